"""I9: every wallet, users' own among them, has on its chain what the ledger says that it has, while payouts go on.

Minus the balance of `external:wallet:{chain}:{wallet}` is what the ledger says. The chain is asked first, for balances
at a final block, and the ledger is read after it. So whatever has left a wallet by that block is booked by then, or
belongs to a payout that is open and has signed bytes: its amount and its worst fee may be gone already. On account
chains the wallet's nonce at that block says whether: of a payout whose nonce is not used, nothing is gone. A sweep that
is open has debited the wallet it goes to when it started, and brings nothing before the chain says so. Hence, per
wallet and asset:

    balance on the chain >= what the ledger says - what open payouts may have taken, or not have brought yet

Less than that is broken: money is gone that no payout explains. More is a note: a deposit that is not booked yet, or
coin that was never booked. A deficit can hide behind a payout whose transaction is final, or a sweep, until that is
booked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from bursar.audit import UNREADABLE, Finding, said
from bursar.engine import FlowRecord, set_pause
from bursar.flows.payouts.derived import ADDRESSES, body_of
from bursar.flows.payouts.documents import ASSET, CHAIN, AssetDocument, ChainDocument, WalletDocument
from bursar.flows.payouts.invariants import NUMBERS_MAX, PAGE, read_wallets
from bursar.flows.payouts.machine import MACHINE, OPEN, REPLACEMENTS
from bursar.flows.payouts.payout import ATTEMPT, Attempt, Payout, attempt_key, held, wallet_account
from bursar.flows.payouts.payouts import Payouts
from bursar.flows.payouts.wallets import no_address
from bursar.model.accounts import Account
from bursar.model.actors import REASON_LENGTH_MAX
from bursar.model.errors import BursarError
from bursar.model.money import Asset, Money
from bursar.rails.chain import Balances, Chain
from bursar.store import Store
from bursar.store.records import NEWEST
from bursar.store.tables import Tables

log = logging.getLogger("bursar.payouts")

NAMED_MAX: Final = 10  # wallets that a note names
ASKED_MAX: Final = (
    1_000  # wallets that nodes are asked about at one final block: they forget its balances after a while
)
Place = tuple[str, str]  # account of the wallet, code of the asset


class OnChain(msgspec.Struct, frozen=True):
    """An asset as a chain has it."""

    contract: str  # "": the chain's own coin
    decimals: int


class _Known(msgspec.Struct):
    """What the documents say."""

    wallets: dict[str, WalletDocument]
    assets: dict[str, dict[str, OnChain]]  # by chain and code


class _Loose(msgspec.Struct):
    """By how much wallets may have less than is booked, because of payouts that are open."""

    taken: Counter[Place]  # by what was signed and may be final; in units of the chain
    debited: Counter[Place]  # for what a sweep or a refill has not brought yet; in units of the ledger
    unreadable: list[str]  # payouts of which that is not known


class _Found(msgspec.Struct):
    """What the comparison has found."""

    checked: int = 0
    short: list[str] = []
    notes: list[str] = []
    not_judged: int = 0


async def wallets_cover(store: Store, chains: Mapping[str, Chain]) -> Finding:
    """I9 of all wallets. Those whose chain is not among `chains`, or does not answer, are named and not judged."""
    monotonic = store.ports.monotonic
    started = monotonic()
    try:
        found = await _compared(store, chains)
    except UNREADABLE as error:
        found = _Found(notes=[f"not judged to the end: {said(error)}"], not_judged=1)
    return Finding(
        invariant="I9",
        ok=not found.short,
        checked=found.checked,
        broken=found.short,
        seconds=monotonic() - started,
        judged=not found.not_judged,
        not_judged=found.not_judged,
        note="; ".join(found.notes),
    )


async def stop_if_short(payouts: Payouts) -> Finding:
    """I9 once: if a wallet has less than the ledger says, payouts stop until two people have looked."""
    finding = await wallets_cover(payouts.ledger.store, payouts.chains)
    if not finding.ok:
        reason = f"I9 is broken: {'; '.join(finding.broken)}"[:REASON_LENGTH_MAX]
        store = payouts.ledger.store
        await set_pause(store, "flow", MACHINE.name, actor="audit", reason=reason, two_people=True)
        await payouts.engine.alert(None, "wallets have less than the ledger says", "critical", reason)
    return finding


async def watch_wallets(payouts: Payouts, interval_s: float) -> None:
    """Until cancelled: compare the wallets with the ledger from time to time. 0 seconds: never."""
    while interval_s:
        await payouts.engine.ports.sleep(interval_s)
        finding = await stop_if_short(payouts)
        if finding.note:
            log.warning("I9: %s", finding.note)


async def _compared(store: Store, chains: Mapping[str, Chain]) -> _Found:
    known = await _known(store.read)
    there, away = await _asked(known, chains)
    found = _Found()
    async with store.snapshot(unhurried=True) as tables:  # after the chains were asked: see above
        loose = await _in_flight(tables, {name: balances.nonce for name, balances in there.items()})
        assets = await tables.rules.assets()
        codes = {asset.id: code for code, asset in assets.items()}
        heads = await tables.accounts.heads(wallet_account(known.wallets[wallet].chain, wallet) for wallet in there)
        sums = await tables.balances.of_many([head.id for head in heads.values()])
        for wallet, balances in sorted(there.items()):
            chain = known.wallets[wallet].chain
            booked = _booked(heads.get(wallet_account(chain, wallet)), sums, codes)
            on_chain = known.assets.get(chain, {})
            for code in sorted((on_chain.keys() | booked.keys()) & assets.keys()):  # of no other is anything booked
                found.checked += 1
                place = (wallet_account(chain, wallet), code)
                _compare(found, wallet, assets[code], on_chain.get(code), balances, booked.get(code, 0), loose, place)
    found.notes += [*loose.unreadable, *([_named(away)] if away else [])]
    found.not_judged = len(away) + len(loose.unreadable)
    return found


def _compare(
    found: _Found,
    wallet: str,
    asset: Asset,
    on_chain: OnChain | None,
    balances: Balances,
    booked: int,
    loose: _Loose,
    place: Place,
) -> None:
    """One asset of one wallet, in the smaller of the two smallest units."""
    decimals = asset.precision if on_chain is None else on_chain.decimals
    scale = max(decimals, asset.precision)
    of_chain, of_ledger = 10 ** (scale - decimals), 10 ** (scale - asset.precision)
    has = 0
    if on_chain is not None:
        has = (balances.tokens.get(on_chain.contract, 0) if on_chain.contract else balances.coin) * of_chain
    says = booked * of_ledger
    may_miss = loose.taken[place] * of_chain + loose.debited[place] * of_ledger
    if says - may_miss <= has <= says:
        return
    there, said_, open_ = (f"{Money(asset.code, scale, minor)} {asset.code}" for minor in (has, says, may_miss))
    text = f"{wallet} has {there} at block {balances.block}, the ledger says {said_}"
    if has > says:
        found.notes.append(f"more than is booked: {text}")
    else:
        found.short.append(f"{text}, and open payouts explain {open_} of it")


def _named(away: Mapping[str, str]) -> str:
    parts = [f"{wallet} ({why})" for wallet, why in sorted(away.items())]
    rest = f" and {len(parts) - NAMED_MAX} more" if len(parts) > NAMED_MAX else ""
    return "not asked: " + ", ".join(parts[:NAMED_MAX]) + rest


async def _known(tables: Tables) -> _Known:
    """Wallets, and assets by chain, retired ones too: what they had they still have."""
    known = _Known(await read_wallets(tables) | await _derived(tables), {})
    for document in await tables.documents.list(CHAIN.name):
        chain = msgspec.json.decode(document.body, type=ChainDocument)
        known.assets[document.name] = {chain.native: OnChain("", chain.decimals)}
    after = ""
    while page := await tables.documents.list(ASSET.name, after=after):
        after = page[-1].name
        for document in page:
            asset = msgspec.json.decode(document.body, type=AssetDocument)
            known.assets.setdefault(asset.chain, {})[asset.asset] = OnChain(asset.contract, asset.decimals)
    return known


async def _derived(tables: Tables) -> dict[str, WalletDocument]:
    """Users' wallets, of which the ledger says that they have something: of the others nothing can be missing."""
    found: dict[str, WalletDocument] = {}
    before = NEWEST
    while page := await tables.records.list(ADDRESSES.name, before=before, limit=PAGE):
        before = page[-1].number
        wallets = {record.id: body_of(record).document() for record in page}
        paths = {wallet_account(wallet.chain, name): name for name, wallet in wallets.items()}
        heads = await tables.accounts.heads(paths)
        sums = await tables.balances.of_many([head.id for head in heads.values()])
        found |= {
            paths[path]: wallets[paths[path]] for path, head in heads.items() if any(sums.get(head.id, {}).values())
        }
    return found


