"""The flow of sequences: what is run and undone in each state, what the ledger books with it, and where the index goes.

An entry is booked in the transaction that advances the index, so there is no moment between the two: the
compare-and-set decides, and the ledger's refusal is the step's answer. Its compensation is its reversal, as
`Ledger.reverse` makes it and under the same key: an entry that was reversed by hand is not reversed twice.
The caller's own steps are called like any rail: the state is on disk first, and they are asked again until they answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from bursar.engine import SUCCESS, Answer, Booking, Flow, FlowRecord, FlowRefused
from bursar.flows.sequence.checks import UNKNOWN_STEP
from bursar.flows.sequence.machine import (
    COMPENSATING,
    COMPENSATION_FAILED,
    END,
    MACHINE,
    NEXT,
    RUNNING,
    SKIP,
    STEP_DONE,
    UNDO,
    UNDONE,
    UNDONE_IN_PART,
)
from bursar.flows.sequence.steps import Call, EntryStep, OwnCall, OwnStep, Refused, Sequence
from bursar.model.entries import EntryKind, Intent, Leg, check_key
from bursar.model.outcome import Outcome
from bursar.model.postings import PostingState
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.store import Store

SCOPE = "sequence"  # of the entries' keys
REVERSE = "reverse"  # the scope in which the ledger reverses an envelope, once
REVERSES, CONSUMES = "reverses", "consumes"  # in the evidence of a compensation
RESULT_LENGTH_MAX = 4_096
PREFIX = "seq-"  # of ids
CANCELLED = "CANCELLED"
MISSING_STEP = "missing step"  # the alert's reason
COMPENSATION_ALERT = "CompensationFailed"

# The ledger's refusals that are a step's answer. Whatever else it refuses is a mistake of ours, and stays.
NO_CODES = (
    "INSUFFICIENT_BALANCE",
    "OVERDRAFT_FLOOR",
    "ACCOUNT_NOT_FOUND",
    "ACCOUNT_FROZEN",
    "ACCOUNT_CLOSED",
    "ASSET_SUSPENDED",
    "BOOK_REFUSES",
)
NO: Mapping[str, Outcome] = dict.fromkeys(NO_CODES, Outcome.EXPLICIT_FAIL)
# A compensation also looks before it leaps: a posting that was spent, or a reversal made by hand, since we looked.
NO_OR_AGAIN: Mapping[str, Outcome] = {
    **NO,
    "POSTING_NOT_LIVE": Outcome.PENDING,
    "DUPLICATE_REQUEST": Outcome.PENDING,
}

Alert = Callable[[Record | None, str, str, str], Awaitable[None]]


def entry_key(id: str, step: int) -> str:
    """The key of a step's entry: by the record's id and the step's place, so it is booked once."""
    return f"{id}:{step}"


def sequence_flow(
    store: Store,
    own: Mapping[str, OwnStep],
    alert: Alert,
    *,
    retry: Retry,
    call_timeout_s: float,
) -> Flow[Sequence]:
    """Sequences whose own steps are these. `alert` raises an alert."""
    _check(own)
    at = Actions(store, own, alert)
    return Flow(
        machine=MACHINE,
        body=Sequence,
        prefix=PREFIX,
        actions={"run": at.run, "undo": at.undo, "report": at.report},
        cancels={"run": at.cancel},
        book=book,
        next_body=next_body,
        choose=choose,
        rails={"run": _rail} if own else {},
        rail_names=frozenset(own),
        second_person=frozenset({SKIP}),
        retry=retry,
        call_timeout_s=call_timeout_s,
    )


