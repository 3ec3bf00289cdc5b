"""Which wallet pays: the one used least recently, then the one with least reserved, among those that can (W43).

`ranked` decides, pure. `Wallets` reads what it decides on: documents, the flow's rows, and balances at the last final
block. Reserved amounts cover everything that is not final yet, so `final balance - reserved` is what is free, whatever
has been mined meanwhile. The rows have the last word: a reservation beyond the bound is refused in the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from bursar.documents import Documents
from bursar.flows.payouts.documents import WALLET, Role, WalletDocument, WalletStatus
from bursar.flows.payouts.machine import MACHINE
from bursar.flows.payouts.payout import NONCE, RESERVED, UNCONFIRMED
from bursar.model.flow_rows import numbered
from bursar.rails.chain import Balances, Chain
from bursar.store import Store

FRESH_S: Final = 1.0  # how old balances may be


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet as it stands."""

    name: str
    address: str
    last_used_us: int
    unconfirmed: int
    reserved: dict[str, int]  # by asset
    coin: int
    tokens: dict[str, int]  # by contract

    def free(self, asset: str, contract: str) -> int:
        """What it can still pay of an asset."""
        return (self.tokens.get(contract, 0) if contract else self.coin) - self.reserved.get(asset, 0)


def ranked(candidates: Iterable[Candidate], asset: str) -> list[Candidate]:
    """In the order in which they are asked to pay. Pure."""
    return sorted(candidates, key=lambda c: (c.last_used_us, c.reserved.get(asset, 0), c.name))


def short_of(candidate: Candidate, asset: str, contract: str, amount: int, native: str, gas: int) -> str:
    """The asset that a wallet has too little of for a payment with this much gas; "" if it can pay. Pure."""
    if not contract:
        return native if candidate.free(native, "") < amount + gas else ""
    if candidate.free(asset, contract) < amount:
        return asset
    return native if candidate.free(native, "") < gas else ""


class Wallets:
    """The wallets of all chains, as this process knows them."""

    def __init__(self, store: Store, documents: Documents) -> None:
        self._store = store
        self._documents = documents
        self._balances: dict[tuple[str, tuple[str, ...]], tuple[float, Balances]] = {}
        self._used: dict[str, int] = {}  # chosen here, and perhaps not written yet: else all would choose the same one

    async def of_chain(self, chain: str) -> dict[str, WalletDocument]:
        """Every wallet of a chain, by name."""
        found = await self._documents.all(WALLET)
        return {name: current.body for name, current in found.items() if current.body.chain == chain}

    async def own_addresses(self, chain: str) -> dict[str, str]:
        """Address → name."""
        return {wallet.address: name for name, wallet in (await self.of_chain(chain)).items()}

    async def payers(self, chain: Chain, requested: str, assets: dict[str, str]) -> list[Candidate]:
        """The wallets that may pay, as they stand. `assets`: code → contract of what is asked for, native included."""
        name, found = chain.network.name, []
        stopped = {pause.name for pause in await self._store.read.pauses.list() if pause.kind == "rail"}
        for wallet, document in sorted((await self.of_chain(name)).items()):
            wanted = wallet == requested if requested else document.role is Role.HOT
            if wanted and document.status is WalletStatus.ACTIVE and wallet_rail(wallet) not in stopped:
                found.append(await self._candidate(chain, wallet, document, assets))
        return found

    async def _candidate(
        self, chain: Chain, wallet: str, document: WalletDocument, assets: dict[str, str]
    ) -> Candidate:
        rows, flow = self._store.read.flow_rows, MACHINE.name
        reserved = {}
        for asset in assets:
            row = await rows.get(flow, RESERVED.name, f"{wallet}/{asset}")
            reserved[asset] = 0 if row is None else row.amount
        unconfirmed = await rows.get(flow, UNCONFIRMED.name, wallet)
        key = nonce_key(chain.network.name, document.address)
        counter = await rows.get(flow, NONCE.name, key)
        last = None if counter is None else await rows.get(flow, NONCE.name, numbered(key, counter.amount - 1))
        used = 0 if last is None else int(msgspec.json.decode(last.body).get("at_us", 0))
        balances = await self._fresh(chain, document.address, tuple(sorted(c for c in assets.values() if c)))
        return Candidate(
            name=wallet,
            address=document.address,
            last_used_us=max(used, self._used.get(wallet, 0)),
            unconfirmed=0 if unconfirmed is None else unconfirmed.amount,
            reserved=reserved,
            coin=balances.coin,
            tokens=balances.tokens,
        )

    async def _fresh(self, chain: Chain, address: str, contracts: tuple[str, ...]) -> Balances:
        key, now = (f"{chain.network.name}/{address}", contracts), self._store.ports.monotonic()
        known = self._balances.get(key)
        if known is None or now - known[0] > FRESH_S:
            known = self._balances[key] = (now, await chain.balances(address, contracts))
        return known[1]

    def chosen(self, wallet: str) -> int:
        """A wallet was chosen just now: the time of it, later than every other."""
        now_us = max(self._store.ports.now_us(), *self._used.values(), 0) + 1
        self._used[wallet] = now_us
        return now_us


def nonce_key(chain: str, address: str) -> str:
    """The key of a wallet's nonces."""
    return f"{chain}/{address}"


def wallet_rail(wallet: str) -> str:
    """The name under which a wallet is paused, as a rail: what it has sent is confirmed, and it pays nothing new."""
    return f"wallet {wallet}"
