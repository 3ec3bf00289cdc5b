"""The nodes of one chain, whatever kind it is: which of them can be used, and what they agree on.

Any single node may be down, behind, on another chain, or lie. So:

- A node is used only after it has shown which chain it is on. It shows it again after every failure and once a minute:
  an address may lead to another machine by then.
- A node that fails is left alone for a while, longer each time. One that hangs costs its own timeout.
- What ends a payment, a balance and a page of the watcher need two nodes that give the same answer, and more than half
  of those that answered (W35). With one node configured there is nothing to compare; callers decide what that allows.
- A node that is behind the others by more than `LAG_BLOCKS_MAX` is not believed when it says that something is absent.
- A node that contradicts the others, or whose answer can't be read, is named: in the error, and for `DOUBT_S` in its
  status.

A node that does not answer, answers something else than was asked, or is not HTTP at all has *failed* (`NodeFailed`),
and its answer says nothing. A node's URL often carries an API key. It is in no error and no representation; what a node
says is shown without it (`Shown`).

Not here: what is asked, and how a chain shows itself (`evm.nodes`, `tron.nodes`).
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from bursar.rails.chain import Network, NodeStatus, NodesUnavailable

Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[tuple[int, bytes]]]

QUORUM = 2
TIMEOUT_S = 10.0
RECHECK_S = 60.0
BACKOFF_S = 1.0
BACKOFF_S_MAX = 60.0
DOUBLINGS_MAX = 10
DOUBT_S = 600.0
LAG_BLOCKS_MAX = 10
SHOWN_CHARS_MAX = 120
ANSWER_BYTES_MAX = 32 << 20
MESSAGE_CHARS_MAX = 300
SECRET_CHARS_MIN = 6  # shorter parts of a URL are words such as "v1" or "rpc"

T = TypeVar("T")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it is configured."""

    name: str
    url: str
    headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Endpoint(name={self.name!r})"  # URL and headers may contain keys


class NodeFailed(Exception):
    """The node gave no answer that can be used. `why` contains nothing of its URL."""

    def __init__(self, node: str, why: str, *, too_large: bool = False) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node
        self.why = why
        self.too_large = too_large  # fewer calls in one request may do


class Malformed(ValueError):
    """A value in an answer is not what the interface says."""


class CallFailed(Malformed):
    """An error came in place of a result that was needed. It may be the question's fault, and not the node's."""


def field(record: Any, name: str) -> Any:
    """A field that must be there."""
    if not isinstance(record, dict) or name not in record:
        raise Malformed(f"{name} is missing")
    return record[name]


