"""The watcher of a chain: it reads every final transaction that our wallets have signed, for ever (W41).

One record per chain polls. A transaction whose hash no attempt has is a stolen key, a forgotten attempt or another
program with our keys: the wallet pays no more, and an incident is open until two people lift it. What took which nonce
is written down; that is how a payout knows that its nonce was used up by something else.

A final block that is not on the chain any more is worse: nothing is sent on that chain until two people have looked,
and what was confirmed and is gone is sent again, with the same bytes (W19).

The cursor moves with what was found, in one transaction. Between findings it is kept in memory: reading blocks twice is
harmless, and a row of history for every block would not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bursar.engine import Answer, Flow, FlowRecord, set_pause
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.payouts.machine import CHAINS, CONFIRMED, CONFIRMING, FAILED, MACHINE, REBASE, REPLACEMENTS
from bursar.flows.payouts.outside import OUTAGE_S, Outside, waits
from bursar.flows.payouts.payout import ATTEMPT, HASH, SPENT, Payout, attempt_key
from bursar.flows.payouts.wallets import nonce_key, wallet_rail
from bursar.model.flow_rows import Put, RowOperation
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.rails.chain import Chain, DeepReorganisation, NodesUnavailable, OwnTransaction, Page
from bursar.store.records import NEWEST

KEEP_BLOCKS: Final = 10_000  # the cursor is written down after so many blocks without a transaction of ours
LOOK_BACK: Final = 200  # blocks that are read again after a deep reorganisation, and whose payouts are sent again
PAGES_MAX: Final = 50  # of as many payouts, that are looked through for these
ASK_AGAIN_S: Final = 10.0  # after that: what was sent again has had the time to be included
ACTOR: Final = "watcher"


class Watch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a chain's record: the last block that was read whole."""

    chain: str
    block: int = -1  # -1: begin at the last final block
    hash: str = ""


