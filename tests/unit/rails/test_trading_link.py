"""A core and the ledger it works for: bound both ways at first contact, and nothing is executed for any other."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rails.desk import WAIT_S, Desk, desk
from tests.unit.rails.test_trading_server import log_in, next_frame

from bursar.model.outcome import Outcome
from bursar.rails.trading import CoreRefused, FixedLink, Floors, Known, Op, Operation, Reply, TradingClient, protocol
from bursar.rails.trading.history import indexed
from bursar.rails.trading.server import Outages

Case = Callable[[Desk], Awaitable[None]]
LEDGER = "ledger-1"


def play(folder: Path, case: Case, **options: Any) -> None:
    async def work() -> None:
        async with asyncio.timeout(WAIT_S), desk(folder, **options) as made:
            await case(made)

    asyncio.run(work())


class Ledger:
    """A ledger's database, as far as a core's client sees it."""

    def __init__(self, ledger: str = LEDGER, core: str = "", seen: int = 0) -> None:
        self.ledger = ledger
        self.core = core
        self.seen = seen
        self.down = False
        self.steps: list[str] = []

    async def known(self) -> Known:
        if self.down:
            raise ConnectionError("the database is down")
        self.steps.append("known")
        return Known(ledger=self.ledger, core=self.core, seen=self.seen)

    async def bind(self, core: str) -> None:
        self.steps.append("bind")
        if self.core not in ("", core):
            raise CoreRefused(self.core, core)
        self.core = core


async def deposit(client: TradingClient, id_: int = 1) -> Reply:
    return await client.deposit(id_, 1, "USDT", 5)


def test_first_contact_binds_both_sides_before_anything_is_executed(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        ledger = Ledger()
        client = await made.client(link=ledger)
        reply = await deposit(client)
        assert reply == Reply(Outcome.SUCCESS, "OK", 2)  # behind the record that binds the core
        assert (ledger.core, made.core.state.ledger) == (made.core.identity, LEDGER)
        assert ledger.steps == ["known", "bind"]
        assert client.core_id == made.core.identity

    play(tmp_path, case)


def test_the_identity_and_the_ledger_outlive_restarts_with_and_without_snapshots(tmp_path: Path) -> None:
    async def work() -> None:
        found = set()
        for round_ in range(3):
            async with desk(tmp_path) as made:
                client = await made.client(link=Ledger(core="" if round_ == 0 else made.core.identity))
                assert (await deposit(client, 1 + round_)).outcome is Outcome.SUCCESS
                found.add((made.core.identity, made.core.state.ledger))
            if round_ == 1:
                for path in (tmp_path / "data").glob("snap-*"):
                    path.unlink()
        assert len(found) == 1
        [(identity, ledger)] = found
        assert (len(identity), ledger) == (32, LEDGER)

    asyncio.run(work())


def test_another_ledger_is_refused_and_executes_nothing(tmp_path: Path) -> None:
    """Two databases at one core would each believe that its money is there."""

    async def case(made: Desk) -> None:
        assert (await deposit(await made.client(link=Ledger()))).outcome is Outcome.SUCCESS
        other = await made.client(link=Ledger("ledger-2"))
        reply = await deposit(other, 2)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "OTHER_LEDGER")
        assert "bound to the ledger ledger-1" in reply.detail and "data folder of its own" in reply.detail
        assert made.core.state.sequence == 2

    play(tmp_path, case)


def test_another_core_is_refused_and_receives_nothing(tmp_path: Path) -> None:
    """A new, empty data folder beside an old database, or a core at the wrong address."""

    async def case(made: Desk) -> None:
        client = await made.client(link=Ledger(core="f" * 32, seen=77))
        reply = await deposit(client)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "OTHER_CORE")
        assert "f" * 32 in reply.detail and made.core.identity in reply.detail and "restore" in reply.detail
        assert (made.core.state.sequence, made.core.state.ledger) == (0, "")
        # Nor did it believe that it has forgotten 77 sequences, which were another core's.
        assert (await deposit(await made.client())).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_a_core_that_is_exchanged_under_a_running_client_is_noticed(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as made:
            client = TradingClient(made.ports, made.address, name=made.name, secret=b"sixteen bytes or more")
            client.start()
            assert (await deposit(client)).outcome is Outcome.SUCCESS
        shutil.rmtree(tmp_path / "data")
        async with desk(tmp_path) as made:
            await made.until(lambda: client.trouble.startswith("OTHER_CORE"))
            assert made.core.state.sequence == 0
            await client.close()

    asyncio.run(work())


def test_a_failing_link_is_retried_and_its_reason_is_reported(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        ledger = Ledger()
        ledger.down = True
        client = await made.client(link=ledger)
        reply = await deposit(client)
        assert (reply.outcome, reply.code) == (Outcome.NETWORK_ERROR, "LINK_FAILED")
        assert "the database is down" in client.trouble
        ledger.down = False
        await made.until(lambda: client.is_connected)
        assert (await deposit(client)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_a_ledger_that_can_not_bind_itself_leaves_the_core_unbound(tmp_path: Path) -> None:
    """The ledger's side comes first: a core must never be bound to a ledger that does not know it."""

    class Broken(Ledger):
        async def bind(self, core: str) -> None:
            raise ConnectionError("the database is down")

    async def case(made: Desk) -> None:
        reply = await deposit(await made.client(link=Broken()))
        assert (reply.outcome, reply.code) == (Outcome.NETWORK_ERROR, "LINK_FAILED")
        assert (made.core.state.ledger, made.core.state.sequence) == ("", 0)

    play(tmp_path, case)


