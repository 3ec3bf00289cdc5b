"""Accounts: paths, policies, and the hash of a version."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.accounts import (
    Account,
    AccountStatus,
    Book,
    CappedOverdraft,
    Closing,
    ExternalAccount,
    NoOverdraft,
    Policy,
    SystemAccount,
    UncappedOverdraft,
    changed,
    check_path,
    close_may_freeze,
    decode_policy,
    encode_policy,
    lifted,
)
from bursar.model.errors import InvalidName
from bursar.model.money import Asset

USDT, BTC = Asset(id=1, code="USDT", precision=6), Asset(id=2, code="BTC", precision=8)
POLICIES: list[Policy] = [
    NoOverdraft(),
    CappedOverdraft(floor="-500.00", asset="USDT"),
    UncappedOverdraft(),
    SystemAccount(),
    ExternalAccount(),
]


@pytest.mark.parametrize("path", ["a", "user:1001:funding", "a-b_c:0", "a" * 128])
def test_a_path_is_admitted(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    "path", ["", ":", "a:", ":a", "a::b", "A", "a b", "a.b", "ä", "a\n", "a/b", "a" * 129, None, 7]
)
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidName):
        check_path(path)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_storage(policy: Policy) -> None:
    assert decode_policy(encode_policy(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "selects", "owes_usdt", "owes_btc", "floor"),
    [
        (POLICIES[0], True, False, False, None),
        (POLICIES[1], True, True, False, -500_000_000),
        (POLICIES[2], True, True, True, None),
        (POLICIES[3], False, True, True, None),
        (POLICIES[4], False, True, True, None),
    ],
)
def test_what_each_policy_allows(
    policy: Policy, selects: bool, owes_usdt: bool, owes_btc: bool, floor: int | None
) -> None:
    account = Account(id=1, path="a", policy=policy)

    assert account.selects is selects
    assert (account.may_owe(USDT), account.may_owe(BTC)) == (owes_usdt, owes_btc)
    assert (account.floor(USDT), account.floor(BTC)) == (floor, None)


@pytest.mark.parametrize(("floor", "minor"), [("0", 0), ("-0", 0), ("-0.000001", -1), ("-5E+2", -500_000_000)])
def test_a_floor_is_read_exactly(floor: str, minor: int) -> None:
    assert Account(id=1, path="a", policy=CappedOverdraft(floor=floor, asset="USDT")).floor(USDT) == minor


@pytest.mark.parametrize("floor", ["", "x", "1", "0.1", "-0.0000001", "NaN", "-Infinity"])
def test_a_floor_that_is_none_is_refused(floor: str) -> None:
    with pytest.raises(InvalidName):
        Account(id=1, path="a", policy=CappedOverdraft(floor=floor, asset="USDT")).floor(USDT)


def test_the_snapshot_is_the_double_hash_of_every_field_with_its_length() -> None:
    account = Account(id=9, path="a:b", version=3, policy=NoOverdraft(), status=AccountStatus.FROZEN, book="main")
    content = b"\x01"
    for field in (b"a:b", b"3", b'{"policy":"no_overdraft"}', b"frozen", b"main"):
        content += len(field).to_bytes(2, "big") + field

    assert account.snapshot == hashlib.sha256(hashlib.sha256(content).digest()).digest()


def test_the_snapshot_does_not_depend_on_the_row_number() -> None:
    assert Account(id=1, path="a").snapshot == Account(id=2, path="a").snapshot


@given(
    st.lists(
        st.builds(
            Account,
            id=st.just(1),
            path=st.sampled_from(["a", "a:b", "b"]),
            version=st.integers(1, 3),
            policy=st.sampled_from(POLICIES),
            status=st.sampled_from(AccountStatus),
            book=st.sampled_from(["", "main", "retail"]),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_snapshots_are_equal_only_for_equal_versions(accounts: list[Account]) -> None:
    for left in accounts:
        for right in accounts:
            assert (left.snapshot == right.snapshot) == (left == right)


def test_a_book_admits_what_it_lists_and_what_is_below() -> None:
    book = Book(name="b", assets=("USDT",), accounts=("user:1", "fees"))

    assert [book.admits_asset(code) for code in ("USDT", "BTC")] == [True, False]
    admitted = [book.admits_account(path) for path in ("user:1", "user:1:spot", "user:10", "user", "fees")]
    assert admitted == [True, True, False, False, True]


def test_an_empty_book_admits_all() -> None:
    assert Book(name="b").admits_asset("USDT")
    assert Book(name="b").admits_account("anybody")


# --- whose freeze it is --------------------------------------------------------------------------------------------

ACTIVE, FROZEN, CLOSED = AccountStatus.ACTIVE, AccountStatus.FROZEN, AccountStatus.CLOSED
OURS, ANOTHER = (Closing(path="a", token=token) for token in ("ours", "another"))


def account(status: AccountStatus) -> Account:
    return Account(id=7, path="a", version=3, status=status, book="b", policy=UncappedOverdraft())


@pytest.mark.parametrize(
    ("before", "closing", "after", "writes"),
    [
        (ACTIVE, None, FROZEN, True),
        (ACTIVE, None, ACTIVE, False),
        (FROZEN, None, ACTIVE, True),
        (FROZEN, None, FROZEN, False),
        (FROZEN, OURS, FROZEN, True),  # a person's freeze, while a close has frozen the account
        (FROZEN, OURS, ACTIVE, True),
        (FROZEN, OURS, CLOSED, True),
    ],
)
def test_a_change_of_status_writes_a_version(
    before: AccountStatus, closing: Closing | None, after: AccountStatus, writes: bool
) -> None:
    head = account(before)
    expected = Account(id=7, path="a", version=4, status=after, book="b", policy=UncappedOverdraft())
    assert changed(head, closing, status=after) == (expected if writes else None)


@pytest.mark.parametrize("closing", [None, OURS])
def test_a_change_of_policy_leaves_the_status(closing: Closing | None) -> None:
    head = account(FROZEN)
    assert changed(head, closing, policy=UncappedOverdraft()) is None
    new = changed(head, closing, policy=NoOverdraft())
    assert new is not None
    assert (new.version, new.status, new.policy) == (4, FROZEN, NoOverdraft())


@pytest.mark.parametrize(
    ("status", "closing", "may"), [(ACTIVE, None, True), (FROZEN, None, False), (FROZEN, ANOTHER, True)]
)
def test_a_close_makes_no_freeze_of_a_person_its_own(status: AccountStatus, closing: Closing | None, may: bool) -> None:
    assert close_may_freeze(account(status), closing) is may


@pytest.mark.parametrize("status", AccountStatus)
@pytest.mark.parametrize("closing", [None, OURS, ANOTHER])
def test_a_close_lifts_its_own_freeze_alone(status: AccountStatus, closing: Closing | None) -> None:
    new = lifted(account(status), closing, "ours")
    assert (new is not None) is (status is FROZEN and closing is OURS)
    assert new is None or (new.version, new.status) == (4, ACTIVE)
    assert lifted(None, closing, "ours") is None
