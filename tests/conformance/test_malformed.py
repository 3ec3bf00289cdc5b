"""What is malformed is refused by a typed error before a row is written, the same on every engine: whatever a caller
puts where a text, a number or a policy is expected. What was accepted once must be readable for ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from tests.builders import BANK, balance, scenario, seed

from bursar import CappedOverdraft, Entry, Money, Movement, NoOverdraft, Receipt, deposit, pay
from bursar.ledger import Ledger
from bursar.model.errors import BursarError, InvalidAmount, InvalidEntry, InvalidName, Refusal, UnknownAccount

Call = Callable[[Ledger], Coroutine[Any, Any, Any]]
POLICIES: list[Any] = [
    "external",
    5,
    False,
    {"policy": "zzz"},
    NoOverdraft,
    CappedOverdraft(-500, "USDT"),  # type: ignore[arg-type]
    CappedOverdraft(None, "USDT"),  # type: ignore[arg-type]
    CappedOverdraft("-\u0665", "USDT"),
    CappedOverdraft(" -5e1_0 ", "USDT"),
    CappedOverdraft("-5e1", "USDT"),
    CappedOverdraft("5", "USDT"),
    CappedOverdraft("-0.0000001", "USDT"),
    CappedOverdraft("-5", ["USDT"]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@scenario
async def test_a_policy_that_could_not_be_read_again(ledger: Ledger, policy: Any) -> None:
    """Versions of accounts are for ever: one that can't be read would lock its money away with it."""
    await seed(ledger, "alice", "1")
    with pytest.raises(Refusal):
        await ledger.change_policy("alice", policy)
    with pytest.raises(Refusal):
        await ledger.create_account("new", policy=policy)
    assert (await ledger.account("alice")).version == 1
    with pytest.raises(UnknownAccount):
        await ledger.account("new")


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": [found]}
    return found


METADATA: list[Any] = [
    {"a": math.nan},
    {"a": [1, {"b": -math.inf}]},
    {"a": msgspec.Raw(b"nope")},
    {"a": object()},
    {"a": "\x00"},
    nested(17),
    nested(20_000),
    5,
]


@pytest.mark.parametrize("metadata", METADATA, ids=lambda value: str(value)[:40] if isinstance(value, int) else "")
@scenario
async def test_metadata_that_is_no_json(ledger: Ledger, metadata: Any) -> None:
    with pytest.raises(InvalidEntry):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", metadata=metadata))
    assert await ledger.history("alice") == []


@scenario
async def test_metadata_at_its_limits_is_read_as_it_was_written(ledger: Ledger) -> None:
    deep = nested(16)
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", metadata=deep))
    (line,) = await ledger.history("alice")
    assert line.metadata == deep


@pytest.mark.parametrize("minor", [True, 1.5, "5", None], ids=repr)
@scenario
async def test_money_that_is_no_whole_number(ledger: Ledger, minor: Any) -> None:
    with pytest.raises(InvalidAmount):
        await ledger.commit(deposit(BANK, "alice", "USDT", Money("USDT", 6, minor)))
    assert await ledger.history("alice") == []


@pytest.mark.parametrize("name", ["transit:trucks", "transit", "held"])
@scenario
async def test_an_account_that_belongs_to_holds_or_flows(ledger: Ledger, name: str) -> None:
    """Their postings are consumed by number (T36): what others put there would belong to nobody."""
    await seed(ledger, "alice", "5")
    hold = await ledger.authorize("alice", "USDT", "1")
    for attempt in (
        ledger.commit(pay("alice", name, "USDT", "1")),
        ledger.commit(pay(name, "alice", "USDT", "1")),
        ledger.authorize(name, "USDT", "1"),
        ledger.confirm(hold.id, name),
    ):
        with pytest.raises(InvalidEntry, match="belongs to"):
            await attempt
    assert await balance(ledger, "alice") == "4.000000"


@pytest.mark.parametrize("name", ["transits:1", "held:1", "heldover"])
@scenario
async def test_a_name_that_only_looks_like_theirs(ledger: Ledger, name: str) -> None:
    await ledger.create_account(name)
    await seed(ledger, name, "1")
    assert await balance(ledger, name) == "1.000000"


class Name(StrEnum):
    """Texts that are more than texts."""

    ALICE = "alice"
    KEY = "k"


@scenario
async def test_texts_of_another_class_are_texts(ledger: Ledger) -> None:
    await ledger.commit(deposit(BANK, Name.ALICE, "USDT", "1", key=Name.KEY))
    assert (await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))).replayed
    assert await balance(ledger, Name.ALICE) == "1.000000"
    assert (await ledger.account(Name.ALICE)).path == "alice"


