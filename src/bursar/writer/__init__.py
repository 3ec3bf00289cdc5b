"""The one way rows change: many callers' changes in one unit."""

from bursar.writer.change import Change, Done, Limit, Move, Passage, Remember
from bursar.writer.writer import Writer

__all__ = ["Change", "Done", "Limit", "Move", "Passage", "Remember", "Writer"]
