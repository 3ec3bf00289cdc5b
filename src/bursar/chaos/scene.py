"""The system under test, as processes that can be hit and come back.

SQLite: one `bursar serve`, which has its core as a child. PostgreSQL: two `bursar serve`, a `bursar worker`, a core
each for SPOT and FUTURE, and the database itself. Both: a `bursar signer run`, and an EVM node (`chain.py`). Cluster:
as PostgreSQL, without payouts, and the database is three nodes, which `failover.py` hits. A supervisor restarts a
program that has ended, as systemd would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from bursar.chaos.chain import Chain
from bursar.chaos.cluster import Cluster
from bursar.chaos.paying import SignerFolder, furnish
from bursar.chaos.probe import DATABASE as PROBE
from bursar.config import Config, read
from bursar.testbed import Guard, Program, children_of, environment
from bursar.testbed.devdb import ThrowawayPostgres
from bursar.testbed.look import create_assets

STORES = ("sqlite", "postgres", "cluster")
TEND_S = 0.05
READY_S = 90.0
KEY_BYTES = 32
DATABASE_AWAY = 4  # exit code of a program that can't reach its database, or whose folder is still in use
SIGNER = "signer"
KILLED = -signal.SIGKILL

# Short waits, so that all of it fits into a minute; no limits, since few users do a lot; and the product's own audit,
# which must raise no false alert while everything dies around it.
SETTINGS = {
    "listen": "127.0.0.1:0",
    "limit_per_second": "0",
    "limit_per_day": "0",
    "limit_reads_per_second": "0",
    "deadline_ms": "300",
    "core_timeout_ms": "2000",
    "retry_backoff_max_ms": "500",
    "audit_interval_s": "3",
    "shutdown_ms": "5000",
}


class Victim(Protocol):
    """Something that can be hit."""

    name: str

    def kill(self) -> None:
        """kill -9."""
        ...

    def pause(self) -> None:
        """Hold it still."""
        ...

    def resume(self) -> None:
        """Resume it."""
        ...

    def revive(self) -> None:
        """Bring it back, without waiting until it works."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it works."""
        ...


