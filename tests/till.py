"""A program that pays out on the paper chain: documents, wallets with money, and a user who has some."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.builders import Place
from tests.paper_chain import PaperChain, PaperSigner

from bursar import deposit
from bursar.documents import Documents
from bursar.engine import Engine
from bursar.flows.catalog import KINDS as CATALOG_KINDS
from bursar.flows.payouts import PayoutRequest, Payouts, PayoutView
from bursar.flows.payouts.documents import (
    ASSET,
    CHAIN,
    WALLET,
    AssetDocument,
    ChainDocument,
    Ranked,
    Role,
    WalletDocument,
)
from bursar.flows.payouts.payout import FEES, GAS, SUSPENSE, wallet_account
from bursar.ledger import Ledger
from bursar.model.documents import Document, Proposal
from bursar.model.records import Record
from bursar.ports import Ports

CONTRACT = "@token"
DOCUMENT = ChainDocument(
    kind="paper",
    chain_id=7,
    native="ETH",
    decimals=18,
    fee_ceilings=Ranked(high=200, normal=100, low=20),
    block_ms=10,
    bump_after_s=0,
    unconfirmed_max=3,
)


@dataclass
class Town:
    """What outlives a process: the chain and the signer."""

    document: ChainDocument = DOCUMENT
    name: str = "paper"  # of the chain
    chain: PaperChain = field(init=False)
    signer: PaperSigner = field(default_factory=PaperSigner)

    def __post_init__(self) -> None:
        self.chain = PaperChain(self.document.network(self.name))
        for wallet in ("@hot1", "@hot2"):
            self.chain.coin[wallet] = 10**9
            self.chain.tokens[CONTRACT, wallet] = 10**10
        self.chain.tokens[CONTRACT, "@hot1"] += 100 * 10**6  # which are alice's


@dataclass(frozen=True)
class Till:
    """One process that pays out."""

    town: Town
    payouts: Payouts
    engine: Engine
    ledger: Ledger
    documents: Documents

    async def request(self, amount: str = "5", *, key: str = "k1", **more: Any) -> PayoutView:
        wanted = {
            "account": "alice",
            "asset": "USDT",
            "chain": self.town.name,
            "to": "@bob",
            "source": f"test:{key}",
        } | more
        return await self.payouts.request(PayoutRequest(amount=amount, mandate="auto", **wanted), key=key)

    async def record(self, id_: str) -> Record:
        found = await self.engine.get("payouts", id_)
        assert found is not None
        return found

    async def step(self, id_: str) -> Record:
        """One step of a payout."""
        await self.engine.step(await self.record(id_))
        return await self.record(id_)

    async def until(self, id_: str, state: str, steps: int = 12) -> Record:
        """Step until it is there."""
        record = await self.record(id_)
        for _ in range(steps):
            if record.state == state:
                return record
            record = await self.step(id_)
        raise AssertionError(f"it is {record.state}, not {state}: {record.error}")

    async def replace(self, id_: str, number: int) -> Record:
        """Drive a replacement to its end."""
        record = await self.engine.get("replacements", f"{id_}-r{number}")
        assert record is not None
        for _ in range(4):
            await self.engine.step(record)
            record = await self.engine.get("replacements", record.id)
            assert record is not None
        return record

    async def minor(self, account: str, asset: str = "USDT") -> int:
        return (await self.ledger.balance(account, asset)).minor

    async def reserved(self) -> dict[str, int]:
        """What is reserved of wallets, totals only."""
        rows = await self.ledger.store.read.flow_rows.by_prefix("payouts", "reserved")
        rows += await self.ledger.store.read.flow_rows.by_prefix("payouts", "unconfirmed")
        return {f"{row.kind} {row.key}": row.amount for row in rows if row.state == "total"}

    async def put(self, kind: Any, name: str, body: msgspec.Struct) -> None:
        """A document, by two people."""
        head = await self.documents.current(kind, name, fresh=True)
        base = 0 if head is None else head.document.version
        done = await self.documents.put(kind, name, body, base=base, author="ann", reason="test")
        if isinstance(done, Proposal):
            done = await self.documents.approve(kind, name, done.hash, actor="ben", reason="test")
        assert isinstance(done, Document)


@contextlib.asynccontextmanager
async def till(
    place: Place, town: Town, *, ports: Ports | None = None, worker: str = "local", reconciles: bool = True
) -> AsyncIterator[Till]:
    """A process; the first one furnishes the database. It `reconciles` itself, unless flows are to be added first."""
    async with place.bursar(ports) as bursar:
        ledger = bursar.ledger
        documents = Documents(bursar.store, CATALOG_KINDS)
        engine = Engine(bursar.store, ledger.writer, (), worker=worker)
        payouts = Payouts(ledger, documents, {town.name: town.chain}, town.signer, engine=engine)
        payouts.out.wallets.fresh_s = -1.0  # no test waits for a look to become old
        found = Till(town, payouts, engine, ledger, documents)
        if await documents.current(CHAIN, town.name, fresh=True) is None:
            await found.put(CHAIN, town.name, town.document)
            await found.put(
                ASSET,
                f"usdt:{town.name}",
                AssetDocument(asset="USDT", chain=town.name, contract=CONTRACT, decimals=6, minimum="1000"),
            )
            await found.put(ASSET, f"eth:{town.name}", AssetDocument(asset="ETH", chain=town.name, decimals=18))
            for name in ("hot1", "hot2"):
                await found.put(WALLET, name, WalletDocument(chain=town.name, address=f"@{name}", role=Role.HOT))
            await payouts.prepare()
            for name in ("hot1", "hot2"):
                books = wallet_account(town.name, name)
                await ledger.commit(deposit(books, "bob", "USDT", "10000", key=f"open {name}"))
            await ledger.commit(deposit(wallet_account(town.name, "hot1"), "alice", "USDT", "100", key="alice"))
        if reconciles:
            await payouts.reconciling.look()
        try:
            yield found
        finally:
            await engine.finish(0)


__all__ = ["CONTRACT", "DOCUMENT", "FEES", "GAS", "SUSPENSE", "Till", "Town", "till", "wallet_account"]
