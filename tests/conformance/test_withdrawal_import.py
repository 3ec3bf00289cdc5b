"""Running withdrawals of another system: taken over whole or not at all, watched, never paid a second time (W38)."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_payouts import ALSO, WHY, watch
from tests.paper_chain import PaperCodec
from tests.till import CONTRACT, FEES, Town, wallet_account
from tests.withdrawing import FUNDS, Counter, counter

from bursar.audit import audit
from bursar.engine import Operators
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.payout import Payout
from bursar.flows.withdrawals import Withdrawals, importing
from bursar.flows.withdrawals.importing import COLUMNS, Report, import_running
from bursar.flows.withdrawals.invariants import CHECKS
from bursar.flows.withdrawals.withdrawal import OPENING, Withdrawal
from bursar.model.flow_rows import number_of
from bursar.rails.chain import Fee, Order, Shape, Slot

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ROW = {
    "request_id": "old-1",
    "user": "1",
    "asset": "USDT",
    "chain": "paper",
    "to": "@bob",
    "amount": "5",
    "fee": "1",
    "status": "confirming",
    "wallet": "",
    "tx_hash": "",
    "memo": "",
    "created_at": "2026-01-31T12:00:00+00:00",
    "debited": "no",
}


BEEF = "beef" * 16


def file_of(*rows: dict[str, str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROW | row for row in rows)
    return text.getvalue()


async def sent_there(
    town: Town, nonce: int, *, amount: int = 5_000_000, to: str = "@bob", sender: str = "@hot1"
) -> str:
    """A transaction of the other system; its hash."""
    order = Order(payout="theirs", to=to, contract=CONTRACT, amount=amount)
    codec, fee = PaperCodec(), Fee(gas_limit=21_000, price=20, tip=1)
    unsigned = codec.build(town.chain.network, sender, order, Shape.PAY, Slot(nonce=nonce), fee)
    signed = codec.signed(unsigned, sender.encode(), sender)
    await town.chain.send(signed.raw)
    return signed.hash


async def imported(c: Counter, *rows: dict[str, str], dry_run: bool = False) -> Report:
    return await import_running(c.withdrawals, file_of(*rows), actor="ann", dry_run=dry_run)


async def payout_of(c: Counter, id_: str) -> str:
    return (await c.withdrawals.view(id_)).payout


async def sound(c: Counter) -> None:
    """Every invariant holds, and the wallets have what the ledger says."""
    found = await audit(c.till.engine.store, more=CHECKS)
    assert [text for finding in found for text in finding.broken] == []
    assert (await wallets_cover(c.till.engine.store, {c.till.town.name: c.till.town.chain})).broken == []


@scenario
async def test_what_is_under_way_is_watched_until_it_is_final_and_nothing_is_signed(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        row = {"tx_hash": hash_}
        (would,) = (await imported(c, row, dry_run=True)).lines
        assert (would.becomes, would.wallet, would.there) == ("watched", "hot1", False)
        assert (await c.withdrawals.page())[0] == [] and await c.funds() == FUNDS, "a dry run writes nothing"
        report = await imported(c, row)
        assert (report.problems, report.written, await c.funds()) == ((), 1, FUNDS - 6_000_000)
        await sound(c)
        await c.until("old-1", "queued")
        payout = await payout_of(c, "old-1")
        await c.till.until(payout, "confirming")
        await c.till.step(payout)
        await sound(c)
        town.chain.mine()
        await sound(c)
        await c.till.until(payout, "confirmed")
        done = await c.withdrawals.view("old-1")
        assert (done.status, done.tx_hash, await c.till.minor(FEES)) == ("completed", hash_, 1_000_000)
        assert done.created_us == 1769860800 * 10**6, "when its user asked"
        assert -await c.till.minor(wallet_account("paper", "hot1"), "ETH") == -21_000 * 20, "its gas is our cost"
        assert town.signer.entries == [] and town.chain.sends == [hash_]
        await sound(c)


@scenario
async def test_what_was_debited_comes_from_the_opening_account_and_goes_to_its_user_if_it_fails(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        paid, lost = await sent_there(town, 0), await sent_there(town, 1, to="@eve")
        rows = (
            {"tx_hash": paid, "debited": "yes"},
            {"request_id": "old-2", "tx_hash": lost, "to": "@eve", "debited": "yes"},
        )
        await c.till.ledger.freeze("user:1:funding")  # it has happened already
        assert (await imported(c, *rows)).written == 2
        assert (await c.funds(), await c.till.minor(OPENING)) == (FUNDS, -12_000_000)
        town.chain.failing.add("@eve")
        for id_ in ("old-1", "old-2"):
            await c.until(id_, "queued")
            await c.till.until(await payout_of(c, id_), "confirming")
        town.chain.mine()
        await c.till.until(await payout_of(c, "old-1"), "confirmed")
        failed = await payout_of(c, "old-2")
        for person in (WHY, ALSO):
            await c.till.payouts.resolve(failed, paid=False, **person)
        await c.till.engine.step(await c.till.record(failed))
        assert (await c.till.record(failed)).state == "failed"
        assert (await c.withdrawals.view("old-2")).status == "failed"
        assert (await c.funds(), await c.till.minor(OPENING)) == (FUNDS + 6_000_000, -12_000_000)
        await sound(c)


@scenario
@pytest.mark.parametrize("is_paid", [True, False])
async def test_what_may_have_been_sent_without_a_known_transaction_waits_for_two_people(
    place: Place, is_paid: bool
) -> None:
    town = Town()
    async with counter(place, town) as c:
        rows = (
            {"status": "processing", "wallet": "hot1"},
            {"request_id": "old-2", "tx_hash": BEEF, "wallet": "hot2"},
        )
        report = await imported(c, *rows)
        assert [line.becomes for line in report.lines] == ["two people", "two people"], report.problems
        await sound(c)
        for id_ in ("old-1", "old-2"):
            await c.until(id_, "queued")
            payout = await payout_of(c, id_)
            record = await c.till.step(payout)
            assert record.state == "disputed" and (await c.till.step(payout)).state == "disputed"
            await sound(c)
            await c.till.payouts.resolve(payout, paid=is_paid, **WHY)
            assert (await c.till.record(payout)).state == "disputed", "one person is not enough"
            await c.till.payouts.resolve(payout, paid=is_paid, **ALSO)
            view = await c.withdrawals.view(id_)
            assert view.status == ("completed" if is_paid else "failed")
        assert (await c.withdrawals.view("old-2")).tx_hash == (BEEF if is_paid else "")
        assert await c.funds() == (FUNDS - 12_000_000 if is_paid else FUNDS) and town.chain.sends == []
        found = await audit(c.till.engine.store, more=CHECKS)
        assert [text for finding in found for text in finding.broken] == []


@scenario
async def test_what_was_not_sent_is_decided_by_the_rules_that_hold_now(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        rows = (
            {"status": "approved", "amount": "20"},
            {"request_id": "old-2", "status": "pending", "debited": "yes"},
        )
        report = await imported(c, *rows)
        assert [line.becomes for line in report.lines] == ["decided here", "decided here"], report.problems
        assert await c.funds() == FUNDS - 21_000_000
        await c.until("old-1", "waiting")
        await c.approve("old-1", "ann")
        assert (await c.paid("old-1")).status == "completed"
        assert (await c.paid("old-2")).status == "completed"
        assert town.chain.tokens[CONTRACT, "@bob"] == 25_000_000
        await sound(c)


@scenario
async def test_the_same_file_twice_is_once_and_other_content_is_refused(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        row = {"tx_hash": await sent_there(town, 0)}
        await imported(c, row)
        again = await imported(c, row | {"amount": "5.00"}, {"request_id": "old-2", "status": "pending"})
        assert ([line.there for line in again.lines], again.written) == ([True, False], 1)
        for changed in ({"amount": "6"}, {"user": "2"}, {"to": "@eve"}, {"tx_hash": "", "wallet": "hot1"}):
            (problem,) = (await imported(c, row | changed)).problems
            assert problem.line == 2 and "it is another one" in problem.why
        assert len((await c.withdrawals.page())[0]) == 2


PROBLEMS = {
    "status is 'completed'": {"status": "completed"},
    "and has a transaction": {"status": "pending", "tx_hash": "{hash}"},
    "debited is 'maybe'": {"debited": "maybe"},
    "user is 'bob'": {"user": "bob"},
    "created_at is 'yesterday'": {"created_at": "yesterday"},
    "created_at is '2026-01-31T12:00:00'": {"created_at": "2026-01-31T12:00:00"},
    "is no wallet of ours": {"tx_hash": "{foreign}"},
    "was sent by the wallet hot1, and not by hot2": {"tx_hash": "{hash}", "wallet": "hot2"},
    "is at no node, so the row must name the wallet": {"tx_hash": BEEF},
    "there is no transaction, so the row must name the wallet": {"status": "queued"},
    "there is no account user:77:funding": {"user": "77", "tx_hash": "{hash}"},
    "and its rows up to here need more": {"amount": "100", "tx_hash": "{hash}"},
    "there is no policy that could decide it": {"asset": "ETH", "status": "pending"},
    "more decimals": {"amount": "5.0000001", "tx_hash": "{hash}"},
    "64 hexadecimal digits": {"tx_hash": "beef", "wallet": "hot1"},
    "which is in the future": {"tx_hash": "{hash}", "created_at": "2999-01-01T00:00:00+00:00"},
    "is an address of our own": {"to": "@hot2", "tx_hash": "{hash}"},
    "no nodes of nowhere are configured": {"chain": "nowhere", "tx_hash": "{hash}"},
    "is the transaction of another payout": {"tx_hash": "{ours}"},
    "is a payout for": {"request_id": "test:k9", "tx_hash": "{hash}"},
    "request old-0 is in line 2 already": {"request_id": "old-0"},
    "is in line 2 already": {"tx_hash": "{first}"},
}


@scenario
@pytest.mark.parametrize("why", PROBLEMS)
async def test_with_one_problem_nothing_is_written_and_its_line_is_named(place: Place, why: str) -> None:
    town = Town()
    async with counter(place, town) as c:
        ours = (await c.till.request("5", key="k9")).id
        await c.till.until(ours, "confirming")
        hashes = {
            "hash": await sent_there(town, 1),
            "first": await sent_there(town, 2),
            "foreign": await sent_there(town, 0, sender="@mallory"),
            "ours": (await c.till.payouts.view(ours)).tx_hash,
        }
        row = {name: text.format(**hashes) for name, text in PROBLEMS[why].items()}
        if "old-0" in why:
            row["tx_hash"] = hashes["hash"]
        good = {"request_id": "old-0", "tx_hash": hashes["first"], "amount": "4"}
        report = await imported(c, good, row)
        assert [(problem.line, why in problem.why) for problem in report.problems] == [(3, True)], report.problems
        assert report.written == 0 and (await c.withdrawals.page())[0] == [] and await c.funds() == FUNDS


@scenario
async def test_chain_that_does_not_answer_is_a_problem_of_its_rows(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        town.chain.away = True
        (problem,) = (await imported(c, {"tx_hash": hash_})).problems
        assert "no node answers" in problem.why


@scenario
async def test_new_payouts_take_nonces_above_the_imported_ones(place: Place) -> None:
    """Whatever the order of the file."""
    town = Town()
    async with counter(place, town) as c:
        hashes = {number: await sent_there(town, number) for number in (2, 0, 1)}
        rows = [{"request_id": f"old-{n}", "tx_hash": hashes[n]} for n in (2, 0, 1)]
        assert (await imported(c, *rows)).problems == ()
        made = await swept(c, "new")
        await c.till.until(made, "sending")
        assert (await c.till.payouts.view(made)).attempts[0].nonce == 3 and await nonces(c) == [0, 1, 2, 3]
        await sound(c)


@scenario
async def test_nonce_below_those_that_are_known_is_not_taken_again(place: Place) -> None:
    """It was used before this wallet paid from here."""
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        town.chain.mine()
        await c.till.until(await swept(c, "new"), "confirming")
        assert await nonces(c) == [1]
        assert (await imported(c, {"tx_hash": hash_})).problems == () and await nonces(c) == [1]
        await c.until("old-1", "queued")
        await c.till.until(await payout_of(c, "old-1"), "confirmed")
        assert (await c.withdrawals.view("old-1")).status == "completed"
        await sound(c)


@scenario
async def test_nonce_that_a_payout_takes_at_the_same_moment_leaves_no_gap(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        ready = importing._ready

        async def late(withdrawals: Withdrawals, plan: importing._Plan, payout: str) -> Withdrawal:
            body = await ready(withdrawals, plan, payout)
            if not await nonces(c):
                await c.till.until(await swept(c, "new"), "processing")
            return body

        monkeypatch.setattr(importing, "_ready", late)
        assert (await imported(c, {"tx_hash": hash_})).written == 1
        assert await nonces(c) == [0], "the chain decides which of the two takes it; no third one is skipped"


async def swept(c: Counter, key: str) -> str:
    """A payout of our own from the wallet that the other system has used."""
    into = wallet_account("paper", "hot2")
    return (await c.till.request("5", key=key, wallet="hot1", to="@hot2", account=into)).id


async def nonces(c: Counter) -> list[int]:
    """Those that payouts have."""
    rows = await c.till.ledger.store.read.flow_rows.by_prefix("payouts", "nonce")
    return [number_of(row) for row in rows if row.record]


@scenario
async def test_dead_transaction_of_another_system_waits_for_two_people(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        await imported(c, {"tx_hash": hash_})
        payout = await payout_of(c, "old-1")
        await c.till.until(payout, "confirming")
        decoded, sender = town.chain.pool.pop(hash_)
        town.chain.include("another", msgspec.structs.replace(decoded, to="@carol"), sender)
        await watch(c.till)  # what took its nonce is known by now: of a payout of ours, that would be proof
        for _ in range(3):
            await c.till.step(payout)
        record = await c.till.record(payout)
        assert record.state == "confirming" and record.error.startswith("NEEDS_PEOPLE") and await c.funds() != FUNDS
        await c.until("old-1", "queued")
        for person in (WHY, ALSO):
            await c.till.payouts.resolve(payout, paid=False, **person)
        assert (await c.withdrawals.view("old-1")).status == "failed" and await c.funds() == FUNDS
        assert town.signer.entries == []


@scenario
async def test_transaction_that_pays_something_else_waits_for_two_people(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0, amount=4_000_000)
        await imported(c, {"tx_hash": hash_})
        await c.until("old-1", "queued")
        payout = await payout_of(c, "old-1")
        await c.till.until(payout, "confirming")
        town.chain.mine()
        assert (await c.till.step(payout)).state == "disputed"
        assert (await c.withdrawals.view("old-1")).status == "queued"


@scenario
async def test_what_another_system_has_sent_is_not_replaced_from_here(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        hash_ = await sent_there(town, 0)
        await imported(c, {"tx_hash": hash_})
        payout = await payout_of(c, "old-1")
        await c.till.until(payout, "confirming")
        town.chain.price = 50  # it would be stuck
        await c.till.payouts.bump(payout, **WHY)
        await c.till.payouts.cancel(payout, **WHY)
        record = await c.till.step(payout)
        assert record.state == "confirming" and "can't be replaced here" in record.error
        assert town.signer.entries == [] and town.chain.sends == [hash_]
        body = msgspec.json.decode(record.body, type=Payout)
        assert body.replacements == () and body.attempts == 1


@scenario
async def test_watcher_knows_imported_transactions(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        await watch(c.till)
        await imported(c, {"tx_hash": await sent_there(town, 0)})
        town.chain.mine()
        await watch(c.till)
        assert await c.till.engine.store.read.pauses.list() == []
        await Operators(c.till.engine).retry_now("payouts", await payout_of(c, "old-1"), actor="ann", reason="now")
        await sound(c)


@scenario
async def test_spelling_of_a_hash_makes_no_second_transaction_of_it(place: Place) -> None:
    async with counter(place, Town()) as c:
        rows = [
            {"request_id": f"old-{n}", "tx_hash": text, "wallet": "hot1"} for n, text in enumerate((BEEF, BEEF.upper()))
        ]
        (problem,) = (await imported(c, *rows)).problems
        assert problem.line == 3 and "is in line 2 already" in problem.why
        assert (await imported(c, rows[0])).written == 1
        (problem,) = (await imported(c, rows[1] | {"tx_hash": "0x" + BEEF.upper()})).problems
        assert "is the transaction of another payout" in problem.why
