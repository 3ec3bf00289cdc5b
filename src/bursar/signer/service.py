"""A signer at work: requests in, decisions, signatures, and no answer before its entry is on disk.

Requests are decided one after the other; a halt does not wait its turn. What is decided is in memory at once, and its
answer waits: whenever the log is free, all entries since are one frame, one write and one fsync, and then the answers
that it covers go out. Refusals and questions wait likewise, because they too are about what was decided. If the disk
fails, no answer leaves any more and `run` raises: the process has to end.

Not here: who asks and how (`server`), what is allowed (`rules`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from bursar.model.actors import check_actor, check_reason, same_person
from bursar.model.authorizations import Approval, Authorization, DeadAttempt, Payment, Release, Unhalt
from bursar.ports import Ports, SerialExecutor
from bursar.rails.chain import Order, Question, Try, Undecodable
from bursar.signer import entries, rules
from bursar.signer.approvals import people_who_approve
from bursar.signer.codecs import Codecs
from bursar.signer.entries import Entry, What
from bursar.signer.errors import KeyUnavailable, PolicyRefused, SignerStopped
from bursar.signer.keys import Keys
from bursar.signer.log import Log, Torn, frame
from bursar.signer.policy import LOCAL, Policy
from bursar.signer.protocol import (
    KnownAttempt,
    LogEntry,
    Never,
    Preview,
    Signature,
    SignerRefused,
    SignerStatus,
    SignerUnavailable,
    SignRequest,
)
from bursar.signer.rules import Again, NeedsDeath, Reason, Refuse, Sign
from bursar.signer.state import Attempt, State
from bursar.signer.wallets import Wallet, wrong_keys
from bursar.signer.witness import Proof, Witness

LOG_ENTRIES_MAX: Final = 1_000
KEY_S: Final = 30.0  # for a hardware module or a key service to sign
LOG_BYTES_MAX: Final = 1024 * 1024  # of one answer, about


class Service:
    """One signer. `open` it, keep `run` running, and ask."""

    def __init__(self, ports: Ports, folder: str, keys: Keys, codecs: Codecs, witness: Witness | None) -> None:
        self.state = State()
        self.policy: Policy | None = None
        self.durable = 0  # promises up to this sequence are on disk
        self._written = 0  # entries up to this number are
        self._ports = ports
        self._keys = keys
        self._codecs = codecs
        self._witness = witness
        self._log = Log(ports.files(), folder)
        self._lane: SerialExecutor = ports.lane("signer-log")
        self._deciding = asyncio.Lock()
        self._reading = asyncio.Lock()  # one read waits for the disk at a time, or many would hold up what is signed
        self._pending: list[tuple[str, bytes, int]] = []  # hash, bytes, sequence
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._stopping = False

    @classmethod
    async def open(
        cls,
        ports: Ports,
        folder: str,
        policy: Policy,
        keys: Keys,
        codecs: Codecs,
        *,
        witness: Witness | None = None,
        new: bool = False,
    ) -> Service:
        """A signer on what its folder holds. Raises SignerInUse, SignerDamaged, NoLog, PolicyRefused, or an OSError."""
        service = cls(ports, folder, keys, codecs, witness)
        identity, at_us = ports.token(), ports.now_us()
        created = entries.Created(name=policy.name, identity=identity)
        first = Entry(number=1, sequence=0, previous=entries.NO_HASH, at_us=at_us, caller="", what=created)
        try:
            await service._lane.run(partial(service._log.open, service.state, (lambda: first) if new else None))
            service.durable, service._written = service.state.sequence, service.state.number
            service.use(policy)
        except BaseException:  # it has answered no caller yet: let go of the log's lock, and pass it on
            service.close()
            raise
        return service

    @property
    def name(self) -> str:
        """Its name, which its log has for ever."""
        return self.state.name

    @property
    def torn(self) -> Torn | None:
        """What was cut off the log when it was opened."""
        return self._log.torn

    def use(self, policy: Policy) -> None:
        """Work by this policy from now on. PolicyRefused, and the old one stays, if it does not fit the keys."""
        problems = []
        if policy.name != self.state.name:
            problems.append(f"name: this log is of the signer {self.state.name!r}, not of {policy.name!r}")
        problems += wrong_keys(policy.wallets, policy.deposits, self._address)
        if problems:
            raise PolicyRefused("file", "; ".join(problems))
        self.policy = policy
        self._append("", entries.Started(policy=policy.digest))

    def _address(self, wallet: Wallet) -> str:
        """The address that a wallet's key has, as its chain writes it."""
        return self._codecs(wallet.kind).check_address(wallet.chain, self._keys.address(wallet))

    def _wallet(self, name: str) -> Wallet | None:
        """A wallet of the policy, with its address: that of a user's deposits is not written there."""
        wallet = self._policy.wallet(name)
        if wallet is None or not wallet.user:
            return wallet
        return msgspec.structs.replace(wallet, address=self._address(wallet))

    # --- questions

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        """Would it sign this payment now?"""
        self._check_whole()
        found = self._previewed(payment, authorization, wallet)
        why = ""
        if isinstance(found, int) and (live := self._live(payment.payout)):
            why = await self._see_dead("", payment.payout, live, self._order(payment))
            found = self._previewed(payment, authorization, wallet)
        if isinstance(found, int) and (live := self._live(payment.payout)):
            found = _second_slot(payment.payout, live, why)
        await self._until_durable()
        if isinstance(found, Refuse):
            raise self._refused(found)
        return Preview(nonce_floor=found, sequence=self.durable)

    def _previewed(self, payment: Payment, authorization: Authorization, wallet: str) -> Refuse | int:
        by, now_us = (self.state, self._policy, self._codecs, self._wallet), self._ports.now_us()
        return rules.preview(*by, payment, authorization, wallet, now_us)

    def _live(self, payout: str) -> tuple[Attempt, ...]:
        """Attempts that may still pay, as far as the signer knows: none, before a caller takes another slot (W31)."""
        record = self.state.payouts.get(payout)
        return () if record is None else tuple(one for one in record.attempts.values() if one.pays)

    def _order(self, payment: Payment) -> Order:
        codec = self._codecs(self._policy.chains[payment.chain].kind)
        return rules.order_of(payment, codec.check_address(payment.chain, payment.to))

    async def sign(self, caller: str, request: SignRequest) -> Signature | Never:
        """Sign, or answer as before."""
        self._check_whole()
        async with self._deciding:
            answer = await self._decide(caller, request)
        why = ""
        if isinstance(answer, NeedsDeath):  # without the lock: nodes may take long, and other payouts do not wait
            why = await self._see_dead(caller, request.payout, answer.attempts, answer.order)
            async with self._deciding:
                answer = await self._decide(caller, request)
        await self._until_durable()
        match answer:
            case Refuse():
                raise self._refused(answer)
            case NeedsDeath():
                raise self._refused(_second_slot(request.payout, answer.attempts, why))
            case Attempt():
                return answer.answer

    async def cancel(self, caller: str, payout: str, attempt: int) -> Signature | Never:
        """The bytes that were signed, or a tombstone."""
        self._check_whole()
        wrong = rules.check_attempt(payout, attempt)
        if wrong is None:
            async with self._deciding:
                known = self.state.attempt(payout, attempt)
                if known is None:
                    wrong = rules.check_tombstone(self.state, payout, self._ports.now_us())
                if known is None and wrong is None:
                    self._append(caller, entries.Tombstone(payout=payout, attempt=attempt))
                    known = self.state.attempt(payout, attempt)
        else:
            known = None
        await self._until_durable()
        if wrong is not None or known is None:
            raise self._refused(wrong or Refuse(Reason.MALFORMED, "no such attempt"))
        return known.answer

    async def attempts(self, payout: str) -> tuple[KnownAttempt, ...]:
        """All that is on record for a payout, in order. Also while halted: the answer keeps a payout from being paid
        again, or given back, by a database that has forgotten it."""
        self._check_whole()
        found = self.state.payouts.get(payout)
        known = [] if found is None else [found.attempts[number] for number in sorted(found.attempts)]
        await self._until_durable()
        return tuple(
            KnownAttempt(
                attempt=one.number,
                shape=one.shape,
                sender=one.sender,
                raw=one.raw,
                hash=one.hash,
                sequence=one.sequence,
            )
            for one in known
        )

    async def log(self, after: int, limit: int) -> tuple[LogEntry, ...]:
        """Signatures and tombstones behind a sequence, in order. Fewer than `limit` if they are large."""
        self._check_whole()
        await self._until_durable()
        up_to = self.durable
        found: list[LogEntry] = []
        most = max(1, min(limit, LOG_ENTRIES_MAX))
        at, size = max(after, 0), 0
        while at < up_to and len(found) < most and size < LOG_BYTES_MAX:
            async with self._reading:
                some = await self._lane.run(partial(self._log.read, at, up_to, most, LOG_BYTES_MAX))
            if not some:
                break
            at = some[-1].sequence
            shown = [entry for entry in map(entries.for_callers, some) if entry is not None]
            found += shown[: most - len(found)]
            size += sum(len(entry.raw) * 8 for entry in shown)
        return tuple(found)

    async def status(self) -> SignerStatus:
        """As operators see it."""
        await self._until_durable()
        state = self.state
        halted = f"behind: a caller has seen sequence {state.behind}" if state.behind else state.halted
        return SignerStatus(name=state.name, identity=state.identity, sequence=self.durable, halted=halted)

    # --- people

    async def release(self, caller: str, release: Release, approvals: Sequence[Approval]) -> int:
        """Two approvers declare attempts dead (W31); the sequence at which it is so."""
        self._check_whole()
        async with self._deciding:
            people = people_who_approve(self._policy.approvers, approvals, release.canonical())
            wrong = rules.check_release(self.state, release, people)
            if wrong is None:
                self._append(caller, entries.DeclaredDead(release=release, approvals=tuple(approvals)))
        await self._until_durable()
        if wrong is not None:
            raise self._refused(wrong)
        return self.durable

    async def halt(self, caller: str, reason: str) -> int:
        """Sign nothing from now on, also after a restart (W21); the sequence at which it is so."""
        check_reason(reason)
        if not self.state.halted:  # without the lock: a halt never waits for a key that does not answer
            self._append(caller, entries.Halted(reason=reason))
        await self._until_durable()
        return self.durable

    async def unhalt(self, people: Sequence[str], approvals: Sequence[Approval]) -> int:
        """Sign again: two people whom the policy names, or two approvers' signatures, as the policy says."""
        async with self._deciding:
            wrong = self._may_unhalt(people, approvals)
            if wrong is None and (self.state.halted or self.state.behind):
                self._append("", entries.Unhalted(people=tuple(people), approvals=tuple(approvals)))
        await self._until_durable()
        if wrong is not None:
            raise self._refused(wrong)
        return self.durable

    async def fell_behind(self, caller: str, seen: int) -> None:
        """A caller has seen more than this log has: answer nothing any more, also after a restart (W33)."""
        if not self.state.behind:
            self._append(caller, entries.Behind(seen=seen))
        await self._until_durable()

    def _may_unhalt(self, people: Sequence[str], approvals: Sequence[Approval]) -> Refuse | None:
        named = self._policy.unhalt_people
        if named:
            found: list[str] = []
            for name in map(check_actor, people):
                if name in named and not any(same_person(name, other) for other in found):
                    found.append(name)
        else:
            what = Unhalt(signer=self.state.identity, halted_at=self.state.halted_at)
            found = people_who_approve(self._policy.approvers, approvals, what.canonical())
        if len(found) < 2:
            who = f"two of {', '.join(named)}" if named else "the signatures of two approvers"
            return Refuse(Reason.NOT_RELEASED, f"{who} lift a halt")
        return None

    # --- deciding

    def _check_whole(self) -> None:
        """A signer that has forgotten something must not say that an attempt was never signed (W33)."""
        if self.state.behind:
            why = f"its log was restored from an old copy: a caller has seen sequence {self.state.behind}"
            raise SignerUnavailable(self.name, why)

    @property
    def _policy(self) -> Policy:
        assert self.policy is not None  # `open` has set it
        return self.policy

    async def _decide(self, caller: str, request: SignRequest) -> Attempt | Refuse | NeedsDeath:
        """Decide, and if it is yes, sign and append. Under the lock: the state does not change meanwhile."""
        by = (self.state, self._policy, self._codecs, self._wallet)
        decision = rules.decide(*by, request, self._ports.now_us())
        match decision:
            case Again(attempt=attempt):
                return attempt
            case Sign():
                return await self._sign(caller, request, decision)
            case _:
                return decision

    async def _sign(self, caller: str, request: SignRequest, yes: Sign) -> Attempt | Refuse:
        try:
            async with asyncio.timeout(KEY_S):
                signature = await self._keys.sign(yes.wallet, yes.codec.digest(request.unsigned))
            made = yes.codec.signed(request.unsigned, signature, yes.wallet.address)
        except KeyUnavailable as error:
            return Refuse(Reason.KEY_UNAVAILABLE, str(error))
        except Undecodable as error:  # they spend from an account that is not the wallet's
            return Refuse(Reason.UNDECODABLE, str(error))
        except TimeoutError:
            return Refuse(Reason.KEY_UNAVAILABLE, f"the key of {yes.wallet.name} did not sign within {KEY_S:g} s")
        if self.state.halted or self.state.behind:  # meanwhile: the signature is dropped, and never leaves
            return Refuse(Reason.HALTED, "the signer was halted")
        self._append(
            caller,
            entries.Signed(
                request=request,
                raw=made.raw,
                hash=made.hash,
                chain_id=yes.chain_id,
                nonce=yes.nonce,
                slot=yes.slot,
                counted=yes.counted,
            ),
        )
        found = self.state.attempt(request.payout, request.attempt)
        assert found is not None  # it was just appended
        return found

    async def _see_dead(self, caller: str, payout: str, attempts: tuple[Attempt, ...], order: Order) -> str:
        """Have the signer's own nodes show that none of these attempts can pay; "" if they do, else why not."""
        if self._witness is None:
            return "this signer has no nodes of its own"
        if self.state.payouts[payout].witnessed >= rules.WITNESSED_MAX:
            return f"its nodes have shown {rules.WITNESSED_MAX} attempts of it dead, and people look at more"

        async def declare(proofs: tuple[Proof, ...]) -> None:
            dead = Release(payout=payout, dead=tuple(map(_named, attempts)))
            async with self._deciding:
                self._append(caller, entries.DeclaredDead(release=dead, proofs=proofs))
            # Before anything rests on it: a signature in another slot never leaves without it, nor survives alone.
            await self._until_durable()

        return await self._witness.look(payout, self._questions(payout, attempts, order), declare)

    def _questions(self, payout: str, attempts: tuple[Attempt, ...], order: Order) -> list[tuple[str, Question]]:
        """What to ask about each slot: all that was signed in it, cancellations too, for one of them has used it."""
        found = []
        for first in {attempt.slot: attempt for attempt in attempts}.values():
            signed = [a for a in self.state.payouts[payout].attempts.values() if a.raw and a.slot == first.slot]
            codec = self._codecs(self._policy.chains[first.chain].kind)
            tries = tuple(Try(hash=a.hash, shape=a.shape, slot=codec.read(a.raw)[0].slot) for a in signed)
            found.append((first.chain, Question(sender=first.sender, order=order, tries=tries)))
        return found

    def _refused(self, refuse: Refuse) -> SignerRefused:
        return SignerRefused(refuse.reason.value, refuse.why, refuse.denied, self.durable)

    # --- the log

    def _append(self, caller: str, what: What) -> None:
        """The next entry, in memory; on disk with the next frame."""
        state = self.state
        entry = next_entry(state, self._ports.now_us(), caller, what)
        data = entries.encode(entry)
        hash_ = entries.hash_of(data)
        state.apply(entry, hash_)
        self._pending.append((hash_, data, entry.sequence))
        self._wake.set()

    async def _until_durable(self) -> None:
        """Wait until everything decided so far is on disk; for ever, if the disk fails."""
        if self._written == self.state.number:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._wake.set()
        await waiting

    async def run(self) -> None:
        """Write what is decided and release the answers, until `stop`. Raises SignerStopped if the disk fails."""
        while True:
            if not self._pending and not self._waiting and not self._stopping:
                self._wake.clear()
                await self._wake.wait()
            if self._pending or self._waiting:
                await self._write()
            elif self._stopping:
                return

    async def _write(self) -> None:
        pending, self._pending = self._pending, []
        waiting, self._waiting = self._waiting, []
        number, sequence = self.state.number, self.state.sequence
        if pending:
            data = frame([(hash_, encoded) for hash_, encoded, _ in pending])
            try:
                await self._lane.run(partial(self._log.append, data, pending[0][2]))
            except OSError as error:
                raise SignerStopped(str(error)) from error
            self.durable, self._written = sequence, number
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def stop(self) -> None:
        """Let `run` end once everything decided is on disk and answered."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Let go of the folder. Not before `run` has ended."""
        if self._witness is not None:
            self._witness.close()
        self._lane.close()
        self._log.close()


