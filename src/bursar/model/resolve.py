"""Resolve: from an intent to an envelope. Movements become postings consumed and created.

Movements are first summed per (account, asset), so that several debits of one account share one selection and value
that only passes through needs no postings at all. Then each account settles its own difference:

- it must pay: its largest postings, with change; system and external accounts just go negative; overdraft accounts go
  negative by what is missing;
- it is paid: overdraft accounts first pay off negative postings (L7), the rest becomes one new posting.

What comes out is not trusted: `validate_and_plan` checks it from scratch.
"""

from __future__ import annotations

from bursar.model.accounts import Account, Book, check_active
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.envelope import BookedLeg, Envelope, booked_amount
from bursar.model.errors import BalanceNotGuarded, InsufficientFunds, InvalidEntry, PostingNotLive, TooManyPostings
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.money import Asset, format_minor
from bursar.model.postings import INDEX_BITS, POSTINGS_MAX, Posting

NETTING_MAX = 64  # negative postings that one incoming payment pays off; the rest waits for the next or for compact


def resolve(intent: Intent, state: LedgerState, seq: int) -> Envelope:
    """The envelope that carries out the intent on this state, numbered `seq`."""
    book = state.book(intent.book)
    if len(intent.legs) == 1 and len(intent.consume) <= 1:
        simple = _payment(intent, intent.legs[0], state, book, seq)
        if simple is not None:
            return simple
    named = _named(intent, state) if intent.consume else []
    start: dict[tuple[int, int], int] = {}
    for p in named:
        start[p.account, p.asset] = start.get((p.account, p.asset), 0) + p.amount
    consumes = named
    creates: list[Posting] = []
    accounts: dict[str, Account] = {}
    assets: dict[str, Asset] = {}
    for (path, code), delta in _deltas(intent, state, named).items():
        accounts[path] = account = state.account(path)
        assets[code] = asset = state.asset(code)
        rest = delta + start.pop((account.id, asset.id), 0) if start else delta
        rest = _settle(account, asset, rest, intent, state, consumes)
        if rest:
            if len(creates) == POSTINGS_MAX:
                raise TooManyPostings(path, len(creates) + 1, POSTINGS_MAX)
            creates.append(Posting(seq << INDEX_BITS | len(creates), account.id, asset.id, rest))
    if start:
        raise InvalidEntry("it consumes a posting of an account that does not take part")
    if len(consumes) > POSTINGS_MAX:
        raise TooManyPostings(intent.legs[0].source if intent.legs else intent.merge, len(consumes), POSTINGS_MAX)
    return Envelope(
        seq=seq,
        scope=intent.scope,
        key=intent.key,
        book=book,
        kind=intent.kind,
        reverses=intent.reverses,
        legs=_booked(intent, accounts, assets),
        accounts=tuple([accounts[path] for path in sorted(accounts)]),
        assets=tuple(assets.values()),
        consumes=tuple(consumes),
        creates=tuple(creates),
        metadata=intent.metadata,
    )


def _payment(intent: Intent, leg: Leg, state: LedgerState, book: Book, seq: int) -> Envelope | None:
    """Most entries: one account pays another, and neither has an overdraft. The same as below, without the bookkeeping.

    None if it is anything else, or if it falls short: then the general way finds the refusal.
    """
    source, target, asset = state.account(leg.source), state.account(leg.target), state.asset(leg.asset)
    minor, number = leg.amount, asset.id
    if source is target or (target.pays_from_postings and not target.no_overdraft):
        return None
    consumes: tuple[Posting, ...] = ()
    total = 0
    if intent.consume:  # exactly the posting that is moved
        posting = state.live.get(intent.consume[0])
        if posting is None or posting != Posting(posting.id, source.id, number, minor):
            return None
        consumes, total = (posting,), minor
    elif source.no_overdraft:
        chosen, total = state.pools[source.id, number, PLUS].pick(minor)
        if total < minor or len(chosen) > POSTINGS_MAX:
            return None
        live = state.live
        consumes = tuple([live[posting] for posting in chosen])
    elif source.pays_from_postings or intent.no_overdraft:
        return None
    paid = Posting(seq << INDEX_BITS | (total != minor), target.id, number, minor)
    return Envelope(
        seq=seq,
        scope=intent.scope,
        key=intent.key,
        book=book,
        kind=intent.kind,
        reverses=intent.reverses,
        legs=(BookedLeg(source.id, target.id, number, booked_amount(minor)),),
        accounts=(source, target) if source.path < target.path else (target, source),
        assets=(asset,),
        consumes=consumes,
        creates=(paid,) if total == minor else (Posting(seq << INDEX_BITS, source.id, number, total - minor), paid),
        metadata=intent.metadata,
    )


