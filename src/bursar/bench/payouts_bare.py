"""The peer of payouts: a bare sender, which pays and remembers nothing.

It counts nonces in memory, builds and signs with the same codec, sends each payment in a request of its own, and asks
for the receipts of all that are open in one request per block, until their blocks are final. One node, no database, no
signer, no checks, no fee but the highest. If it dies, it does not know what it has paid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from coincurve import PrivateKey

from bursar.bench.payouts_town import AMOUNT, BLOCK_MS, CEILING, CODEC, TIP, Key, Town, shops
from bursar.http import Pool
from bursar.rails.chain import Fee, Order, Shape, Slot
from bursar.rails.evm.rpc import ANSWER_BYTES_MAX, CALLS_MAX

TIMEOUT_S = 30.0
GAS = 100_000
HEADERS = {"content-type": "application/json"}


class BareSender:
    """Sends tokens from some wallets, with so many payments of each under way at once."""

    def __init__(self, town: Town, wallets: int, in_flight: int) -> None:
        self._town = town
        self._pool = Pool(ANSWER_BYTES_MAX)
        self._keys = town.keys[:wallets]
        self._signers = {key.address: PrivateKey(key.private) for key in self._keys}
        self._nonces: dict[str, int] = {}
        self._in_flight = in_flight
        self._shops = shops()
        self._open: dict[str, asyncio.Future[None]] = {}

    async def close(self) -> None:
        """Let go of the connections."""
        await self._pool.close()

    async def final(self, payments: int) -> list[float]:
        """Make so many payments, from each wallet as many, until all are final: how long each took."""
        for key in self._keys:
            self._nonces[key.address] = int(await self._one("eth_getTransactionCount", key.address, "latest"), 16)
        lines = [(key, iter(range(payments // len(self._keys)))) for key in self._keys]
        async with asyncio.TaskGroup() as group:  # so that nothing waits for a watcher that has failed
            watching = group.create_task(self._watch())
            tasks = [group.create_task(self._line(key, left)) for key, left in lines for _ in range(self._in_flight)]
            waits = [wait for task in tasks for wait in await task]
            watching.cancel()
        return waits

    async def _line(self, key: Key, left: Iterator[int]) -> list[float]:
        """One payment after the other, until none is left."""
        waits: list[float] = []
        for _ in left:
            begun = time.perf_counter()
            await self._pay(key)
            waits.append(time.perf_counter() - begun)
        return waits

    async def _pay(self, key: Key) -> None:
        nonce = self._nonces[key.address]
        self._nonces[key.address] = nonce + 1
        order = Order(payout="", to=next(self._shops), contract=self._town.token, amount=AMOUNT)
        fee = Fee(gas_limit=GAS, price=CEILING, tip=TIP)
        unsigned = CODEC.build(self._town.network, key.address, order, Shape.PAY, Slot(nonce=nonce), fee)
        signature = self._signers[key.address].sign_recoverable(CODEC.digest(unsigned), hasher=None)
        signed = CODEC.signed(unsigned, signature, key.address)
        said = await self._one("eth_sendRawTransaction", "0x" + signed.raw.hex())
        if said != signed.hash:
            raise RuntimeError(f"the node said {said}")
        final = self._open[signed.hash] = asyncio.get_running_loop().create_future()
        await final

    async def _watch(self) -> None:
        """Once per block: which of the open payments are final?"""
        while True:
            await asyncio.sleep(BLOCK_MS / 1000)
            final = int((await self._one("eth_getBlockByNumber", "finalized", False))["number"], 16)
            hashes = list(self._open)
            for start in range(0, len(hashes), CALLS_MAX):
                some = hashes[start : start + CALLS_MAX]
                receipts = await self._many([("eth_getTransactionReceipt", [hash_]) for hash_ in some])
                for hash_, receipt in zip(some, receipts, strict=True):
                    if receipt is None or int(receipt["blockNumber"], 16) > final:
                        continue
                    if receipt["status"] != "0x1":
                        raise RuntimeError(f"{hash_} failed")
                    self._open.pop(hash_).set_result(None)

    async def _one(self, method: str, *params: Any) -> Any:
        return (await self._many([(method, list(params))]))[0]

    async def _many(self, calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
        body = msgspec.json.encode(
            [
                {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
                for number, (method, params) in enumerate(calls)
            ]
        )
        status, answer = await self._pool.post(self._town.anvil.url, HEADERS, body, TIMEOUT_S)
        found = msgspec.json.decode(answer)
        if status != 200 or any("error" in one for one in found):
            raise RuntimeError(f"the node said {status}: {answer[:300]!r}")
        return [one["result"] for one in sorted(found, key=lambda one: one["id"])]
