"""Builders for tests of the API: the whole of it in this process, on a real database and a real core, called by HTTP.

    async with office(url, tmp_path) as here:
        answer = await here.transfer(ALICE, "FUNDING", "SPOT", "10")

Assets: USDT (6 decimals); LIM (2 decimals, 1.00 to 10.00); OLD, which is suspended; PIN, which does not move.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
from tests.unit.rails.desk import SECRET, Desk, desk

from bursar.api.app import applications
from bursar.api.tokens import Keys
from bursar.config import Config
from bursar.instance import Bursar
from bursar.model.money import AssetStatus
from bursar.ports import SystemPorts
from bursar.runtime import Runtime, running

ALICE, BOB = 1001, 1002
KEY = b"k" * 64
HOUR_S = 3_600
TABLES = ("records", "transitions", "outcomes", "counters", "envelopes", "postings", "accounts", "holds")
PROBLEM = "application/problem+json"
TRANSFERS = "/api/v1/internal_transfer"


def token(subject: int | str, *roles: str, key: Any = KEY, algorithm: str = "HS256", **claims: Any) -> str:
    """A signed token; a claim that is None is left out."""
    body: dict[str, Any] = {"sub": str(subject), "roles": list(roles) or ["user"], "exp": int(time.time()) + HOUR_S}
    body = {name: value for name, value in (body | claims).items() if value is not None}
    return jwt.encode(body, key, algorithm=algorithm)


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


class Office:
    """The API and everything behind it."""

    def __init__(self, runtime: Runtime, core: Desk, app: Any, http: httpx.AsyncClient) -> None:
        self.runtime = runtime
        self.core = core
        self.app = app
        self.http = http

    async def send(
        self, method: str, path: str, body: Any = None, *, by: str = "", headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """A request by whoever has the token."""
        more = {"json": body} if body is not None else {}
        return await self.http.request(method, path, headers=(bearer(by) if by else {}) | (headers or {}), **more)

    async def get(self, path: str, *, by: str = "") -> httpx.Response:
        return await self.send("GET", path, by=by)

    async def transfer(
        self, user: int, source: str, target: str, amount: Any, asset: str = "USDT", **more: Any
    ) -> httpx.Response:
        headers = more.pop("headers", None)
        body = {"from": source, "to": target, "asset": asset, "amount": amount} | more
        return await self.send("POST", TRANSFERS, body, by=token(user), headers=headers)

    async def fund(self, user: int, amount: str, asset: str = "USDT", reference: str = "") -> httpx.Response:
        reference = reference or f"seed-{user}-{asset}"
        body = {"user_id": user, "asset": asset, "amount": amount, "reference": reference}
        answer = await self.send("POST", "/api/v1/deposits", body, by=token("anna", "operator"))
        assert answer.status_code in (200, 202), answer.text
        return answer

    async def balances(self, user: int) -> dict[str, str]:
        """Account type → available USDT."""
        answer = await self.get("/api/v1/balances", by=token(user))
        assert answer.status_code == 200, answer.text
        return {
            account["account"]: line["available"]
            for account in answer.json()["accounts"]
            for line in account["balances"]
            if line["asset"] == "USDT"
        }

    def written(self) -> dict[str, int]:
        """How many rows there are, counted behind the program's back (SQLite)."""
        file = sqlite3.connect(self.runtime.config.database_url.removeprefix("sqlite:///"))
        try:
            return {table: file.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
        finally:
            file.close()


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, which must be told as refusals are."""
    assert answer.headers["content-type"] == PROBLEM, (answer.status_code, answer.text)
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["detail"]
    assert body["title"]
    assert "Traceback" not in answer.text
    assert "bursar/" not in answer.text
    return answer.status_code, body["code"]


async def furnish(url: str) -> None:
    """The assets."""
    async with Bursar(url) as bursar:
        ledger = bursar.ledger
        await ledger.create_asset("USDT", 6)
        await ledger.create_asset("LIM", 2, min_transfer="1.00", max_transfer="10.00")
        await ledger.create_asset("OLD", 2)
        await ledger.change_asset("OLD", status=AssetStatus.SUSPENDED)
        await ledger.create_asset("PIN", 2, internal_transfer_enabled=False)


def config_for(url: str, folder: Path, **settings: Any) -> Config:
    """A configuration with keys of its own."""
    secret, key = folder / "core.secret", folder / "jwt.key"
    for file, content in ((secret, SECRET), (key, KEY)):
        file.write_bytes(content)
        file.chmod(0o600)
    usual: dict[str, Any] = {
        "database": url,
        "data": str(folder),
        "core_spot": f"unix:{folder}/core.sock",
        "core_spot_secret_file": str(secret),
        "jwt_key_file": str(key),
        "limit_per_second": 0,
        "limit_per_day": 0,
        "limit_reads_per_second": 0,
        "retry_backoff_ms": 10,
        "retry_backoff_max_ms": 50,
        "scan_interval_ms": 20,
        "deadline_ms": 10_000,
    }
    return Config(**(usual | settings))


@asynccontextmanager
async def office(url: str, folder: Path, *, ports: SystemPorts | None = None, **settings: Any) -> AsyncIterator[Office]:
    """Open it all, with Alice's funding account."""
    await furnish(url)
    config = config_for(url, folder, **settings)
    ports = ports or SystemPorts()
    async with desk(folder) as core, running(config, ports, "test") as runtime:
        app: Any = applications(runtime, Keys.of(config))[0]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://bursar") as http:
            here = Office(runtime, core, app, http)
            await core.until(lambda: all(client.is_connected for client in runtime.cores.values()))
            yield here


async def until(condition: Any, timeout_s: float = 20) -> Any:
    """Wait for an awaitable condition to give something true."""
    async with asyncio.timeout(timeout_s):
        while not (found := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found
