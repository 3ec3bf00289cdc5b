"""The two ends of a transfer, behind one protocol: the ledger's funding accounts, and a trading core.

Both answer each operation of a request once and for all, keyed by `(req_id, op)`, refusals too; only refusals on a
written list are `EXPLICIT_FAIL` (T26). A refund is never refused for good, so only its success is remembered (T31). The
funding end is called like any other, though it happens to live in the same database: its own transaction, its own rows,
so that it could as well live in another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from bursar.engine import Answer, Booking, FlowRecord, InlineCall
from bursar.flows.transfers.checks import AccountSnapshot
from bursar.flows.transfers.request import TRANSIT, Transfer, funding_account
from bursar.model.accounts import AccountStatus, CappedOverdraft, NoOverdraft, Policy, decode_policy
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.outcome import Outcome
from bursar.model.records import OperationResult
from bursar.rails.trading import BalancesReply, Op, Reply, Status, TradingClient
from bursar.rails.trading.rules import GIVEN_BACK, LEDGER_REFUSALS, SAFETY_FACTOR, Code, amount_refusal
from bursar.store import Store
from bursar.store.sql import bring
from bursar.writer import Change, Operation, Writer

bring("bursar.flows.transfers")

FUNDING_SCOPE = "funding"
GIVEN_BACK_UNKNOWN = "GIVEN_BACK_UNKNOWN"  # whether a core has given it back can't be said just now
LOOKUP_MAX = 512
NEW_US = 1_000_000  # a record that was made so long ago at most is called for by the process that made it
# How an account of the ledger stands, in the words that cores have for it.
STATUSES = {
    AccountStatus.ACTIVE: Status.ACTIVE,
    AccountStatus.FROZEN: Status.FROZEN,
    AccountStatus.CLOSED: Status.DISABLED,
}

Look = asyncio.Future[AccountSnapshot] | Coroutine[Any, Any, AccountSnapshot]


class Rail(Protocol):
    """One end. Every operation is idempotent under the request's id."""

    inline: bool  # whether its operations can be rows of a transition's own transaction (ADR 14)

    def look(self, transfer: Transfer) -> Look:
        """How a user's account stands: asked at once, together with all who ask now. Never a promise."""

    async def withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """Take it from the user."""

    async def deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """Give it to the user."""

    async def refund(self, item: FlowRecord[Transfer]) -> Answer:
        """Give back what was taken."""

    def inline_call(self, item: FlowRecord[Transfer], op: str, booking: Booking) -> InlineCall | None:
        """The operation as rows of this database, in place of a call; None if it has to be called."""

    async def cancel(self, item: FlowRecord[Transfer], op: str) -> Answer:
        """Make sure that an operation never happens: `EXPLICIT_FAIL`; or `SUCCESS`: it has happened (T34)."""

    async def query(self, item: FlowRecord[Transfer], op: str) -> Answer:
        """What is on record of an operation, without making it happen; nothing on record is an unknown (T24)."""

    async def gave_back(self, item: FlowRecord[Transfer], *states: str) -> bool | None:
        """Whether it has given back what this transfer took, though the record is in one of these states (in the one
        of the item, if none is named), in which no refund was asked for: then the database was restored, and what the
        other end gets would be there twice. None if it does not say."""


