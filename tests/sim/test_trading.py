"""The trading core under the simulator: real server, real client, a disk that loses writes and a network that breaks.

Callers remember what they asked and what they were told, and ask again until they know. Meanwhile the floors are
raised, the one that frees room also past withdraws that are still to be refunded. In the end everything the callers
were told must be true, and nothing else may have happened: balances are the sum of what was told to have succeeded, and
room is reserved for what is held and for withdraws from the room floor on. The core is bound to one ledger all along.
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
    FixedLink,
    Floors,
    Known,
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
LEDGER = "ledger-1"
FIRST_ID = 1_000
STEP = 10  # between two ids of one caller: they grow for all of them together, as Snowflakes do
PRUNES = 3
KEEP = (FIRST_ID, FIRST_ID + STEP)  # forced records, say
# What would be trouble of another kind than a core that dies.
WRONG = ("CORE_BEHIND", "CORE_REFUSED", "OTHER_CORE", "OTHER_LEDGER", "MISMATCH", "MALFORMED", "NO_ROOM")


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
    next_ids: dict[int, int] = field(default_factory=dict)  # the lowest id that each caller may still ask for anew
    floors: Floors = field(default_factory=Floors)  # the highest that were asked for
    core: Core | None = None
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
            self.core = core
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
        async with self.client(process, LEDGER) as client:
            async with asyncio.TaskGroup() as group:
                for number in range(self.callers):
                    self.next_ids[number] = FIRST_ID
                    group.create_task(self._caller(client, number), name=f"caller-{number}")
                group.create_task(self._pruner(client), name="pruner")
            self.kernel.calm()
            self.net.heal()
            self.host.state.cut_probability = 0.0
            await self.check(client)
        async with self.client(process, "ledger-2") as other:
            while (refused := await other.deposit(FIRST_ID * 1_000, 1, "USDT", 1)).outcome is not Outcome.UNKNOWN:
                await process.ports.sleep(0.1)
            assert refused.code == "OTHER_LEDGER"

    def client(self, process: Process, ledger: str) -> TradingClient:
        link = FixedLink(Known(ledger=ledger))
        return TradingClient(process.ports, ADDRESS, name="spot", secret=SECRET, link=link, timeout_s=0.5)

    async def _pruner(self, client: TradingClient) -> None:
        """Raise the floors now and then; also too high, which is refused."""
        rng = random.Random(f"{self.kernel.seed} pruner")
        for _ in range(PRUNES):
            await client._ports.sleep(rng.random() * 0.1)
            too_high = await client.prune(room=2**63 - 1, forget=1)
            assert too_high.outcome is not Outcome.SUCCESS
            while not (moved := [id_ for id_, op in sorted(self.told) if op in (Op.DEPOSIT, Op.WITHDRAW)]):
                await client._ports.sleep(0.02)
            room = max(self.floors.room, rng.choice(moved) + 1)
            # Nothing below it is asked for anew; what was told may be asked again, and is not known any more (T32).
            forget = rng.randint(self.floors.forget, max(self.floors.forget, min(room, *self.next_ids.values())))
            self.floors = Floors(room, forget)
            while (reply := await client.prune(room=room, forget=forget, keep=KEEP)).outcome is not Outcome.SUCCESS:
                assert reply.code not in (*WRONG, "FLOOR_TOO_HIGH", "BAD_OPERATION"), reply
                await client._ports.sleep(0.02)
            assert client.floors == self.floors

    async def _caller(self, client: TradingClient, number: int) -> None:
        rng = random.Random(f"{self.kernel.seed} caller {number}")
        script = make_script(rng, number, self.steps)
        while script:
            self.next_ids[number] = int(script[0].req_id)
            some = [script.pop(0) for _ in range(min(len(script), rng.choice((1, 1, 2, 5))))]
            await self.until_known(client, some)
            if rng.random() < 0.3:
                again = rng.choice(sorted(self.told))
                await self.until_known(client, [self.asked[again]])
        self.next_ids[number] = FIRST_ID + STEP * self.steps

    async def until_known(self, client: TradingClient, operations: list[Operation]) -> None:
        """Ask until the core has said what became of each; it must never say two things."""
        for operation in operations:
            self.asked[key_of(operation)] = operation
        open_ones = operations
        while open_ones:
            replies = await client.execute(open_ones)
            rest = []
            for operation, reply in zip(open_ones, replies, strict=True):
                assert reply.code not in WRONG, reply
                if reply.code == "PRUNED":
                    assert key_of(operation) in self.told and self.may_be_forgotten(int(operation.req_id)), operation
                    continue
                final = reply.outcome.is_known or reply.code == "WITHDRAW_NOT_FOUND"
                if not final:
                    rest.append(operation)
                    continue
                before = self.told.setdefault(key_of(operation), reply)
                assert before == reply, f"{operation} was told {before}, now {reply}"
            open_ones = rest
            if rest:
                await client._ports.sleep(0.02)

    def may_be_forgotten(self, id_: int) -> bool:
        """Whether somebody has asked to forget it."""
        return id_ < self.floors.forget and id_ not in KEEP

    # --- the judge

    async def check(self, client: TradingClient) -> None:
        """Everything told is on record, and balances are the sum of it."""
        known = [key for key, reply in sorted(self.told.items()) if reply.outcome.is_known]
        found = await insist(client, lambda: client.lookup(known))
        sequences = []
        for key, reply in zip(known, found.replies, strict=True):
            if self.may_be_forgotten(key[0]):
                assert reply.code == "PRUNED", f"{key} was to be forgotten, and {reply} is on record"
                continue
            assert self.told[key] == reply, f"{key} was told {self.told[key]}, and {reply} is on record"
            sequences.append(reply.sequence)
        assert len(set(sequences)) == len(sequences)
        held = expected({key: self.asked[key] for key in known if self.told[key].outcome is Outcome.SUCCESS})
        for user in (*USERS, 4):
            answer: BalancesReply = await insist(client, lambda user=user: client.balances(user))  # type: ignore[misc]
            for asset in ASSETS:
                balance = answer.balances.get(asset)
                found_there = (balance.available, balance.frozen) if balance else (0, 0)
                added_up = held.get((user, asset), (0, 0))
                assert added_up == found_there, f"user {user} holds {found_there}, and what was told makes {added_up}"
        totals = (await insist(client, client.totals)).totals
        for asset in ASSETS:
            assert totals.get(asset, 0) == sum(sum(pair) for (_, code), pair in held.items() if code == asset)
        self.check_room(held, known, client.floors.room)
        await insist(client, lambda: client.set_status(4, Status.FROZEN))

    def check_room(self, held: dict[tuple[int, str], tuple[int, int]], known: list[tuple[int, Op]], room: int) -> None:
        """Room is reserved for what is held, and for withdraws that may be refunded and are not below the floor."""
        assert self.core is not None
        state = self.core.state
        assert (state.ledger, state.floors.room) == (LEDGER, room)
        wanted = {key: sum(pair) for key, pair in held.items()}
        for id_, op in known:
            if op is Op.WITHDRAW and self.told[id_, op].outcome is Outcome.SUCCESS:
                refund = self.told.get((id_, Op.REFUND))
                if (refund is None or refund.outcome is not Outcome.SUCCESS) and (id_ >= room or id_ in KEEP):
                    _, _, user, asset, amount, _ = self.asked[id_, op]
                    wanted[user, asset] += amount
        for asset in ASSETS:
            accounts = state.assets[asset].by_user if asset in state.assets else {}
            for user, (_, _, committed) in accounts.items():
                assert committed == wanted.get((user, asset), 0), f"user {user} has {committed} of {asset} reserved"


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
        id_ = FIRST_ID + STEP * step + caller
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
    crashes = torn = snapshots = forgot = released = 0
    for seed in range(SEEDS):
        swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({"core"}))
        done = play(seed, swarm=swarm, chaos=True, steps=14)
        crashes += len(done.crashes)
        torn += done.value.torn
        snapshots += done.value.snapshots
        forgot += done.value.floors.forget > FIRST_ID + STEP
        released += done.value.floors.room > FIRST_ID + STEP
    assert forgot > SEEDS // 4
    assert released > SEEDS // 2
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
