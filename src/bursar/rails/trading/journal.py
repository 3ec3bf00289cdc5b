"""Journal records: what the core decided and has to have on disk before it answers (write-ahead log).

`CoreState` makes them, `frames` writes and reads their bytes, and `CoreState.replay` applies them. Each has a sequence
of its own, or one for each of its rows, without a gap; only a new asset has none.
"""

from __future__ import annotations

from typing import NamedTuple

from bursar.rails.trading.history import Block


class NewAsset(NamedTuple):
    """From now on this number stands for this asset. Has no sequence of its own."""

    number: int
    code: str


class OperationBlocks(NamedTuple):
    """Operations, executed or refused."""

    blocks: list[Block]

    @property
    def sequence(self) -> int:
        """Of the first of them."""
        return self.blocks[0].sequence


class StatusChange(NamedTuple):
    """An account is active, frozen or disabled."""

    sequence: int
    user: int
    status: int


class FloorsRaised(NamedTuple):
    """Two ids below which, but for those kept, less is promised than above.

    Below `room`, withdraws no longer reserve room for their refund. Below `forget`, everything is forgotten and nothing
    is executed (T32). `forget` is never above `room`.
    """

    sequence: int
    room: int
    forget: int
    keep: tuple[int, ...]


class Bound(NamedTuple):
    """This core works for one ledger, from now on and for ever."""

    sequence: int
    ledger: str


JournalRecord = NewAsset | OperationBlocks | StatusChange | FloorsRaised | Bound
