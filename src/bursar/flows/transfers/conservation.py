"""I5: what a trading core holds is what the ledger says it holds, while both go on working.

First, whether the database has forgotten something that the core knows (`behind`): then it was restored, and money
would be in two places. Then the sums. The core's total is of one moment of its log (a sequence S), the ledger's of a
snapshot a little later. Between the two lie operations that one side has seen and the other has not: those up to S that
no transition has booked yet, and those after S that one has. Both belong to transfers that were open before the core
was asked, or were started since; their sequences tell on which side of S they are. So, per asset:

    total at S = booked in `trading:{core}` - booked operations after S + operations up to S that are not booked

On PostgreSQL a transfer may become visible after others with higher numbers, and come to its end between the two looks:
then neither look knows of it. By the next time it is known; so only a difference that stays counts.

A record that can't be read (damaged body or row) ends neither the comparison nor the watch. What it did at the core is
asked of the core, which knows asset and amount; what it booked is read from its entries. Where that is not possible
either, the record is named and counted as not judged, and all others are judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from bursar.audit import UNREADABLE, Finding, said
from bursar.engine.flow import storable
from bursar.engine.late import LATE
from bursar.flows.transfers import behind
from bursar.flows.transfers.flow import rail_name
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import SCOPE, AccountType, Transfer, core_account
from bursar.flows.transfers.transfers import Transfers
from bursar.model.envelope import decode_legs
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.rails.trading import Op, TradingClient, operation_id
from bursar.store.tables import Tables

PAGE = 1_000
LOOKS = 3  # at which a difference must have been the same
SIGNS = {Op.WITHDRAW: -1, Op.REFUND: 1, Op.DEPOSIT: 1}  # what a transfer may do at a core, and in which direction
STATES = frozenset(state.name for state in MACHINE.states)
CALLS = tuple(state.name for state in MACHINE.calls)
NAMED_MAX = 5  # unreadable records that a note names
ASKED_MAX = 1_000  # unreadable records that a core is asked about, one by one


async def cores_hold(transfers: Transfers, cores: Mapping[AccountType, TradingClient]) -> Finding:
    """I5 of all cores as one finding. Broken if it is for one of them; judged only if all of them have answered."""
    findings = [await conservation(transfers, kind, client) for kind, client in cores.items()]
    return Finding(
        invariant="I5",
        ok=all(finding.ok for finding in findings),
        checked=sum(finding.checked for finding in findings),
        broken=[text for finding in findings for text in finding.broken],
        seconds=sum(finding.seconds for finding in findings),
        judged=all(finding.judged for finding in findings),
        not_judged=sum(finding.not_judged for finding in findings),
        note="; ".join(finding.note for finding in findings if finding.note),
    )


async def conservation(
    transfers: Transfers, kind: AccountType, client: TradingClient, *, notes: bool = False
) -> Finding:
    """Compare a core with the ledger. Not judged if the core does not answer, or as far as records can't be read.

    With `notes` it also writes down how far the core's log was compared, so that the next look begins there.
    """
    monotonic = transfers.ledger.store.ports.monotonic
    started = monotonic()
    known = await behind.look(transfers.ledger.store, rail_name(kind), client)
    look = await _look(transfers, kind, client)
    for _ in range(LOOKS - 1):
        if look.away or not look.differs:
            break
        again = await _look(transfers, kind, client)
        again.differs = {asset: by for asset, by in again.differs.items() if look.differs.get(asset) == by}
        look = again
    broken = [*known.texts(), *(look.texts[asset] for asset in sorted(look.differs))]
    away = look.away or known.note
    if notes and not broken and not away and known.complete_to > known.begun_at:
        await transfers.ledger.store.single().cores.compared_to(rail_name(kind), known.complete_to)
    return Finding(
        invariant="I5",
        ok=not broken,
        checked=look.checked,
        broken=broken,
        seconds=monotonic() - started,
        judged=not away and not look.not_judged,
        not_judged=len(look.not_judged),
        note=storable(away or _named(kind, look)),
    )


class _Look(msgspec.Struct):
    """One comparison."""

    away: str = ""  # why there is none
    checked: int = 0
    differs: dict[str, int] = {}  # asset → by how much
    texts: dict[str, str] = {}
    by_core: list[str] = []  # records that can't be read, and were judged by what the core says of them
    not_judged: list[str] = []  # and those of which it can't say anything either


def _named(kind: AccountType, look: _Look) -> str:
    """Which records could not be read."""
    parts = []
    if look.not_judged:
        parts.append(
            f"core {kind}: {_some(look.not_judged)}; not judged: {len(look.not_judged)}. Repair or restore them"
        )
    if look.by_core:
        parts.append(f"{_some(look.by_core)}; judged by what core {kind} and their entries say: {len(look.by_core)}")
    return "; ".join(parts)


def _some(texts: list[str]) -> str:
    more = len(texts) - NAMED_MAX
    return "; ".join(texts[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


async def _look(transfers: Transfers, kind: AccountType, client: TradingClient) -> _Look:
    store = transfers.ledger.store
    # In this order: what is started in between is in the one or the other.
    newest = await store.read.records.list(MACHINE.name, limit=1)
    watched = set(await _open(store.read))
    totals = await client.totals()
    if totals.outcome is not Outcome.SUCCESS:
        return _Look(away=f"core {kind} does not answer: {totals.code}")
    operations: list[_Operation] = []
    unreadable: list[tuple[Record, str, Counter[str]]] = []
    look = _Look()
    async with store.snapshot(unhurried=True) as tables:
        booked = await _booked(tables, core_account(kind))
        watched |= set(await _open(tables))
        found = await _records(tables, sorted(watched), look)
        found += await _since(tables, newest[0].number if newest else 0, watched)
        for record in found:
            try:
                operations += _operations(record, kind)
            except UNREADABLE as error:
                why = f"transfer {record.id} can't be read ({said(error)})"
                try:
                    if len(unreadable) == ASKED_MAX:
                        raise ValueError("too many of them to ask the core about each")
                    unreadable.append((record, why, await _booked_by(tables, record, core_account(kind))))
                except UNREADABLE as other:
                    look.not_judged.append(f"{why}, and neither can its entries ({said(other)})")
    replies = (await client.lookup([(op.id, op.op) for op in operations])).replies
    if len(replies) != len(operations):
        return _Look(away=f"core {kind} stopped answering")
    for op, reply in zip(operations, replies, strict=True):
        if reply.outcome is Outcome.SUCCESS:
            early = reply.sequence <= totals.sequence
            booked[op.asset] += SIGNS[op.op] * op.minor * (early - op.is_booked)
    for record, why, by_entries in unreadable:
        happened = await _happened(client, record, totals.sequence)
        if happened is None:
            look.not_judged.append(f"{why}, and core {kind} can't say what it did there")
            continue
        look.by_core.append(why)
        for asset in happened.keys() | by_entries.keys():
            booked[asset] += happened[asset] - by_entries[asset]
    held = totals.totals
    look.checked = len(operations) + len(look.by_core)
    for asset in held.keys() | booked.keys():
        there, said_ = held.get(asset, 0), booked[asset]
        if there != said_:
            look.differs[asset] = there - said_
            look.texts[asset] = f"core {kind} holds {there} of {asset} at {totals.sequence}, the ledger says {said_}"
    return look


class _Operation(msgspec.Struct, frozen=True):
    """What a transfer may have done at a core, and whether the ledger has booked it."""

    id: str
    op: Op
    asset: str
    minor: int
    is_booked: bool


def _operations(record: Record, kind: AccountType) -> list[_Operation]:
    """What a transfer may have done at this core. Raises one of UNREADABLE if the record doesn't say."""
    if record.flow != MACHINE.name:
        return []  # other flows are driven in the same tables
    transfer = msgspec.json.decode(record.body, type=Transfer)
    state, disputed = record.state, transfer.disputed
    if state not in STATES:
        raise ValueError(f"its state is {state!r}")
    operation_id(record.id)  # or no core can be asked about it, and all others with it
    asset, minor = transfer.asset, transfer.minor
    found = []
    if transfer.source is kind:  # what was booked against suspense is booked, or no more
        taken = state not in ("INIT", "SOURCE_PENDING", "FAILED")
        withdrawn = taken != ("SOURCE_PENDING" in disputed)
        found.append(_Operation(record.id, Op.WITHDRAW, asset, minor, withdrawn))
        found.append(_Operation(record.id, Op.REFUND, asset, minor, state == "ROLLED_BACK"))
    if transfer.target is kind:
        deposited = (state == "COMMITTED") != ("TARGET_PENDING" in disputed)
        found.append(_Operation(record.id, Op.DEPOSIT, asset, minor, deposited))
    return found


