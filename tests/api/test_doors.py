"""What strangers do to a socket: heads and bodies that never end or never come, pipelines, two readings of one request.

The real server in this process, on a real socket, with short time-outs; the attacker has bare sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.office import ALICE, BOB, TRANSFERS, Office, office, token
from tests.builders import scenario

from bursar.api.app import applications
from bursar.api.tokens import Keys
from bursar.cli.http_connection import HEADERS_MAX
from bursar.cli.http_server import Server

F, S = "FUNDING", "SPOT"
PATIENCE_S = 20.0
QUICK = {"header_timeout_ms": 600, "body_timeout_ms": 600, "idle_timeout_ms": 600}


class Caller:
    """One connection of somebody who sends what he likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""  # of the last answer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; status 0 if there is none."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                self.head = head = await self.reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                return int(head[9:12]), await self.reader.readexactly(int(length[1]) if length else 0)
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, b""

    async def is_closed(self) -> bool:
        """Wait until the other end has hung up; whether nothing more was said."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        self.writer.close()


class Door:
    """The server's address."""

    def __init__(self, here: Office, port: int, server: Server) -> None:
        self.here, self.port, self.server = here, port, server
        self._callers: list[Caller] = []

    async def call(self, data: bytes = b"") -> Caller:
        caller = Caller(*await asyncio.open_connection("127.0.0.1", self.port))
        self._callers.append(caller)
        if data:
            await caller.send(data)
        return caller

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as http:
            text = (await http.get("/metrics")).text
        found = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(found[0]) if found else 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def hang_up(self) -> None:
        for caller in self._callers:
            caller.close()


@contextlib.asynccontextmanager
async def door(url: str, folder: Path, *, connections_max: int = 100, **settings: Any) -> AsyncIterator[Door]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    async with office(url, folder, **settings) as here:
        await here.fund(ALICE, "100")
        server = Server(here.app, here.runtime.config, connections_max)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        found = Door(here, listener.getsockname()[1], server)
        await found.until(lambda: server.started)
        try:
            yield found
        finally:
            found.hang_up()
            server.should_exit = True
            await task


def head(method: str = "POST", path: str = TRANSFERS, *headers: str, user: int = ALICE) -> bytes:
    usual = ("Host: b", f"Authorization: Bearer {token(user)}", "Content-Type: application/json")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *usual, *headers, "", ""]).encode()


def post(amount: str = "1", order: str = "", *, user: int = ALICE, path: str = TRANSFERS) -> bytes:
    more = f',"client_order_id":"{order}"' if order else ""
    body = f'{{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"{amount}"{more}}}'
    return head("POST", path, f"Content-Length: {len(body)}", user=user) + body.encode()


GET = b"GET /healthz HTTP/1.1\r\nHost: b\r\n\r\n"


