"""What audit asks about records and the operations made for them: I4 and I7.

Between the moment in which a rail of ours has answered and the one in which the record hears of it, the money has moved
and the record has not (T20). So what is in transit is compared with who owns it and who is about to, not with states.
"""

from __future__ import annotations

from bursar.audit.checks import Check
from bursar.audit.finding import EVIDENCE_MAX, Evidence
from bursar.audit.walk import PAGE_MAX, numbered
from bursar.model.flow_rows import FlowRow, RowKey, RowState, number_of
from bursar.model.records import owner_name
from bursar.store.tables import Tables

Owner = tuple[str, str, str, bool]  # flow, id, state, whether it is open
Place = tuple[str, str, str]  # of a row: flow, kind, the key above


class Transit(Check):
    """I4: all that is in transit belongs to an open record, and all that records own in transit is there.

    The same of holds that belong to records (W34): the posting that is held is the one that its record keeps.
    """

    invariant = "I4"

    async def finish(self) -> None:
        checks = self.scene.tables.checks
        missing: dict[int, Owner] = {
            posting: (flow, id_, state, is_open)
            async for _, flow, id_, state, posting, is_open in numbered(checks.records_in_transit)
        }
        driven = {id_ async for _, id_ in numbered(checks.open_records)}
        async for posting, asset, minor, scope, key in numbered(checks.transit):
            self.checked += 1
            owner = missing.pop(posting, None)
            what = f"posting {posting} ({self.scene.money(asset, minor)} in transit)"
            if owner is None and key.rpartition(":")[0] not in driven:
                self.evidence.add(f"{what} was made by {scope} {key}, and belongs to no record")
            elif owner is not None and not owner[3]:
                self.evidence.add(f"{what} belongs to {owner[0]} {owner[1]}, which is {owner[2]} and moves no more")
        await self._holds(missing)
        await self._spent(missing)

    async def _holds(self, missing: dict[int, Owner]) -> None:
        """Every open hold that a record owns is the hold of a record that is open, and knows of it."""
        async for hold, asset, minor, posting, name in numbered(self.scene.tables.checks.owned_holds):
            self.checked += 1
            owner = missing.pop(posting, None)
            what = f"hold {hold} ({self.scene.money(asset, minor)} left)"
            if owner is None or owner_name(owner[0], owner[1]) != name:
                self.evidence.add(f"{what} belongs to {name}, which does not know of it")
            elif not owner[3]:
                self.evidence.add(f"{what} belongs to {name}, which is {owner[2]} and moves no more")

    async def _spent(self, missing: dict[int, Owner]) -> None:
        """What a record owns and is not there must have been consumed in its own name, a moment ago."""
        numbers = sorted(missing)
        for start in range(0, len(numbers), PAGE_MAX):
            some = numbers[start : start + PAGE_MAX]
            spenders = await self.scene.tables.postings.spenders(some)
            keys = {e.seq: e.key for e in await self.scene.tables.envelopes.get(sorted(set(spenders.values())))}
            for number in some:
                flow, id_, state, driven = missing[number]
                self.checked += 1
                key = keys.get(spenders.get(number, 0), "")
                if not driven or key.rpartition(":")[0] != id_:
                    self.evidence.add(f"{flow} {id_} is {state} and owns posting {number}, which is not in transit")


class Effects(Check):
    """I7: an operation of ours has one effect if it was answered with success, and none if it was refused.

    And what records have of their flow's own rows is theirs alone, and adds up.
    """

    invariant = "I7"

    async def finish(self) -> None:
        checks = self.scene.tables.checks
        self.checked = await checks.operations()
        for number in await checks.ids("effects_refused", EVIDENCE_MAX + 1):
            self.evidence.add(f"envelope {number} was booked for an operation that was refused")
        for number in await checks.ids("effects_unanswered", EVIDENCE_MAX + 1):
            self.evidence.add(f"envelope {number} was booked for an operation that is not remembered")
        rows = RowsFound(self.evidence)
        await rows.read(self.scene.tables)
        self.checked += rows.checked


class RowsFound:
    """What was seen of all rows of flows' own (model/flow_rows): one number per sequence and per total, in memory.

    A row belongs to a record of its own flow. The next number of a sequence is above every number that was taken, so
    none is taken twice. What is reserved under a key is the sum of what its records have reserved.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.checked = 0
        self._evidence = evidence
        self._next: dict[Place, int] = {}
        self._highest: dict[Place, int] = {}
        self._totals: dict[Place, int] = {}
        self._reserved: dict[Place, int] = {}

    async def read(self, tables: Tables) -> None:
        """Look at every row."""
        after: RowKey = ("", "", "")
        while page := await tables.flow_rows.all(after, PAGE_MAX):
            after = page[-1][0].row_key
            for row, flow in page:
                self.checked += 1
                self._see(row, flow)
        for place, highest in sorted(self._highest.items()):
            if place in self._next and self._next[place] <= highest:
                self._evidence.add(f"{_place(place)} would give the number {self._next[place]}, and {highest} is taken")
        for place, total in sorted(self._totals.items()):
            if total != (found := self._reserved.get(place, 0)):
                self._evidence.add(f"{_place(place)} says that {total} is reserved, and its records have {found}")

    def _see(self, row: FlowRow, flow: str | None) -> None:
        above: Place = (row.flow, row.kind, row.key.rpartition("/")[0])
        if row.record and flow != row.flow:
            owner = "does not exist" if flow is None else f"is one of {flow}"
            self._evidence.add(f"{_place(row.row_key)} belongs to record {row.record}, which {owner}")
        if row.state is RowState.SEQUENCE:
            self._next[row.row_key] = row.amount
        elif row.state is RowState.TOTAL:
            self._totals[row.row_key] = row.amount
        elif row.state is RowState.HELD:
            self._reserved[above] = self._reserved.get(above, 0) + row.amount
            if row.permanent and row.key.rpartition("/")[2].isdigit():
                self._highest[above] = max(number_of(row), self._highest.get(above, 0))


def _place(place: Place) -> str:
    flow, kind, key = place
    return f"{kind} {key!r} of {flow}"
