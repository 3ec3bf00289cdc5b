"""`bursar audit` of a database with payouts: what it finds there, and the wallets that it could not ask."""

from __future__ import annotations

import asyncio
import sqlite3

from tests.builders import Place, furnish
from tests.cli.conftest import Shell
from tests.till import Town, till

import bursar


def paid(shell: Shell) -> str:
    """A payout that is sent and not final; its id."""

    async def work() -> str:
        async with bursar.open(shell.url) as b:
            await furnish(b.ledger)
        async with till(Place("sqlite", shell.url), Town()) as t:
            made = await t.request("5")
            await t.until(made.id, "confirming")
            return made.id

    return asyncio.run(work())


def test_audit_names_the_wallets_that_it_could_not_ask(empty: Shell) -> None:
    paid(empty)
    ran = empty("--json", "audit")
    assert ran.code == 0 and [f["invariant"] for f in ran.json] == ["I1", "I2", "I3", "I4", "I6", "I7", "I8", "I9"]
    wallets = ran.json[-1]
    assert (wallets["judged"], wallets["not_judged"]) == (False, 2) and "hot1 (no nodes of paper here)" in wallets[
        "note"
    ]
    assert empty("audit", "--only", "I9").code == 3, "it was all that was asked for"


def test_audit_finds_a_payout_whose_hold_is_not_what_it_says(empty: Shell) -> None:
    id_ = paid(empty)
    with sqlite3.connect(empty.url.removeprefix("sqlite:///")) as file:
        file.execute('UPDATE records SET body = replace(body, \'"amount":"5000000"\', \'"amount":"6000000"\')')
    file.close()
    ran = empty("audit")
    assert ran.code == 1 and f"I4: payout {id_} holds 6000000 smallest units" in ran.out.replace("\n", " ")
