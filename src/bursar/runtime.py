"""Everything that runs behind the API, opened from a configuration: database, clients of the cores, transfers, worker.

`bursar serve` and `bursar worker` are this; the API is put on top of it. Nothing here listens or starts a process:
children are the business of the command that owns them (cli/children).
"""

from __future__ import annotations

import asyncio
import logging
import platform
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bursar.config import CHILD, CORE_SECRET_BYTES_MIN, WEBHOOK_SECRET_BYTES_MIN, Config, ConfigRefused, secret
from bursar.engine import Bell, Engine, Program, Sink, Webhook, Worker, to_log
from bursar.flows.deposits import Deposits
from bursar.flows.transfers import AccountType, Limits, Transfers
from bursar.flows.transfers.conservation import watch
from bursar.flows.transfers.flow import ALARMS
from bursar.instance import Bursar
from bursar.model.errors import BursarError, DatabaseUnavailable
from bursar.model.retry import Alarm, Retry
from bursar.ports import Ports, run_program
from bursar.rails.trading import TradingClient
from bursar.stopping import Stopping
from bursar.store.probe import STUCK, Probe

FIRST_WRITE_S = 10.0  # how long the database may take to commit a row when we start
WAITING_S = 2.0  # between two looks at what waits for people
MARKS_S = 1.0  # between two writes of how far the cores are
T = TypeVar("T")

log = logging.getLogger("bursar.runtime")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What is open."""

    config: Config
    ports: Ports
    bursar: Bursar
    cores: dict[AccountType, TradingClient]
    transfers: Transfers
    deposits: Deposits
    worker: Worker
    probe: Probe

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All that drive records here, for those who watch."""
        return (self.transfers.engine, self.deposits.engine)


def make_secrets(config: Config, ports: Ports) -> None:
    """The data folder, and the secrets in it that nobody has named: random, for their owner alone, made once."""
    files, folder = ports.files(), str(Path(config.data).absolute())
    files.make_folder(folder)
    wanted = []
    if any(config.core(kind) == CHILD for kind in config.cores):
        wanted.append("core.secret")
    if not config.jwt_key_file:
        wanted.append("jwt.key")
    for name in wanted:
        if name in files.names(folder):
            continue
        aside = f"{folder}/.{name}.new"
        file = files.create(aside)
        file.write((ports.token() + ports.token() + "\n").encode())
        file.sync()
        file.close()
        files.rename(aside, f"{folder}/{name}")
        files.sync_folder(folder)


@asynccontextmanager
async def opened(config: Config, ports: Ports, role: str, stopping: Stopping | None = None) -> AsyncIterator[Runtime]:
    """Open it all; in the end finish or park what is in hand. Nobody looks for what is due."""
    stopping = stopping or Stopping(ports, config.shutdown_ms / 1000)
    async with AsyncExitStack() as stack:
        bursar = await Bursar(config.database_url, ports=ports, options=config.database_options).__aenter__()
        stack.push_async_callback(_let_go, bursar, stopping)
        name = config.worker_name or (role if config.is_embedded else f"{platform.node()}:{role}")
        probe = Probe(bursar.store, name)
        stack.callback(probe.close)
        await _require_writes(probe)
        marks = Marks(ports, config.data)
        cores = {
            AccountType(kind.upper()): client_of(config, ports, kind, await marks.seen(kind)) for kind in config.cores
        }
        await stack.enter_async_context(marks.kept({kind.value.lower(): client for kind, client in cores.items()}))
        for client in cores.values():
            await stack.enter_async_context(client)
        transfers = Transfers(
            bursar.ledger,
            cores,
            limits=Limits(
                per_second=config.limit_per_second or None,
                per_day=config.limit_per_day or None,
                amount_per_day=config.limit_amount_per_day,
            ),
            safety_factor=config.safety_factor,
            retry=Retry(first_s=config.retry_backoff_ms / 1000, cap_s=config.retry_backoff_max_ms / 1000),
            alarms=alarms(config),
            worker=name,
        )
        await transfers.prepare()
        deposits = Deposits(transfers, confirm_above=config.deposit_confirm_above, waits_s=config.alert_waiting_s)
        worker = Worker(
            transfers.engine,
            driven_max=config.driven_max,
            scan_s=config.scan_interval_ms / 1000,
        )
        try:
            yield Runtime(
                config=config,
                ports=ports,
                bursar=bursar,
                cores=cores,
                transfers=transfers,
                deposits=deposits,
                worker=worker,
                probe=probe,
            )
        finally:
            left = await transfers.engine.finish(stopping.left_s(0.5))
            if left:
                log.warning("%s transfers are left where they are; whoever comes next goes on with them", left)


async def _let_go(bursar: Bursar, stopping: Stopping) -> None:
    await bursar.close(stopping.left_s(0.5))


async def _require_writes(probe: Probe) -> None:
    """A database that only answers reads would take no transfer: better not to start than to be ready for nothing."""
    try:
        await probe.require(FIRST_WRITE_S)
    except TimeoutError:
        raise DatabaseUnavailable(f"no write was committed within {FIRST_WRITE_S:g} s: {STUCK}") from None


