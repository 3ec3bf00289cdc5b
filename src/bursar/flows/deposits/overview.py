"""Sweeps, scans and the first address of rules, as operators see them.

Read from the database alone: neither nodes nor signer are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bursar.documents import Documents, UnknownDocument
from bursar.flows.deposits.rules import DepositRules, derive
from bursar.flows.deposits.scanning import SCANS, Scan
from bursar.flows.deposits.sweep import SWEEPS, Sweep
from bursar.flows.payouts.documents import CHAIN
from bursar.model.errors import UnknownRecord
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.store import Store
from bursar.store.records import NEWEST, Wanted

SWEEP_STATES = tuple(state.name for state in SWEEPS.states)


class SweepView(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep of one asset of one user's wallet."""

    id: str  # of the arrival that has begun it
    state: str
    chain: str
    wallet: str
    address: str
    asset: str
    payout: str  # that is under way, or was the last; "": none yet
    payouts: tuple[str, ...]  # all of them, those for gas among them
    failed: int  # in a row
    error: str  # why it waits
    created_us: int
    updated_us: int


class ScanView(msgspec.Struct, frozen=True, kw_only=True):
    """How a chain is scanned, as it was written down last: from time to time, and when something has arrived."""

    chain: str
    state: str
    block: int  # everything up to it is read; -1: it has not begun
    error: str  # the last trouble; it may be over
    updated_us: int


async def sweep(store: Store, id_: str) -> SweepView:
    """One sweep."""
    record = await store.read.records.get(SWEEPS.name, id_)
    if record is None:
        raise UnknownRecord(SWEEPS.name, id_)
    return _sweep(record)


async def sweeps(
    store: Store,
    *,
    states: Iterable[str] = (),
    chain: str = "",
    wallet: str = "",
    before: int = NEWEST,
    limit: int = 100,
) -> tuple[Sequence[SweepView], int]:
    """Sweeps, newest first, and the number below which the next page begins; 0: there is none."""
    wanted = Wanted(owner=wallet, states=tuple(states), facts={"chain": chain} if chain else {})
    found, after = await store.read.records.page(SWEEPS.name, wanted, before=before, limit=limit)
    return [_sweep(record) for record in found], after


async def scans(store: Store) -> list[ScanView]:
    """Of every chain, by name."""
    found = await store.read.records.list(SCANS.name, limit=1_000)
    return sorted((_scan(record) for record in found), key=lambda view: view.chain)


async def first_address(documents: Documents, chain: str, rules: DepositRules) -> str:
    """The address of user 1 under these rules, to be compared with what the signer says; "": no such chain here."""
    try:
        found = CHAIN.read(await documents.get(CHAIN, chain))
        return derive(found.kind, rules.xpub, 1)
    except (UnknownDocument, ValueError):  # a kind of chain that this program derives no addresses for
        return ""


def _sweep(record: Record) -> SweepView:
    body = msgspec.json.decode(record.body, type=Sweep)
    return SweepView(
        id=record.id,
        state=record.state,
        chain=body.chain,
        wallet=body.wallet,
        address=body.address,
        asset=body.asset,
        payout=body.payout or (body.payouts[-1] if body.payouts else ""),
        payouts=body.payouts,
        failed=body.failed,
        error=_error(record),
        created_us=record.created_us,
        updated_us=record.updated_us,
    )


def _scan(record: Record) -> ScanView:
    body = msgspec.json.decode(record.body, type=Scan)
    return ScanView(
        chain=body.chain, state=record.state, block=body.block, error=_error(record), updated_us=record.updated_us
    )


def _error(record: Record) -> str:
    """What is wrong; nothing is where a record is only not at its end."""
    return "" if record.error == Outcome.PENDING else record.error
