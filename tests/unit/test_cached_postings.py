"""Postings cached from one batch to the next: a decision on them is the same as one on postings just read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory import MemoryLedger

from bursar.model.accounts import Account, ExternalAccount, UncappedOverdraft
from bursar.model.entries import Intent, Leg
from bursar.model.errors import InsufficientFunds, PostingNotLive, Refusal
from bursar.model.money import Asset
from bursar.store.batch import WriteConflict, WriterCache
from bursar.store.sqlite.store import run_sync
from bursar.writer import Change, Operation
from bursar.writer.batch import REUSE_MAX, Batch, commit, prepare

USDT = Asset(id=1, code="USDT", precision=6)
PEOPLE = ("alice", "bob", "carol")
ACCOUNTS = [Account(id=10 + place, path=path, version=1) for place, path in enumerate(PEOPLE)]
ACCOUNTS += [Account(id=90, path="bank", version=1, policy=ExternalAccount())]
ACCOUNTS += [Account(id=91, path="loose", version=1, policy=UncappedOverdraft())]
PATH = {account.id: account.path for account in ACCOUNTS}

Move = tuple[str, str, int]


class Town(MemoryLedger):
    """Live postings, and processes that write batches; one whose postings are gone writes nothing and tries again."""

    def __init__(self) -> None:
        super().__init__(USDT, ACCOUNTS)
        self.conflicts = 0

    def group(self, cache: WriterCache, moves: list[Move], consume: tuple[int, ...] = ()) -> list[type[Refusal] | None]:
        """Decide and write, as a store does that is optimistic first."""
        changes = [
            Change((Intent(scope="t", key=f"{self.number}/{i}", legs=(Leg(a, b, "USDT", n),), consume=consume),))
            for i, (a, b, n) in enumerate(moves)
        ]
        while True:
            batch = Batch(cache, changes, first_read=2, reuses_postings=True)
            try:
                run_sync(commit(batch, self))
                break
            except WriteConflict:
                self.conflicts += 1
                cache.drop_postings()
        return [type(result) if isinstance(result, Refusal) else None for result in batch.results]

    def balances(self) -> dict[str, int]:
        found = dict.fromkeys(PATH.values(), 0)
        for p in self.live.values():
            found[PATH[p.account]] += p.amount
        return found


def process() -> WriterCache:
    """What a process knows when it starts."""
    return Town().cache()


AMOUNTS = st.integers(1, 12)
MOVES = st.one_of(
    st.tuples(st.sampled_from([*PEOPLE, "loose"]), st.sampled_from([*PEOPLE, "loose", "bank"]), AMOUNTS).filter(
        lambda m: m[0] != m[1]
    ),
    st.tuples(st.just("bank"), st.sampled_from(PEOPLE), AMOUNTS),
)
GROUPS = st.lists(st.tuples(st.integers(0, 1), st.lists(MOVES, min_size=1, max_size=5)), max_size=12)


@given(groups=GROUPS)
@settings(max_examples=300)
def test_decision_on_cached_postings_equals_decision_on_read_ones(groups: list[tuple[int, list[Move]]]) -> None:
    """Two processes write in turns on what each has cached; beside them the same batches, each read again."""
    cached, reading = Town(), Town()
    processes = process(), process()
    for who, moves in groups:
        assert cached.group(processes[who], moves) == reading.group(process(), moves)
        assert cached.balances() == reading.balances()


@given(groups=GROUPS)
@settings(max_examples=300)
def test_single_process_never_has_a_stale_cache(groups: list[tuple[int, list[Move]]]) -> None:
    town, cache = Town(), process()
    for _, moves in groups:
        town.group(cache, moves)
        assert town.conflicts == 0
        assert all(town.live[number] == p for number, p in cache.live.items())


def test_single_process_reads_once() -> None:
    town, cache = Town(), process()
    town.group(cache, [("bank", "alice", 100)])
    for _ in range(5):
        assert town.group(cache, [("alice", "bob", 7)]) == [None]
    assert (town.loads, town.optimistic_loads) == (1, 5)  # the deposit selects nothing
    assert town.balances()["alice"] == 65


def test_postings_spent_by_another_process_are_read_again() -> None:
    town, one, other = Town(), process(), process()
    town.group(one, [("bank", "alice", 100)])
    town.group(one, [("alice", "bob", 10)])
    town.group(other, [("alice", "bob", 10)])
    assert town.group(one, [("alice", "carol", 80)]) == [None]
    assert (town.conflicts, town.balances()["alice"]) == (1, 0)


def test_postings_of_another_process_are_read_before_a_refusal() -> None:
    town, one, other = Town(), process(), process()
    town.group(one, [("bank", "alice", 10)])
    assert town.group(one, [("alice", "bob", 11)]) == [InsufficientFunds]
    town.group(one, [("alice", "bob", 1)])
    town.group(other, [("bank", "alice", 90)])
    assert town.group(one, [("alice", "bob", 99)]) == [None]


def test_a_posting_named_by_number_is_read_before_a_refusal() -> None:
    town, one, other = Town(), process(), process()
    town.group(one, [("bank", "alice", 10)])
    mine = next(number for number, p in town.live.items() if p.amount > 0)
    town.group(other, [("alice", "bob", 10)])
    assert town.group(one, [("alice", "carol", 10)], consume=(mine,)) == [PostingNotLive]


def test_large_batch_drops_the_cache_and_the_next_small_one_reads() -> None:
    town, cache = Town(), process()
    town.group(cache, [("bank", "alice", 100)])
    town.group(cache, [("alice", "bob", 1)])
    assert cache.pools
    town.group(cache, [("alice", "carol", 2)] * (REUSE_MAX + 1))
    assert not cache.pools
    read = town.loads
    assert town.group(cache, [("alice", "bob", 65)]) == [None]
    assert (town.loads, town.balances()["alice"]) == (read + 1, 0)


def test_failed_decision_drops_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    town, cache = Town(), process()
    town.group(cache, [("bank", "alice", 100)])
    town.group(cache, [("alice", "bob", 1)])

    def breaks(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("bursar.writer.decision.envelope_row", breaks)
    with pytest.raises(RuntimeError):
        town.group(cache, [("alice", "bob", 2)])
    assert not cache.pools
    assert not cache.live


def test_cache_of_postings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriterCache, "POSTINGS_MAX", 10)
    town, cache = Town(), process()
    for _ in range(50):
        town.group(cache, [("bank", "alice", 1)])
        cache.trim()
        assert len(cache.live) <= 10
    assert town.balances()["alice"] == 50


def test_stored_refusal_is_not_decided_on_cached_postings() -> None:
    """It is stored as the answer of its operation for ever: money from another process has to be read first."""
    town, one, other = Town(), process(), process()
    town.group(one, [("bank", "alice", 10)])
    town.group(one, [("alice", "bob", 1)])
    town.group(other, [("bank", "alice", 90)])
    intent = Intent(scope="t", key="withdraw", legs=(Leg("alice", "bob", "USDT", 99),))
    operation = Operation(
        scope="t", id="1", op="withdraw", fingerprint="", refusals=frozenset({InsufficientFunds.code})
    )
    batch = Batch(one, [Change((intent,), operation=operation)], first_read=2, reuses_postings=True)
    rows = run_sync(prepare(batch, town)).writes
    assert len(rows.envelopes) == 1
    assert rows.records is not None
    assert [row[4] for row in rows.records.operations] == ["SUCCESS"]
