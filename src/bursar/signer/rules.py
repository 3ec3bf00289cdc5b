"""What a signer decides: sign, answer again, or refuse. Pure.

It decodes the bytes itself and compares them with the payment, the payment with its approvals or its mandate, and both
with its own policy and its own memory. What a caller claims counts for nothing (W32). The order of the checks:

1. An attempt that is on record is answered as it was: the same bytes, or never (W30).
2. A halt refuses the rest (W21).
3. Wallet, chain and asset are the policy's; the payment is the payout's, and the same at each attempt (W20).
   What users' addresses for deposits have goes to wallets that the policy names, whatever a caller or an approver says.
4. The bytes do what the payment says, or they cancel: a transfer of nothing from the wallet to itself.
5. One slot (nonce) has one payout for ever; one payout has one slot that can pay, until its attempts are dead (W31).
6. For payments: approvals of enough distinct people, or a mandate; limits and caps by the signer's own log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bursar.model.actors import same_person
from bursar.model.authorizations import Authorization, Payment, Release
from bursar.model.errors import BursarError
from bursar.rails.chain import Codec, Decoded, Order, Shape
from bursar.signer import protocol
from bursar.signer.approvals import people_who_approve
from bursar.signer.codecs import Codecs
from bursar.signer.entries import Counted
from bursar.signer.policy import AssetPolicy, ChainPolicy, Mandate, Policy
from bursar.signer.protocol import SignRequest
from bursar.signer.state import DAY_US, HOUR_US, TOMBSTONES, Attempt, State, asked_for, payment_digest
from bursar.signer.wallets import Wallet

ID_CHARACTERS_MAX: Final = 128
UNSIGNED_BYTES_MAX: Final = 4_096
APPROVALS_MAX: Final = 16
ATTEMPTS_MAX: Final = 256  # of one payout, tombstones too
WITNESSED_MAX: Final = 3  # deaths of one payout that its own nodes show: each has cost a fee, and a thief likes that
TOMBSTONES_DAILY: Final = 100_000  # in 24 hours: each takes disk and memory for ever
NONCE_MAX: Final = 2**63


class Reason(StrEnum):
    """Why a signer refuses."""

    MALFORMED = "MALFORMED"  # an id, an amount or a number that can't be
    OTHER_BYTES = "OTHER_BYTES"  # other bytes were signed for this attempt
    HALTED = "HALTED"
    UNKNOWN_CHAIN = "UNKNOWN_CHAIN"
    UNKNOWN_WALLET = "UNKNOWN_WALLET"
    UNKNOWN_ASSET = "UNKNOWN_ASSET"
    MISMATCH = "MISMATCH"  # bytes, payment, policy and earlier attempts do not say the same
    UNDECODABLE = "UNDECODABLE"
    NONCE_TAKEN = "NONCE_TAKEN"  # by another payout
    SECOND_SLOT = protocol.SECOND_SLOT  # another attempt of this payout may still pay
    DECLARED_DEAD = "DECLARED_DEAD"  # the slot was released
    NOTHING_TO_CANCEL = protocol.NOTHING_TO_CANCEL  # nothing was signed or tombstoned for the payout
    FEE_TOO_HIGH = "FEE_TOO_HIGH"
    EXPIRED = "EXPIRED"
    NOT_APPROVED = "NOT_APPROVED"
    UNKNOWN_MANDATE = "UNKNOWN_MANDATE"
    DESTINATION = "DESTINATION"  # denied, or not on the list
    OVER_LIMIT = "OVER_LIMIT"
    TOO_MANY_ATTEMPTS = "TOO_MANY_ATTEMPTS"
    NOT_PERMITTED = "NOT_PERMITTED"  # the caller lacks the right
    KEY_UNAVAILABLE = "KEY_UNAVAILABLE"
    NOT_RELEASED = "NOT_RELEASED"  # a release or the end of a halt lacks two people


@dataclass(frozen=True)
class Refuse:
    """No. `denied`: not this payment, unless the policy changes."""

    reason: Reason
    why: str
    denied: bool = False


@dataclass(frozen=True)
class Again:
    """It is on record."""

    attempt: Attempt


@dataclass(frozen=True)
class NeedsDeath:
    """Yes, if these attempts of the payout, which may still pay, are seen dead by the signer's own nodes."""

    attempts: tuple[Attempt, ...]
    order: Order


