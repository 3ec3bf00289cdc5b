"""What is refused before anything is written, and why. The order, in which the first that fails names the refusal:

 1. there are steps (EMPTY), not too many (TOO_MANY_STEPS), and each is one (NOT_A_STEP)
 2. entries: what the ledger itself refuses whatever its state (INVALID_ASSET, INVALID_AMOUNT, PRECISION_OVERFLOW,
    SAME_ACCOUNT, INVALID_NAME and the like); own steps: arguments that are JSON and not too long (INVALID_ARGUMENTS)
 3. a key that is known: the first sequence is the answer, whatever has changed since (T12)
 4. accounts and books exist (ACCOUNT_NOT_FOUND, BOOK_NOT_FOUND) and are not closed for ever (ACCOUNT_CLOSED)
 5. own steps are registered here (UNKNOWN_STEP)

Balances and freezes are not looked at: they are a step's affair when its turn has come.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from bursar.flows.sequence.steps import Deposit, EntryStep, Own, OwnCall, Pay, StoredStep, Withdraw
from bursar.model.accounts import Account, AccountStatus
from bursar.model.entries import Entry, check_key, deposit, intend, pay, withdraw
from bursar.model.errors import AccountClosed, BursarError, Refusal, UnknownAccount, UnknownBook
from bursar.model.money import Asset

STEPS_MAX = 32
ARGUMENTS_BYTES_MAX = 8_192
EMPTY, TOO_MANY_STEPS, NOT_A_STEP = "EMPTY", "TOO_MANY_STEPS", "NOT_A_STEP"
INVALID_ARGUMENTS, UNKNOWN_STEP = "INVALID_ARGUMENTS", "UNKNOWN_STEP"


class SequenceRefused(Refusal):
    """A sequence is refused before anything is written."""

    reason: str
    why: str
    code = "SEQUENCE_REFUSED"
    text = "the sequence is refused: {why}"


class StepRefused(SequenceRefused):
    """One step of a sequence is refused before anything is written. `step` counts from 0."""

    step: int
    code = "STEP_REFUSED"
    text = "step {step} of the sequence is refused: {why}"

    @property
    def facts(self) -> dict[str, Any]:
        """Its own, and those of what the ledger has against it."""
        cause = self.__cause__
        return (cause.facts if isinstance(cause, BursarError) else {}) | super().facts


def define(steps: object, assets: Mapping[str, Asset]) -> tuple[StoredStep, ...]:
    """Checks 1 and 2: what can be said without looking at an account. Returns the steps as they are stored."""
    if not isinstance(steps, list | tuple):
        raise SequenceRefused(NOT_A_STEP, f"a list of steps is expected, not {type(steps).__name__}")
    if not steps:
        raise SequenceRefused(EMPTY, "it has no steps")
    if len(steps) > STEPS_MAX:
        raise SequenceRefused(TOO_MANY_STEPS, f"it has {len(steps)} steps, at most {STEPS_MAX} are allowed")
    return tuple(_step(place, step, assets) for place, step in enumerate(steps))


def check_ground(
    steps: tuple[StoredStep, ...], heads: Mapping[str, Account], books: Collection[str], own: Collection[str]
) -> None:
    """Checks 4 and 5: what has to be there."""
    for place, step in enumerate(steps):
        if isinstance(step, OwnCall):
            if step.name not in own:
                known = ", ".join(sorted(own)) or "none"
                why = f"no own step {step.name!r} is registered here; known: {known}"
                raise StepRefused(UNKNOWN_STEP, why, place)
            continue
        if step.book not in books:
            raise _refused(place, UnknownBook(step.book))
        for path in (step.source, step.target):
            head = heads.get(path)
            if head is None:
                raise _refused(place, UnknownAccount(path))
            if head.status is AccountStatus.CLOSED:
                raise _refused(place, AccountClosed(path))


def _step(place: int, step: object, assets: Mapping[str, Asset]) -> StoredStep:
    match step:
        case Pay(source, target, asset, amount, book):
            return _entry(place, "pay", pay(source, target, asset, amount, book=book), assets)
        case Deposit(external, account, asset, amount, book):
            return _entry(place, "deposit", deposit(external, account, asset, amount, book=book), assets)
        case Withdraw(account, external, asset, amount, book):
            return _entry(place, "withdraw", withdraw(account, external, asset, amount, book=book), assets)
        case Own(name, arguments):
            return _own(place, name, arguments)
        case _:
            why = f"Pay, Deposit, Withdraw or Own is expected, not {type(step).__name__}"
            raise StepRefused(NOT_A_STEP, why, place)


def _entry(place: int, kind: str, entry: Entry, assets: Mapping[str, Asset]) -> EntryStep:
    try:
        intent = intend(entry, assets, scope="", token=str)
    except Refusal as refusal:
        raise _refused(place, refusal) from refusal
    (leg,) = intent.legs
    return EntryStep(
        kind=kind,
        source=leg.source,
        target=leg.target,
        asset=leg.asset,
        amount=str(leg.amount),
        units=str(assets[leg.asset].of_minor(leg.amount)),
        book=intent.book,
    )


def _own(place: int, name: str, arguments: object) -> OwnCall:
    try:
        check_key(name)
    except Refusal as refusal:
        raise _refused(place, refusal) from refusal
    if not isinstance(arguments, Mapping):
        raise StepRefused(INVALID_ARGUMENTS, f"arguments by name are expected, not {type(arguments).__name__}", place)
    try:
        text = msgspec.json.encode(dict(arguments))
        found = msgspec.json.decode(text, type=dict[str, Any])
        same = found == arguments
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StepRefused(INVALID_ARGUMENTS, f"its arguments are not JSON: {error}", place) from None
    if not same:  # a date, a tuple, NaN: the step would see something else than was asked for
        raise StepRefused(INVALID_ARGUMENTS, "its arguments are more than JSON can say", place)
    if len(text) > ARGUMENTS_BYTES_MAX:
        why = f"its arguments have {len(text)} bytes, at most {ARGUMENTS_BYTES_MAX} are allowed"
        raise StepRefused(INVALID_ARGUMENTS, why, place)
    return OwnCall(name=name, arguments=found)


def _refused(place: int, refusal: Refusal) -> StepRefused:
    found = StepRefused(refusal.code, str(refusal), place)
    found.__cause__ = refusal
    return found
