"""Split mode: commits without transactions, by a write-ahead saga of primitives (specification 004).

Both stores have transactions, and no user is offered this mode. It is an instrument of the simulator, which crashes
between every two primitives (decisions 7 and 29); the conformance tests run the ledger in it too. SQLite only.
"""

from bursar.sim.split.ledger import SplitBursar, SplitLedger, SplitWriter

__all__ = ["SplitBursar", "SplitLedger", "SplitWriter"]
