"""What a seed of the withdrawals scenario brings: its chain, its policy, who asks for what, and what befalls it.

A run is short and has few troubles; what is rare in one seed is there in some of a thousand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from bursar.sim import payout_faults
from bursar.sim.payout_chains import KINDS, ChainKind

USERS: Final = 3
FUNDS: Final = 100  # USDT of each user
CHAINS: Final = ("evm", "tron", "evm", "tron", "expiry")
# What policies ask for, beside people's approval (`withdrawal_rules.POLICIES`).
VARIANTS: Final = ("plain", "screened", "plain", "cooling", "limited", "screened", "listed")
STAFF: Final = ("mallory", "mal.lory", "mallory+ops", "ma11ory", "ann")  # who ask for users: four names of one person
ALL: Final = "all"
# To one seed in so many; numbers without a common factor, so that everything meets everything.
PAIR_EVERY: Final = 4  # a second server
STORMY_EVERY: Final = 3  # nodes fail, the chain reorganises
RESTORED_EVERY: Final = 11  # the database goes back to a backup
LIED_EVERY: Final = 13  # a node lies
LISTED_EVERY: Final = 61  # the token refuses to pay some addresses from some moment on
DEPOSITS_EVERY: Final = 3  # strangers send to users' addresses
RUSHED_EVERY: Final = 7  # a user asks for everything, five times at once


@dataclass
class UserRequest:
    """A withdrawal that a user wants, and what the user was told. Outlives every process."""

    key: str
    user: int
    to: str
    amount: str
    requester: str = ""  # "": the user
    max_fee: str = ""
    after_s: float = 0.0  # after the one before
    cancel_s: float | None = None  # after it was answered; None: never
    booked: bool = True  # the address is put into the address book first, where there is one
    again: bool = False  # asked once more with the same key, and once with another amount
    cancelled: bool = False  # it was called off before it was ordered: then it must not be paid


@dataclass(frozen=True, slots=True)
class Plan(payout_faults.Plan):
    """What happens to one seed."""

    @property
    def kind(self) -> str:
        """Of its chain."""
        return CHAINS[self.seed % len(CHAINS)]

    @property
    def variant(self) -> str:
        """What its policy asks for."""
        return "screened" if self.small else VARIANTS[self.seed % len(VARIANTS)]

    @property
    def users(self) -> int:
        """How many of the users ask for something."""
        return 1 if self.small else USERS - self.seed % 2

    @property
    def pair(self) -> bool:
        """Two servers."""
        return self._every(PAIR_EVERY, 0)

    @property
    def stormy(self) -> bool:
        """Nodes fail, and the chain reorganises."""
        return self._every(STORMY_EVERY, 1)

    @property
    def restored(self) -> bool:
        """The database goes back to a backup."""
        return self._every(RESTORED_EVERY, 4)

    @property
    def deposits(self) -> bool:
        """Strangers send to users' addresses. (What a restored database has forgotten is tested elsewhere.)"""
        return self.seed % DEPOSITS_EVERY == 2 and not self.restored

    @property
    def rushed(self) -> bool:
        """A user asks for everything, five times at once."""
        return self._every(RUSHED_EVERY, 3)

    @property
    def lied(self) -> bool:
        """A node lies. What TRON's nodes could say instead of the truth is not known here."""
        return self._every(LIED_EVERY, 7) and self.kind != "tron"

    @property
    def blacklists(self) -> bool:
        """From some moment on the token refuses to pay the first user's addresses: dry runs fail, or what was sent."""
        return self._every(LISTED_EVERY, 11)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names."""
        return payout_faults.NODES

    # What the scenario of payouts is for.
    behind = property(lambda _: False)
    lost = property(lambda _: False)
    deep = property(lambda _: False)
    forced = property(lambda _: False)
    watched = property(lambda _: False)


@dataclass
class Requests:
    """What users ask for, on one seed."""

    plan: Plan
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.plan.seed} wishes")

    def of(self, user: int, kind: ChainKind) -> list[UserRequest]:
        """What one user wants, one after the other; at once if nothing is `after_s`."""
        if self.plan.small and self.plan.deposits:
            return []
        if self.plan.small:
            return [UserRequest(key="w0-0", user=user, to=kind.address(0xA000), amount="20")]
        if self.plan.rushed and user == 0:
            return [self._user_request(user, n, kind, ALL if n % 2 else str(FUNDS - 1), rushed=True) for n in range(5)]
        return [self._user_request(user, n, kind) for n in range(self.dice.choice((1, 1, 2)))]

    def _user_request(
        self, user: int, number: int, kind: ChainKind, amount: str = "", *, rushed: bool = False
    ) -> UserRequest:
        dice = self.dice
        sizes = (dice.randint(2, 9), dice.randint(2, 9), dice.randint(12, 30), dice.randint(12, 30))
        user_request = UserRequest(
            key=f"w{user}-{number}",
            user=user,
            to=kind.address(0xA000 + 0x100 * user + number),
            amount=amount or dice.choice((*map(str, sizes), str(dice.randint(31, 60)), "5.25", ALL)),
            after_s=0.0 if rushed else dice.random() * 4,
        )
        if rushed:
            return user_request
        user_request.requester = dice.choice(STAFF) if dice.random() < 0.25 else ""
        user_request.max_fee = dice.choice(("1", "0.99")) if dice.random() < 0.15 else ""
        user_request.cancel_s = dice.random() * 6 if dice.random() < 0.2 else None
        user_request.booked = dice.random() < 0.85
        user_request.again = dice.random() < 0.15
        return user_request


def person_of(name: str) -> str:
    """The person behind a name, as the simulator knows it."""
    return "mallory" if name in STAFF[:4] else name


__all__ = ["ALL", "FUNDS", "KINDS", "USERS", "Plan", "Requests", "UserRequest", "person_of"]
