"""Closing an account for good: freeze it, let what is under way end, ask the cores, close (T44).

The ledger itself sees that an account that closes is empty and no end of a transfer that is under way, in the
transaction that closes it. What a user has at a core it can't see: a core is asked here, after the freeze, so that
nothing more goes there. A core that does not answer refuses the close.

The freeze is the close's own: its token is written in the same transaction (table `closings`). A close that is refused
lifts only that freeze. If a person freezes or unfreezes the account meanwhile, the token is gone and nothing is lifted;
if another close begins, it takes the freeze over. If the process dies, or the database is away, the row stays, and
every `serve` and `worker` raises an alert for it. No program ends such a close by itself: it can't know whether another
process is still at it, and a frozen account loses nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bursar.engine.pauses import overdue_us
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, core_account
from bursar.model.accounts import Account, funding_user
from bursar.model.errors import AccountNotEmpty
from bursar.model.outcome import Outcome

if TYPE_CHECKING:
    from bursar.engine import Engine
    from bursar.flows.transfers.transfers import Transfers

DRAIN_S = 5.0  # how long transfers that are under way may take to end
LOOK_S = 0.02
INTERRUPTED_S = 60.0  # after which a close that has not ended raises an alert; one that is alive takes seconds
WATCH_S = 30.0  # between two looks for such closes

log = logging.getLogger("bursar.transfers")


async def close_account(transfers: Transfers, path: str, drain_s: float) -> Account:
    """Close an account; a user's funding account only if no core has anything of the user's."""
    ledger = transfers.ledger
    user = funding_user(path)
    if user is None:
        return await ledger.close(path)
    token = ledger.store.ports.token()
    try:
        await ledger.begin_close(path, token)
        await _drain(transfers, path, user, drain_s)
        # In this order: a transfer that is started after this is noticed when the account closes.
        seen = await ledger.store.read.records.count(MACHINE.name, str(user))
        for kind in AccountType:
            if kind is not AccountType.FUNDING:
                await _ask(transfers, kind, path, user)
        await ledger.compact(path)  # postings of an overdraft that cancel out (L7)
        return await ledger.close_empty(path, transfers_seen=seen)
    except BaseException as error:  # whatever it is, also a cancellation: a close that is refused changes nothing
        await _cancel(transfers, path, token, error)
        raise


async def _cancel(transfers: Transfers, path: str, token: str, error: BaseException) -> None:
    """Lift the close's freeze. If that fails too, the caller gets the first error: it says what happened."""
    try:
        await transfers.ledger.cancel_close(path, token)
    except Exception as second:  # whatever it is: the row of the close stays, and raises an alert
        note = f"account {path} may still be frozen by this close ({second}); {_what_to_do(path)}"
        log.error("the close failed: %s: %s; %s", type(error).__name__, error, note)
        error.add_note(note)


def _what_to_do(path: str) -> str:
    return f"run `bursar account close {path}` again, or `bursar account unfreeze {path}`"


async def watch_closings(engine: Engine) -> None:
    """Until cancelled: raise an alert for each close that was interrupted. The first look is at the start."""
    while True:
        await alert_interrupted(engine, INTERRUPTED_S)
        await engine.ports.sleep(WATCH_S)


async def alert_interrupted(engine: Engine, after_s: float) -> None:
    """Raise an alert for each close that began so long ago and has not ended, and again when it is twice as old.

    One that began in the future began before the clock was set back (L24): it is as old as it seems to be ahead.
    """
    for closing in await engine.store.read.closings.list():
        since_us = overdue_us(abs(closing.age_us), int(after_s * 1e6))
        if since_us is not None:
            reason, path = f"close of {closing.path} interrupted", closing.path
            message = f"account {path} is frozen by a close that has not ended; {_what_to_do(path)}"
            await engine.store.single().alerts.raise_since(0, reason, "warning", message, since_us)


async def _drain(transfers: Transfers, path: str, user: int, drain_s: float) -> None:
    ports, records = transfers.ledger.store.ports, transfers.ledger.store.read.records
    until = ports.monotonic() + drain_s
    while under_way := await records.open_of(MACHINE.name, str(user)):
        if ports.monotonic() > until:
            raise AccountNotEmpty(path, f"{under_way} transfers of its user are under way; wait until they have ended")
        await ports.sleep(LOOK_S)


async def _ask(transfers: Transfers, kind: AccountType, path: str, user: int) -> None:
    client = transfers.cores.get(kind)
    if client is None:
        if core_account(kind) in await transfers.ledger.store.read.accounts.holding(core_account(kind)):
            raise AccountNotEmpty(
                path, f"core {kind} holds money of users and is not switched on here, so it can't be asked"
            )
        return
    reply = await client.balances(user)
    if reply.outcome is not Outcome.SUCCESS:
        raise AccountNotEmpty(
            path, f"core {kind} does not say whether its user has money there ({reply.code}); try again"
        )
    for asset, balance in sorted(reply.balances.items()):
        if balance.available or balance.frozen:
            raise AccountNotEmpty(path, f"its user has {asset} at core {kind}; move it to the account first")
