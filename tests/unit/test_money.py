"""Money: text in, text out, exactly; everything that could be misread is refused."""

from __future__ import annotations

import operator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.errors import AmountTooLarge, InvalidAmount, InvalidName, PrecisionOverflow, Refusal
from bursar.model.money import (
    MINOR_MAX,
    MINOR_MIN,
    PRECISION_MAX,
    Asset,
    Money,
    check_asset,
    format_minor,
    parse_minor,
)

USDT = Asset(code="USDT", precision=6)
precisions = st.integers(0, PRECISION_MAX)


@given(st.integers(0, MINOR_MAX), precisions)
def test_what_was_formatted_is_parsed_back(minor: int, precision: int) -> None:
    assert parse_minor(format_minor(minor, precision), "X", precision) == minor


@given(st.integers(MINOR_MIN, MINOR_MAX), precisions)
def test_a_decimal_is_the_same_amount_as_its_text(minor: int, precision: int) -> None:
    """Negative ones included, which only text may not be."""
    asset = Asset(code="X", precision=precision)

    assert asset.minor(asset.of_minor(minor).decimal) == minor


@given(st.integers(MINOR_MIN, MINOR_MAX), precisions)
def test_text_shows_every_decimal_of_the_asset(minor: int, precision: int) -> None:
    text = format_minor(minor, precision)

    assert len(text.partition(".")[2]) == precision
    assert Fraction(text) * 10**precision == minor


@given(st.integers(0, 10**12), precisions, st.integers(1, 10))
def test_more_decimals_than_the_asset_has_are_never_cut_off(whole: int, precision: int, more: int) -> None:
    text = f"{whole}.{'0' * (precision + more)}"  # not even zeros

    with pytest.raises(PrecisionOverflow):
        parse_minor(text, "X", precision)


@given(st.text(max_size=12))
def test_whatever_is_parsed_was_plain_digits(text: str) -> None:
    try:
        minor = USDT.minor(text)
    except Refusal:
        return
    whole, _, decimals = text.partition(".")
    assert (whole + decimals).isascii()
    assert (whole + decimals).isdigit()
    assert Decimal(text) == USDT.of_minor(minor).decimal


@pytest.mark.parametrize(
    "text",
    [
        "1.0.0",
        "1e8",
        "1E8",
        "",
        " ",
        "\t",
        "\n",
        "1 ",
        " 1",
        "1\n",
        "1 000",
        "NaN",
        "nan",
        "Infinity",
        "-Infinity",
        "inf",
        "１００",  # noqa: RUF001 (full-width digits)
        "١٢٣",
        "1²",
        "+1",
        "-1",
        "-0",
        "1_000",
        "1,000",
        "1.",
        ".1",
        ".",
        "0x10",
        "01",
        "00.1",
        "1.0.",
        "--1",
        "1/2",
        "$1",
        "1.5USDT",
        "1\x00",
        "1" * 81,
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidAmount):
        USDT.minor(text)


@pytest.mark.parametrize("value", [1, 0, -1, 1.0, 0.1, float("nan"), True, False, None, b"1", ["1"], 10**40])
def test_anything_but_text_decimal_or_money_is_refused_as_ambiguous(value: Any) -> None:
    with pytest.raises(InvalidAmount):
        USDT.minor(value)


@pytest.mark.parametrize("value", ["NaN", "sNaN", "Infinity", "-Infinity"])
def test_a_decimal_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidAmount):
        USDT.minor(Decimal(value))


@pytest.mark.parametrize(
    ("text", "minor"),
    [("0", 0), ("0.0", 0), ("1", 1_000_000), ("1.5", 1_500_000), ("0.000001", 1), ("100.00", 100_000_000)],
)
def test_plain_text_is_read(text: str, minor: int) -> None:
    assert USDT.minor(text) == minor


