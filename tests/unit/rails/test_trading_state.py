"""The state: every operation, every refusal, remembered answers, floors; against a model that is only sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rails.desk import cancel, deposit, prune, refund, run, state_of, withdraw

from bursar.model.outcome import Outcome
from bursar.rails.trading import snapshots
from bursar.rails.trading.frames import decode, encode
from bursar.rails.trading.history import Named
from bursar.rails.trading.rules import CORE_REFUSALS, U64_MAX, UNSURE, Code, Op, Status, operation_id, outcome_of
from bursar.rails.trading.state import CoreState


def do(state: CoreState, *items: Named) -> list[Code]:
    codes, _ = run(state, items)
    return [Code(code) for code in codes]


def held(state: CoreState, user: int = 1, asset: str = "USDT") -> tuple[int, int]:
    return {code: (available, frozen) for code, available, frozen in state.balances(user)}.get(asset, (0, 0))


def move(op: Op, id_: int, amount: int, user: int = 1, other: int = 0) -> Named:
    return (int(op), id_, user, "USDT", amount, other)


# --- operations


def test_deposit_and_withdraw_move_what_is_available_and_open_accounts_lazily() -> None:
    state = CoreState()
    assert state.balances(1) == []
    assert do(state, deposit(10), withdraw(11, amount=30)) == [Code.OK, Code.OK]
    assert held(state) == (70, 0)
    assert do(state, withdraw(12, amount=70)) == [Code.OK]
    assert held(state) == (0, 0)


def test_lock_unlock_and_settle_keep_the_total() -> None:
    state = CoreState()
    do(state, deposit(10), move(Op.LOCK, 11, 60), move(Op.UNLOCK, 12, 10), move(Op.SETTLE, 13, 50, other=2))
    assert (held(state, 1), held(state, 2)) == ((50, 0), (50, 0))
    assert state.totals() == [("USDT", 100)]


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (withdraw(20, amount=101), Code.INSUFFICIENT_BALANCE),
        (withdraw(20, user=9, amount=1), Code.INSUFFICIENT_BALANCE),
        (withdraw(20, asset="BTC", amount=1), Code.INSUFFICIENT_BALANCE),
        (move(Op.LOCK, 20, 101), Code.INSUFFICIENT_BALANCE),
        (move(Op.UNLOCK, 20, 1), Code.INSUFFICIENT_FROZEN),
        (move(Op.SETTLE, 20, 1, other=2), Code.INSUFFICIENT_FROZEN),
        (deposit(20, amount=0), Code.INVALID_AMOUNT),
        (withdraw(20, amount=0), Code.INVALID_AMOUNT),
        (move(Op.LOCK, 20, 0), Code.INVALID_AMOUNT),
        (deposit(20, asset="US DT"), Code.INVALID_ASSET),
        (deposit(20, asset=""), Code.INVALID_ASSET),
        (deposit(20, asset="A" * 17), Code.INVALID_ASSET),
        (deposit(20, amount=U64_MAX - 99), Code.OVERFLOW),
        (deposit(20, user=3, amount=1), Code.ACCOUNT_FROZEN),
        (withdraw(20, user=3, amount=1), Code.ACCOUNT_FROZEN),
        (move(Op.LOCK, 20, 1, user=3), Code.ACCOUNT_FROZEN),
        (deposit(20, user=4, amount=1), Code.ACCOUNT_DISABLED),
        (withdraw(20, user=4, amount=1), Code.ACCOUNT_DISABLED),
    ],
)
def test_a_refusal_moves_nothing_and_is_remembered(item: Named, code: Code) -> None:
    """Refusals are durable outcomes too (T8): when the reason is gone, the same id is still refused."""
    state = CoreState()
    do(state, deposit(10), deposit(5, user=3), deposit(6, user=4))
    state.set_status(3, Status.FROZEN)
    state.set_status(4, Status.DISABLED)
    before = [held(state, user) for user in (1, 2, 3, 4)]
    assert do(state, item) == [code]
    assert outcome_of(code) is Outcome.EXPLICIT_FAIL
    assert [held(state, user) for user in (1, 2, 3, 4)] == before
    for user in (3, 4):
        state.set_status(user, Status.ACTIVE)
    do(state, deposit(30, amount=1000), withdraw(31, amount=0), move(Op.LOCK, 32, 50))
    assert do(state, item) == [code]


def test_settling_with_oneself_is_refused() -> None:
    state = CoreState()
    do(state, deposit(10), move(Op.LOCK, 11, 60))
    assert do(state, move(Op.SETTLE, 12, 10, other=1)) == [Code.SAME_ACCOUNT]


def test_what_has_happened_outside_is_booked_whatever_the_status() -> None:
    """Unlocks, settlements and refunds are never stopped by a freeze (T15, T35)."""
    state = CoreState()
    do(state, deposit(10), withdraw(11, amount=40), move(Op.LOCK, 12, 60))
    state.set_status(1, Status.DISABLED)
    state.set_status(2, Status.FROZEN)
    done = do(state, refund(11, amount=40), move(Op.UNLOCK, 13, 10), move(Op.SETTLE, 14, 50, other=2))
    assert done == [Code.OK] * 3
    assert (held(state, 1), held(state, 2)) == ((50, 0), (50, 0))


def test_an_unknown_operation_does_nothing() -> None:
    state = CoreState()
    codes = do(state, (0, 1, 1, "USDT", 1, 0), (99, 1, 1, "USDT", 1, 0), (int(Op.DEPOSIT), 2, 1, "USDT", 1, 7))
    assert codes == [Code.BAD_OPERATION] * 3
    assert state.sequence == 0
    assert state.drain() == []


# --- idempotency


@pytest.mark.parametrize("op", [Op.DEPOSIT, Op.WITHDRAW, Op.LOCK, Op.UNLOCK, Op.SETTLE, Op.REFUND])
def test_the_same_operation_twice_happens_once_and_says_the_same(op: Op) -> None:
    """Withdraw, deposit, refund each called twice, in one batch and later."""
    state = CoreState()
    do(state, deposit(1, amount=1000), move(Op.LOCK, 2, 100), withdraw(50, amount=10))
    item = move(op, 50, 10, other=2 if op is Op.SETTLE else 0)
    first = run(state, [item])
    now = (held(state, 1), held(state, 2))
    assert run(state, [item]) == first
    state.drain()
    assert run(state, [item]) == first
    assert (held(state, 1), held(state, 2)) == now


def test_a_duplicate_in_the_same_batch_happens_once() -> None:
    state = CoreState()
    codes, sequences = run(state, [deposit(10), deposit(10), deposit(10, amount=5)])
    assert (list(codes), sequences) == ([Code.OK, Code.OK, Code.MISMATCH], [1, 1, 0])
    assert held(state) == (100, 0)


def test_one_id_may_withdraw_and_be_refunded() -> None:
    """Key (req_id, op): a refund is not swallowed as already processed (T7)."""
    state = CoreState()
    assert do(state, deposit(10), withdraw(10), refund(10), refund(10)) == [Code.OK] * 4
    assert held(state) == (100, 0)


@pytest.mark.parametrize("other", [deposit(10, amount=99), deposit(10, user=2), deposit(10, asset="BTC")])
def test_other_parameters_under_the_same_id_never_execute(other: Named) -> None:
    """MISMATCH is neither success nor refusal: a refusal could give back money that is well spent."""
    state = CoreState()
    do(state, deposit(10))
    assert do(state, other) == [Code.MISMATCH]
    assert outcome_of(Code.MISMATCH) is Outcome.UNKNOWN
    assert state.totals() == [("USDT", 100)]
    assert do(state, deposit(10)) == [Code.OK]


# --- refunds


def test_a_refund_without_its_withdraw_is_refused_and_not_remembered() -> None:
    """T29, T31: only success is remembered, so that a refund which came too early can still happen."""
    state = CoreState()
    assert do(state, deposit(10), refund(11), withdraw(11), refund(11)) == [
        Code.OK,
        Code.WITHDRAW_NOT_FOUND,
        Code.OK,
        Code.OK,
    ]
    assert outcome_of(Code.WITHDRAW_NOT_FOUND) is Outcome.UNKNOWN


def test_a_refund_of_a_refused_withdraw_is_refused() -> None:
    state = CoreState()
    assert do(state, deposit(10), withdraw(11, amount=101), refund(11, amount=101))[2] is Code.WITHDRAW_NOT_FOUND
    assert held(state) == (100, 0)


@pytest.mark.parametrize("other", [refund(11, amount=39), refund(11, user=2, amount=40), refund(11, 1, 40, "BTC")])
def test_a_refund_must_be_what_was_withdrawn(other: Named) -> None:
    state = CoreState()
    do(state, deposit(10), deposit(9, asset="BTC"), withdraw(11, amount=40))
    assert do(state, other) == [Code.MISMATCH]
    assert held(state) == (60, 0)


def test_a_refund_always_fits() -> None:
    """T31: room that a withdraw leaves is kept until it can't be refunded any more."""
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=U64_MAX))
    assert do(state, deposit(12, amount=1)) == [Code.OVERFLOW]
    assert do(state, refund(11, amount=U64_MAX)) == [Code.OK]
    assert held(state) == (U64_MAX, 0)
    do(state, withdraw(13, amount=U64_MAX))
    prune(state, 14, 14)
    assert do(state, deposit(15, amount=U64_MAX)) == [Code.OK]


