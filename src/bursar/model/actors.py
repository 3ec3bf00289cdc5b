"""Names of operators: written in one way only, so that one person can't pass for two.

Where two people must agree, all that tells them apart is their names. Unicode has many ways to write what looks like
`ann`: Cyrillic а, full-width letters, a zero-width space, a trailing blank. None of them is a name here: a name is made
of ASCII letters, digits and `. _ @ + | : -`, begins and ends with a letter or digit, and is kept in lower case. What
still looks alike (`0` and `o`, `1`, `l` and `I`, `rn` and `m`, another separator) is the same person to
`same_person`, and so is `ann+ops@example.com` to `ann@example.com`.
"""

from __future__ import annotations

import re

from bursar.model.errors import InvalidName

ACTOR_LENGTH_MAX = 64
REASON_LENGTH_MAX = 1_000
RESERVED = frozenset({"audit", "bursar", "recover", "system", "worker"})  # what the programs themselves are called
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._@+|:-]*[a-z0-9])?", re.ASCII)
_ALIAS = re.compile(r"\+[^@]*")
_ALIKE = str.maketrans({"0": "o", "1": "l", "i": "l", "|": "l", ".": None, "_": None, "-": None, ":": None})
RULE = (
    f"the name of a person: 1 to {ACTOR_LENGTH_MAX} ASCII letters, digits or . _ @ + | : -, beginning and ending with a"
    " letter or digit"
)


def check_actor(name: object) -> str:
    """The name of a person as it is kept: in lower case. InvalidName if it is none."""
    kept = name.lower() if isinstance(name, str) and name.isascii() and len(name) <= ACTOR_LENGTH_MAX else ""
    if not _NAME.fullmatch(kept):
        raise InvalidName("actor", ascii(name)[1:-1][:80] if isinstance(name, str) else type(name).__name__, RULE)
    if kept in RESERVED:
        raise InvalidName("actor", kept, "that is what the program itself is called; give your own name")
    return kept


def check_reason(reason: str) -> str:
    """An operator's reason, as it is stored: text that any database can store."""
    clean = reason.replace("\x00", "?").replace("\x1f", "?").encode("utf-8", "replace").decode()
    if not reason.strip() or len(reason) > REASON_LENGTH_MAX or reason != clean:
        raise InvalidName("reason", clean[:80], f"say why, in 1 to {REASON_LENGTH_MAX} characters")
    return reason


def same_person(one: str, other: str) -> bool:
    """Whether two names are one person's, or look so much alike that a reader could not tell."""
    return _skeleton(one) == _skeleton(other)


def _skeleton(name: str) -> str:
    """The name with characters that look alike replaced by one of them."""
    plain = _ALIAS.sub("", name.strip().casefold())
    return plain.translate(_ALIKE).replace("rn", "m").replace("vv", "w")