@pytest.mark.parametrize(
    ("value", "minor"),
    [("1E+2", 100_000_000), ("1.50000000000", 1_500_000), ("-0.5", -500_000), ("0E-30", 0), ("-0", 0)],
)
def test_a_decimal_is_taken_by_its_value(value: str, minor: int) -> None:
    assert USDT.minor(Decimal(value)) == minor


@pytest.mark.parametrize("value", ["0.0000001", "1.0000001", "1E-7", "1E-999999", "1E-999999999999"])
def test_a_decimal_with_too_many_decimals_is_refused(value: str) -> None:
    with pytest.raises(PrecisionOverflow):
        USDT.minor(Decimal(value))


def test_a_decimal_of_thousands_of_digits_is_refused_like_any_other() -> None:
    with pytest.raises(PrecisionOverflow):
        USDT.minor(Decimal("0." + "1" * 5000))


def test_the_largest_amount_fits_and_one_more_does_not() -> None:
    asset = Asset(code="X", precision=0)

    assert asset.minor(str(MINOR_MAX)) == MINOR_MAX
    for amount in (str(MINOR_MAX + 1), Decimal(MINOR_MAX + 1), Decimal(MINOR_MIN - 1), Decimal("1E+999999")):
        with pytest.raises(AmountTooLarge):
            asset.minor(amount)
    assert asset.minor(Decimal(MINOR_MIN)) == MINOR_MIN


@pytest.mark.parametrize("minor", [MINOR_MAX + 1, MINOR_MIN - 1])
def test_money_that_does_not_fit_is_refused(minor: int) -> None:
    with pytest.raises(AmountTooLarge):
        USDT.minor(Money("USDT", 6, minor))


@pytest.mark.parametrize("money", [Money("BTC", 8, 1), Money("BTC", 6, 1), Money("USDT", 8, 1)])
def test_money_of_another_asset_is_refused(money: Money) -> None:
    with pytest.raises(InvalidAmount):
        USDT.minor(money)


@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20))
def test_money_adds_and_compares_as_integers_do(a: int, b: int) -> None:
    left, right = USDT.of_minor(a), USDT.of_minor(b)

    assert (left + right).minor == a + b
    assert (left - right).minor == a - b
    assert (-left).minor == -a
    assert (left < right, left <= right, left > right, left >= right) == (a < b, a <= b, a > b, a >= b)
    assert (left == right) == (a == b)
    assert bool(left) == bool(a)


@pytest.mark.parametrize("other", [Money("BTC", 6, 1), Money("USDT", 8, 1), 1, "1"])
def test_money_does_not_mix_with_anything_else(other: Any) -> None:
    money = USDT.money("1")
    with pytest.raises(TypeError):
        money + other
    with pytest.raises(TypeError):
        money - other
    with pytest.raises(TypeError):
        assert money < other
    with pytest.raises(TypeError):
        assert money >= other


def test_money_reads_as_a_person_would_write_it() -> None:
    assert str(USDT.money("1.5")) == "1.500000"
    assert str(-USDT.money("0.000001")) == "-0.000001"
    assert str(-USDT.money("0")) == "0.000000"
    assert repr(USDT.money("1.5")) == "Money(1.500000 USDT)"
    assert str(Asset(code="JPY", precision=0).money("7")) == "7"


@pytest.mark.parametrize("code", ["USDT", "A", "1INCH", "USDC.E", "A" * 16])
def test_an_asset_code_is_admitted(code: str) -> None:
    check_asset(code, 6)


@pytest.mark.parametrize(
    ("code", "precision"),
    [
        *[(code, 6) for code in ("usdt", "", "A" * 17, "-A", "A B", "Ä", "A\n", 7)],
        *[("A", precision) for precision in (31, -1, "6", 6.0, True)],
    ],
)
def test_a_malformed_asset_is_refused(code: Any, precision: Any) -> None:
    with pytest.raises(InvalidName):
        check_asset(code, precision)


