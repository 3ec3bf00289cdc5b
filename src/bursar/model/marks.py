"""High-water marks: was this database, or a peer with a log of its own, restored from a backup? Pure.

A peer (a trading core, a signer) numbers what it does in its own log, and each answer carries the number. The database
keeps the highest number per peer, written by each writer with the transitions that rely on it (T33, W33). Each side can
lose its newest part, and the other one shows it: that is the one check for restores.

Not here: how the marks are stored (store/cores), what a caller does about it (refuses the peer; pauses what sends).
"""

from __future__ import annotations

from enum import StrEnum


class Restored(StrEnum):
    """Which side has forgotten something that the other one knows."""

    NEITHER = "neither"
    PEER = "peer"  # it has acknowledged what it does not know any more: nothing that it says can be relied on
    DATABASE = "database"  # the peer has done for it what it does not know: nothing new is sent before that is settled


def restored(*, mark: int, sequence: int, unknown: int = 0) -> Restored:
    """Which side was restored.

    `mark` is the highest number here, read before the peer said that its log has `sequence`. `unknown` is how many
    operations of the peer's log have no record here. A log that is merely longer proves nothing: an answer may have
    been lost, and is asked for again.
    """
    if sequence < mark:
        return Restored.PEER
    return Restored.DATABASE if unknown else Restored.NEITHER
