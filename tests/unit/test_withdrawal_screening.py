"""The screening hook, against a real server: only its own signed answer to this very question is a verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bursar.flows.withdrawals.risk import Screening, Verdict
from bursar.flows.withdrawals.screening import (
    ANSWER_BYTES_MAX,
    Question,
    Screener,
    ScreeningUnavailable,
    answer_signature,
)
from bursar.http import Pool

SECRET = b"s" * 32
NOW_US = 1_700_000_000_123_456
SOON_S, LONG_S = 0.3, 30.0
QUESTION = Question(withdrawal="wd-1", user="42", asset="USDT", chain="bsc", to="0xB0b", amount="12.5")

Says = Callable[[bytes], bytes]  # the question's body → the answer, with its head


class Hook:
    """Keeps what it is asked, and answers as a test says."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.asked: list[tuple[dict[str, str], bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers["content-length"]))
                self.asked.append((headers, body))
                answer = self.says(body)
                writer.write(answer)
                await writer.drain()
                if not answer:
                    await reader.read()  # silent until the other side gives up
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def screening(
    says: Says, *, timeout_s: float = LONG_S, answer_bytes_max: int = 1_000_000
) -> AsyncIterator[tuple[Screener, Hook]]:
    hook, numbers = Hook(says), itertools.count(1)
    server = await asyncio.start_server(hook.serve, "127.0.0.1", 0)
    pool = Pool(answer_bytes_max)
    screener = Screener(
        url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/screen/secret-key",
        secret=SECRET,
        post=pool.post,
        now_us=lambda: NOW_US,
        token=lambda: f"nonce-{next(numbers)}",
        timeout_s=timeout_s,
    )
    try:
        yield screener, hook
    finally:
        await pool.close()
        server.close()


