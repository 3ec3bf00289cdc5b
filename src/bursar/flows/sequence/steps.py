"""Steps: what a caller writes, what is stored of it, and what his own steps get to see.

A step is data. `Pay`, `Deposit` and `Withdraw` are entries of the ledger; `Own` is a name, looked up among the caller's
own steps each time it is run, with arguments that are JSON. So a sequence survives every restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from bursar.engine import Answer
from bursar.model.accounts import MAIN_BOOK
from bursar.model.money import Amount


class Pay(msgspec.Struct, frozen=True):
    """Value moves between two accounts."""

    source: str
    target: str
    asset: str
    amount: Amount
    book: str = MAIN_BOOK


class Deposit(msgspec.Struct, frozen=True):
    """Value comes in from an external account."""

    external: str
    account: str
    asset: str
    amount: Amount
    book: str = MAIN_BOOK


class Withdraw(msgspec.Struct, frozen=True):
    """Value leaves to an external account."""

    account: str
    external: str
    asset: str
    amount: Amount
    book: str = MAIN_BOOK


class Own(msgspec.Struct, frozen=True):
    """A step of the caller's own, by the name under which it is registered."""

    name: str
    arguments: Mapping[str, Any] = {}  # JSON


Step = Pay | Deposit | Withdraw | Own


# --- the caller's own ----------------------------------------------------------------------------------------------


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What an own step gets to see when it is run, or undone."""

    key: str  # of this operation: asked again under it, the other side must give its first answer
    undoes: str = ""  # the key under which it was done, if this is to undo it
    sequence: str  # the record's id
    step: int  # its place, from 0
    arguments: dict[str, Any]
    results: tuple[dict[str, Any], ...]  # the evidence of each step before; its own, too, to undo it


class OwnStep(Protocol):
    """A step of the caller's own. Each of the two may be called any number of times, also by two workers at once.

    Only `EXPLICIT_FAIL` means that it did not happen and never will; whatever is not known is asked again, for ever.
    """

    def do(self, call: Call) -> Awaitable[Answer]:
        """Make it happen, once per key."""

    def undo(self, call: Call) -> Awaitable[Answer]:
        """Undo what was done, once per key. Refused: a person has to decide."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An own step out of functions."""

    do: Callable[[Call], Awaitable[Answer]]
    undo: Callable[[Call], Awaitable[Answer]]
    # Make sure that it never happens: EXPLICIT_FAIL; or SUCCESS: it has happened. Without it no failure can be forced.
    cancel: Callable[[Call], Awaitable[Answer]] | None = None


# --- the record's body ---------------------------------------------------------------------------------------------


class EntryStep(msgspec.Struct, frozen=True, kw_only=True, tag="entry"):
    """An entry, checked, in smallest units."""

    kind: str  # pay, deposit, withdraw
    source: str
    target: str
    asset: str
    amount: str  # smallest units, as text
    units: str  # the same to be shown, in units of the asset
    book: str = MAIN_BOOK

    def __str__(self) -> str:
        return f"{self.kind} {self.units} {self.asset} from {self.source} to {self.target}"


class OwnCall(msgspec.Struct, frozen=True, kw_only=True, tag="own"):
    """A step of the caller's own."""

    name: str
    arguments: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"own step {self.name}"


StoredStep = EntryStep | OwnCall


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Which step was refused, and in which words."""

    step: int
    why: str


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a sequence's record. The steps never change; the rest moves with the arrows."""

    key: str = ""  # the caller's
    steps: tuple[StoredStep, ...]
    index: int = 0  # so many are done, and not undone
    results: tuple[dict[str, Any], ...] = ()  # of all that were done
    refused: Refused | None = None  # why it turned round
    stuck: Refused | None = None  # why a compensation waits for a person
    skipped: tuple[int, ...] = ()  # compensations that two operators have given up
