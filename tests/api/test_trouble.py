"""When there is too much, or something is missing: 503 with `Retry-After`, PENDING, or an id that is in the log."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec
import pytest
from tests.api.office import ALICE, TRANSFERS, Office, office, refusal, token, until
from tests.builders import scenario

from bursar.api.metrics import COUNTED_S
from bursar.api.problems import OutageLog
from bursar.flows.transfers import AccountType, CommitUnknown
from bursar.flows.transfers.link import CoreUnusable
from bursar.model.errors import Conflict, DatabaseUnavailable, OutcomeUnknown

F, S = "FUNDING", "SPOT"


def slow_look(here: Office) -> asyncio.Event:
    """The funding end takes its time until the event is set."""
    rail = here.runtime.transfers.rails[AccountType.FUNDING]
    real, go = rail.look, asyncio.Event()

    async def look(transfer: Any) -> Any:
        await go.wait()
        return await real(transfer)

    rail.look = look  # type: ignore[method-assign]
    return go


def broken_by(here: Office, error: Exception) -> None:
    async def create(*_: Any, **__: Any) -> Any:
        raise error

    here.runtime.transfers.create = create  # type: ignore[method-assign]


@scenario
async def test_beyond_the_limit_it_is_503_at_once_and_health_still_answers(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, requests_max=5) as here:
        await here.fund(ALICE, "100")
        go = slow_look(here)
        held = [asyncio.create_task(here.transfer(ALICE, F, S, "1")) for _ in range(5)]

        async def full() -> bool:
            return "bursar_http_in_progress 5" in (await here.get("/metrics")).text

        await until(full)
        turned = await asyncio.gather(*[here.transfer(ALICE, F, S, "1") for _ in range(20)])
        for answer in turned:
            assert refusal(answer) == (503, "OVERLOADED")
            assert int(answer.headers["retry-after"]) >= 1
        assert (await here.get("/healthz")).json() == {"status": "ok"}
        assert (await here.get("/readyz")).status_code == 200
        for path in ("/healthz", "/readyz"):  # as many load balancers ask
            answer, whole = await here.send("HEAD", path), await here.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-length"] == str(len(whole.content))  # RFC 9110 §9.3.2
        go.set()
        assert [answer.json()["state"] for answer in await asyncio.gather(*held)] == ["COMMITTED"] * 5
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        assert await here.balances(ALICE) == {F: "94.000000", S: "6.000000"}
        assert "bursar_http_rejected_total 20" in (await here.get("/metrics")).text


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (DatabaseUnavailable("gone: host=10.0.0.1 password=hunter2"), (503, "DATABASE_UNAVAILABLE")),
        (OutcomeUnknown("k", "gone"), (503, "COMMIT_UNKNOWN")),
        (CommitUnknown("sr-17", "gone: password=hunter2"), (503, "COMMIT_UNKNOWN")),
        (Conflict("busy", 3), (503, "OVERLOADED")),
        (ConnectionError("core spot: NOT_CONNECTED"), (503, "CORE_UNAVAILABLE")),
    ],
)
@scenario
async def test_what_is_missing_is_503(url: str, tmp_path: Path, error: Exception, found: tuple[int, str]) -> None:
    async with office(url, tmp_path) as here:
        broken_by(here, error)
        answer = await here.transfer(ALICE, F, S, "1")
        assert refusal(answer) == found
        assert int(answer.headers["retry-after"]) >= 1
        assert "hunter2" not in answer.text


@scenario
async def test_the_unexpected_is_500_with_an_id_that_is_in_the_log(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with office(url, tmp_path) as here:
        broken_by(here, ZeroDivisionError("inner secret"))
        with caplog.at_level(logging.ERROR, "bursar.api"):
            answer = await here.transfer(ALICE, F, S, "1")
        assert refusal(answer) == (500, "SYSTEM_ERROR")
        assert "inner secret" not in answer.text
        logged = [record for record in caplog.records if answer.json()["id"] in record.getMessage()]
        assert len(logged) == 1
        assert logged[0].exc_info is not None


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ConnectionError("core spot: NOT_CONNECTED"), 1),
        (DatabaseUnavailable("it is away"), 1),
        (CommitUnknown("sr-1", "it went away"), 3),
    ],
)
@scenario
async def test_an_outage_is_one_log_line_and_an_unknown_commit_is_one_each(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception, lines: int
) -> None:
    """A core that is away refuses every request; the log must not grow with them."""
    async with office(url, tmp_path) as here:
        broken_by(here, error)
        with caplog.at_level(logging.WARNING, "bursar.api"):
            for _ in range(3):
                assert (await here.transfer(ALICE, F, S, "1")).status_code == 503
        logged = [record.getMessage() for record in caplog.records if record.name == "bursar.api"]
        assert len(logged) == lines, logged
        assert str(error) in logged[0]


def test_an_outage_is_logged_again_after_a_minute_without_one(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    outages = OutageLog(lambda: now[0])
    with caplog.at_level(logging.WARNING, "bursar.api"):
        for now[0] in (0.0, 50.0, 100.0, 159.0, 220.0):  # the last one comes more than a minute after the one before
            outages.log("CORE_UNAVAILABLE", "core spot")
    assert len(caplog.records) == 2


@scenario
async def test_a_core_that_is_away(url: str, tmp_path: Path) -> None:
    """New transfers are refused before anything is written; what was answered, and the rest, can still be seen."""
    async with office(url, tmp_path, deadline_ms=200, core_timeout_ms=500) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "10", client_order_id="mine")).status_code == 200
        here.core.server.stop()
        client = here.runtime.cores[AccountType.SPOT]
        await here.core.until(lambda: not client.is_connected)
        before = here.written()
        answer = await here.transfer(ALICE, F, S, "10")
        assert refusal(answer) == (503, "CORE_UNAVAILABLE")
        assert here.written() == before
        again = await here.transfer(ALICE, F, S, "10", client_order_id="mine")
        assert (again.status_code, again.json()["state"]) == (200, "COMMITTED")
        ready = await here.get("/readyz")
        assert (ready.status_code, ready.json()["ready"], ready.json()["database"]) == (503, False, "ok")
        shown = (await here.get("/api/v1/balances", by=token(ALICE))).json()["accounts"]
        assert [(account["account"], account["status"]) for account in shown] == [(F, "ACTIVE"), (S, "UNAVAILABLE")]
        assert 'bursar_core_up{core="SPOT"} 0' in (await here.get("/metrics")).text


@scenario
async def test_a_database_that_is_away(fresh_postgres: str, tmp_path: Path) -> None:
    """Cut off, every request is 503; given back, it goes on."""
    async with office(fresh_postgres, tmp_path) as here:
        await here.fund(ALICE, "100")
        parts = urlsplit(fresh_postgres)
        name = parts.path[1:]
        admin = await asyncpg.connect(urlunsplit(parts._replace(path="/postgres")))
        try:
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            await admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
            for answer in (await here.transfer(ALICE, F, S, "1"), await here.get(TRANSFERS, by=token(ALICE))):
                assert refusal(answer) == (503, "DATABASE_UNAVAILABLE")
                assert int(answer.headers["retry-after"]) >= 1
            assert (await here.get("/readyz")).status_code == 503
            assert (await here.send("HEAD", "/readyz")).status_code == 503
            assert "bursar_database_up 0" in (await here.get("/metrics")).text
            assert (await here.get("/healthz")).status_code == 200
        finally:
            await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            await admin.close()

        async def back() -> bool:
            return (await here.transfer(ALICE, F, S, "1", client_order_id="back")).status_code == 200

        await until(back)


def metric(text: str, name: str) -> float | None:
    """The value of a metric with its labels; None if it is not there."""
    found = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(found[0]) if found else None


@scenario
async def test_metrics_count_what_is_on_its_way_and_what_has_ended(either: str, tmp_path: Path) -> None:
    """By state; also what waits for a person, which nobody drives."""
    async with office(either, tmp_path, deadline_ms=200, deposit_confirm_above={"LIM": 0}) as here:
        await here.fund(ALICE, "100")
        await here.fund(ALICE, "100", "LIM")
        assert (await here.transfer(ALICE, F, S, "1")).json()["state"] == "COMMITTED"
        here.core.server.stop()
        client = here.runtime.cores[AccountType.SPOT]
        await here.core.until(lambda: not client.is_connected)
        rail = here.runtime.transfers.rails[AccountType.SPOT]
        rail.look = here.runtime.transfers.rails[AccountType.FUNDING].look  # type: ignore[method-assign]
        assert (await here.transfer(ALICE, F, S, "1")).json()["fsm_state"] == "TARGET_PENDING"
        answer = await here.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        records = 'bursar_records{flow="transfers",state="%s"}'
        assert metric(answer.text, records % "TARGET_PENDING") == 1
        assert metric(answer.text, records % "COMMITTED") is None
        assert metric(answer.text, 'bursar_records{flow="deposits",state="ASKED"}') == 1
        oldest = metric(answer.text, 'bursar_record_oldest_seconds{flow="transfers",state="TARGET_PENDING"}')
        assert oldest is not None
        assert 0 < oldest < 60
        assert metric(answer.text, 'bursar_records_completed_total{flow="transfers",state="COMMITTED"}') == 1
        assert metric(answer.text, "bursar_database_up") == 1
        assert f'bursar_http_requests_total{{method="POST",route="{TRANSFERS}",status="200"}} 1' in answer.text
        assert f'bursar_http_request_seconds_count{{route="{TRANSFERS}"}} 2' in answer.text


@scenario
async def test_many_who_ask_for_metrics_have_the_database_count_once(url: str, tmp_path: Path) -> None:
    """And again when what was counted is old; never what has ended."""
    async with office(url, tmp_path) as here:
        session: Any = here.runtime.bursar.store.read.records._s
        real, calls = session.rows, []

        async def counted(name: str, *args: Any) -> Any:
            calls.append(name)
            return await real(name, *args)

        session.rows = counted
        texts = [answer.text for answer in await asyncio.gather(*[here.get("/metrics") for _ in range(20)])]
        assert all("bursar_database_up 1" in text for text in texts)
        assert calls.count("count_driven") == 1
        assert "count_records" not in calls
        database = here.app._app.app.state["metrics"].database
        database._seen = msgspec.structs.replace(database._seen, at=database._seen.at - COUNTED_S - 0.001)
        await here.get("/metrics")
        assert calls.count("count_driven") == 2


@scenario
async def test_a_core_that_has_forgotten_is_not_believed(url: str, tmp_path: Path) -> None:
    """Across a restart of the server: a core with an empty disk is another core, and not ours."""
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "10")).status_code == 200
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(CoreUnusable, match="OTHER_CORE"):
        async with asyncio.timeout(20), office(url, tmp_path):
            pass
