"""While a database, a core or a client hangs, every request is answered within its bound, and SIGTERM ends the process
within `shutdown_ms`; what was left is taken up by the next start, and nothing is lost or happens twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from tests.system.crew import until
from tests.system.proxy import Proxy, proxied
from tests.system.test_serve import ALICE, TRANSFERS, CoreProcess, Serve, alive, on_postgres, serve

from bursar.store.sqlite.calls import BUSY_MS
from bursar.testbed.program import COMMAND

TIMEOUT_MS = 500  # of the database and of cores
BOUND_S = TIMEOUT_MS / 1000 + 1.5
STOP_MS = 2_000
BUSY_S = 2.5  # what a machine that others use may add
SETTINGS = {
    "BURSAR_DATABASE_TIMEOUT_MS": str(TIMEOUT_MS),
    "BURSAR_CORE_TIMEOUT_MS": str(TIMEOUT_MS),
    "BURSAR_SHUTDOWN_MS": str(STOP_MS),
}


@pytest.fixture
def core_process(tmp_path: Path) -> Iterator[CoreProcess]:
    core = CoreProcess(tmp_path)
    yield core
    core.kill()


@pytest.fixture
def proxy(fresh_postgres: str) -> Iterator[Proxy]:
    with proxied(fresh_postgres) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, proxy: Proxy, core_process: CoreProcess) -> Iterator[Serve]:
    """A server whose database is behind the proxy; a user has 100."""
    with serve(tmp_path / "a", **(on_postgres(tmp_path, proxy.url, core_process) | SETTINGS)) as made:
        made.run("asset", "create", "USDT", "--precision", "6")
        made.start()
        made.fund("100", "wire-1")
        yield made


def timed(here: Serve, method: str, path: str, body: Any = None, **more: Any) -> Any:
    began = time.monotonic()
    answer = here.send(method, path, body, **more)
    assert time.monotonic() - began < BOUND_S + BUSY_S, path
    return answer


def stopped_in_time(process: subprocess.Popen[str]) -> int:
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    assert time.monotonic() - began < STOP_MS / 1000 + BUSY_S
    return code


def test_every_request_is_answered_while_the_database_is_silent(here: Serve, proxy: Proxy) -> None:
    made = here.transfer("FUNDING", "SPOT", "10", "first").json()
    here.token("anna", "operator")
    proxy.go_silent()
    transfer = {"from": "FUNDING", "to": "SPOT", "asset": "USDT", "amount": "1", "client_order_id": "second"}
    deposit = {"user_id": ALICE, "asset": "USDT", "amount": "1", "reference": "wire-2"}
    asked: list[tuple[Any, ...]] = [
        ("GET", "/api/v1/assets"),
        ("GET", "/api/v1/balances"),
        ("GET", TRANSFERS),
        ("GET", f"{TRANSFERS}/{made['req_id']}"),
        ("POST", TRANSFERS, transfer),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
    ]
    with ThreadPoolExecutor(40) as pool:  # more than there are connections
        futures = [(words, pool.submit(timed, here, *words)) for words in asked * 4]
        booking = pool.submit(timed, here, "POST", "/api/v1/deposits", deposit, who="anna", role="operator")
        for words, future in futures:
            answer = future.result()
            if words[1] in ("/metrics", "/healthz"):
                assert answer.status_code == 200
            else:
                assert answer.status_code == 503, (words, answer.text)
            if words[1].startswith("/api"):
                codes = ("DATABASE_UNAVAILABLE", "COMMIT_UNKNOWN") if words[0] == "POST" else ("DATABASE_UNAVAILABLE",)
                assert answer.json()["code"] in codes
        assert booking.result().status_code == 503
    proxy.speak()
    until(lambda: here.send("GET", "/readyz").status_code == 200)
    until(lambda: here.transfer("FUNDING", "SPOT", "1", "second").status_code == 200)
    here.fund("1", "wire-2")
    assert here.balances() == {"FUNDING": 90, "SPOT": 11}


SLOW_COMMIT = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON bursar.envelopes DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slow();
"""


