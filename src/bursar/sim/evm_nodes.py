"""EVM nodes on a simulated chain, behind HTTP that breaks: each with its own view, its own troubles and its own lies.

`Nodes.transport(sleep)` is what a rail uses instead of an HTTP client: the same signature, the same exceptions. In the
simulator `sleep` is that of the calling process (`process.ports.sleep`), so that a crash ends the call where it is; the
demo gives the real one. Faults come from the node's own seeded dice at the rate `Nodes.trouble`, which a scenario sets
to 0 to heal, or from a node's `script`, which a test fills.

A transaction that a node accepts is offered to the other nodes and to the block makers. With trouble that fails now and
then: the node has it, and it is never mined unless the same bytes are sent again.

Nothing here decides what is true of the chain (`evm_world`) or how a node words it (`evm_rpc`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

import msgspec

from bursar.sim.evm_rpc import RpcError, View, receipt_json, transaction_json
from bursar.sim.evm_tx import RefusedTransaction, Tx, read_transaction
from bursar.sim.evm_world import Receipt, World

Sleep = Callable[[float], Awaitable[None]]
Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[tuple[int, bytes]]]
Lie = Callable[[str, Sequence[Any], Any], Any]  # method, parameters, truth → what is said

LATENCY_S: Final = 0.02  # at most, each way
LATE_CALLS_MAX: Final = 40  # a late request arrives while this many others are made
GOSSIP_LOST_SHARE: Final = 0.3  # of `trouble`


class Fault(StrEnum):
    """What goes wrong with one request."""

    NONE = "none"
    REFUSED = "refused"  # the connection breaks before the request has arrived
    REPLY_LOST = "reply lost"  # it breaks after the effect
    HANGS = "hangs"  # no effect, no answer
    SLOW = "slow"  # effect, and an answer after the caller's timeout
    LATE = "late"  # no answer; the request arrives long after the caller has given up
    BUSY = "busy"  # HTTP 429, no effect
    BROKEN = "broken"  # HTTP 502 from a proxy, after the effect


CHANCE: Final = tuple(fault for fault in Fault if fault is not Fault.NONE)


class Node(View):
    """One node."""

    def __init__(self, world: World, name: str, seed: object) -> None:
        super().__init__(world)
        self.name = name
        self.url = f"http://{name}"
        self.down = False
        self.hangs = False
        self.isolated = False  # it hears of no one else's transactions, and passes none on
        self.slow_s = 0.0  # on top of every answer
        self.lies: list[Lie] = []
        self.script: deque[Fault] = deque()  # of the next requests, before chance has its say
        self.dice = random.Random(f"{seed} evm node {name}")

    def say(self, method: str, params: Sequence[Any]) -> Any:
        """The answer, with its lies."""
        result = self.answer(method, params)
        for lie in self.lies:
            result = lie(method, params, result)
        return result

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


class Nodes:
    """All nodes of a chain, and the network between them and their callers."""

    def __init__(self, world: World, names: Iterable[str], seed: object, *, trouble: float = 0.0) -> None:
        self.world = world
        self.trouble = trouble  # of the requests
        self.by_name = {name: Node(world, name, seed) for name in names}
        self.calls = 0
        self._by_url = {node.url: node for node in self.by_name.values()}
        self._late: list[tuple[int, Node, bytes]] = []
        for node in self.by_name.values():
            node.on_accepted = self._gossip_of(node)

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def heal(self) -> None:
        """End every trouble, lie and lag. What was late arrives now."""
        self.trouble = 0.0
        for node in self.by_name.values():
            node.down = node.hangs = node.isolated = False
            node.slow_s, node.lag, node.keeps, node.chain_id, node.world = 0.0, 0, None, None, self.world
            node.lies.clear()
            node.script.clear()
        self.deliver_late(everything=True)

    def drop(self, hash: str) -> None:
        """Let every pool forget a transaction."""
        self.world.drop(hash)
        for node in self.by_name.values():
            node.pool.drop(hash)

    def deliver_late(self, *, everything: bool = False) -> None:
        """Let requests arrive whose callers have given up."""
        due = [one for one in self._late if everything or one[0] <= self.calls]
        self._late = [one for one in self._late if one not in due]
        for _, node, body in due:
            node.serve(body)

    def transport(self, sleep: Sleep) -> Post:
        """`post(url, headers, body, timeout_s)` for one caller, who sleeps by its own clock."""

        async def post(url: str, _headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
            return await self._post(sleep, self._by_url[url], body, timeout_s)

        return post

    async def _post(self, sleep: Sleep, node: Node, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        self.calls += 1
        self.deliver_late()
        await sleep(node.dice.random() * LATENCY_S)
        if node.down:
            raise ConnectionRefusedError("connection refused")
        fault = self._fault(node)
        match fault:
            case Fault.REFUSED:
                raise ConnectionResetError("the connection was closed")
            case Fault.HANGS | Fault.LATE:
                if fault is Fault.LATE:
                    self._late.append((self.calls + node.dice.randint(1, LATE_CALLS_MAX), node, body))
                await sleep(timeout_s)
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            case Fault.BUSY:
                return 429, b"Too Many Requests"
        answer = node.serve(body)
        match fault:
            case Fault.REPLY_LOST:
                raise ConnectionResetError("the connection was closed")
            case Fault.BROKEN:
                return 502, b"<html>Bad Gateway</html>"
        wait = timeout_s if fault is Fault.SLOW else node.slow_s + node.dice.random() * LATENCY_S
        await sleep(min(wait, timeout_s))
        if wait >= timeout_s:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return 200, answer

    def _fault(self, node: Node) -> Fault:
        if node.script:
            return node.script.popleft()
        if node.hangs:
            return Fault.HANGS
        return node.dice.choice(CHANCE) if node.dice.random() < self.trouble else Fault.NONE

    def _gossip_of(self, node: Node) -> Callable[[Tx], None]:
        def accepted(tx: Tx) -> None:
            lost = node.dice.random() < self.trouble * GOSSIP_LOST_SHARE
            if node.isolated or lost:
                return
            for world in (self.world,) if node.world is self.world else (self.world, node.world):
                with suppress(RefusedTransaction):
                    world.offer(tx)
            for peer in self.by_name.values():
                if peer is not node and not peer.down and not peer.isolated:
                    sender = tx.sender
                    with suppress(RefusedTransaction):
                        peer.pool.add(tx, peer.world.nonce(sender, peer.head), peer.world.balance(sender, at=peer.head))

        return accepted


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
