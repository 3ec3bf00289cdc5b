"""Assets: units of value. Code and precision never change; limits and status may."""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.output import Output, table
from bursar.cli.state import Group, on_database
from bursar.instance import Bursar
from bursar.model.money import MINOR_MAX, Asset, AssetStatus
from bursar.rails.trading.rules import U64_MAX


@click.group(cls=Group)
def asset() -> None:
    """Units of value: create, list, change, suspend, resume."""


@asset.command(
    examples="""
    bursar asset create USDT --precision 6
    bursar asset create EUR --precision 2 --min-transfer 0.01 --max-transfer 50000.00
    """
)
@click.argument("code")
@click.option("--precision", type=int, required=True, help="Decimals: 2 for cents, 18 for wei.")
@click.option("--min-transfer", metavar="AMOUNT", help="Smallest internal transfer.")
@click.option("--max-transfer", metavar="AMOUNT", help="Largest internal transfer.")
@click.option(
    "--transfers/--no-transfers",
    "internal_transfer_enabled",
    default=None,
    help="Whether users may transfer it; not given: they may.",
)
@on_database(may_create=True)
async def create(b: Bursar, out: Output, /, **given: Any) -> None:
    """Create an asset. CODE is up to 16 capital letters and digits.

    Again with the same values it changes nothing; with others it is refused (see `bursar asset change`). The precision
    never changes, so mind what fits into a trading core, which counts in unsigned 64 bits: the answer says how much.
    """
    made = await b.ledger.create_asset(**given)
    most = made.of_minor(U64_MAX)
    out.show(
        _json(made),
        lambda: (
            f"asset {made.code} has {made.precision} decimals and is {made.status}\n"
            f"in a trading core (unsigned 64 bits) one user can have at most {most} {made.code}"
        ),
    )


@asset.command(
    examples="""
    bursar asset change EUR --min-transfer 1.00 --max-transfer 100000.00
    bursar asset change EUR --max-transfer none
    bursar asset change EUR --no-transfers
    """
)
@click.argument("code")
@click.option("--min-transfer", metavar="AMOUNT", help="Smallest internal transfer.")
@click.option("--max-transfer", metavar="AMOUNT", help="Largest internal transfer; none: no bound.")
@click.option(
    "--transfers/--no-transfers", "internal_transfer_enabled", default=None, help="Whether users may transfer it."
)
@on_database()
async def change(b: Bursar, out: Output, /, code: str, **changes: Any) -> None:
    """Change an asset's bounds of transfers, or whether there are any. Transfers under way go on."""
    if all(value is None for value in changes.values()):
        raise click.UsageError("Say what to change: --min-transfer, --max-transfer, --transfers or --no-transfers.")
    if changes["max_transfer"] == "none":
        changes["max_transfer"] = (await b.ledger.asset(code)).of_minor(MINOR_MAX)
    changed = await b.ledger.change_asset(code, **changes)
    out.show(_json(changed), lambda: f"asset {changed.code}: {_transfers(changed)}")


@asset.command("list", examples="bursar asset list")
@on_database()
async def list_(b: Bursar, out: Output) -> None:
    """All assets."""
    found = sorted((await b.ledger.assets()).values(), key=lambda a: a.code)
    rows = [(a.code, a.precision, a.status, a.internal_transfer_enabled, *_bounds(a)) for a in found]
    columns = ("asset", "decimals", "status", "transfers", "min transfer", "max transfer")
    right = ("decimals", "min transfer", "max transfer")
    out.show([_json(a) for a in found], lambda: table(*columns, rows=rows, right=right, empty="no assets yet"))


@asset.command(examples="bursar asset suspend USDT")
@click.argument("code")
@on_database()
async def suspend(b: Bursar, out: Output, code: str) -> None:
    """Stop an asset: nothing moves it any more, except what is given back."""
    await _set(b, out, code, AssetStatus.SUSPENDED)


@asset.command(examples="bursar asset resume USDT")
@click.argument("code")
@on_database()
async def resume(b: Bursar, out: Output, code: str) -> None:
    """Let a suspended asset move again."""
    await _set(b, out, code, AssetStatus.ACTIVE)


async def _set(b: Bursar, out: Output, code: str, status: AssetStatus) -> None:
    changed = await b.ledger.change_asset(code, status=status)
    out.show(_json(changed), lambda: f"asset {changed.code} is {changed.status}")


def _transfers(asset: Asset) -> str:
    if not asset.internal_transfer_enabled:
        return "users can't transfer it"
    least, most = _bounds(asset)
    bound = f" and at most {most}" if most else ""
    return f"users transfer at least {least}{bound} at once"


def _bounds(asset: Asset) -> tuple[str, str | None]:
    """The smallest transfer and the largest; None: no bound."""
    least, most = asset.of_minor(asset.min_transfer), asset.of_minor(asset.max_transfer)
    return str(least), None if asset.max_transfer == MINOR_MAX else str(most)


def _json(asset: Asset) -> dict[str, Any]:
    least, most = _bounds(asset)
    return {
        "code": asset.code,
        "precision": asset.precision,
        "status": asset.status,
        "min_transfer": least,
        "max_transfer": most,
        "internal_transfer_enabled": asset.internal_transfer_enabled,
        "core_max": str(asset.of_minor(U64_MAX)),
    }
