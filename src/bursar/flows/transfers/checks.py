"""What is refused, and why: the checks of specification 000 §1.5, pure, each with its code, in a stated order.

They are made before anything is written (T41), and again where the record is started, by whichever way
(`check_transfer` is part of the flow), by both adapters and by the core, because no layer may rely on the one above it.
The order, in which the first that fails names the refusal:

 1. form: the account types are known (INVALID_ACCOUNT_TYPE) and switched on (UNSUPPORTED_ACCOUNT_TYPE), and two
    (SAME_ACCOUNT)
 2. the asset is known (INVALID_ASSET), active (ASSET_SUSPENDED) and may move between accounts (TRANSFER_NOT_ALLOWED)
 3. the amount is a plain positive number (INVALID_AMOUNT) of no more decimals than the asset has (PRECISION_OVERFLOW),
    within its bounds (AMOUNT_TOO_SMALL, AMOUNT_TOO_LARGE) and those of a core with room to spare (OVERFLOW)
 4. the source exists (SOURCE_ACCOUNT_NOT_FOUND), is not frozen (ACCOUNT_FROZEN) or disabled (ACCOUNT_DISABLED), and so
    is the target, where it is not made on demand (TARGET_ACCOUNT_NOT_FOUND, T14, T15)
 5. the balance suffices, whatever overdraft the account has (INSUFFICIENT_BALANCE, T42), and is guarded: an account
    whose overdraft has no limit can't be a source (TRANSFER_NOT_ALLOWED)

Who asks (UNAUTHORIZED, FORBIDDEN) is checked before, by the API; limits (RATE_LIMIT_EXCEEDED and the like) are counted
after, in the transaction that writes the record (T37, `Limits`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec

from bursar.engine.clock import made_at_us
from bursar.flows.transfers.request import SCOPE, AccountType, Request, Transfer
from bursar.model.errors import AmountTooLarge, InvalidAmount, PrecisionOverflow, Refusal, StoreError
from bursar.model.money import MINOR_MAX, Asset, AssetStatus, format_minor
from bursar.rails.trading.rules import SAFETY_FACTOR, STATUS_REFUSALS, Status, amount_refusal, operation_id
from bursar.writer import Limit

CLIENT_ORDER_ID_LENGTH_MAX = 64
USER_MAX = 2**63 - 1
COUNT_MAX = 2**62
SECOND_US, DAY_US = 1_000_000, 86_400_000_000
ROOM_AFTER_S = 3_600
FORGET_AFTER_S = 7 * 86_400
FRESH_SHARE = 2  # a new transfer's id is at most the horizon divided by this old, or it could be below a floor


class Code(StrEnum):
    """Why a transfer is refused."""

    UNAUTHORIZED = "UNAUTHORIZED"
    FORBIDDEN = "FORBIDDEN"
    INVALID_REQUEST = "INVALID_REQUEST"
    SAME_ACCOUNT = "SAME_ACCOUNT"
    INVALID_ACCOUNT_TYPE = "INVALID_ACCOUNT_TYPE"
    UNSUPPORTED_ACCOUNT_TYPE = "UNSUPPORTED_ACCOUNT_TYPE"
    INVALID_AMOUNT = "INVALID_AMOUNT"
    PRECISION_OVERFLOW = "PRECISION_OVERFLOW"
    AMOUNT_TOO_SMALL = "AMOUNT_TOO_SMALL"
    AMOUNT_TOO_LARGE = "AMOUNT_TOO_LARGE"
    OVERFLOW = "OVERFLOW"
    INVALID_ASSET = "INVALID_ASSET"
    ASSET_SUSPENDED = "ASSET_SUSPENDED"
    TRANSFER_NOT_ALLOWED = "TRANSFER_NOT_ALLOWED"
    SOURCE_ACCOUNT_NOT_FOUND = "SOURCE_ACCOUNT_NOT_FOUND"
    TARGET_ACCOUNT_NOT_FOUND = "TARGET_ACCOUNT_NOT_FOUND"
    ACCOUNT_FROZEN = "ACCOUNT_FROZEN"
    ACCOUNT_DISABLED = "ACCOUNT_DISABLED"
    INSUFFICIENT_BALANCE = "INSUFFICIENT_BALANCE"
    RATE_LIMIT_EXCEEDED = "RATE_LIMIT_EXCEEDED"
    DAILY_LIMIT_EXCEEDED = "DAILY_LIMIT_EXCEEDED"
    DAILY_AMOUNT_EXCEEDED = "DAILY_AMOUNT_EXCEEDED"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    TRANSFER_NOT_FOUND = "TRANSFER_NOT_FOUND"
    TRANSFERS_PAUSED = "TRANSFERS_PAUSED"
    SYSTEM_ERROR = "SYSTEM_ERROR"


class TransferRefused(Refusal):
    """A transfer is refused before anything is written. `reason` is the specification's code."""

    reason: Code
    why: str
    code = "TRANSFER_REFUSED"
    text = "{reason}: {why}"


