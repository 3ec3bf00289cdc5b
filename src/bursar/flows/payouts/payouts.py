"""Payouts: the one place from which anything leaves on a chain.

A payout holds its money in the ledger from its first transaction on, is signed once per nonce, stored with its bytes
and hash, and only then sent; a retry sends the same bytes. It fails only when nothing was ever signed for it, or when
all that was signed is provably dead. `machine` has the picture; `assigning`, `signing`, `confirming` are its actions.

Not here: who may withdraw and how much (withdrawals), how a chain builds a transaction (rails), who may sign (signer).
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bursar.documents import Documents
from bursar.engine import Engine, Flow, Operators
from bursar.flows.payouts.assigning import Assigning
from bursar.flows.payouts.checks import PRIORITIES, PayoutCode, PayoutRefused, PayoutRequest, check_request
from bursar.flows.payouts.confirming import Confirming
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, asset_name
from bursar.flows.payouts.machine import (
    APPROVE,
    BUMP,
    CANCEL,
    CHAINS,
    CONFIRMED,
    CONFIRMING,
    DETACH,
    DISPUTED,
    HOLD,
    KNOWN,
    MACHINE,
    NOT_PAID,
    PAID,
    PENDING,
    RELEASE,
    REPLACEMENTS,
    STATUS,
)
from bursar.flows.payouts.outside import Outside, read_attempt
from bursar.flows.payouts.payout import (
    ATTEMPT,
    BACK_OFF_MAX_S,
    FEES,
    GAS,
    PREFIX,
    REPLACEMENT_ROW_KINDS,
    ROW_KINDS,
    SUSPENSE,
    Attempt,
    Payout,
    Replacement,
    Result,
    attempt_key,
    book,
    book_start,
    dispute,
    judged,
    learned,
    on_signal,
    rank,
    wallet_account,
)
from bursar.flows.payouts.reconciling import Reconciling
from bursar.flows.payouts.signing import Signing
from bursar.flows.payouts.twins import Twins
from bursar.flows.payouts.watching import Watch, Watching
from bursar.ledger import Ledger
from bursar.model.accounts import ExternalAccount, Policy, SystemAccount
from bursar.model.actors import same_person
from bursar.model.authorizations import Approval, Authorization, Payment
from bursar.model.entries import check_key
from bursar.model.errors import AlreadyExists, Conflict, IdempotencyKeyReused, RecordMoved, UnknownRecord
from bursar.model.flow_rows import RowTaken
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Alarm, Retry
from bursar.rails.chain import Chain
from bursar.signer.protocol import Signer
from bursar.store.records import NEWEST, Wanted
from bursar.writer import Operation

RETRY = Retry(first_s=1.0, cap_s=BACK_OFF_MAX_S)
ALARMS = (
    Alarm(reason="pending for long", state=PENDING, seconds=900),
    Alarm(reason="unconfirmed", state=CONFIRMING, seconds=3_600),
    Alarm(reason="disputed", state=DISPUTED, severity="critical", seconds=1),
    Alarm(reason="stuck", tries=10),
)
CALL_TIMEOUT_S = 30.0
SIGNAL_TRIES = 10  # more than a payout has states
SIGNALS = frozenset({BUMP, CANCEL, HOLD, RELEASE, APPROVE, KNOWN, DETACH})
BY_COMPARISON = "the comparison with the signer's log sends it"
APPROVED_BY = "an approval is signed with the approver's own key: `bursar payout approve`"


class PayoutView(msgspec.Struct, frozen=True, kw_only=True):
    """A payout as its owner and operators see it."""

    id: str
    status: str  # the specification's
    state: str  # exactly
    account: str
    asset: str
    chain: str
    to: str
    amount: str  # in units of the asset
    fee: str
    memo: str
    priority: str
    source: str
    wallet: str
    tx_hash: str
    gas_used: int
    gas_price: str
    error: str
    cancel: str
    held: str
    digest: str  # what approvers sign
    approvals: tuple[str, ...]
    mandate: str
    created_us: int
    updated_us: int
    attempts: tuple[Attempt, ...] = ()


class Payouts:
    """Payouts on one engine."""

    def __init__(
        self,
        ledger: Ledger,
        documents: Documents,
        chains: Mapping[str, Chain],
        signer: Signer,
        *,
        engine: Engine,
        names: Iterable[str] = (),
    ) -> None:
        """`names`: of chains that may be added to `chains` while this runs. Their rails can be paused before that."""
        self.ledger = ledger
        self.documents = documents
        self.chains = chains
        self.engine = engine
        self.names = frozenset((*chains, *names))
        self.rails = frozenset({"signer", *(f"chain {name}" for name in self.names)})
        self.out = Outside(ledger.store, documents, chains, signer, engine.alert)
        self.twins = Twins(self.out, engine)
        self.reconciling = Reconciling(self.out, self.twins, engine, ledger)
        watching = Watching(self.out)
        engine.register(self._flow()).register(self._replacements()).register(watching.flow(self.rails))

    def _flow(self) -> Flow[Payout]:
        assigning, signing = Assigning(self.out), Signing(self.out)
        confirming = Confirming(self.out, self.twins)
        return Flow(
            machine=MACHINE,
            body=Payout,
            actions={
                "assign": assigning.assign,
                "build": signing.build,
                "sign": signing.sign,
                "send": signing.send,
                "confirm": confirming.confirm,
            },
            cancels={"confirm": confirming.give_up},
            queries={"confirm": confirming.query},
            book=book,
            book_start=book_start,
            active=lambda body: () if body.booked_from or body.parent else (body.payment.account,),
            dispute=dispute,
            learned=learned,
            rails={
                "assign": lambda item: f"chain {item.body.payment.chain}",
                "sign": "signer",
                "send": lambda item: f"chain {item.body.payment.chain}",
                "confirm": lambda item: f"chain {item.body.payment.chain}",
            },
            rail_names=self.rails,
            second_person=frozenset({PAID, NOT_PAID}),
            reserved_events={APPROVE: APPROVED_BY, **dict.fromkeys((KNOWN, DETACH), BY_COMPARISON)},
            row_kinds=ROW_KINDS,
            inbox_events=SIGNALS,
            on_signal=on_signal,
            priority=rank,
            retry=RETRY,
            alarms=ALARMS,
            call_timeout_s=CALL_TIMEOUT_S,
            prefix=PREFIX,
        )

    def _replacements(self) -> Flow[Replacement]:
        signing = Signing(self.out)
        return Flow(
            machine=REPLACEMENTS,
            body=Replacement,
            actions={"sign": signing.sign_replacement, "send": signing.send_replacement},
            rails={"sign": "signer", "send": lambda item: f"chain {item.body.payment.chain}"},
            rail_names=self.rails,
            row_kinds=REPLACEMENT_ROW_KINDS,
            retry=RETRY,
            alarms=(Alarm(reason="stuck", tries=10, seconds=900),),
            call_timeout_s=CALL_TIMEOUT_S,
        )

    async def prepare(self) -> None:
        """Make the accounts that payouts are booked in and the watchers of chains. Twice is once."""
        wanted: dict[str, Policy] = {GAS: SystemAccount(), FEES: SystemAccount(), SUSPENSE: SystemAccount()}
        for name, wallet in (await self.documents.all(WALLET, fresh=True)).items():
            wanted[wallet_account(wallet.body.chain, name)] = ExternalAccount()
        there = await self.ledger.store.read.accounts.heads(wanted)  # of thousands of wallets, usually all
        for path, policy in wanted.items():
            if path in there:
                continue
            try:
                await self.ledger.create_account(path, policy=policy)
            except AlreadyExists:
                continue
        for name in self.chains:
            if await self.engine.get(CHAINS.name, name) is None:
                with contextlib.suppress(RecordMoved, Conflict):  # another process has started it just now
                    started = await self.engine.start(CHAINS.name, Watch(chain=name), id=name)
                    await self.engine.hand_over(started.record)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def request(self, wanted: PayoutRequest, *, key: str, actor: str = "") -> PayoutView:
        """Write a payout down, with its hold. The same key again is the same payout; with other content, refused."""
        asset = await self.ledger.asset(wanted.asset)
        operation = Operation(scope="payouts", id=check_key(key), op="create", fingerprint=_fingerprint(wanted, asset))
        if (known := await self._known(operation)) is not None:  # first: a valid retry is never refused by a check
            return known
        id_ = await self.engine.new_id(MACHINE.name)
        payment, native = await self.check(wanted, id_, actor)
        body = Payout(
            payment=payment,
            authorization=Authorization(mandate=wanted.mandate),
            native=native,
            priority=PRIORITIES[wanted.priority],
            requested_wallet=wanted.wallet,
        )
        try:
            started = await self.engine.start(
                MACHINE.name, body, id=id_, owner=wanted.account, operation=operation, actor=actor
            )
        except RowTaken as taken:
            if (known := await self._known(operation)) is not None:  # this very request was under way, and was faster
                return known
            why = f"{wanted.source} has a payout that has not failed (record {taken.record})"
            raise PayoutRefused(PayoutCode.PAYOUT_EXISTS, why) from taken
        if not started.replayed:
            await self.engine.hand_over(started.record)
        return await self.view(started.record.id)

    async def check(self, wanted: PayoutRequest, id_: str, requester: str = "") -> tuple[Payment, str]:
        """The exact payment that is requested, and the coin of its chain; raises why it can't be. Writes nothing."""
        asset = await self.ledger.asset(wanted.asset)
        chain = await self.documents.current(CHAIN, wanted.chain, fresh=True)
        on_chain = await self.documents.current(ASSET, asset_name(wanted.asset, wanted.chain), fresh=True)
        rail = self.chains.get(wanted.chain)
        payment = check_request(
            wanted,
            id_,
            asset,
            None if chain is None else chain.body,
            None if on_chain is None else on_chain.body,
            None if rail is None else rail.codec,
            await self.out.wallets.own_addresses(wanted.chain, None if rail is None else rail.codec, wanted.to),
            requester,
        )
        assert chain is not None  # check_request has refused
        await self._check_native(chain.body.native, chain.body.decimals)
        if paid := await self.twins.paid_before(wanted.source):
            why = f"{paid} was for {wanted.source}, and was paid after it had failed"
            raise PayoutRefused(PayoutCode.PAYOUT_EXISTS, why)
        return payment, chain.body.native

    async def step(self, asset: Asset, chain: str) -> int:
        """The smallest amount, in the ledger's units, that the chain's decimals can express."""
        on_chain = await self.documents.current(ASSET, asset_name(asset.code, chain), fresh=True)
        fewer = 0 if on_chain is None else max(0, asset.precision - on_chain.body.decimals)
        return int(10**fewer)

    async def _known(self, operation: Operation) -> PayoutView | None:
        """The payout that this request has made before; a refusal if the key stands for another request."""
        found = await self.ledger.store.read.operations.get(*operation.key)
        if found is None:
            return None
        first = str(msgspec.json.decode(found.detail)["record"])
        if found.fingerprint != operation.fingerprint:
            raise IdempotencyKeyReused(operation.scope, operation.id, first)
        return await self.view(first)

    async def _check_native(self, code: str, decimals: int) -> None:
        """Gas is booked to the smallest unit of the chain, or the wallet's account could never agree with the chain."""
        native = await self.ledger.asset(code)
        if native.precision != decimals:
            why = (
                f"{code} has {native.precision} decimals in the ledger and {decimals} on its chain: gas can't be booked"
            )
            raise PayoutRefused(PayoutCode.NATIVE_PRECISION, why)

    async def approve(self, id_: str, approval: Approval, *, sender: str = "") -> PayoutView:
        """Add a person's signature over the payment. The signer verifies it, and nothing here does."""
        record = await self._record(id_)
        authorization = msgspec.json.decode(record.body, type=Payout).authorization
        if mandate := authorization.mandate:
            why = (
                f"{id_} is paid under the mandate {mandate}: with an approval beside it, the signer would sign neither"
            )
            raise PayoutRefused(PayoutCode.INVALID_STATE, why)
        if same_person(approval.approver, self._payment(record).requester):
            raise PayoutRefused(
                PayoutCode.OWN_REQUEST, f"{approval.approver} has requested {id_}: another person approves it"
            )
        if approval not in authorization.approvals:
            # By version: what another one in the same name has displaced meanwhile can be given again.
            name = sender or f"approval {approval.approver} {approval.signature[:16]} {record.version}"
            evidence = {"approval": msgspec.to_builtins(approval)}
            await self.engine.signal(record, APPROVE, approval.approver, evidence, sender=name)
        return await self.view(id_)

    # --- operators ---------------------------------------------------------------------------------------------------

    async def bump(self, id_: str, *, actor: str, reason: str, sender: str = "") -> PayoutView:
        """Raise the fee of what was sent, on the same nonce."""
        return await self._signal(id_, BUMP, actor, reason, sender)

    async def cancel(self, id_: str, *, actor: str, reason: str, sender: str = "") -> PayoutView:
        """Make sure that it is not paid, if that can still be: what is final is final."""
        return await self._signal(id_, CANCEL, actor, reason, sender)

    async def hold(self, id_: str, *, actor: str, reason: str, sender: str = "") -> PayoutView:
        """Let it wait before anything of it is signed."""
        record = await self._record(id_)
        if record.state != PENDING:
            why = f"{id_} is {record.state}: only what is pending can be held; cancel it, or pause its chain"
            raise PayoutRefused(PayoutCode.INVALID_STATE, why)
        await Operators(self.engine).signal(MACHINE.name, id_, HOLD, actor=actor, reason=reason, sender=sender)
        return await self.view(id_)

    async def release(self, id_: str, *, actor: str, reason: str, sender: str = "") -> PayoutView:
        """Let a payout go on that was held."""
        return await self._signal(id_, RELEASE, actor, reason, sender)

    async def resolve(self, id_: str, *, paid: bool, actor: str, reason: str) -> PayoutView:
        """Two people decide where the chain can't: a final transaction that moved something else (W36), a nonce that
        an unknown transaction used up (W17). What they declare dead stays watched."""
        operators, record = Operators(self.engine), await self._record(id_)
        if record.state == CONFIRMING:
            outcome = Outcome.SUCCESS if paid else Outcome.EXPLICIT_FAIL
            await operators.force(MACHINE.name, id_, outcome, actor=actor, reason=reason)
            return await self.view(id_)
        event = PAID if paid else NOT_PAID
        # Of what was imported without a transaction nothing can be watched, and nothing was issued here (W38).
        body = msgspec.json.decode(record.body, type=Payout)
        watched = body.imported is None or bool(body.tries)
        await operators.signal(MACHINE.name, id_, event, actor=actor, reason=reason, declared_dead=not paid and watched)
        return await self.view(id_)

    async def _signal(self, id_: str, event: str, actor: str, reason: str, sender: str) -> PayoutView:
        """What means the same in every state that is not an end: asked again if the payout moves at that moment."""
        operators = Operators(self.engine)
        for left in reversed(range(SIGNAL_TRIES)):
            try:
                await operators.signal(MACHINE.name, id_, event, actor=actor, reason=reason, sender=sender)
                break
            except RecordMoved:
                if not left:
                    raise
        return await self.view(id_)

    # --- reads -------------------------------------------------------------------------------------------------------

    async def view(self, id_: str) -> PayoutView:
        """A payout with all its attempts."""
        return await self._view(await self._record(id_), attempts=True)

    async def payment(self, id_: str) -> Payment:
        """The exact payment, as approvers sign it."""
        return self._payment(await self._record(id_))

    def _payment(self, record: Record) -> Payment:
        return msgspec.json.decode(record.body, type=Payout).payment

    async def list(
        self, *, owner: str = "", states: Sequence[str] = (), before: int = NEWEST, limit: int = 100
    ) -> list[PayoutView]:
        """Payouts, newest first, without their attempts: so many, however many other records are between them."""
        found: builtins.list[PayoutView] = []
        while before and len(found) < limit:
            views, before = await self.page(owner=owner, states=states, before=before, limit=limit - len(found))
            found += views
        return found

    async def page(
        self, *, owner: str = "", states: Sequence[str] = (), before: int = NEWEST, limit: int = 100
    ) -> tuple[builtins.list[PayoutView], int]:
        """The same, and the number below which the next page begins; 0: there is none. A page looks at a bounded
        number of rows: it may be short, and there may be more."""
        wanted = Wanted(owner=owner, states=tuple(states))
        found, below = await self.ledger.store.read.records.page(MACHINE.name, wanted, before=before, limit=limit)
        return [await self._view(record, attempts=False) for record in found], below

    async def _view(self, record: Record, *, attempts: bool) -> PayoutView:
        body = msgspec.json.decode(record.body, type=Payout)
        payment = body.payment
        asset = (await self.ledger.known_assets(payment.asset))[payment.asset]
        result: Result = body.result
        return PayoutView(
            id=record.id,
            status=STATUS[record.state],
            state=record.state,
            account=payment.account,
            asset=payment.asset,
            chain=payment.chain,
            to=payment.to,
            amount=str(asset.of_minor(int(payment.amount))),
            fee=str(asset.of_minor(int(payment.fee))),
            memo=payment.memo,
            priority=body.priority.name.lower(),
            source=payment.source,
            wallet=body.wallet,
            tx_hash=result.hash if record.state == CONFIRMED else (body.tries[-1].hash if body.tries else result.hash),
            gas_used=result.gas_used,
            gas_price=result.gas_price,
            error=record.error,
            cancel=body.cancel,
            held=body.held,
            digest=payment.digest(),
            approvals=tuple(approval.approver for approval in body.authorization.approvals),
            mandate=body.authorization.mandate,
            created_us=record.created_us,
            updated_us=record.updated_us,
            attempts=judged(record.state, body, await self.attempts(record.id, body)) if attempts else (),
        )

    async def attempts(self, id_: str, body: Payout) -> tuple[Attempt, ...]:
        """Every attempt of a payout, its replacements among them, in order."""
        found = []
        for number in range(1, body.attempts + 1):
            for flow in (MACHINE.name, REPLACEMENTS.name):
                row = await self.ledger.store.read.flow_rows.get(flow, ATTEMPT.name, attempt_key(id_, number))
                if row is not None:
                    found.append(read_attempt(row))
        return tuple(found)

    async def _record(self, id_: str) -> Record:
        record = await self.engine.get(MACHINE.name, id_)
        if record is None:
            raise UnknownRecord(MACHINE.name, id_)
        return record


def _fingerprint(wanted: PayoutRequest, asset: Asset) -> str:
    """Two requests under one key are the same if these are; amounts are compared as values (T43)."""
    minor = {name: str(asset.minor(getattr(wanted, name))) for name in ("amount", "fee")}
    return msgspec.json.encode(msgspec.structs.replace(wanted, **minor), order="sorted").decode()
