"""A database that went back to a backup while the cores went on: how each transfer ends that was under way then.

Every row of TABLE is one such transfer: between which ends, how far the backup knows it, what the cores did after the
backup, and whether the ledger's or the core's account could still do its part when the transfer is driven again. It
ends in the state that is true at the cores; the books say what the cores hold (I5), and the same money is never on both
sides. What a core has forgotten (below its floor) waits, and an alert says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import behind
from tests.unit.rails.desk import Desk, desk

from bursar import Bursar, pay
from bursar.audit import audit
from bursar.engine import Answer, FlowRecord, Operators
from bursar.engine.forced import ask_due
from bursar.flows.transfers import AccountType, Limits, Request, Transfers
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.flow import ARRIVAL_UNKNOWN, PAID_FROM_SUSPENSE
from bursar.flows.transfers.request import funding_account
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.rails.trading import Op, Status

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

UNIT = 10**6
TEN = 10 * UNIT
FUNDING, SPOT, FUTURE = AccountType.FUNDING, AccountType.SPOT, AccountType.FUTURE
F_S, S_F, S_X = (FUNDING, SPOT), (SPOT, FUNDING), (SPOT, FUTURE)
Ends = tuple[AccountType, AccountType]

# How far the backup knows it. All are states in which the engine rests; the others are passed through.
WRITTEN = "written down"  # SOURCE_PENDING, and the source was not called yet
TAKEN = "taken"  # SOURCE_PENDING, and the funding account has paid (of a core that is an operation of the core)
OFFERED = "offered"  # TARGET_PENDING
RETURNING = "returning"  # COMPENSATING, the target having refused it
STATES = {WRITTEN: "SOURCE_PENDING", TAKEN: "SOURCE_PENDING", OFFERED: "TARGET_PENDING", RETURNING: "COMPENSATING"}

# What the cores did after it, in this order: (W)ithdraw and (R)efund at the source, (D)eposit at the target; and
# refusals: of the withdraw (X), of the deposit (C).
LATER: dict[tuple[Ends, str], tuple[str, ...]] = {
    (F_S, WRITTEN): ("", "D", "C"),
    (F_S, TAKEN): ("", "D", "C"),
    (F_S, OFFERED): ("", "D", "C"),
    (F_S, RETURNING): ("",),
    (S_F, WRITTEN): ("", "X", "W", "WR"),
    (S_F, OFFERED): ("", "R"),
    (S_F, RETURNING): ("", "R"),
    (S_X, WRITTEN): ("", "X", "W", "WD", "WC", "WCR"),
    (S_X, OFFERED): ("", "D", "C", "CR"),
    (S_X, RETURNING): ("", "R"),
}

COMMITTED, FAILED, ROLLED_BACK = "COMMITTED", "FAILED", "ROLLED_BACK"
# Where it ends, if the ledger's end can still do its part (the account can pay, or is not frozen; between cores: the
# target's account is not frozen), and if not.
TABLE: dict[tuple[Ends, str, str], tuple[str, str]] = {
    (F_S, WRITTEN, ""): (COMMITTED, FAILED),
    (F_S, WRITTEN, "D"): (COMMITTED, COMMITTED),  # if it can't pay, suspense does
    (F_S, WRITTEN, "C"): (ROLLED_BACK, FAILED),
    (F_S, TAKEN, ""): (COMMITTED, COMMITTED),
    (F_S, TAKEN, "D"): (COMMITTED, COMMITTED),
    (F_S, TAKEN, "C"): (ROLLED_BACK, ROLLED_BACK),
    (F_S, OFFERED, ""): (COMMITTED, COMMITTED),
    (F_S, OFFERED, "D"): (COMMITTED, COMMITTED),
    (F_S, OFFERED, "C"): (ROLLED_BACK, ROLLED_BACK),
    (F_S, RETURNING, ""): (ROLLED_BACK, ROLLED_BACK),
    (S_F, WRITTEN, ""): (COMMITTED, ROLLED_BACK),
    (S_F, WRITTEN, "X"): (FAILED, FAILED),
    (S_F, WRITTEN, "W"): (COMMITTED, ROLLED_BACK),
    (S_F, WRITTEN, "WR"): (FAILED, FAILED),
    (S_F, OFFERED, ""): (COMMITTED, ROLLED_BACK),
    (S_F, OFFERED, "R"): (ROLLED_BACK, ROLLED_BACK),
    (S_F, RETURNING, ""): (ROLLED_BACK, ROLLED_BACK),
    (S_F, RETURNING, "R"): (ROLLED_BACK, ROLLED_BACK),
    (S_X, WRITTEN, ""): (COMMITTED, ROLLED_BACK),
    (S_X, WRITTEN, "X"): (FAILED, FAILED),
    (S_X, WRITTEN, "W"): (COMMITTED, ROLLED_BACK),
    (S_X, WRITTEN, "WD"): (COMMITTED, COMMITTED),
    (S_X, WRITTEN, "WC"): (ROLLED_BACK, ROLLED_BACK),
    (S_X, WRITTEN, "WCR"): (FAILED, FAILED),
    (S_X, OFFERED, ""): (COMMITTED, ROLLED_BACK),
    (S_X, OFFERED, "D"): (COMMITTED, COMMITTED),
    (S_X, OFFERED, "C"): (ROLLED_BACK, ROLLED_BACK),
    (S_X, OFFERED, "CR"): (ROLLED_BACK, ROLLED_BACK),
    (S_X, RETURNING, ""): (ROLLED_BACK, ROLLED_BACK),
    (S_X, RETURNING, "R"): (ROLLED_BACK, ROLLED_BACK),
}


class House:
    """A ledger, two cores, and no worker: a transfer is driven when a test says so. Each row has a user of its own."""

    def __init__(self, bursar: Bursar, desks: dict[AccountType, Desk], transfers: Transfers) -> None:
        self.bursar = bursar
        self.desks = desks
        self.transfers = transfers
        self.engine = transfers.engine
        self.users = 2000

    async def user(self) -> int:
        """One with 50 in funding and 50 at SPOT."""
        self.users += 1
        await self.transfers.fund(self.users, "USDT", "100", reference=f"seed-{self.users}")
        await self.bursar.ledger.create_account(f"spent:{self.users}")
        request = Request(user=self.users, source="FUNDING", target="SPOT", asset="USDT", amount="50")
        assert (await self.transfers.create(request, deadline_s=20)).state == COMMITTED
        return self.users

    async def under_way(self, ends: Ends, backup: str) -> Record:
        """A transfer of 10, as the backup knows it."""
        source, target = ends
        user = await self.user()
        match backup:
            case "written down" | "taken":
                self.lose(source, "withdraw", after=backup == TAKEN)
            case _:
                self.lose(target, "deposit")
        request = Request(user=user, source=source.value, target=target.value, asset="USDT", amount="10")
        view = await self.transfers.create(request, deadline_s=20)
        if backup == RETURNING:
            record = await self.record(view.req_id)
            refused = await self.transfers.rails[target].cancel(self.item(record), "deposit")
            assert refused.outcome is Outcome.EXPLICIT_FAIL
            self.lose(source, "refund")
            await self.engine.process_now(record, 20)
        record = await self.record(view.req_id)
        assert record.state == STATES[backup]
        return record

    def lose(self, kind: AccountType, op: str, *, after: bool = False) -> None:
        """Let one call go unanswered, before its effect or after it."""
        rail = self.transfers.rails[kind]
        inline, rail.inline = rail.inline, False  # or it would not be called at all
        real = getattr(rail, op)

        async def lost(item: FlowRecord[Any]) -> Answer:
            setattr(rail, op, real)
            rail.inline = inline
            if after:
                await real(item)
            return Answer(outcome=Outcome.TIMEOUT)

        setattr(rail, op, lost)

    async def later(self, record: Record, did: str) -> None:
        """What the cores do after the backup."""
        t = self.item(record).body
        cores = self.transfers.cores
        for step in did:
            match step:
                case "W":
                    said = await cores[t.source].withdraw(record.id, t.user, t.asset, t.minor)
                case "R":
                    said = await cores[t.source].refund(record.id, t.user, t.asset, t.minor)
                case "D":
                    said = await cores[t.target].deposit(record.id, t.user, t.asset, t.minor)
                case "X":
                    said = await cores[t.source].cancel(record.id, Op.WITHDRAW)
                case _:
                    said = await cores[t.target].cancel(record.id, Op.DEPOSIT)
            assert said.outcome is (Outcome.EXPLICIT_FAIL if step in "XC" else Outcome.SUCCESS), (step, said)

    async def disable(self, record: Record) -> None:
        """The user's account can't do its part any more: it has spent all, or is frozen."""
        t = self.item(record).body
        account = funding_account(t.user)
        if t.source is FUNDING:
            left = str(await self.bursar.ledger.balance(account, "USDT"))
            await self.bursar.ledger.commit(pay(account, f"spent:{t.user}", "USDT", left, key=f"spend-{t.user}"))
        elif t.target is FUNDING:
            await self.bursar.ledger.freeze(account)
        else:
            await self.transfers.cores[t.target].set_status(t.user, Status.FROZEN)

    async def drive(self, record: Record, calls: int = 5) -> str:
        """Drive it to its end, or for some calls; the state it is in then."""
        for _ in range(calls):
            record = await self.engine.process_now(await self.record(record.id), 20)
            if record.state in (COMMITTED, FAILED, ROLLED_BACK):
                break
        return (await self.record(record.id)).state

    async def force(self, record: Record, event: str) -> None:
        people = Operators(self.engine)
        for person in ("ann", "bob"):
            await people.force("transfers", record.id, event, actor=person, reason="ticket 17")

    async def watched(self, place: Place) -> None:
        """Let the time pass until the rail of a forced call is asked, and ask it."""
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago} WHERE due IS NOT NULL")
        assert await ask_due(self.engine) == 1

    async def record(self, id_: str) -> Record:
        found = await self.engine.get("transfers", id_)
        assert found is not None
        return found

    def item(self, record: Record) -> FlowRecord[Any]:
        return self.transfers.flow.item(record)

    async def forget(self) -> None:
        """Both cores forget all there was: the backup is older than what they remember."""
        user = await self.user()
        for kind, client in self.transfers.cores.items():
            request = Request(user=user, source="FUNDING", target=kind.value, asset="USDT", amount="1")
            assert (await self.transfers.create(request, deadline_s=20)).state == COMMITTED
            highest = (await client.describe()).highest_id
            assert (await client.prune(room=highest, forget=highest)).outcome is Outcome.SUCCESS

    async def reasons(self, record: Record) -> set[str]:
        return {alert.reason for alert in await self.bursar.store.read.alerts.open() if alert.record == record.number}

    async def money(self, user: int) -> dict[AccountType, int]:
        """What a user has at each end; in funding also what was spent from there."""
        ledger = self.bursar.ledger
        own = [(await ledger.balance(path, "USDT")).minor for path in (funding_account(user), f"spent:{user}")]
        found = {FUNDING: sum(own)}
        for kind, client in self.transfers.cores.items():
            balance = (await client.balances(user)).balances.get("USDT")
            found[kind] = 0 if balance is None else balance.available
        return found

    async def suspense(self) -> int:
        return (await self.bursar.ledger.balance("suspense:transfers", "USDT")).minor

    async def check(self) -> None:
        """All invariants hold: also that each core has what the ledger says."""
        broken = [text for finding in await audit(self.bursar.store) for text in finding.broken]
        for kind, client in self.transfers.cores.items():
            finding = await conservation(self.transfers, kind, client)
            assert finding.judged
            broken += finding.broken
        assert broken == []


@asynccontextmanager
async def house(place: Place, folder: Path) -> AsyncIterator[House]:
    for name in ("spot", "future"):
        (folder / name).mkdir()
    async with (
        place.bursar() as bursar,
        desk(folder / "spot", name="spot") as spot,
        desk(folder / "future", name="future") as future,
    ):
        transfers = Transfers(
            bursar.ledger,
            {SPOT: await spot.client(), FUTURE: await future.client()},
            limits=Limits(per_second=None, per_day=None),
            retry=Retry(first_s=0.01, cap_s=0.05),
        )
        await transfers.prepare()
        try:
            yield House(bursar, {SPOT: spot, FUTURE: future}, transfers)
        finally:
            await transfers.engine.finish(10)


def test_the_table_is_complete(mode: str) -> None:
    """Every pair of ends, every state in which the engine rests, and all that the cores can have done from there on."""
    assert TABLE.keys() == {(ends, backup, did) for (ends, backup), all_ in LATER.items() for did in all_}


@pytest.mark.parametrize("ends", [F_S, S_F, S_X], ids=lambda ends: "-".join(ends).lower())
@scenario
async def test_each_transfer_under_way_ends_as_it_did_at_the_cores(place: Place, tmp_path: Path, ends: Ends) -> None:
    async with house(place, tmp_path) as here:
        for (of, backup, did), able in product(TABLE, (True, False)):
            if of != ends:
                continue
            row = f"{ends}, {backup}, then {did or 'nothing'}, {'able' if able else 'not able'}"
            end = TABLE[of, backup, did][not able]
            record = await here.under_way(ends, backup)
            await here.later(record, did)
            if not able:
                await here.disable(record)
            owed = await here.suspense()
            assert await here.drive(record) == end, row
            expected = {FUNDING: 50 * UNIT, SPOT: 50 * UNIT, FUTURE: 0}
            if end == COMMITTED:
                expected[ends[0]] -= TEN
                expected[ends[1]] += TEN
            is_unpaid = (of, backup, did, able) == (F_S, WRITTEN, "D", False)
            expected[FUNDING] += TEN if is_unpaid else 0
            assert await here.money(here.users) == expected, row
            assert await here.suspense() - owed == (-TEN if is_unpaid else 0), row
            assert await here.reasons(record) == ({PAID_FROM_SUSPENSE} if is_unpaid else set()), row
        await here.check()


@pytest.mark.parametrize("ends", [F_S, S_F, S_X], ids=lambda ends: "-".join(ends).lower())
@scenario
async def test_what_a_core_has_forgotten_waits_for_people(place: Place, tmp_path: Path, ends: Ends) -> None:
    """The backup is older than what the cores remember: whatever they did, nothing is decided without evidence."""
    async with house(place, tmp_path) as here:
        waiting: list[tuple[str, Record]] = []
        for (of, backup, did), able in product(TABLE, (True, False)):
            if of != ends or (ends == F_S and backup == RETURNING):  # that one no core is asked for
                continue
            record = await here.under_way(ends, backup)
            await here.later(record, did)
            if not able:
                await here.disable(record)
            state = STATES[backup]
            if ends == F_S and state == "SOURCE_PENDING" and (able or backup == TAKEN):
                state = "TARGET_PENDING"  # it is paid, and waits there
            waiting.append((state, record))
        await here.forget()
        before = [await here.transfers.cores[kind].totals() for kind in (SPOT, FUTURE)]
        for state, record in waiting:
            assert await here.drive(record, calls=12) == state
            assert await here.reasons(record) & {"stuck", "refund failing"}
        assert [(await here.transfers.cores[kind].totals()).totals for kind in (SPOT, FUTURE)] == [
            one.totals for one in before
        ]
        assert await here.suspense() == 0
        assert all(finding.ok for finding in await audit(here.bursar.store))


# --- a refusal is one only when the target core says so (T48)
# --------------------------------------------------------------------------------------------------------------


@scenario
async def test_a_refusal_waits_for_a_core_that_does_not_answer(place: Place, tmp_path: Path) -> None:
    async with house(place, tmp_path) as here:
        record = await here.under_way(F_S, WRITTEN)
        await here.later(record, "D")
        await here.disable(record)
        rail = here.transfers.rails[SPOT]
        cancel = rail.cancel

        async def silent(_item: FlowRecord[Any], _op: str) -> Answer:
            rail.cancel = cancel  # type: ignore[method-assign]
            return Answer(outcome=Outcome.TIMEOUT)

        rail.cancel = silent  # type: ignore[method-assign, assignment]
        assert await here.drive(record, calls=1) == "SOURCE_PENDING"
        assert (await here.record(record.id)).error.startswith(ARRIVAL_UNKNOWN)
        assert await here.drive(record) == COMMITTED
        assert await here.suspense() == -TEN
        await here.check()


@scenario
async def test_what_was_refused_never_arrives(place: Place, tmp_path: Path) -> None:
    """A server that was not stopped for the restore has the deposit on its way: the core has promised otherwise."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(F_S, WRITTEN)
        await here.disable(record)
        assert await here.drive(record) == FAILED
        late = await here.transfers.cores[SPOT].deposit(record.id, here.users, "USDT", TEN)
        assert (late.outcome, late.code) == (Outcome.EXPLICIT_FAIL, "CANCELLED")
        await here.check()


