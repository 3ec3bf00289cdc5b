"""Balances of one asset: per user what is available, what is frozen, and what is committed.

`committed` is what is held and what was withdrawn and could still be refunded: it has to stay below 2^64, and deposits
that would lift it over that are refused. A withdraw does not lower it and a refund does not raise it, which is why a
refund always fits (T31). It sinks when the room floor passes a withdraw that was not refunded: by then no caller is
expected to refund it, and without that, room would be used up for ever by what was only moved in and out.

An account is a list of three integers, because nothing in Python is faster to change. A snapshot takes all of them at
once, as unsigned 64-bit integers: a balance below zero or past 2^64 could not be written.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Final

AVAILABLE, FROZEN, COMMITTED = 0, 1, 2
ACCOUNT_BYTES: Final = 4 * 8  # in a snapshot: the user, and these three


class Accounts:
    """The balance of every user in one asset. An account is opened by the first operation that gives it something."""

    __slots__ = ("by_user", "code", "number")

    def __init__(self, code: str, number: int) -> None:
        self.code = code
        self.number = number  # 0: nothing on record is about it yet
        self.by_user: dict[int, list[int]] = {}

    def open(self, user: int) -> list[int]:
        """The account of a user, new and empty if there is none."""
        account = self.by_user.get(user)
        if account is None:
            account = self.by_user[user] = [0, 0, 0]
        return account

    def columns(self) -> tuple[array[int], array[int]]:
        """Copies, to be read later: the users; available, frozen and committed of each in turn."""
        return array("Q", self.by_user), array("Q", chain.from_iterable(self.by_user.values()))

    def load(self, users: array[int], triples: array[int]) -> None:
        """What `columns` gave."""
        values = iter(triples)
        accounts = map(list, zip(values, values, values, strict=True))
        self.by_user = dict(zip(users, accounts, strict=True))
        if len(self.by_user) != len(users):
            raise ValueError(f"a user has two accounts in {self.code}")

    def total(self) -> int:
        """All that is held, available and frozen."""
        return sum(account[AVAILABLE] + account[FROZEN] for account in self.by_user.values())
