"""What a validated commit consists of: the envelope, its id, and the floors it has moved."""

from __future__ import annotations

import msgspec

from bursar.model.envelope import Envelope


class Plan(msgspec.Struct, frozen=True, gc=False):
    """A commit that is right on the state it was checked on."""

    envelope: Envelope
    id: bytes
    floors: tuple[tuple[int, int, int, int], ...]  # (account, asset, balance before, balance after), capped ones only
