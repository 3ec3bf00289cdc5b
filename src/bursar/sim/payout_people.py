"""The operators of the payouts scenario: they meddle on some seeds, decide on others, and in the end let all go on.

Two of them, ann and ben, do what the pages for operators say (docs/how-to/pay-out.md, docs/how-to/run-a-signer.md).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Final

from bursar.engine import Operators
from bursar.flows.payouts import MACHINE, Payouts
from bursar.flows.payouts.link import BOUND, rebind
from bursar.flows.payouts.machine import CHAINS, OPEN, REBASE
from bursar.flows.payouts.payouts import PayoutView
from bursar.flows.payouts.twins import CANCEL_IT
from bursar.model.errors import BursarError
from bursar.rails.chain import DeepReorganisation
from bursar.sim.oracle import Violation
from bursar.sim.payout_chains import CHAIN_NAME
from bursar.sim.payout_town import SIGNER, Town

PEOPLE: Final = ("ann", "ben")


class Office:
    """Ann and Ben at one server. `restart` ends every server, which then comes back."""

    def __init__(self, payouts: Payouts, town: Town, dice: random.Random, restart: Callable[[], None]) -> None:
        self.payouts = payouts
        self.store = payouts.engine.store
        self.operators = Operators(payouts.engine)
        self.town = town
        self.dice = dice
        self.restart = restart

    async def look(self) -> None:
        """What people do at any one time."""
        if self.town.plan.lied:
            statuses = await self.payouts.chains[CHAIN_NAME].nodes()
            self.town.named |= {status.name for status in statuses if status.trouble}
        if self.town.plan.forced and not self.town.calm:
            await self.decide()
        if self.town.calm or self.dice.random() < 0.5:
            await self.tidy()
        elif self.town.plan.meddled:
            await self.meddle()

    async def meddle(self) -> None:
        """Something that an operator may do at any time."""
        found = await self.payouts.list(states=OPEN, limit=20)
        what = self.dice.choice(("bump", "cancel", "hold", "pause", "halt"))
        if what == "pause":
            await self.operators.pause("rail", f"chain {CHAIN_NAME}", actor="ann", reason="drill")
        elif what == "halt":
            await self.operators.halt("flow", MACHINE.name, actor="ann", reason="drill")
        elif found:
            one = self.dice.choice(found)
            await getattr(self.payouts, what)(one.id, actor="ann", reason="drill")

    async def decide(self) -> None:
        """Two people say what became of a payout: rightly or wrongly."""
        found = await self.payouts.list(states=("confirming", "disputed"), limit=20)
        if found:
            await self.resolve(self.dice.choice(found), paid=self.dice.random() < 0.6)

    async def resolve(self, one: PayoutView, *, paid: bool) -> None:
        """Both say the same."""
        for person in PEOPLE:
            with contextlib.suppress(BursarError):
                await self.payouts.resolve(one.id, paid=paid, actor=person, reason="looked it up")
        self.town.decided += 1

    # --- what lets everything go on ----------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Lift what is switched off, by two people; end what was requested twice; let go what is held."""
        if await self.replace_signer():
            return
        await self.rebase()
        found = await self.payouts.list(states=OPEN, limit=50)
        await self.lift()
        for one in found:
            if one.state == "pending" and CANCEL_IT in one.held:
                await self.payouts.cancel(one.id, actor="ann", reason=one.held)
            elif one.state == "pending" and one.held:
                await self.payouts.release(one.id, actor="ann", reason="over")
            elif one.state == "disputed" and self.town.plan.forced:
                await self.resolve(one, paid=self.dice.random() < 0.5)
            elif self.town.calm and one.state == "disputed":
                raise Violation(f"{one.id} is disputed: {one.error}")
            elif self.town.calm and "NEEDS_PEOPLE" in one.error:
                raise Violation(f"{one.id} needs people: {one.error}")

    async def lift(self) -> None:
        """Two people lift everything."""
        for pause in await self.store.read.pauses.list():
            for person in PEOPLE:
                with contextlib.suppress(BursarError):
                    if pause.kind.startswith("halt"):
                        kind = pause.kind.removeprefix("halt").strip()
                        kind, name = ("" if kind == "all" else kind), pause.name
                        await self.operators.unhalt(kind, name, actor=person, reason="over")
                    else:
                        await self.operators.resume(pause.kind, pause.name, actor=person, reason="over")

    async def rebase(self) -> None:
        """A final block is gone: the watcher begins again below it."""
        watch = await self.payouts.engine.get(CHAINS.name, CHAIN_NAME)
        if watch is not None and watch.error.startswith(DeepReorganisation.code):
            await self.operators.signal(CHAINS.name, CHAIN_NAME, REBASE, actor="ann", reason="looked it up")

    async def replace_signer(self) -> bool:
        """Whether the signer that answers was put in the place of one whose log is lost."""
        bound, service = await self.store.read.cores.get(BOUND), self.town.service
        if bound is None or service is None or service.state.identity in ("", bound.identity):
            return False
        await rebind(self.store, SIGNER, service.state.identity, actor="ann", reason="its log is lost")
        self.town.rebound += 1
        self.restart()
        return True
