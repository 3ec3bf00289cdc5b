"""Balances of one asset, in columns: available, frozen, and the room that is left under 64 bits.

`room` is what a deposit may still add: 2^64 - 1 less what is held and less what was withdrawn and could still be given
back. A withdraw therefore frees no room, and a refund takes none, which is why a refund always fits (T31). Room comes
back when a withdraw is pruned, since then nobody can refund it any more.

The columns are arrays of unsigned 64-bit integers, so that a balance below zero or past 2^64 is an OverflowError in the
line that would have made it, whatever was checked before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from bursar.rails.trading.words import U64_MAX


class Accounts:
    """Everybody's balance in one asset. An account is opened by the first deposit that reaches it."""

    __slots__ = ("available", "base", "code", "frozen", "index", "number", "room", "users")

    def __init__(self, code: str, number: int) -> None:
        self.code = code
        self.number = number
        self.base = number << 16  # of a row's meta
        self.index: dict[int, int] = {}
        self.users: array[int] = array("Q")
        self.available: array[int] = array("Q")
        self.frozen: array[int] = array("Q")
        self.room: array[int] = array("Q")

    def open(self, user: int) -> int:
        """A new, empty account; returns its place."""
        place = self.index[user] = len(self.users)
        self.users.append(user)
        self.available.append(0)
        self.frozen.append(0)
        self.room.append(U64_MAX)
        return place

    def load(self, users: array[int], available: array[int], frozen: array[int], room: array[int]) -> None:
        """What a snapshot says."""
        self.users, self.available, self.frozen, self.room = users, available, frozen, room
        self.index = {user: place for place, user in enumerate(users)}
        if not len(self.index) == len(users) == len(available) == len(frozen) == len(room):
            raise ValueError(f"the columns of {self.code} do not fit together")

    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """Copies, for somebody who reads them later: users, available, frozen, room."""
        return self.users[:], self.available[:], self.frozen[:], self.room[:]

    def total(self) -> int:
        """All that is held, available and frozen."""
        return sum(self.available) + sum(self.frozen)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Each user with what is available and frozen."""
        return zip(self.users, self.available, self.frozen, strict=True)
