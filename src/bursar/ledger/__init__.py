"""Entries: commit, reverse, hold, query, recover."""

from bursar.ledger.holds import keep_expiring_holds
from bursar.ledger.ledger import Ledger

__all__ = ["Ledger", "keep_expiring_holds"]
