"""Tables of the engine: records and their history, answers, alerts. Moves are written by group, not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bursar.model.records import Alert, OperationResult, Record, Signal, Transition
from bursar.store.columns import reader
from bursar.store.rows import operation_result_of, record_of, transition_of
from bursar.store.session import Table

NEWEST = 2**63 - 1
LOOKED_MAX = 10_000  # rows that one page looks at

_alert = reader("alert", Alert)
_signal = reader("signal", Signal)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which records of a flow. Nothing said: all of them."""

    owner: str = ""
    states: tuple[str, ...] = ()
    facts: dict[str, str] = {}  # what the body says, by name
    since_us: int = 0  # created then or later
    until_us: int = NEWEST  # created before

    @property
    def is_all_of_one(self) -> bool:
        """Whether every row of an owner fits, so that none is looked at in vain."""
        narrows = self.states or self.facts or self.since_us > 0 or self.until_us < NEWEST
        return bool(self.owner) and not narrows

    @property
    def way(self) -> tuple[str, tuple[Any, ...]]:
        """Along which index: of the owner, of states, or of all; and what is looked up there."""
        if self.owner:
            return "records_of", (self.owner,)
        return ("records_in", (list(self.states),)) if self.states else ("records", ())


class Records(Table):
    """Rows that flows drive."""

    async def get(self, flow: str, id_: str) -> Record | None:
        """One record by its flow's id."""
        return await self._first(record_of, "record", flow, id_)

    async def by_number(self, number: int) -> Record | None:
        """One record by number."""
        return await self._first(record_of, "record_by_number", number)

    async def by_numbers(self, numbers: Sequence[int]) -> Sequence[Record]:
        """Several records, by number."""
        return await self._all(record_of, "records_by_number", list(numbers))

    async def list(
        self, flow: str, *, owner: str = "", states: tuple[str, ...] = (), before: int = NEWEST, limit: int = 100
    ) -> Sequence[Record]:
        """Records of a flow, newest first."""
        return await self._rows(flow, Wanted(owner=owner, states=states), 0, before, limit)

    async def page(
        self, flow: str, wanted: Wanted, *, before: int = NEWEST, limit: int = 100, looked_max: int = LOOKED_MAX
    ) -> tuple[Sequence[Record], int]:
        """What is wanted of a flow, newest first, and the number below which it goes on; 0: that was all.

        At most so many rows are looked at: a page may be short, or empty, and there may still be more.
        """
        floor = 0 if wanted.is_all_of_one else await self._floor(flow, wanted, before, looked_max - 1)
        found = await self._rows(flow, wanted, floor, before, limit + 1)
        if len(found) > limit:
            return found[:limit], found[limit - 1].number
        return found, floor

    async def _rows(self, flow: str, wanted: Wanted, floor: int, before: int, limit: int) -> Sequence[Record]:
        name, who = wanted.way
        states = [list(wanted.states)] if name != "records_in" else []
        facts = (list(wanted.facts), list(wanted.facts.values()))
        args = (flow, *who, *states, wanted.since_us, wanted.until_us, *facts, floor, before, limit)
        return await self._all(record_of, f"list_{name}", *args)

    async def _floor(self, flow: str, wanted: Wanted, before: int, skipped: int) -> int:
        name, who = wanted.way
        args = (flow, *who) if who else ()
        return int(await self._one(f"floor_{name}", *args, before, skipped) or 0)

    async def open_of(self, flow: str, owner: str) -> int:
        """How many records of an owner are driven: they have not ended."""
        return int(await self._one("count_open_of", flow, owner))

    async def count(self, flow: str, owner: str) -> int:
        """How many records of an owner there are."""
        return int(await self._one("count_records_of", flow, owner))

    async def counts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(flow, state) → how many, and when the oldest of them came there. Reads all that there ever was."""
        return {(row[0], row[1]): (row[2], row[3]) for row in await self._s.rows("count_records")}

    async def open_counts(self, waiting: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[int, int]]:
        """The same of records that have not ended: all that are driven, and those in these (flow, state) that wait."""
        found = {(row[0], row[1]): (row[2], row[3]) for row in await self._s.rows("count_driven")}
        for key in waiting:
            count, since_us = (await self._s.rows("count_resting", *key))[0]
            if count:
                driven, oldest_us = found.get(key, (0, since_us))
                found[key] = (driven + count, min(oldest_us, since_us))
        return found

    async def history(self, number: int) -> Sequence[Transition]:
        """Every transition of a record, oldest first."""
        return await self._all(transition_of, "transitions_of", number)

    async def signals(self, number: int) -> Sequence[Signal]:
        """Every signal that a record was sent, in the order in which they arrived."""
        return await self._all(_signal, "signals_of", number)

    async def claim_due(
        self, flows: Sequence[str], worker: str, limit: int, lease_us: int, cap_us: int
    ) -> Sequence[Record]:
        """Take what is due, for so long: the higher priority first, and a quarter more for the sake of the lower."""
        return await self._all(record_of, "claim_due", list(flows), limit, worker, lease_us, cap_us)

    async def claim_all(
        self, flows: Sequence[str], worker: str, limit: int, lease_us: int, after: int
    ) -> Sequence[Record]:
        """At start: take what no other worker drives, due or not, page by page."""
        rows = await self._s.rows("claim_all", list(flows), limit, worker, lease_us, after)
        return sorted((record_of(row) for row in rows), key=lambda record: record.number)

    async def wake_held(self, numbers: Sequence[int], worker: str) -> None:
        """Make those due now that are still this worker's."""
        await self._s.rows("wake_held", list(numbers), worker)

    async def look_again(self, looked: Sequence[tuple[int, int, int | None]]) -> None:
        """Workers have looked at records and moved nothing: number, version, and when the next look should be."""
        await self._s.write("look_again", looked)


