"""The states of a withdrawal: what a user wants, and who allowed it. What leaves on the chain is a payout of its own.

A withdrawal is checked (`checking`), waits for people where policy says so (`waiting`), and is ordered (`approved`):
the transaction that queues it starts its payout (W4). The payout ends it. Whatever people say, or a time that has come,
leads back to `checking`, which looks at everything anew: so there is one place that decides.

Neither call state issues anything: they look, and what they write is a row of this database. Switches are looked at in
`approved` and once more before each attempt is made (W37), so that a request can be cancelled while a switch is
off. The specification's status of each state is in `STATUS`.
"""

from __future__ import annotations

from typing import Final

from bursar.flows.payouts.payout import (
    PAYOUT_ADOPTED,
    PAYOUT_CANCELLED,
    PAYOUT_FAILED,
    PAYOUT_PAID,
    PAYOUT_RETURNED,
)
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome

CHECKING, WAITING, APPROVED, QUEUED = "checking", "waiting", "approved", "queued"
COMPLETED, FAILED, REJECTED, CANCELLED = "completed", "failed", "rejected", "cancelled"

ASK, BACK, DROPPED, ADOPTED = "ASK", "BACK", "DROPPED", "ADOPTED"
APPROVE, REJECT, CANCEL, DUE = "APPROVE", "REJECT", "CANCEL", "DUE"

MACHINE: Final = Machine(
    name="withdrawals",
    initial=CHECKING,
    events=(
        *(ASK, BACK, DROPPED, ADOPTED, APPROVE, REJECT, CANCEL, DUE),
        *(PAYOUT_PAID, PAYOUT_FAILED, PAYOUT_CANCELLED, PAYOUT_RETURNED, PAYOUT_ADOPTED),
    ),
    states=(
        State(CHECKING, Kind.CALL, action="check", effect=Effect.CONFIRM, poll_s=10.0, in_flight=True),
        State(WAITING, Kind.WAIT, awaits="approvers", timeout_event=DUE, in_flight=True),
        State(APPROVED, Kind.CALL, action="queue", effect=Effect.CONFIRM, poll_s=30.0, in_flight=True),
        State(QUEUED, Kind.WAIT, awaits="its payout", in_flight=True),
        State(COMPLETED, Kind.TERMINAL),
        State(FAILED, Kind.TERMINAL, compensating=True),
        State(REJECTED, Kind.TERMINAL, compensating=True),
        State(CANCELLED, Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow(CHECKING, Outcome.SUCCESS, APPROVED),
        Arrow(CHECKING, ASK, WAITING, Outcome.SUCCESS),
        Arrow(CHECKING, ADOPTED, QUEUED, Outcome.SUCCESS),  # signed before this database was restored (W33)
        Arrow(CHECKING, Outcome.EXPLICIT_FAIL, REJECTED),
        Arrow(CHECKING, DROPPED, CANCELLED, Outcome.EXPLICIT_FAIL),
        Arrow(WAITING, APPROVE, CHECKING),
        Arrow(WAITING, REJECT, CHECKING),
        Arrow(WAITING, CANCEL, CHECKING),
        Arrow(WAITING, DUE, CHECKING),
        Arrow(WAITING, PAYOUT_ADOPTED, QUEUED),
        Arrow(APPROVED, Outcome.SUCCESS, QUEUED),
        Arrow(APPROVED, ADOPTED, QUEUED, Outcome.SUCCESS),
        Arrow(APPROVED, BACK, CHECKING, Outcome.SUCCESS),  # what it was approved for holds no more
        Arrow(APPROVED, Outcome.EXPLICIT_FAIL, REJECTED),
        Arrow(APPROVED, DROPPED, CANCELLED, Outcome.EXPLICIT_FAIL),
        Arrow(QUEUED, PAYOUT_PAID, COMPLETED),
        Arrow(QUEUED, PAYOUT_FAILED, FAILED),
        Arrow(QUEUED, PAYOUT_CANCELLED, CANCELLED),
        Arrow(QUEUED, PAYOUT_RETURNED, CHECKING),  # nothing of it is alive: back to people (W37)
    ),
)

STATUS: Final = {
    CHECKING: "pending",
    WAITING: "pending",
    APPROVED: "approved",
    QUEUED: "queued",
    COMPLETED: "completed",
    FAILED: "failed",
    REJECTED: "rejected",
    CANCELLED: "cancelled",
}
UNDECIDED: Final = (CHECKING, WAITING, APPROVED)  # nothing was ordered, and its user can cancel it
OPEN: Final = (*UNDECIDED, QUEUED)
