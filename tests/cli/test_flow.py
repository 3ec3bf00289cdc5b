"""`bursar flow` and `bursar alert` on a database with records of every flow: transfers, deposits and sequences."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE, office
from tests.cli.conftest import Shell

from bursar.engine import SUCCESS, Answer
from bursar.flows.sequence import Own, Pair, Pay, Sequences
from bursar.flows.sequence.steps import Step
from bursar.model.accounts import ExternalAccount
from bursar.model.outcome import Outcome

WHO, WHY = ("--actor", "anna"), ("--reason", "ticket 17")
WAITS = "COMPENSATION_FAILED"


async def done(_call: Any) -> Answer:
    return SUCCESS


async def refused(_call: Any) -> Answer:
    return Answer(outcome=Outcome.EXPLICIT_FAIL, code="SOLD_OUT")


@pytest.fixture
def ids(tmp_path: Path) -> dict[str, str]:
    """A transfer that has ended, a deposit that waits for a second person, a sequence whose compensation is refused."""
    found: dict[str, str] = {}

    async def fill() -> None:
        async with office(f"sqlite:///{tmp_path}/bursar.db", tmp_path, deposit_confirm_above={"LIM": 0}) as here:
            await here.fund(ALICE, "100")
            await here.fund(ALICE, "5", "LIM", reference="wire-1")
            found["transfers"] = (await here.transfer(ALICE, "FUNDING", "SPOT", "10")).json()["req_id"]
            found["deposits"] = "wire-1"
            ledger = here.runtime.bursar.ledger
            await ledger.create_account("bank", policy=ExternalAccount())
            await ledger.create_account("shop")
            own = {"ship": Pair(do=done, undo=refused), "label": Pair(do=refused, undo=done)}
            async with Sequences(ledger, own=own) as sequences:
                steps: list[Step] = [Pay("bank", "shop", "USDT", "3"), Own("ship", {}), Own("label", {})]
                stuck = await sequences.start(steps, key="order-1", wait_s=20)
                assert stuck.state == WAITS
                found["sequence"] = stuck.id

    asyncio.run(fill())
    return found


@pytest.fixture
def run(tmp_path: Path) -> Shell:
    return Shell(f"sqlite:///{tmp_path}/bursar.db")


def test_list_counts_each_flow_by_state_and_says_what_is_paused(run: Shell, ids: dict[str, str]) -> None:
    run.ok("flow", "pause", "deposits", *WHO, *WHY)
    found = {one["flow"]: one for one in run.json("flow", "list")}
    of_payouts = ["chains", "payouts", "replacements", "withdrawal_addresses", "withdrawals"]
    of_payouts += ["arrivals", "deposit_addresses", "deposit_scans", "sweeps"]
    assert sorted(found) == sorted(["deposits", "sequence", "transfers", *of_payouts])
    assert {name: {s: f["records"] for s, f in one["states"].items()} for name, one in found.items()} == {
        **{name: {} for name in of_payouts},
        "deposits": {"ASKED": 1},
        "sequence": {WAITS: 1},
        "transfers": {},
    }
    assert found["deposits"]["paused"]["reason"] == "ticket 17"
    assert found["sequence"]["paused"] is None
    assert found["deposits"]["oldest_open"] == found["deposits"]["states"]["ASKED"]["oldest"]
    assert found["transfers"]["oldest_open"] is None
    everything = {one["flow"]: one for one in run.json("flow", "list", "--all")}
    assert everything["transfers"]["states"]["COMMITTED"]["records"] == 1
    assert everything["transfers"]["oldest_open"] is None
    text = run.ok("flow", "list")
    assert "by anna: ticket 17" in text
    assert WAITS in text
    run.ok("flow", "resume", "deposits", *WHO, *WHY)
    assert {one["flow"]: one["paused"] for one in run.json("flow", "list")}["deposits"] is None


def test_show_has_the_record_its_history_alerts_and_entries(run: Shell, ids: dict[str, str]) -> None:
    moved = run.json("flow", "show", "transfers", ids["transfers"])
    assert (moved["record"]["flow"], moved["record"]["state"]) == ("transfers", "COMMITTED")
    assert moved["history"][-1]["target"] == "COMMITTED"
    assert moved["alerts"] == []
    legs = [(leg["source"], leg["target"]) for entry in moved["entries"] for leg in entry["movements"]]
    assert legs == [(f"user:{ALICE}:funding", "transit:transfers"), ("transit:transfers", "trading:spot")]
    stuck = run.json("flow", "show", "sequence", ids["sequence"])
    assert [alert["reason"] for alert in stuck["alerts"]] == ["CompensationFailed"]
    assert [entry["movements"][0]["target"] for entry in stuck["entries"]] == ["shop"]
    text = run.ok("flow", "show", "sequence", ids["sequence"])
    for word in ("SOLD_OUT", "CompensationFailed", "shop", "3.000000", "RUNNING"):
        assert word in text, word


def test_show_has_a_reversal_beside_what_it_reverses(run: Shell, ids: dict[str, str]) -> None:
    [entry] = run.json("flow", "show", "sequence", ids["sequence"])["entries"]
    run.ok("ledger", "reverse", str(entry["envelope"]))
    entries = run.json("flow", "show", "sequence", ids["sequence"])["entries"]
    assert [one["reverses"] for one in entries] == [None, entry["envelope"]]


def test_what_is_empty_is_said_in_words(run: Shell, ids: dict[str, str]) -> None:
    assert run.ok("alert", "list", "--flow", "deposits").strip() == "no open alerts"
    shown = run.ok("flow", "show", "deposits", ids["deposits"])
    assert "no open alerts" in shown
    assert "no ledger entries" in shown
    assert run.ok("flow", "pauses").strip() == "nothing is paused or halted"
    assert run.ok("flow", "pauses", "--history").strip() == "nothing was paused or halted yet"
    assert run.ok("transfer", "list", "--user", "999").strip() == "no transfers"


def test_alerts_are_listed_by_flow_and_acknowledged(run: Shell, ids: dict[str, str]) -> None:
    [found] = run.json("alert", "list", "--flow", "sequence")
    assert (found["id"], found["severity"]) == (ids["sequence"], "critical")
    assert run.json("alert", "list", "--flow", "deposits") == []
    assert run("alert", "list", "--flow", "nope").code == 1
    assert ids["sequence"] in run.ok("alert", "list")
    seen = ("alert", "acknowledge", str(found["record"]), found["reason"], *WHO)
    assert run.json(*seen) == {"acknowledged": True}
    assert run.json(*seen) == {"acknowledged": False}
    assert run.json("alert", "list", "--flow", "sequence") == []


def test_a_second_person_is_told_who_asked_first_and_what_to_run(run: Shell, ids: dict[str, str]) -> None:
    """SKIP of a sequence needs two people; the command that is printed is the one that the second one runs."""
    skip = ("flow", "signal", "sequence", ids["sequence"], "SKIP")
    said = run.json(*skip, *WHO, *WHY)
    assert (said["state"], said["asked_by"]) == (WAITS, "anna")
    assert run.json(*skip, *WHO, *WHY)["asked_by"] == "anna"  # the same person again decides nothing
    assert f"asked for by anna; another person must run: {said['run']}" in run.ok(*skip, *WHO, *WHY)
    words = said["run"].replace("OTHER", "ben").replace("WHY", "seen").split()[1:]
    assert "is COMPENSATING: decided" in run.ok(*words)


def test_one_person_alone_signals_where_the_flow_says_so(run: Shell, ids: dict[str, str]) -> None:
    assert "is COMPENSATING: decided" in run.ok("flow", "signal", "sequence", ids["sequence"], "RETRY", *WHO, *WHY)
    rejected = run.json("flow", "signal", "deposits", "wire-1", "REJECT", *WHO, *WHY)
    assert (rejected["state"], rejected["what"]) == ("REJECTED", "decided")


def test_a_signal_sent_again_under_its_id_changes_nothing_and_show_lists_it(run: Shell, ids: dict[str, str]) -> None:
    reject = ("flow", "signal", "deposits", "wire-1", "REJECT", "--sender", "ticket-17", *WHO)
    assert run.json(*reject, *WHY)["what"] == "decided"
    assert run.json(*reject, *WHY)["what"] == "sent before: nothing was changed"
    ran = run(*reject, "--reason", "another one")
    assert (ran.code, "IDEMPOTENCY_KEY_REUSED" in ran.err) == (1, True)
    (sent,) = run.json("flow", "show", "deposits", "wire-1")["signals"]
    assert (sent["event"], sent["sender"], sent["actor"]) == ("REJECT", "ticket-17", "anna")
    assert sent["consumed"] == run.json("flow", "show", "deposits", "wire-1")["record"]["version"]
    assert "ticket-17" in run.ok("flow", "show", "deposits", "wire-1")


def test_a_deposit_is_not_confirmed_by_a_signal(run: Shell, ids: dict[str, str]) -> None:
    """A second person has to repeat what is booked (L25), which a signal can't say. No number of people helps."""
    for actor in ("anna", "ben", "carl"):
        ran = run("flow", "signal", "deposits", "wire-1", "CONFIRM", "--actor", actor, *WHY)
        assert (ran.code, "POST /api/v1/deposits/REFERENCE/confirm" in ran.err) == (1, True)
    assert run.json("flow", "show", "deposits", "wire-1")["record"]["state"] == "ASKED"
    assert run.json("flow", "show", "deposits", "wire-1")["entries"] == []


