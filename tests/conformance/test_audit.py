"""Audit: green on a busy ledger, red on every row that somebody changes behind our back, green again once it is undone.

The database refuses such changes; here its guards are shut up first, as a superuser or an editor of files could.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import pytest
from tests.builders import Place, seed
from tests.warm import WARM

from bursar import Bursar, CappedOverdraft, Entry, Movement, pay
from bursar.audit import INVARIANTS, Finding, audit
from bursar.audit import walk as walking
from bursar.ledger import Ledger


@dataclass
class Busy:
    """Numbers of what a busy ledger contains."""

    spent: int = 0  # a posting that was spent
    spender: int = 0  # the envelope that spent it
    live: int = 0  # a posting of a plain account that is live
    deposit: int = 0  # an envelope that consumed nothing
    hold: int = 0


async def make_busy(ledger: Ledger) -> Busy:
    """A bit of everything: payments, fees, holds, a reversal, an overdraft, a freeze, a merge, a wide account."""
    busy = Busy()
    await ledger.create_account("shop", policy=CappedOverdraft(floor="-500", asset="USDT"))
    first, *_ = await seed(ledger, "alice", "100", "7", "3")
    await seed(ledger, "bob", "50")
    await seed(ledger, "carol", "1", "1", asset="BTC")
    busy.deposit = first.envelope
    busy.spent = (first.envelope << 16) + 1
    purchase = Entry(movements=(Movement("alice", "bob", "USDT", "20"), Movement("alice", "fees", "USDT", "0.5")))
    busy.spender = (await ledger.commit(purchase)).envelope
    await ledger.commit(pay("shop", "bob", "USDT", "120"))
    await ledger.commit(pay("bob", "shop", "USDT", "30"))
    undone = await ledger.commit(pay("bob", "alice", "USDT", "5"))
    await ledger.reverse(undone.envelope)
    hold = await ledger.authorize("bob", "USDT", "40", expires_in=timedelta(hours=1))
    await ledger.confirm(hold.id, "shop", "15")
    other = await ledger.authorize("bob", "USDT", "4")
    await ledger.void(other.id)
    await ledger.compact("alice")
    await ledger.widen(await ledger.account("alice"))
    await ledger.commit(pay("alice", "carol", "USDT", "2"))
    await ledger.freeze("carol")
    busy.hold = hold.id
    busy.live = (await ledger.postings("carol", "USDT"))[0].id
    return busy


async def look(place: Place, *only: str) -> list[Finding]:
    async with place.bursar() as b:
        return await audit(b.store, only=only)


def red(findings: list[Finding]) -> set[str]:
    return {f.invariant for f in findings if not f.ok}


async def behind_our_back(place: Place, *statements: str) -> None:
    """Run SQL with the guards shut up. `{s}` is the schema."""
    if place.engine == "postgres":
        connection = await asyncpg.connect(place.url)
        try:
            await connection.execute("SET session_replication_role = replica")
            for sql in statements:
                await connection.execute(sql.replace("{s}", "bursar."))
        finally:
            await connection.close()
        return
    with sqlite3.connect(place.path) as file:
        guards = file.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            file.execute(f"DROP TRIGGER {name}")
        for sql in statements:
            file.execute(sql.replace("{s}", ""))
        for _, sql in guards:
            file.execute(sql)
    file.close()


async def saved_aside(place: Place, table: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do something, and put the rows of a table back afterwards."""
    await behind_our_back(place, f"CREATE TABLE {{s}}aside AS SELECT * FROM {{s}}{table}")
    await work()
    put_back = f"INSERT INTO {{s}}{table} SELECT * FROM {{s}}aside"
    await behind_our_back(place, f"DELETE FROM {{s}}{table}", put_back, "DROP TABLE {s}aside")


@dataclass(frozen=True)
class Damage:
    """One change behind our back, and what it breaks."""

    table: str
    sql: str  # {spent}, {spender}, {live}, {deposit}, {hold} are filled in
    breaks: set[str]
    says: str  # in the evidence


