"""How often a user may ask (T46): refused requests count, repeated ones do not, reads have a bucket of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.api.office import ALICE, BOB, TRANSFERS, Office, bearer, office, refusal, token
from tests.builders import scenario

from bursar.ports import SystemPorts

F, S = "FUNDING", "SPOT"
TOO_MANY = (429, "RATE_LIMIT_EXCEEDED")


class Clock(SystemPorts):
    """The real machine, with a wall clock that a test moves."""

    us = 1_800_000_000_000_000

    def now_us(self) -> int:
        return self.us


async def post(here: Office, content: bytes, **headers: str) -> tuple[int, str]:
    usual = bearer(token(ALICE)) | {"Content-Type": "application/json"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return refusal(await here.http.post(TRANSFERS, content=content, headers=usual | named))


@scenario
async def test_refused_requests_count_too(url: str, tmp_path: Path) -> None:
    """However early they are refused; and a flood of them writes nothing."""
    clock = Clock()
    async with office(url, tmp_path, ports=clock, limit_per_second=6) as here:
        await here.fund(ALICE, "100")
        await here.fund(BOB, "100")
        good = b'{"from":"FUNDING","to":"SPOT","asset":"USDT","amount":"1"'
        before = here.written()
        assert await post(here, b"{") == (400, "INVALID_REQUEST")
        assert await post(here, good + b"}", Content_Type="text/plain") == (415, "UNSUPPORTED_MEDIA_TYPE")
        assert await post(here, good + b',"user_id":1002}') == (403, "FORBIDDEN")
        assert await post(here, good.replace(b'"1"', b'"500"') + b"}") == (422, "INSUFFICIENT_BALANCE")
        assert await post(here, good.replace(b"SPOT", b"FUNDING") + b"}") == (422, "SAME_ACCOUNT")
        words_of_001 = {"from": "x", "to": "y", "asset": "USDT", "amount": "1"}
        answer = await here.send("POST", "/api/v1/transfer", words_of_001, by=token(ALICE))
        assert refusal(answer) == (422, "INVALID_ACCOUNT_TYPE")
        answer = await here.transfer(ALICE, F, S, "1")
        assert refusal(answer) == TOO_MANY
        assert answer.headers["retry-after"] == "1"
        for content in (b"{", good + b"}", good + b',"client_order_id":"new"}'):
            assert await post(here, content) == TOO_MANY
        assert here.written() == before
        assert (await here.transfer(BOB, F, S, "1")).status_code == 200
        clock.us += 1_000_000
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200


@scenario
async def test_repeated_requests_count_in_no_bucket(url: str, tmp_path: Path) -> None:
    """T12: a valid retry is never refused by a limit, also when the second is used up; also those at the same time."""
    async with office(url, tmp_path, ports=Clock(), limit_per_second=3, limit_reads_per_second=1) as here:
        await here.fund(ALICE, "100")
        again = [here.transfer(ALICE, F, S, "1", client_order_id="one") for _ in range(30)]
        first = await asyncio.gather(*again[:3])
        others = await asyncio.gather(*again[3:])
        assert {answer.status_code for answer in [*first, *others]} <= {200, 202}
        assert len({answer.json()["req_id"] for answer in [*first, *others]}) == 1
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        assert refusal(await here.transfer(ALICE, F, S, "1")) == TOO_MANY
        assert (await here.transfer(ALICE, F, S, "1", client_order_id="one")).json()["state"] == "COMMITTED"
        other = await here.transfer(ALICE, F, S, "2", client_order_id="one")  # not a repetition
        assert refusal(other) == TOO_MANY
        assert await here.balances(ALICE) == {F: "97.000000", S: "3.000000"}


@scenario
async def test_reads_have_a_bucket_of_their_own(url: str, tmp_path: Path) -> None:
    """Reading uses up nothing that moving money needs, and the other way round; staff reads as it likes."""
    clock = Clock()
    async with office(url, tmp_path, ports=clock, limit_per_second=1, limit_reads_per_second=3) as here:
        await here.fund(ALICE, "100")
        paths = ("/api/v1/balances", "/api/v1/assets", TRANSFERS)
        assert [(await here.get(path, by=token(ALICE))).status_code for path in paths] == [200] * 3
        answer: Any = await here.get(f"{TRANSFERS}/sr-1", by=token(ALICE))
        assert refusal(answer) == TOO_MANY
        assert answer.headers["retry-after"] == "1"
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        assert refusal(await here.transfer(ALICE, F, S, "1")) == TOO_MANY
        assert (await here.get("/api/v1/balances", by=token(BOB))).status_code == 200
        staff = [(await here.get(TRANSFERS, by=token("vera", "viewer"))).status_code for _ in range(10)]
        assert staff == [200] * 10
        clock.us += 1_000_000
        assert (await here.get("/api/v1/balances", by=token(ALICE))).status_code == 200


@scenario
async def test_all_hosts_together_accept_no_more_than_one(url: str, tmp_path: Path) -> None:
    """Each host counts requests by itself; what is accepted is counted in the database."""
    clock = Clock()
    async with office(url, tmp_path, ports=clock, limit_per_second=4) as here:
        await here.fund(ALICE, "100")
        for _ in range(3):
            assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        here.app._moves._counts.clear()  # as another host would begin
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        assert refusal(await here.transfer(ALICE, F, S, "1")) == TOO_MANY
        assert await here.balances(ALICE) == {F: "96.000000", S: "4.000000"}


@scenario
async def test_what_is_remembered_of_a_second_is_forgotten_with_it(url: str, tmp_path: Path) -> None:
    """Also when the clock is set back: nobody waits for the future to come."""
    clock = Clock()
    async with office(url, tmp_path, ports=clock, limit_reads_per_second=1) as here:
        for user in range(1, 50):
            assert (await here.get("/api/v1/assets", by=token(user))).status_code == 200
        assert len(here.app._reads._counts) == 49
        clock.us -= 3_600_000_000
        assert (await here.get("/api/v1/assets", by=token(1))).status_code == 200
        assert len(here.app._reads._counts) == 1