async def execute(url: str, script: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()


def test_write_whose_commit_hangs_is_told_as_unknown(here: Serve, fresh_postgres: str) -> None:
    """And is found by its key, once the database goes on: it is booked once."""
    here.token("anna", "operator")
    body = {"user_id": ALICE, "asset": "USDT", "amount": "5", "reference": "wire-2"}
    asyncio.run(execute(fresh_postgres, SLOW_COMMIT))
    answer = timed(here, "POST", "/api/v1/deposits", body, who="anna", role="operator")
    assert (answer.status_code, answer.json()["code"]) == (503, "COMMIT_UNKNOWN")
    asyncio.run(execute(fresh_postgres, "DROP TRIGGER slow ON bursar.envelopes"))

    def booked() -> bool:
        return bool(here.send("POST", "/api/v1/deposits", body, who="anna", role="operator").status_code == 200)

    until(booked)
    assert here.balances() == {"FUNDING": 105}


def test_stop_is_a_stop_while_the_database_is_silent(here: Serve, proxy: Proxy) -> None:
    """With requests in hand; the next start finishes what they began."""
    with ThreadPoolExecutor(8) as pool:

        def move(number: int) -> None:
            with_answer = (200, 202, 503)
            try:
                assert here.transfer("FUNDING", "SPOT", "1", f"o{number}").status_code in with_answer
            except httpx.HTTPError:
                return  # it was stopped meanwhile

        for number in range(8):
            pool.submit(move, number)
        until(lambda: "SPOT" in here.balances())
        proxy.go_silent()
        futures = [pool.submit(move, number) for number in range(8, 16)]
        assert here.process is not None
        assert stopped_in_time(here.process) == 0
        for future in futures:
            future.result()
    proxy.speak()
    here.start()
    for number in range(16):
        until(lambda number=number: here.transfer("FUNDING", "SPOT", "1", f"o{number}").status_code == 200)  # type: ignore[misc]
    until(lambda: here.pending() == [])
    assert here.balances() == {"FUNDING": 84, "SPOT": 16}


def test_worker_stops_while_the_database_is_silent(here: Serve, proxy: Proxy, tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [*COMMAND, "worker"], env=here.environ | {"BURSAR_DATA": str(tmp_path / "c")}, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert '"worker": true' in worker.stdout.readline()
    proxy.go_silent()
    assert stopped_in_time(worker) == 0


def test_stop_is_a_stop_while_a_core_and_a_client_hang(tmp_path: Path) -> None:
    """A child core that does not react, and a client in the middle of its request: both are left, and the core with the
    server; the transfer that waits for it comes to its end after the next start."""
    with serve(tmp_path / "data", **SETTINGS) as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("100", "wire-1")
        here.committed("FUNDING", "SPOT", "10", "first")
        core = here.core()
        host, port = fact["listen"].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /api/v1/deposits HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            os.kill(core, signal.SIGSTOP)
            assert here.process is not None
            assert stopped_in_time(here.process) == 0
        until(lambda: not alive(core))
        here.start()
        assert here.transfer("SPOT", "FUNDING", "5", "second").json()["state"] in ("COMMITTED", "PENDING")
        until(lambda: here.pending() == [])
        assert here.balances() == {"FUNDING": 95, "SPOT": 5}
        assert here.stop() == 0


def test_process_whose_event_loop_hangs_ends_all_the_same() -> None:
    """As with a thread that waits for a stuck disk when it is joined."""
    hangs = "from bursar.ports import exit_after; exit_after(0.2, 0, 'it is over'); import threading; "
    ran = subprocess.run(
        [sys.executable, "-c", hangs + "threading.Event().wait()"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "it is over\n")


def test_stop_is_a_stop_while_a_disk_hangs(tmp_path: Path) -> None:
    """A thread that waits inside SQLite can't be cancelled, and would be waited for at the end."""
    with serve(tmp_path / "data", **(SETTINGS | {"BURSAR_SHUTDOWN_MS": "1000"})) as here, ThreadPoolExecutor() as pool:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        with contextlib.closing(sqlite3.connect(fact["database"].removeprefix("sqlite:///"))) as other:
            other.execute("BEGIN IMMEDIATE")  # while that is open, each write waits for BUSY_MS
            asked = pool.submit(here.fund, "100", "wire-1")
            until(lambda: "bursar_http_in_progress 1" in httpx.get(f"{fact['listen']}/metrics").text)
            began = time.monotonic()
            assert here.process is not None
            here.process.send_signal(signal.SIGTERM)
            assert here.process.wait(60) == 0
            assert time.monotonic() - began < BUSY_MS / 1000 - 1
        assert asked.exception() is not None  # no answer, or none that says it was booked
        here.start()
        here.fund("100", "wire-1")
        assert here.balances() == {"FUNDING": 100}
        assert here.stop() == 0
