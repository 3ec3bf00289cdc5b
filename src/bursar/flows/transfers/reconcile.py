"""After a restore: write down again what the cores have done and this database has forgotten.

A core's log is evidence. Each operation that happened there and has no record here gets one, ended, and the ledger
books what the core holds because of it: a deposit at a core came from the user's funding account, a withdraw went
there. Refused and cancelled operations moved nothing and get no record. So the same money is not in two places any
more, and what a core holds is again what the ledger says (I5).

What can't be known again is who asked for it under which `client_order_id`: a request that is repeated with one from
after the backup is a new request. And a user who was given money from outside after the backup lacks it here until that
deposit is entered again, under the same reference; until then what he moved comes out of `suspense:transfers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bursar.flows.transfers import behind
from bursar.flows.transfers.flow import rail_name
from bursar.flows.transfers.link import CoreUnusable
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import SCOPE, SUSPENSE, AccountType, Transfer, core_account, funding_account
from bursar.ledger import Ledger
from bursar.model.actors import check_actor, check_reason
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.errors import RecordMoved, Refusal, UnknownAsset
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.rails.trading import Op, OperationRow, TradingClient
from bursar.rails.trading.rules import PREFIX
from bursar.writer import Change, Move, NewTransition

RECONCILED = "RECONCILED"
Done = tuple[AccountType, OperationRow]  # what happened, and at which core


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One forgotten transfer, as it is written down again."""

    id: str
    transfer: Transfer
    state: str  # its end
    source: str  # accounts between which the ledger books it; both empty: nothing has moved
    target: str
    done: tuple[Done, ...]

    def text(self) -> str:
        """In words, in a line."""
        moved = f"{self.source} → {self.target}" if self.source else "nothing to book"
        t = self.transfer
        return f"{self.id}: {t.source} → {t.target}, {t.minor} {t.asset} of user {t.user}, {self.state}; {moved}"


