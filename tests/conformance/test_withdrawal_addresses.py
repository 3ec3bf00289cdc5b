"""The address book: an address is in a user's book once, since a known time, and in that user's book alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.paper_chain import PaperChain

from bursar.audit import audit
from bursar.engine import Engine, Operators, Worker
from bursar.flows.withdrawals import addresses
from bursar.flows.withdrawals.addresses import MACHINE, USER_LENGTH_MAX, AddressBook, AddressRefused
from bursar.model.errors import UnknownRecord
from bursar.model.flow_rows import KEY_LENGTH_MAX
from bursar.rails.chain import InvalidAddress, Network

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ANN, BEN = "user-1", "user-2"
CHAINS: Any = {name: PaperChain(Network(name=name, kind="paper", chain_id=1)) for name in ("paper", "stone")}


@contextlib.asynccontextmanager
async def books(place: Place, worker: str = "local") -> AsyncIterator[AddressBook]:
    """A program with address books; when it ends, its rows must be sound."""
    async with place.bursar() as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, [], worker=worker)
        yield AddressBook(engine, CHAINS)
        await engine.finish(0)
        for finding in await audit(bursar.store):
            assert finding.ok, finding


@scenario
async def test_address_is_in_the_book_of_its_user_until_it_is_removed(place: Place) -> None:
    async with books(place) as book:
        before_us = await book.engine.store.now_us()
        made = await book.add(ANN, "paper", "@bob", "Bob", actor="user 1")
        assert made.id.startswith("ab-")
        assert (made.user, made.chain, made.address, made.label, made.state) == (ANN, "paper", "@bob", "Bob", "active")
        assert before_us <= made.added_us <= await book.engine.store.now_us()
        assert await book.since(ANN, "paper", "@bob") == made.added_us
        other = await book.add(ANN, "stone", "@bob")
        assert await book.list(ANN) == [other, made]
        assert await book.list(ANN, "paper") == [made]

        gone = await book.remove(ANN, made.id)
        assert (gone.id, gone.state) == (made.id, "removed")
        assert await book.since(ANN, "paper", "@bob") is None
        assert await book.list(ANN) == [other]
        assert await book.get(ANN, made.id) == gone
        assert await book.remove(ANN, made.id) == gone


@scenario
async def test_adding_twice_is_once_and_another_label_is_refused(place: Place) -> None:
    async with books(place) as book:
        made = await book.add(ANN, "paper", "@bob", "Bob")
        assert await book.add(ANN, "paper", "@bob", "Bob") == made
        with pytest.raises(AddressRefused, match="in the address book as 'Bob'") as refused:
            await book.add(ANN, "paper", "@bob", "Carol")
        assert refused.value.reason == "ADDRESS_EXISTS"
        assert await book.list(ANN) == [made]


@scenario
async def test_address_that_is_added_again_is_new(place: Place) -> None:
    """Else an attacker's address that was there once could be used at once."""
    async with books(place) as book:
        first = await book.add(ANN, "paper", "@bob")
        await book.remove(ANN, first.id)
        again = await book.add(ANN, "paper", "@bob", "Bob")
        assert again.id != first.id
        assert again.added_us > first.added_us
        assert await book.since(ANN, "paper", "@bob") == again.added_us
        await book.remove(ANN, first.id)  # a late repetition of what removed the first entry
        assert await book.since(ANN, "paper", "@bob") == again.added_us


@scenario
async def test_entry_of_another_user_is_not_visible(place: Place) -> None:
    async with books(place) as book:
        made = await book.add(ANN, "paper", "@bob")
        assert await book.since(BEN, "paper", "@bob") is None
        assert await book.list(BEN) == []
        for act in (book.get, book.remove):
            with pytest.raises(UnknownRecord):
                await act(BEN, made.id)
        own = await book.add(BEN, "paper", "@bob")
        assert own.id != made.id
        await book.remove(BEN, own.id)
        assert await book.since(ANN, "paper", "@bob") == made.added_us


@scenario
async def test_of_concurrent_requests_one_adds_and_all_get_its_entry(place: Place) -> None:
    async with books(place, worker="one") as one, books(place, worker="two") as two:
        found = await asyncio.gather(*(book.add(ANN, "paper", "@bob", "Bob") for book in (one, two) for _ in range(4)))
        assert {entry.id for entry in found} == {found[0].id}
        assert await two.list(ANN) == [found[0]]
        gone = await asyncio.gather(*(book.remove(ANN, found[0].id) for book in (one, two) for _ in range(4)))
        assert {entry.state for entry in gone} == {"removed"}
        assert await one.list(ANN) == []


@scenario
async def test_what_can_not_be_an_entry_is_refused(place: Place) -> None:
    async with books(place) as book:
        wrong = [
            ((ANN, "gold", "@bob", ""), "UNKNOWN_CHAIN"),
            (("", "paper", "@bob", ""), "INVALID_USER"),
            (("a/paper", "paper", "@bob", ""), "INVALID_USER"),
            (("u" * (USER_LENGTH_MAX + 1), "paper", "@bob", ""), "INVALID_USER"),
            ((ANN, "paper", "@bob", "x" * 101), "INVALID_LABEL"),
            ((ANN, "paper", "@bob", "a\nb"), "INVALID_LABEL"),
        ]
        for arguments, code in wrong:
            with pytest.raises(AddressRefused) as refused:
                await book.add(*arguments)
            assert refused.value.reason == code
        with pytest.raises(InvalidAddress):
            await book.add(ANN, "paper", "bob")
        with pytest.raises(InvalidAddress):
            await book.since(ANN, "paper", "bob")
        with pytest.raises(AddressRefused):
            await book.list("a/paper")
        longest = await book.add("u" * USER_LENGTH_MAX, "paper", "@" + "b" * 127, "x" * 100)
        assert await book.since(longest.user, "paper", longest.address) == longest.added_us
        assert USER_LENGTH_MAX + 48 + 128 + 2 == KEY_LENGTH_MAX


@scenario
async def test_book_has_a_bounded_number_of_addresses(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(addresses, "ENTRIES_MAX", 3)
        async with books(place) as book:
            found = await asyncio.gather(
                *(book.add(ANN, "paper", f"@bob{number}") for number in range(5)), return_exceptions=True
            )
            refused = [error for error in found if isinstance(error, AddressRefused)]
            assert [error.reason for error in refused] == ["TOO_MANY_ADDRESSES"] * 2
            first, *_ = await book.list(ANN)
            await book.add(BEN, "paper", "@bob0")
            await book.remove(ANN, first.id)
            await book.add(ANN, "paper", "@bob9")
            assert len(await book.list(ANN)) == 3


@scenario
async def test_worker_leaves_entries_alone_and_operators_can_remove_them(place: Place) -> None:
    async with books(place) as book:
        made = await book.add(ANN, "paper", "@bob")
        await Worker(book.engine).look()
        record = await book.engine.record(MACHINE.name, made.id)
        assert (record.state, record.due_us, record.timer_us) == ("active", None, None)  # looked at for no alarm either
        await Operators(book.engine).signal(MACHINE.name, made.id, "REMOVE", actor="carl", reason="stolen account")
        assert await book.since(ANN, "paper", "@bob") is None
