"""Deposits from chains over HTTP: users, operators and approvers, and those who try what is not theirs.

The chain is simulated behind real HTTP; what arrives is scanned, judged and booked by the worker that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.api.office import ALICE, BOB, office, refusal, token, until
from tests.api.test_payouts import Counter, counter
from tests.evm_town import DEPOSIT_RULES, HOT, TOKEN, USDT, XPUB, Town, evm_town

from bursar.api.app import description
from bursar.flows.deposits.arrivals import STATUS
from bursar.rails.derivation import ExtendedKey, deposit_address

ADDRESSES, DEPOSITS = "/api/v1/deposit_addresses", "/api/v1/chain_deposits"
RULES, SCANS, SWEEPS = "/api/v1/deposit_rules", "/api/v1/deposit_scans", "/api/v1/sweeps"
WHY = {"reason": "seen at an explorer"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with evm_town(tmp_path) as made:
        yield made


def address_of(user: int) -> str:
    return deposit_address("evm", ExtendedKey.parse(XPUB), user)


class Window:
    """The API as users and operators have it."""

    def __init__(self, c: Counter) -> None:
        self.c = c
        self.here = c.here
        self.town = c.town

    async def rules(self, base: int = 0, **changes: Any) -> None:
        """By two people."""
        proposed = await self.c.put("deposit_rules/sim", DEPOSIT_RULES | changes, base)
        assert proposed.status_code == 202, proposed.text
        agreed = {"hash": proposed.json()["proposal"]["hash"], "reason": "agreed"}
        done = await self.c.by("approver", "POST", f"{RULES}/sim/approve", agreed)
        assert done.status_code == 200, done.text

    async def get(self, path: str, by: int | str = ALICE) -> Any:
        answer = await self.here.get(path, by=by if isinstance(by, str) else token(by))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None, by: int | str = ALICE) -> httpx.Response:
        return await self.here.send("POST", path, body or {}, by=by if isinstance(by, str) else token(by))

    async def address(self, user: int = ALICE) -> str:
        answer = await self.post(ADDRESSES, {"chain": "sim"}, user)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["address"])

    async def arrives(self, amount: int, *, user: int = ALICE, status: str, contract: str = TOKEN) -> dict[str, Any]:
        """Something arrives at a user's address, and comes to stand so."""
        hash_ = self.town.pay_in(await self.address(user), amount, contract)

        async def there() -> dict[str, Any] | None:
            self.town.mine()
            found = [one for one in (await self.get(DEPOSITS, user))["deposits"] if one["tx_hash"] == hash_]
            return found[0] if found and found[0]["status"] == status else None

        found: dict[str, Any] = await until(there, 30)
        return found


Work = Callable[[Window], Coroutine[Any, Any, None]]
VIEWER, ANNA, BEN = token("v", "viewer"), token("anna", "operator"), token("ben", "approver")


def at(url: str, folder: Path, town: Town, work: Work) -> None:
    async def run() -> None:
        async with counter(url, folder, town) as c:
            window = Window(c)
            await window.rules()

            async def scanned() -> bool:  # its first look: where the chain begins
                town.mine()
                return any(one["block"] >= 0 for one in await window.get(SCANS, VIEWER))

            await until(scanned, 30)
            await work(window)

    asyncio.run(run())


