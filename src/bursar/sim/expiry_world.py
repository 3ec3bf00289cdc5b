"""A chain without nonces, as TRON or Solana: a transaction expires.

It names a recent block, and the last height that may include it. It happens at most once, because its hash does: the
same content is the same transaction. It can't happen after its expiry, nor on a branch without its reference block.
What fails is included too, and costs all that it offered.

A plain world without IO, clock or chance, as `evm_world`: it changes when it is called (`submit`, `mine`, `advance`,
`reorg`, `drop`), and the same calls give the same hashes. `totals` and `effects` are for oracles. Nodes, which may lag,
forget or lie, and the `rails.chain.Chain` that asks two of them, are in `expiry_chain`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from bursar.rails.chain import Decoded, Undecodable
from bursar.sim.chain_state import (
    BURNED,
    COIN,
    Effect,
    Grant,
    Movement,
    Read,
    Reverted,
    State,
    Token,
    Transferred,
    effects_of,
)
from bursar.sim.expiry_codec import ExpiryCodec

GENESIS_S: Final = 1_700_000_000
COIN_GAS: Final = 300


class Refused(Exception):
    """The chain does not take a transaction now, in the words of a node. No proof that it never will."""


class Tx(NamedTuple):
    """A transaction whose signature was checked."""

    hash: str
    sender: str
    does: Decoded
    raw: bytes

    @property
    def reference(self) -> str:
        """Hash of the block that it counts from."""
        return self.does.slot.reference.partition("/")[0]

    @property
    def expires(self) -> int:
        """The last height that may include it."""
        assert self.does.slot.expires is not None  # the codec refuses others
        return self.does.slot.expires


class Included(NamedTuple):
    """A transaction in its block, and what it did there."""

    tx: Tx
    ok: bool
    gas_used: int
    fee: int
    events: tuple[Movement, ...]  # what a node shows
    moves: tuple[Movement, ...]  # what moved


@dataclass(frozen=True, slots=True)
class Block:
    """One block. `hash` covers everything in it."""

    number: int
    hash: str
    parent: str
    timestamp: int
    included: tuple[Included, ...]
    grants: tuple[Grant, ...]


@dataclass(kw_only=True)
class Terms:
    """What the chain is like. All of it may be changed while it runs."""

    chain_id: int = 728
    block_time_s: int = 3
    finality: int = 20  # blocks on top of a final one
    window: int = 60  # an expiry is at most this far behind the reference block
    price: int = 100  # of one unit of gas; a transaction that offers less waits
    block_size: int = 500  # transactions


@dataclass
class World:
    """The chain as it is."""

    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        self.codec = ExpiryCodec()
        self.state = State()
        self.tokens: dict[str, Token] = {}
        self.censored: set[str] = set()  # hashes that block makers leave out
        self.pool: dict[str, Tx] = {}
        self.blocks: list[Block] = []
        self._where: dict[str, tuple[int, int]] = {}  # hash → block, position
        self._numbers: dict[str, int] = {}  # hash of a block → its number
        self._grants: list[Grant] = []
        self._reorgs = 0
        self._append(GENESIS_S, ())

    @property
    def head(self) -> Block:
        """The last block."""
        return self.blocks[-1]

    @property
    def finalized(self) -> int:
        """The height up to which nothing changes any more."""
        return max(0, self.head.number - self.terms.finality)

    def find(self, hash: str) -> tuple[Block, Included] | None:
        """Where a transaction is on the canonical chain."""
        place = self._where.get(hash)
        if place is None:
            return None
        block = self.blocks[place[0]]
        return block, block.included[place[1]]

    def balance(self, address: str, contract: str = COIN, at: int | None = None) -> int:
        """Coin or tokens of an address."""
        return self.state.get(contract, address, at)

    def totals(self) -> dict[str, tuple[int, int]]:
        """For each asset what exists (burned fees included) and what was minted: equal, or the chain is wrong."""
        return self.state.totals()

    def effects(self, wanted: Callable[[Effect], bool] | None = None) -> list[Effect]:
        """What really moved on the canonical chain, oldest first."""
        return effects_of(
            (
                Effect(one.tx.hash, block.number, None, one.tx.sender, *move)
                for block in self.blocks
                for one in block.included
                for move in one.moves
            ),
            wanted,
        )

    def deploy(self, token: Token) -> Token:
        """Add a token."""
        token.address = self.codec.check_address("", token.address)
        self.tokens[token.address] = token
        return token

    def fund(self, address: str, amount: int, contract: str = COIN) -> None:
        """Give coin or tokens in the next block. A reorganisation repeats it."""
        self._grants.append(Grant(address, amount, contract))

    def read(self, raw: bytes) -> Tx:
        """Decode and check the signature; Refused if it is none."""
        try:
            does, sender, hash = self.codec.read(raw)
        except Undecodable as error:
            raise Refused(f"SIGERROR: {error.why}") from None
        return Tx(hash, sender, does, raw)

    def submit(self, raw: bytes) -> Tx:
        """Bytes for the block makers; Refused if they don't take them."""
        tx = self.read(raw)
        self.check(tx, self.head.number)
        self.pool[tx.hash] = tx
        return tx

    def check(self, tx: Tx, head: int) -> None:
        """Refused if a node whose last block is `head` would not take it."""
        if tx.does.chain_id != self.terms.chain_id:
            raise Refused("SIGERROR: of another chain")
        if tx.hash in self.pool or (tx.hash in self._where and self._where[tx.hash][0] <= head):
            raise Refused("DUP_TRANSACTION_ERROR")
        if tx.expires <= head:
            raise Refused("TRANSACTION_EXPIRATION_ERROR")
        reference = self._numbers.get(tx.reference)
        if reference is None or reference > head or tx.expires > reference + self.terms.window:
            raise Refused("TAPOS_ERROR")
        if self.balance(tx.sender, at=head) < _cost_max(tx):
            raise Refused("CONTRACT_VALIDATE_ERROR: balance is not sufficient")

    def drop(self, hash: str) -> bool:
        """Let the block makers forget a transaction. Until it expires, it may come back."""
        return self.pool.pop(hash, None) is not None

    def advance(self, now_s: float) -> list[Block]:
        """Mine every block that is due by `now_s`."""
        made = []
        while self.head.timestamp + self.terms.block_time_s <= now_s:
            made.append(self.mine())
        return made

    def mine(self, *, empty: bool = False) -> Block:
        """Make a block of what waits: the best price first."""
        self.state.height = number = self.head.number + 1
        self.pool = {hash: tx for hash, tx in self.pool.items() if tx.expires >= number}
        included: list[Included] = []
        for tx in () if empty else sorted(self.pool.values(), key=lambda one: -one.does.fee.price):
            if len(included) < self.terms.block_size and self._valid(tx):
                included.append(self._execute(tx))
                del self.pool[tx.hash]
        for grant in self._grants:
            self.state.mint(grant.contract, grant.to, grant.amount)
        grants, self._grants = tuple(self._grants), []
        return self._append(self.head.timestamp + self.terms.block_time_s, tuple(included), grants)

    def reorg(
        self, depth: int, *, returns: Callable[[Tx], bool] = lambda _: True, empty: bool = False, deep: bool = False
    ) -> list[Tx]:
        """Replace the last `depth` blocks by one more than that; what was in them, and is not now."""
        if not 0 < depth <= self.head.number or (depth > self.head.number - self.finalized and not deep):
            raise ValueError(f"a reorganisation of {depth} blocks at height {self.head.number} is too deep")
        removed = self.blocks[-depth:]
        del self.blocks[-depth:]
        self.state.rewind(self.head.number)
        self._reorgs += 1
        orphans = [one.tx for block in removed for one in block.included]
        for block in removed:
            del self._numbers[block.hash]
        for tx in orphans:
            del self._where[tx.hash]
            if returns(tx):
                self.pool[tx.hash] = tx
        self._grants[:0] = [grant for block in removed for grant in block.grants]
        for _ in range(depth + 1):
            self.mine(empty=empty)
        return [tx for tx in orphans if tx.hash not in self._where]

    def call(self, read: Read, sender: str, to: str, contract: str, amount: int) -> Transferred:
        """What a payment would do. Pure; `Reverted` if the token, or the balance, refuses it."""
        if contract:
            token = self.tokens.get(contract)
            if token is None:
                raise Reverted("no contract at this address")
            return token.plan(read, sender, to, amount)
        if read(COIN, sender) < amount:
            raise Reverted("balance is not sufficient")
        move = (Movement(COIN, sender, to, amount),) if amount else ()
        return Transferred(b"", move, move)

    def gas(self, contract: str) -> int:
        """What a payment uses."""
        return COIN_GAS + (self.tokens[contract].gas if contract in self.tokens else 0)

    def number(self, block_hash: str) -> int | None:
        """Where a block is; None if it is not on the canonical chain."""
        return self._numbers.get(block_hash)

    def _valid(self, tx: Tx) -> bool:
        return (
            tx.reference in self._numbers
            and tx.hash not in self.censored
            and tx.does.fee.price >= self.terms.price
            and self.balance(tx.sender) >= _cost_max(tx)
        )

    def _execute(self, tx: Tx) -> Included:
        does, gas = tx.does, self.gas(tx.does.contract)
        done: Transferred | None = None
        if gas <= does.fee.gas_limit:
            try:
                done = self.call(self.state.get, tx.sender, does.to, does.contract, does.amount)
            except Reverted:
                done = None
        if done is None:
            gas = does.fee.gas_limit
        fee = gas * self.terms.price
        self.state.move(Movement(COIN, tx.sender, BURNED, fee))
        for move in done.moves if done is not None else ():
            self.state.move(move)
        return Included(tx, done is not None, gas, fee, *((done.events, done.moves) if done is not None else ((), ())))

    def _append(self, timestamp: int, included: tuple[Included, ...], grants: tuple[Grant, ...] = ()) -> Block:
        number, parent = len(self.blocks), self.head.hash if self.blocks else 64 * "0"
        content = [
            self.terms.chain_id,
            number,
            parent,
            timestamp,
            self._reorgs,
            [one.tx.hash for one in included],
            grants,
        ]
        hash = sha256(repr(content).encode()).hexdigest()
        block = Block(number, hash, parent, timestamp, included, grants)
        self.blocks.append(block)
        self._numbers[hash] = number
        for position, one in enumerate(included):
            self._where[one.tx.hash] = (number, position)
        return block


def _cost_max(tx: Tx) -> int:
    return tx.does.fee.worst + (0 if tx.does.contract else tx.does.amount)
