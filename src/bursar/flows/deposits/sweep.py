"""What has gathered at a user's address, brought to a wallet of ours: machine and body of a sweep.

A sweep is a payout from the user's wallet to ours, under a mandate. Where tokens lie at an address without coin, a
payout that brings the gas comes first. One sweep per wallet and asset is open at a time. It gets a signal when more
arrives meanwhile, so that nothing is left behind unnoticed. Both payouts are like every other: they are signed,
confirmed, and booked between the accounts of the two wallets; no user's balance moves.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bursar.engine import Booking, FlowRecord
from bursar.model.flow_rows import Claim, Form, Release, RowKind
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome

SWEEPING, SWEPT, LEFT = "sweeping", "swept", "left"
MORE: Final = "MORE"  # something arrived there since: consumed at once, and a move that did not see it is refused

SWEEPS: Final = Machine(
    name="sweeps",
    initial=SWEEPING,
    states=(
        State(SWEEPING, Kind.CALL, action="sweep", effect=Effect.PREPARE, poll_s=5.0),
        State(SWEPT, Kind.TERMINAL),
        State(LEFT, Kind.TERMINAL),
    ),
    arrows=(Arrow(SWEEPING, Outcome.SUCCESS, SWEPT), Arrow(SWEEPING, Outcome.EXPLICIT_FAIL, LEFT)),
)
OPEN: Final = RowKind("open", Form.UNIQUE, releasable=True)  # "wallet/asset" → the sweep that is open


class Sweep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a sweep's record."""

    chain: str
    wallet: str
    address: str
    asset: str
    contract: str = ""
    payout: str = ""  # that is under way
    payouts: tuple[str, ...] = ()  # all that were made, those for gas among them
    asked: int = 0  # how many were asked for: each has a key of its own
    failed: int = 0  # in a row
    more: int = 0  # arrivals since it began


def open_key(wallet: str, asset: str) -> str:
    """The key of the row that lets one sweep be open."""
    return f"{wallet}/{asset}"


def book_start(item: FlowRecord[Sweep]) -> Booking:
    """Claim the wallet's asset. Pure."""
    key = open_key(item.body.wallet, item.body.asset)
    return Booking(rows=(Claim(OPEN, key, {"sweep": item.id}),))


def book(item: FlowRecord[Sweep], _event: str, _answer: Any) -> Booking:
    """It has ended: another one may begin. Pure."""
    return Booking(rows=(Release(OPEN, open_key(item.body.wallet, item.body.asset)),))


def on_signal(item: FlowRecord[Sweep], event: str, _evidence: dict[str, Any]) -> Sweep | None:
    """Something arrived: the balance is looked at once more before it ends. Pure."""
    return msgspec.structs.replace(item.body, more=item.body.more + 1) if event == MORE else None
