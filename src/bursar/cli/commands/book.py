"""Books: which assets and accounts may take part in an entry. They never partition balances."""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.output import Output, table
from bursar.cli.state import Group, on_database
from bursar.instance import Bursar
from bursar.model.accounts import Book


@click.group(cls=Group)
def book() -> None:
    """Which assets and accounts may take part: create, list."""


@book.command(
    examples="""
    bursar book create retail --asset EUR --asset USDT --account user --account external:bank
    bursar book create treasury --account treasury
    """
)
@click.argument("name")
@click.option("--asset", "assets", metavar="CODE", multiple=True, help="Admit this asset; none given: all.")
@click.option("--account", "accounts", metavar="PATH", multiple=True, help="Admit this account and all below it.")
@on_database(may_create=True)
async def create(b: Bursar, out: Output, name: str, assets: tuple[str, ...], accounts: tuple[str, ...]) -> None:
    """Create a book. What is not listed takes no part in its entries; nothing listed means everything may."""
    made = await b.ledger.create_book(name, assets=assets, accounts=accounts)
    out.show(_json(made), lambda: f"book {made.name} admits {_list(made.assets)} of {_list(made.accounts)}")


@book.command("list", examples="bursar book list")
@on_database()
async def list_(b: Bursar, out: Output) -> None:
    """All books."""
    found = sorted((await b.ledger.books()).values(), key=lambda one: one.name)
    rows = [(one.name, _list(one.assets), _list(one.accounts)) for one in found]
    out.show([_json(one) for one in found], lambda: table("book", "assets", "accounts", rows=rows))


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "all"


def _json(book: Book) -> dict[str, Any]:
    return {"name": book.name, "assets": book.assets, "accounts": book.accounts}
