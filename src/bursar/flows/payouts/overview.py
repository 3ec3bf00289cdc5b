"""Wallets, chains and fees as operators look at them: documents, what is in use, and what the nodes say now.

Nothing is written, and a chain whose nodes do not answer is shown with that as its trouble: a list must not be missing
because one chain is away. Not here: which wallet pays (wallets), what a payout is (payouts).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from bursar.documents import Current, Documents
from bursar.flows.payouts.checks import PRIORITIES, PayoutCode, PayoutRefused, PayoutRequest
from bursar.flows.payouts.documents import (
    ASSET,
    CHAIN,
    WALLET,
    AssetDocument,
    ChainDocument,
    WalletDocument,
    asset_name,
)
from bursar.flows.payouts.payouts import Payouts
from bursar.flows.payouts.wallets import Wallets, misspelt, ranked, short_of, wallet_rail
from bursar.model.authorizations import Payment
from bursar.model.money import format_minor
from bursar.rails.chain import (
    Chain,
    Fee,
    InvalidAddress,
    NodeStatus,
    NodesUnavailable,
    Order,
    Shape,
    WalletShort,
)
from bursar.store import Store

SILENT: Final = "no answer in time"
NOT_CONFIGURED: Final = "no nodes are configured here"


class WalletView(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet. Amounts are in units of their assets, balances those at the last final block."""

    name: str
    chain: str
    role: str
    address: str
    status: str
    version: int  # of its document
    paused: str  # why it pays nothing new; "": it does
    last_used_us: int | None
    unconfirmed: int
    reserved: dict[str, str]
    balances: dict[str, str] | None  # None: the nodes can't say; `trouble` says why
    trouble: str


class ChainView(msgspec.Struct, frozen=True, kw_only=True):
    """A chain: its document, and its nodes as they answer now."""

    name: str
    version: int
    document: ChainDocument
    assets: dict[str, AssetDocument]  # by the name of their documents
    paused: str
    configured: bool  # whether its nodes are configured in this process
    nodes: tuple[NodeStatus, ...]
    trouble: str


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """What a payout would offer now. Nothing is reserved: a moment later it may be another fee and another wallet."""

    chain: str
    asset: str
    amount: str
    to: str
    priority: str
    wallet: str
    gas_limit: int
    price: str  # the most per unit of gas, tip included, in the coin's smallest unit
    tip: str
    native: str
    fee_max: str  # the most that it can cost, in units of the coin


class Overview:
    """Reads what operators look at. `within_s` bounds each question to nodes."""

    def __init__(self, store: Store, documents: Documents, chains: Mapping[str, Chain], *, within_s: float) -> None:
        self._store = store
        self._documents = documents
        self._chains = chains
        self._within_s = within_s
        self._wallets = Wallets(store, documents)

    async def wallets(self) -> list[WalletView]:
        """Every wallet, by name."""
        found = await self._documents.all(WALLET, fresh=True)
        chains, assets = await self._documents.all(CHAIN), await self._documents.all(ASSET)
        paused = await self._paused()
        return list(
            await asyncio.gather(
                *(self._wallet(name, one, chains, assets, paused) for name, one in sorted(found.items()))
            )
        )

    async def _wallet(
        self,
        name: str,
        current: Current[WalletDocument],
        chains: Mapping[str, Current[ChainDocument]],
        assets: Mapping[str, Current[AssetDocument]],
        paused: Mapping[str, str],
    ) -> WalletView:
        wallet = current.body
        decimals = {one.body.asset: one.body.decimals for one in assets.values() if one.body.chain == wallet.chain}
        contracts = {one.body.asset: one.body.contract for one in assets.values() if one.body.chain == wallet.chain}
        if (chain := chains.get(wallet.chain)) is not None:
            decimals[chain.body.native] = chain.body.decimals
            contracts[chain.body.native] = ""
        use = await self._wallets.use(wallet.chain, name, wallet.address, sorted(decimals))
        balances, trouble = await self._balances(wallet, contracts)
        return WalletView(
            name=name,
            chain=wallet.chain,
            role=wallet.role.value,
            address=wallet.address,
            status=wallet.status.value,
            version=current.document.version,
            paused=paused.get(wallet_rail(name), ""),
            last_used_us=use.last_used_us or None,
            unconfirmed=use.unconfirmed,
            reserved=_in_units(use.reserved, decimals),
            balances=None if balances is None else _in_units(balances, decimals),
            trouble=trouble,
        )

    async def _balances(
        self, wallet: WalletDocument, contracts: Mapping[str, str]
    ) -> tuple[dict[str, int] | None, str]:
        chain = self._chains.get(wallet.chain)
        if chain is None:
            return None, NOT_CONFIGURED
        if why := misspelt(chain, wallet.address):
            return None, why
        try:
            async with asyncio.timeout(self._within_s):
                found = await chain.balances(wallet.address, sorted({one for one in contracts.values() if one}))
        except TimeoutError:
            return None, SILENT
        except (NodesUnavailable, InvalidAddress) as error:
            return None, str(error)
        return {code: found.tokens[to] if to else found.coin for code, to in contracts.items()}, ""

    async def chains(self) -> list[ChainView]:
        """Every chain, by name."""
        found = await self._documents.all(CHAIN, fresh=True)
        assets = await self._documents.all(ASSET)
        paused = await self._paused()
        return list(
            await asyncio.gather(*(self._chain(name, one, assets, paused) for name, one in sorted(found.items())))
        )

    async def _chain(
        self,
        name: str,
        current: Current[ChainDocument],
        assets: Mapping[str, Current[AssetDocument]],
        paused: Mapping[str, str],
    ) -> ChainView:
        chain, nodes, trouble = self._chains.get(name), tuple[NodeStatus, ...](), NOT_CONFIGURED
        if chain is not None:
            try:
                async with asyncio.timeout(self._within_s):
                    nodes, trouble = await chain.nodes(), ""
            except TimeoutError:
                trouble = SILENT
            if nodes and not any(node.usable for node in nodes):
                trouble = "no node can be used"
        return ChainView(
            name=name,
            version=current.document.version,
            document=current.body,
            assets={key: one.body for key, one in sorted(assets.items()) if one.body.chain == name},
            paused=paused.get(f"chain {name}", ""),
            configured=chain is not None,
            nodes=nodes,
            trouble=trouble,
        )

    async def _paused(self) -> dict[str, str]:
        """Rails that are paused, and why."""
        pauses = await self._store.read.pauses.list()
        return {pause.name: f"{pause.actor}: {pause.reason}" for pause in pauses if pause.kind == "rail"}


