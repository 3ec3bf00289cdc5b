"""EVM formats: vectors of the EIPs, eth-account as an independent oracle, and properties of every byte."""

from __future__ import annotations

import subprocess
import sys

import pytest
import rlp  # type: ignore[import-untyped]
from coincurve import PrivateKey
from eth_account import Account
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.rails.chain import (
    Codec,
    Decoded,
    Fee,
    InvalidAddress,
    Network,
    Order,
    Shape,
    Slot,
    Unbuildable,
    Undecodable,
)
from bursar.rails.evm.codec import CURVE_ORDER, EvmCodec, address_of, checksum_address, transfer_data

CODEC: Codec = EvmCodec()

KEY = PrivateKey(b"\x46" * 32)
SENDER = address_of(KEY.public_key.format(compressed=False))
TO = "0x3535353535353535353535353535353535353535"
TOKEN = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"

ETHEREUM = Network(name="ethereum", kind="evm", chain_id=1)
LEGACY = Network(name="old", kind="evm", chain_id=1, legacy_fees=True)

PAY_COIN = Order(payout="p1", to=TO, amount=10**18)
PAY_TOKEN = Order(payout="p2", to=TO, contract=TOKEN, amount=2_500_000)
FEE = Fee(gas_limit=21_000, price=30 * 10**9, tip=10**9)
GAS_PRICE = Fee(gas_limit=21_000, price=20 * 10**9)


def built(
    network: Network = ETHEREUM,
    order: Order = PAY_COIN,
    shape: Shape = Shape.PAY,
    nonce: int = 9,
    fee: Fee | None = None,
) -> bytes:
    fee = fee or (GAS_PRICE if network.legacy_fees else FEE)
    return CODEC.build(network, SENDER, order, shape, Slot(nonce=nonce), fee)


def signature(unsigned: bytes, key: PrivateKey = KEY) -> bytes:
    return key.sign_recoverable(CODEC.digest(unsigned), hasher=None)


# --- addresses -------------------------------------------------------------------------------------------------------

EIP_55 = [
    "0x52908400098527886E0F7030069857D2E4169EE7",
    "0x8617E340B3D01FA5F11F306F4090FD50E238070D",
    "0xde709f2102306220921060314715629080e2fb77",
    "0x27b1fdb04752bbc536007a920d24acb045561c26",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
]


