"""Accounts: who owns postings, under which policy, in which state.

An account is a path (`user:1001:funding`). A child is a full account of its own; nothing is inherited and nothing is
summed unless asked. Accounts are never modified: freeze, close or a new policy append a version. An entry never bumps
a version, because balances are derived from postings. The hash of a version is what a *pin* compares.
"""

from __future__ import annotations

import hashlib
import re
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cached_property, lru_cache

import msgspec

from bursar.model.errors import AccountClosed, AccountFrozen, InvalidEntry, InvalidName, PrecisionOverflow
from bursar.model.money import Asset, _from_decimal, len16

PATH_LENGTH_MAX = 128
NAME_LENGTH_MAX = 64
HELD = "held"  # the account where held money sits; only holds move it, each its own posting
TRANSIT = "transit"  # and all below it: money in flight; only flows move it, each its own posting (T36)
MAIN_BOOK = "main"

FUNDING_ENDS = "user"  # `user:1001:funding` is the funding account of user 1001, whose other accounts are at cores
CORES = "trading"  # and all below it: the ledger's side of a trading core
# Where flows book what has happened outside, which is never refused (T35): these stay open.
OF_FLOWS = frozenset(
    {"trading:spot", "trading:future", "trading:margin", "suspense:transfers", "suspense:deposits", "external:deposits"}
)

_FUNDING = re.compile(rf"{FUNDING_ENDS}:([1-9][0-9]*):funding")
_PATH = re.compile(r"[a-z0-9_-]+(?::[a-z0-9_-]+)*")
_NAME = re.compile(r"[a-z0-9_-]+")
_FLOOR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")  # ASCII digits only


class AccountStatus(StrEnum):
    """Whether an account may pay and be paid."""

    ACTIVE = "active"
    FROZEN = "frozen"
    CLOSED = "closed"


class NoOverdraft(msgspec.Struct, frozen=True, tag="no_overdraft", tag_field="policy"):
    """Pays only with what it has. Guarded by the postings themselves: only a live one can be spent."""


class CappedOverdraft(msgspec.Struct, frozen=True, tag="capped_overdraft", tag_field="policy"):
    """May go negative in one asset, down to `floor` (text in units of the asset, such as "-500.00")."""

    floor: str
    asset: str


class UncappedOverdraft(msgspec.Struct, frozen=True, tag="uncapped_overdraft", tag_field="policy"):
    """May go negative without bound."""


class SystemAccount(msgspec.Struct, frozen=True, tag="system", tag_field="policy"):
    """Ours: fees, transit, markets. Pays with negative postings and never selects."""


class ExternalAccount(msgspec.Struct, frozen=True, tag="external", tag_field="policy"):
    """The outside world: carries the other side of what came in. Pays with negative postings and never selects."""


Policy = NoOverdraft | CappedOverdraft | UncappedOverdraft | SystemAccount | ExternalAccount

_policies: msgspec.json.Decoder[Policy] = msgspec.json.Decoder(Policy)


def encode_policy(policy: Policy) -> str:
    """The policy as stored."""
    return msgspec.json.encode(policy).decode()


def decode_policy(text: str) -> Policy:
    """The policy as read back."""
    return _policies.decode(text)


