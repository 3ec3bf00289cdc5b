"""How settings are read: from what a TOML file or the environment has, to the value that a program uses.

A reader raises ValueError with what is needed instead. No message repeats the value: it may be a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

from bursar.ports import split_address

CHILD = "child"  # a core that is started here
NODES_MAX = 16  # of one chain
_CHAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)

Reader = Callable[[Any], Any]


def text(raw: Any) -> str:
    """Any text."""
    if not isinstance(raw, str) or "\x00" in raw:
        raise ValueError("a text is needed")
    return raw


def whole(least: int, most: int) -> Reader:
    """A whole number within bounds."""

    def read(raw: Any) -> int:
        found = int(raw) if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 20 else raw
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise ValueError(f"a whole number from {least} to {most} is needed")
        return found

    return read


def one_of(*words: str) -> Reader:
    """One of these words."""

    def read(raw: Any) -> str:
        if raw not in words:
            raise ValueError(f"one of {', '.join(words)} is needed")
        return str(raw)

    return read


def yes_or_no(raw: Any) -> bool:
    """True or false."""
    found = {"true": True, "false": False}.get(raw, raw) if isinstance(raw, str) else raw
    if not isinstance(found, bool):
        raise ValueError("true or false is needed")
    return found


def database_url(raw: Any) -> str:
    """The address of a database; empty: none."""
    url = text(raw)
    if url and not url.startswith(("sqlite:///", "postgresql://", "postgres://")):
        raise ValueError("sqlite:///FILE or postgresql://USER@HOST/NAME is needed")
    return url


def host_port(raw: Any) -> str:
    """Where something listens."""
    try:
        split_address(f"tcp:{text(raw)}")
    except ValueError:
        raise ValueError("HOST:PORT is needed, such as 127.0.0.1:8080 (port 0: any that is free)") from None
    return str(raw)


def optional(read: Reader) -> Reader:
    """The same, or nothing."""
    return lambda raw: "" if raw == "" else read(raw)


def core_address(raw: Any) -> str:
    """Where a core is."""
    address = text(raw)
    if address in ("", CHILD):
        return address
    try:
        split_address(address)
    except ValueError:
        raise ValueError(f"unix:PATH, tcp:HOST:PORT, {CHILD}, or nothing (switched off) is needed") from None
    return address


def amounts(raw: Any) -> dict[str, int]:
    """Smallest units per asset: a TOML table, or `USDT=1000000,BTC=50000` in the environment."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(raw, dict):
        pairs = list(raw.items())
    elif isinstance(raw, str):
        pairs = [(name, value) for name, _, value in (part.partition("=") for part in raw.split(",") if part.strip())]
    else:
        raise ValueError("ASSET=smallest units is needed")
    return {name.strip(): whole(0, 2**127 - 1)(_stripped(value)) for name, value in pairs}


def address(raw: Any) -> str:
    """Where a process listens."""
    try:
        split_address(text(raw))
    except ValueError:
        raise ValueError("unix:PATH or tcp:HOST:PORT is needed") from None
    return str(raw)


def webhook_url(raw: Any) -> str:
    """Where alerts are POSTed to."""
    url = text(raw)
    parts = _http(url) if url else urlsplit("")
    if parts is None:
        raise ValueError("http://… or https://… is needed")
    if parts.username or parts.password:
        raise ValueError("no name or password belongs in it; its receiver checks the signature")
    return url


def _http(url: str) -> SplitResult | None:
    """The parts of an HTTP address; None if it is none."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of a port that is none, or of half an IPv6 address
        return None
    return parts if fine and url.isascii() and not any(char <= " " for char in url) else None


def nodes(raw: Any) -> dict[str, tuple[str, ...]]:
    """URLs of nodes per chain: a TOML table of lists, or JSON. A URL may contain a key: no message repeats one."""
    found = raw
    if isinstance(raw, str):
        try:
            found = json.loads(raw or "{}")
        except ValueError:
            found = None
    if not isinstance(found, dict) or not all(isinstance(urls, list) for urls in found.values()):
        raise ValueError('a list of URLs per chain is needed, such as {"bsc": ["https://…", "https://…"]}')
    return {name: _urls(name, urls) for name, urls in found.items()}


def _urls(name: str, urls: list[Any]) -> tuple[str, ...]:
    if not _CHAIN.fullmatch(name):
        raise ValueError(
            f"{ascii(name)[:70]} is not the name of a chain's document: lower-case letters, digits and . _ -"
        )
    if not 1 <= len(urls) <= NODES_MAX:
        raise ValueError(f"{name}: 1 to {NODES_MAX} nodes are needed")
    for number, url in enumerate(urls, 1):
        if not isinstance(url, str) or _http(url) is None:
            raise ValueError(f"{name}: node {number} is not http://… or https://…")
        port = urlsplit(url).fragment  # TRON: where a node calls blocks final, if that is another port
        if "#" in url and not (port.isdecimal() and port.isascii() and 0 < int(port) < 65_536):
            raise ValueError(f"{name}: node {number}: a port stands behind #, or nothing")
    if len(set(urls)) < len(urls):
        raise ValueError(f"{name}: one URL is given twice; a node can't be its own witness")
    return tuple(urls)


def words(raw: Any) -> tuple[str, ...]:
    """A command: a TOML list, or a JSON list in the environment. Never one text, which a shell would have to split."""
    found = raw
    if isinstance(raw, str):
        try:
            found = json.loads(raw or "[]")
        except ValueError:
            found = None
    if not isinstance(found, list) or not all(isinstance(word, str) and "\x00" not in word for word in found):
        raise ValueError('a list of words is needed, the program first, such as ["/usr/bin/notify", "--now"]')
    if found and not found[0]:
        raise ValueError("the program has no name")
    return tuple(found)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value