DAMAGES = {
    "live row gone": Damage(
        "live_postings", "DELETE FROM {s}live_postings WHERE posting = {live}", {"I1", "I3"}, "2.000000 USDT of carol"
    ),
    "live row worth more": Damage(
        "live_postings",
        "UPDATE {s}live_postings SET amount = (SELECT amount FROM {s}postings WHERE id = {spent})"
        " WHERE posting = {live}",
        {"I1", "I3"},
        "98.000000 USDT instead of zero",
    ),
    "spent posting alive again": Damage(
        "live_postings",
        "INSERT INTO {s}live_postings (posting, account, asset, amount)"
        " SELECT id, account, asset, amount FROM {s}postings WHERE id = {spent}",
        {"I1", "I3"},
        "is live, but it was spent",
    ),
    "spend forgotten": Damage(
        "spends", "DELETE FROM {s}spends WHERE posting = {spent}", {"I2", "I3"}, "which is not spent"
    ),
    "spend by another": Damage(
        "spends",
        "UPDATE {s}spends SET envelope = {deposit} WHERE posting = {spent}",
        {"I2"},
        "was spent by envelope {deposit}",
    ),
    "spend by nobody there": Damage(
        "spends", "UPDATE {s}spends SET envelope = 999999 WHERE posting = {spent}", {"I2"}, "does not exist"
    ),
    "spend that nobody lists": Damage(
        "spends",
        "INSERT INTO {s}spends (posting, envelope) VALUES ({live}, {spender})",
        {"I2", "I3"},
        "posting {live} is spent in the name of envelope {spender}",
    ),
    "posting changed": Damage(
        "postings",
        "UPDATE {s}postings SET account = (SELECT account FROM {s}postings WHERE id = {spent}) WHERE id = {live}",
        {"I3", "I8"},
        "not live as it was created",
    ),
    "spent posting changed": Damage(
        "postings",
        "UPDATE {s}postings SET amount = (SELECT amount FROM {s}postings WHERE id = {live}) WHERE id = {spent}",
        {"I8"},
        "envelope {deposit} makes -98.000000 USDT out of nothing",
    ),
    "posting gone": Damage(
        "postings", "DELETE FROM {s}postings WHERE id = {spent}", {"I2", "I8"}, "posting {spent} does not exist"
    ),
    "envelope rewritten": Damage(
        "envelopes",
        "UPDATE {s}envelopes SET key = 'another' WHERE seq = {spender}",
        {"I8"},
        "envelope {spender} hashes to",
    ),
    "metadata rewritten": Damage(
        "envelopes",
        """UPDATE {s}envelopes SET metadata = '{{"why":"fraud"}}' WHERE seq = {spender}""",
        {"I8"},
        "envelope {spender} hashes to",
    ),
    "envelope that can't be read": Damage(
        "envelopes",
        "UPDATE {s}envelopes SET kind = 9 WHERE seq = {deposit}",
        {"I8"},
        "envelope {deposit} can't be read",
    ),
    "spender that can't be read": Damage(
        "envelopes",
        "UPDATE {s}envelopes SET kind = 9 WHERE seq = {spender}",
        {"I2", "I8"},
        "posting {spent} is spent in the name of envelope {spender}",
    ),
    "envelope gone": Damage(
        "envelopes",
        "DELETE FROM {s}envelopes WHERE seq = {deposit}",
        {"I8"},
        "posting {spent} (100.000000 USDT of alice) belongs to no envelope",
    ),
    "account version rewritten": Damage(
        "accounts",
        """UPDATE {s}accounts SET policy = '{{"policy":"uncapped_overdraft"}}' WHERE path = 'alice'""",
        {"I8"},
        "hashes to",
    ),
    "cached balance wrong": Damage(
        "balance_cache",
        "UPDATE {s}balance_cache SET amount = '7' WHERE asset <> 0 AND part = (SELECT max(part) FROM {s}balance_cache)",
        {"I3"},
        "the cache says",
    ),
    "guarded balance wrong": Damage(
        "account_heads", "UPDATE {s}account_heads SET balance = '0'", {"I3"}, "shop: its guarded balance is 0.000000"
    ),
    "guarded balance gone": Damage(
        "account_heads", "DELETE FROM {s}account_heads", {"I3"}, "shop: its guarded balance is 0.000000"
    ),
    "hold says more than is held": Damage(
        "holds",
        "UPDATE {s}holds SET remaining = amount WHERE id = {hold}",
        {"I3"},
        "hold {hold} says 40.000000 USDT remain",
    ),
    "hold of another": Damage(
        "holds",
        "UPDATE {s}holds SET account = (SELECT min(id) FROM {s}accounts WHERE path = 'alice') WHERE id = {hold}",
        {"I3"},
        "which is not what was set aside",
    ),
    "history gone": Damage(
        "involved",
        "DELETE FROM {s}involved WHERE envelope = {deposit}",
        {"I8"},
        "envelope {deposit} is not in the history of account",
    ),
    "history too long": Damage(
        "involved",
        "INSERT INTO {s}involved SELECT id, {deposit} FROM {s}accounts WHERE path = 'bob'",
        {"I8"},
        "parts of accounts",
    ),
    "event gone": Damage(
        "events",
        "DELETE FROM {s}events WHERE kind = 1 AND subject = {deposit}",
        {"I8"},
        "envelope {deposit} was never announced",
    ),
    "account that can't be read": Damage(
        "accounts",
        "UPDATE {s}accounts SET policy = '{{}}' WHERE path = 'bob'",
        {"I3", "I8"},
        "account bob, version 1, can't be read",
    ),
    "hold gone": Damage(
        "holds", "DELETE FROM {s}holds WHERE id = {hold}", {"I3"}, "held: open holds say 0.000000 USDT"
    ),
}


