"""A record that can't be read ends neither the conservation watch nor an audit: it is named, the others are judged.

What an unreadable transfer did at a core is asked of the core, and what it booked is read from its entries; only where
that is not possible it counts as not judged. A core that holds too much is found all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_contradictions import Held, decided, started
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, behind, exchange

from bursar.audit import audit
from bursar.flows.deposits import Deposits
from bursar.flows.transfers import AccountType, Transfers
from bursar.flows.transfers.conservation import conservation, cores_hold
from bursar.flows.transfers.watch import watch
from bursar.model.errors import DatabaseCorrupt
from bursar.model.outcome import Outcome

both = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
sqlite_only = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)  # PostgreSQL stores nothing but UTF-8

NO_TRANSFER = """'{{"user": "nobody"}}'"""
BODIES = {
    "another shape": NO_TRANSFER,
    "no amount": """'{{"user":1,"source":"SPOT","target":"FUNDING","asset":"USDT","asset_id":1,"amount":"x"}}'""",
}
UNITS = 10**6


async def stuck(here: Any, place: Place, source: str, target: str, *, executed: bool, body: str) -> str:
    """A transfer that waits for the core's answer to its first call there, and can't be read any more."""
    op = "deposit" if target == SPOT else "withdraw"
    answers: list[Any] = [(Outcome.TIMEOUT,)] if executed else [Outcome.TIMEOUT]
    here.break_rail(AccountType.SPOT, op, *answers * 1_000)
    view = await here.move(source, target, "3")
    assert view.state == "PENDING"
    await here.transfers.engine.finish(10)
    await behind(place, f"UPDATE {{s}}records SET body = {body} WHERE id = '{view.req_id}'")
    return str(view.req_id)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("way", [(FUNDING, SPOT), (SPOT, FUNDING)], ids=["to the core", "from the core"])
@both
@scenario
async def test_an_unreadable_transfer_is_judged_by_what_the_core_says(
    place: Place, tmp_path: Path, way: tuple[str, str], executed: bool, body: str
) -> None:
    """The core has executed it and no transition has booked it, or it has not: I5 holds, and the record is named."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        await here.move(FUNDING, SPOT, "20")
        req_id = await stuck(here, place, *way, executed=executed, body=body)
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        assert (finding.broken, finding.judged, finding.not_judged) == ([], True, 0)
        assert f"transfer {req_id} can't be read" in finding.note
        await client.deposit(1, ALICE, "USDT", 7)
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        ahead, text = finding.broken
        assert "has no record here" in ahead  # and nobody has asked for it
        held = 20 * UNITS + (3 * UNITS if way[1] == SPOT else -3 * UNITS) * executed
        assert f"holds {held + 7} of USDT" in text and f"says {held}" in text


@both
@scenario
async def test_a_disputed_transfer_that_cannot_be_read_is_judged_by_its_entries(place: Place, tmp_path: Path) -> None:
    """Forced back, and then the core said that it had happened: booked against suspense, which only entries tell."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        held = Held(here, "deposit", after=True)
        view, going = await started(here, FUNDING, SPOT, held)
        await decided(here, view, "EXPLICIT_FAIL", "ROLLED_BACK")
        held.go.set()
        await going
        now = "now()" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}records SET body = {NO_TRANSFER}, due = {now} WHERE id = '{view.req_id}'")
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        assert (finding.broken, finding.judged) == ([], True)
        assert f"transfer {view.req_id} can't be read" in finding.note


@both
@scenario
async def test_a_transfer_that_nobody_can_ask_about_is_named_and_not_judged(place: Place, tmp_path: Path) -> None:
    """Its id is lost too: it counts as not judged, an alert is raised, and everything else is still judged and told."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        await here.move(FUNDING, SPOT, "20")
        req_id = await stuck(here, place, FUNDING, SPOT, executed=False, body=NO_TRANSFER)
        await behind(place, f"UPDATE {{s}}records SET id = 'lost' WHERE id = '{req_id}'")
        finding = await cores_hold(here.transfers, {AccountType.SPOT: client})
        assert (finding.ok, finding.judged, finding.not_judged) == (True, False, 1)
        assert "transfer lost can't be read" in finding.note
        await watch(here.transfers, {AccountType.SPOT: client})
        reasons = {alert.reason for alert in await here.bursar.store.read.alerts.open()}
        assert "I5 can't be judged" in reasons and "I5 is broken" not in reasons
        await client.deposit(1, ALICE, "USDT", 7)
        await watch(here.transfers, {AccountType.SPOT: client})
        reasons = {alert.reason for alert in await here.bursar.store.read.alerts.open()}
        assert "I5 is broken" in reasons


