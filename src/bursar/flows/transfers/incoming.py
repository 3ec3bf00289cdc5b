"""Money that has arrived from outside: booked once per reference, whatever has become of its account (T35, T44).

To a frozen account it is booked all the same; what has arrived for a closed one is booked in `suspense:deposits`, and
an alert says so. A reference is one deposit, whichever way it came: the first request under it is remembered with who
made it, and an unlike second one is refused. Keys live in a scope of their own, which no entry from outside can reach
(L19).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from bursar.engine import Engine
from bursar.flows.transfers.checks import Code, TransferRefused
from bursar.flows.transfers.request import EXTERNAL, SUSPENSE_DEPOSITS, funding_account
from bursar.ledger import Ledger
from bursar.model.accounts import NoOverdraft, SystemAccount
from bursar.model.entries import Intent, Leg, encode_metadata
from bursar.model.errors import AccountClosed, Conflict, IdempotencyKeyReused, UnknownAccount
from bursar.model.records import OperationResult, Record
from bursar.writer import Change, ChangeResult, Operation

T = TypeVar("T")

DEPOSITS = "deposits"  # the scope of keys and remembered requests
CREATE = "create"
CLOSED = "account closed"  # the reason of the alert


class Deposit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has arrived, and for whom; the body of its record, if it waits for a second person. What was asked never
    changes; where it was booked is added."""

    user: int
    asset: str
    amount: str  # smallest units
    reference: str
    asked_by: str
    account: str = ""  # where it is booked

    @property
    def fingerprint(self) -> str:
        """Two requests under one reference are the same if these are."""
        return f"{self.user}:{self.asset}:{self.amount}"

    def intent(self, account: str) -> Intent:
        """Its entry."""
        return Intent(
            scope=DEPOSITS,
            key=self.reference,
            legs=(Leg(EXTERNAL, account, self.asset, int(self.amount)),),
            metadata=encode_metadata({"reference": self.reference, "actor": self.asked_by}),
            outside=True,
        )

    def operation(self, **detail: str) -> Operation:
        """That it was asked for, and by whom."""
        text = msgspec.json.encode({"asked_by": self.asked_by, **detail}).decode()
        return Operation(scope=DEPOSITS, id=self.reference, op=CREATE, fingerprint=self.fingerprint, detail=text)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of the first request."""

    asked_by: str
    account: str = ""  # where it is booked
    record: str = ""  # if it waits, or waited, for a second person

    def of(self, deposit: Deposit) -> Deposit:
        """The deposit as the first request had it."""
        return msgspec.structs.replace(deposit, asked_by=self.asked_by, account=self.account)


async def book(engine: Engine, ledger: Ledger, deposit: Deposit) -> Deposit:
    """Book it now, unless that was done before."""

    def write(account: str) -> Awaitable[ChangeResult]:
        asked = deposit.operation(account=account, record="")
        return ledger.writer.apply(Change((deposit.intent(account),), operation=asked))

    try:
        done = await book_somewhere(engine, ledger, deposit, None, write)
    except IdempotencyKeyReused:
        raise used_before(deposit.reference) from None
    assert done.operation is not None
    first = asked_of(done.operation)
    if first.record:
        raise Conflict(f"deposit {deposit.reference} waits for a second person", 1)
    return first.of(deposit)


async def book_somewhere(
    engine: Engine, ledger: Ledger, deposit: Deposit, record: Record | None, write: Callable[[str], Awaitable[T]]
) -> T:
    """Book it with `write`: in the user's account, which the first deposit makes; or in suspense if that is closed."""
    account = funding_account(deposit.user)
    while True:
        try:
            return await write(account)
        except UnknownAccount as unknown:
            if unknown.account == EXTERNAL:  # `prepare` makes it
                raise
            policy = SystemAccount() if unknown.account == SUSPENSE_DEPOSITS else NoOverdraft()
            await ledger.create_account(unknown.account, policy=policy)
        except AccountClosed:
            await _alert_closed(engine, deposit, record)
            account = SUSPENSE_DEPOSITS


def used_before(reference: str) -> TransferRefused:
    """Another deposit is booked under that reference."""
    why = f"reference {reference} was used before, for another deposit, which is booked"
    return TransferRefused(Code.DUPLICATE_REQUEST, why)


def asked_of(remembered: OperationResult) -> Asked:
    """What a remembered request says."""
    return msgspec.json.decode(remembered.detail, type=Asked)


async def _alert_closed(engine: Engine, deposit: Deposit, record: Record | None) -> None:
    """Say that a deposit goes to suspense, before it does: it must not be booked there without a word."""
    message = (
        f"deposit {deposit.reference} of {deposit.amount} smallest units of {deposit.asset} is for user "
        f"{deposit.user}, whose funding account is closed; it is booked in {SUSPENSE_DEPOSITS}: find out whose it is"
    )
    reason = CLOSED if record is not None else f"{CLOSED}: deposit {deposit.reference}"
    await engine.alert(record, reason, "critical", message)
