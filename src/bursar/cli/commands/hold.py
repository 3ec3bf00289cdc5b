"""Holds: money set aside. Authorized first, then confirmed in part or whole, voided, or expired."""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.commands.account import hold_table
from bursar.cli.output import Output
from bursar.cli.show import show_receipt
from bursar.cli.state import Group, on_database
from bursar.cli.types import LIMIT, NUMBER, duration, key_option, meta_option
from bursar.instance import Bursar


@click.group(cls=Group)
def hold() -> None:
    """Money set aside: authorize, confirm, void, list, expire."""


@hold.command(
    examples="""
    bursar hold authorize user:1001:funding USDT 25.00 --key order-8 --expires-in 30m
    bursar hold authorize user:1001:funding USDT 25.00 --meta order=9
    """
)
@click.argument("account")
@click.argument("asset")
@click.argument("amount")
@click.option("--expires-in", metavar="DURATION", type=duration, help="90s, 30m, 12h or 7d; not given: never.")
@key_option
@meta_option
@on_database()
async def authorize(b: Bursar, out: Output, /, **given: Any) -> None:
    """Set money of an account aside. Prints the number of the hold."""
    made = await b.ledger.authorize(**given)
    out.show(made, lambda: f"hold {made.id}: {made.remaining} {made.remaining.asset} of {made.account} are set aside")


@hold.command(
    examples="""
    bursar hold confirm 17 merchant:42 --key order-8-paid
    bursar hold confirm 17 merchant:42 10.00
    """
)
@click.argument("hold", type=NUMBER)
@click.argument("target")
@click.argument("amount", required=False)
@key_option
@meta_option
@on_database()
async def confirm(b: Bursar, out: Output, /, **given: Any) -> None:
    """Pay from a hold: AMOUNT and keep the rest held, or all that remains."""
    show_receipt(out, await b.ledger.confirm(**given))


@hold.command(examples="bursar hold void 17")
@click.argument("hold", type=NUMBER)
@on_database()
async def void(b: Bursar, out: Output, hold: int) -> None:
    """Give back what remains of a hold."""
    show_receipt(out, await b.ledger.void(hold))


@hold.command("list", examples="bursar hold list user:1001:funding")
@click.argument("account")
@on_database()
async def list_(b: Bursar, out: Output, account: str) -> None:
    """Open holds of an account."""
    found = await b.ledger.holds(account)
    out.show(found, lambda: hold_table(found) if found else f"{account} has no open holds")


@hold.command(examples="bursar hold expire --limit 1000")
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many at most.")
@on_database()
async def expire(b: Bursar, out: Output, limit: int) -> None:
    """Give back what remains of holds whose time is up. `bursar serve` and `bursar worker` do it by themselves."""
    receipts = await b.ledger.expire_holds(limit)
    out.show(receipts, lambda: f"{len(receipts)} holds have expired and were given back")
