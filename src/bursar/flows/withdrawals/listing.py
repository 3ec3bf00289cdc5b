"""Withdrawals by status, user, asset and chain, page by page.

Status and user are looked up along an index. Asset and chain are compared row by row, so that one page looks at a
bounded number of rows: it may be short, even empty, and there may still be more.
"""

from __future__ import annotations

from typing import Final

from bursar.flows.withdrawals.machine import STATUS, WAITING
from bursar.flows.withdrawals.withdrawal import WithdrawalView
from bursar.flows.withdrawals.withdrawals import Withdrawals
from bursar.store.records import NEWEST

LOOKED_MAX = 1_000  # withdrawals that one page looks at
LOOK = 50  # as many count at least as looked at by each question to the database, so that a page asks few
WAITING_LOOKED_MAX = 20_000
STATUSES: Final = tuple(dict.fromkeys(STATUS.values()))


def states_of(status: str) -> tuple[str, ...] | None:
    """The states that a status of the specification stands for, or an exact state; None: there is none. Pure."""
    if not status:
        return ()
    found = tuple(state for state, of in STATUS.items() if of == status)
    return found or ((status,) if status in STATUS else None)


async def listed(
    withdrawals: Withdrawals,
    *,
    user: int | None = None,
    states: tuple[str, ...] = (),
    asset: str = "",
    chain: str = "",
    before: int = NEWEST,
    limit: int = 50,
) -> tuple[list[WithdrawalView], int]:
    """Withdrawals, newest first, and the number below which the next page begins; 0: there is none."""
    found: list[WithdrawalView] = []
    looked = 0
    while before and len(found) < limit and looked < LOOKED_MAX:
        most = limit - len(found)
        views, before = await withdrawals.page(user=user, states=states, before=before, limit=most)
        looked += max(most, LOOK)
        found += [view for view in views if asset in ("", view.asset) and chain in ("", view.chain)]
    return found, before


async def waiting_for_people(withdrawals: Withdrawals, limit: int) -> list[WithdrawalView]:
    """Those that people have to approve, newest first. What only time or a switch holds up is left out, and hides none:
    users can make any number of those, and would hide what they don't want to be seen."""
    found: list[WithdrawalView] = []
    before, looked = NEWEST, 0
    while before and len(found) < limit and looked < WAITING_LOOKED_MAX:
        views, before = await withdrawals.page(states=(WAITING,), before=before, limit=limit)
        looked += limit
        found += [view for view in views if view.approvals_missing]
    return found[:limit]
