"""`bursar audit` with a configuration asks the cores: I5 holds, is broken, or can't be told; never green unasked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sqlite3
import subprocess
from pathlib import Path

from tests.commands import Ran, command
from tests.system.test_serve import ALICE, COMMAND, Serve, serve, until

from bursar.model.outcome import Outcome
from bursar.ports import SystemPorts
from bursar.rails.trading import TradingClient


def audit(here: Serve, *words: str) -> Ran:
    return command("audit", *words, environ=here.environ | {"BURSAR_CORE_TIMEOUT_MS": "2000"})


async def deposit_by_hand(folder: Path, minor: int) -> None:
    """Money that the core has and nobody booked."""
    secret = (folder / "core.secret").read_bytes().strip()
    client = TradingClient(SystemPorts(), f"unix:{folder}/spot.sock", name="spot", secret=secret, timeout_s=20)
    async with client:
        assert (await client.deposit(1, ALICE, "USDT", minor)).outcome is Outcome.SUCCESS


def test_the_cores_are_one_more_row_and_one_more_reason(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with serve(folder, BURSAR_AUDIT_INTERVAL_S="0") as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("100", "wire-1")
        here.committed("FUNDING", "SPOT", "40", "a")

        held = audit(here, "--data", str(folder), "--json")
        assert (held.code, held.err) == (0, "")
        verdicts = {f["invariant"]: (f["ok"], f["judged"]) for f in json.loads(held.out)}
        assert list(verdicts) == ["I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8"]
        assert set(verdicts.values()) == {(True, True)}
        unasked = audit(here, "--data", str(folder), "--no-cores", "--json")
        assert [f["invariant"] for f in json.loads(unasked.out)] == ["I1", "I2", "I3", "I4", "I6", "I7", "I8"]
        by_environment = audit(here, "--cores", "--only", "I5", "--json")
        assert [(f["invariant"], f["ok"]) for f in json.loads(by_environment.out)] == [("I5", True)]

        asyncio.run(deposit_by_hand(folder, 7))
        wrong = audit(here, "--data", str(folder))
        assert wrong.code == 1
        assert "core SPOT holds 40000007 of USDT" in wrong.out
        assert wrong.out.count("BROKEN") == 1

        here.kill()
        away = audit(here, "--data", str(folder))
        assert away.code == 3
        assert "I5: core SPOT does not answer" in away.out
        assert "not judged" in away.out
        [finding] = json.loads(audit(here, "--data", str(folder), "--only", "I5", "--json").out)
        assert (finding["judged"], finding["checked"]) == (False, 0)

        watching = subprocess.Popen(
            [*COMMAND, "audit", "--data", str(folder), "--only", "I5", "--watch", "0.01"],
            env=here.environ | {"BURSAR_CORE_TIMEOUT_MS": "100"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        watching.communicate()
        assert "I5 not judged" in lines[0]
        assert "I5: core SPOT does not answer" in lines[1]


def test_one_unreadable_record_ends_neither_the_watch_nor_an_audit(tmp_path: Path) -> None:
    """Given an open transfer whose body is damaged, then an audit names it, and broken conservation is still found."""
    folder = tmp_path / "data"
    with serve(folder, BURSAR_AUDIT_INTERVAL_S="1") as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("100", "wire-1")
        done = here.transfer("FUNDING", "SPOT", "40", "a").json()
        assert done["state"] == "COMMITTED"
        with contextlib.closing(sqlite3.connect(folder / "bursar.db", isolation_level=None)) as file:
            file.execute("PRAGMA busy_timeout = 10000")
            damage = "UPDATE records SET state = 'TARGET_PENDING', due = 0, body = '{}' WHERE id = ?"
            assert file.execute(damage, (done["req_id"],)).rowcount == 1

        found = audit(here, "--data", str(folder))
        assert (found.code, found.err) == (0, "")
        assert f"transfer {done['req_id']} can't be read" in " ".join(found.out.split())

        asyncio.run(deposit_by_hand(folder, 7))
        orders = itertools.count()
        paused = until(lambda: (r := here.transfer("FUNDING", "SPOT", "0.01", f"b-{next(orders)}")).is_error and r)
        assert paused.json()["code"] == "TRANSFERS_PAUSED"
        assert "I5 is broken" in here.run("--database", fact["database"], "alert", "list")
