"""Tokens whose events are not what moved: payments held against balances, and nodes that can't say them (W36)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.rails.evm_fake import (
    ALICE,
    BOB,
    COIN,
    GWEI,
    TOKEN,
    TOKENS,
    WALLET,
    CallRefused,
    Event,
    Token,
    World,
    question,
)

from bursar.rails.chain import Confirmed, Dead, Fate, Mismatch, Order, Pending, Question, Signed, Unknown
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import ZERO_ADDRESS
from bursar.rails.evm.nodes import STATE_BLOCKS
from bursar.rails.evm.rpc import CallError, CallFailed, Malformed
from bursar.rails.evm.tokens import Change, Changes, changes
from bursar.rails.evm.verdict import abstaining, check

AMOUNT = TOKENS.amount
Moves = Callable[[str, str, int], list[Event]]


def fate(chain: EvmChain, asked: Question) -> Fate:
    return asyncio.run(chain.fate(asked))


def paid(world: World, *more: Order, moves: Moves | None = None, blocks: int = 4) -> Signed:
    """The payment of tokens and further ones in one block, of a token that moves something else than it says."""
    if moves is not None:
        world.chain.tokens[TOKEN] = Token(moves=moves)
    signed = [world.submit(world.sign(order, nonce=nonce)) for nonce, order in enumerate((TOKENS, *more))]
    world.chain.mine(blocks)
    return signed[0]


def nothing(sender: str, to: str, amount: int) -> list[Event]:
    return []


def refused(code: int = -32000, message: str = "missing trie node") -> Callable[[list[Any], Any], Any]:
    def lie(params: list[Any], honest: Any) -> Any:
        raise CallRefused(code, message)

    return lie


def drop_state(world: World, *nodes: str) -> None:
    """These nodes have no state but the newest, and the payment's block is older than what nodes keep."""
    world.chain.mine(STATE_BLOCKS)
    for name in nodes:
        world.nodes[name].lies["eth_call"] = refused()


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moves", "why"),
    [
        (
            nothing,
            f"in block 1 the token reports that the recipient's balance rose by {AMOUNT}, but it did not change",
        ),
        (
            lambda sender, to, amount: [(TOKEN, sender, to, amount - 3), (TOKEN, sender, BOB, 3)],
            f"in block 1 the token reports that the recipient's balance rose by {AMOUNT}, but it rose by {AMOUNT - 3}",
        ),
        (
            lambda sender, to, amount: [(TOKEN, sender, to, amount), (TOKEN, sender, BOB, 3)],
            f"in block 1 the token reports that the wallet's balance fell by {AMOUNT}, but it fell by {AMOUNT + 3}",
        ),
        (
            lambda sender, to, amount: [(TOKEN, to, BOB, 3), (TOKEN, sender, BOB, amount)],
            f"in block 1 the token reports that the recipient's balance rose by {AMOUNT}, but it fell by 3",
        ),
    ],
)
def test_a_token_that_moves_less_than_its_event_says_is_a_mismatch(moves: Moves, why: str) -> None:
    world = World()
    signed = paid(world, moves=moves)
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Mismatch)
    assert found.why == why
    assert (found.hash, found.fee_paid) == (signed.hash, 50_000 * 3 * GWEI)
    assert found.evidence["nodes"] == ["a", "b"]
    assert found.evidence["balances"]["recipient"]["reported"] == str(AMOUNT)


def test_a_balance_that_rose_by_more_than_the_events_say_is_no_mismatch() -> None:
    """Interest, or coin that the recipient wrapped in that block."""
    world = World()
    signed = paid(world, moves=lambda sender, to, amount: [(TOKEN, sender, to, amount), (TOKEN, BOB, to, 5)])
    assert isinstance(fate(world.open(), question(TOKENS, signed)), Confirmed)


def test_other_transfers_of_the_same_block_do_not_disturb() -> None:
    """To the same recipient, from it, from the zero address, to it, and between strangers."""
    world = World()
    others = {
        7: (WALLET, ALICE),
        11: (ALICE, BOB),
        13: (ZERO_ADDRESS, ALICE),
        17: (ALICE, ZERO_ADDRESS),
        19: (BOB, WALLET),
        23: (BOB, ZERO_ADDRESS),
        AMOUNT: (WALLET, ALICE),
    }
    world.chain.tokens[TOKEN] = Token(events=lambda s, t, amount: [(TOKEN, *others[amount], amount)])
    signed = paid(world, *(msgspec.structs.replace(TOKENS, amount=amount) for amount in others))
    assert len(world.chain.blocks[1].transactions) == 8
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Confirmed)
    assert "balances_not_checked" not in found.evidence


