"""EVM nodes on a simulated chain, behind HTTP that breaks: each with its own view, its own troubles and its own lies.

`Nodes.transport(sleep)` is what a rail uses instead of an HTTP client: the same signature, the same exceptions. What
can go wrong on the way is in `chain_faults`.

A transaction that a node accepts is offered to the other nodes and to the block makers. With trouble that fails now and
then: the node has it, and it is never mined unless the same bytes are sent again.

Nothing here decides what is true of the chain (`evm_world`) or how a node words it (`evm_rpc`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from bursar.sim.chain_faults import FaultyNetwork, HttpStatus, Lie, Machine, Sleep
from bursar.sim.evm_rpc import RpcError, View, receipt_json, transaction_json
from bursar.sim.evm_tx import RefusedTransaction, Tx, read_transaction
from bursar.sim.evm_world import Receipt, World

Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[tuple[int, bytes]]]


class Node(Machine, View):
    """One node."""

    def __init__(self, world: World, name: str, seed: object) -> None:
        View.__init__(self, world)
        Machine.__init__(self, name, seed)
        self.url = f"http://{name}"

    def say(self, method: str, params: Sequence[Any]) -> Any:
        """The answer, with its lies."""
        return self.lied(method, params, self.answer(method, params))

    def serve(self, body: bytes) -> bytes:
        """One HTTP body to another: a JSON-RPC request, or a batch."""
        try:
            request = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return msgspec.json.encode(_error(None, RpcError(-32700, "parse error")))
        if isinstance(request, list):
            return msgspec.json.encode([self._one(one) for one in request])
        return msgspec.json.encode(self._one(request))

    def _one(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or "method" not in request:
            return _error(None, RpcError(-32600, "invalid request"))
        try:
            result = self.say(request["method"], request.get("params") or [])
        except RpcError as error:
            return _error(request.get("id"), error)
        return {"jsonrpc": "2.0", "id": request.get("id"), "result": result}


def _error(id: Any, error: RpcError) -> dict[str, Any]:
    told: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.data is not None:
        told["data"] = error.data
    return {"jsonrpc": "2.0", "id": id, "error": told}


class Nodes(FaultyNetwork):
    """All nodes of a chain, and the network between them and their callers."""

    def __init__(self, world: World, names: Iterable[str], seed: object, *, trouble: float = 0.0) -> None:
        super().__init__(trouble)
        self.world = world
        self.by_name = {name: Node(world, name, seed) for name in names}
        self._by_url = {node.url: node for node in self.by_name.values()}
        for node in self.by_name.values():
            node.on_accepted = partial(self._gossip, node)

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def heal(self) -> None:
        """End every trouble, lie and lag. What was late arrives, and nodes pass on what they hold."""
        self.trouble = 0.0
        for node in self.by_name.values():
            node.repair()
            node.chain_id, node.world = None, self.world
        self.deliver_late(everything=True)
        for node in self.by_name.values():
            for tx in list(node.pool):
                self._gossip(node, tx)

    def drop(self, hash: str) -> None:
        """Let every pool forget a transaction."""
        self.world.drop(hash)
        for node in self.by_name.values():
            node.pool.drop(hash)

    def transport(self, sleep: Sleep) -> Post:
        """`post(url, headers, body, timeout_s)` for one caller, who sleeps by its own clock."""

        async def post(url: str, _headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
            node = self._by_url[url]
            try:
                return 200, await self.call(sleep, node, partial(node.serve, body), timeout_s)
            except HttpStatus as answered:
                return answered.status, b"<html></html>"

        return post

    def _gossip(self, node: Node, tx: Tx) -> None:
        if self.loses_gossip(node):
            return
        for world in (self.world,) if node.world is self.world else (self.world, node.world):
            with suppress(RefusedTransaction):
                world.offer(tx)
        for peer in self.by_name.values():
            if peer is not node and not peer.down and not peer.isolated:
                with suppress(RefusedTransaction):
                    peer.hear(tx)


# --- lies ------------------------------------------------------------------------------------------------------------


def receipt_says(
    hash: str, *, status: int | None = None, block_hash: str | None = None, amount: int | None = None
) -> Lie:
    """One receipt with another status, block hash or Transfer amount."""

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        if method != "eth_getTransactionReceipt" or truth is None or params[0].lower() != hash:
            return truth
        told = dict(truth)
        if status is not None:
            told["status"] = hex(status)
        if block_hash is not None:
            told["blockHash"] = block_hash
            told["logs"] = [log | {"blockHash": block_hash} for log in told["logs"]]
        if amount is not None:
            told["logs"] = [log | {"data": f"0x{amount:064x}"} for log in told["logs"]]
        return told

    return lie


def hidden(hash: str) -> Lie:
    """A transaction that the node claims not to know, wherever it would show."""

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        if method in ("eth_getTransactionByHash", "eth_getTransactionReceipt") and params[0].lower() == hash:
            return None
        if method in ("eth_getBlockByNumber", "eth_getBlockByHash") and truth is not None:
            left = [tx for tx in truth["transactions"] if hash not in (tx, isinstance(tx, dict) and tx["hash"])]
            return truth | {"transactions": left}
        if method == "eth_getLogs":
            return [log for log in truth if log["transactionHash"] != hash]
        return truth

    return lie


def invented(world: World, raw: bytes, number: int) -> Lie:
    """A transaction that was never mined, told as if it had succeeded in an existing block and used its nonce."""
    tx, block = read_transaction(raw), world.blocks[number]
    done = world.call(world.state.get, tx.sender, tx.to, tx.value, tx.data)
    gas = tx.intrinsic_gas + world.extra_gas(tx.to, tx.data)
    receipt = Receipt(tx, len(block.receipts), True, gas, block.gas_used + gas, tx.max_fee, done.events, 0, done.moves)

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        if method == "eth_getTransactionByHash" and params[0].lower() == tx.hash:
            return transaction_json(tx, block, receipt)
        if method == "eth_getTransactionReceipt" and params[0].lower() == tx.hash:
            return receipt_json(block, receipt)
        if method == "eth_getTransactionCount" and params[0].lower() == tx.sender:
            return hex(max(int(truth, 16), tx.nonce + 1))
        if method in ("eth_getBlockByNumber", "eth_getBlockByHash") and truth and truth["hash"] == block.hash:
            shown = transaction_json(tx, block, receipt) if params[1:] == [True] else tx.hash
            return truth | {"transactions": [*truth["transactions"], shown]}
        return truth

    return lie


def all_final(node: View) -> Lie:
    """The head is called finalized."""

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        if "finalized" not in params:
            return truth
        return node.answer(method, ["latest" if one == "finalized" else one for one in params])

    return lie
