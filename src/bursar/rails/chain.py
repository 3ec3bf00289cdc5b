"""What every chain offers, stated once: addresses, building, decoding, fees, fate, balances, scanning.

A chain has two halves. Its `Codec` is pure: it checks addresses, builds the exact unsigned bytes of a transaction, and
decodes such bytes back into what they would do. The signer uses the codec alone: it signs what it has decoded itself,
never what a caller says. Its `Chain` talks to nodes: it quotes a fee, sends bytes, and says what became of them.

The answer to "what became of it" is a *fate*. Only two fates end a payment: `Confirmed` (final, and it pays exactly
what was ordered) and `Dead` (it can never pay any more, with the proof). Absence at a node is neither. Nothing that a
node answers to `send` is proof of anything.

A *slot* is what makes a transaction happen at most once on its chain. On account chains it is the sender's nonce: of
all transactions that share it, one takes effect. On others it is an expiry: the transaction is dead when the chain's
final height has passed it and the transaction is not there.

Amounts are integers of the chain's own smallest unit; their conversion to the ledger's units is exact or refused. Not
here: which nodes there are (configuration), who may pay what (`signer`), retries and records (`flows/payouts`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from bursar.model.errors import BursarError, Refusal
from bursar.model.records import Priority

# --- what can go wrong -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class InvalidAddress(Refusal):
    """The text is no address of this chain, or its checksum is wrong."""

    chain: str
    address: str
    why: str
    code = "INVALID_ADDRESS"
    text = "{address!r} is not an address on {chain}: {why}"


@dataclass(eq=False)
class Undecodable(Refusal):
    """The bytes are no transaction that this codec builds: nothing may be signed that can't be read."""

    chain: str
    why: str
    code = "UNDECODABLE_TRANSACTION"
    text = "these bytes are no transaction that can be read on {chain}: {why}"


@dataclass(eq=False)
class Unbuildable(Refusal):
    """No transaction of this chain can carry this payment: an amount that does not fit, a slot of another kind."""

    chain: str
    why: str
    code = "UNBUILDABLE_TRANSACTION"
    text = "no transaction on {chain} can carry this payment: {why}"


class InvalidMemo(Unbuildable):
    """This chain carries no memos, or not this one."""

    code = "INVALID_MEMO"
    text = "the memo can't be sent on {chain}: {why}"


@dataclass(eq=False)
class WouldRevert(Refusal):
    """A dry run says that the chain would refuse this very payment. Nothing was signed."""

    chain: str
    why: str
    code = "WOULD_REVERT"
    text = "{chain} would refuse this payment: {why}"


@dataclass(eq=False)
class FeeTooHigh(BursarError):
    """The chain asks for more than the ceiling of this priority: wait until it is cheaper, or raise the ceiling."""

    chain: str
    price: int
    ceiling: int
    code = "FEE_ABOVE_CEILING"
    text = "{chain} asks for {price} per unit of gas, and the ceiling of this priority is {ceiling}"


@dataclass(eq=False)
class WalletShort(BursarError):
    """The wallet that would pay has too little. Not the payment's fault: wait until the wallet is funded."""

    chain: str
    wallet: str
    asset: str  # a token's contract, or the chain's own coin
    has: int
    needs: int
    code = "WALLET_SHORT"
    text = "{chain}: {wallet} has {has} of {asset} and needs {needs}, in smallest units"


@dataclass(eq=False)
class DeepReorganisation(BursarError):
    """A block that was final is no longer part of the chain, at nodes that agree: stop sending and look (W19)."""

    chain: str
    block: int
    expected: str
    found: str
    code = "DEEP_REORGANISATION"
    text = "{chain}: block {block} was final as {expected} and is now {found}"


@dataclass(eq=False)
class NodesUnavailable(BursarError):
    """Too few nodes answered, or they disagree. It says nothing about any transaction."""

    chain: str
    why: str
    code = "NODES_UNAVAILABLE"
    text = "{chain}: {why}"


# --- values ----------------------------------------------------------------------------------------------------------