@scenario
async def test_one_malformed_entry_of_many_is_an_error_in_its_place(ledger: Ledger) -> None:
    odd: list[Any] = [
        Entry(movements=(("bank", "alice", "USDT", "1"),)),  # type: ignore[arg-type]
        Entry(movements=5),  # type: ignore[arg-type]
        Entry(movements=(Movement(BANK, "alice", ["USDT"], "1"),)),  # type: ignore[arg-type]
        Entry(movements=(Movement(BANK, "alice", "USDT", "1"),), pins=["alice"]),  # type: ignore[arg-type]
        Entry(movements=(Movement(BANK, "alice", "USDT", "1"),), book=["main"]),  # type: ignore[arg-type]
        "an entry",
    ]
    good = deposit(BANK, "alice", "USDT", "1")
    results = await ledger.commit_many([good, *odd, deposit(BANK, "alice", "USDT", "2")])
    assert [isinstance(result, Receipt) for result in results] == [True, *[False] * len(odd), True]
    assert all(isinstance(result, Receipt | Refusal) for result in results)
    assert await balance(ledger, "alice") == "3.000000"


ODD_CALLS: dict[str, Call] = {
    "expiry 5": lambda b: b.authorize("alice", "USDT", "1", expires_in=5),  # type: ignore[arg-type]
    "expiry nothing": lambda b: b.authorize("alice", "USDT", "1", expires_in=timedelta(0)),
    "hold of a list": lambda b: b.authorize("alice", ["USDT"], "1"),  # type: ignore[arg-type]
    "void True": lambda b: b.void(True),
    "confirm text": lambda b: b.confirm("1", "bob"),  # type: ignore[arg-type]
    "envelope None": lambda b: b.envelope(None),  # type: ignore[arg-type]
    "reverse 1.5": lambda b: b.reverse(1.5),  # type: ignore[arg-type]
    "balance of a list": lambda b: b.balance("alice", ["USDT"]),  # type: ignore[arg-type]
    "postings of a list": lambda b: b.postings("alice", ["USDT"]),  # type: ignore[arg-type]
    "postings of no text": lambda b: b.postings("alice", "\ud800"),
    "balance of two lines": lambda b: b.balance("alice", "US\nDT"),
    "book of no text": lambda b: b.envelopes(book="\ud800\x00"),
    "book of a list": lambda b: b.envelopes(book=["main"]),  # type: ignore[arg-type]
    "key 5": lambda b: b.envelope_by_key(5),  # type: ignore[arg-type]
    "cursor 5": lambda b: b.events(5),  # type: ignore[arg-type]
    "cursor text": lambda b: b.events("x"),
    "limit large": lambda b: b.history("alice", limit=2**70),
    "limit negative": lambda b: b.postings("alice", limit=-1),
    "limit True": lambda b: b.events("", limit=True),
    "limit of accounts": lambda b: b.accounts("", limit=-1),
    "after text": lambda b: b.postings("alice", after="1"),  # type: ignore[arg-type]
    "before large": lambda b: b.history("alice", before=2**70),
    "status": lambda b: b.change_asset("USDT", status="x"),  # type: ignore[arg-type]
    "asset of a list": lambda b: b.change_asset(["USDT"]),  # type: ignore[arg-type]
    "book None": lambda b: b.create_account("new", book=None),  # type: ignore[arg-type]
    "book 0": lambda b: b.create_account("new", book=0),  # type: ignore[arg-type]
    "accounts of a book as one text": lambda b: b.create_book("b", accounts="user"),  # type: ignore[arg-type]
    "path of bytes": lambda b: b.account(b"alice"),  # type: ignore[arg-type]
    "no asset": lambda b: b.balance("alice"),
    "prefix of half a character": lambda b: b.accounts("\ud800"),
    "after half a character": lambda b: b.accounts("", after="a\udfff"),
    "prefix with NUL": lambda b: b.accounts("user\x00"),
    "key with NUL": lambda b: b.envelope_by_key("a\x00b"),
    "key of half a character": lambda b: b.envelope_by_key("\ud800"),
    "scope with NUL": lambda b: b.envelope_by_key("a", scope="\x00"),
    "moment as text": lambda b: b.balance("alice", "USDT", at="2026-01-01"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", ODD_CALLS)
@scenario
async def test_an_argument_of_the_wrong_kind(ledger: Ledger, call: str) -> None:
    """A typed error in one line, and nothing is written."""
    await seed(ledger, "alice", "5")
    before = await ledger.events(limit=1000)
    with pytest.raises(BursarError) as refused:
        await ODD_CALLS[call](ledger)
    assert isinstance(refused.value, Refusal)
    assert str(refused.value).isprintable()
    assert await ledger.events(limit=1000) == before


@scenario
async def test_a_floor_that_was_created_is_the_same_again(ledger: Ledger) -> None:
    policy = CappedOverdraft("-5.00", "USDT")
    made = await ledger.create_account("credit", policy=policy)
    assert await ledger.create_account("credit", policy=policy) == made


@scenario
async def test_a_balance_without_an_asset_says_what_is_missing(ledger: Ledger) -> None:
    with pytest.raises(InvalidName, match="say of which asset"):
        await ledger.balance("alice")
