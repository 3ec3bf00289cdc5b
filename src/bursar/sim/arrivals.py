"""Money from outside in the transfers scenario: deposits to accounts that are frozen, closing or closed; an overdraft.

On some seeds one account may owe, of which no transfer may ever make use; deposits arrive for accounts in the moment in
which they are frozen; and the account of a user who leaves closes while a deposit for it waits for a second person.
Each is asked for in every life of the server. In the end each reference is booked once, for the user or in suspense.
"""

from __future__ import annotations

from bursar.flows.deposits import Deposits
from bursar.flows.transfers import Transfers
from bursar.flows.transfers.request import SUSPENSE_DEPOSITS, funding_account
from bursar.ledger import Ledger
from bursar.model.accounts import AccountStatus, CappedOverdraft
from bursar.model.errors import AccountClosed, AccountNotEmpty, BursarError
from bursar.sim.oracle import Violation

ASSET = "USD"
OWES = 2  # the user whose account may owe
LEAVER = 9
LEAVES = "leaves"
AMOUNT = "1.00"
MINOR = 100


class Arrivals:
    """What arrives, over all lives of the server."""

    def __init__(self, seed: int) -> None:
        self.takes_part = seed % 7 == 2
        self.funded: dict[str, int] = {}  # reference → user

    async def furnish(self, ledger: Ledger) -> None:
        """One account may owe; and one has nothing and will be closed. Twice is once."""
        if not self.takes_part:
            return
        await ledger.change_policy(funding_account(OWES), CappedOverdraft("-1000.00", ASSET))
        if funding_account(LEAVER) not in {account.path for account in await ledger.accounts("user")}:
            await ledger.create_account(funding_account(LEAVER))

    async def arrive(self, transfers: Transfers, user: int, turn: int) -> None:
        """A deposit for a user, whose account is frozen just now."""
        if self.takes_part:
            reference = f"arrives-{user}-{turn}"
            self.funded[reference] = user
            if await transfers.fund(user, ASSET, AMOUNT, reference=reference) != funding_account(user):
                raise Violation(f"deposit {reference} is not where it belongs: the account is not closed")

    async def leave(self, transfers: Transfers) -> None:
        """Somebody leaves: a deposit waits, the account closes, and then the deposit is confirmed."""
        if not self.takes_part:
            return
        deposits = Deposits(transfers, confirm_above={ASSET: 0})
        try:
            await deposits.ask(LEAVER, ASSET, AMOUNT, reference=LEAVES, actor="ann")
            await transfers.close_account(funding_account(LEAVER), drain_s=0.1)
        except (AccountClosed, AccountNotEmpty):
            pass  # it was closed in another life; or the core can't be asked, or the deposit came first
        await deposits.confirm(LEAVER, ASSET, AMOUNT, reference=LEAVES, actor="bob")

    async def settle(self, transfers: Transfers) -> dict[int, int]:
        """Nothing goes wrong any more: all of it once more, and how much each user has got by it."""
        for reference, user in self.funded.items():
            await transfers.fund(user, ASSET, AMOUNT, reference=reference)
        try:
            await self.leave(transfers)
        except BursarError as error:
            raise Violation(f"healed, but the deposit of who leaves is refused: {error}") from error
        return {user: MINOR * list(self.funded.values()).count(user) for user in self.funded.values()}

    async def judge(self, ledger: Ledger) -> None:
        """What waited while its account closed is booked once; and no user owes."""
        if not self.takes_part:
            return
        leaver = await ledger.account(funding_account(LEAVER))
        there = (await ledger.balance(leaver.path, ASSET)).minor
        suspense = (await ledger.balance(SUSPENSE_DEPOSITS, ASSET)).minor
        if (there, suspense) != ((0, MINOR) if leaver.status is AccountStatus.CLOSED else (MINOR, 0)):
            raise Violation(f"{leaver.path} is {leaver.status} with {there}, and {suspense} is in suspense")
        if suspense and not await ledger.store.read.alerts.open():
            raise Violation("a deposit is in suspense, without an alert")
        if (await ledger.balance(funding_account(OWES), ASSET)).minor < 0:
            raise Violation("a transfer has used an overdraft")
