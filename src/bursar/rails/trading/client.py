"""A client of the trading core: any number of concurrent calls over one connection, and an outcome for each.

Calls that are made in one turn of the event loop travel in one frame, and while many frames are on their way the next
ones gather, so that a busy client sends few, large frames. The connection is made anew when it breaks, with back-off;
what was on its way then is CONNECTION_LOST, and the caller asks again with the same id. While the core cannot be
reached, calls fail at once instead of queueing.

Nothing here ever says EXPLICIT_FAIL by itself: only the core does, about what is on its disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Self

import msgspec

from bursar.deadlines import Deadlines, Pending
from bursar.model.outcome import Outcome
from bursar.model.retry import Retry
from bursar.ports import Ports
from bursar.rails.trading import protocol, replies
from bursar.rails.trading.connection import Connected, CoreLink, FixedLink, Known, NoConnection, Target, connect
from bursar.rails.trading.events import Event
from bursar.rails.trading.history import Named, indexed
from bursar.rails.trading.replies import (
    BalancesReply,
    DescribeReply,
    Floors,
    LookupReply,
    OperationsReply,
    QueryReply,
    Reply,
    TotalsReply,
)
from bursar.rails.trading.rules import Op, Status, is_u64, operation_id
from bursar.rails.trading.state import ASSETS_IN_FRAME_MAX
from bursar.rails.trading.subscription import follow
from bursar.supervise import supervise

FRAME_ITEMS_MAX: Final = 1_024
FRAMES_MAX: Final = 8  # on their way; further calls gather
PING_S: Final = 15.0
PRUNE_S: Final = 60.0  # a floor that rises by much rises in steps, and others are served in between
RECONNECT: Final = Retry(first_s=0.1, cap_s=2.0)


class Operation(NamedTuple):
    """One operation, for `execute`. `other`: whom a settlement pays; the operation that a cancel is about."""

    op: Op
    req_id: str | int
    user_id: int = 0
    asset: str = ""
    amount: int = 0
    other: int = 0


@dataclass(eq=False, slots=True)
class Call:
    """A caller who waits: for one operation, for a user's balances, or for a request of another kind."""

    item: Named | None = None
    request: Callable[[int], protocol.Request] | None = None
    user: int | None = None
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    expire: Callable[[], None] | None = None
    pending: Pending | None = None  # where it is to be taken out of when it is over
    asked_at: float = 0.0
    written_at: float | None = None

    def finish(self, answer: Any) -> None:
        """Answer, once."""
        if self.expire is not None and self.pending is not None:
            self.pending.pop(self.expire, None)
        if not self.future.done():
            self.future.set_result(answer if self.user is None else replies.meaning_of(answer, BalancesReply))


