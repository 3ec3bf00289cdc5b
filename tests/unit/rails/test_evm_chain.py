"""Fees, dry runs, nonces, sending, balances and pages of the watcher, by nodes in memory (W11, W12, W35)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.rails.evm_fake import (
    ALICE,
    BOB,
    CODEC,
    COIN,
    GWEI,
    NORMAL,
    TOKEN,
    TOKENS,
    WALLET,
    CallRefused,
    Token,
    World,
)

from bursar.model.records import Priority
from bursar.rails.chain import (
    Balances,
    Chain,
    DeepReorganisation,
    Fee,
    FeeTooHigh,
    InvalidAddress,
    NodesUnavailable,
    Order,
    OwnTransaction,
    Shape,
    Slot,
    WalletShort,
    WouldRevert,
)
from bursar.rails.evm.chain import SCAN_BLOCKS_MAX
from bursar.rails.evm.fees import Market, gas_limit, median, offer, replacement

PAY, CANCEL = Shape.PAY, Shape.CANCEL


def quote(chain: Chain, order: Order = COIN, shape: Shape = PAY, priority: Priority = NORMAL) -> Fee:
    return asyncio.run(chain.quote(WALLET, order, shape, priority))


# --- fees ------------------------------------------------------------------------------------------------------------


def test_a_quote_offers_twice_the_base_fee_and_the_tip_of_its_priority() -> None:
    chain = World().open()
    assert quote(chain, priority=Priority.HIGH) == Fee(gas_limit=21_000, price=4 * GWEI, tip=2 * GWEI)
    assert quote(chain, priority=Priority.LOW) == Fee(gas_limit=21_000, price=3 * GWEI, tip=GWEI)


def test_a_quote_of_tokens_has_a_margin_of_gas_within_the_limit_of_the_asset() -> None:
    chain = World().open()
    assert quote(chain, TOKENS).gas_limit == 60_000
    assert quote(chain, msgspec.structs.replace(TOKENS, gas_limit_max=55_000)).gas_limit == 55_000
    with pytest.raises(WouldRevert, match="48000 gas"):
        quote(chain, msgspec.structs.replace(TOKENS, gas_limit_max=47_999))


def test_a_quote_never_passes_the_ceiling() -> None:
    world = World()
    chain = world.open()
    world.chain.base = 30 * GWEI
    assert quote(chain).price == 50 * GWEI
    world.chain.base = 49 * GWEI
    assert quote(chain) == Fee(gas_limit=21_000, price=50 * GWEI, tip=GWEI)
    world.chain.base += 1
    with pytest.raises(FeeTooHigh) as caught:
        quote(chain)
    assert (caught.value.price, caught.value.ceiling) == (50 * GWEI + 1, 50 * GWEI)


def test_a_chain_without_base_fee_is_quoted_a_gas_price() -> None:
    world = World()
    chain = world.open(legacy_fees=True)
    assert quote(chain) == Fee(gas_limit=21_000, price=GWEI)
    assert asyncio.run(chain.higher(Fee(gas_limit=21_000, price=GWEI), NORMAL)) == Fee(
        gas_limit=21_000, price=1_125_000_000
    )
    world.chain.base = 51 * GWEI
    with pytest.raises(FeeTooHigh):
        quote(chain)


@pytest.mark.parametrize("said", [None, [], {}, {"baseFeePerGas": ["0x1"]}, {"baseFeePerGas": "0x1"}])
def test_a_fee_history_that_can_not_be_read_sets_no_price(said: Any) -> None:
    world = World()
    world.nodes["b"].lies["eth_feeHistory"] = lambda params, honest: said
    chain = world.open()
    assert quote(chain).price == 3 * GWEI
    assert "malformed answer" in {node.name: node.trouble for node in asyncio.run(chain.nodes())}["b"]


def test_one_node_of_three_does_not_set_the_price() -> None:
    world = World("abc")
    world.nodes["b"].lies["eth_feeHistory"] = lambda params, honest: {"baseFeePerGas": ["0x1", hex(10**18)]}
    assert quote(world.open()).price == 3 * GWEI


@pytest.mark.parametrize(
    ("fee", "base", "expected"),
    [
        (Fee(gas_limit=7, price=8, tip=8), 0, Fee(gas_limit=7, price=9, tip=9)),
        (Fee(gas_limit=7, price=9, tip=1), 0, Fee(gas_limit=7, price=11, tip=2)),  # rounded up
        (Fee(gas_limit=7, price=1_000, tip=0), 0, Fee(gas_limit=7, price=1_125, tip=0)),
        (Fee(gas_limit=7, price=8, tip=8), 100, Fee(gas_limit=7, price=209, tip=9)),  # not below the market
        (Fee(gas_limit=7, price=8, tip=8), 1_200, Fee(gas_limit=7, price=2_000, tip=9)),  # capped, still includable
        (Fee(gas_limit=7, price=8, tip=8), 1_992, None),  # the market is above the ceiling
        (Fee(gas_limit=7, price=1_777, tip=8), 0, Fee(gas_limit=7, price=2_000, tip=9)),
        (Fee(gas_limit=7, price=1_778, tip=8), 0, None),  # an eighth more is above the ceiling
    ],
)
def test_a_replacement_offers_an_eighth_more_of_both_and_never_passes_the_ceiling(
    fee: Fee, base: int, expected: Fee | None
) -> None:
    assert replacement(fee, Market(base, False), 0, 2_000) == expected


def test_the_arithmetic_of_fees() -> None:
    assert median([5]) == 5
    assert median([5, 9]) == 9
    assert median([1, 100, 7]) == 7
    assert gas_limit(21_000, 500_000) == 21_000
    assert gas_limit(21_001, 500_000) == 26_252
    assert gas_limit(500_000, 500_000) == 500_000
    assert gas_limit(500_001, 500_000) is None
    assert offer("x", Market(0, False), 0, 10, 21_000).price == 1  # a price of nothing can't be encoded
    with pytest.raises(FeeTooHigh):
        offer("x", Market(0, False), 0, 0, 21_000)  # a ceiling that was never set


# --- dry runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (Token(reverts="Pausable: paused"), "Pausable: paused"),
        (Token(returns="0x" + 64 * "0"), "returns false"),
        (Token(returns="0x01"), "returns false"),
    ],
)
def test_a_payment_that_the_token_refuses_is_not_quoted(token: Token, why: str) -> None:
    world = World()
    world.chain.tokens[TOKEN] = token
    with pytest.raises(WouldRevert, match=why):
        quote(world.open(), TOKENS)


def test_a_token_that_returns_nothing_is_one() -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(returns="0x")
    assert quote(world.open(), TOKENS).gas_limit == 60_000


def test_an_address_without_code_is_no_token() -> None:
    """A call to it would succeed and move nothing."""
    world = World()
    with pytest.raises(WouldRevert, match="no contract"):
        quote(world.open(), msgspec.structs.replace(TOKENS, contract=BOB))
    assert all(node.usable for node in asyncio.run(world.open().nodes()))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("0x4e487b71" + 62 * "0" + "11", "panics with code 0x11"),
        ("0xe450d38c" + 64 * "0", "error 0xe450d38c"),
        ("0xe450d38c" + 128 * "0", "error 0xe450d38c"),
        ("0xe450d38c", "error 0xe450d38c"),
        ("0xe450d3", "execution reverted"),
        ("0x08c379a0" + 62 * "0" + "20" + 64 * "0", "this payment: $"),  # an empty reason
        ("0x08c379a0" + 62 * "0" + "20" + 62 * "0", "error 0x08c379a0"),  # cut off
        ("", "execution reverted"),
        ("0x08c379a0" + 62 * "0" + "20" + 64 * "f", "would refuse"),  # a reason of absurd length
    ],
)
def test_reasons_are_decoded(data: str, why: str) -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(3, "execution reverted", data)

    world = World()
    for node in world.nodes.values():
        node.lies["eth_estimateGas"] = refuse
    with pytest.raises(WouldRevert, match=why):
        quote(world.open())


def test_a_wallet_without_enough_is_our_side_and_no_refusal_of_the_payment() -> None:
    world = World()
    chain = world.open(native="BNB")
    world.chain.tokens[TOKEN] = Token(balance=TOKENS.amount - 1, reverts="transfer amount exceeds balance")
    with pytest.raises(WalletShort) as short:
        quote(chain, TOKENS)
    assert (short.value.asset, short.value.has, short.value.needs) == (TOKEN, 2_499_999, 2_500_000)
    world.chain.coin = COIN.amount + 21_000 * 3 * GWEI - 1
    with pytest.raises(WalletShort) as short:
        quote(chain)
    assert (short.value.asset, short.value.needs - short.value.has) == ("BNB", 1)
    world.chain.coin = COIN.amount - 1  # nodes refuse the dry run itself
    with pytest.raises(WalletShort):
        quote(chain)
    world.chain.tokens[TOKEN] = Token()
    world.chain.coin = 59_999 * 3 * GWEI
    with pytest.raises(WalletShort):
        quote(chain, TOKENS)


def test_a_cancellation_needs_only_its_fee() -> None:
    world = World()
    world.chain.coin = 21_000 * 3 * GWEI
    for order in (COIN, TOKENS):
        assert quote(world.open(), order, CANCEL) == Fee(gas_limit=21_000, price=3 * GWEI, tip=GWEI)


def test_a_payment_of_tokens_needs_coin_for_its_fee_alone() -> None:
    world = World()
    world.chain.coin = 60_000 * 3 * GWEI
    assert quote(world.open(), TOKENS).worst == world.chain.coin


def test_nodes_that_call_a_wallet_short_which_is_not_give_no_quote() -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32000, "insufficient funds for gas * price + value")

    world = World()
    for node in world.nodes.values():
        node.lies["eth_estimateGas"] = refuse
    with pytest.raises(NodesUnavailable, match="a, b: the wallet is said to have too little, and has enough"):
        quote(world.open())


def test_one_node_alone_does_not_refuse_a_payment() -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(3, "execution reverted")

    world = World()
    chain = world.open()
    world.nodes["b"].lies["eth_estimateGas"] = refuse
    assert quote(chain).gas_limit == 21_000
    world.nodes["a"].down = True
    with pytest.raises(NodesUnavailable, match="only b says"):
        quote(chain)


def test_a_contract_that_speaks_of_funds_is_not_our_wallet() -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32000, "execution reverted: insufficient funds in the vault")

    world = World()
    for node in world.nodes.values():
        node.lies["eth_estimateGas"] = refuse
    with pytest.raises(WouldRevert, match="in the vault"):
        quote(world.open())


@pytest.mark.parametrize("said", ["daily request count exceeded", "insufficient credits", "refunding the node"])
def test_the_trouble_of_a_node_is_no_refusal(said: str) -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32005, said)

    world = World()
    for node in world.nodes.values():
        node.lies["eth_estimateGas"] = refuse
    with pytest.raises(NodesUnavailable, match=said):
        quote(world.open())


# --- nonces and sending ----------------------------------------------------------------------------------------------


def test_the_next_nonce_is_the_highest_that_two_nodes_know_and_ignores_pools() -> None:
    world = World("abc")
    chain = world.open()
    assert asyncio.run(chain.slot(WALLET)) == Slot(nonce=0)
    for nonce in range(2):
        world.submit(world.sign(COIN, nonce=nonce))
    world.chain.mine(2)
    world.submit(world.sign(COIN, nonce=2))
    world.nodes["a"].behind = 2
    assert asyncio.run(chain.slot(WALLET)) == Slot(nonce=2)
    world.nodes["b"].lies["eth_getTransactionCount"] = lambda params, honest: "0xffff"
    world.nodes["a"].behind = 0
    assert asyncio.run(chain.slot(WALLET)) == Slot(nonce=2), "one node alone can't make us leave a gap"
    world.nodes["a"].down = world.nodes["c"].down = True
    with pytest.raises(NodesUnavailable, match=r"the nonce of .*1 nodes answer, and 2 are needed"):
        asyncio.run(chain.slot(WALLET))
    assert asyncio.run(World("a").open().slot(WALLET)) == Slot(nonce=0)


def test_one_node_that_lies_about_the_nonce_leaves_no_hole_in_a_wallets_sequence() -> None:
    world = World()
    chain = world.open()
    world.nodes["a"].eth_getTransactionCount = lambda *_: "0x7"  # type: ignore[method-assign]
    assert asyncio.run(chain.slot(WALLET)) == Slot(nonce=0)
    world.nodes["b"].down = True
    with pytest.raises(NodesUnavailable, match="1 nodes answer, and 2 are needed"):
        asyncio.run(chain.slot(WALLET))


def test_sending_goes_to_all_nodes_and_collects_their_answers() -> None:
    world = World()
    chain, signed = world.open(), world.sign(COIN)
    sent = asyncio.run(chain.send(signed.raw))
    assert sent.accepted
    assert sorted(sent.answers.values()) == ["-32000: already known", "accepted"]
    world.nodes["a"].down = True
    sent = asyncio.run(chain.send(signed.raw))
    assert sent.accepted  # "already known" is success
    assert sent.answers == {"a": "no answer (ConnectionError)", "b": "-32000: already known"}


@pytest.mark.parametrize("said", ["0x" + 64 * "1", None, 7])
def test_a_node_that_names_another_hash_has_not_accepted(said: Any) -> None:
    world = World("a")
    world.nodes["a"].lies["eth_sendRawTransaction"] = lambda params, honest: said
    sent = asyncio.run(world.open().send(world.sign(COIN).raw))
    assert not sent.accepted
    assert "another hash" in sent.answers["a"]


def test_transaction_of_another_program_is_known_by_its_sender_and_nonce_in_the_pool_and_in_a_block() -> None:
    world = World("abc")
    chain, signed = world.open(), world.submit(world.sign(COIN))
    hash_ = signed.hash
    for _ in range(2):
        found = asyncio.run(chain.sent_elsewhere(hash_.upper().replace("0X", "0x")))
        assert found is not None
        decoded = chain.codec.read(signed.raw)[0]
        assert (found.hash, found.sender, found.slot, found.fee.worst) == (
            hash_,
            WALLET,
            Slot(nonce=0),
            decoded.fee.worst,
        )
        world.chain.mine()
    assert asyncio.run(chain.sent_elsewhere("0x" + 64 * "7")) is None


def test_one_node_alone_does_not_say_who_has_sent_a_transaction() -> None:
    world = World("ab")
    chain, hash_ = world.open(), world.submit(world.sign(COIN)).hash
    world.nodes["b"].lies["eth_getTransactionByHash"] = lambda params, honest: None
    with pytest.raises(NodesUnavailable, match="only a answers"):
        asyncio.run(chain.sent_elsewhere(hash_))
    world.nodes["b"].lies["eth_getTransactionByHash"] = lambda params, honest: honest | {"from": BOB.lower()}
    with pytest.raises(NodesUnavailable):
        asyncio.run(chain.sent_elsewhere(hash_))


def test_nonce_too_low_is_an_answer_and_no_error() -> None:
    world = World()
    chain, signed = world.open(), world.submit(world.sign(COIN))
    world.chain.mine()
    sent = asyncio.run(chain.send(signed.raw))
    assert not sent.accepted
    assert all("nonce too low" in said for said in sent.answers.values())


def test_sending_without_any_node_says_so_and_raises_nothing() -> None:
    world = World()
    for node in world.nodes.values():
        node.down = True
    sent = asyncio.run(world.open().send(world.sign(COIN).raw))
    assert not sent.accepted
    assert set(sent.answers) == {"a", "b"}


# --- balances --------------------------------------------------------------------------------------------------------


def test_balances_are_of_the_final_block_at_nodes_that_agree() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(9)
    found = asyncio.run(chain.balances(WALLET, [TOKEN]))
    assert (found.block, found.block_hash) == (7, world.chain.blocks[7].hash)
    assert (found.coin, found.tokens, found.nonce) == (10**20, {TOKEN: 10**18}, 0)
    world.nodes["b"].lies["eth_getBalance"] = lambda params, honest: "0x5"
    with pytest.raises(NodesUnavailable, match=r"disagree about balances.*b says \(5"):
        asyncio.run(chain.balances(WALLET, [TOKEN]))


def test_balances_of_many_addresses_travel_together_and_are_of_one_final_block() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(9)
    addresses = [CODEC.check_address("", f"0x{number:040x}") for number in range(1, 301)]
    found = asyncio.run(chain.balances_of(addresses, [TOKEN]))
    assert list(found) == addresses
    assert {one.block for one in found.values() if isinstance(one, Balances)} == {7}
    assert found[addresses[7]] == asyncio.run(chain.balances(addresses[7], [TOKEN]))
    # Who it is, where the chain is, and three calls for each address, a hundred calls to a request; then the second.
    assert [len(node.requests) for node in world.nodes.values()] == 2 * [3 + 9 + 3]


def test_a_node_that_contradicts_about_one_address_leaves_the_others_known() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(9)
    world.nodes["b"].lies["eth_getBalance"] = lambda params, honest: "0x5" if params[0] == BOB else honest
    found = asyncio.run(chain.balances_of([ALICE, BOB], []))
    assert isinstance(found[ALICE], Balances)
    assert f"disagree about balances of {BOB}" in str(found[BOB])
    world.nodes["b"].down = True
    with pytest.raises(NodesUnavailable, match="only a answers"):
        asyncio.run(chain.balances_of([ALICE, BOB], []))
    world.nodes["b"].down = False
    world.now += 100
    with pytest.raises(InvalidAddress, match="no token"):
        asyncio.run(chain.balances_of([ALICE], [BOB]))


def test_two_nodes_against_two_agree_on_nothing() -> None:
    world = World("abcd")
    for name in "cd":
        world.nodes[name].lies["eth_getBalance"] = lambda params, honest: "0x5"
    with pytest.raises(NodesUnavailable, match="disagree"):
        asyncio.run(world.open().balances(WALLET, []))
    world.nodes["c"].lies.clear()
    assert asyncio.run(world.open().balances(WALLET, [])).coin == 10**20
    three = World("abc")
    three.nodes["b"].lies["eth_getBalance"] = lambda params, honest: "0x5"
    three.nodes["c"].lies["eth_getBalance"] = lambda params, honest: "0x6"
    with pytest.raises(NodesUnavailable, match="disagree"):
        asyncio.run(three.open().balances(WALLET, []))


def test_a_node_that_answers_everything_but_the_balance_is_missing() -> None:
    def refuse(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32000, "missing trie node")

    world = World()
    world.nodes["b"].lies["eth_getBalance"] = refuse
    with pytest.raises(NodesUnavailable, match=r"only a answers, and 2 nodes must agree \(b: .*missing trie node"):
        asyncio.run(world.open().balances(WALLET, []))


def test_the_balance_of_what_is_no_token_is_refused() -> None:
    with pytest.raises(InvalidAddress, match="no token"):
        asyncio.run(World().open().balances(WALLET, [BOB]))


def test_balances_need_two_nodes_if_two_are_configured() -> None:
    world = World()
    world.nodes["b"].down = True
    with pytest.raises(NodesUnavailable, match=r"only a answers.*b: no answer"):
        asyncio.run(world.open().balances(WALLET, []))
    assert asyncio.run(World("a").open().balances(WALLET, [])).coin == 10**20


def test_code_at_an_address() -> None:
    world = World()
    chain = world.open()
    assert asyncio.run(chain.is_contract(TOKEN))
    assert not asyncio.run(chain.is_contract(ALICE))
    world.chain.code[ALICE.lower()] = "0xef0100" + 40 * "7"  # EIP-7702: still an account with a key
    assert not asyncio.run(chain.is_contract(ALICE))
    for code in ("0xef0100" + 42 * "7", "0x" + 46 * "7"):
        world.chain.code[BOB.lower()] = code
        assert asyncio.run(chain.is_contract(BOB))
    del world.chain.code[BOB.lower()]
    world.nodes["b"].lies["eth_getCode"] = lambda params, honest: "0x6001"
    with pytest.raises(NodesUnavailable, match="disagree about code"):
        asyncio.run(chain.is_contract(BOB))  # one node alone makes no payment fail
    world.nodes["b"].lies.clear()
    world.nodes["b"].down = True
    for address in (TOKEN, BOB):
        with pytest.raises(NodesUnavailable):
            asyncio.run(chain.is_contract(address))


# --- the watcher's pages ---------------------------------------------------------------------------------------------


def own(world: World, block: int, index: int = 0) -> OwnTransaction:
    found = world.chain.blocks[block].transactions[index]
    return OwnTransaction(hash=found.signed.hash, sender=WALLET, nonce=found.decoded.slot.nonce, block=block)


class LookedUp:
    """Addresses that can't be gone through: there may be a million."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    def __contains__(self, address: object) -> bool:
        return address in self._addresses


