"""How a database is used, as its configuration says. SQLite is a file on this host: none of it is for that."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """PostgreSQL's."""

    statement_s: float = 5.0  # for one statement; then its connection is dropped. Not for migrations, audit, rebuild
    require_synchronous: bool = False  # refuse a server whose commits no synchronous standby has


USUAL = Options()
