"""Closing an account for good: freeze it, let what is under way end, ask the cores, close (T44).

The ledger itself sees that an account that closes is empty and no end of a transfer that is under way, in the
transaction that closes it. What a user has at a core it can't see: a core is asked here, after the freeze, so that
nothing more goes there. A core that does not answer refuses the close. If it is refused, the account is what it was
before; if the process dies in between, it stays frozen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, core_account
from bursar.model.accounts import Account, AccountStatus, funding_user
from bursar.model.errors import AccountClosed, AccountNotEmpty
from bursar.model.outcome import Outcome

if TYPE_CHECKING:
    from bursar.flows.transfers.transfers import Transfers

DRAIN_S = 5.0  # how long transfers that are under way may take to end
LOOK_S = 0.02


async def close_account(transfers: Transfers, path: str, drain_s: float) -> Account:
    """Close an account; a user's funding account only if no core has anything of the user's."""
    ledger = transfers.ledger
    user = funding_user(path)
    if user is None:
        return await ledger.close(path)
    before = await ledger.account(path)
    if before.status is AccountStatus.CLOSED:
        raise AccountClosed(path)
    await ledger.freeze(path)
    try:
        await _drain(transfers, path, user, drain_s)
        # In this order: a transfer that is started after this is noticed when the account closes.
        seen = await ledger.store.read.records.count(MACHINE.name, str(user))
        for kind in AccountType:
            if kind is not AccountType.FUNDING:
                await _ask(transfers, kind, path, user)
        await ledger.compact(path)  # postings of an overdraft that cancel out (L7)
        return await ledger.close_empty(path, transfers_seen=seen)
    except BaseException:  # whatever it is, also a cancellation: a close that is refused changes nothing
        if before.status is AccountStatus.ACTIVE:
            await ledger.unfreeze(path)
        raise


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
