"""The restored scenario: as the transfers scenario, but in the middle of it the database goes back to a backup.

The core goes on and knows what the database has forgotten. No server may take a new transfer before that was noticed;
then operators reconcile and resume, and all goes on and breaks as before. Transfers move money between accounts of
one user, so in the end each user must have what he had in the beginning, whatever was forgotten: on both sides
together, and booked on both sides alike.

On some seeds users spend what the restored database says they have, before anything is driven again. The backup is then
made while a transfer to the core is only written down: the funding account can't pay it any more, and it has arrived.
"""

from __future__ import annotations

import contextlib
from contextvars import Context
from typing import Any

from bursar.audit import audit
from bursar.flows.transfers import MACHINE, AccountType, Transfers
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.flow import PAID_FROM_SUSPENSE
from bursar.flows.transfers.reconcile import reconcile
from bursar.flows.transfers.request import NEW_TRANSFERS, SUSPENSE, funding_account
from bursar.flows.transfers.watch import resume_intake
from bursar.ledger import Ledger
from bursar.model.entries import pay
from bursar.model.errors import AlreadyExists, BursarError, Refusal
from bursar.model.outcome import Outcome as Said
from bursar.rails.trading import TradingClient
from bursar.sim import transfers
from bursar.sim.exchange import FUNDS, PATH, USERS
from bursar.sim.kernel import Kernel, Run
from bursar.sim.oracle import Violation
from bursar.sim.process import Process
from bursar.sim.transfers import HEALED_S, SERVERS, Outcome, Scenario, Size

BACKUP_S_MAX = 0.6  # when the backup is made
RESTORE_S_MAX = 1.2  # how much later it is put back
AGAIN_S = 0.003
LOOKS_MAX = 400  # for a moment in which a transfer is only written down, on the seeds that want one
RESUMED_S = 60.0  # virtual seconds within which core and ledger must agree, and the intake be resumed
WRITTEN_DOWN = """
    SELECT 1 FROM records WHERE flow = 'transfers' AND state = 'SOURCE_PENDING' AND body LIKE '%"source":"FUNDING"%'
    AND NOT EXISTS (SELECT 1 FROM outcomes WHERE scope = 'funding' AND outcomes.id = records.id)
"""


