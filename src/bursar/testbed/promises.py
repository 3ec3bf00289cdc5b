"""Requests and their answers, and whether every answer is true. Pure: no IO, no clock.

An ask is one `client_order_id`, sent as often as it takes. The rules: it becomes at most one transfer; it became one if
and only if an answer said so; a request id or a terminal state, once answered, is true for ever; money is exactly where
the terminal states of all transfers put it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FUNDING = "FUNDING"
COMMITTED = "COMMITTED"
CONFIRMED = "confirmed"
ENDS = frozenset({COMMITTED, "FAILED", "ROLLED_BACK", CONFIRMED, "failed"})  # of transfers, and of payouts
ADDRESS = "0x"  # what the address of an account on a chain begins with
SHOWN_MAX = 20

Place = tuple[int, str, str]  # user, account type, asset


class Kind(StrEnum):
    """What an answer says about a request."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    LOST = "lost"  # no answer, or none that says anything


@dataclass(frozen=True)
class Said:
    """One answer."""

    kind: Kind
    req_id: str = ""
    state: str = ""
    code: str = ""


@dataclass
class Ask:
    """One request for a transfer or a payout, and all its answers."""

    order: str
    user: int
    source: str
    target: str  # of a payout: the address that is paid
    asset: str
    minor: int
    said: list[Said] = field(default_factory=list)

    @property
    def is_payout(self) -> bool:
        """Whether it leaves on a chain."""
        return self.target.startswith(ADDRESS)

    def was(self, kind: Kind) -> bool:
        """Whether that was ever the answer."""
        return any(said.kind is kind for said in self.said)

    @property
    def is_settled(self) -> bool:
        """Whether it is known if there is a transfer. A refusal proves nothing while a lost request may still be in
        flight: that one could be carried out later."""
        return self.was(Kind.ACCEPTED) or (self.was(Kind.REFUSED) and not self.was(Kind.LOST))


@dataclass(frozen=True)
class Row:
    """A transfer, or a payout, as the database has it."""

    order: str
    user: int
    req_id: str
    source: str
    target: str
    asset: str
    minor: int
    state: str


@dataclass
class Found:
    """What is there in the end, read without the program under test where that is possible."""

    rows: list[Row] = field(default_factory=list)
    balances: dict[Place, int] = field(default_factory=dict)
    paused: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # critical ones


def judge(asks: Iterable[Ask], deposits: Mapping[Place, int], found: Found) -> list[str]:
    """Everything that is not as it must be; nothing, if all is well."""
    wrong = [*judge_rows(asks, found.rows, "transfers"), *_money(deposits, found)]
    wrong += [f"new transfers are stopped, though nothing was broken: {text}" for text in found.paused]
    wrong += [f"a critical alert: {text}" for text in found.alarms]
    return shortened(wrong)


def judge_rows(asks: Iterable[Ask], rows: list[Row], what: str) -> list[str]:
    """Every answer that is not true of what is in the database, and every row that no answer explains."""
    by_order = {(ask.user, ask.order): ask for ask in asks}
    return [*_told(by_order.values()), *_rows(by_order, rows, what)]


def _told(asks: Iterable[Ask]) -> Iterable[str]:
    for ask in asks:
        if len(ids := {said.req_id for said in ask.said if said.req_id}) > 1:
            yield f"{ask.order} was answered under several ids: {', '.join(sorted(ids))}"
        if len(ends := {said.state for said in ask.said if said.state in ENDS}) > 1:
            yield f"{ask.order} was answered with several terminal states: {', '.join(sorted(ends))}"
        if not ask.is_settled:
            yield f"{ask.order} never got a definite answer: {ask.said[-1] if ask.said else 'none at all'}"


def _rows(asks: Mapping[tuple[int, str], Ask], rows: list[Row], what: str) -> Iterable[str]:
    count = Counter((row.user, row.order) for row in rows)
    yield from (f"{order} is {n} {what}" for (_, order), n in count.items() if n > 1)
    accepted = {key for key, ask in asks.items() if ask.was(Kind.ACCEPTED)}
    yield from (f"{order} was accepted and is lost" for _, order in sorted(accepted - count.keys()))
    yield from (f"{order} exists and was never acknowledged" for _, order in sorted(count.keys() - accepted))
    for row in rows:
        if row.state not in ENDS:
            yield f"{row.order} ({row.req_id}) has not ended: {row.state}"
        if (ask := asks.get((row.user, row.order))) is not None:
            yield from _row(ask, row)


def _row(ask: Ask, row: Row) -> Iterable[str]:
    if (ask.source, ask.target, ask.asset, ask.minor) != (row.source, row.target, row.asset, row.minor):
        yield f"{row.order} is not what was requested: {row}"
    for said in dict.fromkeys(ask.said):
        if said.req_id and said.req_id != row.req_id:
            yield f"{row.order} was answered as {said.req_id} and is {row.req_id}"
        if said.state in ENDS and said.state != row.state:
            yield f"{row.order} was answered as {said.state} and is {row.state}"


def _money(deposits: Mapping[Place, int], found: Found) -> Iterable[str]:
    """COMMITTED moved it, every other terminal state did not."""
    wanted = Counter(deposits)
    for row in found.rows:
        if row.state == COMMITTED:
            wanted[row.user, row.source, row.asset] -= row.minor
            wanted[row.user, row.target, row.asset] += row.minor
    for place in sorted(wanted.keys() | found.balances.keys()):
        there = found.balances.get(place, 0)
        if there != wanted[place]:
            user, account, asset = place
            yield f"user {user} should have {wanted[place]} {asset} in {account} and has {there}"


def shortened(wrong: list[str]) -> list[str]:
    """The first ones, and how many more there are."""
    left = len(wrong) - SHOWN_MAX
    return wrong if left <= 0 else [*wrong[:SHOWN_MAX], f"and {left} more"]