def test_pages_list_the_final_transactions_of_our_wallets_and_stop_at_the_final_block() -> None:
    world = World()
    chain = world.open()
    for nonce in range(3):
        world.submit(world.sign(COIN, nonce=nonce))
        world.chain.mine(2)
    page = asyncio.run(chain.scan(LookedUp(WALLET), 0))
    assert (page.up_to, page.up_to_hash) == (4, world.chain.blocks[4].hash)
    assert page.transactions == (own(world, 1), own(world, 3))
    assert asyncio.run(chain.scan(frozenset({BOB}), 0)).transactions == ()
    world.chain.mine(2)
    page = asyncio.run(chain.scan(frozenset({WALLET}), page.up_to, page.up_to_hash))
    assert (page.up_to, page.transactions) == (6, (own(world, 5),))
    again = asyncio.run(chain.scan(frozenset({WALLET}), page.up_to, page.up_to_hash))
    assert (again.up_to, again.up_to_hash, again.transactions) == (6, page.up_to_hash, ())


def test_a_page_is_bounded() -> None:
    world = World()
    world.chain.mine(100)
    assert asyncio.run(world.open().scan(frozenset(), 10)).up_to == 10 + SCAN_BLOCKS_MAX


@pytest.mark.parametrize("blocks", [6, 40])
def test_a_final_block_that_is_replaced_is_noticed(blocks: int) -> None:
    world = World()
    chain = world.open()
    world.chain.mine(6)
    page = asyncio.run(chain.scan(frozenset({WALLET}), 0))
    world.chain.reorganise(5)
    world.chain.mine(blocks - 6)
    with pytest.raises(DeepReorganisation) as caught:
        asyncio.run(chain.scan(frozenset({WALLET}), page.up_to, page.up_to_hash))
    assert (caught.value.block, caught.value.expected) == (page.up_to, page.up_to_hash)


