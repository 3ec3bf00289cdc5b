"""Accounts: who owns postings, under which policy. A change appends a version; nothing is ever overwritten."""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.output import Drawing, Output, stack, table
from bursar.cli.state import Group, configured, on_database
from bursar.cli.types import LIMIT, POLICIES, floor_options, policy_of, settings_options
from bursar.instance import Bursar
from bursar.model.accounts import CORES, Account, CappedOverdraft, by_number, funding_user
from bursar.model.views import Hold
from bursar.ports import SystemPorts

COMPACT_STEP = 5_000  # postings merged between two looks at the bar


@click.group(cls=Group)
def account() -> None:
    """Accounts: create, list, show, freeze, unfreeze, close, policy, compact."""


@account.command(
    examples="""
    bursar account create user:1001:funding
    bursar account create external:bank --policy external
    bursar account create shop:7 --policy capped --floor -500.00 --asset EUR
    """
)
@click.argument("path")
@click.option(
    "--policy", type=click.Choice(POLICIES), default="no-overdraft", show_default=True, help="What it may owe."
)
@floor_options
@click.option("--book", metavar="NAME", default="", help="Only entries of this book may touch it.")
@on_database(may_create=True)
async def create(
    b: Bursar, out: Output, path: str, policy: str, floor: str | None, asset: str | None, book: str
) -> None:
    """Create an account. PATH is parts of lower-case letters, digits, - and _ joined by colons."""
    made = await b.ledger.create_account(path, policy=policy_of(policy, floor, asset), book=book)
    out.show(_json(made), lambda: f"account {made.path} exists ({_policy(made)}, {made.status})")


