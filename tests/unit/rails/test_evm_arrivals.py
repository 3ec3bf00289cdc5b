"""What arrives at our addresses: coin and tokens, read whole at nodes that agree, and held against balances (W35)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Container, Mapping
from types import FrameType
from typing import Any

import pytest
from tests.unit.rails.evm_fake import ALICE, BOB, CODEC, COIN, TOKEN, TOKENS, WALLET, CallRefused, Event, Token, World

from bursar.rails.chain import Arrival, Arrivals, DeepReorganisation, Network, NodesUnavailable, Order, Signed
from bursar.rails.evm.arriving import BLOCKS_MAX
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import checksum_address, transfer_data
from bursar.rails.evm.nodes import STATE_BLOCKS
from bursar.rails.evm.reading import TRANSFER_TOPIC, in_bloom
from bursar.rails.evm.rpc import CALLS_MAX, Endpoint
from bursar.sim.chain_state import Movement
from bursar.sim.evm_rpc import bloom

AMOUNT = TOKENS.amount
OURS = frozenset({ALICE})
LISTED = frozenset({TOKEN})
LATER = 10**9  # the caller sets no bound
Lie = Callable[[list[Any], Any], Any]


def arrivals(
    chain: EvmChain, after: int = 0, after_hash: str = "", up_to: int = LATER, ours: Container[str] = OURS
) -> Arrivals:
    return asyncio.run(chain.arrivals(ours, LISTED, after, after_hash, up_to))


def paid(world: World, *orders: Order, blocks: int = 4) -> list[Signed]:
    """Payments from outside, in the next block, and blocks on top."""
    nonce = world.chain.nonce(WALLET, len(world.chain.blocks))
    signed = [world.submit(world.sign(order, nonce=nonce + n)) for n, order in enumerate(orders)]
    world.chain.mine(blocks)
    return signed


def coin(world: World, signed: Signed, block: int = 1) -> Arrival:
    hash_ = world.chain.blocks[block].hash
    where: dict[str, Any] = {"block": block, "block_hash": hash_}
    return Arrival(hash=signed.hash, part="coin", sender=WALLET, to=ALICE, contract="", amount=COIN.amount, **where)


def tokens(world: World, signed: Signed, block: int = 1, amount: int = AMOUNT, **more: Any) -> Arrival:
    where: dict[str, Any] = {"block": block, "block_hash": world.chain.blocks[block].hash}
    sides: dict[str, Any] = {"sender": WALLET, "to": ALICE, "contract": TOKEN}
    return Arrival(hash=signed.hash, part="0", amount=amount, **sides, **where, **more)


# --- what is an arrival ----------------------------------------------------------------------------------------------


def test_coin_and_tokens_arrive_once_they_are_final() -> None:
    world = World()
    chain = world.open()
    sent = paid(world, COIN, TOKENS, blocks=2)
    assert arrivals(chain) == Arrivals(up_to=0, up_to_hash="", found=(), one_node=False)
    world.chain.mine(2)
    found = (coin(world, sent[0]), tokens(world, sent[1]))
    assert arrivals(chain) == Arrivals(up_to=2, up_to_hash=world.chain.blocks[2].hash, found=found, one_node=False)


def test_what_goes_to_others_is_none() -> None:
    world = World()
    paid(world, COIN, TOKENS)
    assert arrivals(world.open(), ours={BOB, WALLET}).found == ()


def test_a_token_that_is_not_listed_is_not_seen() -> None:
    world = World()
    world.chain.tokens[BOB] = Token(events=lambda sender, to, amount: [(BOB, sender, to, amount)])
    paid(world, Order(payout="p", to=ALICE, contract=BOB, amount=7))
    page = asyncio.run(world.open().arrivals(OURS, LISTED, 0, "", LATER))
    assert (page.up_to, page.found) == (2, ())
    assert asyncio.run(world.open().arrivals(OURS, frozenset(), 0, "", LATER)).found == ()


def test_a_transaction_that_failed_brings_nothing() -> None:
    world = World()
    signed = [world.sign(COIN), world.sign(TOKENS, nonce=1)]
    world.chain.failing = {one.hash for one in signed}
    for one in signed:
        world.submit(one)
    world.finish()
    assert arrivals(world.open()).found == ()


def test_what_an_address_sends_to_itself_or_nothing_at_all_is_no_arrival() -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(
        events=lambda sender, to, amount: [(TOKEN, to, to, amount), (TOKEN, sender, to, 0)]
    )
    paid(world, Order(payout="p", to=WALLET, amount=5), TOKENS)
    assert arrivals(world.open(), ours={ALICE, WALLET}).found == ()


def test_events_are_numbered_within_their_transaction() -> None:
    """In another block, after a deep reorganisation, the same transfer would have the same name."""
    world = World()
    world.chain.tokens[TOKEN] = Token(
        events=lambda sender, to, amount: [(TOKEN, sender, BOB, 1), (TOKEN, sender, to, amount)]
    )
    sent = paid(world, TOKENS, TOKENS)
    assert [(one.hash, one.part) for one in arrivals(world.open()).found] == [(one.hash, "1") for one in sent]


def test_a_page_is_bounded_by_the_caller_and_by_itself() -> None:
    world = World()
    world.chain.mine(100)
    chain = world.open()
    assert arrivals(chain, after=10).up_to == 10 + BLOCKS_MAX
    page = arrivals(chain, after=10, up_to=12)
    assert (page.up_to, page.up_to_hash) == (12, world.chain.blocks[12].hash)
    page = arrivals(chain, after=12, after_hash=page.up_to_hash, up_to=9)
    assert (page.up_to, page.up_to_hash) == (12, world.chain.blocks[12].hash)


@pytest.mark.parametrize("blocks", [6, 40])
def test_a_final_block_that_is_replaced_is_noticed(blocks: int) -> None:
    world = World()
    chain = world.open()
    world.chain.mine(6)
    page = arrivals(chain)
    world.chain.reorganise(5)
    world.chain.mine(blocks - 6)
    with pytest.raises(DeepReorganisation) as caught:
        arrivals(chain, page.up_to, page.up_to_hash)
    assert (caught.value.block, caught.value.expected) == (page.up_to, page.up_to_hash)


def test_one_node_alone_is_believed_and_named_as_such() -> None:
    world = World("a")
    sent = paid(world, COIN)
    page = arrivals(world.open())
    assert (page.found, page.one_node) == ((coin(world, sent[0]),), True)


# --- incomplete and contradicting answers ----------------------------------------------------------------------------


def no_logs(params: list[Any], honest: Any) -> Any:
    return []


def fewer_logs(params: list[Any], honest: Any) -> Any:
    return honest[:1]


def logs_of(change: Mapping[str, Any]) -> Lie:
    return lambda params, honest: [log | change for log in honest]


def no_transactions(params: list[Any], honest: Any) -> Any:
    return honest | {"transactions": []} if params[1] else honest


def more_coin(params: list[Any], honest: Any) -> Any:
    listed = [one | ({"value": hex(10**21)} if one["value"] != "0x0" else {}) for one in honest["transactions"]]
    return honest | {"transactions": listed} if params[1] else honest


def turned(params: list[Any], honest: Any) -> Any:
    return honest | {"status": "0x0" if honest["status"] == "0x1" else "0x1"}


BLOCK, LOGS, RECEIPT = "eth_getBlockByNumber", "eth_getLogs", "eth_getTransactionReceipt"
LIES: list[tuple[str, Lie]] = [
    (LOGS, no_logs),
    (LOGS, fewer_logs),
    (LOGS, logs_of({"data": f"0x{10 * AMOUNT:064x}"})),
    (LOGS, logs_of({"blockHash": "0x" + 64 * "5"})),
    (LOGS, logs_of({"transactionHash": "0x" + 64 * "5"})),
    (LOGS, logs_of({"topics": [TRANSFER_TOPIC, *(2 * ["0x" + 24 * "0" + BOB[2:].lower()])]})),
    (LOGS, lambda params, honest: None),
    (BLOCK, no_transactions),
    (BLOCK, more_coin),
    (BLOCK, lambda params, honest: {key: one for key, one in honest.items() if key != "logsBloom" or not params[1]}),
    (RECEIPT, turned),
    (RECEIPT, lambda params, honest: None),
    (RECEIPT, lambda params, honest: honest | {"blockHash": "0x" + 64 * "5"}),
    (RECEIPT, lambda params, honest: honest | {"logs": []}),
]


@pytest.mark.parametrize(("method", "lie"), LIES)
def test_an_answer_that_is_incomplete_or_contradicts_moves_no_cursor(method: str, lie: Lie) -> None:
    world = World("ab")
    paid(world, COIN, TOKENS, TOKENS)
    world.nodes["b"].lies[method] = lie
    with pytest.raises(NodesUnavailable, match="b"):
        arrivals(world.open())


@pytest.mark.parametrize(("method", "lie"), LIES)
def test_a_third_node_settles_it_and_the_liar_is_named(method: str, lie: Lie) -> None:
    world = World("abc")
    chain = world.open()
    sent = paid(world, COIN, TOKENS, TOKENS)
    world.nodes["b"].lies[method] = lie
    found = (coin(world, sent[0]), tokens(world, sent[1]), tokens(world, sent[2]))
    assert arrivals(chain).found == found
    trouble = {node.name: node.trouble for node in asyncio.run(chain.nodes())}
    assert trouble["b"]
    assert not trouble["a"] + trouble["c"]


@pytest.mark.parametrize("events", [[(TOKEN, BOB, ALICE, 5)], [(TOKEN, BOB, WALLET, 5)]])
def test_nodes_whose_index_of_events_is_behind_are_found_out_by_the_bloom_filter(events: list[Event]) -> None:
    """Both say "none" of a block with events that no transaction shows by itself."""
    world = World()
    world.chain.tokens[BOB] = Token(events=lambda sender, to, amount: events, moves=lambda *_: events)
    paid(world, Order(payout="p", to=BOB, contract=BOB, amount=1))
    for node in world.nodes.values():
        node.lies[LOGS] = no_logs
    with pytest.raises(NodesUnavailable, match=f"its events of block 1 lack those of {TOKEN.lower()}"):
        arrivals(world.open())


def test_a_block_that_only_looks_as_if_it_had_events_is_looked_through_and_passed() -> None:
    world = World()
    paid(world, COIN, TOKENS)
    for node in world.nodes.values():
        node.lies[BLOCK] = lambda params, honest: honest | {"logsBloom": "0x" + 512 * "f"}
    page = arrivals(world.open())
    assert (page.up_to, len(page.found)) == (2, 2)
    assert [sum("eth_getBlockReceipts" in one for one in node.requests) for node in world.nodes.values()] == [1, 1]


def cut(params: list[Any], honest: Any) -> Any:
    return honest[1:]


def empty(params: list[Any], honest: Any) -> Any:
    return [None for _ in honest]


@pytest.mark.parametrize("lie", [cut, empty, lambda params, honest: None])
def test_the_receipts_of_a_block_are_all_there_or_say_nothing(lie: Lie) -> None:
    world = World()
    paid(world, COIN, COIN)
    for node in world.nodes.values():
        node.lies[BLOCK] = lambda params, honest: honest | {"logsBloom": "0x" + 512 * "f"}
        node.lies["eth_getBlockReceipts"] = lie
    with pytest.raises(NodesUnavailable, match="receipt"):
        arrivals(world.open())


def test_a_bloom_filter_never_says_no_to_what_is_there() -> None:
    of_tokens = int(bloom([Movement(TOKEN.lower(), WALLET.lower(), ALICE.lower(), 1)]), 16)
    assert in_bloom(of_tokens, TOKEN.lower())
    assert in_bloom(of_tokens, TRANSFER_TOPIC)
    assert not in_bloom(of_tokens, BOB.lower())
    assert not in_bloom(0, TOKEN.lower())


def test_a_node_that_is_behind_or_away_moves_no_cursor() -> None:
    world = World()
    paid(world, COIN)
    world.nodes["b"].down = True
    with pytest.raises(NodesUnavailable, match="b"):
        arrivals(world.open())
    world.nodes["b"].down = False
    world.nodes["b"].behind = 4
    page = arrivals(world.open())
    assert (page.up_to, page.found) == (0, ())


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
            arrivals(chain)
    assert arrivals(chain).up_to == 4
    fitting = 100
    assert arrivals(chain, 4).up_to == 9


# --- tokens that lie -------------------------------------------------------------------------------------------------


def moves(*parts: tuple[str, int]) -> Callable[[str, str, int], list[Event]]:
    return lambda sender, to, amount: [(TOKEN, sender, who or to, amount * share // 100) for who, share in parts]


@pytest.mark.parametrize(
    ("moved", "why"),
    [
        (moves(), f"rose by {AMOUNT}, but it did not change"),
        (moves(("", 97), (BOB, 3)), f"rose by {AMOUNT}, but it rose by {AMOUNT * 97 // 100}"),
    ],
)
def test_what_did_not_arrive_is_disputed(moved: Any, why: str) -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(moves=moved)
    sent = paid(world, TOKENS)
    disputed = f"in block 1 the token reports that the recipient's balance {why}"
    assert arrivals(world.open()).found == (tokens(world, sent[0], disputed=disputed),)


def test_a_fee_that_the_events_show_is_no_dispute() -> None:
    """What arrives is what the event says, less than what was sent."""
    world = World()
    world.chain.tokens[TOKEN] = Token(events=moves(("", 97), (BOB, 3)))
    sent = paid(world, TOKENS)
    assert arrivals(world.open()).found == (tokens(world, sent[0], amount=AMOUNT * 97 // 100),)


def test_all_arrivals_of_a_token_in_a_block_are_disputed_together() -> None:
    """Which of two events lies can't be known from a balance."""
    world = World()
    world.chain.tokens[TOKEN] = Token(moves=lambda s, to, amount: [(TOKEN, s, to, amount)] if amount == 5 else [])
    five = Order(payout="p", to=ALICE, contract=TOKEN, amount=5)
    paid(world, five, TOKENS, COIN)
    paid(world, five)
    found = arrivals(world.open()).found
    assert [(one.block, bool(one.disputed)) for one in found] == [(1, True), (1, True), (1, False), (5, False)]


