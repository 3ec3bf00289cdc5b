"""What has arrived on a chain at a user's address: a record per transfer, credited once. Machine, body, entries. Pure.

The record's id is `chain:hash:part`, and the entry that credits it has that as its key, in the scope of all deposits.
So it is credited once, however often it is seen, and also if an operator books it by hand under the same reference.
What can't be believed yet is `held`, and nothing of it is booked: one node alone has seen it, a token's events
contradict its balances, or a wallet of ours has sent it. What is real and no user's is booked in suspense. Nothing is
judged while this flow, or the rail of the chain's deposits, is paused; it is still seen and written down.

Not here: what a transfer is judged by (`judging`), where it was seen (`scanning`), what becomes of it (`sweeping`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bursar.engine import Answer, Booking, FlowRecord, NewRecord, RecordSignal
from bursar.flows.deposits.sweep import MORE, SWEEPS, Sweep
from bursar.flows.payouts.payout import wallet_account
from bursar.flows.transfers.incoming import DEPOSITS
from bursar.model.entries import Intent, Leg, encode_metadata
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.rails.chain import Arrival

ARRIVED, HELD, CREDITED, SUSPENSE = "arrived", "held", "credited", "suspense"
OWN, REJECTED = "own", "rejected"
HOLD, PARK, OURS = "HOLD", "PARK", "OURS"  # what the action has found
CONFIRM, REJECT = "CONFIRM", "REJECT"  # what people say of one that is held

ARRIVALS: Final = Machine(
    name="arrivals",
    initial=ARRIVED,
    events=(HOLD, PARK, OURS, CONFIRM, REJECT),
    states=(
        State(ARRIVED, Kind.CALL, action="judge", effect=Effect.PREPARE, poll_s=15.0),
        State(HELD, Kind.WAIT, awaits="operators"),
        State(CREDITED, Kind.TERMINAL),
        State(SUSPENSE, Kind.TERMINAL),
        State(OWN, Kind.TERMINAL),
        State(REJECTED, Kind.TERMINAL),
    ),
    arrows=(
        Arrow(ARRIVED, Outcome.SUCCESS, CREDITED),
        Arrow(ARRIVED, PARK, SUSPENSE, Outcome.SUCCESS),  # it is there, and no user's
        Arrow(ARRIVED, OURS, OWN, Outcome.SUCCESS),  # between wallets of ours: its payout books it (S38)
        Arrow(ARRIVED, HOLD, HELD, Outcome.SUCCESS),
        Arrow(ARRIVED, Outcome.EXPLICIT_FAIL, REJECTED),  # it is worth nothing, or two operators say so
        Arrow(HELD, CONFIRM, ARRIVED),  # it is judged anew, with who has confirmed it
        Arrow(HELD, REJECT, REJECTED),
    ),
)
STATUS: Final = {
    ARRIVED: "pending",
    HELD: "pending",
    CREDITED: "credited",
    SUSPENSE: "under_review",
    OWN: "ignored",
    REJECTED: "rejected",
}


class Arrived(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an arrival's record. What was seen never changes; what was made of it is added."""

    chain: str
    hash: str
    part: str
    sender: str
    to: str
    contract: str = ""
    raw: str  # in the chain's smallest units
    block: int
    block_hash: str
    wallet: str  # of ours, that has received it
    user: int
    one_node: bool = False
    disputed: str = ""
    by_event_alone: bool = False
    asset: str = ""
    minor: str = "0"  # in the ledger's smallest units
    account: str = ""  # where it is booked
    why: str = ""  # it waits, or is not the user's
    confirmed_by: tuple[str, ...] = ()
    sweeps: bool = False  # booking it starts a sweep
    open_sweep: str = ""  # one that is open, and gets a signal


def rail(chain: str) -> str:
    """The name under which crediting what arrives on a chain is paused, as a rail."""
    return f"deposits {chain}"


def arrival_id(chain: str, arrival: Arrival) -> str:
    """What names it for ever."""
    return f"{chain}:{arrival.hash}:{arrival.part}"


def arrived(chain: str, arrival: Arrival, wallet: str, user: int, *, one_node: bool) -> Arrived:
    """The body that an arrival starts with."""
    return Arrived(
        chain=chain,
        hash=arrival.hash,
        part=arrival.part,
        sender=arrival.sender,
        to=arrival.to,
        contract=arrival.contract,
        raw=str(arrival.amount),
        block=arrival.block,
        block_hash=arrival.block_hash,
        wallet=wallet,
        user=user,
        one_node=one_node,
        disputed=arrival.disputed,
        by_event_alone=arrival.by_event_alone,
    )


def book(item: FlowRecord[Arrived], event: str, answer: Answer) -> Booking:
    """The credit, or the entry in suspense; with the sweep that it starts."""
    if event not in (Outcome.SUCCESS, PARK) or item.state != ARRIVED:
        return Booking()
    after = answer.body if isinstance(answer.body, Arrived) else item.body
    leg = Leg(wallet_account(after.chain, after.wallet), after.account, after.asset, int(after.minor))
    said = {"reference": item.id, "hash": after.hash, "block": after.block, "from": after.sender, "to": after.to}
    said |= {"actor": ", ".join(after.confirmed_by) or "scan"}
    intent = Intent(scope=DEPOSITS, key=item.id, legs=(leg,), metadata=encode_metadata(said), outside=True)
    # Closed, or swept by another one, since it was judged: it is judged anew.
    again = ("ACCOUNT_CLOSED", "ACCOUNT_NOT_FOUND", "ROW_TAKEN", "INVALID_STATE")
    return Booking(
        (intent,),
        starts=(_sweep(item.id, after),) if after.sweeps else (),
        signals=(RecordSignal(flow=SWEEPS.name, id=after.open_sweep, event=MORE),) if after.open_sweep else (),
        refused=dict.fromkeys(again, Outcome.PENDING),
    )


def _sweep(id_: str, body: Arrived) -> NewRecord:
    sweep = Sweep(chain=body.chain, wallet=body.wallet, address=body.to, asset=body.asset, contract=body.contract)
    return NewRecord(flow=SWEEPS.name, id=id_, body=sweep, owner=body.wallet)


def next_body(item: FlowRecord[Arrived], event: str, answer: Answer) -> Arrived | None:
    """Who has confirmed it."""
    if event != CONFIRM:
        return None
    by = str(answer.evidence["by"])
    return msgspec.structs.replace(item.body, confirmed_by=(*item.body.confirmed_by, by))


def booked(body: Arrived, event: str = "", why: str = "", **evidence: Any) -> Answer:
    """It is the user's; or, on `PARK`, there and no user's. The body says where it is booked."""
    after = msgspec.structs.replace(body, why=why)
    said = evidence | ({"why": why} if why else {})
    return Answer(outcome=Outcome.SUCCESS, event=event, body=after, evidence=said, decision=True)


def held(body: Arrived, why: str) -> Answer:
    """Nothing of it is booked until people have looked."""
    after = msgspec.structs.replace(body, why=why)
    return Answer(outcome=Outcome.SUCCESS, event=HOLD, body=after, evidence={"why": why}, decision=True)
