"""I6: green on withdrawals in every status, red on every row that is changed behind our back; and few queries."""

from __future__ import annotations

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_withdrawal_views import in_every_status, payout_of
from tests.till import Town
from tests.withdrawing import Counter, counter

from bursar.audit import Finding, audit
from bursar.audit.checks import Scene
from bursar.engine import Operators
from bursar.flows.withdrawals import invariants
from bursar.flows.withdrawals.invariants import CHECKS, WithdrawalsLately, WithdrawalSums, stop_if_unbalanced

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

BODY = "UPDATE {s}records SET body = replace(CAST(body AS text), '{old}', '{new}'){json} WHERE id = "

# What is changed, and what the audit says of it. {completed} and the others are ids of withdrawals, {paid} and {sent}
# of payouts; {s} is the schema.
DAMAGES = {
    "an open one says that it holds more": (
        BODY.format(old='"amount":"20000000"', new='"amount":"30000000"', s="{s}", json="{json}") + "'{pending}'",
        "holds 31000000 smallest units of USDT of user:3:funding, its hold is 21000000 of USDT of user:3:funding",
    ),
    "an open one says that another user's money is held": (
        BODY.format(old="user:3:funding", new="user:2:funding", s="{s}", json="{json}") + "'{pending}'",
        "of USDT of user:2:funding were never set aside",
    ),
    "an open one has lost its hold": (
        "UPDATE {s}records SET transit = 0 WHERE id = '{approved}'",
        "is approved, and no open hold is its own",
    ),
    "an open one is said to have been completed": (
        "UPDATE {s}records SET state = 'completed' WHERE id = '{confirming}'",
        "is completed, and has paid nothing, not",
    ),
    "a rejected one is open again": (
        "UPDATE {s}records SET state = 'waiting' WHERE id = '{rejected}'",
        "is waiting, and has given back 21000000 USDT to user:3:funding, not nothing",
    ),
    "a rejected one is said to have been completed": (
        "UPDATE {s}records SET state = 'completed' WHERE id = '{rejected}'",
        "is completed, and 0 of its payouts were confirmed",
    ),
    "a completed one is said to have failed": (
        "UPDATE {s}records SET state = 'failed' WHERE id = '{completed}'",
        "is failed, and has given back nothing, not 6000000 USDT to user:1:funding",
    ),
    "a failed one has a payout that was confirmed": (
        "UPDATE {s}records SET state = 'confirmed' WHERE id = '{refused}'",
        "is failed, and its payouts were confirmed or are open: {refused}",
    ),
    "a completed one has paid another amount": (
        BODY.format(old='"amount":"5000000"', new='"amount":"4000000"', s="{s}", json="{json}") + "'{completed}'",
        "is completed, and has paid 5000000 USDT to external:wallet:bsc:hot1, 1000000 USDT to",
    ),
    "a completed one was paid by another transaction": (
        BODY.format(old='"tx_hash":"{hash}"', new='"tx_hash":"beef"', s="{s}", json="{json}") + "'{completed}'",
        "is completed by beef, and its payout by {hash}",
    ),
    "a completed one has a payout that was not confirmed": (
        "UPDATE {s}records SET state = 'failed' WHERE id = '{paid}'",
        "is completed, and 0 of its payouts were confirmed, 0 are open",
    ),
    "a queued one has a payout that has ended": (
        "UPDATE {s}records SET state = 'failed' WHERE id = '{sent}'",
        "is queued, and 0 of its payouts are open",
    ),
    "one that waits has a payout that is open": (
        "UPDATE {s}records SET state = 'waiting' WHERE id = '{confirming}'",
        "is waiting, and its payouts were confirmed or are open: {sent}",
    ),
    "a queued one does not know its payout": (
        BODY.format(old='"payouts":["{sent}"]', new='"payouts":[]', s="{s}", json="{json}") + "'{confirming}'",
        "is queued, and does not know payout {sent}, which names it",
    ),
    "a payout names one that does not know it": (
        BODY.format(old="withdrawals/{confirming}", new="withdrawals/{queued}", s="{s}", json="{json}") + "'{sent}'",
        "payout {sent} was ordered by withdrawal {queued}, which does not know it",
    ),
    "a payout names one that does not exist": (
        BODY.format(old="withdrawals/{confirming}", new="withdrawals/gone", s="{s}", json="{json}") + "'{sent}'",
        "payout {sent} was ordered by withdrawal gone, which does not exist",
    ),
    "one is gone with its payout": (
        "UPDATE {s}records SET flow = 'gone' WHERE id IN ('{completed}', '{pending}')",
        "smallest units of USDT, and",
    ),
    "one can't be read": ("UPDATE {s}records SET body = '{{}}' WHERE id = '{queued}'", "can't be read"),
}


async def look(c: Counter) -> list[Finding]:
    return await audit(c.till.engine.store, more=CHECKS)