def test_what_an_address_passes_on_in_the_same_block_disputes_nothing() -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(events=lambda s, to, amount: [(TOKEN, s, to, amount), (TOKEN, to, BOB, amount)])
    sent = paid(world, TOKENS)
    assert arrivals(world.open()).found == (tokens(world, sent[0]),)


def test_a_token_without_balances_disputes_what_arrives() -> None:
    world = World()
    paid(world, TOKENS)
    for node in world.nodes.values():
        node.lies["eth_call"] = lambda params, honest: "0x"
    (found,) = arrivals(world.open()).found
    assert "gives no balance" in found.disputed


def refused(params: list[Any], honest: Any) -> Any:
    raise CallRefused(-32000, "missing trie node")


def test_a_balance_that_should_be_known_is_waited_for() -> None:
    world = World()
    paid(world, TOKENS)
    world.nodes["b"].lies["eth_call"] = refused
    with pytest.raises(NodesUnavailable, match="missing trie node"):
        arrivals(world.open())


@pytest.mark.parametrize(("forgetful", "alone"), [("a", False), ("ab", True)])
def test_where_nodes_have_dropped_the_state_the_event_decides(forgetful: str, alone: bool) -> None:
    world = World()
    sent = paid(world, TOKENS)
    world.chain.mine(STATE_BLOCKS)
    for name in forgetful:
        world.nodes[name].lies["eth_call"] = refused
    assert arrivals(world.open()).found == (tokens(world, sent[0], by_event_alone=alone),)


