"""The first step of a payout: choose a wallet and a fee, and take the nonce and the reservations. Nothing leaves.

If the process dies before the answer is written, nothing was taken; after it, nonce and reservations are the record's.
What holds is asked now, not when the payout was requested: switches, documents, approvals (W37). Causes on our side (an
empty wallet, nodes or signer away, fees above the ceiling) wait and count no refusal (W7, W39).
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.derived import user_of
from bursar.flows.payouts.documents import ASSET, CHAIN, AssetDocument, ChainDocument, asset_name
from bursar.flows.payouts.machine import ADOPTED
from bursar.flows.payouts.outside import (
    NEEDS_RELEASE,
    OUTAGE_S,
    UNCHECKED,
    NotNow,
    Outside,
    adopted,
    fails,
    order_of,
    put_attempt,
)
from bursar.flows.payouts.payout import (
    BACK_OFF_MAX_S,
    BACK_OFF_S,
    NONCE,
    REFUSALS_MAX,
    RESERVED,
    RETURNED_CODE,
    UNCONFIRMED,
    Attempt,
    Payout,
    taken_over,
)
from bursar.flows.payouts.wallets import Candidate, nonce_key, ranked, short_of
from bursar.model.accounts import AccountStatus
from bursar.model.flow_rows import Next, Reserve, RowOperation
from bursar.model.outcome import Outcome
from bursar.rails.chain import (
    Chain,
    Fee,
    FeeTooHigh,
    NodesUnavailable,
    Order,
    Shape,
    Slot,
    Unbuildable,
    WalletShort,
    WouldRevert,
)
from bursar.signer.protocol import SECOND_SLOT, KnownAttempt, SignerRefused, SignerUnavailable

ROOM_S_MAX: Final = 30.0  # until a payout for which no wallet has room looks again

log = logging.getLogger("bursar.payouts")


class Assigning:
    """The action of `pending`."""

    def __init__(self, out: Outside) -> None:
        self.out = out
        self._crowd = 0.0  # how many payouts found no room lately

    async def assign(self, item: FlowRecord[Payout]) -> Answer:
        """Choose a wallet and a fee, and take the slot. Nothing leaves."""
        taken = False
        try:
            answer = await self._assign(item)
            taken = answer.outcome is Outcome.SUCCESS
            return answer
        except (NotNow, FeeTooHigh, NodesUnavailable, SignerUnavailable) as cause:
            retry_after_s = getattr(cause, "retry_after_s", None) or OUTAGE_S
            return await self.out.waits(item, cause.code, str(cause), retry_after_s)
        except WouldRevert as refused:
            return self._refused(item, refused.code, str(refused))
        finally:
            if not taken:
                self.out.wallets.drop(item.id)

    async def _assign(self, item: FlowRecord[Payout]) -> Answer:
        if item.body.imported is not None:
            return taken_over(item.body, item.body.imported)
        # First, and before money could be given back: has the signer signed what this database has forgotten (W33)?
        known = await self.out.signer.attempts(item.id)
        if new := [one for one in known if one.attempt > item.body.attempts]:
            if any(one.raw for one in new):
                return await self._adopt(item, new)
            numbers = msgspec.structs.replace(item.body, attempts=new[-1].attempt)  # tombstones: used up
            item = FlowRecord(item.record, numbers)
        body, payment = item.body, item.body.payment
        if body.detached:
            return fails("DETACHED", "another payout, which was signed before a restore, is what its money is for")
        if body.cancel:
            return fails("CANCELLED", body.cancel)
        if payment.expires_us and self.out.ports.now_us() >= payment.expires_us:
            return fails("EXPIRED", "its approval has expired: request it again")
        if not self.out.reconciled:
            raise NotNow("SIGNER_UNCHECKED", UNCHECKED, OUTAGE_S)
        if body.held:
            raise NotNow("HELD", f"an operator holds it: {body.held}", BACK_OFF_S)
        chain, network, asset = await self._rules(payment.chain, payment.asset)
        order = order_of(item.id, body, asset)
        if not asset.contracts_allowed and await chain.is_contract(order.to):
            return fails("DESTINATION_IS_CONTRACT", f"{order.to} is a contract, and {payment.asset} is not sent to one")
        candidate, fee = await self._payer(item, chain, network, order)
        try:
            preview = await self.out.signer.preview(payment, body.authorization, candidate.name)
        except SignerRefused as refused:
            if refused.denied:
                return self._refused(item, refused.reason, refused.why)
            raise _not_signed(item, refused) from None
        slot = await chain.slot(candidate.address)
        try:  # before a nonce is taken: bytes that can't be built would never use it up
            chain.codec.build(chain.network, candidate.address, order, Shape.PAY, slot, fee)
        except Unbuildable as refused:
            return fails(refused.code, str(refused))
        if why := await self._no_longer_approved(item):  # last: nodes and signer may have taken long
            return fails(RETURNED_CODE, why)
        return self._taken(item, chain, network, candidate, order, fee, slot, preview.nonce_floor)

    async def _no_longer_approved(self, item: FlowRecord[Payout]) -> str:
        """Why what held when it was requested holds no more (W37). The flow that has ordered it says that, and gets it
        back. Without one, an account that was frozen since waits: its money is held already."""
        flow, _, parent = item.body.parent.partition("/")
        if flow:
            guard = self.out.guards.get(flow)
            if guard is None:
                raise NotNow("PARENT_UNKNOWN", f"this process does not know {flow}, which has ordered it", BACK_OFF_S)
            return await guard(parent, item.body)
        path = item.body.payment.account
        account = (await self.out.store.read.accounts.heads([path])).get(path)
        if account is not None and account.status is AccountStatus.FROZEN:
            raise NotNow("ACCOUNT_FROZEN", f"{path} was frozen since this was requested", BACK_OFF_S)
        return ""

    async def _rules(self, name: str, asset: str) -> tuple[Chain, ChainDocument, AssetDocument]:
        """What holds now, not when it was requested (W37)."""
        network = await self.out.documents.current(CHAIN, name, fresh=True)
        on_chain = await self.out.documents.current(ASSET, asset_name(asset, name), fresh=True)
        if network is None or not network.body.active:
            raise NotNow("CHAIN_INACTIVE", f"chain {name} is switched off", BACK_OFF_S)
        if on_chain is None or not on_chain.body.active:
            raise NotNow("ASSET_INACTIVE", f"{asset} on {name} is switched off", BACK_OFF_S)
        chain = self.out.chains.get(name)
        if chain is None:
            raise NotNow("CHAIN_NOT_CONFIGURED", f"no nodes of {name} are configured here", BACK_OFF_S)
        return chain, network.body, on_chain.body

    async def _payer(
        self, item: FlowRecord[Payout], chain: Chain, network: ChainDocument, order: Order
    ) -> tuple[Candidate, Fee]:
        body, payment = item.body, item.body.payment
        candidates = await self.out.wallets.payers(chain, body.requested_wallet, payment.asset, payment.contract)
        if not candidates:
            wanted = body.requested_wallet or "an active hot wallet"
            why = "; ".join([f"{payment.chain} has not {wanted}", *await self.out.wallets.misspelt(chain)])
            raise NotNow("NO_WALLET", why, BACK_OFF_S)
        short: set[str] = set()
        room = [c for c in candidates if c.unconfirmed < network.unconfirmed_max]
        for candidate in ranked(room, payment.asset):
            if lacks := short_of(candidate, payment.asset, payment.contract, order.amount, body.native, 0):
                short.add(lacks)
                continue
            self.out.wallets.choose(item.record, payment.chain, candidate.name, {payment.asset: order.amount})
            try:
                fee = await chain.quote(candidate.address, order, Shape.PAY, body.priority)
            except WalletShort:
                short.add(body.native)
                continue
            if lacks := short_of(candidate, payment.asset, payment.contract, order.amount, body.native, fee.worst):
                short.add(lacks)
                continue
            return candidate, fee
        if short:
            raise NotNow(
                "LOW_BALANCE", f"no wallet on {payment.chain} has enough {', '.join(sorted(short))}", BACK_OFF_S
            )
        raise NotNow("NO_ROOM", f"every wallet on {payment.chain} waits for its transactions", self._room_s())

    def _room_s(self) -> float:
        """Many that wait for room look less often each, so that looking costs no more than paying."""
        self._crowd = min(self._crowd * 0.99 + 1, ROOM_S_MAX * 50)
        return min(ROOM_S_MAX, 0.5 + self._crowd / 50)

    def _refused(self, item: FlowRecord[Payout], code: str, message: str) -> Answer:
        """This very payment is refused, and nothing is signed: try again a few times, then fail (W6, W39)."""
        refusals = item.body.refusals + 1
        if refusals >= REFUSALS_MAX:
            return fails(code, message)
        body = msgspec.structs.replace(item.body, refusals=refusals)
        delay_s = min(BACK_OFF_S * 2**refusals, BACK_OFF_MAX_S)
        return Answer(
            outcome=Outcome.PENDING, code=code, message=message, body=body, retry_after_s=delay_s, decision=True
        )

    def _taken(
        self,
        item: FlowRecord[Payout],
        chain: Chain,
        network: ChainDocument,
        candidate: Candidate,
        order: Order,
        fee: Fee,
        slot: Slot,
        floor: int,
    ) -> Answer:
        body, payment, number = item.body, item.body.payment, item.body.attempts + 1
        needs = {payment.asset: order.amount}
        needs[body.native] = needs.get(body.native, 0) + fee.worst
        bounds = {payment.asset: candidate.tokens.get(payment.contract, 0), body.native: candidate.coin}
        at_us = self.out.wallets.used_us(item.id)
        attempt = Attempt(number=number, shape=Shape.PAY, wallet=candidate.name, fee=fee, made_us=at_us)
        rows: list[RowOperation] = [
            Reserve(RESERVED, f"{candidate.name}/{code}", needs[code], bounds[code]) for code in sorted(needs)
        ]
        rows.append(Reserve(UNCONFIRMED, candidate.name, 1, network.unconfirmed_max))
        if slot.nonce is not None:
            key = nonce_key(payment.chain, candidate.address)
            rows.append(Next(NONCE, key, max(floor, slot.nonce), {"payout": item.id, "at_us": at_us}))
        else:
            attempt = msgspec.structs.replace(attempt, expires=slot.expires, reference=slot.reference)
        rows.append(put_attempt(item.id, attempt, 0))
        after = msgspec.structs.replace(
            body,
            wallet=candidate.name,
            sender=candidate.address,
            fee=fee,
            attempts=number,
            current=number,
            shape=Shape.PAY,
            reserved=True,
        )
        return Answer(
            outcome=Outcome.SUCCESS,
            body=after,
            rows=tuple(rows),
            decision=True,
            evidence={"wallet": candidate.name, "attempt": number},
        )

    async def _adopt(self, item: FlowRecord[Payout], new: list[KnownAttempt]) -> Answer:
        """The signer has signed for this payout what this database does not know: it is watched, not paid again."""
        payment = item.body.payment
        chain = self.out.chains.get(payment.chain)
        sender = next(one.sender for one in reversed(new) if one.raw)
        wallet = (await self.out.wallets.ever(payment.chain, None if chain is None else chain.codec)).get(sender)
        if chain is None or wallet is None:
            why = f"it was signed for {sender}, which is no wallet known here"
            raise NotNow("SIGNED_BEFORE", why + _ask_again(payment.chain, item.body.requested_wallet), OUTAGE_S)
        body, rows = adopted(chain, item.id, item.body, wallet, new, self.out.ports.now_us())
        log.critical("%s was signed before this database was restored; it is watched now", item.id)
        return Answer(outcome=Outcome.SUCCESS, event=ADOPTED, body=body, rows=rows, decision=True)


def _ask_again(chain: str, wallet: str) -> str:
    """What to do about a wallet that is forgotten, if by its name it may be one that receives for a user. Pure."""
    user = user_of(wallet)
    if not user:
        return ""
    run = f"bursar deposit address {chain} --user {user}"
    return f". It is {wallet}: if that is a user's for deposits, it is the same address that is issued again by: {run}"


def _not_signed(item: FlowRecord[Payout], refused: SignerRefused) -> NotNow:
    """What the signer may sign later. It never fails the payment, which was approved."""
    # Not at the first look: the signer's own nodes may be a moment behind ours.
    if refused.reason == SECOND_SLOT and item.record.error.startswith((SECOND_SLOT, NEEDS_RELEASE)):
        why = f"it waits, and `bursar payout cancel` gives the money back instead: {refused.why}"
        return NotNow(NEEDS_RELEASE, why, BACK_OFF_S)
    return NotNow(refused.reason, refused.why, BACK_OFF_S)