def test_room_of_a_refunded_withdraw_is_not_given_away_twice() -> None:
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=5), refund(11, amount=5))
    prune(state, 12, 12)
    assert do(state, deposit(13, amount=1)) == [Code.OVERFLOW]


def test_an_overflow_of_a_payee_is_refused() -> None:
    state = CoreState()
    do(state, deposit(10), move(Op.LOCK, 11, 100), deposit(12, user=2, amount=U64_MAX))
    assert do(state, move(Op.SETTLE, 13, 1, other=2)) == [Code.OVERFLOW]
    assert (held(state, 1), held(state, 2)) == ((0, 100), (U64_MAX, 0))


# --- cancel


def test_cancel_before_leaves_a_refusal_for_ever() -> None:
    """T34: a tombstone, whatever the operation's parameters would have been."""
    state = CoreState()
    assert (
        do(state, cancel(10, Op.DEPOSIT), deposit(10), deposit(10, amount=7), cancel(10, Op.DEPOSIT))
        == [Code.CANCELLED] * 4
    )
    assert outcome_of(Code.CANCELLED) is Outcome.EXPLICIT_FAIL
    assert state.totals() == []


def test_cancel_after_says_that_it_has_happened() -> None:
    state = CoreState()
    _, [at] = run(state, [deposit(10)])
    assert run(state, [cancel(10, Op.DEPOSIT)]) == (bytes([Code.OK]), [at])
    assert do(state, withdraw(11, amount=101), cancel(11, Op.WITHDRAW)) == [Code.INSUFFICIENT_BALANCE] * 2


