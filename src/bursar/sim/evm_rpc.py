"""JSON-RPC of one EVM node: what it answers to each method, from its own view of the chain.

A `View` may be behind (`lag`), have forgotten old receipts and old state (`keeps`), hold another mempool than the block
makers, or be on a fork of its own (`world` is another one). What it says is true of that view; lies are told on top, in
`evm_nodes`. Errors are those of real nodes, in their words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from eth_hash.auto import keccak

from bursar.sim.chain_state import COIN, Movement, Read, Reverted
from bursar.sim.evm_tx import BASE_GAS, RefusedTransaction, Tx, read_transaction
from bursar.sim.evm_world import MAKER, Block, Receipt, World

TRANSFER_TOPIC: Final = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
BALANCE_OF: Final = bytes.fromhex("70a08231")
DECIMALS: Final = bytes.fromhex("313ce567")
ERROR_STRING: Final = bytes.fromhex("08c379a0")  # Error(string)
CODE: Final = "0x60806040"  # any: contracts are built in
BLOOM_BITS: Final = 2_048
LOG_BLOCKS_MAX: Final = 1_000


class RpcError(Exception):
    """What a node answers instead of a result."""

    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class View:
    """One node's view, and its answers. `lag`, `keeps` and `world` may be changed at any time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pool = world.new_pool()
        self.lag = 0  # blocks that it has not seen yet
        self.keeps: int | None = None  # blocks, from its head, whose receipts and state it still has; None: all
        self.chain_id: int | None = None  # what it says; None: the truth
        self.on_accepted: Callable[[Tx], None] = lambda _tx: None  # gossip
        self._methods: dict[str, Callable[..., Any]] = {
            "eth_blockNumber": lambda: hex(self.head),
            "eth_call": self._call,
            "eth_chainId": lambda: hex(self._id()),
            "eth_estimateGas": self._estimate_gas,
            "eth_feeHistory": self._fee_history,
            "eth_gasPrice": lambda: hex(self.world.base_fee() + self.world.suggested_tip()),
            "eth_getBalance": lambda address, tag="latest": hex(self._state(tag)(COIN, address.lower())),
            "eth_getBlockByHash": self._block_by_hash,
            "eth_getBlockByNumber": self._block_by_number,
            "eth_getBlockReceipts": self._block_receipts,
            "eth_getCode": lambda address, _tag="latest": CODE if self.world.is_contract(address.lower()) else "0x",
            "eth_getLogs": self._logs,
            "eth_getTransactionByHash": self._transaction,
            "eth_getTransactionCount": self._count,
            "eth_getTransactionReceipt": self._receipt,
            "eth_maxPriorityFeePerGas": lambda: hex(self.world.suggested_tip()),
            "eth_sendRawTransaction": self._send,
            "net_version": lambda: str(self._id()),
        }

    @property
    def head(self) -> int:
        """The last block that it has seen."""
        return max(0, self.world.head.number - self.lag)

    def answer(self, method: str, params: Sequence[Any]) -> Any:
        """The result of a call, or RpcError."""
        called = self._methods.get(method)
        if called is None:
            raise RpcError(-32601, f"the method {method} does not exist/is not available")
        try:
            return called(*params)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise RpcError(-32602, f"invalid argument: {error}") from None

    # --- blocks and places ---

    def _id(self) -> int:
        return self.world.terms.chain_id if self.chain_id is None else self.chain_id

    def _number(self, tag: Any) -> int:
        """The height that a tag, a number or an EIP-1898 object names."""
        if isinstance(tag, dict):
            if "blockHash" not in tag:
                return self._number(tag["blockNumber"])
            block = self._named(tag["blockHash"])
            if block is None:
                raise RpcError(-32000, "header for hash not found")
            return block.number
        finality = self.world.terms.finality
        tags = {
            "latest": self.head,
            "pending": self.head,
            "safe": max(0, self.head - finality // 2),
            "finalized": max(0, self.head - finality),
            "earliest": 0,
        }
        return tags[tag] if tag in tags else int(tag, 16)

    def _kept(self, number: int) -> bool:
        return self.keeps is None or number > self.head - self.keeps

    def _state(self, tag: Any) -> Read:
        number = self._number(tag)
        if number > self.head:
            raise RpcError(-32000, "header not found")
        if not self._kept(number):
            raise RpcError(-32000, "missing trie node: the state of this block is pruned")
        return self.world.state.reader(number)

    def _named(self, hash: str) -> Block | None:
        block = self.world.block(hash.lower())
        return block if block is not None and block.number <= self.head else None

    def _block_by_number(self, tag: str, full: bool = False) -> Any:
        number = self._number(tag)
        return self._block(self.world.blocks[number], full) if number <= self.head else None

    def _block_by_hash(self, hash: str, full: bool = False) -> Any:
        block = self._named(hash)
        return None if block is None else self._block(block, full)

    def _block(self, block: Block, full: bool) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "number": hex(block.number),
            "hash": block.hash,
            "parentHash": block.parent,
            "timestamp": hex(block.timestamp),
            "gasLimit": hex(self.world.terms.gas_limit),
            "gasUsed": hex(block.gas_used),
            "miner": MAKER,
            "extraData": "0x" + block.extra.encode().hex(),
            "logsBloom": bloom(event for one in block.receipts for event in one.events),
            "difficulty": "0x0",
            "uncles": [],
            "transactions": [transaction_json(one.tx, block, one) if full else one.tx.hash for one in block.receipts],
        }
        if self.world.terms.dynamic_base_fee:
            shown["baseFeePerGas"] = hex(block.base_fee)
        return shown

    def _block_receipts(self, tag: str) -> Any:
        block = self._named(tag) if len(tag) == 66 else self.world.blocks[self._number(tag)]
        if block is None or block.number > self.head or not self._kept(block.number):
            return None
        return [receipt_json(block, one) for one in block.receipts]

    # --- transactions ---

    def _found(self, hash: str) -> tuple[Block, Receipt] | None:
        found = self.world.find(hash.lower())
        return found if found is not None and found[0].number <= self.head and self._kept(found[0].number) else None

    def _transaction(self, hash: str) -> Any:
        found = self._found(hash)
        if found is not None:
            return transaction_json(found[1].tx, *found)
        tx = self._waiting(hash)
        return None if tx is None else transaction_json(tx)

    def _waiting(self, hash: str) -> Tx | None:
        tx = self.pool.get(hash.lower())
        if tx is not None:
            self.pool.settle(tx.sender, self.world.nonce(tx.sender, self.head))
            tx = self.pool.get(tx.hash)
        return tx

    def _receipt(self, hash: str) -> Any:
        found = self._found(hash)
        return None if found is None else receipt_json(*found)

    def _count(self, address: str, tag: Any = "latest") -> str:
        sender = address.lower()
        nonce = self._state(tag)("nonce", sender)
        return hex(self.pool.next_nonce(sender, nonce) if tag == "pending" else nonce)

    def _send(self, raw: str) -> str:
        try:
            tx = read_transaction(bytes.fromhex(raw.removeprefix("0x")))
            if tx.chain_id != self._id():
                raise RefusedTransaction(f"invalid chain id for signer: have {tx.chain_id} want {self._id()}")
            if self.pool.get(tx.hash) is not None:
                self.on_accepted(tx)  # offered to the others again, so that one lost on the way is not lost for ever
            self.hear(tx)
        except RefusedTransaction as error:
            raise RpcError(-32000, str(error)) from None
        self.on_accepted(tx)
        return tx.hash

    def hear(self, tx: Tx) -> None:
        """Take a transaction into its own pool; RefusedTransaction if that does not fit its view."""
        nonce = self.world.nonce(tx.sender, self.head)
        self.pool.settle(tx.sender, nonce)
        self.pool.add(tx, nonce, self.world.balance(tx.sender, COIN, self.head))

    # --- calls and fees ---

    def _call(self, call: dict[str, Any], tag: Any = "latest") -> str:
        read, to, data = self._state(tag), call["to"].lower(), _calldata(call)
        token = self.world.tokens.get(to)
        if token is not None and data[:4] == BALANCE_OF and len(data) == 36:
            return _word(read(to, "0x" + data[16:].hex()))
        if token is not None and data == DECIMALS:
            return _word(token.decimals)
        return "0x" + self._dry_run(read, call).hex()

    def _dry_run(self, read: Read, call: dict[str, Any]) -> bytes:
        sender, value = call.get("from", "0x" + 40 * "0").lower(), int(call.get("value", "0x0"), 16)
        if read(COIN, sender) < value:
            raise RpcError(-32000, f"insufficient funds for transfer: address {sender}")
        try:
            return self.world.call(read, sender, call["to"].lower(), value, _calldata(call)).output
        except Reverted as reverted:
            text = f"execution reverted: {reverted.reason}" if reverted.reason else "execution reverted"
            raise RpcError(3, text, _revert_data(reverted.reason)) from None

    def _estimate_gas(self, call: dict[str, Any], tag: Any = "latest") -> str:
        self._dry_run(self._state(tag), call)
        data = _calldata(call)
        zeros = data.count(0)
        gas = BASE_GAS + 4 * zeros + 16 * (len(data) - zeros) + self.world.extra_gas(call["to"].lower(), data)
        if "gas" in call and int(call["gas"], 16) < gas:
            raise RpcError(-32000, f"gas required exceeds allowance ({int(call['gas'], 16)})")
        return hex(gas)

    def _fee_history(self, count: str | int, newest: Any, percentiles: Sequence[float] | None = None) -> dict[str, Any]:
        last = self._number(newest)
        first = max(0, last + 1 - (int(count, 16) if isinstance(count, str) else count))
        blocks = self.world.blocks[first : last + 1]
        after = self.world.blocks[last + 1].base_fee if last < self.world.head.number else self.world.base_fee()
        shown: dict[str, Any] = {
            "oldestBlock": hex(first),
            "baseFeePerGas": [hex(block.base_fee) for block in blocks] + [hex(after)],
            "gasUsedRatio": [block.gas_used / self.world.terms.gas_limit for block in blocks],
        }
        if percentiles:
            shown["reward"] = [[hex(tip) for tip in self._tips(block, percentiles)] for block in blocks]
        return shown

    def _tips(self, block: Block, percentiles: Sequence[float]) -> list[int]:
        tips = sorted(receipt.price - block.base_fee for receipt in block.receipts)
        if self.world.terms.background_gas:
            tips.append(self.world.terms.background_tip)
        return [tips[min(len(tips) - 1, int(len(tips) * one / 100))] if tips else 0 for one in percentiles]

    # --- logs ---

    def _logs(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        if "blockHash" in wanted:
            block = self._named(wanted["blockHash"])
            if block is None:
                raise RpcError(-32000, "unknown block")
            blocks: Iterable[Block] = (block,)
            first = block.number
        else:
            first = self._number(wanted.get("fromBlock", "latest"))
            last = min(self._number(wanted.get("toBlock", "latest")), self.head)
            if last - first >= LOG_BLOCKS_MAX:
                raise RpcError(-32005, f"block range is too wide: at most {LOG_BLOCKS_MAX} blocks")
            blocks = self.world.blocks[first : last + 1]
        if not self._kept(first):
            raise RpcError(4444, "pruned history unavailable")
        logs = [log for block in blocks for one in block.receipts for log in logs_json(block, one)]
        return [log for log in logs if _selected(log, wanted)]


def _calldata(call: dict[str, Any]) -> bytes:
    text: str = call.get("input") or call.get("data") or "0x"
    return bytes.fromhex(text[2:])


@lru_cache(4_096)
def _bloom_bits(value: str) -> int:
    """The three bits of an address or a topic."""
    hashed = keccak(bytes.fromhex(value[2:]))
    bits = 0
    for place in (0, 2, 4):
        bits |= 1 << int.from_bytes(hashed[place : place + 2], "big") % BLOOM_BITS
    return bits


def bloom(events: Iterable[Movement]) -> str:
    """The filter that a block has of its events."""
    bits = 0
    for event in events:
        for value in (event.contract, TRANSFER_TOPIC, _topic(event.sender), _topic(event.to)):
            bits |= _bloom_bits(value)
    return f"0x{bits:0{BLOOM_BITS // 4}x}"


def _topic(address: str) -> str:
    return "0x" + 24 * "0" + address[2:]


def _word(value: int) -> str:
    return f"0x{value:064x}"


def _revert_data(reason: str) -> str:
    if not reason:
        return "0x"
    text = reason.encode()
    padded = text.ljust(-(-len(text) // 32) * 32, b"\0")
    return "0x" + (ERROR_STRING + (32).to_bytes(32, "big") + len(text).to_bytes(32, "big") + padded).hex()


def _selected(log: dict[str, Any], wanted: dict[str, Any]) -> bool:
    addresses = wanted.get("address")
    if addresses and log["address"] not in _lower(addresses):
        return False
    topics = wanted.get("topics") or []
    return len(topics) <= len(log["topics"]) and all(
        not one or log["topics"][place] in _lower(one) for place, one in enumerate(topics)
    )


def _lower(one: str | Sequence[str]) -> list[str]:
    return [one.lower()] if isinstance(one, str) else [each.lower() for each in one]


# --- as JSON ---------------------------------------------------------------------------------------------------------


def transaction_json(tx: Tx, block: Block | None = None, receipt: Receipt | None = None) -> dict[str, Any]:
    """A transaction, in a block or waiting."""
    shown: dict[str, Any] = {
        "hash": tx.hash,
        "type": "0x0" if tx.legacy else "0x2",
        "chainId": hex(tx.chain_id),
        "nonce": hex(tx.nonce),
        "from": tx.sender,
        "to": tx.to,
        "value": hex(tx.value),
        "input": "0x" + tx.data.hex(),
        "gas": hex(tx.gas),
        "gasPrice": hex(tx.max_fee if receipt is None else receipt.price),
        "v": hex(tx.v),
        "r": hex(tx.r),
        "s": hex(tx.s),
        "blockHash": None if block is None else block.hash,
        "blockNumber": None if block is None else hex(block.number),
        "transactionIndex": None if receipt is None else hex(receipt.position),
    }
    if not tx.legacy:
        shown |= {"maxFeePerGas": hex(tx.max_fee), "maxPriorityFeePerGas": hex(tx.tip)}
        shown |= {"accessList": [], "yParity": hex(tx.v)}
    return shown


def receipt_json(block: Block, receipt: Receipt) -> dict[str, Any]:
    """What became of a transaction."""
    tx = receipt.tx
    return {
        "transactionHash": tx.hash,
        "transactionIndex": hex(receipt.position),
        "blockHash": block.hash,
        "blockNumber": hex(block.number),
        "from": tx.sender,
        "to": tx.to,
        "contractAddress": None,
        "status": "0x1" if receipt.ok else "0x0",
        "type": "0x0" if tx.legacy else "0x2",
        "gasUsed": hex(receipt.gas_used),
        "cumulativeGasUsed": hex(receipt.cumulative_gas),
        "effectiveGasPrice": hex(receipt.price),
        "logs": logs_json(block, receipt),
        "logsBloom": bloom(receipt.events),
    }


def logs_json(block: Block, receipt: Receipt) -> list[dict[str, Any]]:
    """The Transfer events of a transaction."""
    return [log_json(block, receipt, receipt.first_log + place, event) for place, event in enumerate(receipt.events)]


def log_json(block: Block, receipt: Receipt, index: int, event: Movement) -> dict[str, Any]:
    """One Transfer event."""
    return {
        "address": event.contract,
        "topics": [TRANSFER_TOPIC, _topic(event.sender), _topic(event.to)],
        "data": _word(event.amount),
        "blockNumber": hex(block.number),
        "blockHash": block.hash,
        "transactionHash": receipt.tx.hash,
        "transactionIndex": hex(receipt.position),
        "logIndex": hex(index),
        "removed": False,
    }