@asynccontextmanager
async def running(config: Config, ports: Ports, role: str, stopping: Stopping | None = None) -> AsyncIterator[Runtime]:
    """The same, and a worker that drives whatever is due, and a bell that tells people."""
    told = sinks(config, ports)  # wrong settings are refused before anything is opened
    stopping = stopping or Stopping(ports, config.shutdown_ms / 1000)
    async with opened(config, ports, role, stopping) as runtime:
        runtime.transfers.engine.logs_alerts = runtime.deposits.engine.logs_alerts = False  # the bell does, once
        waiting = Worker(runtime.deposits.engine, scan_s=WAITING_S)
        workers = {"bursar-worker": runtime.worker, "bursar-waiting": waiting}
        tasks = [asyncio.create_task(worker.run(), name=name) for name, worker in workers.items()]
        beside = [
            asyncio.create_task(_watch(runtime), name="bursar-watch"),
            asyncio.create_task(Bell(runtime.bursar.store, told).run(), name="bursar-alerts"),
        ]
        try:
            yield runtime
        finally:
            for worker in workers.values():
                worker.stop()
            for other in beside:
                other.cancel()
            await asyncio.wait([*tasks, *beside], timeout=stopping.left_s(0.3))
            for task in (*tasks, *beside):  # in the middle of a look, or of what can't be cancelled
                task.cancel()
            await asyncio.wait([*tasks, *beside], timeout=stopping.left_s(0.3))


async def _watch(runtime: Runtime) -> None:
    """See all the time that nothing is lost or made; what can't be asked just now is asked next time."""
    while runtime.config.audit_interval_s:
        await runtime.ports.sleep(runtime.config.audit_interval_s)
        try:
            await watch(runtime.transfers, runtime.cores)
        except BursarError as error:
            log.error("the audit failed, the next one comes in %s s: %s", runtime.config.audit_interval_s, error)


class Marks:
    """The highest sequence that was ever heard from each core, in a file per core (T33).

    A core that was restored from an old disk would tell us that what it acknowledged never happened. It is shown the
    mark when we connect, and refuses to serve if it is behind. A mark that is a little old is only a weaker one, so it
    is written now and then, and nobody waits for it.
    """

    def __init__(self, ports: Ports, folder: str) -> None:
        self._ports = ports
        self._folder = folder
        self._written: dict[str, int] = {}

    async def seen(self, kind: str) -> int:
        """What was heard before."""
        return await self._on_lane(lambda: self._read(kind))

    @asynccontextmanager
    async def kept(self, clients: dict[str, TradingClient]) -> AsyncIterator[None]:
        """Keep them fresh, and write them once more at the end."""
        task = asyncio.create_task(self._keep(clients), name="bursar-marks")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._write(clients)

    async def _keep(self, clients: dict[str, TradingClient]) -> None:
        while True:
            await self._ports.sleep(MARKS_S)
            await self._write(clients)

    async def _write(self, clients: dict[str, TradingClient]) -> None:
        new = {k: c.sequence for k, c in clients.items() if c.sequence > self._written.get(k, 0)}
        if not new:
            return
        try:
            await self._on_lane(lambda: self._put(new))
        except OSError as error:
            log.error("how far the cores are can't be written to %s: %s", self._folder, error)

    async def _on_lane(self, work: Callable[[], T]) -> T:
        lane = self._ports.lane("marks")
        try:
            return await lane.run(work)
        finally:
            lane.close()

    def _read(self, kind: str) -> int:
        files = self._ports.files()
        files.make_folder(self._folder)
        if f"{kind}.seen" not in files.names(self._folder):
            return 0
        text = files.read(f"{self._folder}/{kind}.seen").decode("ascii", "replace").strip()
        if not (text.isascii() and text.isdigit()):
            raise ConfigRefused(f"{self._folder}/{kind}.seen is damaged: {text[:40]!r} is no sequence")
        self._written[kind] = int(text)
        return int(text)

    def _put(self, new: dict[str, int]) -> None:
        files = self._ports.files()
        for kind, sequence in new.items():
            path = f"{self._folder}/{kind}.seen"
            file = files.create(f"{path}.new")
            file.write(f"{sequence}\n".encode())
            file.sync()
            file.close()
            files.rename(f"{path}.new", path)
            self._written[kind] = sequence


def client_of(config: Config, ports: Ports, kind: str, seen: int = 0) -> TradingClient:
    """A client of one core, not started yet."""
    key = secret(config.core_secret_file(kind), f"core_{kind}_secret_file", CORE_SECRET_BYTES_MIN)
    timeout_s = config.core_timeout_ms / 1000
    return TradingClient(ports, config.core_address(kind), name=kind, secret=key, seen=seen, timeout_s=timeout_s)


def sinks(config: Config, ports: Ports) -> dict[str, Sink]:
    """Who is told of alerts: the log, and whoever the configuration names."""
    found: dict[str, Sink] = {"log": to_log}
    timeout_s = config.alert_timeout_ms / 1000
    if config.alert_webhook:
        try:
            from bursar.http import post  # noqa: PLC0415 (an extra: only those who want it need its library)
        except ModuleNotFoundError as error:
            raise ConfigRefused(f"alert_webhook: {error.name} is missing: pip install 'bursar[webhook]'") from None
        key = secret(config.alert_webhook_secret_file, "alert_webhook_secret_file", WEBHOOK_SECRET_BYTES_MIN)
        found["webhook"] = Webhook(
            url=config.alert_webhook, secret=key, timeout_s=timeout_s, post=post, now_us=ports.now_us
        )
    if config.alert_command:
        if shutil.which(config.alert_command[0]) is None:
            raise ConfigRefused(f"alert_command: {config.alert_command[0]} is no program that can be run")
        found["command"] = Program(words=config.alert_command, timeout_s=timeout_s, run=run_program)
    return found


def alarms(config: Config) -> tuple[Alarm, ...]:
    """When people are told: the configured thresholds, and those of the flow itself."""
    usual = Alarm(reason="stuck", tries=config.alert_threshold, seconds=config.alert_after_s)
    return (usual, *(alarm for alarm in ALARMS if alarm.reason != usual.reason))
