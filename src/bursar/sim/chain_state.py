"""What simulated chains have in common: balances that remember every block, and tokens that behave well or badly.

`State` keeps each number (coin, nonce, tokens) with the heights at which it changed, so that a node can be asked for
any block, and a reorganisation takes back exactly the blocks that it removes.

A `Token` is a contract with a fixed behaviour. `plan` says what a transfer moves and what its event claims, which
differ where a token lies; `Movement` is what moved, and the only thing that oracles believe.

Not here: transactions, blocks and fees, which differ from chain to chain (`evm_world`, `expiry_world`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

COIN: Final = ""  # the asset that stands for the chain's own coin; a token is known by its contract's address
NONCE: Final = "nonce"
MINTED: Final = "minted"
BURNED: Final = "burned"  # an address to which nothing belongs any more
BASIS_POINTS: Final = 10_000

Key = tuple[str, str]  # asset and address
Read = Callable[[str, str], int]


class Reverted(Exception):
    """A contract refuses. Nothing moved."""

    @property
    def reason(self) -> str:
        """What the contract says; "" if it says nothing."""
        return str(self.args[0]) if self.args else ""


class Movement(NamedTuple):
    """What really moved, whatever an event says."""

    contract: str  # COIN: the chain's own coin
    sender: str
    to: str
    amount: int


class Grant(NamedTuple):
    """Coin or tokens that a faucet gives in a block, without a transaction."""

    to: str
    amount: int
    contract: str


class Effect(NamedTuple):
    """A movement on the canonical chain, and the transaction that caused it."""

    hash: str
    block: int
    nonce: int | None
    signer: str
    contract: str
    sender: str
    to: str
    amount: int


class State:
    """Numbers by asset and address, at every height."""

    def __init__(self) -> None:
        self.height = 0
        self._now: dict[Key, int] = {}
        self._history: dict[Key, tuple[list[int], list[int]]] = {}  # heights, and the value from each on
        self._touched: dict[int, dict[Key, None]] = {}  # by height; a dict, because a set has no order

    def get(self, asset: str, address: str, at: int | None = None) -> int:
        """The value now, or after block `at`."""
        if at is None or at >= self.height:
            return self._now.get((asset, address), 0)
        heights, values = self._history.get((asset, address), ((), ()))
        place = bisect_right(heights, at)
        return values[place - 1] if place else 0

    def reader(self, at: int | None) -> Read:
        """`get` at one height."""
        return lambda asset, address: self.get(asset, address, at)

    def add(self, asset: str, address: str, amount: int) -> None:
        """Change a value in the block that is being made."""
        key = (asset, address)
        value = self._now.get(key, 0) + amount
        assert value >= 0, f"{key} would be {value}"
        self._now[key] = value
        heights, values = self._history.setdefault(key, ([], []))
        if heights and heights[-1] == self.height:
            values[-1] = value
        else:
            heights.append(self.height)
            values.append(value)
            self._touched.setdefault(self.height, {})[key] = None

    def move(self, movement: Movement) -> None:
        """Take from one address, give to another."""
        self.add(movement.contract, movement.sender, -movement.amount)
        self.add(movement.contract, movement.to, movement.amount)

    def mint(self, asset: str, address: str, amount: int) -> None:
        """Make coin or tokens out of nothing: genesis, faucets."""
        self.add(asset, address, amount)
        self.add(MINTED, asset, amount)

    def rewind(self, height: int) -> None:
        """Take back every block above `height`."""
        for above in range(self.height, height, -1):
            for key in self._touched.pop(above, {}):
                heights, values = self._history[key]
                heights.pop()
                values.pop()
                self._now[key] = values[-1] if values else 0
        self.height = height

    def totals(self) -> dict[str, tuple[int, int]]:
        """For each asset: what all addresses have together, and what was ever minted. They must be equal."""
        found: dict[str, int] = {}
        for (asset, _), value in self._now.items():
            if asset not in (NONCE, MINTED):
                found[asset] = found.get(asset, 0) + value
        return {asset: (total, self.get(MINTED, asset)) for asset, total in sorted(found.items())}


class Behaviour(StrEnum):
    """What a token's `transfer` does."""

    HONEST = "honest"
    RETURNS_NOTHING = "returns nothing"  # moves, and gives no boolean back
    RETURNS_FALSE = "returns false"  # moves nothing, and does not revert either
    TAKES_FEE = "takes a fee"  # the recipient gets less; the events say so
    LIES = "lies"  # moves nothing; the event and the result say that it did


class Transferred(NamedTuple):
    """What a call of `transfer` does: the bytes it returns, what moves, and what its Transfer events claim."""

    output: bytes
    moves: tuple[Movement, ...]
    events: tuple[Movement, ...]


@dataclass
class Token:
    """A built-in contract."""

    address: str
    decimals: int = 6
    behaviour: Behaviour = Behaviour.HONEST
    fee_bps: int = 100  # TAKES_FEE
    gas: int = 30_000  # of a transfer, beyond what any transaction costs
    blacklist: set[str] = field(default_factory=set)  # a transfer from or to one of these reverts

    def plan(self, read: Read, sender: str, to: str, amount: int) -> Transferred:
        """What a transfer would do. Pure; `Reverted` if the contract refuses it."""
        whole = Movement(self.address, sender, to, amount)
        if self.behaviour is Behaviour.RETURNS_FALSE:
            return Transferred(bytes(32), (), ())
        if sender in self.blacklist or to in self.blacklist:
            raise Reverted("Blacklistable: account is blacklisted")
        if read(self.address, sender) < amount:
            raise Reverted("ERC20: transfer amount exceeds balance")
        true = (1).to_bytes(32, "big")
        match self.behaviour:
            case Behaviour.HONEST:
                return Transferred(true, (whole,), (whole,))
            case Behaviour.RETURNS_NOTHING:
                return Transferred(b"", (whole,), (whole,))
            case Behaviour.TAKES_FEE:
                fee = amount * self.fee_bps // BASIS_POINTS
                parts = (Movement(self.address, sender, to, amount - fee), whole._replace(to=self.address, amount=fee))
                return Transferred(true, parts, parts)
            case Behaviour.LIES:
                return Transferred(true, (), (whole,))


def effects_of(movements: Iterable[Effect], wanted: Callable[[Effect], bool] | None) -> list[Effect]:
    """Those that a predicate selects; all of them without one."""
    return [one for one in movements if wanted is None or wanted(one)]
