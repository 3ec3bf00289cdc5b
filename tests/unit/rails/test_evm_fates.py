"""What became of a transaction, by nodes in memory that are honest, lie, lag, hang or disagree (W13, W35, W36)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from coincurve import PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
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
    FakeNode,
    Token,
    World,
    question,
)

from bursar.rails.chain import (
    Confirmed,
    Dead,
    Fate,
    Mismatch,
    NodesUnavailable,
    Order,
    Pending,
    Question,
    Shape,
    Signed,
    Slot,
    Try,
    Unknown,
)
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import address_of

CANCEL = Shape.CANCEL
METHODS = [
    "eth_chainId",
    "eth_getBlockByNumber",
    "eth_getTransactionByHash",
    "eth_getTransactionCount",
    "eth_getTransactionReceipt",
]
FIELDS = ["number", "hash", "parentHash", "blockNumber", "blockHash", "status", "logs", "topics", "from", "to", "nonce"]
ELSEWHERE = Order(payout="payout-9", to=BOB, amount=7)


def fate(chain: EvmChain, asked: Question) -> Fate:
    return asyncio.run(chain.fate(asked))


def paid(world: World, order: Order = COIN, *, blocks: int = 4) -> Signed:
    """A payment in the first block, and blocks on top."""
    signed = world.submit(world.sign(order))
    world.chain.mine(blocks)
    return signed


# --- the way of a payment --------------------------------------------------------------------------------------------


def test_a_payment_of_coin_is_pending_until_its_block_is_final_and_then_confirmed() -> None:
    world = World()
    chain, signed = world.open(), world.sign(COIN)
    asked = question(COIN, signed)
    assert fate(chain, asked) == Pending(seen=False)
    world.submit(signed)
    assert fate(chain, asked) == Pending(seen=True)
    world.chain.mine(2)
    assert fate(chain, asked) == Pending(seen=True, block=1)
    world.chain.mine(1)
    found = fate(chain, asked)
    assert isinstance(found, Confirmed)
    assert (found.hash, found.block, found.block_hash) == (signed.hash, 1, world.chain.blocks[1].hash)
    assert (found.gas_used, found.gas_price, found.fee_paid) == (21_000, 3 * GWEI, 63_000 * GWEI)
    assert found.evidence["nodes"] == ["a", "b"]


def test_a_payment_of_tokens_is_confirmed_by_its_transfer_event() -> None:
    world = World()
    found = fate(world.open(), question(TOKENS, paid(world, TOKENS)))
    assert isinstance(found, Confirmed)
    assert found.evidence["transfers"] == [
        {"contract": TOKEN.lower(), "from": WALLET.lower(), "to": ALICE.lower(), "amount": "2500000"}
    ]


@pytest.mark.parametrize(
    ("network", "blocks"),
    [
        ({"finalized_tag": False, "depth": 1}, 1),
        ({"finalized_tag": False, "depth": 5}, 5),
        ({"finalized_tag": True, "depth": 1}, 2),  # the fake's finality is two blocks deep
        ({"finalized_tag": True, "depth": 5}, 5),
    ],
)
def test_final_means_the_chains_own_finality_and_the_configured_depth(network: dict[str, Any], blocks: int) -> None:
    world = World()
    chain, signed = world.open(**network), paid(world, blocks=blocks)
    assert isinstance(fate(chain, question(COIN, signed)), Pending)
    world.chain.mine()
    assert isinstance(fate(chain, question(COIN, signed)), Confirmed)


@pytest.mark.parametrize("mined", [0, 1])
def test_of_a_payment_and_its_fee_bump_either_may_be_mined(mined: int) -> None:
    world = World()
    tries = world.sign(COIN, price=3 * GWEI), world.sign(COIN, price=4 * GWEI)
    world.submit(tries[mined])
    world.finish()
    found = fate(world.open(), question(COIN, *tries))
    assert isinstance(found, Confirmed)
    assert found.hash == tries[mined].hash


def test_a_final_cancellation_is_the_death_of_the_payment() -> None:
    world = World()
    payment, cancel = world.sign(COIN), world.sign(COIN, shape=CANCEL, price=9 * GWEI)
    world.submit(cancel)
    world.finish()
    found = fate(world.open(), question(COIN, payment, (cancel, CANCEL)))
    assert isinstance(found, Dead)
    assert found.proof["how"] == "cancelled"
    assert found.proof["consumed_by"] == {"hash": cancel.hash, "block": 1, "block_hash": world.chain.blocks[1].hash}
    assert (found.hash, found.fee_paid) == (cancel.hash, 21_000 * 9 * GWEI)


def test_a_cancellation_that_is_not_final_proves_nothing() -> None:
    world = World()
    payment, cancel = world.sign(COIN), world.submit(world.sign(COIN, shape=CANCEL))
    world.chain.mine(2)
    assert fate(world.open(), question(COIN, payment, (cancel, CANCEL))) == Pending(seen=True, block=1)


def test_a_payment_that_failed_is_dead_and_its_fee_is_known() -> None:
    world = World()
    signed = world.sign(TOKENS)
    world.chain.failing.add(signed.hash)
    world.submit(signed)
    world.finish()
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Dead)
    assert (found.proof["how"], found.hash, found.fee_paid) == ("failed", signed.hash, 50_000 * 3 * GWEI)


def test_a_dropped_transaction_is_pending_and_not_seen() -> None:
    world = World()
    chain, signed = world.open(), world.submit(world.sign(COIN))
    assert fate(chain, question(COIN, signed)) == Pending(seen=True)
    world.chain.pool.clear()
    world.chain.mine(50)
    assert fate(chain, question(COIN, signed)) == Pending(seen=False)


def test_after_a_reorganisation_it_is_pending_again() -> None:
    world = World()
    chain, signed = world.open(), paid(world, blocks=2)
    world.chain.reorganise(2)
    world.finish()
    assert fate(chain, question(COIN, signed)) == Pending(seen=False)


def test_a_receipt_of_a_block_that_is_gone_does_not_count() -> None:
    """A node's index of receipts may outlive the block."""
    world = World()
    chain, signed = world.open(), paid(world, blocks=2)
    old = world.nodes["a"].eth_getTransactionReceipt(signed.hash)
    world.chain.reorganise(2)
    world.finish()
    for node in world.nodes.values():
        node.lies["eth_getTransactionReceipt"] = lambda params, honest: old
    assert fate(chain, question(COIN, signed)) == Pending(seen=False)


