"""A process that pays bills is killed or stopped at every call: no number, seat or amount is lost or doubled."""

from __future__ import annotations

from typing import Any

from tests.bills import FLOW, NUMBER, RESERVED, SEAT, bill, ended, rows

from bursar import Bursar
from bursar.testing import crash_everywhere

IDS = ("b1", "b2", "b3")


async def client(b: Bursar) -> dict[str, Any]:
    engine = b.engine
    for id in IDS:
        await ended(engine, await engine.get("bills", id) or await bill(engine, id, amount=20))
    attempts = [await engine.store.read.flow_rows.get("bills", "attempt", id) for id in IDS]
    return {
        "records": [record.number for id in IDS if (record := await engine.get("bills", id))],
        "numbers": await rows(engine, NUMBER),
        "reserved": await rows(engine, RESERVED),
        "seats": await rows(engine, SEAT),
        "attempts": [row.version for row in attempts if row],
    }


def check(_world: None, found: dict[str, Any]) -> None:
    numbers, records = found["numbers"], found["records"]
    assert numbers.pop("wallet") == (0, "sequence", 8)
    assert [record for record, _, _ in numbers.values()] == records
    assert found["reserved"]["wallet"] == (0, "total", 0)
    assert found["seats"] == {"1A": (records[2], "released", 0)}
    assert found["attempts"] == [3, 3, 3]


def test_killed_or_stopped_at_every_call_no_row_is_lost_or_doubled() -> None:
    assert crash_everywhere(client, flows=[FLOW], world=lambda: None, check=check) > 50
