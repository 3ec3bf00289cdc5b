"""The real `bursar serve` on an empty folder, and on PostgreSQL: over HTTP, killed in flight, started again.

Everything that was answered stays true, nothing is lost or doubled, everything comes to an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.commands import command

from bursar.cli.commands.serve import _bound
from bursar.model.errors import DatabaseUnavailable

ALICE = 1001
WAIT_S = 60.0
TRANSFERS = "/api/v1/internal_transfer"
TOO_LATE = ("COMMIT_UNKNOWN", "DATABASE_UNAVAILABLE")  # the machine was too busy for the deadline
COMMAND = [sys.executable, "-P", "-c", "from bursar.cli import main; main()"]


def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait for something to become true; trouble on the way counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)  # between two looks at a real process, until a deadline


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Serve:
    """A `bursar serve` on a folder, and its caller."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        self.folder = folder
        self.words = words
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
        self.environ |= {"BURSAR_DATA": str(folder), "BURSAR_LISTEN": "127.0.0.1:0"}
        self.environ |= {"BURSAR_LIMIT_PER_SECOND": "0", "BURSAR_LIMIT_PER_DAY": "0", "BURSAR_DEADLINE_MS": "300"}
        self.environ |= {"BURSAR_LIMIT_READS_PER_SECOND": "0", "BURSAR_REQUESTS_PER_USER_MAX": "0"}
        self.environ |= {"BURSAR_RETRY_BACKOFF_MAX_MS": "500"} | environ
        self.process: subprocess.Popen[str] | None = None
        self.cwd: Path | None = None
        self.files = 0  # how many it may have open, if not as many as we
        self.http = httpx.Client(timeout=20, verify=False)
        self.tokens: dict[tuple[str, str], str] = {}

    def run(self, *words: str) -> str:
        """Another command on the same folder, which goes well."""
        ran = command(*words, environ=self.environ)
        assert ran.code == 0, ran.err + ran.out
        return ran.out.strip()

    def start(self) -> dict[str, Any]:
        """Start it; returns the one line that it prints when it is ready."""
        log = (self.folder.parent / "serve.log").open("a")
        command = [*COMMAND, "--json", *self.words, "serve"]
        if self.files:
            command = ["sh", "-c", f'ulimit -n {self.files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, env=self.environ, cwd=self.cwd, stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()[-2_000:]
        fact: dict[str, Any] = json.loads(line)
        self.http = httpx.Client(base_url=fact["listen"], timeout=20, verify=False)
        return fact

    def log(self) -> str:
        """What it has written to stderr."""
        return (self.folder.parent / "serve.log").read_text()

    def refused(self) -> subprocess.CompletedProcess[str]:
        """Start it where it can't start, and see how it ends."""
        words = [*COMMAND, "serve"]
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def token(self, subject: str, role: str) -> str:
        if (subject, role) not in self.tokens:
            self.tokens[subject, role] = self.run("token", "--subject", subject, "--role", role)
        return self.tokens[subject, role]

    def send(self, method: str, path: str, body: Any = None, *, who: str = str(ALICE), role: str = "user") -> Any:
        """A request, and its answer; what can't be answered is an httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {self.token(who, role)}"}
        more = {} if body is None else {"json": body}
        return self.http.request(method, path, headers=headers, **more)

    def fund(self, amount: str, reference: str) -> None:
        """A deposit, asked for until it is known; and the user's token is there before many threads want it."""
        self.token(str(ALICE), "user")
        body = {"user_id": ALICE, "asset": "USDT", "amount": amount, "reference": reference}

        def is_known() -> bool:
            answer = self.send("POST", "/api/v1/deposits", body, who="anna", role="operator")
            if answer.json().get("code") in TOO_LATE:
                return False
            assert answer.status_code == 200, answer.text
            return True

        until(is_known)

    def transfer(self, source: str, target: str, amount: str, order: str) -> Any:
        body = {"from": source, "to": target, "asset": "USDT", "amount": amount, "client_order_id": order}
        return self.send("POST", TRANSFERS, body)

    def committed(self, source: str, target: str, amount: str, order: str) -> dict[str, Any]:
        """The same, once it has arrived: on a busy machine that may be after the deadline of the first answer."""

        def arrived() -> dict[str, Any] | None:
            found: dict[str, Any] = self.transfer(source, target, amount, order).json()
            assert found.get("state") in ("COMMITTED", "PENDING") or found.get("code") in TOO_LATE, found
            return found if found.get("state") == "COMMITTED" else None

        done: dict[str, Any] = until(arrived)
        return done

    def balances(self) -> dict[str, float]:
        found = self.send("GET", "/api/v1/balances").json()["accounts"]
        return {
            account["account"]: float(line["available"]) + float(line["in_flight"])
            for account in found
            for line in account["balances"]
        }

    def pending(self) -> list[str]:
        return [one["req_id"] for one in self.send("GET", f"{TRANSFERS}?state=PENDING&limit=200").json()["transfers"]]

    def core(self) -> int:
        """The process id of the child core."""
        assert self.process is not None
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found[0]) if found else 0

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextlib.contextmanager
def serve(folder: Path, *words: str, **environ: str) -> Iterator[Serve]:
    here = Serve(folder, *words, **environ)
    try:
        yield here
    finally:
        if here.process is not None and here.process.poll() is None:
            here.kill()