class Shown:
    """What a node says, as people may see it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._secrets = _secrets(endpoint)

    def text(self, said: bytes) -> str:
        """What a node says, short, on one line, and without its URL."""
        text = said[: 4 * MESSAGE_CHARS_MAX].decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return "".join(c if c.isprintable() else " " for c in text)[:MESSAGE_CHARS_MAX]


def _secrets(endpoint: Endpoint) -> list[str]:
    """The parts of a URL and of its headers that could be a key, longest first."""
    parts = urlsplit(endpoint.url)
    found = {endpoint.url, parts.netloc, parts.path, parts.query, parts.username or "", parts.password or ""}
    found |= set(parts.path.split("/")) | set(re.split(r"[&=]", parts.query)) | set((parts.hostname or "").split("."))
    found |= {word for value in endpoint.headers.values() for word in (value, *value.split())}
    return sorted((one for one in found if len(one) >= SECRET_CHARS_MIN), key=len, reverse=True)


class Answers(dict[str, T]):
    """What nodes say, by name. `silent`: those that were asked and gave no answer that can be used, with the reason."""

    def __init__(self, answers: Mapping[str, T], silent: Mapping[str, str]) -> None:
        super().__init__(answers)
        self.silent = dict(silent)


class NodesDisagree(NodesUnavailable):
    """Nodes that answered contradict each other. A person should look at the nodes that are named."""


def largest_group(said: Mapping[str, T]) -> tuple[T, list[str]]:
    """The value that most nodes give, and their names; of equally large groups, the first."""
    groups: list[tuple[T, list[str]]] = []
    for name, value in sorted(said.items()):
        for known, names in groups:
            if known == value:
                names.append(name)
                break
        else:
            groups.append((value, [name]))
    return max(groups, key=lambda group: len(group[1]))


@dataclass
class KnownNode:
    """What is known about a node."""

    name: str
    shown_at: float | None = None  # when it last showed which chain it is on; None: it has to
    failure: str = ""  # of the last request that failed
    failures: int = 0
    retry_at: float = 0.0
    doubt: str = ""
    doubt_until: float = 0.0
    height: int | None = None


class NodeBook(ABC):
    """What is known about the nodes of one chain. Every method is safe to use concurrently."""

    def __init__(self, network: Network, endpoints: Sequence[Endpoint], monotonic: Callable[[], float]) -> None:
        names = [endpoint.name for endpoint in endpoints]
        places = {endpoint.url.partition("#")[0] for endpoint in endpoints}
        if not names or len(set(names)) != len(names) or len(places) != len(names):
            # One node under two names would be its own witness.
            raise ValueError(f"{network.name}: at least one node is needed, and each with its own name and URL")
        self.network = network
        self.configured = len(names)
        self.quorum = min(QUORUM, self.configured)
        self._monotonic = monotonic
        self._known = {name: KnownNode(name) for name in names}

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask_each(self, among: Iterable[str] | None, ask: Callable[[str], Awaitable[T]]) -> Answers[T]:
        """Ask several nodes (None: all) at once. `ask` raises NodeFailed, or Malformed for what it can't read.

        A node whose answer is malformed is silent. It is not left alone for that: a question that no node can answer
        must not keep the others from being asked.
        """
        names = sorted(self._known if among is None else among)
        found = await asyncio.gather(*(self._ask_one(self._known[name], ask) for name in names))
        said = dict(zip(names, found, strict=True))
        return Answers(
            {name: one[0] for name, one in said.items() if isinstance(one, tuple)},
            {name: one for name, one in said.items() if isinstance(one, str)},
        )

    async def _ask_one(self, node: KnownNode, ask: Callable[[str], Awaitable[T]]) -> tuple[T] | str:
        """What a node says, or why it says nothing."""
        if self._monotonic() < node.retry_at:
            return node.failure
        try:
            await self._shown(node)
        except NodeFailed as error:
            self._failed(node, error.why)
            return error.why
        except Malformed as error:
            self._failed(node, f"malformed answer: {error}")
            return node.failure
        try:
            found = (await ask(node.name),)
        except NodeFailed as error:
            if not error.too_large:
                self._failed(node, error.why)
            return error.why
        except Malformed as error:
            node.failures, node.retry_at = 0, 0.0
            return self.malformed(node.name, error)
        node.failures, node.retry_at = 0, 0.0
        return found

    async def _shown(self, node: KnownNode) -> None:
        """Make the node show which chain it is on, unless it just has."""
        now = self._monotonic()
        if node.shown_at is not None and now - node.shown_at < RECHECK_S:
            return
        node.shown_at = None
        await self._show_chain(node.name)
        node.shown_at = now

    @abstractmethod
    async def _show_chain(self, name: str) -> None:
        """NodeFailed or Malformed unless the node is on this chain."""

    def malformed(self, name: str, error: Malformed) -> str:
        """Why an answer can't be read. The node is named, unless the question may be at fault."""
        if isinstance(error, CallFailed):
            return str(error)
        self._doubt(name, f"gave a malformed answer: {error}")
        return f"malformed answer: {error}"

    def _failed(self, node: KnownNode, why: str) -> None:
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

    def agree_if_there(self, what: str, said: Answers[T | None]) -> T | None:
        """The same of what some nodes may not have yet: what all say that have it, or that none has it."""
        there = {name: one for name, one in said.items() if one is not None}
        return self.agree(what, Answers(there, said.silent)) if there else self.agree(what, said)

    def vouched(self, what: str, said: Answers[int]) -> int:
        """The highest number that a quorum of nodes has reached: one node alone can't raise it."""
        if len(said) < self.quorum:
            why = f"{what}: {len(said)} nodes answer, and {self.quorum} are needed{self.missing(said)}"
            raise NodesUnavailable(self.network.name, why)
        return sorted(said.values(), reverse=True)[self.quorum - 1]

    def doubt(self, words: Mapping[str, str]) -> None:
        """Name nodes that contradict others."""
        for name, said in words.items():
            self._doubt(name, f"contradicts other nodes about {said}")

    def _doubt(self, name: str, why: str) -> None:
        node = self._known[name]
        node.doubt, node.doubt_until = why, self._monotonic() + DOUBT_S

    def missing(self, said: Answers[T]) -> str:
        """Which nodes gave no answer, and why: the end of a sentence, or nothing."""
        others = {
            name: said.silent.get(name) or node.failure or node.doubt or "behind the others"
            for name, node in sorted(self._known.items())
            if name not in said
        }
        return f" ({'; '.join(f'{name}: {why}' for name, why in others.items())})" if others else ""

    def is_behind(self, name: str) -> bool:
        """Whether a node's "there is no such thing" says nothing, because others know more blocks than it."""
        return self._lag(name) > LAG_BLOCKS_MAX

    def _lag(self, name: str) -> int:
        """Of three or more, one node that claims a great height does not put the others behind."""
        heights = sorted((node.height for node in self._known.values() if node.height is not None), reverse=True)
        if not heights:
            return 0
        best = heights[1] if len(heights) > 2 else heights[0]
        own = self._known[name].height
        return best if own is None else best - own

    def _status(self, heads: Answers[T]) -> tuple[NodeStatus, ...]:
        """Every node, by whether it has just told its head."""
        found = []
        for name, node in sorted(self._known.items()):
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


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