@pytest.mark.parametrize("address", EIP_55)
def test_an_address_is_accepted_in_lower_upper_and_checksum_case(address: str) -> None:
    for text in (address, address.lower(), "0x" + address[2:].upper()):
        assert CODEC.check_address("ethereum", text) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1Beaed", "checksum"),
        ("5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "0x"),
        ("0X5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "0x"),
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAe", "40"),
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed0", "40"),
        ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed\n", "40"),
        (" 0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "0x"),
        ("0x" + 40 * "0", "zero address"),
        ("0x" + 40 * "\uff11", "40"),  # full-width digits
        ("0x" + 40 * "g", "40"),
        ("", "0x"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidAddress, match=why):
        CODEC.check_address("ethereum", text)


@given(st.binary(min_size=20, max_size=20).filter(any), st.integers(0, 39))
def test_one_letter_in_the_wrong_case_is_refused(raw: bytes, position: int) -> None:
    address = checksum_address(raw)
    digits = list(address[2:])
    digits[position] = digits[position].swapcase()
    changed = "0x" + "".join(digits)
    if changed[2:] in (changed[2:].lower(), changed[2:].upper(), address[2:]):  # also if that digit is no letter
        assert CODEC.check_address("ethereum", changed) == address
    else:
        with pytest.raises(InvalidAddress):
            CODEC.check_address("ethereum", changed)


# --- known transactions ----------------------------------------------------------------------------------------------


def test_the_example_of_eip_155() -> None:
    unsigned = built(LEGACY)
    assert unsigned.hex() == (
        "ec098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a764000080018080"
    )
    assert CODEC.digest(unsigned).hex() == "daf5a779ae972f972197303d7b574746c7ef83eadac0f2791ad23db92e4c8e53"
    raw = CODEC.signed(unsigned, signature(unsigned), SENDER).raw
    assert raw.hex() == (
        "f86c098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a764000080"
        "25a028ef61340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276"
        "a067cbe9d8997f761aecb703304b3800ccf555c9f3dc64214b297fb1966a3b6d83"
    )


@pytest.mark.parametrize("network", [ETHEREUM, LEGACY, Network(name="bsc", kind="evm", chain_id=56)])
@pytest.mark.parametrize("order", [PAY_COIN, PAY_TOKEN])
@pytest.mark.parametrize("shape", Shape)
def test_signed_bytes_are_those_that_eth_account_makes(network: Network, order: Order, shape: Shape) -> None:
    unsigned = built(network, order, shape, nonce=7)
    made = CODEC.signed(unsigned, signature(unsigned), SENDER)
    fields: dict[str, object] = {"nonce": 7, "gas": 21_000, "chainId": network.chain_id}
    if network.legacy_fees:
        fields |= {"gasPrice": GAS_PRICE.price}
    else:
        fields |= {"type": 2, "maxFeePerGas": FEE.price, "maxPriorityFeePerGas": FEE.tip}
    if shape is Shape.CANCEL:
        fields |= {"to": SENDER, "value": 0}
    elif order.contract:
        fields |= {"to": TOKEN, "value": 0, "data": transfer_data(TO, order.amount)}
    else:
        fields |= {"to": TO, "value": order.amount}
    oracle = Account.sign_transaction(fields, KEY.secret)
    assert made.raw == bytes(oracle.raw_transaction)
    assert made.hash == "0x" + bytes(oracle.hash).hex()
    assert Account.recover_transaction(made.raw) == SENDER


# --- what build refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (Order(payout="p", to=TO, amount=0), "amount 0"),
        (Order(payout="p", to=TO, amount=-1), "amount -1"),
        (Order(payout="p", to=TO, amount=2**256), "amount"),
        (Order(payout="p", to=TO, contract=TOKEN, amount=2**256), "amount"),
        (Order(payout="p", to=TO, amount=1, memo="invoice 7"), "memo"),
    ],
)
def test_a_payment_that_no_transaction_can_carry_is_refused(order: Order, why: str) -> None:
    with pytest.raises(Unbuildable, match=why):
        built(order=order)


@pytest.mark.parametrize(
    ("slot", "fee", "why"),
    [
        (Slot(), FEE, "nonce"),
        (Slot(nonce=1, expires=7), FEE, "nonce"),
        (Slot(nonce=2**64 - 1), FEE, "nonce"),
        (Slot(nonce=-1), FEE, "nonce"),
        (Slot(nonce=1), Fee(gas_limit=0, price=1), "gas limit"),
        (Slot(nonce=1), Fee(gas_limit=21_000, price=0), "fee"),
        (Slot(nonce=1), Fee(gas_limit=21_000, price=1, tip=2), "fee"),
    ],
)
def test_slots_and_fees_out_of_bounds_are_refused(slot: Slot, fee: Fee, why: str) -> None:
    with pytest.raises(Unbuildable, match=why):
        CODEC.build(ETHEREUM, SENDER, PAY_COIN, Shape.PAY, slot, fee)


def test_the_bounds_themselves_are_allowed() -> None:
    """The largest chain id, nonce, gas limit and amount that a transaction may have."""
    network = Network(name="edge", kind="evm", chain_id=2**63 - 1)
    order, fee = Order(payout="p", to=TO, amount=2**256 - 1), Fee(gas_limit=2**63 - 1, price=2**256 - 1, tip=2**256 - 1)
    found = CODEC.decode(built(network, order, nonce=2**64 - 2, fee=fee))
    assert (found.chain_id, found.amount, found.slot.nonce, found.fee) == (2**63 - 1, 2**256 - 1, 2**64 - 2, fee)


def test_a_gas_price_has_no_tip() -> None:
    with pytest.raises(Unbuildable, match="tip"):
        built(LEGACY, fee=FEE)


def test_a_payment_to_the_zero_address_is_not_built() -> None:
    for order in (
        Order(payout="p", to="0x" + 40 * "0", amount=1),
        Order(payout="p", to=TO, contract="0x" + 40 * "0", amount=1),
    ):
        with pytest.raises(InvalidAddress):
            built(order=order)


# --- what decode refuses ---------------------------------------------------------------------------------------------


def as_list(unsigned: bytes) -> list[object]:
    return list(rlp.decode(unsigned[1:]))


def changed(position: int, value: object) -> bytes:
    """The bytes of a coin payment with one field replaced, encoded without a mistake."""
    fields = as_list(built())
    fields[position] = value
    return b"\x02" + bytes(rlp.encode(fields))


ACCESS_LIST = [[bytes.fromhex(TOKEN[2:]), []]]


@pytest.mark.parametrize(
    ("unsigned", "why"),
    [
        (b"", "RLP|list"),
        (b"\x02", "RLP|list"),
        (b"\x01" + built()[1:], "RLP|list|fields"),  # an access-list transaction
        (b"\x03" + built()[1:], "RLP|list|fields"),  # a blob transaction
        (built() + b"\0", "RLP"),
        (built()[:-1], "RLP"),
        (b"\x02" + bytes(rlp.encode([*as_list(built()), b""])), "9 fields"),
        (changed(8, ACCESS_LIST), "more than a transfer"),
        (changed(5, b""), "create a contract"),
        (changed(5, bytes(20)), "zero address"),
        (changed(5, bytes(19) + b"\x01\x02"), "create a contract"),
        (changed(5, []), "list"),
        (changed(1, b"\0\x09"), "number"),
        (changed(1, b"\0"), "number"),
        (changed(6, b"\x01" + bytes(32)), "number"),
        (changed(0, b""), "chain id"),
        (changed(0, (2**63).to_bytes(8, "big")), "chain id"),
        (changed(1, (2**64 - 1).to_bytes(8, "big")), "nonce"),
        (changed(2, (30 * 10**9 + 1).to_bytes(5, "big")), "fee"),  # a tip above the price
        (changed(3, b""), "fee"),
        (changed(4, b""), "gas limit"),
        (changed(4, (2**63).to_bytes(8, "big")), "gas limit"),
        (changed(7, b"\x00"), "calldata"),
        (changed(7, transfer_data(TO, 1)), "coin and tokens"),
    ],
)
def test_nothing_but_a_transfer_can_be_decoded(unsigned: bytes, why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        CODEC.decode(unsigned)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes.fromhex("095ea7b3") + transfer_data(TO, 1)[4:], "calldata"),  # approve
        (bytes.fromhex("23b872dd") + transfer_data(TO, 1)[4:], "calldata"),  # transferFrom
        (transfer_data(TO, 1) + b"\0", "calldata"),
        (transfer_data(TO, 1)[:-1], "calldata"),
        (transfer_data(TO, 1)[:4] + b"\x01" + transfer_data(TO, 1)[5:], "calldata"),  # bits above the address
        (transfer_data("0x" + 40 * "0", 1), "zero address"),
        (transfer_data(TO, 0), "no tokens"),
    ],
)
def test_no_other_call_of_a_token_can_be_decoded(data: bytes, why: str) -> None:
    fields = as_list(built(order=PAY_TOKEN))
    fields[7] = data
    with pytest.raises(Undecodable, match=why):
        CODEC.decode(b"\x02" + bytes(rlp.encode(fields)))


