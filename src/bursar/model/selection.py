"""Which postings pay: the largest first, and no more than needed.

A `Pool` holds what is known to be live of one (account, asset) and one sign, by magnitude. It may be incomplete: the
store reads the largest few first, and only if those don't suffice is it asked for more (`NeedMorePostings`). Everything
else in a batch works on the same pools, so a later entry can spend what an earlier one created.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection

PoolKey = tuple[int, int, int]  # account, asset, sign


class NeedMorePostings(Exception):
    """The pool is exhausted but the store has more: read on and decide again. Never reaches a caller."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool


class Pool:
    """Live postings of one sign, ordered by magnitude; of equals the oldest pays first."""

    __slots__ = ("complete", "items")

    def __init__(self, items: list[tuple[int, int]], complete: bool) -> None:
        """`items` are (magnitude, minus number), in any order; `complete` says that the store has no more."""
        items.sort()
        self.items = items
        self.complete = complete

    def pick(self, target: int, skip: Collection[int] = ()) -> tuple[list[int], int]:
        """Numbers of the postings that pay `target`, and their sum, which falls short only if there are no more."""
        chosen: list[int] = []
        total = 0
        for magnitude, minus_id in reversed(self.items):
            if total >= target:
                return chosen, total
            if skip and -minus_id in skip:
                continue
            chosen.append(-minus_id)
            total += magnitude
        if total < target and not self.complete:
            raise NeedMorePostings(self)
        return chosen, total

    def put(self, magnitude: int, number: int) -> None:
        """A posting is live from now on."""
        insort(self.items, (magnitude, -number))

    def drop(self, magnitude: int, number: int) -> None:
        """A posting is spent. It may be unknown here, if it was named by number."""
        item = (magnitude, -number)
        if self.items and self.items[-1] == item:  # the usual case: the largest pays
            self.items.pop()
            return
        place = bisect_left(self.items, item)
        if place < len(self.items) and self.items[place] == item:
            del self.items[place]
