"""Webhooks against a real server, commands with real programs: what counts as delivered, and what does not."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bursar.config import ConfigRefused, read
from bursar.engine import DeliveryFailed, Notice, Program, Webhook
from bursar.http import post
from bursar.ports import SystemPorts, run_program
from bursar.runtime import sinks

SECRET = b"s" * 32
NOW_US = 1_700_000_000_123_456
NOTICE = Notice(
    id="17:stuck:5",
    reason="stuck",
    severity="critical",
    message="transfers sr-1 is TARGET_PENDING: ü",
    raised_at=datetime(2026, 11, 16, 3, 4, 5, 678, tzinfo=UTC),
    attempt=2,
    record=17,
    flow="transfers",
    record_id="sr-1",
)
SOON_S, LONG_S = 0.3, 30.0


class Server:
    """Takes requests, keeps them, and answers as it is set to."""

    def __init__(self, says: bytes | None, *, slowly: bool = False) -> None:
        self.says = says
        self.slowly = slowly
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        self.requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
        try:
            if self.says is None:
                await reader.read()  # until the other side gives up
            elif self.slowly:
                for byte in self.says:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.05)
            else:
                writer.write(self.says)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


@asynccontextmanager
async def serving(says: bytes | None, *, slowly: bool = False) -> AsyncIterator[Server]:
    here = Server(says, slowly=slowly)
    server = await asyncio.start_server(here.serve, "127.0.0.1", 0)
    here.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    try:
        yield here
    finally:
        server.close()


def webhook(url: str, timeout_s: float = LONG_S) -> Webhook:
    return Webhook(url=url, secret=SECRET, timeout_s=timeout_s, post=post, now_us=lambda: NOW_US)


def answer(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Content-Length: 0", "Connection: close", *headers, "", ""]).encode()


async def failure(work: Awaitable[None]) -> Exception:
    try:
        await work
    except Exception as error:
        return error
    raise AssertionError("it counts as delivered")


# --- webhook ---------------------------------------------------------------------------------------------------------


def test_a_webhook_gets_the_alert_signed() -> None:
    async def body() -> None:
        async with serving(answer("204 No Content")) as server:
            await webhook(server.url)(NOTICE)
            [(headers, sent)] = server.requests
        assert json.loads(sent) == {
            "id": "17:stuck:5",
            "reason": "stuck",
            "severity": "critical",
            "message": "transfers sr-1 is TARGET_PENDING: ü",
            "raised_at": "2026-11-16T03:04:05.000678Z",
            "attempt": 2,
            "record": 17,
            "flow": "transfers",
            "record_id": "sr-1",
        }
        assert headers["content-type"] == "application/json"
        assert headers["bursar-timestamp"] == "1700000000"
        # As docs/how-to/operate.md asks receivers to check it.
        expected = hmac.new(SECRET, b"1700000000." + sent, hashlib.sha256).hexdigest()
        assert headers["bursar-signature"] == f"sha256={expected}"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("status", "delivered"),
    [
        ("200 OK", True),
        ("202 Accepted", True),
        ("301 Moved", False),
        ("400 Bad Request", False),
        ("404 Not Found", False),
        ("500 Oh", False),
        ("503 Not Now", False),
    ],
)
def test_only_a_success_status_counts_as_delivered(status: str, delivered: bool) -> None:
    async def body() -> None:
        async with serving(answer(status, "Location: /elsewhere")) as server:
            if delivered:
                await webhook(server.url)(NOTICE)
            else:
                error = await failure(webhook(server.url)(NOTICE))
                assert isinstance(error, DeliveryFailed)
                assert status[:3] in str(error)
            assert len(server.requests) == 1, "a redirect is not followed, a failure not repeated here"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("says", "slowly"),
    [
        (b"what?\r\n\r\n", False),
        (b"", False),
        (b"HTTP/1.1 200", False),
        (b"\x00\xff" * 5_000, False),
        (None, False),  # it takes the request and says nothing
        (b"HTTP/1.1 200 OK\r\n" + b"X-More: 1\r\n" * 50, True),  # it drips: each read is in time, the whole is not
    ],
    ids=["garbage", "nothing", "half", "bytes", "silent", "drip"],
)
def test_no_http_answer_is_not_delivered(says: bytes | None, slowly: bool) -> None:
    async def body() -> None:
        async with serving(says, slowly=slowly) as server:
            started = time.monotonic()
            error = await failure(webhook(server.url, SOON_S)(NOTICE))
            assert isinstance(error, OSError)
            assert time.monotonic() - started < LONG_S / 3
            assert len(server.requests) == 1

    asyncio.run(body())


def test_webhook_without_a_listener_is_not_delivered() -> None:
    async def body() -> None:
        async with serving(b"") as server:
            url = server.url
        assert isinstance(await failure(webhook(url)(NOTICE)), ConnectionError)
        assert isinstance(await failure(webhook("http://no-such-host.invalid/")(NOTICE)), OSError)
        assert isinstance(await failure(webhook("https" + url.removeprefix("http"))(NOTICE)), OSError)

    asyncio.run(body())


# --- command ---------------------------------------------------------------------------------------------------------


def program(folder: Path, text: str, *, timeout_s: float = LONG_S, words: tuple[str, ...] = ()) -> Program:
    file = folder / "notify"
    file.write_text(f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return Program(words=(str(file), *words), timeout_s=timeout_s, run=run_program)


def test_a_program_gets_the_alert_on_its_stdin_and_its_words_unsplit(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = f"json.dump([sys.argv[1:], json.load(sys.stdin)], open({str(out)!r}, 'w'))"
    asyncio.run(program(tmp_path, text, words=("a b", "$HOME; exit 1"))(NOTICE))
    words, alert = json.loads(out.read_text())
    assert words == ["a b", "$HOME; exit 1"]
    assert (alert["id"], alert["message"], alert["attempt"]) == (NOTICE.id, NOTICE.message, 2)


@pytest.mark.parametrize(
    "text",
    ["sys.exit(3)", "raise ValueError('no')", "os.kill(os.getpid(), signal.SIGTERM)"],
    ids=["code", "exception", "signal"],
)
def test_a_failing_command_has_not_delivered(tmp_path: Path, text: str) -> None:
    error = asyncio.run(failure(program(tmp_path, text)(NOTICE)))
    assert isinstance(error, DeliveryFailed)
    assert "ended with" in str(error)


def test_a_command_need_not_read_its_stdin_and_may_print(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that ends without reading a large alert, or writes more than a pipe holds, has delivered it."""
    large = Notice(**{name: getattr(NOTICE, name) for name in NOTICE.__struct_fields__} | {"message": "x" * 1_000_000})
    asyncio.run(program(tmp_path, "print('y' * 1_000_000)")(large))
    assert capfd.readouterr().out == ""  # the first line of `bursar serve` is for the process that started it


