"""Questions asked together: one look for all, none older than its question, and no one's trouble is another's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from bursar.together import Together


class Source:
    """Answers a key with how many looks had begun, and keeps what it was asked."""

    def __init__(self, most: int = 500) -> None:
        self.looks: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False
        self.together = Together(self.look, most)

    async def look(self, keys: list[str]) -> dict[str, int]:
        self.looks.append(keys)
        number = len(self.looks)
        await self.gate.wait()
        if self.fails:
            raise OSError("away")
        return {key: number for key in keys if key != "missing"}


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_questions_at_the_same_time_share_one_look_and_equal_ones_one_key() -> None:
    async def story() -> None:
        source = Source()
        found = await asyncio.gather(*map(source.together.ask, ["a", "b", "a", "missing"]))
        assert (found, source.looks) == ([1, 1, 1, None], [["a", "b", "missing"]])

    play(story())


def test_question_during_a_look_waits_for_the_next_one() -> None:
    """It may be about what has happened since the look began."""

    async def story() -> None:
        source = Source()
        source.gate.clear()
        first = asyncio.create_task(source.together.ask("a"))
        while not source.looks:  # noqa: ASYNC110 (a few turns of the loop)
            await asyncio.sleep(0)
        second = asyncio.create_task(source.together.ask("a"))
        await asyncio.sleep(0)
        source.gate.set()
        assert (await first, await second, source.looks) == (1, 2, [["a"], ["a"]])

    play(story())


def test_look_answers_at_most_so_many() -> None:
    async def story() -> None:
        source = Source(most=2)
        assert await asyncio.gather(*map(source.together.ask, "abcde")) == [1, 1, 2, 2, 3]

    play(story())


def test_failed_look_fails_its_questions_and_no_later_one() -> None:
    async def story() -> None:
        source = Source()
        source.fails = True
        found = await asyncio.gather(*map(source.together.ask, "ab"), return_exceptions=True)
        assert [type(one) for one in found] == [OSError, OSError]
        source.fails = False
        assert await source.together.ask("a") == 2

    play(story())


def test_caller_that_gives_up_leaves_others_their_answer() -> None:
    async def story() -> None:
        source = Source()
        source.gate.clear()
        hasty, patient = (asyncio.create_task(source.together.ask("a")) for _ in range(2))
        while not source.looks:  # noqa: ASYNC110 (a few turns of the loop)
            await asyncio.sleep(0)
        hasty.cancel()
        source.gate.set()
        assert await patient == 1
        with pytest.raises(asyncio.CancelledError):
            await hasty

    play(story())