def http(content: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def documented() -> Callable[..., bytes]:
    """The function that the page for people who write a hook shows."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "screening.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    known: dict[str, Any] = {"hashlib": hashlib, "hmac": hmac, "json": json}
    exec(code, known)
    found: Callable[..., bytes] = known["answer"]
    return found


ANSWER = documented()


def signed(question: bytes, verdict: str = "clear", reason: str = "", **more: Any) -> dict[str, Any]:
    """What a hook answers, by its page and not by our own function."""
    fields: dict[str, Any] = json.loads(ANSWER(SECRET, question, verdict, reason))
    return fields | more


def says(**fields: Any) -> Says:
    return lambda question: http(json.dumps(signed(question, **fields)).encode())


async def refused(screener: Screener) -> ScreeningUnavailable:
    with pytest.raises(ScreeningUnavailable) as caught:
        await screener.ask(QUESTION)
    assert "secret-key" not in str(caught.value), "the URL may contain a key"
    assert caught.value.withdrawal == "wd-1"
    return caught.value


@pytest.mark.parametrize(("verdict", "reason"), [("clear", ""), ("review", "new: ü"), ("denied", "sanctioned")])
def test_hook_is_asked_with_a_signed_question_and_its_verdict_is_read(verdict: str, reason: str) -> None:
    async def body() -> None:
        async with screening(says(verdict=verdict, reason=reason)) as (screener, hook):
            assert await screener.ask(QUESTION) == Screening(Verdict(verdict), reason)
            [(headers, sent)] = hook.asked
            assert json.loads(sent) == {
                "withdrawal": "wd-1",
                "user": "42",
                "asset": "USDT",
                "chain": "bsc",
                "to": "0xB0b",
                "amount": "12.5",
                "nonce": "nonce-1",
            }
            expected = hmac.new(SECRET, b"1700000000." + sent, hashlib.sha256).hexdigest()
            assert headers["bursar-timestamp"] == "1700000000"
            assert headers["bursar-signature"] == f"sha256={expected}"

    asyncio.run(body())


def test_answer_may_be_as_long_as_the_page_says() -> None:
    def answer(question: bytes) -> bytes:
        return http(json.dumps(signed(question, reason="x" * 500)).encode().ljust(ANSWER_BYTES_MAX))

    async def body() -> None:
        async with screening(answer) as (screener, _):
            assert await screener.ask(QUESTION) == Screening(Verdict.CLEAR, "x" * 500)

    asyncio.run(body())


def test_reason_may_be_left_out() -> None:
    def answer(question: bytes) -> bytes:
        fields = signed(question)
        del fields["reason"]
        return http(json.dumps(fields).encode())

    async def body() -> None:
        async with screening(answer) as (screener, _):
            assert await screener.ask(QUESTION) == Screening(Verdict.CLEAR)

    asyncio.run(body())


def test_earlier_answer_to_the_same_question_is_not_believed() -> None:
    """A cache in between would clear an address that is denied by now."""

    async def body() -> None:
        answers: list[bytes] = []

        def first_answer(question: bytes) -> bytes:
            answers.append(says()(question))
            return answers[0]

        async with screening(first_answer) as (screener, hook):
            assert (await screener.ask(QUESTION)).verdict is Verdict.CLEAR
            assert "its signature" in str(await refused(screener))
            assert hook.asked[0][1] != hook.asked[1][1]

    asyncio.run(body())


def tampered(**fields: Any) -> Says:
    return lambda question: http(json.dumps(signed(question, "denied", "sanctioned") | fields).encode())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (tampered(verdict="clear"), "signature"),
        (tampered(reason=""), "signature"),
        (tampered(signature=""), "signature"),
        (tampered(signature="ü" * 64), "signature"),
        (lambda question: http(json.dumps(signed(question + b" ")).encode()), "signature"),
        (tampered(verdict="CLEAR"), "Invalid enum value"),
        (tampered(verdict="unanswered"), "Invalid enum value"),
        (tampered(verdict=None), "Expected `str`|Invalid enum value|Expected"),
        (says(until="tomorrow"), "unknown field"),
        (says(reason="x" * 501), "its reason"),
        (says(reason="a\nb"), "its reason"),
        (lambda _: http(b""), "can't be believed"),
        (lambda _: http(b'"clear"'), "can't be believed"),
        (lambda _: http(b'{"verdict":"clear"}'), "missing required field `signature`"),
        (lambda _: http(b"\xff\xfe"), "can't be believed"),
        (lambda question: http(json.dumps(signed(question)).encode() + b" " * ANSWER_BYTES_MAX), "longer than 4096"),
    ],
)
def test_answer_that_is_not_exactly_a_verdict_is_none(answer: Says, why: str) -> None:
    async def body() -> None:
        async with screening(answer) as (screener, _):
            with pytest.raises(ScreeningUnavailable, match=why):
                await screener.ask(QUESTION)
            await refused(screener)

    asyncio.run(body())


@pytest.mark.parametrize("status", ["201 Created", "204 No Content", "302 Found", "403 No", "500 Oh", "503 Not Now"])
def test_only_status_200_is_an_answer(status: str) -> None:
    def answer(question: bytes) -> bytes:
        return http(b"" if status.startswith("204") else json.dumps(signed(question)).encode(), status)

    async def body() -> None:
        async with screening(answer) as (screener, hook):
            assert f"status {status[:3]}" in str(await refused(screener))
            assert len(hook.asked) == 1, "a redirect is not followed, a failure not repeated here"

    asyncio.run(body())


def test_hook_that_is_silent_garbled_too_long_or_away_has_not_answered() -> None:
    async def body() -> None:
        async with screening(lambda _: b"", timeout_s=SOON_S) as (screener, _):
            assert "no answer" in str(await refused(screener))
        async with screening(lambda _: b"what?\r\n\r\n") as (screener, _):
            assert "no answer" in str(await refused(screener))
        async with screening(says(), answer_bytes_max=10) as (screener, _):
            assert "no answer" in str(await refused(screener))
        async with screening(says()) as (screener, _):
            away = dataclasses.replace(screener, url="http://127.0.0.1:1/secret-key")
            assert "no answer" in str(await refused(away))

    asyncio.run(body())


def test_signature_of_an_answer_is_what_a_hook_computes() -> None:
    for verdict, reason in (("clear", ""), ("denied", "ü")):
        assert answer_signature(SECRET, b"{}", verdict, reason) == signed(b"{}", verdict, reason)["signature"]
