"""The one way rows change: many callers' changes in one unit."""

from bursar.writer.change import Change, ChangeResult, Limit, Move, NewTransition, Operation
from bursar.writer.writer import Writer

__all__ = ["Change", "ChangeResult", "Limit", "Move", "NewTransition", "Operation", "Writer"]
