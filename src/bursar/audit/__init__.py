"""Audit: is the ledger still what it says it is? Numbered invariants, checked over one consistent moment."""

from bursar.audit.finding import ELSEWHERE, INVARIANTS, Finding, Progress
from bursar.audit.run import audit

__all__ = ["ELSEWHERE", "INVARIANTS", "Finding", "Progress", "audit"]
