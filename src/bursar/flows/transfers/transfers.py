"""Transfers: what an API, a program or a test calls. It checks, writes the record down, and has it driven.

    transfers = Transfers(store, writer, ledger, {AccountType.SPOT: core_client})
    await transfers.prepare()
    view = await transfers.create(Request(user=1001, source="FUNDING", target="SPOT", asset="USDT", amount="100.00"))

A repeated `client_order_id` gets the transfer of the first request, whatever the limits and balances are by now (T12);
one with other parameters is refused (T11). What is not at its end when `create` returns is PENDING to the caller, and
goes on: by the task that drives it, or by whichever worker finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bursar.engine import Engine, Flow, Snowflakes
from bursar.flows.transfers.checks import (
    SAFETY_FACTOR,
    Code,
    TransferRefused,
    check_order_id,
    check_request,
    check_sides,
)
from bursar.flows.transfers.flow import ALARMS, SCOPE, rail_name, transfers_flow
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.rails import FundingRail, Rail, TradingRail, both
from bursar.flows.transfers.request import (
    EXTERNAL,
    SUSPENSE,
    TRANSIT,
    AccountType,
    Request,
    Transfer,
    core_account,
    funding_account,
)
from bursar.ledger import Ledger
from bursar.model.accounts import AccountStatus, ExternalAccount, Policy, SystemAccount
from bursar.model.entries import deposit
from bursar.model.envelope import Receipt
from bursar.model.errors import AlreadyExists, Conflict, LimitExceeded, OtherRequest, RecordMoved, Refusal
from bursar.model.machine import Kind
from bursar.model.money import MINOR_MAX, Amount, Asset
from bursar.model.records import Record
from bursar.model.retry import USUAL_RETRY, Alarm, Retry
from bursar.rails.trading import TradingClient
from bursar.rails.trading.words import PREFIX
from bursar.store.engine import Wanted
from bursar.writer import Limit, Remember

ASSETS_S = 0.5
DEADLINE_S = 2.0  # how long a request waits for its transfer
COUNT_MAX = 2**62
NEWEST = 2**63 - 1
SECOND_US, DAY_US = 1_000_000, 86_400_000_000
CREATE = "create"
NEW_TRANSFERS = ("flow", "new transfers")  # as a pause: none are started, those under way go on
PENDING = "PENDING"
OPEN = tuple(state.name for state in MACHINE.states if state.kind is not Kind.TERMINAL)
TERMINAL = {state.name for state in MACHINE.states if state.kind is Kind.TERMINAL}

log = logging.getLogger("bursar.transfers")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one user may do (000 §1.5.6). None: no limit."""

    per_second: int | None = 10
    per_day: int | None = 100
    amount_per_day: dict[str, int] = {}  # asset → smallest units


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer as its owner sees it."""

    transfer_id: int
    req_id: str
    user: int
    source: AccountType
    target: AccountType
    asset: str
    amount: str  # in units of the asset
    fsm_state: str
    error: str
    created_us: int
    updated_us: int
    client_order_id: str = ""
    replayed: bool = False

    @property
    def state(self) -> str:
        """The state where it is an end, else PENDING (T18)."""
        return self.fsm_state if self.fsm_state in TERMINAL else PENDING


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which transfers are to be listed. Nothing said: all."""

    state: str = ""  # PENDING, or an exact one
    asset: str = ""
    source: AccountType | None = None
    target: AccountType | None = None
    since_us: int = 0  # created then or later
    until_us: int = NEWEST  # created before

    def of(self, owner: str) -> Wanted:
        """As the store asks for it."""
        said = {"asset": self.asset, "source": self.source, "target": self.target}
        return Wanted(
            owner=owner,
            states=OPEN if self.state == PENDING else (self.state,) if self.state else (),
            facts={name: str(value) for name, value in said.items() if value},
            since_us=self.since_us,
            until_us=self.until_us,
        )


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
        rides: bool = True,
    ) -> None:
        """`rides`: the ledger's end happens in the transitions' own units, without a call (ADR 14)."""
        self.ledger = ledger
        self.limits = Limits() if limits is None else limits
        self.safety_factor = safety_factor
        funding = FundingRail(ledger.store, ledger.writer, rides=rides)
        self.rails: dict[AccountType, Rail] = {AccountType.FUNDING: funding}
        self.rails |= {kind: TradingRail(client, rail_name(kind)) for kind, client in cores.items()}
        self.flow: Flow[Transfer] = transfers_flow(self.rails, retry=retry, alarms=alarms)
        self.engine = Engine(ledger.store, ledger.writer, [self.flow], worker=worker)
        self._ids = Snowflakes(ledger.store)
        self._assets: Mapping[str, Asset] = {}
        self._assets_read = float("-inf")
        self._paused: frozenset[tuple[str, str]] = frozenset()
        self._reading: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """The accounts of ours that transfers need. Twice is once."""
        wanted: dict[str, Policy] = {TRANSIT: SystemAccount(), SUSPENSE: SystemAccount(), EXTERNAL: ExternalAccount()}
        wanted |= {core_account(kind): SystemAccount() for kind in self.rails if kind is not AccountType.FUNDING}
        for path, policy in wanted.items():
            with contextlib.suppress(AlreadyExists):
                await self.ledger.create_account(path, policy=policy)

    async def fund(self, user: int, asset: str, amount: Amount, *, reference: str) -> Receipt:
        """A deposit from outside, known by its reference; the first one makes the user's funding account."""
        account = funding_account(user)
        with contextlib.suppress(AlreadyExists):
            await self.ledger.create_account(account)
        return await self.ledger.commit(deposit(EXTERNAL, account, asset, amount, key=f"deposit:{reference}"))

    async def create(
        self, request: Request, *, deadline_s: float = DEADLINE_S, admit: Callable[[], None] = lambda: None
    ) -> View:
        """Check, write down, drive; the answer is at its end, or PENDING.

        `admit` is called for a request that does not repeat an accepted one (T12), and may refuse it: how often
        somebody may ask is known to whoever knows who asks (T46). What is accepted is counted here, too (`_limits`).
        """
        if check_order_id(request.client_order_id) and (first := await self._first(request)) is not None:
            return first
        admit()
        try:
            return await self._create(request, deadline_s)
        except TransferRefused:
            # The same request may have been faster at another server, or a moment ago here, and taken the very money
            # that is missing now: then that is the answer (T11).
            if request.client_order_id and (first := await self._first(request)) is not None:
                return first
            raise

    async def _create(self, request: Request, deadline_s: float) -> View:
        assets = await self._assets_now()
        if NEW_TRANSFERS in self._paused:
            raise TransferRefused(
                Code.TRANSFERS_PAUSED, "no new transfers for now; those under way go on, try again later"
            )
        transfer = check_request(request, assets, self.rails.keys(), self.safety_factor)
        for name in (rail_name(transfer.source), rail_name(transfer.target)):
            if ("rail", name) in self._paused:  # it would be taken at one end, and wait for the other
                raise TransferRefused(Code.TRANSFERS_PAUSED, f"no new transfers from or to {name} for now")
        started = await self._at_once(request, transfer)
        if started is None:
            ends = (self.rails[transfer.source], self.rails[transfer.target])
            source, target = await both(*[end.look(transfer) for end in ends])
            check_sides(transfer, source, target, assets[transfer.asset])
            started = await self._start(request, transfer)
        record, replayed = started
        if not replayed:
            record = await self.engine.process_now(record, deadline_s)
        return await self._view(record, replayed=replayed)

    async def stop_new(self, actor: str, reason: str) -> bool:
        """Start no new transfers; those under way go on. Whether they were started until now."""
        return await self.ledger.store.single().pauses.add(*NEW_TRANSFERS, actor, reason)

    async def allow_new(self) -> bool:
        """And start them again. Whether they were stopped."""
        return await self.ledger.store.single().pauses.drop(*NEW_TRANSFERS)

    async def get(self, user: int | None, req_id: str) -> View:
        """A user's own transfer; somebody else's is as if it were not there. Without a user, anybody's."""
        record = await self.engine.get(self.flow.name, req_id)
        if record is None or (user is not None and record.owner != str(user)):
            raise TransferRefused(Code.TRANSFER_NOT_FOUND, f"you have no transfer {req_id[:64]}")
        return await self._view(record)

    async def list(self, user: int | None, *, state: str = "", before: int = NEWEST, limit: int = 50) -> Sequence[View]:
        """A user's transfers, newest first. Without a user, everybody's."""
        found: list[View] = []
        while before and len(found) < limit:
            more, before = await self.page(user, Filter(state=state), before=before, limit=limit - len(found))
            found += more
        return found

    async def page(
        self, user: int | None, wanted: Filter, *, before: int = NEWEST, limit: int = 50
    ) -> tuple[Sequence[View], int]:
        """Some of a user's transfers (or everybody's), newest first, and the number below which to go on; 0: all seen.

        One page looks at a bounded number of rows: it may be short, even empty, and there may still be more.
        """
        owner = "" if user is None else str(user)
        records = self.ledger.store.read.records
        found, below = await records.page(self.flow.name, wanted.of(owner), before=before, limit=limit)
        return await self._views(found), below

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
            paused = await self.ledger.store.read.pauses.list()
            self._paused = frozenset((pause.kind, pause.name) for pause in paused)
            self._assets_read = asked
        finally:
            self._reading = None

    async def _first(self, request: Request) -> View | None:
        """The transfer that this `client_order_id` stands for already."""
        answer = await self.ledger.store.read.outcomes.get(_orders(request.user), request.client_order_id, CREATE)
        if answer is None:
            return None
        if answer.fingerprint != request.fingerprint:
            raise _other(request)
        record = await self.engine.get(self.flow.name, msgspec.json.decode(answer.detail)["record"])
        return None if record is None else await self._view(record, replayed=True)

    async def _at_once(self, request: Request, transfer: Transfer) -> tuple[Record, bool] | None:
        """Start without a look at the ledger's end: the unit that starts it looks there, as it takes the money, or at
        the account if that is the target. A lone caller looks at both ends at the same time, which is faster.

        None if anything speaks against it. Nothing is written then, and a closer look finds out what to say.
        """
        source, target = self.rails[transfer.source], self.rails[transfer.target]
        if not source.rides and not (target.rides and self.ledger.writer.busy):
            return None
        other = await (target if source.rides else source).look(transfer)
        enough = source.rides or (other.exists and other.available >= transfer.minor)
        if other.status is not AccountStatus.ACTIVE or not enough:
            return None
        try:
            if source.rides:
                return await self._start(request, transfer, riding=True)
            return await self._start(request, transfer, active=(funding_account(transfer.user),))
        except (Refusal, Conflict):
            return None

    async def _start(
        self, request: Request, transfer: Transfer, *, riding: bool = False, active: tuple[str, ...] = ()
    ) -> tuple[Record, bool]:
        while True:
            req_id = f"{PREFIX}{await self._ids.next()}"
            remember = None
            if request.client_order_id:
                remember = Remember(
                    scope=_orders(request.user),
                    id=request.client_order_id,
                    op=CREATE,
                    fingerprint=request.fingerprint,
                    detail=msgspec.json.encode({"record": req_id}).decode(),
                )
            try:
                started = await self.engine.start(
                    self.flow.name,
                    transfer,
                    id=req_id,
                    owner=str(request.user),
                    remember=remember,
                    limits=self._limits(transfer),
                    riding=riding,
                    active=active,
                )
            except RecordMoved:
                # It is there: ours, if the reply to its COMMIT was lost, and then another one would pay twice; or
                # somebody has that id, and the database has the last word (T10).
                found = await self.engine.get(self.flow.name, req_id)
                if found is not None and found.owner == str(request.user) and self.flow.item(found).body == transfer:
                    return found, False
                continue
            except OtherRequest:
                raise _other(request) from None
            except LimitExceeded as refusal:
                raise TransferRefused(Code(refusal.name), f"limit {refusal.limit}") from None
            return started.record, started.replayed

    def _limits(self, transfer: Transfer) -> tuple[Limit, ...]:
        """What this transfer uses up, in buckets of a second and of a day (UTC)."""
        now_us = self.ledger.store.ports.now_us()
        second, day = now_us // SECOND_US, now_us // DAY_US
        who = f"{SCOPE}:{transfer.user}"
        buckets = (
            (f"{who}:s:{second}", self.limits.per_second, (second + 1) * SECOND_US, Code.RATE_LIMIT_EXCEEDED),
            (f"{who}:d:{day}", self.limits.per_day, (day + 1) * DAY_US, Code.DAILY_LIMIT_EXCEEDED),
        )
        found = [
            Limit(key=key, count_max=most, amount_max=MINOR_MAX, until_us=until_us, code=code)
            for key, most, until_us, code in buckets
            if most is not None
        ]
        amount_max = self.limits.amount_per_day.get(transfer.asset)
        if amount_max is not None:
            found.append(
                Limit(
                    key=f"{who}:a:{transfer.asset}:{day}",
                    count_max=COUNT_MAX,
                    amount_max=amount_max,
                    amount=transfer.minor,
                    until_us=(day + 1) * DAY_US,
                    code=Code.DAILY_AMOUNT_EXCEEDED,
                )
            )
        return tuple(found)

    async def _view(self, record: Record, *, replayed: bool = False) -> View:
        transfer = self.flow.item(record).body
        return _view(record, transfer, await self.ledger.known_assets(transfer.asset), replayed)

    async def _views(self, records: Sequence[Record]) -> Sequence[View]:
        """All at once. A body that can't be read is left out: it must not hide the others."""
        readable: list[tuple[Record, Transfer]] = []
        for record in records:
            try:
                readable.append((record, self.flow.item(record).body))
            except (msgspec.MsgspecError, UnicodeError) as error:
                log.error("transfer %s can't be read: %s", record.id, error)
        assets = await self.ledger.known_assets(*{transfer.asset for _, transfer in readable})
        return [_view(record, transfer, assets) for record, transfer in readable]


def _view(record: Record, transfer: Transfer, assets: Mapping[str, Asset], replayed: bool = False) -> View:
    return View(
        transfer_id=record.number,
        req_id=record.id,
        user=transfer.user,
        source=transfer.source,
        target=transfer.target,
        asset=transfer.asset,
        amount=str(assets[transfer.asset].of_minor(transfer.minor)),
        fsm_state=record.state,
        error=record.error,
        created_us=record.created_us,
        updated_us=record.updated_us,
        client_order_id=transfer.client_order_id,
        replayed=replayed,
    )


def _orders(user: int) -> str:
    return f"{SCOPE}:{user}"


def _other(request: Request) -> TransferRefused:
    why = f"client_order_id {request.client_order_id} was used before with other parameters"
    return TransferRefused(Code.DUPLICATE_REQUEST, why)
