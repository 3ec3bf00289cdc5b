"""Switches of withdrawals: for all users, one user, an asset or a chain. Pure.

They are pauses of the engine under names of their own, so `bursar flow pauses` lists them beside the others. What is
requested while one is off is written down and decided, and its payout is not ordered before the switch is on again.
"""

from __future__ import annotations

from bursar.flows.withdrawals.machine import MACHINE

RAIL = "rail"
Switch = tuple[str, str]  # kind and name of a pause

EVERYTHING: Switch = ("flow", MACHINE.name)


def is_switch(kind: str, name: str) -> bool:
    """Whether a pause is one of these."""
    return (kind, name) == EVERYTHING or (kind == RAIL and name.startswith(("withdrawals of ", "withdrawals on ")))


def of_user(user: int) -> Switch:
    """Withdrawals of one user."""
    return RAIL, f"withdrawals of user {user}"


def of_asset(asset: str) -> Switch:
    """Withdrawals of an asset, on any chain."""
    return RAIL, f"withdrawals of {asset}"


def of_chain(chain: str) -> Switch:
    """Withdrawals on a chain."""
    return RAIL, f"withdrawals on {chain}"


def switches_of(user: int, asset: str, chain: str) -> tuple[Switch, ...]:
    """Those that stop a withdrawal."""
    return EVERYTHING, of_user(user), of_asset(asset), of_chain(chain)