def test_alone_on_an_empty_folder(tmp_path: Path) -> None:
    """One line when ready; secrets made, for their owner alone; both ways; a second one is refused; ends with 0."""
    with serve(tmp_path / "data") as here:
        fact = here.start()
        assert fact["database"].startswith("sqlite:")
        for name in ("core.secret", "jwt.key"):
            assert (tmp_path / "data" / name).stat().st_mode & 0o777 == 0o600
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("100", "wire-1")
        here.committed("FUNDING", "SPOT", "40", "a")
        here.committed("SPOT", "FUNDING", "15", "b")
        assert here.balances() == {"FUNDING": 75, "SPOT": 25}
        second = here.refused()
        assert second.returncode == 4
        assert "another `bursar serve` runs on" in second.stderr
        core = here.core()
        assert here.stop() == 0
        assert not alive(core)
        here.start()
        assert here.balances() == {"FUNDING": 75, "SPOT": 25}
        assert here.stop() == 0


def test_killed_in_flight(tmp_path: Path) -> None:
    """kill -9 of the core, then of the server, while transfers are on their way: all come to an end, none twice."""
    with serve(tmp_path / "data") as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("1000", "wire-1")
        here.committed("FUNDING", "SPOT", "500", "first")
        answered: dict[str, str] = {}  # client order → request

        def move(number: int) -> None:
            """Ask until it is accepted, as a client does; across crashes the same order is the same transfer."""
            ways = ("FUNDING", "SPOT") if number % 2 else ("SPOT", "FUNDING")

            def accepted() -> str:
                answer = here.transfer(*ways, "1", f"order-{number}")
                return answer.json()["req_id"] if answer.status_code in (200, 202) else ""

            answered[f"order-{number}"] = until(accepted)

        for victim in ("core", "server"):
            count = len(answered)
            with ThreadPoolExecutor(8) as pool:
                futures = [pool.submit(move, count + n) for n in range(60)]
                until(lambda count=count: len(answered) > count + 10)  # type: ignore[misc]
                if victim == "core":
                    old = here.core()
                    os.kill(old, signal.SIGKILL)
                    until(lambda old=old: here.core() not in (0, old))  # type: ignore[misc]
                else:
                    core = here.core()
                    here.kill()
                    until(lambda core=core: not alive(core))  # type: ignore[misc]
                    here.start()
                for future in futures:
                    future.result()
        until(lambda: here.pending() == [])
        assert len(set(answered.values())) == len(answered) == 120
        for order, req_id in list(answered.items())[::10]:
            seen = here.send("GET", f"{TRANSFERS}/{req_id}").json()
            assert seen["state"] == "COMMITTED", (order, seen)
        assert here.balances() == {"FUNDING": 500, "SPOT": 500}
        assert here.stop() == 0
        here.run("--database", fact["database"], "audit")


