"""The store's accounts: versions that are appended, never changed, and never out of turn."""

from __future__ import annotations

import pytest
from tests.builders import scenario

from bursar.model.accounts import Account, AccountStatus, CappedOverdraft, UncappedOverdraft
from bursar.store import Store


async def create(store: Store, path: str) -> Account:
    async with store.transaction() as unit:
        account = Account(id=await unit.accounts.take_number(), path=path)
        assert await unit.accounts.append(account) == 1
    return account


def successor(account: Account, version: int, status: AccountStatus = AccountStatus.FROZEN) -> Account:
    return Account(id=account.id, path=account.path, version=version, policy=account.policy, status=status)


@scenario
async def test_create_and_read(store: Store) -> None:
    policy = CappedOverdraft(floor="-500.00", asset="USDT")
    written = Account(id=77, path="user:1:funding", policy=policy, book="retail")
    async with store.transaction() as unit:
        await unit.accounts.append(written)

    assert await store.read.accounts.heads(["user:1:funding"]) == {"user:1:funding": written}


@scenario
async def test_every_number_is_taken_once(store: Store) -> None:
    numbers = [await store.single().accounts.take_number() for _ in range(5)]

    assert len(set(numbers)) == 5


@scenario
async def test_a_duplicate_path_is_not_written(store: Store) -> None:
    first = await create(store, "alice")

    assert await store.single().accounts.append(Account(id=first.id + 1, path="alice")) == 0
    assert await store.read.accounts.heads(["alice"]) == {"alice": first}


@scenario
async def test_a_missing_account_is_missing(store: Store) -> None:
    assert await store.read.accounts.heads(["nobody"]) == {}
    assert await store.read.accounts.heads_by_id([4711]) == {}
    assert await store.read.accounts.history("nobody") == []


@scenario
async def test_batch_read_returns_those_that_are_there(store: Store) -> None:
    alice, bob = await create(store, "alice"), await create(store, "bob")

    assert await store.read.accounts.heads(["bob", "nobody", "alice"]) == {"alice": alice, "bob": bob}
    assert await store.read.accounts.heads_by_id([bob.id, 4711, alice.id]) == {alice.id: alice, bob.id: bob}


@scenario
async def test_an_appended_version_becomes_the_head(store: Store) -> None:
    first = await create(store, "alice")
    second = successor(first, 2)

    assert await store.single().accounts.append(second) == 1
    assert await store.read.accounts.heads(["alice"]) == {"alice": second}


@scenario
async def test_a_gap_between_versions_is_refused(store: Store) -> None:
    first = await create(store, "alice")

    assert await store.single().accounts.append(successor(first, 3)) == 0
    assert await store.read.accounts.heads(["alice"]) == {"alice": first}


@scenario
async def test_a_first_version_above_one_is_refused(store: Store) -> None:
    assert await store.single().accounts.append(Account(id=9, path="alice", version=2)) == 0
    assert await store.read.accounts.heads(["alice"]) == {}


@scenario
async def test_a_duplicate_version_is_refused(store: Store) -> None:
    first = await create(store, "alice")
    await store.single().accounts.append(successor(first, 2))

    assert await store.single().accounts.append(successor(first, 2, AccountStatus.CLOSED)) == 0
    assert (await store.read.accounts.heads(["alice"]))["alice"].status is AccountStatus.FROZEN


@scenario
async def test_history_is_every_version_oldest_first(store: Store) -> None:
    first = await create(store, "alice")
    versions = [first, successor(first, 2), successor(first, 3, AccountStatus.ACTIVE)]
    for version in versions[1:]:
        await store.single().accounts.append(version)

    history = await store.read.accounts.history("alice")

    assert [found.account for found in history] == versions
    assert history[0].at_us <= history[1].at_us <= history[2].at_us


@scenario
async def test_exact_versions_stay_readable(store: Store) -> None:
    first = await create(store, "alice")
    await store.single().accounts.append(successor(first, 2))

    assert await store.read.accounts.versions([(first.id, 1), (first.id, 9)]) == {(first.id, 1): first}


@scenario
async def test_list_is_by_path_from_a_prefix_in_pages(store: Store) -> None:
    """A prefix is an account and all below it: not whatever begins with the same letters."""
    for path in ("user:2", "user:1:spot", "user:1", "user:10", "user:1-x", "user1", "user-1", "usher", "vault"):
        await create(store, path)

    async def paths(prefix: str, after: str = "") -> list[str]:
        return [a.path for a in await store.read.accounts.list(prefix, after, limit=2)]

    assert await paths("user:1") == ["user:1", "user:1:spot"]
    assert await paths("user:1", "user:1") == ["user:1:spot"]
    assert await paths("user:1", "user:1:spot") == []
    assert await paths("user") == ["user:1", "user:1-x"]
    assert await paths("user", "user:1-x") == ["user:10", "user:1:spot"]
    assert await paths("nobody") == []
    await create(store, "user")
    assert (await paths("user"))[0] == "user"


@scenario
async def test_list_shows_heads_only(store: Store) -> None:
    first = await create(store, "alice")
    await store.single().accounts.append(successor(first, 2))

    assert await store.read.accounts.list("alice") == [successor(first, 2)]


@pytest.mark.parametrize("policy", [CappedOverdraft(floor="-0.5", asset="BTC"), UncappedOverdraft()])
@scenario
async def test_a_policy_comes_back_as_it_was(store: Store, policy: CappedOverdraft | UncappedOverdraft) -> None:
    await store.single().accounts.append(Account(id=77, path="alice", policy=policy))

    assert (await store.read.accounts.heads(["alice"]))["alice"].policy == policy
