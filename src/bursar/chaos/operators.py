"""Operators who freeze accounts and unfreeze them again, so that a target refuses what its source has already given.

Without them nothing would ever be rolled back. They use the library and the core's own client, not the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

from bursar.config import Config
from bursar.flows.transfers.request import funding_account
from bursar.instance import Bursar
from bursar.model.accounts import AccountStatus
from bursar.model.errors import BursarError
from bursar.model.outcome import Outcome
from bursar.ports import SystemPorts
from bursar.rails.trading import Status, TradingClient
from bursar.runtime import client_of

FROZEN_S = 0.3
BETWEEN_S = 0.6
THAW_S = 60.0
AGAIN_S = 0.1


class Operators:
    """Freeze at random until stopped; then unfreeze everything."""

    def __init__(self, config: Config, users: range, seed: int) -> None:
        self.frozen = 0
        self._config = config
        self._users = users
        self._rng = random.Random(f"{seed}:people")
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="people", daemon=True)
        self._failed = ""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> str:
        """Unfreeze everything; returns why not, if that fails."""
        self._over.set()
        self._thread.join(2 * THAW_S)
        return "the operators who freeze accounts hang" if self._thread.is_alive() else self._failed

    async def _work(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [client_of(self._config, SystemPorts(), kind) for kind in self._config.cores]
            for client in clients:
                await stack.enter_async_context(client)
            while not self._over.is_set():
                # Many at once: some of them have a transfer in flight that was checked already.
                users = self._rng.sample(self._users, len(self._users) // 2)
                place = self._rng.choice([None, *clients])
                if await self._set(place, users, AccountStatus.FROZEN):
                    self.frozen += len(users)
                await asyncio.sleep(self._rng.random() * FROZEN_S)
                await self._thaw(place, users)
                await asyncio.sleep(self._rng.random() * BETWEEN_S)

    async def _thaw(self, place: TradingClient | None, users: list[int]) -> None:
        """However long it takes, and also if freezing seems to have failed: its answer may have been lost."""
        try:
            async with asyncio.timeout(THAW_S):
                while not await self._set(place, users, AccountStatus.ACTIVE):  # noqa: ASYNC110
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            self._failed = f"users {users} can't be unfrozen"

    async def _set(self, place: TradingClient | None, users: list[int], status: AccountStatus) -> bool:
        if place is not None:
            wanted = Status.FROZEN if status is AccountStatus.FROZEN else Status.ACTIVE
            replies = await asyncio.gather(*[place.set_status(user, wanted) for user in users])
            return all(reply.outcome is Outcome.SUCCESS for reply in replies)
        try:
            # Opened again each time: an operator's command does the same.
            async with Bursar(self._config.database_url) as b:
                for path in map(funding_account, users):
                    if (await b.ledger.account(path)).status is not status:
                        await (b.ledger.freeze(path) if status is AccountStatus.FROZEN else b.ledger.unfreeze(path))
        except (BursarError, OSError):
            return False
        return True