def test_a_ledger_that_remembers_another_core_by_now_is_not_served(tmp_path: Path) -> None:
    """Two servers of one ledger meet two cores at the same time: the second one's bind is refused by the database."""

    class Raced(Ledger):
        async def bind(self, core: str) -> None:
            self.core = "f" * 32
            await super().bind(core)

    async def case(made: Desk) -> None:
        reply = await deposit(await made.client(link=Raced()))
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "OTHER_CORE")
        assert (made.core.state.ledger, made.core.state.sequence) == ("", 0)

    play(tmp_path, case)


def test_a_core_that_is_bound_meanwhile_refuses_the_second_ledger(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        first, _ = await log_in(made, ledger="ledger-1")
        second, _ = await log_in(made, ledger="ledger-2")
        for stream, ledger in ((first, "ledger-1"), (second, "ledger-2")):
            assert isinstance(protocol.decode_handshake(await next_frame(stream)), protocol.Welcome)
            stream.write(protocol.frame(protocol.Bind(0, ledger)))
            assert protocol.decode_answer(await next_frame(stream)) == protocol.Bound(0, 1, "ledger-1")
        second.write(protocol.frame(protocol.Execute(1, *indexed([(1, 1, 1, "USDT", 5, 0)]))))
        assert await next_frame(second) == b""
        assert made.core.state.sequence == 1

    play(tmp_path, case)


@pytest.mark.parametrize(
    "request_",
    [
        protocol.Execute(1, *indexed([(1, 1, 1, "USDT", 5, 0)])),
        protocol.SetStatus(1, 1, 2),
        protocol.Prune(1, 1, 1, []),
        protocol.Bind(1, "ledger-2"),
        protocol.Subscribe(1, 0),
    ],
)
def test_nothing_is_executed_for_a_named_ledger_before_the_core_is_bound(
    tmp_path: Path, request_: protocol.Request
) -> None:
    async def case(made: Desk) -> None:
        stream, _ = await log_in(made, ledger=LEDGER)
        assert isinstance(protocol.decode_handshake(await next_frame(stream)), protocol.Welcome)
        stream.write(protocol.frame(request_))
        assert await next_frame(stream) == b""
        assert (made.core.state.sequence, made.core.state.ledger) == (0, "")

    play(tmp_path, case)


@pytest.mark.parametrize("ledger", ["two words", "\n", "l\u00e9dger"])
def test_a_ledger_identity_that_is_not_readable_is_refused(tmp_path: Path, ledger: str) -> None:
    async def case(made: Desk) -> None:
        reply = await deposit(await made.client(link=Ledger(ledger)))
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_REFUSED")
        assert made.core.state.sequence == 0

    play(tmp_path, case)


def test_clients_that_name_no_ledger_are_served_by_a_core_that_is_bound(tmp_path: Path) -> None:
    """A matching engine works for no ledger."""

    async def case(made: Desk) -> None:
        assert (await deposit(await made.client(link=Ledger()))).outcome is Outcome.SUCCESS
        engine = await made.client()
        assert (await engine.lock(7, 1, "USDT", 3)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_client_presents_the_high_water_mark_at_every_login(tmp_path: Path) -> None:
    """T33: another host has seen a higher sequence than this client; a core behind it serves no client."""

    async def case(made: Desk) -> None:
        ledger = Ledger()
        client = await made.client(link=ledger)
        assert (await deposit(client)).outcome is Outcome.SUCCESS
        ledger.seen = 50
        made.server.connections[0].stream.abort()
        await made.until(lambda: client.trouble.startswith("CORE_BEHIND"))
        assert (await deposit(client, 2)).outcome is Outcome.UNKNOWN
        assert made.core.state.sequence == 2

    play(tmp_path, case)


def test_sequence_of_another_ledger_does_not_make_a_core_refuse_its_own(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        mine = await made.client(link=Ledger())
        assert (await deposit(mine)).outcome is Outcome.SUCCESS
        other = await made.client(link=Ledger("ledger-2", seen=99))
        assert (await deposit(other, 2)).code == "OTHER_LEDGER"
        assert (await deposit(mine, 3)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


# --- what a ledger asks its core


def test_operations_are_listed_page_by_page(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client(link=Ledger())
        await client.execute([Operation(Op.DEPOSIT, 100 + n, 7, "USDT", 10 + n) for n in range(30)])
        await client.withdraw(200, 7, "USDT", 10**6)
        await client.lock(201, 7, "USDT", 1)
        await client.withdraw(202, 7, "USDT", 5)
        await client.refund(202, 7, "USDT", 5)
        for wrong in (-1, 2**64):
            assert (await client.operations(wrong)).code == "MALFORMED"
        found, after = [], 0
        while after < client.sequence:
            reply = await client.operations(after, limit=10)
            assert reply.outcome is Outcome.SUCCESS and len(reply.items) <= 10
            found += reply.items
            after = reply.complete_to
        assert [row.id for row in found] == [*range(100, 130), 200, 202, 202]
        assert [row.sequence for row in found] == [*range(2, 32), 32, 34, 35]
        assert [(row.op, row.user, row.asset, row.amount, row.code) for row in found[-3:]] == [
            (Op.WITHDRAW, 7, "USDT", 10**6, "INSUFFICIENT_BALANCE"),
            (Op.WITHDRAW, 7, "USDT", 5, "OK"),
            (Op.REFUND, 7, "USDT", 5, "OK"),
        ]

    play(tmp_path, case)


def test_a_core_describes_itself(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client(link=Ledger())
        await client.execute([Operation(Op.DEPOSIT, 100 + n, n % 3 + 1, "USDT", 10) for n in range(9)])
        await client.lock(5_000, 1, "USDT", 1)
        assert (await client.prune(room=105, forget=103)).outcome is Outcome.SUCCESS
        found = await client.describe()
        assert (found.outcome, found.core, found.ledger) == (Outcome.SUCCESS, made.core.identity, LEDGER)
        assert (found.floors, found.highest_id, found.remembered, found.accounts) == (Floors(105, 103), 108, 7, 3)
        assert found.sequence == made.core.durable == 13
        assert client.floors == Floors(105, 103)
        late = await made.client(link=Ledger(core=made.core.identity))
        await late.totals()
        assert late.floors == Floors(105, 103)

    play(tmp_path, case)


def test_floors_that_are_too_high_or_out_of_order_are_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        await deposit(client, 100)
        for room, forget, code in ((2**63 - 1, 1, "FLOOR_TOO_HIGH"), (102, 102, "FLOOR_TOO_HIGH"), (5, 6, "MALFORMED")):
            reply = await client.prune(room=room, forget=forget)
            assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, code)
        assert (await client.prune(room="17", forget="sr-1")).code == "MALFORMED"
        assert (client.floors, made.core.state.sequence) == (Floors(1, 1), 1)
        assert (await deposit(client, 7)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_pruning_much_is_done_in_steps_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        for start in range(1, 40_000, 1_000):
            await client.execute([Operation(Op.DEPOSIT, start + n, 1, "USDT", 1) for n in range(1_000)])
        pruning = asyncio.create_task(client.prune(room=39_000, forget=39_000, keep=[17]))
        other = await made.client()
        served = 0
        while not pruning.done():
            assert (await other.deposit(10**6 + served, 2, "USDT", 1)).outcome is Outcome.SUCCESS
            served += 1
        assert (await pruning).outcome is Outcome.SUCCESS
        assert served >= 4
        described = await client.describe()
        assert described.remembered == 40_000 - 39_000 + 1 + 1 + served
        looked = await client.lookup([(id_, Op.DEPOSIT) for id_ in (17, 18, 38_999, 39_000)])
        assert [reply.code for reply in looked.replies] == ["OK", "PRUNED", "PRUNED", "OK"]

    play(tmp_path, case)


def test_the_folder_shrinks_after_a_prune(tmp_path: Path) -> None:
    """Restart time and memory fall with what is forgotten: the next snapshot has a fraction of the rows and bytes."""

    async def work() -> tuple[int, int]:
        async with desk(tmp_path, snapshot_bytes=10**9) as made:
            client = await made.client()
            described = await client.describe()
            first = max(described.highest_id, 0) + 1
            for start in range(first, first + 20_000, 1_000):
                await client.execute([Operation(Op.DEPOSIT, start + n, 1, "USDT", 1) for n in range(1_000)])
        newest = max((tmp_path / "data").glob("snap-*"))
        async with desk(tmp_path, snapshot_bytes=10**9) as made:
            client = await made.client()
            assert (await client.prune(room=19_000, forget=19_000)).outcome is Outcome.SUCCESS
        return newest.stat().st_size, max((tmp_path / "data").glob("snap-*")).stat().st_size

    before, after = asyncio.run(work())
    assert after < before / 15

    async def again() -> None:
        async with desk(tmp_path) as made:
            assert made.core.recovery.remembered == 1_001
            assert (await (await made.client()).totals()).totals == {"USDT": 20_000}

    asyncio.run(again())


def test_what_is_forgotten_brings_the_next_snapshot_nearer(tmp_path: Path) -> None:
    """Otherwise a core that is killed would read all of it again, until 64 MiB of log are written."""

    async def case(made: Desk) -> None:
        client = await made.client()
        for start in range(1, 20_001, 1_000):
            await client.execute([Operation(Op.DEPOSIT, start + n, 1, "USDT", 1) for n in range(1_000)])
        assert not list((tmp_path / "data").glob("snap-*"))
        assert (await client.prune(room=20_001, forget=20_001)).outcome is Outcome.SUCCESS
        await client.deposit(20_001, 1, "USDT", 1)
        await made.until(lambda: bool(list((tmp_path / "data").glob("snap-*.snap"))))

    play(tmp_path, case, snapshot_bytes=450_000)


def test_a_fixed_link_remembers_its_core() -> None:
    async def work() -> None:
        link = FixedLink(Known(ledger=LEDGER))
        await link.bind("a" * 32)
        assert (await link.known()).core == "a" * 32
        with pytest.raises(CoreRefused, match="restore the data folder"):
            await link.bind("b" * 32)

    asyncio.run(work())


def test_stopping_in_the_middle_of_a_prune_leaves_floors_that_can_be_raised_further(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as made:
            client = await made.client()
            for start in range(1, 40_000, 1_000):
                await client.execute([Operation(Op.DEPOSIT, start + n, 1, "USDT", 1) for n in range(1_000)])
            pruning = asyncio.create_task(client.prune(room=40_000, forget=40_000))
            await made.until(lambda: made.core.state.floors.forget > 1)
            made.server.stop()
            assert (await pruning).outcome is not Outcome.SUCCESS
        async with desk(tmp_path) as made:
            assert 1 < made.core.state.floors.forget < 40_000 == made.core.state.floors.room
            client = await made.client()
            assert (await client.prune(room=40_000, forget=40_000)).outcome is Outcome.SUCCESS
            assert (client.floors, made.core.state.history.count) == (Floors(40_000, 40_000), 1)
            assert (await client.totals()).totals == {"USDT": 40_000}

    asyncio.run(work())


def test_trouble_of_one_kind_is_one_line_when_it_begins_and_one_when_it_is_over() -> None:
    lines: list[str] = []
    outages = Outages(lines.append)
    for _ in range(1_000):
        outages.happened("no place", "for a reason")
        outages.look()
    outages.happened("something else")
    assert lines == ["no place: for a reason", "something else"]
    outages.look()
    outages.look()
    assert lines[2:] == ["no place: it happened 1,000 times, and is over"]
    outages.happened("no place", "again")
    assert lines[3:] == ["no place: again"]
