"""A program that takes withdrawals on the paper chain: a policy, approvers with keys, users with money."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.builders import Place
from tests.till import Till, Town, till, wallet_account

from bursar import deposit
from bursar.flows.withdrawals import WithdrawalRequest, Withdrawals, WithdrawalView
from bursar.flows.withdrawals.policy import APPROVER, POLICY, AddressBookRule, Approver, WithdrawalPolicy
from bursar.flows.withdrawals.screening import Screener
from bursar.model.authorizations import Approval
from bursar.model.records import Record
from bursar.ports import Ports

POLICY_BODY = WithdrawalPolicy(
    asset="USDT",
    chain="paper",
    fee_flat="1",
    minimum="1",
    maximum="1000",
    auto_approve_max="10",
    mandate="auto",
    dual_above="50",
    daily_user="200",
    daily_all="300",
    address_book=AddressBookRule.OFF,
)
PEOPLE = ("ann", "ben", "eve", "mallory")  # mallory is not enrolled
KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32)) for name in PEOPLE}
FUNDS = 100_000_000  # of each user


@dataclass(frozen=True)
class Counter:
    """One process that takes withdrawals."""

    till: Till
    withdrawals: Withdrawals

    async def request(self, amount: str = "5", *, key: str = "k1", user: int = 1, **more: Any) -> WithdrawalView:
        requester = more.pop("requester", "")
        wanted: dict[str, Any] = {
            "user": user,
            "asset": "USDT",
            "chain": self.till.town.name,
            "to": "@bob",
            "amount": amount,
        } | more
        return await self.withdrawals.request(WithdrawalRequest(**wanted), key=key, requester=requester)

    async def record(self, id_: str) -> Record:
        return await self.till.engine.record("withdrawals", id_)

    def drives(self) -> None:
        """From now on records are driven as in a real process."""
        del self.till.engine.drive

    async def record_count(self) -> int:
        return len(await self.till.engine.store.read.records.list("withdrawals"))

    async def step(self, id_: str) -> Record:
        await self.till.engine.step(await self.record(id_))
        return await self.record(id_)

    async def until(self, id_: str, state: str, steps: int = 8) -> Record:
        """Step the withdrawal until it is there."""
        record = await self.record(id_)
        for _ in range(steps):
            if record.state == state:
                return record
            record = await self.step(id_)
        raise AssertionError(f"it is {record.state}, not {state}: {record.error}")

    async def paid(self, id_: str) -> WithdrawalView:
        """Drive it and its payout to the end, with a block in between."""
        await self.until(id_, "queued")
        payout = (await self.withdrawals.view(id_)).payout
        await self.till.until(payout, "confirming")
        self.till.town.chain.mine()
        await self.till.until(payout, "confirmed")
        return await self.withdrawals.view(id_)

    async def approval(self, id_: str, name: str, *, signed_by: str = "") -> Approval:
        payment = await self.withdrawals.payment(id_)
        return Approval(approver=name, signature=KEYS[signed_by or name].sign(payment.canonical()).hex())

    async def approve(self, id_: str, name: str) -> WithdrawalView:
        return await self.withdrawals.approve(id_, await self.approval(id_, name))

    async def funds(self, user: int = 1) -> int:
        return await self.till.minor(f"user:{user}:funding")

    async def policy(self, **changes: Any) -> None:
        chain = self.till.town.name
        current = await self.till.documents.current(POLICY, f"usdt:{chain}", fresh=True)
        body = msgspec.structs.replace(POLICY_BODY, chain=chain) if current is None else current.body
        await self.till.put(POLICY, f"usdt:{chain}", msgspec.structs.replace(body, **changes))


def not_driven(_record: Record) -> asyncio.Future[Record]:
    return asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def counter(
    place: Place,
    town: Town,
    *,
    ports: Ports | None = None,
    worker: str = "local",
    screener: Screener | None = None,
    reconciles: bool = True,
) -> AsyncIterator[Counter]:
    """A process; the first one furnishes the database."""
    async with till(place, town, ports=ports, worker=worker, reconciles=False) as t:
        withdrawals = Withdrawals(t.ledger, t.documents, t.payouts, engine=t.engine, screener=screener)
        # Records that others start or signal are driven at once; here a test steps each of them when it wants to.
        t.engine.drive = not_driven  # type: ignore[method-assign,assignment]
        found = Counter(t, withdrawals)
        if reconciles:
            await t.payouts.reconciling.look()
        if await t.documents.current(POLICY, f"usdt:{town.name}", fresh=True) is None:
            await found.policy()
            for name in ("ann", "ben", "eve"):
                public = KEYS[name].public_key().public_bytes_raw().hex()
                await t.put(APPROVER, name, Approver(public_key=public))
            for user in (1, 2, 3):
                path = f"user:{user}:funding"
                await t.ledger.create_account(path)
                books = wallet_account(town.name, "hot1")
                await t.ledger.commit(deposit(books, path, "USDT", "100", key=f"open {path}"))
                town.chain.tokens["@token", "@hot1"] += FUNDS
        yield found
