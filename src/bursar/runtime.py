"""Everything that runs behind the API, opened from a configuration: database, clients of the cores, transfers, worker.

`bursar serve` and `bursar worker` are this; the API is put on top of it. Nothing here listens or starts a process:
children are the business of the command that owns them (cli/children).
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bursar.config import CHILD, CORE_SECRET_BYTES_MIN, Config, secret
from bursar.engine import Bell, Worker
from bursar.flows.deposits import Deposits
from bursar.flows.transfers import AccountType, Limits, Transfers
from bursar.flows.transfers.flow import ALARMS
from bursar.instance import Bursar
from bursar.model.retry import Alarm, Retry
from bursar.ports import Ports
from bursar.rails.trading import TradingClient

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
async def opened(config: Config, ports: Ports, role: str) -> AsyncIterator[Runtime]:
    """Open it all; in the end finish or park what is in hand. Nobody looks for what is due."""
    async with AsyncExitStack() as stack:
        bursar = await stack.enter_async_context(Bursar(config.database_url, ports=ports))
        cores = {AccountType(kind.upper()): client_of(config, ports, kind) for kind in config.cores}
        for client in cores.values():
            await stack.enter_async_context(client)
        name = config.worker_name or (role if config.is_embedded else f"{platform.node()}:{role}")
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
        deposits = Deposits(transfers, confirm_above=config.deposit_confirm_above)
        worker = Worker(
            transfers.engine,
            bell=Bell(bursar.store),
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
            )
        finally:
            left = await transfers.engine.finish(config.shutdown_ms / 1000)
            if left:
                log.warning("%s transfers are left where they are; whoever comes next goes on with them", left)


@asynccontextmanager
async def running(config: Config, ports: Ports, role: str) -> AsyncIterator[Runtime]:
    """The same, and a worker that drives whatever is due."""
    async with opened(config, ports, role) as runtime:
        task = asyncio.create_task(runtime.worker.run(), name="bursar-worker")
        try:
            yield runtime
        finally:
            runtime.worker.stop()
            await asyncio.gather(task, return_exceptions=True)


def client_of(config: Config, ports: Ports, kind: str) -> TradingClient:
    """A client of one core, not started yet."""
    key = secret(config.core_secret_file(kind), f"core_{kind}_secret_file", CORE_SECRET_BYTES_MIN)
    timeout_s = config.core_timeout_ms / 1000
    return TradingClient(ports, config.core_address(kind), name=kind, secret=key, timeout_s=timeout_s)


def alarms(config: Config) -> tuple[Alarm, ...]:
    """When people are told: the configured thresholds, and those of the flow itself."""
    usual = Alarm(reason="stuck", tries=config.alert_threshold, seconds=config.alert_after_s)
    return (usual, *(alarm for alarm in ALARMS if alarm.reason != usual.reason))
