"""Deposits from a TRON chain, end to end: the flow, the rail, the real signer with keys from words, a simulated chain.

What differs from other chains: an address that has received tokens alone is no account yet, and whoever brings it gas
pays for its activation; tokens are believed by their events; transactions expire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.arriving import Intake, not_driven
from tests.builders import Place, scenario
from tests.conformance.test_payouts_tron import NAME, Town, till, watches
from tests.till import GAS, wallet_account
from tests.tron_fake import HOT, KEY, OTHER_KEY, TOKEN, TRX, USDT, sign, trx, usdt

from bursar import deposit
from bursar.audit import audit
from bursar.engine import Engine
from bursar.flows.deposits import ChainDeposits
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.deposits.rules import DEPOSITS, DepositAsset, DepositRules
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.documents import WALLET, Role, WalletDocument
from bursar.model.records import Record
from bursar.rails.chain import Fee, Order
from bursar.signer.codecs import codec_of
from bursar.signer.curve import public_key, tron_address
from bursar.signer.keys import Keys, KeystoreKeys
from bursar.signer.keystore import Keystore
from bursar.signer.policy import Policy, parse

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

WORDS = b"abandon " * 11 + b"about"
PATH = "m/44'/195'/1'"
GAS_KEY = bytearray(b"\x88" * 32)
GAS_WALLET = tron_address(public_key(GAS_KEY))
ACTIVATION = 1_100_000  # a new account, and the bandwidth of that


def _caps(asset: str, unit: int) -> str:
    return f"""
payment_max = "{100 * unit}"
hourly_max = "{1_000 * unit}"
daily_max = "{1_000 * unit}"
asset = "{asset}"
chain = "{NAME}"
"""


def policy_of(chain_id: int) -> Policy:
    text = f"""
name = "hot"
[unhalt]
people = ["ann", "ben"]
[chains.{NAME}]
kind = "tron"
chain_id = {chain_id}
fee_max = "{40 * TRX}"
cancel_fee_max = "1"
[wallets.hot]
chain = "{NAME}"
address = "{HOT}"
key = "hot"
[wallets.gas]
chain = "{NAME}"
address = "{GAS_WALLET}"
key = "gas"
[deposits.dep]
chain = "{NAME}"
key = "main"
path = "{PATH}"
"""
    for asset, contract in (("USDT", TOKEN), ("TRX", "")):
        limits = "".join(f'{name}_max = "{1_000 * TRX}"\n' for name in ("payment", "hourly", "daily"))
        text += f'[assets.{NAME}.{asset}]\ncontract = "{contract}"\ndecimals = 6\ndual_above = "0"\n{limits}'
    text += f"[mandates.sweep]\nown_wallets = true\n{_caps('USDT', USDT)}"
    text += f"[mandates.sweep-trx]\nown_wallets = true\n{_caps('TRX', TRX)}"
    text += f"[mandates.gas]\nown_deposits = true\n{_caps('TRX', TRX)}"
    return parse("policy", text.encode(), codec_of)


class Village(Town):
    """The chain, a stranger with tokens, and a signer with words for users' addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.world.fund(GAS_WALLET, 100 * TRX)
        self.world.fund(tron_address(public_key(OTHER_KEY)), 500 * USDT, TOKEN)
        self.mine(22)
        self.store = Keystore("memory", {}, {})
        for name, secret in (("hot", KEY.hex().encode()), ("gas", GAS_KEY.hex().encode()), ("main", WORDS)):
            self.store.add(name, bytearray(secret), ())

    def rules(self) -> tuple[Policy, Keys]:
        return policy_of(self.world.chain_id), KeystoreKeys(self.store)

    async def pay_in(self, order: Order) -> str:
        """From a stranger, until it is final."""
        fee = Fee(gas_limit=100_000, price=100) if order.contract else Fee(gas_limit=0, price=0)
        slot = await self.chain.slot(tron_address(public_key(OTHER_KEY)))
        raw, hash_ = sign(self.network, order, slot, fee, key=OTHER_KEY)
        self.world.submit(raw)
        self.mine(22)
        self.wait()
        return hash_


@asynccontextmanager
async def intake(place: Place, town: Village) -> AsyncIterator[Intake]:
    """A process that takes deposits, with rules for both assets."""
    async with till(place, town) as t:
        engine: Engine = t.engine
        deposits = ChainDeposits(t.payouts, engine=engine)
        engine.drive = not_driven  # type: ignore[method-assign,assignment]
        await t.put(WALLET, "gas", WalletDocument(chain=NAME, address=GAS_WALLET, role=Role.GAS))
        await t.payouts.prepare()
        await t.ledger.commit(deposit(wallet_account(NAME, "gas"), "alice", "TRX", "100", key="gas"))
        rules = DepositRules(
            wallets="dep",
            xpub=town.store.extended_key("main", PATH).text,
            assets={
                "USDT": DepositAsset(minimum="1", sweep_at="50"),
                "TRX": DepositAsset(sweep_at="20", sweep_mandate="sweep-trx"),
            },
            sweep_to="hot",
            sweep_mandate="sweep",
            gas_from="gas",
            gas_mandate="gas",
        )
        await t.put(DEPOSITS, NAME, rules)
        await deposits.prepare()
        found = Intake(t, deposits)
        await found.scan()
        yield found