def plan(id_: int, done: Sequence[Done], assets: Mapping[str, Asset]) -> Plan | None:
    """How a transfer ended of which only the cores know; None if nothing of it has happened anywhere. Pure."""
    happened = [(kind, row) for kind, row in done if row.code == behind.OK]
    if not happened:
        return None
    by_op = {row.op: kind for kind, row in happened}
    row = happened[0][1]
    source = by_op.get(Op.WITHDRAW, AccountType.FUNDING)
    target = by_op.get(Op.DEPOSIT, AccountType.FUNDING)
    transfer = Transfer(
        user=row.user,
        source=source,
        target=target,
        asset=row.asset,
        asset_id=assets[row.asset].id,
        amount=str(row.amount),
    )
    gave_back = Op.REFUND in by_op
    user = funding_account(row.user)
    ends = [user if kind is AccountType.FUNDING else core_account(kind) for kind in (source, target)]
    if gave_back:
        ends = ["", ""]
    return Plan(
        id=f"{PREFIX}{id_}",
        transfer=transfer,
        state="ROLLED_BACK" if gave_back else "COMMITTED",
        source=ends[0],
        target=ends[1],
        done=tuple(happened),
    )


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one of them."""

    id: str
    text: str
    suspense: bool = False  # the user's account does not have it: it came out of suspense


class Report(msgspec.Struct, kw_only=True):
    """What is behind, and what was done about it."""

    found: list[behind.Behind]
    plans: list[Plan]
    unknown: list[str] = []  # assets that were created after the backup: transfers of them have no plan yet
    done: list[Reconciled] = []


async def survey(ledger: Ledger, cores: Mapping[AccountType, TradingClient]) -> Report:
    """Ask every core what it knows and this database does not. All must answer: a transfer may be at two of them."""
    found = [await behind.look(ledger.store, rail_name(kind), client) for kind, client in cores.items()]
    if silent := [one.note for one in found if one.note]:
        raise CoreUnusable(f"{'; '.join(silent)}; every core has to be asked before anything is booked")
    by_id: dict[int, list[Done]] = {}
    for kind, one in zip(cores, found, strict=True):
        for row in one.missing:
            by_id.setdefault(row.id, []).append((kind, row))
    of_id = {id_: {row.asset for _, row in done if row.code == behind.OK} for id_, done in by_id.items()}
    codes = {code for some in of_id.values() for code in some}
    assets = await ledger.known_assets(*codes)
    named = [(id_, done) for id_, done in by_id.items() if of_id[id_] <= assets.keys()]
    plans = [made for id_, done in named if (made := plan(id_, done, assets)) is not None]
    return Report(found=found, plans=plans, unknown=sorted(codes - assets.keys()))


async def reconcile(ledger: Ledger, cores: Mapping[AccountType, TradingClient], *, actor: str, reason: str) -> Report:
    """Write all of it down. Twice is once; a crash in the middle leaves the rest to be done again."""
    by = (check_actor(actor), check_reason(reason))
    report = await survey(ledger, cores)
    if report.unknown:  # before anything is booked: what is compared at the end is all of it
        raise UnknownAsset(report.unknown[0])
    left = report.plans
    # One may pay with what another brings: those that a user's account can't pay are tried again after the others.
    while left:
        refused = []
        for made in left:
            await _never_arrives(made, cores)
            done = await _write(ledger, made, made.source, made.target, *by)
            report.done += [] if done is None else [done]
            refused += [made] if done is None else []
        if len(refused) == len(left):
            break
        left = refused
    for made in left:
        source, target = (SUSPENSE if path.startswith("user:") else path for path in (made.source, made.target))
        done = await _write(ledger, made, source, target, *by)
        assert done is not None  # neither suspense nor a core's account has a floor, and none of them is ever frozen
        report.done.append(
            msgspec.structs.replace(done, suspense=True, text=f"{done.text}; booked {source} → {target}")
        )
    tables = ledger.store.single().cores
    for kind, one in zip(cores, report.found, strict=True):
        # Last: as long as this is not written, the next look finds what is missing again.
        rail = rail_name(kind)
        await tables.raise_floors(rail, cores[kind].floors.room, cores[kind].floors.forget)
        await tables.compared_to(rail, one.complete_to)
    return report


async def _never_arrives(made: Plan, cores: Mapping[AccountType, TradingClient]) -> None:
    """What left a core is given to the user in funding: it must not arrive at another core as well (T34)."""
    if made.transfer.target is not AccountType.FUNDING or made.transfer.source is AccountType.FUNDING:
        return
    for kind, client in cores.items():
        if kind is not made.transfer.source:
            said = await client.cancel(made.id, Op.DEPOSIT)
            if said.outcome is not Outcome.EXPLICIT_FAIL:
                why = f"core {rail_name(kind)} does not promise that {made.id} never arrives there: {said.code}"
                raise CoreUnusable(f"{why}; repeat this")


async def _write(ledger: Ledger, made: Plan, source: str, target: str, actor: str, reason: str) -> Reconciled | None:
    """Write one of them down; None if an account refuses it."""
    try:
        await ledger.writer.apply(_change(made, source, target, actor, reason))
    except RecordMoved:
        return Reconciled(id=made.id, text=f"{made.id} is written down already")
    except Refusal:
        return None
    return Reconciled(id=made.id, text=made.text())


def _change(made: Plan, source: str, target: str, actor: str, reason: str) -> Change:
    evidence = {
        "actor": actor,
        "reason": reason,
        "rows": [[rail_name(kind), *msgspec.to_builtins(row)] for kind, row in made.done],
    }
    move = Move(
        flow=MACHINE.name,
        id=made.id,
        version=0,
        transitions=(NewTransition("", RECONCILED, made.state, msgspec.json.encode(evidence).decode()),),
        actor=actor,
        delay_us=None,
        body=msgspec.json.encode(made.transfer).decode(),
        owner=str(made.transfer.user),
    )
    if not source:
        return Change(moves=(move,))
    leg = Leg(source, target, made.transfer.asset, made.transfer.minor)
    intent = Intent(scope=SCOPE, key=f"{made.id}:{RECONCILED}", legs=(leg,), kind=EntryKind.RETURN, outside=True)
    return Change(intents=(intent,), moves=(move,))