@pytest.mark.parametrize("forgetful", ["a", "b"])
def test_a_node_that_has_dropped_the_state_does_not_outvote_one_that_sees_a_difference(forgetful: str) -> None:
    world = World()
    world.chain.tokens[TOKEN] = Token(moves=moves())
    paid(world, TOKENS)
    world.chain.mine(STATE_BLOCKS)
    world.nodes[forgetful].lies["eth_call"] = refused
    (found,) = arrivals(world.open()).found
    assert "did not change" in found.disputed


def test_nodes_that_name_different_balances_move_no_cursor_and_are_named() -> None:
    for names in ("ab", "abc"):
        world = World(names)
        chain = world.open()
        sent = paid(world, TOKENS)
        world.nodes["b"].lies["eth_call"] = lambda params, honest: f"0x{7:064x}"
        if names == "ab":
            with pytest.raises(NodesUnavailable, match="disagree about the balance"):
                arrivals(chain)
        else:
            assert arrivals(chain).found == (tokens(world, sent[0]),)
        assert "the balance of" in {node.name: node.trouble for node in asyncio.run(chain.nodes())}["b"]


# --- what it costs ---------------------------------------------------------------------------------------------------


class Busy:
    """A chain whose every block brings tokens to many addresses, as JSON and without keys."""

    PER_BLOCK = 100

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.requests = 0
        self.ours = {CODEC.check_address("", self.address(n)) for n in range(blocks * self.PER_BLOCK)}

    def address(self, n: int) -> str:
        return f"0x{n + 10**30:040x}"

    def hash(self, block: int, n: int = 0xFFFF) -> str:
        return f"0x{block + 1:060x}{n:04x}"

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        self.requests += 1
        calls = json.loads(body)
        told = [{"id": one["id"], "result": getattr(self, one["method"])(*one["params"])} for one in calls]
        return 200, json.dumps(told).encode()

    def eth_chainId(self) -> str:
        return "0x38"

    def eth_getBlockByNumber(self, at: str, whole: bool) -> Any:
        number = self.blocks + 2 if at in ("latest", "finalized") else int(at, 16)
        paying = range(self.PER_BLOCK) if 0 < number <= self.blocks and whole else ()
        head = {"number": hex(number), "hash": self.hash(number), "parentHash": self.hash(number - 1)}
        return head | {"transactions": [self.transaction(number, n) for n in paying], "logsBloom": "0x" + 512 * "0"}

    def transaction(self, number: int, n: int) -> dict[str, Any]:
        to = self.address((number - 1) * self.PER_BLOCK + n)
        return {
            "hash": self.hash(number, n),
            "blockHash": self.hash(number),
            "blockNumber": hex(number),
            "transactionIndex": hex(n),
            "from": BOB.lower(),
            "to": TOKEN.lower(),
            "nonce": "0x1",
            "value": "0x0",
            "input": "0x" + transfer_data(to, 5).hex(),
        }

    def log(self, number: int, n: int) -> dict[str, Any]:
        to = self.address((number - 1) * self.PER_BLOCK + n)
        return {
            "address": TOKEN.lower(),
            "topics": [TRANSFER_TOPIC, *("0x" + 24 * "0" + one[2:].lower() for one in (BOB, to))],
            "data": f"0x{5:064x}",
            "logIndex": hex(n),
            "blockHash": self.hash(number),
            "transactionHash": self.hash(number, n),
        }

    def eth_getLogs(self, wanted: Mapping[str, Any]) -> Any:
        number = int(wanted["blockHash"][2:62], 16) - 1
        return [self.log(number, n) for n in range(self.PER_BLOCK if 0 < number <= self.blocks else 0)]

    def eth_getTransactionReceipt(self, hash_: str) -> Any:
        number, n = int(hash_[2:62], 16) - 1, int(hash_[62:], 16)
        where = {"transactionHash": hash_, "blockNumber": hex(number), "blockHash": self.hash(number)}
        return where | {"status": "0x1", "gasUsed": "0x1", "effectiveGasPrice": "0x1", "logs": [self.log(number, n)]}

    def eth_call(self, call: Mapping[str, str], at: str) -> str:
        n = int(call["data"][-40:], 16) - 10**30
        return f"0x{5 if int(at, 16) > n // self.PER_BLOCK else 0:064x}"


