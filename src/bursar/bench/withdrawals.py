"""What withdrawals that wait for approval cost a worker, while more and more of them wait.

The requests are made the usual way, each with its hold, and driven until they wait for a person. Then the worker looks
for work again and again, as it does all day, and finds none. A look costs the CPU that this process has used meanwhile.
No signer and no node is asked: nothing is approved.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import msgspec

from bursar import deposit
from bursar.bench.measure import Row, row_of
from bursar.bench.places import Place, place_of
from bursar.documents import Documents, Proposal
from bursar.engine import Engine, Worker
from bursar.flows.payouts import KINDS as PAYOUT_KINDS
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.documents import ASSET, CHAIN, AssetDocument, ChainDocument, Ranked
from bursar.flows.withdrawals import KINDS, MACHINE, WithdrawalRequest, Withdrawals
from bursar.flows.withdrawals.machine import WAITING
from bursar.flows.withdrawals.policy import POLICY, AddressBookRule, WithdrawalPolicy
from bursar.instance import Bursar
from bursar.model.accounts import ExternalAccount
from bursar.model.document_kinds import DocumentKind
from bursar.rails.behind import chain_behind
from bursar.signer.absent import AbsentSigner

NAME: Final = "sim"
USER: Final = 1
CHUNK: Final = 250  # requests under way at a time
DEADLINE_S: Final = 600.0
GWEI: Final = 10**9
ADDRESS_BYTES: Final = 20
TOKEN: Final = "0x" + "c0" * ADDRESS_BYTES

Say = Callable[[str], None]


class WaitingPace(msgspec.Struct, frozen=True):
    """How many wait, and how often the worker looks."""

    waiting: tuple[int, ...]
    looks: int  # per sample
    samples: int


FULL = WaitingPace((100, 1_000, 10_000), 2_000, 3)
QUICK = WaitingPace((100, 1_000), 300, 3)


class Looks(msgspec.Struct, frozen=True):
    """What was measured while so many waited."""

    waiting: int
    cpu_ms: list[float]  # per look, sample by sample
    wall_ms: list[float]
    request_ms: float  # of time per request that was made on the way, with its decision


def steps(stores: Iterable[str], pace: WaitingPace) -> int:
    """How many times `run` will say something."""
    return sum(1 + len(pace.waiting) for _ in stores)


async def run(stores: Iterable[str], pace: WaitingPace, say: Say) -> list[Row]:
    """All cases on these stores."""
    rows: list[Row] = []
    for store in stores:
        say(f"{store}: starting")
        with place_of(store) as place:
            found = await _measured(place, pace, say)
        rows += [_row(store, found[0], looks) for looks in found]
    return rows


async def _measured(place: Place, pace: WaitingPace, say: Say) -> list[Looks]:
    found: list[Looks] = []
    async with Bursar(await place.blank("waiting")) as bursar:
        engine, withdrawals = await _open(bursar)
        worker = Worker(engine)
        there = 0
        for waiting in pace.waiting:
            say(f"{place.store}: {waiting:,} withdrawals wait")
            begun = time.perf_counter()
            await _make(engine, withdrawals, there, waiting)
            each_ms = (time.perf_counter() - begun) / (waiting - there) * 1_000
            there = waiting
            while await worker.look():  # the first looks take over what the requests have left
                await engine.finish(DEADLINE_S)
            cpu_ms, wall_ms = list[float](), list[float]()
            for _ in range(pace.samples):
                cpu, begun = time.process_time(), time.perf_counter()
                for _ in range(pace.looks):
                    if await worker.look():
                        raise RuntimeError("a withdrawal that waits for a person was looked at")
                cpu_ms.append((time.process_time() - cpu) / pace.looks * 1_000)
                wall_ms.append((time.perf_counter() - begun) / pace.looks * 1_000)
            found.append(Looks(waiting, cpu_ms, wall_ms, each_ms))
    return found


async def _make(engine: Engine, withdrawals: Withdrawals, first: int, waiting: int) -> None:
    """Until so many wait for a person."""
    for start in range(first, waiting, CHUNK):
        numbers = range(start, min(waiting, start + CHUNK))
        made = await asyncio.gather(*[_request(withdrawals, number) for number in numbers])
        records = [await engine.record(MACHINE.name, id_) for id_ in made]
        done = await asyncio.gather(*[engine.process_now(record, DEADLINE_S) for record in records])
        if any(record.state != WAITING for record in done):
            raise RuntimeError(f"withdrawals are { ({record.state for record in done}) }, and should wait")


async def _request(withdrawals: Withdrawals, number: int) -> str:
    to = "0x" + (number + 1).to_bytes(ADDRESS_BYTES, "big").hex()
    wanted = WithdrawalRequest(user=USER, asset="USDT", chain=NAME, to=to, amount="1")
    return (await withdrawals.request(wanted, key=f"bench:{number}")).id


async def _open(bursar: Bursar) -> tuple[Engine, Withdrawals]:
    """Withdrawals on a chain whose nodes are never asked."""
    ledger = bursar.ledger
    await ledger.create_asset("USDT", precision=6)
    await ledger.create_asset("ETH", precision=18)
    await ledger.create_account(f"user:{USER}:funding")
    await ledger.create_account("external:bank", policy=ExternalAccount())
    await ledger.commit(deposit("external:bank", f"user:{USER}:funding", "USDT", "1000000", key="opening"))
    documents = Documents(bursar.store, (*PAYOUT_KINDS, *KINDS))
    network = ChainDocument(
        kind="evm", chain_id=777, native="ETH", fee_ceilings=Ranked(high=GWEI, normal=GWEI, low=GWEI)
    )
    policy = WithdrawalPolicy(
        asset="USDT", chain=NAME, maximum="1000", dual_above="1000", address_book=AddressBookRule.OFF
    )
    await _put(documents, CHAIN, NAME, network)
    await _put(documents, ASSET, f"usdt:{NAME}", AssetDocument(asset="USDT", chain=NAME, contract=TOKEN, decimals=6))
    await _put(documents, POLICY, f"usdt:{NAME}", policy)
    engine = Engine(bursar.store, ledger.writer, ())
    chain = chain_behind(network.network(NAME), ("http://node",), _no_node, bursar.store.ports, 1.0)
    payouts = Payouts(ledger, documents, {NAME: chain}, AbsentSigner(), engine=engine)
    return engine, Withdrawals(ledger, documents, payouts, engine=engine)


async def _no_node(_url: str, _headers: Mapping[str, str], _body: bytes, _timeout_s: float) -> NoReturn:
    raise ConnectionError("no node is asked here")


async def _put(documents: Documents, kind: DocumentKind[Any], name: str, body: msgspec.Struct) -> None:
    done = await documents.put(kind, name, body, base=0, author="ann", reason="benchmark")
    if isinstance(done, Proposal):
        await documents.approve(kind, name, done.hash, actor="ben", reason="benchmark")


def _row(store: str, fewest: Looks, looks: Looks) -> Row:
    """Looks per second of CPU, beside those at the fewest that wait: 1 is flat, less is dearer."""
    samples = list(zip(_rates(looks.cpu_ms), _rates(fewest.cpu_ms), strict=True))
    row = row_of(f"waiting-{looks.waiting}", store, looks.waiting, samples, against=f"the same with {fewest.waiting}")
    cpu = statistics.median(looks.cpu_ms)
    dearer = cpu / statistics.median(fewest.cpu_ms)
    row.note = f"{cpu:.3f} ms of CPU and {statistics.median(looks.wall_ms):.3f} ms of time a look, {dearer:.2f} times "
    row.note += f"the CPU with {fewest.waiting}; a request with its decision took {looks.request_ms:.1f} ms"
    return row


def _rates(each_ms: list[float]) -> list[float]:
    return [1_000 / one for one in each_ms]
