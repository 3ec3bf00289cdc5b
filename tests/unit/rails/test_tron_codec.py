"""TRON's formats: addresses, bytes that are exactly those that nodes make, and bytes that never reach a key."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tron_fake import CODEC, HOT, KEY, NEW, OTHER, OTHER_KEY, SHOP, TOKEN, trx, usdt

from bursar.model.errors import BursarError
from bursar.rails.chain import Fee, InvalidAddress, Network, Order, Shape, Slot, Unbuildable, Undecodable
from bursar.rails.tron.addresses import bytes_of, text_of
from bursar.rails.tron.codec import ACTIVATION_SUN, MEMO_SUN, ZERO_ADDRESS, content, encode, hash_of, transaction
from bursar.rails.tron.protobuf import NotProtobuf, data, fields, number
from bursar.signer.curve import sign_digest

RECORDINGS = Path(__file__).parent / "tron"
NETWORK = Network(name="tron", kind="tron", chain_id=1)
SLOT = Slot(expires=1_794_967_848_168, reference="00862dc3400f9103d403/1794967668168")
TOKEN_FEE = Fee(gas_limit=49_268, price=100)
NO_FEE = Fee(gas_limit=0, price=0)


def built(order: Order, slot: Slot = SLOT, fee: Fee | None = None) -> bytes:
    return CODEC.build(NETWORK, HOT, order, Shape.PAY, slot, fee or (TOKEN_FEE if order.contract else NO_FEE))


# --- golden vectors: what a java-tron node made or took ---------------------------------------------------------------


def recorded(*, sent: bool) -> dict[str, dict[str, Any]]:
    """Every whole transaction in the recordings, by its id. What was sent may be wrong on purpose."""
    found: dict[str, dict[str, Any]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            raw, id_ = value.get("raw_data_hex", "…"), value.get("txID", value.get("txid"))
            if "…" not in raw and "raw_data" in value and sha256(bytes.fromhex(raw)).hexdigest() == id_:
                found.setdefault(id_, value)
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)

    for file in sorted(RECORDINGS.glob("*.json")):
        for entry in json.loads(file.read_text())["entries"]:
            walk({name: value for name, value in entry.items() if sent or name != "params"})
    return found


def address(text: str) -> str:
    return text if text.startswith("T") else text_of(bytes.fromhex(text))


def test_bytes_are_those_of_the_node_for_every_recorded_transfer() -> None:
    """Given the fields that a node shows, then the bytes and the id that we make of them are the node's."""
    checked, refused = 0, set()
    for id_, one in recorded(sent=False).items():
        try:
            decoded = CODEC.decode(bytes.fromhex(one["raw_data_hex"]))
        except Undecodable as error:
            refused.add(error.why)
            continue
        raw = one["raw_data"]
        contract = raw["contract"][0]
        value = contract["parameter"]["value"]
        is_transfer = "to_address" in value
        called = value.get("data", "")
        order = Order(
            payout="p",
            to=address(value["to_address"]) if is_transfer else text_of(b"\x41" + bytes.fromhex(called[32:72])),
            contract="" if is_transfer else address(value["contract_address"]),
            amount=int(value["amount"]) if is_transfer else int(called[72:], 16),
            memo=bytes.fromhex(raw.get("data", "")).decode(),
        )
        reference = f"{raw['ref_block_bytes']}{raw['ref_block_hash']}/{raw['timestamp']}"
        slot = Slot(expires=int(raw["expiration"]), reference=reference)
        fee = Fee(gas_limit=raw.get("fee_limit", 0), price=1)
        unsigned = CODEC.build(NETWORK, address(value["owner_address"]), order, Shape.PAY, slot, fee)
        assert unsigned.hex() == one["raw_data_hex"]
        assert hash_of(unsigned) == id_
        meant = (order.to, order.contract, order.amount, order.memo)
        assert (decoded.to, decoded.contract, decoded.amount, decoded.memo) == meant
        assert (decoded.slot, decoded.fee.gas_limit, decoded.chain_id) == (slot, fee.gas_limit, None)
        checked += 1
    assert checked >= 10
    # What a node has taken or shown, and we never build.
    assert "it contains more than a transfer, or is encoded otherwise" in refused and len(refused) > 3


