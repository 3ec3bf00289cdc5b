"""Payouts: everything that leaves on a chain. `Payouts` is the way in; `machine` has the states."""

from bursar.flows.payouts.checks import PayoutCode, PayoutRefused, PayoutRequest
from bursar.flows.payouts.documents import KINDS
from bursar.flows.payouts.machine import MACHINE, REPLACEMENTS
from bursar.flows.payouts.payouts import Payouts, PayoutView

__all__ = ["KINDS", "MACHINE", "REPLACEMENTS", "PayoutCode", "PayoutRefused", "PayoutRequest", "PayoutView", "Payouts"]
