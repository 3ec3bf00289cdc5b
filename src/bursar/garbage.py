"""How often Python's garbage collector runs, in programs of ours.

A batch of entries, or a frame of a core, is thousands of small objects that live for a moment. By default the collector
scans them several times per batch, and finds nothing: it takes a twentieth of the time. While modules are loaded it
takes a tenth: what they make stays. The library does not change this; our programs do, and users' programs may.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)


def while_loading() -> None:
    """Collect rarely from here on: call it when a program begins."""
    gc.set_threshold(*THRESHOLDS)


def relax_gc(young: int = THRESHOLDS[0]) -> None:
    """Collect rarely, and never scan what is loaded now: call it when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, *THRESHOLDS[1:])