@pytest.mark.parametrize("column", ["state", "id", "owner", "worker", "body", "error"])
@sqlite_only
@scenario
async def test_a_row_that_is_no_text_hides_no_other(place: Place, tmp_path: Path, column: str) -> None:
    """SQLite keeps whatever bytes the disk gives back: one such row must not fail the statements that read all rows."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        await here.move(FUNDING, SPOT, "20")
        req_id = await stuck(here, place, FUNDING, SPOT, executed=True, body=NO_TRANSFER)
        await behind(place, f"UPDATE {{s}}records SET {column} = CAST(x'ff00fe' AS TEXT) WHERE id = '{req_id}'")
        findings = await watch(here.transfers, {AccountType.SPOT: client})
        assert [finding.invariant for finding in findings] == ["I1", "I4", "I5"]
        assert findings[2].not_judged == (column == "id")
        assert {f.invariant for f in await audit(here.bursar.store)} == {"I1", "I2", "I3", "I4", "I7", "I8"}
        engine = here.transfers.engine
        claimed = await engine.store.single().records.claim_all(["transfers"], engine.worker, 10, 1, 0)
        assert len(claimed) == 1


@both
@scenario
async def test_one_core_that_cannot_be_compared_hides_no_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        other = await here.core.client()
        await here.move(FUNDING, SPOT, "20")
        await client.deposit(1, ALICE, "USDT", 7)

        async def nonsense() -> None:
            raise AssertionError("a mistake of ours")

        monkeypatch.setattr(other, "totals", nonsense)
        findings = await watch(here.transfers, {AccountType.FUTURE: other, AccountType.SPOT: client})
        assert [(f.ok, f.judged) for f in findings[2:]] == [(True, False), (False, True)]
        reasons = {alert.reason for alert in await here.bursar.store.read.alerts.open()}
        assert {"I5 is broken", "I5 can't be judged"} <= reasons


DAMAGES = [
    ("envelopes", "consumes", "x'ff'"),
    ("envelopes", "reverses", "-1"),
    ("envelopes", "key", "CAST(x'ff00fe' AS TEXT)"),
    ("transitions", "event", "CAST(x'ff00fe' AS TEXT)"),
    ("books", "assets", "'x'"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=[f"{table}.{column}" for table, column, _ in DAMAGES])
@sqlite_only
@scenario
async def test_a_damaged_row_is_named_and_never_an_unexpected_error(
    place: Place, tmp_path: Path, damage: tuple[str, str, str]
) -> None:
    """An audit finds it, or says by a typed error what can't be read; the watch compares the core all the same."""
    table, column, value = damage
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        await here.move(FUNDING, SPOT, "20")
        await stuck(here, place, FUNDING, SPOT, executed=False, body=NO_TRANSFER)
        last = "" if table == "transitions" else f"WHERE rowid = (SELECT max(rowid) FROM {table})"
        await behind_our_back(place, f"UPDATE {{s}}{table} SET {column} = {value} {last}")
        async with place.bursar() as fresh:  # knows nothing yet
            transfers = Transfers(fresh.ledger, {AccountType.SPOT: client})
            try:
                found = {finding.invariant for finding in await audit(fresh.store) if not finding.ok}
                assert bool(found) == (table == "envelopes")
            except DatabaseCorrupt as error:
                assert table == "books" and "main" in str(error)
            assert (await watch(transfers, {AccountType.SPOT: client}))[-1].invariant == "I5"
            await client.deposit(1, ALICE, "USDT", 7)
            assert not (await watch(transfers, {AccountType.SPOT: client}))[-1].ok


@both
@scenario
async def test_a_deposit_that_cannot_be_read_hides_no_other(place: Place, tmp_path: Path) -> None:
    """Those that wait for a second person are listed, as far as they can be read."""
    async with exchange(place, tmp_path) as here:
        deposits = Deposits(here.transfers, confirm_above={"USDT": 0})
        for name in ("one", "two", "three"):
            await deposits.ask(ALICE, "USDT", "5", reference=name, actor="anna")
        await behind(place, f"UPDATE {{s}}records SET body = {NO_TRANSFER} WHERE id = 'two'")
        assert [view.reference for view in await deposits.waiting()] == ["three", "one"]
