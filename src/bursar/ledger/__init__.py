"""Entries: commit, reverse, hold, query, recover."""

from bursar.ledger.ledger import Ledger

__all__ = ["Ledger"]
