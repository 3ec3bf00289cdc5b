"""Withdrawals: quote, request, cancel, approve, reject, look at; the flow behind them.

The amount and the fee are held in the transaction that writes the request. Completion settles the hold, every other end
gives it back, in the transaction of that end. What is approved is the exact payment, with the id of the payout that
will make it: people sign it with keys of their own, and the signer verifies that once more (W20, W32).

Not here: what leaves (flows/payouts), what decides (risk), what people change (policy).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from bursar.documents import Documents
from bursar.engine import Engine, Flow, FlowRecord, lift_pause, set_pause
from bursar.engine.pauses import Lift
from bursar.flows.payouts import PayoutRequest, Payouts
from bursar.flows.payouts.checks import PRIORITIES
from bursar.flows.payouts.documents import CHAIN, asset_name
from bursar.flows.payouts.machine import CANCEL as CANCEL_PAYOUT
from bursar.flows.payouts.machine import MACHINE as PAYOUTS
from bursar.flows.payouts.machine import PENDING, PROCESSING
from bursar.flows.payouts.machine import STATUS as PAYOUT_STATUS
from bursar.flows.payouts.payout import PARENT_EVENTS, SOURCE, Payout
from bursar.flows.transfers.request import funding_account
from bursar.flows.withdrawals.addresses import AddressBook
from bursar.flows.withdrawals.deciding import Deciding
from bursar.flows.withdrawals.machine import (
    APPROVE,
    CANCEL,
    CANCELLED,
    MACHINE,
    QUEUED,
    REJECT,
    REJECTED,
    UNDECIDED,
    WAITING,
)
from bursar.flows.withdrawals.policy import APPROVER, POLICY, WithdrawalPolicy, fee_of, keys_of, send_all
from bursar.flows.withdrawals.risk import LIMIT_FOR_ALL, Refuse, Screening, Verdict, Wait, decide, limits
from bursar.flows.withdrawals.screening import Screener
from bursar.flows.withdrawals.signatures import people_who_approve
from bursar.flows.withdrawals.switches import Switch
from bursar.flows.withdrawals.withdrawal import (
    ALL,
    PREFIX,
    RESULTS,
    SCOPE,
    Quote,
    Withdrawal,
    WithdrawalCode,
    WithdrawalRefused,
    WithdrawalRequest,
    WithdrawalView,
    book,
    book_start,
    next_body,
    on_signal,
    view_of,
    withdrawal_id,
)
from bursar.ledger import Ledger
from bursar.model.accounts import check_path
from bursar.model.actors import check_actor, check_reason, same_person
from bursar.model.authorizations import Approval, Payment
from bursar.model.entries import check_key
from bursar.model.errors import IdempotencyKeyReused, LimitExceeded, RecordMoved, Refusal
from bursar.model.flow_rows import RowState
from bursar.model.money import Asset
from bursar.model.records import Record
from bursar.model.retry import Alarm, Retry
from bursar.model.views import moment
from bursar.store.records import NEWEST, Wanted
from bursar.writer import Operation

RETRY = Retry(first_s=1.0, cap_s=60.0)
ALARMS = (
    Alarm(reason="waiting for approval", state=WAITING, seconds=3_600),
    Alarm(reason="not paid yet", state=QUEUED, seconds=7_200),
    Alarm(reason="stuck", tries=10),
)
NO_RAIL = ""  # of `check` and `queue`: they call nothing outside
CALL_TIMEOUT_S = 35.0  # longer than the screening may take (screening_timeout_ms): its silence is an answer, too
TRIES = 10  # of a signal to a record that moves meanwhile
APPROVED_BY = "an approval is signed with the approver's own key: `bursar withdrawal approve`"
BY_COMMAND = "`bursar withdrawal` does it"
BY_PAYOUT = "its payout sends it"

log = logging.getLogger("bursar.withdrawals")


class Withdrawals:
    """Withdrawals of users, on top of payouts."""

    def __init__(
        self,
        ledger: Ledger,
        documents: Documents,
        payouts: Payouts,
        *,
        engine: Engine,
        screener: Screener | None = None,
    ) -> None:
        self.ledger = ledger
        self.documents = documents
        self.payouts = payouts
        self.engine = engine
        self.addresses = AddressBook(engine, payouts.chains)
        self.deciding = Deciding(payouts, documents, engine, self.addresses, screener)
        payouts.out.guards[MACHINE.name] = self.deciding.still_approved
        self.flow: Flow[Withdrawal] = Flow(
            machine=MACHINE,
            body=Withdrawal,
            actions={"check": self.deciding.check, "queue": self.deciding.queue},
            book=book,
            book_start=book_start,
            next_body=next_body,
            on_signal=on_signal,
            # What another system has sent, or debited, has happened: no freeze refuses to write it down (T35).
            active=lambda body: () if body.imported is not None else (body.payment.account,),
            timer=_timer,
            inbox_events=frozenset({APPROVE, REJECT, CANCEL, *PARENT_EVENTS}),
            reserved_events={
                APPROVE: APPROVED_BY,
                REJECT: BY_COMMAND,
                CANCEL: BY_COMMAND,
                **dict.fromkeys(PARENT_EVENTS, BY_PAYOUT),
            },
            priority=lambda body: body.priority,
            # What the rules say can always be asked: no operators say it instead, past approvals and without a payout.
            local_rails=frozenset({NO_RAIL}),
            retry=RETRY,
            alarms=ALARMS,
            call_timeout_s=CALL_TIMEOUT_S,
            prefix=PREFIX,
        )
        engine.register(self.flow)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def quote(self, wanted: WithdrawalRequest) -> Quote:
        """What it would cost, and how long it would take. Nothing is written; `max_fee` of a request keeps the fee."""
        asset, policy = await self._rules(wanted)
        amount, fee = await self._amounts(wanted, asset, policy)
        payment, native = await self._payment(wanted, asset, policy, amount, fee, "quote", "quote", str(wanted.user))
        body = Withdrawal(user=wanted.user, payment=payment, native=native)
        await self._check(body)
        chain = await self.documents.current(CHAIN, wanted.chain)
        assert chain is not None  # the payment was checked against it
        clear = msgspec.structs.replace(body, screening=Screening(verdict=Verdict.CLEAR))
        decision = decide(await self.deciding.facts(clear, ()))
        return Quote(
            asset=asset.code,
            chain=wanted.chain,
            to=payment.to,
            amount=str(asset.of_minor(amount)),
            fee=str(asset.of_minor(fee)),
            total=str(asset.of_minor(amount + fee)),
            seconds=chain.body.block_ms * (chain.body.depth + 2) // 1000 + 1,
            reasons=decision.reasons if isinstance(decision, Wait) else (),
        )

    async def request(
        self,
        wanted: WithdrawalRequest,
        *,
        key: str,
        requester: str = "",
        within_s: float = 0.0,
        admit: Callable[[], None] = lambda: None,
    ) -> WithdrawalView:
        """Write it down with its money set aside. The same key again is the same withdrawal; with other content, it is
        refused. `requester`: who asks, if that is not the user: no approval of the same person counts.

        `within_s`: it is driven here for so long; 0: by a worker, alone. `admit` is called for a request that repeats
        none (T12), and may refuse it: how often a user may ask is known to the API (T46).
        """
        who = check_actor(requester) if requester else str(wanted.user)
        asset = await self.ledger.asset(wanted.asset)
        operation = Operation(
            scope=f"{SCOPE}:{wanted.user}", id=check_key(key), op="create", fingerprint=_fingerprint(wanted, asset)
        )
        if (known := await self._known(operation)) is not None:  # first: a valid retry is never refused by a check
            return known
        admit()
        try:
            started = await self._write_down(wanted, operation, who)
        except Refusal:
            if (known := await self._known(operation)) is not None:  # this very request was under way, and was faster
                return known
            raise
        if within_s:
            await self.engine.process_now(started, within_s)
        else:
            await self.engine.hand_over(started)
        return await self.view(started.id)

    async def _write_down(self, wanted: WithdrawalRequest, operation: Operation, who: str) -> Record:
        asset, policy = await self._rules(wanted)
        amount, fee = await self._amounts(wanted, asset, policy)
        id_, payout = withdrawal_id(operation, amount, fee), await self.engine.new_id(PAYOUTS.name)
        await self._require_forgotten_unpaid(id_)
        payment, native = await self._payment(wanted, asset, policy, amount, fee, id_, payout, who)
        body = Withdrawal(user=wanted.user, payment=payment, native=native, priority=PRIORITIES[policy.priority])
        await self._check(body)
        return await self._start(id_, body, operation, asset, policy)

    async def _require_forgotten_unpaid(self, id_: str) -> None:
        """A database that was restored has forgotten the request; the signer has not, and its payout is put back."""
        row = await self.ledger.store.read.flow_rows.get(PAYOUTS.name, SOURCE.name, id_)
        if row is not None and row.state is RowState.HELD:
            payout = msgspec.json.decode(row.body)["payout"]
            why = f"it was requested before the database was restored, and {payout} pays it"
            raise WithdrawalRefused(WithdrawalCode.ALREADY_ORDERED, why)

    async def _check(self, body: Withdrawal) -> None:
        """What would be refused in any case is refused before it is written down."""
        decision = decide(await self.deciding.facts(body, ()))
        if isinstance(decision, Refuse):
            raise WithdrawalRefused(decision.code, decision.why)

    async def _start(
        self, id_: str, body: Withdrawal, operation: Operation, asset: Asset, policy: WithdrawalPolicy
    ) -> Record:
        """Over a user's limit it is refused; over the limit for all, it is written down and people decide (W44)."""
        used = limits(policy, asset, str(body.user), body.amount, await self.ledger.store.now_us())
        for over_all in (False, True):
            count = tuple(limit for limit in used if not (over_all and limit.code == LIMIT_FOR_ALL))
            wanted = msgspec.structs.replace(body, over_all=over_all)
            try:
                started = await self.engine.start(
                    MACHINE.name,
                    wanted,
                    id=id_,
                    owner=str(body.user),
                    operation=operation,
                    limits=count,
                    actor=body.payment.requester,
                )
            except LimitExceeded as exceeded:
                if exceeded.name == LIMIT_FOR_ALL and not over_all:
                    continue
                within = "an hour" if exceeded.name == WithdrawalCode.HOURLY_LIMIT_EXCEEDED else "a day"
                most = policy.hourly_user if within == "an hour" else policy.daily_user
                why = f"at most {most} {asset.code} can be withdrawn within {within}, and this would be more"
                raise WithdrawalRefused(WithdrawalCode(exceeded.name), why) from None
            return started.record
        raise AssertionError("a limit for all was counted although it was left out")

    async def _known(self, operation: Operation) -> WithdrawalView | None:
        """The withdrawal that this request has made before; a refusal if the key stands for another request."""
        found = await self.ledger.store.read.operations.get(*operation.key)
        if found is None:
            return None
        first = str(msgspec.json.decode(found.detail)["record"])
        if found.fingerprint != operation.fingerprint:
            raise IdempotencyKeyReused(operation.scope, operation.id, first)
        return msgspec.structs.replace(await self.view(first), replayed=True)

    async def _rules(self, wanted: WithdrawalRequest) -> tuple[Asset, WithdrawalPolicy]:
        asset = await self.ledger.asset(wanted.asset)
        found = await self.documents.current(POLICY, asset_name(wanted.asset, wanted.chain), fresh=True)
        if found is None or not found.body.enabled:
            why = f"{wanted.asset} can't be withdrawn on {wanted.chain}"
            raise WithdrawalRefused(WithdrawalCode.NOT_OFFERED, why)
        return asset, found.body

    async def _amounts(self, wanted: WithdrawalRequest, asset: Asset, policy: WithdrawalPolicy) -> tuple[int, int]:
        """What arrives, and the fee beside it."""
        if wanted.amount == ALL:
            account = funding_account(wanted.user)
            available = (await self.ledger.balance(account, asset.code)).minor
            amount = send_all(policy, asset, available, await self.payouts.step(asset, wanted.chain))
            if not amount:
                why = f"{account} has {asset.of_minor(max(available, 0))}, and that does not cover the fee"
                raise WithdrawalRefused(WithdrawalCode.NOTHING_TO_SEND, why)
        else:
            amount = asset.minor(wanted.amount)
        fee = fee_of(policy, asset, amount)
        if amount < asset.minor(policy.minimum):
            why = f"at least {policy.minimum} {asset.code} can be withdrawn on {wanted.chain}"
            raise WithdrawalRefused(WithdrawalCode.BELOW_MINIMUM, why)
        if wanted.max_fee and fee > asset.minor(wanted.max_fee):
            why = f"the fee is {asset.of_minor(fee)} now, above {wanted.max_fee}: ask for a new quote"
            raise WithdrawalRefused(WithdrawalCode.FEE_CHANGED, why)
        return amount, fee

    async def _payment(
        self,
        wanted: WithdrawalRequest,
        asset: Asset,
        policy: WithdrawalPolicy,
        amount: int,
        fee: int,
        id_: str,
        payout: str,
        who: str,
    ) -> tuple[Payment, str]:
        """The exact payment, with every check of a payout."""
        request = PayoutRequest(
            account=check_path(funding_account(wanted.user)),
            asset=asset.code,
            chain=wanted.chain,
            to=wanted.to,
            amount=str(asset.of_minor(amount)),
            fee=str(asset.of_minor(fee)),
            memo=wanted.memo,
            priority=policy.priority,
            source=id_,
            expires_us=await self.ledger.store.now_us() + policy.expires_s * 1_000_000,
        )
        return await self.payouts.check(request, payout, who)

    # --- its user ----------------------------------------------------------------------------------------------------

    async def cancel(self, id_: str, *, actor: str, reason: str = "", user: int | None = None) -> WithdrawalView:
        """Give the money back, as long as nothing was asked of the signer."""
        by, why = check_actor(actor), check_reason(reason or "its user cancelled it")
        for _ in range(TRIES):
            record = await self._record(id_, user)
            if record.state in RESULTS:
                if record.state == CANCELLED:
                    break
                raise WithdrawalRefused(WithdrawalCode.INVALID_STATE, f"{id_} is {record.state}, and moves no more")
            try:
                if record.state in UNDECIDED:
                    evidence = {"by": by, "reason": why}
                    await self.engine.signal(record, CANCEL, by, evidence, sender=f"cancel {by}")
                else:
                    await self._cancel_payout(record, by, why)
                break
            except RecordMoved:  # it has left that state meanwhile: what may be done now?
                continue
        return await self.view(id_)

    async def _cancel_payout(self, record: Record, by: str, why: str) -> None:
        body = self._body(record)
        payout = await self.engine.record(PAYOUTS.name, body.payouts[-1])
        attempts = msgspec.json.decode(payout.body, type=Payout)
        if payout.state not in (PENDING, PROCESSING) or attempts.dead or body.adopted:
            text = f"{record.id} is being paid ({PAYOUT_STATUS[payout.state]}) and can't be cancelled any more"
            raise WithdrawalRefused(WithdrawalCode.TOO_LATE, text)
        await self.engine.signal(payout, CANCEL_PAYOUT, by, {"reason": why}, sender=f"cancel {by}")

    # --- approvers ---------------------------------------------------------------------------------------------------

    async def payment(self, id_: str) -> Payment:
        """The exact payment, as approvers sign it."""
        return self._body(await self._record(id_)).payment

    async def approve(self, id_: str, approval: Approval) -> WithdrawalView:
        """Add a person's signature over the payment. Checked here, again when it is decided, and by the signer."""
        for _ in range(TRIES):
            record = await self._record(id_)
            body = self._body(record)
            if record.state not in UNDECIDED:
                why = f"{id_} is {record.state}: only what waits for approval can be approved"
                raise WithdrawalRefused(WithdrawalCode.INVALID_STATE, why)
            await self._check_approval(body, approval)
            if approval in body.approvals:
                break
            # By version: what another one in the same name has displaced meanwhile can be given again.
            name = f"approval {approval.approver} {approval.signature[:16]} {record.version}"
            try:
                evidence = {"approval": msgspec.to_builtins(approval)}
                await self.engine.signal(record, APPROVE, approval.approver, evidence, sender=name)
                break
            except RecordMoved:
                continue
        return await self.view(id_)

    async def _check_approval(self, body: Withdrawal, approval: Approval) -> None:
        payment, name = body.payment, check_actor(approval.approver)
        found = await self.documents.all(APPROVER, fresh=True)
        keys = keys_of({each: current.body for each, current in found.items()}, payment.asset, payment.chain)
        if name not in keys:
            why = f"{name} is not enrolled as an approver of {payment.asset} on {payment.chain}"
            raise WithdrawalRefused(WithdrawalCode.UNKNOWN_APPROVER, why)
        if same_person(name, payment.requester):
            raise WithdrawalRefused(WithdrawalCode.OWN_REQUEST, f"{name} has requested it: another person approves it")
        if not people_who_approve(keys, [approval], payment):
            why = f"the signature is not {name}'s over the payment {payment.digest()}: sign what is shown now"
            raise WithdrawalRefused(WithdrawalCode.WRONG_SIGNATURE, why)

    async def reject(self, id_: str, *, actor: str, reason: str) -> WithdrawalView:
        """Refuse it: the money goes back. What was ordered already is cancelled as a payout."""
        by, why = check_actor(actor), check_reason(reason)
        for _ in range(TRIES):
            record = await self._record(id_)
            if record.state == REJECTED:
                break
            if record.state not in UNDECIDED:
                text = f"{id_} is {record.state}: only what was not ordered yet can be rejected"
                if record.state == QUEUED:
                    text += f"; `bursar payout cancel {self._body(record).payouts[-1]}` may still stop it"
                raise WithdrawalRefused(WithdrawalCode.INVALID_STATE, text)
            try:
                evidence = {"by": by, "reason": why}
                await self.engine.signal(record, REJECT, by, evidence, sender=f"reject {by}")
                break
            except RecordMoved:
                continue
        return await self.view(id_)

    # --- switches ----------------------------------------------------------------------------------------------------

    async def pause(self, switch: Switch, *, actor: str, reason: str) -> bool:
        """Switch withdrawals of a user, an asset, a chain, or all of them off; whether they were on."""
        return await set_pause(self.ledger.store, *switch, actor=check_actor(actor), reason=check_reason(reason))

    async def resume(self, switch: Switch, *, actor: str, reason: str) -> Lift:
        """And on again."""
        return await lift_pause(self.ledger.store, *switch, actor=actor, reason=reason)

    # --- reads -------------------------------------------------------------------------------------------------------

    async def view(self, id_: str, user: int | None = None) -> WithdrawalView:
        """One withdrawal. With a user, only that one's own: another's is as if it were not there."""
        record = await self._record(id_, user)
        (view,) = await self._views([record])
        payout = await self.engine.get(PAYOUTS.name, view.payout) if view.payout else None
        return view if payout is None else msgspec.structs.replace(view, payout_status=PAYOUT_STATUS[payout.state])

    async def page(
        self, *, user: int | None = None, states: Sequence[str] = (), before: int = NEWEST, limit: int = 50
    ) -> tuple[list[WithdrawalView], int]:
        """Withdrawals, newest first, without the status of their payouts; and the number below which the next page
        begins, 0: there is none. A page looks at a bounded number of rows: it may be short, and there may be more."""
        wanted = Wanted(owner="" if user is None else str(user), states=tuple(states))
        found, below = await self.ledger.store.read.records.page(MACHINE.name, wanted, before=before, limit=limit)
        return await self._views(found), below

    async def _views(self, records: Sequence[Record]) -> list[WithdrawalView]:
        """All at once. A body that can't be read is left out: it must not hide the others."""
        readable: list[tuple[Record, Withdrawal]] = []
        for record in records:
            try:
                readable.append((record, self._body(record)))
            except (msgspec.MsgspecError, UnicodeError) as error:
                log.error("withdrawal %s can't be read: %s", record.id, error)
        assets = await self.ledger.known_assets(*{body.payment.asset for _, body in readable})
        return [view_of(record, body, assets[body.payment.asset]) for record, body in readable]

    def _body(self, record: Record) -> Withdrawal:
        return msgspec.json.decode(record.body, type=Withdrawal)

    async def _record(self, id_: str, user: int | None = None) -> Record:
        record = await self.engine.get(MACHINE.name, id_)
        if record is None or (user is not None and record.owner != str(user)):
            raise WithdrawalRefused(WithdrawalCode.NOT_FOUND, f"there is no withdrawal {id_[:64]}")
        return record


def _timer(item: FlowRecord[Withdrawal]) -> datetime | None:
    """When a withdrawal that waits is looked at again by itself: a cooling period is over, or it expires."""
    body = item.body
    times = [us for us in (body.until_us, body.payment.expires_us) if us]
    return moment(min(times)) if times else None


def _fingerprint(wanted: WithdrawalRequest, asset: Asset) -> str:
    """Two requests under one key are the same if these are; amounts are compared as values (T43)."""
    minor = wanted.amount if wanted.amount == ALL else str(asset.minor(wanted.amount))
    fee = str(asset.minor(wanted.max_fee)) if wanted.max_fee else ""
    same = msgspec.structs.replace(wanted, amount=minor, max_fee=fee)
    return msgspec.json.encode(same, order="sorted").decode()