class Account(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of an account. The newest version is its head."""

    id: int
    path: str
    version: int = 1
    policy: Policy = NoOverdraft()
    status: AccountStatus = AccountStatus.ACTIVE
    book: str = ""  # if set, only entries of this book may touch the account

    @cached_property
    def snapshot(self) -> bytes:
        """Hash of this version: what pins name. Independent of the row number."""
        return hashlib.sha256(hashlib.sha256(self.canonical).digest()).digest()

    @cached_property
    def canonical(self) -> bytes:
        """Version prefix, then every field with its length in front."""
        parts = (self.path, str(self.version), encode_policy(self.policy), self.status.value, self.book)
        return b"\x01" + b"".join(len16(part) for part in parts)

    @cached_property
    def path_bytes(self) -> bytes:
        """The path as it stands in canonical bytes; kept because every envelope repeats it."""
        return len16(self.path)

    @cached_property
    def pin_bytes(self) -> bytes:
        """Path and snapshot: this version as an envelope pins it."""
        return self.path_bytes + self.snapshot

    @cached_property
    def pays_from_postings(self) -> bool:
        """Whether it pays with postings it owns. System and external accounts never look for any."""
        return not isinstance(self.policy, SystemAccount | ExternalAccount)

    @cached_property
    def capped(self) -> bool:
        """Whether a guarded balance enforces its floor."""
        return isinstance(self.policy, CappedOverdraft)

    @cached_property
    def no_overdraft(self) -> bool:
        """Whether it may own no negative posting of any asset."""
        return isinstance(self.policy, NoOverdraft)

    def may_owe(self, asset: Asset) -> bool:
        """Whether it may own a negative posting of the asset."""
        match self.policy:
            case NoOverdraft():
                return False
            case CappedOverdraft(asset=only):
                return asset.code == only
            case _:
                return True

    def floor(self, asset: Asset) -> int | None:
        """The lowest balance allowed where that needs a lock to guard it (capped overdraft), else None."""
        if isinstance(self.policy, CappedOverdraft) and self.policy.asset == asset.code:
            return floor_minor(self.policy.floor, asset.code, asset.precision)
        return None


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """A close that has frozen an account and has not ended: it is under way, or its process has died."""

    path: str
    token: str  # of the close; a later one takes the freeze over under its own
    age_us: int = 0  # since it began


def changed(
    head: Account, closing: Closing | None, *, status: AccountStatus | None = None, policy: Policy | None = None
) -> Account | None:
    """The version that a change appends to this head; None if it changes nothing.

    To freeze an account that only a close has frozen is a change: the close lifts its own freeze when it is refused,
    and a freeze that left no trace would go with it.
    """
    new_policy, new_status = policy or head.policy, status or head.status
    takes_over = status is AccountStatus.FROZEN and closing is not None
    if (new_policy, new_status) == (head.policy, head.status) and not takes_over:
        return None
    return msgspec.structs.replace(head, version=head.version + 1, policy=new_policy, status=new_status)


def close_may_freeze(head: Account, closing: Closing | None) -> bool:
    """Whether a close that freezes this account now may lift that freeze: it is active, or only another close has
    frozen it. A close never lifts an operator's freeze."""
    return head.status is AccountStatus.ACTIVE or closing is not None


def lifted(head: Account | None, closing: Closing | None, token: str) -> Account | None:
    """The version by which the close of this token lifts its freeze; None if the freeze is not its own any more."""
    if head is None or head.status is not AccountStatus.FROZEN or closing is None or closing.token != token:
        return None
    return changed(head, closing, status=AccountStatus.ACTIVE)


def check_active(account: Account) -> None:
    """An account that is to pay or be paid must be active."""
    if account.status is AccountStatus.CLOSED:
        raise AccountClosed(account.path)
    if account.status is not AccountStatus.ACTIVE:
        raise AccountFrozen(account.path)


def check_policy(policy: Policy) -> Policy:
    """The same policy, or a refusal: what is stored must be read again for ever."""
    if not isinstance(policy, Policy):
        raise InvalidName("policy", str(policy)[:NAME_LENGTH_MAX], "one of the five, such as NoOverdraft()")
    if isinstance(policy, CappedOverdraft):
        if type(policy.floor) is not str or not _FLOOR.fullmatch(policy.floor):
            raise InvalidName("floor", str(policy.floor)[:NAME_LENGTH_MAX], 'plain text such as "-500.00"')
        if type(policy.asset) is not str:
            raise InvalidName("asset code", str(policy.asset)[:NAME_LENGTH_MAX], "text is expected")
    return policy


def same_policy(one: Policy, other: Policy) -> bool:
    """Whether they allow the same, however a floor is written ("-5" is "-5.00")."""
    if isinstance(one, CappedOverdraft) and isinstance(other, CappedOverdraft):
        return one.asset == other.asset and Decimal(one.floor) == Decimal(other.floor)
    return one == other


@lru_cache(maxsize=1024)  # asked several times for every entry of such an account
def floor_minor(floor: str, code: str, precision: int) -> int:
    """A floor in smallest units; refused if it is not a number at or below zero that the asset can express."""
    try:
        value = Decimal(floor)
    except InvalidOperation:
        raise InvalidName("floor", floor, 'a number such as "-500.00"') from None
    if not value.is_finite() or value > 0:
        raise InvalidName("floor", floor, "zero or a negative number")
    try:
        return _from_decimal(value, code, precision)
    except PrecisionOverflow:
        raise InvalidName("floor", floor, f"{code} has {precision} decimals") from None


def check_path(path: str) -> str:
    """The same path, or a refusal."""
    if type(path) is not str:
        path = plain_text("account path", path)
    if not _is_path(path):
        raise InvalidName(
            "account path",
            path[:PATH_LENGTH_MAX],
            f"parts of lower-case letters, digits, '-' and '_' joined by ':', at most {PATH_LENGTH_MAX} characters",
        )
    return path


def check_open_path(path: str) -> str:
    """The same path, or a refusal: entries of callers can't touch held money or money in flight."""
    path = check_path(path)
    if path == HELD:
        raise InvalidEntry(f"account {HELD} belongs to holds; use authorize, confirm and void")
    if path.startswith(TRANSIT) and path.partition(":")[0] == TRANSIT:
        raise InvalidEntry(f"account {path} belongs to flows, as all below {TRANSIT} does; choose another name")
    return path


def by_number(path: str) -> bool:
    """Whether its postings are each consumed by number, so that `compact` must not merge them (T36)."""
    return path == HELD or path.partition(":")[0] == TRANSIT


def funding_user(path: str) -> int | None:
    """The user whose funding account this is; None if it is none."""
    match = _FUNDING.fullmatch(path)
    return None if match is None else int(match[1])


def plain_text(what: str, value: object) -> str:
    """A text of exactly that type that databases can store (they know no other), or a refusal."""
    if not isinstance(value, str):
        raise InvalidName(what, str(value)[:NAME_LENGTH_MAX], "text is expected")
    text = str.__str__(value)
    if "\x00" in text:
        raise InvalidName(what, ascii(text)[:NAME_LENGTH_MAX], "it contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidName(what, ascii(text)[:NAME_LENGTH_MAX], "it is not valid Unicode text") from None
    return text


@lru_cache(maxsize=16_384)
def _is_path(path: str) -> bool:
    return len(path) <= PATH_LENGTH_MAX and _PATH.fullmatch(path) is not None


def check_name(what: str, name: str) -> str:
    """The same short name (of a book, a scope), or a refusal."""
    name = plain_text(what, name)
    if len(name) > NAME_LENGTH_MAX or not _NAME.fullmatch(name):
        raise InvalidName(what, name[:NAME_LENGTH_MAX], "lower-case letters, digits, '-' and '_'")
    return name


class Book(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Which assets and accounts may take part in its entries. It never partitions balances."""

    id: int = 0
    name: str
    assets: tuple[str, ...] = ()  # asset codes; empty: all
    accounts: tuple[str, ...] = ()  # paths or prefixes; empty: all

    @cached_property
    def name_bytes(self) -> bytes:
        """The name as it stands in canonical bytes."""
        return len16(self.name)

    def admits_asset(self, code: str) -> bool:
        """Whether the asset may move in this book."""
        return not self.assets or code in self.assets

    def admits_account(self, path: str) -> bool:
        """Whether the account, or a parent of it, is listed. `held` is in every book: its money belongs to the accounts
        that set it aside."""
        return not self.accounts or path == HELD or any(path == p or path.startswith(p + ":") for p in self.accounts)
