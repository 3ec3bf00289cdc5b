"""The one way rows change: many callers' changes in one unit."""

from bursar.writer.change import Change
from bursar.writer.writer import Writer

__all__ = ["Change", "Writer"]
