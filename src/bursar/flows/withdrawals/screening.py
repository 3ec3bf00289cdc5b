"""The screening hook: a server of the operator's own that says whether an address may be paid.

Each question is POSTed as JSON, signed as webhooks are (`Bursar-Signature` over the timestamp and the body). The answer
is status 200 and JSON:

    {"verdict": "clear" | "review" | "denied", "reason": "for operators", "signature": "…"}

The signature is HMAC-SHA256 with the same secret, in hexadecimal, over `ANSWER_LABEL`, the SHA-256 of the question's
body in hexadecimal, the verdict and the reason, joined by newlines. The question has a nonce. So an answer clears this
question alone: neither a stranger in between, nor a cache, nor an earlier answer about the same address can.

Whatever else comes is `ScreeningUnavailable`, and never a verdict: another status, other JSON, a field that is not
known, an answer that is too long, too late or not signed. What that means for the withdrawal is decided in `risk`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from bursar.engine.sinks import SIGNATURE, TIMESTAMP, signature
from bursar.flows.withdrawals.risk import Screening, Verdict
from bursar.model.errors import BursarError

ANSWER_LABEL: Final = "bursar screening answer 1"
ANSWER_BYTES_MAX: Final = 4_096
REASON_LENGTH_MAX = 500

# url, headers, body, seconds → status and body of the answer. OSError if there was none in time.
Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[tuple[int, bytes]]]


@dataclass(eq=False)
class ScreeningUnavailable(BursarError):
    """The screening hook gave no answer that can be believed. It says nothing about the withdrawal."""

    withdrawal: str
    why: str
    code = "SCREENING_UNAVAILABLE"
    text = "{withdrawal} was not screened: {why}"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the hook is asked."""

    withdrawal: str
    user: str
    asset: str
    chain: str
    to: str  # as the chain's codec writes it
    amount: str  # in units of the asset


class _Sent(Question, frozen=True, kw_only=True):
    nonce: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verdict: Literal["clear", "review", "denied"]
    reason: str = ""
    signature: str


@dataclass(frozen=True, kw_only=True)
class Screener:
    """Asks the hook."""

    url: str
    secret: bytes
    post: Post
    now_us: Callable[[], int]
    token: Callable[[], str]  # random text that never repeats
    timeout_s: float

    async def ask(self, question: Question) -> Screening:
        """The hook's verdict; ScreeningUnavailable if it gave none. May be repeated: it changes nothing outside."""
        body = msgspec.json.encode(_Sent(**msgspec.structs.asdict(question), nonce=self.token()))
        timestamp = str(self.now_us() // 1_000_000)
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP: timestamp,
            SIGNATURE: f"sha256={signature(self.secret, timestamp, body)}",
        }
        try:
            status, answer = await self.post(self.url, headers, body, self.timeout_s)
        except OSError as error:
            raise ScreeningUnavailable(question.withdrawal, f"no answer ({error})") from error
        if status != 200:
            raise ScreeningUnavailable(question.withdrawal, f"the hook answered with status {status}")
        try:
            return read_answer(self.secret, body, answer)
        except ValueError as error:  # also msgspec's
            raise ScreeningUnavailable(question.withdrawal, f"the hook's answer can't be believed: {error}") from error


def read_answer(secret: bytes, question: bytes, answer: bytes) -> Screening:
    """What an answer to these bytes says; ValueError unless the holder of the secret has given it to them. Pure."""
    if len(answer) > ANSWER_BYTES_MAX:
        raise ValueError(f"it is longer than {ANSWER_BYTES_MAX} bytes")
    said = msgspec.json.decode(answer, type=_Answer)
    right = answer_signature(secret, question, said.verdict, said.reason)
    if not hmac.compare_digest(right.encode(), said.signature.encode()):
        raise ValueError("its signature is not over this question and this verdict, with our secret")
    if len(said.reason) > REASON_LENGTH_MAX or not said.reason.isprintable():
        raise ValueError(f"its reason is not at most {REASON_LENGTH_MAX} printable characters")
    return Screening(Verdict(said.verdict), said.reason)


def answer_signature(secret: bytes, question: bytes, verdict: str, reason: str) -> str:
    """How the hook signs its answer to a question's body. Pure."""
    signed = "\n".join((ANSWER_LABEL, hashlib.sha256(question).hexdigest(), verdict, reason))
    return hmac.new(secret, signed.encode(), hashlib.sha256).hexdigest()
