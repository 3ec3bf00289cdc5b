"""Transfers: what an API, a program or a test calls. It checks, writes the record down, and has it driven.

    transfers = Transfers(store, writer, ledger, {AccountType.SPOT: core_client})
    await transfers.prepare()
    view = await transfers.create(Request(user=1001, source="FUNDING", target="SPOT", asset="USDT", amount="100.00"))

A repeated `client_order_id` gets the transfer of the first request, whatever the limits and balances are by now (T12);
one with other parameters is refused (T11). What has not ended when `create` returns is PENDING to the caller, and
goes on: by the task that drives it, or by whichever worker finds it. `create` returns within its deadline, whatever
hangs (T45): a far side that does not answer, or the database, in whose COMMIT the transfer may just be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bursar.deadlines import Deadline, Deadlines
from bursar.engine import DatabaseClock, Engine, Flow, Lift, Snowflakes, lift_pause, set_pause
from bursar.engine.clock import first_id_at
from bursar.flows.transfers.checks import (
    SECOND_US,
    Code,
    CommitUnknown,
    Horizons,
    Limits,
    TransferRefused,
    check_id,
    check_order_id,
    check_request,
    check_snapshots,
    check_transfer,
)
from bursar.flows.transfers.closing import DRAIN_S, close_account
from bursar.flows.transfers.flow import ALARMS, rail_name, transfers_flow
from bursar.flows.transfers.incoming import Deposit, book
from bursar.flows.transfers.rails import FundingRail, Rail, TradingRail, both
from bursar.flows.transfers.request import (
    EXTERNAL,
    NEW_TRANSFERS,
    NEWEST,
    SCOPE,
    SUSPENSE,
    SUSPENSE_DEPOSITS,
    TERMINAL,
    TRANSIT,
    AccountType,
    Filter,
    Request,
    Transfer,
    View,
    core_account,
    view_of,
)
from bursar.ledger import Ledger
from bursar.model.accounts import Account, ExternalAccount, Policy, SystemAccount
from bursar.model.actors import check_reason
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    AlreadyExists,
    Conflict,
    DatabaseUnavailable,
    IdempotencyKeyReused,
    InvalidAmount,
    LimitExceeded,
    OutcomeUnknown,
    RecordMoved,
    Refusal,
    StoreError,
)
from bursar.model.money import Amount, Asset
from bursar.model.records import Record
from bursar.model.retry import USUAL_RETRY, Alarm, Retry
from bursar.rails.trading import TradingClient
from bursar.rails.trading.rules import PREFIX, SAFETY_FACTOR, Status
from bursar.writer import Operation

ASSETS_S = 0.5
DEADLINE_S = 2.0  # how long a request waits for its transfer
ACCEPT_S = 0.5  # and at least for its first state: an answer that it may or may not be there is of no use
FOLLOW_MIN_S, FOLLOW_MAX_S = 0.01, 0.25  # between two looks at a transfer that is driven elsewhere
CREATE = "create"

log = logging.getLogger("bursar.transfers")


class Transfers:
    """Internal transfers between the ledger and trading cores."""

    def __init__(
        self,
        ledger: Ledger,
        cores: Mapping[AccountType, TradingClient],
        *,
        limits: Limits | None = None,
        safety_factor: int = SAFETY_FACTOR,
        retry: Retry = USUAL_RETRY,
        alarms: tuple[Alarm, ...] = ALARMS,
        worker: str = "local",
        inline: bool = True,
        horizons: Horizons | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`inline`: the ledger's end happens in the transitions' own transactions, without a call (ADR 14). `engine`:
        the one of the process, which drives other flows too; without it transfers get an engine of their own for
        `worker`."""
        self.ledger = ledger
        self.cores = dict(cores)
        self.limits = Limits() if limits is None else limits
        self.safety_factor = safety_factor
        funding = FundingRail(ledger.store, ledger.writer, inline=inline, safety_factor=safety_factor)
        self.rails: dict[AccountType, Rail] = {AccountType.FUNDING: funding}
        self.rails |= {kind: TradingRail(client, rail_name(kind), ledger.store) for kind, client in cores.items()}
        self.engine = engine or Engine(ledger.store, ledger.writer, (), worker=worker)
        self.flow: Flow[Transfer] = transfers_flow(
            self.rails, admit=self._admit, alert=self.engine.alert, retry=retry, alarms=alarms
        )
        self.engine.register(self.flow)
        self._ids = Snowflakes(ledger.store)
        self._clock = DatabaseClock(ledger.store)
        self._assets: Mapping[str, Asset] = {}
        self._assets_read = float("-inf")
        self._paused: frozenset[tuple[str, str]] = frozenset()
        self._reading: asyncio.Task[None] | None = None
        # Cores that the watch has not compared with the ledger yet since the start: nothing new goes there. The program
        # that runs a watch fills it.
        self.unchecked: set[AccountType] = set()
        self.horizons = Horizons() if horizons is None else horizons
        self._forgotten = 1  # the highest id below which a core has forgotten all
        self._deadlines = Deadlines()
        self._following: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """The accounts of ours that transfers need. Twice is once."""
        wanted: dict[str, Policy] = {path: SystemAccount() for path in (TRANSIT, SUSPENSE, SUSPENSE_DEPOSITS)}
        wanted[EXTERNAL] = ExternalAccount()
        wanted |= {core_account(kind): SystemAccount() for kind in self.rails if kind is not AccountType.FUNDING}
        for path, policy in wanted.items():
            with contextlib.suppress(AlreadyExists):
                await self.ledger.create_account(path, policy=policy)
        # Before there is any money: every backup with something in it knows who this ledger is.
        await self.ledger.store.single().cores.make_identity(self.ledger.store.ports.token())

    async def fund(self, user: int, asset: str, amount: Amount, *, reference: str) -> str:
        """A deposit from outside, known by its reference; the first one makes the user's funding account. Where it is
        booked: there, or in suspense if that account is closed (T44)."""
        minor = (await self.ledger.asset(asset)).minor(amount)
        if minor <= 0:
            raise InvalidAmount(str(amount), "an amount above zero is needed")
        deposit = Deposit(user=user, asset=asset, amount=str(minor), reference=reference, asked_by=self.engine.worker)
        return (await book(self.engine, self.ledger, deposit)).account

    async def close_account(self, path: str, *, drain_s: float = DRAIN_S) -> Account:
        """Close an account of the ledger for good. Of a user's funding account the cores are asked first (T44)."""
        return await close_account(self, path, drain_s)

    async def create(
        self, request: Request, *, deadline_s: float = DEADLINE_S, admit: Callable[[], None] = lambda: None
    ) -> View:
        """Check, write down, drive; the transfer has ended, or is PENDING; the answer comes within the deadline (T45).

        A deadline that is shorter than a COMMIT may take is one for its end only: to be written down, a transfer always
        has a moment. With 0 the caller does not wait for its end. `admit` is called for a request that does not repeat
        an accepted one (T12), and may refuse it: how often a user may ask is known to the API (T46).
        """
        stage, ports = _Stage(), self.ledger.store.ports
        accept_s, began = max(deadline_s, ACCEPT_S), ports.monotonic()
        deadline = self._deadlines.begin(accept_s)
        try:
            record, assets, replayed = await deadline.keep(self._accept(request, stage, admit))
            if accept_s > deadline_s:
                deadline.end()
                deadline = self._deadlines.begin(max(0.0, began + deadline_s - ports.monotonic()))
            if record.state not in TERMINAL:
                if not replayed:
                    record = await self._drive(record, deadline, is_waiting=deadline_s > 0)
                elif deadline_s > 0:
                    record = await self._follow(record, deadline)
        except TimeoutError:
            if not deadline.is_over:
                raise
            raise self._too_late(stage, accept_s) from None
        finally:
            deadline.end()
        return view_of(record, self.flow.item(record).body, assets, replayed)

    async def _accept(
        self, request: Request, stage: _Stage, admit: Callable[[], None]
    ) -> tuple[Record, Mapping[str, Asset], bool]:
        """The transfer of this request, written down now or long ago, and the assets that there are."""
        if check_order_id(request.client_order_id) and (first := await self._first(request)) is not None:
            return first, await self.ledger.known_assets(self.flow.item(first).body.asset), True
        admit()
        try:
            return await self._create(request, stage)
        except TransferRefused:
            # The same request may have been faster at another server, or a moment ago here, and taken the very money
            # that is missing now: then that is the answer (T11).
            if request.client_order_id and (first := await self._first(request)) is not None:
                return first, await self.ledger.known_assets(self.flow.item(first).body.asset), True
            raise

    async def _create(self, request: Request, stage: _Stage) -> tuple[Record, Mapping[str, Asset], bool]:
        assets = await self._assets_with(request.asset)
        if NEW_TRANSFERS in self._paused:
            raise TransferRefused(
                Code.TRANSFERS_PAUSED, "no new transfers for now; those under way go on, try again later"
            )
        transfer = check_request(request, assets, self.rails.keys(), self.safety_factor)
        for name in (rail_name(transfer.source), rail_name(transfer.target)):
            if ("rail", name) in self._paused:  # it would be taken at one end, and wait for the other
                raise TransferRefused(Code.TRANSFERS_PAUSED, f"no new transfers from or to {name} for now")
        for kind in (transfer.source, transfer.target):
            if kind in self.unchecked:
                raise ConnectionError(f"core {rail_name(kind)} was not compared with the ledger yet; try again later")
        started = await self._at_once(request, transfer, stage)
        if started is None:
            kinds = (transfer.source, transfer.target)
            first, second = (self.rails[kind].look(transfer) for kind in kinds)
            source, target = await both(first, second, lambda place: stage.asks(kinds[place]))
            stage.asks(None)
            check_snapshots(transfer, source, target, assets[transfer.asset])
            started = await self._start(request, transfer, stage)
        record, replayed = started
        return record, assets, replayed

    async def _drive(self, record: Record, deadline: Deadline, *, is_waiting: bool) -> Record:
        """Drive a transfer, and wait for its end if there is time."""
        task = self.engine.drive(record)
        if is_waiting:
            await deadline.wait(task)
        return self.engine.newest(record, task)

    async def _follow(self, record: Record, deadline: Deadline) -> Record:
        """Wait for the end of a transfer that is under way: driven here, or by another process."""
        task = self.engine.driving(record)
        if task is not None:
            await deadline.wait(task)
            record = self.engine.newest(record, task)
        pause_s = FOLLOW_MIN_S
        try:
            while record.state not in TERMINAL:
                await deadline.keep(self.ledger.store.ports.sleep(pause_s))
                found = await deadline.keep(self.engine.get(record.flow, record.id))
                record = record if found is None else found
                pause_s = min(2 * pause_s, FOLLOW_MAX_S)
        except TimeoutError:
            if not deadline.is_over:
                raise
        except StoreError as error:  # it is written down and goes on, whether or not it can be read just now
            log.warning("transfer %s can't be followed: %s", record.id, error)
        return record

    def _too_late(self, stage: _Stage, deadline_s: float) -> Exception:
        """What to say when the deadline came before the transfer was known to be written."""
        why = f"no answer within {deadline_s:g} s"
        if stage.req_id:
            task = asyncio.get_running_loop().create_task(self._pick_up(stage.req_id), name=f"bursar-{stage.req_id}")
            self._following.add(task)
            task.add_done_callback(self._following.discard)
            return CommitUnknown(stage.req_id, why)
        if stage.asked is not None and stage.asked is not AccountType.FUNDING:
            return ConnectionError(f"core {rail_name(stage.asked)}: {why}")
        return DatabaseUnavailable(f"{why}; nothing was written")

    async def _pick_up(self, req_id: str) -> None:
        """Drive a transfer whose COMMIT no caller waits for any more, once it can be seen: its lease is ours, and
        long."""
        ports, pause_s = self.ledger.store.ports, FOLLOW_MIN_S
        until = ports.monotonic() + self.engine.lease_us / 1e6
        while ports.monotonic() < until:
            await ports.sleep(pause_s)
            pause_s = min(2 * pause_s, FOLLOW_MAX_S)
            with contextlib.suppress(StoreError):
                record = await self.engine.get(self.flow.name, req_id)
                if record is not None:
                    if record.state not in TERMINAL and self.engine.driving(record) is None:
                        self.engine.drive(record)
                    return

    async def pause_intake(self, actor: str, reason: str, *, two_people: bool = False) -> bool:
        """Start no new transfers; those under way go on. Whether they were started until now.

        `actor` is a person, or what a program calls itself. With `two_people`, it takes two to start them again.
        """
        why = check_reason(reason)
        was_on = await set_pause(self.ledger.store, *NEW_TRANSFERS, actor=actor, reason=why, two_people=two_people)
        if self._reading is not None:  # it may have looked before, and what it knows would be believed for a while
            with contextlib.suppress(StoreError):
                await asyncio.shield(self._reading)
        self._assets_read = float("-inf")
        return was_on

    async def resume_intake(self, actor: str, reason: str) -> Lift:
        """And start them again; where two operators are needed, the first one only proposes it (T47)."""
        return await lift_pause(self.ledger.store, *NEW_TRANSFERS, actor=actor, reason=reason)

    async def get(self, user: int | None, req_id: str) -> View:
        """A user's own transfer; another user's is as if it were not there. Without a user, any user's."""
        record = await self.engine.get(self.flow.name, req_id)
        if record is None or (user is not None and record.owner != str(user)):
            raise TransferRefused(Code.TRANSFER_NOT_FOUND, f"you have no transfer {req_id[:64]}")
        transfer = self.flow.item(record).body
        return view_of(record, transfer, await self.ledger.known_assets(transfer.asset))

    async def list(self, user: int | None, *, state: str = "", before: int = NEWEST, limit: int = 50) -> Sequence[View]:
        """A user's transfers, newest first. Without a user, those of all users."""
        found: list[View] = []
        while before and len(found) < limit:
            more, before = await self.page(user, Filter(state=state), before=before, limit=limit - len(found))
            found += more
        return found

    async def page(
        self, user: int | None, wanted: Filter, *, before: int = NEWEST, limit: int = 50
    ) -> tuple[Sequence[View], int]:
        """Some transfers of a user (or of all), newest first, and the number below which to go on; 0: all seen.

        One page looks at a bounded number of rows: it may be short, even empty, and there may still be more.
        """
        owner = "" if user is None else str(user)
        records = self.ledger.store.read.records
        found, below = await records.page(self.flow.name, wanted.of(owner), before=before, limit=limit)
        return await self._views(found), below

    async def _admit(self, transfer: Transfer, req_id: str) -> None:
        """What every transfer is checked for when it is started, by whichever way."""
        assets = await self._assets_with(transfer.asset)
        check_id(req_id, self._clock.now_us(), self._forgotten, self.horizons)
        check_transfer(transfer, assets, self.rails.keys(), self.safety_factor)

    async def _assets_with(self, code: str) -> Mapping[str, Asset]:
        """All assets, at most a moment old; read again if one is not among them, for it may be new."""
        assets = await self._assets_now()
        if code not in assets:
            self._assets_read = float("-inf")
            assets = await self._assets_now()
        return assets

    async def _assets_now(self) -> Mapping[str, Asset]:
        """All assets, and what is paused, at most a moment old: another process may change both."""
        if self.ledger.store.ports.monotonic() - self._assets_read > ASSETS_S:
            if self._reading is None:  # once for all who ask meanwhile
                self._reading = asyncio.get_running_loop().create_task(self._read_assets(), name="bursar-assets")
            await asyncio.shield(self._reading)
        return self._assets

    async def _read_assets(self) -> None:
        try:
            asked = self.ledger.store.ports.monotonic()
            self._assets = await self.ledger.assets()
            await self._clock.set_back()  # sampled: buckets of limits are of the database's time
            paused = await self.ledger.store.read.pauses.list()
            self._paused = frozenset((pause.kind, pause.name) for pause in paused)
            self._forgotten = await self.ledger.store.read.cores.forgotten()
            # New ids are above what cores have forgotten, and of the database's time, whatever our clock says (T32).
            self._ids.rise_above(max(self._forgotten, first_id_at(self._clock.now_us() - SECOND_US)))
            self._assets_read = asked
        finally:
            self._reading = None

    async def _first(self, request: Request) -> Record | None:
        """The transfer that this `client_order_id` stands for already."""
        answer = await self.ledger.store.read.operations.get(_orders(request.user), request.client_order_id, CREATE)
        if answer is None:
            return None
        if answer.fingerprint != request.fingerprint:
            raise _other(request)
        return await self.engine.get(self.flow.name, msgspec.json.decode(answer.detail)["record"])

    async def _at_once(self, request: Request, transfer: Transfer, stage: _Stage) -> tuple[Record, bool] | None:
        """Start without a look at the ledger's end: the transaction that starts it looks there, as it takes the money,
        or at the account if that is the target. A lone caller looks at both ends at the same time, which is faster.

        None if anything speaks against it. Nothing is written then, and a closer look finds out what to say.
        """
        source, target = self.rails[transfer.source], self.rails[transfer.target]
        if not source.inline and not (target.inline and self.ledger.writer.busy):
            return None
        stage.asks(transfer.target if source.inline else transfer.source)
        other = await (target if source.inline else source).look(transfer)
        stage.asks(None)
        enough = source.inline or (other.exists and other.available >= transfer.minor)
        if other.status is not Status.ACTIVE or not enough:
            return None
        try:
            return await self._start(request, transfer, stage, require_inline=source.inline)
        except (Refusal, Conflict):
            return None

    async def _start(
        self, request: Request, transfer: Transfer, stage: _Stage, *, require_inline: bool = False
    ) -> tuple[Record, bool]:
        while True:
            stage.req_id = ""
            req_id = f"{PREFIX}{await self._ids.next()}"
            remember = None
            if request.client_order_id:
                remember = Operation(
                    scope=_orders(request.user),
                    id=request.client_order_id,
                    op=CREATE,
                    fingerprint=request.fingerprint,
                )
            stage.req_id = req_id  # from here on it may be written, heard of or not
            try:
                started = await self.engine.start(
                    self.flow.name,
                    transfer,
                    id=req_id,
                    owner=str(request.user),
                    operation=remember,
                    limits=self.limits.used_by(transfer, self._clock.now_us()),
                    require_inline=require_inline,
                )
            except RecordMoved:
                # It is there: ours, if the reply to its COMMIT was lost, and then another one would pay twice; or
                # another transfer has that id, and the database has the last word (T10).
                found = await self.engine.get(self.flow.name, req_id)
                if found is not None and found.owner == str(request.user) and self.flow.item(found).body == transfer:
                    return found, False
                continue
            except IdempotencyKeyReused:
                stage.req_id = ""
                raise _other(request) from None
            except OutcomeUnknown as error:
                raise CommitUnknown(req_id, error.why) from error
            except Refusal as refusal:
                stage.req_id = ""
                raise self._refused(refusal, transfer) from None
            return started.record, started.replayed

    def _refused(self, refusal: Refusal, transfer: Transfer) -> Refusal:
        """The refusal of a first state in the specification's words, and without our inside."""
        match refusal:
            case LimitExceeded(name=name):
                most = self._assets[transfer.asset].of_minor(self.limits.amount_per_day.get(transfer.asset, 0))
                why = {
                    Code.RATE_LIMIT_EXCEEDED: f"at most {self.limits.per_second} in a second",
                    Code.DAILY_LIMIT_EXCEEDED: f"at most {self.limits.per_day} transfers in a day",
                    Code.DAILY_AMOUNT_EXCEEDED: f"at most {most} {transfer.asset} in a day",
                }
                return TransferRefused(Code(name), why[Code(name)])
            case AccountFrozen():
                return TransferRefused(Code.ACCOUNT_FROZEN, f"an account of user {transfer.user} is frozen")
            case AccountClosed():
                return TransferRefused(Code.ACCOUNT_DISABLED, f"an account of user {transfer.user} is disabled")
            case _:
                return refusal

    async def _views(self, records: Sequence[Record]) -> Sequence[View]:
        """All at once. A body that can't be read is left out: it must not hide the others."""
        readable: list[tuple[Record, Transfer]] = []
        for record in records:
            try:
                readable.append((record, self.flow.item(record).body))
            except (msgspec.MsgspecError, UnicodeError) as error:
                log.error("transfer %s can't be read: %s", record.id, error)
        assets = await self.ledger.known_assets(*{transfer.asset for _, transfer in readable})
        return [view_of(record, transfer, assets) for record, transfer in readable]


class _Stage(msgspec.Struct):
    """How far a request has come: what it waits for, and the id of the transfer that is being written."""

    asked: AccountType | None = None
    req_id: str = ""

    def asks(self, kind: AccountType | None) -> None:
        """An end is asked, or none any more."""
        self.asked = kind


def _orders(user: int) -> str:
    return f"{SCOPE}:{user}"


def _other(request: Request) -> TransferRefused:
    why = f"client_order_id {request.client_order_id} was used before with other parameters"
    return TransferRefused(Code.DUPLICATE_REQUEST, why)
