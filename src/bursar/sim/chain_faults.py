"""The network between a caller and the nodes of a simulated chain: slow, lossy, and late.

`FaultyNetwork.call` performs one request at one `Machine` by the caller's own `sleep`. In the simulator that is the
calling process's (`process.ports.sleep`), so that a crash ends the call where it is; the demo gives the real one.
Faults come from the machine's own seeded dice at the rate `trouble`, which a scenario sets to 0 to heal, or from the
machine's `script`, which a test fills.

A lie is a function from what a node would truthfully answer to what it says instead.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

T = TypeVar("T")

Sleep = Callable[[float], Awaitable[None]]
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


class HttpStatus(ConnectionError):
    """The node's front answered with a status, and no result."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


class Machine:
    """What can be wrong with a node, apart from what it knows."""

    def __init__(self, name: str, seed: object) -> None:
        self.name = name
        self.dice = random.Random(f"{seed} node {name}")
        self.script: deque[Fault] = deque()  # of the next requests, before chance has its say
        self.repair()

    def repair(self) -> None:
        """End everything that was wrong with it."""
        self.down = False
        self.hangs = False
        self.isolated = False  # it hears of no other node's transactions, and passes none on
        self.slow_s = 0.0  # on top of every answer
        self.lag = 0  # blocks that it has not seen yet
        self.keeps: int | None = None  # blocks, from its head, of which it still has everything; None: all
        self.lies: list[Lie] = []
        self.script.clear()

    def lied(self, method: str, params: Sequence[Any], truth: Any) -> Any:
        """What it says instead of the truth."""
        for lie in self.lies:
            truth = lie(method, params, truth)
        return truth


class FaultyNetwork:
    """Requests that arrive, or don't, or too late."""

    def __init__(self, trouble: float = 0.0) -> None:
        self.trouble = trouble  # of the requests
        self.calls = 0
        self._late: list[tuple[int, Callable[[], object]]] = []

    async def call(self, sleep: Sleep, machine: Machine, effect: Callable[[], T], timeout_s: float) -> T:
        """The answer of `effect`, which happens at most once; OSError (HttpStatus, TimeoutError) if none is heard."""
        self.calls += 1
        self.deliver_late()
        await sleep(machine.dice.random() * LATENCY_S)
        if machine.down:
            raise ConnectionRefusedError("connection refused")
        fault = self._fault(machine)
        match fault:
            case Fault.REFUSED:
                raise ConnectionResetError("the connection was closed")
            case Fault.HANGS | Fault.LATE:
                if fault is Fault.LATE:
                    self._late.append((self.calls + machine.dice.randint(1, LATE_CALLS_MAX), effect))
                await sleep(timeout_s)
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            case Fault.BUSY:
                raise HttpStatus(429)
        answer = effect()
        match fault:
            case Fault.REPLY_LOST:
                raise ConnectionResetError("the connection was closed")
            case Fault.BROKEN:
                raise HttpStatus(502)
        wait = timeout_s if fault is Fault.SLOW else machine.slow_s + machine.dice.random() * LATENCY_S
        await sleep(min(wait, timeout_s))
        if wait >= timeout_s:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return answer

    def deliver_late(self, *, everything: bool = False) -> None:
        """Let requests arrive whose callers have given up."""
        due = [effect for at, effect in self._late if everything or at <= self.calls]
        self._late = [] if everything else [one for one in self._late if one[0] > self.calls]
        for effect in due:
            effect()

    def loses_gossip(self, machine: Machine) -> bool:
        """Whether what a node has accepted gets no further, this time."""
        return machine.dice.random() < self.trouble * GOSSIP_LOST_SHARE or machine.isolated

    def _fault(self, machine: Machine) -> Fault:
        if machine.script:
            return machine.script.popleft()
        if machine.hangs:
            return Fault.HANGS
        return machine.dice.choice(CHANCE) if machine.dice.random() < self.trouble else Fault.NONE
