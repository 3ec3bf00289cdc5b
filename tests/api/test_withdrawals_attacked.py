"""Withdrawals over HTTP under attack: ids from outside, lists that hide or cost much, answers that tell too much."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.api.office import ALICE, refusal, token
from tests.api.test_withdrawals import WITHDRAWALS, Window, at, town
from tests.evm_town import HOT, SHOP, Town

from bursar.flows.withdrawals.importing import COLUMNS, import_running

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
        entry = SHOP[:-1]  # two people have overlooked that a digit is missing
        await w.document("withdrawal_address_lists/sim", {"deny": [entry]})
        made = await w.request("5")
        assert entry + "'" not in made.text
        assert [one["code"] for one in made.json()["waits_for"]] == ["POLICY_UNUSABLE"], "and nothing is paid"
        seen = await w.show(made.json()["id"], by=token("v", "viewer"))
        assert entry in seen["staff"]["details"]["POLICY_UNUSABLE"]

    at(url, tmp_path, town, work)
