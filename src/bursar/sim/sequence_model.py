"""What the sequence scenario drives and judges: random steps, the other side of own steps, and what must be true.

The depot does and undoes what own steps ask for, once per key; it loses requests and replies, is slow, late, or hears
things twice. It refuses some for good. To undo something it may refuse at first, and relent when it is asked again.

`SequenceOracle` follows every record's history by itself: which steps are done, undone, skipped. After every commit the
body must say the same, and the ledger must hold exactly the entries and reversals that follow from it, each with its
step's accounts and amount. In the end the depot must have done exactly what the histories say.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import msgspec

from bursar.engine import Answer
from bursar.flows.sequence import MACHINE, Call, Deposit, Own, Pair, Pay, Withdraw
from bursar.flows.sequence.flow import COMPENSATION_ALERT, MISSING_STEP, REVERSE, SCOPE
from bursar.flows.sequence.machine import (
    COMPENSATING,
    COMPENSATION_FAILED,
    COMPLETED,
    FAILED,
    FAILED_IN_PART,
    RUNNING,
    SKIP,
    SUCCESS,
)
from bursar.flows.sequence.steps import EntryStep, OwnCall, Sequence, Step, StoredStep
from bursar.model.envelope import decode_legs
from bursar.model.outcome import Outcome
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.orders import Rail
from bursar.sim.records import RecordOracle

if TYPE_CHECKING:
    from bursar.sim.kernel import Kernel
    from bursar.sim.process import Process

BANK: Final = "external:bank"
OWN: Final = ("ship", "room")
STEPS_MAX: Final = 5
AMOUNT_MAX: Final = 40_000  # of the 500.00 that every user begins with
REFUSED_SHARE: Final = 0.3  # of what is to be done
GRUDGES: Final = (0, 0, 1, 3)  # how often it refuses to undo something
ENDS: Final = (COMPLETED, FAILED, FAILED_IN_PART)
LATE_SUCCESS: Final = "LATE SUCCESS"
CONTRADICTION: Final = "contradiction"
WORTH_AN_ALERT: Final = {COMPENSATION_ALERT, MISSING_STEP}


def wishes(dice: random.Random, users: int) -> list[Step]:
    """One sequence: a handful of steps between a few users, the bank and the depot."""
    steps: list[Step] = []
    for _ in range(1 + dice.randrange(STEPS_MAX)):
        one, other = (f"user:{number}" for number in dice.sample(range(users), 2))
        minor = 1 + dice.randrange(AMOUNT_MAX)
        amount = f"{minor // 100}.{minor % 100:02d}"
        match dice.randrange(6):
            case 0 | 1:
                steps.append(Pay(one, other, "USD", amount))
            case 2:
                steps.append(Deposit(BANK, one, "USD", amount))
            case 3:
                steps.append(Withdraw(one, BANK, "USD", amount))
            case _:
                steps.append(Own(dice.choice(OWN), {"weight": minor}))
    return steps


class Depot(Rail):
    """The other side of own steps. `answers` are by (key, operation)."""

    def __init__(self, kernel: Kernel, dice: random.Random) -> None:
        super().__init__(kernel, dice)
        self.grudges: Counter[str] = Counter()  # how often it was asked to undo something, by key

    def own(self, process: Process) -> dict[str, Pair]:
        """Its steps, as one process calls them."""
        return {name: Pair(do=self._ask(process, "do"), undo=self._ask(process, "undo")) for name in OWN}

    def _ask(self, process: Process, op: str) -> Callable[[Call], Awaitable[Answer]]:
        async def ask(call: Call) -> Answer:
            return await self._call(process, call.key, op)

        return ask

    def execute(self, id: str, op: str) -> Outcome:
        """Once per key; asked again, the same answer. But who refuses to undo something may relent."""
        known = self.answers.get((id, op))
        if known is Outcome.SUCCESS or (known is not None and op == "do"):
            return known
        dice = random.Random(f"{self._kernel.seed} {id}")
        if op == "do":
            refused = dice.random() < REFUSED_SHARE
        else:
            self.grudges[id] += 1
            refused = self.grudges[id] <= dice.choice(GRUDGES)
        self.answers[id, op] = Outcome.EXPLICIT_FAIL if refused else Outcome.SUCCESS
        if not refused:
            self.effects.append((id, op))
        return self.answers[id, op]


class Course:
    """What a history says has become of the steps."""

    def __init__(self, id: str, body: Sequence, steps: list[tuple[object, ...]]) -> None:
        self.id = id
        self.body = body
        self.index = 0
        self.done: set[int] = set()  # ever
        self.undone: set[int] = set()
        self.skipped: list[int] = []
        self.failed_once = False  # whether a compensation was ever refused
        for _, source, event, target in steps:
            if source != target:
                self._follow(str(source), str(event), str(target))

    def _follow(self, source: str, event: str, target: str) -> None:
        self.failed_once |= target == COMPENSATION_FAILED
        if (source, event) == (RUNNING, SUCCESS):
            self.done.add(self.index)
            self.index += 1
        elif (source, event) == (COMPENSATING, SUCCESS):
            self.index -= 1
            self.undone.add(self.index)
        elif (source, event) == (COMPENSATION_FAILED, SKIP):
            self.index -= 1
            self.skipped.append(self.index)
        if self.index < 0 or self.index > len(self.body.steps):
            raise Violation(f"sequence {self.id} has come to step {self.index} of {len(self.body.steps)}")

    def entries(self, steps: set[int]) -> dict[str, EntryStep]:
        """Those of these steps that are entries, by key."""
        found = {f"{self.id}:{place}": self.body.steps[place] for place in steps}
        return {key: step for key, step in found.items() if isinstance(step, EntryStep)}


class SequenceOracle(RecordOracle):
    """What must be true of sequences."""

    machine = MACHINE
    # Two processes ask the depot to undo the same; it refuses one and relents to the other, whose answer is late: an
    # operator has to know that it is undone after all. A late refusal says nothing: another call had more luck.
    late = (LATE_SUCCESS,)

    def __init__(self, connection: sqlite3.Connection, depot: Depot, past: Oracle | None = None) -> None:
        super().__init__(connection, past)
        self._depot = depot
        self._paths = dict(self.db.execute("SELECT id, path FROM accounts").fetchall())

    def records(self) -> None:
        """The bodies and the ledger say what the histories say."""
        made: dict[str, EntryStep] = {}
        reversed_: dict[str, EntryStep] = {}
        for course in self.courses():
            made |= course.entries(course.done)
            reversed_ |= course.entries(course.undone)
        seqs = self._compare(SCOPE, made, back=False)
        self._compare(REVERSE, {str(seqs[key]): step for key, step in reversed_.items()}, back=True)

    def courses(self) -> list[Course]:
        """Every record, followed along its own history."""
        read = self.db.execute
        rows = read("SELECT number, id, state, version, transit, body FROM records ORDER BY number").fetchall()
        steps = self.steps()
        found = []
        for number, id, state, version, transit, text in rows:
            self.legal(number, id, steps[number], state, version)
            body = msgspec.json.decode(text, type=Sequence)
            course = Course(id, body, steps[number])
            said = (body.index, list(body.skipped), len(body.results))
            if said != (course.index, course.skipped, len(course.done)):
                raise Violation(f"sequence {id} says {said}, its history {course.index, course.skipped, course.done}")
            if transit:
                raise Violation(f"I4: sequence {id} owns posting {transit}")
            _check_end(state, course)
            found.append(course)
        return found

    def _compare(self, scope: str, expected: dict[str, EntryStep], *, back: bool) -> dict[str, int]:
        """Exactly these entries were booked, each with its step's accounts and amount; returns their numbers."""
        rows = {row[3]: row for row in self.envelopes.values() if row[2] == scope}
        if rows.keys() != expected.keys():
            differing = sorted(rows.keys() ^ expected.keys())
            raise Violation(f"{scope}: booked without its transition, or not booked with it: {differing}")
        for key, step in expected.items():
            (leg,) = decode_legs(rows[key][7])
            ends = (self._paths[leg.source], self._paths[leg.target], leg.minor)
            wanted = (step.source, step.target, int(step.amount))
            if ends != ((wanted[1], wanted[0], wanted[2]) if back else wanted):
                raise Violation(f"{scope} {key} moved {ends}, the step says {wanted}")
        return {key: row[0] for key, row in rows.items()}

    def ended(self) -> None:
        """Every sequence has ended or waits for a person, and the depot has done what the histories say."""
        states = {id: (state, due) for id, state, due in self.db.execute("SELECT id, state, due FROM records")}
        effects = Counter(self._depot.effects)
        if effects and max(effects.values()) > 1:
            raise Violation("I7: something happened twice at the depot")
        for course in self.courses():
            state, due = states[course.id]
            if state != COMPENSATION_FAILED and (due is not None or state not in ENDS):
                raise Violation(f"sequence {course.id} is {state}, due {due}")
            for place, step in enumerate(course.body.steps):
                self._happened(course, place, step, effects)
        self._told()

    def _happened(self, course: Course, place: int, step: StoredStep, effects: Counter[tuple[str, str]]) -> None:
        if not isinstance(step, OwnCall):
            return
        did = tuple(effects.pop((f"{course.id}:{place}:{op}", op), 0) for op in ("do", "undo"))
        allowed = [(0, 0)]
        if place in course.undone:
            allowed = [(1, 1)]
        elif place in course.skipped or (place in course.done and place == course.index - 1):
            allowed = [(1, 0), (1, 1)]  # given up, or refused until now; a call that was late may have done it
        elif place in course.done:
            allowed = [(1, 0)]
        if did not in allowed or (did == (1, 1) and course.body.refused is None):
            raise Violation(f"step {place} of {course.id}: done and undone {did} times, {allowed} would be right")

    def _told(self) -> None:
        """An alert was raised for every refused compensation, and for nothing else but steps that were missing."""
        found = self.db.execute(
            "SELECT r.id, a.reason, a.message FROM alerts a LEFT JOIN records r ON r.number = a.record "
            "WHERE a.severity = 'critical'"
        ).fetchall()
        heard = self._heard_late()
        if wrong := [a for a in found if a[1] not in WORTH_AN_ALERT and (a[1] != CONTRADICTION or a[0] not in heard)]:
            raise Violation(f"alerts that should not be: {wrong}")
        if silent := heard - {id for id, reason, _ in found if reason == CONTRADICTION}:
            raise Violation(f"undone after it was refused, without an alert: {sorted(silent)}")
        told = {id for id, reason, _ in found if reason == COMPENSATION_ALERT}
        refused = {course.id for course in self.courses() if course.failed_once}
        if refused - told:
            raise Violation(f"compensations that were refused without an alert: {sorted(refused - told)}")

    def _heard_late(self) -> set[str]:
        """Sequences of which a late success was heard: of a compensation that had been refused, and nothing else."""
        heard = set()
        for id, evidence in self.db.execute(
            "SELECT r.id, t.evidence FROM transitions t JOIN records r ON r.number = t.record WHERE t.event = ?",
            (LATE_SUCCESS,),
        ):
            if (of := msgspec.json.decode(evidence)["late"]["of"]) != COMPENSATING:
                raise Violation(f"sequence {id}: a late success of {of}")
            heard.add(id)
        return heard


def _check_end(state: str, course: Course) -> None:
    """An end says what has become of the steps."""
    whole = course.index == len(course.body.steps)
    right = {
        COMPLETED: whole and not course.undone and not course.skipped,
        FAILED: course.index == 0 and not course.skipped and course.undone == course.done and not whole,
        FAILED_IN_PART: course.index == 0 and bool(course.skipped),
    }
    if not right.get(state, True):
        raise Violation(f"sequence {course.id} is {state}; done {course.done}, undone {course.undone}")