async def _asked(known: _Known, chains: Mapping[str, Chain]) -> tuple[dict[str, Balances], dict[str, str]]:
    """What each wallet has at a final block; and the wallets that could not be asked, with the reason."""
    there: dict[str, Balances] = {}
    away: dict[str, str] = {}
    for name in sorted({wallet.chain for wallet in known.wallets.values()}):
        wallets = {one: wallet.address for one, wallet in known.wallets.items() if wallet.chain == name}
        chain = chains.get(name)
        if chain is None:
            away |= dict.fromkeys(wallets, f"no nodes of {name} here")
            continue
        contracts = sorted({asset.contract for asset in known.assets.get(name, {}).values() if asset.contract})
        wrong = {one: why for one, address in wallets.items() if (why := no_address(chain, address))}
        away |= wrong
        right = sorted(wallets.keys() - wrong.keys())
        for start in range(0, len(right), ASKED_MAX):
            some = {one: wallets[one] for one in right[start : start + ASKED_MAX]}
            for wallet, found in (await _of_chain(chain, some, contracts)).items():
                if isinstance(found, str):
                    away[wallet] = found
                else:
                    there[wallet] = found
    return there, away


async def _of_chain(chain: Chain, wallets: Mapping[str, str], contracts: Sequence[str]) -> dict[str, Balances | str]:
    """What some wallets (name → address) have, or why that can't be said. All at one final block, where a chain can."""
    try:
        found = await chain.balances_of(list(wallets.values()), contracts)
    except BursarError as error:  # no nodes, or an asset's contract that is no token: the other chains are judged
        return dict.fromkeys(wallets, str(error))
    return {name: found[address] for name, address in wallets.items()}


