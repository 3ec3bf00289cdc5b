"""What nodes say about blocks, transactions and receipts is read whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.rails.evm_fake import ALICE, COIN, TOKEN, TOKENS, WALLET, FakeNode, World

from bursar.rails.evm import reading
from bursar.rails.evm.reading import TRANSFER_TOPIC, Transfer
from bursar.rails.evm.rpc import Malformed

ADDRESSES = frozenset({WALLET.lower()})


@pytest.fixture
def world() -> World:
    """A payment of tokens and one of coin, in the first block."""
    world = World()
    world.submit(world.sign(TOKENS))
    world.submit(world.sign(COIN, nonce=1))
    world.chain.mine()
    return world


@pytest.fixture
def node(world: World) -> FakeNode:
    return world.nodes["a"]


def hashes(world: World) -> list[str]:
    return [one.signed.hash for one in world.chain.blocks[1].transactions]


def test_what_was_asked_for_must_be_what_came(world: World, node: FakeNode) -> None:
    first, second = hashes(world)
    with pytest.raises(Malformed, match="another transaction"):
        reading.transaction(node.eth_getTransactionByHash(second), first)
    with pytest.raises(Malformed, match="another receipt"):
        reading.receipt(node.eth_getTransactionReceipt(second), first)
    with pytest.raises(Malformed, match="block 0 was asked for and 1 came"):
        reading.header(node.eth_getBlockByNumber("0x1", False), 0)


def test_what_is_not_there_is_none(world: World) -> None:
    assert reading.transaction(None, hashes(world)[0]) is None
    assert reading.receipt(None, hashes(world)[0]) is None
    assert reading.header_hash(None, 1) is None
    with pytest.raises(Malformed):
        reading.header(None, 1)  # of a block that must be there


@pytest.mark.parametrize("missing", ["transactionHash", "blockNumber", "blockHash", "status", "gasUsed", "logs"])
def test_a_receipt_with_a_part_missing_is_none_at_all(world: World, node: FakeNode, missing: str) -> None:
    receipt = node.eth_getTransactionReceipt(hashes(world)[0])
    del receipt[missing]
    with pytest.raises(Malformed):
        reading.receipt(receipt, hashes(world)[0])


@pytest.mark.parametrize("change", [{"status": "0x2"}, {"logs": None}, {"logs": {}}, {"effectiveGasPrice": 7}])
def test_a_receipt_with_a_part_of_another_kind_is_none_at_all(
    world: World, node: FakeNode, change: dict[str, Any]
) -> None:
    with pytest.raises(Malformed):
        reading.receipt(node.eth_getTransactionReceipt(hashes(world)[0]) | change, hashes(world)[0])


@pytest.mark.parametrize("missing", ["hash", "from", "nonce", "to", "value", "input"])
def test_a_transaction_with_a_part_missing_is_none_at_all(world: World, node: FakeNode, missing: str) -> None:
    transaction = node.eth_getTransactionByHash(hashes(world)[0])
    del transaction[missing]
    with pytest.raises(Malformed):
        reading.transaction(transaction, hashes(world)[0])


def logs(world: World, node: FakeNode, **change: Any) -> tuple[Transfer, ...]:
    receipt = node.eth_getTransactionReceipt(hashes(world)[0])
    receipt["logs"][0] |= change
    found = reading.receipt(receipt, hashes(world)[0])
    assert found is not None
    return found.transfers


def test_transfers_are_read_from_logs(world: World, node: FakeNode) -> None:
    assert logs(world, node) == (Transfer(TOKEN.lower(), WALLET.lower(), ALICE.lower(), TOKENS.amount, 0),)


@pytest.mark.parametrize(
    "change",
    [
        {"topics": []},
        {"topics": ["0x" + 64 * "1"]},  # another event
        {"topics": [TRANSFER_TOPIC, "0x" + 64 * "1"]},  # nothing indexed but the sender
        {"topics": [TRANSFER_TOPIC] + 3 * ["0x" + 64 * "1"], "data": "0x"},  # an NFT's
        {"data": "0x"},
    ],
)
def test_other_events_are_no_transfers(world: World, node: FakeNode, change: dict[str, Any]) -> None:
    assert logs(world, node, **change) == ()


@pytest.mark.parametrize("change", [{"topics": None}, {"topics": ["0x12"]}, {"topics": [5]}, {"data": "7"}])
def test_a_log_that_can_not_be_read_spoils_the_receipt(world: World, node: FakeNode, change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        logs(world, node, **change)


def test_a_block_is_read_with_all_its_transactions(world: World, node: FakeNode) -> None:
    found = reading.block(node.eth_getBlockByNumber("0x1", True), 1, ADDRESSES)
    assert found.hashes == tuple(hashes(world))
    assert [one.nonce for one in found.own] == [0, 1]
    assert reading.block(node.eth_getBlockByNumber("0x1", True), 1, frozenset()).own == ()


@pytest.mark.parametrize(
    "change",
    [
        {"transactionIndex": "0x1"},
        {"transactionIndex": None},
        {"blockHash": "0x" + 64 * "9"},
        {"blockHash": None},
        {"from": None},
        {"hash": "0x12"},
    ],
)
def test_a_block_with_a_transaction_that_is_not_whole_is_none_at_all(node: FakeNode, change: dict[str, Any]) -> None:
    whole = node.eth_getBlockByNumber("0x1", True)
    whole["transactions"][0] |= change
    with pytest.raises(Malformed):
        reading.block(whole, 1, ADDRESSES)


@pytest.mark.parametrize("listed", [None, {}, "0x", ["0x" + 64 * "1"]])
def test_a_block_without_a_list_of_transactions_is_none_at_all(node: FakeNode, listed: Any) -> None:
    with pytest.raises(Malformed):
        reading.block(node.eth_getBlockByNumber("0x1", True) | {"transactions": listed}, 1, ADDRESSES)


def test_a_transaction_that_creates_a_contract_has_no_recipient(world: World, node: FakeNode) -> None:
    found = reading.transaction(node.eth_getTransactionByHash(hashes(world)[0]) | {"to": None}, hashes(world)[0])
    assert found is not None
    assert found.to == ""