@dataclass(frozen=True)
class Sign:
    """Yes: sign these bytes, and write this down."""

    codec: Codec
    wallet: Wallet
    chain_id: int
    nonce: int | None
    slot: str
    counted: tuple[Counted, ...]


Decision = Sign | Again | NeedsDeath | Refuse
Wallets = Callable[[str], Wallet | None]  # by name, with their addresses; a BursarError if a key can't be asked now


class _No(Exception):
    """A refusal on its way out."""

    def __init__(self, reason: Reason, why: str, *, denied: bool = False) -> None:
        super().__init__(why)
        self.refuse = Refuse(reason, why, denied)


def decide(
    state: State, policy: Policy, codecs: Codecs, wallets: Wallets, request: SignRequest, now_us: int
) -> Decision:
    """Whether to sign."""
    known = state.attempt(request.payout, request.attempt)
    if known is not None and known.raw and known.asked != asked_for(request):
        return Refuse(Reason.OTHER_BYTES, "other bytes were signed for this attempt; `cancel` says which")
    if known is not None:
        return Again(known)
    try:
        return _Case(state, policy, codecs, wallets, now_us).sign(request)
    except _No as no:
        return no.refuse


def preview(
    state: State,
    policy: Policy,
    codecs: Codecs,
    wallets: Wallets,
    payment: Payment,
    authorization: Authorization,
    wallet: str,
    now_us: int,
) -> Refuse | int:
    """Whether it would sign this payment now; the wallet's nonce floor if so."""
    try:
        return _Case(state, policy, codecs, wallets, now_us).preview(payment, authorization, wallet)
    except _No as no:
        return no.refuse


def check_attempt(payout: str, attempt: int) -> Refuse | None:
    """Whether these name an attempt at all."""
    if not (0 < len(payout) <= ID_CHARACTERS_MAX and payout.isascii() and payout.isprintable()):
        return Refuse(Reason.MALFORMED, f"a payout's id is printable ASCII, at most {ID_CHARACTERS_MAX} characters")
    if not 0 <= attempt < 2**31:
        return Refuse(Reason.MALFORMED, f"{attempt} is no number of an attempt")
    return None


def check_tombstone(state: State, payout: str, now_us: int) -> Refuse | None:
    """Whether there is room for a tombstone. A thief with the right to make them must not fill disk and memory."""
    record = state.payouts.get(payout)
    if record is not None and len(record.attempts) >= 2 * ATTEMPTS_MAX:
        return Refuse(Reason.TOO_MANY_ATTEMPTS, f"the payout has {len(record.attempts)} attempts already")
    if state.used(TOMBSTONES, now_us - DAY_US) >= TOMBSTONES_DAILY:
        return Refuse(Reason.OVER_LIMIT, f"{TOMBSTONES_DAILY} attempts were cancelled in 24 hours without being signed")
    return None


def check_release(state: State, release: Release, people: list[str]) -> Refuse | None:
    """Whether attempts may be declared dead by these people, whose signatures are right."""
    record = state.payouts.get(release.payout)
    for dead in release.dead:
        found = None if record is None else record.attempts.get(dead.attempt)
        if found is None or not found.raw or found.hash != dead.hash:
            return Refuse(Reason.MISMATCH, f"attempt {dead.attempt} with hash {dead.hash} was not signed here")
    if not release.dead:
        return Refuse(Reason.MALFORMED, "a release names the attempts that are dead")
    if len(people) < 2:
        return Refuse(Reason.NOT_RELEASED, f"two approvers sign a release, and {len(people)} of these signatures count")
    return None


