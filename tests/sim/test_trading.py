"""The trading core under the simulator: real server, real client, a disk that loses writes and a network that breaks.

Callers remember what they asked and what they were told, and ask again until they know. In the end everything they were
told must be true, and nothing else may have happened: balances are the sum of what was told to have succeeded.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest

from bursar.model.outcome import Outcome
from bursar.rails.trading import (
    BalancesReply,
    Core,
    CoreStopped,
    LookupReply,
    Op,
    Operation,
    Reply,
    Server,
    Status,
    TotalsReply,
    TradingClient,
)
from bursar.sim import CrashAt, CrashSwarm, Kernel, Moment, Process, Run, SimHost, SimNet, run

SECRET = b"a secret of the simulator"
ADDRESS = "unix:/run/spot.sock"
FOLDER = "/data"
SEEDS = int(os.environ.get("BURSAR_TRADING_SEEDS", "400"))
USERS = (1, 2, 3)
ASSETS = ("USDT", "BTC")


@dataclass
class Scene:
    """One run: a core that is restarted whenever it dies, and callers in a process of their own."""

    kernel: Kernel
    callers: int = 3
    steps: int = 8
    segment_bytes: int = 700
    snapshot_bytes: int = 900
    told: dict[tuple[int, Op], Reply] = field(default_factory=dict)
    asked: dict[tuple[int, Op], Operation] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    recoveries: int = 0
    torn: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.net = SimNet(self.kernel)
        self.host = SimHost(self.net, f"{self.kernel.seed} disk")
        self.client_host = SimHost(self.net, f"{self.kernel.seed} client")

    # --- the core

    def start_core(self) -> None:
        process = self.kernel.start("core", disk=self.host)
        process.spawn(self._serve(process), name="core")

    async def _serve(self, process: Process) -> None:
        try:
            core = await Core.open(
                process.ports, FOLDER, "spot", segment_bytes=self.segment_bytes, snapshot_bytes=self.snapshot_bytes
            )
            self.recoveries += 1
            self.torn += core.recovery.torn is not None
            self.snapshots += core.recovery.snapshot > 0
            await Server(process.ports, core, SECRET, log=lambda _: None).run(ADDRESS, lambda _: None)
        except CoreStopped as error:
            self.stops.append(str(error))
        except OSError as error:  # full, also when it starts
            self.stops.append(str(error))
        self.kernel.loop.call_soon(process.crash, context=Context())

    def restart(self, dead: Process) -> None:
        if dead.name == "core":
            delay = 0.01 + self.kernel.rng.random() * 0.05
            self.kernel.loop.call_later(delay, self.start_core, context=Context())

    # --- the callers

    async def play(self) -> None:
        self.start_core()
        process = self.kernel.start("callers", disk=self.client_host)
        await process.spawn(self._callers(process), name="callers")

    async def _callers(self, process: Process) -> None:
        async with TradingClient(process.ports, ADDRESS, name="spot", secret=SECRET, timeout_s=0.5) as client:
            async with asyncio.TaskGroup() as group:
                for number in range(self.callers):
                    group.create_task(self._caller(client, number), name=f"caller-{number}")
            self.kernel.calm()
            self.net.heal()
            self.host.state.cut_probability = 0.0
            await self.check(client)

    async def _caller(self, client: TradingClient, number: int) -> None:
        rng = random.Random(f"{self.kernel.seed} caller {number}")
        script = make_script(rng, number, self.steps)
        while script:
            some = [script.pop(0) for _ in range(min(len(script), rng.choice((1, 1, 2, 5))))]
            await self.until_known(client, some)
            if rng.random() < 0.3:
                again = rng.choice(sorted(self.told))
                await self.until_known(client, [self.asked[again]])

    async def until_known(self, client: TradingClient, operations: list[Operation]) -> None:
        """Ask until the core has said what became of each; it must never say two things."""
        for operation in operations:
            self.asked[key_of(operation)] = operation
        open_ones = operations
        while open_ones:
            replies = await client.execute(open_ones)
            rest = []
            for operation, reply in zip(open_ones, replies, strict=True):
                assert reply.code not in ("CORE_BEHIND", "CORE_REFUSED", "MISMATCH", "MALFORMED"), reply
                final = reply.outcome.is_known or reply.code == "WITHDRAW_NOT_FOUND"
                if not final:
                    rest.append(operation)
                    continue
                before = self.told.setdefault(key_of(operation), reply)
                assert before == reply, f"{operation} was told {before}, now {reply}"
            open_ones = rest
            if rest:
                await client._ports.sleep(0.02)

    # --- the judge

    async def check(self, client: TradingClient) -> None:
        """Everything told is on record, and balances are the sum of it."""
        known = [key for key, reply in sorted(self.told.items()) if reply.outcome.is_known]
        found = await insist(client, lambda: client.lookup(known))
        for key, reply in zip(known, found.replies, strict=True):
            assert self.told[key] == reply, f"{key} was told {self.told[key]}, and {reply} is on record"
        sequences = [reply.sequence for reply in found.replies]
        assert len(set(sequences)) == len(sequences)
        held = expected({key: self.asked[key] for key in known if self.told[key].outcome is Outcome.SUCCESS})
        for user in (*USERS, 4):
            answer: BalancesReply = await insist(client, lambda user=user: client.balances(user))  # type: ignore[misc]
            for asset in ASSETS:
                balance = answer.balances.get(asset)
                assert held.get((user, asset), (0, 0)) == ((balance.available, balance.frozen) if balance else (0, 0))
        totals = (await insist(client, client.totals)).totals
        for asset in ASSETS:
            assert totals.get(asset, 0) == sum(sum(pair) for (_, code), pair in held.items() if code == asset)
        await insist(client, lambda: client.set_status(4, Status.FROZEN))


A = TypeVar("A", Reply, BalancesReply, TotalsReply, LookupReply)


async def insist(client: TradingClient, ask: Callable[[], Awaitable[A]]) -> A:
    """Ask until there is an answer."""
    while (answer := await ask()).outcome is not Outcome.SUCCESS:
        await client._ports.sleep(0.1)
    return answer


def key_of(operation: Operation) -> tuple[int, Op]:
    target = Op(operation.other) if operation.op is Op.CANCEL else operation.op
    return int(operation.req_id), target


def make_script(rng: random.Random, caller: int, steps: int) -> list[Operation]:
    """What one caller does, with ids of its own."""
    made: list[Operation] = []
    for step in range(steps):
        id_ = 1_000_000 * (caller + 1) + step
        user, asset, amount = rng.choice(USERS), rng.choice(ASSETS), rng.randint(1, 50)
        kind = rng.random()
        if kind < 0.4 or step == 0:
            made.append(Operation(Op.DEPOSIT, id_, user, asset, amount * 3))
        elif kind < 0.7:
            made.append(Operation(Op.WITHDRAW, id_, user, asset, amount))
            if rng.random() < 0.4:
                made.append(Operation(Op.REFUND, id_, user, asset, amount))
        elif kind < 0.9:
            made.append(Operation(Op.LOCK, id_, user, asset, amount))
            if rng.random() < 0.5:
                made.append(Operation(Op.UNLOCK, id_, user, asset, max(1, amount // 2)))
            else:
                made.append(Operation(Op.SETTLE, id_, user, asset, amount, other=4))
        else:
            made.append(Operation(Op.CANCEL, id_, other=int(Op.DEPOSIT)))
    return made


def expected(happened: dict[tuple[int, Op], Operation]) -> dict[tuple[int, str], tuple[int, int]]:
    """Available and frozen per user and asset: a sum, whatever the order."""
    held: dict[tuple[int, str], tuple[int, int]] = {}

    def add(user: int, asset: str, available: int, frozen: int) -> None:
        before = held.get((user, asset), (0, 0))
        held[user, asset] = (before[0] + available, before[1] + frozen)

    for (_, op), (_, _, user, asset, amount, other) in happened.items():
        match op:
            case Op.DEPOSIT | Op.REFUND:
                add(user, asset, amount, 0)
            case Op.WITHDRAW:
                add(user, asset, -amount, 0)
            case Op.LOCK:
                add(user, asset, -amount, amount)
            case Op.UNLOCK:
                add(user, asset, amount, -amount)
            case Op.SETTLE:
                add(user, asset, 0, -amount)
                add(other, asset, amount, 0)
    return held


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    swarm: CrashSwarm | None = None,
    cut_at: int | None = None,
    chaos: bool = False,
    callers: int = 3,
    steps: int = 8,
    free_bytes: int | None = None,
    failing_syncs: int = 0,
) -> Run[Scene]:
    """One run, with what is to go wrong in it."""
    scenes: list[Scene] = []

    async def main(kernel: Kernel) -> Scene:
        scene = Scene(kernel, callers=callers, steps=steps)
        scenes.append(scene)
        scene.host.state.cut_at = cut_at
        if chaos:
            scene.host.state.cut_probability = 0.02
            scene.net.cut_probability = 0.02
        if free_bytes is not None or failing_syncs:
            kernel.loop.call_later(0.02, _break_disk, scene, free_bytes, failing_syncs)
        await scene.play()
        return scene

    return run(main, seed, crashes=crashes or (), swarm=swarm, on_crash=partial(_restart, scenes))


def _restart(scenes: list[Scene], dead: Process) -> None:
    scenes[0].restart(dead)


def _break_disk(scene: Scene, free_bytes: int | None, failing_syncs: int) -> None:
    scene.host.state.failing_syncs = failing_syncs
    if free_bytes is not None:
        scene.host.state.free_bytes = free_bytes
        scene.kernel.loop.call_later(0.3, setattr, scene.host.state, "free_bytes", None)


def test_many_seeds_with_crashes_cuts_and_lost_writes() -> None:
    """A hundred random crashes in a row equal a model; acknowledged operations are never lost, none happens twice."""
    crashes = torn = snapshots = 0
    for seed in range(SEEDS):
        swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({"core"}))
        done = play(seed, swarm=swarm, chaos=True, steps=14)
        crashes += len(done.crashes)
        torn += done.value.torn
        snapshots += done.value.snapshots
    assert crashes > 2 * SEEDS
    assert torn > SEEDS // 20
    assert snapshots > SEEDS // 4


@pytest.mark.parametrize("moment", list(Moment))
def test_a_crash_at_every_port_call(moment: Moment) -> None:
    """Crash before and after append and fsync, after apply before reply: wherever it reaches out of itself."""
    calls = died = 0
    for seed in range(8):
        everywhere = range(1, play(seed, callers=2).port_calls_by["core"] + 1)
        calls += len(everywhere)
        for call in everywhere:
            died += len(play(seed, callers=2, crashes=[CrashAt("core", call, moment)]).crashes)
    assert calls > 150
    assert died >= calls * 0.6  # the judge's own questions are among the calls, and nothing crashes any more by then


def test_a_power_cut_before_every_file_operation() -> None:
    """Crash between write and sync, during a snapshot before and after its rename, while rotating, while cutting."""
    operations = died = 0
    for seed in range(6):
        everywhere = range(1, play(seed, callers=2).value.host.state.operations + 1)
        operations += len(everywhere)
        for cut_at in everywhere:
            died += len(play(seed, callers=2, cut_at=cut_at).crashes)
    assert operations > 200
    assert died >= operations * 0.8


def test_a_disk_that_is_full_ends_the_core_and_loses_nothing() -> None:
    """Disk full: the process ends without an answer, and goes on when there is room."""
    stopped = 0
    for seed in range(20):
        done = play(seed, free_bytes=40 + 20 * seed)
        stopped += bool(done.value.stops)
    assert stopped >= 10


def test_a_sync_that_fails_ends_the_core_and_loses_nothing() -> None:
    """fsync failing ends the process; whatever the disk has kept of it, callers learn one truth."""
    stopped = 0
    for seed in range(20):
        done = play(seed, failing_syncs=1)
        assert len(done.value.stops) <= 1
        stopped += len(done.value.stops)
    assert stopped >= 15


def test_a_partition_is_waited_out() -> None:
    """Given a partition, then callers learn nothing, say nothing, and go on when it heals."""

    async def main(kernel: Kernel) -> Scene:
        scene = Scene(kernel)
        kernel.loop.call_later(0.01, scene.net.partition, "core", "callers")
        kernel.loop.call_later(8, scene.net.heal)
        await scene.play()
        return scene

    for seed in range(10):
        done = run(main, seed)
        assert done.virtual_s > 8
        assert done.value.told


def test_the_same_seed_is_the_same_run() -> None:
    """Same seed, same trace, here and in another process with another hash seed."""
    swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({"core"}))
    here = play(11, swarm=swarm, chaos=True).trace_hash
    assert play(11, swarm=swarm, chaos=True).trace_hash == here
    assert play(12, swarm=swarm, chaos=True).trace_hash != here
    program = (
        "from tests.sim.test_trading import *\n"
        "swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({'core'}))\n"
        "print(play(11, swarm=swarm, chaos=True).trace_hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here


def test_an_answer_before_its_fsync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that answers before the disk has it is found out: this simulation can fail."""

    def at_once(self: Core, answer: object) -> None:
        assert callable(answer)
        answer()
        self._held.append(lambda: None)
        self._wake.set()

    monkeypatch.setattr(Core, "when_durable", at_once)
    with pytest.raises(Exception, match=r"(?s)was told|BEHIND"):
        for seed in range(40):
            swarm = CrashSwarm(probability=0.05, budget=6, processes=frozenset({"core"}))
            try:
                play(seed, swarm=swarm, chaos=True)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
