"""Everything that runs behind the API, opened from a configuration: database, cores, transfers, payouts, worker.

`bursar serve` and `bursar worker` are this; the API is put on top of it. Nothing here listens or starts a process:
children are the business of the command that owns them (cli/children).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bursar.config import CHILD, CORE_SECRET_BYTES_MIN, WEBHOOK_SECRET_BYTES_MIN, Config, ConfigRefused, secret
from bursar.documents import Documents
from bursar.engine import Engine, Program, Sink, Webhook, Worker, to_log
from bursar.engine.background import AWAY, Job, finish, usual_jobs
from bursar.engine.background import running as running_jobs
from bursar.flows.catalog import KINDS
from bursar.flows.deposits import ChainDeposits, Deposits
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.coverage import watch_wallets
from bursar.flows.transfers import AccountType, Limits, Transfers
from bursar.flows.transfers.checks import Horizons
from bursar.flows.transfers.closing import watch_closings
from bursar.flows.transfers.flow import ALARMS, rail_name
from bursar.flows.transfers.link import CoreUnusable, StoreLink
from bursar.flows.transfers.pruning import Pruned, prune
from bursar.flows.transfers.watch import look_at_cores, watch
from bursar.flows.withdrawals import Withdrawals
from bursar.flows.withdrawals.invariants import watch_withdrawals
from bursar.instance import Bursar
from bursar.ledger import keep_expiring_holds
from bursar.model.errors import DatabaseUnavailable
from bursar.model.retry import Alarm, Retry
from bursar.payout_setup import PayingOut, paying_out
from bursar.ports import Ports, run_program, write_whole
from bursar.rails.trading import CoreLink, TradingClient
from bursar.rails.trading.replies import OTHER_CORE, OTHER_LEDGER
from bursar.stopping import Stopping
from bursar.store import Store
from bursar.store.probe import STUCK, Probe
from bursar.worker_names import held_name

FIRST_WRITE_S = 10.0  # how long the database may take to commit a row when we start
NOT_OURS = (OTHER_CORE, OTHER_LEDGER)  # trouble with a core that only an operator can end
UNCHECKED_S = 1.0  # between two tries to compare a core with the ledger that did not answer yet

log = logging.getLogger("bursar.runtime")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What is open."""

    config: Config
    ports: Ports
    bursar: Bursar
    engine: Engine  # the only one of the process: it drives every flow
    cores: dict[AccountType, TradingClient]
    transfers: Transfers
    deposits: Deposits
    documents: Documents  # chains, assets on chains, wallets; what governs withdrawals
    paying_out: PayingOut | None  # None: no signer is configured, and no payout is driven here
    worker: Worker
    probe: Probe

    @property
    def payouts(self) -> Payouts | None:
        """Payouts, where a signer and nodes are configured."""
        return None if self.paying_out is None else self.paying_out.payouts

    @property
    def withdrawals(self) -> Withdrawals | None:
        """Withdrawals, where payouts are."""
        return None if self.paying_out is None else self.paying_out.withdrawals

    @property
    def arrivals(self) -> ChainDeposits | None:
        """Deposits from chains, where payouts are."""
        return None if self.paying_out is None else self.paying_out.deposits


def make_secrets(config: Config, ports: Ports) -> None:
    """The data folder, and the secrets in it that no setting names: random, for their owner alone, made once."""
    files, folder = ports.files(), str(Path(config.data).absolute())
    files.make_folder(folder)
    wanted = []
    if any(config.core(kind) == CHILD for kind in config.cores):
        wanted.append("core.secret")
    if not config.jwt_key_file:
        wanted.append("jwt.key")
    for name in wanted:
        if name not in files.names(folder):
            write_whole(files, folder, name, [f"{ports.token()}{ports.token()}\n".encode()])


