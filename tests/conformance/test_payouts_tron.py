"""Payouts on a TRON chain, end to end: the flow, the real signer with a look of its own, and a simulated chain.

What differs from chains with nonces: a transaction expires, nothing replaces it, and another attempt needs the death of
the first, which the signer sees at nodes of its own (W31).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.builders import FaultyPorts, Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import GAS, Till, wallet_account
from tests.tron_fake import HOT, KEY, NEW, SHOP, TOKEN, TRX, USDT, TronTown, no_sleep, trx

from bursar import deposit
from bursar.audit import audit
from bursar.config import Config
from bursar.documents import Documents
from bursar.engine import Engine
from bursar.flows.catalog import KINDS
from bursar.flows.payouts import PayoutRequest, Payouts
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, ChainDocument, Ranked, WalletDocument
from bursar.flows.payouts.invariants import CHECKS
from bursar.model.authorizations import Authorization, Payment
from bursar.model.errors import AlreadyExists
from bursar.payout_setup import ConfiguredChains
from bursar.ports import Ports, SystemPorts
from bursar.signer.codecs import codec_of
from bursar.signer.curve import sign_digest
from bursar.signer.keys import Keys
from bursar.signer.policy import Policy, parse
from bursar.signer.protocol import Never, Preview, Signature, SignerUnavailable, SignRequest
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.signer.witness import Witness
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Behaviour
from bursar.sim.tron_world import World

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}
NAME = "tron"


def policy_of(chain_id: int) -> Policy:
    """The signer's own rules."""
    return parse(
        "policy",
        f"""
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
key = "main"
path = "m/44'/195'/0'/0/0"
[assets.{NAME}.USDT]
contract = "{TOKEN}"
decimals = 6
payment_max = "{100 * USDT}"
dual_above = "{100 * USDT}"
hourly_max = "{1_000 * USDT}"
daily_max = "{1_000 * USDT}"
[assets.{NAME}.TRX]
contract = ""
decimals = 6
payment_max = "{100 * TRX}"
dual_above = "{100 * TRX}"
hourly_max = "{1_000 * TRX}"
daily_max = "{1_000 * TRX}"
[mandates.auto]
chain = "{NAME}"
asset = "USDT"
payment_max = "{100 * USDT}"
hourly_max = "{1_000 * USDT}"
daily_max = "{1_000 * USDT}"
[mandates.auto-trx]
chain = "{NAME}"
asset = "TRX"
payment_max = "{100 * TRX}"
hourly_max = "{1_000 * TRX}"
daily_max = "{1_000 * TRX}"
""".encode(),
        codec_of,
    )


class OpenKeys:
    """The wallet's key."""

    def address(self, _wallet: Wallet) -> str:
        return HOT

    async def sign(self, _wallet: Wallet, digest: bytes) -> bytes:
        return sign_digest(KEY, digest)


class InProcess:
    """A signer in this process, as the flow asks it. `loses`: it signs, and its next answer is lost."""

    name = "hot"

    def __init__(self, service: Service) -> None:
        self.service = service
        self.loses = False

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        return await self.service.preview(payment, authorization, wallet)

    async def sign(self, request: SignRequest) -> Signature | Never:
        said = await self.service.sign("payouts", request)
        if self.loses:
            self.loses = False
            raise SignerUnavailable(self.name, "the answer is lost")
        return said

    async def cancel(self, payout: str, attempt: int) -> Signature | Never:
        return await self.service.cancel("payouts", payout, attempt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)  # attempts, log, status


class Town(TronTown):
    """What outlives the process: the chain and the signer, which has a look of its own."""

    name = NAME

    def __init__(self) -> None:
        super().__init__(names=("one", "two", "mine", "too"))
        self.chain = self.rail(("one", "two"))
        self.document = ChainDocument(
            kind="tron",
            chain_id=self.world.chain_id,
            native="TRX",
            decimals=6,
            fee_ceilings=Ranked(high=420, normal=420, low=420),
            block_ms=3_000,
        )

    def rules(self) -> tuple[Policy, Keys]:
        """What the signer has."""
        return policy_of(self.world.chain_id), OpenKeys()

    @contextlib.asynccontextmanager
    async def signing(self, folder: Path) -> AsyncIterator[None]:
        """The signer at work."""
        (folder / "signer").mkdir(mode=0o700)
        witness = Witness({NAME: self.rail(("mine", "too"))})
        policy, keys = self.rules()
        service = await Service.open(
            SystemPorts(), str(folder / "signer"), policy, keys, codec_of, witness=witness, new=True
        )
        running = asyncio.create_task(service.run())
        self.signer = InProcess(service)
        try:
            yield
        finally:
            service.stop()
            await running
            service.close()


