"""What a policy of withdrawals may say, what a withdrawal costs by it, and whose addresses and keys count."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.flows.payouts.checks import PRIORITIES
from bursar.flows.payouts.documents import CHAIN, ChainDocument, Ranked
from bursar.flows.withdrawals.policy import (
    ADDRESS_LIST,
    APPROVER,
    KINDS,
    LISTED_MAX,
    POLICY,
    AddressList,
    Approver,
    PriorityName,
    WithdrawalPolicy,
    fee_of,
    joined,
    keys_of,
    list_names,
    send_all,
)
from bursar.model.documents import Document, InvalidDocument
from bursar.model.errors import BursarError, PrecisionOverflow
from bursar.model.money import Asset
from bursar.rails.chain import InvalidAddress
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.tron.codec import TronCodec

USDT = Asset(code="USDT", precision=6)
UNIT = 10**6
NAME = "usdt:bsc"
KEY, OTHER_KEY = "a" * 64, "b" * 64
BOB = "0x" + "b" * 40


def policy(**fields: Any) -> WithdrawalPolicy:
    return WithdrawalPolicy(**{"asset": "USDT", "chain": "bsc", "maximum": "1000", "dual_above": "500"} | fields)


def network(kind: str) -> ChainDocument:
    some = Ranked(high=2, normal=2, low=2)
    return ChainDocument(kind=kind, chain_id=1, native="ETH", decimals=18, fee_ceilings=some, tips=some)


def put(kind: Any, name: str, body: Any, old: Any = None) -> bool:
    """As a change of documents does; whether two people are needed."""
    head = None
    if old is not None:
        head = Document(
            number=1,
            kind=kind.name,
            name=name,
            version=1,
            body=kind.write(name, old)[1],
            retired=False,
            previous=b"",
            hash=b"",
            author="ann",
            reason="",
            approved_by="bob",
            approved_reason="",
            at_us=0,
        )
    return bool(kind.judge(name, head, kind.write(name, body)[0]))


# --- documents -------------------------------------------------------------------------------------------------------


def test_every_change_needs_two_people() -> None:
    assert put(POLICY, NAME, policy())
    assert put(POLICY, NAME, policy(enabled=False), old=policy())
    assert put(ADDRESS_LIST, "bsc", AddressList())
    assert put(ADDRESS_LIST, NAME, AddressList(deny=(BOB,)))
    assert put(APPROVER, "ann", Approver(public_key=KEY))
    assert all(kind.retiring_needs_two for kind in KINDS)


@pytest.mark.parametrize(
    "fields",
    [
        {"minimum": "1000"},
        {"auto_approve_max": "500", "mandate": "small"},
        {"fee_flat": "1.5", "fee_max": "1.5", "fee_bps": 10_000},
        {"hourly_user": "10", "daily_user": "10", "hourly_all": "10", "daily_all": "10"},
        {"maximum": "340282366920938463463374607431768211456000"},  # more than fits: said when it is used
        {"cooling_s": 86_399},
        {"address_book": "off"},
        {"mandate": "m" * 128},
        {"expires_s": 60},
        {"minimum": "0." + "1" * 30},
        {"maximum": "9" * 60},
    ],
)
def test_policy_that_makes_sense_is_taken(fields: dict[str, Any]) -> None:
    put(POLICY, NAME, msgspec.to_builtins(policy()) | fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"maximum": "-1"}, "maximum is not an amount"),
        ({"maximum": "1e3"}, "maximum is not an amount"),
        ({"maximum": "1\u0660"}, "maximum is not an amount"),
        ({"maximum": ""}, "maximum is not an amount"),
        ({"minimum": " 1"}, "minimum is not an amount"),
        ({"fee_flat": "01"}, "fee_flat is not an amount"),
        ({"dual_above": ""}, "dual_above is not an amount"),
        ({"daily_all": "many"}, "daily_all is not an amount"),
        ({"maximum": "9" * 61}, "maximum is not an amount"),
        ({"minimum": "0." + "1" * 31}, "minimum has more than 30 decimals"),
        ({"maximum": "0.00"}, "maximum is zero"),
        ({"hourly_user": "0"}, "hourly_user is zero"),
        ({"minimum": "1000.000001"}, "minimum is above maximum"),
        ({"auto_approve_max": "1001", "mandate": "m", "dual_above": "2000"}, "auto_approve_max is above maximum"),
        ({"auto_approve_max": "501", "mandate": "m"}, "auto_approve_max is above dual_above"),
        ({"fee_flat": "2", "fee_max": "1.999"}, "fee_flat is above fee_max"),
        ({"hourly_user": "11", "daily_user": "10"}, "hourly_user is above daily_user"),
        ({"hourly_all": "11", "daily_all": "10"}, "hourly_all is above daily_all"),
        ({"hourly_user": "11", "hourly_all": "10"}, "hourly_user is above hourly_all"),
        ({"daily_user": "11", "daily_all": "10"}, "daily_user is above daily_all"),
        ({"fee_bps": 10_001}, "fee_bps is 10001"),
        ({"fee_bps": -1}, "fee_bps is -1"),
        ({"expires_s": 59}, "expires_s is 59"),
        ({"expires_s": 30 * 86_400 + 1}, "expires_s is"),
        ({"cooling_s": -1}, "cooling_s is -1"),
        ({"cooling_s": 86_400}, "cooling_s is not below expires_s"),
        ({"cooling_s": 1, "address_book": "off"}, "cooling_s needs the address book"),
        ({"auto_approve_max": "0.01"}, "auto_approve_max needs a mandate"),
        ({"mandate": "grüezi"}, "mandate is at most"),
        ({"mandate": "m" * 129}, "mandate is at most"),
        ({"address_book": "sometimes"}, "address_book"),
        ({"priority": "urgent"}, "priority"),
        ({"asset": "usdt"}, "asset code"),
        ({"chain": "eth"}, "has the name usdt:eth"),
        ({"asset": "USDC"}, "has the name usdc:bsc"),
    ],
)
def test_policy_that_contradicts_itself_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BursarError, match=why):
        put(POLICY, NAME, msgspec.to_builtins(policy()) | fields)


def test_chain_of_a_policy_has_a_name_that_chains_can_have() -> None:
    assert put(POLICY, f"usdt:{'c' * 48}", policy(chain="c" * 48))
    for chain in ("BSC", "c" * 49):
        with pytest.raises(BursarError, match="name of a chain"):
            put(POLICY, f"usdt:{chain}", policy(chain=chain))


def test_asset_and_chain_of_a_policy_never_change() -> None:
    old = policy(asset="USDC")  # written under this name by an older program
    with pytest.raises(InvalidDocument, match="asset and chain never change"):
        put(POLICY, NAME, policy(), old=old)


def test_priorities_are_those_of_payouts() -> None:
    assert {name.value for name in PriorityName} == set(PRIORITIES)


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("bsc", {"deny": ["b", "a"]}, "deny is not sorted"),
        ("bsc", {"allow": ["a", "a"]}, "allow is not sorted, or has an entry twice"),
        ("bsc", {"deny": [""]}, "deny: '' is no address"),
        ("bsc", {"deny": ["0x\u0430"]}, "is no address"),
        ("bsc", {"allow": ["a b"]}, "is no address"),
        ("bsc", {"allow": ["a" * 129]}, "is no address"),
        ("bsc", {"allow": [f"{i:04}" for i in range(LISTED_MAX + 1)]}, "more than 700"),
        ("BSC", {}, "name of a document|name of a chain"),
        ("USDT:bsc", {}, "not in lower case"),
        ("us/dt:bsc", {}, "asset code"),
        ("usdt:", {}, "name of a chain"),
    ],
)
def test_list_of_addresses_that_can_not_be_compared_is_refused(name: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BursarError, match=why):
        put(ADDRESS_LIST, name, fields)


def test_two_full_lists_of_addresses_fit_one_document() -> None:
    full = tuple(f"0x{i:040}" for i in range(LISTED_MAX))
    assert put(ADDRESS_LIST, "bsc", AddressList(allow=full, deny=full))
    assert put(ADDRESS_LIST, "bsc", AddressList(allow=("a" * 128,)))


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("ann", {"public_key": "A" * 64}, "64 lower-case"),
        ("ann", {"public_key": "a" * 63}, "64 lower-case"),
        ("ann", {"public_key": KEY, "chains": ["eth", "bsc"]}, "chains is not sorted"),
        ("ann", {"public_key": KEY, "assets": ["USDT", "USDT"]}, "assets is not sorted"),
        ("ann", {"public_key": KEY, "assets": ["usdt"]}, "asset code"),
        ("ann", {"public_key": KEY, "chains": ["B S C"]}, "name of a chain"),
        ("ann", {"public_key": KEY, "chains": [f"c{i:03}" for i in range(101)]}, "at most 100"),
        ("ann", {"public_key": KEY, "assets": [f"A{i:03}" for i in range(101)]}, "at most 100"),
        ("Ann", {"public_key": KEY}, "in lower case: ann"),
        ("worker", {"public_key": KEY}, "program itself"),
    ],
)
def test_approver_whose_key_or_name_is_none_is_refused(name: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BursarError, match=why):
        put(APPROVER, name, fields)


# --- fees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "minor", "fee"),
    [
        ({}, 100 * UNIT, 0),
        ({"fee_flat": "1.5"}, 100 * UNIT, 1_500_000),
        ({"fee_bps": 10}, 100 * UNIT, 100_000),
        ({"fee_flat": "1", "fee_bps": 10}, 100 * UNIT, 1_100_000),
        ({"fee_flat": "1", "fee_bps": 10, "fee_max": "1.05"}, 100 * UNIT, 1_050_000),
        ({"fee_bps": 1}, 9_999, 0),  # rounded down: never more than the rate
        ({"fee_bps": 1}, 10_000, 1),
        ({"fee_bps": 1}, 19_999, 1),
        ({"fee_bps": 10, "fee_max": "0"}, 100 * UNIT, 0),
    ],
)
def test_fee_is_flat_and_share_up_to_a_maximum(fields: dict[str, Any], minor: int, fee: int) -> None:
    assert fee_of(policy(**fields), USDT, minor) == fee


def test_fee_that_the_asset_can_not_express_is_refused_not_rounded() -> None:
    with pytest.raises(PrecisionOverflow):
        fee_of(policy(fee_flat="0.0000001"), USDT, UNIT)


fees = st.builds(
    lambda flat, bps, cap: policy(
        fee_flat=str(USDT.of_minor(flat)), fee_bps=bps, fee_max="" if cap is None else str(USDT.of_minor(flat + cap))
    ),
    st.integers(0, 5 * UNIT),
    st.integers(0, 10_000),
    st.none() | st.integers(0, 10 * UNIT),
)


@given(fees, st.integers(0, 10**30), st.integers(0, 10**30))
def test_fee_never_exceeds_the_rate_and_never_falls_with_the_amount(
    rate: WithdrawalPolicy, less: int, more: int
) -> None:
    low, high = sorted((less, more))
    assert 0 <= fee_of(rate, USDT, low) <= fee_of(rate, USDT, high)
    assert fee_of(rate, USDT, high) * 10_000 <= USDT.minor(rate.fee_flat) * 10_000 + high * rate.fee_bps
    if rate.fee_max:
        assert fee_of(rate, USDT, high) <= USDT.minor(rate.fee_max)


@given(fees, st.integers(-5, 10**14), st.sampled_from([1, 10, 10**3, 10**6]))
def test_send_all_is_the_largest_amount_that_is_covered(rate: WithdrawalPolicy, available: int, step: int) -> None:
    amount = send_all(rate, USDT, available, step)
    assert amount >= 0
    assert amount % step == 0
    assert amount == 0 or amount + fee_of(rate, USDT, amount) <= available
    more = amount + step
    assert more + fee_of(rate, USDT, more) > available


# --- lists and people ------------------------------------------------------------------------------------------------


def test_lists_are_compared_as_the_chain_writes_addresses() -> None:
    codec = EvmCodec()
    canonical = codec.check_address("bsc", BOB)
    assert canonical != BOB
    carol = codec.check_address("bsc", "0x" + "c" * 40)
    lists = joined(
        "bsc", codec, [AddressList(deny=(BOB,)), AddressList(allow=(BOB, carol)), AddressList(allow=(carol,))]
    )
    assert lists.deny == {canonical}
    assert lists.allow == (frozenset({canonical, carol}), frozenset({carol}))
    assert joined("bsc", codec, [AddressList()]).allow == ()


def test_list_with_an_address_of_another_chain_is_refused() -> None:
    """Compared as it is, it would be equal to nothing, and what is denied would be paid."""
    with pytest.raises(InvalidAddress):
        joined("tron", TronCodec(), [AddressList(deny=(BOB,))])


def test_list_is_refused_if_an_entry_is_no_address_of_its_chain() -> None:
    good = EvmCodec().check_address("bsc", BOB)
    wrong = good.swapcase().replace("0X", "0x")
    assert wrong.lower() == good.lower()
    ADDRESS_LIST.judge_beside("bsc", AddressList(allow=(good,), deny=(BOB,)), network("evm"))
    for name in ("bsc", NAME):
        for which in ("allow", "deny"):
            said = f"{which}: '{wrong}' is not an address on bsc: its checksum is wrong"
            with pytest.raises(InvalidDocument, match=re.escape(said)):
                ADDRESS_LIST.judge_beside(name, AddressList(**{which: (wrong,)}), network("evm"))
    with pytest.raises(InvalidDocument, match="is not an address on tron"):
        ADDRESS_LIST.judge_beside("tron", AddressList(deny=(good,)), network("tron"))
    ADDRESS_LIST.judge_beside("bsc", AddressList(deny=(wrong,)), network("of a program of its own"))
    assert ADDRESS_LIST.beside is not None
    assert [ADDRESS_LIST.beside(name) for name in ("bsc", NAME)] == [(CHAIN, "bsc")] * 2


def test_list_of_a_chain_whose_extra_is_missing_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bursar.rails.evm.codec", None)
    ADDRESS_LIST.judge_beside("bsc", AddressList(deny=("0x",)), network("evm"))


def test_lists_of_a_chain_and_of_an_asset_on_it_apply() -> None:
    assert list_names("USDT", "bsc") == ("bsc", "usdt:bsc")
    for name in list_names("USDT", "bsc"):
        assert put(ADDRESS_LIST, name, AddressList())


def test_approver_may_be_limited_to_many_chains_and_assets() -> None:
    chains, assets = (tuple(f"{letter}{number:03}" for number in range(100)) for letter in "cA")
    assert put(APPROVER, "ann", Approver(public_key=KEY, chains=chains, assets=assets))


def test_approver_counts_where_he_may_approve() -> None:
    def allowed(**fields: Any) -> bool:
        return bool(keys_of({"ann": Approver(public_key=KEY, **fields)}, "USDT", "bsc"))

    assert allowed()
    assert allowed(chains=("bsc", "eth"), assets=("USDT",))
    assert not allowed(active=False)
    assert not allowed(chains=("eth",))
    assert not allowed(assets=("BTC",))


def test_key_under_two_names_counts_for_neither() -> None:
    people = {
        "ann": Approver(public_key=KEY),
        "bob": Approver(public_key=OTHER_KEY),
        "carl": Approver(public_key=KEY, active=False),
    }
    assert keys_of(people, "USDT", "bsc") == {"bob": OTHER_KEY}