def test_a_refund_cannot_be_cancelled() -> None:
    state = CoreState()
    assert do(state, cancel(10, Op.REFUND), cancel(10, Op.CANCEL)) == [Code.BAD_OPERATION] * 2


# --- the floor


def test_below_the_floor_nothing_is_remembered_and_nothing_executes() -> None:
    """T32: a delayed frame of a pruned operation answers UNKNOWN, and never executes."""
    state = CoreState()
    do(state, deposit(10), deposit(11), withdraw(12, amount=1))
    prune(state, 12, 12)
    assert do(state, deposit(10), deposit(9), cancel(11, Op.DEPOSIT), refund(11)) == [Code.PRUNED] * 4
    assert outcome_of(Code.PRUNED) is Outcome.UNKNOWN
    assert do(state, withdraw(12, amount=1), deposit(13)) == [Code.OK, Code.OK]
    assert held(state) == (299, 0)
    state.drain()
    assert state.history.count == 2


def test_the_floor_never_sinks_and_what_is_kept_is_kept() -> None:
    """Forced records are not pruned (T32)."""
    state = CoreState()
    do(state, deposit(10), deposit(11), withdraw(11, amount=5))
    prune(state, 12, 12, [11])
    at = state.sequence
    assert do(state, deposit(11), withdraw(11, amount=5), deposit(10)) == [Code.OK, Code.OK, Code.PRUNED]
    assert prune(state, 11, 11, [11]) is Code.OK
    assert (state.floors.room, state.floors.forget, state.sequence) == (12, 12, at)