@asynccontextmanager
async def opened(config: Config, ports: Ports, role: str, stopping: Stopping | None = None) -> AsyncIterator[Runtime]:
    """Open it all; in the end finish or park what is in progress. No worker looks for what is due."""
    stopping = stopping or Stopping(ports, config.shutdown_ms / 1000)
    async with AsyncExitStack() as stack:
        bursar = await Bursar(config.database_url, ports=ports, options=config.database_options).__aenter__()
        stack.push_async_callback(_let_go, bursar, stopping)
        name = stack.enter_context(held_name(ports, config.data, role, config.worker_name))
        probe = Probe(bursar.store, name)
        stack.callback(probe.close)
        await _require_writes(probe)
        await _check_assets(config, bursar)
        cores = await stack.enter_async_context(asked_cores(config, bursar.store, ports, binds=True))
        engine = Engine(bursar.store, bursar.ledger.writer, (), worker=name)
        transfers = Transfers(
            bursar.ledger,
            cores,
            limits=Limits(
                per_second=config.limit_per_second or None,
                per_day=config.limit_per_day or None,
                amount_per_day=dict(config.limit_amount_per_day),
            ),
            safety_factor=config.safety_factor,
            retry=Retry(first_s=config.retry_backoff_ms / 1000, cap_s=config.retry_backoff_max_ms / 1000),
            alarms=alarms(config),
            horizons=Horizons(room_after_s=config.core_room_after_s, forget_after_s=config.core_forget_after_s),
            engine=engine,
        )
        transfers.unchecked.update(cores)
        await transfers.prepare()
        deposits = Deposits(
            transfers, confirm_above=config.deposit_confirm_above, waits_s=config.alert_waiting_s, engine=engine
        )
        documents, paying = Documents(bursar.store, KINDS), None
        if config.pays_out:
            paying = await stack.enter_async_context(paying_out(config, ports, bursar.ledger, documents, engine))
        worker = Worker(engine, concurrency=config.worker_concurrency, scan_s=config.scan_interval_ms / 1000)
        try:
            yield Runtime(
                config=config,
                ports=ports,
                bursar=bursar,
                engine=engine,
                cores=cores,
                transfers=transfers,
                deposits=deposits,
                documents=documents,
                paying_out=paying,
                worker=worker,
                probe=probe,
            )
        finally:
            await finish(engine, stopping)


async def _check_assets(config: Config, bursar: Bursar) -> None:
    """Settings per asset name assets that there are: a limit on a misspelt one would limit nothing."""
    known = await bursar.ledger.assets()
    for name in ("limit_amount_per_day", "deposit_confirm_above"):
        if missing := sorted(set(getattr(config, name)) - known.keys()):
            codes = ", ".join(missing)
            raise ConfigRefused(f"{name}: there is no asset {codes} in the database; create it first, or correct it")


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
    """The same, and a worker that drives whatever is due, and an alert dispatcher."""
    receivers = sinks(config, ports)  # wrong settings are refused before anything is opened
    stopping = stopping or Stopping(ports, config.shutdown_ms / 1000)
    async with opened(config, ports, role, stopping) as runtime:
        jobs: dict[str, Job] = {
            "bursar-watch": partial(_watch, runtime),
            "bursar-prune": partial(_prune, runtime),
            "bursar-closings": partial(watch_closings, runtime.engine),
            "bursar-holds": partial(keep_expiring_holds, runtime.bursar.ledger, config.hold_expiry_interval_ms / 1000),
            **usual_jobs(runtime.engine, receivers, config.alert_paused_s),
        }
        if runtime.paying_out is not None:
            jobs["bursar-signer-log"] = runtime.paying_out.payouts.reconciling.run
            jobs["bursar-chains"] = runtime.paying_out.follow_documents
            withdrawals = runtime.paying_out.withdrawals
            jobs["bursar-withdrawals"] = partial(watch_withdrawals, withdrawals, config.audit_interval_s)
            jobs["bursar-wallets"] = partial(watch_wallets, runtime.paying_out.payouts, config.audit_interval_s)
        async with running_jobs(runtime.worker, jobs, stopping):
            await first_look(runtime)
            yield runtime


