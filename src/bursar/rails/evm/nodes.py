"""The nodes of one chain: which of them can be used, and what they agree on.

Any single node may be down, behind, on another chain, or lie. So:

- A node is used only after it has shown the chain's id and, where configured, its genesis block. It shows them again
  after every failure and once a minute: an address may lead to another machine by then.
- A node that fails is left alone for a while, longer each time. One that hangs costs its own timeout.
- What ends a payment, a balance and a page of the watcher need two nodes that give the same answer, and more than half
  of those that answered (W35). With one node configured there is nothing to compare; callers decide what that allows.
- A node that is behind the others by more than `LAG_BLOCKS_MAX` is not believed when it says that something is absent.
- A node that contradicts the others, or whose answer can't be read, is named: in the error, and for `DOUBT_S` in its
  status.

The final block F of a chain is the last one that two nodes call final: of each node's own final height the second
highest. One node that claims a block to be final too early does not move it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from bursar.rails.chain import Network, NodeStatus, NodesUnavailable
from bursar.rails.evm.reading import header
from bursar.rails.evm.rpc import Call, CallError, CallFailed, Endpoint, Malformed, NodeFailed, Post, Rpc, quantity
from bursar.rails.evm.verdict import largest_group

QUORUM = 2
TIMEOUT_S = 10.0
RECHECK_S = 60.0
BACKOFF_S = 1.0
BACKOFF_S_MAX = 60.0
DOUBLINGS_MAX = 10
DOUBT_S = 600.0
LAG_BLOCKS_MAX = 10
SHOWN_CHARS_MAX = 120

T = TypeVar("T")


class Answers(dict[str, T]):
    """What nodes say, by name. `silent`: those that were asked and gave no answer that can be used, with the reason."""

    def __init__(self, answers: Mapping[str, T], silent: Mapping[str, str]) -> None:
        super().__init__(answers)
        self.silent = dict(silent)


class NodesDisagree(NodesUnavailable):
    """Nodes that answered contradict each other. A person should look at the nodes that are named."""


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A final block, and the nodes that have it with that hash."""

    number: int
    hash: str
    nodes: tuple[str, ...]
    missing: str  # the others, and why they do not stand behind it: the end of a sentence, or nothing


class _Head(msgspec.Struct, frozen=True):
    latest: int
    final: int


@dataclass
class _Node:
    """A node and what is known about it."""

    rpc: Rpc
    shown_at: float | None = None  # when it last showed which chain it is on; None: it has to
    failure: str = ""  # of the last request that failed
    failures: int = 0
    retry_at: float = 0.0
    doubt: str = ""
    doubt_until: float = 0.0
    height: int | None = None


