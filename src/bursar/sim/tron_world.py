"""A TRON chain: what becomes of transactions, by the rules of java-tron as they were recorded.

A plain world without IO, clock or chance, as `evm_world` and `expiry_world`: it changes when it is called (`submit`,
`mine`, `advance`, `reorg`, `drop`, `restart`), and the same calls give the same ids. `totals` and `effects` are for
oracles. Its nodes, which speak HTTP, lag, forget and lie, are in `tron_nodes`.

What waits is executed on trial: what a node shows of its newest state includes it. A block executes it again, perhaps
with another outcome. A block takes a transaction that expires after its *parent*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from bursar.rails.tron.addresses import ADDRESS_BYTES, PREFIX, bytes_of, text_of
from bursar.rails.tron.codec import TRANSFER, TRANSFER_SELECTOR, TRIGGER
from bursar.rails.tron.fees import NEW_HOLDER_ENERGY
from bursar.sim.chain_state import BURNED, COIN, Effect, Grant, Movement, Reverted, State, Token, effects_of
from bursar.sim.tron_tx import Tx, parse, signer_of

GENESIS_MS: Final = 1_794_967_206_000
EXISTS: Final = "account"  # 1 for an address that is an account
FREE_NET: Final = "net"  # free bandwidth that an account has used
NET: Final = "staked net"  # bandwidth from its stake that it has used
ENERGY: Final = "staked energy"  # energy from its stake that it has used
NET_TOTAL, NET_WEIGHT = 43_200_000_000, 100_000  # of the whole chain: what there is a day, and TRX staked for it
ENERGY_TOTAL, ENERGY_WEIGHT = 50_000_000_000, 500_000
REVERT_ENERGY: Final = 475
BYTES_MAX: Final = 512_000
DAY_MS: Final = 86_400_000


class Refused(Exception):
    """A node does not take a transaction now: code and message. No proof that it never will."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Included(NamedTuple):
    """A transaction, and what it did, in a block or on trial."""

    tx: Tx
    result: str  # SUCCESS, REVERT, OUT_OF_ENERGY
    fee: int
    net_usage: int
    net_fee: int
    energy: int
    energy_usage: int  # of that, from a stake
    energy_fee: int
    penalty: int  # of the energy, because many call this contract
    returned: bytes
    events: tuple[Movement, ...]  # what a node shows
    moves: tuple[Movement, ...]  # what moved


@dataclass(frozen=True, slots=True)
class Block:
    """One block. `id` begins with its number."""

    number: int
    id: str
    parent: str
    timestamp: int
    included: tuple[Included, ...]
    grants: tuple[Grant, ...]


@dataclass(kw_only=True)
class Terms:
    """What the chain is like. All of it may be changed while it runs."""

    block_ms: int = 3_000
    solidified: int = 20  # blocks behind the head that are final
    free_net: int = 600
    byte: int = 1_000
    create_account: int = 100_000
    new_account: int = 1_000_000
    memo: int = 1_000_000
    energy: int = 100
    fee_limit_max: int = 15_000_000_000


