"""`bursar demo-payouts`: payments that leave on a chain, while the chain does what chains do.

Everything is real but the chain: a database in a file, a signer with its log and its socket, the EVM rail, the worker.
The chain is the simulator's (`sim/evm_world`), with blocks, a pool, fees and reorganisations, behind two nodes that
speak JSON-RPC. Users are paid out; a spike makes fees too dear, one transaction is stuck and its fee is raised, one is
cancelled, a reorganisation removes blocks, and the signer is stopped and comes back. In the end the chain must have
paid each recipient once, and each wallet must have what its account in the ledger says.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from bursar.audit import audit
from bursar.audit.finding import Finding
from bursar.cli.commands.audit import draw_findings
from bursar.cli.output import Output, table
from bursar.cli.state import Command, State
from bursar.documents import Documents
from bursar.engine import Engine, Worker
from bursar.flows.payouts import KINDS, PayoutRequest, Payouts, PayoutView
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.invariants import CHECKS
from bursar.instance import Bursar
from bursar.ports import SystemPorts
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.rpc import Endpoint
from bursar.signer.client import SignerClient
from bursar.signer.policy import parse
from bursar.signer.server import Server
from bursar.signer.service import Service
from bursar.sim.chain_state import Token
from bursar.sim.evm_nodes import Nodes
from bursar.sim.evm_world import Terms, World
from bursar.sim.payout_town import (
    ADDRESSES,
    CALLER,
    CHAIN_ID,
    CHAIN_NAME,
    COINS,
    FINALITY,
    GWEI,
    NODES,
    POLICY,
    SECRET,
    SIGNER,
    TOKEN,
    TOKENS,
    MarkLink,
    OpenKeys,
    codecs,
    document,
    furnish,
)

BLOCK_S: Final = 0.4
PAYOUTS: Final = 6
PATIENCE_S: Final = 60.0
Say = Callable[[str], object]


@dataclass
class Scene:
    """The demo while it runs."""

    folder: Path
    say: Say
    world: World = field(default_factory=lambda: World(Terms(chain_id=CHAIN_ID, block_time_s=1, finality=FINALITY)))
    began: float = field(default_factory=time.monotonic)
    mining: bool = True

    def __post_init__(self) -> None:
        self.world.deploy(Token(address=TOKEN))
        for address in ADDRESSES.values():
            self.world.fund(address, COINS)
            self.world.fund(address, TOKENS, TOKEN)
        for _ in range(FINALITY + 1):
            self.world.mine()
        self.nodes = Nodes(self.world, NODES, 0)

    def tell(self, text: str) -> None:
        """One line of the story, with its time."""
        self.say(f"{time.monotonic() - self.began:5.1f} s  {text}")

    async def mine(self) -> None:
        """A block now and then."""
        while True:
            await asyncio.sleep(BLOCK_S)
            if self.mining:
                self.world.mine()

    @contextlib.asynccontextmanager
    async def signer(self, *, new: bool) -> AsyncIterator[None]:
        """The signer's process, as a task: the same code behind the same socket, on a log that stays."""
        ports = SystemPorts()
        policy = parse("policy", POLICY.replace("KIND", "evm").encode(), codecs)
        service = await Service.open(ports, str(self.folder / "signer"), policy, OpenKeys(), codecs, new=new)
        server = Server(ports, service, {CALLER: SECRET}, local_secret=SECRET, log=lambda _: None)
        ready = asyncio.Event()
        local = f"unix:{self.folder}/local.sock"
        task = asyncio.create_task(server.run(self.address, local, lambda _: ready.set()))
        await ready.wait()
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @property
    def address(self) -> str:
        """Where the signer listens."""
        return f"unix:{self.folder}/signer.sock"

    def chain(self) -> EvmChain:
        """The chain behind its nodes."""
        endpoints = [Endpoint(name=node.name, url=node.url) for node in self.nodes.by_name.values()]
        post = self.nodes.transport(asyncio.sleep)
        return EvmChain(document("evm").network(CHAIN_NAME), endpoints, post, time.monotonic, timeout_s=2.0)


async def play(folder: Path, say: Say) -> tuple[list[PayoutView], list[str], list[Finding]]:
    """The whole story: the payouts as they ended, what is wrong, and the audit's findings."""
    scene = Scene(folder, say)
    async with Bursar(f"sqlite:///{folder}/funds.db") as bursar, scene.signer(new=True):
        await furnish(bursar.ledger, "evm", 2, 100)
        engine = Engine(bursar.store, bursar.ledger.writer, ())
        documents = Documents(bursar.store, KINDS)
        client = SignerClient(
            bursar.store.ports,
            scene.address,
            name=SIGNER,
            caller=CALLER,
            secret=SECRET,
            link=MarkLink(bursar.store),
            timeout_s=2.0,
        )
        async with client as signer:
            payouts = Payouts(bursar.ledger, documents, {CHAIN_NAME: scene.chain()}, signer, engine=engine)
            await payouts.prepare()
            worker = Worker(engine, scan_s=0.1)
            tasks = [asyncio.create_task(work) for work in (worker.run(), payouts.reconciling.run(), scene.mine())]
            try:
                await _acts(scene, payouts)
            finally:
                worker.stop()
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.wait(tasks, timeout=5)
                await engine.finish(5)
            views = [await payouts.view(one.id) for one in reversed(await payouts.list())]
            findings = await audit(bursar.store, more=CHECKS)
            findings.append(await wallets_cover(bursar.store, payouts.chains))
    return views, _wrong(scene, views), findings