@scenario
async def test_another_deposit_under_that_id_is_not_taken_for_it(place: Place, tmp_path: Path) -> None:
    async with house(place, tmp_path) as here:
        record = await here.under_way(F_S, WRITTEN)
        other = await here.transfers.cores[SPOT].deposit(record.id, here.users, "USDT", TEN + 1)
        assert other.outcome is Outcome.SUCCESS
        await here.disable(record)
        assert await here.drive(record, calls=12) == "SOURCE_PENDING"
        assert await here.reasons(record) == {"stuck"}
        assert await here.suspense() == 0


@scenario
async def test_a_core_that_is_not_connected_yet_is_asked_for_a_refund_too(place: Place, tmp_path: Path) -> None:
    """A server has just started, and has heard of no sequence: any answer seems to be newer than that."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(S_F, WRITTEN)
        await here.later(record, "WR")
        client = await here.desks[SPOT].client()
        assert not client.is_connected
        again = Transfers(here.bursar.ledger, {SPOT: client}, worker="again")
        said = await again.rails[SPOT].withdraw(here.item(record))
        assert (said.outcome, said.code) == (Outcome.EXPLICIT_FAIL, "GIVEN_BACK")


@scenario
async def test_a_client_that_has_not_heard_of_it_asks_for_a_refund_too(place: Place, tmp_path: Path) -> None:
    """Another server did it, and the database has moved to a replica that lacks that: this one was connected before."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(S_F, WRITTEN)
        idle, active = here.transfers.cores[SPOT], await here.desks[SPOT].client()
        heard = idle.sequence
        here.transfers.cores[SPOT] = active
        await here.later(record, "WR")
        assert idle.sequence == heard
        old = msgspec.structs.replace(record, created_us=record.created_us - 2 * UNIT)
        assert (await here.engine.process_now(old, 20)).state == FAILED
        await here.check()