@scenario
@pytest.mark.parametrize("damage", DAMAGES)
async def test_audit_finds_what_was_changed_behind_our_back(place: Place, damage: str) -> None:
    sql, says = DAMAGES[damage]
    async with counter(place, Town(name="bsc")) as c:
        asked = await in_every_status(c)
        assert [text for finding in await look(c) for text in finding.broken] == []
        paid, sent = await payout_of(c, asked["completed"]), await payout_of(c, asked["confirming"])
        refused, hash_ = await payout_of(c, asked["failed"]), (await c.withdrawals.view(asked["completed"])).tx_hash
        filled = {"paid": paid, "sent": sent, "refused": refused, "hash": hash_, **asked.ids}
        await behind_our_back(place, sql.format(s="{s}", json="::json" if place.engine == "postgres" else "", **filled))
        (finding,) = [finding for finding in await look(c) if finding.invariant == "I6"]
        assert not finding.ok and any(says.format(**filled) in text for text in finding.broken), finding.broken
        lately = (await audit(c.till.engine.store, only=["I6"], more=(WithdrawalsLately,)))[0]
        assert set(lately.broken) <= set(finding.broken) and not lately.ok, "all of it is new"


@scenario
async def test_books_balance_at_every_step_of_a_withdrawal(place: Place) -> None:
    """Also while a payout goes back to people, and while what it said is on its way."""
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("20")
        for who in ("", "ann", "ben"):
            if who:
                await c.approve(made.id, who)
            for _ in range(3):
                assert [text for finding in await look(c) for text in finding.broken] == []
                await c.step(made.id)
            view = await c.withdrawals.view(made.id)
            if view.payout and who == "ann":
                await c.till.ledger.freeze("user:1:funding")
                await c.till.step(view.payout)
                assert (await c.withdrawals.view(made.id)).status == "pending"
                assert [text for finding in await look(c) for text in finding.broken] == []
                await c.till.ledger.unfreeze("user:1:funding")
                await c.step(made.id)
        payout = await payout_of(c, made.id)
        for _ in range(6):
            await c.till.step(payout)
            town.chain.mine()
            assert [text for finding in await look(c) for text in finding.broken] == []
        done = await c.withdrawals.view(made.id)
        assert done.status == "completed" and len(done.approvals) == 1


@scenario
async def test_broken_sums_switch_withdrawals_off_until_two_people_have_looked(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await c.request("5")
        assert (await stop_if_unbalanced(c.withdrawals)).ok
        assert await c.till.engine.store.read.pauses.list() == []
        await behind_our_back(place, f"UPDATE {{s}}records SET transit = 0 WHERE id = '{made.id}'")
        assert not (await stop_if_unbalanced(c.withdrawals)).ok
        (pause,) = await c.till.engine.store.read.pauses.list()
        assert (pause.kind, pause.name, pause.two_people) == ("flow", "withdrawals", True) and made.id in pause.reason
        alerts = [(alert.reason, alert.severity) for alert in await c.till.engine.store.read.alerts.open()]
        assert ("withdrawals and ledger disagree", "critical") in alerts
        await Operators(c.till.engine).resume("flow", "withdrawals", actor="ann", reason="looked")
        assert len(await c.till.engine.store.read.pauses.list()) == 1, "one person is not enough"


@scenario
async def test_watch_of_withdrawals_looks_at_all_that_is_open_and_at_what_ended_lately(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        asked = await in_every_status(c)
        long, damaged = 3_660_000_000, f"UPDATE {{s}}records SET state = 'failed' WHERE id = '{asked['completed']}'"
        await behind_our_back(place, damaged, put_back(place, asked["completed"], long))
        assert (await stop_if_unbalanced(c.withdrawals)).ok, "that is for the audit"
        (whole,) = await audit(c.till.engine.store, only=["I6"], more=(WithdrawalSums,))
        assert not whole.ok
        await behind_our_back(place, put_back(place, asked["completed"], -long))
        assert not (await stop_if_unbalanced(c.withdrawals)).ok


def put_back(place: Place, id_: str, us: int) -> str:
    """It ended so much earlier."""
    by = f"interval '1 microsecond' * {us}" if place.engine == "postgres" else str(us)
    return f"UPDATE {{s}}records SET since = since - {by} WHERE id = '{id_}'"


@scenario
async def test_audit_takes_few_queries_however_many_there_are(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with counter(place, Town(name="bsc")) as c:
        await in_every_status(c)
        before = await counted(c)
        for number in range(5):
            await c.request("1", key=f"more {number}")
        assert await counted(c) == before
        (whole,) = await audit(c.till.engine.store, only=["I6"], more=(WithdrawalSums,))
        monkeypatch.setattr(invariants, "PAGE", 2)
        (paged,) = await audit(c.till.engine.store, only=["I6"], more=(WithdrawalSums,))
        assert (paged.checked, paged.broken) == (whole.checked, []) and whole.checked == 13


async def counted(c: Counter) -> int:
    """Statements that I6 makes."""
    made = 0
    async with c.till.engine.store.snapshot(unhurried=True) as tables:
        session = tables.session
        rows = session.rows

        async def counting(*args: object) -> object:
            nonlocal made
            made += 1
            return await rows(*args)  # type: ignore[arg-type]

        session.rows = counting  # type: ignore[method-assign,assignment]
        scene = Scene(tables, lambda *_: None)
        await scene.read()
        await WithdrawalSums(scene).finish()
        session.rows = rows  # type: ignore[method-assign]
    return made