def test_a_legacy_transaction_without_chain_is_refused() -> None:
    """Such a signature would be valid on every chain."""
    fields = rlp.decode(built(LEGACY))
    for without in (fields[:6], [*fields[:6], b"", b"", b""]):
        with pytest.raises(Undecodable):
            CODEC.decode(rlp.encode(without))


def test_a_digest_is_only_of_what_can_be_read() -> None:
    with pytest.raises(Undecodable):
        CODEC.digest(changed(8, ACCESS_LIST))


# --- properties ------------------------------------------------------------------------------------------------------

addresses = st.binary(min_size=20, max_size=20).filter(any).map(checksum_address)
words = st.integers(1, 2**256 - 1)
networks = st.builds(
    Network,
    name=st.just("any"),
    kind=st.just("evm"),
    chain_id=st.integers(1, 2**63 - 1),
    legacy_fees=st.booleans(),
)


@st.composite
def transactions(draw: st.DrawFn) -> tuple[Network, str, Order, Shape, Slot, Fee]:
    network = draw(networks)
    price = draw(words)
    tip = 0 if network.legacy_fees else draw(st.integers(0, price))
    order = Order(payout="p", to=draw(addresses), contract=draw(st.one_of(st.just(""), addresses)), amount=draw(words))
    fee = Fee(gas_limit=draw(st.integers(1, 2**63 - 1)), price=price, tip=tip)
    shape = draw(st.sampled_from(Shape))
    return network, draw(addresses), order, shape, Slot(nonce=draw(st.integers(0, 2**64 - 2))), fee


@given(transactions())
def test_what_is_built_decodes_to_what_was_asked(made: tuple[Network, str, Order, Shape, Slot, Fee]) -> None:
    network, sender, order, shape, slot, fee = made
    found = CODEC.decode(CODEC.build(*made))
    if shape is Shape.CANCEL:
        expected = Decoded(chain_id=network.chain_id, to=sender, contract="", amount=0, slot=slot, fee=fee)
    else:
        expected = Decoded(
            chain_id=network.chain_id, to=order.to, contract=order.contract, amount=order.amount, slot=slot, fee=fee
        )
    assert found == expected


def decoded_or_none(unsigned: bytes) -> Decoded | None:
    try:
        return CODEC.decode(unsigned)
    except Undecodable:
        return None