# --- tokens that do something else (W36) -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        lambda sender, to, amount: [],
        lambda sender, to, amount: [(TOKEN, sender, to, amount - 1)],
        lambda sender, to, amount: [(TOKEN, sender, BOB, amount)],
        lambda sender, to, amount: [(TOKEN, BOB, to, amount)],
        lambda sender, to, amount: [(BOB, sender, to, amount)],  # another contract's event
        lambda sender, to, amount: [(TOKEN, sender, to, amount), (TOKEN, sender, to, amount)],
        lambda sender, to, amount: [(TOKEN, sender, to, amount), (TOKEN, sender, BOB, 5)],  # a fee of the sender's
        lambda sender, to, amount: [(TOKEN, sender, to, amount), (TOKEN, to, BOB, 5)],  # a fee of the recipient's
    ],
)
def test_success_with_other_events_is_a_mismatch(events: Callable[[str, str, int], list[Event]]) -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(events=events)
    signed = paid(world, TOKENS)
    found = fate(world.open(), question(TOKENS, signed))
    assert isinstance(found, Mismatch)
    assert (found.hash, found.fee_paid) == (signed.hash, 50_000 * 3 * GWEI)


def test_events_of_other_contracts_in_the_same_transaction_do_not_matter() -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(events=lambda s, t, a: [(BOB, s, t, 1), (TOKEN, s, t, a)])
    assert isinstance(fate(world.open(), question(TOKENS, paid(world, TOKENS))), Confirmed)


