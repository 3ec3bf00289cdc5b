"""The judgement of payouts in a chaos run: every payment too many, too few or unexplained is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from bursar.chaos.chain import Paid
from bursar.chaos.paid import PaidOut, Signed, judge_payouts
from bursar.chaos.paying import MANDATE
from bursar.testbed.load import address_of
from bursar.testbed.promises import Ask, Kind, Row, Said

HOT = "0x" + "11" * 20


def ask(order: str, *said: Said) -> Ask:
    return Ask(order, 1001, "FUNDING", address_of(order), "USDT", 10, list(said))


def row(order: str, id_: str, state: str = "confirmed") -> Row:
    return Row(order, 1001, id_, "FUNDING", address_of(order), "USDT", 10, state)


def signed(order: str, id_: str, shape: str = "pay") -> Signed:
    return Signed(id_, shape, address_of(order), 10, MANDATE)


ASKS = [
    ask("paid", Said(Kind.LOST), Said(Kind.ACCEPTED, "po-1", "pending"), Said(Kind.ACCEPTED, "po-1", "confirmed")),
    ask("cancelled", Said(Kind.ACCEPTED, "po-2", "confirming")),
    ask("refused", Said(Kind.REFUSED, code="INSUFFICIENT_BALANCE")),
]
FAIR = PaidOut(
    rows=[row("paid", "po-1"), row("cancelled", "po-2", "failed")],
    replacements={"po-2-r2": "sent"},
    paid=[Paid(HOT, address_of("paid"), 10, "0xa1")],
    signed={
        "0xa1": signed("paid", "po-1"),
        "0xb1": signed("cancelled", "po-2"),
        "0xb2": signed("cancelled", "po-2", "cancel"),
    },
    on_chain={("hot-1", "USDT"): 90, ("hot-1", "ETH"): 5},
    booked={("hot-1", "USDT"): 90, ("hot-1", "ETH"): 5},
    held=0,
    log="",
)


def test_a_right_result_has_no_complaints() -> None:
    assert judge_payouts(ASKS, FAIR) == []


def but(**changes: object) -> PaidOut:
    return dataclasses.replace(FAIR, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda: but(paid=[]), "po-1 is confirmed of 10, and the chain has paid []"),
        (lambda: but(paid=FAIR.paid * 2), "and the chain has paid [10, 10]"),
        (lambda: but(paid=[Paid(HOT, address_of("paid"), 11, "0xa1")]), "has paid [11]"),
        (lambda: but(paid=[*FAIR.paid, Paid(HOT, address_of("cancelled"), 10, "0xb1")]), "po-2 is failed of 10"),
        (lambda: but(paid=[*FAIR.paid, Paid(HOT, "0xdead", 10, "0xc1")]), "has paid 0xdead, which no payout pays"),
        (lambda: but(paid=[Paid(HOT, address_of("paid"), 10, "0xb1")]), "0xb1, which the signer has not signed for it"),
        (lambda: but(signed=FAIR.signed | {"0xa1": signed("paid", "po-1", "cancel")}), "has not signed for it"),
        (lambda: but(signed=FAIR.signed | {"0xc1": signed("paid", "po-9")}), "0xc1 was signed without authorization"),
        (lambda: but(signed=FAIR.signed | {"0xc1": signed("x", "po-1")}), "0xc1 was signed without authorization"),
        (lambda: but(replacements={"po-2-r2": "sending"}), "po-2-r2 has not ended: sending"),
        (lambda: but(rows=[FAIR.rows[0], row("cancelled", "po-2", "signing")]), "has not ended: signing"),
        (lambda: but(rows=[*FAIR.rows, row("paid", "po-3", "failed")]), "paid is 2 payouts"),
        (lambda: but(rows=FAIR.rows[:1]), "cancelled was accepted and is lost"),
        (lambda: but(rows=[*FAIR.rows, row("refused", "po-3", "failed")]), "refused exists and was never"),
        (
            lambda: but(booked=FAIR.booked | {("hot-1", "ETH"): 6}),
            "hot-1 has 5 ETH on the chain, and the ledger says 6",
        ),
        (lambda: but(held=3), "3 smallest units are held"),
        (lambda: but(log="the signer's log is damaged"), "the signer's log is damaged"),
    ],
)
def test_every_wrong_result_is_reported(found: Callable[[], PaidOut], said: str) -> None:
    wrong = judge_payouts(ASKS, found())
    assert any(said in text for text in wrong), wrong
