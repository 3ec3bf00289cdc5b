"""validate_and_plan: the one place that decides whether a commit is right.

It trusts no caller, not even `resolve`: a hand-made envelope gets the same checks. The checks run in this order, and
the first that fails names the refusal, so that an envelope is always refused for the same reason:

 1. shape: something is consumed or created (InvalidEntry), within 65,535 each (TooManyPostings)
 2. no posting twice (DuplicateConsume)
 3. the book admits every asset and account (BookRefuses); no asset is suspended (AssetSuspended)
 4. every account exists (UnknownAccount), is as pinned (StalePin), not closed (AccountClosed), not frozen
    (AccountFrozen)
 5. what is consumed is live, and is what the ledger says it is (PostingNotLive)
 6. amounts are not zero and fit (AmountTooLarge); negative ones only where the policy allows (NegativePosting)
 7. conservation: per asset, consumed = created (ConservationBroken)
 8. the intent is honoured: per account and asset, created - consumed = what its movements say (InvalidEntry)
 9. where the balance must cover it: that balance is guarded (BalanceNotGuarded) and suffices (InsufficientFunds);
    floors of capped overdrafts (FloorExceeded)

Commit safety map: what makes each of these still true when the rows are written is in docs/concepts/safety.md.
"""

from __future__ import annotations

from bursar.model.accounts import Account, AccountStatus, check_active
from bursar.model.entries import EntryKind
from bursar.model.envelope import Envelope, Plan
from bursar.model.errors import (
    AmountTooLarge,
    AssetSuspended,
    BalanceNotGuarded,
    BookRefuses,
    ConservationBroken,
    DuplicateConsume,
    FloorExceeded,
    InsufficientFunds,
    InvalidEntry,
    NegativePosting,
    PostingNotLive,
    StalePin,
    TooManyPostings,
    UnknownAccount,
)
from bursar.model.ledger_state import LedgerState
from bursar.model.money import MINOR_MAX, MINOR_MIN, Asset, AssetStatus, format_minor
from bursar.model.postings import POSTINGS_MAX


def validate_and_plan(
    envelope: Envelope,
    state: LedgerState,
    pins: tuple[tuple[str, bytes], ...] = (),
    *,
    no_overdraft: bool = False,
    outside: bool = False,
) -> Plan:
    """Check an envelope against the ledger's state; return what to write, or raise the refusal.

    With `no_overdraft`, the payer's balance must cover it, whatever the policy allows (T42). With `outside`, it books
    what has happened outside: neither a freeze nor a suspended asset refuses it (T35).
    """
    if not pins and _fast_path_valid(envelope, state, no_overdraft):
        return Plan(envelope, envelope.id(), ())
    _check_shape(envelope)
    _check_book(envelope, outside)
    wanted = _wanted(envelope)
    _check_accounts(envelope, state, wanted, pins, outside)
    accounts = {a.id: a for a in envelope.accounts}
    assets = {a.id: a for a in envelope.assets}
    got = _check_value(envelope, state, accounts, assets)
    if got != wanted:  # equal, value is conserved too: every movement takes what it gives
        _check_difference(envelope, assets, got, wanted)
    if no_overdraft:
        _check_guarded(accounts, assets, got)
    guarded = any(a.capped for a in envelope.accounts)
    floors = _check_floors(state, accounts, assets, got, no_overdraft) if guarded else ()
    return Plan(envelope, envelope.id(), floors)


def _fast_path_valid(envelope: Envelope, state: LedgerState, no_overdraft: bool = False) -> bool:
    """All nine checks at once for most envelopes: one account pays another with one posting or none, neither has an
    overdraft, the book has no limits. It only ever accepts; what it is not sure of gets the full checks.
    """
    legs, consumes, creates, accounts = envelope.legs, envelope.consumes, envelope.creates, envelope.accounts
    if len(legs) != 1 or len(consumes) > 1 or not 1 <= len(creates) <= 2 or len(accounts) != 2:
        return False
    book, assets = envelope.book, envelope.assets
    if len(assets) != 1 or assets[0].status is not AssetStatus.ACTIVE:
        return False
    if book.assets or book.accounts or envelope.kind is EntryKind.COMPACT:
        return False
    for account in accounts:
        if state.accounts.get(account.path) is not account or account.book:
            return False
        if account.status is not AccountStatus.ACTIVE or (account.pays_from_postings and not account.no_overdraft):
            return False
    leg, paid, number = legs[0], creates[-1], assets[0].id
    source, target, minor = leg.source, leg.target, leg.amount
    payer, payee = accounts if accounts[0].id == source else (accounts[1], accounts[0])
    if payer.id != source or payee.id != target or source == target or leg.asset != number:
        return False
    if no_overdraft and not payer.pays_from_postings:
        return False
    if not isinstance(minor, int) or not 0 < minor <= MINOR_MAX:
        return False
    if paid.account != target or paid.asset != number or paid.amount != minor:
        return False
    rest = -minor
    if consumes:
        spent = consumes[0]
        if state.live.get(spent.id) != spent or spent.account != source or spent.asset != number:
            return False
        rest += spent.amount
    if len(creates) == 1:
        return rest == 0
    left = creates[0]
    if left.account != source or left.asset != number or left.amount != rest:
        return False
    return 0 < rest <= MINOR_MAX or (MINOR_MIN <= rest < 0 and not payer.pays_from_postings)


def _check_shape(envelope: Envelope) -> None:
    consumes, creates = envelope.consumes, envelope.creates
    if not consumes and not creates:
        raise InvalidEntry("its movements cancel out: nothing would move")
    most = max(len(consumes), len(creates))
    if most > POSTINGS_MAX:
        raise TooManyPostings(envelope.accounts[0].path, most, POSTINGS_MAX)
    if len(consumes) > 1:
        seen = set()
        for p in consumes:
            if p.id in seen:
                raise DuplicateConsume(p.id)
            seen.add(p.id)


