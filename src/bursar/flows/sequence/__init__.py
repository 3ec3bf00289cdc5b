"""Composition: several entries and calls as one durable saga, resumed where it stopped, compensated in reverse."""

from bursar.flows.sequence.checks import SequenceRefused, StepRefused
from bursar.flows.sequence.machine import MACHINE
from bursar.flows.sequence.sequences import Sequences
from bursar.flows.sequence.steps import Call, Deposit, Own, OwnStep, Pair, Pay, Withdraw
from bursar.flows.sequence.views import Result, SequenceView, StepState, StepView

__all__ = [
    "MACHINE",
    "Call",
    "Deposit",
    "Own",
    "OwnStep",
    "Pair",
    "Pay",
    "Result",
    "SequenceRefused",
    "SequenceView",
    "Sequences",
    "StepRefused",
    "StepState",
    "StepView",
    "Withdraw",
]
