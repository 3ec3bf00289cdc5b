"""`bursar transfer` and `bursar token`, as operators use them: on a database with a transfer that is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from click.testing import CliRunner
from tests.api.office import ALICE, BOB, KEY, office
from tests.commands import Ran
from tests.unit.rails.desk import desk

from bursar import pay
from bursar.cli.app import root
from bursar.engine import Answer
from bursar.flows.transfers import AccountType
from bursar.model.accounts import AccountStatus
from bursar.model.outcome import Outcome


@pytest.fixture
def operate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on the settings of an office whose core has gone; a transfer waits for the funding side."""
    return operating(tmp_path, monkeypatch, AccountType.FUNDING, "withdraw")


@pytest.fixture
def operate_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same; a transfer waits for the core."""
    return operating(tmp_path, monkeypatch, AccountType.SPOT, "deposit")


def operating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: AccountType, call: str) -> Any:
    """An office where one call is never answered."""
    url = f"sqlite:///{tmp_path}/bursar.db"

    async def stick() -> None:
        async with office(url, tmp_path, deadline_ms=50, alert_threshold=1) as here:
            await here.fund(ALICE, "100")

            async def silent(_item: Any) -> Answer:
                return Answer(outcome=Outcome.TIMEOUT, message="no answer")

            rails = here.runtime.transfers.rails
            monkeypatch.setattr(rails[AccountType.FUNDING], "inline", False)
            monkeypatch.setattr(rails[side], call, silent)
            answer = await here.transfer(ALICE, "FUNDING", "SPOT", "10")
            assert answer.json()["fsm_state"] == ("SOURCE_PENDING" if call == "withdraw" else "TARGET_PENDING")

    asyncio.run(stick())
    for name, value in {
        "DATABASE": url,
        "DATA": str(tmp_path),
        "CORE_SPOT": f"unix:{tmp_path}/core.sock",
        "CORE_SPOT_SECRET_FILE": str(tmp_path / "core.secret"),
        "JWT_KEY_FILE": str(tmp_path / "jwt.key"),
        "CORE_TIMEOUT_MS": "200",
    }.items():
        monkeypatch.setenv(f"BURSAR_{name}", value)

    def run(*words: str) -> Ran:
        result = CliRunner().invoke(root, list(words))
        assert "Traceback" not in result.output
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


def test_both_ends_are_asked_what_they_remember(operate_spot: Any) -> None:
    """The ledger's end has taken it; the core is away, and says nothing."""
    (only,) = json.loads(operate_spot("transfer", "list", "--json").out)
    said = json.loads(operate_spot("transfer", "query", only["req_id"], "--json").out)
    assert [(one["end"], one["op"], one["outcome"]) for one in said][::2] == [
        ("FUNDING", "withdraw", "SUCCESS"),
        ("FUNDING", "refund", "UNKNOWN"),
    ]
    assert (said[1]["end"], said[1]["op"]) == ("SPOT", "deposit")
    assert said[1]["outcome"] != "SUCCESS"


