"""Flows join an engine: one engine drives all flows of a process.

A program makes one `Engine` without flows and hands it to `Transfers`, `Deposits` and `Sequences`, which register their
flow in it. So there is one worker, one cache of pauses and one limit on records in progress per process, whatever the
number of flows. Each of those classes makes an engine of its own only if it is given none.
"""

from __future__ import annotations

from typing import Any

from bursar.engine.engine import Engine
from bursar.engine.flow import Flow, by_name


def register(engine: Engine, flow: Flow[Any]) -> Engine:
    """Have an engine drive one more flow; `FlowRefused` if it has one of that name. Returns the engine.

    Register before a worker runs on the engine: its first look, which takes over what a dead process left, covers the
    flows that are there by then.
    """
    engine.flows = by_name([*engine.flows.values(), flow])
    return engine