def test_what_another_transfer_of_the_block_hides_is_seen() -> None:
    """Three were kept back, and the other transfer says nothing of having moved them."""
    world = World()
    signed = paid(
        world,
        msgspec.structs.replace(TOKENS, amount=7),
        moves=lambda s, t, amount: [(TOKEN, s, t, amount - 3 if amount == AMOUNT else amount)],
    )
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Mismatch)
    assert f"rose by {AMOUNT + 7}, but it rose by {AMOUNT + 4}" in found.why


@pytest.mark.parametrize(("moves", "kind"), [(None, Confirmed), (lambda s, t, a: [(TOKEN, s, BOB, 1)], Mismatch)])
def test_a_transfer_of_the_wallet_to_itself_changes_nothing(moves: Moves | None, kind: type[Fate]) -> None:
    world = World()
    to_self = msgspec.structs.replace(TOKENS, to=WALLET)
    world.chain.tokens[TOKEN] = Token(moves=moves)
    signed = world.submit(world.sign(to_self))
    world.finish()
    assert isinstance(fate(world.open(), question(to_self, signed)), kind)


@pytest.mark.parametrize("answer", ["0x", "0x" + 62 * "0", "reverted"])
def test_a_token_that_gives_no_balance_is_a_mismatch(answer: str) -> None:
    world = World()
    signed = paid(world)
    for node in world.nodes.values():
        node.lies["eth_call"] = refused(3, "execution reverted") if answer == "reverted" else lambda p, h: answer
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Mismatch)
    assert "the token gives no balance of the recipient" in found.why


def test_balances_of_the_largest_numbers_are_compared() -> None:
    most = 2**256 - 1
    fine = Change(before=0, after=most, reported=most)
    confirmed = Confirmed(hash="0x1", block=9, block_hash="0x2", fee_paid=1)
    assert check(confirmed, Changes(wallet=fine, recipient=fine)) == confirmed
    wrapped = Change(before=most, after=AMOUNT - 1, reported=AMOUNT)
    found = check(confirmed, Changes(wallet=fine, recipient=wrapped))
    assert isinstance(found, Mismatch)
    assert f"fell by {most - AMOUNT + 1}" in found.why


# --- what nodes say --------------------------------------------------------------------------------------------------


@pytest.fixture
def answered() -> list[Any]:
    """What an honest node answers about a payment in block 1, in the order in which it is asked."""
    log = {
        "address": TOKEN.lower(),
        "topics": [
            "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef",
            *("0x" + 24 * "0" + side[2:].lower() for side in (WALLET, ALICE)),
        ],
        "data": f"0x{AMOUNT:064x}",
        "logIndex": "0x0",
        "blockHash": BLOCK_HASH,
    }
    return [[log], [log], f"0x{10 * AMOUNT:064x}", f"0x{9 * AMOUNT:064x}", f"0x{0:064x}", f"0x{AMOUNT:064x}"]


BLOCK_HASH = "0x" + 64 * "b"
PAID = Confirmed(hash="0x" + 64 * "1", block=1, block_hash=BLOCK_HASH, fee_paid=1)
ASKED = Question(sender=WALLET, order=TOKENS, tries=())


def test_answers_are_read_into_the_changes_of_both_sides(answered: list[Any]) -> None:
    assert changes(ASKED, PAID, answered) == Changes(
        wallet=Change(before=10 * AMOUNT, after=9 * AMOUNT, reported=-AMOUNT),
        recipient=Change(before=0, after=AMOUNT, reported=AMOUNT),
    )


def test_logs_that_were_not_asked_for_count_for_nothing(answered: list[Any]) -> None:
    """A node may ignore a filter. Of another contract, of other addresses: neither is about this balance."""
    log = answered[1][0]
    answered[1] += [log | {"address": BOB.lower()}, log | {"topics": [*log["topics"][:2], "0x" + 64 * "7"]}]
    answered[0] += [
        log | {"address": BOB.lower()},
        log | {"topics": [log["topics"][0], "0x" + 64 * "7", "0x" + 64 * "8"]},
    ]
    assert check(PAID, changes(ASKED, PAID, answered)) == PAID


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("value", [None, {}, 7, "0xzz", [{}], [None]])
def test_an_answer_that_is_malformed_says_nothing(answered: list[Any], place: int, value: Any) -> None:
    answered[place] = value
    with pytest.raises(Malformed):
        changes(ASKED, PAID, answered)


