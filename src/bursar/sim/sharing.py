"""Ports of processes that share a disk: one that finds the database in another's transaction waits, as SQLite does.

A real connection waits inside the call, on the lane's thread, so all that is queued behind it waits too. That is what a
`SharedLane` does. SQLite gives up after some seconds; here no process holds a transaction for so long, and one that
dies lets go of it.
"""

from __future__ import annotations

from typing import Final

from bursar.ports import SerialExecutor
from bursar.sim.process import TICK_S, SimLane, SimPorts

LOOK_AGAIN_S: Final = 4 * TICK_S


class SharedLane(SimLane):
    """A lane to a database that others write too."""

    __slots__ = ()

    def _perform(self) -> None:
        process = self._process
        if process.disk.held():
            process.kernel.loop.call_later(LOOK_AGAIN_S, self._perform, context=process.context)
            return
        super()._perform()


class SharedPorts(SimPorts):
    """The ports of one incarnation, with lanes that wait for others."""

    __slots__ = ()

    def lane(self, name: str) -> SerialExecutor:
        """A lane that waits for others."""
        return SharedLane(self._living(), name)
