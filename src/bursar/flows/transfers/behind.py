"""Is this database behind a core? It is if it was restored from a backup, and then money would exist twice.

Every transfer is written here before a core hears of it. So each operation in a core's log has a record here, unless
the database has lost it. How far that was seen to be true is written down (`cores.compared`): only what comes behind it
has to be compared, and a backup that contains the mark contains the records below it. (The high-water mark of T33 would
not do: after a restore, a transfer of old goes on and raises it above operations that are missing.) The same is true of
floors: they are written here before the core is asked (T32). No operator has to say that there was a restore: the
core's own log shows it, at the first look.
"""

from __future__ import annotations

import msgspec

from bursar.flows.transfers.machine import MACHINE
from bursar.model.marks import Restored, restored
from bursar.model.outcome import Outcome
from bursar.rails.trading import Floors, OperationRow, TradingClient
from bursar.rails.trading.rules import PREFIX, Code
from bursar.store import Store
from bursar.store.cores import CoreRow

SHOWN_MAX = 20
OK = Code.OK.name


class Behind(msgspec.Struct, kw_only=True):
    """What a core knows and this database does not."""

    rail: str
    note: str = ""  # why that can't be said
    missing: list[OperationRow] = []  # operations of the core whose transfer has no record here
    floors: str = ""  # what the core's floors say, if they are higher than the ones here
    begun_at: int = 0  # the sequence up to which the core's log had been compared before
    complete_to: int = 0  # and up to which it was compared now
    mark: int = 0  # the highest sequence of the core that this database relies on
    sequence: int = 0  # of the core's log

    @property
    def restored(self) -> Restored:
        """Which of the two has forgotten something."""
        unknown = len(self.missing) + bool(self.floors)
        return restored(mark=self.mark, sequence=self.sequence, unknown=unknown)

    @property
    def is_behind(self) -> bool:
        """Whether this database has forgotten something."""
        return self.restored is Restored.DATABASE

    def texts(self) -> list[str]:
        """The same in words, each a line."""
        found = [f"core {self.rail} is ahead of this database: {line(row)}" for row in self.missing[:SHOWN_MAX]]
        if len(self.missing) > SHOWN_MAX:
            found.append(f"core {self.rail}: and {len(self.missing) - SHOWN_MAX} more operations without a record here")
        return found + ([self.floors] if self.floors else [])


def line(row: OperationRow) -> str:
    """An operation of a core, in words."""
    what = f"{PREFIX}{row.id} {row.op.name} of {row.amount} {row.asset} for user {row.user}"
    said = "" if row.code == OK else f", refused: {row.code}"
    return f"{what} (sequence {row.sequence}{said}) has no record here"


async def look(store: Store, rail: str, client: TradingClient) -> Behind:
    """Compare a core's log, as far as it was not compared before, with the records here."""
    known = await store.read.cores.get(rail)
    after, end = 0 if known is None else known.compared, -1
    mark = 0 if known is None else max(known.sequence, known.compared)
    found = Behind(rail=rail, missing=[], begun_at=after, mark=mark)
    while end < 0 or after < end:
        listed = await client.operations(after)
        if listed.outcome is not Outcome.SUCCESS:
            return Behind(rail=rail, note=f"core {rail} does not answer: {listed.code}")
        end = listed.sequence if end < 0 else end  # what comes later has its record, or will be seen next time
        # Read after the core has answered: whatever it did by then had its record before.
        ids = sorted({f"{PREFIX}{row.id}" for row in listed.items})
        here = await store.read.cores.known(MACHINE.name, ids) if ids else set()
        found.missing += [row for row in listed.items if f"{PREFIX}{row.id}" not in here]
        if listed.complete_to <= after:
            break
        after = listed.complete_to
    found.complete_to, found.sequence = after, end
    if found.restored is Restored.PEER:  # of no use before its newest part is back: what it lists is not all
        return Behind(rail=rail, note=f"core {rail} is at {end}, and {mark} was acknowledged here: restore its log")
    there = client.floors
    if _above(there, known):
        # Read again, after the core has said them: another process may have raised both meanwhile, this database's
        # first; and the first contact may just have bound the core to a database that had never heard of it.
        known = await store.read.cores.get(rail)
    if known is not None and _above(there, known):
        found.floors = (
            f"core {rail} has forgotten more than this database allowed: its floors are {there.room} and "
            f"{there.forget}, here they are {known.room} and {known.forget}"
        )
    return found


def _above(there: Floors, known: CoreRow | None) -> bool:
    """Whether a core's floors are above those that are written here; none are, before the first contact."""
    room, forget = (1, 1) if known is None else (known.room, known.forget)
    return there.room > room or there.forget > forget
