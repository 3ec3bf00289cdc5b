"""The rules of the trading core, pure and written once: operations, bounds, answers, and what each answer allows.

The checks of a request (flows/transfers/checks), both adapters (flows/transfers/rails), the client and the core itself
(state) each call what is here, because no layer relies on the one above it.

An answer is one byte. `OK` is an effect that is on disk. Below `UNSURE` stand the business refusals: each is on disk
too, remembered for its (id, operation), and will be the answer for ever. From `UNSURE` on nothing was written, so
nothing is promised: the caller's record stays where it is (`UNKNOWN`), and an operator may have to look.

`REFUSALS` is the written list of T26, of cores and of the ledger's end: these codes alone are `EXPLICIT_FAIL`, because
they alone may lead to money being given back.

Not here: how an operation is decided (state), how an answer travels (protocol).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from bursar.model.outcome import Outcome

U64_MAX: Final = 2**64 - 1
SAFETY_FACTOR: Final = 2  # a transfer stays below 2^64 divided by this (T37)
ID_MAX: Final = 2**63 - 1  # a Snowflake is a positive signed 64-bit integer
ASSET_CHARACTERS_MAX: Final = 16
ASSETS_MAX: Final = 65_535
LEDGER_CHARACTERS_MAX: Final = 128  # of a ledger's identity
IDENTITY_DIGITS: Final = 32  # of a core's identity, hexadecimal
PREFIX: Final = "sr-"


class Op(IntEnum):
    """What a core does, each at most once per id. The numbers are on disk and on the wire: never change one."""

    DEPOSIT = 1  # available grows
    WITHDRAW = 2  # available shrinks
    REFUND = 3  # a withdraw is given back, whole
    LOCK = 4  # available → frozen
    UNLOCK = 5  # frozen → available
    SETTLE = 6  # frozen of one user → available of another
    CANCEL = 7  # what has not happened never will; on the wire only: it is kept as that operation's refusal


REMEMBERED: Final = (Op.DEPOSIT, Op.WITHDRAW, Op.REFUND, Op.LOCK, Op.UNLOCK, Op.SETTLE)
# A refund is never made impossible: what was taken out can always come back (T15, T35).
CANCELLABLE: Final = frozenset({Op.DEPOSIT, Op.WITHDRAW, Op.LOCK, Op.UNLOCK, Op.SETTLE})


class Status(IntEnum):
    """A user's account in this core (T30). Numbers as in specification 000."""

    ACTIVE = 1
    FROZEN = 2
    DISABLED = 3


UNSURE: Final = 128


class Code(IntEnum):
    """What the core answers. On disk and on the wire: never change a number."""

    OK = 0

    # Business refusals. Each is remembered.
    INSUFFICIENT_BALANCE = 1
    INSUFFICIENT_FROZEN = 2
    ACCOUNT_FROZEN = 3
    ACCOUNT_DISABLED = 4
    INVALID_AMOUNT = 5
    INVALID_ASSET = 6
    OVERFLOW = 7  # what is held and what could still be refunded must fit 64 bits together (T31)
    SAME_ACCOUNT = 8
    CANCELLED = 9  # by `cancel`, before it happened (T34)

    # Nothing was written, nothing is promised.
    MISMATCH = UNSURE  # the id stands for other parameters: a caller has a bug, and no answer would be true for both
    PRUNED = UNSURE + 1  # pruned: it may have happened or not, it will not happen now (T32)
    WITHDRAW_NOT_FOUND = UNSURE + 2  # a refund without its withdraw (T29); not remembered, since T31
    NOT_FOUND = UNSURE + 3  # a look-up of what is not remembered
    BAD_OPERATION = UNSURE + 4  # no such operation, or one that cannot be cancelled, or floors out of order
    NO_ROOM = UNSURE + 5  # a late refund does not fit in 64 bits now; it is executed once there is room (T31)
    FLOOR_TOO_HIGH = UNSURE + 6  # a floor above every id there ever was: nothing was raised (T32)


CORE_REFUSALS: Final = frozenset(code for code in Code if 0 < code < UNSURE)
# What the ledger refuses by itself: codes of its errors (bursar.model.errors).
LEDGER_REFUSALS: Final = frozenset(
    {
        "INSUFFICIENT_BALANCE",
        "BALANCE_NOT_GUARDED",
        "OVERDRAFT_FLOOR",
        "ACCOUNT_NOT_FOUND",
        "ACCOUNT_FROZEN",
        "ACCOUNT_CLOSED",
        "ASSET_SUSPENDED",
        "BOOK_REFUSES",
    }
)
GIVEN_BACK: Final = "GIVEN_BACK"  # a core took it and gave it back, and the database was restored to before that
REFUSALS: Final = frozenset(code.name for code in CORE_REFUSALS) | LEDGER_REFUSALS | {GIVEN_BACK}
STATUS_REFUSALS: Final = {Status.FROZEN: Code.ACCOUNT_FROZEN, Status.DISABLED: Code.ACCOUNT_DISABLED}


def outcome_of(code: int) -> Outcome:
    """What an answer allows. A number that this version does not know is not on the list, so it is `UNKNOWN`."""
    if code == Code.OK:
        return Outcome.SUCCESS
    if code in CORE_REFUSALS:
        return Outcome.EXPLICIT_FAIL
    return Outcome.UNKNOWN


def amount_refusal(amount: int, safety_factor: int = 1) -> Code | None:
    """Why a core can't take an amount, in smallest units; None: it can."""
    if amount <= 0:
        return Code.INVALID_AMOUNT
    return Code.OVERFLOW if amount > U64_MAX // safety_factor else None


def is_u64(value: object) -> bool:
    """Whether a value can be on the wire and in a log: an unsigned integer of 64 bits."""
    return type(value) is int and 0 <= value <= U64_MAX


def code_name(code: int) -> str:
    """An answer as text."""
    try:
        return Code(code).name
    except ValueError:
        return f"CODE_{code}"


def operation_id(req_id: str | int) -> int:
    """The integer inside `sr-…`: what the core knows an operation by, so that floors compare."""
    if isinstance(req_id, str):
        digits = req_id.removeprefix(PREFIX)
        # Only the one way to write a number: "007" and "7" must not be the same operation under two names.
        if not (req_id.startswith(PREFIX) and digits.isascii() and digits.isdigit()) or digits[0] == "0":
            raise ValueError(f"{req_id!r} is not {PREFIX} followed by a Snowflake")
        req_id = int(digits)
    if not 0 < req_id <= ID_MAX:
        raise ValueError(f"{req_id} is not a Snowflake: 1 to 2^63 - 1")
    return req_id


def is_identity(text: str) -> bool:
    """Whether a text may be a core's identity."""
    return len(text) == IDENTITY_DIGITS and all(digit in "0123456789abcdef" for digit in text)


def is_ledger(text: str) -> bool:
    """Whether a text may be a ledger's identity: printable ASCII without blanks, so that operators can compare it."""
    return 0 < len(text) <= LEDGER_CHARACTERS_MAX and all("!" <= character <= "~" for character in text)


def is_asset(code: str) -> bool:
    """Whether a text may name an asset: letters, digits, dot, dash, underscore."""
    if not 0 < len(code) <= ASSET_CHARACTERS_MAX or not code.isascii():
        return False
    return code.replace(".", "").replace("-", "").replace("_", "").isalnum()
