"""What the actions of payouts share: the chains, the signer, the documents, and the rows of attempts.

Not here: what each action does (assigning, signing, confirming), which is where the order of writing and calling is
decided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from bursar.documents import Documents
from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.documents import AssetDocument
from bursar.flows.payouts.machine import MACHINE, REPLACEMENTS
from bursar.flows.payouts.payout import ATTEMPT, HASH, Attempt, Payout, attempt_key
from bursar.flows.payouts.wallets import Wallets
from bursar.model.authorizations import Authorization, Payment
from bursar.model.flow_rows import Claim, FlowRow, Put, RowOperation
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.rails.chain import Chain, Fee, Order, Shape, Try
from bursar.signer.protocol import KnownAttempt, Signature, Signer, SignRequest
from bursar.store import Store
from bursar.together import Together

OUTAGE_S: Final = 10.0  # until nodes or signer are asked again
UNCHECKED: Final = "the signer's log was not compared with the database yet"
SIGNER_PEER: Final = "signer:"  # and its name: whose log the database knows how far (W33)

Guard = Callable[[str, Payout], Awaitable[str]]  # parent's id, payout → why it may not be paid any more; "": it may
Alert = Callable[[Record | None, str, str, str], Awaitable[None]]  # record, reason, severity, message
# Causes for which an operator is called, and not only when the payout has waited for long.
NEEDS_RELEASE: Final = "NEEDS_RELEASE"  # its attempt is dead at our nodes, and the signer has not seen that (W31)
ALERTS: Final = {
    "LOW_BALANCE": "warning",
    "NO_WALLET": "warning",
    "NEEDS_PEOPLE": "critical",
    NEEDS_RELEASE: "critical",
}


class NotNow(Exception):
    """The payout waits for a cause that is not its own."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


def waits(item: FlowRecord[Any], code: str, message: str, retry_after_s: float | None = None) -> Answer:
    """Stay here. Told once: the same cause again leaves no row of history."""
    answer = Answer(outcome=Outcome.PENDING, code=code, message=message, retry_after_s=retry_after_s, decision=True)
    return msgspec.structs.replace(answer, unchanged=item.record.error == answer.error)


def fails(code: str, message: str, **evidence: Any) -> Answer:
    """This payment will not be made: nothing of it is signed, or all of it is dead."""
    return Answer(outcome=Outcome.EXPLICIT_FAIL, code=code, message=message, evidence=evidence)


class Outside:
    """Everything that the actions reach."""

    def __init__(
        self, store: Store, documents: Documents, chains: Mapping[str, Chain], signer: Signer, alert: Alert
    ) -> None:
        self.store = store
        self.ports = store.ports
        self.documents = documents
        self.chains = chains
        self.signer = signer
        self.alert = alert
        self.guards: dict[str, Guard] = {}  # by the flow that orders payouts: asked before each attempt (W37)
        self.wallets = Wallets(store, documents)
        self._attempts = Together(self._read_attempts)
        self.reconciled = False  # whether the signer's log was compared with this database: no send before (W33)

    async def waits(self, item: FlowRecord[Any], code: str, message: str, retry_after_s: float) -> Answer:
        """Stay here; where an operator can help, an alert is raised."""
        answer = waits(item, code, message, retry_after_s)
        if code in ALERTS and not answer.unchanged:
            await self.alert(item.record, code.lower().replace("_", " "), ALERTS[code], f"{item.id}: {message}")
        return answer

    async def attempt(self, item: FlowRecord[Payout]) -> tuple[Chain | None, FlowRow | None, Attempt]:
        """The chain of a payout, and the attempt that it makes or made last, with its row."""
        key = attempt_key(item.id, item.body.current)
        row = await self._attempts.ask(key)
        return self.chains.get(item.body.payment.chain), row, read_attempt(row)

    async def _read_attempts(self, keys: list[str]) -> dict[str, FlowRow]:
        return await self.store.read.flow_rows.by_keys(MACHINE.name, ATTEMPT.name, keys)

    async def replacement(self, payout: str, number: int) -> Attempt | None:
        """An attempt that a record of its own makes; None until it is signed or given up."""
        row = await self.store.read.flow_rows.get(REPLACEMENTS.name, ATTEMPT.name, attempt_key(payout, number))
        return None if row is None else read_attempt(row)