# --- a nonce that something else has used ----------------------------------------------------------------------------


def replaced(world: World, by: Order) -> tuple[Signed, Signed]:
    """A payment, and the transaction from outside that took its nonce."""
    payment, other = world.sign(COIN if not by.contract else TOKENS), world.sign(by, price=8 * GWEI)
    world.submit(other)
    world.finish()
    return payment, other


def test_a_nonce_used_by_an_unknown_transaction_needs_a_person() -> None:
    world = World()
    payment, _ = replaced(world, ELSEWHERE)
    found = fate(world.open(), question(COIN, payment))
    assert isinstance(found, Unknown)
    assert found.person


def test_a_nonce_used_by_another_payment_proves_death_and_names_it() -> None:
    world = World()
    payment, other = replaced(world, ELSEWHERE)
    found = fate(world.open(), question(COIN, payment, consumer=other.hash))
    assert isinstance(found, Dead)
    assert found.proof["how"] == "replaced"
    assert found.proof["consumed_by"]["hash"] == other.hash
    assert found.proof["nodes"] == ["a", "b"]
    assert (found.hash, found.fee_paid) == ("", 0)


def test_a_nonce_used_by_the_same_payment_under_another_hash_is_a_mismatch() -> None:
    """The bytes of an attempt were lost with a database, and its transaction was mined (W17)."""
    for order in (COIN, TOKENS):
        world = World()
        payment, lost = replaced(world, msgspec.structs.replace(order, payout="the same"))
        found = fate(world.open(), question(order, payment, consumer=lost.hash))
        assert isinstance(found, Mismatch)
        assert found.hash == lost.hash


def by_call(order: Order, events: list[Event]) -> Fate:
    """The fate of a token payment whose nonce another call of the token took, which reported these events."""
    world = World()
    world.chain.tokens[TOKEN] = Token(events=lambda sender, to, amount: events)
    payment, other = world.sign(TOKENS), world.submit(world.sign(order, price=8 * GWEI))
    world.finish()
    return fate(world.open(), question(TOKENS, payment, consumer=other.hash))


OTHER_CALL = msgspec.structs.replace(TOKENS, to=BOB, amount=77)


@pytest.mark.parametrize(
    ("order", "events", "kind"),
    [
        (TOKENS, [], Mismatch),  # the very call, whatever the token reports
        (OTHER_CALL, [(TOKEN, BOB, ALICE, TOKENS.amount)], Mismatch),  # another call that paid the same
        (OTHER_CALL, [(TOKEN, WALLET, ALICE, TOKENS.amount - 1)], Dead),
        (OTHER_CALL, [(TOKEN, WALLET, BOB, TOKENS.amount)], Dead),
        (OTHER_CALL, [(BOB, WALLET, ALICE, TOKENS.amount)], Dead),
        (msgspec.structs.replace(TOKENS, amount=77), [], Dead),
        (msgspec.structs.replace(TOKENS, amount=77), [(TOKEN, WALLET, ALICE, TOKENS.amount)], Mismatch),
        (msgspec.structs.replace(TOKENS, to=BOB), [], Dead),
    ],
)
def test_whether_a_consumer_made_the_payment_is_read_from_its_call_and_its_events(
    order: Order, events: list[Event], kind: type[Fate]
) -> None:
    assert isinstance(by_call(order, events), kind)


def test_the_same_payment_that_failed_is_death() -> None:
    world = World()
    payment, lost = world.sign(TOKENS), world.sign(TOKENS, price=8 * GWEI)
    world.chain.failing.add(lost.hash)
    world.submit(lost)
    world.finish()
    assert isinstance(fate(world.open(), question(TOKENS, payment, consumer=lost.hash)), Dead)


