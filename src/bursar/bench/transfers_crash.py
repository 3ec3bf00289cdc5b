"""Starts transfers, drives none, prints so and waits to be killed: what a crash in the middle leaves.

python -m bursar.bench.transfers_crash DATABASE CORE HOW-MANY
"""

from __future__ import annotations

import asyncio
import sys

import bursar
from bursar.bench.transfers import prepared
from bursar.bench.transfers_load import AMOUNT, ASSET, CORE, SECRET, USERS
from bursar.flows.transfers import AccountType
from bursar.flows.transfers.request import Transfer
from bursar.ports import SystemPorts
from bursar.rails.trading import TradingClient

AT_ONCE = 512
FIRST_ID = 8 * 10**18


async def main(address: str, core: str, count: int) -> None:
    """Start them all; each has left its source and has not arrived."""
    client = TradingClient(SystemPorts(), core, name=CORE, secret=SECRET)
    async with client, bursar.open(address) as b:
        transfers = await prepared(b.ledger, client)
        asset = (await b.ledger.assets())[ASSET].id
        for first in range(0, count, AT_ONCE):
            numbers = range(first, min(count, first + AT_ONCE))
            await asyncio.gather(
                *[
                    transfers.engine.start(
                        transfers.flow.name,
                        Transfer(
                            user=number % USERS + 1,
                            source=AccountType.FUNDING,
                            target=AccountType.SPOT,
                            asset=ASSET,
                            asset_id=asset,
                            amount=str(AMOUNT),
                        ),
                        id=f"sr-{FIRST_ID + number}",
                        owner=str(number % USERS + 1),
                    )
                    for number in numbers
                ]
            )
        print(count, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