class Watching:
    """The action of `watching`."""

    def __init__(self, out: Outside) -> None:
        self.out = out
        self._cursors: dict[str, Watch] = {}  # newer than those in the records

    def flow(self, rails: frozenset[str]) -> Flow[Watch]:
        """The flow of all chains."""
        return Flow(
            machine=CHAINS,
            body=Watch,
            actions={"watch": self.watch},
            rails={"watch": lambda item: f"chain {item.body.chain}"},
            rail_names=rails,
            row_kinds=(SPENT,),
            inbox_events=frozenset({REBASE}),
            on_signal=_rebased,
            retry=Retry(first_s=1.0, cap_s=60.0),
            alarms=(),
            call_timeout_s=60.0,
        )

    async def watch(self, item: FlowRecord[Watch]) -> Answer:
        """Read on. What can't be read now is read later; the cursor never passes it."""
        name = item.body.chain
        document = await self.out.documents.current(CHAIN, name)
        chain = self.out.chains.get(name)
        if chain is None:
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {name} are configured here")
        # A chain that is retired is read on: the keys of its wallets exist still.
        poll_s = 15.0 if document is None else max(document.body.block_ms / 1000, 0.05)
        addresses = await self.out.wallets.ever(name, chain.codec)
        cursor = self._cursor(item.body)
        try:
            if cursor.block < 0:
                block, block_hash = await chain.final_block()
                return self._moved(item, Watch(chain=name, block=block, hash=block_hash), (), poll_s)
            page = await chain.scan(addresses, cursor.block, cursor.hash)
        except NodesUnavailable as away:
            return waits(item, away.code, str(away), OUTAGE_S)
        except DeepReorganisation as deep:
            await self._incident(item, chain, deep)
            return waits(item, deep.code, str(deep), 60.0)
        return await self._read(item, page, addresses, poll_s)

    def _cursor(self, body: Watch) -> Watch:
        kept = self._cursors.get(body.chain)
        return body if kept is None or kept.block < body.block or not body.hash else kept

    async def _read(self, item: FlowRecord[Watch], page: Page, addresses: Mapping[str, str], poll_s: float) -> Answer:
        name = item.body.chain
        rows: list[RowOperation] = []
        for own in page.transactions:
            if not await self._is_known(name, own):
                await self._unknown(item, own, addresses[own.sender])
            if own.nonce is not None:
                key = f"{nonce_key(name, own.sender)}/{own.nonce}"
                seen = await self.out.store.read.flow_rows.get(CHAINS.name, SPENT.name, key)
                rows.append(
                    Put(SPENT, key, 0 if seen is None else seen.version, {"hash": own.hash, "block": own.block})
                )
        cursor = Watch(chain=name, block=page.up_to, hash=page.up_to_hash)
        # Without a hash operators have sent it back: written down at once, or it would begin there at each look.
        if rows or not item.body.hash or page.up_to - item.body.block >= KEEP_BLOCKS:
            return self._moved(item, cursor, tuple(rows), poll_s)
        self._cursors[name] = cursor
        return Answer(outcome=Outcome.PENDING, unchanged=True, decision=True, retry_after_s=poll_s)

    def _moved(self, item: FlowRecord[Watch], cursor: Watch, rows: tuple[RowOperation, ...], poll_s: float) -> Answer:
        self._cursors[cursor.chain] = cursor
        evidence = {"block": cursor.block, "found": len(rows)}
        return Answer(
            outcome=Outcome.PENDING,
            body=cursor,
            rows=rows,
            evidence=evidence,
            decision=True,
            retry_after_s=poll_s,
        )

    async def _is_known(self, chain: str, own: OwnTransaction) -> bool:
        rows = self.out.store.read.flow_rows
        for flow in (MACHINE.name, REPLACEMENTS.name):
            if await rows.get(flow, HASH.name, f"{chain}/{own.hash}") is not None:
                return True
        return False

    async def _unknown(self, item: FlowRecord[Watch], own: OwnTransaction, wallet: str) -> None:
        """A transaction of our wallet that no attempt explains: first the stop, then the alert."""
        reason = f"{own.hash} in block {own.block} (nonce {own.nonce}) is no payout of this database"
        await set_pause(self.out.store, "rail", wallet_rail(wallet), actor=ACTOR, reason=reason, two_people=True)
        await self.out.alert(item.record, f"unknown transaction of {wallet}", "critical", reason)

    async def _incident(self, item: FlowRecord[Watch], chain: Chain, deep: DeepReorganisation) -> None:
        """Stop the chain's sends, then send what is gone once more. Terminal records never move (W19): what became of
        them is asked again, and an answer that contradicts their end raises an alert and goes to suspense (T34)."""
        name = item.body.chain
        await set_pause(self.out.store, "rail", f"chain {name}", actor=ACTOR, reason=str(deep), two_people=True)
        await self.out.alert(item.record, f"final block of {name} reorganised", "critical", str(deep))
        for record, body in await self._taken_back(item):
            await self._ask_again(record)
            for number in range(1, body.attempts + 1):
                if raw := await self._raw(record.id, number, body.result.hash):
                    await chain.send(raw)

    async def _taken_back(self, item: FlowRecord[Watch]) -> list[tuple[Record, Payout]]:
        """Payouts whose last transaction may be gone: the newest that have failed (what used up their nonce, and others
        wait behind it), and those confirmed in the last blocks, among which may be many of other chains."""
        found = []
        for state, pages in ((CONFIRMED, PAGES_MAX), (FAILED, 1)):
            before = NEWEST
            for _ in range(pages):
                records = await self.out.store.read.records.list(
                    MACHINE.name, states=(state,), before=before, limit=LOOK_BACK
                )
                for record in records:
                    body = msgspec.json.decode(record.body, type=Payout)
                    is_near = state == FAILED or body.result.block >= item.body.block - LOOK_BACK
                    if body.payment.chain == item.body.chain and body.result.hash and is_near:
                        found.append((record, body))
                if len(records) < LOOK_BACK:
                    break
                before = records[-1].number
        return found

    async def _ask_again(self, record: Record) -> None:
        """Have the chain asked about a payout that has ended, as about one whose end people have decided."""
        history = await self.out.store.read.records.history(record.number)
        left = [step.version for step in history if step.source == CONFIRMING != step.target]
        if left:
            calls = self.out.store.single().forced_calls
            await calls.add(record.number, left[-1] - 1, CONFIRMING, int(ASK_AGAIN_S * 1e6))

    async def _raw(self, payout: str, number: int, hash_: str) -> bytes:
        for flow in (MACHINE.name, REPLACEMENTS.name):
            row = await self.out.store.read.flow_rows.get(flow, ATTEMPT.name, attempt_key(payout, number))
            found: dict[str, Any] = {} if row is None else msgspec.json.decode(row.body)
            if found.get("hash") == hash_:
                return bytes.fromhex(found["raw"])
        return b""


def _rebased(item: FlowRecord[Watch], event: str, evidence: dict[str, Any]) -> Watch | None:
    """Operators have looked at a deep reorganisation: read again from a block, whatever its hash is now. Pure."""
    if event != REBASE:
        return None
    block = max(0, item.body.block - LOOK_BACK)
    return Watch(chain=item.body.chain, block=block, hash="")
