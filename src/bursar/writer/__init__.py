"""The one way rows change: many callers' changes in one unit."""

from bursar.writer.change import KEEP_DUE, NO_TIMER, Change, ChangeResult, Limit, Move, NewTransition, Operation
from bursar.writer.writer import Writer

__all__ = ["KEEP_DUE", "NO_TIMER", "Change", "ChangeResult", "Limit", "Move", "NewTransition", "Operation", "Writer"]
