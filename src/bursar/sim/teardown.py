"""End a run: close its unfinished coroutines quietly, once nothing they do can matter.

A crash leaves coroutines suspended for ever, and the end of a run leaves those of the processes still alive. Python
cannot free a suspended coroutine without resuming it once, with GeneratorExit, through its `except` and `finally`
blocks. So this happens after the run has been judged, with every port fenced and the loop deaf: the blocks run, and
reach nothing. What they complain about on their way out (being awaited again, being destroyed, never being awaited)
is about a program that no longer exists, and is kept off stderr.

Not here: which coroutines are dead during a run, and that they stay dead; that is the loop's.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bursar.sim.loop import SimLoop

# A coroutine whose finally blocks await is resumed once for each await. More than this is code that cannot be stopped.
CLOSES_MAX: Final = 64


def close_all(loop: SimLoop) -> list[str]:
    """Close every unfinished task's coroutine, then the loop. Returns the names of those that would not end."""
    loop.closing = True
    unfinished = [task for task in loop.tasks if not task.done()]
    stubborn: list[str] = []
    with _quiet():
        while unfinished:
            task = unfinished.pop()
            if not _close(task.get_coro()):
                stubborn.append(f"{task.get_name()} ({getattr(task.get_coro(), '__qualname__', '')})")
            del task
        loop.close()
        if stubborn:
            gc.collect()  # it goes now, while it is quiet, rather than whenever the collector comes by
    return stubborn


def _close(coro: Any) -> bool:
    """Resume `coro` with GeneratorExit until it is over; False if it never is."""
    for _ in range(CLOSES_MAX):
        try:
            # Not close(): that leaves the arguments of a coroutine that never began to the collector.
            coro.throw(GeneratorExit)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # GeneratorExit, Fenced, or an error in a finally block: its process is dead
            pass
        if getattr(coro, "cr_frame", None) is None:
            return True
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep "Exception ignored in" and "never awaited" off stderr. Not thread-safe; the simulator has no threads."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
