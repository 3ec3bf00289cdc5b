"""The signer's log against this database: each can be restored from a backup, and the other one shows it (W33).

The signer refuses a caller who has seen more of its log than it has: then the signer was restored. If its log has
attempts that this database does not know, the database was: payouts stop by themselves until two people have looked,
and what was forgotten is put back. A payout that is missing is written down again, under its own id; when it goes on,
the signer says that it has signed for it, and it is watched instead of paid again (assigning). A forgotten replacement
is started again, and gets the same signature.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

import msgspec

from bursar.engine import Engine, set_pause
from bursar.flows.payouts.machine import CONFIRMED, DETACH, FAILED, KNOWN, MACHINE, REPLACEMENTS, STATUS
from bursar.flows.payouts.outside import SIGNER_PEER, Outside
from bursar.flows.payouts.payout import (
    ATTEMPT,
    NONCE,
    SUSPENSE,
    WALLETS,
    Attempt,
    Payout,
    Replacement,
    attempt_key,
    replacement_id,
)
from bursar.flows.payouts.twins import Twins
from bursar.flows.payouts.wallets import nonce_key
from bursar.ledger import Ledger
from bursar.model.accounts import ExternalAccount
from bursar.model.errors import AlreadyExists, Conflict, RecordMoved, Refusal
from bursar.model.flow_rows import RowTaken, numbered
from bursar.model.machine import Kind
from bursar.model.marks import Restored, restored
from bursar.model.records import Record
from bursar.signer.protocol import LogEntry, SignerRefused, SignerUnavailable, SignRequest

PAGE: Final = 500
INTERVAL_S: Final = 60.0
RETRY_S: Final = 2.0
ACTOR: Final = "signer"
UNCONFIGURED: Final = "what it has signed can't be put back where no nodes of its chain are configured"
ENDED: Final = (STATUS[CONFIRMED], STATUS[FAILED])

log = logging.getLogger("bursar.payouts")


class Reconciling:
    """Compares the signer's log with the attempts here."""

    def __init__(self, out: Outside, twins: Twins, engine: Engine, ledger: Ledger) -> None:
        self.out = out
        self.ledger = ledger
        self.engine = engine
        self.twins = twins
        self._checked = -1  # up to which sequence all is known here

    async def run(self) -> None:
        """Until cancelled: compare, at the start and from time to time."""
        while True:
            try:
                await self.look()
            except (SignerUnavailable, SignerRefused) as away:
                log.error("the signer's log can't be compared: %s", away)
            await self.out.ports.sleep(INTERVAL_S if self.out.reconciled else RETRY_S)

    async def look(self) -> Restored:
        """Compare once. Until this has succeeded, no payout takes a nonce in this process."""
        mark = await self.out.store.read.marks.highest(SIGNER_PEER + self.out.signer.name)
        status = await self.out.signer.status()
        after, unknown = max(self._checked, mark), list[LogEntry]()
        while page := await self.out.signer.log(after, PAGE):
            unknown += [entry for entry in page if not await self._is_known(entry)]
            after = page[-1].sequence
        found = restored(mark=mark, sequence=status.sequence, unknown=len(unknown))
        if found is Restored.PEER:
            reason = f"the signer's log ends at {status.sequence}, and {mark} is known here: it was restored"
            await self._stop(reason)
            return found
        if found is Restored.DATABASE:
            numbers = ", ".join(sorted({entry.payout for entry in unknown})[:10])
            await self._stop(f"the signer has signed what this database does not know: {numbers}; it was restored")
            there = [one for one in unknown if one.request is None or one.request.chain in self.out.chains]
            for entry in there:
                await self._put_back(entry)
            if away := {one.request.chain for one in unknown if one not in there and one.request is not None}:
                names = ", ".join(sorted(away))
                raise SignerUnavailable(self.out.signer.name, f"{UNCONFIGURED} ({names}): set chain_nodes")
        self._checked = max(after, mark)
        self.out.reconciled = True
        return found

    async def _is_known(self, entry: LogEntry) -> bool:
        """Whether the attempt is here. Its unsigned bytes are stored before the signer is asked (W30).

        A replacement is known if its payout knows of it: one that was put back is told to its payout afterwards.
        """
        key = attempt_key(entry.payout, entry.attempt)
        if await self.out.store.read.flow_rows.get(MACHINE.name, ATTEMPT.name, key) is not None:
            return True
        record = await self.engine.get(MACHINE.name, entry.payout)
        if record is not None and entry.attempt <= msgspec.json.decode(record.body, type=Payout).elsewhere:
            return True
        id_ = replacement_id(entry.payout, entry.attempt)
        if await self.engine.get(REPLACEMENTS.name, id_) is None:
            return False
        return record is None or STATUS[record.state] in ENDED or entry.attempt <= _attempts(record)

    async def _stop(self, reason: str) -> None:
        await set_pause(self.out.store, "flow", MACHINE.name, actor=ACTOR, reason=reason, two_people=True)
        await self.out.alert(None, "payouts and signer disagree", "critical", reason)

    async def _put_back(self, entry: LogEntry) -> None:
        """Write down what was forgotten; where it is there by now, nothing happens."""
        request = entry.request
        if request is None:
            return  # a tombstone: nothing of it can ever happen
        record = await self.engine.get(MACHINE.name, entry.payout)
        if record is None:
            await self._start_again(request)
        elif STATUS[record.state] in ("processing", "confirming") and entry.attempt > _attempts(record):
            if await self._has_slot(record, request):
                await self._replace_again(record, request)
            else:  # it has died here by then: when that is seen, it is adopted (assigning)
                await self._tell(record, {"attempt": request.attempt, "elsewhere": True})

    async def _start_again(self, request: SignRequest) -> None:
        """Its money is what its parent holds, if that is there; else its hold is taken anew; from suspense, if its
        account has less than that by now."""
        parent = await self._parent(request.payment.source)
        is_between_wallets = request.payment.account.startswith(WALLETS)
        body = Payout(
            payment=request.payment,
            authorization=request.authorization,
            native=self.out.chains[request.chain].network.native,
            parent=parent,
            adopted=bool(parent),
            requested_wallet=request.wallet if is_between_wallets else "",  # no other one may pay a sweep or a refill
        )
        if is_between_wallets:  # a user's wallet may be forgotten with its account, and is what this is booked from
            with contextlib.suppress(AlreadyExists):
                await self.ledger.create_account(request.payment.account, policy=ExternalAccount())
        for _ in range(4):
            try:
                owner = request.payment.account
                started = await self.engine.start(MACHINE.name, body, id=request.payout, owner=owner, actor=ACTOR)
                await self.engine.hand_over(started.record)
                return
            except RowTaken as taken:  # requested again since the restore: it must not be paid a second time
                why = f"{request.payout} was signed for the same reason before the database was restored"
                alert = "requested again after a restore"
                if not (parent and await self._detached(taken.record, parent)):
                    await self.twins.stop(taken.record, request.payout, why, alert, actor=ACTOR)
                body = msgspec.structs.replace(body, claimed=f"restored:{request.payout}")
            except (RecordMoved, Conflict):
                return  # another process has done it
            except Refusal as refusal:
                if body.parent:  # it does not wait for a payout: it has another one, or has ended
                    body = msgspec.structs.replace(body, parent="", adopted=False)
                    continue
                log.critical("%s can't be held from its account again: %s", request.payout, refusal)
                body = msgspec.structs.replace(body, booked_from=SUSPENSE)

    async def _detached(self, number: int, parent: str) -> bool:
        """Give up another payout of the same parent, of which nothing is signed: the parent's money is for this one."""
        while True:  # until it is detached, or is no longer pending
            record = await self.out.store.read.records.by_number(number)
            if record is None or STATUS[record.state] != "pending":
                return False
            if msgspec.json.decode(record.body, type=Payout).parent != parent:
                return False
            with contextlib.suppress(RecordMoved, Conflict):
                await self.engine.signal(record, DETACH, ACTOR, {}, sender="detach")
                return True

    async def _parent(self, source: str) -> str:
        """The open record that has ordered a payout, by the payout's source."""
        for flow in self.out.guards:
            record = await self.engine.get(flow, source)
            if record is not None and self.engine.require(flow).machine.state(record.state).kind is not Kind.TERMINAL:
                return f"{flow}/{source}"
        return ""

    async def _replace_again(self, record: Record, request: SignRequest) -> None:
        decoded = self.out.chains[request.chain].codec.decode(request.unsigned)
        attempt = Attempt(
            number=request.attempt,
            shape=request.shape,
            wallet=request.wallet,
            nonce=decoded.slot.nonce,
            expires=decoded.slot.expires,
            reference=decoded.slot.reference,
            fee=decoded.fee,
            unsigned=request.unsigned.hex(),
        )
        body = Replacement(
            payout=request.payout,
            payment=request.payment,
            authorization=request.authorization,
            sender=request.sender,
            attempt=attempt,
        )
        id_ = replacement_id(request.payout, request.attempt)
        with contextlib.suppress(RecordMoved, Conflict):  # another process has done it
            started = await self.engine.start(REPLACEMENTS.name, body, id=id_, owner=record.owner, actor=ACTOR)
            await self.engine.hand_over(started.record)
        await self._tell(record, {"attempt": request.attempt})

    async def _has_slot(self, record: Record, request: SignRequest) -> bool:
        """Whether the attempt is in the slot that the payout has now."""
        body = msgspec.json.decode(record.body, type=Payout)
        slot = self.out.chains[request.chain].codec.decode(request.unsigned).slot
        if request.sender != body.sender:
            return False
        if body.tries or slot.nonce is None:
            return slot in [one.slot for one in body.tries]
        rows = await self.out.store.read.flow_rows.of_record(record.number, NONCE.name)
        return numbered(nonce_key(request.chain, request.sender), slot.nonce) in [row.key for row in rows]

    async def _tell(self, record: Record, evidence: dict[str, Any]) -> None:
        """Tell a payout of an attempt, whatever moves it meanwhile."""
        name = f"known {evidence['attempt']}"
        while STATUS[record.state] not in ENDED:
            try:
                await self.engine.signal(record, KNOWN, ACTOR, evidence, sender=name)
                return
            except RecordMoved:  # into another state, and a worker moves it on meanwhile
                record = await self.engine.record(MACHINE.name, record.id)


def _attempts(record: Record) -> int:
    """How many attempts a payout knows of: one that was forgotten may be adopted by now."""
    return msgspec.json.decode(record.body, type=Payout).attempts