def test_an_attempt_whose_bytes_never_came_is_judged_by_its_nonce() -> None:
    """The signer may have signed it (W30)."""
    world = World()
    _, other = replaced(world, ELSEWHERE)
    asked = Question(
        sender=WALLET, order=COIN, tries=(Try(hash="", shape=Shape.PAY, slot=Slot(nonce=0)),), consumer=other.hash
    )
    assert isinstance(fate(world.open(), asked), Dead)
    assert fate(World().open(), asked) == Pending(seen=False)


def test_coin_that_went_through_a_contract_needs_a_person() -> None:
    world = World()
    payment, other = replaced(world, Order(payout="x", to=BOB, amount=COIN.amount))
    chain = world.open()
    assert isinstance(fate(chain, question(COIN, payment, consumer=other.hash)), Dead)
    for node in world.nodes.values():
        node.lies["eth_getTransactionReceipt"] = lambda params, honest: honest and honest | {"gasUsed": hex(60_000)}
    found = fate(chain, question(COIN, payment, consumer=other.hash))
    assert isinstance(found, Unknown)
    assert found.person


def test_a_consumer_of_another_wallet_or_nonce_proves_nothing() -> None:
    world = World()
    payment, other = replaced(world, ELSEWHERE)
    world.submit(world.sign(ELSEWHERE, nonce=1))
    world.finish()
    second = world.chain.blocks[5].transactions[0].signed
    assert isinstance(fate(world.open(), question(COIN, payment, consumer=second.hash)), Unknown)
    stranger = address_of(PrivateKey(b"\x22" * 32).public_key.format(compressed=False))
    asked = msgspec.structs.replace(question(COIN, payment, consumer=other.hash), sender=stranger)
    assert fate(world.open(), asked) == Pending(seen=False)  # the stranger's nonce is free


def test_a_consumer_proves_death_from_the_block_on_in_which_it_is_final() -> None:
    world = World()
    chain, payment, other = world.open(), world.sign(COIN), world.submit(world.sign(ELSEWHERE))
    world.chain.mine(2)
    assert isinstance(fate(chain, question(COIN, payment, consumer=other.hash)), Pending)
    world.chain.mine(1)
    assert isinstance(fate(chain, question(COIN, payment, consumer=other.hash)), Dead)


# --- nodes that lie --------------------------------------------------------------------------------------------------


def forged_receipt(world: World, signed: Signed) -> Callable[[list[Any], Any], Any]:
    """A receipt in the first block for a transaction that is in none."""
    receipt = {
        "transactionHash": signed.hash,
        "blockNumber": "0x1",
        "blockHash": world.chain.blocks[1].hash,
        "status": "0x1",
        "gasUsed": "0x5208",
        "effectiveGasPrice": "0x1",
        "logs": [],
    }
    return lambda params, honest: receipt


def lie_that_it_is_mined(world: World, node: FakeNode, signed: Signed) -> None:
    world.submit(signed)
    shown = node.eth_getTransactionByHash(signed.hash)
    del world.chain.pool[signed.hash]
    node.lies["eth_getTransactionReceipt"] = forged_receipt(world, signed)
    node.lies["eth_getTransactionByHash"] = lambda params, honest: shown


def test_one_lying_node_of_two_confirms_nothing_and_is_named() -> None:
    world = World()
    chain, signed = world.open(), world.sign(COIN)
    world.chain.mine(5)
    lie_that_it_is_mined(world, world.nodes["b"], signed)
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Unknown)
    assert not found.person
    assert "a: pending, not known" in found.why
    assert f"b: {signed.hash} is confirmed" in found.why
    assert all("contradicts other nodes" in node.trouble for node in asyncio.run(chain.nodes()))


def test_one_lying_node_of_three_is_outvoted_and_named() -> None:
    world = World("abc")
    chain, signed = world.open(), world.sign(COIN)
    world.chain.mine(5)
    lie_that_it_is_mined(world, world.nodes["b"], signed)
    assert fate(chain, question(COIN, signed)) == Pending(seen=False)
    assert [bool(node.trouble) for node in asyncio.run(chain.nodes())] == [False, True, False]


