"""A program that takes deposits from the paper chain: rules, addresses of users, a scan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from tests.builders import Place
from tests.till import CONTRACT, Till, Town, till, wallet_account

from bursar.flows.deposits import ChainDeposits
from bursar.flows.deposits.arrivals import arrival_id
from bursar.flows.deposits.rules import DEPOSITS, DepositAsset, DepositRules
from bursar.model.errors import AlreadyExists
from bursar.model.records import Record
from bursar.ports import Ports
from bursar.rails.chain import Arrival

XPUB = "xpub661MyMwAqRbcFtXgS5sYJABqqG9YLmC4Q1Rdap9gSE8NqtwybGhePY2gZ29ESFjqJoCu1Rupje8YtGqsefD265TMg7usUDFdp6W1EGMcet8"
RULES = DepositRules(
    wallets="dep",
    xpub=XPUB,
    assets={"USDT": DepositAsset(minimum="1", sweep_at="50"), "ETH": DepositAsset()},
    sweep_to="hot2",
    sweep_mandate="sweep",
    gas_from="hot1",
    gas_mandate="gas",
)
UNIT = 10**6  # of USDT, on the chain and in the ledger


def paper_address(_kind: str, _xpub: str, user: int) -> str:
    """Addresses of the paper chain are names."""
    return f"@dep{user}"


@dataclass(frozen=True)
class Intake:
    """One process that takes deposits."""

    till: Till
    deposits: ChainDeposits

    async def address(self, user: int = 1) -> str:
        return (await self.deposits.issue(user, self.till.town.name)).address

    async def rules(self, **changes: Any) -> None:
        current = await self.till.documents.current(DEPOSITS, self.till.town.name, fresh=True)
        body = RULES if current is None else current.body
        await self.till.put(DEPOSITS, self.till.town.name, msgspec.structs.replace(body, **changes))

    async def scan(self) -> Record:
        """One look at the chain. What is found is written down, and is not judged before a test steps it."""
        record = await self.till.engine.record("deposit_scans", self.till.town.name)
        await self.till.engine.step(record)
        return await self.till.engine.record("deposit_scans", self.till.town.name)

    def id_of(self, hash_: str, part: str = "0") -> str:
        given = Arrival(hash=hash_, part=part, sender="", to="", contract="", amount=1, block=0, block_hash="")
        return arrival_id(self.till.town.name, given)

    async def judge(self, hash_: str, part: str = "0") -> Record:
        record = await self.till.engine.record("arrivals", self.id_of(hash_, part))
        await self.till.engine.step(record)
        return await self.till.engine.record("arrivals", record.id)

    async def arrive(
        self, amount: int, *, user: int = 1, contract: str = CONTRACT, sender: str = "@stranger"
    ) -> Record:
        """A transfer from outside to a user's address, seen and judged."""
        hash_ = self.till.town.chain.give(await self.address(user), amount, contract, sender)
        await self.scan()
        return await self.judge(hash_, "0" if contract else "coin")

    async def step(self, flow: str, id_: str) -> Record:
        await self.till.engine.step(await self.till.engine.record(flow, id_))
        return await self.till.engine.record(flow, id_)

    async def funds(self, user: int = 1, asset: str = "USDT") -> int:
        return await self.till.minor(f"user:{user}:funding", asset)

    async def of_wallet(self, user: int = 1, asset: str = "USDT") -> int:
        """What the ledger says that a user's wallet has; its account is made with its first entry."""
        path = wallet_account(self.till.town.name, f"dep-{user}")
        there = await self.till.ledger.store.read.accounts.heads([path])
        return -await self.till.minor(path, asset) if there else 0


def not_driven(_record: Record) -> asyncio.Future[Record]:
    return asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def intake(
    place: Place, town: Town, *, ports: Ports | None = None, worker: str = "local"
) -> AsyncIterator[Intake]:
    """A process; the first one furnishes the database."""
    async with till(place, town, ports=ports, worker=worker) as t:
        deposits = ChainDeposits(t.payouts, engine=t.engine, derive=paper_address)
        t.engine.drive = not_driven  # type: ignore[method-assign,assignment]
        found = Intake(t, deposits)
        if await t.documents.current(DEPOSITS, town.name, fresh=True) is None:
            await found.rules()
            for path in ("user:1:funding", "user:2:funding"):
                with contextlib.suppress(AlreadyExists):
                    await t.ledger.create_account(path)
            await deposits.prepare()
            await found.scan()  # its first look: where the chain begins
        yield found


__all__ = ["CONTRACT", "RULES", "UNIT", "Intake", "Town", "intake"]
