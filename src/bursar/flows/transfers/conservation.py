"""I5: what a trading core holds is what the ledger says it holds, while both go on working.

The core's total is of one moment of its log (a sequence S), the ledger's of a snapshot a little later. Between the two
lie operations that one side has seen and the other has not: those up to S that no transition has booked yet, and those
after S that one has. Both belong to transfers that were open before the core was asked, or were started since; their
sequences tell on which side of S they are. So, per asset:

    total at S = booked in `trading:{core}` - booked operations after S + operations up to S that are not booked

On PostgreSQL a transfer may become visible after others with higher numbers, and come to its end between the two looks:
then neither look knows of it. By the next time it is known; so only a difference that stays counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from bursar.audit import Finding, audit
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, Transfer, core_account
from bursar.flows.transfers.transfers import Transfers
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.rails.trading import Op, TradingClient
from bursar.store.tables import Tables

PAGE = 1_000
LOOKS = 3  # at which a difference must have been the same
CONSERVED = ("I1", "I4")  # beside I5, and cheap enough to be looked at all the time


async def watch(transfers: Transfers, cores: Mapping[AccountType, TradingClient]) -> list[Finding]:
    """Check what must be conserved. If it is not: people are told, and no new transfers are started until one of them
    resumes; those under way go on, and so do refunds."""
    findings = await audit(transfers.ledger.store, only=CONSERVED)
    findings += [await conservation(transfers, kind, client) for kind, client in cores.items()]
    for finding in findings:
        if finding.ok:
            continue
        message = f"{finding.meaning}: {'; '.join(finding.broken[:3])}"
        await transfers.engine.alert(None, f"{finding.invariant} is broken", "critical", message)
        await transfers.stop_new("audit", f"{finding.invariant} is broken")
    return findings


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
        note="; ".join(finding.note for finding in findings if finding.note),
    )


async def conservation(transfers: Transfers, kind: AccountType, client: TradingClient) -> Finding:
    """Compare a core with the ledger. Not judged if the core does not answer."""
    monotonic = transfers.ledger.store.ports.monotonic
    started = monotonic()
    look = await _look(transfers, kind, client)
    for _ in range(LOOKS - 1):
        if look.note or not look.differs:
            break
        again = await _look(transfers, kind, client)
        again.differs = {asset: by for asset, by in again.differs.items() if look.differs.get(asset) == by}
        look = again
    broken = [look.texts[asset] for asset in sorted(look.differs)]
    return Finding(
        invariant="I5",
        ok=not broken,
        checked=look.checked,
        broken=broken,
        seconds=monotonic() - started,
        judged=not look.note,
        note=look.note,
    )


class _Look(msgspec.Struct):
    """One comparison."""

    note: str = ""  # why there is none
    checked: int = 0
    differs: dict[str, int] = {}  # asset → by how much
    texts: dict[str, str] = {}


async def _look(transfers: Transfers, kind: AccountType, client: TradingClient) -> _Look:
    store = transfers.ledger.store
    # In this order: what is started in between is in the one or the other.
    newest = await store.read.records.list(MACHINE.name, limit=1)
    watched = set(await _open(store.read))
    totals = await client.totals()
    if totals.outcome is not Outcome.SUCCESS:
        return _Look(note=f"core {kind} does not answer: {totals.code}")
    async with store.snapshot(unhurried=True) as tables:
        booked = await _booked(tables, core_account(kind))
        watched |= set(await _open(tables))
        found = [record for number in sorted(watched) if (record := await tables.records.by_number(number)) is not None]
        found += await _since(tables, newest[0].number if newest else 0, watched)
    operations = [pair for record in found for pair in _operations(record, kind)]
    replies = (await client.lookup([(record.id, op) for record, op, _, _ in operations])).replies
    if len(replies) != len(operations):
        return _Look(note=f"core {kind} stopped answering")
    for (_, _, transfer, (sign, is_booked)), reply in zip(operations, replies, strict=True):
        if reply.outcome is Outcome.SUCCESS:
            early = reply.sequence <= totals.sequence
            booked[transfer.asset] += sign * transfer.minor * (early - is_booked)
    held = totals.totals
    look = _Look(checked=len(operations))
    for asset in held.keys() | booked.keys():
        there, said = held.get(asset, 0), booked[asset]
        if there != said:
            look.differs[asset] = there - said
            look.texts[asset] = f"core {kind} holds {there} of {asset} at {totals.sequence}, the ledger says {said}"
    return look


def _operations(record: Record, kind: AccountType) -> Iterable[tuple[Record, Op, Transfer, tuple[int, bool]]]:
    """What a transfer may have done at this core, in which direction, and whether the ledger has booked it."""
    if record.flow != MACHINE.name:
        return  # other flows are driven in the same tables
    transfer = msgspec.json.decode(record.body, type=Transfer)
    state, disputed = record.state, transfer.disputed  # what was booked against suspense is booked, or no more
    if transfer.source is kind:
        taken = state not in ("INIT", "SOURCE_PENDING", "FAILED")
        yield record, Op.WITHDRAW, transfer, (-1, taken != ("SOURCE_PENDING" in disputed))
        yield record, Op.REFUND, transfer, (1, state == "ROLLED_BACK")
    if transfer.target is kind:
        yield record, Op.DEPOSIT, transfer, (1, (state == "COMMITTED") != ("TARGET_PENDING" in disputed))


async def _open(tables: Tables) -> list[int]:
    """Numbers of all records that somebody drives."""
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
