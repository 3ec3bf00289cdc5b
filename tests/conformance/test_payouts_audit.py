"""The audit of payouts: green on a busy till, red on every row that is changed behind our back; wallets and chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_payouts import ALSO, WHY, signed_elsewhere, watch
from tests.till import CONTRACT, GAS, Till, Town, till, wallet_account

from bursar import deposit
from bursar.audit import Finding, audit
from bursar.audit.checks import Scene
from bursar.engine.forced import ask_due
from bursar.flows.payouts.coverage import stop_if_short, wallets_cover
from bursar.flows.payouts.documents import ASSET, WALLET, AssetDocument, WalletDocument
from bursar.flows.payouts.invariants import CHECKS
from bursar.flows.payouts.payout import Payout
from bursar.rails.chain import Balances, Decoded, Fee, Slot

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@dataclass
class Ids:
    """Payouts of a busy till."""

    paid: str  # confirmed by its first transaction
    bumped: str  # confirmed by a replacement
    cancelled: str  # failed: its nonce was used up by a cancellation
    open: str  # sent, and not in a block
    sweep: str  # waits


async def make_busy(t: Till) -> Ids:
    """One of each, with what the watcher of the chain saw."""
    chain = t.town.chain
    await watch(t)
    paid = (await t.request("5", key="paid", fee="1")).id
    await t.until(paid, "confirming")
    chain.mine()
    await t.until(paid, "confirmed")
    bumped = (await t.request("6", key="bumped")).id
    await t.until(bumped, "confirming")
    chain.price = 50
    await t.payouts.bump(bumped, **WHY)
    await t.step(bumped)
    await t.replace(bumped, 2)
    chain.price = 10
    chain.mine()
    await t.until(bumped, "confirmed")
    cancelled = (await t.request("7", key="cancelled")).id
    await t.until(cancelled, "processing")
    await t.payouts.cancel(cancelled, **WHY)
    await t.until(cancelled, "confirming")
    chain.mine()
    await t.until(cancelled, "failed")
    await watch(t)
    open_ = (await t.request("8", key="open")).id
    await t.until(open_, "confirming")
    into = wallet_account(t.town.name, "hot2")
    sweep = (await t.request("9", key="sweep", to="@hot2", wallet="hot1", account=into)).id
    return Ids(paid, bumped, cancelled, open_, sweep)


async def look(t: Till) -> dict[str, Finding]:
    return {finding.invariant: finding for finding in await audit(t.engine.store, more=CHECKS)}


# What is changed, and what the audit says of it. {paid} and the others are ids; {s} is the schema.
DAMAGES = {
    "a confirmed payout names another hash": (
        "I7",
        "UPDATE {s}records SET body = replace(CAST(body AS text), '{hash}', 'beef'){json} WHERE id = '{paid}'",
        "was confirmed by 'beef', which 0 of its attempts are",
    ),
    "a hash belongs to another payout": (
        "I7",
        "UPDATE {s}flow_rows SET body = replace(CAST(body AS text), '{paid}', '{open}'){json} WHERE kind = 'hash'",
        "which belongs to",
    ),
    "a hash is gone": (
        "I7",
        "DELETE FROM {s}flow_rows WHERE kind = 'hash' AND flow = 'payouts'",
        "no payout has that hash",
    ),
    "the hash of a replacement is gone": (
        "I7",
        "DELETE FROM {s}flow_rows WHERE kind = 'hash' AND flow = 'replacements'",
        "no payout has that hash",
    ),
    "an attempt has another nonce": (
        "I7",
        "UPDATE {s}flow_rows SET body = replace(CAST(body AS text), '\"nonce\":0', '\"nonce\":77'){json}"
        " WHERE kind = 'attempt' AND key LIKE '{paid}/%'",
        "which no payout has taken",
    ),
    "an attempt has the nonce of another payout": (
        "I7",
        "UPDATE {s}flow_rows SET record = (SELECT number FROM {s}records WHERE id = '{open}')"
        " WHERE kind = 'nonce' AND record = (SELECT number FROM {s}records WHERE id = '{paid}')",
        "which belongs to record",
    ),
    "an attempt is another payout's": (
        "I7",
        "UPDATE {s}flow_rows SET record = (SELECT number FROM {s}records WHERE id = '{open}')"
        " WHERE kind = 'attempt' AND key LIKE '{paid}/%'",
        "belongs to payout",
    ),
    "the chain saw a nonce taken by another payout": (
        "I7",
        "UPDATE {s}flow_rows SET body = replace(CAST(body AS text), '{hash}', '{other}'){json} WHERE kind = 'spent'",
        "took it",
    ),
    "the chain saw a nonce taken by an unknown transaction": (
        "I7",
        "UPDATE {s}flow_rows SET body = replace(CAST(body AS text), '{hash}', 'beef'){json} WHERE kind = 'spent'",
        "which is no attempt of a payout",
    ),
    "what is reserved is not what the payout needs": (
        "I7",
        "UPDATE {s}flow_rows SET amount = {seven}"
        " WHERE kind = 'reserved' AND key LIKE '%/USDT%' AND state <> 'released' AND record <> 0",
        "and has 7",
    ),
    "the total is not the sum": (
        "I7",
        "UPDATE {s}flow_rows SET amount = {seven} WHERE kind = 'unconfirmed' AND state = 'total'",
        "says that 7 is reserved",
    ),
    "something is reserved for a payout that has ended": (
        "I7",
        "UPDATE {s}records SET state = 'failed' WHERE id = '{open}'",
        "is failed and needs 0 of reserved",
    ),
    "a payout says that it holds more": (
        "I4",
        'UPDATE {s}records SET body = replace(CAST(body AS text), \'"amount":"8000000"\', \'"amount":"9000000"\'){json}'
        " WHERE id = '{open}'",
        "holds 9000000 smallest units of USDT of alice",
    ),
    "a payout says that it holds for another account": (
        "I4",
        'UPDATE {s}records SET body = replace(CAST(body AS text), \'"account":"alice"\', \'"account":"bob"\'){json}'
        " WHERE id = '{open}'",
        "of bob, hold",
    ),
    "a payout has no hold": ("I4", "UPDATE {s}records SET transit = 0 WHERE id = '{sweep}'", "no open hold is its own"),
    "a payout can't be read": ("I7", "UPDATE {s}records SET body = '{{}}' WHERE id = '{paid}'", "can't be read"),
}


@scenario
@pytest.mark.parametrize("damage", DAMAGES)
async def test_audit_finds_what_was_changed_behind_our_back(place: Place, damage: str) -> None:
    invariant, sql, says = DAMAGES[damage]
    async with till(place, Town()) as t:
        ids = await make_busy(t)
        before = await look(t)
        assert [text for finding in before.values() for text in finding.broken] == []
        paid, other = await t.payouts.view(ids.paid), await t.payouts.view(ids.open)
        postgres = place.engine == "postgres"
        filled = {"hash": paid.tx_hash, "other": other.tx_hash, "json": "::json" if postgres else ""}
        filled["seven"] = "7" if postgres else "'7'"
        await behind_our_back(place, sql.format(s="{s}", **filled, **vars(ids)))
        finding = (await look(t))[invariant]
        assert not finding.ok and any(says in text for text in finding.broken), finding.broken


@scenario
async def test_audit_of_payouts_takes_few_queries_however_many_there_are(place: Place) -> None:
    async with till(place, Town()) as t:
        first = await counted(t)
        for number in range(6):
            await t.until((await t.request("1", key=f"k{number}")).id, "confirming")
        one_page = await counted(t)
        t.town.chain.mine()
        for view in await t.payouts.list():
            await t.until(view.id, "confirmed")
        assert one_page - first <= 12 and await counted(t) - first <= 12


async def counted(t: Till) -> int:
    """Statements that an audit of payouts makes."""
    made = 0

    async with t.engine.store.snapshot(unhurried=True) as tables:
        session = tables.session
        rows = session.rows

        async def counting(*args: object) -> object:
            nonlocal made
            made += 1
            return await rows(*args)  # type: ignore[arg-type]

        session.rows = counting  # type: ignore[method-assign,assignment]
        scene = Scene(tables, lambda *_: None)
        await scene.read()
        for check in CHECKS:
            await check(scene).finish()
        session.rows = rows  # type: ignore[method-assign]
    return made


@scenario
async def test_audit_holds_after_a_restore_a_dispute_and_a_second_attempt(place: Place) -> None:
    """Attempts that came from the signer's log have no nonce of this database's own (W33)."""
    town = Town()
    async with till(place, town) as t:
        lost = await t.request("3", key="lost")
        body = msgspec.json.decode((await t.record(lost.id)).body, type=Payout)
        await signed_elsewhere(t, lost.id, body)
        await t.until(lost.id, "confirmed")
        town.chain.failing.add("@bob")
        again = await t.request("4", key="again")
        await t.until(again.id, "confirming")
        town.chain.mine()
        assert (await t.step(again.id)).state == "pending"
        town.chain.failing.clear()
        await t.until(again.id, "confirming")
        town.chain.mine()
        await t.until(again.id, "confirmed")
        town.chain.shy.add("@eve")
        for key, paid in (("shy1", True), ("shy2", False)):
            shy = await t.request("2", key=key, to="@eve")
            await t.until(shy.id, "confirming")
            town.chain.mine()
            assert (await t.step(shy.id)).state == "disputed"
            assert [text for finding in (await look(t)).values() for text in finding.broken] == []
            for who in (WHY, ALSO):
                await t.payouts.resolve(shy.id, paid=paid, **who)
        assert [text for finding in (await look(t)).values() for text in finding.broken] == []


# --- I9 --------------------------------------------------------------------------------------------------------------


async def covered(t: Till) -> Finding:
    return await wallets_cover(t.engine.store, {t.town.name: t.town.chain})


@scenario
async def test_wallets_cover_the_ledger_at_every_step_of_a_payout(place: Place) -> None:
    """In a block but not booked, waiting, swept, cancelled, disputed: nothing of that is a deficit."""
    town = Town()
    async with till(place, town) as t:
        chain = town.chain
        assert (await covered(t)).ok
        made = await t.request("5", fee="1")
        for _ in range(4):
            await t.step(made.id)
            assert (await covered(t)).broken == []
        chain.mine()
        finding = await covered(t)
        assert finding.broken == [] and finding.judged, "final on the chain, and not booked yet"
        await t.until(made.id, "confirmed")
        assert (await covered(t)).broken == []
        into = wallet_account("paper", "hot2")
        swept = (await t.request("9", key="sweep", to="@hot2", wallet="hot1", account=into)).id
        assert (await covered(t)).broken == [], "debited already, and not there yet"
        await t.until(swept, "confirming")
        chain.mine()
        assert (await covered(t)).broken == []
        await t.until(swept, "confirmed")
        assert (await covered(t)).broken == []
        chain.tokens[CONTRACT, "@hot1"] -= 1
        (text,) = (await covered(t)).broken
        assert text.startswith("hot1 has 10085.999999 USDT") and "the ledger says 10086.000000 USDT" in text


@scenario
async def test_wallets_are_asked_about_together_and_each_is_judged_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    town, asked = Town(), list[list[str]]()
    balances_of = town.chain.balances_of

    async def some(addresses: Sequence[str], contracts: Sequence[str]) -> dict[str, Balances | str]:
        asked.append(list(addresses))
        return {**await balances_of(addresses, contracts), "@hot2": "nodes disagree"}

    monkeypatch.setattr(town.chain, "balances_of", some)
    async with till(place, town) as t:
        await t.put(WALLET, "hot3", WalletDocument(chain=town.name, address="nowhere"))
        town.chain.tokens[CONTRACT, "@hot1"] = 0
        finding = await covered(t)
        assert asked == [["@hot1", "@hot2"]]
        assert "hot1 has 0.000000 USDT" in finding.broken[0] and len(finding.broken) == 1
        assert "hot2 (nodes disagree)" in finding.note and "hot3 ('nowhere' is not an address" in finding.note
        assert finding.not_judged == 2
        monkeypatch.setattr("bursar.flows.payouts.coverage.ASKED_MAX", 1)
        await covered(t)
        assert asked[1:] == [["@hot1"], ["@hot2"]]


@scenario
async def test_what_is_missing_beyond_open_payouts_is_a_deficit(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request("5")
        await t.until(made.id, "confirming")
        stolen = Decoded(
            chain_id=7,
            to="@thief",
            contract=CONTRACT,
            amount=6_000_000,
            slot=Slot(nonce=1),
            fee=Fee(gas_limit=1, price=10),
        )
        town.chain.include("stolen", stolen, "@hot1")
        finding = await covered(t)
        (text,) = finding.broken
        assert "hot1 has 10094.000000 USDT" in text and "open payouts explain 5.000000 USDT" in text
        assert finding.judged and "more than is booked" in finding.note, "the coin of the wallets was never booked"


@scenario
async def test_deficit_can_not_hide_behind_a_payout_whose_nonce_is_not_used(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request("5")
        await t.until(made.id, "confirming")
        town.chain.tokens[CONTRACT, "@hot1"] -= 1
        (text,) = (await covered(t)).broken
        assert "hot1 has 10099.999999 USDT" in text and "open payouts explain 0.000000 USDT" in text


@scenario
async def test_what_two_people_say_was_paid_is_no_broken_invariant(place: Place) -> None:
    """The chain can't say it, and with its nodes away there is not even a hash (W17). Its cost is booked when known."""
    town = Town()
    async with till(place, town) as t:
        for key, away in (("far", True), ("near", False)):
            made = await t.request("5", key=key)
            await t.until(made.id, "confirming")
            town.chain.mine()
            town.chain.away = away
            for who in (WHY, ALSO):
                await t.payouts.resolve(made.id, paid=True, **who)
            view = await t.payouts.view(made.id)
            outcomes = [attempt.outcome for attempt in view.attempts]
            assert (view.state, view.gas_used, outcomes) == ("confirmed", *((0, [""]) if away else (21_000, ["final"])))
            assert [text for finding in (await look(t)).values() for text in finding.broken] == []
            town.chain.away = False
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind_our_back(place, f"UPDATE {{s}}forced_calls SET due = {ago} WHERE due IS NOT NULL")
        assert await ask_due(t.engine) == 2, "both were forced, and the chain is asked about both"
        assert await t.minor(GAS, "ETH") == -420_000, "of the first one too, now that its nodes can be asked"
        first = (await t.payouts.list())[-1]
        assert (await t.payouts.view(first.id)).attempts[0].outcome == "final"
        assert await ask_due(t.engine) == 0
        assert [text for finding in (await look(t)).values() for text in finding.broken] == []


