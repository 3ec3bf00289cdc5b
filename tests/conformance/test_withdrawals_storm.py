"""Withdrawals in a storm: users, approvers, operators and workers act in any order and at the same time.

What must hold however they meet, also after a restore: what a withdrawal pays arrives once or not at all; it was paid
if and only if it is completed; it was signed only with the people whom its amount needs; and all money is where the
books say. Each run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import Town
from tests.withdrawing import KEYS, Counter, counter

from bursar.audit import audit
from bursar.engine import Operators
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.machine import CONFIRMED
from bursar.flows.payouts.machine import FAILED as PAYOUT_FAILED
from bursar.flows.withdrawals.invariants import CHECKS, stop_if_unbalanced
from bursar.flows.withdrawals.policy import APPROVER, Approver
from bursar.flows.withdrawals.switches import EVERYTHING, of_user
from bursar.flows.withdrawals.withdrawal import RESULTS
from bursar.model.actors import same_person
from bursar.model.errors import BursarError
from bursar.rails.chain import Shape
from bursar.signer.approvals import people_who_approve

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

AMOUNTS = ("5", "9", "20", "49", "60")
ENDED = (CONFIRMED, PAYOUT_FAILED)
PUBLIC = {name: key.public_key().public_bytes_raw().hex() for name, key in KEYS.items()}
SETTLE_ROUNDS = 60
SEEDS = 8


class Storm:
    """One run: the actors, and the dice."""

    def __init__(self, c: Counter, seed: int) -> None:
        self.c = c
        self.dice = random.Random(seed)
        self.count = 0
        self.operators = Operators(c.till.engine)
        self.acts: list[tuple[int, Callable[[], Awaitable[object]]]] = [
            (4, self.ask),
            (10, self.step_withdrawal),
            (14, self.step_payout),
            (4, self.step_replacement),
            (6, self.mine),
            (8, self.approve),
            (2, self.reject),
            (4, self.cancel),
            (2, self.cancel_payout),
            (1, self.bump),
            (1, self.hold),
            (2, self.switch),
            (1, self.freeze),
            (1, self.enrolment),
            (1, self.outage),
            (1, self.policy),
            (4, self.watch),
        ]

    async def ids(self, flow: str) -> list[str]:
        return [record.id for record in await self.c.till.engine.store.read.records.list(flow, limit=200)]

    async def one(self, flow: str) -> str:
        found = await self.ids(flow)
        return self.dice.choice(found) if found else ""

    async def step(self, flow: str, id_: str) -> None:
        """As a worker that has claimed it, if it is due."""
        engine = self.c.till.engine
        record = await engine.record(flow, id_)
        if record.due_us is not None:
            await engine.step(msgspec.structs.replace(record, worker=engine.worker))

    async def ask(self) -> None:
        self.count += 1
        amount, user = self.dice.choice(AMOUNTS), self.dice.choice((1, 2))
        requester = self.dice.choice(("", "", "ann", "b.en"))
        key = f"k{self.count}"
        await self.c.request(amount, key=key, user=user, to=f"@bob{self.count}", requester=requester)

    async def step_withdrawal(self) -> None:
        if id_ := await self.one("withdrawals"):
            await self.step("withdrawals", id_)

    async def step_payout(self) -> None:
        if id_ := await self.one("payouts"):
            await self.step("payouts", id_)

    async def step_replacement(self) -> None:
        if id_ := await self.one("replacements"):
            await self.step("replacements", id_)

    async def mine(self) -> None:
        self.c.till.town.chain.mine()

    async def approve(self) -> None:
        if id_ := await self.one("withdrawals"):
            await self.c.approve(id_, self.dice.choice(("ann", "ben", "eve")))

    async def reject(self) -> None:
        if id_ := await self.one("withdrawals"):
            await self.c.withdrawals.reject(id_, actor="ann", reason="because")

    async def cancel(self) -> None:
        if id_ := await self.one("withdrawals"):
            await self.c.withdrawals.cancel(id_, actor="1")

    async def cancel_payout(self) -> None:
        if id_ := await self.one("payouts"):
            await self.c.till.payouts.cancel(id_, actor="ann", reason="because")

    async def bump(self) -> None:
        if id_ := await self.one("payouts"):
            await self.c.till.payouts.bump(id_, actor="ann", reason="because")

    async def hold(self) -> None:
        if id_ := await self.one("payouts"):
            held = self.dice.random() < 0.3
            change = self.c.till.payouts.hold if held else self.c.till.payouts.release
            await change(id_, actor="ann", reason="because")

    async def switch(self) -> None:
        which = self.dice.choice((EVERYTHING, of_user(1)))
        change = self.c.withdrawals.pause if self.dice.random() < 0.4 else self.c.withdrawals.resume
        await change(which, actor="ann", reason="because")

    async def freeze(self) -> None:
        ledger = self.c.till.ledger
        await (ledger.freeze if self.dice.random() < 0.4 else ledger.unfreeze)("user:1:funding")

    async def enrolment(self) -> None:
        name, active = self.dice.choice(("ann", "ben")), self.dice.random() < 0.6
        await self.c.till.put(APPROVER, name, Approver(public_key=PUBLIC[name], active=active))

    async def outage(self) -> None:
        town = self.c.till.town
        what = self.dice.choice(("signer", "chain", "answer", "over"))
        town.signer.away, town.chain.away = what == "signer", what == "chain"
        town.signer.loses_answer = what == "answer"

    async def policy(self) -> None:
        await self.c.policy(auto_approve_max=self.dice.choice(("10", "30")), dual_above=self.dice.choice(("50", "30")))

    async def watch(self) -> None:
        """As it is done every minute: a false alarm would stop all withdrawals."""
        found = await stop_if_unbalanced(self.c.withdrawals)
        assert found.ok, found.broken

    async def blow(self, moments: int) -> None:
        weights = [weight for weight, _ in self.acts]
        for _ in range(moments):
            chosen = self.dice.choices(self.acts, weights, k=self.dice.choice((1, 1, 2, 3)))
            done = await asyncio.gather(*[act() for _, act in chosen], return_exceptions=True)
            for error in done:
                if isinstance(error, BaseException) and not isinstance(error, BursarError):
                    raise error

    async def calm(self) -> None:
        """Everything is up and on again; what still waits for people is rejected; all is driven to its end."""
        c, town = self.c, self.c.till.town
        town.signer.away = town.chain.away = town.signer.loses_answer = False
        await c.till.payouts.reconciling.look()
        for pause in await c.till.engine.store.read.pauses.list():
            for person in ("ann", "ben"):
                with contextlib.suppress(BursarError):
                    await self.operators.resume(pause.kind, pause.name, actor=person, reason="over")
        with contextlib.suppress(BursarError):
            await c.till.ledger.unfreeze("user:1:funding")
        for id_ in await self.ids("payouts"):
            with contextlib.suppress(BursarError):
                await c.till.payouts.release(id_, actor="ann", reason="over")
        left = ["nothing was driven"]
        for _ in range(SETTLE_ROUNDS):
            left = []
            for flow in ("withdrawals", "payouts", "replacements"):
                for id_ in await self.ids(flow):
                    record = await c.till.engine.record(flow, id_)
                    if record.state not in (*RESULTS, *ENDED, "sent", "dropped"):
                        left.append(f"{flow} {id_} is {record.state}: {record.error} {record.body[-300:]}")
                        if record.state == "waiting" and not record.worker:
                            with contextlib.suppress(BursarError):
                                await c.withdrawals.reject(id_, actor="ann", reason="because")
                        await self.step(flow, id_)
            town.chain.mine()
            if not left:
                return
        raise AssertionError("\n".join(["never come to an end:", *left]))

    async def judge(self, *, restored: bool) -> None:
        c, town = self.c, self.c.till.town
        paid = {to: amount for (contract, to), amount in town.chain.tokens.items() if to.startswith("@bob")}
        for id_ in await self.ids("withdrawals"):
            view, payment = await c.withdrawals.view(id_), await c.withdrawals.payment(id_)
            arrived = paid.pop(view.to, 0)
            if not restored:  # what was requested again since has the same address
                assert arrived == (int(payment.amount_raw) if view.status == "completed" else 0), (view, arrived)
        assert restored or not any(paid.values())
        for entry in town.signer.entries:
            if entry.request is not None and entry.request.shape is Shape.PAY:
                asked, payment = entry.request.authorization, entry.request.payment
                people = people_who_approve(PUBLIC, asked.approvals, payment.canonical())
                people = [name for name in people if not same_person(name, payment.requester)]
                assert asked.mandate or people, payment
                assert int(payment.amount) <= (30 if asked.mandate else 1000) * 10**6
                if not asked.mandate and int(payment.amount) > 50 * 10**6:
                    assert len(people) >= 2, payment
        store = c.till.engine.store
        found = [*await audit(store, more=CHECKS), await wallets_cover(store, {"paper": town.chain})]
        assert [text for finding in found for text in finding.broken] == []
        assert not any((await c.till.reserved()).values())


@pytest.mark.parametrize("seed", range(SEEDS))
@scenario
async def test_every_withdrawal_is_paid_once_or_not_at_all(place: Place, seed: int) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="", daily_all="")
        storm = Storm(c, seed)
        await storm.blow(120)
        await storm.calm()
        await storm.judge(restored=False)


@pytest.mark.parametrize("seed", [*range(SEEDS), 23])  # 23: a cancellation is made twice, with the same bytes
@scenario
async def test_no_withdrawal_is_paid_and_given_back_after_a_restore(place: Place, seed: int, tmp_path: Path) -> None:
    if place.engine == "postgres":
        pytest.skip("the backup is a copy of SQLite's file")
    town = Town()
    async with counter(place, town) as c:
        await c.policy(daily_user="", daily_all="")
        await Storm(c, seed).blow(30 + seed * 3)
    town.signer.away = town.chain.away = town.signer.loses_answer = False
    copy(Path(place.path), tmp_path / "backup.db")
    async with counter(place, town) as c:
        later = Storm(c, seed + 1_000)
        later.count = 1_000
        await later.blow(60)
    town.signer.away = town.chain.away = town.signer.loses_answer = False
    copy(tmp_path / "backup.db", Path(place.path))
    async with counter(place, town, reconciles=False) as c:
        again = Storm(c, seed + 2_000)
        again.count = 2_000
        await again.blow(25)
        await again.calm()
        await again.judge(restored=True)
        signed = [entry for entry in town.signer.entries if entry.raw]
        for id_ in await again.ids("withdrawals"):
            view = await c.withdrawals.view(id_)
            final = [
                entry
                for entry in signed
                if entry.request is not None
                and entry.request.payment.source == id_
                and entry.request.shape is Shape.PAY
                and entry.hash in town.chain.mined
            ]
            assert len(final) == (view.status == "completed"), (view, final)
