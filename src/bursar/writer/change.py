"""A change: what one caller wants to happen, all of it or nothing."""

from __future__ import annotations

import msgspec

from bursar.model.entries import Intent


class Change(msgspec.Struct, frozen=True, gc=False):
    """All or nothing, for one caller."""

    intents: tuple[Intent, ...]