@pytest.mark.parametrize("place", range(6))
def test_an_error_of_the_node_is_no_answer(answered: list[Any], place: int) -> None:
    answered[place] = CallError(-32000, "missing trie node")
    with pytest.raises(CallFailed):
        changes(ASKED, PAID, answered)


@pytest.mark.parametrize("place", [0, 1])
def test_logs_without_the_payments_own_event_are_no_answer(answered: list[Any], place: int) -> None:
    """A node that has dropped old logs may say that there were none."""
    answered[place] = []
    with pytest.raises(CallFailed, match="lack the payment's own"):
        changes(ASKED, PAID, answered)


@pytest.mark.parametrize("place", [0, 1])
def test_logs_of_another_block_are_malformed(answered: list[Any], place: int) -> None:
    """A node that does not know the parameter gives those of its newest block."""
    answered[place] = [answered[place][0] | {"blockHash": "0x" + 64 * "c"}]
    with pytest.raises(Malformed, match="another block"):
        changes(ASKED, PAID, answered)


# --- nodes that lie, or can't say ------------------------------------------------------------------------------------


def raised(by: int) -> Callable[[list[Any], Any], Any]:
    """A lie about every balance after the first block."""
    return lambda params, honest: f"0x{int(honest, 16) + by:064x}" if params[1] == "0x1" else honest


def test_one_lying_node_of_two_makes_no_mismatch_and_is_named() -> None:
    world = World()
    chain, signed = world.open(), paid(world)
    world.nodes["b"].lies["eth_call"] = raised(-1)
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Unknown)
    assert "nodes disagree: a: " in found.why
    assert "b: mismatch: in block 1 the token reports" in found.why
    assert all("contradicts other nodes" in node.trouble for node in asyncio.run(chain.nodes()))


@pytest.mark.parametrize("honest_token", [True, False])
def test_one_lying_node_of_three_is_outvoted(honest_token: bool) -> None:
    world = World("abc")
    chain, signed = world.open(), paid(world, moves=None if honest_token else nothing)
    lies = {True: raised(-1), False: lambda p, h: f"0x{AMOUNT * (p[1] == '0x1') + 10**18:064x}"}
    world.nodes["b"].lies["eth_call"] = lies[honest_token]
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Confirmed if honest_token else Mismatch)
    assert found.evidence["nodes"] == ["a", "c"]
    assert [bool(node.trouble) for node in asyncio.run(chain.nodes())] == [False, True, False]


def test_if_no_node_has_the_state_any_more_the_event_alone_decides_and_the_evidence_says_so() -> None:
    world = World()
    chain, signed = world.open(), paid(world, moves=nothing)
    drop_state(world, "a", "b")
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Confirmed)
    assert found.by_event_alone
    assert set(found.evidence["balances_not_checked"]) == {"a", "b"}
    assert "missing trie node" in found.evidence["balances_not_checked"]["a"]


def test_a_node_without_the_state_confirms_beside_one_that_has_it() -> None:
    world = World()
    chain, signed = world.open(), paid(world)
    drop_state(world, "b")
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Confirmed)
    assert found.evidence["nodes"] == ["a", "b"]
    assert not found.by_event_alone
    assert set(found.evidence["balances_not_checked"]) == {"b"}


def test_a_difference_that_one_node_alone_can_see_is_neither_outvoted_nor_believed() -> None:
    world = World("abc")
    chain, signed = world.open(), paid(world, moves=nothing)
    drop_state(world, "b", "c")
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Unknown)
    assert found.why.startswith("only a answers: mismatch: in block 1 the token reports")
    assert "b: it can't say what the balances were: error -32000: missing trie node" in found.why


def test_two_nodes_that_see_a_difference_are_not_outvoted_by_nodes_that_can_not() -> None:
    world = World("abcde")
    chain, signed = world.open(), paid(world, moves=nothing)
    drop_state(world, "c", "d", "e")
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Mismatch)
    assert found.evidence["nodes"] == ["a", "b"]