@pytest.mark.parametrize("text", ["time.sleep(600)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path: Path, text: str) -> None:
    pids = tmp_path / "pids"
    start = (
        f"child = subprocess.Popen(['sleep', '600']); open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')"
    )
    error = asyncio.run(failure(program(tmp_path, f"{start}\n{text}", timeout_s=3)(NOTICE)))
    assert isinstance(error, TimeoutError)
    for pid in pids.read_text().split():
        until_dead(int(pid))


def test_cancelled_it_leaves_no_program_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def body() -> None:
        text = f"open({str(pids)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
        task = asyncio.create_task(program(tmp_path, text)(NOTICE))
        async with asyncio.timeout(LONG_S):
            while not pids.exists() or not pids.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    until_dead(int(pids.read_text()))


def until_dead(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{pid} lives")
        time.sleep(0.01)  # between two looks at a real process, until a deadline


# --- configuration ---------------------------------------------------------------------------------------------------


def test_the_configuration_names_the_sinks(tmp_path: Path) -> None:
    secret = tmp_path / "hook.secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings: dict[str, Any] = {"alert_webhook": "https://pager/hook", "alert_webhook_secret_file": str(secret)}
    found = sinks(read(**settings, alert_command=["true", "x"], alert_timeout_ms=1500), SystemPorts())
    assert list(found) == ["log", "webhook", "command"]
    hook, command = found["webhook"], found["command"]
    assert isinstance(hook, Webhook)
    assert isinstance(command, Program)
    assert (hook.url, hook.secret, hook.timeout_s) == ("https://pager/hook", SECRET, 1.5)
    assert (command.words, command.timeout_s) == (("true", "x"), 1.5)
    assert list(sinks(read(), SystemPorts())) == ["log"]


@pytest.mark.parametrize(("name", "why"), [("none", "can't be read"), ("short", "at least 32"), ("open", "chmod 600")])
def test_a_webhook_without_a_secret_that_is_one_is_refused(tmp_path: Path, name: str, why: str) -> None:
    for file, text, mode in (("short", b"x" * 31, 0o600), ("open", b"x" * 32, 0o644)):
        (tmp_path / file).write_bytes(text)
        (tmp_path / file).chmod(mode)
    with pytest.raises(ConfigRefused, match=why):
        sinks(read(alert_webhook="http://x/", alert_webhook_secret_file=str(tmp_path / name)), SystemPorts())


@pytest.mark.parametrize("name", ["none", "", "plain"])
def test_a_command_that_can_not_be_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain").write_text("no program")
    with pytest.raises(ConfigRefused, match="is no program that can be run"):
        sinks(read(alert_command=[str(tmp_path / name)]), SystemPorts())


def test_without_its_library_a_webhook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "bursar.http")
    with pytest.raises(ConfigRefused, match=r"pip install 'bursar\[webhook\]'"):
        sinks(read(alert_webhook="http://x/", alert_webhook_secret_file="y"), SystemPorts())