async def reads_on(c: Intake, town: Village) -> None:
    """Up to the last final block, page by page."""
    for _ in range(20):
        town.wait()
        await c.scan()
        if c.deposits.scanning.progress[NAME].block == town.world.finalized:
            return
    raise AssertionError(c.deposits.scanning.progress)


async def swept(c: Intake, town: Village, sweep: str) -> Record:
    """Drive a sweep and its payouts to the end; the watcher sees every transaction of ours."""
    why = ""
    for _ in range(12):
        record = await c.step("sweeps", sweep)
        if record.state != "sweeping":
            return record
        for _ in range(6):
            for payout in await c.till.payouts.list():
                if payout.status not in ("confirmed", "failed"):
                    await c.till.step(payout.id)
        why = f"{record.error}; {[(one.wallet, one.state, one.error) for one in await c.till.payouts.list()]}"
        town.mine(22)
        town.wait()
        await watches(c.till, 2)
    raise AssertionError(why)


async def books_are_the_chain(c: Intake, town: Village, address: str) -> None:
    """To the last sun, of every wallet; and no transaction of ours is one that the watcher did not know."""
    world, t = town.world, c.till
    for name, where in (("hot", HOT), ("gas", GAS_WALLET), ("dep-1", address)):
        assert -await t.minor(wallet_account(NAME, name), "TRX") == world.balance(where), name
        if name != "gas":
            assert -await t.minor(wallet_account(NAME, name), "USDT") == world.balance(where, TOKEN), name
    await watches(t, 3)
    assert not await t.engine.store.read.pauses.list()
    covered = await wallets_cover(t.engine.store, t.payouts.chains)
    assert covered.ok and covered.judged, covered
    assert [finding for finding in await audit(t.engine.store, more=CHECKS) if not finding.ok] == []


@scenario
async def test_tron_tokens_at_an_address_that_is_no_account_are_swept_with_gas_that_makes_it_one(
    place: Place, tmp_path: Path
) -> None:
    town = Village()
    async with town.signing(tmp_path), intake(place, town) as c:
        address = await c.address(1)
        assert address == tron_address(public_key(town.store.private_key("main", f"{PATH}/0/1")))
        hash_ = await town.pay_in(usdt(60 * USDT, to=address))
        assert not town.world.exists(address)
        await reads_on(c, town)
        record = await c.judge(hash_)
        assert (record.state, await c.funds()) == ("credited", 60 * USDT)
        assert msgspec.json.decode(record.body)["by_event_alone"] is True
        assert (await swept(c, town, record.id)).state == "swept"
        assert (town.world.balance(address, TOKEN), town.world.balance(HOT, TOKEN)) == (0, 5_060 * USDT)
        gas, sweep = (await c.till.payouts.list())[::-1]
        assert (gas.wallet, gas.asset, gas.to, gas.mandate) == ("gas", "TRX", address, "gas")
        assert (sweep.wallet, sweep.to, sweep.mandate) == ("dep-1", HOT, "sweep")
        assert 100 * TRX - town.world.balance(GAS_WALLET) == round(float(gas.amount) * TRX) + ACTIVATION
        await reads_on(c, town)
        assert (await c.judge(gas.tx_hash, "coin")).state == "own"
        assert await c.funds(asset="TRX") == 0
        await books_are_the_chain(c, town, address)


@scenario
async def test_tron_coin_is_credited_and_swept_without_gas_of_ours(place: Place, tmp_path: Path) -> None:
    town = Village()
    async with town.signing(tmp_path), intake(place, town) as c:
        address = await c.address(1)
        small, large = await town.pay_in(trx(5 * TRX, to=address)), await town.pay_in(trx(25 * TRX, to=address))
        await reads_on(c, town)
        assert (await c.judge(small, "coin")).state == "credited"
        record = await c.judge(large, "coin")
        assert (record.state, await c.funds(asset="TRX")) == ("credited", 30 * TRX)
        assert (await swept(c, town, record.id)).state == "swept"
        assert [one.wallet for one in await c.till.payouts.list()] == ["dep-1"]
        assert await c.funds(asset="TRX") == 30 * TRX
        assert await c.till.minor(GAS, "TRX") <= 0
        await books_are_the_chain(c, town, address)
