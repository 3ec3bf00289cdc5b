"""The story of the demo of payouts: what is done to the chain and to the signer, and what must have come of it.

It runs on any `DemoChain`, and checks what it tells: each act ends when it has happened, or says what did not. In the
end the chain is asked, without Bursar's own rail, what each recipient has received and what each wallet has.

Not here: what it prints (payouts).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bursar.audit import audit
from bursar.audit.finding import Finding
from bursar.demo.payout_chains import CALM_FEE, FINALITY, GWEI, DemoChain
from bursar.demo.payout_setting import BLOCK_S, DEPOSIT, MANDATE, PAYERS, POLL_S, SignerProcess, answers, paying_out
from bursar.engine import Operators, Worker
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.payouts import PayoutRequest, Payouts, PayoutView
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.machine import MACHINE
from bursar.flows.payouts.payout import wallet_account
from bursar.signer.client import SignerClient
from bursar.testbed import Guard

SPIKE: Final = 150 * GWEI
PATIENCE_S: Final = 60.0
UNTAKEN_BLOCKS: Final = 2  # that pass without the payment that offers too little
ENDED: Final = ("confirmed", "failed")

Tell = Callable[..., None]  # lines of the story
Watch = Callable[[str, int, int], None]  # what is awaited; payouts that have ended, of how many


class NotReached(Exception):
    """What the story waits for does not happen."""


@dataclass(frozen=True)
class Wallet:
    """What a wallet has of an asset in the end, in smallest units."""

    name: str
    asset: str
    on_chain: int
    in_ledger: int


@dataclass
class Report:
    """What happened, and whether it is as it must be."""

    chain: str = ""
    payouts: list[PayoutView] = field(default_factory=list)
    fortunes: dict[str, str] = field(default_factory=dict)  # payout → what happened to it
    wallets: list[Wallet] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.wrong and bool(self.findings) and all(f.ok and f.judged for f in self.findings)


async def play(
    folder: Path, guard: Guard, opened: AbstractAsyncContextManager[DemoChain], tell: Tell, watch: Watch
) -> Report:
    """The whole story, on a chain that is opened for it."""
    report = Report()
    watch("making keys, and starting a signer", 0, 0)
    async with opened as chain:
        report.chain = chain.name
        signer = await asyncio.to_thread(SignerProcess, folder, guard)
        try:
            await asyncio.to_thread(signer.start, chain)
            async with paying_out(folder, chain, signer) as payouts:
                tell(
                    *chain.about, f"The signer, process {signer.pid}, has the keys. A block comes every {BLOCK_S:g} s."
                )
                story = Story(report, chain, signer, payouts, tell, watch)
                async with story.running():
                    try:
                        await story.acts()
                    except NotReached as missing:
                        report.wrong.append(str(missing))
                await story.judge()
        finally:
            signer.kill()
    return report


class Story:
    """The story while it runs."""

    def __init__(
        self, report: Report, chain: DemoChain, signer: SignerProcess, payouts: Payouts, tell: Tell, watch: Watch
    ) -> None:
        self.report = report
        self.chain = chain
        self.signer = signer
        self.payouts = payouts
        self._tell = tell
        self._watch = watch
        self._began = time.monotonic()
        self._asked: list[PayoutView] = []
        self._blocks = asyncio.Event()
        self._making = asyncio.Lock()  # held while a block is made
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Blocks are made and payouts driven inside."""
        engine = self.payouts.engine
        worker = Worker(engine, scan_s=0.1)
        self._blocks.set()
        self._tasks = [
            asyncio.create_task(work) for work in (worker.run(), self.payouts.reconciling.run(), self._mine())
        ]
        try:
            yield
        finally:
            worker.stop()
            for task in self._tasks[1:]:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=5)
            await engine.finish(5)

    # --- acts --------------------------------------------------------------------------------------------------------

    async def acts(self) -> None:
        """One after the other."""
        await self._calm()
        await self._signer_dies()
        await self._fees_rise()
        await self._cancelled()
        await self._reorganised()
        await self._until("every payout to end", self._all_ended)
        self._say("Every payout has ended.")

    async def _calm(self) -> None:
        made = [await self._request("nothing unusual") for _ in range(4)]
        self._say(
            f"{len(made)} payouts are requested. Their money is held in the ledger. Each is signed once,",
            "stored, and only then sent.",
        )
        await self._reach(made, "confirmed")
        self._say(f"All {len(made)} are confirmed: in a final block, to the right recipient, to the last unit.")

    async def _signer_dies(self) -> None:
        async with self._no_blocks():
            sent = [await self._request("confirmed without signer") for _ in range(2)]
            await self._reach(sent, "confirming")
            pid = self.signer.pid
            await asyncio.to_thread(self.signer.kill)
            waiting = await self._request("waited for the signer")
        self._say(f"Two more are sent. Then the signer gets kill -9, process {pid}; and a third is", "requested.")
        await self._reach(sent, "confirmed")
        await self._until("the third to find no signer", lambda: self._has_error(waiting, "SIGNER_UNAVAILABLE"))
        self._say(
            "The two are confirmed without it. The third waits, and nothing is signed for it:",
            f"{waiting.id} is pending, SIGNER_UNAVAILABLE.",
        )
        await asyncio.to_thread(self.signer.start, self.chain)
        client = self.payouts.out.signer
        assert isinstance(client, SignerClient)
        await self._until("the signer to answer", lambda: _within(answers(client), POLL_S))
        await Operators(self.payouts.engine).retry_now(
            MACHINE.name, waiting.id, actor="ann", reason="the signer is back"
        )
        await self._reach([waiting], "confirming")
        self._say(f"The signer is started again, process {self.signer.pid}, with its log: the third is sent.")

    async def _fees_rise(self) -> None:
        async with self._no_blocks():
            late = await self._request("stuck; its fee was raised")
            await self._reach([late], "confirming")
            await self.chain.set_fee(SPIKE)
        height = await self.chain.height()

        async def have_passed() -> bool:
            return await self.chain.height() >= height + UNTAKEN_BLOCKS

        await self._until(f"{UNTAKEN_BLOCKS} blocks", have_passed)
        self._expect(not await self.chain.arrived(late.to), f"{late.id} is paid although it offers too little")
        offer = (await self.payouts.view(late.id)).attempts[0].fee.price
        self._say(
            f"Fees go up from {CALM_FEE // GWEI} to {SPIKE // GWEI} gwei per unit of gas.",
            f"{late.id} offers {offer // GWEI}: {UNTAKEN_BLOCKS} blocks go by without it.",
        )
        await self.payouts.bump(late.id, actor="ann", reason="the user waits")
        await self._reach([late], "confirmed")
        first, second = await self._two_attempts(late)
        self._say(
            f"An operator raises its fee to {second // GWEI} gwei, on the same nonce: at most one of the two",
            "transactions can take effect. It is confirmed.",
        )
        self._expect(second > first, f"{late.id} offers {second} after {first}")
        await self.chain.set_fee(CALM_FEE)

    async def _cancelled(self) -> None:
        async with self._no_blocks():
            unwanted = await self._request("cancelled; money is back")
            await self._reach([unwanted], "confirming")
            await self.payouts.cancel(unwanted.id, actor="ann", reason="the user has changed his mind")

            async def is_replaced() -> bool:
                attempts = (await self.payouts.view(unwanted.id)).attempts
                return len(attempts) == 2 and bool(attempts[1].hash) and await self.chain.knows(attempts[1].hash)

            await self._until("the cancellation to be sent", is_replaced)
        await self._reach([unwanted], "failed")
        await self._two_attempts(unwanted)
        self._say(
            f"{unwanted.id} is sent, and cancelled before a block takes it: the wallet sends",
            "nothing to itself on the same nonce, for a higher fee. When that is final, the payment is",
            "dead, and only then the money goes back.",
        )

    async def _reorganised(self) -> None:
        async with self._no_blocks():
            moved = await self._request("reorganised; sent again")
            await self._reach([moved], "confirming")
            for _ in range(FINALITY):
                await self.chain.mine()
            before = await self.payouts.view(moved.id)
            self._expect(len(await self.chain.arrived(moved.to)) == 1, f"{moved.id} is in no block")
            await self.chain.reorganise(FINALITY)
            self._expect(await self.chain.arrived(moved.to) == [], f"{moved.id} is still in a block")
        self._say(
            f"{moved.id} is in a block. Then the chain reorganises: {FINALITY} blocks are gone, and",
            "the nodes have forgotten the payment.",
        )
        await self._reach([moved], "confirmed")
        after = await self.payouts.view(moved.id)
        self._expect(after.tx_hash == before.tx_hash, f"{moved.id} was signed anew after the reorganisation")
        self._say("Bursar has sent the same bytes again: it is confirmed, with the same hash.")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def judge(self) -> None:
        """What the chain says, against what the payouts and the ledger say."""
        report, ledger = self.report, self.payouts.ledger
        self._watch("the chain and the ledger are compared", *self._ended(self._asked))
        report.payouts = [await self.payouts.view(one.id) for one in self._asked]
        left = dict.fromkeys(PAYERS, DEPOSIT * 10**6)
        for view in report.payouts:
            amount = (await ledger.asset(view.asset)).minor(view.amount)
            wanted = [amount] if view.status == "confirmed" else []
            left[view.account] -= sum(wanted)
            arrived = await self.chain.arrived(view.to)
            self._expect(arrived == wanted, f"{view.id} is {view.status}, and its recipient has received {arrived}")
            self._expect(view.status in ENDED, f"{view.id} has not ended: {view.state}, {view.error}")
        for account, minor in left.items():
            has = (await ledger.balance(account, "USDT")).minor
            self._expect(has == minor, f"{account} has {has} of USDT, and {minor} should be left")
        for name, address in self.signer.wallets.items():
            for asset in ("USDT", "ETH"):
                has = await self.chain.balance(address, token=asset == "USDT")
                says = -(await ledger.balance(wallet_account(self.chain.name, name), asset)).minor
                report.wallets.append(Wallet(name, asset, has, says))
                self._expect(has == says, f"{name} has {has} of {asset} on the chain, the ledger says {says}")
        report.findings = await audit(ledger.store, more=CHECKS)
        report.findings.append(await wallets_cover(ledger.store, self.payouts.chains))

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.report.wrong.append(otherwise)

    async def _two_attempts(self, one: PayoutView) -> tuple[int, int]:
        """What its two attempts offer, which must be on one nonce."""
        attempts = (await self.payouts.view(one.id)).attempts
        self._expect(len(attempts) == 2, f"{one.id} has {len(attempts)} attempts")
        self._expect(len({attempt.nonce for attempt in attempts}) == 1, f"the attempts of {one.id} have several nonces")
        return attempts[0].fee.price, attempts[-1].fee.price

    # --- payouts and blocks ------------------------------------------------------------------------------------------

    async def _request(self, fortune: str) -> PayoutView:
        number = len(self._asked)
        wanted = PayoutRequest(
            account=PAYERS[number % len(PAYERS)],
            asset="USDT",
            chain=self.chain.name,
            to=self.payouts.chains[self.chain.name].codec.check_address("", f"0x{number + 0xABC0:040x}"),
            amount=f"{number + 1}.50",
            source=f"demo:{number}",
            mandate=MANDATE,
        )
        made = await self.payouts.request(wanted, key=f"demo-{number}")
        self._asked.append(made)
        self.report.fortunes[made.id] = fortune
        return made

    async def _reach(self, wanted: Sequence[PayoutView], state: str) -> None:
        """Wait until all are in a state; one that has ended otherwise never gets there."""

        async def are_there() -> bool:
            views = [await self.payouts.view(one.id) for one in wanted]
            for view in views:
                if view.state in ENDED and view.state != state:
                    raise NotReached(f"{view.id} is {view.state} where it should be {state}: {view.error}")
            return all(view.state == state for view in views)

        await self._until(f"{len(wanted)} to be {state}", are_there)

    async def _has_error(self, one: PayoutView, code: str) -> bool:
        return (await self.payouts.view(one.id)).error.startswith(code)

    async def _all_ended(self) -> bool:
        ended, count = self._ended(await self.payouts.list())
        return ended == count

    def _ended(self, views: Sequence[PayoutView]) -> tuple[int, int]:
        return sum(view.status in ENDED for view in views), len(self._asked)

    async def _until(self, what: str, there: Callable[[], Awaitable[bool]]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not await there():
            height = await self.chain.height()  # a chain that has died raises: no wait for nothing
            self._watch(f"{what}; block {height}", *self._ended(await self.payouts.list()))
            for task in self._tasks:
                if task.done():  # it never ends by itself
                    task.result()
            if time.monotonic() > until:
                raise NotReached(f"waited {PATIENCE_S:g} s for {what}")
            await asyncio.sleep(POLL_S)

    async def _mine(self) -> None:
        """A block now and then, unless the story wants none."""
        while True:
            await self._blocks.wait()
            async with self._making:
                if self._blocks.is_set():
                    await self.chain.mine()
            await asyncio.sleep(BLOCK_S)

    @asynccontextmanager
    async def _no_blocks(self) -> AsyncIterator[None]:
        """No block is made inside but by the story itself."""
        self._blocks.clear()
        async with self._making:
            pass  # one that is being made is finished
        yield
        self._blocks.set()

    def _say(self, *lines: str) -> None:
        first, *more = lines
        self._tell(f"{time.monotonic() - self._began:5.1f} s  {first}", *(f"{'':9}{line}" for line in more))


async def _within(work: Awaitable[None], seconds: float) -> bool:
    """Whether it is done within that time."""
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True
