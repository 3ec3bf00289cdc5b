"""The flow of internal transfers: who is called in each state, and what the ledger books beside it.

Between the ledger and a core, money in flight is a posting in `transit:transfers`, owned by the transfer that made it:

    FUNDING → SPOT   withdraw at the ledger: user → transit; deposit at the core, then, with the arrow: transit → core
    SPOT → FUNDING   withdraw at the core, with the arrow: core → transit; deposit at the ledger: transit → user
    compensation     refund at the source; if that is a core, with the arrow: transit → core

The ledger's own operations are its rail's affair (rails). What a core has done is a fact outside; its booking goes with
the transition that learns of it, in the same transaction, and is never refused: no freeze stops it (T35).

A transfer is admitted by the checks of its request (`admit`), whichever program starts it, and only while the user's
account in the ledger is active, in the transaction that writes its first state: an account that is closing gets none.

`Calls` is what each state calls, and what it asks beside, because the database may have been restored. A core repeats
its answers; the ledger's end has forgotten its own if the database went back to a backup, and may now answer otherwise
than it did then. So neither end is believed alone:

    a withdraw is refused     the target core promises that nothing arrives (it cancels the deposit), or says that it
                              has arrived. Then it is no refusal: `suspense:transfers` pays, with an alert (T48)
    a withdraw is repeated,   the source core is asked whether it has given the money back since (rails, `gave_back`):
    a deposit is called       then nothing may arrive

Both end in the state that is true at the cores, so that the same money is never on both sides. What a core does not say
just now is asked again later; what it has forgotten (below its floor) waits for two operators. The ledger's end as a
target is not asked: it is in the same database as the record, and went back with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bursar.engine import Answer, Booking, Dispute, Flow, FlowRecord, InlineCall
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.rails import GIVEN_BACK_UNKNOWN, Rail, unless_given_back
from bursar.flows.transfers.request import (
    SCOPE,
    SUSPENSE,
    TRANSIT,
    AccountType,
    Transfer,
    core_account,
    funding_account,
)
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import USUAL_ALARMS, USUAL_RETRY, Alarm, Retry
from bursar.rails.trading.rules import PREFIX, REFUSALS, Code

ARRIVED = "ARRIVED"  # the source refuses it now, and the target has it: the database was restored to before that
ARRIVAL_UNKNOWN = "ARRIVAL_UNKNOWN"  # or that can't be said just now
PAID_FROM_SUSPENSE = "paid from suspense"

Alert = Callable[[Record, str, str, str], Awaitable[None]]  # raises one: record, reason, severity, message

ALARMS = (
    *(replace(alarm, whole_life=True) for alarm in USUAL_ALARMS),  # 001 §9.5: from creation
    Alarm(reason="target pending", state="TARGET_PENDING", seconds=60),
    Alarm(reason="refund failing", severity="critical", state="COMPENSATING", tries=3),
)


def transfers_flow(
    rails: Mapping[AccountType, Rail],
    *,
    admit: Callable[[Transfer, str], Awaitable[None]],
    alert: Alert,
    retry: Retry = USUAL_RETRY,
    alarms: tuple[Alarm, ...] = ALARMS,
) -> Flow[Transfer]:
    """Transfers between these ends."""

    calls = Calls(rails, alert)

    def inline_call(item: FlowRecord[Transfer], booking: Booking) -> InlineCall | None:
        op = MACHINE.state(item.record.state).action or ""
        return rails[item.body.target if op == "deposit" else item.body.source].inline_call(item, op, booking)

    return Flow(
        machine=MACHINE,
        body=Transfer,
        prefix=PREFIX,
        actions={name: _listed(call) for name, call in calls.actions.items()},
        admit=admit,
        active=active,
        rails={"withdraw": _source, "deposit": _target, "refund": _source},
        rail_names=frozenset(rail_name(kind) for kind in rails),
        cancels={name: _listed(call) for name, call in calls.cancels.items()},
        queries={name: _listed(call) for name, call in calls.queries.items()},
        local_rails=frozenset({rail_name(AccountType.FUNDING)}),  # it lives in this database
        book=book,
        next_body=next_body,
        inline_call=inline_call,
        dispute=dispute,
        retry=retry,
        alarms=alarms,
    )


Call = Callable[[FlowRecord[Transfer]], Awaitable[Answer]]


def _listed(call: Call) -> Call:
    """The same call, whose refusal counts only if it is on the list (T26): whatever an adapter says, nothing else may
    give money back."""

    async def checked(item: FlowRecord[Transfer]) -> Answer:
        answer = await call(item)
        if answer.outcome is Outcome.EXPLICIT_FAIL and answer.code not in REFUSALS:
            return msgspec.structs.replace(answer, outcome=Outcome.UNKNOWN)
        return answer

    return checked


class Calls:
    """The actions of the flow, with how to cancel them and how to ask about them."""

    def __init__(self, rails: Mapping[AccountType, Rail], alert: Alert) -> None:
        self._rails = rails
        self._alert = alert
        self.actions: dict[str, Call] = {"withdraw": self.withdraw, "deposit": self.deposit, "refund": self.refund}
        self.cancels: dict[str, Call] = {"withdraw": self.cancel_withdraw, "deposit": self.cancel_deposit}
        self.queries: dict[str, Call] = {"withdraw": self.query_withdraw, "deposit": self.query_deposit}

    # --- actions

    async def withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """Take it at the source; a refusal counts only if nothing has arrived."""
        answer = await self._source(item).withdraw(item)
        return await self._refused(item, answer) if answer.outcome is Outcome.EXPLICIT_FAIL else answer

    async def deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """Give it at the target, unless the source has given it back."""
        match await self._source(item).gave_back(item):
            case True:  # for good: what was given back must not arrive as well
                return await self._target(item).cancel(item, "deposit")
            case None:
                return Answer(outcome=Outcome.UNKNOWN, code=GIVEN_BACK_UNKNOWN)
            case _:
                return await self._target(item).deposit(item)

    async def refund(self, item: FlowRecord[Transfer]) -> Answer:
        """Give it back at the source."""
        return await self._source(item).refund(item)

    # --- before the word of operators is taken (T34)

    async def cancel_withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """Make sure that it is never taken; or it was, and not given back; or it has arrived, and is paid for."""
        if item.body.source is AccountType.FUNDING and await self._is_unpaid(item):
            return await self.withdraw(item)  # by the user if the account can pay; it could not, once it is cancelled
        answer = await self._source(item).cancel(item, "withdraw")
        if answer.outcome is Outcome.SUCCESS:
            answer = await unless_given_back(self._source(item), item, answer)
        if answer.outcome is Outcome.EXPLICIT_FAIL:
            return await self._refused(item, answer, is_forced=True)
        return answer

    async def cancel_deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """Make sure that it never arrives; or it has."""
        return await self._target(item).cancel(item, "deposit")

    # --- and after it

    async def query_withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """What the source has on record, in the light of what the other end has; nothing is made to happen."""
        answer = await self._source(item).query(item, "withdraw")
        if answer.outcome is Outcome.SUCCESS:
            # In these two no refund was ever asked for. In others the flow has yet to ask, or has given it back itself.
            return await unless_given_back(self._source(item), item, answer, "COMMITTED", "FAILED")
        if answer.outcome is not Outcome.EXPLICIT_FAIL or item.body.target is AccountType.FUNDING:
            return answer
        held = await self._target(item).query(item, "deposit")
        if held.outcome is Outcome.SUCCESS:
            return msgspec.structs.replace(held, code=ARRIVED)
        if held.outcome is Outcome.EXPLICIT_FAIL or held.code in (Code.NOT_FOUND.name, Code.PRUNED.name):
            return answer
        return _unknown(answer, held)

    async def query_deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """What the target has on record."""
        return await self._target(item).query(item, "deposit")

    # --- what both ends say together

    async def _refused(self, item: FlowRecord[Transfer], answer: Answer, *, is_forced: bool = False) -> Answer:
        """A refusal of the source, once the target core has promised that nothing arrives; or that it has arrived."""
        if item.body.target is AccountType.FUNDING:
            return answer
        target = self._target(item)
        promised = await target.cancel(item, "deposit")
        match promised.outcome:
            case Outcome.EXPLICIT_FAIL:
                evidence = answer.evidence | {"target": promised.evidence}
                high_water = answer.high_water + promised.high_water
                return msgspec.structs.replace(answer, evidence=evidence, high_water=high_water)
            case Outcome.SUCCESS:
                held = await target.query(item, "deposit")
                if held.outcome is not Outcome.SUCCESS:  # not with these parameters, or it can't be asked any more
                    return _unknown(answer, held)
                message = f"transfer {item.id} of user {item.body.user} has arrived at {item.body.target}, and its"
                message += f" source refuses it now ({answer.error}): the database was restored. {SUSPENSE} pays"
                message += f" {item.body.minor} {item.body.asset}; settle that by hand"
                # Before it is written, or a crash in between would leave it untold.
                await self._alert(item.record, PAID_FROM_SUSPENSE, "critical", message)
                evidence = promised.evidence | {"refused": answer.error}
                return msgspec.structs.replace(promised, code=ARRIVED, message=message, evidence=evidence)
            case _ if is_forced and promised.code == Code.PRUNED.name:
                # It never arrives any more (T32). That it has not before is the operators' word; I5 compares the sums.
                return answer
            case _:
                return _unknown(answer, promised)

    async def _is_unpaid(self, item: FlowRecord[Transfer]) -> bool:
        """Whether it has arrived, and the source has said nothing of it yet. If it has not arrived, it never will."""
        if (await self._source(item).query(item, "withdraw")).outcome.is_known:
            return False
        return (await self._target(item).cancel(item, "deposit")).outcome is Outcome.SUCCESS

    def _source(self, item: FlowRecord[Transfer]) -> Rail:
        return self._rails[item.body.source]

    def _target(self, item: FlowRecord[Transfer]) -> Rail:
        return self._rails[item.body.target]


def _unknown(answer: Answer, asked: Answer) -> Answer:
    """The source refuses, and the target does not say whether it has arrived."""
    message = f"{answer.error}; and the target does not say that nothing has arrived: {asked.error}"
    return Answer(outcome=Outcome.UNKNOWN, code=ARRIVAL_UNKNOWN, message=message, evidence=asked.evidence)


def rail_name(kind: AccountType) -> str:
    """The name by which operators pause an end: `funding`, `spot`, …"""
    return kind.value.lower()


def _source(item: FlowRecord[Transfer]) -> str:
    return rail_name(item.body.source)


def _target(item: FlowRecord[Transfer]) -> str:
    return rail_name(item.body.target)


def active(transfer: Transfer) -> tuple[str, ...]:
    """Accounts of the ledger that must be active for it to start: the user's, or between cores the cores'. Pure."""
    kinds = (transfer.source, transfer.target)
    if AccountType.FUNDING in kinds:
        return (funding_account(transfer.user),)
    return tuple(core_account(kind) for kind in kinds)


def next_body(item: FlowRecord[Transfer], _event: str, answer: Answer) -> Transfer | None:
    """The body from an arrow on: why the target refused it, which its owner sees when the money is back. Pure."""
    if item.record.state == "TARGET_PENDING" and answer.outcome is Outcome.EXPLICIT_FAIL:
        return msgspec.structs.replace(item.body, reason=answer.error)
    return None


def book(item: FlowRecord[Transfer], event: str, answer: Answer) -> Booking:
    """What the ledger books with an arrow: the core's side of it. Pure."""
    transfer, state = item.body, item.record.state
    if answer.outcome is not Outcome.SUCCESS:
        return Booking()
    match state:
        case "SOURCE_PENDING" if answer.code == ARRIVED:
            return _booking(item, SUSPENSE, TRANSIT)  # the core has it, and no account has paid for it (T48)
        case "SOURCE_PENDING" if transfer.source is not AccountType.FUNDING:
            return _booking(item, core_account(transfer.source), TRANSIT)
        case "TARGET_PENDING" if transfer.target is not AccountType.FUNDING:
            return _booking(item, TRANSIT, core_account(transfer.target))
        case "COMPENSATING" if transfer.source is not AccountType.FUNDING:
            return _booking(item, TRANSIT, core_account(transfer.source))
        case "TARGET_PENDING" | "COMPENSATING":
            return Booking(clears_in_flight=True)  # the ledger's own end has consumed it
        case _:
            return Booking()


