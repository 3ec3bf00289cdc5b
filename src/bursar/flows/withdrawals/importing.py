"""Withdrawals that are under way in another system, taken over from a file (W26, W38).

Every row is checked before the first is written, and every problem is named with its line. A request is written under
the id that it had there, so that the same file can be imported again: what is there is left alone.

| a row with | becomes |
|---|---|
| a transaction that nodes know | a payout that is watched until it is final; the chain names its wallet and nonce |
| a transaction that no node knows, or none though it may have been sent | a payout that two people decide |
| no transaction, and a status in which nothing was sent | a request that is decided here, by the rules that hold now |

What another system has sent is never sent again from here, and never dead by itself: two people say so, and the chain
must agree that it can't be paid any more. Not here: what becomes of a payout then (flows/payouts).
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from bursar.flows.payouts import PayoutRequest
from bursar.flows.payouts.checks import PRIORITIES
from bursar.flows.payouts.documents import asset_name
from bursar.flows.payouts.machine import MACHINE as PAYOUTS
from bursar.flows.payouts.machine import REPLACEMENTS
from bursar.flows.payouts.payout import HASH, NONCE, SOURCE, Imported
from bursar.flows.payouts.wallets import nonce_key
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.transfers.request import funding_account
from bursar.flows.withdrawals.machine import MACHINE
from bursar.flows.withdrawals.policy import POLICY
from bursar.flows.withdrawals.withdrawal import OPENING, Import, Withdrawal
from bursar.flows.withdrawals.withdrawals import Withdrawals
from bursar.model.accounts import ExternalAccount
from bursar.model.actors import check_actor
from bursar.model.entries import check_key
from bursar.model.errors import AlreadyExists, BursarError, RecordMoved
from bursar.model.flow_rows import RowMoved, RowState
from bursar.model.records import Priority, Record
from bursar.model.views import microseconds, moment

COLUMNS: Final = (
    *("request_id", "user", "asset", "chain", "to", "amount", "fee", "status", "wallet", "tx_hash", "memo"),
    *("created_at", "debited"),
)
AS_WRITTEN: Final = tuple(name for name in COLUMNS if name not in ("request_id", "user", "created_at", "debited"))
NOT_SENT: Final = ("pending", "approved")  # statuses in which no transaction was made
MAY_BE_SENT: Final = ("queued", "processing", "confirming")
DEBITED: Final = {"yes": True, "no": False}
ROWS_MAX: Final = 10_000
TRIES: Final = 20  # to take a nonce while payouts of the same wallet take theirs
HEX: Final = re.compile(r"(?:0x)?([0-9a-f]{64})", re.ASCII | re.IGNORECASE)
UNKNOWN_PAYOUT: Final = "import"  # in place of a payout's id, until the row is written


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the file, in its own words."""

    line: int
    id: str
    user: int
    asset: str
    chain: str
    to: str
    amount: str
    fee: str
    status: str
    wallet: str
    tx_hash: str
    memo: str
    created_us: int
    debited: bool


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row can't be imported."""

    line: int
    why: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What a row becomes, or has become."""

    line: int
    id: str
    becomes: str  # watched, two people, decided here
    wallet: str
    tx_hash: str
    there: bool  # it was there already


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or would be. With a problem, nothing was written."""

    lines: tuple[Line, ...]
    problems: tuple[Problem, ...]
    written: int


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    row: Row
    body: Withdrawal
    there: bool


class _Wrong(Exception):
    """This row can't be imported, for this reason."""


# --- the file --------------------------------------------------------------------------------------------------------


