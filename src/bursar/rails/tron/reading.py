"""What nodes say about blocks, transactions and what became of them, read strictly into plain values.

Whatever is not as the interface says makes the whole answer `Malformed`: half an answer would look like an absence.
Addresses here are their 21 bytes. The bytes of a transaction need not be believed: their hash is the transaction's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from bursar.rails.nodes import Malformed
from bursar.rails.tron.addresses import PREFIX
from bursar.rails.tron.codec import hash_of
from bursar.rails.tron.http import amount, hexadecimal, integer, items, record, text

TRANSFER_TOPIC: Final = "ddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"  # Transfer of TRC-20
# Wherever a message may have one: its length, and its 21 bytes. Found also where another one seems to begin before it.
_ADDRESS: Final = re.compile(rb"(?=\x15(\x41.{20}))", re.DOTALL)
_OWNERS: Final = ("owner_address", "transparent_from_address")  # whose account a contract spends from


class Header(msgspec.Struct, frozen=True):
    """A block without its transactions."""

    number: int
    id: str
    parent: str
    timestamp: int


class Block(msgspec.Struct, frozen=True):
    """A block with the hashes of all its transactions, and those of them that spend from certain addresses."""

    header: Header
    hashes: tuple[str, ...]
    own: tuple[tuple[str, bytes], ...]  # hash, address


class Transfer(msgspec.Struct, frozen=True):
    """A Transfer event of a token."""

    contract: bytes
    sender: bytes
    to: bytes
    amount: int
    place: int  # of the event, among all events of its transaction


class Info(msgspec.Struct, frozen=True):
    """What became of a transaction in a block."""

    hash: str
    block: int
    timestamp: int
    fee: int
    energy: int
    energy_fee: int
    result: str  # of a contract call: "SUCCESS", "REVERT", …; "" for a transfer of TRX
    failed: bool
    message: str
    transfers: tuple[Transfer, ...]


def header(value: Any, number: int | None = None) -> Header:
    """A block that must be there; with a number: that block and no other."""
    block = record(value)
    raw = record(record(block.get("block_header")).get("raw_data"))
    found = Header(
        integer(raw, "number"),
        hexadecimal(block.get("blockID"), 32),
        hexadecimal(raw.get("parentHash"), 32),
        integer(raw, "timestamp"),
    )
    if number is not None and found.number != number:
        raise Malformed(f"block {number} was asked for and {found.number} came")
    if int(found.id[:16], 16) != found.number:
        raise Malformed(f"the id of block {found.number} is of another block")
    return found


def block(value: Any, number: int, is_own: Callable[[bytes], bool] = lambda _: False) -> Block:
    """A whole block; the number is checked. `is_own`: asked about every address in the bytes of its transactions."""
    head = header(value, number)
    hashes, own = [], []
    for one in items(value.get("transactions")):
        found = record(one)
        hash_ = hexadecimal(found.get("txID"), 32)
        # The genesis block's transactions have no bytes of their own.
        raw = bytes.fromhex(hexadecimal(found.get("raw_data_hex", "")))
        if number and hash_of(raw) != hash_:
            raise Malformed(f"transaction {hash_} of block {number} is not what its bytes say")
        hashes.append(hash_)
        named = [owner for owner in dict.fromkeys(_ADDRESS.findall(raw)) if is_own(owner)]
        own += [(hash_, owner) for owner in named if owner in _owners(found)]
    return Block(head, tuple(hashes), tuple(own))


def _owners(transaction: dict[str, Any]) -> set[bytes]:
    """The accounts that a transaction of any kind spends from."""
    found = set()
    for contract in items(record(transaction.get("raw_data")).get("contract")):
        value = record(record(record(contract).get("parameter")).get("value"))
        found |= {bytes.fromhex(hexadecimal(value[name])) for name in _OWNERS if name in value}
    return found


def raw_data(value: Any, hash_: str) -> bytes | None:
    """The bytes of a transaction, which are known to be its own by their hash; None if the node does not have it."""
    found = record(value)
    if not found:
        return None
    raw = bytes.fromhex(hexadecimal(found.get("raw_data_hex")))
    if hash_of(raw) != hash_:
        raise Malformed("other bytes came than those of the transaction that was asked for")
    return raw


def info(value: Any, hash_: str) -> Info | None:
    """What became of a transaction; None if it is in no block that the node knows."""
    found = record(value)
    if not found:
        return None
    if hexadecimal(found.get("id"), 32) != hash_:
        raise Malformed("another transaction came than was asked for")
    receipt, said = record(found.get("receipt", {})), text(found, "result")
    if said not in ("", "SUCESS", "FAILED"):  # so spelt, where it is not left out
        raise Malformed("a result is FAILED or nothing")
    result = text(receipt, "result")
    if result and (said == "FAILED") is (result == "SUCCESS"):
        raise Malformed("the result of a transaction and that of its receipt contradict each other")
    return Info(
        hash=hash_,
        block=amount(found, "blockNumber"),
        timestamp=amount(found, "blockTimeStamp"),
        fee=amount(found, "fee"),
        energy=amount(receipt, "energy_usage_total"),
        energy_fee=amount(receipt, "energy_fee"),
        result=result,
        failed=said == "FAILED",
        message=bytes.fromhex(hexadecimal(found.get("resMessage", ""))).decode(errors="replace"),
        transfers=tuple(
            one
            for place, log in enumerate(items(found.get("log")))
            if (one := _transfer(record(log), place)) is not None
        ),
    )


def _transfer(log: dict[str, Any], place: int) -> Transfer | None:
    topics = [hexadecimal(topic, 32) for topic in items(log.get("topics"))]
    data = hexadecimal(log.get("data", ""))
    if len(topics) != 3 or topics[0] != TRANSFER_TOPIC or len(data) != 64:
        return None  # another event, or that of an NFT, which has other indexes
    return Transfer(
        contract=PREFIX + bytes.fromhex(hexadecimal(log.get("address"), 20)),
        sender=PREFIX + bytes.fromhex(topics[1][24:]),
        to=PREFIX + bytes.fromhex(topics[2][24:]),
        amount=int(data, 16),
        place=place,
    )


# --- the state of accounts and contracts -----------------------------------------------------------------------------


class Account(msgspec.Struct, frozen=True):
    """An account; one that was never activated does not exist, and has nothing."""

    exists: bool
    balance: int
    is_contract: bool


def account(value: Any, address: bytes) -> Account:
    """What a node says about an address."""
    found = record(value)
    if not found:
        return Account(False, 0, False)
    if hexadecimal(found.get("address")) != address.hex():
        raise Malformed("another account came than was asked for")
    return Account(True, integer(found, "balance"), text(found, "type") == "Contract")


class Called(msgspec.Struct, frozen=True):
    """What a contract would answer."""

    returned: bytes
    energy: int
    reverted: str = ""  # why the code refuses; "": it does not
    missing: bool = False  # there is no contract at the address


def called(value: Any) -> Called:
    """The answer of a dry run; Malformed if it says nothing about the contract, such as out of time."""
    found = record(value)
    outcome = record(found.get("result"))
    code, message = text(outcome, "code"), _words(text(outcome, "message"))
    if outcome.get("result") is not True:
        if code == "CONTRACT_VALIDATE_ERROR" and "not exist" in message:
            return Called(b"", 0, "there is no contract at the token's address", missing=True)
        raise Malformed(f"a dry run says {code}: {message[:200]}")
    returned = b"".join(bytes.fromhex(hexadecimal(part)) for part in items(found.get("constant_result")))
    ran = [record(one) for one in items(record(found.get("transaction", {})).get("ret"))]
    failed = bool(message) or any(one.get("ret") == "FAILED" for one in ran)
    reason = _reason(returned) or message or "it fails without a reason"
    return Called(returned, amount(found, "energy_used"), reason if failed else "")


def _words(message: str) -> str:
    """A message, which is in hexadecimal digits where addresses are."""
    try:
        return bytes.fromhex(message).decode(errors="replace")
    except ValueError:
        return message


def _reason(returned: bytes) -> str:
    """The reason that the code gave, where it gave one: Error(string)."""
    if not returned.startswith(bytes.fromhex("08c379a0")) or len(returned) < 68:
        return ""
    size = int.from_bytes(returned[36:68], "big")
    said = returned[68 : 68 + min(size, 800)].decode(errors="replace")[:200]
    return "".join(char if char.isprintable() else " " for char in said)


def chain_parameters(value: Any) -> dict[str, int]:
    """The chain's own settings, by key; those that are 0 have no value."""
    return {text(one, "key"): integer(one, "value") for one in map(record, items(record(value).get("chainParameter")))}
