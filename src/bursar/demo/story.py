"""The demo: the whole system on this machine, killed while money is in flight; and every transfer ends, once.

A real `bursar serve` (API, worker, SQLite) with its trading core as a child. Users move money between their FUNDING
account in the ledger and their SPOT account in the core, over HTTP, many at once. Then the core gets kill -9, and later
the server, each at a moment when money has left one side and not arrived at the other. Callers repeat what was not
answered, with the same client_order_id. In the end all answers are compared with what is there.

Not here: what it prints (command).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bursar.api.tokens import make_token
from bursar.audit import Finding
from bursar.config import Config, read
from bursar.model.errors import DatabaseUnavailable
from bursar.ports import split_address
from bursar.testbed import Caller, Guard, NoAnswer, Program, children_of, environment
from bursar.testbed.load import OPERATOR, Habits, Load, make_tokens
from bursar.testbed.look import STATES, audited, create_assets, look, select
from bursar.testbed.promises import ENDS, Found, Kind, judge

ASSET, PRECISION = "USDT", 6
UNIT = 10**PRECISION
USERS = range(1_001, 1_009)
VISITOR = 1_000  # the reader's own user: no traffic of ours touches it
OPENING = 1_000 * UNIT
CALLERS = 12
SETTINGS = {
    "limit_per_second": "0",  # eight users do the work of thousands
    "limit_per_day": "0",
    "limit_reads_per_second": "0",
    "deadline_ms": "500",
    "retry_backoff_max_ms": "500",
}
LISTEN = "127.0.0.1:8080"
ANYWHERE = ("127.0.0.1:0",) * 3  # another process may take a free port first
TAKEN = "can't listen"
STATIC_S = 7.0  # for starting, two restarts, and the audit
TRAFFIC_S_MIN = 0.5  # before each kill
IN_FLIGHT_MIN = 3  # transfers with money between the two sides, before something is killed
BLINK_S = 0.02
CATCH_S = 5.0
BLOWS_MAX = 3
WAIT_S = 60.0
TICK_S = 0.05
TOKEN_S = 86_400
FLYING = frozenset({"SOURCE_DONE", "TARGET_PENDING", "COMPENSATING"})
OPEN = "SELECT req_id, state, amount, user_id FROM {schema}transfers_tb WHERE state NOT IN (40, -10, -30)"
COUNTS = "SELECT state, count(*) FROM {schema}transfers_tb GROUP BY state"
STATE = "SELECT req_id, state FROM {schema}transfers_tb WHERE req_id IN ({ids})"


@dataclass
class Blow:
    """One kill -9, and what came after it."""

    victim: str
    pid: int
    at_s: float
    open: dict[str, tuple[str, int]]  # open transfers: id → state, amount
    unanswered: int = 0  # requests that had to be sent again
    back_s: float = 0.0  # until it worked again
    ended_s: float = 0.0  # until all of those transfers had ended
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> int:
        """The money that had left one side and not arrived at the other, in smallest units."""
        return sum(minor for state, minor in self.open.values() if state in FLYING)


@dataclass
class Report:
    """What happened, and whether it is as it must be."""

    folder: str
    listen: str = ""
    token: str = ""  # the visitor's
    seconds: float = 0.0
    phase: str = "starting"
    done: int = 0  # transfers that have ended
    blows: list[Blow] = field(default_factory=list)
    asked: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    balances: dict[int, dict[str, int]] = field(default_factory=dict)  # user → account → smallest units
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.wrong and bool(self.findings) and all(f.ok and f.judged for f in self.findings)


Tell = Callable[[str, Report], None]  # something has happened: "ready", "killed", "back", "over"
Watch = Callable[[float, Report], None]  # how far it is, from 0 to 1


class Story:
    """One demo."""

    def __init__(self, folder: Path, listen: str | None, seconds: float, tell: Tell) -> None:
        self.report = Report(str(folder))
        self._seconds = seconds
        self._listen = listen
        self._tell = tell
        self._folder = folder
        self._start = time.monotonic()

    @contextlib.contextmanager
    def running(self, guard: Guard) -> Iterator[Program]:
        """The server is up inside, and nothing is left of it afterwards."""
        settings = SETTINGS | {"data": str(self._folder)}
        self._config: Config = read("", _settings(settings))
        log = self._folder / "serve.log"
        self._server = self._first(settings, log, guard)
        try:
            self.report.listen = str(self._server.fact["listen"])
            yield self._server
        finally:
            cores = children_of(self._server.pid)
            self._server.kill()
            for pid in cores:  # it would end by itself, but not before its folder is removed
                _signal(pid, signal.SIGKILL)

    def play(self, watch: Watch) -> Report:
        """The whole demo, inside `running`."""
        report, self._watch = self.report, watch
        asyncio.run(create_assets(self._config, {ASSET: PRECISION}))
        habits = Habits(
            users=USERS,
            accounts=("FUNDING", "SPOT"),
            assets={ASSET: PRECISION},
            opening=OPENING,
            step=UNIT // 4,
            callers=CALLERS,
            large=0.1,
            impossible=0.01,
        )
        self._load = Load(self._config, habits, [self._address], seed=1)
        self._load.open()
        self._welcome()
        self._tell("ready", report)
        self._load.start()
        traffic_s = max(TRAFFIC_S_MIN, (self._seconds - STATIC_S) / 3)
        for victim in ("core", "server"):
            self._pass(traffic_s, "transfers in both directions")
            self._strike(victim)
        self._pass(traffic_s, "transfers in both directions")
        self._finish()
        self._judge()
        report.seconds = time.monotonic() - self._start
        self._tell("over", report)
        return report

    # --- the server

    def _first(self, settings: dict[str, str], log: Path, guard: Guard) -> Program:
        """Start it at the given address; without one, if the usual port is taken, at any. The port stays the same, so
        that clients find it again after a crash."""
        why = ""
        for listen in [self._listen] if self._listen else [LISTEN, *ANYWHERE]:
            server = Program("serve", ["serve", "--listen", with_port(listen)], settings, log, guard)
            server.start()
            if server.ready.wait(WAIT_S) and server.fact:
                return server
            server.kill()
            why = server.last_words or f"`bursar serve` does not start: {server.tail()}"
            if TAKEN not in why:
                break
        raise DatabaseUnavailable(why)

    def _address(self) -> str | None:
        return self._server.fact.get("listen")

    def _works(self) -> bool:
        try:
            return Caller(self._address, timeout_s=2.0).send("GET", "/readyz", "").status == 200
        except NoAnswer:
            return False

    # --- kills

    def _strike(self, victim: str) -> None:
        for _ in range(BLOWS_MAX):  # a moment with nothing in flight proves nothing: then once more
            blow = self._blow(victim)
            if blow.in_flight:
                return

    def _blow(self, victim: str) -> Blow:
        report, server = self.report, self._server
        before = self._unanswered()
        core = next(iter(children_of(server.pid)), 0)
        pid = server.pid if victim == "server" else core
        self._catch(core)
        if victim == "core":
            _signal(core, signal.SIGKILL)
        else:
            server.kill()
            _signal(core, signal.SIGCONT)  # it sees that its server is gone, and ends
        struck = time.monotonic()
        blow = Blow(victim, pid, struck - self._start, self._open())
        report.blows.append(blow)
        report.phase = f"the {victim} is dead"
        self._tell("killed", report)
        if victim == "server":
            server.start()
            server.until_ready()
        else:
            self._until(lambda: children_of(server.pid) not in ([], [pid]), WAIT_S)
        self._must(self._works, f"the {victim} does not come back")
        blow.back_s = time.monotonic() - struck
        self._must(lambda: self._ended(blow), "transfers hang")
        blow.ended_s = time.monotonic() - struck
        blow.unanswered = self._unanswered() - before
        self._tell("back", report)
        return blow

    def _catch(self, core: int) -> None:
        """Choose the moment: stop the core for an instant, again and again, until that leaves money in flight."""

        def is_caught() -> bool:
            _signal(core, signal.SIGSTOP)
            time.sleep(BLINK_S)  # the ledger's side goes on, as far as it can
            if sum(state in FLYING for state, _ in self._open().values()) >= IN_FLIGHT_MIN:
                return True
            _signal(core, signal.SIGCONT)
            return False

        if not self._until(is_caught, CATCH_S):
            _signal(core, signal.SIGSTOP)

    def _unanswered(self) -> int:
        return sum(ask.was(Kind.LOST) for ask in list(self._load.asks))

    def _open(self) -> dict[str, tuple[str, int]]:
        [rows] = select(self._config, OPEN)
        return {req_id: (STATES[state], int(amount)) for req_id, state, amount, user in rows if user in USERS}

    def _ended(self, blow: Blow) -> bool:
        if not blow.open:
            return True
        ids = ", ".join(f"'{req_id}'" for req_id in blow.open)
        [rows] = select(self._config, STATE.replace("{ids}", ids))
        blow.ends = Counter(STATES[state] for _, state in rows)
        return len(rows) == len(blow.open) and blow.ends.keys() <= ENDS

    # --- the end

    def _finish(self) -> None:
        self.report.phase = "every request gets an answer"
        self._tick()
        self._load.finish(WAIT_S)
        self._load.settle(WAIT_S, 0)
        self._must(lambda: not self._open(), "transfers hang")

    def _judge(self) -> None:
        report, load = self.report, self._load
        report.phase = "audit"
        self._tick()
        everything = look(self._config, USERS)
        ours = [row for row in everything.rows if row.user in USERS]
        balances = {place: minor for place, minor in everything.balances.items() if place[0] in USERS}
        found = Found(rows=ours, balances=balances, paused=everything.paused, alarms=everything.alarms)
        report.wrong += judge(load.asks, load.deposits, found)
        report.wrong += load.tally.unexpected
        report.wrong += [f"the {v} was not killed with money in flight" for v in self._spared()]
        report.asked = len(load.asks)
        # By request, not by answer: one that was sent again is refused again, and the figures should add up.
        report.refusals = Counter(ask.said[-1].code for ask in load.asks if ask.said and not ask.was(Kind.ACCEPTED))
        report.ends = Counter(row.state for row in ours)
        for (user, account, _), minor in found.balances.items():
            report.balances.setdefault(user, {})[account] = minor
        report.findings = asyncio.run(audited(self._config))

    def _spared(self) -> list[str]:
        hit = {blow.victim for blow in self.report.blows if blow.in_flight}
        return [victim for victim in ("core", "server") if victim not in hit]

    def _welcome(self) -> None:
        """An account for the reader, and a token for it."""
        operator = make_tokens(self._config, range(0))[OPERATOR]
        body = {"user_id": VISITOR, "asset": ASSET, "amount": "100.00", "reference": "welcome"}
        answer = Caller(self._address).send("POST", "/api/v1/deposits", operator, body)
        if answer.status != 200:
            self.report.wrong.append(f"the visitor's deposit: {answer.body}")
        now_s = int(time.time())
        self.report.token = make_token(self._config, str(VISITOR), ["user"], now_s=now_s, seconds=TOKEN_S)

    # --- time

    def _pass(self, seconds: float, phase: str) -> None:
        self.report.phase = phase
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()
            time.sleep(TICK_S)  # traffic goes on meanwhile

    def _must(self, condition: Callable[[], bool], otherwise: str) -> None:
        if not self._until(condition, WAIT_S):
            self.report.wrong.append(otherwise)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        began = ticked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > began + timeout_s:
                return False
            if now > ticked + TICK_S:
                ticked = now
                self._tick()
            time.sleep(0.005)  # real processes, which send no notice
        return True

    def _tick(self) -> None:
        [rows] = select(self._config, COUNTS)
        self.report.done = sum(count for state, count in rows if STATES[state] in ENDS)
        self._watch(min(1.0, (time.monotonic() - self._start) / self._seconds), self.report)


def _settings(settings: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment(settings).items() if name.startswith("BURSAR_")}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


def with_port(listen: str) -> str:
    """The address with a port that is free, where it names none."""
    _, host, port = split_address(f"tcp:{listen}")
    if port:
        return listen
    with socket.socket() as attempt:
        attempt.bind((host, 0))
        return f"{host}:{attempt.getsockname()[1]}"


def curl_lines(listen: str, token: str) -> list[str]:
    """Lines to copy and paste while it is up."""
    who = '-H "Authorization: Bearer $TOKEN"'
    request = f'{{"from": "FUNDING", "to": "SPOT", "asset": "{ASSET}", "amount": "25.00", "client_order_id": "mine-1"}}'
    return [
        f"TOKEN={token}",
        f"curl -s {listen}/api/v1/balances {who}",
        f"curl -s {listen}/api/v1/internal_transfer {who} -H 'Content-Type: application/json' -d '{request}'",
        f"curl -s '{listen}/api/v1/internal_transfer?limit=5' {who}",
    ]