class CommitUnknown(StoreError):
    """The deadline came, or the database went away, while a transfer was written: it may be there, or not."""

    req_id: str
    why: str
    code = "COMMIT_UNKNOWN"
    text = "transfer {req_id} may or may not have been written ({why}); look for it before you ask again"


class AccountSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a transfer, as it was found."""

    exists: bool
    status: Status = Status.ACTIVE
    available: int = 0
    is_guarded: bool = True  # whether what is available stays so until it is taken, or the taking is refused


class Horizons(msgspec.Struct, frozen=True, kw_only=True):
    """How old a transfer is before a core lets go of it, in seconds."""

    room_after_s: float = ROOM_AFTER_S
    forget_after_s: float = FORGET_AFTER_S

    def __post_init__(self) -> None:
        if not 0 < self.room_after_s <= self.forget_after_s:
            raise ValueError("room is set free before anything is forgotten: 0 < room_after_s <= forget_after_s")


def is_fresh(id_: int, now_us: int, horizons: Horizons) -> bool:
    """Whether a new transfer may have this id: no floor can have passed it by the time it is written. Pure."""
    return now_us - made_at_us(id_) <= horizons.room_after_s * 1_000_000 / FRESH_SHARE


def check_id(req_id: str, now_us: int, forgotten: int, horizons: Horizons) -> None:
    """Refuse an id that a core may have forgotten by the time it is called: it would be stuck for ever. Pure."""
    try:
        id_ = operation_id(req_id)
    except ValueError as error:
        raise TransferRefused(Code.INVALID_REQUEST, str(error)) from None
    if id_ < forgotten or not is_fresh(id_, now_us, horizons):
        raise TransferRefused(Code.INVALID_REQUEST, f"{req_id} is too old for a new transfer; let one be made")


def check_order_id(order: str) -> str:
    """The same, or a refusal. Looked at first: what it stands for may be answered already (T12)."""
    if len(order) > CLIENT_ORDER_ID_LENGTH_MAX or not order.isprintable() or not order.isascii():
        why = f"client_order_id has 1 to {CLIENT_ORDER_ID_LENGTH_MAX} printable ASCII characters"
        raise TransferRefused(Code.INVALID_REQUEST, why)
    return order


def check_request(
    request: Request,
    assets: Mapping[str, Asset],
    supported: Collection[AccountType],
    safety_factor: int = SAFETY_FACTOR,
) -> Transfer:
    """Checks 1 to 3: what can be said without looking at an account."""
    source, target = _types((request.source, request.target), supported)
    asset = _asset(request.asset, assets)
    minor = _bounded(_amount(request.amount, asset), asset, safety_factor)
    return Transfer(
        user=request.user,
        source=source,
        target=target,
        asset=asset.code,
        asset_id=asset.id,
        amount=str(minor),
        client_order_id=check_order_id(request.client_order_id),
    )


def check_transfer(
    transfer: Transfer, assets: Mapping[str, Asset], supported: Collection[AccountType], safety_factor: int
) -> None:
    """The same of what is to become a record, whichever program wrote it."""
    if type(transfer.user) is not int or not 0 < transfer.user <= USER_MAX:
        raise TransferRefused(Code.INVALID_REQUEST, f"a user is a whole number from 1 to {USER_MAX}")
    _types((transfer.source, transfer.target), supported)
    asset = _asset(transfer.asset, assets)
    if transfer.asset_id != asset.id:
        raise TransferRefused(Code.INVALID_ASSET, f"{asset.code} has the number {asset.id}, not {transfer.asset_id}")
    if not (transfer.amount.isascii() and transfer.amount.isdigit()):
        raise TransferRefused(Code.INVALID_AMOUNT, "an amount in smallest units is a whole number, as text")
    _bounded(transfer.minor, asset, safety_factor)
    check_order_id(transfer.client_order_id)


def check_snapshots(transfer: Transfer, source: AccountSnapshot, target: AccountSnapshot, asset: Asset) -> None:
    """Checks 4 and 5: what the accounts say. A core's account that does not exist yet is made on demand."""
    if not source.exists:
        raise TransferRefused(Code.SOURCE_ACCOUNT_NOT_FOUND, f"no {transfer.source} account of user {transfer.user}")
    if not target.exists and transfer.target is AccountType.FUNDING:
        why = f"no {transfer.target} account of user {transfer.user}; an external deposit makes one"
        raise TransferRefused(Code.TARGET_ACCOUNT_NOT_FOUND, why)
    for kind, account in ((transfer.source, source), (transfer.target, target)):
        if (refusal := STATUS_REFUSALS.get(account.status)) is not None:
            why = f"the {kind} account of user {transfer.user} is {account.status.name.lower()}"
            raise TransferRefused(Code[refusal.name], why)
    if source.available < transfer.minor:
        needed, there = (format_minor(minor, asset.precision) for minor in (transfer.minor, source.available))
        raise TransferRefused(Code.INSUFFICIENT_BALANCE, f"{needed} {asset.code} needed, {there} available")
    if not source.is_guarded:
        why = f"the {transfer.source} account of user {transfer.user} has an overdraft without limit"
        raise TransferRefused(Code.TRANSFER_NOT_ALLOWED, why)


