"""What the demo and the chaos tests share: this program as real processes, and callers of its API over HTTP."""

from bursar.testbed.caller import Answered, Caller, NoAnswer
from bursar.testbed.guard import Guard
from bursar.testbed.program import Program, children_of, environment

__all__ = ["Answered", "Caller", "Guard", "NoAnswer", "Program", "children_of", "environment"]
