"""The actions of a withdrawal: decide, and order its payout. Nothing leaves here.

Both look at everything anew: policy, lists, approvers, address book, switches, the account. `risk` decides, pure. What
was approved once is asked again right before the payout is ordered, and by `still_approved` before each attempt is
made (W37). A screening that does not answer clears nothing: after a while people decide (W46).
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.documents import Documents
from bursar.engine import Answer, Engine, FlowRecord
from bursar.flows.payouts.documents import asset_name
from bursar.flows.payouts.outside import OUTAGE_S, UNCHECKED, NotNow, fails, waits
from bursar.flows.payouts.payout import Payout
from bursar.flows.payouts.payouts import Payouts
from bursar.flows.withdrawals.addresses import AddressBook
from bursar.flows.withdrawals.machine import ADOPTED, ASK, BACK, DROPPED, MACHINE
from bursar.flows.withdrawals.policy import ADDRESS_LIST, APPROVER, POLICY, Lists, joined, keys_of, list_names
from bursar.flows.withdrawals.risk import (
    Approve,
    Code,
    Decision,
    Facts,
    Reason,
    Refuse,
    Screen,
    Screening,
    Verdict,
    Wait,
    decide,
)
from bursar.flows.withdrawals.screening import Question, Screener, ScreeningUnavailable
from bursar.flows.withdrawals.signatures import people_who_approve
from bursar.flows.withdrawals.switches import switches_of
from bursar.flows.withdrawals.withdrawal import Withdrawal
from bursar.model.accounts import AccountStatus
from bursar.model.authorizations import Payment
from bursar.model.outcome import Outcome
from bursar.rails.chain import InvalidAddress

SWITCH_S: Final = 60.0  # until a withdrawal that is switched off is looked at again
SWITCHES: Final = frozenset({Code.PAUSED, Code.ACCOUNT_FROZEN, Code.POLICY_UNUSABLE})  # lifted without a word to it
SCREENING_S: Final = 10.0
SCREENINGS_MAX: Final = 5  # that were not answered, before people decide


class Deciding:
    """The actions of `checking` and `approved`, and the guard of payouts."""

    def __init__(
        self, payouts: Payouts, documents: Documents, engine: Engine, book: AddressBook, screener: Screener | None
    ) -> None:
        self._ledger = payouts.ledger
        self._out = payouts.out
        self._chains = payouts.chains
        self._documents = documents
        self._engine = engine
        self._book = book
        self._screener = screener

    async def check(self, item: FlowRecord[Withdrawal]) -> Answer:
        """May it be paid, must people decide, or is it refused?"""
        body = await self._with_new_payout(item.body)
        if body.adopted:
            return Answer(outcome=Outcome.SUCCESS, event=ADOPTED, decision=True)
        decision = decide(await self.facts(body, ()))
        if isinstance(decision, Screen):
            return await self._screen(item, body)
        return self._unless_unchecked(item, self._settled(body, decision))

    async def queue(self, item: FlowRecord[Withdrawal]) -> Answer:
        """Order the payout, if what was decided still holds and nothing is switched off."""
        body = item.body
        if body.adopted:
            return Answer(outcome=Outcome.SUCCESS, event=ADOPTED, decision=True)
        decision = decide(await self.facts(body, await self._switches(body.payment, body.user)))
        match decision:
            case Refuse():
                return self._unless_unchecked(item, _refused(decision))
            case Approve(mandate=mandate):
                after = msgspec.structs.replace(
                    body,
                    mandate=mandate,
                    payouts=(*body.payouts, body.payment.payout),
                    queued_us=self._engine.ports.now_us(),
                    reasons=(),
                )
                return Answer(outcome=Outcome.SUCCESS, body=after, decision=True)
            case Wait() if _only_switches(decision):
                text = "; ".join(reason.detail or reason.words for reason in decision.reasons)
                answer = waits(item, decision.reasons[0].code, text, SWITCH_S)
                after = msgspec.structs.replace(body, reasons=decision.reasons)
                return answer if answer.unchanged else msgspec.structs.replace(answer, body=after)
            case _:
                return Answer(outcome=Outcome.SUCCESS, event=BACK, decision=True)

    def _unless_unchecked(self, item: FlowRecord[Withdrawal], answer: Answer) -> Answer:
        """Nothing is given back before the signer's log was compared with this database: it may have been restored to
        a moment before the payout was ordered, which is paid already (W33)."""
        if answer.outcome is not Outcome.EXPLICIT_FAIL or self._out.reconciled:
            return answer
        return waits(item, "SIGNER_UNCHECKED", UNCHECKED, OUTAGE_S)

    async def still_approved(self, id_: str, payout: Payout) -> str:
        """Why a payout may not be paid any more, asked before each attempt; "": it may. A switch only waits."""
        record = await self._engine.record(MACHINE.name, id_)
        body = msgspec.json.decode(record.body, type=Withdrawal)
        if off := await self._switches(payout.payment, body.user):
            raise NotNow(Code.PAUSED, "; ".join(off), SWITCH_S)
        if body.adopted:
            return ""  # it was signed once: what is asked now is what became of it
        match decide(await self.facts(body, ())):
            case Approve(mandate=mandate) if mandate == payout.authorization.mandate:
                return ""
            case Refuse(why=why):
                return why
            case Wait(reasons=reasons):
                return "; ".join(reason.words for reason in reasons)
            case _:
                return "it has to be approved anew"

    async def _switches(self, payment: Payment, user: int) -> tuple[str, ...]:
        """The switches that stop it now, with their reasons."""
        wanted = set(switches_of(user, payment.asset, payment.chain))
        paused = await self._ledger.store.read.pauses.list()
        return tuple(
            f"{pause.name} is paused: {pause.reason}" for pause in paused if (pause.kind, pause.name) in wanted
        )

    async def _with_new_payout(self, body: Withdrawal) -> Withdrawal:
        """The payout that was ordered has ended unsigned: another one has another id, and is approved anew."""
        if body.payment.payout not in body.payouts or body.adopted:
            return body
        payment = msgspec.structs.replace(body.payment, payout=await self._engine.new_id("payouts"))
        return msgspec.structs.replace(body, payment=payment, approvals=(), mandate="")

    async def facts(self, body: Withdrawal, switches: tuple[str, ...]) -> Facts:
        """What the decision rests on, as it is now."""
        payment = body.payment
        name = asset_name(payment.asset, payment.chain)
        policy = await self._documents.current(POLICY, name, fresh=True)
        asset = (await self._ledger.known_assets(payment.asset))[payment.asset]
        listed = [
            await self._documents.current(ADDRESS_LIST, each) for each in list_names(payment.asset, payment.chain)
        ]
        lists, unreadable, codec = Lists(), "", self._chains[payment.chain].codec
        try:
            lists = joined(payment.chain, codec, [found.body for found in listed if found is not None])
        except InvalidAddress as error:
            unreadable = f"a list of addresses can't be read: {error}"
        account = (await self._ledger.store.read.accounts.heads([payment.account])).get(payment.account)
        return Facts(
            asset=asset,
            amount=int(payment.amount),
            now_us=await self._ledger.store.now_us(),  # by the same clock as timers: or they would fire for nothing
            requester=payment.requester,
            policy=None if policy is None else policy.body,
            lists=lists,
            unreadable=unreadable,
            to=payment.to,
            book_since_us=await self._book.since(str(body.user), payment.chain, payment.to),
            screening=body.screening,
            over_all=body.over_all,
            switches=switches,
            frozen=account is None or account.status is not AccountStatus.ACTIVE,
            approvers=await self._approvers(body),
            rejected=body.rejected,
            cancelled=body.cancelled,
            returned=body.returned,
            expires_us=payment.expires_us,
        )

    async def _approvers(self, body: Withdrawal) -> tuple[str, ...]:
        """Distinct people whose signatures are right, and who are enrolled for this now."""
        if not body.approvals:
            return ()
        payment = body.payment
        found = await self._documents.all(APPROVER)
        keys = keys_of({name: current.body for name, current in found.items()}, payment.asset, payment.chain)
        return people_who_approve(keys, body.approvals, payment)

    async def _screen(self, item: FlowRecord[Withdrawal], body: Withdrawal) -> Answer:
        """Ask the hook. Its answer is stored before it counts."""
        tried = item.record.attempt + 1
        try:
            if self._screener is None:
                raise ScreeningUnavailable(item.id, "no hook is configured here (screening_url)")
            said = await self._screener.ask(await self._question(item.id, body))
        except ScreeningUnavailable as away:
            if tried < SCREENINGS_MAX:
                return Answer(
                    outcome=Outcome.PENDING,
                    code="SCREENING",
                    message=away.why,
                    retry_after_s=SCREENING_S,
                    decision=True,
                )
            said = Screening(Verdict.UNANSWERED, away.why)
        after = msgspec.structs.replace(body, screening=said)
        return self._unless_unchecked(item, self._settled(after, decide(await self.facts(after, ()))))

    async def _question(self, id_: str, body: Withdrawal) -> Question:
        payment = body.payment
        asset = (await self._ledger.known_assets(payment.asset))[payment.asset]
        return Question(
            withdrawal=id_,
            user=str(body.user),
            asset=payment.asset,
            chain=payment.chain,
            to=payment.to,
            amount=str(asset.of_minor(body.amount)),
        )

    def _settled(self, body: Withdrawal, decision: Decision) -> Answer:
        screening = msgspec.to_builtins(body.screening)
        match decision:
            case Refuse():
                return _refused(decision, body)
            case Wait() if not _only_switches(decision):
                after = msgspec.structs.replace(
                    body, reasons=decision.reasons, needed=decision.needed, until_us=decision.until_us
                )
                evidence = {"reasons": [reason.code for reason in decision.reasons], "screening": screening}
                return Answer(outcome=Outcome.SUCCESS, event=ASK, body=after, decision=True, evidence=evidence)
            case Approve() | Wait():
                reasons: tuple[Reason, ...] = decision.reasons if isinstance(decision, Wait) else ()
                after = msgspec.structs.replace(
                    body, reasons=reasons, needed=0, until_us=0, approved_us=self._engine.ports.now_us()
                )
                evidence = {"reasons": [reason.code for reason in reasons], "screening": screening}
                return Answer(outcome=Outcome.SUCCESS, body=after, decision=True, evidence=evidence)
            case Screen():
                raise AssertionError("the screening was asked, and its answer decides")


def _only_switches(decision: Wait) -> bool:
    """Whether nothing is asked of people: what it waits for passes by itself, and it is polled."""
    return not decision.needed and all(reason.code in SWITCHES for reason in decision.reasons)


def _refused(decision: Refuse, body: Withdrawal | None = None) -> Answer:
    answer = fails(decision.code, decision.why, detail=decision.detail)
    answer = msgspec.structs.replace(answer, body=body, decision=True)
    return msgspec.structs.replace(answer, event=DROPPED) if decision.code is Code.CANCELLED else answer