def test_a_user_gets_an_address_and_what_arrives_there_is_credited_once(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        first = (await w.post(ADDRESSES, {"chain": "sim"})).json()
        assert first == (await w.post(ADDRESSES, {"chain": "sim", "user_id": ALICE})).json()
        assert (first["address"], first["user_id"]) == (address_of(ALICE), ALICE)
        assert first["assets"] == [{"asset": "SIM", "minimum": "0"}, {"asset": "USDT", "minimum": "1"}]
        assert (first["blocks"], first["final_after"]) == (1, "when the chain itself calls its block final")
        assert "internal transfer" in first["not_seen"]
        assert await w.get(ADDRESSES) == [first] == await w.get(f"{ADDRESSES}?user_id={ALICE}", VIEWER)
        made = await w.arrives(5 * USDT, status="credited")
        assert (made["asset"], made["amount"], made["chain"], made["address"]) == (
            "USDT",
            "5.000000",
            "sim",
            first["address"],
        )
        assert (made["message"], made["staff"], made["user_id"]) == ("", None, ALICE)
        assert (await w.here.balances(ALICE))["FUNDING"] == "105.000000"
        path = f"{DEPOSITS}/{quote(made['id'])}"
        assert await w.get(path) == made
        staff = (await w.get(path, VIEWER))["staff"]
        assert (staff["state"], staff["account"], staff["wallet"]) == ("credited", f"user:{ALICE}:funding", "dep-1001")
        rescan = {"block": 0, "reason": "again"}
        assert (await w.post(f"{SCANS}/sim/rescan", rescan, ANNA)).json()["chain"] == "sim"
        await w.arrives(1 * USDT, status="credited")
        assert (await w.here.balances(ALICE))["FUNDING"] == "106.000000"
        small = await w.arrives(USDT // 2, status="under_review")
        assert "below the minimum, 1 USDT; ask support" in small["message"]
        metrics = (await w.here.get("/metrics")).text
        assert 'bursar_deposits_scan_behind_blocks{chain="sim"}' in metrics
        assert [one["status"] for one in (await w.get(DEPOSITS))["deposits"]] == ["under_review", *["credited"] * 2]

    at(url, tmp_path, town, work)


def test_another_users_deposits_are_as_if_they_were_not_there(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        made = await w.arrives(5 * USDT, status="credited")
        path = f"{DEPOSITS}/{quote(made['id'])}"
        assert refusal(await w.here.get(path, by=token(BOB))) == (404, "RECORD_NOT_FOUND")
        assert refusal(await w.here.get(f"{DEPOSITS}/sim:0x0:0", by=token(ALICE))) == (404, "RECORD_NOT_FOUND")
        assert (await w.get(DEPOSITS, BOB))["deposits"] == [] == await w.get(ADDRESSES, BOB)
        assert refusal(await w.here.get(f"{DEPOSITS}?user_id={ALICE}", by=token(BOB))) == (403, "FORBIDDEN")
        assert refusal(await w.here.get(f"{ADDRESSES}?user_id={ALICE}", by=token(BOB))) == (403, "FORBIDDEN")
        other = await w.post(ADDRESSES, {"chain": "sim", "user_id": ALICE}, BOB)
        assert refusal(other) == (403, "FORBIDDEN")
        asked = await w.post(ADDRESSES, {"chain": "sim", "user_id": BOB}, ANNA)
        assert (asked.json()["address"], asked.json()["user_id"]) == (address_of(BOB), BOB)
        assert [one["id"] for one in (await w.get(DEPOSITS, VIEWER))["deposits"]] == [made["id"]]
        assert (await w.get(f"{DEPOSITS}?user_id={BOB}", VIEWER))["deposits"] == []
        assert len((await w.get(f"{DEPOSITS}?chain=sim&status=credited&user_id={ALICE}", VIEWER))["deposits"]) == 1
        assert (await w.get(f"{DEPOSITS}?chain=%00", VIEWER))["deposits"] == []
        assert refusal(await w.here.get(f"{DEPOSITS}?status=own", by=token(ALICE))) == (400, "INVALID_REQUEST")
        assert refusal(await w.here.get(f"{DEPOSITS}?status=ignored", by=token(ALICE))) == (400, "INVALID_REQUEST")
        assert (await w.get(f"{DEPOSITS}?status=own", VIEWER))["deposits"] == []

    at(url, tmp_path, town, work)


def test_a_deposit_is_swept_by_the_signer_and_the_gas_for_it_is_no_deposit(
    url: str, tmp_path: Path, town: Town
) -> None:
    """The whole way: what a payout of ours has brought to the address is shown to staff alone."""

    async def work(w: Window) -> None:
        swept = {"USDT": {"sweep_at": "1"}}
        more = {"sweep_to": "hot", "sweep_mandate": "sweep", "gas_from": "hot", "gas_mandate": "gas"}
        await w.rules(1, assets=swept, **more)
        before = w.town.has(HOT, TOKEN)
        seen = await w.arrives(5 * USDT, status="credited")

        async def done() -> bool:
            w.town.mine()
            await asyncio.sleep(0.1)  # it takes seconds: two payouts, and the looks of a sweep at them
            found = (await w.get(f"{SWEEPS}/{quote(seen['id'])}", VIEWER))["state"]
            brought = (await w.get(f"{DEPOSITS}?status=own", VIEWER))["deposits"]
            return found == "swept" and len(brought) == 1

        await until(done, 60)
        assert w.town.has(HOT, TOKEN) == before + 5 * USDT
        assert w.town.has(await w.address(), TOKEN) == 0
        assert (await w.here.balances(ALICE))["FUNDING"] == "105.000000"
        assert len((await w.get(f"{SWEEPS}/{quote(seen['id'])}", VIEWER))["payouts"]) == 2
        [gas] = (await w.get(f"{DEPOSITS}?status=own", VIEWER))["deposits"]
        assert (gas["status"], gas["user_id"], gas["asset"]) == ("ignored", ALICE, "SIM")
        assert [one["id"] for one in (await w.get(DEPOSITS))["deposits"]] == [seen["id"]]
        assert refusal(await w.here.get(f"{DEPOSITS}/{quote(gas['id'])}", by=token(ALICE))) == (404, "RECORD_NOT_FOUND")
        assert {one["id"] for one in (await w.get(DEPOSITS, VIEWER))["deposits"]} == {gas["id"], seen["id"]}

    at(url, tmp_path, town, work)


def test_pages_of_deposits_follow_each_other(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        made = [(await w.arrives(n * USDT, status="credited"))["id"] for n in (1, 2, 3)]
        seen, cursor = [], ""
        while True:
            page = await w.get(f"{DEPOSITS}?limit=2{cursor}")
            seen += [one["id"] for one in page["deposits"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == made[::-1]

    at(url, tmp_path, town, work)


def test_what_is_held_is_decided_by_people_and_its_user_reads_no_reason(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        ours = w.town.pay_in(await w.address(), 7 * USDT, sender=HOT.lower())

        async def held() -> dict[str, Any] | None:
            w.town.mine()
            page = await w.get(f"{DEPOSITS}?status=held", VIEWER)
            return page["deposits"][0] if page["deposits"] else None

        made = await until(held, 30)
        assert (made["tx_hash"], made["staff"]["why"].split(",")[0]) == (ours, "hot has sent it")
        path = f"{DEPOSITS}/{quote(made['id'])}"
        seen = await w.get(path)
        assert (seen["status"], seen["amount"], seen["asset"]) == ("pending", "7.000000", "USDT")
        assert "reviewed by people" in seen["message"] and "hot" not in seen["message"]
        for by in (ALICE, VIEWER):
            assert refusal(await w.post(f"{path}/confirm", WHY, by)) == (403, "FORBIDDEN")
            assert refusal(await w.post(f"{path}/reject", WHY, by)) == (403, "FORBIDDEN")
        assert refusal(await w.post(f"{path}/confirm", {"reason": ""}, ANNA)) == (400, "INVALID_REQUEST")
        first = await w.post(f"{path}/confirm", WHY, ANNA)
        assert first.json()["staff"]["confirmed_by"] == ["anna"]
        await until(held, 30)
        assert refusal(await w.post(f"{path}/confirm", WHY, token("a.nna", "admin"))) == (409, "SAME_PERSON")
        assert (await w.get(path))["status"] == "pending"
        done = await w.post(f"{path}/reject", {"reason": "a thief's"}, BEN)
        assert (done.status_code, done.json()["status"]) == (200, "rejected")
        assert refusal(await w.post(f"{path}/reject", WHY, BEN)) == (409, "NOT_HELD")
        assert refusal(await w.post(f"{path}/confirm", WHY, BEN)) == (409, "NOT_HELD")
        seen = await w.get(path)
        assert (seen["status"], seen["message"], seen["staff"]) == (
            "rejected",
            "it was not credited; ask support",
            None,
        )
        assert not {"thief", "anna", "ben", "hot"} & set(str(seen).replace("'", " ").split())
        assert (await w.here.balances(ALICE))["FUNDING"] == "100.000000"

    at(url, tmp_path, town, work)


def test_rules_say_which_address_they_give_before_another_person_approves_them(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(w: Window) -> None:
        page = await w.get(f"{RULES}/sim", VIEWER)
        assert (page["first_address"], page["proposed_first_address"]) == (address_of(1), "")
        body = DEPOSIT_RULES | {"active": False}
        proposed = (await w.c.put("deposit_rules/sim", body, 1)).json()
        assert proposed["proposed_first_address"] == address_of(1)
        [listed] = await w.get(RULES, VIEWER)
        assert (listed["first_address"], listed["proposed_first_address"]) == (address_of(1), address_of(1))
        agreed = {"hash": proposed["proposal"]["hash"], "reason": "agreed"}
        alone = await w.here.send("POST", f"{RULES}/sim/approve", agreed, by=token("anna", "approver"))
        assert refusal(alone) == (409, "SECOND_PERSON_NEEDED")
        await w.address()
        assert (await w.post(f"{RULES}/sim/approve", agreed, BEN)).json()["document"]["version"] == 2

        async def refused() -> bool:
            return (await w.post(ADDRESSES, {"chain": "sim"}, BOB)).status_code == 422

        await until(refused, 30)
        assert refusal(await w.post(ADDRESSES, {"chain": "sim"}, BOB)) == (422, "NO_DEPOSITS")
        assert refusal(await w.post(ADDRESSES, {"chain": "a\x00b"}, BOB)) == (422, "NO_DEPOSITS")
        assert len(await w.get(ADDRESSES)) == 1, "what arrives there is still credited"
        other = DEPOSIT_RULES | {"wallets": "other"}
        assert refusal(await w.c.put("deposit_rules/sim", other, 2)) == (422, "INVALID_DOCUMENT")
        assert refusal(await w.c.put("deposit_rules/nowhere", body)) == (404, "DOCUMENT_NOT_FOUND")
        assert refusal(await w.here.get(f"{RULES}/nowhere", by=VIEWER)) == (404, "DOCUMENT_NOT_FOUND")

    at(url, tmp_path, town, work)


def test_scans_and_sweeps_are_shown_to_staff(url: str, tmp_path: Path, town: Town) -> None:
    async def work(w: Window) -> None:
        swept = {"USDT": {"sweep_at": "1"}}
        await w.rules(1, assets=swept, sweep_to="hot", sweep_mandate="sweep")
        made = await w.arrives(5 * USDT, status="credited")

        async def waits() -> dict[str, Any] | None:
            w.town.mine()
            found = (await w.get(f"{SWEEPS}?state=sweeping&chain=sim", VIEWER))["sweeps"]
            return found[0] if found and found[0]["error"] else None

        sweep = await until(waits, 30)
        assert (sweep["id"], sweep["wallet"], sweep["asset"], sweep["payouts"]) == (made["id"], "dep-1001", "USDT", [])
        assert sweep["error"].startswith("NO_GAS")
        assert (await w.get(f"{SWEEPS}/{quote(sweep['id'])}", VIEWER))["address"] == await w.address()
        assert refusal(await w.here.get(f"{SWEEPS}/sim:0x0:0", by=VIEWER)) == (404, "RECORD_NOT_FOUND")
        assert refusal(await w.here.get(f"{SWEEPS}?state=odd", by=VIEWER)) == (400, "INVALID_REQUEST")
        assert (await w.get(f"{SWEEPS}?chain=nowhere", VIEWER))["sweeps"] == []
        unknown = await w.post(f"{SCANS}/nowhere/rescan", {"block": 1, "reason": "why"}, ANNA)
        assert refusal(unknown) == (404, "RECORD_NOT_FOUND")
        for block in (-1, 2**60, "1"):
            bad = await w.post(f"{SCANS}/sim/rescan", {"block": block, "reason": "why"}, ANNA)
            assert refusal(bad) == (400, "INVALID_REQUEST")

    at(url, tmp_path, town, work)


STAFF = {"viewer", "operator", "approver", "admin"}
MAY = {
    ("POST", ADDRESSES): {"user", "operator", "admin"},
    ("GET", ADDRESSES): {"user", *STAFF},
    ("GET", DEPOSITS): {"user", *STAFF},
    ("GET", f"{DEPOSITS}/{{deposit_id}}"): {"user", *STAFF},
    ("POST", f"{DEPOSITS}/{{deposit_id}}/confirm"): {"operator", "approver", "admin"},
    ("POST", f"{DEPOSITS}/{{deposit_id}}/reject"): {"operator", "approver", "admin"},
    ("GET", RULES): STAFF,
    ("GET", f"{RULES}/{{name}}"): STAFF,
    ("PUT", f"{RULES}/{{name}}"): {"operator", "admin"},
    ("POST", f"{RULES}/{{name}}/approve"): {"approver", "admin"},
    ("GET", SCANS): STAFF,
    ("POST", f"{SCANS}/{{name}}/rescan"): {"operator", "admin"},
    ("GET", SWEEPS): STAFF,
    ("GET", f"{SWEEPS}/{{sweep_id}}"): STAFF,
}


def test_every_route_is_for_the_roles_that_the_reference_names(url: str, tmp_path: Path) -> None:
    """On a host that drives no payouts: what a role may ask is refused for that, or for another reason, not for it."""
    roots = tuple(root.rsplit("/", 1)[-1] for root in (ADDRESSES, DEPOSITS, RULES, SCANS, SWEEPS))
    paths = description()["paths"]
    ours = {(m.upper(), p) for p, said in paths.items() if p.split("/")[3:4] and p.split("/")[3] in roots for m in said}
    assert ours == set(MAY)

    async def run() -> None:
        async with office(url, tmp_path) as here:
            for (method, path), may in MAY.items():
                filled = path.replace("{deposit_id}", "x").replace("{sweep_id}", "x").replace("{name}", "sim")
                assert (await here.send(method, filled, {} if method != "GET" else None)).status_code == 401
                for role in ("user", *sorted(STAFF)):
                    whose = f"?user_id={ALICE}" if (method, path) == ("GET", ADDRESSES) else ""
                    by = token(ALICE if role == "user" else role, role)
                    answer = await here.send(method, filled + whose, {} if method != "GET" else None, by=by)
                    is_forbidden = answer.status_code == 403
                    assert is_forbidden is (role not in may), (method, path, role, answer.text)
            asked = await here.send("POST", ADDRESSES, {"chain": "sim"}, by=token(ALICE))
            assert refusal(asked) == (503, "PAYOUTS_NOT_CONFIGURED")

    asyncio.run(run())


def test_requests_for_addresses_count_against_the_users_rate(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with office(url, tmp_path, limit_per_second=1) as here:
            codes = {
                (await here.send("POST", ADDRESSES, {"chain": "sim"}, by=token(ALICE))).status_code for _ in range(20)
            }
            assert 429 in codes

    asyncio.run(run())


def test_every_state_has_a_status() -> None:
    assert set(STATUS.values()) == {"pending", "credited", "under_review", "ignored", "rejected"}