def test_recorded_signatures_are_of_their_senders() -> None:
    checked = 0
    for id_, one in recorded(sent=True).items():
        signatures = one.get("signature") or []
        if isinstance(signatures, str) or len(signatures) != 1 or len(signatures[0]) != 130:
            continue
        raw = transaction(bytes.fromhex(one["raw_data_hex"]), bytes.fromhex(signatures[0]))
        try:
            _, sender, hash_ = CODEC.read(raw)
        except Undecodable:
            continue  # what we would never build or sign: high s, v of 27, a foreign key
        owner = one["raw_data"]["contract"][0]["parameter"]["value"]["owner_address"]
        assert (sender, hash_) == (address(owner), id_)
        checked += 1
    assert checked >= 15


# --- addresses -------------------------------------------------------------------------------------------------------


def test_addresses_are_judged_as_the_node_judges_them() -> None:
    """Only the form in base58check is taken: a node takes 41… in hexadecimal digits as well."""
    entries = json.loads((RECORDINGS / "accounts_addresses.json").read_text())["entries"]
    seen = set()
    for entry in entries:
        text = (entry.get("params") or {}).get("address")
        if entry.get("call") != "/wallet/validateaddress" or text is None:
            continue
        said = entry["response"]
        taken = said["result"] and said["message"] == "Base58check format" and bytes_of(text) != ZERO_ADDRESS
        seen.add(taken)
        if taken:
            assert CODEC.check_address("tron", text) == text
        else:
            with pytest.raises(InvalidAddress):
                CODEC.check_address("tron", text)
    assert seen == {True, False}


@given(st.binary(min_size=20, max_size=20).filter(any))
def test_address_of_any_bytes_reads_back_and_one_wrong_character_is_found(raw: bytes) -> None:
    text = text_of(b"\x41" + raw)
    assert (len(text), text[0], bytes_of(text)) == (34, "T", b"\x41" + raw)
    for place in (5, 20, 33):
        other = text[:place] + ("2" if text[place] != "2" else "3") + text[place + 1 :]
        with pytest.raises(InvalidAddress):
            CODEC.check_address("tron", other)


# --- building and reading --------------------------------------------------------------------------------------------

ADDRESSES = st.sampled_from([SHOP, OTHER, NEW])
ORDERS = st.one_of(
    st.builds(trx, st.integers(1, 2**63 - 1), ADDRESSES, memo=st.sampled_from(["", "hello", "für dich"])),
    st.builds(usdt, st.integers(1, 2**256 - 1), ADDRESSES, memo=st.sampled_from(["", "x" * 512])),
)
SLOTS = st.builds(
    lambda expires, block, hash_, stamp: Slot(expires=expires, reference=f"{block:04x}{hash_:016x}/{stamp}"),
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**63 - 1),
)


@given(ORDERS, SLOTS, st.integers(1, 15 * 10**9))
def test_what_is_built_reads_back_as_it_was_meant(order: Order, slot: Slot, limit: int) -> None:
    fee = Fee(gas_limit=limit, price=1)
    unsigned = built(order, slot, fee)
    decoded = CODEC.decode(unsigned)
    assert (decoded.to, decoded.contract, decoded.amount, decoded.memo) == (
        order.to,
        order.contract,
        order.amount,
        order.memo,
    )
    assert decoded.slot == slot
    assert decoded.fee.gas_limit == (limit if order.contract else 0)
    made = CODEC.signed(unsigned, sign_digest(KEY, CODEC.digest(unsigned)), HOT)
    assert CODEC.read(made.raw) == (decoded, HOT, made.hash)
    assert made.hash == sha256(unsigned).hexdigest()


@given(ORDERS, st.data())
def test_bytes_changed_anywhere_are_other_values_or_refused(order: Order, draw: st.DataObject) -> None:
    unsigned = built(order)
    place = draw.draw(st.integers(0, len(unsigned) - 1))
    changed = unsigned[:place] + bytes([unsigned[place] ^ draw.draw(st.integers(1, 255))]) + unsigned[place + 1 :]
    try:
        found = content(changed)
    except Undecodable:
        return
    assert encode(found) == changed and found != content(unsigned)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(raw: bytes) -> None:
    for read in (CODEC.decode, CODEC.read, CODEC.digest):
        with pytest.raises(Undecodable):
            read(raw)


