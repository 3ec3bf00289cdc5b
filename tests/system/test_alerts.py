"""`bursar serve` tells people by webhook and by command: once for a stuck transfer, also across a kill."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.system.test_serve import serve, until

SECRET = b"w" * 40


class Pager:
    """A real HTTP server that keeps what it is sent, and refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.status = 200
        self.got: list[tuple[dict[str, str], bytes, int]] = []
        self.url = ""

    def stuck(self, status: int) -> list[dict[str, Any]]:
        return self.sent(status, "stuck")

    def sent(self, status: int, reason: str) -> list[dict[str, Any]]:
        """What it was sent for this reason, and answered so."""
        alerts = [json.loads(body) for _, body, said in self.got if said == status]
        return [alert for alert in alerts if alert["reason"] == reason]


@contextmanager
def pager() -> Iterator[Pager]:
    here = Pager()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = here.status
            here.got.append((dict(self.headers), body, status))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_stuck_transfer_is_told_once(tmp_path: Path) -> None:
    """Its core hangs: one POST and one run of the command, however often it is tried, and none again after kill -9."""
    secret, told = tmp_path / "hook.secret", tmp_path / "told"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    with pager() as hook:
        environ = {
            "BURSAR_ALERT_WEBHOOK": hook.url,
            "BURSAR_ALERT_WEBHOOK_SECRET_FILE": str(secret),
            "BURSAR_ALERT_COMMAND": json.dumps(["sh", "-c", f"cat >> {told}"]),
            "BURSAR_ALERT_THRESHOLD": "2",
            "BURSAR_CORE_TIMEOUT_MS": "200",
            "BURSAR_RETRY_BACKOFF_MAX_MS": "200",
            "BURSAR_AUDIT_INTERVAL_S": "0",
            "BURSAR_DEPOSIT_CONFIRM_ABOVE": "USDT=500000000",
            "BURSAR_ALERT_WAITING_S": "1",
        }
        with serve(tmp_path / "data", **environ) as here:
            (tmp_path / "data").mkdir()
            database = f"sqlite:///{tmp_path}/data/bursar.db"  # a setting names the asset: it has to be there first
            here.run("--database", database, "asset", "create", "USDT", "--precision", "6")
            here.start()
            here.fund("100", "wire-1")
            large = {"user_id": 1001, "asset": "USDT", "amount": "1000", "reference": "wire-2"}
            assert here.send("POST", "/api/v1/deposits", large, who="anna", role="operator").status_code == 202
            until(lambda: [alert["record_id"] for alert in hook.sent(200, "waiting")] == ["wire-2"])
            here.committed("FUNDING", "SPOT", "10", "first")
            core = here.core()
            hook.status = 503  # before there is anything to tell: on a busy machine it would be told in between
            moved = freeze_between(here, core)
            until(lambda: len(hook.stuck(503)) >= 2)  # refused: it is tried again
            hook.status = 200
            until(lambda: hook.stuck(200))
            until(lambda: attempts(here, moved) >= 8)
            until(lambda: told.exists() and '"stuck"' in told.read_text())
            here.kill()
            os.kill(core, signal.SIGKILL)  # stopped, it would not notice that its parent is gone
            here.start()
            until(lambda: here.pending() == [])
            assert sum(here.balances().values()) == 100
            time.sleep(1.5)  # three polls of the dispatcher: a second delivery would have happened by now
            assert here.stop() == 0
        log = (tmp_path / "serve.log").read_text()
        assert log.count(f": stuck: transfers {moved} is") == 1  # by the dispatcher, and not by the engine as well
        [accepted], refused = hook.stuck(200), hook.stuck(503)
        assert (accepted["record_id"], accepted["flow"], accepted["attempt"]) == (moved, "transfers", len(refused) + 1)
        assert {alert["id"] for alert in refused} == {accepted["id"]}
        alerts = [json.loads(line) for line in told.read_text().splitlines()]
        assert [alert["record_id"] for alert in alerts if alert["reason"] == "stuck"] == [moved]
        for headers, body, _ in hook.got:
            expected = hmac.new(SECRET, headers["Bursar-Timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
            assert headers["Bursar-Signature"] == f"sha256={expected}"


def freeze_between(here: Any, core: int) -> str:
    """A transfer that is accepted, and whose core then hangs: held back by a pause while the core is stopped."""
    pauses(here, "INSERT INTO pauses (kind, name, actor, reason, at) VALUES ('flow', 'transfers', 'test', 'test', 0)")

    def held() -> str:
        made = here.transfer("FUNDING", "SPOT", "1", f"second-{time.monotonic_ns()}").json()
        return str(made["req_id"]) if made["state"] == "PENDING" else ""

    req_id: str = until(held)
    os.kill(core, signal.SIGSTOP)
    pauses(here, "DELETE FROM pauses")
    here.run("flow", "retry", "transfers", req_id, "--actor", "anna", "--reason", "not to wait for its lease")
    return req_id


def pauses(here: Any, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(here.folder / "bursar.db", isolation_level=None)) as file:
        file.execute("PRAGMA busy_timeout = 30000")
        file.execute(sql)


def attempts(here: Any, req_id: str) -> int:
    shown = json.loads(here.run("--json", "flow", "show", "transfers", req_id))
    return max(int(transition["attempt"]) for transition in shown["history"])
