"""What the API refuses: every line of "Refused" in the cases, with code, HTTP status, and nothing written.

Also that everything refused is told as `application/problem+json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.office import ALICE, BOB, TRANSFERS, Office, bearer, office, refusal, token
from tests.builders import scenario

from bursar.ports import SystemPorts
from bursar.rails.trading import Status

F, S = "FUNDING", "SPOT"


class Still(SystemPorts):
    """The real machine, with a wall clock on which it stays the same second."""

    def now_us(self) -> int:
        return 1_800_000_000_000_000


# name, from, to, amount, asset, status, code
CASES: list[tuple[str, str, str, Any, str, int, str]] = [
    ("zero", F, S, "0", "USDT", 422, "INVALID_AMOUNT"),
    ("zero with decimals", F, S, "0.000000", "USDT", 422, "INVALID_AMOUNT"),
    ("negative", F, S, "-1", "USDT", 422, "INVALID_AMOUNT"),
    ("signed", F, S, "+1", "USDT", 422, "INVALID_AMOUNT"),
    ("two dots", F, S, "1.0.0", "USDT", 422, "INVALID_AMOUNT"),
    ("exponent", F, S, "1e8", "USDT", 422, "INVALID_AMOUNT"),
    ("empty", F, S, "", "USDT", 422, "INVALID_AMOUNT"),
    ("blank", F, S, "  ", "USDT", 422, "INVALID_AMOUNT"),
    ("NaN", F, S, "NaN", "USDT", 422, "INVALID_AMOUNT"),
    ("Infinity", F, S, "Infinity", "USDT", 422, "INVALID_AMOUNT"),
    ("full-width digits", F, S, "\uff11\uff10\uff10", "USDT", 422, "INVALID_AMOUNT"),
    ("a thousand digits", F, S, "1" * 1000, "USDT", 422, "INVALID_AMOUNT"),
    ("too many decimals", F, S, "1.0000001", "USDT", 422, "PRECISION_OVERFLOW"),
    ("below minimum", F, S, "0.99", "LIM", 422, "AMOUNT_TOO_SMALL"),
    ("above maximum", F, S, "10.01", "LIM", 422, "AMOUNT_TOO_LARGE"),
    ("above u64", F, S, "18446744073709.551616", "USDT", 422, "OVERFLOW"),
    ("above u64 by its safety factor", F, S, "9223372036854.775808", "USDT", 422, "OVERFLOW"),
    ("above 2^127", F, S, "9" * 40, "USDT", 422, "OVERFLOW"),
    ("same account", F, F, "1", "USDT", 422, "SAME_ACCOUNT"),
    ("unknown type", F, "MOON", "1", "USDT", 422, "INVALID_ACCOUNT_TYPE"),
    ("lower case type", "funding", S, "1", "USDT", 422, "INVALID_ACCOUNT_TYPE"),
    ("unsupported type", F, "FUTURE", "1", "USDT", 422, "UNSUPPORTED_ACCOUNT_TYPE"),
    ("unknown asset", F, S, "1", "DOGE", 422, "INVALID_ASSET"),
    ("suspended asset", F, S, "1", "OLD", 422, "ASSET_SUSPENDED"),
    ("transfer not allowed", F, S, "1", "PIN", 422, "TRANSFER_NOT_ALLOWED"),
    ("missing source", S, F, "1", "USDT", 422, "SOURCE_ACCOUNT_NOT_FOUND"),
    ("insufficient by one unit", F, S, "100.000001", "USDT", 422, "INSUFFICIENT_BALANCE"),
    ("a number instead of text", F, S, 1, "USDT", 400, "INVALID_REQUEST"),
    ("a float", F, S, 1.5, "USDT", 400, "INVALID_REQUEST"),
    ("nothing", F, S, None, "USDT", 400, "INVALID_REQUEST"),
]


async def refused(here: Office, answer: httpx.Response, before: dict[str, int]) -> tuple[int, str]:
    assert here.written() == before, "something was written"
    return refusal(answer)


@scenario
async def test_every_wish_that_is_refused_writes_nothing(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        before = here.written()
        wrong = []
        for name, source, target, amount, asset, status, code in CASES:
            answer = await here.transfer(ALICE, source, target, amount, asset)
            found = await refused(here, answer, before)
            if found != (status, code):
                wrong.append((name, found))
        assert not wrong


@scenario
async def test_what_the_accounts_refuse(url: str, tmp_path: Path) -> None:
    """Frozen and disabled source; missing source; missing FUNDING target."""
    async with office(url, tmp_path) as here:
        assert refusal(await here.transfer(BOB, F, S, "1")) == (422, "SOURCE_ACCOUNT_NOT_FOUND")
        client = await here.core.client()
        await client.deposit(1, BOB, "USDT", 5)
        assert refusal(await here.transfer(BOB, S, F, "0.000001")) == (422, "TARGET_ACCOUNT_NOT_FOUND")
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "50")).status_code == 200
        ledger = here.runtime.bursar.ledger
        await ledger.freeze(f"user:{ALICE}:funding")
        before = here.written()
        assert await refused(here, await here.transfer(ALICE, F, S, "1"), before) == (422, "ACCOUNT_FROZEN")
        await ledger.unfreeze(f"user:{ALICE}:funding")
        before = here.written()
        for status, code in ((Status.FROZEN, "ACCOUNT_FROZEN"), (Status.DISABLED, "ACCOUNT_DISABLED")):
            await client.set_status(ALICE, status)
            for source, target in ((S, F), (F, S)):
                assert await refused(here, await here.transfer(ALICE, source, target, "1"), before) == (422, code)


@scenario
async def test_what_can_not_be_read(url: str, tmp_path: Path) -> None:
    """Oversized body, wrong content type, unknown fields, deep JSON, wrong method, other user's body id."""
    async with office(url, tmp_path, body_bytes_max=1_024) as here:
        await here.fund(ALICE, "100")
        before = here.written()
        auth = bearer(token(ALICE))
        as_json = auth | {"Content-Type": "application/json"}
        good = '{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"1"'

        async def post(content: str | bytes, headers: dict[str, str]) -> tuple[int, str]:
            return await refused(here, await here.http.post(TRANSFERS, content=content, headers=headers), before)

        async def chunks() -> Any:
            for _ in range(100):
                yield b" " * 100

        bad, large = (400, "INVALID_REQUEST"), (413, "PAYLOAD_TOO_LARGE")
        assert await post(good + ',"note":"' + "x" * 2_000 + '"}', as_json) == large
        answer = await here.http.post(TRANSFERS, content=chunks(), headers=as_json)
        assert await refused(here, answer, before) == large
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"):
            assert await post(good + "}", auth | {"Content-Type": kind}) == (415, "UNSUPPORTED_MEDIA_TYPE")
        assert await post(good + "}", auth) == (415, "UNSUPPORTED_MEDIA_TYPE")
        assert await post(good + ',"note":"hello"}', as_json) == bad
        for text in (
            "",
            "{",
            "[]",
            "null",
            "1",
            good,
            good + "}}",
            "\x00",
            '{"from":"\ud800"}'.encode("utf-8", "replace"),
        ):
            assert await post(text, as_json) == bad, text
        assert await post("[" * 500 + "]" * 500, as_json) == bad
        assert await post('{"a":' * 150 + "1" + "}" * 150, as_json) == bad
        assert await post('{"amount":' + "[" * 400 + "]" * 400 + "}", as_json) == bad
        assert await post(good + ',"user_id":1002}', as_json) == (403, "FORBIDDEN")
        assert await post(good + ',"client_order_id":""}', as_json) == bad
        assert await post(good + f',"client_order_id":"{"x" * 65}"}}', as_json) == bad
        assert await post(good + ',"client_order_id":"a\\nb"}', as_json) == bad
        for method in ("PUT", "PATCH", "DELETE"):
            assert refusal(await here.send(method, TRANSFERS, by=token(ALICE))) == (405, "METHOD_NOT_ALLOWED")
        assert refusal(await here.get("/api/v1/nothing", by=token(ALICE))) == (404, "NOT_FOUND")
        for query in (
            "limit=0",
            "limit=201",
            "limit=x",
            "cursor=!",
            "cursor=eA",
            "since=yesterday",
            "until=2026-01-01",
            "state=MOON",
            "state=",
            "from=funding",
            "to=%00",
            "user_id=0",
            "user_id=9223372036854775808",
            "user_id=" + "9" * 5_000,
            "limit=" + "9" * 5_000,
            "cursor=" + "9" * 5_000,
        ):
            assert refusal(await here.get(f"{TRANSFERS}?{query}", by=token(ALICE))) == bad, query


