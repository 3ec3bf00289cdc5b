"""What must be true of the records of any flow after every commit: each transition once, and legal by the machine."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Final

from bursar.engine.moves import SIGNAL
from bursar.model.machine import ImpossibleEvent, Machine
from bursar.model.outcome import UNKNOWNS
from bursar.sim.oracle import Oracle, Violation

STEPS: Final = "SELECT record, version, source, event, target FROM transitions"
NOTES: Final = ("RETRY ASKED", "FORCE ASKED", "TELL ASKED")  # what operators have said, and moved nothing


class RecordOracle(Oracle, ABC):
    """The ledger's oracle, and what must be true of the records of any flow."""

    machine: Machine
    latest_us = 0  # the furthest that the machine's clock has ever been
    late: tuple[str, ...] = ()  # answers that may come after a record has moved on, and are kept in its history

    def __init__(self, connection: sqlite3.Connection, past: Oracle | None = None) -> None:
        super().__init__(connection, past)
        self._history: dict[int, list[tuple[object, ...]]] = {}
        self._judged: dict[int, tuple[object, ...]] = {}  # number, id, state and version of a record, when it was

    def look(self, *, others: bool = True) -> None:
        """After every commit of any process."""
        if not self.db.in_transaction:
            super().look(others=others)
            self.records()

    @abstractmethod
    def records(self) -> None:
        """Every record is where its history says, and so is its money."""

    @abstractmethod
    def ended(self) -> None:
        """Nothing breaks any more: every record is where it may stay."""

    def judge_moved(self, machine: Machine) -> None:
        """What `legal` says of the records of a machine that have moved since they were judged last.

        That the history of the others has not changed is judged at every crash and at the end (`records`).
        """
        read = self.db.execute
        for row in read("SELECT number, id, state, version FROM records WHERE flow = ?", (machine.name,)).fetchall():
            number, id_, state, version = row
            if self._judged.get(number) != row:
                steps = read(f"{STEPS} WHERE record = ? ORDER BY version", (number,))
                self.legal(number, id_, [step[1:] for step in steps], state, version, machine)
                self._judged[number] = row

    def steps(self) -> dict[int, list[tuple[object, ...]]]:
        """The history of every record: version, source, event, target."""
        read = self.db.execute
        found: dict[int, list[tuple[object, ...]]] = defaultdict(list)
        for step in read(f"{STEPS} ORDER BY record, version"):
            found[step[0]].append(step[1:])
        return found

    def legal(
        self,
        number: int,
        id: str,
        steps: list[tuple[object, ...]],
        state: str,
        version: int,
        machine: Machine | None = None,
    ) -> None:
        """Its history is unbroken, only ever grows, follows the machine's arrows, and leads to where it is."""
        of = machine or self.machine
        before = self._history.get(number, [])
        if steps[: len(before)] != before:
            raise Violation(f"the history of {of.name} {id} was changed")
        self._history[number] = steps
        place = ""
        for expected, (at, source, event, target) in enumerate(steps, start=1):
            if at != expected or source != place:
                raise Violation(f"{of.name} {id} has no unbroken history: {steps}")
            place = str(target)
            if source == target and (event in (*UNKNOWNS, *NOTES, *self.late) or str(event).startswith(f"{SIGNAL} ")):
                continue
            if source and not _is_arrow(of, str(source), str(event), place):
                raise Violation(f"{of.name} {id} went from {source} to {target} on {event}")
        if (place, len(steps)) != (state, version):
            raise Violation(f"{of.name} {id} is {state} at version {version}, its history says {place}, {len(steps)}")
        self.stepped(of, id, steps, len(before))

    def stepped(self, machine: Machine, id: str, steps: list[tuple[object, ...]], known: int) -> None:
        """A record's history is legal; the first `known` steps of it were known before. For a scenario to look at."""


def _is_arrow(machine: Machine, source: str, event: str, target: str) -> bool:
    try:
        return machine.arrow(source, event).target == target
    except ImpossibleEvent:
        return False