def _in_units(amounts: Mapping[str, int], decimals: Mapping[str, int]) -> dict[str, str]:
    return {code: format_minor(amount, decimals[code]) for code, amount in sorted(amounts.items())}


async def quote(payouts: Payouts, wanted: PayoutRequest, *, within_s: float) -> Quote:
    """The fee that a payout would offer now, with every check that a request gets, and a dry run at the nodes."""
    payment, native = await payouts.check(wanted, "quote")
    chain = payouts.chains[payment.chain]
    asset = await payouts.documents.current(ASSET, asset_name(payment.asset, payment.chain))
    document = await payouts.documents.current(CHAIN, payment.chain)
    assert asset is not None and document is not None  # they were there a moment ago
    order = Order(
        payout="quote",
        to=payment.to,
        contract=payment.contract,
        amount=int(payment.amount_raw),
        memo=payment.memo,
        gas_limit_max=asset.body.gas_limit_max,
    )
    try:
        async with asyncio.timeout(within_s):
            wallet, fee = await _offer(payouts, chain, wanted, payment, order, native)
    except TimeoutError:
        raise NodesUnavailable(payment.chain, SILENT) from None
    return Quote(
        chain=payment.chain,
        asset=payment.asset,
        amount=wanted.amount,
        to=payment.to,
        priority=wanted.priority,
        wallet=wallet,
        gas_limit=fee.gas_limit,
        price=str(fee.price),
        tip=str(fee.tip),
        native=native,
        fee_max=format_minor(fee.worst, document.body.decimals),
    )


async def _offer(
    payouts: Payouts, chain: Chain, wanted: PayoutRequest, payment: Payment, order: Order, native: str
) -> tuple[str, Fee]:
    """The wallet that would pay, and its fee; PayoutRefused names what each wallet lacks."""
    short: list[str] = []
    candidates = await payouts.out.wallets.payers(chain, wanted.wallet, payment.asset, payment.contract)
    for one in ranked(candidates, payment.asset):
        try:
            fee = await chain.quote(one.address, order, Shape.PAY, PRIORITIES[wanted.priority])
        except WalletShort as lacks:
            short.append(f"{one.name}: {lacks}")
            continue
        if lack := short_of(one, payment.asset, payment.contract, order.amount, native, fee.worst):
            short.append(f"{one.name} has too little {lack} that is free")
            continue
        return one.name, fee
    why = "; ".join(short) or f"{payment.chain} has no active hot wallet"
    raise PayoutRefused(PayoutCode.NO_WALLET, f"no wallet can pay this now: {why}")
