"""Deposits from chains against those who try to get more than they sent, or to stop the deposits of others; and how
crediting is stopped when one of them has found a way."""

from __future__ import annotations

import time

import msgspec
import pytest
from tests.arriving import CONTRACT, RULES, UNIT, XPUB, intake
from tests.builders import Place, scenario
from tests.till import Town

from bursar.engine import Operators
from bursar.flows.deposits import scanning
from bursar.flows.deposits.from_chains import DepositRefused
from bursar.flows.deposits.rules import DEPOSITS, USER_MAX, DepositAsset
from bursar.flows.payouts.documents import WALLET, WalletDocument
from bursar.model.errors import InvalidName
from bursar.rails import derivation

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

DUST = 1_000
OTHER_XPUB = derivation.ExtendedKey.parse(XPUB).of_user(1).text  # any other key


@scenario
async def test_a_block_full_of_dust_is_stored_whole_and_holds_nothing_up(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        address = await c.address(1)
        dust = []
        for number in range(DUST):
            dust.append(town.chain.give(address, 1 + number % 2, CONTRACT, f"@spammer{number}"))
            town.chain.height -= 1
        real = town.chain.give(address, 5 * UNIT, CONTRACT)
        started = time.process_time()
        record = await c.scan()
        spent_s = time.process_time() - started
        assert msgspec.json.decode(record.body, type=scanning.Scan).block == town.chain.height
        counted, _ = (await c.till.ledger.store.read.records.counts())["arrivals", "arrived"]
        assert counted == DUST + 1
        assert spent_s < 10, "a look has 60 s, on machines that are ten times slower"
        assert (await c.judge(real)).state == "credited"
        assert await c.funds() == 5 * UNIT
        assert (await c.judge(dust[0])).state == "suspense"
        assert await c.till.engine.get("sweeps", c.id_of(dust[0])) is None, "dust pays for no sweep"


@scenario
async def test_a_user_number_that_no_address_can_be_derived_for_is_refused(place: Place) -> None:
    assert USER_MAX == derivation.USER_MAX
    async with intake(place, Town()) as c:
        assert await c.address(USER_MAX) == f"@dep{USER_MAX}"
        for user in (0, -1, USER_MAX + 1, 2**63 - 1, 2**64):
            with pytest.raises(InvalidName, match=f"from 1 to {USER_MAX}"):
                await c.address(user)


@scenario
async def test_an_address_of_a_wallet_that_is_ours_already_is_given_to_no_user(place: Place) -> None:
    async with intake(place, Town()) as c:
        await c.till.put(WALLET, "cold", WalletDocument(chain="paper", address="@dep3"))
        await c.till.put(WALLET, "dep-4", WalletDocument(chain="paper", address="@elsewhere"))
        for user in (3, 4):
            with pytest.raises(DepositRefused, match="ADDRESS_TAKEN"):
                await c.address(user)
        assert await c.deposits.addresses(3) == []


@scenario
async def test_two_chains_never_share_the_name_of_their_wallets(place: Place) -> None:
    """A user would be shown the address of the other chain, where nothing that is sent on this one is seen."""
    async with intake(place, Town()) as c:
        with pytest.raises(Exception, match="rules of paper have wallets of that name"):
            await c.till.put(DEPOSITS, "other", RULES)


@scenario
async def test_after_the_key_is_changed_old_addresses_stay_and_new_ones_are_of_the_new_key(place: Place) -> None:
    async with intake(place, Town()) as c:
        before = await c.deposits.issue(1, "paper")
        c.deposits._derive = lambda _kind, xpub, user: f"@{'dep' if xpub == XPUB else 'new'}{user}"
        await c.rules(wallets="new", xpub=OTHER_XPUB)
        after = await c.deposits.issue(1, "paper")
        assert (after.wallet, after.address) == ("new-1", "@new1")
        assert [one.address for one in await c.deposits.addresses(1)] == [after.address, before.address]
        for place_of_user in (before, after):
            hash_ = c.till.town.chain.give(place_of_user.address, 5 * UNIT, CONTRACT)
            await c.scan()
            assert (await c.judge(hash_)).state == "credited"
        assert await c.funds() == 10 * UNIT


@scenario
async def test_a_name_that_had_another_key_is_never_used_for_a_third(place: Place) -> None:
    """The signer has one key under a name: what is sent to an address of another could not be swept."""
    async with intake(place, Town()) as c:
        await c.address(1)
        c.deposits._derive = lambda _kind, xpub, user: f"@{'dep' if xpub == XPUB else 'new'}{user}"
        await c.rules(wallets="new", xpub=OTHER_XPUB)
        third = derivation.ExtendedKey.parse(XPUB).of_user(2).text
        await c.rules(wallets="dep", xpub=third)
        for user in (1, 2):
            with pytest.raises(DepositRefused, match="another key"):
                await c.address(user)
        await c.rules(wallets="new", xpub=OTHER_XPUB)
        await c.rules(wallets="dep", xpub=XPUB)
        assert await c.address(1) == "@dep1"
        assert await c.address(2) == "@dep2"


@scenario
async def test_every_asset_that_is_swept_has_a_mandate_of_its_own(place: Place) -> None:
    """A mandate of the signer is for one asset."""
    async with intake(place, Town()) as c:
        both = {"USDT": DepositAsset(sweep_at="50"), "ETH": DepositAsset(sweep_at="1")}
        with pytest.raises(Exception, match="ETH, USDT"):
            await c.rules(assets=both)
        await c.rules(assets=both | {"ETH": DepositAsset(sweep_at="1", sweep_mandate="sweep-eth")})
        for contract, amount, mandate in ((CONTRACT, 60 * UNIT, "sweep"), ("", 2 * 10**18, "sweep-eth")):
            record = await c.arrive(amount, contract=contract)
            c.till.town.chain.coin["@dep1"] = 3 * 10**18  # so that no gas has to be brought
            await c.step("sweeps", record.id)
            (found, *_) = await c.till.payouts.list()
            assert (found.account, found.mandate) == ("external:wallet:paper:hot2", mandate)


@scenario
@pytest.mark.parametrize(("kind", "name"), [("flow", "arrivals"), ("rail", "deposits paper")])
async def test_crediting_stops_while_it_is_paused_and_everything_else_goes_on(
    place: Place, kind: str, name: str
) -> None:
    why = {"actor": "ann", "reason": "a token is being forged"}
    town = Town()
    async with intake(place, town) as c:
        hash_ = town.chain.give(await c.address(1), 60 * UNIT, CONTRACT)
        await Operators(c.till.engine).pause(kind, name, **why)
        scanned = await c.scan()
        assert msgspec.json.decode(scanned.body, type=scanning.Scan).block == town.chain.height
        assert (await c.judge(hash_)).state == "arrived"
        assert (await c.funds(), await c.of_wallet()) == (0, 0)
        payout = await c.till.request("5")
        await c.till.until(payout.id, "confirming")
        town.chain.mine()
        await c.till.until(payout.id, "confirmed")
        await Operators(c.till.engine).resume(kind, name, **why)
        assert (await c.judge(hash_)).state == "credited"
        assert await c.funds() == 60 * UNIT


@scenario
async def test_a_chain_that_is_paused_for_payouts_still_credits(place: Place) -> None:
    async with intake(place, Town()) as c:
        await Operators(c.till.engine).pause("rail", "chain paper", actor="ann", reason="its nodes move")
        assert (await c.arrive(5 * UNIT)).state == "credited"
