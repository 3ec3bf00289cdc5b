"""What arguments and options may be: checked here, so that a mistake is a usage error that says how to write it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from bursar.model.accounts import (
    CappedOverdraft,
    ExternalAccount,
    NoOverdraft,
    Policy,
    SystemAccount,
    UncappedOverdraft,
)
from bursar.model.postings import SEQ_MAX

HASH_LENGTH = 64
DURATION_MAX = timedelta(days=3650)
PLAIN_POLICIES: dict[str, Policy] = {
    "no-overdraft": NoOverdraft(),
    "uncapped": UncappedOverdraft(),
    "system": SystemAccount(),
    "external": ExternalAccount(),
}
POLICIES = ("no-overdraft", "capped", "uncapped", "system", "external")

_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

F = TypeVar("F", bound=Callable[..., Any])

LIMIT = click.IntRange(1, 10_000)
NUMBER = click.IntRange(1, SEQ_MAX)
POSTING = click.IntRange(0, 2**63 - 1)


def moment(value: str) -> datetime:
    """A time in ISO 8601; without a zone it is UTC, as everything that is printed."""
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a time; write 2026-01-31 or 2026-01-31T12:30:00Z (no zone: UTC)."
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def duration(value: str) -> timedelta:
    """A length of time such as 90s, 30m, 12h or 7d."""
    found = _DURATION.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a length of time; write 90s, 30m, 12h or 7d.")
    length = timedelta(**{_UNITS[found[2]]: int(found[1])})
    if not timedelta(0) < length <= DURATION_MAX:
        raise click.BadParameter(f"{value!r} is out of bounds: more than nothing, at most {DURATION_MAX.days}d.")
    return length


def envelope_name(value: str) -> int | str:
    """An envelope by number or by content hash."""
    if len(value) == HASH_LENGTH:
        return value
    if not (value.isascii() and value.isdigit()) or not 0 < int(value) <= SEQ_MAX:
        raise click.BadParameter(f"{value!r} is neither a number nor a content hash of {HASH_LENGTH} digits.")
    return int(value)


def pair(value: str) -> tuple[str, str]:
    """name=value."""
    name, equals, rest = value.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{value!r} is not name=value.")
    return name, rest


def policy_of(name: str, floor: str | None, asset: str | None) -> Policy:
    """The policy that the options describe."""
    if name == "capped":
        if floor is None or asset is None:
            raise click.UsageError("A capped overdraft needs --floor and --asset, as in --floor -500.00 --asset USDT.")
        return CappedOverdraft(floor=floor, asset=asset)
    if floor is not None or asset is not None:
        raise click.UsageError("--floor and --asset are for a capped overdraft only.")
    return PLAIN_POLICIES[name]


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which the help shows them."""

    def decorate(command: F) -> F:
        return functools.reduce(lambda made, option: option(made), reversed(options), command)

    return decorate


floor_options = together(
    click.option("--floor", metavar="AMOUNT", help="Capped: the lowest balance, such as -500.00."),
    click.option("--asset", metavar="CODE", help="Capped: the asset that may go negative."),
)
key_option = click.option(
    "--key",
    metavar="TEXT",
    help="Idempotency key: sent again with the same key, it happens once. Made for you if you give none.",
)
meta_option = click.option(
    "--meta",
    "metadata",
    metavar="K=V",
    multiple=True,
    type=pair,
    callback=lambda _ctx, _option, pairs: dict(pairs),
    help="Kept with the envelope; may be given several times.",
)
entry_options = together(
    key_option,
    meta_option,
    click.option("--book", metavar="NAME", default="main", show_default=True, help="The book."),
)
settings_options = together(
    click.option(
        "--config", "file", metavar="FILE", envvar="BURSAR_CONFIG", show_envvar=True, help="Settings, as TOML."
    ),
    click.option("--data", metavar="DIR", help="Setting `data`: where database, secrets and log are made."),
)
actor_option = click.option("--actor", metavar="NAME", required=True, help="Who you are; it is written down.")
operator_options = together(
    actor_option, click.option("--reason", metavar="TEXT", required=True, help="Why; it is written down.")
)