def test_what_is_kept_below_the_floor_can_still_be_refunded_once() -> None:
    """A forced record's withdraw is remembered, so its refund cannot happen twice, and is never refused (T31, T32)."""
    state = CoreState()
    do(state, deposit(10), withdraw(11, amount=40), withdraw(12, amount=1))
    prune(state, 13, 13, [11])
    assert do(state, refund(11, amount=40), refund(11, amount=40), refund(12, amount=1)) == [
        Code.OK,
        Code.OK,
        Code.PRUNED,
    ]
    assert held(state) == (99, 0)


@pytest.mark.parametrize(
    ("room", "forget", "code"),
    [
        (13, 13, Code.OK),
        (14, 1, Code.FLOOR_TOO_HIGH),
        (14, 14, Code.FLOOR_TOO_HIGH),
        (2**63 - 1, 1, Code.FLOOR_TOO_HIGH),
        (2**63 - 1, 2**63 - 1, Code.FLOOR_TOO_HIGH),
        (11, 12, Code.BAD_OPERATION),
    ],
)
def test_a_floor_above_every_transfer_there_was_is_refused(room: int, forget: int, code: Code) -> None:
    """T32: it would make every open and every new transfer unanswerable, for ever. Other operations don't count."""
    state = CoreState()
    do(state, deposit(10), withdraw(12, amount=1000), move(Op.LOCK, 99, 1))
    state.drain()
    at = state.sequence
    assert prune(state, room, forget) is code
    if code is not Code.OK:
        assert outcome_of(code) is Outcome.UNKNOWN
        assert (state.sequence, state.floors.room, state.drain()) == (at, 1, [])
    assert do(state, deposit(13)) == [Code.OK]


def test_the_highest_id_outlives_what_is_forgotten() -> None:
    state = CoreState()
    do(state, deposit(10), deposit(20))
    prune(state, 21, 21)
    assert (state.history.count, state.highest) == (0, 20)
    assert prune(state, 22, 22) is Code.FLOOR_TOO_HIGH


# --- room


def test_the_room_floor_gives_room_back_and_answers_stay() -> None:
    """What was moved in and out no longer counts, and every operation still answers as before."""
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=U64_MAX))
    assert do(state, deposit(12, amount=1)) == [Code.OVERFLOW]
    assert prune(state, 12, 1) is Code.OK
    assert do(state, deposit(13, amount=U64_MAX)) == [Code.OK]
    assert do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=U64_MAX), deposit(12, amount=1)) == [
        Code.OK,
        Code.OK,
        Code.OVERFLOW,
    ]
    assert held(state) == (U64_MAX, 0)


def test_a_late_refund_is_executed_when_there_is_room_and_never_refused_for_good() -> None:
    """A restored database may refund what no refund was expected of any more."""
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=U64_MAX))
    prune(state, 12, 1)
    do(state, deposit(13, amount=1))
    at = state.sequence
    assert do(state, refund(11, amount=U64_MAX)) == [Code.NO_ROOM]
    assert outcome_of(Code.NO_ROOM) is Outcome.UNKNOWN
    assert state.sequence == at
    do(state, withdraw(14, amount=1))
    prune(state, 15, 1)
    assert do(state, refund(11, amount=U64_MAX), refund(11, amount=U64_MAX)) == [Code.OK, Code.OK]
    assert held(state) == (U64_MAX, 0)
    assert do(state, deposit(15, amount=1)) == [Code.OVERFLOW]


def test_a_new_withdraw_between_the_floors_is_executed_once_and_reserves_no_room() -> None:
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(20, amount=1))
    prune(state, 21, 5)
    assert do(state, withdraw(15, amount=U64_MAX - 1), withdraw(15, amount=U64_MAX - 1)) == [Code.OK, Code.OK]
    assert do(state, deposit(30, amount=U64_MAX)) == [Code.OK]
    assert held(state) == (U64_MAX, 0)