def test_money_of_another_precision_is_refused_for_its_decimals() -> None:
    """Kept from another database, or from before: it is the same asset, and says another amount."""
    with pytest.raises(InvalidAmount, match=r"it has 2 decimals, and USDT has 6 here"):
        USDT.minor(Money("USDT", 2, 100))
    with pytest.raises(InvalidAmount, match=r"it is in EUR, not in USDT"):
        USDT.minor(Money("EUR", 6, 100))


@pytest.mark.parametrize("minor", [1.0, True, "1", Decimal(1), None])
def test_money_made_of_anything_but_a_whole_number_is_refused(minor: Any) -> None:
    with pytest.raises(InvalidAmount, match="no whole number"):
        USDT.minor(Money("USDT", 6, minor))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is blank"),
        (" \t", "it is blank"),
        ("1" * 81, "longer than 80 characters"),
        ("-1", "without a sign"),
        ("+1", "without a sign"),
        ("1,5", "plain digits"),
        ("x" * 80, "plain digits"),
    ],
)
def test_the_refusal_of_a_text_says_why(text: str, why: str) -> None:
    with pytest.raises(InvalidAmount, match=why):
        USDT.minor(text)


def test_a_text_as_long_as_any_is_read() -> None:
    assert USDT.minor("0." + "0" * 6) == 0
    with pytest.raises(PrecisionOverflow):  # read, that is, and then found to have too many decimals
        USDT.minor("0." + "0" * 78)


@pytest.mark.parametrize("precision", [0, PRECISION_MAX])
def test_an_asset_has_from_zero_to_thirty_decimals(precision: int) -> None:
    check_asset("USDT", precision)


def test_zero_of_a_thousand_decimals_is_zero() -> None:
    assert USDT.minor(Decimal("0E-1000")) == 0


@pytest.mark.parametrize(("digits", "fits"), [(39, True), (40, False), (80, False), (81, False), (10**12, False)])
def test_a_decimal_is_too_large_by_its_digits_or_by_its_exponent(digits: int, fits: bool) -> None:
    """However it is written: in full, or with an exponent that would fill the memory with zeros."""
    asset = Asset(code="X", precision=0)
    for value in [Decimal(f"1E+{digits - 1}"), *([Decimal("1" + "0" * (digits - 1))] if digits < 100 else [])]:
        if fits:
            assert asset.minor(value) == 10 ** (digits - 1)
        else:
            with pytest.raises(AmountTooLarge):
                asset.minor(value)


@pytest.mark.parametrize(
    ("value", "minor"), [("1.500000", 1_500_000), ("12.34000000", 12_340_000), ("0.10E+1", 1_000_000)]
)
def test_zeros_at_the_end_are_no_decimals(value: str, minor: int) -> None:
    assert USDT.minor(Decimal(value)) == minor


@pytest.mark.parametrize("value", ["0.0000005", "0.00000010", "0.00000120", "123.45678901"])
def test_a_part_of_the_smallest_unit_is_refused(value: str) -> None:
    with pytest.raises(PrecisionOverflow):
        USDT.minor(Decimal(value))


def test_a_comparison_of_two_assets_is_refused_in_every_direction() -> None:
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TypeError, match="not of the same asset"):
            compare(USDT.money("1"), Money("BTC", 6, 1))


@pytest.mark.parametrize(("digits", "shown"), [(80, "1" + "0" * 79), (81, "1.000e+80")])
def test_an_amount_of_more_than_eighty_digits_is_not_shown_in_full(digits: int, shown: str) -> None:
    with pytest.raises(AmountTooLarge) as refused:
        Asset(code="X", precision=0).minor(Decimal(10 ** (digits - 1)))

    assert refused.value.value == shown


@pytest.mark.parametrize(("digits", "shown"), [(160, "0." + "1" * 160), (161, "0." + "1" * 30 + "…")])
def test_decimals_of_more_than_a_hundred_and_sixty_digits_are_not_shown_in_full(digits: int, shown: str) -> None:
    with pytest.raises(PrecisionOverflow) as refused:
        USDT.minor(Decimal("0." + "1" * digits))

    assert refused.value.value == shown
