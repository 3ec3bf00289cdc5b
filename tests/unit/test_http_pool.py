"""The pooled HTTP client: connections stay open, answers are bounded, and no text contains the URL."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bursar.http import CONNECTIONS_MAX, Pool

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers every request with what the test says, and counts connections."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
                )
                await reader.readexactly(size)
                await self.answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def says(status: int, body: bytes, headers: str = "") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)

    return answer


@asynccontextmanager
async def pooled(answer: Answer, answer_bytes_max: int = 1_000) -> AsyncIterator[tuple[Pool, Server]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v3/secret-key"
    pool = Pool(answer_bytes_max)
    try:
        yield pool, server
    finally:
        await pool.close()
        listening.close()


def test_connections_are_kept_and_bodies_returned() -> None:
    async def run() -> None:
        async with pooled(says(200, b"hello")) as (pool, server):
            for _ in range(5):
                assert await pool.post(server.url, {"a": "b"}, b"x", 5) == (200, b"hello")
            assert server.connections == 1

    asyncio.run(run())


def test_redirects_are_not_followed() -> None:
    async def run() -> None:
        async with pooled(says(302, b"", "location: http://127.0.0.1:1/\r\n")) as (pool, server):
            assert await pool.post(server.url, {}, b"x", 5) == (302, b"")

    asyncio.run(run())


def test_an_answer_is_not_read_past_its_bound() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"100\r\n" + bytes(256) + b"\r\n")
            await writer.drain()

    async def run() -> None:
        async with pooled(endless) as (pool, server):
            with pytest.raises(OSError, match="more than 1000 bytes"):
                await pool.post(server.url, {}, b"x", 5)
        async with pooled(says(200, bytes(1_000))) as (pool, server):
            assert len((await pool.post(server.url, {}, b"x", 5))[1]) == 1_000

    asyncio.run(run())


def test_the_timeout_is_of_the_whole_answer() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
        while True:
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with pooled(drip) as (pool, server):
            with pytest.raises(TimeoutError):
                await pool.post(server.url, {}, b"x", 0.1)

    asyncio.run(run())


def test_a_server_that_hangs_does_not_use_up_the_connections_to_others() -> None:
    async def hang(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with pooled(hang) as (pool, stuck), pooled(says(200, b"fine")) as (_, server):
            waiting = [asyncio.create_task(pool.post(stuck.url, {}, b"x", 60)) for _ in range(CONNECTIONS_MAX + 5)]
            assert await pool.post(server.url, {}, b"x", 60) == (200, b"fine")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


async def garbage(writer: asyncio.StreamWriter) -> None:
    writer.write(b"this is no HTTP\r\n\r\n")


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("answer", [garbage, hang_up])
def test_errors_and_logs_do_not_contain_the_url(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with pooled(answer) as (pool, server):
            texts = []
            for url in (server.url, "nothing://secret-key", "http://secret-key:99999/", "http://[secret-key"):
                with pytest.raises(OSError) as caught:
                    await pool.post(url, {}, b"x", 5)
                texts.append("".join(traceback.format_exception(caught.value, chain=True)))
            return "".join(texts)

    with caplog.at_level(logging.DEBUG):
        text = asyncio.run(run())
    assert "ConnectionError" in text
    assert "secret-key" not in text + caplog.text


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def run() -> None:
        async with pooled(says(200, b"direct")) as (pool, server):
            assert await pool.post(server.url, {}, b"x", 5) == (200, b"direct")

    asyncio.run(run())
