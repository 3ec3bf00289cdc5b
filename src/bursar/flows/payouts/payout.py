"""A payout as its record has it, its attempts as their rows have them, and its entries. Pure.

The body has what decides: the payment, the wallet, and for each attempt its hash and slot. The bytes are in rows of
the kind `attempt`, one per attempt, which is what the specification's views and an operator read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from bursar.engine import Answer, Booking, Dispute, FlowRecord, NewRecord, RecordSignal, holds
from bursar.engine.holds import Held
from bursar.flows.payouts.machine import (
    ADOPTED,
    CONFIRMED,
    CONFIRMING,
    DISPUTED,
    FAILED,
    MACHINE,
    MISMATCH,
    PENDING,
    REPLACE,
    SIGNING,
)
from bursar.model.authorizations import Approval, Authorization, Payment
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.flow_rows import Claim, Form, GiveBack, Next, Put, Release, RowKind, RowOperation
from bursar.model.outcome import Outcome
from bursar.model.proof import dead
from bursar.model.records import Priority
from bursar.rails.chain import Fee, Shape, Slot, Try

SCOPE: Final = "payouts"
PREFIX: Final = "po-"
GAS: Final = "expense:gas"
FEES: Final = "income:payout-fees"
SUSPENSE: Final = "suspense:payouts"
WALLETS: Final = "external:wallet:"
ATTEMPTS_MAX: Final = 3  # that died, before the payout fails
REFUSALS_MAX: Final = 5  # of this very payment, before anything was signed (the specification's max_retries)
BACK_OFF_S: Final = 30.0
BACK_OFF_MAX_S: Final = 960.0

# What a payout tells the record that has ordered it (`Payout.parent`), in the transaction in which it ends.
PAYOUT_PAID: Final = "PAYOUT_PAID"
PAYOUT_FAILED: Final = "PAYOUT_FAILED"
PAYOUT_CANCELLED: Final = "PAYOUT_CANCELLED"
PAYOUT_RETURNED: Final = "PAYOUT_RETURNED"  # nothing of it is alive, and what it was approved for holds no more (W37)
PAYOUT_ADOPTED: Final = "PAYOUT_ADOPTED"  # it was put back from the signer's log (W33)
PARENT_EVENTS: Final = (PAYOUT_PAID, PAYOUT_FAILED, PAYOUT_CANCELLED, PAYOUT_RETURNED, PAYOUT_ADOPTED)
RETURNED_CODE: Final = "NO_LONGER_APPROVED"

# Rows of the flow's own.
SOURCE: Final = RowKind("source", Form.UNIQUE, releasable=True)  # one payout that has not failed per reason (W3)
NONCE: Final = RowKind("nonce", Form.SEQUENCE)  # "chain/address"
HASH: Final = RowKind("hash", Form.UNIQUE)  # "chain/hash" → who signed it and why; watched for ever (W41)
ATTEMPT: Final = RowKind("attempt", Form.VALUE)  # "payout/number"
RESERVED: Final = RowKind("reserved", Form.AMOUNT)  # "wallet/asset": what is not final yet, gas included (W43)
UNCONFIRMED: Final = RowKind("unconfirmed", Form.AMOUNT)  # "wallet": transactions that are not final yet
SPENT: Final = RowKind("spent", Form.VALUE)  # of the flow `chains`: "chain/address/nonce" → what took it
ROW_KINDS: Final = (SOURCE, NONCE, HASH, ATTEMPT, RESERVED, UNCONFIRMED)
REPLACEMENT_ROW_KINDS: Final = (HASH, ATTEMPT)


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt: the row's body. Bytes are hexadecimal."""

    number: int
    shape: Shape
    wallet: str
    nonce: int | None = None
    expires: int | None = None
    reference: str = ""
    fee: Fee
    made_us: int = 0
    unsigned: str = ""
    raw: str = ""
    hash: str = ""
    sequence: int = 0  # of the signer's log
    outcome: str = ""  # "", final, dead, replaced, mismatch, never signed

    @property
    def slot(self) -> Slot:
        """What makes it happen at most once."""
        return Slot(nonce=self.nonce, expires=self.expires, reference=self.reference)

    def attempted(self) -> Try:
        """As its chain is asked about it."""
        return Try(hash=self.hash, shape=self.shape, slot=self.slot)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the chain said in the end."""

    hash: str = ""
    block: int = 0
    block_hash: str = ""
    gas_used: int = 0
    gas_price: str = "0"
    fee_paid: str = "0"  # in the chain's own coin; text, exact


class Imported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What another system has sent for a payout, or may have sent (W38)."""

    hash: str = ""  # "": none is known
    slot: Slot | None = None  # None: no node knows such a transaction, so two people say what became of it
    fee: Fee = Fee(gas_limit=0, price=0)
    takes_nonce: bool = False  # whether its nonce is above all that are known here