def test_errors_say_what_is_wrong_and_what_there_is(run: Shell, ids: dict[str, str]) -> None:
    flows = "arrivals, chains, deposit_addresses, deposit_scans, deposits, payouts, replacements"
    for words in (
        ("show", "orders", "x"),
        ("retry", "orders", "x", *WHO, *WHY),
        ("signal", "orders", "x", "GO", *WHO, *WHY),
        ("force", "orders", "x", "SUCCESS", *WHO, *WHY),
    ):
        ran = run("flow", *words)
        assert (ran.code, "FLOW_NOT_FOUND" in ran.err, f"known here: {flows}" in ran.err) == (1, True, True), ran.err
    ran = run("flow", "pause", "orders", *WHO, *WHY)
    assert (ran.code, f"flows: {flows}" in ran.err) == (1, True)
    ran = run("flow", "show", "deposits", "none")
    assert (ran.code, "deposits has no record none" in ran.err) == (1, True)
    ran = run("flow", "retry", "deposits", "wire-1", *WHO, *WHY)
    assert (ran.code, "deposits wire-1 is ASKED" in ran.err) == (1, True)
    ran = run("flow", "signal", "transfers", ids["transfers"], "GO", *WHO, *WHY)
    assert (ran.code, "is COMMITTED" in ran.err) == (1, True)
    ran = run("flow", "force", "sequence", ids["sequence"], "SUCCESS", *WHO, *WHY)
    assert (ran.code, f"is {WAITS}" in ran.err) == (1, True)
    assert run("flow", "pause", *WHO, *WHY).code == 2
    assert run("flow", "pause", "deposits", "--rail", "spot", *WHO, *WHY).code == 2
    assert run("flow", "retry", "deposits", "wire-1").code == 2  # who, and why


