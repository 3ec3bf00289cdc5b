"""The scan of a chain: every final transfer to an address that was issued, stored before the cursor passes it.

One record per chain polls, as the watcher does. The final block is asked for before the addresses are read, and nothing
above it is scanned: an address that is issued since then has received nothing in those blocks. Each transfer becomes a
record of its own under the name that it has for ever, so reading blocks twice is harmless; the cursor is written down
with what was found, and now and then without.

Not seen: coin that a contract passes on, and tokens of which there is no document. What was sent to a chain before its
first scan is read after `rescan`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from bursar.engine import Answer, Engine, Flow, FlowRecord
from bursar.flows.deposits.arrivals import ARRIVALS, arrival_id, arrived
from bursar.flows.deposits.judging import Judging
from bursar.flows.payouts.derived import Owned
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.payouts.outside import OUTAGE_S, Outside, waits
from bursar.model.errors import AlreadyExists, RecordMoved
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.rails.chain import Arrival, Arrivals, Chain, DeepReorganisation, NodesUnavailable

SCANNING, ENDED = "scanning", "ended"
RESCAN: Final = "RESCAN"
SCANS: Final = Machine(
    name="deposit_scans",
    initial=SCANNING,
    states=(
        State(SCANNING, Kind.CALL, action="scan", effect=Effect.CONFIRM, poll_s=15.0),
        State(ENDED, Kind.TERMINAL),
    ),
    arrows=(
        Arrow(SCANNING, Outcome.SUCCESS, SCANNING),
        Arrow(SCANNING, Outcome.EXPLICIT_FAIL, ENDED),  # two operators force it: no address there is used any more
    ),
)
KEEP_BLOCKS: Final = 10_000  # the cursor is written down after so many blocks in which nothing arrived
AT_ONCE: Final = 256  # arrivals that are written at a time


class Scan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a chain's record: the last block that was read whole."""

    chain: str
    block: int = -1  # -1: begin at the last final block
    hash: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far this process has read a chain."""

    moved_s: float  # on its monotonic clock: when it came further, or began
    block: int  # -1: it has not looked yet
    behind: int  # blocks that are final and not read


class Scanning:
    """The action of `scanning`."""

    def __init__(self, out: Outside, judging: Judging, engine: Engine) -> None:
        self.out = out
        self._judging = judging
        self._engine = engine
        self._cursors: dict[str, Scan] = {}  # newer than those in the records
        self.progress: dict[str, Progress] = {}  # by chain, of this process

    async def scan(self, item: FlowRecord[Scan]) -> Answer:
        """Read on. What can't be read now is read later; the cursor never passes it."""
        name = item.body.chain
        document, chain = await self.out.documents.current(CHAIN, name), self.out.chains.get(name)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {name} are configured here")
        poll_s = 15.0 if document is None else max(document.body.block_ms / 1000, 0.05)
        cursor = self._cursor(item.body)
        try:
            final, final_hash = await chain.final_block()
            if cursor.block < 0 or (cursor.block > final and not cursor.hash):  # no block is passed over
                self._look(name, final, final)
                return self._moved(item, Scan(chain=name, block=final, hash=final_hash), 0, poll_s)
            if (cursor.block, cursor.hash) == (final, final_hash):  # no block has become final since
                self._look(name, final, final)
                return Answer(outcome=Outcome.PENDING, unchanged=True, decision=True, retry_after_s=poll_s)
            page, owned = await self._page(chain, cursor, final)
        except NodesUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        except DeepReorganisation as deep:
            run = f"bursar deposit rescan {name} BLOCK"
            why = f"{deep}; when it is clear what became of deposits of the last blocks: {run}"
            await self.out.alert(item.record, f"deposits of {name} stand still", "critical", why)
            return waits(item, deep.code, why, 60.0)
        await self._store(name, page, owned)
        self._look(name, page.up_to, final)
        after = Scan(chain=name, block=page.up_to, hash=page.up_to_hash)
        wait_s = poll_s if page.up_to >= final else 0.0
        # Without a hash operators have sent it back: written down at once, or it would begin there at each look.
        if page.found or not item.body.hash or page.up_to - item.body.block >= KEEP_BLOCKS:
            return self._moved(item, after, len(page.found), wait_s)
        self._cursors[name] = after
        return Answer(outcome=Outcome.PENDING, unchanged=True, decision=True, retry_after_s=wait_s)

    def expect(self, chain: str) -> None:
        """This process should scan a chain from now on, or see another one do it."""
        self.progress.setdefault(chain, Progress(moved_s=self._engine.ports.monotonic(), block=-1, behind=0))

    def _look(self, chain: str, block: int, final: int) -> None:
        """A look at the chain has come so far."""
        before = self.progress.get(chain)
        stays = before is not None and before.block == block
        moved_s = before.moved_s if stays and before is not None else self._engine.ports.monotonic()
        self.progress[chain] = Progress(moved_s=moved_s, block=block, behind=max(0, final - block))

    async def _page(self, chain: Chain, cursor: Scan, final: int) -> tuple[Arrivals, Mapping[str, Owned]]:
        owned = await self.out.wallets.derived.of_chain(cursor.chain)  # after the final block was asked for
        contracts = frozenset(contract for contract in await self._judging.assets(cursor.chain) if contract)
        return await chain.arrivals(owned, contracts, cursor.block, cursor.hash, final), owned

    def _cursor(self, body: Scan) -> Scan:
        kept = self._cursors.get(body.chain)
        return body if kept is None or kept.block < body.block or not body.hash else kept

    async def _store(self, chain: str, page: Arrivals, owned: Mapping[str, Owned]) -> None:
        """Write every arrival down, and have it judged; nothing of it may be lost before the cursor moves."""
        for start in range(0, len(page.found), AT_ONCE):
            some = page.found[start : start + AT_ONCE]
            for record in await asyncio.gather(*(self._start(chain, one, page, owned[one.to]) for one in some)):
                if record is not None:
                    self._engine.drive(record)

    async def _start(self, chain: str, arrival: Arrival, page: Arrivals, owner: Owned) -> Record | None:
        """Its record; None if that was there before."""
        body = arrived(chain, arrival, owner.wallet, owner.user, one_node=page.one_node)
        id_ = arrival_id(chain, arrival)
        try:
            return (await self._engine.start(ARRIVALS.name, body, id=id_, owner=str(owner.user))).record
        except (RecordMoved, AlreadyExists):
            return None

    def _moved(self, item: FlowRecord[Scan], cursor: Scan, found: int, wait_s: float) -> Answer:
        self._cursors[cursor.chain] = cursor
        return Answer(
            outcome=Outcome.PENDING,
            body=cursor,
            evidence={"block": cursor.block, "found": found},
            decision=True,
            retry_after_s=wait_s,
        )


def on_signal(item: FlowRecord[Scan], event: str, evidence: dict[str, object]) -> Scan | None:
    """Operators send it back to a block, whatever its hash is now. Never forward: blocks would be passed over. Pure."""
    if event != RESCAN:
        return None
    block = max(0, int(str(evidence["block"])) - 1)
    return Scan(chain=item.body.chain, block=block if item.body.block < 0 else min(block, item.body.block), hash="")


def flow(scanning: Scanning, rails: frozenset[str]) -> Flow[Scan]:
    """The flow of all chains."""
    return Flow(
        machine=SCANS,
        body=Scan,
        actions={"scan": scanning.scan},
        rails={"scan": lambda item: f"chain {item.body.chain}"},
        rail_names=rails,
        inbox_events=frozenset({RESCAN}),
        on_signal=on_signal,
        alarms=(),
        call_timeout_s=60.0,
    )
