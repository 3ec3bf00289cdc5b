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
from bursar.rails.chain import Chain
from bursar.store import Store

FRESH_S: Final = 0.25  # how old a look at all wallets may be


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet as it stands."""

    name: str
    address: str
    role: Role
    last_used_us: int
    unconfirmed: int
    reserved: dict[str, int]  # by asset
    coin: int
    tokens: dict[str, int]  # by contract

    def free(self, asset: str, contract: str) -> int:
        """What it can still pay of an asset."""
        return (self.tokens.get(contract, 0) if contract else self.coin) - self.reserved.get(asset, 0)


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """How far a wallet is in use. Reserved amounts are in the chain's smallest units."""

    last_used_us: int  # 0: never
    unconfirmed: int
    reserved: dict[str, int]  # by asset


class Look(msgspec.Struct):
    """All wallets of a chain at a moment, with what was chosen here since."""

    at_s: float
    wallets: dict[str, Candidate]


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
    """The wallets of all chains, as this process knows them.

    What was read stays in use for a moment, with what was chosen here since: payouts that are assigned at the same time
    share one look, and do not all choose the same wallet.
    """

    def __init__(self, store: Store, documents: Documents) -> None:
        self._store = store
        self._documents = documents
        self._looks: dict[tuple[str, str], Look] = {}  # by chain and asset
        self.fresh_s = FRESH_S
        self._used_us = 0  # when a wallet was chosen here last

    async def of_chain(self, chain: str) -> dict[str, WalletDocument]:
        """Every wallet of a chain, by name."""
        found = await self._documents.all(WALLET)
        return {name: current.body for name, current in found.items() if current.body.chain == chain}

    async def own_addresses(self, chain: str) -> dict[str, str]:
        """Address → name."""
        return {wallet.address: name for name, wallet in (await self.of_chain(chain)).items()}

    async def ever(self, chain: str) -> dict[str, str]:
        """Address → name of every wallet that there ever was: a retired one still has its key (W41)."""
        found = [(one.name, WALLET.read(one)) for one in await self._documents.list(WALLET)]
        return {body.address: name for name, body in found if body.chain == chain}

    async def payers(self, chain: Chain, requested: str, asset: str, contract: str) -> list[Candidate]:
        """The wallets that may pay an asset, as they stand: the one that is requested, or every hot one."""
        key, now = (chain.network.name, asset), self._store.ports.monotonic()
        look = self._looks.get(key)
        if look is None or now - look.at_s > self.fresh_s:
            look = self._looks[key] = Look(at_s=now, wallets=await self._look(chain, asset, contract))
        stopped = {pause.name for pause in await self._store.read.pauses.list() if pause.kind == "rail"}
        return [
            wallet
            for wallet in look.wallets.values()
            if (wallet.name == requested if requested else wallet.role is Role.HOT)
            and wallet_rail(wallet.name) not in stopped
        ]

    async def _look(self, chain: Chain, asset: str, contract: str) -> dict[str, Candidate]:
        name, found = chain.network.name, {}
        for wallet, document in sorted((await self.of_chain(name)).items()):
            if document.status is WalletStatus.ACTIVE:
                found[wallet] = await self._candidate(chain, wallet, document, asset, contract)
        return found

    async def _candidate(
        self, chain: Chain, wallet: str, document: WalletDocument, asset: str, contract: str
    ) -> Candidate:
        used = await self.use(chain.network.name, wallet, document.address, (asset, chain.network.native))
        balances = await chain.balances(document.address, (contract,) if contract else ())
        return Candidate(
            name=wallet,
            address=document.address,
            role=document.role,
            last_used_us=used.last_used_us,
            unconfirmed=used.unconfirmed,
            reserved=used.reserved,
            coin=balances.coin,
            tokens=balances.tokens,
        )

    async def use(self, chain: str, wallet: str, address: str, assets: Iterable[str]) -> Use:
        """How far a wallet is in use, as the flow's rows have it. No node is asked."""
        rows, flow, reserved = self._store.read.flow_rows, MACHINE.name, {}
        for code in assets:
            row = await rows.get(flow, RESERVED.name, f"{wallet}/{code}")
            reserved[code] = 0 if row is None else row.amount
        unconfirmed = await rows.get(flow, UNCONFIRMED.name, wallet)
        key = nonce_key(chain, address)
        counter = await rows.get(flow, NONCE.name, key)
        last = None if counter is None else await rows.get(flow, NONCE.name, numbered(key, counter.amount - 1))
        return Use(
            last_used_us=0 if last is None else int(msgspec.json.decode(last.body).get("at_us", 0)),
            unconfirmed=0 if unconfirmed is None else unconfirmed.amount,
            reserved=reserved,
        )

    def chosen(self, chain: str, wallet: str, needs: dict[str, int]) -> int:
        """A wallet was chosen just now, for so much of some assets: the time of it, later than every other."""
        self._used_us = max(self._store.ports.now_us(), self._used_us + 1)
        for (name, _), look in self._looks.items():
            known = look.wallets.get(wallet) if name == chain else None
            if known is not None:
                reserved = {code: held + needs.get(code, 0) for code, held in known.reserved.items()}
                look.wallets[wallet] = msgspec.structs.replace(
                    known, last_used_us=self._used_us, unconfirmed=known.unconfirmed + 1, reserved=reserved
                )
        return self._used_us


def nonce_key(chain: str, address: str) -> str:
    """The key of a wallet's nonces."""
    return f"{chain}/{address}"


def wallet_rail(wallet: str) -> str:
    """The name under which a wallet is paused, as a rail: what it has sent is confirmed, and it pays nothing new."""
    return f"wallet {wallet}"
