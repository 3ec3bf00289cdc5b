"""Money: integers of an asset's smallest unit inside, text at the edges, never a float.

Parsing refuses what it can't keep exactly: more decimals than the asset has, signs, exponents, blanks, digits of
other scripts. A bare `int` or `float` is refused as ambiguous (is 100 a hundred dollars or a hundred cents?).
Not here: chain decimals (the rails convert them, exactly or not at all) and the trading core's unsigned 64 bits.
"""

from __future__ import annotations

import re
from decimal import Decimal
from enum import StrEnum
from functools import cached_property

import msgspec

from bursar.model.errors import AmountTooLarge, InvalidAmount, InvalidName, PrecisionOverflow

MINOR_MAX = 2**127 - 1
MINOR_MIN = -(2**127)
PRECISION_MAX = 30
TEXT_LENGTH_MAX = 80  # longer than any amount that fits; checked before int() sees it

_PLAIN = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]+))?")  # ASCII digits only; used with fullmatch
_CODE = re.compile(r"[A-Z0-9][A-Z0-9._-]{0,15}")


def len16(text: str) -> bytes:
    """Text with its length in two big-endian bytes in front."""
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


class AssetStatus(StrEnum):
    """Whether an asset moves."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class Asset(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A unit of value. Code and precision never change; the rest may."""

    id: int = 0  # row number in this database; 0 before it is stored
    code: str
    precision: int  # decimals: 1 unit = 10^precision smallest units
    min_transfer: int = 1  # smallest units; bounds of one internal transfer, checked by that flow
    max_transfer: int = MINOR_MAX
    status: AssetStatus = AssetStatus.ACTIVE
    internal_transfer_enabled: bool = True

    @cached_property
    def code_bytes(self) -> bytes:
        """The code as it stands in canonical bytes; kept because every envelope repeats it."""
        return len16(self.code)

    def minor(self, amount: Amount) -> int:
        """The amount in smallest units, exactly, or a refusal. Zero and (for Money and Decimal) negatives pass."""
        if type(amount) is str:
            return parse_minor(amount, self.code, self.precision)
        if isinstance(amount, Money):
            if amount.asset != self.code:
                raise InvalidAmount(_shown(amount), f"it is in {amount.asset}, not in {self.code}")
            if amount.precision != self.precision:
                why = f"it has {amount.precision} decimals, and {self.code} has {self.precision} here"
                raise InvalidAmount(_shown(amount), why)
            if type(amount.minor) is not int:  # Money checks nothing by itself
                raise InvalidAmount(_shown(amount), "its smallest units are no whole number")
            return bounded(amount.minor, self.code, self.precision)
        if isinstance(amount, Decimal):
            return _from_decimal(amount, self.code, self.precision)
        raise InvalidAmount(str(amount), f"a bare {type(amount).__name__} is ambiguous; give text, a Decimal or Money")

    def money(self, amount: Amount) -> Money:
        """The amount as Money of this asset."""
        return Money(asset=self.code, precision=self.precision, minor=self.minor(amount))

    def of_minor(self, minor: int) -> Money:
        """So many smallest units, as Money."""
        return Money(asset=self.code, precision=self.precision, minor=minor)


class Money(msgspec.Struct, frozen=True, gc=False):
    """An amount of an asset. Adds and compares with its own kind only."""

    asset: str
    precision: int
    minor: int

    @property
    def decimal(self) -> Decimal:
        """The exact value in units of the asset."""
        return Decimal(format_minor(self.minor, self.precision))

    def __str__(self) -> str:
        return format_minor(self.minor, self.precision)

    def __repr__(self) -> str:
        return f"Money({self} {self.asset})"

    def __bool__(self) -> bool:
        return self.minor != 0

    def _same(self, other: Money) -> int:
        if not isinstance(other, Money) or (other.asset, other.precision) != (self.asset, self.precision):
            raise TypeError(f"{self!r} and {other!r} are not of the same asset")
        return other.minor

    def __add__(self, other: Money) -> Money:
        return Money(self.asset, self.precision, self.minor + self._same(other))

    def __sub__(self, other: Money) -> Money:
        return Money(self.asset, self.precision, self.minor - self._same(other))

    def __neg__(self) -> Money:
        return Money(self.asset, self.precision, -self.minor)

    def __lt__(self, other: Money) -> bool:
        return self.minor < self._same(other)

    def __le__(self, other: Money) -> bool:
        return self.minor <= self._same(other)

    def __gt__(self, other: Money) -> bool:
        return self.minor > self._same(other)

    def __ge__(self, other: Money) -> bool:
        return self.minor >= self._same(other)


Amount = str | Decimal | Money


def _shown(amount: Money) -> str:
    """Money that may be malformed, for a message."""
    return f"Money({amount.minor} of {amount.asset})"


def parse_minor(text: str, code: str, precision: int) -> int:
    """Read plain decimal text such as "100.00" into smallest units."""
    match = _PLAIN.fullmatch(text) if len(text) <= TEXT_LENGTH_MAX else None
    if match is None:
        raise InvalidAmount(text[:TEXT_LENGTH_MAX], _why_not_plain(text))
    whole, decimals = match.groups("")
    if len(decimals) > precision:
        raise PrecisionOverflow(text, code, precision)
    return bounded(int(whole + decimals.ljust(precision, "0")), code, precision)


def _why_not_plain(text: str) -> str:
    if not text or text.isspace():
        return "it is blank"
    if len(text) > TEXT_LENGTH_MAX:
        return f"it is longer than {TEXT_LENGTH_MAX} characters"
    if text[0] in "+-":
        return "write it without a sign"
    return 'write plain digits with at most one dot, as in "100.00"'


def _from_decimal(value: Decimal, code: str, precision: int) -> int:
    if not value.is_finite():
        raise InvalidAmount(str(value), "it is not a finite number")
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    shift = exponent + precision
    if len(digits) + shift > TEXT_LENGTH_MAX:
        raise AmountTooLarge(f"{value:.3e}", code)
    if len(digits) > 2 * TEXT_LENGTH_MAX:  # so many digits and yet so small a number: most are decimals
        raise PrecisionOverflow(f"{value:.30f}…", code, precision)
    magnitude = int("".join(map(str, digits)))
    if shift < 0:
        if magnitude == 0:
            return 0
        if -shift >= len(digits) or magnitude % 10**-shift:
            raise PrecisionOverflow(str(value), code, precision)
        magnitude //= 10**-shift
    else:
        magnitude *= 10**shift
    return bounded(-magnitude if sign else magnitude, code, precision)


def format_minor(minor: int, precision: int) -> str:
    """Smallest units as text with all decimals of the asset."""
    if precision == 0:
        return str(minor)
    digits = str(abs(minor)).rjust(precision + 1, "0")
    return f"{'-' if minor < 0 else ''}{digits[:-precision]}.{digits[-precision:]}"


def bounded(minor: int, code: str, precision: int) -> int:
    """The same number, or a refusal if it does not fit into 128 bits."""
    if MINOR_MIN <= minor <= MINOR_MAX:
        return minor
    raise AmountTooLarge(format_minor(minor, precision), code)


def check_asset(code: str, precision: int) -> None:
    """Refuse a malformed asset before anything is written."""
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise InvalidName("asset code", str(code), "1 to 16 capital letters, digits, '.', '_' or '-'")
    if not isinstance(precision, int) or isinstance(precision, bool) or not 0 <= precision <= PRECISION_MAX:
        raise InvalidName("precision", str(precision), f"a whole number from 0 to {PRECISION_MAX}")