# a field in place of user_id, as it stands in the body
NO_NUMBERS = ['"1001"', "1001.0", "1.001e3", "true", "[1001]", '""', "9223372036854775808", "9" * 400, "-1001"]


@scenario
async def test_a_number_is_a_number_and_a_field_is_given_once(either: str, tmp_path: Path) -> None:
    """Text for a number, a field twice, NUL, bytes that are no UTF-8, halves of characters: 4xx, and nothing moves."""
    async with office(either, tmp_path) as here:
        await here.fund(ALICE, "100")
        as_json = bearer(token(ALICE)) | {"Content-Type": "application/json"}
        good = b'{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"1"'

        async def post(content: bytes, path: str = TRANSFERS, by: dict[str, str] = as_json) -> tuple[int, str]:
            return refusal(await here.http.post(path, content=content, headers=by))

        bad = (400, "INVALID_REQUEST")
        for number in NO_NUMBERS:
            assert await post(good + f',"user_id":{number}}}'.encode()) == bad, number
        kind = {"Content-Type": "application/json"}
        staff, ben = bearer(token("anna", "operator")) | kind, bearer(token("ben", "approver")) | kind
        for number in NO_NUMBERS:
            deposit = f'{{"user_id":{number},"asset":"USDT","amount":"1","reference":"wire-9"}}'.encode()
            assert await post(deposit, "/api/v1/deposits", staff) == bad, number
        for more in (b',"amount":"1"}', b',"amount":"2"}', b',"from":"SPOT"}'):
            assert await post(good + more) == bad, more
        for broken in (
            b'"client_order_id":"\xff"',
            b'"client_order_id":"\\ud800"',
            b'"\xff":1',
            b'"client_order_id":"a\\u0000"',
        ):
            assert await post(good + b"," + broken + b"}") == bad, broken
        nul = good.replace(b"USDT", b"US\\u0000DT") + b"}"
        assert await post(nul) == (422, "INVALID_ASSET")
        assert await post(good.replace(b'"1"', b'"1\\u0000"') + b"}") == (422, "INVALID_AMOUNT")
        assert await post(b"\xef\xbb\xbf" + good + b"}") == bad
        assert await post(good + b"}", f"{TRANSFERS}?limit=1") == bad
        assert await post(b'{"note":"x"}', "/api/v1/deposits/wire-9/reject", ben) == bad
        assert await here.balances(ALICE) == {F: "100.000000"}
        assert (await here.http.post(TRANSFERS, content=good + b',"user_id":1001}', headers=as_json)).status_code == 200