class Shape(StrEnum):
    """What a transaction is for."""

    PAY = "pay"  # the payment
    CANCEL = "cancel"  # a transfer of nothing from the wallet to itself, in the slot of a payment that must not happen


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A chain as its codec and its nodes know it."""

    name: str  # the name of its document: "bsc"
    kind: str  # of codec: "evm"
    chain_id: int
    genesis: str = ""  # hash of block 0, which a node must have; "": not checked
    native: str = ""  # asset code that fees are paid in
    legacy_fees: bool = False  # EVM: a gas price instead of EIP-1559
    depth: int = 1  # blocks on top before a transaction counts; the chain itself must call it final, too (below)
    finalized_tag: bool = True  # EVM: the chain has blocks that it calls finalized; else the depth alone decides
    fee_ceilings: tuple[int, int, int] = (0, 0, 0)  # per unit of gas: high, normal, low
    tips: tuple[int, int, int] = (0, 0, 0)

    def ceiling(self, priority: Priority) -> int:
        """The most that one unit of gas may cost."""
        return self.fee_ceilings[priority]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A payment as its chain sees it."""

    payout: str
    to: str  # canonical
    contract: str = ""  # of the token; "": the chain's own coin
    amount: int
    memo: str = ""
    gas_limit_max: int = 0  # of the asset


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a transaction happen at most once: a nonce, or an expiry with the block that it counts from."""

    nonce: int | None = None
    expires: int | None = None  # the last height at which it can be included; TRON: the time, in milliseconds
    reference: str = ""


class Fee(msgspec.Struct, frozen=True, kw_only=True):
    """What a transaction offers. `price` is the most per unit of gas, tip included."""

    gas_limit: int
    price: int
    tip: int = 0  # of that, to the block's maker; legacy: not used
    beside: int = 0  # what it costs beside gas; TRON: bandwidth, a memo, a new account

    @property
    def worst(self) -> int:
        """The most that it can cost, in the chain's own coin."""
        return self.gas_limit * self.price + self.beside


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """What some bytes would do, read from the bytes alone."""

    chain_id: int | None  # None: the bytes do not say (TRON)
    to: str  # who receives: the recipient of the token transfer, or of the coin
    contract: str
    amount: int
    slot: Slot
    fee: Fee
    memo: str = ""


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """A signed transaction, and the hash by which its chain knows it."""

    raw: bytes
    hash: str


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction that was signed for a payout, or may have been."""

    hash: str  # "": it may have been signed, but its signed bytes never came (W30)
    shape: Shape
    slot: Slot


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the transactions of one payout that share a slot? At most one of them has taken effect."""

    sender: str
    order: Order
    tries: tuple[Try, ...]
    consumer: str = ""  # hash of the final transaction that took their nonce, if the watcher has seen it
    one_node_is_enough: bool = False  # the amount is within the limit for chains with one node (W35)


# --- fates -----------------------------------------------------------------------------------------------------------


class Confirmed(msgspec.Struct, frozen=True, kw_only=True):
    """Final, and it pays exactly what was ordered: nodes agree on block, receipt and transfer."""

    hash: str
    block: int
    block_hash: str
    fee_paid: int  # in the chain's own coin
    gas_used: int = 0
    gas_price: int = 0
    evidence: dict[str, Any] = {}
    by_event_alone: bool = False  # of tokens: no node could say (any more) what the balances were (W36)


class Dead(msgspec.Struct, frozen=True, kw_only=True):
    """It can never pay. `proof` names what took its slot, or the final failure, or the expiry that has passed."""

    proof: dict[str, Any]
    hash: str = ""  # of the transaction that cost a fee: our own cancellation, or a payment that failed
    fee_paid: int = 0
    gas_used: int = 0
    gas_price: int = 0


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Final and successful, but what moved is not what was ordered: neither paid nor dead, two people decide (W36)."""

    hash: str
    why: str
    fee_paid: int = 0
    gas_used: int = 0
    gas_price: int = 0
    evidence: dict[str, Any] = {}


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """Not final yet. `seen`: some node has it, in its pool or in a block; if not, the same bytes are sent again."""

    seen: bool
    block: int | None = None  # where it is, while that is not final
    blocked: bool = False  # an earlier nonce of its sender is missing: a higher fee would not help


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes disagree, or what they say is incomplete. `person`: it will not become clear by itself."""

    why: str
    person: bool = False


Fate = Confirmed | Dead | Mismatch | Pending | Unknown


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes answered to some bytes. Evidence, never proof: the fate is asked afterwards in any case (W12, W28)."""

    accepted: bool  # some node has it now, or had it before
    answers: dict[str, str]  # node → what it said


class Balances(msgspec.Struct, frozen=True, kw_only=True):
    """What an address has at a final block."""

    block: int
    block_hash: str
    coin: int
    tokens: dict[str, int]  # by contract
    nonce: int | None = None  # account chains: transactions with lower nonces are in these balances, others are not


class OwnTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A final transaction that one of our wallets has signed."""

    hash: str
    sender: str
    nonce: int | None
    block: int


class SentElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that another program has signed, as its bytes say."""

    hash: str  # as its chain writes it
    sender: str
    slot: Slot
    fee: Fee


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Final transactions of our wallets in a range of blocks that was read whole."""

    up_to: int  # the last block that was read, at nodes that agree on its hash; never past an incomplete answer
    up_to_hash: str
    transactions: tuple[OwnTransaction, ...]


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A final transfer to one of our addresses. `hash` and `part` name it for ever: it is credited once under them."""

    hash: str
    part: str  # which transfer of that transaction: "coin", or the number of its event among those of the transaction
    sender: str
    to: str
    contract: str  # of the token; "": the chain's own coin
    amount: int  # in the chain's smallest units
    block: int
    block_hash: str
    disputed: str = ""  # why it must not be credited: the balance did not rise by what the token's events say
    by_event_alone: bool = False  # of tokens: no node could say (any more) what the balance was


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Final transfers to our addresses in a range of blocks that was read whole."""

    up_to: int  # the last block that was read; never past an incomplete answer
    up_to_hash: str
    found: tuple[Arrival, ...]
    one_node: bool  # only one node is configured, so none has confirmed what it says (W35)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node as operators see it. Its URL is not shown: it may contain a key."""

    name: str
    usable: bool
    height: int | None
    trouble: str = ""


# --- the two halves --------------------------------------------------------------------------------------------------


class Codec(Protocol):
    """A chain's formats. Pure."""

    @property
    def kind(self) -> str:
        """Which formats these are: "evm"."""
        ...

    def check_address(self, chain: str, text: str) -> str:
        """The address as it is stored and compared; InvalidAddress if it is none."""
        ...

    def check_memo(self, chain: str, text: str) -> None:
        """InvalidMemo unless a payment can carry this; none ("") always can be."""
        ...

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        """The exact unsigned bytes. The same arguments always give the same bytes."""
        ...

    def decode(self, unsigned: bytes) -> Decoded:
        """What unsigned bytes would do; Undecodable unless they are exactly what `build` makes."""
        ...

    def digest(self, unsigned: bytes) -> bytes:
        """What a key signs."""
        ...

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        """The transaction with its signature; Undecodable if that is not the sender's."""
        ...

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        """What signed bytes do, who signed them, and their hash."""
        ...


class Chain(Protocol):
    """A chain behind its nodes. Anything that can't be said now is `NodesUnavailable`."""

    @property
    def network(self) -> Network:
        """Which chain it is."""
        ...

    @property
    def codec(self) -> Codec:
        """Its formats."""
        ...

    async def quote(self, sender: str, order: Order, shape: Shape, priority: Priority) -> Fee:
        """A fee that should do now, after a dry run.

        `FeeTooHigh`, `WalletShort`: wait. `WouldRevert`: not this payment.
        """
        ...

    async def higher(self, fee: Fee, priority: Priority) -> Fee | None:
        """A fee that replaces one on the same slot; None if that would be above the ceiling."""
        ...

    async def slot(self, sender: str) -> Slot:
        """Account chains: the first nonce that the chain has not used, as its nodes know it. Others: a new expiry."""
        ...

    async def send(self, raw: bytes) -> Sent:
        """Give the bytes to all nodes. The same bytes may be sent at any time."""
        ...

    async def fate(self, question: Question) -> Fate:
        """What became of a payout's transactions."""
        ...

    async def sent_elsewhere(self, hash_: str) -> SentElsewhere | None:
        """A transaction that another program has signed, at nodes that agree; None if they agree that none has it."""
        ...

    async def balances(self, address: str, contracts: Sequence[str]) -> Balances:
        """What an address has at the last final block."""
        ...

    async def balances_of(self, addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        """The same of many addresses, with as few requests as there can be; text: why it can't be said of that one."""
        ...

    async def scan(self, addresses: Container[str], after: int, after_hash: str = "") -> Page:
        """Final transactions signed by these addresses, in the blocks after `after`; a bounded number of blocks.

        Addresses are as the codec writes them. There may be a million: they are looked up, and never gone through.
        `after_hash` is the `up_to_hash` of the page before. `DeepReorganisation`: that block is gone (W19).
        """
        ...

    async def arrivals(
        self, addresses: Container[str], contracts: frozenset[str], after: int, after_hash: str, up_to: int
    ) -> Arrivals:
        """Final transfers of the coin, and of these tokens, to these addresses in the blocks after `after`.

        A bounded number of blocks, none above `up_to`, which the caller has read from `final_block` before it read the
        addresses: an address that was issued since then has received nothing in those blocks. Else it is as `scan`.
        A transfer between two of these addresses is one, too; one of nothing, or from an address to itself, is none.
        """
        ...

    async def final_block(self) -> tuple[int, str]:
        """Height and hash of the last final block, at nodes that agree."""
        ...

    async def is_contract(self, address: str) -> bool:
        """Whether there is code at an address."""
        ...

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Every node, usable or not."""
        ...
