"""What became of each attempt of a payout, as its record says it."""

from __future__ import annotations

import msgspec
import pytest

from bursar.flows.payouts.coverage import may_have_paid
from bursar.flows.payouts.payout import Attempt, Payout, Result, judged
from bursar.model.authorizations import Authorization, Payment
from bursar.rails.chain import Fee, Shape, Slot, Try

FEE = Fee(gas_limit=1, price=1)
PAYMENT = Payment(
    payout="po-1",
    account="alice",
    asset="USDT",
    amount="5",
    fee="0",
    chain="paper",
    chain_id=7,
    contract="",
    decimals=6,
    amount_raw="5",
    to="@bob",
)


def attempt(number: int, nonce: int, *, shape: Shape = Shape.PAY, hash_: str = "") -> Attempt:
    return Attempt(number=number, shape=shape, wallet="hot1", nonce=nonce, fee=FEE, hash=hash_ or f"h{number}")


def payout(*live: Attempt, result: str = "", replacements: tuple[int, ...] = ()) -> Payout:
    tries = tuple(one.attempted() for one in live)
    return Payout(
        payment=PAYMENT,
        authorization=Authorization(),
        native="ETH",
        tries=tries,
        replacements=replacements,
        result=Result(hash=result),
    )


DIED, SECOND, BUMP = attempt(1, 3), attempt(2, 4), attempt(3, 4)
CANCEL = attempt(3, 4, shape=Shape.CANCEL)
TOMBSTONE = Attempt(number=4, shape=Shape.PAY, wallet="hot1", nonce=5, fee=FEE, outcome="never signed")
UNSIGNED = Attempt(number=5, shape=Shape.PAY, wallet="hot1", nonce=6, fee=FEE)


@pytest.mark.parametrize(
    ("state", "body", "last", "says"),
    [
        ("confirming", payout(SECOND, result="h1", replacements=(3,)), BUMP, ["dead", "", "", "never signed", ""]),
        ("confirmed", payout(SECOND, result="h3", replacements=(3,)), BUMP, ["dead", "replaced", "final"]),
        ("confirmed", payout(SECOND, result="h2", replacements=(3,)), BUMP, ["dead", "final", "replaced"]),
        ("disputed", payout(SECOND, result="h3", replacements=(3,)), BUMP, ["dead", "replaced", "mismatch"]),
        ("failed", payout(SECOND, result="h3", replacements=(3,)), CANCEL, ["dead", "dead", "final"]),
        ("failed", payout(SECOND, result="h3", replacements=(3,)), BUMP, ["dead", "dead", "dead"]),
        ("confirmed", payout(SECOND, replacements=(3,)), BUMP, ["dead", "", ""]),  # on the word of two people
    ],
)
def test_attempts_say_what_became_of_them(state: str, body: Payout, last: Attempt, says: list[str]) -> None:
    found = judged(state, body, (DIED, SECOND, last, TOMBSTONE, UNSIGNED))
    assert [one.outcome for one in found][: len(says)] == says
    assert [one.hash for one in found] == ["h1", "h2", "h3", "", ""]


@pytest.mark.parametrize(
    ("slots", "replacements", "nonce", "may"),
    [
        ((4,), (), 4, False),  # at that block nonce 4 was free
        ((4,), (), 5, True),
        ((4,), (), None, True),  # a chain without nonces
        ((None,), (), 5, True),
        ((), (3,), 5, True),  # put back from the signer's log: its slot is not in the body
        ((), (), 5, False),
    ],
)
def test_payout_explains_what_is_missing_only_if_its_nonce_is_used(
    slots: tuple[int | None, ...], replacements: tuple[int, ...], nonce: int | None, may: bool
) -> None:
    body = payout(replacements=replacements)
    tries = tuple(Try(hash=f"h{slot}", shape=Shape.PAY, slot=Slot(nonce=slot)) for slot in slots)
    assert may_have_paid(msgspec.structs.replace(body, tries=tries), nonce) is may
