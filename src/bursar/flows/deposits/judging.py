"""What an arrival is: a deposit that is credited, money that is no user's, a transfer of our own, or held.

`judge` decides, pure, from all that is known. `Judging` reads what it decides on, and makes the accounts that the entry
needs: the wallet's own external account, so that what the ledger says of an address can be compared with the chain
(I9), and the user's funding account, which a first deposit makes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from bursar.engine import Answer, Engine, FlowRecord
from bursar.flows.deposits.arrivals import OURS, PARK, Arrived, booked, held
from bursar.flows.deposits.rules import DEPOSITS, DepositRules
from bursar.flows.deposits.sweep import OPEN, SWEEPS, open_key
from bursar.flows.payouts.derived import ADDRESS, ADDRESSES, Owned, address_key
from bursar.flows.payouts.documents import ASSET, CHAIN, AssetDocument
from bursar.flows.payouts.machine import MACHINE, PENDING, REPLACEMENTS
from bursar.flows.payouts.outside import OUTAGE_S, Outside, fails, waits
from bursar.flows.payouts.payout import HASH, WALLETS, Payout, wallet_account
from bursar.flows.payouts.wallets import canonical
from bursar.flows.transfers.request import SUSPENSE_DEPOSITS, funding_account
from bursar.ledger import Ledger
from bursar.model.accounts import Account, AccountStatus, ExternalAccount, NoOverdraft, Policy, SystemAccount
from bursar.model.actors import same_person
from bursar.model.flow_rows import RowState
from bursar.model.money import MINOR_MAX, Asset
from bursar.model.outcome import Outcome
from bursar.together import Together

PENDING_MAX: Final = 1_000  # payouts that are looked through: what was put back is the newest
CLOSED: Final = "account closed"  # the reason of the alert


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What an arrival is judged by."""

    asset: Asset | None  # of its contract, or the chain's coin; None: no document names it
    decimals: int = 0  # on the chain
    one_node_limit: int = 0  # in the chain's smallest units
    rules: DepositRules | None
    own_payout: bool = False  # a payout between wallets of ours has made it
    from_wallet: str = ""  # of ours, that has sent it, and no payout explains it
    closed: bool = False  # the user's account


class Credit(msgspec.Struct, frozen=True):
    """It is the user's."""

    minor: int
    rest: int  # in the chain's smallest units, too little for the ledger's


class Park(msgspec.Struct, frozen=True):
    """It is there, and is booked in suspense. Its user reads why, too."""

    minor: int
    why: str


class Hold(msgspec.Struct, frozen=True):
    """People look first."""

    why: str


class Worthless(msgspec.Struct, frozen=True):
    """Nothing of it can be booked."""

    why: str


class Own(msgspec.Struct, frozen=True):
    """A payout of ours, which books it."""


Verdict = Credit | Park | Hold | Worthless | Own


def judge(body: Arrived, facts: Facts) -> Verdict:
    """What an arrival is. What is not known counts against crediting it. Pure."""
    if facts.own_payout:
        return Own()
    raw, people = int(body.raw), distinct(body.confirmed_by)
    if body.disputed and people < 2:
        return Hold(f"{body.disputed}; two people confirm it, if it is there")
    if facts.from_wallet and people < 2:
        return Hold(f"{facts.from_wallet} has sent it, and no payout of ours explains that; two people confirm it")
    asset = facts.asset
    if asset is None:
        return Worthless("no document names its asset, so it can't be booked")
    if body.one_node and raw > facts.one_node_limit and not people:
        return Hold("only one node has seen it, and it is above the limit of the asset for that; a person confirms it")
    minor, rest = ledger_units(raw, facts.decimals, asset.precision)
    if minor > MINOR_MAX:
        return Worthless("it does not fit in the ledger")
    if not minor:
        return Worthless(f"it is less than the smallest unit of {asset.code}")
    accepted = None if facts.rules is None else facts.rules.assets.get(asset.code)
    if accepted is None:
        return Park(minor, f"{asset.code} is not accepted from {body.chain}")
    if minor < asset.minor(accepted.minimum):
        return Park(minor, f"it is below the minimum, {accepted.minimum} {asset.code}")
    if facts.closed:
        return Park(minor, "the account is closed")
    return Credit(minor, rest)


def ledger_units(raw: int, decimals: int, precision: int) -> tuple[int, int]:
    """A chain's smallest units as the ledger's, rounded down, and what is left of the chain's. Pure."""
    if decimals <= precision:
        return raw * int(10 ** (precision - decimals)), 0
    return divmod(raw, int(10 ** (decimals - precision)))


