"""The signer's policy: what is read from the file, and that a wrong file is refused whole, with every problem named."""

from __future__ import annotations

import re

import pytest
from tests import signing
from tests.signing import COLD, HOT, POLICY, public_half

from bursar.signer.errors import PolicyRefused
from bursar.signer.policy import Right, parse


def problems(text: str) -> str:
    with pytest.raises(PolicyRefused) as refused:
        signing.policy(text)
    return refused.value.problems


def test_a_policy_is_read() -> None:
    found = signing.policy()
    assert found.name == "hot"
    assert found.chains["bsc"].fee_max == 2_000_000
    assert found.chains["bsc"].cancel_fee_max == 1_000_000
    assert found.wallets["hot"].address == HOT
    assert found.own_addresses("bsc") == {HOT, COLD}
    assert found.assets["bsc", "USDT"].dual_above == 1_000
    assert found.mandates["sweep"].own_wallets
    assert found.callers["viewer"].rights == {Right.STATUS}
    assert found.unhalt_people == ("ann", "ben", "carol")
    assert len(found.digest) == 64


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("chain_id = 56", "chain_id = -1", "chains.bsc.chain_id: a whole number"),
        ("chain_id = 56", "chain_id = true", "chains.bsc.chain_id: a whole number"),
        ("chain_id = 56", "", "chains.bsc.chain_id: it is missing"),
        ("chain_id = 56", "chain_id = 56\ndepth = -1", "chains.bsc.depth: a whole number"),
        ("chain_id = 56", 'chain_id = 56\nfinalized_tag = "no"', "chains.bsc.finalized_tag: true or false"),
        ("chain_id = 56", 'chain_id = 56\ngenesis = "0x12"', "chains.bsc.genesis: 0x and 64"),
        ('name = "hot"\n', 'name = "hot"\nnodes_file = 7\n', "policy.nodes_file: text is expected"),
        ('kind = "evm"', 'kind = "btc"', "chains.bsc.kind: no codec for 'btc'"),
        ("fee_max = 2_000_000", "fee_max = 2.5", "chains.bsc.fee_max"),
        ("fee_max = 2_000_000", 'fee_max = "2e6"', "chains.bsc.fee_max"),
        ('cancel_fee_max = "1000000"', "", "chains.bsc.cancel_fee_max: it is missing"),
        (f'address = "{HOT}"', 'address = "0x1"', "wallets.hot.address"),
        (f'address = "{COLD}"', f'address = "{HOT}"', "two have the same chain and address"),
        ('key = "main"', 'key = "main"\npath = "44/60"', "wallets.hot.path"),
        (public_half("ben"), public_half("ann"), "two have the same public key"),
        (public_half("ben"), "abc", "approvers.ben.public_key"),
        ("[approvers.ben]", '[approvers."a.nn"]', "could be one person"),
        ("[approvers.ben]", "[approvers.Ben]", "write 'Ben' in lower case"),
        ("payment_max = 5_000\ndual", "dual", "assets.bsc.USDT.payment_max: it is missing"),
        ("decimals = 18\npayment_max = 5_000", "payment_max = 5_000", "assets.bsc.USDT.decimals: it is missing"),
        ("[assets.bsc.BNB]\ncontract", "[assets.eth.BNB]\ncontract", "assets.eth: there is no such chain"),
        ('asset = "USDT"\npayment_max = 900', 'asset = "DAI"\npayment_max = 900', "no asset DAI on bsc"),
        ("own_wallets = true", "own_wallets = 1", "mandates.sweep.own_wallets: true or false"),
        ('rights = ["status"]', 'rights = ["admin"]', "callers.viewer.rights: 'admin' is none of"),
        ("[callers.viewer]", "[callers.local]", "callers.local: the command on the signer's own host"),
        ("viewer.secret", "payouts.secret", "two have the same secret_file"),
        ('people = ["ann", "ben", "carol"]', 'people = ["ann"]', "two people at least"),
        ('people = ["ann", "ben", "carol"]', 'people = ["ann", "a-nn"]', "could be one person"),
        ('people = ["ann", "ben", "carol"]', "", "unhalt: say who"),
        ('name = "hot"', 'name = "Hot Wallet"', "name: a name is expected"),
        ('name = "hot"', 'name = "hot"\nspeed = 9', "speed: there is no such setting"),
        ("[mandates.sweep]", "[mandates.sweep]\nlimit = 1", "mandates.sweep.limit: there is no such setting"),
    ],
)
def test_a_wrong_policy_is_refused(old: str, new: str, said: str) -> None:
    assert old in POLICY
    assert said in problems(POLICY.replace(old, new))


def test_every_problem_is_named() -> None:
    """An operator who starts a signer at night wants to hear all of it at once."""
    text = POLICY.replace("chain_id = 56", "chain_id = 0.5").replace('rights = ["status"]', 'rights = ["fly"]')
    text = text.replace("[approvers.ben]", '[approvers."a.nn"]')
    assert len(re.findall(r"; ", problems(text))) >= 2


def test_what_is_not_toml_is_refused() -> None:
    assert "not TOML" in problems("name = ")
    with pytest.raises(PolicyRefused):
        parse("policy.toml", b"\xff", signing.codecs)


def test_a_halt_lifted_by_approvals_needs_two_approvers() -> None:
    text = POLICY.replace('people = ["ann", "ben", "carol"]', "approvals = true")
    assert signing.policy(text).unhalt_people == ()
    alone = re.sub(r"\[approvers\.ben\]\npublic_key = .*\n", "", text)
    assert "two approvers" in problems(alone)
