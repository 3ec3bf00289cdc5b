"""Entries: what is refused before the ledger is read, and what an intent says in sum."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from bursar.model.entries import (
    KEY_LENGTH_MAX,
    METADATA_BYTES_MAX,
    METADATA_DEPTH_MAX,
    MOVEMENTS_MAX,
    Entry,
    Intent,
    Leg,
    Movement,
    check_text,
    deposit,
    encode_metadata,
    intend,
    pay,
    withdraw,
)
from bursar.model.errors import InvalidAmount, InvalidEntry, InvalidName, SelfMovement, UnknownAsset
from bursar.model.money import Asset

ASSETS = {"USDT": Asset(id=1, code="USDT", precision=6)}
SNAPSHOT = bytes(range(32))


class Text(str):
    """Text of a type that no database knows."""


def intent_of(entry: Any) -> Intent:
    return intend(entry, ASSETS, scope="user", token=lambda: "made-up")


def paying(amount: Any = "1", source: Any = "alice", target: Any = "bob", asset: Any = "USDT", **more: Any) -> Intent:
    return intent_of(pay(source, target, asset, amount, **more))


# --- movements -------------------------------------------------------------------------------------------------------


def test_an_entry_becomes_an_intent_in_smallest_units() -> None:
    assert paying("1.5", key="k") == Intent(scope="user", key="k", legs=(Leg("alice", "bob", "USDT", 1_500_000),))


@pytest.mark.parametrize("kind", [deposit, pay, withdraw])
def test_every_way_to_write_one_movement_names_the_payer_first(kind: Any) -> None:
    assert kind("a", "b", "USDT", "1", key="k") == Entry(movements=(Movement("a", "b", "USDT", "1"),), key="k")


@pytest.mark.parametrize("entry", [None, "pay", {"movements": ()}, Movement("a", "b", "USDT", "1")])
def test_what_is_no_entry_is_refused(entry: Any) -> None:
    with pytest.raises(InvalidEntry, match="an Entry is expected"):
        intent_of(entry)


@pytest.mark.parametrize("movements", [(), [], None, "ab", iter(())])
def test_an_entry_without_movements_is_refused(movements: Any) -> None:
    with pytest.raises(InvalidEntry, match="no movements"):
        intent_of(Entry(movements=movements))


def test_a_list_of_movements_will_do() -> None:
    movements: Any = [Movement("alice", "bob", "USDT", "1")]

    assert len(intent_of(Entry(movements=movements)).legs) == 1


def test_as_many_movements_as_an_envelope_has_postings_and_no_more() -> None:
    most = (Movement("alice", "bob", "USDT", "1"),) * MOVEMENTS_MAX

    assert len(intent_of(Entry(movements=most)).legs) == MOVEMENTS_MAX
    with pytest.raises(InvalidEntry, match=f"more than {MOVEMENTS_MAX}"):
        intent_of(Entry(movements=(*most, most[0])))


def test_what_is_no_movement_is_refused() -> None:
    wrong: Any = (("alice", "bob", "USDT", "1"),)
    with pytest.raises(InvalidEntry, match="a Movement is expected, not tuple"):
        intent_of(Entry(movements=wrong))


@pytest.mark.parametrize("asset", ["BTC", "usdt", "", None, 1, ["USDT"]])
def test_an_asset_that_does_not_exist_is_refused(asset: Any) -> None:
    with pytest.raises(UnknownAsset):
        paying(asset=asset)


@pytest.mark.parametrize("amount", ["0", "0.000000", Decimal(0), Decimal("-0.000001"), Decimal(-5)])
def test_a_movement_moves_something(amount: Any) -> None:
    with pytest.raises(InvalidAmount, match="above zero"):
        paying(amount)


def test_the_smallest_unit_moves() -> None:
    assert paying("0.000001").legs[0].amount == 1


def test_an_account_does_not_pay_itself() -> None:
    with pytest.raises(SelfMovement) as refused:
        paying(source="alice", target="alice")

    assert refused.value.account == "alice"


@pytest.mark.parametrize("path", ["held", "transit", "transit:orders", "transit:orders:1"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_held_or_in_transit_is_not_moved_by_an_entry_from_outside(path: str, side: str) -> None:
    with pytest.raises(InvalidEntry, match=f"account {path} belongs to"):
        paying(**{side: path})


@pytest.mark.parametrize("path", ["held:back", "transits", "my:transit", "transit-lounge"])
def test_a_name_that_only_resembles_theirs_is_free(path: str) -> None:
    assert paying(target=path).legs[0].target == path


def test_deltas_of_one_movement() -> None:
    assert paying("1").deltas() == {("alice", "USDT"): -1_000_000, ("bob", "USDT"): 1_000_000}


def test_deltas_sum_what_passes_through() -> None:
    legs = (Leg("a", "b", "USDT", 7), Leg("b", "c", "USDT", 5), Leg("a", "c", "USDT", 1), Leg("c", "a", "BTC", 2))

    assert Intent(scope="user", key="k", legs=legs).deltas() == {
        ("a", "USDT"): -8,
        ("b", "USDT"): 2,
        ("c", "USDT"): 6,
        ("c", "BTC"): -2,
        ("a", "BTC"): 2,
    }


# --- key and book ----------------------------------------------------------------------------------------------------


def test_an_entry_without_a_key_gets_one() -> None:
    assert paying().key == "made-up"
    assert paying(key="mine").key == "mine"


@pytest.mark.parametrize("key", ["k", "k" * KEY_LENGTH_MAX, "Zahlung Nr. 5, März", Text("k")])
def test_a_key_is_kept_as_plain_text(key: str) -> None:
    assert (paying(key=key).key, type(paying(key=key).key)) == (key, str)


@pytest.mark.parametrize("key", ["", "k" * (KEY_LENGTH_MAX + 1), "a\nb", "a\x00", "\ud800", 7, b"k", Text("a\x00")])
def test_a_malformed_key_is_refused(key: Any) -> None:
    with pytest.raises(InvalidName) as refused:
        paying(key=key)

    assert refused.value.what == "key"


def test_the_refusal_of_a_text_says_what_it_was_to_be() -> None:
    with pytest.raises(InvalidName, match="is not a valid memo: 1 to 128 printable characters"):
        check_text("memo", "\t")


def test_an_entry_is_of_the_main_book_unless_it_says_otherwise() -> None:
    assert (paying().book, paying(book="retail").book) == ("main", "retail")


@pytest.mark.parametrize("book", ["", "Retail", "a:b", None])
def test_a_malformed_book_is_refused(book: Any) -> None:
    with pytest.raises(InvalidName) as refused:
        paying(book=book)

    assert refused.value.what == "book name"


# --- metadata --------------------------------------------------------------------------------------------------------


def nested(depth: int, kind: Any) -> Any:
    """A value so many levels deep."""
    value: Any = 1
    for _ in range(depth):
        value = kind(value)
    return value


def test_metadata_is_the_same_text_whatever_the_order() -> None:
    assert paying(metadata={"b": 1, "a": [True, None, 1.5]}).metadata == '{"a":[true,null,1.5],"b":1}'
    assert paying().metadata == "{}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_cannot_say_is_refused(value: float) -> None:
    with pytest.raises(InvalidEntry, match=f"holds {value}"):
        encode_metadata({"deep": [{"er": value}]})


def test_raw_bytes_in_place_of_a_value_are_refused() -> None:
    with pytest.raises(InvalidEntry, match="raw bytes"):
        encode_metadata({"a": msgspec.Raw(b"1}")})


@pytest.mark.parametrize("value", [object(), {(1, 2): 3}, "\ud800"])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidEntry, match="not JSON"):
        encode_metadata({"a": value})


def test_metadata_is_limited_in_bytes() -> None:
    """Not in characters: ä is two bytes."""
    room = METADATA_BYTES_MAX - len('{"a":""}')

    assert len(encode_metadata({"a": "ä" * (room // 2)}).encode()) == METADATA_BYTES_MAX
    with pytest.raises(InvalidEntry, match=f"longer than {METADATA_BYTES_MAX} bytes"):
        encode_metadata({"a": "ä" * (room // 2) + "x"})


@pytest.mark.parametrize("text", ["\x00", "a\x00b", "\\\x00"])
def test_a_nul_character_is_refused(text: str) -> None:
    """PostgreSQL can't store it."""
    with pytest.raises(InvalidEntry, match="NUL"):
        encode_metadata({"a": text})


