"""Everything outside the process: clock, ids, randomness, files, sockets, threads.

All other modules get a `Ports` and reach the outside world through it alone (ruff bans the rest), so that the simulator
can put a virtual clock, seeded randomness, crashing "threads", lossy disks and broken networks in its place. Sockets of
PostgreSQL are the one exception: asyncpg opens its own, which is why that store stays outside the simulator.

A *port call* is anything that leaves the process: `SerialExecutor.run`, `Ports.sleep`, and each write to a `Stream`.
Files are touched by work on a `SerialExecutor`, so that no disk ever holds up the event loop.
"""

from bursar.ports.protocols import ASIDE, File, Files, Listener, Ports, SerialExecutor, Stream, write_whole
from bursar.ports.system import SystemPorts, exit_after, notice_silence, run_program, split_address

__all__ = [
    "ASIDE",
    "File",
    "Files",
    "Listener",
    "Ports",
    "SerialExecutor",
    "Stream",
    "SystemPorts",
    "exit_after",
    "notice_silence",
    "run_program",
    "split_address",
    "write_whole",
]
