"""Closes in the transfers scenario: accounts close at both servers while a person freezes and unfreezes them.

On some seeds. Two of the accounts have money, so that their closes are refused; one is empty. Exactly between the
freeze of a close and its end, when it asks the core, now and then the person freezes the account, or the process dies.
The person remembers what was answered. An account that the person has frozen must stay so until the person unfreezes
it, or be closed. In the end, an account that is frozen and not by the person was frozen by a close that was
interrupted: an alert names it, and another close ends it.
"""

from __future__ import annotations

import contextlib
from contextvars import Context
from typing import Final

from bursar.flows.transfers import Transfers
from bursar.flows.transfers.closing import alert_interrupted
from bursar.flows.transfers.request import funding_account
from bursar.ledger import Ledger
from bursar.model.accounts import AccountStatus
from bursar.model.errors import AccountClosed, BursarError
from bursar.sim.net import SimNet
from bursar.sim.oracle import Violation
from bursar.sim.process import Process

WITH_MONEY: Final = (11, 12)
EMPTY: Final = 13
USERS: Final = (*WITH_MONEY, EMPTY)
CLOSES: Final = 3  # of each account, in each life of a server
FREEZES: Final = 6
DRAIN_S: Final = 0.1
PAUSE_S_MAX: Final = 0.05
FROZEN_SHARE: Final = 0.3  # of the closes meet a freeze by the person
CRASH_SHARE: Final = 0.3  # of the closes are the end of their process, until so many were
CRASHES: Final = 2
FORGOTTEN_SHARE: Final = 0.5  # of the closes that were interrupted: that account is not closed, frozen or unfrozen
OVERDUE_S: Final = 0.001


class Closers:
    """What is closed, and what the person knows, over all lives of the servers."""

    def __init__(self, seed: int, net: SimNet) -> None:
        self.takes_part = seed % 7 == 5
        self._happened = net.happened
        self._strikes = True  # until all is healed
        self._crashes = 0
        self._acting: dict[str, Process] = {}  # where the person's request for an account is being carried out
        self._forgotten: set[str] = set()
        # Whether the person has frozen an account; None if there was no answer.
        self._frozen: dict[str, bool | None] = {funding_account(user): False for user in USERS}

    async def furnish(self, transfers: Transfers) -> None:
        """Accounts with money, and one without. Twice is once."""
        if not self.takes_part:
            return
        for user in WITH_MONEY:
            await transfers.fund(user, "USD", "1.00", reference=f"closer-{user}")
        with contextlib.suppress(AccountClosed):
            await transfers.ledger.create_account(funding_account(EMPTY))

    async def close(self, transfers: Transfers, process: Process) -> None:
        """Close all of them, again and again. Those with money are refused; so are all if the core can't be asked."""
        for _ in range(CLOSES):
            for user in USERS:
                account = funding_account(user)
                if account not in self._forgotten:
                    with contextlib.suppress(BursarError, ConnectionError):
                        await transfers.close_account(account, drain_s=DRAIN_S)
                await process.ports.sleep(process.kernel.rng.random() * PAUSE_S_MAX)

    async def freeze(self, ledger: Ledger, process: Process) -> None:
        """The person freezes accounts and unfreezes them, in the middle of everything."""
        rng = process.kernel.rng
        for _ in range(FREEZES):
            account = funding_account(rng.choice(USERS))
            for is_frozen in (True, False):
                await self._set(ledger, process, account, is_frozen=is_frozen)
                await process.ports.sleep(rng.random() * PAUSE_S_MAX)

    def calm(self) -> None:
        """Nothing happens to a close any more."""
        self._strikes = False

    async def meanwhile(self, ledger: Ledger, process: Process, user: int) -> None:
        """A close of this user's account asks the core: it has frozen the account, and has not closed it."""
        if not self.takes_part or not self._strikes or user not in USERS:
            return
        chance = process.kernel.rng.random()
        if chance < FROZEN_SHARE:
            self._happened["frozen while closing"] += 1
            await self._set(ledger, process, funding_account(user), is_frozen=True)
        elif chance < FROZEN_SHARE + CRASH_SHARE and self._crashes < CRASHES:
            self._crashes += 1
            self._happened["closes interrupted"] += 1
            if process.kernel.rng.random() < FORGOTTEN_SHARE:
                self._forgotten.add(funding_account(user))
            # Not from here: the process's own code is on the stack, and would run on.
            process.kernel.loop.call_soon(process.crash, context=Context())
            await process.kernel.loop.create_future()

    async def _set(self, ledger: Ledger, process: Process, account: str, *, is_frozen: bool) -> None:
        """One request of the person at a time, for each account; the next when it was answered, or its server died."""
        other = self._acting.get(account)
        if account in self._forgotten or (other is not None and other.alive):
            return
        self._acting[account] = process
        try:
            await self._check(ledger, account)
            self._frozen[account] = None
            await (ledger.freeze(account) if is_frozen else ledger.unfreeze(account))
            self._frozen[account] = is_frozen
        except BursarError:
            pass  # it is closed; or the database was busy, and the person does not know
        finally:
            if self._acting.get(account) is process:
                del self._acting[account]

    async def _check(self, ledger: Ledger, account: str) -> None:
        status = (await ledger.account(account)).status
        if self._frozen[account] and status is AccountStatus.ACTIVE:
            raise Violation(f"{account} is active, and a person has frozen it")

    async def judge(self, transfers: Transfers, process: Process) -> None:
        """Nothing goes wrong any more, and no person acts: every freeze has an owner, and every close can be ended."""
        if not self.takes_part:
            return
        ledger, store = transfers.ledger, transfers.ledger.store
        await process.ports.sleep(2 * OVERDUE_S)
        await alert_interrupted(transfers.engine, OVERDUE_S)
        reasons = [alert.reason for alert in await store.read.alerts.open()]
        for account, is_frozen in self._frozen.items():
            await self._check(ledger, account)
            status = (await ledger.account(account)).status
            if status is AccountStatus.FROZEN and is_frozen is False:
                self._happened["closes found interrupted"] += 1
                if f"close of {account} interrupted" not in reasons:
                    raise Violation(f"{account} is frozen by an interrupted close, and no alert names it")
            with contextlib.suppress(BursarError):
                await transfers.close_account(account, drain_s=DRAIN_S)
            after = (await ledger.account(account)).status
            await self._check(ledger, account)
            if after is AccountStatus.FROZEN and is_frozen is False:
                raise Violation(f"{account} is frozen, although another close of it has ended")
        if left := [closing.path for closing in await store.read.closings.list()]:
            raise Violation(f"no close is under way, and {left} are frozen by one")