def read_rows(text: str) -> tuple[list[Row], list[Problem]]:
    """The rows of a CSV file, and what is wrong with it. Pure."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    names = tuple(reader.fieldnames or ())
    if sorted(names) != sorted(COLUMNS):
        return [], [Problem(line=1, why=f"the first line names the columns, in any order: {', '.join(COLUMNS)}")]
    rows: list[Row] = []
    problems: list[Problem] = []
    try:
        for values in reader:
            line = reader.line_num
            if len(rows) + len(problems) == ROWS_MAX:
                problems.append(Problem(line=line, why=f"more than {ROWS_MAX} rows: import them in several files"))
                break
            try:
                rows.append(_row(line, values))
            except _Wrong as wrong:
                problems.append(Problem(line=line, why=str(wrong)))
    except csv.Error as error:
        problems.append(Problem(line=reader.line_num, why=f"this is not CSV: {error}"))
    if not rows and not problems:
        problems.append(Problem(line=1, why="there are no rows"))
    return rows, problems


def _row(line: int, values: dict[str, str | None]) -> Row:
    if None in values or None in values.values():  # what DictReader makes of too many and of too few
        raise _Wrong(f"it has not {len(COLUMNS)} values")
    told = {name: (value or "").strip() for name, value in values.items()}
    digits = told["user"].isascii() and told["user"].isdigit() and len(told["user"]) < 20
    if not digits or not 1 <= int(told["user"]) <= USER_MAX:
        raise _Wrong(f"user is {told['user'][:40]!r}: a number from 1 to {USER_MAX}")
    if told["debited"] not in DEBITED:
        raise _Wrong(f"debited is {told['debited']!r}: yes, if the money was taken from the user already; no, if not")
    if told["status"] not in (*NOT_SENT, *MAY_BE_SENT):
        known = ", ".join((*NOT_SENT, *MAY_BE_SENT))
        raise _Wrong(f"status is {told['status']!r}: one of {known}; what has ended is not imported")
    if told["tx_hash"] and told["status"] in NOT_SENT:
        raise _Wrong(f"it is {told['status']} and has a transaction: one of the two is wrong")
    return Row(
        line=line,
        id=told["request_id"],
        user=int(told["user"]),
        created_us=_moment(told["created_at"]),
        debited=DEBITED[told["debited"]],
        **{name: told[name] for name in AS_WRITTEN},
    )


def _moment(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)
        if at.year < 2009:  # no chain is older; and the year 1 has no time in UTC for every zone
            raise ValueError(at)
        return microseconds(at)
    except (ValueError, BursarError):
        raise _Wrong(f"created_at is {text!r}: a time with its zone, as 2026-01-31T12:00:00+00:00") from None


# --- what the rows mean ----------------------------------------------------------------------------------------------


async def import_running(withdrawals: Withdrawals, text: str, *, actor: str, dry_run: bool = False) -> Report:
    """Take over the withdrawals of a file, all or, if there is any problem, none. Twice is once.

    A crash between two rows leaves those that were written; the next import of the same file writes the others.
    """
    who = check_actor(actor)
    rows, problems = read_rows(text)
    plans: list[_Plan] = []
    for row in rows:
        try:
            plans.append(await _planned(withdrawals, row))
        except (_Wrong, BursarError) as error:
            problems.append(Problem(line=row.line, why=str(error)))
    problems += _named_twice(plans)
    problems += await _short(withdrawals, plans)
    missing = [plan for plan in plans if not plan.there]
    written = 0
    if not problems and not dry_run:
        if any(plan.row.debited for plan in missing):
            await _open_account(withdrawals)
        # Nonces of a wallet in their order: each can be taken once those below it are.
        for plan in sorted(missing, key=lambda plan: (_nonce(plan.body), plan.row.line)):
            written += await _write(withdrawals, plan, who)
    ordered = sorted(problems, key=lambda problem: problem.line)
    return Report(lines=tuple(map(_line, plans)), problems=tuple(ordered), written=written)


async def _planned(withdrawals: Withdrawals, row: Row) -> _Plan:
    engine, payouts = withdrawals.engine, withdrawals.payouts
    if "/" in check_key(row.id):
        raise _Wrong(f"request_id is {row.id!r}: with a '/', nothing could be said about it over HTTP")
    row = msgspec.structs.replace(row, tx_hash=_hash(withdrawals, row))
    if row.created_us > await withdrawals.ledger.store.now_us():
        raise _Wrong(f"created_at is {moment(row.created_us):%Y-%m-%d %H:%M} UTC, which is in the future")
    there = await engine.get(MACHINE.name, row.id)
    asset = await withdrawals.ledger.asset(row.asset)
    content = _content(row, asset.minor(row.amount), asset.minor(row.fee))
    if there is not None:
        return _Plan(row=row, body=_same(there, content), there=True)
    rows = withdrawals.ledger.store.read.flow_rows
    source = await rows.get(PAYOUTS.name, SOURCE.name, row.id)
    if source is not None and source.state is RowState.HELD:
        raise _Wrong(f"record {source.record} is a payout for {row.id} already")
    account = funding_account(row.user)
    if account not in await withdrawals.ledger.store.read.accounts.heads([account]):
        raise _Wrong(f"there is no account {account}: create it, and book what its user has")
    wallet, sender, sent = await _sent(withdrawals, row)
    expires_us, priority = 0, Priority.NORMAL
    if sent is None:
        policy = await withdrawals.documents.current(POLICY, asset_name(row.asset, row.chain), fresh=True)
        if policy is None:
            raise _Wrong(f"{row.asset} can't be withdrawn on {row.chain}: there is no policy that could decide it")
        expires_us = engine.ports.now_us() + policy.body.expires_s * 1_000_000
        priority = PRIORITIES[policy.body.priority]
    wanted = PayoutRequest(
        account=account,
        asset=asset.code,
        chain=row.chain,
        to=row.to,
        amount=row.amount,
        fee=row.fee,
        memo=row.memo,
        source=row.id,
        expires_us=expires_us,
    )
    payment, native = await payouts.check(wanted, UNKNOWN_PAYOUT, str(row.user))
    came = Import(
        created_us=row.created_us, debited=row.debited, content=content, wallet=wallet, sender=sender, sent=sent
    )
    body = Withdrawal(user=row.user, payment=payment, native=native, priority=priority, imported=came)
    return _Plan(row=row, body=body, there=False)


def _hash(withdrawals: Withdrawals, row: Row) -> str:
    """The hash as its chain writes it: in another spelling, one transaction could be two requests'."""
    if not row.tx_hash:
        return ""
    found, chain = HEX.fullmatch(row.tx_hash), withdrawals.payouts.chains.get(row.chain)
    if found is None:
        raise _Wrong(f"tx_hash is {row.tx_hash[:80]!r}: 64 hexadecimal digits")
    return ("0x" if chain is not None and chain.codec.kind == "evm" else "") + found[1].lower()


