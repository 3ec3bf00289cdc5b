"""The states of a payout, and of a replacement (a fee bump or a cancellation of what was sent).

A payout passes through: choose a wallet and take a nonce (`pending`), build the exact bytes (`processing`), have them
signed (`signing`), give them to the nodes (`sending`), watch them until they are final (`confirming`). Each step is on
disk before the next begins, so a crash repeats one step with the same bytes.

What was sent is replaced by a record of its own, so that nothing that stops signatures ever stops confirmation (W15):
the payout stays `confirming`, and asks for the fate of all its transactions. A payout that took a nonce ends only when
that nonce is used up on the chain, by the payment or by a cancellation: so no gap is ever left behind (W18).

The specification's status of each state is in `STATUS`.
"""

from __future__ import annotations

from typing import Final

from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome

PENDING, PROCESSING, SIGNING, SENDING = "pending", "processing", "signing", "sending"
CONFIRMING, REPLACING, DISPUTED, CONFIRMED, FAILED = "confirming", "replacing", "disputed", "confirmed", "failed"

ADOPTED = "ADOPTED"
FILL, AGAIN, REPLACE, REPLACED, MISMATCH = "FILL", "AGAIN", "REPLACE", "REPLACED", "MISMATCH"
PAID, NOT_PAID = "PAID", "NOT_PAID"  # what two people decide of a disputed payout
# Signals that no state waits for: they change the body, and a call state sees it.
BUMP, CANCEL, HOLD, RELEASE, APPROVE, KNOWN = "BUMP", "CANCEL", "HOLD", "RELEASE", "APPROVE", "KNOWN"
DETACH = "DETACH"  # its parent's money is for another payout, which was signed before a restore

MACHINE: Final = Machine(
    name="payouts",
    initial=PENDING,
    events=(ADOPTED, FILL, AGAIN, REPLACE, REPLACED, MISMATCH, PAID, NOT_PAID),
    states=(
        State(PENDING, Kind.CALL, action="assign", effect=Effect.PREPARE, poll_s=5.0, in_flight=True),
        State(PROCESSING, Kind.CALL, action="build", effect=Effect.PREPARE, poll_s=5.0, in_flight=True),
        State(SIGNING, Kind.CALL, action="sign", effect=Effect.SIGN, poll_s=10.0, in_flight=True),
        State(SENDING, Kind.CALL, action="send", effect=Effect.SEND, poll_s=5.0, in_flight=True),
        State(CONFIRMING, Kind.CALL, action="confirm", effect=Effect.CONFIRM, poll_s=15.0, in_flight=True),
        State(REPLACING, Kind.AUTOMATIC, in_flight=True),
        State(DISPUTED, Kind.WAIT, awaits="two operators", in_flight=True),
        State(CONFIRMED, Kind.TERMINAL),
        State(FAILED, Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow(PENDING, Outcome.SUCCESS, PROCESSING),
        Arrow(PENDING, ADOPTED, CONFIRMING, Outcome.SUCCESS),  # signed before a restore (W33), or imported (W38)
        Arrow(PENDING, MISMATCH, DISPUTED, Outcome.EXPLICIT_FAIL),  # another system may have sent it (W38)
        Arrow(PENDING, Outcome.EXPLICIT_FAIL, FAILED),
        Arrow(PROCESSING, Outcome.SUCCESS, SIGNING),
        Arrow(PROCESSING, Outcome.EXPLICIT_FAIL, PROCESSING),
        Arrow(SIGNING, Outcome.SUCCESS, SENDING),
        Arrow(SIGNING, FILL, PROCESSING, Outcome.EXPLICIT_FAIL),  # tombstoned: its nonce is used up by a cancellation
        Arrow(SIGNING, Outcome.EXPLICIT_FAIL, FAILED),  # tombstoned, and no nonce was taken
        Arrow(SENDING, Outcome.SUCCESS, CONFIRMING),
        Arrow(SENDING, Outcome.EXPLICIT_FAIL, CONFIRMING),  # whatever the nodes say, its fate is asked (W12)
        Arrow(CONFIRMING, Outcome.SUCCESS, CONFIRMED),
        Arrow(CONFIRMING, Outcome.EXPLICIT_FAIL, FAILED),  # dead, with its proof
        Arrow(CONFIRMING, AGAIN, PENDING, Outcome.EXPLICIT_FAIL),  # dead, and another attempt may be made
        Arrow(CONFIRMING, REPLACE, REPLACING, Outcome.SUCCESS),
        Arrow(REPLACING, REPLACED, CONFIRMING),
        Arrow(CONFIRMING, MISMATCH, DISPUTED, Outcome.EXPLICIT_FAIL),
        Arrow(DISPUTED, PAID, CONFIRMED),
        Arrow(DISPUTED, NOT_PAID, FAILED),
    ),
)

WATCHING, RETIRED, REBASE = "watching", "retired", "REBASE"

# One record per chain, for ever: it reads every final transaction of our wallets (W41).
CHAINS: Final = Machine(
    name="chains",
    initial=WATCHING,
    states=(
        State(WATCHING, Kind.CALL, action="watch", effect=Effect.CONFIRM, poll_s=15.0),
        State(RETIRED, Kind.TERMINAL),
    ),
    arrows=(
        Arrow(WATCHING, Outcome.SUCCESS, WATCHING),
        Arrow(WATCHING, Outcome.EXPLICIT_FAIL, RETIRED),  # two operators force it: nothing of ours is there any more
    ),
)

R_SIGNING, R_SENDING, R_SENT, R_DROPPED = "signing", "sending", "sent", "dropped"

# No pause stops these two: they bring to an end what has left already. A halt stops the signature (W15, W21).
REPLACEMENTS: Final = Machine(
    name="replacements",
    initial=R_SIGNING,
    states=(
        State(R_SIGNING, Kind.CALL, action="sign", effect=Effect.SIGN | Effect.RETURN, poll_s=10.0),
        State(R_SENDING, Kind.CALL, action="send", effect=Effect.RETURN, poll_s=5.0),
        State(R_SENT, Kind.TERMINAL),
        State(R_DROPPED, Kind.TERMINAL),
    ),
    arrows=(
        Arrow(R_SIGNING, Outcome.SUCCESS, R_SENDING),
        Arrow(R_SIGNING, Outcome.EXPLICIT_FAIL, R_DROPPED),  # tombstoned: it will never be signed
        Arrow(R_SENDING, Outcome.SUCCESS, R_SENT),
        Arrow(R_SENDING, Outcome.EXPLICIT_FAIL, R_SENT),
    ),
)

STATUS: Final = {
    PENDING: "pending",
    PROCESSING: "processing",
    SIGNING: "processing",
    SENDING: "processing",
    CONFIRMING: "confirming",
    REPLACING: "confirming",
    DISPUTED: "confirming",
    CONFIRMED: "confirmed",
    FAILED: "failed",
}
OPEN: Final = tuple(state for state in STATUS if state not in (CONFIRMED, FAILED))
