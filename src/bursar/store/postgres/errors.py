"""What PostgreSQL's errors mean for a caller: a lost race, a broken connection, or something a person can act on."""

from __future__ import annotations

import asyncpg

from bursar.model.errors import (
    BursarError,
    Conflict,
    DatabaseCorrupt,
    DatabaseReadOnly,
    DatabaseUnavailable,
    InvalidEntry,
)
from bursar.store.batch import CommitUnknown, LockTimeout, Unreachable, WriteConflict

LOST_STATES = {"BU001", "BU002", "BU003", "BU004", "BU005", "BU006", "23505", "40001", "40P01"}
BLOCKED_STATES = {  # another transaction holds a row and does not let go:
    "55P03",  # our lock_timeout
    "57014",  # or a statement_timeout: ours, or that of the database's operator
}
BROKEN_STATES = {"57P01", "57P02", "57P03", "08000", "08003", "08006"}
READ_ONLY = "25006"
POOLED_STATES = {"26000", "42P05"}  # a prepared statement is not there, or there already: another client's
POOLER = (
    "set pool_mode = session for it in pgbouncer (or what corresponds to it in another pooler), or connect to "
    "PostgreSQL itself"
)
# What asyncpg raises when a connection can't be made or does not live; the last two are its own state, when a
# connection dies under a statement.
CONNECTION_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return str(error).split("\n")[0] or type(error).__name__


def explain(error: BaseException) -> BursarError:
    """What a person can do about it, in one line."""
    if isinstance(error, BursarError):
        return error
    state = getattr(error, "sqlstate", "") or ""
    text = first_line(error)
    if state == "53100":
        return DatabaseUnavailable("the disk is full; nothing was written, make room and try again")
    if state == READ_ONLY:
        return DatabaseReadOnly("it is read-only (a replica, or set so); connect to the primary")
    if state in ("40001", "40P01"):
        return Conflict(text, 1)
    if state in BLOCKED_STATES:
        return Conflict(f"another transaction holds what this needs, see pg_stat_activity for the oldest ({text})", 1)
    if state.startswith("28") or state == "42501":
        return DatabaseUnavailable(f"access was refused: {text}")
    if state == "3D000":
        return DatabaseUnavailable(f"{text}; create it first")
    if state in ("42P01", "3F000", "42883"):
        return DatabaseUnavailable(f"its schema is not ours or not whole ({text}); run `bursar migrate`")
    if state.startswith("22"):  # a value that can't be stored (NUL in text, no JSON): its sender's mistake alone
        return InvalidEntry(f"the database can't store it: {text}")
    if state in POOLED_STATES:
        return DatabaseUnavailable(f"a pooler in between lends its connections per transaction ({text}): {POOLER}")
    if "startup parameter" in text:  # pgbouncer's words
        return DatabaseUnavailable(f"pgbouncer refuses a setting in the address ({text}): leave it out there")
    if state == "BU100" or state.startswith("23"):
        return DatabaseCorrupt("a row", text)
    return DatabaseUnavailable(text)


def broken(error: BaseException) -> bool:
    """Whether the connection is gone, as against a statement refused."""
    state = getattr(error, "sqlstate", "") or ""
    gone = OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | asyncpg.ConnectionDoesNotExistError
    return isinstance(error, gone | TimeoutError) or state in BROKEN_STATES


def read_only(error: BaseException) -> bool:
    """Whether the server takes no writes: it was never the leader, or is no longer."""
    return getattr(error, "sqlstate", "") == READ_ONLY


def sorted_out(error: Exception) -> Exception:
    """A lost race, a broken connection, or an error for the caller."""
    if isinstance(error, BursarError | WriteConflict | CommitUnknown):
        return error
    if getattr(error, "sqlstate", None) in BLOCKED_STATES:
        return LockTimeout("another transaction holds a posting or key that this one needs")
    if getattr(error, "sqlstate", None) in LOST_STATES:
        return WriteConflict(first_line(error))
    if broken(error):
        return CommitUnknown(first_line(error))
    if isinstance(error, asyncpg.PostgresError):
        return explain(error)
    return error


def not_connected(errors: dict[str, BaseException]) -> Exception:
    """No host could be connected to: worth another try soon (`Unreachable`), unless one of them said why not."""
    for error in errors.values():
        if isinstance(error, BursarError) or not broken(error):
            return explain(error)
    said = {host: first_line(error) for host, error in errors.items()}
    if len(said) == 1:
        return Unreachable(next(iter(said.values())))
    return Unreachable("no host can be used: " + "; ".join(f"{host}: {why}" for host, why in said.items()))
