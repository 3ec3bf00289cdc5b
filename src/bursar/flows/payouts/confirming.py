"""The last step of a payout: what became of its transactions? Until one is final, send them again, or replace them.

Nothing here signs, so nothing that stops signatures stops confirmation: a replacement is a record of its own. Only two
fates end a payout by themselves: final and exactly what was ordered, or dead with its proof. A final transaction that
moved something else waits for two people (W36).
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.documents import ASSET, CHAIN, asset_name
from bursar.flows.payouts.machine import AGAIN, CHAINS, MACHINE, MISMATCH, REPLACE
from bursar.flows.payouts.outside import OUTAGE_S, Outside, order_of, read_attempt, waits
from bursar.flows.payouts.payout import ATTEMPT, ATTEMPTS_MAX, SPENT, Attempt, Payout, Result, attempt_key
from bursar.flows.payouts.twins import Twins
from bursar.flows.payouts.wallets import nonce_key
from bursar.model.outcome import Outcome
from bursar.rails.chain import (
    Chain,
    Confirmed,
    Dead,
    Fate,
    Mismatch,
    NodesUnavailable,
    Pending,
    Question,
    Shape,
    Unknown,
)

RESEND_S: Final = 60.0  # between two times that the same bytes are given to nodes that say they have them
SENT_MAX: Final = 100_000  # payouts whose last time is remembered here


class Confirming:
    """The action of `confirming`, and the query of what people have decided."""

    def __init__(self, out: Outside, twins: Twins) -> None:
        self.out = out
        self.twins = twins
        self._sent: dict[str, float] = {}  # when the bytes of a payout were given to the nodes once more

    async def confirm(self, item: FlowRecord[Payout]) -> Answer:
        """What became of it? Until it is final: send it again if no node has it, replace it if it is stuck."""
        body = item.body
        chain = self.out.chains.get(body.payment.chain)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.payment.chain} are configured here")
        more = [await self.out.replacement(item.id, number) for number in body.replacements]
        unsigned = any(a is None or not (a.hash or a.outcome) for a in more)
        try:
            fate = await self._fate(item, chain, more)
            return await self._settled(item, chain, fate, more, unsigned)
        except NodesUnavailable as away:  # when asked for the fate, or for a higher fee
            return waits(item, away.code, str(away), OUTAGE_S)

    async def query(self, item: FlowRecord[Payout]) -> Answer:
        """What became of it, asked when people decide, and after it: nothing of it is sent or replaced (T34).

        People have decided, so the word of one node is enough to give the transaction, or to contradict them.
        """
        answer = self._told(item, await self._asked(item, one_node_is_enough=True))
        if answer.outcome is Outcome.SUCCESS:
            await self.twins.paid_after_all(item)
        return answer

    async def give_up(self, item: FlowRecord[Payout]) -> Answer:
        """Two people say that it will never pay. They are believed only where the chain can't say more (W17)."""
        fate = await self._asked(item)
        if isinstance(fate, Unknown) and fate.person and item.body.is_elsewhere:
            return self._dead(item, Dead(proof={"declared_dead": fate.why}))
        if isinstance(fate, Unknown) and fate.person:
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code="DECLARED_DEAD", message=fate.why)
        return self._told(item, fate)

    async def _asked(self, item: FlowRecord[Payout], *, one_node_is_enough: bool = False) -> Fate:
        chain = self.out.chains.get(item.body.payment.chain)
        if chain is None:
            return Unknown(why="its chain can't be asked here")
        if not item.body.tries:  # it was dead once, and is asked about again
            more = await self._last_slot(item)
            return await self._fate(item, chain, more) if more else Unknown(why="nothing was ever signed for it")
        more = [await self.out.replacement(item.id, number) for number in item.body.replacements]
        return await self._fate(item, chain, more, one_node_is_enough=one_node_is_enough)

    async def _last_slot(self, item: FlowRecord[Payout]) -> list[Attempt | None]:
        """Every attempt that shares its slot with the last one that was signed."""
        found = []
        for number in range(1, item.body.attempts + 1):
            row = await self.out.store.read.flow_rows.get(MACHINE.name, ATTEMPT.name, attempt_key(item.id, number))
            attempt = read_attempt(row) if row is not None else await self.out.replacement(item.id, number)
            if attempt is not None and attempt.hash:
                found.append(attempt)
        return [one for one in found if one.slot == found[-1].slot]

    def _told(self, item: FlowRecord[Payout], fate: Fate) -> Answer:
        match fate:
            case Confirmed(by_event_alone=True) if fate.hash == item.body.result.hash:
                # Nodes have dropped the balances that contradicted the event. People have decided by those, and the
                # event alone contradicts nothing.
                return _undecided("only its event can be seen any more")
            case Confirmed():
                return confirmed(item.body, fate)
            case Dead():
                after = ended(item.body, fate)
                evidence = {"proof": fate.proof, "hash": fate.hash, "fee_paid": str(fate.fee_paid)}
                if item.body.is_elsewhere:
                    return self._dead(item, fate)
                return Answer(outcome=Outcome.EXPLICIT_FAIL, body=after, evidence=evidence)
            case Pending():
                return _undecided("there is nothing to decide: it may still be included")
            case Mismatch() | Unknown():
                return _undecided(f"there is nothing to decide yet ({type(fate).__name__}): {fate.why}")

    async def _fate(
        self, item: FlowRecord[Payout], chain: Chain, more: list[Attempt | None], *, one_node_is_enough: bool = False
    ) -> Fate:
        """Ask the chain. What took its nonce is looked up only if it was none of ours."""
        body = item.body
        document = await self.out.documents.current(ASSET, asset_name(body.payment.asset, body.payment.chain))
        tries = (*body.tries, *(attempt.attempted() for attempt in more if attempt is not None and attempt.hash))
        if not tries:
            return Unknown(why="nothing of it was signed")
        limit = 0 if document is None else int(document.body.one_node_limit)
        question = Question(
            sender=body.sender,
            order=order_of(item.id, body),
            tries=tries,
            one_node_is_enough=one_node_is_enough or body.order_amount <= limit,
        )
        fate = await chain.fate(question)
        nonce = tries[0].slot.nonce
        if not isinstance(fate, Unknown) or not fate.person or nonce is None:
            return fate
        key = f"{nonce_key(body.payment.chain, body.sender)}/{nonce}"
        seen = await self.out.store.read.flow_rows.get(CHAINS.name, SPENT.name, key)
        if seen is None:
            return fate
        consumer = str(msgspec.json.decode(seen.body)["hash"])
        return await chain.fate(msgspec.structs.replace(question, consumer=consumer))

    async def _settled(
        self,
        item: FlowRecord[Payout],
        chain: Chain,
        fate: Fate,
        more: list[Attempt | None],
        unsigned: bool,
    ) -> Answer:
        body = item.body
        match fate:
            case Confirmed():
                return confirmed(body, fate)
            case Mismatch():
                evidence = {"hash": fate.hash, "why": fate.why, "fee_paid": str(fate.fee_paid), "nodes": fate.evidence}
                after = ended(body, fate)
                return Answer(
                    outcome=Outcome.EXPLICIT_FAIL,
                    event=MISMATCH,
                    code="MISMATCH",
                    message=fate.why,
                    body=after,
                    evidence=evidence,
                )
            case Dead():
                return self._dead(item, fate)
            case Unknown(why=why, person=person):
                # Not at the first look: the watcher may be about to read the block that makes it clear.
                again = person and not unsigned and item.record.error.startswith(("UNCLEAR", "NEEDS_PEOPLE"))
                code = "NEEDS_PEOPLE" if again else "UNCLEAR"
                return await self.out.waits(item, code, why, OUTAGE_S)
            case Pending():
                return await self._unconfirmed(item, chain, fate, more, unsigned)

    def _dead(self, item: FlowRecord[Payout], fate: Dead) -> Answer:
        """Nothing of it can pay any more. Another attempt may, unless it was cancelled or died too often."""
        body = item.body
        after = msgspec.structs.replace(
            ended(body, fate), dead=body.dead + 1, tries=(), replacements=(), reserved=False, bumped=body.bumps
        )
        evidence = {"proof": {"kind": "dead", "facts": fate.proof}, "hash": fate.hash, "fee_paid": str(fate.fee_paid)}
        again = body.is_elsewhere or (not body.cancel and after.dead < ATTEMPTS_MAX)
        return Answer(
            outcome=Outcome.EXPLICIT_FAIL,
            event=AGAIN if again else "",
            code="CANCELLED" if body.cancel else "DEAD",
            message=body.cancel or "its transactions can't take effect any more",
            body=after,
            evidence=evidence,
        )

    async def _unconfirmed(
        self, item: FlowRecord[Payout], chain: Chain, fate: Pending, more: list[Attempt | None], unsigned: bool
    ) -> Answer:
        body = item.body
        network = await self.out.documents.current(CHAIN, body.payment.chain)
        poll_s = 15.0 if network is None else max(network.body.block_ms / 1000, 0.05)
        known = [attempt for attempt in more if attempt is not None]
        cancelling = any(attempt.shape is Shape.CANCEL and not attempt.outcome for attempt in known)
        cancelling = cancelling or body.shape is Shape.CANCEL
        high = ""
        age_s = (self.out.ports.now_us() - body.first_sent_us) / 1e6
        if fate.block is None and not unsigned and body.tries and body.tries[-1].slot.nonce is not None:
            wants_cancel = bool(body.cancel) and not cancelling
            tried = len(known) + 1
            slow = network is not None and 0 < network.body.bump_after_s * tried <= age_s and not fate.blocked
            if wants_cancel or body.bumps > body.bumped or slow:
                answer = await self._replace(item, chain, known, cancel=cancelling or wants_cancel)
                if answer is not None:
                    return answer
                wanted = "it can't be cancelled" if wants_cancel else "its fee can't be raised"
                high = f"{wanted}: that would be above the ceiling of its priority"
        unwanted = body.cancel and body.shape is Shape.PAY and not cancelling
        if fate.block is None and not unwanted and self._is_due(item.id, seen=fate.seen):
            await self._resend(item, chain, known)
        if high:
            return waits(item, "FEE_ABOVE_CEILING", high, max(poll_s, OUTAGE_S))
        why = "not final yet" if fate.block is not None else "not in a block yet"
        answer = Answer(outcome=Outcome.PENDING, message=why, retry_after_s=poll_s, decision=True)
        # No row for each look; one where another cause is told that has passed.
        return msgspec.structs.replace(answer, unchanged=item.record.error in ("", answer.error))

    def _is_due(self, id_: str, *, seen: bool) -> bool:
        """Whether it is sent again: at once if no node has it, else now and then, for a node may keep it to itself."""
        now_s = self.out.ports.monotonic()
        if len(self._sent) > SENT_MAX:
            self._sent.clear()
        last = self._sent.setdefault(id_, now_s)
        if seen and now_s - last < RESEND_S:
            return False
        self._sent[id_] = now_s
        return True

    async def _replace(
        self, item: FlowRecord[Payout], chain: Chain, known: list[Attempt], *, cancel: bool
    ) -> Answer | None:
        """Another transaction on the same nonce: a higher fee, or a cancellation. Its bytes are in the move."""
        body = item.body
        before = known[-1] if known else (await self.out.attempt(item))[2]
        fee = await chain.higher(before.fee, body.priority)
        if fee is None:
            return None  # above the ceiling: wait until the chain is cheaper, or the ceiling is raised
        shape, number = Shape.CANCEL if cancel else Shape.PAY, body.attempts + 1
        unsigned = chain.codec.build(chain.network, body.sender, order_of(item.id, body), shape, before.slot, fee)
        attempt = msgspec.structs.replace(
            before,
            number=number,
            shape=shape,
            fee=fee,
            made_us=self.out.ports.now_us(),
            unsigned=unsigned.hex(),
            raw="",
            hash="",
            sequence=0,
            outcome="",
        )
        after = msgspec.structs.replace(
            body, attempts=number, replacements=(*body.replacements, number), bumped=max(body.bumped, body.bumps)
        )
        evidence = {"attempt": msgspec.to_builtins(attempt)}
        return Answer(outcome=Outcome.SUCCESS, event=REPLACE, body=after, evidence=evidence, decision=True)

    async def _resend(self, item: FlowRecord[Payout], chain: Chain, known: list[Attempt]) -> None:
        """No node has it: the same bytes once more. A pause does not stop this: it was sent before (W15)."""
        latest = next((attempt for attempt in reversed(known) if attempt.raw), None)
        if latest is None:
            latest = (await self.out.attempt(item))[2]
        if latest.raw:
            await chain.send(bytes.fromhex(latest.raw))


def _undecided(why: str) -> Answer:
    """What people asked for can't be. The worker looks soon: however often they ask, that puts nothing off."""
    return Answer(outcome=Outcome.PENDING, message=why, retry_after_s=1.0)


def confirmed(body: Payout, fate: Confirmed) -> Answer:
    """It is final, and paid what was ordered."""
    evidence = {"hash": fate.hash, "block": fate.block, "block_hash": fate.block_hash}
    evidence |= {"fee_paid": str(fate.fee_paid), "nodes": fate.evidence}
    after = ended(body, fate, block=fate.block, block_hash=fate.block_hash)
    return Answer(outcome=Outcome.SUCCESS, body=after, evidence=evidence)


def ended(body: Payout, fate: Confirmed | Dead | Mismatch, block: int = 0, block_hash: str = "") -> Payout:
    """The body with what the chain said in the end."""
    result = Result(
        hash=fate.hash,
        block=block,
        block_hash=block_hash,
        gas_used=fate.gas_used,
        gas_price=str(fate.gas_price),
        fee_paid=str(fate.fee_paid),
    )
    return msgspec.structs.replace(body, result=result, gas_booked=body.gas_booked + 1)
