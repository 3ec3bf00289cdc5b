"""Idempotency: a key stands for one intent, and an intent happens once, whatever breaks on the way."""

from __future__ import annotations

import asyncio

import pytest
from tests.builders import (
    BANK,
    FaultyPorts,
    MovablePorts,
    Place,
    all_at_once,
    balance,
    check_sound,
    receipts,
    scenario,
    seed,
)

from bursar import Entry, Movement, deposit, pay
from bursar.ledger import Ledger
from bursar.model.errors import InsufficientFunds, InvalidName, KeyReused
from bursar.sim.split import SplitLedger
from bursar.sim.split.commit import LEASE_US


@scenario
async def test_same_key_twice_is_one_entry_and_one_receipt(ledger: Ledger) -> None:
    first = await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))
    second = await ledger.commit(deposit(BANK, "alice", "USDT", "1.00", key="k"))

    assert (first.replayed, second.replayed) == (False, True)
    assert (first.envelope, first.id) == (second.envelope, second.id)
    assert await balance(ledger, "alice") == "1.000000"


@scenario
async def test_same_key_concurrently_is_one_entry_and_one_receipt(ledger: Ledger) -> None:
    outcomes = await all_at_once(ledger, [deposit(BANK, "alice", "USDT", "1", key="k") for _ in range(10)])

    assert len(receipts(outcomes)) == 10
    assert len({(found.envelope, found.id) for found in receipts(outcomes)}) == 1
    assert [found.replayed for found in receipts(outcomes)].count(False) == 1
    assert await balance(ledger, "alice") == "1.000000"


@scenario
async def test_same_key_from_two_programs_at_once(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        outcomes = await asyncio.gather(
            *[who.commit(deposit(BANK, "alice", "USDT", "1", key="k")) for who in (ledger, other.ledger) * 4]
        )

    assert len({found.envelope for found in outcomes}) == 1
    assert await balance(ledger, "alice") == "1.000000"


@pytest.mark.parametrize(
    "other",
    [
        deposit(BANK, "alice", "USDT", "2", key="k"),
        deposit(BANK, "bob", "USDT", "1", key="k"),
        deposit(BANK, "alice", "BTC", "1", key="k"),
        deposit("fees", "alice", "USDT", "1", key="k"),
        deposit(BANK, "alice", "USDT", "1", key="k", book="retail"),
        Entry(movements=(Movement(BANK, "alice", "USDT", "1"), Movement(BANK, "bob", "USDT", "1")), key="k"),
    ],
    ids=["amount", "target", "asset", "source", "book", "one movement more"],
)
@scenario
async def test_same_key_with_another_intent_is_refused(ledger: Ledger, other: Entry) -> None:
    """Same key with another amount, and with anything else that makes it another intent."""
    await ledger.create_book("retail")
    first = await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))

    with pytest.raises(KeyReused) as refused:
        await ledger.commit(other)

    assert refused.value.envelope == first.envelope
    assert await balance(ledger, "alice") == "1.000000"


@scenario
async def test_same_key_with_another_amount_concurrently_has_one_winner(ledger: Ledger) -> None:
    outcomes = await all_at_once(ledger, [deposit(BANK, "alice", "USDT", str(n), key="k") for n in range(1, 6)])

    (winner,) = receipts(outcomes)
    assert sum(isinstance(found, KeyReused) for found in outcomes) == 4
    (movement,) = (await ledger.envelope(winner.envelope)).movements
    assert await balance(ledger, "alice") == str(movement.amount)


@scenario
async def test_metadata_and_pins_are_not_part_of_the_intent(ledger: Ledger) -> None:
    """A retry may carry a new timestamp, or look at the account anew."""
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k", metadata={"at": 1}))
    pins = {"alice": (await ledger.account("alice")).snapshot}

    again = await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k", metadata={"at": 2}, pins=pins))

    assert again.replayed
    assert (await ledger.envelope(again.envelope)).metadata == {"at": 1}


@scenario
async def test_two_identical_intents_with_two_keys_are_two_entries(ledger: Ledger) -> None:
    outcomes = await all_at_once(ledger, [deposit(BANK, "alice", "USDT", "1", key=key) for key in ("k1", "k2")])

    assert len({found.id for found in receipts(outcomes)}) == 2
    assert await balance(ledger, "alice") == "2.000000"


@scenario
async def test_two_identical_intents_without_keys_are_two_entries(ledger: Ledger) -> None:
    entry = deposit(BANK, "alice", "USDT", "1")
    first, second = await ledger.commit(entry), await ledger.commit(entry)

    assert first.key != second.key
    assert await balance(ledger, "alice") == "2.000000"