def dispute(called: FlowRecord[Transfer], now: FlowRecord[Transfer], answer: Answer) -> Dispute:
    """A core did something other than what was decided: book what it did, against suspense. Pure.

    What it has and the ledger has not booked (a deposit that happened after all, a withdrawal that did not) comes out
    of suspense, which is then below zero: the user has it twice. What it lacks goes there: we owe it to him. A refund
    is left by success alone, which nothing contradicts (a refusal is never its last word, T31). The funding end can't
    contradict itself: its answers are rows of this database, and no operator's word is taken for them.
    """
    transfer, state = now.body, called.record.state
    kind = transfer.target if state == "TARGET_PENDING" else transfer.source
    if kind is AccountType.FUNDING:
        return Dispute()
    adds = state == "TARGET_PENDING"  # a deposit; a withdrawal takes
    has_more = adds is (answer.outcome is Outcome.SUCCESS)
    ends = (SUSPENSE, core_account(kind)) if has_more else (core_account(kind), SUSPENSE)
    leg = Leg(*ends, transfer.asset, transfer.minor)
    key = f"{now.id}:{state}:late:{now.record.version}"
    disputed = tuple(sorted({state} ^ set(transfer.disputed)))
    body = msgspec.structs.replace(transfer, disputed=disputed)
    return Dispute((Intent(scope=SCOPE, key=key, legs=(leg,), kind=EntryKind.RETURN, outside=True),), body)


def _booking(item: FlowRecord[Any], source: str, target: str) -> Booking:
    leg = Leg(source, target, item.body.asset, item.body.minor)
    key = f"{item.id}:{item.record.state}"
    intent = Intent(scope=SCOPE, key=key, legs=(leg,), kind=EntryKind.RETURN, outside=True)
    if target == TRANSIT:
        return Booking((intent,), in_flight_account=TRANSIT)
    return Booking((msgspec.structs.replace(intent, consume=(item.record.in_flight_posting,)),), clears_in_flight=True)