class Operations(Table):
    """What operations were answered."""

    async def get(self, scope: str, id_: str, op: str) -> OperationResult | None:
        """The answer to one operation."""
        return await self._first(operation_result_of, "operation", scope, id_, op)

    async def of(self, scope: str, id_: str) -> dict[str, OperationResult]:
        """The answers to all operations of one request."""
        return {row[0]: operation_result_of(row[1:]) for row in await self._s.rows("operations_of", scope, id_)}

    async def drop_counters(self, age_us: int) -> int:
        """Forget limits whose time was over so long ago; returns how many."""
        return len(await self._s.rows("drop_counters", age_us))


class Alerts(Table):
    """What a person should look at."""

    async def raise_once(self, record: int, reason: str, severity: str, message: str) -> bool:
        """Whether it is new: none is raised twice before it is acknowledged."""
        return await self._one("raise_alert", record, reason, severity, message) is not None

    async def raise_since(self, record: int, reason: str, severity: str, message: str, since_us: int) -> bool:
        """Raise it unless it is open, or was raised less than so long ago and acknowledged. Whether it is new."""
        return await self._one("raise_alert_since", record, reason, severity, message, since_us) is not None

    async def open(self, *, limit: int = 1000) -> list[Alert]:
        """Not acknowledged yet, oldest first."""
        return await self._all(_alert, "alerts_open", limit)

    async def untold(self, sink: str, limit: int) -> list[Alert]:
        """What is to be delivered to this sink now."""
        return await self._all(_alert, "alerts_untold", sink, limit)

    async def claim(self, alert: Alert, sink: str, lease_us: int) -> int | None:
        """Which attempt to deliver to this sink is ours; None: another process makes it, or it is due no more."""
        attempt = await self._one("claim_delivery", alert.record, alert.reason, alert.raised_us, sink, lease_us)
        return None if attempt is None else int(attempt)

    async def told(self, alert: Alert, sink: str) -> None:
        """This alert was delivered to this sink, not one that was raised anew meanwhile."""
        await self._s.rows("end_delivery", alert.record, alert.reason, alert.raised_us, sink, "", 0)
        await self._s.rows("deliver_alert", alert.record, alert.reason, alert.raised_us)

    async def not_told(self, alert: Alert, sink: str, error: str, delay_us: int) -> None:
        """It was not, for this reason; it is tried again after so long."""
        await self._s.rows("end_delivery", alert.record, alert.reason, alert.raised_us, sink, error, delay_us)

    async def acknowledge(self, record: int, reason: str, by: str) -> bool:
        """Whether there was one to acknowledge."""
        return await self._one("acknowledge_alert", record, reason, by) is not None


class Clock(Table):
    """Due times, when the clock that they are in has been set back."""

    async def now_us(self) -> int:
        """What it says now."""
        return int(await self._one("clock_now"))

    async def set_back(self, by_us: int) -> int:
        """Move all that is due in the future back by as much (L24); returns how many records."""
        await self._s.rows("set_back_deliveries", by_us)
        await self._s.rows("set_back_forced", by_us)
        return len(await self._s.rows("set_back_records", by_us))


class Heartbeats(Table):
    """Processes that can write."""

    async def beat(self, worker: str) -> None:
        """This one can."""
        await self._s.write("beat", [(worker,)])

    async def hanging_commits(self, longer_us: int) -> int:
        """PostgreSQL: commits of ours that wait for a synchronous standby, for longer than that."""
        return int(await self._one("hanging_commits", longer_us))


class Nodes(Table):
    """Node numbers, leased."""

    async def lease(self, holder: str, lease_us: int) -> tuple[int, int] | None:
        """A number without a holder, and the moment after which ids may be made under it."""
        rows = await self._s.rows("lease_node", holder, lease_us)
        return (rows[0][0], rows[0][1]) if rows else None

    async def renew(self, node: int, holder: str, lease_us: int) -> bool:
        """Whether it is still ours."""
        return await self._one("renew_node", node, holder, lease_us) is not None