async def _happened(client: TradingClient, record: Record, sequence: int) -> Counter[str] | None:
    """What a transfer had done at the core up to a sequence, as the core says; None if it doesn't."""
    done: Counter[str] = Counter()
    for op, sign in SIGNS.items():
        try:
            reply = await client.query(record.id, op)
        except ValueError:  # not even its id can be read
            return None
        if not reply.outcome.is_known and reply.code != "NOT_FOUND":
            return None
        if reply.outcome is Outcome.SUCCESS and reply.sequence <= sequence:
            done[reply.asset] += sign * reply.amount
    return done


async def _booked_by(tables: Tables, record: Record, path: str) -> Counter[str]:
    """What the entries of one transfer have booked at the core, found by their keys, without the record's body."""
    late = [row.version - 1 for row in await tables.records.history(record.number) if row.event.startswith(LATE)]
    keys = [f"{record.id}:{state}" for state in CALLS]
    keys += [f"{record.id}:{state}:late:{version}" for state in CALLS for version in late]
    head = (await tables.accounts.heads([path])).get(path)
    codes = {asset.id: code for code, asset in (await tables.rules.assets()).items()}
    sums: Counter[str] = Counter()
    for entry in (await tables.envelopes.existing([(SCOPE, key) for key in keys])).values():
        for leg in decode_legs(entry.legs):
            into = (head is not None and leg.target == head.id) - (head is not None and leg.source == head.id)
            sums[codes[leg.asset]] += into * leg.minor
    return sums