def test_a_withdraw_that_is_kept_keeps_its_room_until_it_is_kept_no_longer() -> None:
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=5), withdraw(12, amount=6))
    prune(state, 13, 1, [11])
    assert do(state, deposit(13, amount=7), deposit(14, amount=6)) == [Code.OVERFLOW, Code.OK]
    assert do(state, refund(11, amount=5)) == [Code.OK]
    do(state, withdraw(15, amount=5))
    prune(state, 16, 1, [11, 15])
    assert do(state, deposit(16, amount=1)) == [Code.OVERFLOW]
    prune(state, 16, 1)
    assert do(state, deposit(17, amount=5), deposit(18, amount=1)) == [Code.OK, Code.OVERFLOW]


def test_asking_to_keep_what_was_released_does_not_reserve_it_again() -> None:
    state = CoreState()
    do(state, deposit(10, amount=U64_MAX), withdraw(11, amount=5))
    prune(state, 12, 1)
    prune(state, 12, 1, [11])
    prune(state, 12, 1)
    assert do(state, deposit(12, amount=5), deposit(13, amount=1)) == [Code.OK, Code.OVERFLOW]


def test_the_lifetime_volume_of_an_account_has_no_limit() -> None:
    """An asset of 18 decimals: more than 2^64 smallest units move in and out, in all."""
    state, amount, moved = CoreState(), 3 * 10**18, 0
    for round_ in range(30):
        id_ = 100 * (round_ + 1)
        assert do(state, deposit(id_, amount=amount), withdraw(id_ + 1, amount=amount)) == [Code.OK, Code.OK]
        moved += amount
        assert prune(state, id_ + 2, 1) is Code.OK
        state.drain()
    assert moved > 4 * U64_MAX
    assert held(state) == (0, 0)
    assert state.history.count == 60


# --- binding


def test_a_core_is_bound_to_one_ledger_for_ever() -> None:
    state = CoreState()
    assert [state.bind("one"), state.bind("one"), state.bind("two")] == ["one"] * 3
    assert state.sequence == 1


# --- listing


def test_transfers_are_listed_behind_a_sequence_refused_ones_too() -> None:
    state = CoreState()
    do(state, deposit(10), withdraw(11, amount=500), move(Op.LOCK, 12, 1))
    state.drain()
    do(state, withdraw(13, amount=5))
    state.set_status(9, Status.FROZEN)
    do(state, refund(13, amount=5))
    state.drain()
    rows, complete_to = state.transfers(0, 100)
    assert [(row.sequence, row.op, row.id, row.code) for row in rows] == [
        (1, Op.DEPOSIT, 10, Code.OK),
        (2, Op.WITHDRAW, 11, Code.INSUFFICIENT_BALANCE),
        (4, Op.WITHDRAW, 13, Code.OK),
        (6, Op.REFUND, 13, Code.OK),
    ]
    assert complete_to == 6
    assert [row.sequence for row in state.transfers(2, 100)[0]] == [4, 6]
    rows, complete_to = state.transfers(0, 2)
    assert ([row.sequence for row in rows], complete_to) == ([1, 2], 2)
    assert state.transfers(6, 100) == ([], 6)
    assert state.transfers(99, 100) == ([], 99)


def test_listing_is_complete_and_bounded_where_transfers_are_few_among_many() -> None:
    """Whole blocks of trades are not decoded, and one request looks at a bounded number of rows."""
    state = CoreState()
    do(state, deposit(1, amount=10**9))
    for start in range(10, 60_000, 1_000):
        run(state, [move(Op.LOCK, start + n, 1) for n in range(1_000)])
        run(state, [deposit(10**6 + start)])
        state.drain()
    found: list[int] = []
    after, requests = 0, 0
    while after < state.sequence:
        rows, complete_to = state.transfers(after, 4_096)
        assert complete_to > after
        found += [row.sequence for row in rows]
        after, requests = complete_to, requests + 1
    assert found == [1, *range(1_002, 1_001 * 60 + 2, 1_001)]
    assert requests == 4