@scenario
async def test_a_replay_is_answered_whatever_has_changed_since(ledger: Ledger) -> None:
    """Money gone, account frozen: the receipt of what happened stays what it was."""
    await seed(ledger, "alice", "1")
    first = await ledger.commit(pay("alice", "bob", "USDT", "1", key="k"))
    await ledger.freeze("alice")

    again = await ledger.commit(pay("alice", "bob", "USDT", "1", key="k"))

    assert (again.replayed, again.id) == (True, first.id)


@scenario
async def test_replays_among_new_entries_of_a_program_that_has_seen_no_key_yet(ledger: Ledger, place: Place) -> None:
    """One replay could happen again (its account has money), one could not (its account is empty): neither does."""
    await seed(ledger, "alice", "10")
    await seed(ledger, "bob", "10")
    again = [pay("alice", "carol", "USDT", "1", key="could"), pay("bob", "carol", "USDT", "10", key="could-not")]
    firsts = [await ledger.commit(entry) for entry in again]

    async with place.bursar() as fresh:
        new = [pay("alice", "carol", "USDT", "1", key=f"new-{number}") for number in range(3)]
        outcomes = await all_at_once(fresh.ledger, [new[0], again[0], new[1], again[1], new[2]])

    assert [found.replayed for found in receipts(outcomes)] == [False, True, False, True, False]
    assert [found.envelope for found in receipts(outcomes) if found.replayed] == [first.envelope for first in firsts]
    assert await balance(ledger, "carol") == "14.000000"


@scenario
async def test_a_refusal_is_not_remembered_under_its_key(ledger: Ledger) -> None:
    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("alice", "bob", "USDT", "1", key="k"))
    await seed(ledger, "alice", "1")

    assert not (await ledger.commit(pay("alice", "bob", "USDT", "1", key="k"))).replayed


@scenario
async def test_a_key_from_outside_never_meets_an_internal_one(ledger: Ledger) -> None:
    """A caller whose key is the number of an envelope does not stop that envelope from being reversed."""
    (first,) = await seed(ledger, "alice", "1")
    await ledger.commit(deposit(BANK, "bob", "USDT", "1", key=str(first.envelope)))

    assert not (await ledger.reverse(first.envelope)).replayed
    assert await balance(ledger, "alice") == "0.000000"


@pytest.mark.parametrize("key", ["", "k" * 129, "a\nb", "a\x00b", "\ud800"])
@scenario
async def test_a_malformed_key_is_refused(ledger: Ledger, key: str) -> None:
    with pytest.raises(InvalidName):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", key=key))


@pytest.mark.parametrize("key", ["k" * 128, "ключ-1", "{}'\";--", "%s $1 ?1"])
@scenario
async def test_a_strange_key_is_as_good_as_any(ledger: Ledger, key: str) -> None:
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", key=key))

    assert (await ledger.commit(deposit(BANK, "alice", "USDT", "1", key=key))).replayed
    assert (await ledger.envelope_by_key(key)).key == key


@pytest.mark.parametrize(
    ("mode", "fault"),
    [("sqlite", "before"), ("sqlite", "after"), ("split", "before"), ("split", "after"), ("split", "cancel")],
    indirect=["mode"],
)
@scenario
async def test_retry_after_a_crash_at_every_step_happens_once(place: Place, fault: str) -> None:
    """The process dies before or after each call to the database; another one recovers and tries again.

    Cancelling a caller is nothing worse: in split mode it may leave a commit half done, which is then finished.
    """
    async with place.bursar() as bursar:
        await seed(bursar.ledger, "alice", "1000")
    paid, call, clock = 0, 0, MovablePorts()
    while True:
        call += 1
        dying = FaultyPorts()
        dying.ahead_us = clock.ahead_us
        entry = pay("alice", "bob", "USDT", "1", key=f"step-{call}")
        if await survives(place, dying, fault, call, entry):
            break
        clock.ahead_us += 2 * LEASE_US  # whoever died is dead by now
        async with place.bursar(clock) as bursar:
            if isinstance(bursar.ledger, SplitLedger):
                await bursar.ledger.recover()
                assert (await bursar.ledger.recover())["finished"] == 0
            await bursar.ledger.commit(entry)
            paid += 1
            assert await balance(bursar.ledger, "bob") == f"{paid}.000000"
            await check_sound(bursar.ledger)

    assert paid >= (8 if place.mode == "split" else 1)


async def survives(place: Place, ports: FaultyPorts, fault: str, call: int, entry: Entry) -> bool:
    """Commit on a machine that dies at a call; False if it did."""
    bursar = place.bursar(ports)
    await bursar.__aenter__()
    await bursar.ledger.known_assets("USDT")
    ports.arm(fault, call)
    commit, death = asyncio.ensure_future(bursar.ledger.commit(entry)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([commit, death], return_when=asyncio.FIRST_COMPLETED)
    survived = not ports.reached
    ports.arm("", 0)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await bursar.store.close()  # what the kernel does for a dead process
    return survived
