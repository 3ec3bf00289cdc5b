"""An EVM chain in memory: accounts with nonces, blocks with a base fee, tokens, receipts, finality, reorganisations.

A plain world without IO, clock or chance: it changes when it is called (`submit`, `mine`, `advance`, `reorg`, `drop`),
and the same calls give the same hashes. Transactions are real raw bytes, whose signatures are checked. The base fee
follows EIP-1559, and a block holds a bounded amount of gas; `background_gas` stands for the transactions of others, so
that a scenario can stage congestion and fee spikes.

Blocks up to `finalized` (the head less `finality`) stay, unless a reorganisation is asked to go deeper. Transactions of
removed blocks return to the pool or are lost, as the caller says.

For oracles: `totals` shows that no coin and no token appears or vanishes, and `effects` lists what really moved on the
canonical chain. Nodes, which may see less than this or lie about it, are in `evm_nodes`. Not simulated: contract code
(tokens are built in), contract creation, the maker's own choice among transactions beyond the best tip first.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from bursar.sim.chain_state import (
    BURNED,
    COIN,
    NONCE,
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
from bursar.sim.evm_pool import Pool
from bursar.sim.evm_tx import RefusedTransaction, Tx, read_transaction, read_transfer

GENESIS_S: Final = 1_700_000_000
GWEI: Final = 10**9
CONTRACT_GAS: Final = 5_000  # a contract that is paid coin runs a little code
BASE_FEE_CHANGE: Final = 8  # EIP-1559: at most an eighth from block to block
MAKER: Final = "0x" + 38 * "0" + "fe"  # gets the tips


class Receipt(NamedTuple):
    """What became of a transaction in its block."""

    tx: Tx
    position: int  # in its block
    ok: bool
    gas_used: int
    cumulative_gas: int
    price: int
    events: tuple[Movement, ...]  # what its logs claim
    first_log: int
    moves: tuple[Movement, ...]  # what moved


@dataclass(frozen=True, slots=True)
class Block:
    """One block. `hash` covers everything in it."""

    number: int
    hash: str
    parent: str
    timestamp: int
    base_fee: int
    gas_used: int
    extra: str
    receipts: tuple[Receipt, ...]
    grants: tuple[Grant, ...]

    def __deepcopy__(self, _memo: object) -> Block:
        return self  # it never changes: a branch shares the blocks that it has in common


@dataclass(kw_only=True)
class Terms:
    """What a chain is like. All of it may be changed while it runs."""

    chain_id: int = 1
    block_time_s: int = 12
    gas_limit: int = 30_000_000
    finality: int = 12  # blocks on top of a final one
    base_fee: int = 10 * GWEI  # of the first block
    dynamic_base_fee: bool = True  # False: it stays as it is, 0 on chains that have none
    tip_min: int = 0
    pool_size: int = 5_000
    background_gas: int = 0  # that others use in each block, where there is room for it
    background_tip: int = GWEI  # what others offer: a lower tip gets the room that they leave


@dataclass
class World:
    """The chain as it is, which no single node has to show."""

    terms: Terms = field(default_factory=Terms)
    name: str = ""  # of a branch that is a node's own: it makes other hashes of the same content

    def __post_init__(self) -> None:
        self.state = State()
        self.tokens: dict[str, Token] = {}
        self.contracts: dict[str, bool] = {}  # other code, and whether it accepts coin
        self.censored: set[str] = set()  # hashes that block makers leave out
        self.seen: dict[str, Tx] = {}  # everything that ever reached a block maker
        self.pool = self.new_pool()
        self.blocks: list[Block] = []
        self._where: dict[str, tuple[int, int]] = {}  # hash → block, position
        self._numbers: dict[str, int] = {}  # hash of a block → its number
        self._grants: list[Grant] = []
        self._reorgs = 0
        self._next_base_fee: int | None = self.terms.base_fee
        self._append(GENESIS_S, self.base_fee(), 0, ())

    # --- reading ---

    @property
    def head(self) -> Block:
        """The last block."""
        return self.blocks[-1]

    @property
    def finalized(self) -> int:
        """The height up to which nothing changes any more."""
        return max(0, self.head.number - self.terms.finality)

    def find(self, hash: str) -> tuple[Block, Receipt] | None:
        """Where a transaction is on the canonical chain."""
        place = self._where.get(hash)
        if place is None:
            return None
        block = self.blocks[place[0]]
        return block, block.receipts[place[1]]

    def block(self, hash: str) -> Block | None:
        """A block of the canonical chain."""
        number = self._numbers.get(hash)
        return None if number is None else self.blocks[number]

    def balance(self, address: str, contract: str = COIN, at: int | None = None) -> int:
        """Coin or tokens of an address, in any spelling."""
        return self.state.get(contract.lower(), address.lower(), at)

    def nonce(self, address: str, at: int | None = None) -> int:
        """How many transactions of an address were mined."""
        return self.state.get(NONCE, address.lower(), at)

    def totals(self) -> dict[str, tuple[int, int]]:
        """For each asset what exists (burned fees included) and what was minted: equal, or the chain is wrong."""
        return self.state.totals()

    def effects(self, wanted: Callable[[Effect], bool] | None = None) -> list[Effect]:
        """What really moved on the canonical chain, oldest first."""
        return effects_of(
            (
                Effect(receipt.tx.hash, block.number, receipt.tx.nonce, receipt.tx.sender, *move)
                for block in self.blocks
                for receipt in block.receipts
                for move in receipt.moves
            ),
            wanted,
        )

    def base_fee(self) -> int:
        """Of the next block (EIP-1559)."""
        if self._next_base_fee is not None:
            return self._next_base_fee
        parent, target = self.head, self.terms.gas_limit // 2
        if not self.terms.dynamic_base_fee or parent.gas_used == target:
            return parent.base_fee
        change = parent.base_fee * abs(parent.gas_used - target) // target // BASE_FEE_CHANGE
        return parent.base_fee + max(change, 1) if parent.gas_used > target else parent.base_fee - change

    def suggested_tip(self) -> int:
        """What a node advises, so that a transaction is mined soon."""
        return max(self.terms.tip_min, self.terms.background_tip)

    def is_contract(self, address: str) -> bool:
        """Whether there is code."""
        return address in self.tokens or address in self.contracts

    # --- changing ---

    def new_pool(self) -> Pool:
        """An empty mempool by this chain's rules."""
        return Pool(size_max=self.terms.pool_size, tip_min=self.terms.tip_min, gas_max=self.terms.gas_limit)

    def deploy(self, token: Token) -> Token:
        """Add a token."""
        token.address = token.address.lower()
        self.tokens[token.address] = token
        return token

    def fund(self, address: str, amount: int, contract: str = COIN) -> None:
        """Give coin or tokens in the next block, without an event. A reorganisation repeats it."""
        self._grants.append(Grant(address.lower(), amount, contract.lower()))

    def spike(self, base_fee: int) -> None:
        """Set the next block's base fee; later ones follow from it."""
        self._next_base_fee = base_fee

    def submit(self, raw: bytes) -> Tx:
        """Bytes for the block makers; RefusedTransaction if they don't take them."""
        tx = read_transaction(raw)
        self.offer(tx)
        return tx

    def offer(self, tx: Tx) -> None:
        """The same, of a transaction that was read already."""
        if tx.chain_id != self.terms.chain_id:
            raise RefusedTransaction(f"invalid chain id for signer: have {tx.chain_id} want {self.terms.chain_id}")
        self.seen[tx.hash] = tx
        self.pool.add(tx, self.nonce(tx.sender), self.balance(tx.sender))

    def drop(self, hash: str) -> bool:
        """Let the block makers forget a transaction. It may come back: its bytes stay valid."""
        return self.pool.drop(hash)

    def advance(self, now_s: float) -> list[Block]:
        """Mine every block that is due by `now_s`."""
        made = []
        while self.head.timestamp + self.terms.block_time_s <= now_s:
            made.append(self.mine())
        return made

    def mine(self, *, first: Iterable[str] = (), empty: bool = False) -> Block:
        """Make a block: `first` these hashes (whether or not a pool still has them), then what pays best."""
        base_fee = self.base_fee()
        self.state.height = self.head.number + 1
        receipts: list[Receipt] = []
        for hash in first:
            self._include(self.seen[hash], base_fee, receipts)
        if not empty:
            self._fill(base_fee, receipts)
        for grant in self._grants:
            self.state.mint(grant.contract, grant.to, grant.amount)
        grants, self._grants = tuple(self._grants), []
        used = receipts[-1].cumulative_gas if receipts else 0
        used += min(self.terms.background_gas, self.terms.gas_limit - used)
        block = self._append(self.head.timestamp + self.terms.block_time_s, base_fee, used, tuple(receipts), grants)
        for receipt in receipts:
            self.pool.settle(receipt.tx.sender, self.nonce(receipt.tx.sender))
        self._next_base_fee = None
        return block

    def reorg(
        self, depth: int, *, returns: Callable[[Tx], bool] = lambda _: True, empty: bool = False, deep: bool = False
    ) -> list[Tx]:
        """Replace the last `depth` blocks by one more than that; what was in them, and is not now.

        `returns` says which of the removed transactions come back into the pool. `empty`: the new blocks contain none.
        `deep` permits to go below the final block, which a chain promises never to do.
        """
        if not 0 < depth <= self.head.number or (depth > self.head.number - self.finalized and not deep):
            raise ValueError(f"a reorganisation of {depth} blocks at height {self.head.number} is too deep")
        removed = self.blocks[-depth:]
        del self.blocks[-depth:]
        for block in removed:
            del self._numbers[block.hash]
        self.state.rewind(self.head.number)
        self._reorgs += 1
        self._next_base_fee = removed[0].base_fee
        orphans = [receipt.tx for block in removed for receipt in block.receipts]
        for tx in orphans:
            del self._where[tx.hash]
        self._grants[:0] = [grant for block in removed for grant in block.grants]
        for tx in orphans:
            if returns(tx):
                self._take_back(tx)
        for _ in range(depth + 1):
            self.mine(empty=empty)
        return [tx for tx in orphans if tx.hash not in self._where]

    def branch(self, name: str, depth: int = 0) -> World:
        """A copy that goes its own way, without the last `depth` blocks: for a node on a fork of its own."""
        other = copy.deepcopy(self)
        other.name = name
        if depth:
            other.reorg(depth, deep=True)
        return other

    def _take_back(self, tx: Tx) -> None:
        # The sender's coin may come from a removed block too, so nothing is checked but what a slot can hold.
        if self.pool.at(tx.sender, tx.nonce) is None and self.pool.get(tx.hash) is None:
            self.pool.add(tx, tx.nonce, tx.cost_max)

    def _append(
        self,
        timestamp: int,
        base_fee: int,
        gas_used: int,
        receipts: tuple[Receipt, ...],
        grants: tuple[Grant, ...] = (),
    ) -> Block:
        number = len(self.blocks)
        parent = self.head.hash if self.blocks else "0x" + 64 * "0"
        extra = f"{self.name} {self._reorgs}".strip()
        content = [
            self.terms.chain_id,
            number,
            parent,
            timestamp,
            base_fee,
            gas_used,
            extra,
            [receipt.tx.hash for receipt in receipts],
            grants,
        ]
        hash = "0x" + sha256(repr(content).encode()).hexdigest()  # any will do: no caller of a node checks it
        block = Block(number, hash, parent, timestamp, base_fee, gas_used, extra, receipts, grants)
        self.blocks.append(block)
        self._numbers[hash] = number
        for receipt in receipts:
            self._where[receipt.tx.hash] = (number, receipt.position)
        return block

    def _fill(self, base_fee: int, receipts: list[Receipt]) -> None:
        """Best tip first; of one sender in the order of nonces."""
        heap: list[tuple[int, int, Tx]] = []

        def push(sender: str) -> None:
            tx = self.pool.at(sender, self.nonce(sender))
            if tx is not None and tx.hash not in self.censored:
                heapq.heappush(heap, (-tx.tip_at(base_fee), self.pool.arrival(tx.hash), tx))

        for sender in self.pool.senders():
            push(sender)
        while heap:
            _, _, tx = heapq.heappop(heap)
            if self._include(tx, base_fee, receipts):
                push(tx.sender)

    def _include(self, tx: Tx, base_fee: int, receipts: list[Receipt]) -> bool:
        """Execute in the block that is being made, if it is valid there and there is room."""
        used = receipts[-1].cumulative_gas if receipts else 0
        others = self.terms.background_gas if tx.tip_at(base_fee) < self.terms.background_tip else 0
        if used + others + tx.gas > self.terms.gas_limit or tx.max_fee < base_fee:
            return False
        if self.nonce(tx.sender) != tx.nonce or self.balance(tx.sender) < tx.cost_max:
            return False
        gas, done = self._execute(tx)
        price = base_fee + tx.tip_at(base_fee)
        self.state.add(NONCE, tx.sender, 1)
        self.state.move(Movement(COIN, tx.sender, BURNED, gas * base_fee))
        self.state.move(Movement(COIN, tx.sender, MAKER, gas * (price - base_fee)))
        events: tuple[Movement, ...] = ()
        moves: tuple[Movement, ...] = ()
        if done is not None:
            events, moves = done.events, done.moves
            for move in moves:
                self.state.move(move)
        first_log = receipts[-1].first_log + len(receipts[-1].events) if receipts else 0
        receipts.append(Receipt(tx, len(receipts), done is not None, gas, used + gas, price, events, first_log, moves))
        return True

    def _execute(self, tx: Tx) -> tuple[int, Transferred | None]:
        """Gas used, and what is done; None if it failed."""
        gas = tx.intrinsic_gas + self.extra_gas(tx.to, tx.data)
        if gas > tx.gas:
            return tx.gas, None
        try:
            return gas, self.call(self.state.get, tx.sender, tx.to, tx.value, tx.data)
        except Reverted:
            return gas, None

    def extra_gas(self, to: str, data: bytes) -> int:
        """What a call costs beyond the transaction itself."""
        token = self.tokens.get(to)
        if token is not None:
            return token.gas if data else CONTRACT_GAS
        return CONTRACT_GAS if to in self.contracts else 0

    def call(self, read: Read, sender: str, to: str, value: int, data: bytes) -> Transferred:
        """What a transaction would do, on the balances that `read` gives. Pure; `Reverted` if a contract refuses."""
        token = self.tokens.get(to)
        if token is not None:
            transfer = read_transfer(data)
            if transfer is None or value:
                raise Reverted
            return token.plan(read, sender, *transfer)
        if not self.contracts.get(to, True):
            raise Reverted
        return Transferred(b"", (Movement(COIN, sender, to, value),) if value else (), ())
