"""Who takes part in the transfers scenario: callers with requests, a client that injects faults, and an oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from bursar.flows.transfers import MACHINE, Request, Transfers, View
from bursar.flows.transfers.link import StoreLink
from bursar.flows.transfers.request import OPEN, funding_account
from bursar.ledger import Ledger
from bursar.rails.trading import BalancesReply, Reply, Status, TradingClient
from bursar.sim.closers import Closers
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import Kernel, run
from bursar.sim.oracle import Violation
from bursar.sim.process import Process
from bursar.sim.records import RecordOracle
from bursar.store import connect

PATH: Final = "funds.db"
SECRET: Final = b"a secret of the simulator"
ADDRESS: Final = "unix:/run/spot.sock"
USERS: Final = 3
FUNDS: Final = 50  # of each user, in the beginning
CALL_S: Final = 0.15  # how long a server waits for the core; what is late comes later
THAW_S_MAX: Final = 0.03


@dataclass
class Caller:
    """A caller outside, with a list of requests."""

    number: int
    wishes: list[Request]
    told: dict[str, View] = field(default_factory=dict)  # by client_order_id, the end of each
    named: dict[str, str] = field(default_factory=dict)  # by client_order_id, the transfer's id
    refused: set[str] = field(default_factory=set)


def wishes(seed: int, caller: int, how_many: int) -> list[Request]:
    """What one caller wants: mostly there, some of it back, and now and then more than there is."""
    dice = random.Random(f"{seed} wishes {caller}")
    found = []
    for number in range(how_many):
        there = dice.random() < 0.6 or number == 0
        found.append(
            Request(
                user=dice.randrange(USERS) + 1,
                source="FUNDING" if there else "SPOT",
                target="SPOT" if there else "FUNDING",
                asset="USD",
                amount=f"{dice.randrange(1, 25)}.00",
                client_order_id=f"{caller}-{number}",
            )
        )
    return found


class TransferOracle(RecordOracle):
    """What must be true of transfers, whatever drove them: each arrow once, in order, and legal."""

    machine = MACHINE

    def records(self) -> None:
        """Two that drive one transfer must not have written over each other."""
        steps = self.steps()
        found = self.db.execute("SELECT number, id, state, version FROM records WHERE flow = 'transfers'")
        for number, id_, state, version in found:
            self.legal(number, id_, steps[number], state, version)

    def ended(self) -> None:
        """All have ended."""
        marks = ", ".join("?" * len(OPEN))
        if found := self.db.execute(f"SELECT id, state FROM records WHERE state IN ({marks})", OPEN).fetchall():
            raise Violation(f"healed, and not ended: {found}")


class FaultyClient(TradingClient):
    """A client in whose calls now and then the target is frozen: it was looked at before, and refuses now."""

    def __init__(self, process: Process, ledger: Ledger, strikes: Callable[[], bool], closers: Closers) -> None:
        link = StoreLink(ledger.store, "spot")
        super().__init__(process.ports, ADDRESS, name="spot", secret=SECRET, link=link, timeout_s=CALL_S)
        self._strikes = strikes
        self._process = process
        self._ledger = ledger
        self._closers = closers

    async def deposit(self, req_id: str | int, user_id: int, *args: Any, **options: Any) -> Reply:
        """Money comes to the core, and the account there is frozen."""
        if self._strikes():
            await self.set_status(user_id, Status.FROZEN)
            self._process.spawn(self._thaw(user_id), name="thaw")
        return await super().deposit(req_id, user_id, *args, **options)

    async def withdraw(self, req_id: str | int, user_id: int, *args: Any, **options: Any) -> Reply:
        """Money leaves the core, and the ledger's account is frozen."""
        if self._strikes():
            await self._ledger.freeze(funding_account(user_id))
            self._process.spawn(self._thaw(user_id), name="thaw")
        return await super().withdraw(req_id, user_id, *args, **options)

    async def balances(self, user_id: int) -> BalancesReply:
        """A close asks what the user has here, and something happens meanwhile."""
        await self._closers.meanwhile(self._ledger, self._process, user_id)
        return await super().balances(user_id)

    async def _thaw(self, user: int) -> None:
        """What this leaves frozen because the process dies, is thawed in the end."""
        await self._process.ports.sleep(self._process.kernel.rng.random() * THAW_S_MAX)
        await self.set_status(user, Status.ACTIVE)
        await self._ledger.unfreeze(funding_account(user))


@cache
def empty() -> bytes:
    """A database with nothing but our schema, made once: to make it for every seed took an eighth of a run."""
    disk = SimDisk()

    async def prepare(kernel: Kernel) -> None:
        await connect(f"sqlite:///{PATH}", kernel.start("prepare", disk=disk).ports).open()

    run(prepare, 0)
    return disk.image(PATH)


async def furnish(ledger: Ledger, transfers: Transfers) -> None:
    """Assets, accounts and money to begin with. The process may have died in the middle of it: twice is once."""
    await ledger.create_asset("USD", precision=2)
    await transfers.prepare()
    for user in range(1, USERS + 1):
        await transfers.fund(user, "USD", f"{FUNDS}.00", reference=f"seed-{user}")
