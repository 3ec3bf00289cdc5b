"""Deposits from chains: one address per user, each transfer credited once, some held for people, the rest swept."""

from __future__ import annotations

import pytest
from tests.arriving import CONTRACT, UNIT, Intake, intake
from tests.builders import Place, scenario
from tests.till import Town, wallet_account
from tests.timed_payouts import behind

from bursar import deposit
from bursar.audit import audit
from bursar.engine import FlowRecord, Operators
from bursar.flows.deposits import scanning
from bursar.flows.deposits.from_chains import DepositRefused
from bursar.flows.deposits.invariants import ArrivalsBooked
from bursar.flows.deposits.rules import DEPOSITS, DepositAsset
from bursar.flows.payouts.coverage import wallets_cover
from bursar.model.errors import InvalidState
from bursar.model.records import Record

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@scenario
async def test_an_address_is_made_once_and_is_one_users_for_ever(place: Place) -> None:
    async with intake(place, Town()) as c:
        first = await c.deposits.issue(1, "paper")
        assert (first.address, first.wallet) == ("@dep1", "dep-1")
        assert await c.deposits.issue(1, "paper") == first
        other = await c.deposits.issue(2, "paper")
        assert other.address != first.address
        assert [one.address for one in await c.deposits.addresses(1)] == ["@dep1"]
        owner = await c.till.payouts.out.wallets.derived.owner("paper", "@dep1")
        assert owner is not None
        assert (owner.wallet, owner.user) == ("dep-1", 1)


@scenario
async def test_no_address_is_issued_before_the_scan_has_a_block_to_go_on_from(place: Place) -> None:
    town = Town()
    town.chain.away = True
    async with intake(place, town) as c:
        with pytest.raises(DepositRefused, match="NOT_READY"):
            await c.address(1)
        town.chain.away = False
        await c.scan()
        hash_ = town.chain.give(await c.address(1), 5 * UNIT, CONTRACT)
        await c.scan()
        assert (await c.judge(hash_)).state == "credited"


@scenario
async def test_a_final_transfer_is_credited_once_however_often_it_is_seen(place: Place) -> None:
    async with intake(place, Town()) as c:
        record = await c.arrive(5 * UNIT)
        assert record.state == "credited"
        assert (await c.funds(), await c.of_wallet()) == (5 * UNIT, 5 * UNIT)
        await c.deposits.rescan("paper", 0, actor="ann", reason="test")
        await c.scan()
        await c.till.engine.step(record)
        assert await c.funds() == 5 * UNIT
        assert (await c.deposits.page(user=1))[0][0].status == "credited"


@scenario
async def test_an_operator_cannot_book_by_hand_what_the_scan_has_credited(place: Place) -> None:
    async with intake(place, Town()) as c:
        record = await c.arrive(5 * UNIT)
        receipt = await c.till.ledger.store.read.envelopes.existing([("deposits", record.id)])
        assert set(receipt) == {("deposits", record.id)}


@scenario
async def test_nothing_is_credited_that_arrived_before_the_address_was_issued_until_it_is_read_again(
    place: Place,
) -> None:
    town = Town()
    async with intake(place, town) as c:
        hash_ = town.chain.give("@dep1", 3 * UNIT, CONTRACT)
        first = town.chain.height
        await c.scan()
        await c.address(1)
        await c.scan()
        assert await c.till.engine.get("arrivals", c.id_of(hash_)) is None
        await c.deposits.rescan("paper", first, actor="ann", reason="the database was restored")
        await c.scan()
        assert (await c.judge(hash_)).state == "credited"
        assert await c.funds() == 3 * UNIT


