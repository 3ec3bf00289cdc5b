"""A chain and a signer for tests of the payouts flow: in memory, honest unless a test says otherwise.

The chain has nonces, a pool and blocks; what is mined is final at once. Transactions are JSON, and a signature is the
sender's name: the flow's decisions are tested here, and not cryptography (rails/evm and the simulator have that).
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from typing import Any

import msgspec

from bursar.model.authorizations import Authorization, Payment
from bursar.model.records import Priority
from bursar.rails.chain import (
    Arrival,
    Arrivals,
    Balances,
    Confirmed,
    Dead,
    Decoded,
    DeepReorganisation,
    Fate,
    Fee,
    FeeTooHigh,
    InvalidAddress,
    Mismatch,
    Network,
    NodeStatus,
    NodesUnavailable,
    Order,
    OwnTransaction,
    Page,
    Pending,
    Question,
    Sent,
    SentElsewhere,
    Shape,
    Signed,
    Slot,
    Undecodable,
    Unknown,
    WouldRevert,
)
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

GAS = 21_000


class PaperCodec:
    kind = "paper"

    def check_address(self, chain: str, text: str) -> str:
        if not text.startswith("@") or not text[1:].isalnum():
            raise InvalidAddress(chain, text, "it begins with @")
        return text

    def check_memo(self, chain: str, text: str) -> None:
        return  # any text goes

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        pays = shape is Shape.PAY
        decoded = Decoded(
            chain_id=network.chain_id,
            to=order.to if pays else sender,
            contract=order.contract if pays else "",
            amount=order.amount if pays else 0,
            slot=slot,
            fee=fee,
        )
        return msgspec.json.encode(decoded, order="sorted")

    def decode(self, unsigned: bytes) -> Decoded:
        try:
            return msgspec.json.decode(unsigned, type=Decoded)
        except ValueError as error:
            raise Undecodable("paper", str(error)) from None

    def digest(self, unsigned: bytes) -> bytes:
        return hashlib.sha256(unsigned).digest()

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        if signature.decode() != sender:
            raise Undecodable("paper", "another signer")
        raw = signature + b"|" + unsigned
        return Signed(raw=raw, hash=hashlib.sha256(raw).hexdigest())

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        sender, _, unsigned = raw.partition(b"|")
        return self.decode(unsigned), sender.decode(), hashlib.sha256(raw).hexdigest()


class PaperChain:
    """One chain behind one honest node, which a test can take away or make expensive."""

    codec = PaperCodec()

    def __init__(self, network: Network) -> None:
        self.network = network
        self.price = 10
        self.height = 100
        self.coin: dict[str, int] = {}
        self.tokens: dict[tuple[str, str], int] = {}  # contract, address
        self.nonces: dict[str, int] = {}
        self.pool: dict[str, tuple[Decoded, str]] = {}
        self.mined: dict[str, tuple[Decoded, str, int]] = {}  # hash → what, sender, block
        self.sends: list[str] = []
        self.away = False
        self.reverts: set[str] = set()  # recipients whose payment is refused in a dry run
        self.failing: set[str] = set()  # recipients whose payment fails in a block, after a dry run that was fine
        self.failed: set[str] = set()  # hashes
        self.shy: set[str] = set()  # recipients whose payment leaves no event
        self.dropped = False  # whether nodes have dropped the balances of old blocks
        self.contracts: set[str] = set()
        self.fork = ""  # part of the hashes of all blocks: another one is another chain
        self.keeps = True  # whether the node keeps what it is sent
        self.liars: set[str] = set()  # contracts whose events say more than arrives
        self.one_node = False

    def _up(self) -> None:
        if self.away:
            raise NodesUnavailable(self.network.name, "no node answers")

    async def quote(self, sender: str, order: Order, shape: Shape, priority: Priority) -> Fee:
        self._up()
        if self.price > self.network.ceiling(priority):
            raise FeeTooHigh(self.network.name, self.price, self.network.ceiling(priority))
        if order.to in self.reverts:
            raise WouldRevert(self.network.name, "it is blacklisted")
        return Fee(gas_limit=GAS, price=self.price, tip=1)

    async def higher(self, fee: Fee, priority: Priority) -> Fee | None:
        self._up()
        price = max(self.price, fee.price * 9 // 8 + 1)
        if price > self.network.ceiling(priority):
            return None
        return Fee(gas_limit=fee.gas_limit, price=price, tip=fee.tip * 9 // 8 + 1)

    async def slot(self, sender: str) -> Slot:
        self._up()
        return Slot(nonce=self.nonces.get(sender, 0))

    async def send(self, raw: bytes) -> Sent:
        self._up()
        decoded, sender, hash_ = self.codec.read(raw)
        self.sends.append(hash_)
        if hash_ in self.mined or hash_ in self.pool:
            return Sent(accepted=True, answers={"paper": "already known"})
        assert decoded.slot.nonce is not None
        if decoded.slot.nonce < self.nonces.get(sender, 0):
            return Sent(accepted=False, answers={"paper": "nonce too low"})
        if self.keeps:
            rivals = [h for h, (d, s) in self.pool.items() if s == sender and d.slot == decoded.slot]
            if any(self.pool[h][0].fee.price * 9 // 8 >= decoded.fee.price for h in rivals):
                return Sent(accepted=False, answers={"paper": "underpriced"})
            for rival in rivals:
                del self.pool[rival]
            self.pool[hash_] = (decoded, sender)
        return Sent(accepted=True, answers={"paper": hash_})

    def mine(self) -> None:
        """One block with everything that can be in it; it is final."""
        self.height += 1
        for hash_, (decoded, sender) in sorted(self.pool.items(), key=lambda kept: kept[1][0].slot.nonce or 0):
            if decoded.fee.price < self.price or decoded.slot.nonce != self.nonces.get(sender, 0):
                continue
            self.include(hash_, decoded, sender)
            del self.pool[hash_]

    def include(self, hash_: str, decoded: Decoded, sender: str) -> None:
        self.nonces[sender] = self.nonces.get(sender, 0) + 1
        self.mined[hash_] = (decoded, sender, self.height)
        self.coin[sender] = self.coin.get(sender, 0) - GAS * decoded.fee.price
        if decoded.to in self.failing:
            self.failed.add(hash_)
            return
        held: dict[Any, int] = self.tokens if decoded.contract else self.coin
        source = (decoded.contract, sender) if decoded.contract else sender
        target = (decoded.contract, decoded.to) if decoded.contract else decoded.to
        held[source] = held.get(source, 0) - decoded.amount
        held[target] = held.get(target, 0) + decoded.amount

    def forget(self, hash_: str) -> None:
        """A transaction that was final is not: its block is gone."""
        decoded, sender, _ = self.mined.pop(hash_)
        self.nonces[sender] -= 1
        assert decoded.slot.nonce == self.nonces[sender]

    def hash_of(self, block: int) -> str:
        return f"{self.fork}b{block}"

    async def sent_elsewhere(self, hash_: str) -> SentElsewhere | None:
        self._up()
        found = self.mined.get(hash_) or self.pool.get(hash_)
        return (
            None if found is None else SentElsewhere(hash=hash_, sender=found[1], slot=found[0].slot, fee=found[0].fee)
        )

    async def fate(self, question: Question) -> Fate:
        self._up()
        if len({one.slot for one in question.tries}) > 1:
            raise ValueError("all tries of a question share one nonce")
        final = [t for t in question.tries if t.hash in self.mined]
        if final:
            hash_ = final[0].hash
            decoded, _, block = self.mined[hash_]
            paid: dict[str, Any] = {
                "fee_paid": GAS * decoded.fee.price,
                "gas_used": GAS,
                "gas_price": decoded.fee.price,
            }
            if final[0].shape is Shape.CANCEL:
                return Dead(proof={"nonce": decoded.slot.nonce, "taken_by": hash_}, hash=hash_, **paid)
            if hash_ in self.failed:
                return Dead(proof={"reverted": hash_}, hash=hash_, **paid)
            order = question.order
            if (decoded.to, decoded.contract, decoded.amount) != (order.to, order.contract, order.amount):
                return Mismatch(hash=hash_, why="it moves something else", **paid)
            if decoded.to in self.shy:
                return Mismatch(hash=hash_, why="there is no Transfer event", **paid)
            where: dict[str, Any] = {"block": block, "block_hash": self.hash_of(block)}
            return Confirmed(hash=hash_, by_event_alone=self.dropped, **where, **paid)
        nonce = question.tries[0].slot.nonce if question.tries else None
        if nonce is not None and nonce < self.nonces.get(question.sender, 0):
            if question.consumer:
                return Dead(proof={"taken_by": question.consumer})
            return Unknown(why="its nonce is used up by a transaction that is not known", person=True)
        return Pending(seen=any(t.hash in self.pool for t in question.tries))

    async def balances(self, address: str, contracts: Sequence[str]) -> Balances:
        self._up()
        tokens = {contract: self.tokens.get((contract, address), 0) for contract in contracts}
        return Balances(
            block=self.height,
            block_hash=self.hash_of(self.height),
            coin=self.coin.get(address, 0),
            tokens=tokens,
            nonce=self.nonces.get(address, 0),
        )

    async def balances_of(self, addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        return {address: await self.balances(address, contracts) for address in addresses}

    async def scan(self, addresses: Container[str], after: int, after_hash: str = "") -> Page:
        self._up()
        if after_hash not in ("", self.hash_of(after)):
            raise DeepReorganisation(self.network.name, after, after_hash, self.hash_of(after))
        found = [
            OwnTransaction(hash=h, sender=s, nonce=d.slot.nonce, block=b)
            for h, (d, s, b) in self.mined.items()
            if s in addresses and b > after
        ]
        return Page(up_to=self.height, up_to_hash=self.hash_of(self.height), transactions=tuple(found))

    async def arrivals(
        self, addresses: Container[str], contracts: frozenset[str], after: int, after_hash: str, up_to: int
    ) -> Arrivals:
        self._up()
        if after_hash not in ("", self.hash_of(after)):
            raise DeepReorganisation(self.network.name, after, after_hash, self.hash_of(after))
        last = max(after, min(up_to, self.height))
        found = [
            Arrival(
                hash=hash_,
                part="0" if decoded.contract else "coin",
                sender=sender,
                to=decoded.to,
                contract=decoded.contract,
                amount=decoded.amount,
                block=block,
                block_hash=self.hash_of(block),
                disputed="the balance did not rise by that" if decoded.contract in self.liars else "",
            )
            for hash_, (decoded, sender, block) in self.mined.items()
            if after < block <= last and decoded.to in addresses and decoded.amount and decoded.to != sender
            if hash_ not in self.failed and decoded.contract in {"", *contracts}
        ]
        up_to_hash = self.hash_of(last)
        return Arrivals(up_to=last, up_to_hash=up_to_hash, found=tuple(found), one_node=self.one_node)

    def give(self, to: str, amount: int, contract: str = "", sender: str = "@stranger") -> str:
        """A transfer from outside, in a block of its own, which is final; its hash."""
        slot = Slot(nonce=self.nonces.get(sender, 0))
        fee = Fee(gas_limit=GAS, price=self.price)
        decoded = Decoded(chain_id=self.network.chain_id, to=to, contract=contract, amount=amount, slot=slot, fee=fee)
        hash_ = hashlib.sha256(f"{sender} {to} {slot.nonce}".encode()).hexdigest()
        self.height += 1
        self.include(hash_, decoded, sender)
        return hash_

    async def final_block(self) -> tuple[int, str]:
        self._up()
        return self.height, self.hash_of(self.height)

    async def is_contract(self, address: str) -> bool:
        self._up()
        return address in self.contracts

    async def nodes(self) -> tuple[NodeStatus, ...]:
        return (NodeStatus(name="paper", usable=not self.away, height=self.height),)


class PaperSigner:
    """Signs what it is asked to, once per attempt, unless a test says otherwise."""

    name = "paper"

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.away = False
        self.loses_answer = False  # signs, and its answer is lost
        self.refusal: SignerRefused | None = None

    def _up(self) -> None:
        if self.away:
            raise SignerUnavailable(self.name, "it does not answer")

    def _known(self, payout: str, attempt: int) -> LogEntry | None:
        return next((e for e in self.entries if (e.payout, e.attempt) == (payout, attempt)), None)

    def _append(self, payout: str, attempt: int, **more: Any) -> LogEntry:
        entry = LogEntry(sequence=len(self.entries) + 1, at_us=1, payout=payout, attempt=attempt, **more)
        self.entries.append(entry)
        return entry

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        self._up()
        if self.refusal is not None:
            raise self.refusal
        asked = [e.request for e in self.entries if e.request is not None and e.request.wallet == wallet]
        nonces = [PaperCodec().decode(request.unsigned).slot.nonce or 0 for request in asked]
        return Preview(nonce_floor=max(nonces, default=-1) + 1, sequence=len(self.entries))

    async def attempts(self, payout: str) -> tuple[KnownAttempt, ...]:
        self._up()
        return tuple(
            KnownAttempt(
                attempt=e.attempt,
                shape=Shape.PAY if e.request is None else e.request.shape,
                sender="" if e.request is None else e.request.sender,
                raw=e.raw,
                hash=e.hash,
                sequence=e.sequence,
            )
            for e in self.entries
            if e.payout == payout
        )

    async def sign(self, request: SignRequest) -> Signature | Never:
        self._up()
        known = self._known(request.payout, request.attempt)
        if known is None:
            if self.refusal is not None:
                raise self.refusal
            if request.shape is Shape.CANCEL and not any(e.payout == request.payout for e in self.entries):
                raise SignerRefused("NOTHING_TO_CANCEL", "nothing was signed or tombstoned", False, len(self.entries))
            done = PaperCodec().signed(request.unsigned, request.sender.encode(), request.sender)
            known = self._append(request.payout, request.attempt, request=request, raw=done.raw, hash=done.hash)
        if known.request is None:
            return Never(sequence=known.sequence)
        assert known.request.unsigned == request.unsigned, "other bytes for one attempt"
        if self.loses_answer:
            self.loses_answer = False
            raise SignerUnavailable(self.name, "the answer is lost")
        return Signature(raw=known.raw, hash=known.hash, sequence=known.sequence)

    async def cancel(self, payout: str, attempt: int) -> Signature | Never:
        self._up()
        known = self._known(payout, attempt) or self._append(payout, attempt)
        if known.raw:
            return Signature(raw=known.raw, hash=known.hash, sequence=known.sequence)
        return Never(sequence=known.sequence)

    async def log(self, after: int, limit: int = 1_000) -> tuple[LogEntry, ...]:
        self._up()
        return tuple(self.entries[after : after + limit])

    async def status(self) -> SignerStatus:
        self._up()
        return SignerStatus(name=self.name, identity="paper", sequence=len(self.entries), halted="")
