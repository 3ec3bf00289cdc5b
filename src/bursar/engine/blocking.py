"""Actions that block: plain `def` functions, each run in a thread, so that the event loop goes on.

A thread cannot be stopped. A call that takes longer than `call_timeout_s` counts as TIMEOUT like any other, and its
thread is used again only when the function has returned. The number of threads is bounded, so that functions that hang
are noticed (calls wait for a thread, and time out) before the machine runs out of threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bursar.engine.flow import Action, Answer, Flow, FlowRecord
from bursar.ports import Ports, SerialExecutor

THREADS_MAX = 64


@dataclass(frozen=True, eq=False)
class BlockingAction:
    """An action that is a plain function. It works once it has threads (`in_threads`)."""

    function: Callable[[FlowRecord[Any]], Answer]

    async def __call__(self, item: FlowRecord[Any]) -> Answer:
        raise TypeError(
            "a plain `def` action is run in a thread of `bursar.open(url, flows=[…])`, not by a bare engine"
        )


class Threads:
    """Threads for blocking actions, made when they are needed."""

    def __init__(self, ports: Ports, most: int = THREADS_MAX) -> None:
        self._ports = ports
        self._room = asyncio.Semaphore(most)
        self._idle: list[SerialExecutor] = []
        self._made = 0

    async def run(self, function: Callable[[FlowRecord[Any]], Answer], item: FlowRecord[Any]) -> Answer:
        """Run it in a thread. If the caller is cancelled the function goes on, and the thread is busy until it ends."""
        await self._room.acquire()
        if not self._idle:
            self._made += 1
            self._idle.append(self._ports.lane(f"action-{self._made}"))
        lane = self._idle.pop()
        work = asyncio.ensure_future(lane.run(partial(function, item)))
        work.add_done_callback(partial(self._over, lane))
        return await asyncio.shield(work)

    def _over(self, lane: SerialExecutor, work: asyncio.Future[Answer]) -> None:
        self._idle.append(lane)
        self._room.release()
        if not work.cancelled():
            work.exception()  # looked at: its caller may be gone

    def close(self) -> None:
        """Let the idle ones end. One that still runs is left alone, as a crash would leave it: it can't be stopped."""
        for lane in self._idle:
            lane.close()
        self._idle.clear()


def in_threads(flow: Flow[Any], threads: Threads) -> Flow[Any]:
    """The same flow, whose blocking actions are run in these threads."""

    def bound(actions: Mapping[str, Action]) -> dict[str, Action]:
        return {
            name: partial(threads.run, action.function) if isinstance(action, BlockingAction) else action
            for name, action in actions.items()
        }

    return replace(flow, actions=bound(flow.actions), cancels=bound(flow.cancels), queries=bound(flow.queries))
