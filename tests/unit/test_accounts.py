"""Accounts: paths, policies, and the hash of a version."""

from __future__ import annotations

import hashlib
from typing import Any

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
    by_number,
    changed,
    check_active,
    check_name,
    check_open_path,
    check_path,
    check_policy,
    close_may_freeze,
    decode_policy,
    encode_policy,
    floor_minor,
    funding_user,
    lifted,
    plain_text,
    same_policy,
)
from bursar.model.errors import AccountClosed, AccountFrozen, InvalidEntry, InvalidName
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

    assert account.pays_from_postings is selects
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
    assert Book(name="b").admits_account("alice")


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


def test_a_changed_account_has_a_snapshot_of_its_own() -> None:
    head = Account(id=1, path="a")
    before = head.snapshot
    new = changed(head, None, status=AccountStatus.FROZEN)
    assert new is not None
    assert new.snapshot == Account(id=1, path="a", version=2, status=AccountStatus.FROZEN).snapshot != before


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


# --- names -----------------------------------------------------------------------------------------------------------


class Text(str):
    """Text of a type that no database knows."""


def test_a_path_of_another_type_of_text_is_kept_as_plain_text() -> None:
    assert (check_path(Text("a:b")), type(check_path(Text("a:b")))) == ("a:b", str)


@pytest.mark.parametrize("text", ["a\x00b", Text("a\x00b")])
def test_a_text_with_a_nul_character_is_refused(text: str) -> None:
    with pytest.raises(InvalidName, match="NUL"):
        plain_text("memo", text)


@pytest.mark.parametrize(("value", "why"), [("\ud800", "Unicode"), (7, "text is expected"), (None, "text is expected")])
def test_what_no_database_can_store_as_text_is_refused(value: object, why: str) -> None:
    with pytest.raises(InvalidName, match=why):
        plain_text("memo", value)


@pytest.mark.parametrize("name", ["main", "a-b_0", "a" * 64])
def test_a_short_name_is_admitted(name: str) -> None:
    assert check_name("scope", name) == name


@pytest.mark.parametrize("name", ["", "A", "a:b", "a b", "a\n", "a" * 65, 7])
def test_a_malformed_short_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName) as refused:
        check_name("scope", name)

    assert refused.value.what == "scope"


@pytest.mark.parametrize("path", ["held", "transit", "transit:orders"])
def test_held_and_transit_accounts_belong_to_holds_and_flows(path: str) -> None:
    """No entry from outside moves it, and `compact` does not merge its postings: each is consumed by its number
    (T36)."""
    assert by_number(path)
    with pytest.raises(InvalidEntry):
        check_open_path(path)


@pytest.mark.parametrize("path", ["held:x", "transits", "transit-x", "my:transit", "alice"])
def test_a_path_that_only_resembles_them_is_an_account_like_any_other(path: str) -> None:
    assert not by_number(path)
    assert check_open_path(path) == path


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("user:1001:funding", 1001),
        ("user:1:funding", 1),
        ("user:01:funding", None),
        ("user:x:funding", None),
        ("user:1:funding:x", None),
        ("users:1:funding", None),
    ],
)
def test_whose_funding_account_it_is(path: str, user: int | None) -> None:
    assert funding_user(path) == user


def test_held_money_is_in_every_book() -> None:
    assert Book(name="b", accounts=("user:1",)).admits_account("held")


# --- status and policy -----------------------------------------------------------------------------------------------


def test_only_an_active_account_pays_or_is_paid() -> None:
    check_active(account(ACTIVE))
    with pytest.raises(AccountFrozen, match="account a is frozen"):
        check_active(account(FROZEN))
    with pytest.raises(AccountClosed, match="account a is closed"):
        check_active(account(CLOSED))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_each_policy_is_admitted_and_is_one_kind(policy: Policy) -> None:
    one = Account(id=1, path="a", policy=policy)

    assert check_policy(policy) is policy
    assert (one.capped, one.no_overdraft) == (isinstance(policy, CappedOverdraft), isinstance(policy, NoOverdraft))


@pytest.mark.parametrize("policy", [None, "no_overdraft", NoOverdraft, {"policy": "system"}])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(InvalidName, match="is not a valid policy"):
        check_policy(policy)


@pytest.mark.parametrize("floor", ["0", "-0", "-5", "-500.00", "12.5"])
def test_a_floor_is_plain_digits(floor: str) -> None:
    """Whether it is low enough depends on nothing but the number; that is asked when an asset is at hand."""
    policy = CappedOverdraft(floor=floor, asset="USDT")

    assert check_policy(policy) is policy


@pytest.mark.parametrize("floor", ["", "x", "-5.", "-.5", "-05", "-5E+2", "-\u0665", "NaN", -5, None])
def test_a_floor_that_could_be_read_in_another_way_is_refused(floor: Any) -> None:
    with pytest.raises(InvalidName, match="is not a valid floor"):
        check_policy(CappedOverdraft(floor=floor, asset="USDT"))


def test_the_asset_of_a_floor_is_text() -> None:
    asset: Any = 7
    with pytest.raises(InvalidName, match="is not a valid asset code"):
        check_policy(CappedOverdraft(floor="-5", asset=asset))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (NoOverdraft(), NoOverdraft(), True),
        (NoOverdraft(), SystemAccount(), False),
        (CappedOverdraft("-5", "USDT"), CappedOverdraft("-5.00", "USDT"), True),
        (CappedOverdraft("-5", "USDT"), CappedOverdraft("-5", "BTC"), False),
        (CappedOverdraft("-5", "USDT"), CappedOverdraft("-5.01", "USDT"), False),
        (CappedOverdraft("-5", "USDT"), UncappedOverdraft(), False),
    ],
)
def test_policies_that_allow_the_same_are_the_same(one: Policy, other: Policy, same: bool) -> None:
    assert same_policy(one, other) is same_policy(other, one) is same


@pytest.mark.parametrize(
    ("floor", "why"),
    [
        ("x", "a number such as"),
        ("0.01", "zero or a negative"),
        ("-Infinity", "zero or a negative"),
        ("NaN", "zero or"),
    ],
)
def test_the_refusal_of_a_floor_says_why(floor: str, why: str) -> None:
    with pytest.raises(InvalidName, match=why):
        floor_minor(floor, "USDT", 6)


def test_a_floor_with_more_decimals_than_the_asset_is_refused() -> None:
    with pytest.raises(InvalidName, match="USDT has 6 decimals"):
        floor_minor("-0.0000001", "USDT", 6)
