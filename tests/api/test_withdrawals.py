"""Withdrawals over HTTP: users, operators and approvers, and those who try what is not theirs.

The chain is simulated behind real HTTP, and the signer is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
import pytest
from tests.api.office import ALICE, BOB, office, refusal, token, until
from tests.api.test_payouts import Counter, counter
from tests.evm_town import HOT, SHOP, TOKEN, USDT, Town, evm_town
from tests.evm_town import POLICY_OF_WITHDRAWALS as POLICY
from tests.signing import SECRET, approval, public_half

from bursar.engine import set_pause
from bursar.flows.withdrawals.screening import answer_signature
from bursar.model.authorizations import Approval, Payment

WITHDRAWALS = "/api/v1/withdrawals"
BOOK = "/api/v1/withdrawal_addresses"
SWITCHES = "/api/v1/withdrawal_switches"
WHY = {"reason": "ticket 17"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with evm_town(tmp_path) as made:
        yield made


class Window:
    """The API as users, operators and approvers have it."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self.here = counter.here
        self.town = counter.town

    async def document(self, path: str, body: dict[str, Any], base: int = 0) -> None:
        """By two people."""
        proposed = await self.counter.put(path, body, base)
        assert proposed.status_code == 202, proposed.text
        agreed = {"hash": proposed.json()["proposal"]["hash"], "reason": "agreed"}
        done = await self.counter.by("approver", "POST", f"/api/v1/{path}/approve", agreed)
        assert done.status_code == 200, done.text

    async def policy(self, base: int = 1, **changes: Any) -> None:
        await self.document("withdrawal_policies/usdt:sim", POLICY | changes, base)

    async def request(self, amount: Any = "5", *, by: str = "", key: str | None = "k1", **more: Any) -> httpx.Response:
        body = {"asset": "USDT", "chain": "sim", "to": SHOP, "amount": amount} | more
        body |= {} if key is None else {"client_withdrawal_id": key}
        return await self.here.send("POST", WITHDRAWALS, body, by=by or token(ALICE))

    async def ok(self, amount: str = "5", **more: Any) -> dict[str, Any]:
        answer = await self.request(amount, **more)
        assert answer.status_code in (200, 202), answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def show(self, id_: str, *, by: str = "") -> dict[str, Any]:
        answer = await self.here.get(f"{WITHDRAWALS}/{id_}", by=by or token(ALICE))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def payment(self, id_: str) -> dict[str, Any]:
        answer = await self.here.get(f"{WITHDRAWALS}/{id_}/payment", by=token("ann", "approver"))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def signed(self, id_: str, name: str) -> Approval:
        return approval(msgspec.convert((await self.payment(id_))["payment"], Payment), name)

    async def approve(self, id_: str, name: str, made: Approval | None = None, *, by: str = "") -> httpx.Response:
        body = msgspec.to_builtins(made or await self.signed(id_, name))
        return await self.here.send("POST", f"{WITHDRAWALS}/{id_}/approve", body, by=by or token(name, "approver"))

    async def post(self, path: str, body: Any = None, *, by: str = "") -> httpx.Response:
        return await self.here.send("POST", path, {} if body is None else body, by=by or token(ALICE))

    async def funds(self, user: int = ALICE) -> str:
        return (await self.here.balances(user))["FUNDING"]

    async def reaches(self, id_: str, status: str) -> dict[str, Any]:
        async def there() -> dict[str, Any] | None:
            self.town.mine()
            found = await self.show(id_)
            return found if found["status"] == status else None

        found: dict[str, Any] = await until(there, 30)
        return found


Work = Callable[[Window], Coroutine[Any, Any, None]]


def at(url: str, folder: Path, town: Town, work: Work, **settings: Any) -> None:
    async def run() -> None:
        async with counter(url, folder, town, **settings) as c:
            window = Window(c)
            await window.policy(base=0)
            for name in ("ann", "ben"):
                await window.document(f"withdrawal_approvers/{name}", {"public_key": public_half(name)})
            await work(window)

    asyncio.run(run())