class Payout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a payout's record."""

    payment: Payment
    authorization: Authorization
    native: str  # asset that fees are paid in
    priority: Priority = Priority.NORMAL
    parent: str = ""  # "flow/id" of the record that holds the money and settles it; "": the payout holds it itself
    imported: Imported | None = None  # another system has sent it: it is watched, never sent and never dead by itself
    adopted: bool = False  # it was put back from the signer's log, and its parent is told
    detached: bool = False  # its parent has another payout: this one is never paid, and its end is not told
    requested_wallet: str = ""  # a sweep or a refill names its wallet; else it is chosen
    wallet: str = ""
    sender: str = ""  # address of the wallet
    fee: Fee | None = None  # of the attempt that is being made
    attempts: int = 0  # made so far, replacements included
    current: int = 0  # the attempt that is being made or was made last by this record
    shape: Shape = Shape.PAY  # of that
    tries: tuple[Try, ...] = ()  # signed by this record, and not dead
    replacements: tuple[int, ...] = ()  # numbers of the attempts made by records of their own, for the same slot
    elsewhere: int = 0  # the last attempt in another slot that the signer has, and this database has forgotten (W33)
    dead: int = 0  # attempts that died
    refusals: int = 0
    bumps: int = 0  # asked for by operators
    bumped: int = 0  # of those, made
    cancel: str = ""  # why it is to be cancelled; "": it is not
    held: str = ""  # why it waits; "": it does not
    reserved: bool = False  # whether it has reservations of its wallet
    claimed: str = ""  # instead of the payment's source: a restored one, whose source another payout has by now
    booked_from: str = ""  # instead of the payment's account: a restored one, whose account has less than it needs
    first_sent_us: int = 0
    result: Result = Result()
    gas_booked: int = 0  # attempts whose fee is booked: each key once
    contradicted: bool = False  # what the chain has said since its end is the opposite of its end, and is booked

    @property
    def is_elsewhere(self) -> bool:
        """Whether the signer has signed for it in another slot: dead here, it is adopted, and nothing is given back."""
        return self.elsewhere > self.attempts

    @property
    def order_amount(self) -> int:
        """In the chain's smallest units."""
        return int(self.payment.amount_raw)


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a replacement's record: the same slot, a higher fee, perhaps another shape."""

    payout: str
    payment: Payment
    authorization: Authorization
    sender: str
    attempt: Attempt


def attempt_key(payout: str, number: int) -> str:
    """The key of an attempt's row."""
    return f"{payout}/{number:04}"


def replacement_id(payout: str, number: int) -> str:
    """The id of the record that makes an attempt for a slot that was used before."""
    return f"{payout}-r{number}"


def wallet_account(chain: str, wallet: str) -> str:
    """The wallet's own external account: minus its balance is what the ledger says the wallet has (I9)."""
    return f"{WALLETS}{chain}:{wallet}"


def rank(payout: Payout) -> Priority:
    """Its priority, for the engine. Pure."""
    return payout.priority


