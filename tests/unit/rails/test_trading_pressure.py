"""What one client can make a core keep in memory: answers count as much as requests, while they wait for the disk and
while the client does not read them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.unit.rails.desk import Desk, deposit
from tests.unit.rails.test_trading_server import log_in, next_frame, play

from bursar.ports import Stream
from bursar.rails.trading import ServerLimits, protocol
from bursar.rails.trading.history import indexed

QUESTIONS = 3_000  # some 20 bytes each
ASSETS = 400  # so that each answer has some 8,000
BYTES = 100_000  # that may wait
BOUND = 4 * BYTES  # far below what all answers take, far above what the sockets' own buffers add


async def rich_client(made: Desk) -> Stream:
    """A client that has logged in, where one user has so many assets that a short question has a long answer."""
    made.core.state.execute(*indexed([deposit(n, asset=f"A{n}") for n in range(1, ASSETS + 1)]))
    stream, _ = await log_in(made)
    await next_frame(stream)
    return stream


def ask(stream: Stream) -> None:
    for number in range(1, QUESTIONS + 1):
        stream.write(protocol.frame(protocol.Balances(number, [1])))


def test_a_client_that_reads_no_answers_is_not_read_from(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream = await rich_client(made)
        mine = made.server.connections[0].stream
        ask(stream)
        await made.until(lambda: mine.unsent > BYTES)
        other = await made.client()
        for _ in range(50):  # others are served meanwhile
            assert len((await other.totals()).totals) == ASSETS
        splitter, answered, most = protocol.Splitter(protocol.ANSWER_BYTES_MAX), 0, 0
        while answered < QUESTIONS:
            most = max(most, mine.unsent)
            answered += len(splitter.feed(await stream.read()))
        assert most < BOUND

    play(tmp_path, case, limits=ServerLimits(unsent_bytes=BYTES, waiting_bytes=BYTES))


def test_answers_that_wait_for_the_disk_are_counted(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream = await rich_client(made)
        connection, go = made.server.connections[0], threading.Event()
        stuck = asyncio.create_task(made.core._lane.run(go.wait))  # the disk takes its time
        taken = 0
        answer_at_once = made.core.when_durable

        def counted(answer: object) -> None:
            nonlocal taken
            taken += 1
            answer_at_once(answer)  # type: ignore[arg-type]

        made.core.when_durable = counted  # type: ignore[method-assign]
        stream.write(protocol.frame(protocol.Execute(QUESTIONS + 1, *indexed([deposit(ASSETS + 1)]))))
        ask(stream)
        try:
            await made.until(lambda: connection.waiting_bytes > BYTES)
            assert taken < BOUND // (ASSETS * 10)
        finally:
            go.set()
        splitter, answered = protocol.Splitter(protocol.ANSWER_BYTES_MAX), 0
        while answered < QUESTIONS + 1:
            answered += len(splitter.feed(await stream.read()))
        assert taken == QUESTIONS + 1
        assert await stuck

    play(tmp_path, case, limits=ServerLimits(waiting_bytes=BYTES))