def test_what_is_decided_and_not_yet_closed_is_listed_later() -> None:
    state = CoreState()
    do(state, deposit(10))
    assert state.transfers(0, 10) == ([], 0)
    state.drain()
    assert state.transfers(0, 10)[1] == 1


def test_id_zero_is_below_every_floor() -> None:
    assert do(CoreState(), deposit(0)) == [Code.PRUNED]


# --- looking


def test_looking_up_says_what_is_on_record_and_where() -> None:
    state = CoreState()
    do(state, deposit(10), withdraw(10, amount=200))
    codes, sequences = state.lookup([(10, Op.DEPOSIT), (10, Op.WITHDRAW), (10, Op.LOCK), (0, Op.LOCK), (10, 99)])
    assert list(codes) == [Code.OK, Code.INSUFFICIENT_BALANCE, Code.NOT_FOUND, Code.PRUNED, Code.NOT_FOUND]
    assert sequences == [1, 2, 0, 0, 0]


def test_the_written_list_of_refusals() -> None:
    """T26: these codes and no others are EXPLICIT_FAIL, and each of them is remembered."""
    assert {code.name for code in CORE_REFUSALS} == {
        "INSUFFICIENT_BALANCE",
        "INSUFFICIENT_FROZEN",
        "ACCOUNT_FROZEN",
        "ACCOUNT_DISABLED",
        "INVALID_AMOUNT",
        "INVALID_ASSET",
        "OVERFLOW",
        "SAME_ACCOUNT",
        "CANCELLED",
    }
    for code in range(256):
        assert (outcome_of(code) is Outcome.EXPLICIT_FAIL) == (code in CORE_REFUSALS)
        assert (outcome_of(code) is Outcome.SUCCESS) == (code == 0)
    assert all(code < UNSURE for code in CORE_REFUSALS)


@pytest.mark.parametrize(
    "text", ["sr-0", "sr-", "17", "sr-017", "sr--1", "sr-1e3", "SR-1", "sr-\uff19", "sr-" + "9" * 19]
)
def test_an_id_that_is_not_a_snowflake_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Snowflake"):
        operation_id(text)


def test_an_id_is_the_number_in_it() -> None:
    assert operation_id("sr-1734912345678901234") == operation_id(1734912345678901234) == 1734912345678901234


# --- against a model


items = st.tuples(
    st.sampled_from([1, 1, 2, 2, 3, 4, 5, 6]),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(["USDT", "BTC", "no asset"]),
    st.sampled_from([0, 1, 5, 9, U64_MAX]),
    st.just(0),
)


@given(
    st.lists(st.lists(items, max_size=12), max_size=6),
    st.lists(st.tuples(st.integers(1, 13), st.integers(1, 13), st.sets(st.integers(1, 12), max_size=2)), max_size=6),
)
def test_replaying_the_journal_gives_the_same_state(
    groups: list[list[Named]], floors: list[tuple[int, int, set[int]]]
) -> None:
    """Whatever is decided, its frames alone make the same state again, and no account holds what was not put in."""
    state, again = CoreState(), CoreState()
    for number, group in enumerate(groups):
        first = state.sequence + 1
        given_items = [(*item[:5], 4 if item[0] == Op.SETTLE else 0) for item in group]
        codes, _ = run(state, given_items)
        assert run(state, given_items)[0] == codes or any(code >= UNSURE for code in codes)
        if number == 2:
            state.set_status(2, Status.FROZEN)
            state.bind("ledger-1")
        if number < len(floors):
            room, forget, keep = floors[number]
            prune(state, room, forget, sorted(keep))
        if state.sequence >= first:
            frame = decode(encode(state.drain(), first, state.sequence - first + 1), 0, first)
            again.replay(frame.records)
        held_still = snapshots.capture(again, "spot", "0" * 32)
        assert state_of(snapshots.restore(b"".join(snapshots.pieces(held_still))).state) == state_of(state)
    assert state_of(again) == state_of(state)
    for accounts in state.assets.values():
        for available, frozen, committed in accounts.by_user.values():
            assert 0 <= available + frozen <= committed <= U64_MAX