class Nodes:
    """The nodes of one chain. Every method is safe to use concurrently."""

    def __init__(
        self,
        network: Network,
        endpoints: Sequence[Endpoint],
        post: Post,
        monotonic: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        names = [endpoint.name for endpoint in endpoints]
        if not names or len(set(names)) != len(names) or len({one.url for one in endpoints}) != len(names):
            # One node under two names would be its own witness.
            raise ValueError(f"{network.name}: at least one node is needed, and each with its own name and URL")
        self.network = network
        self.configured = len(names)
        self.quorum = min(QUORUM, self.configured)
        self._monotonic = monotonic
        self._nodes = {endpoint.name: _Node(Rpc(endpoint, post, timeout_s)) for endpoint in endpoints}

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(
        self, calls: Sequence[Call], among: Iterable[str] | None, read: Callable[[list[Any]], T]
    ) -> Answers[T]:
        """The same calls to several nodes (None: all) at once, in one request each.

        `read` turns results into values. A node whose results it finds malformed is silent. It is not left alone for
        that: a question that no node can answer must not keep the others from being asked.
        """
        names = sorted(self._nodes if among is None else among)
        found = await asyncio.gather(*(self._ask_one(self._nodes[name], calls, read) for name in names))
        said = dict(zip(names, found, strict=True))
        return Answers(
            {name: one[0] for name, one in said.items() if isinstance(one, tuple)},
            {name: one for name, one in said.items() if isinstance(one, str)},
        )

    async def _ask_one(self, node: _Node, calls: Sequence[Call], read: Callable[[list[Any]], T]) -> tuple[T] | str:
        """What a node says, or why it says nothing."""
        if self._monotonic() < node.retry_at:
            return node.failure
        try:
            await self._show_chain(node)
            results = await node.rpc.batch(calls)
        except NodeFailed as error:
            if not error.too_large:
                self._failed(node, error.why)
            return error.why
        except Malformed as error:
            self._failed(node, f"malformed answer: {error}")
            return node.failure
        node.failures, node.retry_at = 0, 0.0
        try:
            return (read(results),)
        except Malformed as error:
            return self.malformed(node.rpc.name, error)

    def malformed(self, name: str, error: Malformed) -> str:
        """Why an answer can't be read. The node is named, unless the question may be at fault."""
        if isinstance(error, CallFailed):
            return str(error)
        self._doubt(name, f"gave a malformed answer: {error}")
        return f"malformed answer: {error}"

    async def _show_chain(self, node: _Node) -> None:
        """Make the node show which chain it is on, unless it just has."""
        now = self._monotonic()
        if node.shown_at is not None and now - node.shown_at < RECHECK_S:
            return
        node.shown_at = None
        shown, genesis = await node.rpc.batch([Call("eth_chainId"), block_call(0)])
        chain_id = quantity(result(shown))
        if chain_id != self.network.chain_id:
            raise NodeFailed(node.rpc.name, f"it is on chain {chain_id}, not {self.network.chain_id}")
        if self.network.genesis and header(result(genesis), 0).hash != self.network.genesis.lower():
            raise NodeFailed(node.rpc.name, "its genesis block is another")
        node.shown_at = now

    def _failed(self, node: _Node, why: str) -> None:
        node.failure = why
        node.shown_at = None  # who answers next at this address may be another
        now = self._monotonic()
        if now >= node.retry_at:  # or requests that failed together would count as failures one after the other
            node.retry_at = now + min(BACKOFF_S * 2 ** min(node.failures, DOUBLINGS_MAX), BACKOFF_S_MAX)
            node.failures += 1

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def agree(self, what: str, said: Answers[T]) -> T:
        """What a quorum of nodes and more than half of them say. `what` names the matter in errors."""
        if not said:
            raise NodesUnavailable(self.network.name, f"{what}: no node answers{self.missing(said)}")
        value, agreeing = largest_group(said)
        if len(agreeing) == len(said):
            if len(agreeing) >= self.quorum:
                return value
            why = f"{what}: only {', '.join(agreeing)} answers, and {self.quorum} nodes must agree{self.missing(said)}"
            raise NodesUnavailable(self.network.name, why)
        if len(agreeing) >= self.quorum and 2 * len(agreeing) > len(said):
            self.doubt({name: f"{what}: {_shown(said[name])}" for name in said if name not in agreeing})
            return value
        self.doubt({name: f"{what}: {_shown(said[name])}" for name in said})
        words = "; ".join(f"{name} says {_shown(one)}" for name, one in sorted(said.items()))
        raise NodesDisagree(self.network.name, f"nodes disagree about {what}: {words}")

    def doubt(self, words: Mapping[str, str]) -> None:
        """Name nodes that contradict others."""
        for name, said in words.items():
            self._doubt(name, f"contradicts other nodes about {said}")

    def _doubt(self, name: str, why: str) -> None:
        node = self._nodes[name]
        node.doubt, node.doubt_until = why, self._monotonic() + DOUBT_S

    def missing(self, said: Answers[T]) -> str:
        """Which nodes gave no answer, and why: the end of a sentence, or nothing."""
        others = {
            name: said.silent.get(name) or node.failure or node.doubt or "behind the others"
            for name, node in sorted(self._nodes.items())
            if name not in said
        }
        return f" ({'; '.join(f'{name}: {why}' for name, why in others.items())})" if others else ""

    # --- where the chain is ------------------------------------------------------------------------------------------

    async def anchor(self) -> Anchor:
        """The final block. Fewer nodes than the quorum may stand behind it if no others answer: look at `nodes`."""
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
        return Anchor(
            number=number, hash=hash_, nodes=nodes, missing=self.missing(Answers(said, heads.silent | said.silent))
        )

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
            self._nodes[name].height = head.latest
        return heads

    def is_behind(self, name: str) -> bool:
        """Whether a node's "there is no such thing" says nothing, because others know more blocks than it."""
        return self._lag(name) > LAG_BLOCKS_MAX

    def _lag(self, name: str) -> int:
        """Of three or more, one node that claims a great height does not put the others behind."""
        heights = sorted((node.height for node in self._nodes.values() if node.height is not None), reverse=True)
        if not heights:
            return 0
        best = heights[1] if len(heights) > 2 else heights[0]
        own = self._nodes[name].height
        return best if own is None else best - own

    async def status(self) -> tuple[NodeStatus, ...]:
        """Every node as it answers now."""
        heads = await self._heads()
        found = []
        for name, node in sorted(self._nodes.items()):
            troubles = []
            if name not in heads:
                troubles.append(heads.silent[name])
            elif self.is_behind(name):
                troubles.append(f"it is {self._lag(name)} blocks behind")
            usable = not troubles
            if self._monotonic() < node.doubt_until:
                troubles.append(node.doubt)
            found.append(NodeStatus(name=name, usable=usable, height=node.height, trouble="; ".join(troubles)))
        return tuple(found)


def result(value: Any) -> Any:
    """A result; `Malformed` if the node gave an error to a call that can't be refused."""
    if isinstance(value, CallError):
        raise CallFailed(f"error {value.code}: {value.message}")
    return value


def block_call(number: int, *, whole: bool = False) -> Call:
    """Ask for a block by its height."""
    return Call("eth_getBlockByNumber", (hex(number), whole))


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
