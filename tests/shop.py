"""The other side of own steps, and a program with sequences, for every suite that tests them.

The shop ships and books rooms: idempotent by key, as every rail must be; it remembers what it answered. A test scripts
what it says, and asks what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from tests.builders import Place

from bursar.engine import Answer
from bursar.flows.sequence import Call, Own, Pair, Pay, Sequences, SequenceView, Withdraw
from bursar.flows.sequence.steps import Step
from bursar.ledger import Ledger
from bursar.model.outcome import Outcome
from bursar.model.retry import Retry
from bursar.ports import Ports

SOON = Retry(first_s=0.01, cap_s=0.02)
LATER = Retry(first_s=500, cap_s=500)
PATIENCE_S = 30.0
OPS = ("do", "undo")

THREE: list[Step] = [
    Pay("alice", "bob", "USDT", "10"),
    Own("ship", {"book": "Dune"}),
    Withdraw("bob", "bank", "USDT", "4"),
]


class Shop:
    """What it is told to say, what it was asked, and what it did."""

    def __init__(self, **says: list[Any]) -> None:
        self.says = says  # per "ship_do" and so on, in order: an outcome, an answer, an error, something to await
        self.refuses: set[str] = set()  # "ship_do" and so on: explicitly, and for ever
        self.loses: set[str] = set()  # it happens, and the first reply is lost
        self.calls: list[Call] = []
        self.effects: Counter[str] = Counter()  # by "ship_do" and so on
        self.keys: Counter[str] = Counter()  # effects by key
        self.cancels: Outcome | None = None  # what it says to a cancel; None: it can't
        self._answered: dict[str, Answer] = {}

    def own(self, *names: str) -> dict[str, Pair]:
        """Its steps, by name."""
        return {name: self._pair(name) for name in names or ("ship", "room")}

    def _pair(self, name: str) -> Pair:
        cancel = None if self.cancels is None else self._cancel
        return Pair(do=self._op(f"{name}_do"), undo=self._op(f"{name}_undo"), cancel=cancel)

    async def _cancel(self, call: Call) -> Answer:
        assert self.cancels is not None
        self.calls.append(call)
        return Answer(outcome=self.cancels, code="CANCELLED")

    def _op(self, op: str) -> Callable[[Call], Awaitable[Answer]]:
        async def ask(call: Call) -> Answer:
            self.calls.append(call)
            if call.key in self._answered:
                return self._answered[call.key]
            if op in self.refuses:
                return Answer(outcome=Outcome.EXPLICIT_FAIL, code="SOLD_OUT", message="not today")
            script = self.says.get(op, [])
            said = script.pop(0) if script else Outcome.SUCCESS
            if callable(said):
                said = await said()
            if isinstance(said, BaseException):
                raise said
            if isinstance(said, Outcome):
                said = Answer(outcome=said, evidence={"parcel": f"{op} {call.step}"})
            if isinstance(said, Answer) and said.outcome is Outcome.SUCCESS:
                self.effects[op] += 1
                self.keys[call.key] += 1
                self._answered[call.key] = said
            if op in self.loses:
                self.loses.discard(op)
                raise ConnectionResetError("the reply is lost")
            return cast("Answer", said)  # a test may have it return anything

        return ask


@dataclass(frozen=True)
class Program:
    """One process that knows sequences."""

    sequences: Sequences
    ledger: Ledger

    async def start(self, steps: list[Step], key: str = "order-7", wait_s: float = PATIENCE_S) -> SequenceView:
        return await self.sequences.start(steps, key=key, wait_s=wait_s)

    async def path(self, id: str) -> list[str]:
        """Every transition, without those of calls that had no answer."""
        record = await self.sequences.engine.get("sequence", id)
        assert record is not None
        history = await self.sequences.engine.store.read.records.history(record.number)
        assert [t.version for t in history] == list(range(1, len(history) + 1)), "every transition once, in order"
        return [f"{t.source}-{t.event}>{t.target}" for t in history if t.source != t.target]

    async def evidence(self, id: str) -> list[dict[str, Any]]:
        record = await self.sequences.engine.get("sequence", id)
        assert record is not None
        history = await self.sequences.engine.store.read.records.history(record.number)
        return [msgspec.json.decode(t.evidence) for t in history]

    async def until(self, id: str, *states: str) -> SequenceView:
        """Wait until it is in one of these states."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.sequences.get(id)
                if found.state in states:
                    return found
                await asyncio.sleep(0.005)

    async def balances(self) -> list[str]:
        """What alice, bob and carol have, in whole USDT."""
        found = [(await self.ledger.balance(path, "USDT")).decimal for path in ("alice", "bob", "carol")]
        return [str(amount.normalize() + 0) if amount else "0" for amount in found]

    async def reasons(self) -> list[tuple[str, str]]:
        """Open alerts: severity and reason."""
        return [(alert.severity, alert.reason) for alert in await self.ledger.store.read.alerts.open()]

    async def rows(self) -> list[int]:
        """How many records, transitions, remembered requests and envelopes there are."""
        read = self.ledger.store.read
        records = await read.records.list("sequence", limit=1000)
        transitions = sum([len(await read.records.history(record.number)) for record in records])
        async with self.ledger.store.snapshot() as tables:
            return [
                len(records),
                transitions,
                await tables.checks.operations(),
                (await tables.checks.counts())["envelopes"],
            ]


def states(view: SequenceView) -> list[str]:
    return [step.state.value for step in view.steps]


@contextlib.asynccontextmanager
async def program(
    place: Place,
    shop: Shop,
    *,
    own: dict[str, Any] | None = None,
    worker: str = "local",
    retry: Retry = SOON,
    ports: Ports | None = None,
    lease_s: float = 30.0,
    call_timeout_s: float = 10.0,
) -> AsyncIterator[Program]:
    """A program with sequences and no worker. Several at once on one place are several processes at once."""
    async with place.bursar(ports) as bursar:
        sequences = Sequences(
            bursar.ledger,
            own=shop.own() if own is None else own,
            worker=worker,
            retry=retry,
            lease_s=lease_s,
            call_timeout_s=call_timeout_s,
        )
        try:
            yield Program(sequences, bursar.ledger)
        finally:
            await sequences.engine.finish(0)
