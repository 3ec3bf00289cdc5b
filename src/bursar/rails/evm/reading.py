"""What nodes say about blocks, transactions and receipts, read strictly into plain values.

A field that is missing or is not what the interface says makes the whole answer `Malformed`: half an answer would look
like an absence. Addresses and hashes are lower-case text here; `same` compares an address of ours with one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec
from eth_hash.auto import keccak

from bursar.rails.evm.rpc import Malformed, data, field, fixed, quantity

TRANSFER_TOPIC = (
    "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"  # Transfer(address,address,uint256)
)
BLOOM_BYTES = 256
BLOOM_BITS = 8 * BLOOM_BYTES


class Header(msgspec.Struct, frozen=True):
    """A block without its transactions."""

    number: int
    hash: str
    parent: str


class Transaction(msgspec.Struct, frozen=True):
    """A transaction as a node has it, in its pool (no block) or in a block."""

    hash: str
    sender: str
    nonce: int
    to: str  # "": it creates a contract
    value: int
    data: bytes
    block: int | None
    block_hash: str | None


class Offered(msgspec.Struct, frozen=True):
    """Who has signed a transaction, in which slot, and the most that it can cost."""

    sender: str
    nonce: int
    gas: int
    price: int  # the most per unit of gas


class Transfer(msgspec.Struct, frozen=True):
    """A Transfer event of a token."""

    contract: str
    sender: str
    to: str
    amount: int
    index: int


class Receipt(msgspec.Struct, frozen=True):
    """What became of a transaction in a block."""

    hash: str
    block: int
    block_hash: str
    succeeded: bool
    gas_used: int
    gas_price: int
    transfers: tuple[Transfer, ...]
    first_index: int = 0  # of its first event; the numbers of events run through the whole block

    @property
    def fee(self) -> int:
        """What it has cost."""
        return self.gas_used * self.gas_price


class Block(msgspec.Struct, frozen=True):
    """A block with the hashes of all its transactions, and those that certain addresses have signed."""

    header: Header
    hashes: tuple[str, ...]
    own: tuple[Transaction, ...]


class Incoming(msgspec.Struct, frozen=True):
    """A block, and those of its transactions that may bring something to certain addresses."""

    header: Header
    bloom: int  # of all its events: it never lacks one that there is
    hashes: tuple[str, ...]
    paying: tuple[Transaction, ...]


def same(ours: str, theirs: str) -> bool:
    """Whether an address of ours is the one that a node names."""
    return ours.lower() == theirs


def header(value: Any, number: int | None = None) -> Header:
    """A block that must be there; with a number: that block and no other."""
    found = Header(
        quantity(field(value, "number")), fixed(field(value, "hash"), 32), fixed(field(value, "parentHash"), 32)
    )
    if number is not None and found.number != number:
        raise Malformed(f"block {number} was asked for and {found.number} came")
    return found


def header_hash(value: Any, number: int) -> str | None:
    """The hash of a block; None if the node does not have it."""
    return None if value is None else header(value, number).hash


def transaction(value: Any, hash_: str) -> Transaction | None:
    """The transaction of that hash; None if the node does not have it."""
    if value is None:
        return None
    found = _transaction(value)
    if found.hash != hash_.lower():
        raise Malformed("another transaction came than was asked for")
    return found


def offered(value: Any, hash_: str) -> Offered | None:
    """What the transaction of that hash offers, also while it is in no block; None if the node does not have it."""
    found = transaction(value, hash_)
    if found is None:
        return None
    price = value.get("maxFeePerGas", value.get("gasPrice"))
    return Offered(found.sender, found.nonce, quantity(field(value, "gas")), quantity(price))


def _transaction(value: Any) -> Transaction:
    to, block, block_hash = field(value, "to"), value.get("blockNumber"), value.get("blockHash")
    return Transaction(
        hash=fixed(field(value, "hash"), 32),
        sender=fixed(field(value, "from"), 20),
        nonce=quantity(field(value, "nonce")),
        to="" if to is None else fixed(to, 20),
        value=quantity(field(value, "value")),
        data=data(field(value, "input")),
        block=None if block is None else quantity(block),
        block_hash=None if block_hash is None else fixed(block_hash, 32),
    )


def receipt(value: Any, hash_: str) -> Receipt | None:
    """The receipt of that hash; None if the transaction is in no block that the node knows."""
    if value is None:
        return None
    if fixed(field(value, "transactionHash"), 32) != hash_.lower():
        raise Malformed("another receipt came than was asked for")
    status = quantity(field(value, "status"))
    if status not in (0, 1):
        raise Malformed("a receipt's status is 0 or 1")
    logs = field(value, "logs")
    if not isinstance(logs, list):
        raise Malformed("a receipt's logs are a list")
    return Receipt(
        hash=hash_.lower(),
        block=quantity(field(value, "blockNumber")),
        block_hash=fixed(field(value, "blockHash"), 32),
        succeeded=status == 1,
        gas_used=quantity(field(value, "gasUsed")),
        gas_price=quantity(field(value, "effectiveGasPrice")),
        transfers=tuple(_transfers(logs)),
        first_index=min((quantity(field(log, "logIndex")) for log in logs), default=0),
    )


def block_receipts(value: Any, hashes: Sequence[str]) -> list[Receipt]:
    """The receipts of a whole block, which has these transactions."""
    if not isinstance(value, list) or len(value) != len(hashes):
        raise Malformed("the receipts of a block are one for each of its transactions")
    found = [one for got, hash_ in zip(value, hashes, strict=True) if (one := receipt(got, hash_)) is not None]
    if len(found) != len(hashes):
        raise Malformed("a receipt of the block is missing")
    return found


def block_transfers(value: Any, block_hash: str) -> list[Transfer]:
    """The Transfer events among the logs of a block that was asked for by its hash."""
    return list(_transfers(_logs(value, block_hash)))


def transfers_by_hash(value: Any, block_hash: str) -> dict[str, list[Transfer]]:
    """The same, by the hash of the transaction that caused them."""
    found: dict[str, list[Transfer]] = {}
    for log in _logs(value, block_hash):
        found.setdefault(fixed(field(log, "transactionHash"), 32), []).extend(_transfers([log]))
    return found


def _logs(value: Any, block_hash: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed("logs are a list")
    if any(fixed(field(log, "blockHash"), 32) != block_hash for log in value):
        raise Malformed("a log of another block came than was asked for")
    return value


def _transfers(logs: list[Any]) -> Iterable[Transfer]:
    for log in logs:
        topics = field(log, "topics")
        if not isinstance(topics, list):
            raise Malformed("a log's topics are a list")
        if not topics or fixed(topics[0], 32) != TRANSFER_TOPIC:
            continue
        words = [fixed(topic, 32) for topic in topics[1:]]
        amount = data(field(log, "data"))
        if len(words) != 2 or len(amount) != 32:
            continue  # the same event with other indexes: an NFT's
        yield Transfer(
            contract=fixed(field(log, "address"), 20),
            sender="0x" + words[0][26:],
            to="0x" + words[1][26:],
            amount=int.from_bytes(amount, "big"),
            index=quantity(field(log, "logIndex")),
        )


def block(value: Any, number: int, addresses: Container[str]) -> Block:
    """A whole block. `Malformed` if any of its transactions is missing or not in full."""
    head, hashes, listed = _whole(value, number)
    own = (_transaction(one) for one in listed if fixed(field(one, "from"), 20) in addresses)
    return Block(head, hashes, tuple(own))


def incoming(value: Any, number: int, paying: Callable[[Transaction], bool]) -> Incoming:
    """A whole block, likewise, with the transactions that are chosen."""
    head, hashes, listed = _whole(value, number)
    bloom = int(fixed(field(value, "logsBloom"), BLOOM_BYTES), 16)
    return Incoming(head, bloom, hashes, tuple(one for one in map(_transaction, listed) if paying(one)))


def _whole(value: Any, number: int) -> tuple[Header, tuple[str, ...], list[Any]]:
    """A block whose transactions are all there, with their hashes."""
    head = header(value, number)
    listed = field(value, "transactions")
    if not isinstance(listed, list):
        raise Malformed("a block's transactions are a list")
    hashes = []
    for index, one in enumerate(listed):
        if quantity(field(one, "transactionIndex")) != index or fixed(field(one, "blockHash"), 32) != head.hash:
            raise Malformed(f"transaction {index} of block {number} is missing")
        hashes.append(fixed(field(one, "hash"), 32))
    return head, tuple(hashes), listed


def in_bloom(bloom: int, value: str) -> bool:
    """Whether a block may have an event with this address or topic. "No" is certain."""
    hashed = keccak(bytes.fromhex(value[2:]))
    return all(bloom >> (int.from_bytes(hashed[at : at + 2], "big") % BLOOM_BITS) & 1 for at in (0, 2, 4))
