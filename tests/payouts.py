"""A toy flow with every effect: a payout is approved, signed, sent, confirmed; if it is not confirmed, people decide.

The other sides are those of `tests.toy`: scripted, and idempotent. `queries` of `confirm` says what a test has put into
`found`: whether a payment that was given up has landed after all.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tests.toy import SOON, Program, World

from bursar.engine import Answer, Dispute, Flow, FlowRecord
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record

SUSPENSE = "suspense:payouts"

MACHINE = Machine(
    name="payouts",
    initial="APPROVING",
    events=("APPROVE", "REJECT", "AGAIN", "GIVE_UP", "DECIDE", "BACK", "ON"),
    states=(
        State("APPROVING", Kind.WAIT, awaits="approver"),
        State("SIGNING", Kind.CALL, action="sign", effect=Effect.SIGN),
        State("SENDING", Kind.CALL, action="send", effect=Effect.SEND),
        State("CONFIRMING", Kind.CALL, action="confirm", effect=Effect.CONFIRM),
        State("STUCK", Kind.WAIT, awaits="operator"),
        State("DECIDING", Kind.AUTOMATIC),
        State("DONE", Kind.TERMINAL),
        State("RETURNING", Kind.CALL, action="return", effect=Effect.SIGN | Effect.RETURN, compensating=True),
        State("RETURNED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("APPROVING", "APPROVE", "SIGNING"),
        Arrow("APPROVING", "REJECT", "RETURNED"),
        Arrow("SIGNING", Outcome.SUCCESS, "SENDING"),
        Arrow("SIGNING", Outcome.EXPLICIT_FAIL, "RETURNED"),
        Arrow("SENDING", Outcome.SUCCESS, "CONFIRMING"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "RETURNING"),
        Arrow("CONFIRMING", Outcome.SUCCESS, "DONE"),
        Arrow("CONFIRMING", Outcome.EXPLICIT_FAIL, "STUCK"),
        Arrow("STUCK", "AGAIN", "APPROVING"),
        Arrow("STUCK", "GIVE_UP", "RETURNING"),
        Arrow("STUCK", "DECIDE", "DECIDING"),
        Arrow("DECIDING", "BACK", "RETURNING"),
        Arrow("DECIDING", "ON", "APPROVING"),
        Arrow("RETURNING", Outcome.SUCCESS, "RETURNED"),
        Arrow("RETURNING", Outcome.EXPLICIT_FAIL, "RETURNING"),
    ),
)


class Payout(msgspec.Struct):
    minor: int = 0
    way: str = "BACK"  # out of DECIDING


def choose(item: FlowRecord[Payout]) -> str:
    return item.body.way


def dispute(_called: FlowRecord[Payout], now: FlowRecord[Payout], _answer: Answer) -> Dispute:
    """It has landed although it was given up: bob has it, and it was given back."""
    leg = Leg(SUSPENSE, "bob", "USDT", now.body.minor)
    key = f"{now.id}:late:{now.record.version}"
    return Dispute((Intent(scope="payouts", key=key, legs=(leg,), kind=EntryKind.RETURN, outside=True),))


class Chain(World):
    """The signer and the chain."""

    found: Outcome = Outcome.UNKNOWN  # what the query of a confirmation says

    async def query(self, _item: FlowRecord[Payout]) -> Answer:
        self.calls["query"] += 1
        return Answer(outcome=self.found)

    def flow(self) -> Flow[Payout]:
        options: dict[str, Any] = {"queries": {"confirm": self.query}, **self.flow_options}
        return Flow(
            machine=MACHINE,
            body=Payout,
            actions={name: self.action(name) for name in ("sign", "send", "confirm", "return")},
            cancels={name: self.cancel(name) for name in ("sign", "send")},
            rails={"sign": "signer", "send": "chain", "confirm": "chain", "return": "chain"},
            choose=choose,
            dispute=dispute,
            retry=SOON,
            **options,
        )


async def payout(p: Program, id: str, **body: Any) -> Record:
    """A payout that waits for its approval."""
    return (await p.engine.start("payouts", Payout(**body), id=id)).record


async def approved(p: Program, id: str, **body: Any) -> Record:
    """A payout that was approved; nobody drives it yet."""
    return await p.engine.signal(await payout(p, id, **body), "APPROVE", "ann", {"reason": "known"})


async def stuck(p: Program, id: str, **body: Any) -> Record:
    """A payout that was sent and can't be confirmed. The chain must say so."""
    record = await p.now(await approved(p, id, **body))
    assert record.state == "STUCK"
    return record