@settings(max_examples=25)
@given(transactions(), st.integers(1, 255))
def test_a_change_of_any_one_byte_is_noticed(made: tuple[Network, str, Order, Shape, Slot, Fee], flip: int) -> None:
    """Either the bytes can't be read any more, or they are read as something else; never as the same payment."""
    unsigned = CODEC.build(*made)
    meaning = CODEC.decode(unsigned)
    for position in range(len(unsigned)):
        other = bytearray(unsigned)
        other[position] ^= flip
        assert decoded_or_none(bytes(other)) != meaning, position


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    for unsigned in (data, b"\x02" + data):
        assert decoded_or_none(unsigned) is None
        with pytest.raises(Undecodable):
            CODEC.read(unsigned)


@given(transactions(), st.binary(min_size=32, max_size=32).filter(lambda b: 0 < int.from_bytes(b, "big") < CURVE_ORDER))
def test_signed_bytes_read_back_with_their_signer(
    made: tuple[Network, str, Order, Shape, Slot, Fee], secret: bytes
) -> None:
    key = PrivateKey(secret)
    sender = address_of(key.public_key.format(compressed=False))
    unsigned = CODEC.build(*made)
    signed = CODEC.signed(unsigned, signature(unsigned, key), sender)
    assert CODEC.read(signed.raw) == (CODEC.decode(unsigned), sender, signed.hash)


# --- signatures ------------------------------------------------------------------------------------------------------


def test_a_signature_of_another_key_is_refused() -> None:
    unsigned = built()
    with pytest.raises(Undecodable, match="not by"):
        CODEC.signed(unsigned, signature(unsigned, PrivateKey(b"\x47" * 32)), SENDER)


def test_a_signature_of_other_bytes_is_refused() -> None:
    with pytest.raises(Undecodable, match="not by"):
        CODEC.signed(built(nonce=9), signature(built(nonce=10)), SENDER)


@pytest.mark.parametrize("where", ["unsigned", "raw"])
def test_the_second_signature_with_high_s_is_refused(where: str) -> None:
    """(r, n - s) with the other recovery id recovers the same key: the same payment under another hash."""
    unsigned = built()
    first = signature(unsigned)
    high = CURVE_ORDER - int.from_bytes(first[32:64], "big")
    second = first[:32] + high.to_bytes(32, "big") + bytes([1 - first[64]])
    if where == "unsigned":
        with pytest.raises(Undecodable, match="out of bounds"):
            CODEC.signed(unsigned, second, SENDER)
    else:
        fields = [*as_list(unsigned), second[64:].lstrip(b"\0"), second[:32], second[32:64]]
        with pytest.raises(Undecodable, match="out of bounds"):
            CODEC.read(b"\x02" + bytes(rlp.encode(fields)))


@pytest.mark.parametrize(
    "malformed",
    [
        b"",
        bytes(64),
        bytes(65),
        bytes(66),
        b"\x01" * 64 + b"\x1b",
        b"\xff" * 64 + b"\0",
        b"\0" * 31 + b"\x05" + b"\x01" * 33,
    ],
)
def test_a_malformed_signature_is_refused(malformed: bytes) -> None:
    with pytest.raises(Undecodable):
        CODEC.signed(built(), malformed, SENDER)


@pytest.mark.parametrize("v", [2, 27, 300])
def test_signed_bytes_with_an_impossible_recovery_id_are_refused(v: int) -> None:
    unsigned = built()
    made = signature(unsigned)
    fields = [*as_list(unsigned), v.to_bytes(2, "big").lstrip(b"\0"), made[:32], made[32:64]]
    with pytest.raises(Undecodable):
        CODEC.read(b"\x02" + bytes(rlp.encode(fields)))


@pytest.mark.parametrize("v", [0, 27, 28, 34, 35, 36])
def test_signed_legacy_bytes_that_are_valid_on_every_chain_are_refused(v: int) -> None:
    """Before EIP-155 a signature named no chain."""
    unsigned = built(LEGACY)
    made = signature(unsigned)
    fields = [*rlp.decode(unsigned)[:6], v.to_bytes(1, "big").lstrip(b"\0"), made[:32], made[32:64]]
    with pytest.raises(Undecodable):
        CODEC.read(rlp.encode(fields))


def loaded(imported: str) -> set[str]:
    """The modules in a fresh process after an import."""
    program = f"import sys, {imported}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_the_library_alone_does_not_load_the_chains_libraries() -> None:
    assert not loaded("bursar, bursar.rails.chain") & {"rlp", "eth_hash", "eth_utils", "eth_account", "coincurve"}


def test_the_codec_loads_nothing_that_talks_to_nodes() -> None:
    """The signer imports it."""
    found = {name for name in loaded("bursar.rails.evm.codec") if name.startswith(("httpx", "bursar.rails.evm."))}
    assert found == {"bursar.rails.evm.codec"}
