"""Payouts over HTTP: documents by two people, requests, approvals, operators; a simulated chain and a real signer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.office import ALICE, Office, config_for, office, refusal, token, until
from tests.evm_town import ASSETS, CHAIN, HOT, SHOP, TOKEN, USDT, WALLET, Town, evm_town
from tests.signing import approval
from tests.unit.rails.desk import desk

from bursar.api.app import applications
from bursar.api.tokens import Keys
from bursar.documents import Documents
from bursar.flows.payouts import KINDS
from bursar.instance import Bursar
from bursar.model.authorizations import Payment
from bursar.ports import SystemPorts
from bursar.runtime import running
from bursar.sim.chain_state import Behaviour

PAYOUTS = "/api/v1/payouts"
ACCOUNT = f"user:{ALICE}:funding"
DOCUMENTS: dict[str, dict[str, Any]] = {
    "chains/sim": CHAIN,
    **{f"assets-on-chain/{name}": body for name, body in ASSETS.items()},
    "wallets/hot": WALLET,
}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with evm_town(tmp_path) as made:
        yield made


class Counter:
    """The API as staff uses it."""

    def __init__(self, here: Office, town: Town) -> None:
        self.here = here
        self.town = town

    async def by(self, role: str, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        name = {"operator": "anna", "approver": "ben"}.get(role, role)
        return await self.here.send(method, path, body, by=token(name, role), **more)

    async def put(self, path: str, body: dict[str, Any], base: int = 0) -> httpx.Response:
        return await self.by("operator", "PUT", f"/api/v1/{path}", {"base": base, "reason": "set up", "body": body})

    async def furnish(self) -> None:
        for path, body in DOCUMENTS.items():
            proposed = await self.put(path, body)
            assert proposed.status_code == 202, proposed.text
            agreed = {"hash": proposed.json()["proposal"]["hash"], "reason": "agreed"}
            done = await self.by("approver", "POST", f"/api/v1/{path}/approve", agreed)
            assert done.status_code == 200, done.text

    async def request(self, amount: str = "5", *, key: str = "k1", **more: Any) -> httpx.Response:
        body = {"account": ACCOUNT, "asset": "USDT", "chain": "sim", "to": SHOP, "amount": amount, "mandate": "auto"}
        return await self.by("operator", "POST", PAYOUTS, body | {"source": f"test:{key}", "key": key} | more)

    async def show(self, id_: str) -> dict[str, Any]:
        answer = await self.by("viewer", "GET", f"{PAYOUTS}/{id_}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def reaches(self, id_: str, status: str, *, mines: bool = True) -> dict[str, Any]:
        async def there() -> dict[str, Any] | None:
            if mines:
                self.town.mine()
            found = await self.show(id_)
            return found if status in (found["status"], found["state"]) else None

        found: dict[str, Any] = await until(there, 30)
        return found


@asynccontextmanager
async def counter(url: str, folder: Path, town: Town, **settings: Any) -> AsyncIterator[Counter]:
    async with Bursar(url) as bursar:
        await bursar.ledger.create_asset("SIM", 18)
    async with office(url, folder, **town.settings, **settings) as here:
        await here.fund(ALICE, "100")
        made = Counter(here, town)
        await made.furnish()

        async def is_followed() -> bool:
            chains = await made.by("viewer", "GET", "/api/v1/chains")
            return bool(chains.json()[0]["configured"])

        await until(is_followed)
        yield made


def at(url: str, folder: Path, town: Town, work: Any) -> None:
    async def run() -> None:
        async with counter(url, folder, town) as c:
            await work(c)

    asyncio.run(run())


def test_payout_is_requested_signed_by_mandate_and_confirmed(url: str, tmp_path: Path, town: Town) -> None:
    """Chain, assets and wallet come to a process that runs already, as documents; no restart."""

    async def work(c: Counter) -> None:
        made = await c.request("5", fee="1")
        assert made.status_code == 200, made.text
        assert made.json()["status"] in ("pending", "processing", "confirming")
        done = await c.reaches(made.json()["id"], "confirmed")
        assert (town.has(SHOP, TOKEN), done["wallet"]) == (5 * USDT, "hot")
        [attempt] = done["attempts"]
        assert (attempt["hash"], attempt["nonce"], attempt["outcome"]) == (done["tx_hash"], 0, "final")
        again = await c.request("5.00", fee="1")
        assert again.json()["id"] == done["id"]
        assert refusal(await c.request("6")) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert refusal(await c.request("5", key="k2", source="test:k1")) == (409, "PAYOUT_EXISTS")
        assert (await c.here.balances(ALICE))["FUNDING"] == "94.000000"
        [wallet] = (await c.by("viewer", "GET", "/api/v1/wallets")).json()
        assert (wallet["name"], wallet["address"], wallet["unconfirmed"]) == ("hot", HOT, 0)
        assert (wallet["balances"]["USDT"], wallet["reserved"]["USDT"]) == ("9995.000000", "0.000000")
        assert wallet["last_used_at"] is not None
        [listed] = (await c.by("viewer", "GET", f"{PAYOUTS}?status=confirmed&account={ACCOUNT}")).json()["payouts"]
        assert listed["id"] == done["id"]
        assert (await c.by("viewer", "GET", f"{PAYOUTS}?status=failed")).json()["payouts"] == []

    at(url, tmp_path, town, work)


def test_payout_waits_for_an_approval_made_with_the_approvers_key(url: str, tmp_path: Path, town: Town) -> None:
    async def work(c: Counter) -> None:
        made = (await c.request("20", mandate="")).json()
        waiting = await until(lambda: _error(c, made["id"]))
        assert waiting["status"] == "pending"
        signed = msgspec.to_builtins(approval(msgspec.convert(made["payment"], Payment), "ben"))
        path = f"{PAYOUTS}/{made['id']}/approve"
        assert refusal(await c.by("operator", "POST", path, signed)) == (403, "FORBIDDEN")
        other = await c.here.send("POST", path, signed, by=token("carol", "approver"))
        assert refusal(other) == (403, "FORBIDDEN")
        done = await c.by("approver", "POST", path, signed)
        assert done.json()["approvals"] == ["ben"]
        await c.reaches(made["id"], "confirmed")
        assert town.has(SHOP, TOKEN) == 20 * USDT

    at(url, tmp_path, town, work)


def test_payout_of_a_token_that_lies_in_its_event_is_disputed(url: str, tmp_path: Path, town: Town) -> None:
    town.world.tokens[TOKEN.lower()].behaviour = Behaviour.LIES

    async def work(c: Counter) -> None:
        made = (await c.request("5")).json()["id"]
        found = await c.reaches(made, "disputed")
        assert "the recipient's balance rose by 5000000, but it did not change" in found["error"]
        assert town.has(SHOP, TOKEN) == 0

    at(url, tmp_path, town, work)


async def _error(c: Counter, id_: str) -> dict[str, Any] | None:
    found = await c.show(id_)
    return found if found["error"] else None


def test_operators_hold_release_bump_and_cancel(url: str, tmp_path: Path, town: Town) -> None:
    async def work(c: Counter) -> None:
        town.world.terms.dynamic_base_fee = False
        sent = (await c.request("5")).json()["id"]
        await c.reaches(sent, "confirming", mines=False)
        why = {"reason": "ticket 17"}
        assert refusal(await c.by("operator", "POST", f"{PAYOUTS}/{sent}/hold", why)) == (409, "INVALID_STATE")
        assert refusal(await c.by("viewer", "POST", f"{PAYOUTS}/{sent}/bump", why)) == (403, "FORBIDDEN")
        for _ in range(2):  # the same request twice is one bump
            bumped = await c.by(
                "operator", "POST", f"{PAYOUTS}/{sent}/bump", why, headers={"Idempotency-Key": "bump-1"}
            )
            assert bumped.status_code == 200, bumped.text

        async def is_replaced() -> bool:
            return [one["shape"] for one in (await c.show(sent))["attempts"]] == ["pay", "pay"]

        await until(is_replaced)
        first, second = (await c.show(sent))["attempts"]
        assert first["nonce"] == second["nonce"]
        assert int(second["price"]) * 8 >= int(first["price"]) * 9
        assert (await c.by("operator", "POST", f"{PAYOUTS}/{sent}/cancel", why)).json()["cancel"] == "ticket 17"
        ended = await until(lambda: _ended(c, sent))
        paid = town.has(SHOP, TOKEN)
        assert (ended["status"], paid) in (("failed", 0), ("confirmed", 5 * USDT))
        left = {"failed": "100.000000", "confirmed": "95.000000"}[ended["status"]]
        assert (await c.here.balances(ALICE))["FUNDING"] == left
        assert refusal(await c.by("operator", "POST", f"{PAYOUTS}/{sent}/bump", why)) == (409, "INVALID_STATE")

    at(url, tmp_path, town, work)


async def _ended(c: Counter, id_: str) -> dict[str, Any] | None:
    c.town.mine()
    found = await c.show(id_)
    return found if found["status"] in ("failed", "confirmed") else None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"chain": "nowhere"}, (422, "UNKNOWN_CHAIN")),
        ({"asset": "LIM"}, (422, "ASSET_NOT_ON_CHAIN")),
        ({"asset": "XXX"}, (422, "INVALID_ASSET")),
        ({"to": "0x1234"}, (422, "INVALID_ADDRESS")),
        ({"to": HOT}, (422, "OWN_ADDRESS")),
        ({"memo": "invoice 7"}, (422, "INVALID_MEMO")),
        ({"to": TOKEN}, (422, "DESTINATION_IS_TOKEN")),
        ({"amount": "0.0001"}, (422, "BELOW_MINIMUM")),
        ({"amount": "1000"}, (422, "INSUFFICIENT_BALANCE")),
        ({"amount": "-1"}, (422, "INVALID_AMOUNT")),
        ({"amount": 5}, (400, "INVALID_REQUEST")),
        ({"priority": "urgent"}, (422, "INVALID_PRIORITY")),
        ({"account": "a\x00b"}, (400, "INVALID_NAME")),
        ({"account": "user:9:funding"}, (422, "ACCOUNT_NOT_FOUND")),
        ({"key": None}, (400, "INVALID_REQUEST")),
        ({"more": "1"}, (400, "INVALID_REQUEST")),
        ({"expires_us": -1}, (400, "INVALID_REQUEST")),
    ],
)
def test_a_bad_request_is_refused_with_its_code_and_nothing_is_written(
    url: str, tmp_path: Path, town: Town, change: dict[str, Any], expected: tuple[int, str]
) -> None:
    async def work(c: Counter) -> None:
        async def quiet() -> int | None:  # the watcher of the chain has written its first cursor
            before = c.here.written()["transitions"]
            await asyncio.sleep(0)
            return before if before == c.here.written()["transitions"] else None

        await until(quiet)
        before = {name: count for name, count in c.here.written().items() if name != "transitions"}
        assert refusal(await c.request(**({"amount": "5"} | change))) == expected
        assert {name: count for name, count in c.here.written().items() if name != "transitions"} == before

    at(url, tmp_path, town, work)


def test_documents_are_changed_by_two_people_and_refused_with_what_to_change(
    url: str, tmp_path: Path, town: Town
) -> None:
    async def work(c: Counter) -> None:
        path = "/api/v1/chains/sim"
        proposed = await c.put("chains/sim", CHAIN | {"active": False}, base=1)
        hash_ = proposed.json()["proposal"]["hash"]
        agree = {"hash": hash_, "reason": "agreed"}
        same = await c.here.send("POST", f"{path}/approve", agree, by=token("Anna", "approver"))
        assert refusal(same) == (409, "SECOND_PERSON_NEEDED")
        assert refusal(await c.put("chains/sim", CHAIN | {"depth": 2}, base=0)) == (409, "DOCUMENT_MOVED")
        assert refusal(await c.put("chains/sim", CHAIN | {"chain_id": 78}, base=1)) == (422, "INVALID_DOCUMENT")
        assert refusal(await c.put("chains/sim", CHAIN | {"chain_ids": 78}, base=1)) == (400, "INVALID_REQUEST")
        assert refusal(await c.put("chains/BSC", CHAIN)) == (400, "INVALID_NAME")
        missing = await c.by("viewer", "GET", "/api/v1/chains/eth")
        assert refusal(missing) == (404, "DOCUMENT_NOT_FOUND")
        unknown = await c.by("approver", "POST", f"{path}/approve", agree | {"hash": "0" * 64})
        assert refusal(unknown) == (404, "PROPOSAL_NOT_FOUND")
        shown = (await c.by("viewer", "GET", path)).json()
        assert (shown["document"]["version"], shown["proposal"]["hash"]) == (1, hash_)
        for _ in range(2):  # twice is once
            done = await c.by("approver", "POST", f"{path}/approve", agree)
            assert (done.json()["document"]["version"], done.json()["document"]["approved_by"]) == (2, "ben")
        assert refusal(await c.request("5")) == (422, "CHAIN_INACTIVE")
        operators = await c.by("operator", "POST", f"{path}/approve", agree)
        assert refusal(operators) == (403, "FORBIDDEN")

    at(url, tmp_path, town, work)


def test_quote_is_a_dry_run_and_nodes_are_listed_without_their_urls(url: str, tmp_path: Path, town: Town) -> None:
    async def work(c: Counter) -> None:
        query = f"?chain=sim&asset=USDT&to={SHOP}&amount="
        quoted = (await c.by("viewer", "GET", f"{PAYOUTS}/quote{query}5")).json()
        assert (quoted["wallet"], quoted["native"], quoted["gas_limit"] > 21_000) == ("hot", "SIM", True)
        assert 0 < float(quoted["fee_max"]) < 1
        much = await c.by("viewer", "GET", f"{PAYOUTS}/quote{query}20000")
        assert refusal(much) == (422, "NO_WALLET")
        answer = await c.by("viewer", "GET", "/api/v1/chains")
        [chain] = answer.json()
        assert [(node["name"], node["usable"]) for node in chain["nodes"]] == [("sim-1", True), ("sim-2", True)]
        assert "127.0.0.1" not in answer.text
        assert sorted(chain["assets"]) == ["sim:sim", "usdt:sim"]

    at(url, tmp_path, town, work)


def test_a_chain_that_is_away_leaves_lists_and_readiness_as_they_are(url: str, tmp_path: Path) -> None:
    """Its nodes and its signer are gone: what the nodes say is missing, and the rest is there."""

    async def work() -> None:
        with evm_town(tmp_path) as town:
            async with counter(url, tmp_path, town):
                pass
        async with office_again(url, tmp_path, town) as c:
            [wallet] = (await c.by("viewer", "GET", "/api/v1/wallets")).json()
            assert (wallet["balances"], bool(wallet["trouble"])) == (None, True)
            [chain] = (await c.by("viewer", "GET", "/api/v1/chains")).json()
            assert [node["usable"] for node in chain["nodes"]] == [False, False]
            quote = await c.by("viewer", "GET", f"{PAYOUTS}/quote?chain=sim&asset=USDT&amount=5&to={SHOP}")
            assert refusal(quote) == (503, "NODES_UNAVAILABLE")
            made = await c.request("5")
            assert made.json()["status"] == "pending", "it is written down, and waits"
            assert (await c.here.get("/readyz")).json()["ready"]

    asyncio.run(work())


@asynccontextmanager
async def office_again(url: str, folder: Path, town: Town) -> AsyncIterator[Counter]:
    """A second process, later."""
    config = config_for(url, folder, deadline_ms=1_000, **town.settings)
    async with desk(folder) as core, running(config, SystemPorts(), "test") as runtime:
        app: Any = applications(runtime, Keys.of(config))[0]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bursar") as http:
            yield Counter(Office(runtime, core, app, http), town)


def test_without_configuration_documents_work_and_payouts_say_what_is_missing(url: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with office(url, tmp_path) as here:
            answer = await here.get(PAYOUTS, by=token("v", "viewer"))
            assert refusal(answer) == (503, "PAYOUTS_NOT_CONFIGURED")
            assert "signer" in answer.json()["detail"]
            assert "payouts" not in here.runtime.engine.flows, "a host without a signer must not claim payouts"
            assert (await here.get("/api/v1/wallets", by=token("v", "viewer"))).json() == []
            body = {"base": 0, "reason": "set up", "body": CHAIN}
            proposed = await here.send("PUT", "/api/v1/chains/sim", body, by=token("anna", "operator"))
            assert proposed.status_code == 202
            documents = Documents(here.runtime.bursar.store, KINDS)
            assert [one.name for one in await documents.proposals()] == ["sim"]

    asyncio.run(work())
