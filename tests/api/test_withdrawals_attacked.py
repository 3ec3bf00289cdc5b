"""Withdrawals over HTTP under attack: ids from outside, lists that hide or cost much, answers that tell too much."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path

from tests.api.office import ALICE, refusal, token
from tests.api.test_withdrawals import WITHDRAWALS, Window, at, town
from tests.commands import Ran, command
from tests.evm_town import HOT, SHOP, Town

from bursar.documents import DocumentKind, Documents
from bursar.flows.withdrawals.importing import COLUMNS, import_running
from bursar.flows.withdrawals.policy import ADDRESS_LIST, AddressList

__all__ = ["town"]  # a fixture

OLD = "5f0c2f3e-9f0b-4b5e-8d5a-1c0f6d1f2a3b"  # a UUID, as the specification's ids are


def imported_file(**changes: str) -> str:
    row = dict.fromkeys(COLUMNS, "") | {
        "request_id": OLD,
        "user": str(ALICE),
        "asset": "USDT",
        "chain": "sim",
        "to": SHOP,
        "amount": "20",
        "fee": "1",
        "status": "pending",
        "created_at": "2026-01-31T12:00:00+00:00",
        "debited": "no",
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerow(row | changes)
    return text.getvalue()


def test_imported_withdrawal_is_seen_approved_and_cancelled_under_its_old_id(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        paying = w.here.runtime.paying_out
        assert paying is not None
        report = await import_running(paying.withdrawals, imported_file(), actor="anna")
        assert (report.problems, report.written) == ((), 1)
        (problem,) = (await import_running(paying.withdrawals, imported_file(request_id="a/b"), actor="anna")).problems
        assert "over HTTP" in problem.why
        assert (await w.show(OLD))["id"] == OLD
        other = await w.here.get(f"{WITHDRAWALS}/{OLD}", by=token(1002))
        assert refusal(other) == (404, "WITHDRAWAL_NOT_FOUND")
        assert (await w.approve(OLD, "ann")).json()["status"] == "queued"

    at(url, tmp_path, town, work)


def test_user_is_told_neither_names_of_our_wallets_nor_entries_of_lists(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        asked = {"asset": "USDT", "chain": "sim", "to": HOT, "amount": "5"}
        for answer in (await w.request("5", to=HOT), await w.post(f"{WITHDRAWALS}/quote", asked)):
            assert refusal(answer) == (422, "OWN_ADDRESS")
            assert "hot" not in answer.text
        entry = SHOP[:-1]  # two people have overlooked that a digit is missing, when nothing checked it
        refused = await w.counter.put("withdrawal_address_lists/sim", {"deny": [entry]})
        assert refusal(refused) == (422, "INVALID_DOCUMENT")
        assert "it is not 0x and 40 hexadecimal digits" in refused.text
        earlier = DocumentKind(name=ADDRESS_LIST.name, body=AddressList, two_people=False)
        documents = Documents(w.here.runtime.bursar.store, (earlier,))
        await documents.put(earlier, "sim", {"deny": [entry]}, base=0, author="ann", reason="ticket 17")
        await w.policy(expires_s=3_600)  # the server looks for documents that have changed
        made = await w.request("5")
        assert entry + "'" not in made.text
        assert [one["code"] for one in made.json()["waits_for"]] == ["POLICY_UNUSABLE"], "and nothing is paid"
        seen = await w.show(made.json()["id"], by=token("v", "viewer"))
        assert entry in seen["staff"]["details"]["POLICY_UNUSABLE"]

    at(url, tmp_path, town, work)


def test_approver_without_the_database_approves_over_http_as_the_how_to_says(
    url: str, tmp_path: Path, town: Town
) -> None:
    """docs/how-to/withdraw.md, section 4: the payment from the API, signed by the command, and back to the API."""
    phrase, key = tmp_path / "ann.pass", tmp_path / "ann.key"
    phrase.write_text("correct horse battery staple")
    phrase.chmod(0o600)

    def run(*words: str) -> Ran:
        ran = command(*words, "--passphrase-file", str(phrase))
        assert ran.code == 0, ran.err
        return ran

    public = json.loads(run("--json", "signer", "approver-key", "--file", str(key), "--name", "carla").out)[
        "public_key"
    ]

    async def work(w: Window) -> None:
        await w.document("withdrawal_approvers/carla", {"public_key": public})
        id_, by = (await w.ok("20"))["id"], token("carla", "approver")
        file = tmp_path / "payment.json"
        file.write_text((await w.here.get(f"{WITHDRAWALS}/{id_}/payment", by=by)).text)
        ran = await asyncio.to_thread(run, "signer", "approve", "--key", str(key), "--yes", str(file))
        assert f"pays  20.000000 USDT to {SHOP} on sim" in ran.err, ran.err
        assert (await w.payment(id_))["digest"] in ran.err
        made = await w.here.send("POST", f"{WITHDRAWALS}/{id_}/approve", json.loads(ran.out), by=by)
        assert (made.status_code, made.json()["staff"]["approvals"]) == (200, ["carla"]), made.text
        assert made.json()["status"] == "queued"

    at(url, tmp_path, town, work)