class AccountLookup:
    """How accounts stand, asked together by all who ask at the same time: one statement for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int], asyncio.Future[AccountSnapshot]]] = []
        self._runner: asyncio.Task[None] | None = None

    def of(self, path: str, asset: int) -> asyncio.Future[AccountSnapshot]:
        """Status and what is available."""
        future: asyncio.Future[AccountSnapshot] = asyncio.get_running_loop().create_future()
        self._waiting.append(((path, asset), future))
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="bursar-account-lookup")
        return future

    async def _run(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting[:LOOKUP_MAX], self._waiting[LOOKUP_MAX:]
                await self._answer(asked)
        finally:
            self._runner = None

    async def _answer(self, asked: list[tuple[tuple[str, int], asyncio.Future[AccountSnapshot]]]) -> None:
        try:
            paths, assets = [path for (path, _), _ in asked], [asset for (_, asset), _ in asked]
            rows = await self._store.read.session.rows("standings", paths, assets)
            found = {row[0]: _snapshot(AccountStatus(row[1]), decode_policy(row[2]), int(row[3] or 0)) for row in rows}
            snapshots = [found.get(place, AccountSnapshot(exists=False)) for place in range(len(asked))]
        except Exception as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), snapshot in zip(asked, snapshots, strict=True):
            if not future.done():
                future.set_result(snapshot)


class FundingRail:
    """Funding accounts in the ledger. In-flight money sits in the transit account, one posting per transfer (T36)."""

    def __init__(
        self, store: Store, writer: Writer, *, inline: bool = True, safety_factor: int = SAFETY_FACTOR
    ) -> None:
        """`inline`: as part of the transitions' own transactions (ADR 14); if not, it is called like any other end."""
        self._store = store
        self._lookup = AccountLookup(store)
        self._writer = writer
        self._safety_factor = safety_factor
        self.inline = inline

    def look(self, transfer: Transfer) -> Look:
        return self._lookup.of(funding_account(transfer.user), transfer.asset_id)

    async def withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        return await self._operate(item, "withdraw")

    async def deposit(self, item: FlowRecord[Transfer]) -> Answer:
        return await self._operate(item, "deposit")

    async def refund(self, item: FlowRecord[Transfer]) -> Answer:
        return await self._operate(item, "refund")

    async def cancel(self, item: FlowRecord[Transfer], op: str) -> Answer:
        return await self._refuse(item, op, Code.CANCELLED)

    async def query(self, item: FlowRecord[Transfer], op: str) -> Answer:
        found = await self._store.read.operations.get(FUNDING_SCOPE, item.id, op)
        if found is None:
            return Answer(outcome=Outcome.UNKNOWN, code="NOT_FOUND", message=f"nothing is on record of {op} {item.id}")
        return _answer(msgspec.structs.replace(found, replayed=True))

    async def gave_back(self, item: FlowRecord[Transfer], *states: str) -> bool | None:
        return False  # it goes back with the record

    async def _refuse(self, item: FlowRecord[Transfer], op: str, code: Code) -> Answer:
        """Refuse an operation for good, unless it was answered before: then that is the answer."""
        change = Change(
            operation=Operation(
                scope=FUNDING_SCOPE,
                id=item.id,
                op=op,
                fingerprint=_fingerprint(item.body),
                outcome=Outcome.EXPLICIT_FAIL,
                code=code.name,
            )
        )
        return await self._apply(change)

    def inline_call(self, item: FlowRecord[Transfer], op: str, booking: Booking) -> InlineCall | None:
        """The operation, as rows that go with the transition that leads to it. Booked with it, money never rests."""
        if not self.inline or self._refusal(item.body, op) is not None:
            return None
        intent, operation = self._operation(item, op)
        if booking.intents:  # what a core has just let go of goes to the user, not to transit and from there
            (come,) = booking.intents[0].legs
            leg = msgspec.structs.replace(intent.legs[0], source=come.source)
            intent = msgspec.structs.replace(intent, legs=(leg,), consume=())
        answer = Answer(outcome=Outcome.SUCCESS, evidence={"rail": FUNDING_SCOPE, "rides": True})
        return InlineCall(
            answer,
            (operation,),
            Booking(
                (intent,),
                in_flight_account=operation.in_flight_account,
                clears_in_flight=not operation.in_flight_account,
            ),
        )

    async def _operate(self, item: FlowRecord[Transfer], op: str) -> Answer:
        if (refusal := self._refusal(item.body, op)) is not None:
            return await self._refuse(item, op, refusal)
        intent, operation = self._operation(item, op)
        return await self._apply(Change(intents=(intent,), operation=operation))

    def _refusal(self, transfer: Transfer, op: str) -> Code | None:
        """Why this end refuses it whatever the account has: the last line of defence, for what is to leave. What comes,
        or comes back, has been taken from the user elsewhere, and is never refused for its size."""
        return amount_refusal(transfer.minor, self._safety_factor) if op == "withdraw" else None

    def _operation(self, item: FlowRecord[Transfer], op: str) -> tuple[Intent, Operation]:
        transfer = item.body
        user = funding_account(transfer.user)
        source, target = (user, TRANSIT) if op == "withdraw" else (TRANSIT, user)
        intent = Intent(
            scope=FUNDING_SCOPE,
            key=f"{item.id}:{op}",
            legs=(Leg(source, target, transfer.asset, transfer.minor),),
            kind=EntryKind.RETURN if op == "refund" else EntryKind.ENTRY,
            # What arrives, or goes back, is the very posting that this transfer put there, and no other (T36).
            consume=() if op == "withdraw" else (item.record.in_flight_posting,),
            no_overdraft=op == "withdraw",  # T42
            outside=op == "refund",  # no freeze stops it, not even that of the account in transit (T35)
        )
        operation = Operation(
            scope=FUNDING_SCOPE,
            id=item.id,
            op=op,
            fingerprint=_fingerprint(transfer),
            refusals=frozenset() if op == "refund" else LEDGER_REFUSALS,
            in_flight_account=TRANSIT if op == "withdraw" else "",
        )
        return intent, operation

    async def _apply(self, change: Change) -> Answer:
        remembered = (await self._writer.apply(change)).operation
        if remembered is None:
            return Answer(outcome=Outcome.UNKNOWN, message="the ledger remembers nothing of it")
        return _answer(remembered)


