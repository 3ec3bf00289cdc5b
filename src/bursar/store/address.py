"""A database's address as it may be printed: in logs, in errors, in what a command says when it is ready.

A password stands in an address in many ways: before the `@`, as `?password=`, with its characters encoded or not, in
which case the address is another one than was meant and the password a part of its host or name. So nothing is cut
out: what is recognised as harmless is shown, and nothing else.
"""

from __future__ import annotations

import re

_SCHEMES = ("sqlite", "postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle", "redis", "http", "https")
_HOST = r"(?:\[[0-9a-fA-F:.]*\]|[A-Za-z0-9._-]*)(?::[0-9]{0,5})?"
_PLAIN = re.compile(
    r"(?:(?P<user>[A-Za-z0-9._~%+-]*)(?P<password>:[^@/?#\s]*)?@)?"
    rf"(?P<hosts>{_HOST}(?:,{_HOST})*)"
    r"(?P<name>/[A-Za-z0-9._~%-]*)?"
    r"(?P<rest>\?.*)?",
    re.ASCII | re.DOTALL,
)
_NOT_SHOWN = "…"

HOW_TO = "write postgresql://USER:PASSWORD@HOST:PORT/NAME, with what is neither letter nor digit in it as %40 (for @)"


def printable(url: str) -> str:
    """The address without what might be a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        return _NOT_SHOWN
    if scheme == "sqlite":
        return url
    found = _PLAIN.fullmatch(rest) if scheme in ("postgresql", "postgres") else None
    if found is None or (found["user"] is None and "@" in rest):  # a password with a question mark in it
        return f"{scheme}://{_NOT_SHOWN}"
    user = "" if found["user"] is None else f"{found['user']}@"
    return f"{scheme}://{user}{found['hosts']}{found['name'] or ''}"
