"""Bad input of sequences: refused with its facts before a row is written."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from tests.builders import Place, outcome, scenario, seed
from tests.shop import Shop, program

from bursar.flows.sequence import Deposit, Own, Pay, SequenceRefused, StepRefused, Withdraw
from bursar.model.errors import InvalidName

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

GOOD = Pay("alice", "bob", "USDT", "1")


class Strange:
    """Nothing that JSON knows."""


DEEP: dict[str, Any] = {}
inner = DEEP
for _ in range(5_000):
    inner["deeper"] = inner = {}

STEPS: list[tuple[str, Any, dict[str, Any]]] = [
    ("INVALID_ASSET", Pay("alice", "bob", "DOGE", "1"), {"asset": "DOGE"}),
    ("INVALID_ASSET", Pay("alice", "bob", ["USDT"], "1"), {}),  # type: ignore[arg-type]
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", "0"), {"value": "0"}),
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", "-1"), {}),
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", "1e3"), {}),
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", 1), {}),  # type: ignore[arg-type]
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", 1.5), {}),  # type: ignore[arg-type]
    ("INVALID_AMOUNT", Pay("alice", "bob", "USDT", Decimal("NaN")), {}),
    ("PRECISION_OVERFLOW", Deposit("bank", "bob", "USDT", "0.0000001"), {"precision": 6}),
    ("AMOUNT_TOO_LARGE", Withdraw("alice", "bank", "USDT", "9" * 40), {}),
    ("SAME_ACCOUNT", Pay("alice", "alice", "USDT", "1"), {"account": "alice"}),
    ("INVALID_NAME", Pay("Alice!", "bob", "USDT", "1"), {"what": "account path"}),
    ("INVALID_NAME", Pay("alice", "bob", "USDT", "1", book="no/book"), {}),
    ("INVALID_ENTRY", Pay("alice", "held", "USDT", "1"), {}),
    ("ACCOUNT_NOT_FOUND", Pay("alice", "nobody", "USDT", "1"), {"account": "nobody"}),
    ("ACCOUNT_NOT_FOUND", Deposit("nowhere", "bob", "USDT", "1"), {"account": "nowhere"}),
    ("ACCOUNT_CLOSED", Withdraw("carol", "bank", "USDT", "1"), {"account": "carol"}),
    ("BOOK_NOT_FOUND", Pay("alice", "bob", "USDT", "1", book="other"), {"book": "other"}),
    ("UNKNOWN_STEP", Own("fly"), {}),
    ("INVALID_NAME", Own(""), {}),
    ("INVALID_NAME", Own("a\nb"), {}),
    ("INVALID_ARGUMENTS", Own("ship", {"book": Strange()}), {}),
    ("INVALID_ARGUMENTS", Own("ship", {"book": float("nan")}), {}),  # JSON would make it null
    ("INVALID_ARGUMENTS", Own("ship", {"price": Decimal("1.5")}), {}),  # and this a text
    ("INVALID_ARGUMENTS", Own("ship", {7: "book"}), {}),  # type: ignore[dict-item]
    ("INVALID_ARGUMENTS", Own("ship", {"book": "\ud800"}), {}),
    ("INVALID_ARGUMENTS", Own("ship", {"book": "x" * 8_200}), {}),
    ("INVALID_ARGUMENTS", Own("ship", DEEP), {}),
    ("INVALID_ARGUMENTS", Own("ship", ["Dune"]), {}),  # type: ignore[arg-type]
    ("NOT_A_STEP", "pay bob", {}),
    ("NOT_A_STEP", Pay, {}),
    ("NOT_A_STEP", None, {}),
]


@scenario
async def test_a_bad_step_is_refused_with_its_facts_and_nothing_is_written(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")
        await p.ledger.close("carol")
        rows = await p.rows()
        for reason, step, facts in STEPS:
            refusal = await outcome(p.start([GOOD, Own("ship"), step]))
            assert isinstance(refusal, StepRefused), (reason, refusal)
            assert (refusal.reason, refusal.step) == (reason, 2), refusal
            assert refusal.facts.items() >= {"reason": reason, "step": 2, **facts}.items()
            assert str(refusal).startswith("step 2 of the sequence is refused: ")
        assert await p.rows() == rows
        assert shop.calls == []
        assert await p.balances() == ["10", "0", "0"]


@scenario
async def test_a_sequence_that_is_none(place: Place) -> None:
    async with program(place, Shop()) as p:
        for reason, steps in (
            ("EMPTY", []),
            ("EMPTY", ()),
            ("TOO_MANY_STEPS", [Own("ship")] * 33),
            ("NOT_A_STEP", "ship"),
            ("NOT_A_STEP", {Own: "ship"}),
            ("NOT_A_STEP", None),
            ("NOT_A_STEP", GOOD),
        ):
            refusal = await outcome(p.start(steps))  # type: ignore[arg-type]
            assert isinstance(refusal, SequenceRefused)
            assert (refusal.reason, refusal.code) == (reason, "SEQUENCE_REFUSED")
        for bad in ("x" * 129, "a\x00b", "\ud800"):
            assert isinstance(await outcome(p.start([Own("ship")], key=bad)), InvalidName)
            assert isinstance(await outcome(p.sequences.start([Own("ship")], owner=bad)), InvalidName)
        assert await p.rows() == [0, 0, 0, 0]


@scenario
async def test_the_most_steps_that_are_allowed(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        view = await p.start([Own("ship", {"book": "x" * 8_000})] * 32)
        assert (view.state, shop.effects) == ("COMPLETED", {"ship_do": 32})


@scenario
async def test_a_refused_start_leaves_its_key_free(place: Place) -> None:
    """T41: nothing was started, so nothing is remembered."""
    async with program(place, Shop()) as p:
        assert isinstance(await outcome(p.start([Own("fly")])), StepRefused)
        assert (await p.start([Own("ship")])).state == "COMPLETED"
