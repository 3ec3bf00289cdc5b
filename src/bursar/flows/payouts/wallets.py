"""Which wallet pays: the one used least recently, then the one with least reserved, among those that can (W43).

`ranked` decides, pure. `Wallets` reads what it decides on: documents, the flow's rows, and balances at the last final
block. Reserved amounts cover everything that is not final yet, so `final balance - reserved` is what is free, whatever
has been mined meanwhile. The rows have the last word: a reservation beyond the bound is refused in the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from bursar.documents import Documents
from bursar.flows.payouts.derived import DerivedWallets, OwnAddresses
from bursar.flows.payouts.documents import WALLET, Role, WalletDocument, WalletStatus
from bursar.flows.payouts.machine import MACHINE
from bursar.flows.payouts.payout import NONCE, RESERVED, UNCONFIRMED
from bursar.model.flow_rows import FlowRow, numbered
from bursar.model.records import Record
from bursar.rails.chain import Chain, Codec, InvalidAddress
from bursar.store import Store
from bursar.together import Together

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
    """The hot wallets of a chain at a moment, with what was chosen here since."""

    at_s: float
    wallets: dict[str, Candidate]


Asked = tuple[Chain, str, str]  # with an asset and its contract


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet that a payout has chosen, until that is written down."""

    record: int  # of the payout, and its version when it chose: a higher one is what was written
    version: int
    used_us: int
    chain: str
    wallet: str
    needs: dict[str, int]  # by asset

    def count_in(self, chain: str, look: Look, sign: int = 1) -> None:
        """Count it in a look at the wallets of a chain; -1: no longer."""
        known = look.wallets.get(self.wallet) if chain == self.chain else None
        if known is not None:
            reserved = {code: held + sign * self.needs.get(code, 0) for code, held in known.reserved.items()}
            look.wallets[self.wallet] = msgspec.structs.replace(
                known,
                last_used_us=max(known.last_used_us, self.used_us),
                unconfirmed=known.unconfirmed + sign,
                reserved=reserved,
            )


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
        self.derived = DerivedWallets(store)
        self._looks: dict[tuple[str, str], Look] = {}  # by chain and asset
        self.fresh_s = FRESH_S
        self._fresh: dict[tuple[str, str], Together[Asked, Look]] = {}  # apart: a chain may hang
        self._pauses = Together(self._stopped)
        self._ever: dict[str, tuple[int, dict[str, str]]] = {}  # by chain, with the number of the newest document
        self._choices: dict[str, Choice] = {}  # of payouts, by their ids
        self._used_us = 0  # when a wallet was chosen here last

    async def of_chain(self, chain: str) -> dict[str, WalletDocument]:
        """Every wallet of a chain, by name."""
        found = await self._documents.all(WALLET)
        return {name: current.body for name, current in found.items() if current.body.chain == chain}

    async def own_addresses(self, chain: str, codec: Codec | None, asked: str = "") -> dict[str, str]:
        """Address → name, of the wallets that have documents; and of a derived one, if that is what is asked about."""
        found = (await self.of_chain(chain)).items()
        own = {canonical(codec, chain, wallet.address): name for name, wallet in found}
        address = canonical(codec, chain, asked)
        if asked and (derived := await self.derived.owner(chain, address)) is not None:
            own[address] = derived.wallet
        return own

    async def ever(self, chain: str, codec: Codec | None) -> OwnAddresses:
        """Address → name of every wallet that there ever was: a retired one still has its key (W41)."""
        return OwnAddresses(await self.documented(chain, codec), await self.derived.of_chain(chain))

    async def documented(self, chain: str, codec: Codec | None) -> dict[str, str]:
        """The same of those that have documents, retired ones too.

        Read again when any document has changed: the watchers ask at each look, and there may be thousands.
        """
        number = await self._documents.number()  # first: what changes meanwhile is read the next time
        kept = self._ever.get(chain)
        if kept is None or kept[0] != number:
            kept = self._ever[chain] = (number, await self._every(chain, codec))
        return kept[1]

    async def _every(self, chain: str, codec: Codec | None) -> dict[str, str]:
        found, after = dict[str, str](), ""
        while page := await self._documents.list(WALLET, after=after):
            after = page[-1].name
            bodies = [(one.name, WALLET.read(one)) for one in page]
            found |= {canonical(codec, chain, body.address): name for name, body in bodies if body.chain == chain}
        return found

    async def payers(self, chain: Chain, requested: str, asset: str, contract: str) -> list[Candidate]:
        """The wallets that may pay an asset, as they stand: the one that is requested, or every hot one."""
        key = (chain.network.name, asset)
        look = None if requested else self._looks.get(key)
        if requested:
            look = await self._look_at(chain, asset, contract, requested)
        elif look is None or self._store.ports.monotonic() - look.at_s > self.fresh_s:
            look = await self._fresh.setdefault(key, Together(self._look)).ask((chain, asset, contract))
        assert look is not None  # one for each that was asked for
        stopped = await self._pauses.ask(None)
        assert stopped is not None  # a read answers all that asked
        return [wallet for wallet in look.wallets.values() if wallet_rail(wallet.name) not in stopped]

    async def _stopped(self, asked: list[None]) -> dict[None, frozenset[str]]:
        """The rails that are paused; a wallet is one."""
        found = frozenset(pause.name for pause in await self._store.read.pauses.list() if pause.kind == "rail")
        return dict.fromkeys(asked, found)

    async def _look(self, asked: list[Asked]) -> dict[Asked, Look]:
        """The hot wallets of some chains, each for an asset, as they stay in use for a moment."""
        found = {}
        for one in asked:
            chain, asset, contract = one
            found[one] = self._looks[chain.network.name, asset] = await self._look_at(chain, asset, contract, "")
        return found

    async def _look_at(self, chain: Chain, asset: str, contract: str, requested: str) -> Look:
        """The rows of wallets in a few reads, their balances all at once.

        Of those that may pay alone: nodes are asked about each, and there may be thousands that are swept.
        """
        await self._forget_written()  # before the rows are read: those have it then
        name, at_s = chain.network.name, self._store.ports.monotonic()
        known = await self.of_chain(name)
        if requested and requested not in known and (derived := await self.derived.wallet(requested)) is not None:
            known = {requested: derived.document()} if derived.chain == name else {}
        wallets = {
            wallet: document
            for wallet, document in sorted(known.items())
            if (wallet == requested if requested else document.role is Role.HOT)
            and document.status is WalletStatus.ACTIVE
            and not misspelt(chain, document.address)
        }
        addresses = {wallet: document.address for wallet, document in wallets.items()}
        uses = await self.uses(name, addresses, (asset, chain.network.native))
        contracts = (contract,) if contract else ()
        balances = await asyncio.gather(*(chain.balances(address, contracts) for address in addresses.values()))
        look = Look(at_s=at_s, wallets={})
        for (wallet, document), held in zip(wallets.items(), balances, strict=True):
            look.wallets[wallet] = Candidate(
                name=wallet,
                address=document.address,
                role=document.role,
                last_used_us=uses[wallet].last_used_us,
                unconfirmed=uses[wallet].unconfirmed,
                reserved=uses[wallet].reserved,
                coin=held.coin,
                tokens=held.tokens,
            )
        for choice in self._choices.values():
            choice.count_in(name, look)
        return look

    async def _forget_written(self) -> None:
        chosen = {choice.record: (payout, choice) for payout, choice in self._choices.items()}
        for record in await self._store.read.records.by_numbers(list(chosen)) if chosen else ():
            payout, choice = chosen[record.number]
            if record.version > choice.version and self._choices.get(payout) is choice:
                del self._choices[payout]

    async def misspelt(self, chain: Chain) -> list[str]:
        """Why wallets are left out: the signer knows each under the one spelling of its address."""
        found = sorted((await self.of_chain(chain.network.name)).items())
        return [f"{name}: {why}" for name, wallet in found if (why := misspelt(chain, wallet.address))]

    async def use(self, chain: str, wallet: str, address: str, assets: Iterable[str]) -> Use:
        """How far a wallet is in use."""
        return (await self.uses(chain, {wallet: address}, assets))[wallet]

    async def uses(self, chain: str, wallets: Mapping[str, str], assets: Iterable[str]) -> dict[str, Use]:
        """How far some wallets (name → address) are in use, as the flow's rows have it. No node is asked."""
        rows, flow, codes = self._store.read.flow_rows, MACHINE.name, tuple(assets)
        reserved = await rows.by_keys(flow, RESERVED.name, [f"{w}/{code}" for w in wallets for code in codes])
        unconfirmed = await rows.by_keys(flow, UNCONFIRMED.name, wallets)
        keys = {wallet: nonce_key(chain, address) for wallet, address in wallets.items()}
        counters = await rows.by_keys(flow, NONCE.name, keys.values())
        last = {w: numbered(key, counters[key].amount - 1) for w, key in keys.items() if key in counters}
        taken = await rows.by_keys(flow, NONCE.name, last.values())
        return {
            wallet: Use(
                last_used_us=_taken_us(taken.get(last.get(wallet, ""))),
                unconfirmed=_amount(unconfirmed.get(wallet)),
                reserved={code: _amount(reserved.get(f"{wallet}/{code}")) for code in codes},
            )
            for wallet in wallets
        }

    def choose(self, payout: Record, chain: str, wallet: str, needs: dict[str, int]) -> None:
        """A payout takes a wallet, for so much of some assets. It counts at once: those that choose at the same time
        must not all choose the same wallet, and be refused when they are written down."""
        self.drop(payout.id)
        self._used_us = max(self._store.ports.now_us(), self._used_us + 1)
        choice = self._choices[payout.id] = Choice(
            record=payout.number,
            version=payout.version,
            used_us=self._used_us,
            chain=chain,
            wallet=wallet,
            needs=needs,
        )
        for (name, _), look in self._looks.items():
            choice.count_in(name, look)

    def used_us(self, payout: str) -> int:
        """When it took its wallet: later than every other choice here."""
        choice = self._choices.get(payout)
        return self._used_us if choice is None else choice.used_us

    def drop(self, payout: str) -> None:
        """A payout has not taken the wallet after all."""
        choice = self._choices.pop(payout, None)
        if choice is not None:
            for (name, _), look in self._looks.items():
                choice.count_in(name, look, -1)