class Actions:
    """What is done in each call state."""

    def __init__(self, store: Store, own: Mapping[str, OwnStep], alert: Alert) -> None:
        self._store = store
        self._own = own
        self._alert = alert

    async def run(self, item: FlowRecord[Sequence]) -> Answer:
        """The step whose turn it is."""
        step = item.body.steps[item.body.index]
        if isinstance(step, EntryStep):
            return SUCCESS  # there is no call: `book` is the step, and the ledger's refusal its no
        return await self._ask(item, step, item.body.index, "do")

    async def undo(self, item: FlowRecord[Sequence]) -> Answer:
        """The last step that is done and not undone."""
        place = item.body.index - 1
        step = item.body.steps[place]
        if isinstance(step, EntryStep):
            return await self._reversal(item, place)
        return await self._ask(item, step, place, "undo")

    async def report(self, item: FlowRecord[Sequence]) -> Answer:
        """A compensation was refused: into the operators' queue, before it waits there."""
        stuck = item.body.stuck
        assert stuck is not None  # written by the arrow that led here
        what = f"step {stuck.step} ({item.body.steps[stuck.step]}) can't be undone"
        message = f"{SCOPE} {item.id}: {what}: {stuck.why}; say RETRY, or two of you SKIP"
        await self._alert(item.record, COMPENSATION_ALERT, "critical", message)
        return SUCCESS

    async def cancel(self, item: FlowRecord[Sequence]) -> Answer:
        """Two operators say that the step failed: make sure that it never happens (T34)."""
        step = item.body.steps[item.body.index]
        if isinstance(step, EntryStep):
            # It happens with the arrow forward or not at all; this arrow leads back, and only one of them is taken.
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code=CANCELLED)
        cancel = getattr(self._own.get(step.name), "cancel", None)
        if cancel is None:
            return Answer(outcome=Outcome.UNKNOWN, message=f"{step} can't promise that it never happened")
        return _told(await cancel(_call(item, step, item.body.index, "do")))

    async def _reversal(self, item: FlowRecord[Sequence], place: int) -> Answer:
        """What to reverse, and with which postings; `book` does it."""
        key = (SCOPE, entry_key(item.id, place))
        read = self._store.read
        done = (await read.envelopes.existing([key])).get(key)
        if done is None:  # can't be: the entry came with the arrow that counted the step as done
            return Answer(outcome=Outcome.UNKNOWN, message=f"step {place} is done, but there is no entry {key[1]}")
        again = (REVERSE, str(done.seq))
        by_hand = (await read.envelopes.existing([again])).get(again)
        if by_hand is not None:
            return Answer(outcome=Outcome.SUCCESS, evidence={"envelope": done.seq, "reversed_by": by_hand.seq})
        created = await read.postings.of_envelopes(done.seq, done.seq)
        live = [stored.posting.id for stored in created if stored.state is PostingState.LIVE]
        evidence = {REVERSES: done.seq, CONSUMES: live}
        return Answer(outcome=Outcome.SUCCESS, evidence=evidence)

    async def _ask(self, item: FlowRecord[Sequence], step: OwnCall, place: int, op: str) -> Answer:
        """Call the caller's own step. If it is not here any more: wait for it, and raise an alert at once."""
        found = self._own.get(step.name)
        if found is not None:
            ask = found.do if op == "do" else found.undo
            return _told(await ask(_call(item, step, place, op)))
        message = f"{SCOPE} {item.id} needs own step {step.name!r}, which this program does not have; it waits for it"
        await self._alert(item.record, MISSING_STEP, "critical", message)
        return Answer(outcome=Outcome.UNKNOWN, code=UNKNOWN_STEP, message=message)


# --- pure ----------------------------------------------------------------------------------------------------------


def book(item: FlowRecord[Sequence], _event: str, answer: Answer) -> Booking:
    """The step itself, or its reversal, in the transaction of its transition. Pure."""
    body, state = item.body, item.record.state
    if answer.outcome is not Outcome.SUCCESS:
        return Booking()
    if state == RUNNING:
        step = body.steps[body.index]
        if isinstance(step, EntryStep):
            leg = Leg(step.source, step.target, step.asset, int(step.amount))
            key = entry_key(item.id, body.index)
            note = _note(item.id, body.index)
            return Booking((Intent(scope=SCOPE, key=key, legs=(leg,), book=step.book, metadata=note),), refused=NO)
    if state == COMPENSATING and REVERSES in answer.evidence:
        step = body.steps[body.index - 1]
        if isinstance(step, EntryStep):
            return _reverse(item, step, answer)
    return Booking()