def test_sigterm_finishes_what_is_in_hand(tmp_path: Path) -> None:
    """Requests that are in hand get their answer; nobody new gets in; what is left is found by the next."""
    with serve(tmp_path / "data") as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("1000", "wire-1")

        def move(number: int) -> int:
            try:
                return int(here.transfer("FUNDING", "SPOT", "1", f"order-{number}").status_code)
            except httpx.HTTPError:
                return 0

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(move, number) for number in range(200)]
            until(lambda: sum(future.done() for future in futures) > 20)
            assert here.stop() == 0
            codes = [future.result() for future in futures]
        assert set(codes) <= {200, 202, 0, 503}
        here.start()
        until(lambda: here.pending() == [])
        done = codes.count(200) + codes.count(202)
        assert here.balances()["SPOT"] >= done > 20
        assert sum(here.balances().values()) == 1_000
        assert here.stop() == 0


def test_more_cores_by_configuration(tmp_path: Path) -> None:
    """FUTURE is a core like SPOT once it is switched on; MARGIN, which is not, is refused."""
    with serve(tmp_path / "data", BURSAR_CORE_FUTURE="child") as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("100", "wire-1")
        ways = [
            ("FUNDING", "FUTURE", "40"),
            ("FUTURE", "SPOT", "15"),
            ("SPOT", "FUTURE", "5"),
            ("FUTURE", "FUNDING", "1"),
        ]
        for number, way in enumerate(ways):
            assert here.transfer(*way, f"order-{number}").json()["state"] == "COMMITTED", way
        refused = here.transfer("FUNDING", "MARGIN", "1", "margin")
        assert (refused.status_code, refused.json()["code"]) == (422, "UNSUPPORTED_ACCOUNT_TYPE")
        assert here.balances() == {"FUNDING": 61, "SPOT": 10, "FUTURE": 29}
        assert here.send("GET", "/readyz").json()["cores"] == {"SPOT": "ok", "FUTURE": "ok"}
        assert here.stop() == 0
        here.start()
        assert here.balances() == {"FUNDING": 61, "SPOT": 10, "FUTURE": 29}
        assert here.stop() == 0