def _content(row: Row, amount: int, fee: int) -> str:
    """What makes a row the same as another one. Its status may have changed meanwhile, and how an amount is written."""
    told = (row.user, row.asset, row.chain, row.to, amount, fee, row.wallet, row.tx_hash, row.memo, row.debited)
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def _same(there: Record, content: str) -> Withdrawal:
    body = msgspec.json.decode(there.body, type=Withdrawal)
    if body.imported is None or body.imported.content != content:
        raise _Wrong(f"there is a withdrawal {there.id} already, and it is another one: it is {there.state}")
    return body


async def _sent(withdrawals: Withdrawals, row: Row) -> tuple[str, str, Imported | None]:
    """What was sent for a row, or may have been, with the wallet and its address."""
    if row.status in NOT_SENT:
        return "", "", None
    payouts = withdrawals.payouts
    chain = payouts.chains.get(row.chain)
    if chain is None:
        raise _Wrong(f"no nodes of {row.chain} are configured here")
    addresses = await payouts.out.wallets.ever(row.chain, chain.codec)
    found = await chain.sent_elsewhere(row.tx_hash) if row.tx_hash else None
    if found is None:
        sender = next((address for address, name in addresses.items() if name == row.wallet), "")
        if not sender:
            known = f"transaction {row.tx_hash} is at no node" if row.tx_hash else "there is no transaction"
            raise _Wrong(f"{known}, so the row must name the wallet that would have paid it; {row.wallet!r} is none")
        sent = Imported(hash=row.tx_hash)
    else:
        sender, wallet = found.sender, addresses.get(found.sender, "")
        if not wallet:
            raise _Wrong(f"{row.tx_hash} was sent by {found.sender}, which is no wallet of ours")
        if row.wallet not in ("", wallet):
            raise _Wrong(f"{row.tx_hash} was sent by the wallet {wallet}, and not by {row.wallet}")
        sent = Imported(hash=found.hash, slot=found.slot, fee=found.fee)
    for flow in (PAYOUTS.name, REPLACEMENTS.name):
        taken = await withdrawals.ledger.store.read.flow_rows.get(flow, HASH.name, f"{row.chain}/{sent.hash}")
        if sent.hash and taken is not None:
            raise _Wrong(f"{row.tx_hash} is the transaction of another payout: {taken.body}")
    return addresses[sender], sender, sent