# --- and people's word
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("able", [True, False])
@scenario
async def test_forcing_back_what_has_arrived_pays_for_it(place: Place, tmp_path: Path, able: bool) -> None:
    async with house(place, tmp_path) as here:
        record = await here.under_way(F_S, WRITTEN)
        await here.later(record, "D")
        if not able:
            await here.disable(record)
        await here.force(record, "EXPLICIT_FAIL")
        assert await here.drive(record) == COMMITTED
        assert await here.suspense() == (0 if able else -TEN)
        await here.watched(place)
        assert await here.reasons(record) == (set() if able else {PAID_FROM_SUSPENSE})
        await here.check()


@scenario
async def test_forcing_back_what_has_not_arrived(place: Place, tmp_path: Path) -> None:
    async with house(place, tmp_path) as here:
        record = await here.under_way(F_S, WRITTEN)
        await here.force(record, "EXPLICIT_FAIL")
        assert await here.drive(record) == FAILED
        late = await here.transfers.cores[SPOT].deposit(record.id, here.users, "USDT", TEN)
        assert late.code == "CANCELLED"
        await here.watched(place)
        assert await here.reasons(record) == set()
        await here.check()


@pytest.mark.parametrize(
    ("ends", "backup", "words", "end"),
    [
        (F_S, WRITTEN, ["EXPLICIT_FAIL"], FAILED),
        (F_S, OFFERED, ["SUCCESS"], COMMITTED),
        (S_F, WRITTEN, ["SUCCESS"], COMMITTED),
        (S_F, OFFERED, ["EXPLICIT_FAIL", "SUCCESS"], ROLLED_BACK),
        (S_F, RETURNING, ["SUCCESS"], ROLLED_BACK),
    ],
)
@scenario
async def test_two_people_decide_what_a_core_has_forgotten(
    place: Place, tmp_path: Path, ends: Ends, backup: str, words: list[str], end: str
) -> None:
    """It never happens any more. Whether it has happened before, they say, and the sums of I5 check."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(ends, backup)
        if ends == F_S:
            await here.disable(record)
        await here.forget()
        for word in words:
            assert await here.drive(record, calls=2) not in (COMMITTED, FAILED, ROLLED_BACK)
            await here.force(record, word)
        assert await here.drive(record) == end
        assert all(finding.ok for finding in await audit(here.bursar.store))


@scenario
async def test_forcing_back_what_the_core_took_and_gave_back(place: Place, tmp_path: Path) -> None:
    """The core says that it was taken, which is true, and not all of it."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(S_F, WRITTEN)
        await here.later(record, "WR")
        await here.force(record, "EXPLICIT_FAIL")
        assert await here.drive(record) == FAILED
        await here.watched(place)
        assert await here.reasons(record) == set()
        assert await here.money(here.users) == {FUNDING: 50 * UNIT, SPOT: 50 * UNIT, FUTURE: 0}
        await here.check()


@scenario
async def test_people_who_say_that_it_was_taken_when_it_was_given_back(place: Place, tmp_path: Path) -> None:
    """Their word counts until the core is asked: then the books say what the core has, and an alert is raised."""
    async with house(place, tmp_path) as here:
        record = await here.under_way(S_F, WRITTEN)
        await here.later(record, "WR")
        await here.force(record, "SUCCESS")
        assert await here.drive(record) == COMMITTED
        await here.watched(place)
        assert await here.reasons(record) == {"contradiction"}
        assert await here.suspense() == -TEN
        await here.check()