async def _records(tables: Tables, numbers: list[int], look: _Look) -> list[Record]:
    """Records by number; a row that can't be read at all is noted."""
    found: list[Record] = []
    for start in range(0, len(numbers), PAGE):
        page = numbers[start : start + PAGE]
        try:
            found += await tables.records.by_numbers(page)
        except UNREADABLE:  # one of them, or several: which?
            for number in page:
                try:
                    found += await tables.records.by_numbers([number])
                except UNREADABLE as error:
                    look.not_judged.append(f"record {number} can't be read ({said(error)})")
    return found


async def _open(tables: Tables) -> list[int]:
    """Numbers of all records that are open."""
    found: list[int] = []
    while page := await tables.checks.open_records(found[-1] if found else 0, PAGE):
        found += [number for number, _ in page]
    return found


async def _since(tables: Tables, newest: int, known: set[int]) -> list[Record]:
    """Transfers that were started after a number."""
    found: list[Record] = []
    before = 2**63 - 1
    while page := await tables.records.list(MACHINE.name, before=before, limit=PAGE):
        found += [record for record in page if record.number > newest and record.number not in known]
        before = page[-1].number
        if before <= newest:
            break
    return found


async def _booked(tables: Tables, path: str) -> Counter[str]:
    """What the ledger has booked at the core, by asset code."""
    head = (await tables.accounts.heads([path])).get(path)
    codes = {asset.id: code for code, asset in (await tables.rules.assets()).items()}
    sums = {} if head is None else await tables.balances.of(head.id)
    return Counter({codes[asset]: total for asset, (total, _) in sums.items()})