def distinct(people: tuple[str, ...]) -> int:
    """How many people these are. Pure."""
    found: list[str] = []
    for name in people:
        if not any(same_person(name, other) for other in found):
            found.append(name)
    return len(found)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the database has of an arrival."""

    rules: DepositRules | None
    on_chain: AssetDocument | None  # of its contract, or the chain's coin; None: no document names it
    asset: Asset | None  # in the ledger
    payout: str = ""  # of ours, that has made it
    from_wallet: str = ""  # of ours, that has sent it
    statuses: dict[str, AccountStatus] = {}  # of the accounts that it may be booked between, if they are there
    open_sweep: str = ""  # of its asset, at its wallet
    booked: int = 0  # of its asset, at its wallet, in the ledger's smallest units


class Judging:
    """The action of `arrived`. What many arrivals ask of the database at one time is asked once."""

    def __init__(self, out: Outside, ledger: Ledger, engine: Engine) -> None:
        self.out = out
        self._ledger = ledger
        self._engine = engine
        self._looks: dict[str, Together[Arrived, Known]] = {}  # by chain: the documents of one may be unreadable
        self._accounts = Together(self._make_accounts)
        self._assets: dict[str, tuple[int, dict[str, AssetDocument]]] = {}  # with the number of the newest document

    async def judge(self, item: FlowRecord[Arrived]) -> Answer:
        """Look at everything, decide, and say where it is booked."""
        body = item.body
        if body.chain not in self.out.chains:  # nothing could be compared: our own would look like a stranger's
            return waits(item, "CHAIN_NOT_CONFIGURED", f"no nodes of {body.chain} are configured here", OUTAGE_S)
        found = await self._looks.setdefault(body.chain, Together(self._look)).ask(body)
        assert found is not None  # one for each that was asked for
        if found.from_wallet and not found.payout and (payout := await self._not_sent_yet(body)):
            why = f"{payout} has ordered just this, and does not know yet that it was sent: was the database restored?"
            return waits(item, "OWN_PAYOUT", why, OUTAGE_S)
        facts = Facts(
            asset=found.asset,
            decimals=0 if found.on_chain is None else found.on_chain.decimals,
            one_node_limit=0 if found.on_chain is None else int(found.on_chain.one_node_limit),
            rules=found.rules,
            own_payout=bool(found.payout) and await self._is_between_wallets(found.payout),
            from_wallet="" if found.payout else found.from_wallet,
            closed=found.statuses.get(funding_account(body.user)) is AccountStatus.CLOSED,
        )
        match judge(body, facts):
            case Own():
                return Answer(outcome=Outcome.SUCCESS, event=OURS, decision=True)
            case Worthless(why=why):
                return msgspec.structs.replace(fails("WORTHLESS", why), decision=True)
            case Hold(why=why):
                await self.out.alert(item.record, "arrival is held", "warning", f"{item.id}: {why}")
                return held(body, why)
            case Park(minor=minor, why=why):
                if facts.closed:
                    message = f"{item.id} is for user {body.user}, whose account is closed: find out whose it is"
                    await self.out.alert(item.record, CLOSED, "critical", message)
                return booked(await self._placed(body, found, SUSPENSE_DEPOSITS, minor), PARK, why)
            case Credit(minor=minor, rest=rest):
                placed = await self._placed(body, found, funding_account(body.user), minor)
                return booked(placed, rest=str(rest), by_event_alone=body.by_event_alone)

    async def assets(self, chain: str) -> dict[str, AssetDocument]:
        """By contract, every asset that there ever was on a chain: what arrives of a retired one is there all the same.

        The chain's coin ("") is there without a document of its own.
        """
        number = await self.out.documents.number()  # first: what changes meanwhile is read the next time
        kept = self._assets.get(chain)
        if kept is None or kept[0] != number:
            kept = self._assets[chain] = (number, await self._all_assets(chain))
        return kept[1]

    async def _all_assets(self, chain: str) -> dict[str, AssetDocument]:
        rail = self.out.chains.get(chain)
        codec = None if rail is None else rail.codec
        native = CHAIN.read(await self.out.documents.get(CHAIN, chain))
        found, after = {"": AssetDocument(asset=native.native, chain=chain, decimals=native.decimals)}, ""
        while page := await self.out.documents.list(ASSET, after=after):
            after = page[-1].name
            for body in map(ASSET.read, page):
                if body.chain == chain:
                    found[canonical(codec, chain, body.contract) if body.contract else ""] = body
        return found

    async def _is_between_wallets(self, payout: str) -> bool:
        """Whether a payout is a sweep or a refill. A user's payout to another user's address here is a deposit."""
        record = await self._engine.record(MACHINE.name, payout)
        return msgspec.json.decode(record.body, type=Payout).payment.account.startswith(WALLETS)

    async def _not_sent_yet(self, body: Arrived) -> str:
        """A payout between wallets of ours that this may be, once it has learned what the signer has signed (W33)."""
        for record in await self.out.store.read.records.list(MACHINE.name, states=(PENDING,), limit=PENDING_MAX):
            payment = msgspec.json.decode(record.body, type=Payout).payment
            if (payment.chain, payment.to, payment.amount_raw) == (body.chain, body.to, body.raw):
                return record.id
        return ""

    async def _look(self, asked: list[Arrived]) -> dict[Arrived, Known]:
        """What the database has of several arrivals on one chain, in a handful of reads, however many they are."""
        rows, name = self.out.store.read.flow_rows, asked[0].chain
        hashes = {f"{one.chain}/{one.hash}" for one in asked}
        made = dict[str, str]()
        for flow in (REPLACEMENTS.name, MACHINE.name):
            for key, row in (await rows.by_keys(flow, HASH.name, hashes)).items():
                made[key] = str(msgspec.json.decode(row.body)["payout"])
        senders = {address_key(one.chain, one.sender) for one in asked}
        derived = {
            key: msgspec.json.decode(row.body, type=Owned).wallet
            for key, row in (await rows.by_keys(ADDRESSES.name, ADDRESS.name, senders)).items()
        }
        current, rail = await self.out.documents.current(DEPOSITS, name), self.out.chains.get(name)
        rules = None if current is None else current.body
        wallets = await self.out.wallets.documented(name, None if rail is None else rail.codec)
        on_chain = await self.assets(name)
        known = await self._ledger.known_assets(*{asset.asset for asset in on_chain.values()})
        assets = {one: known.get(on_chain[one.contract].asset) for one in asked if one.contract in on_chain}
        sweeps = await self._open_sweeps(assets, rules)
        heads = await self.out.store.read.accounts.heads({path for one in asked for path in _paths(one)})
        sums = await self._booked(asked, heads)  # after the sweeps: one that ends meanwhile leaves less
        found = {}
        for one in asked:
            asset, books = assets.get(one), heads.get(_paths(one)[0])
            found[one] = Known(
                rules=rules,
                on_chain=on_chain.get(one.contract),
                asset=asset,
                payout=made.get(f"{one.chain}/{one.hash}", ""),
                from_wallet=wallets.get(one.sender) or derived.get(address_key(one.chain, one.sender), ""),
                statuses={path: heads[path].status for path in _paths(one) if path in heads},
                open_sweep="" if asset is None else sweeps.get(open_key(one.wallet, asset.code), ""),
                booked=0 if asset is None or books is None else -sums.get(books.id, {}).get(asset.id, 0),
            )
        return found

    async def _open_sweeps(self, assets: Mapping[Arrived, Asset | None], rules: DepositRules | None) -> dict[str, str]:
        """The sweeps that are open, by the keys of their rows, where any are made."""
        swept = {
            one: asset for one, asset in assets.items() if asset is not None and sweep_at(rules, asset) is not None
        }
        keys = {open_key(one.wallet, asset.code) for one, asset in swept.items()}
        found = await self.out.store.read.flow_rows.by_keys(SWEEPS.name, OPEN.name, keys)
        held_ = {key: row for key, row in found.items() if row.state is RowState.HELD}
        return {key: str(msgspec.json.decode(row.body)["sweep"]) for key, row in held_.items()}

    async def _booked(self, asked: list[Arrived], heads: Mapping[str, Account]) -> dict[int, dict[int, int]]:
        """What is booked at the wallets' accounts (number → asset → sum). Those are external: a cache has it."""
        numbers = {heads[path].id for one in asked if (path := _paths(one)[0]) in heads}
        return await self.out.store.read.balances.cached_of_many(sorted(numbers)) if numbers else {}

    # --- where it is booked ------------------------------------------------------------------------------------------

    async def _placed(self, body: Arrived, found: Known, account: str, minor: int) -> Arrived:
        """The body with its entry's facts, once the accounts are there; and the sweep that goes with it."""
        books = wallet_account(body.chain, body.wallet)
        missing = [path for path in (books, account) if path not in found.statuses]
        await asyncio.gather(*(self._accounts.ask(path) for path in missing))
        assert found.asset is not None  # what has none is worthless
        placed = {"account": account, "asset": found.asset.code, "minor": str(minor)}
        after = msgspec.structs.replace(body, **placed, sweeps=False, open_sweep="")
        at = sweep_at(found.rules, found.asset)
        if at is None:
            return after
        if found.open_sweep:
            return msgspec.structs.replace(after, open_sweep=found.open_sweep)
        return msgspec.structs.replace(after, sweeps=found.booked + minor >= at)

    async def _make_accounts(self, paths: list[str]) -> dict[str, None]:
        """Accounts that entries need, all in one transaction."""
        await self._ledger.require_accounts({path: _policy(path) for path in paths})
        return {}


def _paths(body: Arrived) -> tuple[str, ...]:
    """The accounts that it may be booked between."""
    return wallet_account(body.chain, body.wallet), funding_account(body.user), SUSPENSE_DEPOSITS


def sweep_at(rules: DepositRules | None, asset: Asset) -> int | None:
    """From how much on an address is swept, in the ledger's smallest units; None: it is not. Pure."""
    accepted = None if rules is None or not rules.sweep_to else rules.assets.get(asset.code)
    return asset.minor(accepted.sweep_at) if accepted is not None and accepted.sweep_at else None


def _policy(account: str) -> Policy:
    if account.startswith(WALLETS):
        return ExternalAccount()
    return SystemAccount() if account == SUSPENSE_DEPOSITS else NoOverdraft()
