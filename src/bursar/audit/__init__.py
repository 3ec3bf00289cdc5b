"""Audit: is the ledger still what it says it is? Numbered invariants, checked over one consistent moment."""

from bursar.audit.finding import INVARIANTS, Finding, Progress
from bursar.audit.run import audit

__all__ = ["INVARIANTS", "Finding", "Progress", "audit"]
