"""The judgement of a chaos run: every way to lose, double or misreport money is found in what it is given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bursar.testbed.promises import Ask, Found, Kind, Row, Said, judge

USER = 1001


def accepted(state: str = "COMMITTED", req_id: str = "sr-1") -> Said:
    return Said(Kind.ACCEPTED, req_id, state)


def ask(order: str, *said: Said, source: str = "FUNDING", target: str = "SPOT", minor: int = 10) -> Ask:
    return Ask(order, USER, source, target, "USDT", minor, list(said))


def row(order: str, req_id: str, state: str = "COMMITTED", *, target: str = "SPOT", minor: int = 10) -> Row:
    return Row(order, USER, req_id, "FUNDING", target, "USDT", minor, state)


def fair() -> tuple[list[Ask], Found]:
    """One that moved, one that was rolled back, one that was refused, one whose answer was lost twice."""
    asks = [
        ask("moved", Said(Kind.LOST), accepted("TARGET_PENDING"), accepted()),
        ask("back", accepted("SOURCE_PENDING", "sr-2"), accepted("ROLLED_BACK", "sr-2")),
        ask("refused", Said(Kind.REFUSED, code="INSUFFICIENT_BALANCE")),
        ask("late", Said(Kind.LOST), Said(Kind.LOST), accepted(req_id="sr-3"), minor=5),
    ]
    rows = [row("moved", "sr-1"), row("back", "sr-2", "ROLLED_BACK"), row("late", "sr-3", minor=5)]
    balances = {(USER, "FUNDING", "USDT"): 85, (USER, "SPOT", "USDT"): 15}
    return asks, Found(rows=rows, balances=balances)


DEPOSITS = {(USER, "FUNDING", "USDT"): 100}


def test_a_right_result_has_no_complaints() -> None:
    assert judge(*order_of(fair())) == []


def order_of(scene: tuple[list[Ask], Found]) -> tuple[list[Ask], dict[tuple[int, str, str], int], Found]:
    return scene[0], DEPOSITS, scene[1]


Spoil = Callable[[list[Ask], Found], object]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _, f: f.rows.pop(0), "moved was accepted and is lost"),
        (lambda _, f: f.rows.append(row("moved", "sr-9")), "moved is 2 transfers"),
        (lambda _, f: f.rows.append(row("refused", "sr-9")), "refused exists and was never acknowledged"),
        (lambda _, f: f.rows.append(row("", "sr-9", "FAILED")), "exists and was never acknowledged"),
        (lambda _, f: f.rows.__setitem__(0, row("moved", "sr-1", "FAILED")), "as COMMITTED and is FAILED"),
        (lambda _, f: f.rows.__setitem__(1, row("back", "sr-2", "COMPENSATING")), "has not ended"),
        (lambda _, f: f.rows.__setitem__(0, row("moved", "sr-8")), "was answered as sr-1 and is sr-8"),
        (lambda _, f: f.rows.__setitem__(0, row("moved", "sr-1", minor=11)), "not what was requested"),
        (
            lambda _, f: f.rows.__setitem__(0, row("moved", "sr-1", target="FUTURE")),
            "not what was requested",
        ),
        (lambda a, _: a[0].said.append(accepted(req_id="sr-7")), "several ids: sr-1, sr-7"),
        (lambda a, _: a[0].said.append(accepted("FAILED")), "several terminal states: COMMITTED, FAILED"),
        (lambda a, _: a[2].said.append(Said(Kind.LOST)), "refused never got a definite answer"),
        (lambda a, _: a[2].said.clear(), "refused never got a definite answer"),
        (lambda _, f: f.balances.update({(USER, "SPOT", "USDT"): 25}), "should have 15 USDT in SPOT and has 25"),
        (lambda _, f: f.balances.pop((USER, "SPOT", "USDT")), "should have 15 USDT in SPOT and has 0"),
        (lambda _, f: f.balances.update({(USER, "FUTURE", "USDT"): 1}), "should have 0 USDT in FUTURE and has 1"),
        (lambda _, f: f.paused.append("transfers: I5 is broken"), "new transfers are stopped"),
        (lambda _, f: f.alarms.append("contradiction"), "a critical alert: contradiction"),
    ],
)
def test_every_wrong_result_is_reported(spoil: Spoil, said: str) -> None:
    asks, found = fair()
    spoil(asks, found)
    wrong = judge(asks, DEPOSITS, found)
    assert any(said in text for text in wrong), wrong


def test_a_thousand_complaints_are_cut_short() -> None:
    asks = [ask(f"o{n}", accepted(req_id=f"sr-{n}")) for n in range(1_000)]
    wrong = judge(asks, {}, Found())
    assert len(wrong) == 21
    assert wrong[-1] == "and 980 more"
