"""The ledger: move value, and look at what was moved."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

import click

from bursar.cli.commands.hold import hold
from bursar.cli.entry_file import read_entries
from bursar.cli.output import Output, table
from bursar.cli.place import until_back
from bursar.cli.show import draw_envelope, event_subject, show_receipt, show_receipts
from bursar.cli.state import Group, on_database
from bursar.cli.types import LIMIT, NUMBER, POSTING, F, entry_options, envelope_name, meta_option, moment, together
from bursar.instance import Bursar
from bursar.model import entries
from bursar.model.envelope import Receipt
from bursar.model.errors import DatabaseUnavailable, InvalidName


@click.group(cls=Group)
def ledger() -> None:
    """Move value and look at it: deposit, pay, withdraw, commit, reverse, history, balance, show, postings, events."""


def _movement(source: str, target: str) -> Callable[[F], F]:
    """The arguments and options of an entry of one movement."""
    return together(*(click.argument(name) for name in (source, target, "asset", "amount")), entry_options)


@ledger.command(examples="bursar ledger deposit external:bank user:1001:funding USDT 100.00 --key dep-1 --meta ref=A17")
@_movement("external", "account")
@on_database()
async def deposit(b: Bursar, out: Output, /, **given: Any) -> None:
    """Value comes in from an EXTERNAL account."""
    show_receipt(out, await b.ledger.commit(entries.deposit(**given)))


@ledger.command(examples="bursar ledger pay user:1001:funding merchant:42 USDT 12.50 --key order-7")
@_movement("source", "target")
@on_database()
async def pay(b: Bursar, out: Output, /, **given: Any) -> None:
    """Value moves from SOURCE to TARGET."""
    show_receipt(out, await b.ledger.commit(entries.pay(**given)))


@ledger.command(examples="bursar ledger withdraw user:1001:funding external:bank USDT 40.00 --key wd-1")
@_movement("account", "external")
@on_database()
async def withdraw(b: Bursar, out: Output, /, **given: Any) -> None:
    """Value leaves to an EXTERNAL account."""
    show_receipt(out, await b.ledger.commit(entries.withdraw(**given)))


@ledger.command(
    examples="""
    bursar ledger commit --file order-7.json
    bursar --json ledger commit --file - < entries.json
    """
)
@click.option(
    "--file",
    metavar="FILE",
    type=click.File("rb"),
    required=True,
    help="JSON: one entry, or a list of them; - is standard input.",
)
@on_database()
async def commit(b: Bursar, out: Output, file: BinaryIO) -> None:
    """Commit entries of any number of movements from a FILE, all of them or none.

    \b
    {"key": "order-7", "metadata": {"order": 7}, "movements": [
      {"source": "user:1", "target": "shop:2", "asset": "EUR", "amount": "12.50"},
      {"source": "user:1", "target": "fees",   "asset": "EUR", "amount": "0.10"}]}

    Give every entry a key: with it, the same file committed again changes nothing.
    """
    wanted, is_list = read_entries(file)
    receipts = [one for one in await b.ledger.commit_many(wanted, atomic=True) if isinstance(one, Receipt)]
    if is_list:
        show_receipts(out, receipts)
    else:
        show_receipt(out, receipts[0])


@ledger.command(examples="bursar ledger reverse 12 --meta why=mistake")
@click.argument("envelope", type=envelope_name)
@meta_option
@on_database()
async def reverse(b: Bursar, out: Output, envelope: int | str, metadata: dict[str, str]) -> None:
    """Undo an envelope by another one. Doing it again changes nothing."""
    show_receipt(out, await b.ledger.reverse(envelope, metadata=metadata))


@ledger.command(
    examples="""
    bursar ledger balance user:1001:funding
    bursar ledger balance user:1001 USDT --prefix --at 2026-01-31T23:59:59Z
    """
)
@click.argument("account")
@click.argument("asset", required=False)
@click.option("--prefix", is_flag=True, help="ACCOUNT and everything below it, in sum.")
@click.option("--at", metavar="TIME", type=moment, help="What it was then: 2026-01-31T12:00:00Z (no zone: UTC).")
@on_database()
async def balance(b: Bursar, out: Output, account: str, asset: str | None, prefix: bool, at: datetime | None) -> None:
    """What an account has, or had; of one ASSET or of all."""
    where: dict[str, Any] = {"prefix": account} if prefix else {"account": account}
    if asset is not None:
        found = [await b.ledger.balance(asset=asset, at=at, **where)]
    else:
        found = list((await b.ledger.balances(at=at, **where)).values())
    value = [{"account": account, "asset": money.asset, "amount": str(money)} for money in found]
    rows = [(account + (":*" if prefix else ""), money.asset, money) for money in found]
    out.show(
        value,
        lambda: table("account", "asset", "balance", rows=rows, right=("balance",), empty="it has no balance"),
    )


@ledger.command(
    examples="""
    bursar ledger history user:1001:funding --limit 20
    bursar ledger history user:1001:funding --since 2026-01-01 --until 2026-02-01
    """
)
@click.argument("account")
@click.option("--since", metavar="TIME", type=moment, help="Not before this time.")
@click.option("--until", metavar="TIME", type=moment, help="Before this time.")
@click.option("--before", metavar="ENVELOPE", type=NUMBER, help="Go on below this envelope.")
@click.option("--limit", type=LIMIT, default=20, show_default=True, help="How many at most.")
@on_database()
async def history(b: Bursar, out: Output, /, account: str, limit: int, **where: Any) -> None:
    """What an account took part in, newest first."""
    lines = await b.ledger.history(account, limit=limit + 1, **where)
    more, lines = len(lines) > limit, lines[:limit]
    rows = []
    for line in lines:
        others = sorted({p for m in line.movements for p in (m.source, m.target)} - {account})
        for n, change in enumerate(line.changes or (None,)):
            sign = "+" if change is not None and change.minor > 0 else ""
            amount = "" if change is None else f"{sign}{change}"
            asset = "" if change is None else change.asset
            first = (line.envelope, line.at, line.kind) if n == 0 else ("", "", "")
            rows.append((*first, amount, asset, ", ".join(others), line.key if n == 0 else ""))
    columns = ("envelope", "time (UTC)", "kind", "change", "asset", "with", "key")
    right, whole = ("envelope", "change"), ("time (UTC)",)
    out.show(
        lines,
        lambda: table(*columns, rows=rows, right=right, whole=whole, empty=f"{account} has no history there"),
    )
    if more:
        out.say(f"more: bursar ledger history {account} --before {lines[-1].envelope}")


@ledger.command(
    examples="""
    bursar ledger show 12
    bursar ledger show --key order-7
    """
)
@click.argument("envelope", type=envelope_name, required=False)
@click.option("--key", metavar="TEXT", help="Find it by its idempotency key instead.")
@on_database()
async def show(b: Bursar, out: Output, envelope: int | str | None, key: str | None) -> None:
    """One envelope as a small graph: what it consumed, from whom; what it created, and who spent that since.

    ENVELOPE is its number, or its content hash (which looks at all of them).
    """
    if (envelope is None) == (key is None):
        raise click.UsageError("Give either the envelope's number (or hash) or its --key.")
    view = await b.ledger.envelope_by_key(key) if key is not None else await b.ledger.envelope(envelope or 0)
    out.show(view, lambda: draw_envelope(view, out.console.width))


@ledger.command(examples="bursar ledger postings user:1001:funding USDT --all")
@click.argument("account")
@click.argument("asset", required=False)
@click.option("--all", "everything", is_flag=True, help="Spent ones too.")
@click.option("--after", metavar="POSTING", type=POSTING, default=0, help="Go on after this posting.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many at most.")
@on_database()
async def postings(
    b: Bursar, out: Output, account: str, asset: str | None, everything: bool, after: int, limit: int
) -> None:
    """The postings of an account: what its balance is the sum of."""
    found = await b.ledger.postings(account, asset, live_only=not everything, after=after, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    rows = [(p.id, p.amount, p.amount.asset, p.state, p.created_by, p.spent_by) for p in found]
    columns = ("posting", "amount", "asset", "state", "created by", "spent by")
    right = ("posting", "amount", "created by", "spent by")
    out.show(found, lambda: table(*columns, rows=rows, right=right, empty=f"{account} has no such postings"))
    if more:
        out.say(f"more: bursar ledger postings {account} --after {found[-1].id}")


@ledger.command(
    examples="""
    bursar ledger events --limit 20
    bursar --json ledger events --follow --after 0.0.1041
    """
)
@click.option("--after", metavar="CURSOR", default="", help="Go on after this cursor; not given: from the beginning.")
@click.option("--follow", is_flag=True, help="Then wait for those to come, until interrupted.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many at most, unless following.")
@on_database()
async def events(b: Bursar, out: Output, after: str, follow: bool, limit: int) -> None:
    """What happened, in order. A cursor never skips an event, however late its commit."""
    try:
        page = await b.ledger.events(after, limit=1 if follow else limit)
    except InvalidName as error:
        raise click.UsageError(str(error)) from None
    if not follow:
        rows = [(e.cursor, e.kind, event_subject(e)) for e in page]
        columns = ("cursor", "event", "what")
        out.show(page, lambda: table(*columns, rows=rows, whole=("cursor",), empty="no events there"))
        return
    while True:
        try:
            async for event in b.ledger.follow(after):
                out.line(event, f"{event.cursor:<20} {event.kind.name.lower():<16} {event_subject(event)}")
                after = event.cursor
        except DatabaseUnavailable as error:
            await until_back(b, error)


ledger.add_command(hold)
