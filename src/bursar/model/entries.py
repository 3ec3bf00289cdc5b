"""Entries: what callers want. An entry is checked here as far as it can be without looking at the ledger.

`Entry` is what a caller writes, with amounts as text. `Intent` is the same with amounts in smallest units and a key:
what travels through the writer. Two intents are the same if movements and book are the same; metadata and pins
don't count, so a retry may carry a new timestamp in its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from math import isfinite
from typing import Any

import msgspec

from bursar.model.accounts import MAIN_BOOK, check_name, check_open_path, check_path, plain_text
from bursar.model.errors import InvalidAmount, InvalidEntry, InvalidName, SelfMovement, UnknownAsset
from bursar.model.money import Amount, Asset
from bursar.model.postings import POSTINGS_MAX

KEY_LENGTH_MAX = 128
METADATA_BYTES_MAX = 16_384
METADATA_DEPTH_MAX = 32
MOVEMENTS_MAX = POSTINGS_MAX
USER_SCOPE = "user"  # keys given from outside; internal scopes can't be reached by them (L19)


class Movement(msgspec.Struct, frozen=True, gc=False):
    """Value from one account to another."""

    source: str
    target: str
    asset: str
    amount: Amount


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Movements that happen together or not at all."""

    movements: tuple[Movement, ...]
    key: str | None = None  # same key and same movements: the same entry, however often it is sent
    book: str = MAIN_BOOK
    metadata: Mapping[str, Any] = {}
    pins: Mapping[str, bytes] = {}  # account path → snapshot the caller has seen


def pay(source: str, target: str, asset: str, amount: Amount, *, key: str | None = None, **more: Any) -> Entry:
    """Value moves between two accounts."""
    return Entry(movements=(Movement(source, target, asset, amount),), key=key, **more)


def deposit(external: str, account: str, asset: str, amount: Amount, *, key: str | None = None, **more: Any) -> Entry:
    """Value comes in from an external account."""
    return pay(external, account, asset, amount, key=key, **more)


def withdraw(account: str, external: str, asset: str, amount: Amount, *, key: str | None = None, **more: Any) -> Entry:
    """Value leaves to an external account."""
    return pay(account, external, asset, amount, key=key, **more)


class HoldState(StrEnum):
    """A hold is open until it is confirmed in full, voided or expired."""

    OPEN = "open"
    CONFIRMED = "confirmed"
    VOIDED = "voided"
    EXPIRED = "expired"


class EntryKind(IntEnum):
    """Why an envelope exists; part of its content."""

    ENTRY = 0
    RETURN = 1  # gives back: voids, expiries, reversals. A freeze on the receiving side does not stop it (T35)
    COMPACT = 2  # merges postings of one account; moves nothing


class Leg(msgspec.Struct, frozen=True, gc=False):
    """A movement in smallest units."""

    source: str
    target: str
    asset: str
    amount: int


class HoldChange(msgspec.Struct, frozen=True, kw_only=True):
    """A hold as it stands after an entry. The posting that is held follows from the entry itself."""

    id: int = 0  # 0: a new hold, which gets the number of the entry's envelope
    account: str
    asset: str
    amount: int
    remaining: int
    state: HoldState
    owner: str = ""  # the record it belongs to: only a move of that one, in the same change, makes or settles it (W34)
    expires_us: int | None = None
    lasts_us: int | None = None  # its requested duration: what a repeated request is compared with
    posting: int = 0  # the posting held before; kept when the entry holds nothing any more


