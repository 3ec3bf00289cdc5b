"""Commits that recovery could not finish and has set aside: what they block, and how to give one up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bursar.cli.output import Output, table
from bursar.cli.state import Group, on_database

if TYPE_CHECKING:
    from bursar.instance import Bursar

CLAIMS_MAX = 100_000


@click.group(cls=Group)
def saga() -> None:
    """Commits that recovery has set aside: list, release."""


@saga.command("list", examples="bursar saga list")
@on_database()
async def list_(b: Bursar, out: Output) -> None:
    """Commits under way or set aside, their keys, and how many postings each has claimed.

    `recover` finishes or abandons those that are under way. What is set aside blocks its postings and its key until it
    is released.
    """
    claimed: dict[str, int] = {}
    for _, owner in await b.store.read.sagas.claims(CLAIMS_MAX):
        claimed[owner] = claimed.get(owner, 0) + 1
    found = [
        {
            "id": one.id,
            "scope": one.scope,
            "key": one.key,
            "phase": "set aside" if one.phase == "broken" else one.phase,
            "claimed_postings": claimed.get(one.id, 0),
        }
        for one in await b.store.read.sagas.list()
    ]
    rows = [tuple(str(value) for value in one.values()) for one in found]
    headings = ("commit", "scope", "key", "phase", "claimed postings")
    out.show(
        found,
        lambda: table(*headings, rows=rows, right=("claimed postings",), empty="no commits are under way or set aside"),
    )


@saga.command(examples='bursar saga release 4b1f… --actor anna --reason "ticket 17: the row was damaged"')
@click.argument("id")
@click.option("--actor", metavar="NAME", required=True, help="Who you are; it is written down.")
@click.option("--reason", metavar="TEXT", required=True, help="Why; it is written down.")
@on_database()
async def release(b: Bursar, out: Output, id: str, actor: str, reason: str) -> None:
    """Give up a commit that was set aside: what it has claimed can be spent again, and its key be used.

    Refused if anything of it was written. Its caller never got the answer that it was done.
    """
    freed = await b.ledger.release_saga(id, actor=actor, reason=reason)
    words = f"commit {id} is released; postings that can be spent again: {freed}"
    out.show({"released": id, "postings": freed}, lambda: words)