def hide(params: list[Any], honest: Any) -> Any:
    """A block without its transactions: its hash does not show it."""
    return honest | {"transactions": []} if params[1] else honest


def disguise(params: list[Any], honest: Any) -> Any:
    """Another sender."""
    return (
        honest | {"transactions": [one | {"from": BOB.lower()} for one in honest["transactions"]]}
        if params[1]
        else honest
    )


def cut(params: list[Any], honest: Any) -> Any:
    return honest | {"transactions": honest["transactions"][1:]} if params[1] else honest


def only_hashes(params: list[Any], honest: Any) -> Any:
    return honest | {"transactions": [one["hash"] for one in honest["transactions"]]} if params[1] else honest


def nothing(params: list[Any], honest: Any) -> Any:
    return None if params[1] else honest


def foreign(params: list[Any], honest: Any) -> Any:
    return honest | {"parentHash": "0x" + 64 * "3"} if params[1] else honest


@pytest.mark.parametrize("lie", [hide, disguise, cut, only_hashes, nothing, foreign])
def test_a_page_never_passes_an_incomplete_answer(lie: Callable[..., Any]) -> None:
    for names, raised in (("ab", True), ("abc", False)):
        world = World(names)
        chain = world.open()
        world.submit(world.sign(COIN))
        world.submit(world.sign(COIN, nonce=1))
        world.chain.mine(5)
        world.nodes["b"].lies["eth_getBlockByNumber"] = lie
        if raised:
            with pytest.raises(NodesUnavailable, match="b"):
                asyncio.run(chain.scan(frozenset({WALLET}), 0))
        else:
            page = asyncio.run(chain.scan(frozenset({WALLET}), 0))
            assert page.transactions[0] == own(world, 1)
            assert {n.name: n.trouble for n in asyncio.run(chain.nodes())}["b"]