@contextlib.contextmanager
def core_is_back(folder: Path) -> Iterator[None]:
    """The office's core, run by a thread of its own."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with desk(folder):
            ready.set()
            while not stop.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        stop.set()
        thread.join()


def test_a_stuck_transfer_is_seen_retried_and_forced_by_two(operate: Any, tmp_path: Path) -> None:
    """It is forced back once its core has promised that nothing arrives (T48)."""
    [stuck] = operate("--json", "transfer", "list", "--state", "SOURCE_PENDING").json
    req_id = stuck["req_id"]
    assert req_id in operate("transfer", "list", "--user", str(ALICE)).out
    assert operate("--json", "transfer", "list", "--user", "7").json == []
    assert "no answer" in operate("flow", "show", "transfers", req_id).out
    [alert] = operate("--json", "alert", "list").json
    assert (alert["flow"], alert["id"]) == ("transfers", req_id)
    assert operate("alert", "acknowledge", str(alert["record"]), alert["reason"], "--actor", "anna").code == 0
    assert operate("--json", "alert", "list").json == []
    why = ("--reason", "ticket 17")
    assert "due now" in operate("flow", "retry", "transfers", req_id, "--actor", "anna", *why).out
    force = ("flow", "force", "transfers", req_id, "EXPLICIT_FAIL")
    for actor in ("anna", "Anna"):
        told = operate(*force, "--actor", actor, *why)
        assert f"{req_id} is SOURCE_PENDING: asked for by anna; another person must run: bursar flow force" in told.out
    told = operate(*force, "--actor", "ben", *why)
    assert f"{req_id} is SOURCE_PENDING: not decided: its rail did not say" in told.out
    with core_is_back(tmp_path):
        told = operate(*force, "--actor", "ben", *why)
    assert f"{req_id} is FAILED: decided" in told.out
    history = operate("--json", "flow", "show", "transfers", req_id).json["history"]
    assert [one["actor"] for one in history][-1] == "ben"
    assert operate("flow", "retry", "transfers", req_id, "--actor", "anna", *why).code == 1


def test_operators_are_told_that_the_core_did_not_answer(operate_spot: Any) -> None:
    [stuck] = operate_spot("--json", "transfer", "list", "--state", "TARGET_PENDING").json
    force = ("flow", "force", "transfers", stuck["req_id"], "EXPLICIT_FAIL", "--reason", "ticket 17", "--actor")
    assert "another person must run" in operate_spot(*force, "anna").out
    for _ in range(2):
        told = operate_spot(*force, "ben")
        assert (told.code, "another person" in told.out) == (0, False)
        assert "is TARGET_PENDING: not decided: its rail did not say that it never happened" in told.out


def test_history_alerts_and_pauses_say_when(operate: Any) -> None:
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    [stuck] = operate("--json", "transfer", "list").json
    shown = operate("flow", "show", "transfers", stuck["req_id"]).out
    history = re.findall(rf"^{when}\.\d{{3}} .*$", shown, re.MULTILINE)
    assert history == sorted(history)
    assert len(history) == len(operate("--json", "flow", "show", "transfers", stuck["req_id"]).json["history"])
    assert re.search(rf"\n{when} ", operate("alert", "list").out)
    operate("transfer", "stop", "--actor", "anna", "--reason", "ticket 17")
    assert re.search(rf"\n{when} +flow +new transfers +anna", operate("flow", "pauses").out)


def test_what_only_needs_the_database_asks_for_no_secret_and_leaves_no_folder(
    operate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [stuck] = operate("--json", "transfer", "list").json
    for name in ("CORE_SPOT", "CORE_SPOT_SECRET_FILE", "JWT_KEY_FILE"):
        monkeypatch.delenv(f"BURSAR_{name}")
    monkeypatch.setenv("BURSAR_DATA", str(tmp_path / "elsewhere"))
    who = ("--actor", "anna")
    why = ("--reason", "ticket 17")
    for words in (
        ("alert", "list"),
        ("alert", "acknowledge", "17", "stuck", *who),
        ("flow", "list"),
        ("flow", "pauses"),
        ("flow", "show", "transfers", stuck["req_id"]),
        ("flow", "retry", "transfers", stuck["req_id"], *who, *why),
        ("flow", "pause", "deposits", *who, *why),
        ("flow", "resume", "deposits", *who, *why),
        ("transfer", "stop", *who, *why),
        ("transfer", "allow", *who, *why),
        ("transfer", "list"),
        ("transfer", "show", stuck["req_id"]),
    ):
        assert operate(*words).code == 0, words
    ran = operate("flow", "force", "transfers", stuck["req_id"], "SUCCESS", *who, *why)
    assert (ran.code, "CONFIG_REFUSED" in ran.err) == (1, True)
    assert not (tmp_path / "elsewhere").exists()


def test_a_rail_is_paused_and_resumed(operate: Any) -> None:
    why = ("--actor", "anna", "--reason", "the core moves")
    assert "rail spot is paused" in operate("flow", "pause", "--rail", "spot", *why).out
    assert "was paused before" in operate("flow", "pause", "--rail", "spot", *why).out
    [pause] = operate("--json", "flow", "pauses").json
    assert (pause["kind"], pause["name"], pause["actor"], pause["reason"]) == ("rail", "spot", "anna", "the core moves")
    create = ("transfer", "create", "--user", str(ALICE), "--from", "FUNDING", "--to", "SPOT", "USDT", "1")
    assert "no new transfers from or to spot" in operate(*create).err
    wrong = operate("flow", "pause", "--rail", "spott", *why)
    assert (wrong.code, "rails: funding, signer, spot" in wrong.err) == (1, True)
    assert "is resumed" in operate("flow", "resume", "--rail", "spot", *why).out
    assert "was not paused" in operate("flow", "resume", "--rail", "spot", *why).out
    assert operate("flow", "pause", "transfers", *why).code == 0


def test_a_core_that_is_away_and_a_transfer_that_is_not_there(operate: Any) -> None:
    words = ("transfer", "create", "--user", str(ALICE), "--from", "FUNDING", "--to", "SPOT", "USDT", "1")
    ran = operate(*words)
    assert (ran.code, ran.err.startswith("error: UNUSABLE: a core can't be reached: ")) == (4, True)
    assert operate("transfer", "show", "sr-1").code == 1
    ran = operate("--database", "sqlite:///nowhere/none.db", "transfer", "list")
    assert (ran.code, "there is no file" in ran.err) == (4, True)


def test_a_token_for_trying_out(operate: Any) -> None:
    made = operate("token", "--user", str(ALICE), "--seconds", "60").out.strip()
    claims = jwt.decode(made, KEY, algorithms=["HS256"])
    assert (claims["sub"], claims["roles"], claims["exp"] - claims["iat"]) == (str(ALICE), ["user"], 60)
    for words in ((), ("--user", "alice"), ("--subject", "anna"), ("--subject", "anna", "--role", "root")):
        assert operate("token", *words).code == 2, words


def test_new_transfers_are_stopped_and_allowed_again(operate: Any) -> None:
    create = ("transfer", "create", "--user", str(ALICE), "--from", "FUNDING", "--to", "SPOT", "USDT", "1.00")
    assert operate("--json", "transfer", "stop", "--actor", "anna", "--reason", "ticket 17").json == {"stopped": True}
    assert operate("--json", "transfer", "stop", "--actor", "bob", "--reason", "me too").json == {"stopped": False}
    refused = operate(*create)
    assert refused.code != 0
    assert "TRANSFERS_PAUSED" in refused.err
    assert operate("transfer", "allow").code == 2  # who, and why
    assert operate("transfer", "allow", "--actor", "\u0430nna", "--reason", "mended").code == 1
    allowed = operate("--json", "transfer", "allow", "--actor", "anna", "--reason", "mended").json
    assert allowed == {"allowed": True, "proposed": False}
    history = operate("--json", "flow", "pauses", "--history").json
    assert [(one["action"], one["actor"], one["reason"]) for one in history] == [
        ("resumed", "anna", "mended"),
        ("paused", "anna", "ticket 17"),
    ]
    assert "mended" in operate("flow", "pauses", "--history").out
    assert "TRANSFERS_PAUSED" not in operate(*create).err


def test_an_account_is_closed_only_after_the_cores_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T44, by the command: money at the core refuses it, a core that is away too, and then it closes."""
    url, account = f"sqlite:///{tmp_path}/bursar.db", f"user:{ALICE}:funding"
    settings = {"DATABASE": url, "DATA": str(tmp_path), "CORE_SPOT": f"unix:{tmp_path}/core.sock"}
    files = {"CORE_SPOT_SECRET_FILE": f"{tmp_path}/core.secret", "JWT_KEY_FILE": f"{tmp_path}/jwt.key"}
    for name, value in (settings | files | {"CORE_TIMEOUT_MS": "500"}).items():
        monkeypatch.setenv(f"BURSAR_{name}", value)

    async def close() -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, root, ["account", "close", account])
        return result.exit_code, result.output

    async def story() -> None:
        async with office(url, tmp_path) as here:
            await here.fund(ALICE, "10")
            await here.fund(BOB, "5")
            for user in (ALICE, BOB):
                await here.transfer(user, "FUNDING", "SPOT", "5")
            code, said = await close()
            assert (code, "it still has a balance" in said or "USDT at core SPOT" in said) == (1, True), said
            ledger = here.runtime.bursar.ledger
            await ledger.commit(pay(account, f"user:{BOB}:funding", "USDT", "5"))
            code, said = await close()
            assert (code, "USDT at core SPOT" in said) == (1, True), said
            assert (await ledger.account(account)).status is AccountStatus.ACTIVE
            await here.transfer(ALICE, "SPOT", "FUNDING", "5")
            await ledger.commit(pay(account, f"user:{BOB}:funding", "USDT", "5"))
            here.core.server.stop()
            client = here.runtime.cores[AccountType.SPOT]
            await here.core.until(lambda: not client.is_connected)
            code, said = await close()
            assert (code, "core SPOT does not say" in said) == (1, True), said
        async with office(url, tmp_path) as here:
            code, said = await close()
            assert (code, "closed" in said) == (0, True), said
            assert (await here.runtime.bursar.ledger.account(account)).status is AccountStatus.CLOSED

    asyncio.run(story())