def test_a_node_that_hides_a_receipt_is_outvoted_and_named() -> None:
    world = World("abc")
    chain, signed = world.open(), paid(world)
    world.nodes["c"].lies["eth_getTransactionReceipt"] = lambda params, honest: None
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Confirmed)
    assert found.evidence["nodes"] == ["a", "b"]
    trouble = {node.name: node.trouble for node in asyncio.run(chain.nodes())}
    assert "payout-1" in trouble["c"]
    assert not trouble["a"]


@pytest.mark.parametrize(
    ("method", "lie"),
    [
        ("eth_getTransactionReceipt", lambda params, honest: honest and honest | {"status": "0x0"}),
        ("eth_getTransactionReceipt", lambda params, honest: honest and honest | {"gasUsed": "0x1"}),
        ("eth_getTransactionReceipt", lambda params, honest: honest and honest | {"blockHash": "0x" + 64 * "1"}),
        ("eth_getTransactionByHash", lambda params, honest: honest and honest | {"value": "0x1"}),
        ("eth_getTransactionByHash", lambda params, honest: honest and honest | {"to": BOB.lower()}),
        ("eth_getTransactionByHash", lambda params, honest: honest and honest | {"nonce": "0x9"}),
        ("eth_getTransactionByHash", lambda params, honest: None),
    ],
)
def test_two_nodes_must_agree_on_the_receipt_and_the_transaction(method: str, lie: Callable[..., Any]) -> None:
    world = World()
    signed = paid(world)
    world.nodes["b"].lies[method] = lie
    assert isinstance(fate(world.open(), question(COIN, signed)), Unknown)


def test_nodes_that_disagree_about_the_final_block_prove_nothing() -> None:
    world = World()
    chain, signed = world.open(), paid(world)
    world.nodes["b"].lies["eth_getBlockByNumber"] = lambda params, honest: honest and honest | {"hash": "0x" + 64 * "2"}
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Unknown)
    assert "a says 0x" in found.why
    assert "b says 0x2222" in found.why


def test_a_node_that_calls_a_block_final_too_early_moves_nothing() -> None:
    world = World()
    world.nodes["b"].final_lag = 0
    signed = paid(world, blocks=2)
    assert fate(world.open(), question(COIN, signed)) == Pending(seen=True, block=1)


@pytest.mark.parametrize("instead", [{"status": "0x0"}, None])
def test_two_against_two_is_no_majority(instead: dict[str, str] | None) -> None:
    world = World("abcd")
    signed = paid(world)
    for name in "cd":
        world.nodes[name].lies["eth_getTransactionReceipt"] = lambda p, honest: instead and honest and honest | instead
        if instead is None:
            world.nodes[name].lies["eth_getTransactionCount"] = lambda p, honest: "0x0"
    found = fate(world.open(), question(COIN, signed))
    assert isinstance(found, Unknown)
    assert all(f"{name}: " in found.why for name in "abcd")


def test_nodes_must_agree_on_the_nonce() -> None:
    world = World()
    payment, other = replaced(world, ELSEWHERE)
    world.nodes["b"].lies["eth_getTransactionCount"] = lambda params, honest: "0x0"
    assert isinstance(fate(world.open(), question(COIN, payment, consumer=other.hash)), Unknown)


def test_nodes_that_have_dropped_the_state_of_the_final_block_still_confirm() -> None:
    """Finality may stall for longer than nodes keep old states. Then receipts are all there is, and death waits."""

    def dropped(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32000, "missing trie node")

    world = World()
    chain, signed = world.open(), paid(world)
    for node in world.nodes.values():
        node.lies["eth_getTransactionCount"] = dropped
    assert isinstance(fate(chain, question(COIN, signed)), Confirmed)
    found = fate(chain, question(COIN, world.sign(COIN, price=9 * GWEI)))
    assert isinstance(found, Unknown)
    assert not found.person
    assert "no state of block" in found.why
    del world.nodes["a"].lies["eth_getTransactionCount"]
    found = fate(chain, question(COIN, world.sign(COIN, nonce=1), nonce=1))
    assert isinstance(found, Unknown)
    assert found.why.startswith("b: ")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.sampled_from(["0x", "0x0", "0x1", "0x5", "0x" + 64 * "0", WALLET]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.sampled_from(METHODS), st.sampled_from([*FIELDS, ""]), values)