@account.command("list", examples="bursar account list user:1001 --limit 20")
@click.argument("prefix", default="")
@click.option("--after", metavar="PATH", default="", help="Go on after this path.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many at most.")
@on_database()
async def list_(b: Bursar, out: Output, prefix: str, after: str, limit: int) -> None:
    """Accounts by path: all, or PREFIX and everything below it."""
    found = await b.ledger.accounts(prefix, after=after, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    rows = [(a.path, _policy(a), a.status, a.book, a.version) for a in found]
    columns = ("account", "policy", "status", "book", "version")
    right, empty = ("version",), "no accounts there"
    out.show([_json(a) for a in found], lambda: table(*columns, rows=rows, right=right, empty=empty))
    if more:
        out.say(f"more: bursar account list {prefix}{' ' if prefix else ''}--after {found[-1].path}")


@account.command(examples="bursar account show user:1001:funding")
@click.argument("path")
@on_database()
async def show(b: Bursar, out: Output, path: str) -> None:
    """One account: its versions, balances and open holds."""
    versions = await b.ledger.account_history(path)
    balances = await b.ledger.balances(path)
    holds = await b.ledger.holds(path)
    head = versions[-1].account
    value = _json(head) | {
        "versions": [_json(v.account) | {"at": v.at} for v in versions],
        "balances": list(balances.values()),
        "holds": holds,
    }

    def draw() -> Drawing:
        rows = [(v.account.version, v.at, v.account.status, _policy(v.account)) for v in versions]
        columns = ("version", "since (UTC)", "status", "policy")
        sums = [(code, amount) for code, amount in balances.items()]
        book = f", only in book {head.book}" if head.book else ""
        return stack(
            f"{head.path}: {head.status}, {_policy(head)}{book}",
            "",
            table("asset", "balance", rows=sums, right=("balance",)) if sums else "it has no balance\n",
            table(*columns, rows=rows, title="Versions", right=("version",), whole=("since (UTC)",)),
            hold_table(holds, "Open holds") if holds else "no open holds",
        )

    out.show(value, draw)


def hold_table(holds: list[Hold], title: str | None = None) -> Drawing:
    """Holds as a table."""
    columns = ("hold", "account", "asset", "held", "remaining", "state", "expires (UTC)", "owner")
    rows = [
        (h.id, h.account, h.amount.asset, h.amount, h.remaining, h.state, h.expires or "never", h.owner) for h in holds
    ]
    return table(*columns, rows=rows, title=title, right=("hold", "held", "remaining"), whole=("expires (UTC)",))


@account.command(examples="bursar account freeze user:1001:funding")
@click.argument("path")
@on_database()
async def freeze(b: Bursar, out: Output, path: str) -> None:
    """Freeze an account: nothing moves out or in from then on, except what is given back or arrives from outside."""
    _changed(out, await b.ledger.freeze(path))


@account.command(examples="bursar account unfreeze user:1001:funding")
@click.argument("path")
@on_database()
async def unfreeze(b: Bursar, out: Output, path: str) -> None:
    """Undo a freeze."""
    _changed(out, await b.ledger.unfreeze(path))


@account.command(
    examples="""
    bursar account close merchant:42
    bursar account close user:1001:funding --config /etc/bursar.toml
    """
)
@click.argument("path")
@settings_options
@on_database()
async def close(b: Bursar, out: Output, path: str, file: str | None, data: str | None) -> None:
    """Close an account for good. It must be empty, with no open holds and no transfers under way.

    A user's funding account is frozen first, and the trading cores are asked whether the user has money there: give the
    settings that `bursar serve` has. A core that does not answer refuses it.
    """
    # What is held or in transit is not netted first, which would be refused: let closing itself say what is wrong.
    if by_number(path):
        _changed(out, await b.ledger.close_empty(path))
    elif funding_user(path) is None or not await b.store.read.accounts.holding(CORES):
        _changed(out, await b.ledger.close(path))
    else:
        from bursar.flows.transfers import Transfers
        from bursar.runtime import asked_cores

        async with asked_cores(configured(file, data=data), b.store, SystemPorts()) as cores:
            _changed(out, await Transfers(b.ledger, cores).close_account(path))


@account.command(
    examples="""
    bursar account policy shop:7 capped --floor -500.00 --asset EUR
    bursar account policy shop:7 no-overdraft
    """
)
@click.argument("path")
@click.argument("policy", type=click.Choice(POLICIES))
@floor_options
@on_database()
async def policy(b: Bursar, out: Output, path: str, policy: str, floor: str | None, asset: str | None) -> None:
    """Give an account another policy. One that forbids owing is refused while it owes."""
    _changed(out, await b.ledger.change_policy(path, policy_of(policy, floor, asset)))


@account.command(examples="bursar account compact merchant:42")
@click.argument("path")
@on_database()
async def compact(b: Bursar, out: Output, path: str) -> None:
    """Merge an account's many small postings, so that it can make large payments."""
    head = await b.ledger.account(path)
    total = sum(count for _, count in (await b.store.read.balances.of(head.id)).values())
    merged = 0
    with out.bar("compacting") as advance:
        advance("postings", 0, total)
        while step := await b.ledger.compact(path, most=COMPACT_STEP):
            merged += step
            advance("postings", min(merged, total), total)
    out.show({"account": path, "merged": merged}, lambda: f"{merged} postings of {path} were merged")


def _changed(out: Output, head: Account) -> None:
    out.show(_json(head), lambda: f"account {head.path} is {head.status}, {_policy(head)} (version {head.version})")


def _policy(head: Account) -> str:
    if isinstance(head.policy, CappedOverdraft):
        return f"capped at {head.policy.floor} {head.policy.asset}"
    name = str(head.policy.__struct_config__.tag)
    return "uncapped" if name == "uncapped_overdraft" else name.replace("_", "-")


def _json(head: Account) -> dict[str, Any]:
    capped = head.policy if isinstance(head.policy, CappedOverdraft) else None
    return {
        "path": head.path,
        "version": head.version,
        "status": head.status,
        "policy": str(head.policy.__struct_config__.tag),
        "floor": capped.floor if capped else None,
        "asset": capped.asset if capped else None,
        "book": head.book or None,
        "snapshot": head.snapshot,
    }
