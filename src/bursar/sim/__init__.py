"""The simulator: the whole system on a seeded event loop with virtual time, crashed wherever it can crash.

`run` a scenario's main coroutine for a seed; `Kernel` is what it is handed. Nothing of the library imports this; tests
and the programs around the library do.
"""

from bursar.sim.disk import SimDisk
from bursar.sim.kernel import Crash, CrashAt, CrashSwarm, Kernel, Run, SimFailure, run
from bursar.sim.loop import Fenced, SimDeadlock, SimLivelock, SimLoop
from bursar.sim.net import SimHost, SimNet
from bursar.sim.process import Moment, Process, SimLane, SimPorts
from bursar.sim.trace import Trace

__all__ = [
    "Crash",
    "CrashAt",
    "CrashSwarm",
    "Fenced",
    "Kernel",
    "Moment",
    "Process",
    "Run",
    "SimDeadlock",
    "SimDisk",
    "SimFailure",
    "SimHost",
    "SimLane",
    "SimLivelock",
    "SimLoop",
    "SimNet",
    "SimPorts",
    "Trace",
    "run",
]