class TradingRail:
    """A trading core, by its client. The client has turned every kind of trouble into an outcome already."""

    inline = False

    def __init__(self, client: TradingClient, name: str, store: Store) -> None:
        self._client = client
        self._name = name
        self._store = store

    def look(self, transfer: Transfer) -> Look:
        return self._snapshot(transfer, self._client.ask_balances(transfer.user))

    async def _snapshot(self, transfer: Transfer, asked: asyncio.Future[BalancesReply]) -> AccountSnapshot:
        found = await asked
        if found.outcome is not Outcome.SUCCESS:
            raise ConnectionError(f"core {self._name}: {found.code} {found.detail}".rstrip())
        balance = found.balances.get(transfer.asset)
        return AccountSnapshot(
            exists=bool(found.balances),
            status=found.status,
            available=0 if balance is None else balance.available,
        )

    async def withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        t, heard = item.body, self._client.sequence if self._client.is_connected else None
        reply = await self._client.withdraw(item.id, t.user, t.asset, t.minor)
        said = self._told(reply)
        if reply.outcome is not Outcome.SUCCESS or self._is_new(item, reply, heard):
            return said
        return await unless_given_back(self, item, said)

    def _is_new(self, item: FlowRecord[Transfer], reply: Reply, heard: int | None) -> bool:
        """Whether the core has done it for this call: not before what we had heard of it, of which there is nothing
        before the first connection; and for a record that was just made. Another process may have done it for an older
        one, of which we had not heard, and the database may have moved to a server that has forgotten that."""
        age_us = self._store.ports.now_us() - item.record.created_us
        return heard is not None and reply.sequence > heard and 0 <= age_us < NEW_US

    async def deposit(self, item: FlowRecord[Transfer]) -> Answer:
        t = item.body
        return self._told(await self._client.deposit(item.id, t.user, t.asset, t.minor))

    async def refund(self, item: FlowRecord[Transfer]) -> Answer:
        t = item.body
        return self._told(await self._client.refund(item.id, t.user, t.asset, t.minor))

    def inline_call(self, item: FlowRecord[Transfer], op: str, booking: Booking) -> InlineCall | None:
        return None

    async def cancel(self, item: FlowRecord[Transfer], op: str) -> Answer:
        return self._told(await self._client.cancel(item.id, Op[op.upper()]))

    async def query(self, item: FlowRecord[Transfer], op: str) -> Answer:
        t, found = item.body, await self._client.query(item.id, Op[op.upper()])
        evidence = {"rail": self._name, "sequence": found.sequence}
        if found.outcome is Outcome.SUCCESS and (found.user, found.asset, found.amount) != (t.user, t.asset, t.minor):
            said = f"on record is {found.amount} of {found.asset} for user {found.user}"
            return Answer(outcome=Outcome.UNKNOWN, code="OTHER_OPERATION", message=said, evidence=evidence)
        return Answer(outcome=found.outcome, code=found.code, message=found.detail, evidence=evidence)

    async def gave_back(self, item: FlowRecord[Transfer], *states: str) -> bool | None:
        asked = await self._client.lookup([(item.id, Op.REFUND)])  # unlike `query`, it says what was forgotten (T32)
        if not asked.replies:
            return None
        (found,) = asked.replies
        if found.outcome is not Outcome.SUCCESS:
            return False if found.code == Code.NOT_FOUND.name else None
        # Read after the core has said it: the worker that asked it for the refund had written that down before. If the
        # record is still here, that is forgotten; if it is not, another worker was faster, and this answer is too late
        # anyway.
        now = await self._store.read.records.by_number(item.record.number)
        return now is not None and now.state in (states or (item.record.state,))

    def _told(self, reply: Reply) -> Answer:
        evidence = {"rail": self._name, "sequence": reply.sequence}
        known = ((self._name, reply.sequence),) if reply.sequence else ()
        return Answer(outcome=reply.outcome, code=reply.code, message=reply.detail, evidence=evidence, high_water=known)


