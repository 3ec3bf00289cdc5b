"""Envelopes: canonical bytes and their hash, compared with vectors written down once and with a second encoder.

The vectors in golden/envelopes.json must never change: ids are stored, and an auditor recomputes them years later. The
second encoder below knows the documented format only, so that a mistake would have to be made twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.accounts import Account, AccountStatus, Book, decode_policy
from bursar.model.entries import EntryKind
from bursar.model.envelope import (
    BookedLeg,
    Envelope,
    booked_amount,
    decode_ids,
    decode_legs,
    decode_pins,
    encode_ids,
    encode_legs,
    encode_pins,
)
from bursar.model.money import MINOR_MAX, MINOR_MIN, Asset
from bursar.model.postings import SEQ_MAX, Posting, posting_id

GOLDEN = Path(__file__).parent / "golden" / "envelopes.json"
VECTORS: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
BY_NAME = {vector["name"]: vector for vector in VECTORS}


def envelope_of(given: dict[str, Any]) -> Envelope:
    """An envelope from a vector's input, by names and with amounts as text."""
    accounts = {
        a["path"]: Account(
            id=number,
            path=a["path"],
            version=a["version"],
            policy=decode_policy(json.dumps(a["policy"])),
            status=AccountStatus(a["status"]),
            book=a["book"],
        )
        for number, a in enumerate(given["accounts"], 101)
    }
    assets = {code: Asset(id=n, code=code, precision=p) for n, (code, p) in enumerate(given["assets"].items(), 1)}

    def posting(number: int, p: dict[str, str]) -> Posting:
        return Posting(number, accounts[p["account"]].id, assets[p["asset"]].id, int(p["amount"]))

    return Envelope(
        seq=given["seq"],
        scope=given["scope"],
        key=given["key"],
        book=Book(id=1, name=given["book"]),
        kind=EntryKind(given["kind"]),
        reverses=given["reverses"],
        legs=tuple(
            BookedLeg(
                accounts[leg["source"]].id,
                accounts[leg["target"]].id,
                assets[leg["asset"]].id,
                booked_amount(int(leg["amount"])),
            )
            for leg in given["legs"]
        ),
        accounts=tuple(accounts.values()),
        assets=tuple(assets.values()),
        consumes=tuple(posting(int(p["id"]), p) for p in given["consumes"]),
        creates=tuple(posting(posting_id(given["seq"], i), p) for i, p in enumerate(given["creates"])),
        metadata=given["metadata"],
    )


def second_encoder(given: dict[str, Any]) -> bytes:
    """Canonical bytes from the same input, by the documented format alone: big-endian, lengths in front."""

    def text(value: str) -> bytes:
        return len(value.encode()).to_bytes(2, "big") + value.encode()

    def wide(value: str) -> bytes:
        return (int(value) % 2**128).to_bytes(16, "big")  # two's complement

    def sha2(data: bytes) -> bytes:
        return hashlib.sha256(hashlib.sha256(data).digest()).digest()

    def snapshot(a: dict[str, Any]) -> bytes:
        policy = json.dumps(a["policy"], separators=(",", ":"), ensure_ascii=False)
        fields = (a["path"], str(a["version"]), policy, a["status"], a["book"])
        return sha2(b"\x01" + b"".join(map(text, fields)))

    out: bytes = bytes([1, given["kind"]]) + given["reverses"].to_bytes(8, "big")
    out += text(given["book"]) + text(given["scope"]) + text(given["key"])
    out += len(given["legs"]).to_bytes(2, "big")
    for leg in given["legs"]:
        out += text(leg["source"]) + text(leg["target"]) + text(leg["asset"]) + wide(leg["amount"])
    out += len(given["accounts"]).to_bytes(4, "big")
    for account in given["accounts"]:
        out += text(account["path"]) + snapshot(account)
    out += len(given["consumes"]).to_bytes(2, "big")
    for p in given["consumes"]:
        out += int(p["id"]).to_bytes(8, "big") + text(p["account"]) + text(p["asset"]) + wide(p["amount"])
    out += len(given["creates"]).to_bytes(2, "big")
    for p in given["creates"]:
        out += text(p["account"]) + text(p["asset"]) + wide(p["amount"])
    metadata: bytes = given["metadata"].encode()
    return out + len(metadata).to_bytes(4, "big") + metadata


@pytest.mark.parametrize("name", BY_NAME)
def test_canonical_bytes_are_what_they_have_always_been(name: str) -> None:
    assert envelope_of(BY_NAME[name]["input"]).canonical().hex() == BY_NAME[name]["canonical"]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_id_is_what_it_has_always_been(name: str) -> None:
    assert envelope_of(BY_NAME[name]["input"]).id().hex() == BY_NAME[name]["id"]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_second_encoder_makes_the_same_bytes(name: str) -> None:
    vector = BY_NAME[name]
    content = second_encoder(vector["input"])

    assert content.hex() == vector["canonical"]
    assert hashlib.sha256(hashlib.sha256(content).digest()).hexdigest() == vector["id"]


def test_the_vectors_cover_every_kind() -> None:
    assert {vector["input"]["kind"] for vector in VECTORS} == {int(kind) for kind in EntryKind}


