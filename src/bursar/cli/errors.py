"""What can go wrong with the command itself, as against with the ledger or with the database."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.model.errors import BursarError


@dataclass(eq=False)
class Unprinted(BursarError):
    """It was done, but nobody could be told."""

    why: str
    code = "UNPRINTED"
    text = "the output can't be written: {why}; what was to be printed has been done, and is committed"