@scenario
async def test_headers_without_end_are_refused(url: str, tmp_path: Path) -> None:
    """One header, its name, the address, or many headers: 431 once the limit is passed, however much is sent."""
    async with door(url, tmp_path, header_bytes_max=2_048) as here:
        for begin in (b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n", b"GET /"):
            caller = await here.call(begin + b"x" * 200_000)
            assert (await caller.answer())[0] == 431, begin
            assert await caller.is_closed()
        many = "".join(f"x{n}: 1\r\n" for n in range(HEADERS_MAX + 1)).encode()
        assert (await (await here.call(b"GET /healthz HTTP/1.1\r\n" + many + b"\r\n")).answer())[0] == 431
        just = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 1_900 + b"\r\n\r\n"
        assert (await (await here.call(just)).answer())[0] == 200
        over = b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 2_048 + b"\r\n\r\n"
        assert (await (await here.call(over)).answer())[0] == 431
        assert await here.metric('bursar_http_closed_total{reason="headers_too_large"}') == 5


@scenario
async def test_a_slow_head_or_body_and_silence_end_in_time(url: str, tmp_path: Path) -> None:
    """A byte now and then does not make it longer: the time of the whole counts."""
    async with door(url, tmp_path, **QUICK) as here:
        silent = await here.call()
        loris = await here.call(b"GET / HTTP/1.1\r\n")
        body = await here.call(head("POST", TRANSFERS, "Content-Length: 100"))
        chunked = await here.call(head("POST", TRANSFERS, "Transfer-Encoding: chunked"))
        refused = await here.call(b"POST " + TRANSFERS.encode() + b" HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        idle = await here.call(GET)
        assert (await idle.answer())[0] == 200
        assert (await refused.answer())[0] == 401

        async def drip() -> None:
            while True:
                await loris.send(b"x: 1\r\n")
                await body.send(b" ")
                await chunked.send(b"1\r\n \r\n")
                await refused.send(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert [(await one.answer())[0] for one in (loris, body, chunked)] == [408, 408, 408]
        for one in (silent, loris, body, chunked, refused, idle):
            assert await one.is_closed()
        dripping.cancel()
        assert await here.metric("bursar_http_in_progress") == 0
        assert await here.metric('bursar_http_closed_total{reason="body_timeout"}') == 2
        assert (await (await here.call(post())).answer())[0] == 200


@scenario
async def test_bodies_that_never_come_hold_no_place(url: str, tmp_path: Path) -> None:
    """Far more than there are places: others are served, and of this user no more than his part is read."""
    async with door(url, tmp_path, requests_max=4, requests_per_user_max=8, connections_max=200) as here:
        await here.here.fund(BOB, "100")
        held = [await here.call(head("POST", TRANSFERS, "Content-Length: 50")) for _ in range(60)]
        answers = []
        for caller in held[8:]:
            answers.append((await caller.answer())[0])
        assert answers == [429] * 52
        assert await here.metric("bursar_http_in_progress") == 0
        assert (await (await here.call(post(user=BOB))).answer())[0] == 200
        assert (await (await here.call(post())).answer())[0] == 429
        for caller in held[:8]:
            caller.close()
        gate = here.here.app
        await here.until(lambda: gate.traffic.hung_up == 8)
        assert (await (await here.call(post())).answer())[0] == 200
        await here.until(lambda: not gate._per_user)


@scenario
async def test_hanging_up_in_the_middle_of_a_body_is_no_error(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with door(url, tmp_path) as here:
        before = here.here.written()
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                (await here.call(head("POST", TRANSFERS, "Content-Length: 500") + b'{"from":')).close()
            await here.until(lambda: here.here.app.traffic.hung_up == 5)
        assert not [record.getMessage() for record in caplog.records if "bursar" in record.name or record.exc_info]
        assert not [key for key in here.here.app.traffic.requests if key[2] >= 500]
        assert here.here.written() == before


@scenario
async def test_only_the_first_of_a_pipeline_is_carried_out(url: str, tmp_path: Path) -> None:
    """Its answer closes the connection; the others were not even begun."""
    async with door(url, tmp_path) as here:
        caller = await here.call(post("1", "one") + post("1", "two") * 50)
        assert (await caller.answer())[0] == 200
        assert await caller.is_closed()
        assert await here.here.balances(ALICE) == {F: "99.000000", S: "1.000000"}
        kept = await here.call(post("1", "three"))  # one after the other, they are as many as one likes
        assert (await kept.answer())[0] == 200
        await kept.send(post("1", "four"))
        assert (await kept.answer())[0] == 200
        assert await here.here.balances(ALICE) == {F: "97.000000", S: "3.000000"}


SMUGGLED = post("7", "smuggled")
SHAPES: dict[str, bytes] = {
    "length and chunked": head("POST", TRANSFERS, "Content-Length: 6", "Transfer-Encoding: chunked")
    + b"0\r\n\r\n"
    + SMUGGLED,
    "chunked and length": head("POST", TRANSFERS, "Transfer-Encoding: chunked", "Content-Length: 6")
    + b"0\r\n\r\n"
    + SMUGGLED,
    "two lengths": head("POST", TRANSFERS, "Content-Length: 0", "Content-Length: 300") + SMUGGLED,
    "two lengths in one": head("POST", TRANSFERS, "Content-Length: 0, 300") + SMUGGLED,
    "a signed length": head("POST", TRANSFERS, "Content-Length: +0") + SMUGGLED,
    "a negative length": head("POST", TRANSFERS, "Content-Length: -1") + SMUGGLED,
    "a length in hex": head("POST", TRANSFERS, "Content-Length: 0x0") + SMUGGLED,
    "chunked, not last": head("POST", TRANSFERS, "Transfer-Encoding: chunked, identity") + b"0\r\n\r\n" + SMUGGLED,
    "an unknown coding": head("POST", TRANSFERS, "Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
    "a tab before the colon": head("POST", TRANSFERS, "Transfer-Encoding\t: chunked") + b"0\r\n\r\n" + SMUGGLED,
    "a folded header": head("POST", TRANSFERS, "X: 1", " Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
    "a chunk with a sign": head("POST", TRANSFERS, "Transfer-Encoding: chunked") + b"+0\r\n\r\n" + SMUGGLED,
    "a chunk in decimal with 0x": head("POST", TRANSFERS, "Transfer-Encoding: chunked") + b"0x0\r\n\r\n" + SMUGGLED,
    "a huge chunk": head("POST", TRANSFERS, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n\r\n" + SMUGGLED,
    "chunk data too long": head("POST", TRANSFERS, "Transfer-Encoding: chunked") + b"1\r\nabc\r\n0\r\n\r\n" + SMUGGLED,
    "bare LF": head("POST", TRANSFERS, "Content-Length: 0").replace(b"\r\n", b"\n") + SMUGGLED,
    "bare CR": head("POST", TRANSFERS, "X: a\rTransfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
    "NUL in a header": head("POST", TRANSFERS, "X: a\x00b") + SMUGGLED,
    "a fragment": head("POST", TRANSFERS + "#", "Content-Length: 0") + SMUGGLED,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "HTTP/0.9": b"GET /\r\n\r\n" + SMUGGLED,
    "TLS": bytes.fromhex("1603010200010001fc0303") + b"\0" * 64 + SMUGGLED,
    "upgrade": head("POST", TRANSFERS, "Connection: Upgrade", "Upgrade: websocket", "Content-Length: 0") + SMUGGLED,
    "upgrade of a read": head("GET", TRANSFERS, "Connection: Upgrade", "Upgrade: h2c") + SMUGGLED,
    "CONNECT": head("CONNECT", "b:443") + SMUGGLED,
    "a trailer": head("POST", TRANSFERS, "Transfer-Encoding: chunked") + b"0\r\nIdempotency-Key: x\r\n\r\n" + SMUGGLED,
}


@scenario
async def test_no_request_hides_in_another(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever one takes for the end of the first, the second is not carried out; and nobody's log is filled."""
    async with door(url, tmp_path, **QUICK) as here:
        before = here.here.written()
        with caplog.at_level(logging.WARNING):
            for name, shape in SHAPES.items():
                caller = await here.call(shape)
                status, _ = await caller.answer()
                assert 400 <= status < 500 or name == "upgrade of a read", (name, status)
                assert b"connection: close" in caller.head, name
                assert await caller.is_closed(), name
                assert here.here.written() == before, name
        assert not [record.getMessage() for record in caplog.records]


@scenario
async def test_a_trailer_does_not_become_a_header(url: str, tmp_path: Path) -> None:
    """Somebody in front of us may have looked at the headers; nobody looks at trailers."""
    async with door(url, tmp_path) as here:
        body = b'{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"1"}'
        chunk = (
            f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\nIdempotency-Key: mine\r\nContent-Type: text/plain\r\n\r\n"
        )
        caller = await here.call(head("POST", TRANSFERS, "Transfer-Encoding: chunked") + chunk)
        assert (await caller.answer())[0] == 200
        found = (await here.here.get(TRANSFERS, by=token(ALICE))).json()["transfers"]
        assert [one.get("client_order_id") for one in found] == [None]


@scenario
async def test_a_body_without_end_is_cut(url: str, tmp_path: Path) -> None:
    """Also after its answer: a chunk's extension, trailers, and bytes that nobody wants."""
    async with door(url, tmp_path, body_bytes_max=1_024) as here:
        chunked = head("POST", TRANSFERS, "Transfer-Encoding: chunked")
        for begin, more in (
            (b"", b"400\r\n" + b"x" * 1_024 + b"\r\n"),
            (b"1;", b"x" * 4_096),
            (b"0\r\n", b"x: y\r\n" * 500),
        ):
            caller = await here.call(chunked + begin)
            sent = 0
            while not caller.reader.at_eof() and sent < 50_000_000:
                await caller.send(more)
                sent += len(more)
                if caller.writer.is_closing():
                    break
                await asyncio.sleep(0)
            assert sent < 50_000_000, begin
        assert (await (await here.call(post())).answer())[0] == 200


@scenario
async def test_whoever_has_sent_all_may_close_his_end(url: str, tmp_path: Path) -> None:
    """Half-closed: the request is carried out, and its answer arrives. Half-closed before that: the end."""
    async with door(url, tmp_path) as here:
        caller = await here.call(post())
        caller.writer.write_eof()
        assert (await caller.answer())[0] == 200
        assert await caller.is_closed()
        for part in (b"", b"GET / HT", head("POST", TRANSFERS, "Content-Length: 50")):
            caller = await here.call(part)
            caller.writer.write_eof()
            assert await caller.is_closed()


@scenario
async def test_answers_that_nobody_reads_do_not_keep_their_connection(url: str, tmp_path: Path) -> None:
    async with door(url, tmp_path, **QUICK) as here:
        caller = await here.call()
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        ask = head("GET", "/schema/openapi.json")
        before = here.here.app.traffic.closed.copy()
        for _ in range(2_000):
            if caller.writer.is_closing() or here.here.app.traffic.closed != before:
                break
            await caller.send(ask)
            await asyncio.sleep(0.005)
        await here.until(lambda: here.here.app.traffic.closed["answer_not_read"] > 0)
        await here.until(lambda: here.here.app.traffic.in_progress == 0)


@scenario
async def test_strangers_make_room_for_users(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twice as many silent connections as there may be: a user's stays, newcomers get in, and it is told once."""
    async with door(url, tmp_path, connections_max=32) as here:
        user = await here.call(post("1", "a"))
        assert (await user.answer())[0] == 200
        with caplog.at_level(logging.WARNING, "bursar.http"):
            for _ in range(80):
                await here.call()
            assert (await (await here.call(post("1", "b"))).answer())[0] == 200
        await user.send(post("1", "c"))
        assert (await user.answer())[0] == 200
        assert len(here.server.server_state.connections) <= 32
        assert len([record for record in caplog.records if record.name == "bursar.http"]) == 1
        assert await here.metric('bursar_http_closed_total{reason="evicted"}') >= 40


@scenario
async def test_when_all_are_being_answered_a_newcomer_is_told_so(url: str, tmp_path: Path) -> None:
    async with door(url, tmp_path, connections_max=4) as here:
        transfers: Any = here.here.runtime.transfers
        real, go = transfers.create, asyncio.Event()

        async def create(*args: Any, **named: Any) -> Any:
            await go.wait()
            return await real(*args, **named)

        transfers.create = create
        traffic = here.here.app.traffic
        held = [await here.call(post("1", f"o{n}")) for n in range(4)]
        await here.until(lambda: traffic.in_progress == 4)
        refused = await here.call()
        assert (await refused.answer())[0] == 503
        go.set()
        assert [(await caller.answer())[0] for caller in held] == [200] * 4


@scenario
async def test_health_has_an_address_of_its_own(url: str, tmp_path: Path) -> None:
    """Then the public one does not know it, and it knows nothing else."""
    async with office(url, tmp_path, health_listen="127.0.0.1:0") as here:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await here.get(path)).status_code == 404
        inside = applications(here.runtime, Keys.of(here.runtime.config))[1]
        transport = httpx.ASGITransport(app=inside)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://bursar") as http:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await http.get(path)).status_code == 200
            assert (await http.get("/api/v1/assets")).status_code == 404
            assert (await http.get("/schema/openapi.json")).status_code == 404


@scenario
async def test_an_address_has_one_spelling(url: str, tmp_path: Path) -> None:
    async with door(url, tmp_path) as here:
        for path in (
            "//metrics",
            "/metrics/",
            "/metrics//",
            "/%6detrics",
            "/%6Detrics",
            "/METRICS",
            "/./metrics",
            "/x/../metrics",
            "/metrics%2f",
            "/metrics;x",
            "/metrics#",
            "/metrics#/api/v1/assets",
            "/metrics%00",
            "/%2fmetrics",
            "\\metrics",
            "/healthz/",
            "//healthz",
            "/api//v1/balances",
            "/api/v1/balances/",
            "/%61pi/v1/balances",
            f"/{TRANSFERS}",
            f"{TRANSFERS}/",
            f"{TRANSFERS}//sr-1",
            "//schema/openapi.json",
        ):
            status, body = await (await here.call(head("GET", path))).answer()
            assert status in (400, 404), path
            assert b"bursar_http" not in body
        for path, status in (("/metrics", 200), ("/metrics?x=/healthz/", 200), ("http://b/metrics", 200), ("/", 404)):
            assert (await (await here.call(head("GET", path))).answer())[0] == status, path
        confirm = head("POST", "/api/v1/deposits/wire%201/confirm", "Content-Length: 0")
        assert (await (await here.call(confirm)).answer())[0] == 403  # a parameter may be encoded


@scenario
async def test_a_header_that_counts_is_given_once(url: str, tmp_path: Path) -> None:
    """Two tokens or two keys: whoever stands in front of us may have looked at the other one."""
    async with door(url, tmp_path) as here:
        before = here.here.written()
        body = b'{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"1"}'
        for twice in (
            (f"Authorization: Bearer {token(BOB)}",),
            (f"authorization: Bearer {token(ALICE)}",),
            ("Idempotency-Key: a", "idempotency-key: a"),
            ("Idempotency-Key: a", "Idempotency-Key: b"),
            ("Content-Type: text/plain",),
            ("Host: c",),
        ):
            request = head("POST", TRANSFERS, *twice, f"Content-Length: {len(body)}") + body
            status, answer = await (await here.call(request)).answer()
            assert (status, b"given twice" in answer) == (400, True), twice
        assert here.here.written() == before
