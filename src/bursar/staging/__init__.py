"""What the demo and the torture share: this very program as real processes, and callers of its API over HTTP."""

from bursar.staging.caller import Answered, Caller, NoAnswer
from bursar.staging.guard import Guard
from bursar.staging.program import Program, children_of, environment

__all__ = ["Answered", "Caller", "Guard", "NoAnswer", "Program", "children_of", "environment"]
