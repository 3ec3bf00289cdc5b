"""What can go wrong with the command itself, as against with the ledger or with the database."""

from __future__ import annotations

from bursar.model.errors import BursarError, DatabaseUnavailable


class Unprinted(BursarError):
    """It was done, and the result could not be printed."""

    why: str
    code = "UNPRINTED"
    text = "the output can't be written: {why}; what was to be printed has been done, and is committed"


class Unusable(DatabaseUnavailable):
    """Not the database, but a core, a folder or an address can't be used; `why` says which."""

    code = "UNUSABLE"
    text = "{why}"