def test_a_busy_ledger_is_green(place: Place) -> None:
    async def body() -> None:
        async with place.bursar() as b:
            await make_busy(b.ledger)
            findings = await audit(b.store)
            counts = await b.store.read.checks.counts()
            spends = await b.store.read.checks.spends()
        assert [f.invariant for f in findings] == list(INVARIANTS)
        assert all(f.ok and f.judged and not f.broken and not f.note for f in findings), findings
        checked = {f.invariant: f.checked for f in findings}
        seen = {"I1": counts["live"], "I2": spends, "I3": counts["postings"], "I8": counts["envelopes"]}
        assert checked == seen | {"I4": 0, "I7": 0}  # no records yet

    WARM.run(body())


def test_an_empty_ledger_is_green(place: Place) -> None:
    findings = WARM.run(look(place))
    assert not red(findings)
    assert all(f.judged for f in findings)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named_and_nothing_else_is_blamed(place: Place, name: str) -> None:
    damage = DAMAGES[name]

    async def body() -> None:
        async with place.bursar() as b:
            busy = await make_busy(b.ledger)
        facts = vars(busy)

        async def hurt() -> None:
            await behind_our_back(place, damage.sql.format(s="{s}", **facts))
            findings = await look(place)
            evidence = "\n".join(text for f in findings for text in f.broken)
            assert red(findings) == damage.breaks, evidence
            assert damage.says.format(**facts) in evidence

        await saved_aside(place, damage.table, hurt)
        assert red(await look(place)) == set()

    WARM.run(body())


def test_small_pages_find_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one or two envelopes, cut wherever they name more than three postings."""
    monkeypatch.setattr(walking, "PAGE_MAX", 2)
    monkeypatch.setattr(walking, "PAGE_MIN", 1)
    monkeypatch.setattr(walking, "PAGE_BYTES_MAX", 50)
    monkeypatch.setattr(walking, "POSTINGS_MAX", 3)

    async def body() -> None:
        async with place.bursar() as b:
            busy = await make_busy(b.ledger)
        assert red(await look(place)) == set()
        await behind_our_back(place, f"UPDATE {{s}}envelopes SET kind = 9 WHERE seq = {busy.spender}")
        assert red(await look(place)) == {"I2", "I8"}

    WARM.run(body())


def test_only_what_was_asked_for_is_checked(place: Place) -> None:
    async def body() -> None:
        async with place.bursar() as b:
            await make_busy(b.ledger)
            for name in INVARIANTS:
                (finding,) = await audit(b.store, only=[name])
                assert (finding.invariant, finding.ok) == (name, True)
            with pytest.raises(ValueError, match="I1, I2, I3, I4, I7, I8"):
                await audit(b.store, only=["I5"])

    WARM.run(body())


def test_progress_is_told_up_to_the_last_envelope(place: Place) -> None:
    told: list[tuple[str, int, int]] = []

    async def body() -> int:
        async with place.bursar() as b:
            await make_busy(b.ledger)
            await audit(b.store, progress=lambda *words: told.append(words))
            return (await b.store.read.checks.counts())["envelopes"]

    envelopes = WARM.run(body())
    assert [(done, of) for what, done, of in told if what == "envelopes"][-1] == (envelopes, envelopes)


def test_evidence_is_limited_and_says_so(place: Place) -> None:
    async def body() -> list[Finding]:
        async with place.bursar() as b:
            await make_busy(b.ledger)
        await behind_our_back(place, "UPDATE {s}envelopes SET scope = 'another'")
        return await look(place, "I8")

    (finding,) = WARM.run(body())
    assert len(finding.broken) == 10
    assert "there are more" in finding.note


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)  # split: each step is a moment of its own
def test_an_audit_sees_one_moment_while_others_write(place: Place) -> None:
    async def write(b: Bursar) -> None:
        for n in range(30):
            await b.ledger.commit(pay("bob", "alice", "USDT", "0.01", key=f"k{n}"))

    async def body() -> None:
        async with place.bursar() as writer, place.bursar() as reader:
            await make_busy(writer.ledger)
            writing = asyncio.create_task(write(writer))
            while not writing.done():
                assert red(await audit(reader.store)) == set()
            await writing

    WARM.run(body())
