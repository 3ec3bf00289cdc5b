"""The process is killed or stopped at every call that it makes; the next one finishes everything.

Three orders: one goes well, one loses replies, one is refused by the shop and given back. Each other side does each
thing once, each entry is booked once, and no order is left behind.
"""

from __future__ import annotations

import msgspec
from tests.builders import check_sound, furnish, seed
from tests.toy import HAPPY, TRANSIT, Order, Program, World

from bursar import Bursar, SystemAccount
from bursar.engine import Flow
from bursar.model.records import Record
from bursar.testing import crash_everywhere
from bursar.writer import Limit, Operation

ENDS = {"good": "DONE", "lossy": "DONE", "refused": "FAILED"}


class Ended(msgspec.Struct):
    records: dict[str, Record]
    paths: dict[str, list[str]]
    balances: list[int]


async def setup(b: Bursar) -> None:
    await furnish(b.ledger)
    await b.ledger.create_account(TRANSIT, policy=SystemAccount())
    await seed(b.ledger, "alice", "3")


def world() -> World:
    made = World()
    made.loses = {("lossy", "charge"), ("lossy", "ship"), ("refused", "refund")}
    made.refuses = {("refused", "ship")}
    return made


def flows(outside: World) -> list[Flow[Order]]:
    return [outside.flow()]


async def client(b: Bursar) -> Ended:
    """Start the three as an API would, with the client's own keys, and drive them to their ends."""
    for id in ENDS:  # one after the other: together they would ride in a handful of units
        remember = Operation(scope="orders:alice", id=f"client-{id}", op="create", fingerprint=id)
        limit = Limit(key="day", count_max=3, amount_max=9, until_us=2**60, code="TOO_MANY")
        started = await b.engine.start("orders", Order(minor=1_000_000), id=id, operation=remember, limits=(limit,))
        record = started.record
        while record.state not in ENDS.values():
            record = await b.engine.process_now(record, 60)
    p = Program(b.engine, b.ledger)
    records = {id: await b.engine.get("orders", id) for id in ENDS}
    found = {id: record for id, record in records.items() if record is not None}
    await check_sound(b.ledger)
    return Ended(found, {id: await p.path(record) for id, record in found.items()}, await p.balances())


def check(outside: World, end: Ended) -> None:
    for id, state in ENDS.items():
        record = end.records[id]
        assert (record.state, record.in_flight_posting, record.due_us) == (state, 0, None)
        path = [step for step in end.paths[id] if "UNKNOWN" not in step]
        assert path[:4] == HAPPY[:4]
        assert len(path) == (5 if state == "DONE" else 6), path
    assert outside.effects == {
        **{(id, "charge"): 1 for id in ENDS},
        **{(id, "ship"): 1 for id in ("good", "lossy")},
        ("refused", "refund"): 1,
    }
    assert end.balances == [1_000_000, 0, 2_000_000]


def test_killed_or_stopped_at_every_call_each_order_ends_once() -> None:
    assert crash_everywhere(client, flows=flows, world=world, check=check, setup=setup) > 100
