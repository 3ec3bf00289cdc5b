"""The nodes of one EVM chain: how each shows which chain it is on, and where they say that the chain is.

Which nodes can be used and what they agree on is `rails.nodes`. A node shows the chain's id and, where configured, its
genesis block.

The final block F of a chain is the last one that two nodes call final: of each node's own final height the second
highest. One node that claims a block to be final too early does not move it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from bursar.rails.chain import Network, NodeStatus, NodesUnavailable
from bursar.rails.evm.reading import Header, header
from bursar.rails.evm.rpc import Call, Endpoint, Malformed, NodeFailed, Post, Rpc, quantity, result
from bursar.rails.nodes import QUORUM, TIMEOUT_S, Answers, NodeBook, NodesDisagree
from bursar.together import Together

__all__ = [  # what the other modules of this rail need to ask nodes, in one place
    "TIMEOUT_S",
    "Anchor",
    "Answers",
    "Ask",
    "Nodes",
    "NodesDisagree",
    "block_call",
    "require_linked",
]

STATE_BLOCKS = 128  # of which a node that keeps no archive has the state, at most some more

T = TypeVar("T")
Ask = Callable[[Sequence[Call]], Awaitable[list[Any]]]  # of one node: a result or `CallError` for each call


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A final block, and the nodes that have it with that hash."""

    number: int
    hash: str
    nodes: tuple[str, ...]
    missing: str  # the others, and why they do not stand behind it: the end of a sentence, or nothing


class _Head(msgspec.Struct, frozen=True):
    latest: int
    final: int


class Nodes(NodeBook):
    """The nodes of one chain."""

    def __init__(
        self,
        network: Network,
        endpoints: Sequence[Endpoint],
        post: Post,
        monotonic: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(network, endpoints, monotonic)
        self._anchors = Together(self._anchor)
        self._rpc = {endpoint.name: Rpc(endpoint, post, timeout_s) for endpoint in endpoints}

    async def ask(
        self, calls: Sequence[Call], among: Iterable[str] | None, read: Callable[[list[Any]], T]
    ) -> Answers[T]:
        """The same calls to several nodes (None: all), in one request each. `read` turns results into values."""

        async def one(name: str) -> T:
            return read(await self._rpc[name].batch(calls))

        return await self.ask_each(among, one)

    async def ask_enough(self, anchor: Anchor, talk: Callable[[str, Ask], Awaitable[T]]) -> Answers[T]:
        """As many nodes as must agree, and the others only if these do not. `talk` asks one of them, in steps."""

        async def one(name: str) -> T:
            return await talk(name, self._rpc[name].batch)

        said = await self.ask_each(anchor.nodes[: self.quorum], one)
        if len(said) < self.quorum or len(set(said.values())) > 1:
            others = await self.ask_each(anchor.nodes[self.quorum :], one)
            said = Answers(said | others, said.silent | others.silent)
        return said

    async def _show_chain(self, name: str) -> None:
        shown, genesis = await self._rpc[name].batch([Call("eth_chainId"), block_call(0)])
        chain_id = quantity(result(shown))
        if chain_id != self.network.chain_id:
            raise NodeFailed(name, f"it is on chain {chain_id}, not {self.network.chain_id}")
        if self.network.genesis and header(result(genesis), 0).hash != self.network.genesis.lower():
            raise NodeFailed(name, "its genesis block is another")

    # --- where the chain is ------------------------------------------------------------------------------------------

    async def anchor(self) -> Anchor:
        """The final block. Fewer nodes than the quorum may stand behind it if no others answer: look at `nodes`."""
        anchor = await self._anchors.ask(None)  # one look for all that ask at the same time
        assert anchor is not None  # a look answers all that asked
        return anchor

    async def _anchor(self, asked: list[None]) -> dict[None, Anchor]:
        heads = await self._heads()
        if not heads:
            raise NodesUnavailable(self.network.name, f"no node answers{self.missing(heads)}")
        finals = sorted((head.final for head in heads.values()), reverse=True)
        number = finals[min(QUORUM, len(finals)) - 1]
        able = [name for name, head in heads.items() if head.final >= number]
        said = await self.ask([block_call(number)], able, lambda results: header(result(results[0]), number).hash)
        if not said:
            raise NodesUnavailable(self.network.name, f"no node has block {number}{self.missing(said)}")
        hash_ = self.agree(f"block {number}", said) if len(said) >= self.quorum else next(iter(said.values()))
        nodes = tuple(sorted(name for name in said if said[name] == hash_))
        missing = self.missing(Answers(said, heads.silent | said.silent))
        return dict.fromkeys(asked, Anchor(number=number, hash=hash_, nodes=nodes, missing=missing))

    async def firm_anchor(self) -> Anchor:
        """The final block, with a quorum of nodes behind it."""
        anchor = await self.anchor()
        if len(anchor.nodes) < self.quorum:
            raise NodesUnavailable(
                self.network.name,
                f"only {', '.join(anchor.nodes)} answers, and {self.quorum} nodes must agree{anchor.missing}",
            )
        return anchor

    async def _heads(self) -> Answers[_Head]:
        calls = [Call("eth_getBlockByNumber", ("latest", False))]
        if self.network.finalized_tag:
            calls.append(Call("eth_getBlockByNumber", ("finalized", False)))

        def read(results: list[Any]) -> _Head:
            latest = header(result(results[0])).number
            deep = max(0, latest - self.network.depth)
            if not self.network.finalized_tag:
                return _Head(latest, deep)
            return _Head(latest, min(deep, header(result(results[1])).number))

        heads = await self.ask(calls, None, read)
        for name, head in heads.items():
            self._known[name].height = head.latest
        return heads

    def has_state(self, name: str, number: int) -> bool:
        """Whether a node should have the state of a block: an error in place of it is then a trouble that may pass."""
        height = self._known[name].height
        return height is None or number > height - STATE_BLOCKS

    async def status(self) -> tuple[NodeStatus, ...]:
        """Every node as it answers now."""
        return self._status(await self._heads())


def block_call(number: int, *, whole: bool = False) -> Call:
    """Ask for a block by its height."""
    return Call("eth_getBlockByNumber", (hex(number), whole))


def require_linked(blocks: Sequence[Header], anchor: Anchor) -> None:
    """`Malformed` unless each block is the child of the one before, and the anchor, if it is the last, is as agreed."""
    for earlier, later in pairwise(blocks):
        if later.parent != earlier.hash:
            raise Malformed(f"block {later.number} is no child of the one before it")
    if blocks[-1].number == anchor.number and blocks[-1].hash != anchor.hash:
        raise Malformed(f"block {anchor.number} is another than a moment ago")
