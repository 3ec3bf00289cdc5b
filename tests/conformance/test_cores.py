"""A core and its ledger: bound to each other, compared before anything is taken, pruned, and put right after a
restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_forced_calls import forced as forced_end
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, exchange
from tests.unit.rails.desk import desk

from bursar import Bursar
from bursar.engine import Lift
from bursar.engine.clock import first_id_at
from bursar.flows.transfers import AccountType, Code, Limits, Request, TransferRefused, Transfers, behind
from bursar.flows.transfers.checks import Horizons
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.link import CoreUnusable, StoreLink
from bursar.flows.transfers.pruning import prune
from bursar.flows.transfers.reconcile import RECONCILED, reconcile, survey
from bursar.flows.transfers.watch import look_at_cores, resume_intake
from bursar.model.errors import InvalidState, UnknownAsset
from bursar.model.outcome import Outcome
from bursar.rails.trading import Op, TradingClient
from bursar.rails.trading.replies import OperationsReply

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

UNIT = 10**6
AT_ONCE = Horizons(room_after_s=1e-6, forget_after_s=1e-6)


@asynccontextmanager
async def linked(place: Place, folder: Path) -> AsyncIterator[tuple[Bursar, Transfers, TradingClient]]:
    """Transfers with a core that is bound to the ledger, and a user with 100 in funding."""
    async with place.bursar() as bursar, desk(folder) as core:
        client = await core.client(link=StoreLink(bursar.store, "spot"))
        transfers = Transfers(
            bursar.ledger, {AccountType.SPOT: client}, limits=Limits(per_second=None, per_day=None), worker="one"
        )
        await transfers.prepare()
        await transfers.fund(ALICE, "USDT", "100", reference="seed")
        try:
            yield bursar, transfers, client
        finally:
            await transfers.engine.finish(10)


async def move(transfers: Transfers, source: str, target: str, amount: str) -> str:
    request = Request(user=ALICE, source=source, target=target, asset="USDT", amount=amount)
    view = await transfers.create(request, deadline_s=20)
    assert view.state == "COMMITTED"
    return view.req_id


async def until_refused(client: TradingClient) -> str:
    async with asyncio.timeout(20):
        while not client.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return client.trouble


# --- who belongs to whom
# -----------------------------------------------------------------------------------------------


@scenario
async def test_a_ledger_and_its_core_are_bound_to_each_other(place: Place, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with linked(place, tmp_path / "one") as (bursar, transfers, client), desk(tmp_path / "two") as second:
        await move(transfers, FUNDING, SPOT, "10")
        known = await bursar.store.read.cores.get("spot")
        described = await client.describe()
        assert known is not None
        assert known.identity == described.core == client.core_id != ""
        assert described.ledger == await bursar.store.read.cores.identity() != ""

        other = await second.client(link=StoreLink(bursar.store, "spot"))
        assert (await other.deposit(first_id_at(2**50), ALICE, "USDT", 1)).outcome is not Outcome.SUCCESS
        assert (await until_refused(other)).startswith("OTHER_CORE")
        as_future = await second.client(link=StoreLink(bursar.store, "future"))
        assert (await as_future.totals()).outcome is Outcome.SUCCESS, "each rail has a core of its own"
        assert second.core.state.sequence >= 1


@scenario
async def test_one_core_is_not_two_rails(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (bursar, transfers, _):
        await move(transfers, FUNDING, SPOT, "10")
        known = await bursar.store.read.cores.get("spot")
        assert known is not None
        assert not await bursar.store.single().cores.bind("future", known.identity)
        assert await bursar.store.read.cores.get("future") is None


@scenario
async def test_a_core_that_is_behind_what_any_worker_has_heard_does_not_serve(place: Place, tmp_path: Path) -> None:
    """T33, by the database: another worker's mark counts too."""
    async with place.bursar() as bursar, desk(tmp_path) as core:
        link = StoreLink(bursar.store, "spot")
        first = await core.client(link=link)
        assert (await first.deposit(7, ALICE, "USDT", 1)).outcome is Outcome.SUCCESS
        await _relied_on(bursar, "elsewhere", 1_000)
        second = await core.client(link=StoreLink(bursar.store, "spot"))
        assert (await second.totals()).outcome is not Outcome.SUCCESS
        assert (await until_refused(second)).startswith("CORE_BEHIND")


