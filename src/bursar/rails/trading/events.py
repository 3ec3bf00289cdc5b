"""Events: what the core's log says, one by one, for its subscribers.

Every record with a sequence is an event, refusals too, so that a follower can tell a gap from silence: sequences are
contiguous. Events leave the core only when they are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from bursar.rails.trading.journal import Bound, FloorsRaised, JournalRecord, NewAsset, OperationBlocks, StatusChange
from bursar.rails.trading.rules import Op, Status, code_name

STATUS: Final = 20
FLOORS: Final = 21
BOUND: Final = 22

# kind, sequence, id, user, asset, amount, other, answer
Wire = tuple[int, int, int, int, str, int, int, int]


class Event(msgspec.Struct, frozen=True):
    """One thing that is on record in the core."""

    sequence: int
    kind: str  # an operation (`DEPOSIT`, …), `STATUS`, `FLOORS` or `BOUND`
    id: int = 0  # of the operation; the floor below which all is forgotten
    user: int = 0
    asset: str = ""  # the ledger to which the core was bound
    amount: int = 0
    other: int = 0  # whom a settlement paid; the floor below which no room is reserved
    code: str = "OK"  # or the refusal, or the account's new status

    @property
    def happened(self) -> bool:
        """Whether balances moved."""
        return self.code == "OK" and self.kind in Op.__members__


def to_wire(records: Iterable[JournalRecord], after: int, asset_code: Callable[[int], str]) -> list[Wire]:
    """The events in journal records, behind a sequence."""
    found: list[Wire] = []
    for record in records:
        match record:
            case OperationBlocks(blocks):
                found += [
                    (meta >> 8 & 0xFF, sequence, id_, user, asset_code(meta >> 16), amount, other, meta & 0xFF)
                    for block in blocks
                    for sequence, id_, user, amount, other, meta in block.rows()
                    if sequence > after
                ]
            case StatusChange(sequence, user, status) if sequence > after:
                found.append((STATUS, sequence, 0, user, "", 0, 0, status))
            case FloorsRaised(sequence, room, forget) if sequence > after:
                found.append((FLOORS, sequence, forget, 0, "", 0, room, 0))
            case Bound(sequence, ledger) if sequence > after:
                found.append((BOUND, sequence, 0, 0, ledger, 0, 0, 0))
            case NewAsset() | StatusChange() | FloorsRaised() | Bound():
                pass
    return found


def from_wire(wire: Wire) -> Event:
    """An event as the client hands it out."""
    kind, sequence, id_, user, asset, amount, other, code = wire
    if kind == STATUS:
        return Event(sequence, "STATUS", user=user, code=Status(code).name)
    if kind == FLOORS:
        return Event(sequence, "FLOORS", id=id_, other=other)
    if kind == BOUND:
        return Event(sequence, "BOUND", asset=asset)
    return Event(sequence, Op(kind).name, id_, user, asset, amount, other, code_name(code))
