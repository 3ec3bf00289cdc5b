"""Many addresses and many arrivals: what a poll and a judgement ask of the database does not grow with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.arriving import CONTRACT, UNIT, Intake, intake
from tests.builders import Place, scenario
from tests.till import Town

from bursar.engine import Engine
from bursar.flows.payouts import derived
from bursar.flows.payouts.derived import OwnAddresses
from bursar.model.accounts import ExternalAccount, NoOverdraft, Policy
from bursar.model.errors import InvalidName
from bursar.store.sql import bring

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
bring("tests")


async def behind_back(c: Intake, name: str, *args: Any) -> None:
    async with c.till.ledger.store.transaction() as tables:
        await tables.session.rows(name, *args)


def counted(c: Intake) -> Counter[str]:
    """How often each statement is read from now on, in reads that each stand alone."""
    session, found = c.till.ledger.store.read.session, Counter[str]()
    rows = session.rows

    async def count(name: str, *args: Any) -> Sequence[Any]:
        found[name] += 1
        return await rows(name, *args)

    session.rows = count  # type: ignore[method-assign]
    return found


@scenario
async def test_an_address_is_scanned_whose_number_was_taken_long_before_it_was_issued(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "PAGE", 2)
    town = Town()
    async with intake(place, town) as c:
        for user in range(1, 7):
            await c.address(user)
        await c.scan()
        await behind_back(c, "age_addresses")
        await c.scan()  # all of these are known, and old
        address, _ = await c.address(7), await c.address(8)
        await behind_back(c, "renumber_address", "dep-7", -7)
        hash_ = town.chain.give(address, 5 * UNIT, CONTRACT)
        await c.scan()
        assert (await c.judge(hash_)).state == "credited"


@scenario
async def test_old_addresses_are_not_read_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "PAGE", 2)
    async with intake(place, Town()) as c:
        for user in range(1, 8):
            await c.address(user)
        wallets = c.till.payouts.out.wallets.derived
        first = counted(c)
        assert len(await wallets.of_chain("paper")) == 7
        assert (first["addresses_issued"], first["addresses_by_number"]) == (4, 4)
        again = counted(c)
        await wallets.of_chain("paper")
        assert again["addresses_by_number"] == 0  # they are recent, and known
        await behind_back(c, "age_addresses")
        await wallets.of_chain("paper")
        later = counted(c)
        assert len(await wallets.of_chain("paper")) == 7
        assert later == {"addresses_issued": 1} | ({"clock_now": 1} if place.engine == "postgres" else {})


@scenario
async def test_arrivals_that_are_judged_together_are_read_together(place: Place) -> None:
    async def reads(c: Intake, users: range) -> Counter[str]:
        given = [c.till.town.chain.give(await c.address(user), 5 * UNIT, CONTRACT) for user in users]
        await c.scan()
        records = [await c.till.engine.record("arrivals", c.id_of(hash_)) for hash_ in given]
        found = counted(c)
        await asyncio.gather(*(c.till.engine.step(record) for record in records))
        assert [(await c.funds(user)) for user in users] == [5 * UNIT] * len(users)
        return found

    async with intake(place, Town()) as c:
        few, many = await reads(c, range(1, 4)), await reads(c, range(4, 44))
        of_balances = ("heads_by_path", "assets", "balances", "cached_accounts", "balances_of")  # of `funds`, above
        for name in many.keys() - set(of_balances):
            assert many[name] <= few[name] + 2, name


@scenario
async def test_many_arrivals_at_a_wallet_that_is_being_swept_are_credited_without_a_conflict(place: Place) -> None:
    async with intake(place, Town()) as c:
        first = await c.arrive(60 * UNIT)
        assert await c.till.engine.get("sweeps", first.id) is not None
        address = await c.address(1)
        given = [c.till.town.chain.give(address, UNIT, CONTRACT, f"@sender{number}") for number in range(30)]
        await c.scan()
        records = [await c.till.engine.record("arrivals", c.id_of(hash_)) for hash_ in given]
        tasks = [Engine.drive(c.till.engine, record) for record in records]
        done = await asyncio.gather(*tasks)
        assert {record.state for record in done} == {"credited"}
        assert await c.funds() == 90 * UNIT


@scenario
async def test_accounts_are_made_together_and_those_that_are_there_stay_as_they_are(place: Place) -> None:
    async with intake(place, Town()) as c:
        ledger = c.till.ledger
        there = await ledger.account("user:1:funding")
        wanted: dict[str, Policy] = {"user:1:funding": ExternalAccount(), "b": NoOverdraft(), "a": ExternalAccount()}
        await asyncio.gather(*(ledger.require_accounts(wanted) for _ in range(3)))
        assert await ledger.account("user:1:funding") == there
        assert (await ledger.account("a")).policy == ExternalAccount()
        assert [len(await ledger.account_history(path)) for path in ("a", "b")] == [1, 1]
        with pytest.raises(InvalidName):
            await ledger.require_accounts({"c": NoOverdraft(), "no path": NoOverdraft()})
        assert [one.path for one in await ledger.accounts("c")] == []


def test_addresses_of_documents_and_of_users_are_one_mapping_that_copies_nothing(mode: str) -> None:
    known = {"@dep1": derived.Owned(wallet="dep-1", user=1), "@hot": derived.Owned(wallet="dep-2", user=2)}
    own = OwnAddresses({"@hot": "hot"}, known)
    assert dict(own) == {"@hot": "hot", "@dep1": "dep-1"}
    known["@dep3"] = derived.Owned(wallet="dep-3", user=3)
    assert own["@dep3"] == "dep-3"
    assert own.get("@none") is None
    assert len(own) == 3
