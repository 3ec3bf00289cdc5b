"""The two ends of a transfer, behind one protocol: the ledger's funding accounts, and a trading core.

Both answer each operation of a request once and for all, keyed by `(req_id, op)`, refusals too; only refusals on a
written list are `EXPLICIT_FAIL` (T26). A refund is never refused for good, so only its success is remembered (T31).
The funding end is called like any other, though it happens to live in the same database: its own unit, its own rows, so
that it could as well live in another.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from bursar.engine import Answer, Item
from bursar.flows.transfers.checks import SAFETY_FACTOR, U64_MAX, Side
from bursar.flows.transfers.request import TRANSIT, Transfer, funding_account
from bursar.model.accounts import AccountStatus
from bursar.model.entries import Intent, Kind, Leg
from bursar.model.outcome import Outcome
from bursar.rails.trading import Op, Reply, Status, TradingClient
from bursar.store import Store
from bursar.writer import Change, Remember, Writer

FUNDING_SCOPE = "funding"
# The written list of business refusals of the funding end. Whatever else goes wrong is no answer.
FUNDING_REFUSALS = frozenset(
    {
        "INSUFFICIENT_BALANCE",
        "OVERDRAFT_FLOOR",
        "ACCOUNT_NOT_FOUND",
        "ACCOUNT_FROZEN",
        "ACCOUNT_CLOSED",
        "ASSET_SUSPENDED",
        "BOOK_REFUSES",
    }
)
CANCELLED = "CANCELLED"
STANDINGS_MAX = 512

Standing = tuple[AccountStatus, int]


class Rail(Protocol):
    """One end. Every operation is idempotent under the request's id."""

    async def look(self, transfer: Transfer) -> Side:
        """How a user's account stands. Never a promise."""
        ...

    async def withdraw(self, item: Item[Transfer]) -> Answer:
        """Take it from the user."""
        ...

    async def deposit(self, item: Item[Transfer]) -> Answer:
        """Give it to the user."""
        ...

    async def refund(self, item: Item[Transfer]) -> Answer:
        """Give back what was taken."""
        ...

    async def cancel(self, item: Item[Transfer], op: str) -> Answer:
        """Make sure that an operation never happens: `EXPLICIT_FAIL`; or `SUCCESS`: it has happened (T34)."""
        ...


