"""Nodes of the simulated chain without nonces, and the `rails.chain.Chain` that asks them.

A node's answers are true of its own view: it may lag, have forgotten old blocks (`keeps`), or lie. Each request may
break on the way (`chain_faults`). The chain believes only what two nodes say alike.

The fate of a transaction: *confirmed* if both have it, final, in the same block, and it pays what was ordered. *Dead*
if both include it as failed at a final height; or if, at both, the final height was past its expiry before they were
asked for it, they don't have it, and they keep every block that could contain it. Anything else is pending or unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from bursar.model.records import Priority
from bursar.rails.chain import (
    Arrival,
    Arrivals,
    Balances,
    Codec,
    Confirmed,
    Dead,
    DeepReorganisation,
    Fate,
    Fee,
    FeeTooHigh,
    Mismatch,
    Network,
    NodeStatus,
    NodesUnavailable,
    Order,
    OwnTransaction,
    Page,
    Pending,
    Question,
    Sent,
    SentElsewhere,
    Shape,
    Slot,
    Try,
    Unknown,
    WalletShort,
    WouldRevert,
)
from bursar.sim.chain_faults import FaultyNetwork, Machine, Sleep
from bursar.sim.chain_state import COIN, Movement, Reverted
from bursar.sim.expiry_codec import ExpiryCodec
from bursar.sim.expiry_world import Refused, Tx, World

TIMEOUT_S: Final = 2.0
SCAN_BLOCKS_MAX: Final = 100
GAS_MARGIN: Final = 2


class Found(NamedTuple):
    """A transaction in a block, as a node shows it."""

    block: int
    block_hash: str
    ok: bool
    gas_used: int
    fee: int
    events: tuple[Movement, ...]


class Summary(NamedTuple):
    """A block, as a node lists it: hashes and senders of its transactions, and what they say that they moved."""

    number: int
    hash: str
    transactions: tuple[tuple[str, str], ...]
    events: tuple[tuple[str, int, Movement], ...]  # hash, number in its transaction, what moved by what it says


class Node(Machine):
    """One node."""

    def __init__(self, world: World, name: str, seed: object) -> None:
        super().__init__(name, seed)
        self.world = world
        self.pool: dict[str, Tx] = {}

    @property
    def head(self) -> int:
        """The last block that it has seen."""
        return max(0, self.world.head.number - self.lag)

    def answer(self, method: str, params: Sequence[Any]) -> Any:
        """What it says, with its lies."""
        answers: dict[str, Callable[..., Any]] = {
            "balances": self._balances,
            "blocks": self._blocks,
            "bytes": self._bytes,
            "dry_run": self._dry_run,
            "final": self._final,
            "find": self._find,
            "first_block": lambda: 0 if self.keeps is None else max(0, self.head + 1 - self.keeps),
            "is_contract": lambda address: address in self.world.tokens,
            "price": lambda: self.world.terms.price,
            "submit": self._submit,
        }
        return self.lied(method, params, answers[method](*params))

    def _kept(self, number: int) -> bool:
        return number <= self.head and (self.keeps is None or number > self.head - self.keeps)

    def _final(self) -> tuple[int, str]:
        number = max(0, self.head - self.world.terms.finality)
        return number, self.world.blocks[number].hash

    def _find(self, hash: str) -> Found | bool:
        """Where it is; or whether it waits in the node's pool."""
        found = self.world.find(hash)
        if found is not None and self._kept(found[0].number):
            block, one = found
            return Found(block.number, block.hash, one.ok, one.gas_used, one.fee, one.events)
        tx = self.pool.get(hash)
        return tx is not None and tx.expires > self.head and (found is None or found[0].number > self.head)

    def _bytes(self, hash: str) -> bytes:
        """The bytes of a transaction, in a block or in the node's pool; none if it has no such transaction."""
        found = self.world.find(hash)
        if found is not None and self._kept(found[0].number):
            return found[1].tx.raw
        return self.pool[hash].raw if hash in self.pool else b""

    def _submit(self, raw: bytes) -> str:
        try:
            tx = self.world.read(raw)
            self.world.check(tx, self.head)
        except Refused as refused:
            return str(refused)
        self.pool[tx.hash] = tx
        return "SUCCESS"

    def _blocks(self, first: int, last: int) -> list[Summary] | None:
        if not all(self._kept(number) for number in (first, last)):
            return None
        return [
            Summary(
                block.number,
                block.hash,
                tuple((one.tx.hash, one.tx.sender) for one in block.included),
                tuple((one.tx.hash, n, event) for one in block.included for n, event in enumerate(one.events)),
            )
            for block in self.world.blocks[first : last + 1]
        ]

    def _balances(self, address: str, contracts: Sequence[str], at: int | None = None) -> tuple[int, ...] | None:
        number = self.head if at is None else at
        if not self._kept(number):
            return None
        return tuple(self.world.balance(address, contract, number) for contract in (COIN, *contracts))

    def _dry_run(self, sender: str, order: Order) -> int | str:
        """The gas that a payment would use, or why it is refused, whatever the sender has."""
        try:
            self.world.call(lambda _asset, _address: order.amount, sender, order.to, order.contract, order.amount)
        except Reverted as reverted:
            return reverted.reason
        return self.world.gas(order.contract)


