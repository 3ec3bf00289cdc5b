"""The flow of internal transfers: who is called in each state, and what the ledger books beside it.

Between the ledger and a core, money in flight is a posting in `transit:transfers`, owned by the transfer that made it:

    FUNDING → SPOT   withdraw at the ledger: user → transit; deposit at the core, then, with the arrow: transit → core
    SPOT → FUNDING   withdraw at the core, with the arrow: core → transit; deposit at the ledger: transit → user
    compensation     refund at the source; if that is a core, with the arrow: transit → core

The ledger's own operations are its rail's affair (rails). What a core has done is a fact outside; its booking goes with
the transition that learns of it, in the same unit, and is never refused: no freeze stops it (T35). What a state calls,
and what it asks beside because the database may have been restored, is in calls.

A transfer is admitted by the checks of its request (`admit`), whoever starts it, and only while the user's account in
the ledger is active, in the transaction that writes its first state: so an account that is closing gets no new ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from bursar.engine import Answer, Booking, Dispute, Flow, FlowRecord, InlineCall
from bursar.flows.transfers.calls import ARRIVED, Alert, Calls
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.rails import Rail
from bursar.flows.transfers.request import SUSPENSE, TRANSIT, AccountType, Transfer, core_account, funding_account
from bursar.model.entries import Intent, Kind, Leg
from bursar.model.outcome import Outcome
from bursar.model.retry import USUAL_ALARMS, USUAL_RETRY, Alarm, Retry
from bursar.rails.trading.words import PREFIX

SCOPE = "transfers"
CALL_TIMEOUT_S = 10.0

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
    call_timeout_s: float = CALL_TIMEOUT_S,
) -> Flow[Transfer]:
    """Transfers between these ends."""

    calls = Calls(rails, alert)

    def inline_call(item: FlowRecord[Transfer], booking: Booking) -> InlineCall | None:
        match item.record.state:
            case "SOURCE_PENDING":
                return rails[item.body.source].inline_call(item, "withdraw", booking)
            case "TARGET_PENDING":
                return rails[item.body.target].inline_call(item, "deposit", booking)
            case _:
                return rails[item.body.source].inline_call(item, "refund", booking)

    return Flow(
        machine=MACHINE,
        body=Transfer,
        prefix=PREFIX,
        actions={"withdraw": calls.withdraw, "deposit": calls.deposit, "refund": calls.refund},
        admit=admit,
        active=active,
        rails={"withdraw": _source, "deposit": _target, "refund": _source},
        rail_names=frozenset(rail_name(kind) for kind in rails),
        cancels={"withdraw": calls.cancel_withdraw, "deposit": calls.cancel_deposit},
        queries={"withdraw": calls.query_withdraw, "deposit": calls.query_deposit},
        local_rails=frozenset({rail_name(AccountType.FUNDING)}),  # it lives in this database
        book=book,
        next_body=next_body,
        inline_call=inline_call,
        dispute=dispute,
        retry=retry,
        alarms=alarms,
        call_timeout_s=call_timeout_s,
    )


def rail_name(kind: AccountType) -> str:
    """How people name an end when they pause it: `funding`, `spot`, …"""
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
    """The body from an arrow on: why the target refused it, which its owner is told when the money is back. Pure."""
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

    What it has and nobody booked (a deposit that happened after all, a withdrawal that did not) comes out of suspense,
    which is then below zero: the user has it twice. What it lacks goes there: we owe it to him. A refund is left by
    success alone, which nothing contradicts (a refusal is never its last word, T31). The funding end can't contradict
    itself: its answers are rows of this database, and nobody's word is taken for them.
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
    return Dispute((Intent(scope=SCOPE, key=key, legs=(leg,), kind=Kind.RETURN, outside=True),), body)


def _booking(item: FlowRecord[Any], source: str, target: str) -> Booking:
    leg = Leg(source, target, item.body.asset, item.body.minor)
    key = f"{item.id}:{item.record.state}"
    intent = Intent(scope=SCOPE, key=key, legs=(leg,), kind=Kind.RETURN, outside=True)
    if target == TRANSIT:
        return Booking((intent,), in_flight_account=TRANSIT)
    return Booking((msgspec.structs.replace(intent, consume=(item.record.in_flight_posting,)),), clears_in_flight=True)