class Standings:
    """How accounts stand, asked together by all who ask at the same time: one statement for all of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int], asyncio.Future[Standing | None]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def of(self, path: str, asset: int) -> Standing | None:
        """Status and what is available; None if there is no such account."""
        future: asyncio.Future[Standing | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((path, asset), future))
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="bursar-standings")
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting[:STANDINGS_MAX], self._waiting[STANDINGS_MAX:]
                await self._answer(asked)
        finally:
            self._runner = None

    async def _answer(self, asked: list[tuple[tuple[str, int], asyncio.Future[Standing | None]]]) -> None:
        try:
            found = await self._store.read.accounts.standings([pair for pair, _ in asked])
        except Exception as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for place, (_, future) in enumerate(asked):
            if not future.done():
                future.set_result(found.get(place))


class FundingRail:
    """Funding accounts in the ledger. In-flight money sits in the transit account, one posting per transfer (T36)."""

    def __init__(self, store: Store, writer: Writer) -> None:
        self._standings = Standings(store)
        self._writer = writer

    async def look(self, transfer: Transfer) -> Side:
        found = await self._standings.of(funding_account(transfer.user), transfer.asset_id)
        return Side(exists=False) if found is None else Side(exists=True, status=found[0], available=found[1])

    async def withdraw(self, item: Item[Transfer]) -> Answer:
        return await self._operate(item, "withdraw", keeps=TRANSIT)

    async def deposit(self, item: Item[Transfer]) -> Answer:
        return await self._operate(item, "deposit")

    async def refund(self, item: Item[Transfer]) -> Answer:
        return await self._operate(item, "refund")

    async def cancel(self, item: Item[Transfer], op: str) -> Answer:
        change = Change(
            remember=Remember(
                scope=FUNDING_SCOPE,
                id=item.id,
                op=op,
                fingerprint=_fingerprint(item.body),
                outcome=Outcome.EXPLICIT_FAIL,
                code=CANCELLED,
            )
        )
        return await self._answer(change)

    async def _operate(self, item: Item[Transfer], op: str, *, keeps: str = "") -> Answer:
        transfer = item.body
        if not 0 < transfer.minor <= U64_MAX // SAFETY_FACTOR:  # the last line of defence at this end
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code="INVALID_AMOUNT", message="refused before it was tried")
        user = funding_account(transfer.user)
        source, target = (user, TRANSIT) if op == "withdraw" else (TRANSIT, user)
        intent = Intent(
            scope=FUNDING_SCOPE,
            key=f"{item.id}:{op}",
            legs=(Leg(source, target, transfer.asset, transfer.minor),),
            kind=Kind.RETURN if op == "refund" else Kind.ENTRY,
            # What arrives, or goes back, is the very posting that this transfer put there, and no other (T36).
            consume=() if op == "withdraw" else (item.record.transit,),
        )
        remember = Remember(
            scope=FUNDING_SCOPE,
            id=item.id,
            op=op,
            fingerprint=_fingerprint(transfer),
            refusals=frozenset() if op == "refund" else FUNDING_REFUSALS,
            keeps=keeps,
        )
        return await self._answer(Change(intents=(intent,), remember=remember))

    async def _answer(self, change: Change) -> Answer:
        remembered = (await self._writer.apply(change)).remembered
        if remembered is None:
            return Answer(outcome=Outcome.UNKNOWN, message="the ledger remembers nothing of it")
        detail = msgspec.json.decode(remembered.detail, type=dict[str, object])
        posting = detail.get("posting")
        return Answer(
            outcome=remembered.outcome,
            code=remembered.code,
            message=str(detail.get("message", "")),
            evidence={"rail": FUNDING_SCOPE, "replayed": remembered.replayed, **detail},
            transit=posting if isinstance(posting, int) else None,
        )


class TradingRail:
    """A trading core, by its client. The client has turned every kind of trouble into an outcome already."""

    def __init__(self, client: TradingClient, name: str) -> None:
        self._client = client
        self._name = name

    async def look(self, transfer: Transfer) -> Side:
        found = await self._client.balances(transfer.user)
        if found.outcome is not Outcome.SUCCESS:
            raise ConnectionError(f"core {self._name}: {found.code} {found.detail}".rstrip())
        balance = found.balances.get(transfer.asset)
        status = {Status.FROZEN: AccountStatus.FROZEN, Status.DISABLED: AccountStatus.CLOSED}
        return Side(
            exists=bool(found.balances),
            status=status.get(found.status, AccountStatus.ACTIVE),
            available=0 if balance is None else balance.available,
        )

    async def withdraw(self, item: Item[Transfer]) -> Answer:
        t = item.body
        return self._told(await self._client.withdraw(item.id, t.user, t.asset, t.minor))

    async def deposit(self, item: Item[Transfer]) -> Answer:
        t = item.body
        return self._told(await self._client.deposit(item.id, t.user, t.asset, t.minor))

    async def refund(self, item: Item[Transfer]) -> Answer:
        t = item.body
        return self._told(await self._client.refund(item.id, t.user, t.asset, t.minor))

    async def cancel(self, item: Item[Transfer], op: str) -> Answer:
        return self._told(await self._client.cancel(item.id, Op[op.upper()]))

    def _told(self, reply: Reply) -> Answer:
        evidence = {"rail": self._name, "sequence": reply.sequence}
        return Answer(outcome=reply.outcome, code=reply.code, message=reply.detail, evidence=evidence)


def _fingerprint(transfer: Transfer) -> str:
    return f"{transfer.user}:{transfer.asset}:{transfer.amount}"