def _named_twice(plans: Iterable[_Plan]) -> list[Problem]:
    """One payout per request, and one request per transaction."""
    problems, ids, hashes = list[Problem](), dict[str, int](), dict[tuple[str, str], int]()
    for plan in plans:
        line, sent = plan.row.line, plan.body.imported and plan.body.imported.sent
        first = ids.setdefault(plan.row.id, line)
        if first != line:
            problems.append(Problem(line=line, why=f"request {plan.row.id} is in line {first} already"))
        elif sent and sent.hash and (first := hashes.setdefault((plan.row.chain, sent.hash), line)) != line:
            problems.append(Problem(line=line, why=f"transaction {sent.hash} is in line {first} already"))
    return problems


async def _short(withdrawals: Withdrawals, plans: Iterable[_Plan]) -> list[Problem]:
    """Rows for which an account has too little, counted together with those above them."""
    problems, needed = list[Problem](), Counter[tuple[str, str]]()
    for plan in plans:
        payment = plan.body.payment
        if plan.there or plan.row.debited:
            continue
        place = (payment.account, payment.asset)
        needed[place] += int(payment.amount) + int(payment.fee)
        has = await withdrawals.ledger.balance(*place)
        if has.minor < needed[place]:
            why = f"{payment.account} has {has}, and its rows up to here need more: was it debited already?"
            problems.append(Problem(line=plan.row.line, why=why))
    return problems


# --- writing ---------------------------------------------------------------------------------------------------------


async def _open_account(withdrawals: Withdrawals) -> None:
    if OPENING in await withdrawals.ledger.store.read.accounts.heads([OPENING]):
        return
    with contextlib.suppress(AlreadyExists):  # another import has made it just now
        await withdrawals.ledger.create_account(OPENING, policy=ExternalAccount())


async def _write(withdrawals: Withdrawals, plan: _Plan, actor: str) -> bool:
    """Whether it was written now, and not by another import at the same time."""
    engine = withdrawals.engine
    payout = await engine.new_id(PAYOUTS.name)
    for left in reversed(range(TRIES)):
        body = await _ready(withdrawals, plan, payout)
        try:
            started = await engine.start(MACHINE.name, body, id=plan.row.id, owner=str(body.user), actor=actor)
        except RowMoved:  # a payout of the same wallet has taken a nonce meanwhile
            if not left:
                raise
            continue
        except RecordMoved:
            return False
        await engine.hand_over(started.record)
        return True
    raise AssertionError("the last try returns or raises")


async def _ready(withdrawals: Withdrawals, plan: _Plan, payout: str) -> Withdrawal:
    """The body as it is written: with the id of its payout, and its nonce if that is above all that are known here."""
    replace, body = msgspec.structs.replace, plan.body
    body = replace(body, payment=replace(body.payment, payout=payout))
    came = body.imported
    if came is None or came.sent is None:
        return body
    slot, takes_nonce = came.sent.slot, False
    if slot is not None and slot.nonce is not None:
        key = nonce_key(body.payment.chain, came.sender)
        counter = await withdrawals.ledger.store.read.flow_rows.get(PAYOUTS.name, NONCE.name, key)
        takes_nonce = counter is None or counter.amount <= slot.nonce
    came = replace(came, sent=replace(came.sent, takes_nonce=takes_nonce))
    return replace(body, imported=came, payouts=(payout,), adopted=payout, queued_us=withdrawals.engine.ports.now_us())


def _nonce(body: Withdrawal) -> int:
    sent = None if body.imported is None else body.imported.sent
    return -1 if sent is None or sent.slot is None or sent.slot.nonce is None else sent.slot.nonce


def _line(plan: _Plan) -> Line:
    came = plan.body.imported
    assert came is not None  # every plan is an import
    becomes = "decided here" if came.sent is None else "two people" if came.sent.slot is None else "watched"
    hash_ = "" if came.sent is None else came.sent.hash
    return Line(
        line=plan.row.line, id=plan.row.id, becomes=becomes, wallet=came.wallet, tx_hash=hash_, there=plan.there
    )