@contextlib.asynccontextmanager
async def till(place: Place, town: Town, *, ports: Ports | None = None) -> AsyncIterator[Till]:
    """A process; the first one furnishes the database."""
    async with place.bursar(ports) as bursar:
        ledger = bursar.ledger
        documents = Documents(bursar.store, KINDS)
        engine = Engine(bursar.store, ledger.writer, (), worker="local")
        payouts = Payouts(ledger, documents, {NAME: town.chain}, cast(Any, town.signer), engine=engine)
        payouts.out.wallets.fresh_s = -1.0
        found = Till(cast(Any, town), payouts, engine, ledger, documents)
        if await documents.current(CHAIN, NAME, fresh=True) is None:
            with contextlib.suppress(AlreadyExists):
                await ledger.create_asset("TRX", 6)
            await found.put(CHAIN, NAME, town.document)
            usdt = AssetDocument(asset="USDT", chain=NAME, contract=TOKEN, decimals=6, minimum="1000")
            await found.put(ASSET, f"usdt:{NAME}", usdt)
            await found.put(ASSET, f"trx:{NAME}", AssetDocument(asset="TRX", chain=NAME, decimals=6))
            await found.put(WALLET, "hot", WalletDocument(chain=NAME, address=HOT))
            await payouts.prepare()
            books = wallet_account(NAME, "hot")
            await ledger.commit(deposit(books, "alice", "USDT", "5000", key="usdt"))
            await ledger.commit(deposit(books, "alice", "TRX", "1000", key="trx"))
        await payouts.reconciling.look()
        try:
            yield found
        finally:
            await engine.finish(0)


async def asks(t: Till, amount: str = "5", **more: Any) -> str:
    """A payout to the shop, under a mandate."""
    return (await t.request(amount, to=SHOP, **more)).id


async def judge(t: Till, paid: int, *, gas_is_positive: bool = True) -> None:
    """The chain and the books agree, to the smallest unit."""
    world: World = cast(Any, t.town).world
    assert world.balance(SHOP, TOKEN) == paid
    assert await t.minor("alice") == 5_000 * USDT - paid
    assert not any((await t.reserved()).values())
    spent = await t.minor(GAS, "TRX")
    assert (spent < 0) is gas_is_positive
    assert -await t.minor(wallet_account(NAME, "hot"), "TRX") == world.balance(HOT), "costs are booked to the last sun"
    covered = await wallets_cover(t.engine.store, t.payouts.chains)
    assert covered.ok and covered.judged, covered
    assert [finding for finding in await audit(t.engine.store, more=CHECKS) if not finding.ok] == []