def test_small_withdrawal_is_queued_at_once_and_paid(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        asked = {"asset": "USDT", "chain": "sim", "to": SHOP, "amount": "5"}
        quote = (await w.post(f"{WITHDRAWALS}/quote", asked)).json()
        assert (quote["amount"], quote["fee"], quote["total"]) == ("5.000000", "1.000000", "6.000000")
        assert quote["waits_for"] == [] and quote["seconds"] >= 1
        answer = await w.request("5", max_fee=quote["fee"])
        made = answer.json()
        assert (answer.status_code, made["status"]) == (200, "queued")
        assert (made["waits_for"], made["staff"], await w.funds()) == ([], None, "94.000000")
        done = await w.reaches(made["id"], "completed")
        assert w.town.has(SHOP, TOKEN) == 5 * USDT and done["tx_hash"].startswith("0x")
        seen = (await w.show(made["id"], by=token("v", "viewer")))["staff"]
        assert (seen["requester"], seen["payout_status"], seen["state"]) == (str(ALICE), "confirmed", "completed")
        refused = await w.post(f"{WITHDRAWALS}/{made['id']}/cancel")
        assert refusal(refused) == (409, "INVALID_STATE")

    at(url, tmp_path, town, work)


def test_large_withdrawal_says_what_it_waits_for_and_two_approvers_release_it(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        answer = await w.request("60")
        made = answer.json()
        assert (answer.status_code, made["status"]) == (202, "pending")
        assert [one["words"] for one in made["waits_for"]] == [
            "it is above the amount that is approved automatically",
            "it needs approval by two people",
        ]
        assert made["until"] is not None and made["message"] == ""
        [waiting] = (await w.here.get(f"{WITHDRAWALS}/waiting", by=token("ann", "approver"))).json()
        assert (waiting["id"], waiting["staff"]["approvals_missing"]) == (made["id"], 2)
        shown = await w.payment(made["id"])
        payment = msgspec.convert(shown["payment"], Payment)
        assert shown["digest"] == payment.digest() == waiting["staff"]["digest"]
        assert shown["signed_text"].encode() == payment.canonical()
        words = {one["name"]: one["value"] for one in shown["words"]}
        assert (words["pays"], words["to"], words["for"]) == ("60.000000 USDT", SHOP, made["id"])
        first = (await w.approve(made["id"], "ann")).json()
        assert (first["status"], first["staff"]["approvals_missing"]) == ("pending", 1)
        assert (await w.approve(made["id"], "ann")).json()["staff"]["approvals"] == ["ann"], "once is once"
        second = (await w.approve(made["id"], "ben")).json()
        assert (second["status"], second["staff"]["approvals"]) == ("queued", ["ann", "ben"])
        await w.reaches(made["id"], "completed")
        assert w.town.has(SHOP, TOKEN) == 60 * USDT
        assert (await w.here.get(f"{WITHDRAWALS}/waiting", by=token("ann", "approver"))).json() == []

    at(url, tmp_path, town, work)


def test_rejected_and_cancelled_give_the_money_back_and_tell_the_user_no_more_than_that(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        made = await w.ok("20")
        path = f"{WITHDRAWALS}/{made['id']}/reject"
        assert refusal(await w.post(path, {"reason": ""}, by=token("ann", "approver"))) == (400, "INVALID_REQUEST")
        done = await w.post(path, {"reason": "looks like a mule"}, by=token("ann", "approver"))
        assert (done.json()["status"], done.json()["staff"]["reason"]) == ("rejected", "looks like a mule")
        seen = await w.show(made["id"])
        assert (seen["status"], await w.funds()) == ("rejected", "100.000000")
        assert seen["message"] == "it was rejected; the money is back in the account"
        assert "mule" not in str(seen)
        other = await w.ok("20", key="k2")
        gone = (await w.post(f"{WITHDRAWALS}/{other['id']}/cancel")).json()
        assert (gone["status"], await w.funds()) == ("cancelled", "100.000000")
        assert (await w.post(f"{WITHDRAWALS}/{other['id']}/cancel", {"reason": "again"})).json()[
            "status"
        ] == "cancelled"

    at(url, tmp_path, town, work)


def test_what_is_queued_is_cancelled_until_the_signer_is_asked(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        # The wallet is paused, so that the payout stays where it has not been signed.
        by = token("anna", "operator")
        store = w.here.runtime.bursar.store
        await set_pause(store, "rail", "wallet hot", actor="anna", reason="ticket 17")
        made = await w.ok("5")
        assert made["status"] == "queued"
        done = (await w.post(f"{WITHDRAWALS}/{made['id']}/cancel", {"reason": "a typing error"})).json()
        assert (done["status"], done["message"]) == ("cancelled", "it was cancelled; the money is back in the account")
        assert (await w.funds(), w.town.has(SHOP, TOKEN)) == ("100.000000", 0)
        seen = (await w.show(made["id"], by=by))["staff"]
        assert (seen["payout_status"], "a typing error" in seen["reason"]) == ("failed", True)

    at(url, tmp_path, town, work)


def test_a_request_is_made_once_per_key_and_user(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        made = await w.ok("5")
        assert (await w.ok("5.00"))["id"] == made["id"], "amounts are compared as values"
        by_header = {"asset": "USDT", "chain": "sim", "to": SHOP, "amount": "5"}
        same = await w.here.send("POST", WITHDRAWALS, by_header, by=token(ALICE), headers={"Idempotency-Key": "k1"})
        assert same.json()["id"] == made["id"]
        assert refusal(await w.request("6")) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert refusal(await w.request("5", key=None)) == (400, "INVALID_REQUEST")
        differ = await w.here.send(
            "POST",
            WITHDRAWALS,
            by_header | {"client_withdrawal_id": "k1"},
            by=token(ALICE),
            headers={"Idempotency-Key": "k2"},
        )
        assert refusal(differ) == (400, "INVALID_REQUEST")
        await w.here.fund(BOB, "50")
        other = await w.ok("5", by=token(BOB))
        assert other["id"] != made["id"] and await w.funds() == "94.000000"

    at(url, tmp_path, town, work)


def test_what_is_not_ones_own_is_as_if_it_were_not_there(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        made = await w.ok("20")
        bob, viewer = token(BOB), token("v", "viewer")
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await w.here.send(method, f"{WITHDRAWALS}/{made['id']}{path}", {} if path else None, by=bob)
            assert refusal(answer) == (404, "WITHDRAWAL_NOT_FOUND")
        assert (await w.here.get(WITHDRAWALS, by=bob)).json()["withdrawals"] == []
        assert refusal(await w.here.get(f"{WITHDRAWALS}?user_id={ALICE}", by=bob)) == (403, "FORBIDDEN")
        assert refusal(await w.request("5", by=bob, user_id=ALICE)) == (403, "FORBIDDEN")
        quote = {"asset": "USDT", "chain": "sim", "to": SHOP, "amount": "5", "user_id": ALICE}
        assert refusal(await w.post(f"{WITHDRAWALS}/quote", quote, by=bob)) == (403, "FORBIDDEN")
        added = (await w.post(BOOK, {"chain": "sim", "address": SHOP})).json()
        assert refusal(await w.here.send("DELETE", f"{BOOK}/{added['id']}", by=bob)) == (404, "RECORD_NOT_FOUND")
        assert refusal(await w.here.get(f"{BOOK}?user_id={ALICE}", by=bob)) == (403, "FORBIDDEN")
        theirs = {"chain": "sim", "address": SHOP, "user_id": ALICE}
        assert refusal(await w.post(BOOK, theirs, by=bob)) == (403, "FORBIDDEN")
        assert refusal(await w.post(BOOK, theirs, by=viewer)) == (403, "FORBIDDEN")
        for path in ("approve", "reject", "payment"):
            method = "GET" if path == "payment" else "POST"
            answer = await w.here.send(
                method, f"{WITHDRAWALS}/{made['id']}/{path}", None if path == "payment" else WHY, by=bob
            )
            assert refusal(answer) == (403, "FORBIDDEN")
        for name in ("pause", "resume"):
            assert refusal(await w.post(f"{SWITCHES}/{name}", {"all": True} | WHY, by=bob)) == (403, "FORBIDDEN")
            assert refusal(await w.post(f"{SWITCHES}/{name}", {"all": True} | WHY, by=viewer)) == (403, "FORBIDDEN")
        assert refusal(await w.request("5", by=viewer)) == (403, "FORBIDDEN")
        for odd in ("wd-1", "wd-x", "wd-%00", "sr-1"):
            answer = await w.here.get(f"{WITHDRAWALS}/{odd}", by=token(ALICE))
            assert refusal(answer) == (404, "WITHDRAWAL_NOT_FOUND")
        seen = await w.show(made["id"], by=viewer)
        assert (seen["user_id"], seen["staff"]["state"]) == (ALICE, "waiting")

    at(url, tmp_path, town, work)


def test_no_approval_but_one_of_another_person_over_this_very_payment_counts(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        made, other = await w.ok("20"), await w.ok("20", key="k2")
        id_ = made["id"]
        ben = await w.signed(id_, "ben")
        stolen = await w.approve(id_, "ben", ben, by=token("carol", "approver"))
        assert refusal(stolen) == (403, "FORBIDDEN"), "the token's subject is the approver"
        assert refusal(await w.approve(id_, "ben", ben, by=token("ben", "operator"))) == (403, "FORBIDDEN")
        replayed = await w.approve(id_, "ben", await w.signed(other["id"], "ben"))
        assert refusal(replayed) == (422, "WRONG_SIGNATURE"), "one approval is for one request"
        payment = msgspec.convert((await w.payment(id_))["payment"], Payment)
        for field, value in (("to", HOT), ("amount", "5000000"), ("fee", "0"), ("payout", "po-1"), ("memo", "x")):
            tampered = approval(msgspec.structs.replace(payment, **{field: value}), "ben")
            assert refusal(await w.approve(id_, "ben", tampered)) == (422, "WRONG_SIGNATURE"), field
        forged = approval(payment, "eve")
        as_ben = msgspec.structs.replace(forged, approver="ben")
        assert refusal(await w.approve(id_, "ben", as_ben)) == (422, "WRONG_SIGNATURE")
        assert refusal(await w.approve(id_, "eve", forged)) == (403, "UNKNOWN_APPROVER")
        assert (await w.show(id_))["status"] == "pending" and w.town.has(SHOP, TOKEN) == 0
        assert (await w.approve(id_, "ben", ben)).json()["status"] == "queued"
        assert refusal(await w.approve(id_, "ann", await w.signed(id_, "ann"))) == (409, "INVALID_STATE")

    at(url, tmp_path, town, work)


def test_operator_asks_for_a_user_and_then_can_approve_it_under_no_name(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        for name in ("a.nn", "ANN"):  # names that look like ann's are ann's
            by = token(name, "operator", "approver")
            made = await w.ok("20", by=by, user_id=ALICE, key=f"for alice {name}")
            assert (made["user_id"], made["staff"]["requester"]) == (ALICE, name.lower())
            own = await w.approve(made["id"], "ann")
            assert refusal(own) == (403, "OWN_REQUEST")
            done = await w.post(f"{WITHDRAWALS}/{made['id']}/cancel", {"reason": "she called"}, by=by)
            assert done.json()["status"] == "cancelled"
        nameless = await w.request("20", by=token("anna", "operator"))
        assert refusal(nameless) == (403, "FORBIDDEN"), "an operator has no money of his own"

    at(url, tmp_path, town, work)


REFUSED: list[tuple[dict[str, Any], tuple[int, str]]] = [
    ({"asset": "XXX"}, (422, "INVALID_ASSET")),
    ({"asset": "LIM"}, (422, "WITHDRAWAL_NOT_OFFERED")),
    ({"chain": "nowhere"}, (422, "WITHDRAWAL_NOT_OFFERED")),
    ({"chain": "a\x00b"}, (422, "WITHDRAWAL_NOT_OFFERED")),
    ({"to": "0x1234"}, (422, "INVALID_ADDRESS")),
    ({"to": HOT}, (422, "OWN_ADDRESS")),
    ({"to": TOKEN}, (422, "DESTINATION_IS_TOKEN")),
    ({"amount": "0.5"}, (422, "BELOW_MINIMUM")),
    ({"amount": "91"}, (422, "ABOVE_MAXIMUM")),
    ({"amount": "90"}, (422, "INSUFFICIENT_BALANCE")),
    ({"amount": "-1"}, (422, "INVALID_AMOUNT")),
    ({"amount": "1.0000001"}, (422, "PRECISION_OVERFLOW")),
    ({"amount": 5}, (400, "INVALID_REQUEST")),
    ({"max_fee": "0.99"}, (409, "FEE_CHANGED")),
    ({"user_id": str(ALICE)}, (400, "INVALID_REQUEST")),
    ({"more": "1"}, (400, "INVALID_REQUEST")),
    ({"key": "a\x00b"}, (400, "INVALID_NAME")),
]


def test_bad_requests_are_refused_with_their_code_and_nothing_is_written(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        spent = (await w.ok("5", key="before"))["id"]
        await w.reaches(spent, "completed")
        await w.ok("9", key="held")  # 85 are left
        before = len((await w.here.get(WITHDRAWALS, by=token(ALICE))).json()["withdrawals"]), await w.funds()
        for change, expected in REFUSED:
            assert refusal(await w.request(**({"amount": "5"} | change))) == expected, change
        for change in ({"max_fee": "x"}, {"max_fee": "-1"}):
            assert refusal(await w.request("5", **change)) == (422, "INVALID_AMOUNT")
        after = len((await w.here.get(WITHDRAWALS, by=token(ALICE))).json()["withdrawals"]), await w.funds()
        assert after == before

    at(url, tmp_path, town, work)


def test_address_book_lists_and_limits_of_the_policy_refuse_with_words_a_user_understands(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        await w.policy(address_book="required", cooling_s=3_600, hourly_user="8", daily_user="12")
        assert refusal(await w.request("5")) == (422, "ADDRESS_NOT_IN_BOOK")
        added = (await w.post(BOOK, {"chain": "sim", "address": SHOP.lower(), "label": "the shop"})).json()
        assert (added["address"], added["label"], added["state"]) == (SHOP, "the shop", "active")
        again = (await w.post(BOOK, {"chain": "sim", "address": SHOP, "label": "the shop"})).json()
        assert again["id"] == added["id"]
        other = await w.post(BOOK, {"chain": "sim", "address": SHOP, "label": "another"})
        assert refusal(other) == (409, "ADDRESS_EXISTS")
        assert refusal(await w.post(BOOK, {"chain": "sim", "address": "0x12"})) == (422, "INVALID_ADDRESS")
        assert refusal(await w.post(BOOK, {"chain": "nowhere", "address": SHOP})) == (422, "UNKNOWN_CHAIN")
        cooling = await w.ok("5")
        assert [one["code"] for one in cooling["waits_for"]] == ["ADDRESS_COOLING"]
        assert (await w.here.get(f"{WITHDRAWALS}/waiting", by=token("ann", "approver"))).json() == []
        over = await w.request("5", key="k2")
        assert refusal(over) == (429, "HOURLY_LIMIT_EXCEEDED")
        assert 0 < int(over.headers["retry-after"]) <= 3_600
        [listed] = (await w.here.get(f"{BOOK}?chain=sim", by=token(ALICE))).json()
        assert listed["id"] == added["id"]
        gone = await w.here.send("DELETE", f"{BOOK}/{added['id']}", by=token(ALICE))
        assert gone.json()["state"] == "removed"
        assert (await w.here.get(BOOK, by=token(ALICE))).json() == []
        await w.document("withdrawal_address_lists/sim", {"deny": [SHOP.lower()]})
        await w.policy(base=2, address_book="off", daily_user="6")
        assert refusal(await w.request("1", key="k3")) == (422, "ADDRESS_DENIED")
        await w.document("withdrawal_address_lists/sim", {"deny": []}, base=1)
        late = await w.request("2", key="k4")
        assert refusal(late) == (429, "DAILY_LIMIT_EXCEEDED")
        assert 0 < int(late.headers["retry-after"]) <= 86_400

    at(url, tmp_path, town, work)


def test_switches_of_a_user_an_asset_a_chain_and_all_let_it_wait_and_say_no_more(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        by, viewer = token("anna", "operator"), token("v", "viewer")
        switches: list[dict[str, Any]] = [{"user_id": ALICE}, {"asset": "USDT"}, {"chain": "sim"}, {"all": True}]
        for number, which in enumerate(switches):
            off = (await w.post(f"{SWITCHES}/pause", which | {"reason": "ticket 17"}, by=by)).json()
            assert (off["paused"], off["changed"]) == (True, True)
            [listed] = (await w.here.get(SWITCHES, by=viewer)).json()
            assert listed == {"switch": off["switch"], "by": "anna", "reason": "ticket 17"}
            made = await w.ok("5", key=f"k{number}")
            assert made["status"] == "approved"
            assert [one["words"] for one in made["waits_for"]] == ["withdrawals are paused at the moment"]
            assert "ticket" not in str(made)
            details = (await w.show(made["id"], by=viewer))["staff"]["details"]
            assert "ticket 17" in details["PAUSED"]
            on = await w.post(f"{SWITCHES}/resume", which | WHY, by=by)
            assert (on.json()["paused"], on.json()["changed"]) == (False, True)
            assert (await w.post(f"{SWITCHES}/resume", which | WHY, by=by)).json()["changed"] is False
            await w.post(f"{WITHDRAWALS}/{made['id']}/cancel")
        odd: list[tuple[dict[str, Any], tuple[int, str]]] = [
            ({}, (400, "INVALID_REQUEST")),
            ({"asset": "USDT", "all": True}, (400, "INVALID_REQUEST")),
            ({"asset": "USTD"}, (422, "INVALID_ASSET")),
            ({"chain": "smi"}, (404, "DOCUMENT_NOT_FOUND")),
        ]
        for which, expected in odd:
            assert refusal(await w.post(f"{SWITCHES}/pause", which | WHY, by=by)) == expected

    at(url, tmp_path, town, work)


def test_lists_are_filtered_and_paged(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        ids = [(await w.ok("20", key=f"k{n}"))["id"] for n in range(4)]
        await w.post(f"{WITHDRAWALS}/{ids[0]}/cancel")

        async def listed(query: str, by: str = "") -> list[str]:
            answer = await w.here.get(f"{WITHDRAWALS}?{query}", by=by or token(ALICE))
            assert answer.status_code == 200, answer.text
            return [one["id"] for one in answer.json()["withdrawals"]]

        assert await listed("status=pending&asset=USDT&chain=sim") == ids[:0:-1]
        assert await listed("status=cancelled") == ids[:1]
        assert await listed("status=waiting", token("v", "viewer")) == ids[:0:-1]
        assert await listed(f"user_id={BOB}", token("v", "viewer")) == []
        assert await listed("asset=LIM") == await listed("chain=nowhere") == []
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await w.here.get(f"{WITHDRAWALS}?limit=3{cursor and '&cursor=' + cursor}", by=token(ALICE))).json()
            seen += [one["id"] for one in page["withdrawals"]]
            cursor = page["next_cursor"]
        assert seen == ids[::-1]
        assert refusal(await w.here.get(f"{WITHDRAWALS}?status=odd", by=token(ALICE))) == (400, "INVALID_REQUEST")

    at(url, tmp_path, town, work)


def test_requests_count_against_the_limit_per_second_of_transfers(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        statuses: list[tuple[int, str]] = []

        async def burst() -> bool:  # a second may end in the middle of one
            statuses.clear()
            for number in range(4):
                statuses.append(refusal(await w.request("0.5", key=f"r{number}")))
            return (429, "RATE_LIMIT_EXCEEDED") in statuses

        await until(burst)
        assert statuses.index((429, "RATE_LIMIT_EXCEEDED")) <= 3
        made = await until(lambda: _accepted(w))
        for _ in range(6):  # a valid retry is never refused by a limit
            assert (await w.ok("20", key="mine"))["id"] == made["id"]

    at(url, tmp_path, town, work, limit_per_second=3)


async def _accepted(w: Window) -> dict[str, Any] | None:
    answer = await w.request("20", key="mine")
    return answer.json() if answer.status_code == 202 else None


def test_documents_of_withdrawals_need_two_people_and_are_listed(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        viewer = token("v", "viewer")
        path = "withdrawal_policies/usdt:sim"
        assert refusal(await w.counter.put(path, POLICY | {"maximum": "0"}, 1)) == (422, "INVALID_DOCUMENT")
        assert refusal(await w.counter.put(path, POLICY | {"fee": "1"}, 1)) == (400, "INVALID_REQUEST")
        proposed = (await w.counter.put(path, POLICY | {"fee_flat": "2"}, 1)).json()["proposal"]
        alone = {"hash": proposed["hash"], "reason": "me too"}
        same = await w.post(f"/api/v1/{path}/approve", alone, by=token("Anna", "approver"))
        assert refusal(same) == (409, "SECOND_PERSON_NEEDED")
        [policy] = (await w.here.get("/api/v1/withdrawal_policies", by=viewer)).json()
        assert (policy["document"]["version"], policy["proposal"]["hash"]) == (1, proposed["hash"])
        names = [
            one["document"]["name"] for one in (await w.here.get("/api/v1/withdrawal_approvers", by=viewer)).json()
        ]
        assert names == ["ann", "ben"]
        await w.counter.put("withdrawal_address_lists/sim", {"deny": [SHOP]})
        [only] = (await w.here.get("/api/v1/withdrawal_address_lists", by=viewer)).json()
        assert (only["document"], only["proposal"]["name"]) == (None, "sim")
        shown = (await w.here.get("/api/v1/withdrawal_approvers/ann", by=viewer)).json()
        assert shown["document"]["body"]["public_key"] == public_half("ann")
        assert refusal(await w.here.get("/api/v1/withdrawal_policies", by=token(ALICE))) == (403, "FORBIDDEN")

    at(url, tmp_path, town, work)


def test_without_a_signer_withdrawals_are_not_offered_and_their_documents_are(url: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with office(url, tmp_path) as here:
            answer = await here.get(WITHDRAWALS, by=token(ALICE))
            assert refusal(answer) == (503, "PAYOUTS_NOT_CONFIGURED")
            assert "signer" in answer.json()["detail"]
            assert not {"withdrawals", "withdrawal_addresses"} & here.runtime.engine.flows.keys()
            body = {"base": 0, "reason": "set up", "body": POLICY}
            path = "/api/v1/withdrawal_policies/usdt:sim"
            proposed = await here.send("PUT", path, body, by=token("anna", "operator"))
            assert proposed.status_code == 202

    asyncio.run(work())


@pytest.mark.parametrize("slow", ["signal"])
def test_answer_comes_in_time_when_the_database_hangs(url: str, tmp_path: Path, town: Town, slow: str) -> None:
    async def work(w: Window) -> None:
        made = await w.ok("20")
        hangs = asyncio.Event()
        engine = w.here.runtime.engine
        real = engine.signal

        async def hanging(*args: Any, **more: Any) -> Any:
            await hangs.wait()
            return await real(*args, **more)

        setattr(engine, slow, hanging)
        answer = await w.post(f"{WITHDRAWALS}/{made['id']}/cancel")
        assert refusal(answer) == (503, "COMMIT_UNKNOWN")
        hangs.set()
        await w.reaches(made["id"], "cancelled")

    at(url, tmp_path, town, work, deadline_ms=600)


def test_money_that_is_missing_switches_withdrawals_off_until_two_people_have_looked(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        await w.ok("20")
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            change = "UPDATE records SET body = replace(body, ?, ?) WHERE flow = 'withdrawals'"
            assert file.execute(change, ('"fee":"1000000"', '"fee":"2000000"')).rowcount == 1

        async def switched() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await w.here.get(SWITCHES, by=token("v", "viewer"))).json()
            return found

        [off] = await until(switched)
        assert (off["switch"], off["by"]) == ("withdrawals", "audit") and "I6" in off["reason"]
        assert (await w.ok("5", key="k2"))["status"] == "approved", "written down, and not ordered"
        resume = {"all": True} | WHY
        first = await w.post(f"{SWITCHES}/resume", resume, by=token("anna", "operator"))
        assert (first.status_code, first.json()["paused"]) == (202, True)

    at(url, tmp_path, town, work, audit_interval_s=1)


class Hook(BaseHTTPRequestHandler):
    """A screening hook that says what the test wants; it has the secret."""

    verdicts: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        question = json.loads(body)
        self.asked.append(question)
        verdict, reason = self.verdicts[question["amount"]], "seen near a mixer"
        said = {"verdict": verdict, "reason": reason, "signature": answer_signature(SECRET, body, verdict, reason)}
        answer = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""


def test_configured_screening_is_asked_and_users_are_not_told_what_it_said(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        await w.policy(screening=True)
        Hook.verdicts = {"5.000000": "clear", "6.000000": "review", "7.000000": "denied"}
        clear, review, denied = [await w.ok(amount, key=amount) for amount in ("5", "6", "7")]
        assert clear["status"] == "queued"
        assert (review["status"], denied["status"]) == ("pending", "rejected")
        assert [one["code"] for one in review["waits_for"]] == ["UNDER_REVIEW", "APPROVAL_NEEDED"]
        assert denied["message"] == "this address can't be paid; the money is back in the account"
        assert "mixer" not in str((review, denied)) and "SCREENING" not in str((review, denied))
        seen = (await w.show(review["id"], by=token("v", "viewer")))["staff"]["details"]
        assert seen == {"SCREENING_REVIEW": "seen near a mixer"}
        assert {one["user"] for one in Hook.asked} == {str(ALICE)} and len(Hook.asked) == 3

    secret = tmp_path / "screening.secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    hook = {"screening_url": f"http://127.0.0.1:{server.server_port}/", "screening_secret_file": str(secret)}
    try:
        at(url, tmp_path, town, work, **hook)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