def test_what_has_moved_is_not_in_two_places(run: Shell, ids: dict[str, str]) -> None:
    for moved in ("alerts", "acknowledge", "pause", "resume", "pauses", "retry", "force"):
        assert run("transfer", moved).code == 2
    assert "history" not in run.json("transfer", "show", ids["transfers"])
    assert run.json("transfer", "show", ids["transfers"])["state"] == "COMMITTED"


def test_records_of_another_programs_flow_are_shown_and_left_alone(
    run: Shell, ids: dict[str, str], tmp_path: Path
) -> None:
    file = sqlite3.connect(tmp_path / "bursar.db")
    file.execute("UPDATE records SET flow = 'orders', due = 1 WHERE flow = 'deposits'")
    file.commit()
    file.close()
    orders = {one["flow"]: one for one in run.json("flow", "list")}["orders"]
    assert (orders["known"], orders["states"]["ASKED"]["records"]) == (False, 1)
    assert "a flow of another program" in run.ok("flow", "list")
    assert run.json("flow", "show", "orders", "wire-1")["entries"] == []
    assert run("flow", "retry", "orders", "wire-1", *WHO, *WHY).code == 1


def test_another_programs_flow_is_paused_and_halted_by_name(run: Shell, ids: dict[str, str], tmp_path: Path) -> None:
    """An operator needs no program of it; a name with a typing error is refused."""
    file = sqlite3.connect(tmp_path / "bursar.db")
    file.execute("UPDATE records SET flow = 'orders' WHERE flow = 'deposits'")
    file.commit()
    file.close()
    assert run("flow", "pause", "order", *WHO, *WHY).code == 1
    assert run.json("flow", "pause", "orders", *WHO, *WHY) == {"paused": True}
    assert run.json("flow", "halt", "orders", *WHO, *WHY) == {"halted": True}
    assert {one["kind"] for one in run.json("flow", "pauses")} == {"flow", "halt flow"}
    assert run.json("flow", "resume", "orders", *WHO, *WHY)["resumed"]
    assert run.json("flow", "unhalt", "orders", *WHO, *WHY)["proposed"]
    again = run("flow", "unhalt", "orders", *WHO, *WHY)
    assert "flow orders is halted: anna has proposed to lift it; another must agree" in again.err
    assert run.json("flow", "unhalt", "orders", "--actor", "ben", *WHY)["unhalted"]