SWAP = envelope_of(BY_NAME["several assets"]["input"])


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": "reverse"},
        {"key": "another"},
        {"book": Book(id=1, name="another")},
        {"kind": EntryKind.RETURN},
        {"reverses": 5},
        {"metadata": '{"a":1}'},
        {"legs": SWAP.legs[:1]},
        {"legs": SWAP.legs[::-1]},
        {"consumes": SWAP.consumes[:1]},
        {"creates": SWAP.creates[:1]},
        {"creates": SWAP.creates[::-1]},
        {"accounts": (msgspec.structs.replace(SWAP.accounts[0], version=99), *SWAP.accounts[1:])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_everything_that_matters_changes_the_id(changes: dict[str, Any]) -> None:
    assert msgspec.structs.replace(SWAP, **changes).id() != SWAP.id()


PAYMENT = envelope_of(BY_NAME["payment with change"]["input"])


@pytest.mark.parametrize("field", ["account", "asset", "amount"])
@pytest.mark.parametrize("which", ["consumes", "creates", "legs"])
def test_nothing_of_a_payment_can_be_another_without_a_trace(which: str, field: str) -> None:
    """A row that was tampered with has another id; or none at all, if it names what the envelope does not pin."""
    for place, row in enumerate(getattr(PAYMENT, which)):
        name = "source" if (which, field) == ("legs", "account") else field
        for value in (getattr(row, name) + 1, 10**6):
            rows = list(getattr(PAYMENT, which))
            rows[place] = msgspec.structs.replace(row, **{name: value})
            forged = msgspec.structs.replace(PAYMENT, **{which: tuple(rows)})
            try:
                assert forged.id() != PAYMENT.id()
            except KeyError:
                assert field != "amount"


ROWS = ("leg", "spent", "left", "paid")


@pytest.mark.parametrize("wrong", [rows for n in range(1, 5) for rows in itertools.combinations(ROWS, n)], ids="+".join)
def test_a_payment_in_an_asset_that_it_does_not_name_has_no_id(wrong: tuple[str, ...]) -> None:
    """Neither if some rows say another asset nor if all do: a hash that hid it would vouch for another movement."""
    (leg,), (spent,), (left, paid) = PAYMENT.legs, PAYMENT.consumes, PAYMENT.creates
    rows = {"leg": leg, "spent": spent, "left": left, "paid": paid}
    rows |= {name: msgspec.structs.replace(rows[name], asset=999) for name in wrong}
    forged = msgspec.structs.replace(
        PAYMENT, legs=(rows["leg"],), consumes=(rows["spent"],), creates=(rows["left"], rows["paid"])
    )
    with pytest.raises(KeyError):
        forged.id()


def test_row_numbers_do_not_change_the_id() -> None:
    """The same content in another database is the same envelope, but for the numbers of what it consumed."""
    elsewhere = msgspec.structs.replace(
        SWAP,
        seq=999,
        creates=tuple(msgspec.structs.replace(p, id=posting_id(999, i)) for i, p in enumerate(SWAP.creates)),
        book=Book(id=77, name=SWAP.book.name),
    )

    assert elsewhere.id() == SWAP.id()


def test_where_one_text_ends_and_the_next_begins_is_part_of_the_content() -> None:
    one, other = (msgspec.structs.replace(SWAP, scope=scope, key=key) for scope, key in (("ab", "c"), ("a", "bc")))

    assert one.id() != other.id()


# --- the stored forms ------------------------------------------------------------------------------------------------

amounts = st.integers(1, MINOR_MAX) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, MINOR_MAX])


@given(st.integers(1, MINOR_MAX))
def test_a_booked_amount_is_read_back(amount: int) -> None:
    assert BookedLeg(1, 2, 3, booked_amount(amount)).minor == amount


@given(
    st.lists(
        st.builds(
            lambda s, t, a, v: BookedLeg(s, t, a, booked_amount(v)),
            st.integers(1, 2**63 - 1),
            st.integers(1, 2**63 - 1),
            st.integers(1, 2**31 - 1),
            amounts,
        ),
        max_size=5,
    )
)
def test_legs_survive_storage(stored: list[BookedLeg]) -> None:
    assert decode_legs(encode_legs(tuple(stored))) == tuple(stored)


def test_equal_movements_are_equal_bytes_and_others_are_not() -> None:
    one = encode_legs((BookedLeg(1, 2, 3, booked_amount(2**64)),))

    assert one == encode_legs((BookedLeg(1, 2, 3, booked_amount(2**64)),))
    assert one != encode_legs((BookedLeg(1, 2, 3, booked_amount(2**64 + 1)),))


def test_pins_survive_storage() -> None:
    accounts = tuple(Account(id=i, path=f"a:{i}", version=i % 3 + 1) for i in (1, 300, 2**40))

    assert decode_pins(encode_pins(accounts)) == tuple((a.id, a.version) for a in accounts)


@given(st.lists(st.integers(0, SEQ_MAX << 16 | 0xFFFF), max_size=5))
def test_posting_numbers_survive_storage(ids: list[int]) -> None:
    assert decode_ids(encode_ids(tuple(Posting(i, 1, 1, 1) for i in ids))) == tuple(ids)


@given(st.integers(MINOR_MIN, MINOR_MAX))
def test_every_amount_has_canonical_bytes(amount: int) -> None:
    envelope = msgspec.structs.replace(SWAP, creates=(msgspec.structs.replace(SWAP.creates[0], amount=amount),))

    assert (amount % 2**128).to_bytes(16, "big") in envelope.canonical()


@pytest.mark.parametrize(("amount", "wide"), [(1, False), (2**63 - 1, False), (2**63, True), (MINOR_MAX, True)])
def test_an_amount_that_messagepack_can_hold_is_a_number_and_a_larger_one_is_bytes(amount: int, wide: bool) -> None:
    assert isinstance(booked_amount(amount), bytes) is wide
    assert BookedLeg(1, 2, 3, booked_amount(amount)).minor == amount


@pytest.mark.parametrize("length", [1, 7, 9])
def test_bytes_that_are_no_list_of_posting_numbers_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes are no list of posting numbers"):
        decode_ids(bytes(length))