class CoreProcess:
    """A `bursar core` of its own, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, name: str = "spot") -> None:
        self.name = name
        self.data = folder / name
        self.address = f"unix:{folder}/{name}.sock"
        self.secret = folder / f"{name}.secret"
        self.secret.write_bytes(b"s" * 32)
        self.secret.chmod(0o600)
        self.start()

    def start(self) -> None:
        words = ["--data", str(self.data), "--listen", self.address, "--secret-file", str(self.secret)]
        command = [*COMMAND, "--json", "core", *words, "--name", self.name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["listen"] == self.address

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    @property
    def environ(self) -> dict[str, str]:
        """The settings by which a server finds it."""
        which = f"BURSAR_CORE_{self.name.upper()}"
        return {which: self.address, f"{which}_SECRET_FILE": str(self.secret)}


@pytest.fixture
def core_process(tmp_path: Path) -> Iterator[CoreProcess]:
    core = CoreProcess(tmp_path)
    yield core
    core.kill()


def on_postgres(folder: Path, url: str, *cores: CoreProcess) -> dict[str, str]:
    """Settings of all hosts that share a database."""
    key = folder / "jwt.key"
    key.write_bytes(b"j" * 48)
    key.chmod(0o600)
    found = {"BURSAR_JWT_KEY_FILE": str(key), "BURSAR_DATABASE": url}
    for core in cores:
        found |= core.environ
    return found


def test_killed_in_flight_on_postgres(tmp_path: Path, fresh_postgres: str, core_process: CoreProcess) -> None:
    """kill -9 of a server, and of the core, while money is seen to be on its way; the other host goes on alone.

    The core is stopped first, so that there are transfers which have left one side and not arrived at the other.
    """
    environ = on_postgres(tmp_path, fresh_postgres, core_process)
    with serve(tmp_path / "a", **environ) as one, serve(tmp_path / "b", **environ) as two:
        one.run("asset", "create", "USDT", "--precision", "6")
        one.start()
        two.start()
        one.fund("1000", "wire-1")
        two.token(str(ALICE), "user")
        one.committed("FUNDING", "SPOT", "500", "first")
        answered: dict[str, str] = {}

        def move(host: Serve, number: int) -> None:
            ways = ("FUNDING", "SPOT") if number % 2 else ("SPOT", "FUNDING")

            def accepted() -> str:
                answer = host.transfer(*ways, "1", f"order-{number}")
                return answer.json()["req_id"] if answer.status_code in (200, 202) else ""

            answered[f"order-{number}"] = until(accepted)

        in_flight = []
        for turn in range(2):
            with ThreadPoolExecutor(16) as pool:
                futures = [pool.submit(move, (one, two)[n % 2], turn * 100 + n) for n in range(100)]
                until(lambda turn=turn: len(answered) > turn * 100 + 10)  # type: ignore[misc]
                for _ in range(50):
                    core_process.signal(signal.SIGSTOP)
                    if _in_flight(two) or len(answered) > turn * 100 + 80:
                        break
                    core_process.signal(signal.SIGCONT)
                one.kill()
                in_flight.append(_in_flight(two))
                core_process.kill()
                core_process.start()
                one.start()
                for future in futures:
                    future.result()
        assert sum(found > 0 for found in in_flight) >= 1, in_flight
        until(lambda: two.pending() == [])
        assert len(set(answered.values())) == len(answered) == 200
        for order, req_id in list(answered.items())[::10]:
            seen = two.send("GET", f"{TRANSFERS}/{req_id}").json()
            assert seen["state"] == "COMMITTED", (order, seen)
        assert two.balances() == {"FUNDING": 500, "SPOT": 500}
        assert one.stop() == two.stop() == 0
        two.run("--database", fresh_postgres, "audit")


def _in_flight(host: Serve) -> int:
    """Transfers whose money has left one side and has not arrived at the other."""
    flying = ("SOURCE_DONE", "TARGET_PENDING", "COMPENSATING")
    return sum(len(host.send("GET", f"{TRANSFERS}?state={state}&limit=200").json()["transfers"]) for state in flying)


def test_two_hosts_and_a_worker_on_postgres(tmp_path: Path, fresh_postgres: str, core_process: CoreProcess) -> None:
    """The same command twice, and a worker beside it; one is killed, and the others go on."""
    environ = on_postgres(tmp_path, fresh_postgres, core_process)
    with serve(tmp_path / "a", **environ) as one, serve(tmp_path / "b", **environ) as two:
        one.run("asset", "create", "USDT", "--precision", "6")
        assert one.start()["listen"] != two.start()["listen"]
        worker = subprocess.Popen(
            [*COMMAND, "worker"],
            env=one.environ | {"BURSAR_DATA": str(tmp_path / "c")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        assert "a worker is ready" in worker.stdout.readline()
        one.fund("100", "wire-1")
        made = two.committed("FUNDING", "SPOT", "40", "a")
        assert one.transfer("FUNDING", "SPOT", "40", "a").json()["req_id"] == made["req_id"]
        one.kill()
        two.committed("SPOT", "FUNDING", "15", "b")
        assert two.balances() == {"FUNDING": 75, "SPOT": 25}
        assert two.stop() == 0
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WAIT_S) == 0


def test_an_address_belongs_to_one_from_the_first_moment() -> None:
    """Two that start at the same time: the second is refused, instead of being ready and then falling over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with _bound(listen), pytest.raises(DatabaseUnavailable, match="can't listen"), _bound(listen):
        pass


def test_a_file_in_the_current_folder_does_not_become_part_of_the_core(tmp_path: Path) -> None:
    """Python would look for modules there first."""
    (tmp_path / "json.py").write_text("raise SystemExit('this is not the json that was meant')\n")
    with serve(tmp_path / "data") as here:
        here.cwd = tmp_path
        assert here.start()["listen"]
        assert here.stop() == 0


def test_wrong_settings_are_refused_at_start(tmp_path: Path) -> None:
    here = Serve(tmp_path / "data", BURSAR_REQUESTS_MAX="many", BURSAR_LISTENN="x")
    ran = here.refused()
    assert ran.returncode == 1
    assert "BURSAR_REQUESTS_MAX: a whole number" in ran.stderr
    assert "BURSAR_LISTENN is no setting; did you mean listen?" in ran.stderr
    assert not (tmp_path / "data").exists()


def test_answers_are_not_held_back() -> None:
    """asyncio switches Nagle's algorithm off where it knows a socket for TCP; else each answer may wait 40 ms for the
    client's acknowledgement of its first half."""
    with _bound("127.0.0.1:0") as listener:
        assert listener.proto == socket.IPPROTO_TCP
