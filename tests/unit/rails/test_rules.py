"""The rules of the trading core stand once: every layer gives the same verdict, because it asks the same function."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bursar.config import Config
from bursar.engine import Answer, FlowRecord
from bursar.flows.transfers import AccountType, Transfer, TransferRefused, checks, rails
from bursar.flows.transfers.checks import check_transfer
from bursar.flows.transfers.flow import transfers_flow
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.rails import FundingRail
from bursar.model import errors
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.rails.trading import client, rules, state
from bursar.rails.trading.rules import LEDGER_REFUSALS, REFUSALS, SAFETY_FACTOR, U64_MAX, Code, Op, amount_refusal

SOURCE = Path(__file__).resolve().parents[3] / "src" / "bursar"
EUR = Asset(id=1, code="EUR", precision=0)
ENDS = frozenset({AccountType.FUNDING, AccountType.SPOT})


def transfer(minor: int) -> Transfer:
    return Transfer(
        user=1, source=AccountType.FUNDING, target=AccountType.SPOT, asset="EUR", asset_id=1, amount=str(minor)
    )


def item(body: Transfer) -> FlowRecord[Transfer]:
    record: Any = SimpleNamespace(state="SOURCE_PENDING", number=1, id="sr-1")
    return FlowRecord(record, body)


@pytest.mark.parametrize(
    ("minor", "factor", "refusal"),
    [
        (0, 2, Code.INVALID_AMOUNT),
        (1, 2, None),
        (U64_MAX // 2, 2, None),
        (U64_MAX // 2 + 1, 2, Code.OVERFLOW),
        (U64_MAX, 1, None),
        (U64_MAX + 1, 1, Code.OVERFLOW),
    ],
)
def test_request_adapter_and_core_agree_on_amounts(minor: int, factor: int, refusal: Code | None) -> None:
    assert amount_refusal(minor, factor) is refusal
    found = ""
    try:
        check_transfer(transfer(minor), {"EUR": EUR}, ENDS, factor)
    except TransferRefused as error:
        found = error.reason
    assert found == ("" if refusal is None else refusal.name)
    funding = FundingRail.__new__(FundingRail)
    funding._safety_factor = factor
    assert funding._refusal(transfer(minor), "withdraw") is refusal
    assert funding._refusal(transfer(minor), "refund") is None  # what was taken always comes back
    if minor <= U64_MAX:  # what the wire can carry
        (code,), _ = state.CoreState().execute(["EUR"], [(int(Op.DEPOSIT), 1, 1, 0, minor, 0)])
        assert (code == Code.OK) is (amount_refusal(minor) is None)


def test_each_layer_asks_the_same_rule() -> None:
    """And none of them has written it again."""
    for layer in (checks, rails, state):
        assert vars(layer)["amount_refusal"] is rules.amount_refusal
    for layer in (checks, state):
        assert vars(layer)["STATUS_REFUSALS"] is rules.STATUS_REFUSALS
    assert vars(client)["is_u64"] is rules.is_u64
    assert Config().safety_factor == SAFETY_FACTOR


def test_the_bound_of_64_bits_is_written_once() -> None:
    places = [
        str(path.relative_to(SOURCE))
        for part in ("api", "flows", "rails/trading", "cli")
        for path in sorted((SOURCE / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node) == "2 ** 64"
    ]
    assert places == ["rails/trading/rules.py"]


def test_the_list_of_refusals_that_give_money_back_is_written_once() -> None:
    """T26. No other module of the flow or its rails has a list of codes, and each code of the ledger is an error's."""
    known = {getattr(kind, "code", "") for kind in vars(errors).values() if isinstance(kind, type)}
    assert known >= LEDGER_REFUSALS
    assert {code.name for code in Code if outcome(code) is Outcome.EXPLICIT_FAIL} == REFUSALS - LEDGER_REFUSALS - {
        rules.GIVEN_BACK
    } | {"INSUFFICIENT_BALANCE", "ACCOUNT_FROZEN"}
    for part in ("flows/transfers", "rails"):
        for path in sorted((SOURCE / part).rglob("*.py")):
            lists = [
                node
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Set | ast.List | ast.Tuple)
                and sum(isinstance(one, ast.Constant) and one.value in REFUSALS for one in node.elts) > 1
            ]
            assert not lists or path.name == "rules.py", (path, lists)


def outcome(code: Code) -> Outcome:
    return rules.outcome_of(code)


class Claims:
    """An adapter that calls whatever it likes a refusal."""

    inline = False

    def __init__(self, code: str) -> None:
        self.code = code

    def __getattr__(self, _name: str) -> Any:
        async def answer(*_: object) -> Answer:
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code=self.code)

        return answer

    async def gave_back(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize("code", [*sorted(REFUSALS), "", "TEST", "NO_ROOM", "MISMATCH"])
def test_the_flow_takes_no_adapters_word_for_a_refusal_that_is_not_listed(code: str) -> None:
    """Every call that can lead to a refund: what is not on the list stays unknown, and the record where it is."""

    async def admit(*_: object) -> None: ...

    flow = transfers_flow(
        dict.fromkeys(ENDS, Claims(code)),
        admit=admit,
        alert=admit,
    )
    expected = Outcome.EXPLICIT_FAIL if code in REFUSALS else Outcome.UNKNOWN
    called = item(
        Transfer(user=1, source=AccountType.SPOT, target=AccountType.FUNDING, asset="EUR", asset_id=1, amount="1")
    )
    for calls in (flow.actions, flow.cancels, flow.queries):
        for name, call in calls.items():
            answer: Answer = asyncio.run(call(called))  # type: ignore[arg-type]
            assert answer.outcome is expected, name
    assert {state.action for state in MACHINE.calls} == set(flow.actions)
