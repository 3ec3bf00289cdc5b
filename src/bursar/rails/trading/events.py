"""Events: what the core's log says, one by one, for whoever follows it.

Every note with a sequence is an event, refusals too, so that a follower can tell a gap from silence: sequences are
contiguous. Events leave the core only when they are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from bursar.rails.trading.book import FloorRaised, NewAsset, Note, Rows, StatusChange
from bursar.rails.trading.words import Op, Status, code_name

STATUS: Final = 20
FLOOR: Final = 21

# kind, sequence, id, user, asset, amount, other, answer
Wire = tuple[int, int, int, int, str, int, int, int]


class Event(msgspec.Struct, frozen=True):
    """One thing that is on record in the core."""

    sequence: int
    kind: str  # an operation (`DEPOSIT`, …), `STATUS` or `FLOOR`
    id: int = 0  # of the operation; the floor's new height
    user: int = 0
    asset: str = ""
    amount: int = 0
    other: int = 0  # whom a settlement paid
    code: str = "OK"  # or the refusal, or the account's new status

    @property
    def happened(self) -> bool:
        """Whether balances moved."""
        return self.code == "OK" and self.kind in Op.__members__


def to_wire(notes: Iterable[Note], after: int, asset_code: Callable[[int], str]) -> list[Wire]:
    """The events in notes, behind a sequence."""
    found: list[Wire] = []
    for note in notes:
        match note:
            case Rows(blocks):
                found += [
                    (meta >> 8 & 0xFF, sequence, id_, user, asset_code(meta >> 16), amount, other, meta & 0xFF)
                    for block in blocks
                    for sequence, id_, user, amount, other, meta in block.rows()
                    if sequence > after
                ]
            case StatusChange(sequence, user, status) if sequence > after:
                found.append((STATUS, sequence, 0, user, "", 0, 0, status))
            case FloorRaised(sequence, floor) if sequence > after:
                found.append((FLOOR, sequence, floor, 0, "", 0, 0, 0))
            case NewAsset() | StatusChange() | FloorRaised():
                pass
    return found


def from_wire(wire: Wire) -> Event:
    """An event as the client hands it out."""
    kind, sequence, id_, user, asset, amount, other, code = wire
    if kind == STATUS:
        return Event(sequence, "STATUS", user=user, code=Status(code).name)
    if kind == FLOOR:
        return Event(sequence, "FLOOR", id=id_)
    return Event(sequence, Op(kind).name, id_, user, asset, amount, other, code_name(code))