class Nodes(FaultyNetwork):
    """The chain's nodes, and the network between them and their callers."""

    def __init__(self, world: World, names: Iterable[str], seed: object, *, trouble: float = 0.0) -> None:
        super().__init__(trouble)
        self.world = world
        self.by_name = {name: Node(world, name, seed) for name in names}

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def heal(self) -> None:
        """End every trouble, lie and lag. What was late arrives, and nodes pass on what they hold."""
        self.trouble = 0.0
        for node in self.by_name.values():
            node.repair()
        self.deliver_late(everything=True)
        for node in self.by_name.values():
            for tx in list(node.pool.values()):
                self._gossip(node, tx.raw)

    def drop(self, hash: str) -> None:
        """Let every pool forget a transaction."""
        self.world.drop(hash)
        for node in self.by_name.values():
            node.pool.pop(hash, None)

    async def ask(self, sleep: Sleep, node: Node, method: str, *params: Any) -> Any:
        """One request; OSError if no answer is heard."""
        return await self.call(sleep, node, partial(self._perform, node, method, params), TIMEOUT_S)

    def _perform(self, node: Node, method: str, params: Sequence[Any]) -> Any:
        answer = node.answer(method, params)
        if method == "submit":
            self._gossip(node, params[0])
        return answer

    def _gossip(self, node: Node, raw: bytes) -> None:
        if self.loses_gossip(node):
            return
        with suppress(Refused):
            tx = self.world.submit(raw)
            for peer in self.by_name.values():
                if not peer.down and not peer.isolated:
                    peer.pool[tx.hash] = tx


class _Seen(NamedTuple):
    """What one node says about a question. `final` was read before anything else."""

    node: str
    final: int
    found: dict[str, Found | bool]
    first_block: int