async def _acts(scene: Scene, payouts: Payouts) -> None:
    made = [await payouts.request(_wanted(number), key=f"demo-{number}") for number in range(PAYOUTS)]
    scene.tell(f"{PAYOUTS} payouts are requested: their money is held in the ledger.")
    await _until(payouts, made[:2], "confirmed")
    scene.tell("The first are confirmed: final on the chain, at two nodes, to the last unit.")
    scene.world.terms.background_gas = 0
    scene.mining = False
    late = await payouts.request(_wanted(PAYOUTS), key="demo-late")
    await _until(payouts, [late], "confirming")
    scene.world.spike(150 * GWEI)
    scene.mining = True
    scene.tell(f"Fees go up fifteenfold: {late.id} offers too little, and no block takes it.")
    await asyncio.sleep(3 * BLOCK_S)
    await payouts.bump(late.id, actor="ann", reason="the user waits")
    scene.tell("An operator raises its fee, on the same nonce.")
    unwanted = await payouts.request(_wanted(PAYOUTS + 1), key="demo-unwanted")
    await payouts.cancel(unwanted.id, actor="ann", reason="the user has changed his mind")
    scene.tell(f"{unwanted.id} is cancelled.")
    scene.world.reorg(FINALITY - 1)
    scene.tell(f"The chain reorganises: {FINALITY - 1} blocks are gone, and others take their place.")
    await _ended(payouts)
    scene.tell("Every payout has ended.")


def _wanted(number: int) -> PayoutRequest:
    return PayoutRequest(
        account=f"user:{number % 2}",
        asset="USDT",
        chain=CHAIN_NAME,
        to=_recipient(number),
        amount=f"{number + 1}.50",
        source=f"demo:{number}",
        mandate="auto",
    )


def _recipient(number: int) -> str:
    return codecs("evm").check_address(CHAIN_NAME, f"0x{number + 0xABC0:040x}")


async def _until(payouts: Payouts, wanted: list[PayoutView], state: str) -> None:
    async def there() -> bool:
        return all([(await payouts.view(one.id)).state in (state, "confirmed", "failed") for one in wanted])

    await _wait(there)


async def _ended(payouts: Payouts) -> None:
    async def there() -> bool:
        return all(one.status in ("confirmed", "failed") for one in await payouts.list())

    await _wait(there)


async def _wait(there: Callable[[], Awaitable[bool]]) -> None:
    ports = SystemPorts()
    async with asyncio.timeout(PATIENCE_S):
        while not await there():
            await ports.sleep(0.05)


def _wrong(scene: Scene, views: list[PayoutView]) -> list[str]:
    """What the chain has paid, against what the payouts say."""
    wrong = []
    for number, view in enumerate(views):
        to = _recipient(number).lower()
        paid = [effect for effect in scene.world.effects() if effect.to.lower() == to]
        if len(paid) != (view.status == "confirmed"):
            wrong.append(f"{view.id} is {view.status}, and the chain has paid it {len(paid)} times")
    return wrong


@click.command("demo-payouts", cls=Command, examples="bursar demo-payouts")
@click.pass_obj
def demo_payouts(state: State) -> int:
    """Payments on a simulated chain: a fee spike, a stuck transaction that is bumped, a cancellation, a reorganisation.

    Exit code 0 only if the chain has paid each recipient once, and the audit is clean.
    """
    out = Output(as_json=state.json)
    with tempfile.TemporaryDirectory(prefix="bursar-payouts-") as folder:
        views, wrong, findings = asyncio.run(play(Path(folder), out.say))
    ok = not wrong and all(finding.ok for finding in findings)
    if out.as_json:
        ended = {view.id: {"status": view.status, "attempts": len(view.attempts)} for view in views}
        out.show({"ok": ok, "payouts": ended, "wrong": wrong}, str)
        return 0 if ok else 1
    rows = [
        (view.id, view.amount, view.status, view.wallet or "-", len(view.attempts), view.tx_hash[:18] or "-")
        for view in views
    ]
    heads = ("USDT", "status", "wallet", "attempts", "transaction")
    out.console.print("", table("payout", *heads, rows=rows, right=("USDT", "attempts")), "")
    out.console.print(draw_findings(findings), "")
    for text in wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    out.console.print("All is well." if ok else "NOT well: see above.", style="bold green" if ok else "bold red")
    return 0 if ok else 1
