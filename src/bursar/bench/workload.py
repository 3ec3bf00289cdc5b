"""The payments of the benchmark: who pays whom, how much, under which key. The same for every program that is measured.

Three shapes: `uniform` (any account pays any other), `hot-source` (one account pays all) and `hot-target` (one account
receives all); growth adds `hot`, where one account takes part in every payment, in turn as source and as target. Every
account starts with one posting far larger than all that will be paid, so paying always means: consume the largest
posting, create its change and the payment. That is what lets a baseline write the same rows without selecting.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import count

from bursar.model.entries import Entry, pay
from bursar.model.money import format_minor

ASSET = "USD"
PRECISION = 2
ACCOUNTS = 2_000
SEED_MINOR = 10**15  # what each account starts with
AMOUNT_MAX = 999  # of one payment, in smallest units
PAIRS = 32_768  # drawn ahead, then repeated: drawing must not be part of what is measured

# Row numbers. The migrations give 1 to the account of held money; the outside world is next, then the rest.
WORLD_ID = 2
FIRST_ID = 3
HOT_ID = FIRST_ID  # the first of the accounts is the hot one

Payment = tuple[int, int, int]  # source, target, amount; accounts by row number


def path_of(account: int) -> str:
    """The path of an account by its row number."""
    return "external:world" if account == WORLD_ID else f"user:{account}:funding"


def _uniform(draw: random.Random, _place: int) -> tuple[int, int]:
    source = draw.randrange(ACCOUNTS)
    target = (source + draw.randrange(1, ACCOUNTS)) % ACCOUNTS
    return FIRST_ID + source, FIRST_ID + target


def _other(draw: random.Random) -> int:
    return FIRST_ID + draw.randrange(1, ACCOUNTS)


def _hot_source(draw: random.Random, _place: int) -> tuple[int, int]:
    return HOT_ID, _other(draw)


def _hot_target(draw: random.Random, _place: int) -> tuple[int, int]:
    return _other(draw), HOT_ID


def _hot(draw: random.Random, place: int) -> tuple[int, int]:
    return _hot_source(draw, place) if place % 2 else _hot_target(draw, place)


SHAPES: dict[str, Callable[[random.Random, int], tuple[int, int]]] = {
    "uniform": _uniform,
    "hot-source": _hot_source,
    "hot-target": _hot_target,
    "hot": _hot,
}


@cache
def _drawn(shape: str, seed: int) -> tuple[list[Payment], list[tuple[str, str, str]]]:
    """Payments by row numbers, and the same as callers write them."""
    draw = random.Random(f"{shape}-{seed}")
    choose = SHAPES[shape]
    payments: list[Payment] = [(*choose(draw, place), draw.randint(1, AMOUNT_MAX)) for place in range(PAIRS)]
    written = [(path_of(source), path_of(target), format_minor(minor, PRECISION)) for source, target, minor in payments]
    return payments, written


class Workload:
    """An endless line of payments of one shape. `key` numbers never repeat within a database."""

    def __init__(self, shape: str, seed: int = 7) -> None:
        self.shape = shape
        self._payments, self._entries = _drawn(shape, seed)
        self._paid = count()

    def entry(self) -> Entry:
        """The next payment as a caller writes it: with text for an amount, and a key of its own."""
        number = next(self._paid)
        source, target, amount = self._entries[number % PAIRS]
        return pay(source, target, ASSET, amount, key=self.key(number))

    def take(self, how_many: int) -> list[tuple[str, Payment]]:
        """The next payments by row numbers, each with its key."""
        numbers = [next(self._paid) for _ in range(how_many)]
        return [(self.key(number), self._payments[number % PAIRS]) for number in numbers]

    def key(self, number: int) -> str:
        """An idempotency key such as a caller might use."""
        return f"{self.shape}-{number:09d}"