class ExpiryChain:
    """`rails.chain.Chain` on simulated nodes."""

    def __init__(self, network: Network, nodes: Nodes, sleep: Sleep, token: Callable[[], str]) -> None:
        self.network = network
        self.codec: Codec = ExpiryCodec()
        self._nodes = nodes
        self._sleep = sleep
        self._token = token  # a random text, by which equal payments are different transactions

    async def quote(self, sender: str, order: Order, shape: Shape, priority: Priority) -> Fee:
        price = max(await self._each("price"))
        ceiling = self.network.ceiling(priority)
        if price > ceiling:
            raise FeeTooHigh(self.network.name, price, ceiling)
        if shape is Shape.CANCEL:
            order = Order(payout=order.payout, to=sender, amount=0)
        gas = await self._alike("dry_run", sender, order)
        if isinstance(gas, str):
            raise WouldRevert(self.network.name, gas)
        fee = Fee(gas_limit=min(GAS_MARGIN * gas, order.gas_limit_max or GAS_MARGIN * gas), price=price)
        coin, *tokens = await self._alike("balances", sender, (order.contract,) if order.contract else ())
        short = tokens[0] < order.amount if tokens else False
        needs = fee.worst + (0 if order.contract else order.amount)
        if short:
            raise WalletShort(self.network.name, sender, order.contract, tokens[0], order.amount)
        if coin < needs:
            raise WalletShort(self.network.name, sender, "", coin, needs)
        return fee

    async def higher(self, fee: Fee, priority: Priority) -> Fee | None:
        return None  # nothing replaces a transaction here: it is included, or it expires

    async def slot(self, sender: str) -> Slot:
        number, hash = await self.final_block()
        return Slot(expires=number + self._nodes.world.terms.window, reference=f"{hash}/{self._token()}")

    async def send(self, raw: bytes) -> Sent:
        answers: dict[str, str] = {}
        for node in self._nodes.by_name.values():
            try:
                answers[node.name] = await self._nodes.ask(self._sleep, node, "submit", raw)
            except OSError as error:
                answers[node.name] = f"no answer ({type(error).__name__})"
        taken = ("SUCCESS", "DUP_TRANSACTION_ERROR")
        return Sent(accepted=any(one in taken for one in answers.values()), answers=answers)

    async def sent_elsewhere(self, hash_: str) -> SentElsewhere | None:
        raw = await self._alike("bytes", hash_)
        if not raw:
            return None
        decoded, sender, _ = self.codec.read(raw)
        return SentElsewhere(hash=hash_, sender=sender, slot=decoded.slot, fee=decoded.fee)

    async def fate(self, question: Question) -> Fate:
        seen = []
        for node in self._nodes.by_name.values():
            try:
                seen.append(await self._look(node, question.tries))
            except OSError:
                continue
        needed = 1 if question.one_node_is_enough and len(self._nodes.by_name) == 1 else 2
        if len(seen) < needed:
            return Unknown(why=f"{len(seen)} of {len(self._nodes.by_name)} nodes answered")
        fates = [self._judge(question.order, one, seen) for one in question.tries]
        for kind in (Confirmed, Mismatch, Unknown, Pending):
            for fate in fates:
                if isinstance(fate, kind):
                    return fate
        dead = [fate for fate in fates if isinstance(fate, Dead)]
        paid = next((one for one in dead if one.hash), Dead(proof={}))
        return Dead(
            proof={"tries": [one.proof for one in dead]}, hash=paid.hash, fee_paid=paid.fee_paid, gas_used=paid.gas_used
        )

    async def balances(self, address: str, contracts: Sequence[str]) -> Balances:
        number, hash = await self.final_block()
        coin, *tokens = await self._alike("balances", address, tuple(contracts), number)
        return Balances(block=number, block_hash=hash, coin=coin, tokens=dict(zip(contracts, tokens, strict=True)))

    async def balances_of(self, addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        found: dict[str, Balances | str] = {}
        for address in addresses:
            try:
                found[address] = await self.balances(address, contracts)
            except NodesUnavailable as error:
                found[address] = str(error)
        return found

    async def scan(self, addresses: Container[str], after: int, after_hash: str = "") -> Page:
        page, hash = await self._page(after, after_hash)
        found = [
            OwnTransaction(hash=tx, sender=sender, nonce=None, block=block.number)
            for block in page
            for tx, sender in block.transactions
            if sender in addresses
        ]
        return Page(up_to=after + len(page), up_to_hash=hash, transactions=tuple(found))

    async def arrivals(
        self, addresses: Container[str], contracts: frozenset[str], after: int, after_hash: str, up_to: int
    ) -> Arrivals:
        page, hash = await self._page(after, after_hash, up_to)
        found = [
            Arrival(
                hash=hash,
                part=str(part) if event.contract else "coin",
                sender=event.sender,
                to=event.to,
                contract=event.contract,
                amount=event.amount,
                block=block.number,
                block_hash=block.hash,
            )
            for block in page
            for hash, part, event in block.events
            if event.to in addresses and event.amount and event.to != event.sender
            if event.contract in {COIN, *contracts}
        ]
        events = {block.number: [event for _, _, event in block.events] for block in page}
        checked = [await self._held(one, events[one.block]) if one.contract else one for one in found]
        one_node = len(self._nodes.by_name) == 1
        return Arrivals(up_to=after + len(page), up_to_hash=hash, found=tuple(checked), one_node=one_node)

    async def _held(self, one: Arrival, events: Sequence[Movement]) -> Arrival:
        """An arrival of tokens, held against what its block did to the balance of its recipient."""
        contracts = (one.contract,)
        _, before = await self._alike("balances", one.to, contracts, one.block - 1)
        _, after = await self._alike("balances", one.to, contracts, one.block)
        ours = [event for event in events if event.contract == one.contract]
        reported = sum(event.amount for event in ours if event.to == one.to)
        reported -= sum(event.amount for event in ours if event.sender == one.to)
        if after - before >= reported:
            return one
        return msgspec.structs.replace(one, disputed=f"the balance rose by {after - before}, not by {reported}")

    async def _page(self, after: int, after_hash: str, up_to: int | None = None) -> tuple[list[Summary], str]:
        """The next final blocks, and the hash of the last block that was read."""
        number, hash = await self.final_block()
        if number < after:
            raise NodesUnavailable(self.network.name, f"the last final block is {number}, and {after} was read already")
        if after_hash:
            (before,) = await self._alike("blocks", after, after)
            if before.hash != after_hash:
                raise DeepReorganisation(self.network.name, after, after_hash, before.hash)
        last = min(number, after + SCAN_BLOCKS_MAX, number if up_to is None else up_to)
        if last <= after:
            return [], hash if number == after else after_hash
        blocks: list[Summary] = await self._alike("blocks", after + 1, last)
        return blocks, blocks[-1].hash

    async def final_block(self) -> tuple[int, str]:
        number = min(final for final, _ in await self._each("final"))
        (block,) = await self._alike("blocks", number, number)
        return number, block.hash

    async def is_contract(self, address: str) -> bool:
        return bool(await self._alike("is_contract", address))

    async def nodes(self) -> tuple[NodeStatus, ...]:
        told = []
        for node in self._nodes.by_name.values():
            try:
                height, _ = await self._nodes.ask(self._sleep, node, "final")
                told.append(NodeStatus(name=node.name, usable=True, height=height))
            except OSError as error:
                told.append(NodeStatus(name=node.name, usable=False, height=None, trouble=type(error).__name__))
        return tuple(told)

    async def _each(self, method: str, *params: Any) -> list[Any]:
        """What every node says; NodesUnavailable unless all of them answer."""
        try:
            return [await self._nodes.ask(self._sleep, node, method, *params) for node in self._nodes.by_name.values()]
        except OSError as error:
            raise NodesUnavailable(self.network.name, f"a node did not answer ({type(error).__name__})") from None

    async def _alike(self, method: str, *params: Any) -> Any:
        """What all nodes say alike."""
        first, *others = await self._each(method, *params)
        if first is None or any(other != first for other in others):
            raise NodesUnavailable(self.network.name, f"nodes disagree on {method}, or have pruned it")
        return first

    async def _look(self, node: Node, tries: Sequence[Try]) -> _Seen:
        ask = partial(self._nodes.ask, self._sleep, node)
        final, _ = await ask("final")  # first: what was not there before its expiry was final might be there after
        found = {one.hash: await ask("find", one.hash) for one in tries}
        return _Seen(node.name, final, found, await ask("first_block"))

    def _judge(self, order: Order, one: Try, seen: Sequence[_Seen]) -> Fate:
        if not one.hash:
            return Unknown(why="a transaction whose hash is not known can't be looked for", person=True)
        said = [node.found[one.hash] for node in seen]
        included = [found for found in said if isinstance(found, Found)]
        if included:
            return self._judge_included(order, one, included, seen)
        expires = one.slot.expires
        if expires is None or any(node.final <= expires for node in seen):
            return Pending(seen=any(said))
        earliest = expires - self._nodes.world.terms.window
        if any(node.first_block > max(0, earliest) for node in seen):
            return Unknown(why=f"a node has pruned blocks that could contain {one.hash}", person=True)
        finals = {node.node: node.final for node in seen}
        return Dead(proof={"hash": one.hash, "expired": expires, "final": finals})

    def _judge_included(self, order: Order, one: Try, included: Sequence[Found], seen: Sequence[_Seen]) -> Fate:
        found = included[0]
        if any(node.final < found.block for node in seen):
            return Pending(seen=True, block=found.block)
        if len(included) < len(seen) or any(other != found for other in included):
            pruned = any(node.first_block > found.block for node in seen)
            return Unknown(why=f"nodes disagree on {one.hash}", person=pruned)
        evidence = {"nodes": [node.node for node in seen], "block": found.block, "block_hash": found.block_hash}
        cost: dict[str, Any] = {
            "hash": one.hash,
            "fee_paid": found.fee,
            "gas_used": found.gas_used,
            "gas_price": found.fee // max(found.gas_used, 1),
        }
        if not found.ok or one.shape is Shape.CANCEL:
            why = "cancelled" if found.ok else "failed"
            return Dead(proof={"hash": one.hash, why: found.block, **evidence}, **cost)
        paid = [(event.contract, event.to, event.amount) for event in found.events]
        if paid != [(order.contract, order.to, order.amount)]:
            return Mismatch(why=f"it moved {paid}", evidence=evidence, **cost)
        return Confirmed(block=found.block, block_hash=found.block_hash, evidence=evidence, **cost)