class _Case:
    """One question, with all that it is judged by. A check that fails raises `_No`."""

    def __init__(self, state: State, policy: Policy, codecs: Codecs, wallets: Wallets, now_us: int) -> None:
        self.state = state
        self.policy = policy
        self.codecs = codecs
        self.wallets = wallets
        self.now_us = now_us

    def sign(self, request: SignRequest) -> Sign | NeedsDeath:
        self._may_sign(request)
        payment = request.payment
        chain, wallet = self._wallet(payment, request.wallet)
        codec = self.codecs(chain.kind)
        if (request.chain, request.payout) != (payment.chain, payment.payout):
            raise _No(Reason.MISMATCH, "chain or payout of the request are not the payment's")
        if request.sender != wallet.address:
            raise _No(Reason.MISMATCH, f"wallet {wallet.name} has the address {wallet.address}, not {request.sender}")
        decoded = self._decode(codec, chain, request.unsigned)
        slot = self._slot(chain, wallet, decoded, request)
        if request.shape is Shape.CANCEL:
            counted = self._cancels(request, chain, wallet, decoded)
        else:
            asset = self._asset(payment, chain)
            to = self._pays(codec, payment, decoded)
            if decoded.fee.worst > chain.fee_max:
                raise _No(Reason.FEE_TOO_HIGH, f"it may cost {decoded.fee.worst}, and {chain.fee_max} is allowed")
            counted = self._authorized(payment, request.authorization, wallet, asset, to)
            if waits := self._other_slots(request.payout, slot):
                return NeedsDeath(waits, order_of(payment, to))
        return Sign(codec, wallet, chain.chain_id, decoded.slot.nonce, slot, counted)

    def preview(self, payment: Payment, authorization: Authorization, name: str) -> int:
        if self.state.halted or self.state.behind:
            raise _No(Reason.HALTED, f"the signer is halted: {self.state.halted}")
        chain, wallet = self._wallet(payment, name)
        asset = self._asset(payment, chain)
        to = self._canonical(self.codecs(chain.kind), chain, payment.to)
        self._authorized(payment, authorization, wallet, asset, to)
        return self.state.nonce_floor(chain.chain_id, wallet.address)

    # --- what is asked

    def _may_sign(self, request: SignRequest) -> None:
        state = self.state
        if (wrong := check_attempt(request.payout, request.attempt)) is not None:
            raise _No(wrong.reason, wrong.why)
        if state.halted or state.behind:
            raise _No(Reason.HALTED, f"the signer is halted: {state.halted}")
        record = state.payouts.get(request.payout)
        if record is not None and len(record.attempts) >= ATTEMPTS_MAX:
            raise _No(Reason.TOO_MANY_ATTEMPTS, f"the payout has {ATTEMPTS_MAX} attempts already")
        if len(request.unsigned) > UNSIGNED_BYTES_MAX:
            raise _No(Reason.UNDECODABLE, f"a transaction of more than {UNSIGNED_BYTES_MAX} bytes")

    def _wallet(self, payment: Payment, name: str) -> tuple[ChainPolicy, Wallet]:
        """Chain and wallet, as the policy has them."""
        wrong = check_attempt(payment.payout, 0)
        if wrong is not None:
            raise _No(wrong.reason, wrong.why)
        chain = self.policy.chains.get(payment.chain)
        if chain is None:
            raise _No(Reason.UNKNOWN_CHAIN, f"the policy has no chain {payment.chain!r}")
        wallet = self._found(name, chain.name)
        if wallet is None:
            raise _No(Reason.UNKNOWN_WALLET, f"the policy has no wallet {name!r} on {chain.name}")
        return chain, wallet

    def _found(self, name: str, chain: str) -> Wallet | None:
        try:
            wallet = self.wallets(name)
        except BursarError as error:  # the address of a user's wallet comes from its key
            raise _No(Reason.KEY_UNAVAILABLE, str(error)) from None
        return wallet if wallet is not None and wallet.chain == chain else None

    def _asset(self, payment: Payment, chain: ChainPolicy) -> AssetPolicy:
        """The asset, as the policy has it; and the payment is the one that was signed before, if any was."""
        asset = self.policy.assets.get((chain.name, payment.asset))
        if asset is None:
            raise _No(Reason.UNKNOWN_ASSET, f"the policy has no asset {payment.asset!r} on {chain.name}", denied=True)
        said = (payment.chain_id, payment.decimals, self._contract(chain, payment.contract))
        if said != (chain.chain_id, asset.decimals, asset.contract):
            why = "chain id, contract or decimals of the payment are not the policy's"
            raise _No(Reason.MISMATCH, why, denied=True)
        record = self.state.payouts.get(payment.payout)
        if record is not None and record.payment not in (b"", payment_digest(payment)):
            raise _No(Reason.MISMATCH, "another payment was signed for this payout", denied=True)
        return asset

    def _contract(self, chain: ChainPolicy, contract: str) -> str:
        return self._canonical(self.codecs(chain.kind), chain, contract) if contract else ""

    def _canonical(self, codec: Codec, chain: ChainPolicy, address: str) -> str:
        try:
            return codec.check_address(chain.name, address)
        except BursarError as error:
            raise _No(Reason.MISMATCH, str(error), denied=True) from None

    # --- what the bytes do

    def _decode(self, codec: Codec, chain: ChainPolicy, unsigned: bytes) -> Decoded:
        try:
            decoded = codec.decode(unsigned)
        except BursarError as error:
            raise _No(Reason.UNDECODABLE, str(error)) from None
        if decoded.chain_id not in (None, chain.chain_id):
            raise _No(Reason.MISMATCH, f"these bytes are for chain {decoded.chain_id}, not {chain.chain_id}")
        if decoded.slot.nonce is not None and not 0 <= decoded.slot.nonce < NONCE_MAX:
            raise _No(Reason.UNDECODABLE, f"{decoded.slot.nonce} is no nonce")
        return decoded

    def _pays(self, codec: Codec, payment: Payment, decoded: Decoded) -> str:
        """The bytes pay exactly the payment; the recipient."""
        chain = self.policy.chains[payment.chain]
        to = self._canonical(codec, chain, payment.to)
        wanted = (to, self._contract(chain, payment.contract), amount_of(payment.amount_raw), payment.memo)
        found = (decoded.to, decoded.contract, decoded.amount, decoded.memo)
        names = ("recipient", "contract", "amount", "memo")
        if wrong := [name for name, one, other in zip(names, wanted, found, strict=True) if one != other]:
            raise _No(Reason.MISMATCH, f"the bytes pay another {', '.join(wrong)} than the payment says")
        return to

    def _cancels(
        self, request: SignRequest, chain: ChainPolicy, wallet: Wallet, decoded: Decoded
    ) -> tuple[Counted, ...]:
        """The bytes move nothing, from the wallet to itself: they only take a slot."""
        if (decoded.to, decoded.contract, decoded.amount, decoded.memo) != (wallet.address, "", 0, ""):
            raise _No(Reason.MISMATCH, "a cancellation moves nothing, from the wallet to itself")
        if request.payout not in self.state.payouts:
            raise _No(Reason.NOTHING_TO_CANCEL, "no attempt of this payout was signed or tombstoned")
        if decoded.fee.worst > chain.cancel_fee_max:
            raise _No(Reason.FEE_TOO_HIGH, f"it may cost {decoded.fee.worst}, and {chain.cancel_fee_max} is allowed")
        scope = f"cancels:{chain.chain_id}:{wallet.address}"
        if self.state.used(scope, self.now_us - DAY_US) >= chain.cancels_daily:
            raise _No(Reason.OVER_LIMIT, f"{chain.cancels_daily} cancellations were signed in 24 hours")
        return (Counted(scope=scope, amount="1"),)

    # --- slots

    def _slot(self, chain: ChainPolicy, wallet: Wallet, decoded: Decoded, request: SignRequest) -> str:
        """What the bytes take, which no other payout may ever have (W31). Without a nonce: the transaction itself."""
        nonce = decoded.slot.nonce
        what = str(nonce) if nonce is not None else f"#{hashlib.sha256(request.unsigned).hexdigest()}"
        slot = f"{chain.chain_id}:{wallet.address}:{what}"
        if self.state.slots.get(slot, request.payout) != request.payout:
            raise _No(Reason.NONCE_TAKEN, f"nonce {what} of {wallet.name} belongs to another payout, for ever")
        return slot

    def _other_slots(self, payout: str, slot: str) -> tuple[Attempt, ...]:
        """Attempts of the payout that may still pay in another slot."""
        record = self.state.payouts.get(payout)
        attempts = [] if record is None else list(record.attempts.values())
        if any(attempt.dead and attempt.slot == slot for attempt in attempts):
            raise _No(Reason.DECLARED_DEAD, "this slot of the payout was declared dead, and must stay so")
        return tuple(attempt for attempt in attempts if attempt.pays and attempt.slot != slot)

    # --- why it may be paid

    def _authorized(
        self, payment: Payment, authorization: Authorization, wallet: Wallet, asset: AssetPolicy, to: str
    ) -> tuple[Counted, ...]:
        """Approved or mandated, within all limits; what counts towards caps."""
        amount = amount_of(payment.amount_raw)
        if payment.expires_us and self.now_us > payment.expires_us:
            raise _No(Reason.EXPIRED, "the payment has expired: it has to be approved anew", denied=True)
        # Before why it may be paid: no approval and no mandate takes users' deposits anywhere else.
        if wallet.user and to not in self.policy.own_addresses(wallet.chain):
            why = f"{wallet.name} is for deposits, and pays to the wallets that the policy names alone"
            raise _No(Reason.DESTINATION, why, denied=True)
        if to in asset.deny or (asset.allow and to not in asset.allow):
            raise _No(Reason.DESTINATION, f"{to} is not a destination that the policy allows", denied=True)
        if amount > asset.payment_max:
            raise _No(Reason.OVER_LIMIT, f"a payment of {amount} is above the limit, {asset.payment_max}", denied=True)
        scope = f"asset:{payment.chain_id}:{wallet.address}:{asset.contract}"
        counted = [self._within(payment, scope, amount, asset.hourly_max, asset.daily_max)]
        if authorization.mandate and authorization.approvals:
            raise _No(Reason.NOT_APPROVED, "a payment has a mandate or approvals, not both")
        if authorization.mandate:
            counted.append(self._mandated(payment, authorization.mandate, amount, to))
        else:
            self._approved(payment, authorization, 2 if amount > asset.dual_above else 1)
        return tuple(count for count in counted if count is not None)

    def _approved(self, payment: Payment, authorization: Authorization, needed: int) -> None:
        if len(authorization.approvals) > APPROVALS_MAX:
            raise _No(Reason.MALFORMED, f"more than {APPROVALS_MAX} approvals")
        try:
            message = payment.canonical()
        except BursarError as error:  # text that two programs could read as two things
            raise _No(Reason.MALFORMED, str(error), denied=True) from None
        others = [one for one in authorization.approvals if not same_person(one.approver, payment.requester)]
        people = people_who_approve(self.policy.approvers, others, message)
        if len(people) < needed:
            given = len(authorization.approvals)
            why = f"{needed} distinct approvers are needed, and {len(people)} of {given} signatures count"
            raise _No(Reason.NOT_APPROVED, why)

    def _mandated(self, payment: Payment, name: str, amount: int, to: str) -> Counted | None:
        mandate = self.policy.mandates.get(name)
        if mandate is None or (mandate.chain, mandate.asset) != (payment.chain, payment.asset):
            raise _No(Reason.UNKNOWN_MANDATE, f"no mandate {name!r} for {payment.asset} on {payment.chain}")
        if mandate.is_for_some and not self._is_for(mandate, payment, to):
            raise _No(Reason.DESTINATION, f"{to} is not a destination of the mandate {name}", denied=True)
        if amount > mandate.payment_max:
            why = f"a payment of {amount} is above the mandate's limit, {mandate.payment_max}"
            raise _No(Reason.OVER_LIMIT, why, denied=True)
        return self._within(payment, f"mandate:{name}", amount, mandate.hourly_max, mandate.daily_max)

    def _is_for(self, mandate: Mandate, payment: Payment, to: str) -> bool:
        """Whether this is one of the mandate's destinations."""
        if to in mandate.allow or (mandate.own_wallets and to in self.policy.own_addresses(mandate.chain)):
            return True
        # Of a user's address the payment must say the name, and the key must have the address: nothing is searched.
        account = wallet_account(mandate.chain, "")
        if not mandate.own_deposits or not payment.account.startswith(account):
            return False
        wallet = self._found(payment.account.removeprefix(account), mandate.chain)
        return wallet is not None and wallet.user > 0 and wallet.address == to

    def _within(self, payment: Payment, scope: str, amount: int, hourly: int, daily: int) -> Counted | None:
        """Within the caps of a scope. A payout counts once in each, however often its fee is raised."""
        record = self.state.payouts.get(payment.payout)
        if record is not None and scope in record.scopes:
            return None
        for window_us, most, name in ((HOUR_US, hourly, "hour"), (DAY_US, daily, "24 hours")):
            used = self.state.used(scope, self.now_us - window_us)
            if used + amount > most:
                raise _No(Reason.OVER_LIMIT, f"{used} of {most} was signed within the {name}; {amount} is too much now")
        return Counted(scope=scope, amount=str(amount))


def wallet_account(chain: str, wallet: str) -> str:
    """The account of a wallet in the ledger of callers: whose money it is that goes to a user's address."""
    return f"external:wallet:{chain}:{wallet}"


def amount_of(text: str) -> int:
    """An amount in the chain's smallest units, written in the one way there is."""
    if not (text.isascii() and text.isdigit() and len(text) <= 78 and text[0] != "0"):
        raise _No(Reason.MALFORMED, "amount_raw is a positive whole number in plain digits", denied=True)
    return int(text)


def order_of(payment: Payment, to: str) -> Order:
    """A payment as its chain sees it; `to` as the chain writes it."""
    return Order(
        payout=payment.payout,
        to=to,
        contract=payment.contract,
        amount=amount_of(payment.amount_raw),
        memo=payment.memo,
    )