def _amount(row: FlowRow | None) -> int:
    return 0 if row is None else row.amount


def _taken_us(nonce: FlowRow | None) -> int:
    """When a nonce was taken; 0: none was."""
    return 0 if nonce is None else int(msgspec.json.decode(nonce.body).get("at_us", 0))


def misspelt(chain: Chain, address: str) -> str:
    """What is wrong with the way in which a document writes an address; "": nothing. Pure."""
    try:
        right = chain.codec.check_address(chain.network.name, address)
    except InvalidAddress as error:
        return str(error)
    return "" if address == right else f"its document has the address {address}, which is written {right}"


def no_address(chain: Chain, address: str) -> str:
    """Why a text is no address on a chain; "": it is one, if perhaps misspelt. Pure."""
    try:
        chain.codec.check_address(chain.network.name, address)
    except InvalidAddress as error:
        return str(error)
    return ""


def canonical(codec: Codec | None, chain: str, address: str) -> str:
    """An address as its chain writes it; one that is none as it is: a document may have anything. Pure."""
    try:
        return address if codec is None else codec.check_address(chain, address)
    except InvalidAddress:
        return address


def nonce_key(chain: str, address: str) -> str:
    """The key of a wallet's nonces."""
    return f"{chain}/{address}"


def wallet_rail(wallet: str) -> str:
    """The name under which a wallet is paused, as a rail: what it has sent is confirmed, and it pays nothing new."""
    return f"wallet {wallet}"
