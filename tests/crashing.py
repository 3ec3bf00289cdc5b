"""A program on real files that dies at one call to its database: before it, after its effect, or by being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.builders import FaultyPorts, Place

from bursar.engine import Engine, Flow


class Dying(FaultyPorts):
    """Where `cancel` means the tasks that drive a record just then, as a shutdown does."""

    def __init__(self, flows: Sequence[Flow[Any]]) -> None:
        super().__init__()
        self._prefixes = tuple(f"bursar-{flow.name}-" for flow in flows)

    def victims(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith(self._prefixes)]


async def dies(
    place: Place, flows: Sequence[Flow[Any]], run: Callable[[Engine], Awaitable[None]], fault: str, call: int
) -> bool:
    """Run on a machine on which that call goes wrong; whether there was such a call."""
    ports = Dying(flows)
    bursar = place.bursar(ports)
    await bursar.__aenter__()
    engine = Engine(bursar.store, bursar.ledger.writer, flows)
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(run(engine)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    reached = ports.reached
    ports.arm("", 0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await bursar.store.close()  # what the kernel does for a dead process
    return reached