@scenario
async def test_an_address_that_was_used_before_it_was_issued_raises_an_alert(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        town.chain.give("@dep1", 7)
        await c.address(1)
        assert (await c.step("deposit_addresses", "dep-1")).state == "issued"
        alerts = await c.till.ledger.store.read.alerts.open()
        assert any(alert.reason == "address was used before" for alert in alerts)


@scenario
async def test_two_transfers_to_two_users_in_one_block_are_two_deposits(place: Place) -> None:
    async with intake(place, Town()) as c:
        one = await c.arrive(2 * UNIT, user=1)
        two = await c.arrive(3 * UNIT, user=2, sender="@another")
        assert one.id != two.id
        assert (await c.funds(1), await c.funds(2)) == (2 * UNIT, 3 * UNIT)


@scenario
async def test_coin_of_more_decimals_than_fit_is_not_credited_in_part_of_a_unit(place: Place) -> None:
    async with intake(place, Town()) as c:
        record = await c.arrive(123, contract="")
        assert record.state == "credited"
        assert await c.funds(asset="ETH") == 123


@pytest.mark.parametrize(
    ("amount", "why"), [(UNIT - 1, "below the minimum"), (5 * UNIT, "not accepted"), (6 * UNIT, "closed")]
)
@scenario
async def test_what_is_no_users_is_booked_in_suspense(place: Place, amount: int, why: str) -> None:
    async with intake(place, Town()) as c:
        await c.address(1)
        if why == "not accepted":
            await c.rules(assets={"ETH": DepositAsset()}, sweep_to="", sweep_mandate="")
        if why == "closed":
            await c.till.ledger.close("user:1:funding")
        record = await c.arrive(amount)
        assert record.state == "suspense"
        assert why in (await c.deposits.view(record.id)).why
        assert await c.till.minor("suspense:deposits") == amount
        assert await c.of_wallet() == amount


@scenario
async def test_what_is_less_than_a_unit_or_unknown_is_worthless(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        assert record.state == "credited"
        town.chain.give("@dep1", 5, "@unknown")
        await c.scan()
        assert len((await c.deposits.page(user=1))[0]) == 1  # no document names it, so that it is not looked for


@scenario
async def test_one_node_alone_credits_up_to_the_limit_of_the_asset(place: Place) -> None:
    town = Town()
    town.chain.one_node = True
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        assert record.state == "held"
        assert await c.funds() == 0
        assert await c.of_wallet() == 0  # nothing is booked of what may not be there
        await c.deposits.confirm(record.id, actor="ann", reason="seen at an explorer")
        assert (await c.step("arrivals", record.id)).state == "credited"
        assert await c.funds() == 5 * UNIT


@scenario
async def test_a_token_whose_events_and_balances_disagree_needs_two_people(place: Place) -> None:
    town = Town()
    town.chain.liars.add(CONTRACT)
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        assert record.state == "held"
        await c.deposits.confirm(record.id, actor="ann", reason="it is there")
        assert (await c.step("arrivals", record.id)).state == "held"
        with pytest.raises(DepositRefused, match="another person"):
            await c.deposits.confirm(record.id, actor="Ann", reason="it is there")
        await c.deposits.confirm(record.id, actor="ben", reason="it is there")
        assert (await c.step("arrivals", record.id)).state == "credited"


@scenario
async def test_what_people_reject_is_never_credited(place: Place) -> None:
    town = Town()
    town.chain.liars.add(CONTRACT)
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        rejected = await c.deposits.reject(record.id, actor="ann", reason="it is not there")
        assert rejected.state == "rejected"
        await c.deposits.rescan("paper", 0, actor="ann", reason="test")
        await c.scan()
        assert (await c.judge(record.id.split(":")[1])).state == "rejected"
        with pytest.raises(DepositRefused, match="held"):
            await c.deposits.confirm(record.id, actor="ben", reason="it is there")
        assert await c.funds() == 0


@scenario
async def test_operators_cannot_confirm_by_a_plain_signal(place: Place) -> None:
    town = Town()
    town.chain.liars.add(CONTRACT)
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        with pytest.raises(InvalidState, match="bursar deposit confirm"):
            await Operators(c.till.engine).signal("arrivals", record.id, "CONFIRM", actor="ann", reason="test")


@scenario
async def test_what_our_own_wallet_sends_without_a_payout_is_held(place: Place) -> None:
    async with intake(place, Town()) as c:
        record = await c.arrive(5 * UNIT, sender="@hot1")
        assert record.state == "held"
        assert "hot1 has sent it" in (await c.deposits.view(record.id)).why


@scenario
async def test_a_deep_reorganisation_stops_the_scan_until_it_is_sent_back(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        await c.arrive(5 * UNIT)
        town.chain.fork = "other"
        town.chain.height += 1
        before = await c.scan()
        assert before.error.startswith("DEEP_REORGANISATION")
        hash_ = town.chain.give("@dep1", 2 * UNIT, CONTRACT)
        await c.deposits.rescan("paper", 1, actor="ann", reason="looked at")
        await c.scan()
        assert (await c.judge(hash_)).state == "credited"
        assert await c.funds() == 7 * UNIT


@scenario
async def test_a_scan_that_is_sent_forward_by_mistake_passes_no_block_over(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        await c.address(1)
        await c.deposits.rescan("paper", 10**9, actor="ann", reason="a digit too many")
        hash_ = town.chain.give("@dep1", 5 * UNIT, CONTRACT)
        await c.scan()
        assert (await c.judge(hash_)).state == "credited"


@scenario
async def test_a_scan_that_is_ahead_of_the_chain_goes_back_to_it(place: Place) -> None:
    """Sent so far before its first look, when there was nothing to compare with."""
    scan = scanning.Scan(chain="paper")
    async with intake(place, Town()) as c:
        record = await c.till.engine.record("deposit_scans", "paper")
        ahead = scanning.on_signal(FlowRecord(record, scan), scanning.RESCAN, {"block": 10**9})
        assert ahead is not None and ahead.block == 10**9 - 1
        answer = await c.deposits.scanning.scan(FlowRecord(record, ahead))
        assert isinstance(answer.body, scanning.Scan)
        assert answer.body.block == c.till.town.chain.height


@scenario
async def test_a_process_without_nodes_of_a_chain_judges_nothing_of_it(place: Place) -> None:
    """It could not compare addresses: the contract of a token would be unknown, and our own wallet a stranger."""
    town = Town()
    async with intake(place, town) as c:
        hash_ = town.chain.give(await c.address(1), 5 * UNIT, CONTRACT)
        await c.scan()
        c.till.payouts.chains.pop("paper")  # type: ignore[attr-defined]
        record = await c.judge(hash_)
        assert (record.state, record.error.split(":")[0]) == ("arrived", "CHAIN_NOT_CONFIGURED")
        c.till.payouts.chains["paper"] = town.chain  # type: ignore[index]
        assert (await c.judge(hash_)).state == "credited"


@scenario
async def test_a_scan_says_how_far_it_has_come_and_since_when(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:

        def progress() -> scanning.Progress:
            return c.deposits.scanning.progress["paper"]

        begun = progress()
        assert (begun.block, begun.behind) == (town.chain.height, 0)
        await c.scan()
        assert progress() == begun, "nothing to read"
        town.chain.mine()
        await c.scan()
        moved = progress()
        assert moved.block == town.chain.height and moved.moved_s > begun.moved_s
        town.chain.mine()
        town.chain.away = True
        await c.scan()
        assert progress() == moved, "it stands still, and its age grows"


@scenario
async def test_users_read_words_that_tell_nothing_of_our_inside(place: Place) -> None:
    town = Town()
    town.chain.liars.add(CONTRACT)
    async with intake(place, town) as c:
        record = await c.arrive(5 * UNIT)
        view = await c.deposits.view(record.id)
        assert (view.asset, view.amount) == ("USDT", "5.000000"), "what it would be"
        assert "balance" in view.why and "reviewed by people" in view.words
        await c.deposits.reject(record.id, actor="ann", reason="a thief's")
        view = await c.deposits.view(record.id)
        assert view.words == "it was not credited; ask support"
        address = (await c.deposits.addresses(1))[0]
        assert address.assets == {"ETH": "0", "USDT": "1"}
        assert (address.blocks, address.final_after) == (1, "when the chain itself calls its block final")


# --- sweeps ----------------------------------------------------------------------------------------------------------


async def swept(c: Intake, id_: str, steps: int = 40) -> Record:
    """Drive a sweep and its payouts to the end."""
    chain = c.till.town.chain
    record = await c.step("sweeps", id_)
    for _ in range(steps):
        if record.state != "sweeping":
            return record
        for payout in await c.till.payouts.list():
            if payout.status not in ("confirmed", "failed"):
                await c.till.step(payout.id)
        chain.mine()
        record = await c.step("sweeps", id_)
    raise AssertionError(f"it is still sweeping: {record.error}")


@scenario
async def test_what_has_gathered_is_swept_after_gas_was_brought(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        small = await c.arrive(20 * UNIT)
        assert await c.till.engine.get("sweeps", small.id) is None
        record = await c.arrive(30 * UNIT)
        record = await swept(c, record.id)
        assert record.state == "swept"
        assert town.chain.tokens[CONTRACT, "@dep1"] == 0
        assert await c.of_wallet() == 0
        assert await c.funds() == 50 * UNIT  # no user's balance has moved
        gas, sweep = (await c.till.payouts.list())[::-1]
        assert (gas.wallet, gas.to, gas.asset) == ("hot1", "@dep1", "ETH")
        assert (sweep.wallet, sweep.to, sweep.amount) == ("dep-1", "@hot2", "50.000000")
        # The gas that arrived at the address is ours, and is credited to nobody.
        await c.scan()
        assert (await c.judge(gas.tx_hash, "coin")).state == "own"
        assert await c.funds(asset="ETH") == 0


@scenario
async def test_what_arrives_during_a_sweep_is_swept_too(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        record = await c.arrive(60 * UNIT)
        await c.step("sweeps", record.id)
        more = await c.arrive(70 * UNIT)
        assert await c.till.engine.get("sweeps", more.id) is None  # one is open, and gets a signal
        assert (await swept(c, record.id)).state == "swept"
        assert await c.of_wallet() == 0
        again = await c.arrive(50 * UNIT)
        assert (await swept(c, again.id)).state == "swept"


@scenario
async def test_a_sweep_waits_where_nobody_brings_gas(place: Place) -> None:
    async with intake(place, Town()) as c:
        await c.rules(gas_from="", gas_mandate="")
        record = await c.arrive(60 * UNIT)
        after = await c.step("sweeps", record.id)
        assert (after.state, after.error.split(":")[0]) == ("sweeping", "NO_GAS")


@scenario
async def test_a_sweep_ends_when_the_rules_do_not_want_it_any_more(place: Place) -> None:
    async with intake(place, Town()) as c:
        record = await c.arrive(60 * UNIT)
        await c.rules(assets={"USDT": DepositAsset()}, sweep_to="", sweep_mandate="")
        assert (await c.step("sweeps", record.id)).state == "left"
        assert await c.of_wallet() == 60 * UNIT


@scenario
async def test_an_address_of_another_user_is_no_destination_of_a_payout(place: Place) -> None:
    async with intake(place, Town()) as c:
        await c.address(2)
        await c.till.ledger.commit(deposit(wallet_account("paper", "hot1"), "user:1:funding", "USDT", "9", key="f"))
        with pytest.raises(Exception, match="OWN_ADDRESS"):
            await c.till.request("5", account="user:1:funding", to="@dep2")


@scenario
async def test_rules_with_another_key_need_another_name(place: Place) -> None:
    async with intake(place, Town()) as c:
        with pytest.raises(Exception, match="another xpub"):
            await c.rules(wallets="other")
        with pytest.raises(Exception, match="sweep_mandate"):
            await c.rules(sweep_mandate="")
        assert (await c.till.documents.current(DEPOSITS, "paper", fresh=True)) is not None


# --- what the audit sees ---------------------------------------------------------------------------------------------


@scenario
async def test_audit_holds_users_addresses_against_the_chain(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        await c.arrive(20 * UNIT)
        assert (await wallets_cover(c.till.engine.store, c.till.payouts.chains)).ok
        town.chain.tokens[CONTRACT, "@dep1"] -= 1
        finding = await wallets_cover(c.till.engine.store, c.till.payouts.chains)
        assert not finding.ok
        assert "dep-1 has 19.999999 USDT" in finding.broken[0]


@scenario
async def test_audit_passes_while_a_sweep_is_under_way(place: Place) -> None:
    town = Town()
    town.chain.tokens[CONTRACT, "@hot1"] += 20_000 * UNIT
    town.chain.tokens[CONTRACT, "@hot2"] += 20_000 * UNIT
    async with intake(place, town) as c:
        record = await c.arrive(60 * UNIT)
        for _ in range(12):
            record = await c.step("sweeps", record.id)
            for payout in await c.till.payouts.list():
                if payout.status not in ("confirmed", "failed"):
                    await c.till.step(payout.id)
                    finding = await wallets_cover(c.till.engine.store, c.till.payouts.chains)
                    assert finding.ok, finding
            town.chain.mine()
            finding = await wallets_cover(c.till.engine.store, c.till.payouts.chains)
            assert finding.ok, finding
        assert record.state == "swept"


@scenario
async def test_audit_sees_what_was_booked_otherwise_than_the_arrival_says(place: Place) -> None:
    town = Town()
    async with intake(place, town) as c:
        store = c.till.engine.store
        record = await c.arrive(20 * UNIT)
        await c.rules(assets={})
        await c.arrive(5 * UNIT)
        await c.arrive(2 * UNIT, contract="", sender="@y")
        (fine,) = await audit(store, only=("I6",), more=(ArrivalsBooked,))
        assert (fine.ok, fine.checked) == (True, 3), fine
        other = "replace(CAST(body AS text), '20000000', '20000001')"
        other = f"CAST({other} AS json)" if place.engine == "postgres" else other
        await behind(place, f"UPDATE {{s}}records SET body = {other} WHERE flow = 'arrivals'")
        (broken,) = await audit(store, only=("I6",), more=(ArrivalsBooked,))
        assert not broken.ok
        assert record.id in broken.broken[0]
        await behind(place, "UPDATE {s}records SET state = 'rejected' WHERE flow = 'arrivals'")
        (broken,) = await audit(store, only=("I6",), more=(ArrivalsBooked,))
        assert len(broken.broken) == 3
        assert "something was booked for it" in broken.broken[0]
