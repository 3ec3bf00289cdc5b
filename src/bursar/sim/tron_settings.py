"""Settings of a simulated TRON node that change what it answers: peers, its waiting list, a cache of ids, dry runs.

As they were recorded of java-tron 4.8.0, with the names of its configuration in comments. With the defaults here a node
takes whatever is valid, as most nodes that a rail is given do. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bursar.sim.tron_world import Refused


@dataclass
class Settings:
    """Of one node."""

    peers: int | None = None  # that it is connected to; None: enough
    peers_min: int = 1  # minEffectiveConnection
    pending_max: int = 2_000  # maxTransactionPendingSize
    unsolidified_max: int | None = None  # maxUnsolidifiedBlocks, with unsolidifiedBlockCheck; None: not checked
    cache: bool = False  # node.rpc.trxCacheEnable: ids that were sent to it are refused, whatever became of them
    constant: bool = True  # vm.supportConstant: it performs dry runs
    seen: set[str] = field(default_factory=set)  # ids in the cache

    def check(self, id: str, waiting: int, unsolidified: int) -> None:
        """Refused, before a node looks at what a transaction is."""
        if self.peers is not None and self.peers < self.peers_min:
            if not self.peers:
                raise Refused("NO_CONNECTION", "No connection.")
            why = f"Effective connection:{self.peers} lt minEffectiveConnection:{self.peers_min}"
            raise Refused("NOT_ENOUGH_EFFECTIVE_CONNECTION", why)
        if self.unsolidified_max is not None and unsolidified >= self.unsolidified_max:
            raise Refused("BLOCK_UNSOLIDIFIED", "Block unsolidified.")
        if waiting > self.pending_max:
            raise Refused("SERVER_BUSY", "Server busy.")
        if self.cache:
            if id in self.seen:
                raise Refused("DUP_TRANSACTION_ERROR", "Transaction already exists.")
            self.seen.add(id)