class TradingClient:
    """Calls to one core. Use it as `async with`; or `start` and `close` it."""

    def __init__(
        self,
        ports: Ports,
        address: str,
        *,
        name: str,
        secret: bytes,
        link: CoreLink | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """`link`: what the ledger that this client works for knows of the core; without one it works for none."""
        self.target = Target(address, name, secret)
        self.link: CoreLink = link or FixedLink()
        self.core_id = ""  # the core's identity, once there was a connection
        self.sequence = 0  # the highest heard of
        self.floors = Floors()  # as of the last login or `prune`
        self.timeout_s = timeout_s
        self._ports = ports
        self._deadlines = Deadlines()
        self._outbox: deque[Call] = deque()
        self._looks: list[Call] = []
        self._inflight: dict[int, list[Call]] = {}
        self._number = 0
        self._connected: Connected | None = None
        self._trouble: NoConnection | None = None  # why there is no connection, once one was tried
        self._heard_at = 0.0
        self._flushing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to connect. Calls may be made at once."""
        self._tasks = [
            asyncio.create_task(supervise("core-client", self._keep_connected, self._ports), name="core-client"),
            asyncio.create_task(supervise("core-client-ping", self._ping, self._ports), name="core-client-ping"),
        ]

    async def close(self) -> None:
        """Stop. Calls that still wait are answered with CLOSED, which is an unknown."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connected is not None:  # or the core would keep a place for us until it finds us silent
            self._connected.stream.close()
        self._disconnect(NoConnection(replies.CLOSED, "the client was closed"))

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as this side can know."""
        return self._connected is not None

    @property
    def trouble(self) -> str:
        """Why there is no connection; empty if there is one, or none was tried yet."""
        return "" if self._trouble is None else f"{self._trouble.code}: {self._trouble.detail}"

    # --- operations

    async def deposit(self, req_id: str | int, user_id: int, asset: str, amount_minor: int) -> Reply:
        """Add to what a user has available. The account is opened if it is the first time."""
        return await self._operate(Operation(Op.DEPOSIT, req_id, user_id, asset, amount_minor))

    async def withdraw(self, req_id: str | int, user_id: int, asset: str, amount_minor: int) -> Reply:
        """Take from what a user has available."""
        return await self._operate(Operation(Op.WITHDRAW, req_id, user_id, asset, amount_minor))

    async def refund(self, req_id: str | int, user_id: int, asset: str, amount_minor: int) -> Reply:
        """Give back the withdraw of this id, which must have had just these parameters."""
        return await self._operate(Operation(Op.REFUND, req_id, user_id, asset, amount_minor))

    async def lock(self, req_id: str | int, user_id: int, asset: str, amount_minor: int) -> Reply:
        """Freeze some of what a user has available, for an order."""
        return await self._operate(Operation(Op.LOCK, req_id, user_id, asset, amount_minor))

    async def unlock(self, req_id: str | int, user_id: int, asset: str, amount_minor: int) -> Reply:
        """Make some of what is frozen available again."""
        return await self._operate(Operation(Op.UNLOCK, req_id, user_id, asset, amount_minor))

    async def settle(self, req_id: str | int, user_id: int, asset: str, amount_minor: int, to_user_id: int) -> Reply:
        """Pay another user out of what is frozen: one leg of a trade."""
        return await self._operate(Operation(Op.SETTLE, req_id, user_id, asset, amount_minor, to_user_id))

    async def cancel(self, req_id: str | int, op: Op) -> Reply:
        """Make an operation definite: SUCCESS if it has happened; EXPLICIT_FAIL, and it never will (T34)."""
        return await self._operate(Operation(Op.CANCEL, req_id, other=int(op)))

    async def execute(self, operations: Sequence[Operation]) -> list[Reply]:
        """Many operations, in order, each with its own reply."""
        calls = [_call_of(operation) for operation in operations]
        self._send([call for call in calls if isinstance(call, Call)])
        return [await call.future if isinstance(call, Call) else call for call in calls]

    async def _operate(self, operation: Operation) -> Reply:
        call = _call_of(operation)
        if isinstance(call, Reply):
            return call
        self._send([call])
        reply: Reply = await call.future
        return reply

    # --- looking

    async def lookup(self, pairs: Iterable[tuple[str | int, Op]]) -> LookupReply:
        """What is on record for many (req_id, operation) pairs. Says nothing about what is still on its way."""
        wanted = [(operation_id(req_id), int(op)) for req_id, op in pairs]
        found: list[Reply] = []
        sequence = 0
        for start in range(0, len(wanted), protocol.LOOKUPS_MAX):
            some = wanted[start : start + protocol.LOOKUPS_MAX]
            answer = await self._ask(lambda number, some=some: protocol.Lookup(number, some))  # type: ignore[misc]
            if not isinstance(answer, protocol.Done):
                return replies.trouble_of(answer, LookupReply)
            sequence = answer.sequence
            found += [replies.reply_of(code, at) for code, at in zip(answer.codes, answer.sequences, strict=True)]
        return LookupReply(Outcome.SUCCESS, "OK", sequence, replies=found)

    async def query(self, req_id: str | int, op: Op) -> QueryReply:
        """Everything on record about one operation."""
        id_ = operation_id(req_id)
        return replies.meaning_of(await self._ask(lambda number: protocol.Query(number, id_, int(op))), QueryReply)

    async def balances(self, user_id: int) -> BalancesReply:
        """What a user has available and frozen, per asset. Those asked for in one turn travel in one frame."""
        return await self.ask_balances(user_id)

    def ask_balances(self, user_id: int) -> asyncio.Future[BalancesReply]:
        """The same, asked for at once and heard when awaited."""
        call = Call(user=user_id)
        self._send([call])
        return call.future

    async def totals(self) -> TotalsReply:
        """What all users hold, per asset."""
        return replies.meaning_of(await self._ask(protocol.Totals), TotalsReply)

    async def operations(self, after: int, limit: int = 4096) -> OperationsReply:
        """Deposits, withdraws and refunds that the core remembers, behind a sequence, refused ones too, in order.

        One answer may be short, or empty: go on with `after=reply.complete_to` until that is as far as wanted.
        """
        if not is_u64(after):  # the core would end the connection that all callers share
            return OperationsReply(Outcome.UNKNOWN, replies.MALFORMED, detail=f"{after} is no sequence")
        most = max(1, min(limit, protocol.OPERATIONS_MAX))
        answer = await self._ask(lambda number: protocol.Operations(number, after, most))
        return replies.meaning_of(answer, OperationsReply)

    async def describe(self) -> DescribeReply:
        """Who the core is, which ledger it is bound to, its floors, and how much it holds."""
        return replies.meaning_of(await self._ask(protocol.Describe), DescribeReply)

    def events(self, after: int) -> AsyncIterator[Event]:
        """Everything on record behind a sequence, and then as it happens. EventsGone if it is no longer kept."""
        return follow(self._ports, self.target, self.link, Known(core=self.core_id, seen=after), self.timeout_s)

    # --- operating

    async def set_status(self, user_id: int, status: Status) -> Reply:
        """Freeze, disable or free a user's account in this core."""
        answer = await self._ask(lambda number: protocol.SetStatus(number, user_id, int(status)))
        return replies.meaning_of(answer, Reply)

    async def prune(self, *, room: str | int, forget: str | int, keep: Iterable[str | int] = ()) -> Reply:
        """Raise the floors, but for `keep`; neither ever sinks.

        `room`: withdraws below it no longer reserve room for their refund; only where all of them are terminal.
        `forget`: what lies below it is forgotten and will not be executed; only where none is to come (T32), and where
        no database that might be restored would still ask.
        """
        try:
            floors = Floors(operation_id(room), operation_id(forget))
            kept = [operation_id(req_id) for req_id in keep]
        except ValueError as error:
            return Reply(Outcome.UNKNOWN, replies.MALFORMED, detail=str(error))
        if floors.room < floors.forget or len(kept) > protocol.KEEP_MAX:
            why = f"room {floors.room} is below forget {floors.forget}, or more than {protocol.KEEP_MAX} ids are kept"
            return Reply(Outcome.UNKNOWN, replies.MALFORMED, detail=why)
        asked = self._ask(lambda number: protocol.Prune(number, floors.room, floors.forget, kept), PRUNE_S)
        reply, now = replies.pruned_of(await asked)
        self.floors = now or self.floors
        return reply

    # --- calls

    async def _ask(self, request: Callable[[int], protocol.Request], timeout_s: float | None = None) -> Any:
        call = Call(request=request)
        self._send([call], timeout_s)
        return await call.future

    def _send(self, calls: list[Call], timeout_s: float | None = None) -> None:
        """Queue calls; whatever is queued in one turn of the loop leaves together."""
        if self._closed:
            self._fail(calls, NoConnection(replies.CLOSED, "the client was closed"))
            return
        if self._connected is None and self._trouble is not None:
            self._fail(calls, self._trouble)  # it is being tried again; the caller has a back-off of its own
            return
        loop = asyncio.get_running_loop()
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        now = self._ports.monotonic()
        for call in calls:
            call.asked_at = now
            call.expire = partial(self._expire, call)
            call.pending = self._deadlines.add(wait_s, call.expire)
            (self._outbox if call.user is None else self._looks).append(call)
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Put what is queued into frames, as long as not too many are on their way."""
        self._flushing = False
        connected = self._connected
        if connected is None:
            return
        now = self._ports.monotonic()
        frames: list[bytes] = []
        while (self._outbox or self._looks) and len(self._inflight) < FRAMES_MAX:
            calls = self._next_calls()
            if not calls:
                continue
            self._number += 1
            message = self._message(calls)
            self._inflight[self._number] = calls
            for call in calls:
                call.written_at = now
            frames.append(protocol.frame(message))
        if frames:
            connected.stream.write(b"".join(frames))

    def _message(self, calls: list[Call]) -> protocol.Request:
        request = calls[0].request
        if request is not None:
            return request(self._number)
        if calls[0].user is not None:
            return protocol.Balances(self._number, [call.user for call in calls if call.user is not None])
        return protocol.Execute(self._number, *indexed(call.item for call in calls if call.item is not None))

    def _next_calls(self) -> list[Call]:
        """The next frame's calls: one request, or operations up to the limit. Calls without a caller are not sent."""
        if self._looks:
            some, self._looks = self._looks[: protocol.USERS_MAX], self._looks[protocol.USERS_MAX :]
            return [call for call in some if not call.future.done()]
        calls: list[Call] = []
        assets: set[str] = set()
        while self._outbox and len(calls) < FRAME_ITEMS_MAX:
            call = self._outbox[0]
            if calls and (call.item is None or (len(assets) == ASSETS_IN_FRAME_MAX and call.item[3] not in assets)):
                break
            if call.item is not None:
                assets.add(call.item[3])
            self._outbox.popleft()
            if call.future.done():
                continue
            calls.append(call)
            if call.item is None:
                break
        return calls

    def _expire(self, call: Call) -> None:
        """Its time is up. If the core has been silent since it was sent, the connection is not worth keeping either."""
        if call.future.done():
            return
        since = call.written_at
        if since is None:  # no connection; or too many frames are on their way, and if nothing comes they never end
            since = call.asked_at
            call.finish(Reply(Outcome.NETWORK_ERROR, replies.NOT_SENT_IN_TIME, detail=self.trouble))
        else:
            call.finish(Reply(Outcome.TIMEOUT, replies.NO_REPLY))
        if self._connected is not None and self._heard_at < since:
            self._connected.stream.abort()
            self._disconnect(NoConnection(replies.CONNECTION_LOST, "the core fell silent"))

    # --- the connection

    async def _keep_connected(self) -> None:
        if self._connected is not None:  # it failed in the middle, and is run again
            self._connected.stream.abort()
            self._disconnect(NoConnection(replies.CONNECTION_LOST, "the client had to begin anew"))
        failures = 0
        while True:
            try:
                heard = Known(core=self.core_id, seen=self.sequence)
                connected = await connect(self._ports, self.target, self.link, heard, self.timeout_s)
            except NoConnection as why:
                failures += 1
                self._disconnect(why)
                await self._ports.sleep(RECONNECT.delay_us(failures, self._ports.random()) / 1e6)
                continue
            failures = 0
            self._connected, self._trouble = connected, None
            self.sequence = max(self.sequence if connected.core == self.core_id else 0, connected.sequence)
            self.core_id, self.floors = connected.core, connected.floors
            self._heard_at = self._ports.monotonic()
            self._flush()
            ended = await self._read(connected)
            connected.stream.abort()
            if self._connected is connected:
                self._disconnect(ended)

    async def _read(self, connected: Connected) -> NoConnection:
        """Hand out answers until the connection ends; returns why it did."""
        payloads = connected.payloads
        try:
            while True:
                for payload in payloads:
                    self._on_answer(protocol.decode_answer(payload))
                data = await connected.stream.read()
                if not data:
                    return NoConnection(replies.CONNECTION_LOST, "the core closed the connection")
                self._heard_at = self._ports.monotonic()
                payloads = connected.splitter.feed(data)
        except OSError as error:
            return NoConnection(replies.CONNECTION_LOST, f"{type(error).__name__}: {error}")
        except (protocol.ProtocolError, msgspec.MsgspecError, ValueError, KeyError) as error:
            return NoConnection(replies.CONNECTION_LOST, f"the core said something that makes no sense: {error}")

    def _on_answer(self, answer: protocol.Answer) -> None:
        if isinstance(answer, protocol.Events):
            raise protocol.ProtocolError("events without a subscription")
        calls = self._inflight.pop(answer.number)
        if isinstance(answer, protocol.Done) and calls[0].item is not None:
            for call, code, at in zip(calls, answer.codes, answer.sequences, strict=True):
                call.finish(replies.reply_of(code, at))
        elif isinstance(answer, protocol.Held):
            for call, account in zip(calls, answer.accounts, strict=True):
                call.finish((answer.sequence, account))
        else:
            calls[0].finish(answer)
        if not isinstance(answer, protocol.Gone):
            self.sequence = max(self.sequence, answer.sequence)
        if self._outbox or self._looks:
            self._flush()

    def _disconnect(self, why: NoConnection) -> None:
        """There is no connection: every call that waits is answered so."""
        self._connected, self._trouble = None, why
        inflight, self._inflight = self._inflight, {}
        waiting, self._outbox, self._looks = [*self._outbox, *self._looks], deque(), []
        for calls in inflight.values():
            self._fail(calls, NoConnection(replies.CONNECTION_LOST, why.detail))
        self._fail(waiting, why)

    @staticmethod
    def _fail(calls: Iterable[Call], why: NoConnection) -> None:
        # A core that has forgotten something, or does not let us in, is more than a broken line: a person must look.
        outcome = Outcome.UNKNOWN if why.code in replies.NEEDS_A_PERSON else Outcome.NETWORK_ERROR
        for call in calls:
            call.finish(Reply(outcome, why.code, detail=why.detail))

    async def _ping(self) -> None:
        """Say something now and then, so that the core keeps the connection, and a dead one is noticed."""
        while True:
            await self._ports.sleep(PING_S)
            if self._connected is not None:
                await self._ask(protocol.Ping)


def _call_of(operation: Operation) -> Call | Reply:
    """A call, if it can be put on the wire. If not, that is no refusal: nothing durable has said no."""
    op, req_id, user, asset, amount, other = operation
    try:
        id_ = operation_id(req_id)
    except ValueError as error:
        return Reply(Outcome.UNKNOWN, replies.MALFORMED, detail=str(error))
    for what, value in (("user", user), ("amount", amount), ("other", other)):
        if not is_u64(value):
            return Reply(Outcome.UNKNOWN, replies.MALFORMED, detail=f"{what} {value!r} is not unsigned, of 64 bits")
    return Call((int(op), id_, user, asset, amount, other))