def with_field(unsigned: bytes, *extra: bytes) -> bytes:
    return unsigned + b"".join(extra)


def with_contract(change: Any) -> bytes:
    """A transfer of TRX with another `contract`."""
    parts = dict(fields(built(trx())))
    found = b""
    for field, value in parts.items():
        if field == 11:
            assert isinstance(value, bytes)
            found += data(11, change(value))
        else:
            found += data(field, value) if isinstance(value, bytes) else number(field, value)
    return found


def call(owner: str, contract: str, calldata: bytes, *more: bytes) -> bytes:
    value = data(1, bytes_of(owner)) + data(2, bytes_of(contract)) + data(4, calldata) + b"".join(more)
    any_ = data(1, b"type.googleapis.com/protocol.TriggerSmartContract") + data(2, value)
    return number(1, 31) + data(2, any_)


TRANSFER_DATA = bytes.fromhex("a9059cbb") + bytes_of(SHOP)[1:].rjust(32, b"\0") + (5).to_bytes(32, "big")


def token_raw(contract: bytes, fee_limit: int = 10**6) -> bytes:
    head = data(1, b"\0\1") + data(4, b"12345678") + number(8, 10**12) + data(11, contract)
    return head + number(14, 7) + number(18, fee_limit)


BAD = {
    "an unknown field": with_field(built(trx()), number(3, 1)),
    "auths": with_field(built(trx()), data(9, b"x")),
    "scripts": with_field(built(trx()), data(12, b"x")),
    "a second contract": with_field(built(trx()), data(11, b"\x08\x01")),
    "a permission": with_contract(lambda contract: contract + number(5, 2)),
    "a provider": with_contract(lambda contract: contract + data(3, b"x")),
    "another type of contract": with_contract(lambda contract: b"\x08\x02" + contract[2:]),
    "the type of a call with the value of a transfer": with_contract(lambda contract: b"\x08\x1f" + contract[2:]),
    "no contract": data(1, b"\0\1") + data(4, b"12345678") + number(8, 10**12) + number(14, 7),
    "call_value": token_raw(call(HOT, TOKEN, TRANSFER_DATA, number(3, 5))),
    "call_token_value": token_raw(call(HOT, TOKEN, TRANSFER_DATA, number(5, 5))),
    "approve": token_raw(call(HOT, TOKEN, bytes.fromhex("095ea7b3") + TRANSFER_DATA[4:])),
    "transferFrom": token_raw(call(HOT, TOKEN, bytes.fromhex("23b872dd") + TRANSFER_DATA[4:])),
    "calldata with bytes behind it": token_raw(call(HOT, TOKEN, TRANSFER_DATA + b"\0")),
    "calldata with a dirty address": token_raw(call(HOT, TOKEN, TRANSFER_DATA[:5] + b"\x41" + TRANSFER_DATA[6:])),
    "a call without a fee limit": token_raw(call(HOT, TOKEN, TRANSFER_DATA), 0),
    "tokens to their own contract": token_raw(call(HOT, SHOP, TRANSFER_DATA)),
    "no bytes": b"",
    "a signed transaction": data(1, built(trx())),
}


@pytest.mark.parametrize("name", BAD)
def test_nothing_but_a_transfer_is_read(name: str) -> None:
    with pytest.raises(Undecodable):
        CODEC.decode(BAD[name])
    with pytest.raises(Undecodable):
        CODEC.digest(BAD[name])


def test_the_usual_call_is_read() -> None:
    """So that the refusals above are for what was changed."""
    assert CODEC.decode(token_raw(call(HOT, TOKEN, TRANSFER_DATA))).amount == 5