def test_blocks_that_do_not_follow_each_other_are_no_page() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(6)
    for node in world.nodes.values():
        node.lies["eth_getBlockByNumber"] = foreign
    with pytest.raises(NodesUnavailable, match="is no child of the one before it"):
        asyncio.run(chain.scan(frozenset({WALLET}), 0))


def test_a_page_that_ends_at_the_final_block_ends_with_its_hash() -> None:
    """The final block was replaced between two requests."""
    world = World()
    chain = world.open()
    world.chain.mine(3)
    for node in world.nodes.values():
        node.lies["eth_getBlockByNumber"] = lambda p, honest: honest | {"hash": "0x" + 64 * "5"} if p[1] else honest
    with pytest.raises(NodesUnavailable, match="block 1 is another than a moment ago"):
        asyncio.run(chain.scan(frozenset({WALLET}), 0))


def test_a_third_node_reads_whole_blocks_only_if_two_do_not_agree() -> None:
    world = World("abc")
    chain = world.open()
    world.chain.mine(6)
    asyncio.run(chain.scan(frozenset({WALLET}), 0))
    assert [len(node.requests) for node in world.nodes.values()] == [4, 4, 3]


def test_nodes_that_have_fallen_back_do_not_move_the_cursor() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(8)
    page = asyncio.run(chain.scan(frozenset({WALLET}), 0))
    for node in world.nodes.values():
        node.behind = 3
    again = asyncio.run(chain.scan(frozenset({WALLET}), page.up_to, page.up_to_hash))
    assert (again.up_to, again.up_to_hash) == (page.up_to, page.up_to_hash)


def test_pages_get_smaller_if_blocks_are_too_large_for_one_answer_and_grow_again() -> None:
    world = World()
    world.chain.mine(60)
    honest_post, fitting = world.post, 4

    async def post(url: str, headers: Any, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        if body.count(b"true") > fitting:
            return 200, bytes(33 << 20)
        return await honest_post(url, headers, body, timeout_s)

    world.post = post  # type: ignore[method-assign]
    chain = world.open()
    for _ in range(2):
        with pytest.raises(NodesUnavailable, match="too large"):
            asyncio.run(chain.scan(frozenset(), 0))
    assert asyncio.run(chain.scan(frozenset(), 0)).up_to == 4
    assert all(node.usable for node in asyncio.run(chain.nodes()))
    fitting = 0
    for _ in range(8):
        with pytest.raises(NodesUnavailable, match="too large"):
            asyncio.run(chain.scan(frozenset(), 4))
    fitting = 100
    for after in (1, 2, 3):
        assert asyncio.run(chain.scan(frozenset(), 4)).up_to == 4 + after
