"""The nodes of one TRON chain: how each shows which chain it is on, and what they call final.

Which nodes can be used and what they agree on is `rails.nodes`. A node shows its genesis block on both interfaces: the
last four bytes of that block's id are the chain's id.

The final block of the chain is the last one that two nodes have solidified: of each node's own the second highest. One
node that claims a block to be final too early does not move it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from bursar.rails.chain import Network, NodeStatus, NodesUnavailable
from bursar.rails.nodes import QUORUM, TIMEOUT_S, Answers, Endpoint, Malformed, NodeBook, NodeFailed, Post
from bursar.rails.tron.http import Http
from bursar.rails.tron.reading import Header, header

HEAD_S: Final = 1.0  # how old what a node calls final may be, when it is asked about a transaction: an older one is
# only more careful. A block with its transactions is large, and there is no way to ask for its header alone.

T = TypeVar("T")
Look = Callable[[Http], Awaitable[T]]


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A final block, and the nodes that have it with that id."""

    header: Header
    nodes: tuple[str, ...]


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
        self._http = {endpoint.name: Http(endpoint, post, timeout_s) for endpoint in endpoints}
        self._heads: dict[str, tuple[float, Header]] = {}
        self._reading: dict[str, asyncio.Task[Header]] = {}

    async def ask(self, among: Iterable[str] | None, look: Look[T]) -> Answers[T]:
        """Let several nodes (None: all) be looked at, at once."""
        return await self.ask_each(among, lambda name: look(self._http[name]))

    async def head(self, http: Http) -> Header:
        """What a node calls final, read at most `HEAD_S` ago."""
        at, found = self._heads.get(http.name, (0.0, None))
        if found is not None and self._monotonic() - at <= HEAD_S:
            return found
        reading = self._reading.get(http.name)
        if reading is None:  # questions that come meanwhile share it, and a node that hangs makes them wait once
            reading = asyncio.create_task(self._read_head(http), name=f"head of {http.name}")
            self._reading[http.name] = reading
            reading.add_done_callback(lambda done: self._read(http.name, done))
        return await asyncio.shield(reading)

    async def _read_head(self, http: Http) -> Header:
        at = self._monotonic()
        found = header(await http.solid("getnowblock"))
        self._heads[http.name] = (at, found)
        self._known[http.name].height = found.number
        return found

    def _read(self, name: str, done: asyncio.Task[Header]) -> None:
        del self._reading[name]
        if not done.cancelled():
            done.exception()  # those who wait for it have it, and if they were all cancelled, it is of no use

    async def _show_chain(self, name: str) -> None:
        http = self._http[name]
        ids = {header(await asked("getblockbynum", num=0), 0).id for asked in (http.wallet, http.solid)}
        if len(ids) > 1:
            raise NodeFailed(name, "its wallet and its walletsolidity are on different chains")
        found = ids.pop()
        if int(found[-8:], 16) != self.network.chain_id:
            raise NodeFailed(name, f"it is on chain {int(found[-8:], 16)}, not {self.network.chain_id}")
        if self.network.genesis and found != self.network.genesis.lower().removeprefix("0x"):
            raise NodeFailed(name, "its genesis block is another")

    # --- where the chain is ------------------------------------------------------------------------------------------

    async def anchor(self) -> Anchor:
        """The final block, with a quorum of nodes behind it."""
        heads = await self.ask(None, self.head)
        if not heads:
            raise NodesUnavailable(self.network.name, f"no node answers{self.missing(heads)}")
        numbers = sorted((head.number for head in heads.values()), reverse=True)
        number = numbers[min(QUORUM, len(numbers)) - 1]

        async def at(http: Http) -> Header:
            head = heads[http.name]
            if head.number == number:
                return head
            value = await http.solid("getblockbynum", num=number)
            if value == {}:
                raise Malformed(f"it has no block {number}, and calls block {head.number} final")
            return header(value, number)

        able = await self.ask([name for name in heads if heads[name].number >= number], at)
        said = Answers(able, heads.silent | able.silent)
        found = self.agree(f"block {number}", said)
        nodes = tuple(sorted(name for name in said if said[name] == found))
        return Anchor(header=found, nodes=nodes)

    async def status(self) -> tuple[NodeStatus, ...]:
        """Every node as it answers now."""
        return self._status(await self.ask(None, self.head))