@scenario
async def test_what_was_compared_counts_as_heard(place: Place, tmp_path: Path) -> None:
    """T33: what was reconciled after a restore rests on the core's log, and no transition has ever relied on it."""
    async with place.bursar() as bursar, desk(tmp_path) as core:
        first = await core.client(link=StoreLink(bursar.store, "spot"))
        assert (await first.deposit(7, ALICE, "USDT", 1)).outcome is Outcome.SUCCESS
        await bursar.store.single().cores.compared_to("spot", 1_000)
        second = await core.client(link=StoreLink(bursar.store, "spot"))
        assert (await second.totals()).outcome is not Outcome.SUCCESS
        assert (await until_refused(second)).startswith("CORE_BEHIND")


@scenario
async def test_a_core_that_replaces_a_lost_one_serves_clients_of_the_old_one(place: Place, tmp_path: Path) -> None:
    """What a running client has heard from the old core is no reason for the new one to refuse everybody (T33)."""
    old_folder, new_folder = tmp_path / "old", tmp_path / "new"
    old_folder.mkdir()
    new_folder.mkdir()
    async with place.bursar() as bursar, desk(new_folder) as new:
        cores = bursar.store.single().cores
        async with desk(old_folder) as old:
            client = await old.client(link=StoreLink(bursar.store, "spot"))
            for id_ in range(1, 10):
                assert (await client.deposit(id_, ALICE, "USDT", 1)).outcome is Outcome.SUCCESS
            client.target = replace(client.target, address=new.address)
            old.clients.remove(client)  # it outlives its core
            new.clients.append(client)
        was = await cores.get("spot")
        assert was is not None
        assert (await until_refused(client)) != ""
        assert not await cores.rebind("spot", new.core.identity, "somebody else's")
        assert await cores.rebind("spot", new.core.identity, was.identity)
        async with asyncio.timeout(20):
            while (await client.totals()).outcome is not Outcome.SUCCESS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert client.core_id == new.core.identity
        assert client.sequence == new.core.durable


async def _relied_on(bursar: Bursar, worker: str, sequence: int) -> None:
    from bursar.writer import Change, Move, NewTransition  # noqa: PLC0415

    move_ = Move(flow="toy", id="x", version=0, transitions=(NewTransition("", "X", "A"),), actor=worker, delay_us=None)
    await bursar.ledger.writer.apply(Change(moves=(move_,), high_water=(("spot", worker, sequence),)))


@pytest.mark.parametrize(
    ("kind", "op", "says", "state"),
    [
        (AccountType.SPOT, "withdraw", (Outcome.TIMEOUT,), "FAILED"),
        (AccountType.FUNDING, "deposit", Outcome.TIMEOUT, "ROLLED_BACK"),
    ],
)
@scenario
async def test_what_a_core_gave_back_after_the_backup_does_not_arrive_as_well(
    place: Place, tmp_path: Path, kind: AccountType, op: str, says: Any, state: str
) -> None:
    """It was under way at the time of the backup, and was refunded later: the core says again that it was taken."""
    async with exchange(place, tmp_path, works=False) as here:
        await here.move(FUNDING, SPOT, "20")
        here.break_rail(kind, op, says)
        view = await here.move(SPOT, FUNDING, "5")
        assert view.fsm_state == ("SOURCE_PENDING" if op == "withdraw" else "TARGET_PENDING")
        client = here.transfers.cores[AccountType.SPOT]
        assert (await client.refund(view.req_id, ALICE, "USDT", 5 * UNIT)).outcome is Outcome.SUCCESS
        record = await here.transfers.engine.get("transfers", view.req_id)
        assert record is not None
        await here.transfers.engine.process_now(record, 10)
        assert (await here.transfers.get(ALICE, view.req_id)).fsm_state == state
        assert await here.standing() == ("80.000000", 20 * UNIT)


# --- before anything is taken
# --------------------------------------------------------------------------------------------


@scenario
async def test_nothing_is_taken_before_core_and_ledger_were_compared(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (_, transfers, client):
        transfers.unchecked.add(AccountType.SPOT)
        request = Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="1")
        with pytest.raises(ConnectionError, match="not compared"):
            await transfers.create(request)
        assert await transfers.list(None) == []
        await look_at_cores(transfers, {AccountType.SPOT: client})
        assert (await transfers.create(request, deadline_s=20)).state == "COMMITTED"