def _types(names: tuple[str, str], supported: Collection[AccountType]) -> tuple[AccountType, AccountType]:
    found = []
    for name in names:
        try:
            found.append(AccountType(name))
        except ValueError:
            why = f"{name[:32]!r} is none of {', '.join(AccountType)}"
            raise TransferRefused(Code.INVALID_ACCOUNT_TYPE, why) from None
    for kind in found:
        if kind not in supported:
            raise TransferRefused(Code.UNSUPPORTED_ACCOUNT_TYPE, f"{kind} is not switched on here")
    source, target = found
    if source is target:
        raise TransferRefused(Code.SAME_ACCOUNT, f"from and to are both {source}")
    return source, target


def _asset(code: str, assets: Mapping[str, Asset]) -> Asset:
    asset = assets.get(code)
    if asset is None:
        raise TransferRefused(Code.INVALID_ASSET, f"there is no asset {code[:32]!r}")
    if asset.status is not AssetStatus.ACTIVE:
        raise TransferRefused(Code.ASSET_SUSPENDED, f"{asset.code} is suspended")
    if not asset.internal_transfer_enabled:
        raise TransferRefused(Code.TRANSFER_NOT_ALLOWED, f"{asset.code} does not move between accounts")
    return asset


def _amount(text: str, asset: Asset) -> int:
    try:
        return asset.minor(text)
    except PrecisionOverflow as error:
        raise TransferRefused(Code.PRECISION_OVERFLOW, str(error)) from None
    except AmountTooLarge as error:
        raise TransferRefused(Code.OVERFLOW, str(error)) from None
    except InvalidAmount as error:
        raise TransferRefused(Code.INVALID_AMOUNT, str(error)) from None


def _bounded(minor: int, asset: Asset, safety_factor: int) -> int:
    """The same amount, if it is above zero, fits a core and is within the asset's bounds."""
    if (refusal := amount_refusal(minor, safety_factor)) is not None:
        why = "does not fit a trading core" if minor > 0 else "is not above zero"
        raise TransferRefused(Code[refusal.name], f"{asset.of_minor(minor)} {asset.code} {why}")
    if minor < asset.min_transfer:
        raise TransferRefused(Code.AMOUNT_TOO_SMALL, f"at least {asset.of_minor(asset.min_transfer)} {asset.code}")
    if minor > asset.max_transfer:
        raise TransferRefused(Code.AMOUNT_TOO_LARGE, f"at most {asset.of_minor(asset.max_transfer)} {asset.code}")
    return minor


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one user may do (000 §1.5.6), counted as rows in the transaction that writes the record (T37). None: no
    limit."""

    per_second: int | None = 10
    per_day: int | None = 100
    amount_per_day: dict[str, int] = {}  # asset → smallest units

    def used_by(self, transfer: Transfer, now_us: int) -> tuple[Limit, ...]:
        """What a transfer uses up, in buckets of a second and of a day (UTC). Pure."""
        second, day = now_us // SECOND_US, now_us // DAY_US
        who = f"{SCOPE}:{transfer.user}"
        asset, tomorrow_us = transfer.asset, (day + 1) * DAY_US
        amount_max = self.amount_per_day.get(asset)
        buckets = (
            (f"s:{second}", self.per_second, MINOR_MAX, 0, (second + 1) * SECOND_US, Code.RATE_LIMIT_EXCEEDED),
            (f"d:{day}", self.per_day, MINOR_MAX, 0, tomorrow_us, Code.DAILY_LIMIT_EXCEEDED),
            (f"a:{asset}:{day}", COUNT_MAX, amount_max, transfer.minor, tomorrow_us, Code.DAILY_AMOUNT_EXCEEDED),
        )
        return tuple(
            Limit(key=f"{who}:{key}", count_max=count, amount_max=most, amount=amount, until_us=until_us, code=code)
            for key, count, most, amount, until_us, code in buckets
            if count is not None and most is not None
        )