def _named(attempt: Attempt) -> DeadAttempt:
    return DeadAttempt(attempt=attempt.number, hash=attempt.hash)


def _second_slot(payout: str, attempts: tuple[Attempt, ...], why: str) -> Refuse:
    """Another slot could pay a payout twice. Says what two approvers would sign, ready to be copied."""
    release = Release(payout=payout, dead=tuple(map(_named, attempts)))
    signs = f"If people see that it can't, two approvers release it: {msgspec.json.encode(release).decode()}"
    return Refuse(Reason.SECOND_SLOT, f"an earlier attempt may still pay ({why or 'signed meanwhile'}). {signs}")


async def halt_offline(ports: Ports, folder: str, reason: str) -> int:
    """Halt a signer that is not running: it will start halted. The number of the entry; SignerInUse if it runs."""
    check_reason(reason)
    state, log, lane = State(), Log(ports.files(), folder), ports.lane("signer-log")

    def append() -> None:
        log.open(state, None)
        if state.halted:
            return
        entry = next_entry(state, ports.now_us(), LOCAL, entries.Halted(reason=reason))
        data = entries.encode(entry)
        log.append(frame([(entries.hash_of(data), data)]), entry.sequence)
        state.apply(entry, entries.hash_of(data))

    try:
        await lane.run(append)
        return state.halted_at
    finally:
        log.close()
        lane.close()


def next_entry(state: State, at_us: int, caller: str, what: What) -> Entry:
    """The entry that follows."""
    return Entry(
        number=state.number + 1,
        sequence=state.sequence + entries.is_promise(what),
        previous=state.last_hash,
        at_us=at_us,
        caller=caller,
        what=what,
    )
