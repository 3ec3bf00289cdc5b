"""Builders for tests of the trading core: a disk in memory, a core on it, a server and a client on real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bursar.ports import Files, SystemPorts
from bursar.rails.trading import Core, Server, ServerLimits, TradingClient
from bursar.rails.trading.frames import encode
from bursar.rails.trading.history import Named, indexed
from bursar.rails.trading.rules import Code, Op
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import Log
from bursar.sim.files import FilesState, SimFiles

SECRET = b"sixteen bytes or more"
NAME = "spot"
IDENTITY = "0123456789abcdef" * 2
FOLDER = "/core"
WAIT_S = 30.0


def deposit(id_: int, user: int = 1, amount: int = 100, asset: str = "USDT") -> Named:
    return (int(Op.DEPOSIT), id_, user, asset, amount, 0)


def withdraw(id_: int, user: int = 1, amount: int = 100, asset: str = "USDT") -> Named:
    return (int(Op.WITHDRAW), id_, user, asset, amount, 0)


def refund(id_: int, user: int = 1, amount: int = 100, asset: str = "USDT") -> Named:
    return (int(Op.REFUND), id_, user, asset, amount, 0)


def cancel(id_: int, op: Op) -> Named:
    return (int(Op.CANCEL), id_, 0, "", 0, int(op))


def run(state: CoreState, items: Sequence[Named]) -> tuple[bytes, list[int]]:
    """Decide operations whose assets are given by name."""
    return state.execute(*indexed(items))


def memory_files() -> SimFiles:
    """A disk in memory on which nothing goes wrong unless a test says so."""
    process: Any = SimpleNamespace(alive=True, who="test")
    return SimFiles(process, FilesState(random.Random(0)))


def prune(state: CoreState, room: int, forget: int, keep: Sequence[int] = ()) -> Code:
    """Raise the floors as the server does, in steps."""
    code, steps = state.floor_steps(room, forget)
    for step in steps:
        state.raise_floors(*step, keep)
    return code


class MemoryPorts(SystemPorts):
    """The real machine with a disk in memory."""

    def __init__(self) -> None:
        self.disk = memory_files()

    def files(self) -> Files:
        return self.disk


def write_log(files: Files, groups: list[list[Named]], *, segment_bytes: int = 10**9) -> CoreState:
    """A log in which each batch is a frame; returns the state it makes."""
    files.make_folder(FOLDER)
    log = Log(files, FOLDER, NAME, segment_bytes_max=segment_bytes)
    list(log.read_all())
    log.open(1, IDENTITY)
    state = CoreState()
    for group in groups:
        first = state.sequence + 1
        run(state, group)
        log.append(encode(state.drain(), first, state.sequence - first + 1), first)
    log.close()
    return state


def state_of(state: CoreState) -> Any:
    """All that a state knows, to be compared."""
    return (
        state.sequence,
        state.ledger,
        (state.floors.room, state.floors.forget, state.floors.kept),
        state.highest,
        state.statuses,
        {code: [(user, *held) for user, held in a.by_user.items()] for code, a in state.assets.items()},
        list(state.history.rows()),
        state.history.count,
        {op: {id_: state.history[number] for id_, number in seen.items()} for op, seen in state.history.where.items()},
    )


async def open_core(ports: SystemPorts, folder: str = FOLDER, **sizes: Any) -> Core:
    return await Core.open(ports, folder, NAME, **sizes)


@dataclass
class Desk:
    """A core that is being served, and how to reach it."""

    ports: SystemPorts
    core: Core
    server: Server
    address: str
    log: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    clients: list[TradingClient] = field(default_factory=list)
    name: str = NAME

    async def client(self, **options: Any) -> TradingClient:
        settings: dict[str, Any] = {"name": self.name, "secret": SECRET, "timeout_s": WAIT_S} | options
        client = TradingClient(self.ports, self.address, **settings)
        client.start()
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@asynccontextmanager
async def desk(
    folder: Path,
    *,
    ports: SystemPorts | None = None,
    limits: ServerLimits | None = None,
    name: str = NAME,
    **sizes: Any,
) -> AsyncIterator[Desk]:
    """A core on a folder, served at a Unix socket in it; stopped and closed at the end."""
    ports = ports or SystemPorts()
    core = await Core.open(ports, str(folder / "data"), name, **sizes)
    log: list[str] = []
    server = Server(ports, core, SECRET, limits=limits, log=log.append)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.run(f"unix:{folder}/core.sock", ready.set_result))
    made = Desk(ports, core, server, await ready, log, task, name=name)
    try:
        yield made
    finally:
        for client in made.clients:
            await client.close()
        server.stop()
        await asyncio.gather(task, return_exceptions=True)
        core.close()