@scenario
async def test_a_parameter_that_nobody_knows_is_refused(either: str, tmp_path: Path) -> None:
    """A filter that is misspelt, or given twice, must not answer with what was not asked for."""
    async with office(either, tmp_path) as here:
        bad = (400, "INVALID_REQUEST")
        for path, query in (
            (TRANSFERS, "asssset=USDT"),
            (TRANSFERS, "limit=1&limit=2"),
            (TRANSFERS, "%00=1"),
            ("/api/v1/balances", "user=1001"),
            ("/api/v1/assets", "x"),
            (f"{TRANSFERS}/sr-1", "x=1"),
        ):
            assert refusal(await here.get(f"{path}?{query}", by=token(ALICE))) == bad, query
        assert (await here.get(f"{TRANSFERS}?asset=%00", by=token(ALICE))).json()["transfers"] == []
        assert (await here.get("/healthz?probe=1")).status_code == 200


@scenario
async def test_limits_are_429_and_say_until_when(url: str, tmp_path: Path) -> None:
    """Last allowed, first refused, and a repeated request that was accepted is not counted."""
    async with office(url, tmp_path, limit_per_day=2, limit_amount_per_day={"USDT": 50_000_000}) as here:
        await here.fund(ALICE, "100")
        first = await here.transfer(ALICE, F, S, "50", client_order_id="one")
        assert first.status_code == 200
        answer = await here.transfer(ALICE, F, S, "0.000001")
        assert refusal(answer) == (429, "DAILY_AMOUNT_EXCEEDED")
        assert 0 < int(answer.headers["retry-after"]) <= 86_400
        assert (await here.transfer(ALICE, F, S, "50", client_order_id="one")).json() == first.json()
    (tmp_path / "b").mkdir()
    async with office(f"sqlite:///{tmp_path}/b.db", tmp_path / "b", limit_per_day=1) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        before = here.written()
        answer = await here.transfer(ALICE, F, S, "1")
        assert await refused(here, answer, before) == (429, "DAILY_LIMIT_EXCEEDED")


@scenario
async def test_ten_in_a_second(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, ports=Still(), limit_per_second=10) as here:
        await here.fund(ALICE, "100")
        for _ in range(10):
            assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        answer = await here.transfer(ALICE, F, S, "1")
        assert refusal(answer) == (429, "RATE_LIMIT_EXCEEDED")
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"from": "FUNDING", "to": "SPOT"}, (422, "INVALID_ACCOUNT_TYPE")),
        ({"from": "trading", "to": "trading"}, (422, "SAME_ACCOUNT")),
        ({"from": "funding", "to": "trading", "user_id": BOB}, (403, "FORBIDDEN")),
        ({"from": "funding", "to": "trading", "client_order_id": "x"}, (400, "INVALID_REQUEST")),
    ],
)
@scenario
async def test_the_words_of_001_refuse_too(
    url: str, tmp_path: Path, body: dict[str, Any], found: tuple[int, str]
) -> None:
    async with office(url, tmp_path) as here:
        wish = {"asset": "USDT", "amount": "1"} | body
        assert refusal(await here.send("POST", "/api/v1/transfer", wish, by=token(ALICE))) == found
