"""The bytes of a payout: build them, have them signed, give them to the nodes. The same for a replacement.

Where the process dies, and which line guards the money:

- in `build`: the bytes are a function of the record and its nonce; made again, they are the same.
- in `sign`: the unsigned bytes are on disk. The signer answers the same question with the same bytes (W30).
- in `send`: the signed bytes and their hash are on disk. Sending them again is harmless (W1).
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.machine import CONFIRMING, FILL, MACHINE, REPLACING
from bursar.flows.payouts.outside import (
    OUTAGE_S,
    SIGNER_PEER,
    UNCHECKED,
    Outside,
    claim_hash,
    order_of,
    put_attempt,
    sign_request,
    unlike,
    waits,
)
from bursar.flows.payouts.payout import NONCE, Attempt, Payout, Replacement
from bursar.flows.payouts.wallets import nonce_key
from bursar.model.flow_rows import number_of
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.rails.chain import NodesUnavailable, Shape, Slot
from bursar.signer.protocol import NOTHING_TO_CANCEL, Never, Signature, SignerRefused, SignerUnavailable, SignRequest


class Signing:
    """The actions of `processing`, `signing` and `sending`, and those of replacements."""

    def __init__(self, out: Outside) -> None:
        self.out = out

    async def build(self, item: FlowRecord[Payout]) -> Answer:
        """The exact bytes of the attempt, stored before the signer is asked (W30). The same again after a crash."""
        body = item.body
        chain = self.out.chains.get(body.payment.chain)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.payment.chain} are configured here")
        _, row, attempt = await self.out.attempt(item)
        if row is None or body.fee is None:
            return Answer(outcome=Outcome.UNKNOWN, message=f"attempt {body.current} has no row")
        slot, shape, number = attempt.slot, attempt.shape, body.current
        taken = await self.out.store.read.flow_rows.of_record(item.record.number, NONCE.name)
        own = nonce_key(body.payment.chain, body.sender)  # an attempt that died may have been another wallet's
        if nonces := [number_of(row) for row in taken if row.key.rpartition("/")[0] == own]:
            slot = Slot(nonce=max(nonces))
        # The nonce is used up without a payment. Without one there is nothing to use up: the signer is asked never to
        # sign these bytes (`sign`).
        if slot.nonce is not None and (body.cancel or attempt.outcome):
            shape = Shape.CANCEL
        if attempt.outcome:
            number = body.attempts + 1
        version = row.version if number == body.current else 0
        fee = body.fee
        unsigned = chain.codec.build(chain.network, body.sender, order_of(item.id, body), shape, slot, fee)
        attempt = msgspec.structs.replace(
            attempt,
            number=number,
            shape=shape,
            nonce=slot.nonce,
            expires=slot.expires,
            reference=slot.reference,
            unsigned=unsigned.hex(),
            outcome="",
        )
        rows = (put_attempt(item.id, attempt, version),)
        after = msgspec.structs.replace(body, current=number, attempts=max(number, body.attempts), shape=shape)
        return Answer(
            outcome=Outcome.SUCCESS, body=after, rows=rows, decision=True, evidence={"attempt": number, "shape": shape}
        )

    async def sign(self, item: FlowRecord[Payout]) -> Answer:
        """Ask the signer for exactly the bytes that are stored. Its answer is definite, and stored with its bytes."""
        body = item.body
        chain, row, attempt = await self.out.attempt(item)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.payment.chain} are configured here")
        if row is None or not attempt.unsigned:
            return Answer(outcome=Outcome.UNKNOWN, message=f"attempt {body.current} has no bytes")
        request = sign_request(item.id, body.sender, body.payment, body.authorization, attempt)
        wants_cancel = bool(body.cancel) and attempt.shape is Shape.PAY
        said = await self._signed(item, request, wants_cancel=wants_cancel)
        if isinstance(said, Answer):
            return said
        peer = ((SIGNER_PEER + self.out.signer.name, said.sequence),)
        if isinstance(said, Never):
            dead = msgspec.structs.replace(attempt, outcome="never signed", sequence=said.sequence)
            after = msgspec.structs.replace(body, cancel=body.cancel or "the signer refuses it")
            return Answer(
                outcome=Outcome.EXPLICIT_FAIL,
                event=FILL if attempt.nonce is not None else "",
                code="NEVER_SIGNED",
                message=f"attempt {attempt.number} was never signed, and never will be",
                body=after,
                rows=(put_attempt(item.id, dead, row.version),),
                high_water=peer,
            )
        if why := unlike(chain, request, said):
            return Answer(outcome=Outcome.UNKNOWN, message=f"the signer answered with other bytes: {why}")
        done = msgspec.structs.replace(attempt, raw=said.raw.hex(), hash=said.hash, sequence=said.sequence)
        after = msgspec.structs.replace(body, tries=(*body.tries, done.attempted()))
        rows = (put_attempt(item.id, done, row.version), claim_hash(item.id, body.payment.chain, done))
        return Answer(outcome=Outcome.SUCCESS, body=after, rows=rows, evidence={"hash": said.hash}, high_water=peer)

    async def _signed(
        self, item: FlowRecord[Any], request: SignRequest, *, wants_cancel: bool
    ) -> Signature | Never | Answer:
        """What the signer says of an attempt; a tombstone where it is to be cancelled or will not be signed."""
        if not self.out.reconciled:  # the mark of this answer would hide what the log has before it (W33)
            return waits(item, "SIGNER_UNCHECKED", UNCHECKED, OUTAGE_S)
        try:
            if wants_cancel:
                return await self.out.signer.cancel(request.payout, request.attempt)
            return await self.out.signer.sign(request)
        except SignerRefused as refused:
            # It cancels only what it knows. Once it knows a tombstone, the attempt that follows may cancel.
            if not refused.denied and refused.reason != NOTHING_TO_CANCEL:
                return waits(item, refused.reason, refused.why, OUTAGE_S)
        except SignerUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        try:
            return await self.out.signer.cancel(request.payout, request.attempt)
        except (SignerRefused, SignerUnavailable) as away:
            return waits(item, away.code, str(away), OUTAGE_S)

    async def send(self, item: FlowRecord[Payout]) -> Answer:
        """Give the signed bytes to the nodes. No answer of theirs is proof of anything: the fate is asked next."""
        body = item.body
        chain, row, attempt = await self.out.attempt(item)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.payment.chain} are configured here")
        if row is None or not attempt.raw:
            return Answer(outcome=Outcome.UNKNOWN, message=f"attempt {body.current} has no signed bytes")
        after = msgspec.structs.replace(body, first_sent_us=self.out.ports.now_us())
        if body.cancel and attempt.shape is Shape.PAY:  # signed, and no node has it: a cancellation takes its nonce
            return Answer(outcome=Outcome.SUCCESS, body=after, decision=True, evidence={"not_sent": body.cancel})
        try:
            sent = await chain.send(bytes.fromhex(attempt.raw))
        except NodesUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        return Answer(outcome=Outcome.SUCCESS, body=after, evidence={"hash": attempt.hash, "nodes": sent.answers})

    async def sign_replacement(self, item: FlowRecord[Replacement]) -> Answer:
        """Have a replacement signed, unless its payout has ended or was cancelled meanwhile."""
        body, attempt = item.body, item.body.attempt
        chain = self.out.chains.get(body.payment.chain)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.payment.chain} are configured here")
        payout = await self.out.store.read.records.get(MACHINE.name, body.payout)
        moot = payout is None or payout.state not in (CONFIRMING, REPLACING) or _is_unwanted(payout, attempt)
        request = sign_request(body.payout, body.sender, body.payment, body.authorization, attempt)
        said = await self._signed(item, request, wants_cancel=moot)
        if isinstance(said, Answer):
            return said
        peer = ((SIGNER_PEER + self.out.signer.name, said.sequence),)
        if isinstance(said, Never):
            never = msgspec.structs.replace(attempt, outcome="never signed", sequence=said.sequence)
            after = msgspec.structs.replace(body, attempt=never)
            kept = (put_attempt(body.payout, never, 0),)
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code="NEVER_SIGNED", body=after, rows=kept, high_water=peer)
        if why := unlike(chain, request, said):
            return Answer(outcome=Outcome.UNKNOWN, message=f"the signer answered with other bytes: {why}")
        done = msgspec.structs.replace(attempt, raw=said.raw.hex(), hash=said.hash, sequence=said.sequence)
        after = msgspec.structs.replace(body, attempt=done)
        rows = (put_attempt(body.payout, done, 0), claim_hash(body.payout, body.payment.chain, done))
        return Answer(outcome=Outcome.SUCCESS, body=after, rows=rows, evidence={"hash": said.hash}, high_water=peer)

    async def send_replacement(self, item: FlowRecord[Replacement]) -> Answer:
        """Give it to the nodes."""
        chain = self.out.chains.get(item.body.payment.chain)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {item.body.payment.chain} are configured here")
        try:
            sent = await chain.send(bytes.fromhex(item.body.attempt.raw))
        except NodesUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        return Answer(outcome=Outcome.SUCCESS, evidence={"hash": item.body.attempt.hash, "nodes": sent.answers})


def _is_unwanted(payout: Record, attempt: Attempt) -> bool:
    """Whether it would pay what was cancelled since. It makes room for the cancellation, unless it is signed by now."""
    return attempt.shape is Shape.PAY and bool(msgspec.json.decode(payout.body, type=Payout).cancel)
