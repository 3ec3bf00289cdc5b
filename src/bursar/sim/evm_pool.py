"""A mempool: transactions that wait to be mined, by sender and nonce.

Of one sender, a transaction waits for the nonces before it: a gap stops all that come behind. A transaction replaces
another of the same nonce only if both of its fees are at least 10 % higher. A full pool drops its cheapest transaction,
or refuses the new one if that is the cheapest.

Block makers have one pool, and every node has its own; none is proof of anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bursar.sim.evm_tx import RefusedTransaction, Tx

REPLACEMENT_PERCENT: Final = 110


class Pool:
    """Bounded. Refusals are in the words of real nodes."""

    def __init__(self, *, size_max: int, tip_min: int, gas_max: int) -> None:
        self.size_max = size_max
        self.tip_min = tip_min
        self._gas_max = gas_max  # of a block
        self._by_hash: dict[str, Tx] = {}
        self._by_sender: dict[str, dict[int, Tx]] = {}
        self._arrival: dict[str, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[Tx]:
        return iter(self._by_hash.values())

    def get(self, hash: str) -> Tx | None:
        """A transaction that waits here."""
        return self._by_hash.get(hash)

    def arrival(self, hash: str) -> int:
        """Among equal tips, the one that came first is mined first."""
        return self._arrival[hash]

    def senders(self) -> list[str]:
        """Every address of which something waits."""
        return list(self._by_sender)

    def at(self, sender: str, nonce: int) -> Tx | None:
        """What waits in one slot."""
        return self._by_sender.get(sender, {}).get(nonce)

    def next_nonce(self, sender: str, nonce: int) -> int:
        """The first nonce from `nonce` on in which nothing waits."""
        waiting = self._by_sender.get(sender, {})
        while nonce in waiting:
            nonce += 1
        return nonce

    def add(self, tx: Tx, nonce: int, balance: int) -> None:
        """Take a transaction, given its sender's nonce and coin; RefusedTransaction in a node's words."""
        if tx.hash in self._by_hash:
            raise RefusedTransaction("already known")
        if tx.nonce < nonce:
            raise RefusedTransaction(f"nonce too low: next nonce {nonce}, tx nonce {tx.nonce}")
        if tx.gas > self._gas_max:
            raise RefusedTransaction("exceeds block gas limit")
        if tx.gas < tx.intrinsic_gas:
            raise RefusedTransaction(f"intrinsic gas too low: gas {tx.gas}, minimum needed {tx.intrinsic_gas}")
        if tx.tip < self.tip_min:
            raise RefusedTransaction(f"transaction underpriced: gas tip cap {tx.tip}, minimum needed {self.tip_min}")
        if balance < tx.cost_max:
            raise RefusedTransaction(
                f"insufficient funds for gas * price + value: balance {balance}, tx cost {tx.cost_max}, "
                f"overshot {tx.cost_max - balance}"
            )
        old = self.at(tx.sender, tx.nonce)
        if old is not None:
            if tx.tip * 100 < old.tip * REPLACEMENT_PERCENT or tx.max_fee * 100 < old.max_fee * REPLACEMENT_PERCENT:
                raise RefusedTransaction("replacement transaction underpriced")
            self.drop(old.hash)
        elif len(self._by_hash) >= self.size_max:
            cheapest = min(self._by_hash.values(), key=lambda one: (one.tip, -self._arrival[one.hash]))
            if cheapest.tip >= tx.tip:
                raise RefusedTransaction("txpool is full")
            self.drop(cheapest.hash)
        self._by_hash[tx.hash] = tx
        self._by_sender.setdefault(tx.sender, {})[tx.nonce] = tx
        self._arrivals += 1
        self._arrival[tx.hash] = self._arrivals

    def drop(self, hash: str) -> bool:
        """Forget a transaction. Whether it was here."""
        tx = self._by_hash.pop(hash, None)
        if tx is None:
            return False
        del self._arrival[hash]
        waiting = self._by_sender[tx.sender]
        del waiting[tx.nonce]
        if not waiting:
            del self._by_sender[tx.sender]
        return True

    def settle(self, sender: str, nonce: int) -> None:
        """Forget what can't be mined any more, because the sender's nonce has passed it."""
        for tx in [tx for tx in self._by_sender.get(sender, {}).values() if tx.nonce < nonce]:
            self.drop(tx.hash)