class Restored(Scenario):
    """One run."""

    image: bytes = b""
    restored = False

    def __init__(self, kernel: Kernel, size: Size) -> None:
        super().__init__(kernel, size)
        self.arrivals.takes_part = False  # what came from outside after the backup would have to be entered again
        self.closers.takes_part = False  # and so would a person's freezes
        self.spends = kernel.seed % 4 == 1  # on these seeds the ledger's end is called, and can be found before it is
        self.looks = 0

    def trouble(self) -> None:
        """A backup at some time, and back to it later; beside everything else."""
        super().trouble()
        loop = self.kernel.loop
        loop.call_later(self.rng.random() * BACKUP_S_MAX, self.back_up, context=Context())

    def back_up(self) -> None:
        """Take a copy of the database as it is between two transactions, once there is something in it."""
        host, loop = self.hosts["server"], self.kernel.loop
        db = host.open(PATH)
        busy = host.held() or db.in_transaction
        if self.healed:
            return
        if busy or not self.is_furnished() or not self.is_moment():
            loop.call_later(AGAIN_S, self.back_up, context=Context())
            return
        self.image = host.image(PATH)
        loop.call_later(self.rng.random() * RESTORE_S_MAX, self.restore, context=Context())

    def is_furnished(self) -> bool:
        """Whether every user has money: before that there is nothing to lose."""
        db = self.hosts["server"].open(PATH)
        (entries,) = db.execute("SELECT count(*) FROM envelopes").fetchone()
        return bool(entries >= USERS)

    def is_moment(self) -> bool:
        """Whether to make the backup now; on seeds that spend, while a transfer to the core is only written down."""
        self.looks += 1
        if not self.spends or self.looks > LOOKS_MAX:
            return True
        found = self.hosts["server"].open(PATH).execute(WRITTEN_DOWN).fetchone() is not None
        self.net.happened["written down"] += found
        return found

    def restore(self) -> None:
        """All servers are stopped, and yesterday is put back. What callers were answered since then is no promise."""
        if self.healed:
            return
        self.restored = True
        self.net.happened["restored"] += 1
        for name in SERVERS:
            process = self.kernel.processes[name]
            if process.alive:
                process.crash()
        self.hosts["server"].restore(PATH, self.image)
        self.oracle = None
        for caller in self.callers:
            caller.wishes = [wish for wish in caller.wishes if wish.client_order_id not in caller.named]
            for known in (caller.told, caller.named):
                known.clear()
            caller.refused.clear()

    async def opened(self, ledger: Ledger) -> None:
        """Users spend what they have in the restored database; each once, whichever server is first."""
        if not self.restored or not self.spends:
            return
        for user in range(1, USERS + 1):
            with contextlib.suppress(AlreadyExists):
                await ledger.create_account(spent_account(user))
            left = await ledger.balance(funding_account(user), "USD")
            with contextlib.suppress(Refusal):  # it was spent before, or is frozen
                await ledger.commit(
                    pay(funding_account(user), spent_account(user), "USD", str(left), key=f"spent-{user}")
                )

    async def compared(self, process: Process, transfers: Transfers, client: TradingClient, broken: list[str]) -> None:
        """Operators reconcile, see that core and ledger agree, and let transfers in. At every server: the look of one
        may have begun before all was reconciled at the other, and pauses again what was resumed there."""
        if not self.restored:
            await super().compared(process, transfers, client, broken)
        self.net.happened["noticed"] += bool(broken)
        cores, deadline = {AccountType.SPOT: client}, self.kernel.loop.now + RESUMED_S
        said = ""
        while await is_paused(transfers):
            with contextlib.suppress(BursarError):  # the core could not be asked
                await reconcile(transfers.ledger, cores, actor="ann", reason="restored")
            for person in ("ann", "bob"):
                try:
                    await resume_intake(transfers, cores, actor=person, reason="reconciled")
                except BursarError as error:  # nor could it be asked now; or ann has proposed it before
                    said = str(error)
            if self.kernel.loop.now > deadline:
                raise Violation(f"reconciled, and not resumed: {said}")
            await process.ports.sleep(0.05)

    async def end(self, process: Process, transfers: Transfers, client: TradingClient) -> None:
        """Also what was under way at the time of the backup, and no caller remembers, comes to its end."""
        await super().end(process, transfers, client)
        deadline, records = self.kernel.loop.now + HEALED_S, transfers.ledger.store.read.records
        while any([await records.open_of(MACHINE.name, str(user)) for user in range(1, USERS + 1)]):
            if self.kernel.loop.now > deadline:
                raise Violation("healed, but what was under way has not come to an end")
            await process.ports.sleep(0.1)

    async def judge(self, ledger: Ledger, transfers: Transfers, client: TradingClient, process: Process) -> None:
        """Nobody has more or less than in the beginning, and both sides say the same."""
        await self.settled(process)
        oracle = self.look()
        if oracle is not None:
            oracle.everything(every_column=True)
            oracle.ended()
        broken = [text for finding in await audit(ledger.store) for text in finding.broken]
        finding = await conservation(transfers, AccountType.SPOT, client)
        if broken or not finding.ok or not finding.judged:
            raise Violation(f"audit: {broken} {finding}")
        owed = (await ledger.balance(SUSPENSE, "USD")).minor  # below zero: what a user's account could not pay then
        self.net.happened["suspense"] += owed != 0
        alerts = await ledger.store.read.alerts.open()
        self.net.happened[PAID_FROM_SUSPENSE] += any(alert.reason == PAID_FROM_SUSPENSE for alert in alerts)
        total = 0
        for user in range(1, USERS + 1):
            while (found := await client.balances(user)).outcome is not Said.SUCCESS:
                await process.ports.sleep(0.1)
            held = found.balances.get("USD")
            there = 0 if held is None else held.available
            here = (await ledger.balance(funding_account(user), "USD")).minor
            if self.restored and self.spends:
                here += (await ledger.balance(spent_account(user), "USD")).minor
            total += here + there
            if not owed and here + there != FUNDS * 100:
                raise Violation(f"user {user} has {here} and {there}, and had {FUNDS * 100} in the beginning")
        if total + owed != USERS * FUNDS * 100:
            raise Violation(f"all users together have {total}, and {owed} is in suspense")


def spent_account(user: int) -> str:
    """Where a user's money goes that is spent."""
    return f"spent:{user}"


async def is_paused(transfers: Transfers) -> bool:
    """Whether no new transfers are taken."""
    return NEW_TRANSFERS in {(pause.kind, pause.name) for pause in await transfers.ledger.store.read.pauses.list()}


def play(seed: int, **options: Any) -> Run[Outcome]:
    """Run one seed, as `transfers.play`."""
    return transfers.play(seed, scenario=Restored, **options)
