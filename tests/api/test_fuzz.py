"""Requests that no description would make: bytes that are almost JSON, odd headers and queries; and long stories told
in requests, after which the money is still where it should be. BURSAR_FUZZ_EXAMPLES=1000 for more of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.api.office import ALICE, PROBLEM, TRANSFERS, bearer, token
from tests.evm_town import CHAIN, DEPOSIT_RULES, POLICY_OF_WITHDRAWALS, WALLET

from bursar.api.app import description

EXAMPLES = int(os.environ.get("BURSAR_FUZZ_EXAMPLES", "30"))
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ROLES = {name: bearer(token(name, name)) for name in ("viewer", "operator", "approver", "admin")}
ROLES |= {"user": bearer(token(ALICE)), "nobody": {}}
PATHS = description()["paths"]
ROUTES = [(method.upper(), path) for path, said in PATHS.items() for method in said if "/api" in path]
GOOD: dict[str, dict[str, Any]] = {
    TRANSFERS: {"from": "FUNDING", "to": "SPOT", "asset": "USDT", "amount": "0.000001"},
    "/api/v1/transfer": {"from": "funding", "to": "trading", "asset": "USDT", "amount": "0.000001"},
    "/api/v1/deposits": {"user_id": ALICE, "asset": "USDT", "amount": "1", "reference": "wire-1"},
    "/api/v1/deposits/{reference}/confirm": {"user_id": ALICE, "asset": "USDT", "amount": "1"},
    "/api/v1/payouts": {
        "account": f"user:{ALICE}:funding",
        "asset": "USDT",
        "chain": "sim",
        "to": "0x" + "a5" * 20,
        "amount": "1",
        "source": "test:1",
        "key": "k1",
    },
    "/api/v1/withdrawals": {
        "asset": "USDT",
        "chain": "sim",
        "to": "0x" + "a5" * 20,
        "amount": "1",
        "client_withdrawal_id": "mine",
    },
    "/api/v1/withdrawals/quote": {"asset": "USDT", "chain": "sim", "to": "0x" + "a5" * 20, "amount": "1"},
    "/api/v1/withdrawals/{withdrawal_id}/cancel": {"reason": "why"},
    "/api/v1/withdrawals/{withdrawal_id}/reject": {"reason": "why"},
    "/api/v1/withdrawals/{withdrawal_id}/approve": {"approver": "approver", "signature": "0" * 128},
    "/api/v1/withdrawal_addresses": {"chain": "sim", "address": "0x" + "a5" * 20, "label": "shop"},
    "/api/v1/withdrawal_switches/pause": {"user_id": 7, "reason": "why"},
    "/api/v1/withdrawal_switches/resume": {"user_id": 7, "reason": "why"},
    "/api/v1/withdrawal_policies/{name}": {"base": 1, "reason": "why", "body": POLICY_OF_WITHDRAWALS},
    "/api/v1/withdrawal_approvers/{name}": {"base": 0, "reason": "why", "body": {"public_key": "0" * 64}},
    "/api/v1/deposit_addresses": {"chain": "sim"},
    "/api/v1/chain_deposits/{deposit_id}/confirm": {"reason": "why"},
    "/api/v1/chain_deposits/{deposit_id}/reject": {"reason": "why"},
    "/api/v1/deposit_rules/{name}": {"base": 1, "reason": "why", "body": DEPOSIT_RULES},
    "/api/v1/deposit_rules/{name}/approve": {"hash": "0" * 64, "reason": "why"},
    "/api/v1/deposit_scans/{name}/rescan": {"block": 1, "reason": "why"},
    "/api/v1/chains/{name}": {"base": 0, "reason": "why", "body": CHAIN},
    "/api/v1/wallets/{name}": {"base": 0, "reason": "why", "body": WALLET},
    "/api/v1/chains/{name}/approve": {"hash": "0" * 64, "reason": "why"},
}

# --- one request ---------------------------------------------------------------------------------------------------

odd_text = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["\x00", "a\x00b", "\u202e", "\ufeff", "x" * 20_000, "9" * 400, "-0", "1e400", "%00", "%ff", "'--"]
    ),
)
odd_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), odd_text, st.just(10**400), st.just(-(2**63) - 1)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(odd_text, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A good body that something was done to."""
    fields = list(GOOD.get(path, {}).items())
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.one_of(st.sampled_from([*GOOD.get(path, {"x": 1}), "client_order_id", "user_id"]), odd_text))
        change = (name, draw(odd_json))
        fields = draw(st.sampled_from([[*fields, change], [f for f in fields if f[0] != name] + [change], fields[1:]]))
    text = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields)
    body = f"{{{text}}}".encode("utf-8", "surrogatepass")
    match draw(st.sampled_from(["whole", "whole", "cut", "bytes", "deep", "more", "anything"])):
        case "cut":
            return body[: draw(st.integers(0, len(body)))]
        case "bytes":
            at = draw(st.integers(0, len(body)))
            return body[:at] + draw(st.binary(max_size=4)) + body[at:]
        case "deep":
            depth = draw(st.sampled_from([10, 1_000, 5_000]))
            return b'{"a":' * depth + b"1" + b"}" * depth
        case "more":
            return body + draw(st.sampled_from([b"{}", b"\x00", b"\n\n", b" " * 30_000, body]))
        case "anything":
            return draw(st.binary(max_size=200))
    return body


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request to any route, with something odd about it."""
    method, path = draw(st.sampled_from(ROUTES))
    body = draw(bodies(path))
    filled = path.replace("{req_id}", draw(st.sampled_from(["sr-1", "sr-" + "9" * 30, "%00", "a%2Fb", "%ff%fe"])))
    filled = filled.replace("{reference}", draw(st.sampled_from(["wire-1", "%00", "%F0%9F", ".", "x" * 300])))
    filled = filled.replace("{payout_id}", draw(st.sampled_from(["po-1", "po-" + "9" * 30, "%00", "quote", "%ff"])))
    filled = filled.replace("{withdrawal_id}", draw(st.sampled_from(["wd-1", "wd-" + "9" * 30, "%00", "%ff"])))
    filled = filled.replace("{address_id}", draw(st.sampled_from(["ab-1", "%00", "%F0%9F", "x" * 300])))
    filled = filled.replace("{name}", draw(st.sampled_from(["sim", "%00", "usdt:sim", "A", "x" * 300, "%F0%9F"])))
    odd_ids = st.sampled_from(["sim:0x1:0", "%00", "%F0%9F", ":", "x" * 300, "a%20b"])
    filled = filled.replace("{deposit_id}", draw(odd_ids)).replace("{sweep_id}", draw(odd_ids))
    names = st.sampled_from(
        [
            "state",
            "asset",
            "from",
            "to",
            "since",
            "until",
            "user_id",
            "cursor",
            "limit",
            "limit",
            "q",
            "chain",
            "status",
        ]
    )
    query = draw(st.lists(st.tuples(names, st.one_of(odd_text, st.sampled_from(["1", "PENDING", "USDT"]))), max_size=3))
    kinds = ["application/json", "application/json", "application/json; charset=utf-16", "text/plain", "", "\xff/\xfe"]
    headers = {"Content-Type": draw(st.sampled_from(kinds))}
    if draw(st.booleans()):
        headers["Idempotency-Key"] = draw(st.sampled_from(["", "k", "\xff", "x" * 100, "a b", "mine"]))
    return {"method": method, "path": filled, "params": query, "content": body, "headers": headers, "route": path}


@pytest.fixture(scope="module")
def http(served: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served, timeout=60) as client:
        yield client


def check(route: str, method: str, answer: httpx.Response) -> None:
    """Documented for that route, and told as refusals are."""
    assert answer.status_code < 500, answer.text
    documented = {int(status) for status in PATHS[route][method.lower()]["responses"]}
    assert answer.status_code in documented, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == PROBLEM
        assert answer.json()["status"] == answer.status_code


def test_no_bytes_get_an_answer_that_is_not_documented(http: httpx.Client) -> None:
    """NUL, halves of characters, fields twice, deep and huge JSON, odd headers, paths and queries; in every role."""

    @settings(QUIET, max_examples=EXAMPLES * 5)
    @given(request=requests(), role=st.sampled_from(sorted(ROLES)))
    def ask(request: dict[str, Any], role: str) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (request["headers"] | ROLES[role]).items()]
        raw = [(name, value) for name, value in raw if value]
        answer = http.request(
            request["method"], request["path"], params=request["params"], content=request["content"], headers=raw
        )
        check(request["route"], request["method"], answer)

    ask()


# --- long stories --------------------------------------------------------------------------------------------------

AMOUNTS = ["1", "0.5", "2.00", "40", "1000", "0", "-1", "1e3", "0.0000001", ""]
MINOR = 10**6


class Story(RuleBasedStateMachine):
    """A user with money of his own, and what he and the staff do to it, in requests. The model is a sum: what was
    booked from outside is what the accounts hold, and a transfer is one transfer however often it is asked for."""

    http: httpx.Client
    users = iter(range(50_000, 10**9))

    transfers = Bundle("transfers")
    waiting = Bundle("waiting")

    @initialize(amount=st.sampled_from(["10", "100"]))
    def begins(self, amount: str) -> None:
        self.user = next(Story.users)
        self.booked = 0
        self.orders: dict[str, tuple[Any, ...]] = {}
        self.count = 0
        answer = self.deposit(f"first-{self.user}", amount)
        assert answer.status_code == 200, answer.text
        self.booked += int(amount) * MINOR

    def send(self, method: str, path: str, route: str, body: Any = None, role: str = "user") -> httpx.Response:
        headers = bearer(token(self.user)) if role == "user" else ROLES[role]
        answer = self.http.request(method, path, headers=headers, **({} if body is None else {"json": body}))
        check(route, method, answer)
        return answer

    def deposit(self, reference: str, amount: str) -> httpx.Response:
        body = {"user_id": self.user, "asset": "USDT", "amount": amount, "reference": reference}
        return self.send("POST", "/api/v1/deposits", "/api/v1/deposits", body, role="operator")

    @rule(
        target=transfers,
        way=st.sampled_from([("FUNDING", "SPOT"), ("SPOT", "FUNDING"), ("SPOT", "SPOT"), ("FUNDING", "FUTURE")]),
        amount=st.sampled_from(AMOUNTS),
        order=st.sampled_from(["", "", "a", "b"]),
    )
    def transfer(self, way: tuple[str, str], amount: str, order: str) -> str:
        body = {"from": way[0], "to": way[1], "asset": "USDT", "amount": amount}
        answer = self.send("POST", TRANSFERS, TRANSFERS, body | ({"client_order_id": order} if order else {}))
        if answer.status_code >= 400:
            if order in self.orders and self.orders[order][:2] != (way, amount):
                assert answer.json()["code"] == "DUPLICATE_REQUEST"
            return "sr-1"
        req_id = str(answer.json()["req_id"])
        if order:
            assert self.orders.setdefault(order, (way, amount, req_id)) == (way, amount, req_id)
        return req_id

    @rule(req_id=transfers, role=st.sampled_from(["user", "viewer"]))
    def look(self, req_id: str, role: str) -> None:
        answer = self.send("GET", f"{TRANSFERS}/{req_id}", TRANSFERS + "/{req_id}", role=role)
        assert answer.status_code == (404 if req_id == "sr-1" else 200)

    @rule(state=st.sampled_from(["", "PENDING", "COMMITTED", "FAILED"]), limit=st.sampled_from([1, 3, 200]))
    def pages(self, state: str, limit: int) -> None:
        seen: list[str] = []
        cursor = ""
        while True:
            query = f"?limit={limit}" + (f"&state={state}" if state else "") + (f"&cursor={cursor}" if cursor else "")
            page = self.send("GET", TRANSFERS + query, TRANSFERS).json()
            seen += [one["req_id"] for one in page["transfers"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert len(seen) == len(set(seen))
        assert {order[2] for order in self.orders.values()} <= set(seen) or state

    @rule(target=waiting, amount=st.sampled_from(["5", "1001", "2000"]))
    def arrives(self, amount: str) -> tuple[str, str]:
        self.count += 1
        reference = f"more-{self.user}-{self.count}"
        answer = self.deposit(reference, amount)
        assert answer.status_code == (202 if int(amount) > 1000 else 200), answer.text
        if answer.status_code == 200:
            self.booked += int(amount) * MINOR
        return reference, amount

    @rule(which=waiting, does=st.sampled_from(["confirm", "reject"]), other=st.booleans())
    def decide(self, which: tuple[str, str], does: str, other: bool) -> None:
        reference, amount = which
        body = {"user_id": self.user, "asset": "USDT", "amount": "7" if other else amount}
        route = f"/api/v1/deposits/{{reference}}/{does}"
        path = route.replace("{reference}", reference)
        before = self.total()
        answer = self.send("POST", path, route, body if does == "confirm" else None, role="approver")
        self.booked += self.total() - before
        assert self.total() - before in ((0, int(amount) * MINOR) if answer.status_code == 200 else (0,))

    @rule()
    def counts(self) -> None:
        assert self.total() == self.booked

    def total(self) -> int:
        """All that the user has, or is on its way."""
        found = self.send("GET", "/api/v1/balances", "/api/v1/balances").json()
        lines = [line for account in found["accounts"] for line in account["balances"]]
        return sum(_minor(line[name]) for line in lines for name in ("available", "frozen", "in_flight"))

    def teardown(self) -> None:
        if hasattr(self, "user"):
            self.counts()


def _minor(amount: str) -> int:
    units, _, rest = amount.partition(".")
    return int(units) * MINOR + int(rest)


def test_money_is_where_it_should_be_after_any_story(http: httpx.Client) -> None:
    Story.http = http
    run_state_machine_as_test(
        Story, settings=settings(QUIET, max_examples=max(5, EXAMPLES // 3), stateful_step_count=20)
    )