@scenario
async def test_a_core_is_open_only_after_what_it_shows_has_paused_the_intake(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core comes back while requests arrive: none is taken between the look and the pause that follows from it."""
    async with linked(place, tmp_path) as (bursar, transfers, client):
        transfers.unchecked.add(AccountType.SPOT)
        forgotten = first_id_at(bursar.store.ports.now_us() + 1_000)
        assert (await client.deposit(forgotten, ALICE, "USDT", 5)).outcome is Outcome.SUCCESS
        request, pause = (
            Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="1"),
            transfers.pause_intake,
        )

        async def asked_meanwhile(actor: str, reason: str, *, two_people: bool = False) -> bool:
            with pytest.raises(ConnectionError, match="not compared"):
                await transfers.create(request)
            return await pause(actor, reason, two_people=two_people)

        monkeypatch.setattr(transfers, "pause_intake", asked_meanwhile)
        [finding] = await look_at_cores(transfers, {AccountType.SPOT: client})
        assert not finding.ok
        with pytest.raises(TransferRefused) as refusal:
            await transfers.create(request)
        assert refusal.value.reason is Code.TRANSFERS_PAUSED
        assert await transfers.list(None) == []


@scenario
async def test_what_was_compared_is_not_looked_at_again(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (bursar, transfers, client):
        for _ in range(3):
            await move(transfers, FUNDING, SPOT, "1")
        [finding] = await look_at_cores(transfers, {AccountType.SPOT: client})
        assert finding.ok and finding.judged
        known = await bursar.store.read.cores.get("spot")
        assert known is not None
        assert known.compared == client.sequence
        found = await behind.look(bursar.store, "spot", client)
        assert (found.is_behind, found.complete_to) == (False, known.compared)


# --- a database that went back
# -------------------------------------------------------------------------------------------


@scenario
async def test_forgotten_transfers_pause_the_intake_and_are_written_down_again(place: Place, tmp_path: Path) -> None:
    """There, back, refused, and refunded: what the core did comes back as records and bookings, once."""
    async with linked(place, tmp_path) as (bursar, transfers, client):
        await move(transfers, FUNDING, SPOT, "10")
        cores = {AccountType.SPOT: client}
        await look_at_cores(transfers, cores)
        # As if all that follows had been written to a database that is gone: the core alone knows of it.
        ids = [first_id_at(bursar.store.ports.now_us() + 1_000) + n for n in range(5)]
        assert (await client.deposit(ids[0], ALICE, "USDT", 30 * UNIT)).outcome is Outcome.SUCCESS
        assert (await client.withdraw(ids[1], ALICE, "USDT", 5 * UNIT)).outcome is Outcome.SUCCESS
        assert (await client.withdraw(ids[2], ALICE, "USDT", 900 * UNIT)).outcome is Outcome.EXPLICIT_FAIL
        assert (await client.withdraw(ids[3], ALICE, "USDT", 4 * UNIT)).outcome is Outcome.SUCCESS
        assert (await client.refund(ids[3], ALICE, "USDT", 4 * UNIT)).outcome is Outcome.SUCCESS
        more_than_there_is = await client.deposit(ids[4], ALICE, "USDT", 500 * UNIT)
        assert more_than_there_is.outcome is Outcome.SUCCESS

        [finding] = await look_at_cores(transfers, cores)
        assert not finding.ok
        assert any(f"sr-{ids[0]} DEPOSIT of {30 * UNIT} USDT for user {ALICE}" in text for text in finding.broken)
        with pytest.raises(TransferRefused) as refusal:
            await transfers.create(Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="1"))
        assert refusal.value.reason is Code.TRANSFERS_PAUSED
        with pytest.raises(InvalidState, match="I5 is broken"):
            await resume_intake(transfers, cores, actor="ann", reason="it looks fine")
        assert len((await survey(bursar.ledger, cores)).plans) == 4

        report = await reconcile(bursar.ledger, cores, actor="ann", reason="restored")
        assert [one.suspense for one in report.done].count(True) == 1
        ledger = bursar.ledger
        assert (await ledger.balance(f"user:{ALICE}:funding", "USDT")).minor == (100 - 10 - 30 + 5) * UNIT
        assert (await ledger.balance("suspense:transfers", "USDT")).minor == -500 * UNIT
        assert (await ledger.balance("trading:spot", "USDT")).minor == (10 + 30 - 5 + 500) * UNIT
        ends = {view.req_id: view.fsm_state for view in await transfers.list(ALICE)}
        assert [ends.get(f"sr-{id_}") for id_ in ids] == ["COMMITTED", "COMMITTED", None, "ROLLED_BACK", "COMMITTED"]
        record = await transfers.engine.get("transfers", f"sr-{ids[0]}")
        assert record is not None
        [transition] = await bursar.store.read.records.history(record.number)
        assert (transition.event, transition.actor, msgspec.json.decode(transition.evidence)["reason"]) == (
            RECONCILED,
            "ann",
            "restored",
        )

        again = await reconcile(bursar.ledger, cores, actor="ann", reason="twice")
        assert (again.plans, again.done) == ([], [])
        assert (await conservation(transfers, AccountType.SPOT, client)).ok
        assert await resume_intake(transfers, cores, actor="ann", reason="reconciled") is Lift.PROPOSED
        with pytest.raises(InvalidState):
            await resume_intake(transfers, cores, actor="Ann", reason="reconciled")
        assert await resume_intake(transfers, cores, actor="bob", reason="I have looked") is Lift.LIFTED
        await bursar.store.ports.sleep(0.6)
        await move(transfers, SPOT, FUNDING, "1")


@scenario
async def test_what_left_a_core_and_was_forgotten_arrives_nowhere_else(place: Place, tmp_path: Path) -> None:
    """A withdraw for another core: the user gets it in funding, and the other core will never take it (T34)."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with linked(place, tmp_path / "one") as (bursar, transfers, client), desk(tmp_path / "two") as second:
        other = await second.client(link=StoreLink(bursar.store, "future"))
        cores = {AccountType.SPOT: client, AccountType.FUTURE: other}
        await Transfers(bursar.ledger, cores).prepare()
        await move(transfers, FUNDING, SPOT, "10")
        id_ = first_id_at(bursar.store.ports.now_us() + 1_000) + 9
        assert (await client.withdraw(id_, ALICE, "USDT", 3 * UNIT)).outcome is Outcome.SUCCESS
        await reconcile(bursar.ledger, cores, actor="ann", reason="restored")
        assert (await bursar.ledger.balance(f"user:{ALICE}:funding", "USDT")).minor == 93 * UNIT
        late = await other.deposit(id_, ALICE, "USDT", 3 * UNIT)
        assert (late.outcome, late.code) == (Outcome.EXPLICIT_FAIL, "CANCELLED")


@scenario
async def test_nothing_is_reconciled_while_a_core_is_silent(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (bursar, _, client):
        await client.close()
        with pytest.raises(CoreUnusable, match="every core has to be asked"):
            await reconcile(bursar.ledger, {AccountType.SPOT: client}, actor="ann", reason="restored")


# --- what a core may forget
# -------------------------------------------------------------------------------------------------


@scenario
async def test_pruning_frees_room_and_forgets_what_has_ended(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (bursar, transfers, client):
        req_id = await move(transfers, FUNDING, SPOT, "10")
        await move(transfers, SPOT, FUNDING, "10")
        await move(transfers, FUNDING, SPOT, "1")
        before = await client.describe()
        done = await prune(bursar.store, "spot", client, AT_ONCE)
        assert done.note == "" and done.floors is not None
        after, known = await client.describe(), await bursar.store.read.cores.get("spot")
        assert known is not None and known.pruned_us is not None
        assert (after.floors.room, after.floors.forget) == (known.room, known.forget)
        assert after.remembered < before.remembered
        again = await client.deposit(req_id, ALICE, "USDT", 10 * UNIT)
        assert again.outcome not in (Outcome.SUCCESS, Outcome.EXPLICIT_FAIL), "forgotten, and never executed (T32)"
        assert (await conservation(transfers, AccountType.SPOT, client)).ok


@scenario
async def test_an_open_transfer_is_not_forgotten(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client(link=StoreLink(here.bursar.store, "spot"))
        assert (await client.totals()).outcome is Outcome.SUCCESS
        here.break_rail(AccountType.SPOT, "deposit", (Outcome.TIMEOUT,), *[Outcome.TIMEOUT] * 50)
        stuck = await here.move(FUNDING, SPOT, "5")
        assert stuck.state == "PENDING"
        done = await prune(here.bursar.store, "spot", client, AT_ONCE)
        height = int(stuck.req_id.removeprefix("sr-"))
        assert (await client.describe()).floors.forget <= height
        assert (await client.query(stuck.req_id, Op.DEPOSIT)).outcome is Outcome.SUCCESS, done


@scenario
async def test_a_forced_transfer_is_not_forgotten(place: Place, tmp_path: Path) -> None:
    """T34: the core may still contradict the people, for ever."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client(link=StoreLink(here.bursar.store, "spot"))
        plain = await here.move(FUNDING, SPOT, "1")
        forced = await forced_end(here, FUNDING, SPOT, (Outcome.TIMEOUT,), "SUCCESS")
        assert forced.state == "COMMITTED"
        await here.move(FUNDING, SPOT, "1")
        done = await prune(here.bursar.store, "spot", client, AT_ONCE)
        assert done.kept == 1
        assert (await client.query(forced.req_id, Op.DEPOSIT)).outcome is Outcome.SUCCESS
        assert (await client.query(plain.req_id, Op.DEPOSIT)).outcome is not Outcome.SUCCESS


@scenario
async def test_floors_above_those_here_show_that_the_database_went_back(place: Place, tmp_path: Path) -> None:
    async with linked(place, tmp_path) as (bursar, transfers, client):
        await move(transfers, FUNDING, SPOT, "10")
        await move(transfers, FUNDING, SPOT, "1")
        highest = (await client.describe()).highest_id
        assert (await client.prune(room=highest, forget=1)).outcome is Outcome.SUCCESS  # not by this database
        [finding] = await look_at_cores(transfers, {AccountType.SPOT: client})
        assert not finding.ok and "forgotten more than this database allowed" in finding.broken[0]
        skipped = await prune(bursar.store, "spot", client, AT_ONCE)
        assert skipped.floors is None, "what the core remembers is evidence now"


@scenario
async def test_floors_count_at_the_first_contact_too(place: Place, tmp_path: Path) -> None:
    """The backup is from before this ledger had a core: the look that binds them sees what the core has let go of."""
    async with place.bursar() as bursar, desk(tmp_path) as core:
        before = await core.client()
        for id_ in (10, 20):
            assert (await before.deposit(id_, ALICE, "USDT", 1)).outcome is Outcome.SUCCESS
        assert (await before.prune(room=20, forget=20)).outcome is Outcome.SUCCESS
        found = await behind.look(bursar.store, "spot", await core.client(link=StoreLink(bursar.store, "spot")))
        assert "forgotten more than this database allowed" in found.floors


@scenario
async def test_floors_that_another_process_raises_during_the_look_are_no_restore(place: Place, tmp_path: Path) -> None:
    """It writes them here, and then asks the core: whoever reads the core first has to read the database after it."""
    async with linked(place, tmp_path) as (bursar, transfers, client):
        await move(transfers, FUNDING, SPOT, "10")
        await move(transfers, FUNDING, SPOT, "1")
        listed = client.operations

        async def raised_meanwhile(after: int, limit: int = 10) -> OperationsReply:
            highest = (await client.describe()).highest_id
            await bursar.store.single().cores.raise_floors("spot", highest, 1)
            assert (await client.prune(room=highest, forget=1)).outcome is Outcome.SUCCESS
            return await listed(after, limit)

        client.operations = raised_meanwhile  # type: ignore[method-assign]
        assert not (await behind.look(bursar.store, "spot", client)).is_behind


@scenario
async def test_an_asset_that_the_database_has_forgotten_is_named(place: Place, tmp_path: Path) -> None:
    """It was created after the backup: nothing is booked until it is there again."""
    async with linked(place, tmp_path) as (bursar, transfers, client):
        cores = {AccountType.SPOT: client}
        await move(transfers, FUNDING, SPOT, "10")
        at = first_id_at(bursar.store.ports.now_us() + 1_000)  # after the transfer's own id, which has this millisecond
        assert (await client.deposit(at, ALICE, "LATE", 5)).outcome is Outcome.SUCCESS
        assert (await client.deposit(at + 1, ALICE, "USDT", 5)).outcome is Outcome.SUCCESS
        report = await survey(bursar.ledger, cores)
        assert ([plan.transfer.asset for plan in report.plans], report.unknown) == (["USDT"], ["LATE"])
        with pytest.raises(UnknownAsset):
            await reconcile(bursar.ledger, cores, actor="anna", reason="restored")
        assert len(await transfers.list(None)) == 1
        await bursar.ledger.create_asset("LATE", precision=2)
        done = await reconcile(bursar.ledger, cores, actor="anna", reason="restored")
        assert len(done.done) == 2
        [finding] = await look_at_cores(transfers, cores)
        assert finding.ok, finding.broken
