"""Entries: commit, reverse, hold, query, recover."""

from bursar.ledger.holds import REAP
from bursar.ledger.ledger import Ledger

__all__ = ["REAP", "Ledger"]