def _check_book(envelope: Envelope, outside: bool) -> None:
    book = envelope.book
    for asset in envelope.assets:
        if book.assets and not book.admits_asset(asset.code):
            raise BookRefuses(book.name, "asset", asset.code)
        if asset.status is not AssetStatus.ACTIVE and envelope.kind is not EntryKind.RETURN and not outside:
            raise AssetSuspended(asset.code)
    for account in envelope.accounts:
        if (account.book and account.book != book.name) or (book.accounts and not book.admits_account(account.path)):
            raise BookRefuses(book.name, "account", account.path)


def _wanted(envelope: Envelope) -> dict[tuple[int, int], int]:
    """What the movements say: per (account, asset), what it gains or loses."""
    if len(envelope.legs) == 1:
        leg = envelope.legs[0]
        minor = leg.minor
        return {(leg.source, leg.asset): -minor, (leg.target, leg.asset): minor}
    net: dict[tuple[int, int], int] = {}
    for leg in envelope.legs:
        minor = leg.minor
        net[leg.source, leg.asset] = net.get((leg.source, leg.asset), 0) - minor
        net[leg.target, leg.asset] = net.get((leg.target, leg.asset), 0) + minor
    return net


def _check_accounts(
    envelope: Envelope,
    state: LedgerState,
    wanted: dict[tuple[int, int], int],
    pins: tuple[tuple[str, bytes], ...],
    outside: bool,
) -> None:
    for path, snapshot in pins:
        if state.account(path).snapshot != snapshot:
            raise StalePin(path)
    for account in envelope.accounts:
        head = state.accounts.get(account.path)
        if head is None:
            raise UnknownAccount(account.path)
        if head is not account and head.snapshot != account.snapshot:
            raise StalePin(account.path)
        if head.status is AccountStatus.FROZEN:
            receives = envelope.kind is EntryKind.RETURN and all(
                d >= 0 for (a, _), d in wanted.items() if a == account.id
            )
            if outside or receives or envelope.kind is EntryKind.COMPACT:
                continue
        check_active(head)


def _check_value(
    envelope: Envelope, state: LedgerState, accounts: dict[int, Account], assets: dict[int, Asset]
) -> dict[tuple[int, int], int]:
    """Checks 5 and 6; returns what each (account, asset) gains or loses by the postings."""
    got: dict[tuple[int, int], int] = {}
    live = state.live
    for p in envelope.consumes:
        if live.get(p.id) != p:
            raise PostingNotLive(p.id)
        if p.account not in accounts or p.asset not in assets:
            raise UnknownAccount(f"#{p.account}")
        key = (p.account, p.asset)
        got[key] = got.get(key, 0) - p.amount
    for p in envelope.creates:
        account, asset = accounts.get(p.account), assets.get(p.asset)
        if account is None or asset is None:
            raise UnknownAccount(f"#{p.account}")
        amount = p.amount
        if amount == 0:
            raise InvalidEntry("it creates an empty posting")
        if not MINOR_MIN <= amount <= MINOR_MAX:
            raise AmountTooLarge(format_minor(amount, asset.precision), asset.code)
        if amount < 0 and (account.no_overdraft or not account.may_owe(asset)):
            raise NegativePosting(account.path)
        key = (p.account, p.asset)
        got[key] = got.get(key, 0) + amount
    return got


def _check_difference(
    envelope: Envelope, assets: dict[int, Asset], got: dict[tuple[int, int], int], wanted: dict[tuple[int, int], int]
) -> None:
    """Checks 7 and 8, where the postings are not exactly what the movements say."""
    for number, asset in assets.items():
        consumed = sum(p.amount for p in envelope.consumes if p.asset == number)
        created = sum(p.amount for p in envelope.creates if p.asset == number)
        if consumed != created:
            raise ConservationBroken(asset.code, consumed, created)
    if any(got.get(k, 0) != wanted.get(k, 0) for k in got.keys() | wanted.keys()):
        raise InvalidEntry("its postings do not add up to its movements")


def _check_guarded(accounts: dict[int, Account], assets: dict[int, Asset], got: dict[tuple[int, int], int]) -> None:
    """What must be covered by a balance is refused where nothing guards that balance: the check would race (T42)."""
    for (account_id, asset_id), change in got.items():
        account = accounts[account_id]
        if change < 0 and account.may_owe(assets[asset_id]) and not account.capped:
            raise BalanceNotGuarded(account.path)


def _check_floors(
    state: LedgerState,
    accounts: dict[int, Account],
    assets: dict[int, Asset],
    got: dict[tuple[int, int], int],
    no_overdraft: bool,
) -> tuple[tuple[int, int, int, int], ...]:
    floors: list[tuple[int, int, int, int]] = []
    for (account_id, asset_id), change in got.items():
        account, asset = accounts[account_id], assets[asset_id]
        floor = account.floor(asset)
        if floor is None or change == 0:
            continue
        before = state.balances[account_id, asset_id]
        if no_overdraft and change < 0 and before + change < 0:
            needed, there = (format_minor(minor, asset.precision) for minor in (-change, before))
            raise InsufficientFunds(account.path, asset.code, needed, there)
        # Paying in is always allowed, even to an account that a stricter policy has left below its floor.
        if change < 0 and before + change < floor:
            raise FloorExceeded(
                account.path,
                asset.code,
                format_minor(floor, asset.precision),
                format_minor(before, asset.precision),
                format_minor(-change, asset.precision),
            )
        floors.append((account_id, asset_id, before, before + change))
    return tuple(sorted(floors))