@pytest.mark.parametrize("text", ["u0000", "\\u0000", "\\\\u0000", "\x01"])
def test_text_about_a_nul_character_is_just_text(text: str) -> None:
    assert msgspec.json.decode(encode_metadata({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    "kind",
    [lambda v: {"a": v}, lambda v: [v], lambda v: (v,), lambda v: frozenset([v])],
    ids=["map", "list", "tuple", "set"],
)
def test_metadata_is_limited_in_depth(kind: Any) -> None:
    assert encode_metadata({"a": nested(METADATA_DEPTH_MAX - 1, kind)})
    with pytest.raises(InvalidEntry, match=f"deeper than {METADATA_DEPTH_MAX}"):
        encode_metadata({"a": nested(METADATA_DEPTH_MAX, kind)})


# --- pins ------------------------------------------------------------------------------------------------------------


def test_pins_are_kept_in_order() -> None:
    assert paying(pins={"b": SNAPSHOT, "a": SNAPSHOT}).pins == (("a", SNAPSHOT), ("b", SNAPSHOT))
    assert paying().pins == ()


def test_pins_are_paths_with_snapshots() -> None:
    with pytest.raises(InvalidEntry, match="not account paths with their snapshots"):
        paying(pins=[("alice", SNAPSHOT)])
    with pytest.raises(InvalidEntry, match="the pin of alice is not the bytes"):
        paying(pins={"alice": SNAPSHOT.hex()})
    with pytest.raises(InvalidName):
        paying(pins={"Alice": SNAPSHOT})
