"""Sinks outside the process: a webhook that is sent a signed JSON document, and a program that gets it on its stdin.

Neither opens a door itself: how HTTP is spoken and how a program is run is handed in, so that a test or the simulator
can stand in. What is not plainly a success (2xx, exit code 0, in time) is `DeliveryFailed`, and is retried.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from bursar.engine.alerts import Notice

SIGNATURE, TIMESTAMP = "Bursar-Signature", "Bursar-Timestamp"

# url, headers, body, seconds → the answer's status. Raises if there was none in time.
Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[int]]
# words, stdin, seconds → exit code. Raises, and the program is dead, if it had not ended in time.
Run = Callable[[Sequence[str], bytes, float], Awaitable[int]]


class DeliveryFailed(Exception):
    """The sink did not confirm that it has taken the alert."""


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    """What `Bursar-Signature` carries: HMAC-SHA256, in hexadecimal, over the timestamp, a dot and the body."""
    return hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """POSTs each alert to an address."""

    url: str
    secret: bytes
    timeout_s: float
    post: Post
    now_us: Callable[[], int]

    async def __call__(self, notice: Notice) -> None:
        body = msgspec.json.encode(notice)
        timestamp = str(self.now_us() // 1_000_000)
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: timestamp,
            SIGNATURE: f"sha256={signature(self.secret, timestamp, body)}",
        }
        status = await self.post(self.url, headers, body, self.timeout_s)
        if not 200 <= status < 300:
            raise DeliveryFailed(f"the webhook answered {status}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Runs a program for each alert. No shell is involved."""

    words: tuple[str, ...]
    timeout_s: float
    run: Run

    async def __call__(self, notice: Notice) -> None:
        code = await self.run(self.words, msgspec.json.encode(notice) + b"\n", self.timeout_s)
        if code:
            raise DeliveryFailed(f"{self.words[0]} ended with {code}")
