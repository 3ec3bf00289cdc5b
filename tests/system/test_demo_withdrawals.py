"""The demo of withdrawals, run as in a pipe: what it says is so, its lines work, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.system.test_demo import COMMAND, WAIT_S, marked

from bursar.demo import withdrawal_story
from bursar.demo.withdrawal_chains import EvmChain, HttpChain, TronChain
from bursar.demo.withdrawal_deposits import PAID_IN, Sent
from bursar.demo.withdrawal_setting import USERS
from bursar.demo.withdrawal_story import People, Story

WITHDRAWALS = [*COMMAND, "demo-withdrawals"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment in which whatever a demo leaves behind can be found: it is gone in the end."""
    mark = f"withdrawals-{os.getpid()}-{time.monotonic_ns()}"
    scratch = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))  # short: a socket lies in it
    yield {**os.environ, "TMPDIR": str(scratch), "DEMO_MARK": mark}
    deadline = time.monotonic() + WAIT_S
    while left := marked(mark) or [path.name for path in scratch.iterdir()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)  # real processes, which send no notice
    scratch.rmdir()


def test_story_ends_well_and_says_who_approved_what(environ: dict[str, str]) -> None:
    ran = subprocess.run(WITHDRAWALS, env=environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    said = ran.stdout
    assert (ran.returncode, ran.stderr) == (0, ""), said + ran.stderr
    assert "\x1b" not in said
    lines = re.findall(r"^(\S+/bursar) withdrawal --config (\S+) approve (wd-\d+) --key (\S+)", said, re.MULTILINE)
    assert [(Path(key).name, who) for _, _, who, key in lines] == [
        ("ann.key", lines[0][2]),
        ("ann.key", lines[1][2]),
        ("ben.key", lines[1][2]),
    ]
    assert {executable for executable, *_ in lines} == {str(Path(sys.executable).with_name("bursar"))}
    rows = re.findall(r"^wd-\d+ +(\d+) +([\d,.]+) +(\w+) +(\w+) +(\S+) +(.+?) *$", said, re.MULTILINE)
    assert [(user, amount, chain, status, who) for user, amount, chain, status, _, who in rows] == [
        ("1001", "25.00", "eth", "completed", "policy"),
        ("1001", "25.00", "tron", "completed", "policy"),
        ("1003", "120.00", "eth", "cancelled", "-"),
        ("1002", "450.00", "eth", "rejected", "-"),
        ("1002", "300.00", "eth", "completed", "ann"),
        ("1003", "1,500.00", "tron", "completed", "ann, ben"),
        ("1001", "40.00", "eth", "completed", "policy"),
        ("1001", "40.00", "tron", "completed", "policy"),
    ]
    arrived = re.findall(r"^(\d+) +(eth|tron) +(\w{34,42}) +([\d,.]+) +(\w+) +(\w+) *$", said, re.MULTILINE)
    assert [(user, chain, amount, status) for user, chain, _, amount, status, _ in arrived] == [
        ("1001", "eth", "300.00", "credited"),
        ("1001", "eth", "0.50", "under_review"),
        ("1002", "eth", "1,000.00", "credited"),
        ("1003", "tron", "2,000.00", "credited"),
    ]
    assert len({hash_ for *_, hash_ in arrived}) == 4
    assert len({address for _, _, address, *_ in arrived}) == 3, "each user has one"
    swept = re.findall(r"^ +dep-(\S+): ([\d,.]+) USDT to (\S+), gas [\d.]+ (\w+) from (\S+): \w+$", said, re.MULTILINE)
    assert sorted(swept) == [
        ("eth-1002", "1,000.00", "hot-eth", "ETH", "gas-eth"),
        ("tron-1003", "2,000.00", "hot-tron", "TRX", "gas-tron"),
    ]
    for words in (
        "comparing the address",
        "it is below the minimum, 1 USDT",
        "the address was added at",
        "it needs approval by two people",
        "kill -9 of bursar serve",
        "both are paid, once, by the transactions that were signed before",
        "All is well: 6 of 8 withdrawals are paid",
    ):
        assert words in said
    money = re.findall(r"^user (\d+)" + r" +([\d,.]+)" * 6, said, re.MULTILINE)
    assert [int(user) for user, *_ in money] == list(USERS)
    for user, *amounts in money:
        received, *parts = (Decimal(amount.replace(",", "")) for amount in amounts)
        assert received == sum(Decimal(amount) for amount, _ in PAID_IN[int(user)]) == sum(parts)
    covered = re.search(r"^I9 .* (\d+) +[\d.]+ s +ok", said, re.MULTILINE)
    assert covered is not None
    assert int(covered[1]) == 14, "coin and tokens of four wallets of ours, and of three addresses of users"
    assert re.findall(r"^(I\d) .* ok", said, re.MULTILINE) == [f"I{number}" for number in range(1, 10)]


def test_ctrl_c_leaves_nothing_behind(environ: dict[str, str]) -> None:
    """While keys are made and programs are started."""
    with subprocess.Popen(WITHDRAWALS, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        assert ran.stdout.readline()
        deadline = time.monotonic() + WAIT_S
        while not list(Path(environ["TMPDIR"]).glob("*/serve.err")):
            assert time.monotonic() < deadline
            time.sleep(0.05)  # until the server is started
        ran.send_signal(signal.SIGINT)
        assert ran.wait(WAIT_S) == 130
        assert "Traceback" not in ran.stderr.read()


# --- people ----------------------------------------------------------------------------------------------------------


def view_of(id_: str, *approvals: str, status: str = "pending") -> dict[str, Any]:
    return {"id": id_, "status": status, "tx_hash": "0xab", "staff": {"approvals": list(approvals)}}


def test_what_approvers_do_elsewhere_is_told_once_and_nothing_is_done_for_them() -> None:
    said: list[str] = []
    views = {"wd-1": view_of("wd-1"), "wd-2": view_of("wd-2")}
    people = People(views.__getitem__, {"wd-1": 1, "wd-2": 2}, lambda *lines: said.extend(lines))
    assert not people.look()
    assert said == []
    assert people.waits()
    views |= {"wd-1": view_of("wd-1", "ann"), "wd-2": view_of("wd-2", "ben")}
    assert not people.look()
    assert said == ["ann has approved wd-1.", "ben has approved wd-2; one more person is needed."]
    assert [people.is_missing(*one) for one in (("wd-1", "ann"), ("wd-2", "ann"), ("wd-2", "ben"))] == [0, 1, 0]
    views |= {"wd-1": view_of("wd-1", "ann", status="completed"), "wd-2": view_of("wd-2", "ben", status="rejected")}
    assert people.look()
    assert people.look()
    assert said[2:] == ["wd-1 is paid, approved by ann:", "0xab", "wd-2 is rejected."]
    assert not people.waits()
    assert not people.is_missing("wd-2", "ann")


# --- the end ---------------------------------------------------------------------------------------------------------


OWN = "0xown"  # the address for deposits of user 1001


def deposit_of(number: int, amount: str, status: str) -> dict[str, Any]:
    return {
        "id": f"eth:0x{number}:0",
        "user_id": 1001,
        "block": number,
        "tx_hash": f"0x{number}",
        "amount": amount,
        "status": status,
    }


class Answers:
    """A setting after a story in which user 1001 has sent in 300 and half a unit, and was paid 25 on eth.

    `paid` and `sent_in` are what the chain says; `left` is what it has at the user's address for deposits.
    """

    config = None

    def __init__(
        self,
        paid: list[int],
        available: str = "274.50",
        *,
        sent_in: tuple[int, ...] = (300_000_000, 500_000),
        left: int = 300_500_000,
        credits: int = 1,
    ) -> None:
        self.chains: dict[str, HttpChain] = {"eth": EvmChain(), "tron": TronChain()}
        self._available, self._credits = available, credits
        there = {self.chains["eth"].address(1001): paid, OWN: list(sent_in)}
        self.chains["eth"].arrived = lambda to: there.get(to, [])  # type: ignore[method-assign]
        self.chains["eth"].has = lambda address: left  # type: ignore[method-assign]

    def ask(self, _method: str, path: str, who: int | str) -> Any:
        if path == "sweeps":
            return {"sweeps": []}
        if path == "chain_deposits":
            found = [deposit_of(0, "300.000000", "credited")] * self._credits
            return {"deposits": [deposit_of(2, "0.1", "ignored"), deposit_of(1, "0.500000", "under_review"), *found]}
        if path == "balances":
            has = self._available if who == 1001 else "0"
            return {"accounts": [{"balances": [{"asset": "USDT", "available": has, "frozen": "0"}]}]}
        ours = {"user_id": 1001, "chain": "eth", "amount": "25.000000", "fee": "0.500000"}
        return view_of("wd-1", status="completed") | ours


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        (Answers([25_000_000]), []),
        (Answers([25_000_000] * 2), ["has received", "does not add up"]),
        (Answers([]), ["has received", "does not add up"]),
        (Answers([25_000_000], available="275.00"), ["does not add up"]),
        (Answers([25_000_000], sent_in=(300_000_000,)), ["does not add up"]),
        (Answers([25_000_000], left=500_000), ["has 0.5 on eth, not 300.50"]),
        (Answers([25_000_000], credits=2), ["the deposits are"]),
        (Answers([25_000_000], credits=0), ["the deposits are"]),
    ],
)
def test_chain_and_ledger_are_compared(setting: Any, wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def audited(_config: object) -> list[Any]:
        return [SimpleNamespace(invariant="I1", ok=True, judged=True)]

    monkeypatch.setattr(withdrawal_story, "audited", audited)
    story = Story(setting, 0.0, lambda *_lines: None, lambda _what: None)
    story.asked.append("wd-1")
    story.deposits.addresses[1001] = OWN
    story.deposits.sent += [
        Sent("0x0", 1001, Decimal(300), "credited"),
        Sent("0x1", 1001, Decimal("0.50"), "under_review"),
    ]
    story.judge()
    assert [any(words in text for text in story.report.wrong) for words in wrong] == [True] * len(wrong)
    assert len(story.report.wrong) == len(wrong)
    assert story.report.ok == (not wrong)


@pytest.mark.parametrize("chain", [EvmChain(), TronChain()], ids=lambda chain: chain.name)
def test_simulated_chain_shows_what_its_wallet_got_and_refuses_when_told(chain: HttpChain) -> None:
    import httpx  # noqa: PLC0415 (of the extras)

    with chain.running():
        chain.fund(chain.address(7))
        assert len(set(chain.urls)) == 2
        for url in chain.urls:
            if chain.kind == "evm":
                body = {"jsonrpc": "2.0", "id": 1, "method": "eth_getBalance", "params": [chain.address(7), "latest"]}
                assert int(httpx.post(url, json=body).json()["result"], 16) == 10**18
                sent: dict[str, Any] = {
                    "url": url,
                    "json": body | {"method": "eth_sendRawTransaction", "params": ["0x00"]},
                }
            else:
                found = httpx.post(f"{url}/wallet/getaccount", json={"address": chain.address(7), "visible": True})
                assert found.json()["balance"] == 1_000 * 10**6
                sent = {"url": f"{url}/wallet/broadcasthex", "json": {"transaction": "00"}}
            chain.takes = True
            assert httpx.post(**sent).status_code == 200
            chain.takes = False
            assert httpx.post(**sent).status_code == 503
        chain.fund(chain.stranger)
        assert len({chain.pay_in(chain.address(8), 5), chain.pay_in(chain.address(8), 6)}) == 2
        deadline = time.monotonic() + WAIT_S
        while sorted(chain.arrived(chain.address(8))) != [5, 6]:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # until a block is made
        assert chain.has(chain.address(8)) == 11
    with pytest.raises(httpx.ConnectError):
        httpx.post(chain.urls[0])