def test_a_mismatch_by_the_event_makes_no_node_abstain() -> None:
    fates: dict[str, Fate] = {
        "a": Mismatch(hash="0x1", why="the token reports 2 transfers", evidence={"block": 1}),
        "b": PAID,
    }
    assert abstaining(fates, {"b": "no state"}) == {}


def test_an_error_about_a_block_that_the_node_should_have_is_asked_for_again() -> None:
    """A rate limit must not let a payment pass unchecked."""
    world = World()
    chain, signed = world.open(), paid(world)
    for node in world.nodes.values():
        node.lies["eth_getLogs"] = refused(-32005, "limit exceeded")
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Unknown)
    assert not found.person
    assert found.why.startswith("no node says what the balances were")
    del world.nodes["a"].lies["eth_getLogs"]
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Unknown)
    assert found.why.startswith("only a answers")
    assert "b: it can't say what the balances were: error -32005: limit exceeded" in found.why
    assert not any(node.trouble for node in asyncio.run(chain.nodes()))
    del world.nodes["b"].lies["eth_getLogs"]
    assert isinstance(fate(chain, question(TOKENS, signed)), Confirmed)


def test_a_node_with_a_malformed_balance_is_named_and_the_others_decide() -> None:
    world = World("abc")
    chain, signed = world.open(), paid(world)
    world.nodes["b"].lies["eth_call"] = lambda params, honest: {"balance": 7}
    assert isinstance(fate(chain, question(TOKENS, signed)), Confirmed)
    assert "malformed answer: not data" in {n.name: n.trouble for n in asyncio.run(chain.nodes())}["b"]


def test_a_node_that_fails_at_this_request_is_missing_and_the_question_stays_open() -> None:
    world = World()
    chain, signed = world.open(), paid(world)

    def away(params: list[Any], honest: Any) -> Any:
        raise ConnectionError

    world.nodes["b"].lies["eth_getLogs"] = away
    found = fate(chain, question(TOKENS, signed))
    assert isinstance(found, Unknown)
    assert found.why.startswith("only a answers")
    assert "b: no answer (ConnectionError)" in found.why


def test_with_one_node_configured_its_balances_decide() -> None:
    world = World("a")
    signed = paid(world, moves=nothing)
    assert isinstance(fate(world.open(), question(TOKENS, signed, one_node=True)), Mismatch)


# --- what it costs ---------------------------------------------------------------------------------------------------


def rounds(world: World, chain: EvmChain, *asked: Question) -> tuple[list[Fate], list[list[str]]]:
    """The fates, and the methods of every request that node `b` got for them."""
    fate(chain, question(COIN, world.sign(COIN, nonce=77), nonce=77))  # the node has shown which chain it is on
    before = len(world.nodes["b"].requests)

    async def ask_all() -> list[Fate]:
        return await asyncio.gather(*(chain.fate(one) for one in asked))

    found = asyncio.run(ask_all())
    return found, world.nodes["b"].requests[before:]


def test_only_a_payment_of_tokens_that_ends_confirmed_costs_a_further_request() -> None:
    world = World()
    chain, signed = world.open(), [world.sign(TOKENS, nonce=nonce) for nonce in range(10)]
    coin = world.sign(COIN, nonce=10)
    asked = [question(TOKENS, one, nonce=nonce) for nonce, one in enumerate(signed)]
    heads, facts, blocks = 2, 1, 1
    for one in (*signed, coin):
        world.submit(one)
    found, requests = rounds(world, chain, *asked)
    assert all(isinstance(one, Pending) for one in found)
    assert len(requests) == heads + facts
    world.chain.failing.add(signed[9].hash)
    world.chain.mine(1)
    found, requests = rounds(world, chain, *asked)
    assert found == 10 * [Pending(seen=True, block=1)]
    assert len(requests) == heads + facts + blocks
    world.finish()
    found, requests = rounds(world, chain, asked[9], question(COIN, coin, nonce=10))
    assert [type(one) for one in found] == [Dead, Confirmed]
    assert len(requests) == heads + facts + blocks
    found, requests = rounds(world, chain, *asked, question(COIN, coin, nonce=10))
    assert [type(one) for one in found] == 9 * [Confirmed] + [Dead, Confirmed]
    assert len(requests) == heads + facts + blocks + 1
    # All nine are of one wallet to one recipient in one block: their questions are the same, and are asked once.
    assert requests[-1] == 2 * ["eth_getLogs"] + 4 * ["eth_call"]