class Hired:
    """A program that the supervisor starts again when it ends, unless it is meant to be down."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.name = program.name
        self.wanted = False
        self.ended: Counter[int] = Counter()  # by itself, by exit code
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        return self.program.is_ready

    def kill(self) -> None:
        with self._lock:
            self.wanted = False
            self.program.kill()

    def pause(self) -> None:
        self.program.pause()

    def resume(self) -> None:
        self.program.resume()

    def revive(self) -> None:
        with self._lock:
            self.wanted = True
            if not self.program.pid:
                self.program.start()

    def tend(self) -> None:
        """Start it again if it has ended."""
        with self._lock:
            if self.wanted and not self.program.pid:
                self.ended[self.program.code or 0] += 1
                self.program.start()

    def dismiss(self) -> int:
        """SIGTERM, and for good; returns the exit code."""
        with self._lock:
            self.wanted = False
            return self.program.stop()


class Child:
    """The core that is a child of a server, which starts it again itself."""

    def __init__(self, name: str, parent: Hired) -> None:
        self.name = name
        self._parent = parent
        self._hit = 0

    @property
    def _pid(self) -> int:
        return next(iter(children_of(self._parent.program.pid)), 0) if self._parent.program.pid else 0

    @property
    def is_ready(self) -> bool:
        return self._pid not in (0, self._hit)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._hit = self._pid

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        pass

    def _signal(self, number: int) -> None:
        if pid := self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Database:
    """PostgreSQL: the postmaster and every process of it."""

    name = "postgres"

    def __init__(self, server: ThrowawayPostgres) -> None:
        self.server = server
        self.is_ready = True

    def kill(self) -> None:
        self.is_ready = False
        children = children_of(self.server.pid)
        self.server.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        self.server.start()
        self.is_ready = True

    def _signal(self, number: int) -> None:
        for pid in [self.server.pid, *children_of(self.server.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Scene:
    """All of it."""

    def __init__(self, store: str, folder: Path, guard: Guard, assets: dict[str, int]) -> None:
        self.store = store
        self.folder = folder
        self.guard = guard
        self.assets = assets
        self.victims: list[Victim] = []
        self.hired: list[Hired] = []
        self.apis: list[Hired] = []
        self.cluster: Cluster | None = None
        self.chain: Chain | None = None
        self.signer: SignerFolder | None = None
        self.config = Config()
        self.accounts = ("FUNDING", "SPOT") if store == "sqlite" else ("FUNDING", "SPOT", "FUTURE")
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything is up inside, and supervised."""
        with contextlib.ExitStack() as stack:
            self._set_up(stack)
            stack.callback(self._kill_all)
            for hired in self.hired:
                hired.revive()
            for hired in self.hired:
                hired.program.until_ready(READY_S)
            tending = threading.Thread(target=self._tend, name="supervisor", daemon=True)
            tending.start()
            stack.callback(tending.join)
            stack.callback(self._over.set)
            yield

    def addresses(self) -> list[Callable[[], str | None]]:
        """Where each server listens; None while it is down."""
        return [partial(_address, hired.program) for hired in self.apis]

    def until_ready(self, timeout_s: float) -> bool:
        """Wait until everything is up."""
        deadline = time.monotonic() + timeout_s
        while not all(victim.is_ready for victim in self.victims):
            if time.monotonic() > deadline:
                return False
            time.sleep(TEND_S)  # real processes, which send no notice
        return True

    def traces(self) -> list[str]:
        """Where something unexpected stands in a log: a program of ours must not print a traceback."""
        found = []
        for log in [hired.program.log for hired in self.hired]:
            if not log.exists():
                continue
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [f"{log.name}:{n}: {line}" for n, line in enumerate(lines, 1) if line.startswith("Traceback")]
        return found

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        payouts = {} if self.store == "cluster" else self._payouts(stack)
        if self.store == "sqlite":
            settings = SETTINGS | payouts | {"data": str(self.folder / "data")}
            (self.folder / "data").mkdir(mode=0o700)
            server = self._hire("server", ["serve"], settings)
            self.apis = [server]
            self.victims += [server, Child("core", server)]
        else:
            database = self._cluster(stack) if self.store == "cluster" else self._postgres(stack)
            settings = SETTINGS | payouts | database | {"jwt_key_file": self._key("jwt.key")}
            settings |= {"data": str(self.folder / "a")}
            cores = [self._core(kind, settings) for kind in ("spot", "future")]
            both = [
                self._hire(f"api-{name}", ["serve"], settings | {"data": f"{self.folder}/{name}", "worker_name": name})
                for name in ("a", "b")
            ]
            worker = self._hire("worker", ["worker"], settings | {"data": f"{self.folder}/w", "worker_name": "w"})
            self.apis = both
            self.victims += [*cores, *both, worker]
        self.config = read("", {k: v for k, v in environment(settings).items() if k.startswith("BURSAR_")})
        asyncio.run(create_assets(self.config, self.assets))
        if self.chain is not None:
            asyncio.run(furnish(self.config, self.chain))

    def _payouts(self, stack: contextlib.ExitStack) -> dict[str, str]:
        self.chain = Chain(self.folder, self.guard)
        stack.enter_context(self.chain.running())
        self.signer = SignerFolder(self.folder, self.chain)
        self.victims += [self._hire(SIGNER, self.signer.words(), {}), self.chain]
        return self.signer.settings(self.chain)

    def _postgres(self, stack: contextlib.ExitStack) -> dict[str, str]:
        # Without fsync a committed row still survives kill -9 of the server: the kernel has it.
        server = ThrowawayPostgres({"fsync": "off"})
        stack.callback(server.close)
        server.start()
        self.victims.append(Database(server))
        return {"database": server.url}

    def _cluster(self, stack: contextlib.ExitStack) -> dict[str, str]:
        self.cluster = Cluster(self.folder, self.guard)
        stack.enter_context(self.cluster.running())
        asyncio.run(self.cluster.prepare(PROBE))
        return {"database": self.cluster.url_of(), "require_synchronous": "true"}

    def _core(self, kind: str, settings: dict[str, str]) -> Hired:
        address, secret = f"unix:{self.folder}/{kind}.sock", self._key(f"{kind}.secret")
        settings |= {f"core_{kind}": address, f"core_{kind}_secret_file": secret}
        words = ["core", "--data", f"{self.folder}/{kind}", "--listen", address, "--secret-file", secret]
        return self._hire(f"core-{kind}", [*words, "--name", kind, "--snapshot-mib", "1"], {})

    def _hire(self, name: str, words: list[str], settings: dict[str, str]) -> Hired:
        hired = Hired(Program(name, words, settings, self.folder / f"{name}.log", self.guard))
        self.hired.append(hired)
        return hired

    def _key(self, name: str) -> str:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(KEY_BYTES).hex().encode())
        return str(path)

    def _tend(self) -> None:
        while not self._over.wait(TEND_S):
            for hired in self.hired:
                hired.tend()

    def _kill_all(self) -> None:
        for hired in reversed(self.hired):
            hired.kill()


def _address(program: Program) -> str | None:
    return program.fact.get("listen")


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for something to become true; False if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(TEND_S)  # real processes, which send no notice
    return True