def booked_legs(intent: Intent, state: LedgerState) -> tuple[BookedLeg, ...]:
    """The movements by row numbers: what is stored, and what makes two intents the same."""
    accounts = {path: state.account(path) for leg in intent.legs for path in (leg.source, leg.target)}
    assets = {leg.asset: state.asset(leg.asset) for leg in intent.legs}
    return _booked(intent, accounts, assets)


def _booked(intent: Intent, accounts: dict[str, Account], assets: dict[str, Asset]) -> tuple[BookedLeg, ...]:
    return tuple(
        [
            BookedLeg(accounts[leg.source].id, accounts[leg.target].id, assets[leg.asset].id, booked_amount(leg.amount))
            for leg in intent.legs
        ]
    )


def _named(intent: Intent, state: LedgerState) -> list[Posting]:
    named = []
    for number in intent.consume:
        posting = state.live.get(number)
        if posting is None:
            raise PostingNotLive(number)
        named.append(posting)
    return named


def _deltas(intent: Intent, state: LedgerState, named: list[Posting]) -> dict[tuple[str, str], int]:
    if intent.kind is EntryKind.COMPACT:  # one account, every asset of the named postings, nothing moves
        return {(intent.merge, state.assets_by_id[p.asset].code): 0 for p in named}
    return intent.deltas()


def _settle(
    account: Account, asset: Asset, rest: int, intent: Intent, state: LedgerState, consumes: list[Posting]
) -> int:
    """Consume what the account pays with (or pays off) and return what is left to create, with its sign."""
    if intent.kind is EntryKind.COMPACT:
        return rest  # nothing but the named postings is consumed
    if rest < 0 and intent.no_overdraft and account.may_owe(asset) and not account.capped:
        check_active(account)
        raise BalanceNotGuarded(account.path)
    if rest < 0 and account.pays_from_postings:
        chosen, total = state.pools[account.id, asset.id, PLUS].pick(-rest, intent.consume)
        if len(chosen) > POSTINGS_MAX:
            raise TooManyPostings(account.path, len(chosen), POSTINGS_MAX)
        if total + rest < 0 and (intent.no_overdraft or not account.may_owe(asset)):
            check_active(account)  # a closed or frozen account is refused for its status, not for its balance
            raise InsufficientFunds(
                account.path,
                asset.code,
                format_minor(-rest, asset.precision),
                format_minor(total, asset.precision),
            )
        consumes += [state.live[number] for number in chosen]
        return rest + total
    if rest > 0 and account.pays_from_postings and not account.no_overdraft and account.may_owe(asset):
        return _pay_off(account, asset, rest, intent, state, consumes)
    return rest


def _pay_off(
    account: Account, asset: Asset, rest: int, intent: Intent, state: LedgerState, consumes: list[Posting]
) -> int:
    pool = state.pools[account.id, asset.id, MINUS]
    for magnitude, minus_id in pool.items[: -NETTING_MAX - 1 : -1]:
        if rest <= 0:
            break
        if -minus_id not in intent.consume:
            consumes.append(state.live[-minus_id])
            rest -= magnitude
    return rest