class Intent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An entry ready for the writer."""

    scope: str
    key: str
    legs: tuple[Leg, ...]
    book: str = MAIN_BOOK
    metadata: str = "{}"  # JSON text, exactly as it will be stored and hashed
    pins: tuple[tuple[str, bytes], ...] = ()
    kind: EntryKind = EntryKind.ENTRY
    reverses: int = 0  # number of the envelope this one reverses
    consume: tuple[int, ...] = ()  # postings that must be consumed, by number (holds, transit, reversal)
    merge: str = ""  # COMPACT: the account whose postings are merged
    hold: HoldChange | None = None  # how this entry changes a hold, in the same transaction
    no_overdraft: bool = False  # the payer's balance must cover it, whatever overdraft its policy allows (T42)
    outside: bool = False  # books what has happened outside: neither a freeze nor a suspended asset refuses it (T35)

    def deltas(self) -> dict[tuple[str, str], int]:
        """What each (account, asset) gains or loses in sum."""
        if len(self.legs) == 1:
            leg = self.legs[0]
            return {(leg.source, leg.asset): -leg.amount, (leg.target, leg.asset): leg.amount}
        net: dict[tuple[str, str], int] = {}
        for leg in self.legs:
            net[leg.source, leg.asset] = net.get((leg.source, leg.asset), 0) - leg.amount
            net[leg.target, leg.asset] = net.get((leg.target, leg.asset), 0) + leg.amount
        return net


def intend(entry: Entry, assets: Mapping[str, Asset], *, scope: str, token: Callable[[], str]) -> Intent:
    """Check an entry and turn its amounts into smallest units. `token` makes a key where the entry brought none."""
    if not isinstance(entry, Entry):
        raise InvalidEntry(f"an Entry is expected, not {type(entry).__name__}")
    if not isinstance(entry.movements, tuple | list) or not entry.movements:
        raise InvalidEntry("it has no movements")
    if len(entry.movements) > MOVEMENTS_MAX:
        raise InvalidEntry(f"it has more than {MOVEMENTS_MAX} movements")
    return Intent(
        scope=scope,
        key=token() if entry.key is None else check_key(entry.key),
        legs=tuple([_leg(m, assets) for m in entry.movements]),
        book=MAIN_BOOK if entry.book == MAIN_BOOK else check_name("book name", entry.book),
        metadata=encode_metadata(entry.metadata) if entry.metadata else "{}",
        pins=_pins(entry.pins) if entry.pins else (),
    )


def _leg(movement: Movement, assets: Mapping[str, Asset]) -> Leg:
    if not isinstance(movement, Movement):
        raise InvalidEntry(f"a Movement is expected, not {type(movement).__name__}")
    asset = assets.get(movement.asset) if isinstance(movement.asset, str) else None
    if asset is None:
        raise UnknownAsset(str(movement.asset))
    amount = asset.minor(movement.amount)
    if amount <= 0:
        raise InvalidAmount(str(movement.amount), "a movement needs an amount above zero")
    source, target = check_open_path(movement.source), check_open_path(movement.target)
    if source == target:
        raise SelfMovement(source)
    return Leg(source, target, asset.code, amount)


def check_key(key: str) -> str:
    """The same key, or a refusal."""
    return check_text("key", key)


def check_text(what: str, text: str, length_max: int = KEY_LENGTH_MAX) -> str:
    """The same text, which comes from outside, or a refusal."""
    if type(text) is not str:
        text = plain_text(what, text)
    if not 0 < len(text) <= length_max or not text.isprintable():
        raise InvalidName(what, text[:length_max], f"1 to {length_max} printable characters")
    return text  # valid Unicode too: half a surrogate pair is not printable


def encode_metadata(metadata: Mapping[str, Any]) -> str:
    """Metadata as deterministic JSON text, or a refusal."""
    _check_metadata(metadata)
    try:
        text = msgspec.json.encode(dict(metadata), order="deterministic").decode()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidEntry(f"its metadata is not JSON: {error}") from None
    if len(text.encode()) > METADATA_BYTES_MAX:
        raise InvalidEntry(f"its metadata is longer than {METADATA_BYTES_MAX} bytes")
    if "\\u0000" in text.replace("\\\\", ""):  # an escaped backslash before u0000 is just text
        raise InvalidEntry("its metadata contains a NUL character")
    return text


def _check_metadata(value: object, depth: int = 0) -> None:
    """Refuse what JSON can't express exactly, and what could be written but not read again."""
    if depth > METADATA_DEPTH_MAX:
        raise InvalidEntry(f"its metadata is nested deeper than {METADATA_DEPTH_MAX}")
    if isinstance(value, float) and not isfinite(value):
        raise InvalidEntry(f"its metadata holds {value}, which JSON can't say")
    if isinstance(value, msgspec.Raw):
        raise InvalidEntry("its metadata holds raw bytes in place of a value")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for part in value:
            _check_metadata(part, depth + 1)


def _pins(wanted: Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(wanted, Mapping):
        raise InvalidEntry("its pins are not account paths with their snapshots")
    pins = wanted.items()
    for path, snapshot in pins:
        check_path(path)
        if not isinstance(snapshot, bytes):
            raise InvalidEntry(f"the pin of {path} is not the bytes of a snapshot")
    return tuple(sorted(pins))
