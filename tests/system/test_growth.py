"""A plan made for an empty table must not be kept when the table has grown: an empty, analysed database is grown to
10^5 rows on one connection, and the rate of commits at the end is compared with that of the beginning."""

from __future__ import annotations

import asyncio
import time

import asyncpg
from tests.system.crew import ASSET, BANK, furnish

from bursar import Receipt, deposit, pay
from bursar import open as open_bursar
from bursar.ledger import Ledger

ROWS = 100_000  # postings, spends, envelopes and events together
GROUP = 250
PEOPLE = 200
EARLY, LATE = 12, 12  # groups in the windows that are compared
MORE = 10  # late windows, at most


async def one_group(ledger: Ledger, number: int) -> float:
    """Seconds for a group of payments among many accounts, each from one posting with change."""
    pairs = [((number * 7 + i) % PEOPLE, (number * 11 + i * 3 + 1) % PEOPLE) for i in range(GROUP)]
    entries = [pay(f"p{a}", f"p{b}", ASSET, "0.01", key=f"{number}-{i}") for i, (a, b) in enumerate(pairs) if a != b]
    began = time.perf_counter()
    results = await ledger.commit_many(entries)
    took = time.perf_counter() - began
    assert all(isinstance(r, Receipt) for r in results)
    return took / len(entries)


def test_the_rate_does_not_fall_as_the_database_grows(fresh_postgres: str) -> None:
    """10^5 rows later, on the same connection, without a new ANALYZE of ours: the rate has not halved."""

    async def body() -> tuple[list[float], int]:
        await furnish(fresh_postgres, *[f"p{i}" for i in range(PEOPLE)])
        observer = await asyncpg.connect(fresh_postgres)
        await observer.execute("ANALYZE")
        times: list[float] = []
        rows = 0
        async with open_bursar(fresh_postgres) as bursar:
            await bursar.ledger.commit_many([deposit(BANK, f"p{i}", ASSET, "100") for i in range(PEOPLE)])
            while rows < ROWS:
                times.append(await one_group(bursar.ledger, len(times)))
                rows = await observer.fetchval(
                    "SELECT (SELECT last_value FROM bursar.numbers) * 5"  # 2 postings, 1 spend, 1 envelope, 1 event
                )
            for _ in range(MORE):  # others may be busy on this machine; a bad plan stays bad
                if min(times[-LATE:]) < 2 * min(times[2 : 2 + EARLY]):
                    break
                times += [await one_group(bursar.ledger, len(times)) for _ in range(LATE)]
        await observer.close()
        return times, rows

    times, rows = asyncio.run(body())
    early, late = min(times[2 : 2 + EARLY]), min(times[-LATE:])
    print(f"{1 / early:.0f}/s at first, {1 / late:.0f}/s after {rows} rows")
    assert late < 2 * early, f"{early * 1e6:.0f} µs per commit at first, {late * 1e6:.0f} µs at the end"