@scenario
async def test_more_than_is_booked_is_a_note(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        town.chain.tokens[CONTRACT, "@hot2"] += 1
        finding = await covered(t)
        assert finding.ok and "hot2 has 10000.000001 USDT" in finding.note


@scenario
async def test_wallets_that_can_not_be_asked_are_named_and_not_judged(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        alone = await wallets_cover(t.engine.store, {})
        assert (alone.ok, alone.judged, alone.not_judged, alone.checked) == (True, False, 2, 0)
        assert alone.note == "not asked: hot1 (no nodes of paper here), hot2 (no nodes of paper here)"
        town.chain.away = True
        away = await covered(t)
        assert (away.judged, away.not_judged) == (False, 2) and "no node answers" in away.note


@scenario
async def test_units_of_chain_and_ledger_are_compared_exactly(place: Place) -> None:
    """An asset with 18 decimals on its chain and 8 in the ledger."""
    town = Town()
    async with till(place, town) as t:
        wide = AssetDocument(asset="BTC", chain="paper", contract="@btc", decimals=18)
        await t.put(ASSET, "btc:paper", wide)
        await t.ledger.commit(deposit(wallet_account("paper", "hot1"), "bob", "BTC", "1.5", key="btc"))
        town.chain.tokens["@btc", "@hot1"] = 15 * 10**17
        assert (await covered(t)).broken == []
        town.chain.tokens["@btc", "@hot1"] -= 1
        (text,) = (await covered(t)).broken
        assert "hot1 has 1.499999999999999999 BTC" in text


@scenario
async def test_wallet_with_less_than_the_ledger_says_stops_payouts(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        assert (await stop_if_short(t.payouts)).ok
        town.chain.tokens[CONTRACT, "@hot2"] -= 1
        finding = await stop_if_short(t.payouts)
        assert not finding.ok and "hot2" in finding.broken[0]
        assert [a.severity for a in await t.engine.store.read.alerts.open()] == ["critical"]
        made = await t.request()
        assert (await t.step(made.id)).state == "pending", "nothing is paid until two people have looked"