def judged(state: str, body: Payout, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Attempts, each with what became of it: the record says that, and their rows are not written once more. Pure."""
    result = next((one for one in attempts if one.hash and one.hash == body.result.hash), None)
    live = {one.hash for one in body.tries}
    return tuple(
        msgspec.structs.replace(
            one, outcome=_became(state, one, result, one.hash in live or one.number in body.replacements)
        )
        if one.hash and not one.outcome
        else one
        for one in attempts
    )


def _became(state: str, one: Attempt, result: Attempt | None, live: bool) -> str:
    """`result`: the attempt that the chain has named last. `live`: the record has this one among those that may pay."""
    if one is result and state in (CONFIRMED, DISPUTED):
        return "final" if state == CONFIRMED else "mismatch"
    if one is result and state == FAILED and one.shape is Shape.CANCEL:
        return "final"
    if state in (CONFIRMED, DISPUTED) and live:
        return "replaced" if result is not None else ""  # "": two people have decided, and the chain has not said
    return "" if live and state != FAILED else "dead"


# --- entries ---------------------------------------------------------------------------------------------------------


def held(item: FlowRecord[Payout]) -> Held:
    """What is set aside for it: the amount and our fee."""
    payment, account = item.body.payment, item.body.booked_from or item.body.payment.account
    return Held(account=account, asset=payment.asset, amount=int(payment.amount) + int(payment.fee))


def book_start(item: FlowRecord[Payout]) -> Booking:
    """Set the money aside, unless its parent has, and claim the reason: a second payout for it is refused while this
    one has not failed."""
    rows: tuple[RowOperation, ...] = (
        Claim(SOURCE, item.body.claimed or item.body.payment.source, {"payout": item.id}),
        *(() if item.body.imported is None else _imported_rows(item, item.body.imported)),
    )
    if item.body.parent:
        return Booking(rows=rows, signals=(_to_parent(item, PAYOUT_ADOPTED, {}),) if item.body.adopted else ())
    return msgspec.structs.replace(holds.authorize(item, held(item)), rows=rows)


def _imported_rows(item: FlowRecord[Payout], sent: Imported) -> tuple[RowOperation, ...]:
    """The hash, the nonce and the attempt of what another system has sent: they are this payout's from the start."""
    body, rows = item.body, list[RowOperation]()
    if sent.hash:
        said = {"payout": item.id, "attempt": 1}
        rows.append(Claim(HASH, f"{body.payment.chain}/{sent.hash}", said))
    if sent.slot is not None:
        attempt = Attempt(
            number=1,
            shape=Shape.PAY,
            wallet=body.wallet,
            nonce=sent.slot.nonce,
            expires=sent.slot.expires,
            reference=sent.slot.reference,
            fee=sent.fee,
            hash=sent.hash,
        )
        rows.append(Put(ATTEMPT, attempt_key(item.id, 1), 0, msgspec.to_builtins(attempt)))
        if sent.takes_nonce and sent.slot.nonce is not None:
            key = f"{body.payment.chain}/{body.sender}"
            rows.append(Next(NONCE, key, sent.slot.nonce, {"payout": item.id}, exact=True))
    return tuple(rows)


def taken_over(body: Payout, sent: Imported) -> Answer:
    """The first step of what was imported: it is watched if its transaction is known; if not, people decide. Pure."""
    if sent.slot is not None:
        return Answer(outcome=Outcome.SUCCESS, event=ADOPTED, decision=True, evidence={"hash": sent.hash})
    why = "another system may have sent it, and no node knows its transaction: was it paid?"
    after = msgspec.structs.replace(body, result=Result(hash=sent.hash))
    outcome = Outcome.EXPLICIT_FAIL
    return Answer(outcome=outcome, event=MISMATCH, code="NO_TRANSACTION", message=why, body=after, decision=True)


def book(item: FlowRecord[Payout], event: str, answer: Answer) -> Booking:
    """What accompanies an arrow: entries, and the rows that are taken or given back with it. Pure."""
    state, body = item.record.state, item.body
    after = answer.body if isinstance(answer.body, Payout) else body
    target = MACHINE.next(state, event).name
    if state == PENDING and target != FAILED:
        # Another payout was faster to reserve: not now. It is chosen again, perhaps another wallet.
        return Booking(refused={"BOUND_EXCEEDED": Outcome.PENDING, "ROW_TAKEN": Outcome.PENDING})
    if event == REPLACE:
        return Booking(starts=(_replacement(item, after, answer),))
    if target not in (CONFIRMED, FAILED) and state not in (CONFIRMING, DISPUTED):
        return Booking()
    gas = _gas(item, after, answer) if state == CONFIRMING else ()
    rows = _given_back(body) if state in (CONFIRMING, DISPUTED, SIGNING) and target != DISPUTED else ()
    if target == FAILED:
        rows = (*rows, Release(SOURCE, body.claimed or body.payment.source))
    if body.parent and target in (CONFIRMED, FAILED):
        booking = Booking(signals=() if body.detached else (_ended(item, target, after, answer),))
    elif target == CONFIRMED:
        paid = [(wallet_account(body.payment.chain, after.wallet), int(body.payment.amount))]
        if int(body.payment.fee):
            paid.append((FEES, int(body.payment.fee)))
        booking = holds.confirm(item, held(item), *paid)
    elif target == FAILED:
        booking = holds.void(item, held(item))
    else:
        booking = Booking()
    return msgspec.structs.replace(booking, intents=(*booking.intents, *gas), rows=rows)


def _ended(item: FlowRecord[Payout], target: str, after: Payout, answer: Answer) -> RecordSignal:
    """What its parent settles its hold by: that it was paid, from which wallet, or that it never will be."""
    if target == CONFIRMED:
        wallet = wallet_account(item.body.payment.chain, after.wallet)
        hash_ = after.result.hash or (after.tries[-1].hash if after.tries else "")  # people may have decided
        return _to_parent(item, PAYOUT_PAID, {"hash": hash_, "account": wallet})
    event = PAYOUT_CANCELLED if item.body.cancel else PAYOUT_FAILED
    event = PAYOUT_RETURNED if answer.code == RETURNED_CODE else event
    why = {"code": answer.code, "why": item.body.cancel or answer.message}
    return _to_parent(item, event, why | dead(payout=item.id, **why))


def _to_parent(item: FlowRecord[Payout], event: str, evidence: dict[str, Any]) -> RecordSignal:
    flow, _, id_ = item.body.parent.partition("/")
    return RecordSignal(flow=flow, id=id_, event=event, evidence={"payout": item.id, **evidence})


def _replacement(item: FlowRecord[Payout], after: Payout, answer: Answer) -> NewRecord:
    attempt = msgspec.convert(answer.evidence["attempt"], Attempt)
    body = Replacement(
        payout=item.id,
        payment=after.payment,
        authorization=after.authorization,
        sender=after.sender,
        attempt=attempt,
    )
    return NewRecord(
        flow="replacements", id=replacement_id(item.id, attempt.number), body=body, owner=item.record.owner
    )


def _given_back(body: Payout) -> tuple[RowOperation, ...]:
    """The reservations of an attempt that has ended, whichever way."""
    if not body.reserved:
        return ()
    keys = {f"{body.wallet}/{body.payment.asset}", f"{body.wallet}/{body.native}"}
    return (*(GiveBack(RESERVED, key) for key in sorted(keys)), GiveBack(UNCONFIRMED, body.wallet))


def _gas(item: FlowRecord[Payout], after: Payout, answer: Answer) -> tuple[Intent, ...]:
    """What the chain took for the transaction that ended the slot: our cost, never the user's (W29)."""
    paid = int(answer.evidence.get("fee_paid", "0"))
    if not paid:
        return ()
    leg = Leg(GAS, wallet_account(item.body.payment.chain, item.body.wallet), item.body.native, paid)
    key = f"{item.id}:gas:{after.gas_booked}"
    return (Intent(scope=SCOPE, key=key, legs=(leg,), kind=EntryKind.RETURN, outside=True),)


def dispute(called: FlowRecord[Payout], now: FlowRecord[Payout], answer: Answer) -> Dispute:
    """What was decided is contradicted: the amount goes to suspense, where operators see it (T34). Pure.

    Before its end nothing of it is booked: that is done once, when it ends. A contradiction that is taken back, by a
    second deep reorganisation, is booked back.
    """
    if now.record.state not in (CONFIRMED, FAILED):
        return Dispute()
    wallet = wallet_account(now.body.payment.chain, now.body.wallet)
    paid = answer.outcome is Outcome.SUCCESS
    if not now.body.wallet or paid is ((now.record.state == CONFIRMED) is not now.body.contradicted):
        return Dispute()
    source, target = (SUSPENSE, wallet) if paid else (wallet, SUSPENSE)
    leg = Leg(source, target, now.body.payment.asset, int(now.body.payment.amount))
    key = f"{now.id}:late:{now.record.version}"
    late = Intent(scope=SCOPE, key=key, legs=(leg,), kind=EntryKind.RETURN, outside=True)
    facts = learned(called, now, answer)
    known = facts.body if isinstance(facts.body, Payout) else now.body
    after = msgspec.structs.replace(known, contradicted=not now.body.contradicted)
    return Dispute((late, *facts.intents), after)


def learned(_called: FlowRecord[Payout], now: FlowRecord[Payout], answer: Answer) -> Dispute:
    """Which transaction it was and what it cost, if people decided before the chain could say so. Pure."""
    said = answer.body
    if now.record.state not in (CONFIRMED, FAILED):
        return Dispute()  # it is asked again, and books it then
    if not isinstance(said, Payout) or not said.result.hash or now.body.result.hash:
        return Dispute()
    after = msgspec.structs.replace(now.body, result=said.result, gas_booked=now.body.gas_booked + 1)
    return Dispute(_gas(now, after, answer), after)


# --- signals ---------------------------------------------------------------------------------------------------------


def on_signal(item: FlowRecord[Payout], event: str, evidence: dict[str, Any]) -> Payout | None:
    """The body once an operator, or an approver, has spoken. Pure."""
    body = item.body
    reason = str(evidence.get("reason", "")) or "no reason given"
    match event:
        case "BUMP":
            return msgspec.structs.replace(body, bumps=body.bumps + 1)
        case "CANCEL":
            return msgspec.structs.replace(body, cancel=body.cancel or reason)
        case "KNOWN":  # the signer's log has an attempt that this database has forgotten
            number = int(evidence["attempt"])
            if evidence.get("elsewhere"):
                return msgspec.structs.replace(body, elsewhere=max(body.elsewhere, number))
            if number <= body.attempts:
                return None  # it is known by now
            numbers = (*body.replacements, number)
            return msgspec.structs.replace(body, replacements=numbers, attempts=max(body.attempts, numbers[-1]))
        case "DETACH":
            return msgspec.structs.replace(body, detached=True)
        case "HOLD":
            return msgspec.structs.replace(body, held=reason)
        case "RELEASE":
            return msgspec.structs.replace(body, held="")
        case "APPROVE":
            given = msgspec.convert(evidence["approval"], Approval)
            others = tuple(a for a in body.authorization.approvals if a.approver != given.approver)
            approved = msgspec.structs.replace(body.authorization, approvals=(*others, given))
            return msgspec.structs.replace(body, authorization=approved)
        case _:
            return None