@pytest.mark.parametrize(
    ("order", "slot", "fee", "shape"),
    [
        (trx(0), SLOT, NO_FEE, Shape.PAY),
        (trx(2**63), SLOT, NO_FEE, Shape.PAY),
        (trx(to=HOT), SLOT, NO_FEE, Shape.PAY),
        (usdt(2**256), SLOT, TOKEN_FEE, Shape.PAY),
        (usdt(to=TOKEN), SLOT, TOKEN_FEE, Shape.PAY),
        (usdt(), SLOT, NO_FEE, Shape.PAY),
        (trx(memo="x" * 513), SLOT, NO_FEE, Shape.PAY),
        (trx(memo="a\nb"), SLOT, NO_FEE, Shape.PAY),
        (trx(), Slot(nonce=1), NO_FEE, Shape.PAY),
        (trx(), Slot(expires=10), NO_FEE, Shape.PAY),
        (trx(), Slot(expires=10, reference="00862dc3400f9103d403/0"), NO_FEE, Shape.PAY),
        (trx(), Slot(expires=2**63, reference=SLOT.reference), NO_FEE, Shape.PAY),
        (trx(), SLOT, NO_FEE, Shape.CANCEL),
    ],
)
def test_what_no_transaction_can_carry_is_not_built(order: Order, slot: Slot, fee: Fee, shape: Shape) -> None:
    with pytest.raises(Unbuildable):
        CODEC.build(NETWORK, HOT, order, shape, slot, fee)


@pytest.mark.parametrize("text", ["", "0x" + "11" * 20, "41" + "11" * 20, text_of(ZERO_ADDRESS), SHOP.lower()])
def test_what_is_no_address_is_not_built(text: str) -> None:
    with pytest.raises(InvalidAddress):
        built(trx(to=text))


def test_equal_content_is_one_transaction_and_a_timestamp_tells_two_apart() -> None:
    """W27: the signature is no part of the id."""
    other = msgspec.structs.replace(SLOT, reference=SLOT.reference[:-1] + "9")
    assert hash_of(built(trx())) == hash_of(built(trx())) != hash_of(built(trx(), other))


def test_signature_must_be_of_the_sender_and_in_its_one_form() -> None:
    unsigned = built(usdt())
    right = sign_digest(KEY, CODEC.digest(unsigned))
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    high = right[:32] + (order - int.from_bytes(right[32:64], "big")).to_bytes(32, "big") + bytes([1 - right[64]])
    for wrong in (
        sign_digest(OTHER_KEY, CODEC.digest(unsigned)),
        right[:64],
        right + b"\0",
        right[:64] + bytes([right[64] + 27]),
        high,
        bytes(65),
    ):
        with pytest.raises(Undecodable):
            CODEC.signed(unsigned, wrong, HOT)
        with pytest.raises(Undecodable):
            CODEC.read(transaction(unsigned, wrong))
    with pytest.raises(Undecodable):
        CODEC.signed(unsigned, right, OTHER)
    with pytest.raises(Undecodable):
        CODEC.read(transaction(unsigned, right) + data(2, right))
    with pytest.raises(Undecodable):
        CODEC.read(transaction(unsigned, right) + number(5, 1))


def test_a_signer_who_spends_from_another_account_is_refused() -> None:
    """The key may have a permission on another account; the bytes say whose TRX it is."""
    unsigned = CODEC.build(NETWORK, OTHER, trx(), Shape.PAY, SLOT, NO_FEE)
    with pytest.raises(Undecodable):
        CODEC.signed(unsigned, sign_digest(KEY, CODEC.digest(unsigned)), HOT)


def test_decoded_fee_bounds_what_the_bytes_can_cost() -> None:
    """As recorded: 268,000 sun for a transfer, 345,000 and the energy for a call, 1.1 TRX for a new account."""
    assert 268_000 + ACTIVATION_SUN <= CODEC.decode(built(trx())).fee.worst < 300_000 + ACTIVATION_SUN
    assert 345_000 + 4_926_800 <= CODEC.decode(built(usdt())).fee.worst < 400_000 + 4_926_800
    with_memo = CODEC.decode(built(trx(memo="hello"))).fee.worst - CODEC.decode(built(trx())).fee.worst
    assert MEMO_SUN <= with_memo < MEMO_SUN + 10_000


@pytest.mark.parametrize("raw", ["00", "0aff", "0a05aa", "08" + "ff" * 10 + "01", "0d00000000", "0b"])
def test_broken_messages_are_refused(raw: str) -> None:
    with pytest.raises(NotProtobuf):
        list(fields(bytes.fromhex(raw)))


def test_errors_name_chain_and_reason() -> None:
    with pytest.raises(BursarError, match=r"on tron: .*mistyped"):
        CODEC.check_address("tron", SHOP[:-1] + ("2" if SHOP[-1] != "2" else "3"))