NO_ATTEMPT: Final = Attempt(number=0, shape=Shape.PAY, wallet="", fee=Fee(gas_limit=0, price=0))


def read_attempt(row: FlowRow | None) -> Attempt:
    """An attempt as its row has it."""
    return NO_ATTEMPT if row is None else msgspec.json.decode(row.body, type=Attempt)


def put_attempt(payout: str, attempt: Attempt, version: int) -> Put:
    """Write an attempt by compare-and-set on its row: bytes are stored once (W18)."""
    return Put(ATTEMPT, attempt_key(payout, attempt.number), version, msgspec.to_builtins(attempt))


def claim_hash(payout: str, chain: str, attempt: Attempt) -> Claim:
    """Every hash ever signed is one payout's, for ever (W41)."""
    return Claim(HASH, f"{chain}/{attempt.hash}", {"payout": payout, "attempt": attempt.number})


def order_of(payout: str, body: Payout, asset: AssetDocument | None = None) -> Order:
    """The payment as its chain sees it."""
    payment = body.payment
    return Order(
        payout=payout,
        to=payment.to,
        contract=payment.contract,
        amount=body.order_amount,
        memo=payment.memo,
        gas_limit_max=0 if asset is None else asset.gas_limit_max,
    )


def sign_request(
    payout: str, sender: str, payment: Payment, authorization: Authorization, attempt: Attempt
) -> SignRequest:
    """The question for the signer: the same for an attempt, however often it is asked."""
    return SignRequest(
        payout=payout,
        attempt=attempt.number,
        shape=attempt.shape,
        chain=payment.chain,
        wallet=attempt.wallet,
        sender=sender,
        unsigned=bytes.fromhex(attempt.unsigned),
        payment=payment,
        authorization=authorization,
    )


def unlike(chain: Chain, request: SignRequest, said: Signature) -> str:
    """Why signed bytes are not those that were asked for; "" if they are. A wrong signer must not be believed."""
    decoded, sender, hash_ = chain.codec.read(said.raw)
    if decoded != chain.codec.decode(request.unsigned):
        return "they do something else"
    if sender != request.sender:
        return f"{sender} has signed, not {request.sender}"
    return "" if hash_ == said.hash else f"their hash is {hash_}, not {said.hash}"


def from_signer(chain: Chain, wallet: str, known: KnownAttempt) -> Attempt:
    """An attempt as the signer has it: bytes and hash, if it was signed."""
    attempt = Attempt(
        number=known.attempt,
        shape=known.shape,
        wallet=wallet,
        fee=Fee(gas_limit=0, price=0),
        sequence=known.sequence,
        outcome="" if known.raw else "never signed",
    )
    if not known.raw:
        return attempt
    decoded, _, _ = chain.codec.read(known.raw)
    return msgspec.structs.replace(
        attempt,
        nonce=decoded.slot.nonce,
        expires=decoded.slot.expires,
        reference=decoded.slot.reference,
        fee=decoded.fee,
        raw=known.raw.hex(),
        hash=known.hash,
    )


def _died(attempt: Attempt) -> Attempt:
    return msgspec.structs.replace(attempt, outcome="dead")


def adopted(
    chain: Chain, payout: str, body: Payout, wallet: str, known: list[KnownAttempt], now_us: int
) -> tuple[Payout, tuple[RowOperation, ...]]:
    """A payout with the attempts that the signer has of it: signed ones are watched, tombstones are kept.

    Only those of the last slot are watched: the signer takes another one when it has seen the first one dead (W31).
    """
    last = next(one for one in reversed(known) if one.raw)  # behind it may be tombstones
    slot = from_signer(chain, wallet, last).slot
    rows: list[RowOperation] = []
    tries: list[Try] = list(body.tries)
    for one in known:
        attempt = from_signer(chain, wallet, one)
        live = (one.sender, attempt.slot) == (last.sender, slot)
        rows.append(put_attempt(payout, attempt if live or not one.raw else _died(attempt), 0))
        if attempt.raw:
            rows.append(claim_hash(payout, body.payment.chain, attempt))
            tries += [attempt.attempted()] if live else []
    after = msgspec.structs.replace(
        body,
        wallet=wallet,
        sender=last.sender,
        attempts=known[-1].attempt,
        current=last.attempt,
        shape=last.shape,
        tries=tuple(tries),
        first_sent_us=now_us,
    )
    return after, tuple(rows)