def test_a_halt_of_all_signing_is_set_by_one_and_lifted_by_two(run: Shell, ids: dict[str, str]) -> None:
    assert run.json("flow", "halt", *WHO, *WHY) == {"halted": True}
    assert "all signing was halted before" in run.ok("flow", "halt", *WHO, *WHY)
    halted = {one["flow"]: one["halted"]["reason"] for one in run.json("flow", "list")}
    assert (set(halted.values()), halted.keys() > ids.keys()) == ({"ticket 17"}, True)
    assert "halted by anna: ticket 17" in run.ok("flow", "list")
    [halt] = run.json("flow", "pauses")
    assert (halt["kind"], halt["name"], halt["two_people"]) == ("halt all", "signing", True)
    said = run.ok("flow", "unhalt", *WHO, *WHY)
    assert "Another person must run: bursar flow unhalt --actor OTHER --reason WHY" in said
    assert run("flow", "unhalt", *WHO, *WHY).code == 1
    assert run.json("flow", "unhalt", "--actor", "ben", *WHY) == {"unhalted": True, "proposed": False}
    assert "all signing was not halted" in run.ok("flow", "unhalt", *WHO, *WHY)
    assert [one["action"] for one in run.json("flow", "pauses", "--history")] == [
        "unhalted",
        "unhalt proposed",
        "halted",
    ]


def test_a_halt_of_a_flow_that_signs_nothing_is_refused(run: Shell, ids: dict[str, str]) -> None:
    ran = run("flow", "halt", "transfers", *WHO, *WHY)
    assert (ran.code, "nothing there signs" in ran.err) == (1, True)


def test_a_second_person_repeats_that_it_is_declared_dead(run: Shell, ids: dict[str, str]) -> None:
    said = run.json("flow", "signal", "sequence", ids["sequence"], "RETRY", "--declared-dead", *WHO, *WHY)
    assert (said["state"], said["asked_by"]) == (WAITS, "anna")
    words = said["run"].replace("OTHER", "ben").replace("WHY", "seen").split()[1:]
    assert "--declared-dead" in words
    assert "is COMPENSATING: decided" in run.ok(*words)


def test_show_finds_the_flow_by_the_prefix_of_the_id(run: Shell, ids: dict[str, str]) -> None:
    assert run.json("flow", "show", ids["transfers"])["record"]["flow"] == "transfers"
    assert run.json("flow", "show", ids["sequence"])["record"]["flow"] == "sequence"
    assert ids["sequence"].startswith("seq-")


def test_show_asks_for_the_flow_where_the_id_is_the_callers_own(run: Shell, ids: dict[str, str]) -> None:
    ran = run("flow", "show", ids["deposits"])
    assert ran.code == 2
    assert "bursar flow show FLOW ID" in ran.err