@dataclass
class World:
    """The chain as it is. Addresses are text; `first` is the timestamp of the genesis block."""

    terms: Terms = field(default_factory=Terms)
    seed: str = "tron"
    first: int = GENESIS_MS
    ids: dict[int, str] = field(default_factory=dict)  # that blocks get, instead of the hash of what is in them

    def __post_init__(self) -> None:
        self.state = State()
        self.tokens: dict[str, Token] = {}
        self.censored: set[str] = set()  # ids that block producers leave out
        self.stakes: dict[str, tuple[int, int]] = {}  # address → TRX staked for bandwidth and for energy
        self.penalties: dict[str, int] = {}  # token → energy that its transfers take more, because many call it
        self.permissions: dict[str, str] = {}  # account → address of the key that may sign for it, if not its own
        self.pool: dict[str, Included] = {}
        self.blocks: list[Block] = []
        self._where: dict[str, tuple[int, int]] = {}  # id → block, position
        self._references: dict[str, int] = {}  # what a transaction can refer to → block
        self._grants: list[Grant] = []
        self._reorgs = 0
        self._append(self.first, ())

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def head(self) -> Block:
        """The last block."""
        return self.blocks[-1]

    @property
    def finalized(self) -> int:
        """The height up to which nothing changes any more."""
        return max(0, self.head.number - self.terms.solidified)

    @property
    def chain_id(self) -> int:
        """The last four bytes of the genesis block's id."""
        return int(self.blocks[0].id[-8:], 16)

    def find(self, id: str) -> tuple[Block, Included] | None:
        """Where a transaction is on the chain."""
        place = self._where.get(id)
        if place is None:
            return None
        block = self.blocks[place[0]]
        return block, block.included[place[1]]

    def balance(self, address: str, contract: str = COIN, at: int | None = None) -> int:
        """Coin or tokens of an address; without a height with what waits."""
        return self.state.get(contract, address, at)

    def exists(self, address: str, at: int | None = None) -> bool:
        """Whether an address is an account."""
        return self.state.get(EXISTS, address, at) > 0 or address in self.tokens

    def limits(self, address: str) -> tuple[int, int]:
        """Bandwidth and energy that an account has from its stake."""
        net, energy = self.stakes.get(address, (0, 0))
        return NET_TOTAL * net // NET_WEIGHT, ENERGY_TOTAL * energy // ENERGY_WEIGHT

    def totals(self) -> dict[str, tuple[int, int]]:
        """For each asset what exists (burned fees included) and what was minted: equal, or the chain is wrong."""
        return self.state.totals()

    def effects(self, wanted: Callable[[Effect], bool] | None = None) -> list[Effect]:
        """What really moved on the chain, oldest first."""
        return effects_of(
            (
                Effect(one.tx.id, block.number, None, text_of(one.tx.contracts[0].owner), *move)
                for block in self.blocks
                for one in block.included
                for move in one.moves
            ),
            wanted,
        )

    # --- changing ----------------------------------------------------------------------------------------------------

    def deploy(self, token: Token) -> Token:
        """Add a token."""
        bytes_of(token.address)
        self.tokens[token.address] = token
        return token

    def fund(self, address: str, amount: int, contract: str = COIN) -> None:
        """Give coin or tokens in the next block. A reorganisation repeats it."""
        self._grants.append(Grant(address, amount, contract))

    def submit(self, encoded: bytes) -> Tx:
        """Bytes for the waiting list; Refused if a node whose view is the whole chain does not take them."""
        tx = parse(encoded)
        self.check(tx)
        self.pool[tx.id] = self._execute(tx)
        return tx

    def check(self, tx: Tx, head: Block | None = None) -> None:
        """Refused, in the order in which a node finds out, if one whose last block is `head` would not take it."""
        head = head or self.head
        if not tx.contracts:
            raise Refused("CONTRACT_VALIDATE_ERROR", "Contract validate error : No contract!")
        if tx.expires < head.timestamp + self.terms.block_ms:
            raise Refused("TRANSACTION_EXPIRATION_ERROR", "Transaction expired")
        self._check_signatures(tx)
        if self._references.get(tx.reference, head.number + 1) > head.number:
            raise Refused("TAPOS_ERROR", "Tapos check error.")
        if tx.size > BYTES_MAX:
            size = f"the size is {tx.size} bytes, maxTxSize {BYTES_MAX}"
            raise Refused("TOO_BIG_TRANSACTION_ERROR", f"Too big transaction with result, TxId {tx.id}, {size}")
        if tx.expires > head.timestamp + DAY_MS:
            raise Refused("TRANSACTION_EXPIRATION_ERROR", "Transaction expired")
        if tx.id in self.pool or (tx.id in self._where and self._where[tx.id][0] <= head.number):
            raise Refused("DUP_TRANSACTION_ERROR", "Dup transaction.")
        self._check_content(tx)

    def drop(self, id: str) -> bool:
        """Let every waiting list forget a transaction. Until it expires, it may come back."""
        found = self.pool.pop(id, None) is not None
        self._try_again()
        return found

    def restart(self) -> None:
        """The only node is killed and starts again: what waits and every block that is not final are gone."""
        self.pool.clear()
        self._remove(self.head.number - self.finalized)
        self._grants.clear()

    def advance(self, now_s: float) -> list[Block]:
        """Mine every block that is due by `now_s`."""
        made = []
        while self.head.timestamp + self.terms.block_ms <= now_s * 1000:
            made.append(self.mine())
        return made

    def mine(self, *, empty: bool = False, missed: int = 0) -> Block:
        """Make a block of what waits, in the order of arrival, after some slots without a block."""
        self.state.rewind(self.head.number)
        self.state.height = self.head.number + 1
        waiting = [one.tx for one in self.pool.values() if one.tx.expires > self.head.timestamp]
        included, left = [], []
        for tx in waiting:
            if empty or tx.id in self.censored or not self._valid(tx):
                left.append(tx)
            else:
                included.append(self._execute(tx))
        for grant in self._grants:
            self._grant(grant)
        grants, self._grants = tuple(self._grants), []
        timestamp = self.head.timestamp + (1 + missed) * self.terms.block_ms
        block = self._append(timestamp, tuple(included), grants)
        self._try_again(left)
        return block

    def reorg(
        self, depth: int, *, returns: Callable[[Tx], bool] = lambda _: True, empty: bool = False, deep: bool = False
    ) -> list[Tx]:
        """Replace the last `depth` blocks by one more than that; what was in them, and is not now."""
        if not 0 < depth <= self.head.number or (depth > self.head.number - self.finalized and not deep):
            raise ValueError(f"a reorganisation of {depth} blocks at height {self.head.number} is too deep")
        waiting = [one.tx for one in self.pool.values()]
        removed = self._remove(depth)
        orphans = [one.tx for block in removed for one in block.included]
        self._try_again([*(tx for tx in orphans if returns(tx)), *waiting])
        self._grants[:0] = [grant for block in removed for grant in block.grants]
        for _ in range(depth + 1):
            self.mine(empty=empty)
        return [tx for tx in orphans if tx.id not in self._where]

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_signatures(self, tx: Tx) -> None:
        contract = tx.contracts[0]
        why = ""
        if not tx.signatures:
            why = "miss sig or contract"
        elif contract.permission and contract.permission != 2:  # a new account has the active permission 2 alone
            why = "permission isn't exit"
        elif len(tx.signatures) > 1:
            why = f"Signature count is {len(tx.signatures)} more than key counts of permission : 1"
        else:
            try:
                signer = signer_of(tx, tx.signatures[0])
            except ValueError as error:
                why = str(error)
            else:
                owner = text_of(contract.owner) if len(contract.owner) == ADDRESS_BYTES else ""
                if signer != self.permissions.get(owner, owner):
                    signed = tx.signatures[0].hex()
                    why = f"{signed} is signed by {signer} but it is not contained of permission."
        if why:
            raise Refused("SIGERROR", f"Validate signature error: {why}")

    def _check_content(self, tx: Tx) -> None:
        """Whether accounts and amounts allow it now, with what waits."""

        def invalid(why: str) -> Refused:
            return Refused("CONTRACT_VALIDATE_ERROR", f"Contract validate error : {why}")

        if len(tx.contracts) > 1:
            size = f"contract size should be exactly 1, this is extend feature ,actual :{len(tx.contracts)}"
            raise invalid(f"tx {tx.id} {size}")
        contract = tx.contracts[0]
        owner = text_of(contract.owner)
        if not self.exists(owner):
            raise invalid(f"account [{owner}] does not exist")
        beside, _, _ = self._bandwidth(tx, owner)
        memo = self.terms.memo if tx.memo else 0
        has = self.state.get(COIN, owner)
        if has < beside + memo:
            raise Refused("BANDWITH_ERROR", "Account resource insufficient error.")
        if contract.kind == TRANSFER:
            to, amount = contract.field(2) or b"", contract.field(3) or 0
            if len(to) != 21 or to[:1] != PREFIX:
                raise invalid("Invalid toAddress!")
            if amount <= 0 or amount >= 2**63:
                raise invalid("Amount must be greater than 0.")
            if to == contract.owner:
                raise invalid("Cannot transfer TRX to yourself.")
            if text_of(to) in self.tokens:
                raise invalid("Cannot transfer TRX to a smartContract.")
            if has < beside + memo + amount + (0 if self.exists(text_of(to)) else self.terms.new_account):
                raise invalid("Validate TransferContract error, balance is not sufficient.")
        elif contract.kind == TRIGGER:
            if not 0 <= tx.fee_limit <= self.terms.fee_limit_max:
                raise invalid(f"feeLimit must be >= 0 and <= {self.terms.fee_limit_max}")
            if text_of(contract.field(2) or b"") not in self.tokens:
                raise invalid("No contract or not a smart contract")
        else:
            raise invalid("this chain knows transfers and calls only")

    def _valid(self, tx: Tx) -> bool:
        try:
            self._check_content(tx)
        except Refused:
            return False
        return tx.reference in self._references

    # --- execution ---------------------------------------------------------------------------------------------------

    def _bandwidth(self, tx: Tx, owner: str) -> tuple[int, int, str]:
        """What the bytes cost in sun, and in bandwidth of a stake or of what is free: one of the three covers all of
        it. A new account is paid for where no stake covers it."""
        to, size = tx.contracts[0].field(2), tx.size + 64
        if self.state.get(NET, owner) + size <= self.limits(owner)[0]:
            return 0, size, NET
        if tx.contracts[0].kind == TRANSFER and isinstance(to, bytes) and to and not self.exists(text_of(to)):
            return self.terms.create_account, 0, ""
        if self.state.get(FREE_NET, owner) + size <= self.terms.free_net:
            return 0, size, FREE_NET
        return size * self.terms.byte, 0, ""

    def _execute(self, tx: Tx) -> Included:
        contract = tx.contracts[0]
        owner = text_of(contract.owner)
        net_fee, net_usage, used = self._bandwidth(tx, owner)
        if net_usage:
            self.state.mint(used, owner, net_usage)
        fee = net_fee + (self.terms.memo if tx.memo else 0)
        result, energy, staked, energy_fee, penalty, returned = "SUCCESS", 0, 0, 0, 0, b""
        events: tuple[Movement, ...] = ()
        moves: tuple[Movement, ...] = ()
        if contract.kind == TRANSFER:
            to = text_of(contract.field(2))
            if not self.exists(to):
                fee += self.terms.new_account
                self.state.mint(EXISTS, to, 1)
            moves = events = (Movement(COIN, owner, to, contract.field(3)),)
        else:
            token, called = text_of(contract.field(2)), contract.field(4) or b""
            result, energy, returned, events, moves = self.call(token, owner, called)
            penalty = self.penalty(token, result, moves)
            left = self.limits(owner)[1] - self.state.get(ENERGY, owner)
            bought = (self.state.get(COIN, owner) - fee) // self.terms.energy
            most = min(tx.fee_limit // self.terms.energy, left + bought)
            if energy > most:
                result, energy, penalty, returned, events, moves = "OUT_OF_ENERGY", most, 0, b"", (), ()
            staked = min(left, energy)
            if staked:
                self.state.mint(ENERGY, owner, staked)
            energy_fee = (energy - staked) * self.terms.energy
            fee += energy_fee
        self.state.move(Movement(COIN, owner, BURNED, fee))
        for move in moves:
            self.state.move(move)
        costs = (fee, net_usage, net_fee, energy, staked, energy_fee, penalty)
        return Included(tx, result, *costs, returned, events, moves)

    def penalty(self, contract: str, result: str, moves: tuple[Movement, ...]) -> int:
        """The energy that a call takes more, because many call this contract: a part of what `call` says."""
        return self.penalties.get(contract, 0) if result == "SUCCESS" and moves else 0

    def call(
        self, contract: str, owner: str, called: bytes, at: int | None = None
    ) -> tuple[str, int, bytes, tuple[Movement, ...], tuple[Movement, ...]]:
        """What a token's code would do at a height: result, energy, what it returns, events, movements."""
        token = self.tokens[contract]
        read = self.state.reader(at)
        if called[:4] == bytes.fromhex("70a08231") and len(called) == 36:
            return "SUCCESS", 272, read(contract, text_of(PREFIX + called[16:])).to_bytes(32, "big"), (), ()
        if called == bytes.fromhex("313ce567"):
            return "SUCCESS", 166, token.decimals.to_bytes(32, "big"), (), ()
        if called[:4] != TRANSFER_SELECTOR or len(called) != 68:
            return "REVERT", 89, b"", (), ()
        to, amount = text_of(PREFIX + called[16:36]), int.from_bytes(called[36:], "big")
        try:
            done = token.plan(read, owner, to, amount)
        except Reverted as reverted:
            return "REVERT", REVERT_ENERGY, _error(reverted.reason), (), ()
        energy = token.gas + (NEW_HOLDER_ENERGY if not read(contract, to) else 0)
        return "SUCCESS", energy + self.penalty(contract, "SUCCESS", done.moves), done.output, done.events, done.moves

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _grant(self, grant: Grant) -> None:
        if not grant.contract and not self.exists(grant.to):
            self.state.mint(EXISTS, grant.to, 1)
        self.state.mint(grant.contract, grant.to, grant.amount)

    def _try_again(self, waiting: list[Tx] | None = None) -> None:
        """Execute what waits on trial, on top of the last block."""
        txs = [one.tx for one in self.pool.values()] if waiting is None else waiting
        self.pool = {}
        self.state.rewind(self.head.number)
        self.state.height = self.head.number + 1
        for tx in txs:
            if self._valid(tx):
                self.pool[tx.id] = self._execute(tx)

    def _remove(self, depth: int) -> list[Block]:
        removed = self.blocks[len(self.blocks) - depth :]
        del self.blocks[len(self.blocks) - depth :]
        for block in removed:
            del self._references[block.id[12:32]]
            for one in block.included:
                del self._where[one.tx.id]
        self._reorgs += 1
        self.pool = {}
        self._try_again([])
        return removed

    def _append(self, timestamp: int, included: tuple[Included, ...], grants: tuple[Grant, ...] = ()) -> Block:
        number, parent = len(self.blocks), self.head.id if self.blocks else 64 * "0"
        content = [self.seed, number, parent, timestamp, self._reorgs, [one.tx.id for one in included], grants]
        id = self.ids.get(number) or f"{number:016x}{sha256(repr(content).encode()).hexdigest()[16:]}"
        block = Block(number, id, parent, timestamp, included, grants)
        self.blocks.append(block)
        self._references[id[12:32]] = number
        for position, one in enumerate(included):
            self._where[one.tx.id] = (number, position)
        return block


def _error(reason: str) -> bytes:
    """Error(string), as Solidity and Vyper encode it."""
    said = reason.encode()
    padded = said.ljust(-(-len(said) // 32) * 32, b"\0")
    head = (32).to_bytes(32, "big") + len(said).to_bytes(32, "big")
    return bytes.fromhex("08c379a0") + head + padded if said else b""