def _reverse(item: FlowRecord[Sequence], step: EntryStep, answer: Answer) -> Booking:
    """By the very postings that the step made where they are live, else by value (L22)."""
    seq: int = answer.evidence[REVERSES]
    intent = Intent(
        scope=REVERSE,
        key=str(seq),
        legs=(Leg(step.target, step.source, step.asset, int(step.amount)),),
        book=step.book,
        metadata=_note(item.id, item.body.index - 1),
        kind=EntryKind.RETURN,
        reverses=seq,
        consume=tuple(answer.evidence[CONSUMES]),
    )
    return Booking((intent,), refused=NO_OR_AGAIN)


def next_body(item: FlowRecord[Sequence], event: str, answer: Answer) -> Sequence | None:
    """Where the index is from an arrow on, and what is kept of what was said. Pure."""
    body, state = item.body, item.record.state
    index = body.index
    replace = msgspec.structs.replace
    if (state, event) == (RUNNING, Outcome.SUCCESS):
        return replace(body, index=index + 1, results=(*body.results, kept(answer.evidence)))
    if (state, event) == (RUNNING, Outcome.EXPLICIT_FAIL):
        return replace(body, refused=Refused(step=index, why=answer.error))
    if (state, event) == (COMPENSATING, Outcome.SUCCESS):
        return replace(body, index=index - 1, stuck=None)
    if (state, event) == (COMPENSATING, Outcome.EXPLICIT_FAIL):
        return replace(body, stuck=Refused(step=index - 1, why=answer.error))
    if (state, event) == (COMPENSATION_FAILED, SKIP):
        return replace(body, index=index - 1, stuck=None, skipped=(*body.skipped, index - 1))
    return None


def choose(item: FlowRecord[Sequence]) -> str:
    """On, back, or to an end. Pure."""
    body = item.body
    if item.record.state == STEP_DONE:
        return NEXT if body.index < len(body.steps) else END
    if body.index:
        return UNDO
    return UNDONE_IN_PART if body.skipped else UNDONE


def kept(evidence: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an answer in the body: all of it, if it is short. The history has it in any case."""
    text = Answer(outcome=Outcome.SUCCESS, evidence=evidence).as_json()
    if len(text) > RESULT_LENGTH_MAX:
        return {"cut": text[:RESULT_LENGTH_MAX]}
    found: dict[str, Any] = msgspec.json.decode(text)
    return {name: value for name, value in found.items() if name in evidence or name == "cut"}


def _rail(item: FlowRecord[Sequence]) -> str:
    """Own steps can be paused by name; the ledger can't."""
    step = item.body.steps[item.body.index]
    return step.name if isinstance(step, OwnCall) else ""


def _note(id: str, step: int) -> str:
    return msgspec.json.encode({"sequence": id, "step": step}).decode()


def _call(item: FlowRecord[Sequence], step: OwnCall, place: int, op: str) -> Call:
    key = entry_key(item.id, place)
    return Call(
        key=f"{key}:{op}",
        undoes="" if op == "do" else f"{key}:do",
        sequence=item.id,
        step=place,
        arguments=step.arguments,
        results=item.body.results,
    )


def _told(answer: object) -> Answer:
    """What an own step said, without what only a flow may say: which arrow, which body, which posting."""
    if not isinstance(answer, Answer):
        raise TypeError(f"{answer!r} is not an Answer")
    return msgspec.structs.replace(answer, event="", body=None, in_flight_posting=None)


def _check(own: Mapping[str, OwnStep]) -> None:
    for name, step in own.items():
        check_key(name)
        for what in ("do", "undo"):
            if not callable(getattr(step, what, None)):
                raise FlowRefused(SCOPE, f"own step {name!r} has no `{what}`")