def work(run: Callable[[], object]) -> int:
    """How many Python functions of the rail were called: unlike a time, the same on every machine."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/rails/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def cost(blocks: int) -> tuple[float, float]:
    """Requests and calls of functions, for each arrival."""
    busy = Busy(blocks)
    endpoints = [Endpoint(name=name, url=f"https://{name}.example") for name in "ab"]
    chain = EvmChain(Network(name="fake", kind="evm", chain_id=56), endpoints, busy.post, lambda: 1000.0)
    found: list[Arrival] = []

    async def read_all() -> None:
        after, after_hash = 0, ""
        while after < blocks:
            page = await chain.arrivals(busy.ours, LISTED, after, after_hash, blocks)
            after, after_hash = page.up_to, page.up_to_hash
            found.extend(page.found)

    checksum_address.cache_clear()  # which the test has filled itself
    calls = work(lambda: asyncio.run(read_all()))
    assert len(found) == blocks * Busy.PER_BLOCK
    assert not any(one.disputed for one in found)
    return busy.requests / len(found), calls / len(found)


def test_an_arrival_costs_the_same_among_ten_thousand_as_among_a_hundred() -> None:
    few, many = cost(1), cost(100)
    assert many[0] <= few[0]
    assert many[1] <= 1.1 * few[1]
    # A receipt and two balances at each of two nodes, a hundred calls to a request, and some for the blocks.
    assert many[0] <= 2 * 3.5 / CALLS_MAX