def test_whatever_one_of_two_nodes_says_a_payment_that_was_not_mined_does_not_end(
    method: str, name: str, value: Any
) -> None:
    """Garbage in place of an answer, or of one field of it."""
    world = World()
    chain, signed = world.open(), world.sign(COIN)
    world.submit(world.sign(ELSEWHERE, nonce=1))
    world.chain.mine(5)

    def lie(params: list[Any], honest: Any) -> Any:
        return honest | {name: value} if name and isinstance(honest, dict) else value

    world.nodes["b"].lies[method] = lie
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Pending | Unknown)
    assert not getattr(found, "person", False)


# --- nodes that are away, behind or alone ----------------------------------------------------------------------------


def test_a_node_that_hangs_costs_a_timeout_and_not_the_others_answers() -> None:
    world = World("abc")
    world.nodes["b"].hangs = True
    chain, signed = world.open(), paid(world)
    assert isinstance(fate(chain, question(COIN, signed)), Confirmed)
    assert "no answer within" in {n.name: n.trouble for n in asyncio.run(chain.nodes())}["b"]


def test_with_one_node_of_two_away_nothing_is_confirmed_and_pending_is_still_said() -> None:
    world = World()
    chain, signed = world.open(), paid(world, blocks=1)
    world.nodes["b"].down = True
    assert fate(chain, question(COIN, signed)) == Pending(seen=True, block=1)
    world.finish()
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Unknown)
    assert not found.person
    assert "only a answers" in found.why
    assert "b: no answer" in found.why
    world.nodes["b"].down = False
    world.now += 100
    assert isinstance(fate(chain, question(COIN, signed)), Confirmed)


def test_with_all_nodes_away_nothing_is_said() -> None:
    world = World()
    for node in world.nodes.values():
        node.down = True
    with pytest.raises(NodesUnavailable, match=r"a: no answer.*b: no answer"):
        fate(world.open(), question(COIN, world.sign(COIN)))


def test_a_question_that_nodes_can_not_answer_does_not_spoil_the_others() -> None:
    """All travel in one batch: one bad transaction must not stop every confirmation."""
    world = World()
    chain, signed = world.open(), paid(world)
    poison = world.sign(COIN, nonce=7)

    def broken(params: list[Any], honest: Any) -> Any:
        if params[0] == poison.hash:
            raise CallRefused(-32603, "internal error")
        return honest

    def malformed(params: list[Any], honest: Any) -> Any:
        return {} if params[0] == poison.hash else honest

    async def both() -> list[Fate]:
        asked = question(COIN, signed), question(COIN, poison, nonce=7)
        return await asyncio.gather(*(chain.fate(one) for one in asked))

    for lie, named in ((broken, False), (malformed, True)):
        for node in world.nodes.values():
            node.lies["eth_getTransactionReceipt"] = lie
        confirmed, unknown = asyncio.run(both())
        assert isinstance(confirmed, Confirmed)
        assert isinstance(unknown, Unknown)
        assert unknown.why.startswith("a: ")
        for status in asyncio.run(chain.nodes()):
            assert status.usable
            assert ("malformed answer" in status.trouble) is named


def test_a_node_that_names_a_block_which_others_do_not_have_hurts_itself_alone() -> None:
    world = World("abc")
    chain, signed = world.open(), paid(world)
    world.nodes["b"].lies["eth_getTransactionReceipt"] = lambda p, honest: (
        honest and honest | {"blockNumber": hex(2**40)}
    )
    for name in "ac":
        world.nodes[name].lies["eth_getBlockByNumber"] = lambda p, honest: honest or {}
    assert isinstance(fate(chain, question(COIN, signed)), Confirmed)


