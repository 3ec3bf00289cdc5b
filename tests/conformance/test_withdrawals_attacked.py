"""Withdrawals under attack: what users, approvers, operators and restored backups may try for money of others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import behind
from tests.till import CONTRACT, SUSPENSE, Town
from tests.withdrawing import FUNDS, counter

from bursar.audit import audit
from bursar.config import read
from bursar.engine import Operators
from bursar.engine.forced import ask_due
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.withdrawals import WithdrawalRefused
from bursar.flows.withdrawals.invariants import CHECKS
from bursar.flows.withdrawals.listing import listed, waiting_for_people
from bursar.flows.withdrawals.policy import ADDRESS_LIST, AddressBookRule, AddressList
from bursar.flows.withdrawals.switches import of_asset, of_user
from bursar.model.errors import BursarError, IdempotencyKeyReused

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}
ALSO = {"actor": "ben", "reason": "because"}


@pytest.mark.parametrize("end", ["cancelled", "rejected"])
@scenario
async def test_nothing_is_given_back_before_the_signers_log_was_compared(place: Place, end: str) -> None:
    """A database restored to a moment before the payout was ordered: it may be paid already (W33)."""
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("20")
        await c.until(made.id, "waiting")
        c.till.payouts.out.reconciled = False  # as in a process that has just started on the restored database
        if end == "cancelled":
            await c.withdrawals.cancel(made.id, actor="1", user=1)
        else:
            await c.withdrawals.reject(made.id, **WHY)
        for _ in range(3):
            await c.step(made.id)
        assert await c.funds() == FUNDS - 21_000_000, "given back while it may be paid"
        await c.till.payouts.reconciling.look()
        await c.until(made.id, end)
        assert await c.funds() == FUNDS


@pytest.mark.parametrize("state", ["checking", "approved"])
@pytest.mark.parametrize("event", ["SUCCESS", "ADOPTED", "ASK", "BACK", "EXPLICIT_FAIL", "DROPPED"])
@scenario
async def test_two_operators_can_force_nothing_that_rules_decide(place: Place, state: str, event: str) -> None:
    async with counter(place, Town()) as c:
        await c.withdrawals.pause(of_asset("USDT"), **WHY)
        made = await c.request("5")
        await c.until(made.id, state)
        operators = Operators(c.till.engine)
        for person in (WHY, ALSO):
            with contextlib.suppress(BursarError):
                await operators.force("withdrawals", made.id, event, **person)
        record = await c.record(made.id)
        assert record.state == state, f"forced by {event} to {record.state}"


@scenario
async def test_everything_asked_for_again_while_the_first_request_is_written_is_one_withdrawal(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="")
        balance, first = c.till.ledger.balance, asyncio.get_running_loop().create_future()

        async def slow(*args: Any, **more: Any) -> Any:
            c.till.ledger.balance = balance  # type: ignore[method-assign]
            first.set_result(await c.request("all"))
            return await balance(*args, **more)

        c.till.ledger.balance = slow  # type: ignore[method-assign]
        again = await c.request("all")
        assert (again.id, again.replayed, await c.funds()) == (first.result().id, True, 0)


@scenario
async def test_everything_asked_for_by_many_at_once_under_one_key_is_one_withdrawal(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="99")
        made = await asyncio.gather(*[c.request(amount) for amount in ("all", "99") * 4], return_exceptions=True)
        refusals = {type(one) for one in made if isinstance(one, BaseException)}
        assert refusals == {IdempotencyKeyReused}, "the key stands for one of the two"
        assert len({one.id for one in made if not isinstance(one, BaseException)}) == 1 and await c.funds() == 0


@scenario
async def test_engine_waits_for_the_screening_longer_than_any_setting_lets_the_hook_be_silent(place: Place) -> None:
    """Or each call would be given up before the hook is, and no answer would ever be counted as none."""
    most_ms = 30_000
    assert read(environ={}, screening_timeout_ms=most_ms).screening_timeout_ms == most_ms
    with pytest.raises(BursarError):
        read(environ={}, screening_timeout_ms=most_ms + 1)
    async with counter(place, Town()) as c:
        assert c.withdrawals.flow.call_timeout_s * 1_000 > most_ms


@scenario
async def test_withdrawals_that_wait_for_time_hide_none_that_waits_for_people(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await c.request("20")
        await c.until(made.id, "waiting")
        await c.policy(address_book=AddressBookRule.REQUIRED, cooling_s=3_600, daily_user="", daily_all="")
        await c.withdrawals.addresses.add("1", "paper", "@bob", "mine")
        for number in range(5):
            cooling = await c.request("5", key=f"cooling {number}")
            await c.until(cooling.id, "waiting")
        assert [view.id for view in await waiting_for_people(c.withdrawals, 2)] == [made.id]


@scenario
async def test_page_that_finds_nothing_asks_the_database_a_bounded_number_of_times(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="", daily_all="")
        for number in range(30):
            await c.request("1", key=f"k{number}")
        page, asked = c.withdrawals.page, []

        async def counted(**how: Any) -> Any:
            asked.append(how)
            return await page(**how)

        c.withdrawals.page = counted  # type: ignore[method-assign]
        found, before = await listed(c.withdrawals, user=1, asset="BTC", limit=1)
        assert found == [] and len(asked) <= 20 and before, "and there is more: go on from there"
        while before:
            found, before = await listed(c.withdrawals, user=1, asset="USDT", limit=7, before=before)
            assert before == 0 or len(found) == 7


@scenario
async def test_limits_hold_across_processes(place: Place) -> None:
    """Twelve requests of each of two users, at three processes at once: three of each fit into the user's day, and
    three of all into the day of all."""
    town = Town()
    async with counter(place, town) as a, counter(place, town, worker="b") as b, counter(place, town, worker="c") as c:
        await a.policy(daily_user="30", daily_all="35")
        here = itertools.cycle((a, b, c))
        asked = [next(here).request("10", key=f"k{n}", user=1 + n % 2) for n in range(24)]
        made = await asyncio.gather(*asked, return_exceptions=True)
        refusals = [one.reason for one in made if isinstance(one, WithdrawalRefused)]
        assert refusals == ["DAILY_LIMIT_EXCEEDED"] * 18
        taken = [await a.record(one.id) for one in made if not isinstance(one, BaseException)]
        assert sum('"over_all":true' in record.body for record in taken) == 3
        assert [await a.funds(user) for user in (1, 2)] == [FUNDS - 33_000_000] * 2


@pytest.mark.parametrize("why", ["attempt that died", "tombstone from before a restore"])
@scenario
async def test_switch_and_lists_stop_every_attempt_that_is_not_signed_yet(place: Place, why: str) -> None:
    """Not the first one alone: while nothing of a payout is alive, what holds now decides (W37)."""
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("5")
        await c.until(made.id, "queued")
        payout = (await c.withdrawals.view(made.id)).payout
        if why == "attempt that died":
            town.chain.failing.add("@bob")
            await c.till.until(payout, "confirming")
            town.chain.mine()
            await c.till.until(payout, "pending")
            town.chain.failing.clear()
        else:
            await town.signer.cancel(payout, 1)
        await c.withdrawals.pause(of_user(1), **WHY)
        waiting = await c.till.step(payout)
        assert waiting.state == "pending" and "PAUSED" in waiting.error
        await c.withdrawals.resume(of_user(1), **WHY)
        await c.till.put(ADDRESS_LIST, "paper", AddressList(deny=("@bob",)))
        assert (await c.till.step(payout)).state == "failed"
        await c.until(made.id, "rejected")
        assert await c.funds() == FUNDS and (CONTRACT, "@bob") not in town.chain.tokens


@scenario
async def test_withdrawal_that_people_declared_unpaid_and_that_arrives_shows_in_suspense_and_stops_payouts(
    place: Place,
) -> None:
    """The hold is settled once, by the word of people; what the chain says later is booked beside it (T34)."""
    town = Town()
    async with counter(place, town) as c:
        town.chain.shy.add("@bob")
        made = await c.request("5")
        await c.until(made.id, "queued")
        payout = (await c.withdrawals.view(made.id)).payout
        await c.till.until(payout, "confirming")
        town.chain.mine()
        await c.till.until(payout, "disputed")
        for person in (WHY, ALSO):
            await c.till.payouts.resolve(payout, paid=False, **person)
        assert ((await c.record(made.id)).state, await c.funds()) == ("failed", FUNDS)
        town.chain.shy.clear()
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago}")
        assert await ask_due(c.till.engine) == 1
        assert ((await c.record(made.id)).state, await c.funds()) == ("failed", FUNDS), "terminal records never move"
        assert await c.till.minor(SUSPENSE) == -5_000_000
        assert ("halt flow", "payouts") in {(p.kind, p.name) for p in await c.till.engine.store.read.pauses.list()}
        store = c.till.engine.store
        found = [*await audit(store, more=CHECKS), await wallets_cover(store, {"paper": town.chain})]
        assert [text for finding in found for text in finding.broken] == []
