"""Audit: is the ledger still what it says it is? Numbered invariants, checked over one consistent moment."""

from bursar.audit.checks import Check
from bursar.audit.finding import ELSEWHERE, INVARIANTS, Finding, Progress
from bursar.audit.run import audit
from bursar.audit.walk import UNREADABLE, said

__all__ = ["ELSEWHERE", "INVARIANTS", "UNREADABLE", "Check", "Finding", "Progress", "audit", "said"]