def test_nodes_that_fail_between_two_requests_say_nothing() -> None:
    world = World()

    def last_words(params: list[Any], honest: Any) -> Any:
        for node in world.nodes.values():
            node.down = True
        return honest

    world.nodes["b"].lies["eth_getTransactionByHash"] = last_words  # the second of the two to be asked
    signed = paid(world)
    with pytest.raises(NodesUnavailable, match=r"no node answers \(a: no answer.*b: no answer"):
        fate(world.open(), question(COIN, signed))


def test_a_node_that_is_behind_is_not_believed_that_something_is_absent() -> None:
    world = World()
    chain = world.open()
    world.chain.mine(30)
    signed = world.submit(world.sign(COIN))
    world.chain.mine(1)
    asyncio.run(chain.final_block())  # both are known to be at height 31
    world.nodes["a"].behind = 20
    world.nodes["b"].down = True
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Unknown)
    assert "a does not know it, but is behind" in found.why


def test_finality_follows_the_two_best_nodes() -> None:
    world = World("abc")
    world.nodes["c"].behind = 100
    assert isinstance(fate(world.open(), question(COIN, paid(world))), Confirmed)


def test_with_one_node_configured_the_question_decides() -> None:
    world = World("a")
    chain, signed = world.open(), paid(world)
    assert isinstance(fate(chain, question(COIN, signed, one_node=True)), Confirmed)
    found = fate(chain, question(COIN, signed))
    assert isinstance(found, Unknown)
    assert found.person
    assert "only one node (a) is configured" in found.why
    assert fate(chain, question(COIN, world.sign(COIN, nonce=1), nonce=1)) == Pending(seen=False)


# --- many questions --------------------------------------------------------------------------------------------------


def test_concurrent_questions_share_one_batch_per_node() -> None:
    world = World()
    chain = world.open()
    signed = [world.submit(world.sign(COIN, nonce=n)) for n in range(20)]
    world.chain.mine(25)

    async def ask_all() -> list[Fate]:
        return await asyncio.gather(*(chain.fate(question(COIN, one, nonce=n)) for n, one in enumerate(signed)))

    found = asyncio.run(ask_all())
    assert [one.hash for one in found if isinstance(one, Confirmed)] == [one.hash for one in signed]
    for node in world.nodes.values():
        # Which chain it is; where it is; the final block; all facts; the blocks of all receipts.
        assert len(node.requests) == 5


def test_questions_that_come_during_a_round_are_answered_in_the_next() -> None:
    world = World()
    chain, signed = world.open(), paid(world)

    async def ask_late() -> tuple[Fate, Fate]:
        first = asyncio.create_task(chain.fate(question(COIN, signed)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert world.nodes["a"].requests  # the round has begun
        second = asyncio.create_task(chain.fate(question(COIN, signed)))
        third = asyncio.create_task(chain.fate(question(COIN, signed)))
        await asyncio.sleep(0)
        third.cancel()
        return await first, await second

    assert [type(one) for one in asyncio.run(ask_late())] == [Confirmed, Confirmed]


@pytest.mark.parametrize("hash_", ["0x12", "0x" + 64 * "G", "0x" + 64 * "A", 66 * "1"])
def test_what_is_no_hash_is_not_asked(hash_: str) -> None:
    tries = (Try(hash=hash_, shape=Shape.PAY, slot=Slot(nonce=0)),)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        fate(World().open(), Question(sender=WALLET, order=COIN, tries=tries))


def test_tries_with_different_nonces_are_two_questions() -> None:
    tries = tuple(Try(hash=f"0x{n:064x}", shape=Shape.PAY, slot=Slot(nonce=n)) for n in range(2))
    with pytest.raises(ValueError, match="share one nonce"):
        fate(World().open(), Question(sender=WALLET, order=COIN, tries=tries))