def _booked(head: Account | None, sums: Mapping[int, dict[int, int]], codes: Mapping[int, str]) -> dict[str, int]:
    """What the ledger says that a wallet has, by asset code, in the ledger's smallest units."""
    found = {} if head is None else sums.get(head.id, {})
    return {codes[asset]: -total for asset, total in found.items() if total}


async def _in_flight(tables: Tables, nonces: Mapping[str, int | None]) -> _Loose:
    """What open payouts may have taken from wallets, or not have brought yet. `nonces`: of the wallets."""
    loose = _Loose(Counter(), Counter(), [])
    before = NEWEST
    while page := await tables.records.list(MACHINE.name, states=OPEN, before=before, limit=PAGE):
        before = page[-1].number
        items = []
        for record in page:
            try:
                items.append(FlowRecord(record, msgspec.json.decode(record.body, type=Payout)))
            except UNREADABLE as error:
                loose.unreadable.append(f"payout {record.id} can't be read ({said(error)})")
        worst = await _worst_fees(tables, items)
        for item in items:
            body, payment = item.body, item.body.payment
            if body.wallet and may_have_paid(body, nonces.get(body.wallet)):
                path = wallet_account(payment.chain, body.wallet)
                loose.taken[path, payment.asset] += body.order_amount
                loose.taken[path, body.native] += worst.get(item.id, 0)
            if body.requested_wallet:  # a sweep or a refill: the wallet that receives it is debited already
                loose.debited[held(item).account, payment.asset] += held(item).amount
    return loose


def may_have_paid(body: Payout, nonce: int | None) -> bool:
    """Whether a transaction of an open payout may be in balances of its wallet that were read at this nonce. Pure."""
    slots = [one.slot.nonce for one in body.tries]
    if nonce is None or not slots or None in slots:
        return bool(body.tries or body.replacements or body.imported)
    return any(slot is not None and slot < nonce for slot in slots)


async def _worst_fees(tables: Tables, items: list[FlowRecord[Payout]]) -> dict[str, int]:
    """The most that the transaction of each payout may cost: one of its attempts is mined, the dearest at worst."""
    keys = {
        attempt_key(item.id, number): item.id
        for item in items
        for number in range(1, min(item.body.attempts, NUMBERS_MAX) + 1)
    }
    worst: dict[str, int] = {}
    for flow in (MACHINE.name, REPLACEMENTS.name):
        for key, row in (await tables.flow_rows.by_keys(flow, ATTEMPT.name, keys)).items():
            attempt = msgspec.json.decode(row.body, type=Attempt)
            worst[keys[key]] = max(worst.get(keys[key], 0), attempt.fee.worst)
    return worst