async def first_look(runtime: Runtime) -> None:
    """Compare every core with the ledger before the first transfer is taken. A core that is not this ledger's is
    refused; one that does not answer is asked again later, and nothing new goes there until then."""
    with contextlib.suppress(*AWAY):  # the watch meets it again at once, and says so
        await look_at_cores(runtime.transfers, runtime.cores)
    for kind, client in runtime.cores.items():
        if client.trouble.startswith(NOT_OURS):
            raise CoreUnusable(f"core {rail_name(kind)}: {client.trouble}")


async def _watch(runtime: Runtime) -> None:
    """See all the time that nothing is lost or made; what can't be asked just now is asked next time."""
    transfers, interval_s = runtime.transfers, runtime.config.audit_interval_s
    monotonic = runtime.ports.monotonic
    due = monotonic() + interval_s
    while interval_s or transfers.unchecked:
        wait_s = min(due - monotonic(), UNCHECKED_S) if transfers.unchecked else due - monotonic()
        await runtime.ports.sleep(max(0.0, wait_s) if interval_s else UNCHECKED_S)
        try:
            if interval_s and monotonic() >= due:
                due = monotonic() + interval_s
                await watch(transfers, runtime.cores)
            elif transfers.unchecked:
                await look_at_cores(transfers, {kind: runtime.cores[kind] for kind in sorted(transfers.unchecked)})
        except AWAY as error:
            log.error("the audit failed, the next one comes in %s s: %s", interval_s or UNCHECKED_S, error)


async def _prune(runtime: Runtime) -> None:
    """Let cores set room free and forget, as time goes on (T32)."""
    while runtime.config.prune_interval_s:
        await runtime.ports.sleep(runtime.config.prune_interval_s)
        for result in await prune_cores(runtime):
            log.info("core %s: floors %s, %s kept %s", result.rail, result.floors, result.kept, result.note)
            if result.refused:
                await runtime.engine.alert(None, f"core {result.rail} is not pruned", "warning", result.note)


async def prune_cores(runtime: Runtime) -> list[Pruned]:
    """Raise the floors of all cores as far as they go."""
    store = runtime.bursar.store
    cores = {rail_name(kind): client for kind, client in runtime.cores.items()}
    return [await prune(store, rail, client, runtime.transfers.horizons) for rail, client in cores.items()]


def client_of(config: Config, ports: Ports, kind: str, link: CoreLink | None = None) -> TradingClient:
    """A client of one core, not started yet."""
    key = secret(config.core_secret_file(kind), f"core_{kind}_secret_file", CORE_SECRET_BYTES_MIN)
    timeout_s = config.core_timeout_ms / 1000
    return TradingClient(ports, config.core_address(kind), name=kind, secret=key, link=link, timeout_s=timeout_s)


@asynccontextmanager
async def asked_cores(
    config: Config, store: Store, ports: Ports, *, binds: bool = False
) -> AsyncIterator[dict[AccountType, TradingClient]]:
    """Clients of all cores; without `binds` for a tool that only looks: pointed at the wrong core, it does not bind the
    ledger to it."""
    async with AsyncExitStack() as stack:
        found = {}
        for kind in config.cores:
            client = client_of(config, ports, kind, StoreLink(store, kind, binds=binds))
            found[AccountType(kind.upper())] = await stack.enter_async_context(client)
        yield found


def sinks(config: Config, ports: Ports) -> dict[str, Sink]:
    """Where alerts are delivered: the log, and the sinks that the configuration names."""
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
    """When an alert is raised: the configured thresholds, and those of the flow itself."""
    usual = Alarm(reason="stuck", tries=config.alert_threshold, seconds=config.alert_after_s, whole_life=True)
    return (usual, *(alarm for alarm in ALARMS if alarm.reason != usual.reason))
