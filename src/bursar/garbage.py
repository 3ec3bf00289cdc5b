"""How often Python's garbage collector runs in programs of ours, and how often memory goes back to the kernel.

A batch of entries, or a frame of a core, is thousands of small objects that live for a moment. By default the collector
scans them several times per batch, and finds nothing: it takes a twentieth of the time. While modules are loaded it
takes a tenth: what they make stays. The library does not change this; our programs do, and users' programs may.

SQLite takes 90 KB for each of its temporary tables, and frees them with the statement. The C library of Linux begins by
giving back at once whatever is over 128 KB: each such statement takes pages from the kernel anew, which clears them.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)
KEPT_BYTES = 24 << 20


def while_loading() -> None:
    """Collect rarely from here on: call it when a program begins."""
    gc.set_threshold(*THRESHOLDS)


def relax_gc(young: int = THRESHOLDS[0]) -> None:
    """Collect rarely, never scan what is loaded now, and keep memory: call it when everything is loaded."""
    keep_memory()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, *THRESHOLDS[1:])


def keep_memory() -> None:
    """Have the C library keep what is freed, up to twice this much: it raises its threshold to what it has seen freed.

    Never touched, these bytes are never there. Elsewhere than in glibc this does nothing.
    """
    bytes(KEPT_BYTES)