async def unless_given_back(source: Rail, item: FlowRecord[Transfer], answer: Answer, *states: str) -> Answer:
    """That the source has taken it; or, if it has given it back since, that it has not."""
    match await source.gave_back(item, *states):
        case True:
            return msgspec.structs.replace(answer, outcome=Outcome.EXPLICIT_FAIL, code=GIVEN_BACK)
        case None:
            return msgspec.structs.replace(answer, outcome=Outcome.UNKNOWN, code=GIVEN_BACK_UNKNOWN)
        case _:
            return answer


def _snapshot(status: AccountStatus, policy: Policy, available: int) -> AccountSnapshot:
    is_guarded = isinstance(policy, NoOverdraft | CappedOverdraft)
    return AccountSnapshot(exists=True, status=STATUSES[status], available=available, is_guarded=is_guarded)


def _answer(remembered: OperationResult) -> Answer:
    """What the ledger's end has answered to an operation, as the engine hears it."""
    detail = msgspec.json.decode(remembered.detail, type=dict[str, object])
    posting = detail.get("posting")
    return Answer(
        outcome=remembered.outcome,
        code=remembered.code,
        message=str(detail.get("message", "")),
        evidence={"rail": FUNDING_SCOPE, "replayed": remembered.replayed, **detail},
        in_flight_posting=posting if isinstance(posting, int) else None,
    )


async def both(first: Look, second: Look, waits_for: Callable[[int], None]) -> tuple[AccountSnapshot, AccountSnapshot]:
    """What two have said that were asked together. If one of them can't be heard, the other need not be."""
    try:
        waits_for(0)
        one = await first
    except BaseException:  # a cancellation, too: the other one is not waited for any more
        if isinstance(second, asyncio.Future):
            second.cancel()
        else:
            second.close()
        raise
    waits_for(1)
    return one, await second


def _fingerprint(transfer: Transfer) -> str:
    return f"{transfer.user}:{transfer.asset}:{transfer.amount}"
