"""How often Python looks for garbage, in a process that is ours.

A group of entries, or a frame of a core, is thousands of small objects that live for a moment. Left alone, the
collector walks over them several times per group, and finds nothing: it takes a twentieth of the time. While modules
are loaded it takes a tenth: whatever they make stays. A library does not touch this; a program that is ours does, and
others may.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)


def while_loading() -> None:
    """Look for garbage rarely from here on: call it when a program begins."""
    gc.set_threshold(*THRESHOLDS)


def relax_gc(young: int = THRESHOLDS[0]) -> None:
    """Look for garbage rarely, and never among what is there now: call it when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, *THRESHOLDS[1:])
