"""Calls to a node travel together: few requests, equal calls once, and one caller's trouble is not another's."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
import pytest

from bursar.rails.evm.rpc import CALLS_MAX, REQUESTS_MAX, Call, Endpoint, NodeFailed, Rpc


class Wire:
    """A node that answers a call with its own parameters."""

    def __init__(self) -> None:
        self.requests: list[list[list[Any]]] = []  # parameters of each call
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls_max = CALLS_MAX  # more are too large an answer
        self.fails = False
        self.rpc = Rpc(Endpoint(name="north", url="http://node.example"), self.post, 5.0)

    async def post(self, _url: str, _headers: Mapping[str, str], body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        calls = msgspec.json.decode(body)
        self.requests.append([call["params"] for call in calls])
        await self.gate.wait()
        if self.fails:
            raise ConnectionError("refused")
        if len(calls) > self.calls_max:
            raise OSError(errno.EMSGSIZE, "too large")
        answers = [{"jsonrpc": "2.0", "id": call["id"], "result": call["params"]} for call in calls]
        return 200, msgspec.json.encode(answers[::-1])

    def ask(self, *numbers: int) -> Coroutine[Any, Any, list[Any]]:
        return self.rpc.batch([Call("m", (number,)) for number in numbers])

    async def fill(self) -> list[asyncio.Task[list[Any]]]:
        """As many requests as may be under way, none of them answered."""
        self.gate.clear()
        tasks = []
        for number in range(REQUESTS_MAX):
            tasks.append(asyncio.create_task(self.ask(-1 - number)))
            while len(self.requests) < number + 1:  # noqa: ASYNC110 (a few turns of the loop)
                await asyncio.sleep(0)
        return tasks


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_calls_of_many_callers_are_one_request_and_equal_ones_one_call() -> None:
    async def story() -> None:
        wire = Wire()
        found = await asyncio.gather(wire.ask(1, 2), wire.ask(2, 3), wire.ask(1, 2))
        assert list(found) == [[[1], [2]], [[2], [3]], [[1], [2]]]
        assert wire.requests == [[[1], [2], [3]]]

    play(story())


def test_request_that_hangs_holds_up_no_other_and_a_crowd_waits_for_few() -> None:
    async def story() -> None:
        wire = Wire()
        busy = await wire.fill()
        crowd = [asyncio.create_task(wire.ask(number)) for number in range(CALLS_MAX + 5)]
        await asyncio.sleep(0)
        assert len(wire.requests) == REQUESTS_MAX
        wire.gate.set()
        assert await asyncio.gather(*crowd) == [[[number]] for number in range(CALLS_MAX + 5)]
        await asyncio.gather(*busy)
        assert [len(calls) for calls in wire.requests[REQUESTS_MAX:]] == [CALLS_MAX, 5]

    play(story())


def test_request_that_fails_fails_those_that_wait_for_it_and_no_later_one() -> None:
    """They would only wait for the same again: a node that hangs costs its timeout once."""

    async def story() -> None:
        wire = Wire()
        tasks = await wire.fill()
        tasks += [asyncio.create_task(wire.ask(number)) for number in range(3)]
        await asyncio.sleep(0)
        wire.fails = True
        wire.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, NodeFailed) for one in found)
        assert len(wire.requests) == REQUESTS_MAX
        wire.fails = False
        assert await wire.ask(7) == [[7]]

    play(story())


def test_answer_that_is_too_large_for_all_is_asked_for_by_each_alone() -> None:
    async def story() -> None:
        wire = Wire()
        wire.calls_max = 2
        small, large = (asyncio.create_task(wire.ask(*numbers)) for numbers in ((1, 2), (3, 4, 5)))
        assert await small == [[1], [2]]
        with pytest.raises(NodeFailed, match="too large"):
            await large

    play(story())


def test_caller_that_gives_up_leaves_others_their_answer() -> None:
    async def story() -> None:
        wire = Wire()
        wire.gate.clear()
        hasty, patient = (asyncio.create_task(wire.ask(number)) for number in (1, 2))
        while not wire.requests:  # noqa: ASYNC110 (a few turns of the loop)
            await asyncio.sleep(0)
        hasty.cancel()
        wire.gate.set()
        assert await patient == [[2]]
        with pytest.raises(asyncio.CancelledError):
            await hasty

    play(story())