@scenario
async def test_tron_payout_is_signed_sent_and_confirmed_when_final(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        await watches(t, 1)
        id_ = await asks(t, fee="1")
        await t.until(id_, "confirming")
        town.mine(3)
        town.wait()
        assert (await t.step(id_)).state == "confirming", "in a block is not final"
        await ends(t, id_, "confirmed")
        view = await t.payouts.view(id_)
        (attempt,) = view.attempts
        assert (attempt.nonce, attempt.hash, view.gas_used) == (None, view.tx_hash, 27_414)
        assert town.world.balance(SHOP, TOKEN) == 5 * USDT
        await watches(t, 3)
        assert not await t.engine.store.read.pauses.list(), "the watcher knows what was ordered"
        assert -await t.minor(wallet_account(NAME, "hot"), "TRX") == town.world.balance(HOT)


@scenario
async def test_tron_payout_of_coin_activates_the_recipient_at_our_cost(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        wanted = PayoutRequest(
            account="alice", asset="TRX", chain=NAME, to=NEW, amount="7", source="s", mandate="auto-trx"
        )
        id_ = (await t.payouts.request(wanted, key="coin")).id
        await t.until(id_, "confirming")
        await ends(t, id_, "confirmed")
        assert town.world.balance(NEW) == 7 * TRX
        assert await t.minor(GAS, "TRX") == -1_100_000
        await judge(t, 0)


async def watches(t: Till, pages: int) -> None:
    """Let the watcher of the chain read on."""
    for _ in range(pages):
        cast(Town, t.town).wait()
        watcher = await t.engine.get("chains", NAME)
        assert watcher is not None
        await t.engine.step(watcher)


async def ends(t: Till, id_: str, state: str) -> None:
    """Blocks, until it is final; and what came of it."""
    town = cast(Town, t.town)
    town.mine(22)
    town.wait()
    await t.until(id_, state)


@scenario
async def test_tron_payout_that_reverts_is_made_again_and_its_cost_is_ours(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        town.token.blacklist.add(SHOP)  # after the dry run, and after "SUCCESS"
        town.mine()
        town.token.blacklist.clear()
        town.mine(22)
        town.wait()
        await t.until(id_, "pending", steps=2)
        first = await t.minor(GAS, "TRX")
        assert first == -47_500, "475 energy; its bandwidth was free"
        await t.until(id_, "confirming")
        await ends(t, id_, "confirmed")
        tried = (await t.payouts.view(id_)).attempts
        assert [attempt.outcome for attempt in tried] == ["dead", "final"]
        await judge(t, 5 * USDT)


@scenario
async def test_tron_payout_that_expires_is_made_again_once_the_signer_has_seen_its_death(
    place: Place, tmp_path: Path
) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        (first,) = (await t.payouts.view(id_)).attempts
        town.world.censored.add(first.hash)
        town.world.drop(first.hash)
        town.expire(first.slot, empty=True)
        town.nodes["mine"].lag = town.nodes["too"].lag = 100  # the signer's own nodes do not see it yet
        town.wait()
        await t.until(id_, "pending", steps=2)
        refused = await t.step(id_)
        assert (refused.state, refused.error[:11]) == ("pending", "SECOND_SLOT")
        town.nodes.heal()
        town.wait()
        await t.until(id_, "confirming")
        await ends(t, id_, "confirmed")
        tried = (await t.payouts.view(id_)).attempts
        assert [attempt.outcome for attempt in tried] == ["dead", "final"]
        assert tried[0].hash != tried[1].hash and tried[0].expires != tried[1].expires
        await judge(t, 5 * USDT)


@scenario
async def test_tron_payout_whose_broadcast_is_lost_is_sent_again_with_the_same_bytes(
    place: Place, tmp_path: Path
) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "sending")
        for node in town.nodes.by_name.values():  # they take it, hang up, and lose it again
            node.script.append(Fault.REPLY_LOST)
        await t.until(id_, "confirming")
        (sent,) = (await t.payouts.view(id_)).attempts
        assert sent.hash in town.world.pool
        town.world.drop(sent.hash)
        town.wait(10)
        assert (await t.step(id_)).state == "confirming"
        assert sent.hash in town.world.pool, "no node had it: the same bytes once more"
        await ends(t, id_, "confirmed")
        assert [attempt.hash for attempt in (await t.payouts.view(id_)).attempts] == [sent.hash]
        await judge(t, 5 * USDT)


@scenario
async def test_tron_payout_included_after_its_expiration_is_confirmed_and_never_made_again(
    place: Place, tmp_path: Path
) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        (sent,) = (await t.payouts.view(id_)).attempts
        town.world.censored.add(sent.hash)
        assert sent.expires is not None
        while town.world.head.timestamp + 3_000 < sent.expires:
            town.mine()
        town.world.censored.clear()
        town.mine(missed=5)  # the parent is before its expiration, the block itself is not
        assert town.world.find(sent.hash) is not None and town.world.head.timestamp > sent.expires
        town.wait()
        assert (await t.step(id_)).state == "confirming"
        await ends(t, id_, "confirmed")
        await judge(t, 5 * USDT)


@scenario
@pytest.mark.parametrize("returns", [True, False])
async def test_tron_payout_whose_block_is_replaced_is_paid_once(place: Place, returns: bool, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        town.mine(4)
        (sent,) = (await t.payouts.view(id_)).attempts
        first = town.world.find(sent.hash)
        assert first is not None
        town.world.reorg(4, returns=lambda _: returns, empty=True)
        town.wait(10)
        assert (await t.step(id_)).state == "confirming"
        await ends(t, id_, "confirmed")
        again = town.world.find(sent.hash)
        assert again is not None and again[0].number > first[0].number
        await judge(t, 5 * USDT)


@scenario
async def test_tron_payout_cancelled_before_it_is_signed_costs_nothing(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "processing")
        await t.payouts.cancel(id_, **WHY)
        await t.until(id_, "failed")
        assert [attempt.outcome for attempt in (await t.payouts.view(id_)).attempts] == ["never signed"]
        await judge(t, 0, gas_is_positive=False)


@scenario
async def test_tron_payout_cancelled_after_it_was_sent_ends_when_it_is_dead_or_paid(
    place: Place, tmp_path: Path
) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        (sent,) = (await t.payouts.view(id_)).attempts
        await t.payouts.cancel(id_, **WHY)
        town.world.drop(sent.hash)
        town.wait(10)
        assert (await t.step(id_)).state == "confirming", "nothing cancels it: it may still be included"
        assert sent.hash not in town.world.pool, "and it is not sent again"
        town.expire(sent.slot)
        town.wait()
        await t.until(id_, "failed")
        await judge(t, 0, gas_is_positive=False)


@scenario
async def test_tron_payout_whose_signature_is_lost_on_the_way_has_one(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "signing")
        town.signer.loses = True
        assert (await t.step(id_)).state == "signing"
        await t.until(id_, "confirming")
        await ends(t, id_, "confirmed")
        assert len(await town.signer.log(0, 100)) == 1
        await judge(t, 5 * USDT)


@scenario
@pytest.mark.parametrize("behaviour", [Behaviour.TAKES_FEE, Behaviour.RETURNS_FALSE])
async def test_tron_payout_that_moves_something_else_waits_for_people(
    place: Place, behaviour: Behaviour, tmp_path: Path
) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        id_ = await asks(t)
        await t.until(id_, "confirming")
        town.token.behaviour = behaviour  # after the dry run
        await ends(t, id_, "disputed")


@scenario
async def test_tron_watcher_halts_a_wallet_that_has_sent_what_nobody_ordered(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        await watches(t, 1)
        raw, _ = await town.signed(trx())
        town.world.submit(raw)
        town.mine(22)
        await watches(t, 3)
        pauses = await t.engine.store.read.pauses.list()
        assert [pause.name for pause in pauses] == ["wallet hot"]


@scenario
async def test_chain_document_of_the_kind_tron_and_urls_of_nodes_are_all_it_takes(place: Place, tmp_path: Path) -> None:
    """Given a document and URLs in the configuration, then the chain is there."""
    town = Town()
    async with town.signing(tmp_path), till(place, town) as t:
        urls = tuple(town.nodes.url(name) for name in ("one", "two"))
        config = Config(chain_nodes={NAME: urls}, chain_timeout_ms=2_000)
        chains = ConfiguredChains(config, t.documents, SystemPorts(), town.nodes.transport(no_sleep))
        await chains.refresh()
        assert not chains.refused
        assert [node.usable for node in await chains[NAME].nodes()] == [True, True]
        assert (await chains[NAME].balances(HOT, (TOKEN,))).tokens == {TOKEN: 5_000 * USDT}
        slots = {await chains[NAME].slot(HOT) for _ in range(5)}
        assert len(slots) == 5, "the ports' own chance tells payments apart"
        wrong = Config(chain_nodes={NAME: ("http://one#x", "http://two")}, chain_timeout_ms=2_000)
        refused = ConfiguredChains(wrong, t.documents, SystemPorts(), town.nodes.transport(no_sleep))
        await refused.refresh()
        assert "port" in refused.refused[0] and not refused


CALLS_MAX = 400


async def live(t: Till) -> None:
    """Ask for a payout and drive it to its end. Said twice, it happens once."""
    town = cast(Town, t.town)
    id_ = await asks(t)
    for _ in range(10):
        record = await t.step(id_)
        if record.state == "confirmed":
            return
        if record.state == "confirming":
            town.mine(22)
            town.wait()


async def dies(place: Place, town: Town, fault: str, call: int) -> bool:
    """One life, ended at this call; whether there was such a call."""
    ports = FaultyPorts()
    context = till(place, town, ports=ports)
    t = await context.__aenter__()
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(live(t)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    reached = ports.reached
    ports.arm("", 0)
    work.cancel()
    death.cancel()
    await asyncio.gather(work, death, return_exceptions=True)
    await t.ledger.store.close()
    return reached


@scenario
@pytest.mark.parametrize("fault", ["before", "after"])
async def test_tron_payout_survives_a_crash_at_every_call(place: Place, fault: str, tmp_path: Path) -> None:
    for call in range(1, CALLS_MAX):
        folder = tmp_path / str(call)
        folder.mkdir()
        copy(Path(place.path), folder / "run.db")
        at, town = Place("sqlite", f"sqlite:///{folder}/run.db"), Town()
        async with town.signing(folder):
            reached = await dies(at, town, fault, call)
            async with till(at, town) as t:
                for _ in range(3):
                    await live(t)
                (record,) = await t.engine.store.read.records.list("payouts")
                assert record.state == "confirmed", record.error
                await judge(t, 5 * USDT)
        if not reached:
            assert call > 20, "the process was not killed at all"
            return
    raise AssertionError("it never came to an end")
