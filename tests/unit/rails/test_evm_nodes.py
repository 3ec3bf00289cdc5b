"""Nodes: which chain they are on, back-off, lag; JSON-RPC that is not what it should be; and no URL in any text."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.unit.rails.evm_fake import COIN, NORMAL, WALLET, CallRefused, World, question

from bursar.rails.chain import Confirmed, Network, NodeStatus, NodesUnavailable, Shape
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.rpc import (
    CALLS_MAX,
    Call,
    CallError,
    Endpoint,
    Malformed,
    NodeFailed,
    Rpc,
    data,
    fixed,
    quantity,
)

SECRET_URL = "https://user:pass-word@node.example/v3/0123456789abcdef?token=topsecret"


def statuses(chain: EvmChain) -> dict[str, NodeStatus]:
    return {node.name: node for node in asyncio.run(chain.nodes())}


# --- which chain -----------------------------------------------------------------------------------------------------


def test_a_node_of_another_chain_is_not_used_and_named() -> None:
    world = World("abc")
    world.nodes["b"].lies["eth_chainId"] = lambda params, honest: "0x1"
    chain = world.open()
    assert asyncio.run(chain.final_block())[0] == 0
    assert statuses(chain)["b"] == NodeStatus(name="b", usable=False, height=None, trouble="it is on chain 1, not 56")


def test_a_node_with_another_genesis_is_not_used() -> None:
    world = World("abc")
    chain = world.open(genesis=world.chain.blocks[0].hash)
    world.nodes["c"].lies["eth_getBlockByNumber"] = lambda p, honest: honest | {"hash": "0x" + 64 * "4"}
    assert statuses(chain)["c"].trouble == "its genesis block is another"
    assert statuses(chain)["a"].usable


@pytest.mark.parametrize("event", ["a minute", "a failure"])
def test_a_node_shows_its_chain_again_after_a_while_and_after_a_failure(event: str) -> None:
    """The address may lead to another machine by then."""
    world = World()
    chain = world.open()
    asyncio.run(chain.final_block())
    world.nodes["b"].lies["eth_chainId"] = lambda params, honest: "0x5"
    asyncio.run(chain.final_block())
    if event == "a minute":
        world.now += 61
    else:
        world.nodes["b"].down = True
        with pytest.raises(NodesUnavailable, match="b: no answer"):
            asyncio.run(chain.final_block())
        world.nodes["b"].down = False
        world.now += 2
    with pytest.raises(NodesUnavailable, match="b: it is on chain 5, not 56"):
        asyncio.run(chain.final_block())


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failing_node_is_left_alone_longer_each_time() -> None:
    world = World()
    chain = world.open()
    node = world.nodes["b"]
    node.down = True
    asked = []
    for _ in range(40):
        before = len(node.requests)
        with pytest.raises(NodesUnavailable):
            asyncio.run(chain.final_block())
        asked.append(len(node.requests) - before)
        world.now += 1
    assert [at for at, n in enumerate(asked) if n] == [0, 1, 3, 7, 15, 31]
    node.down = False
    world.now += 60
    assert asyncio.run(chain.final_block())[0] == 0
    assert statuses(chain)["b"].usable


def test_requests_that_fail_together_are_one_failure() -> None:
    world = World()
    chain = world.open()
    world.nodes["b"].down = True

    async def many() -> None:
        await asyncio.gather(*(chain.slot(WALLET) for _ in range(50)), return_exceptions=True)

    asyncio.run(many())
    world.nodes["b"].down = False
    world.now += 1.1
    asyncio.run(chain.final_block())


def test_a_long_outage_ends_like_a_short_one() -> None:
    world = World()
    chain = world.open()
    world.nodes["b"].down = True
    for _ in range(1_100):
        with pytest.raises(NodesUnavailable):
            asyncio.run(chain.slot(WALLET))
        world.now += 61
    world.nodes["b"].down = False
    asyncio.run(chain.final_block())


def test_a_question_that_no_node_can_answer_does_not_keep_others_from_being_asked() -> None:
    """A recipient can be chosen so that nodes give an error that says nothing."""

    def strange(params: list[Any], honest: Any) -> Any:
        raise CallRefused(-32000, "something that no list contains")

    world = World()
    for node in world.nodes.values():
        node.lies["eth_estimateGas"] = strange
    chain = world.open()
    with pytest.raises(NodesUnavailable, match="something that no list contains"):
        asyncio.run(chain.quote(WALLET, COIN, Shape.PAY, NORMAL))
    assert asyncio.run(chain.final_block())[0] == 0
    assert [node.trouble for node in asyncio.run(chain.nodes())] == ["", ""]


def test_a_node_that_is_behind_is_shown_as_such() -> None:
    world = World("abc")
    world.chain.mine(50)
    world.nodes["c"].behind = 11
    chain = world.open()
    assert statuses(chain)["c"] == NodeStatus(name="c", usable=False, height=39, trouble="it is 11 blocks behind")
    world.nodes["c"].behind = 10
    assert statuses(chain)["c"].usable


def test_one_node_of_three_that_claims_a_great_height_does_not_put_the_others_behind() -> None:
    world = World("abc")
    world.chain.mine(5)
    world.nodes["c"].lies["eth_getBlockByNumber"] = lambda params, honest: (
        honest | {"number": hex(10**9)} if params[0] == "latest" else honest
    )
    chain = world.open()
    assert [node.usable for node in statuses(chain).values()] == [True, True, True]
    assert asyncio.run(chain.final_block()) == (3, world.chain.blocks[3].hash)


def test_one_node_alone_is_a_chain_too() -> None:
    world = World("a")
    world.chain.mine(5)
    assert asyncio.run(world.open().final_block())[0] == 3


def test_a_node_without_finalized_blocks_can_not_serve_a_chain_that_has_them() -> None:
    world = World()
    world.nodes["b"].lies["eth_getBlockByNumber"] = lambda p, honest: None if p[0] == "finalized" else honest
    chain = world.open()
    with pytest.raises(NodesUnavailable, match="b: malformed answer"):
        asyncio.run(chain.final_block())


def test_nodes_that_do_not_have_their_own_final_block_say_nothing() -> None:
    world = World()
    for node in world.nodes.values():
        node.lies["eth_getBlockByNumber"] = lambda p, honest: honest if p[0] in ("latest", "finalized") else None
    with pytest.raises(NodesUnavailable, match=r"no node has block 0 \(a: malformed answer"):
        asyncio.run(world.open().final_block())


def test_nodes_need_names_and_urls_of_their_own() -> None:
    """One node under two names would be its own witness."""

    async def post(url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        return 500, b""

    network = Network(name="fake", kind="evm", chain_id=56)
    for pairs in ([], [("a", "http://1"), ("a", "http://2")], [("a", "http://1"), ("b", "http://1")]):
        endpoints = [Endpoint(name=name, url=url) for name, url in pairs]
        with pytest.raises(ValueError, match="its own name and URL"):
            EvmChain(network, endpoints, post, lambda: 0.0)


def test_a_second_chain_is_only_data() -> None:
    """The same nodes under another chain id serve nothing."""
    world = World(chain_id=137)
    with pytest.raises(NodesUnavailable, match="it is on chain 137, not 56"):
        asyncio.run(world.open().final_block())


# --- JSON-RPC --------------------------------------------------------------------------------------------------------


def rpc(answer: Callable[[list[Any]], Any], status: int = 200, timeout_s: float = 1.0) -> Rpc:
    async def post(url: str, headers: Mapping[str, str], body: bytes, _: float) -> tuple[int, bytes]:
        made = answer(json.loads(body))
        return status, made if isinstance(made, bytes) else json.dumps(made).encode()

    return Rpc(Endpoint(name="n", url=SECRET_URL, headers={"authorization": "Bearer sesame-open"}), post, timeout_s)


def ok(calls: list[Any]) -> list[Any]:
    return [{"jsonrpc": "2.0", "id": call["id"], "result": call["method"]} for call in calls]


def test_results_are_matched_by_id() -> None:
    calls = [Call("one"), Call("two", ("0x1",)), Call("three")]
    assert asyncio.run(rpc(lambda made: ok(made)[::-1]).batch(calls)) == ["one", "two", "three"]


def test_a_long_batch_is_split() -> None:
    sizes = []

    def answer(calls: list[Any]) -> Any:
        sizes.append(len(calls))
        return ok(calls)

    names = [f"m{n}" for n in range(2 * CALLS_MAX + 1)]
    assert asyncio.run(rpc(answer).batch([Call(name) for name in names])) == names
    assert sizes == [CALLS_MAX, CALLS_MAX, 1]


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (lambda calls: b"<html>", 200, "no JSON-RPC batch"),
        (lambda calls: b"", 200, "no JSON-RPC batch"),
        (lambda calls: 100_000 * b"[", 200, "no JSON-RPC batch"),
        (lambda calls: b'[{"id":0,"result":' + 100_000 * b"[", 200, "no JSON-RPC batch"),
        (lambda calls: {"jsonrpc": "2.0", "id": None, "error": {"code": 1}}, 200, "no JSON-RPC batch"),
        (lambda calls: ok(calls)[:1], 200, "2 calls were made and 1"),
        (lambda calls: ok(calls)[:1] * 2, 200, "2 calls were made and 1"),
        (lambda calls: [one | {"id": 7} for one in ok(calls)], 200, "2 calls were made"),
        (lambda calls: ok(calls) + ok(calls)[:1], 200, "2 calls were made"),
        (lambda calls: bytes(33 << 20), 200, "too large"),
        (ok, 429, "HTTP status 429"),
        (ok, 302, "HTTP status 302"),
    ],
)
def test_anything_but_an_answer_to_every_call_is_a_failure(
    answer: Callable[[list[Any]], Any], status: int, why: str
) -> None:
    with pytest.raises(NodeFailed, match=why):
        asyncio.run(rpc(answer, status).batch([Call("a"), Call("b")]))


def test_an_error_of_one_call_is_its_value() -> None:
    def answer(calls: list[Any]) -> Any:
        error = {"code": 3, "message": "execution reverted", "data": "0x0102"}
        return [{"id": 0, "result": None}, {"id": 1, "error": error}, {"id": 2, "error": {}}]

    found = asyncio.run(rpc(answer).batch([Call("a"), Call("b"), Call("c")]))
    assert found == [None, CallError(3, "execution reverted", b"\x01\x02"), CallError(0, "None")]


def hanging(calls: list[Any]) -> Any:
    raise TimeoutError(SECRET_URL)


def refused(calls: list[Any]) -> Any:
    raise ConnectionError(f"cannot reach {SECRET_URL}")


def telling(calls: list[Any]) -> Any:
    return f"invalid project 0123456789abcdef at {SECRET_URL}, not sesame-open".encode()


def complaining(calls: list[Any]) -> Any:
    return [{"id": 0, "error": {"code": 1, "message": "key 0123456789abcdef (topsecret, pass-word) is over its limit"}}]


@pytest.mark.parametrize("answer", [hanging, refused, telling, complaining])
def test_no_text_contains_the_url_or_a_key(answer: Callable[[list[Any]], Any]) -> None:
    node = rpc(answer)
    try:
        text = repr(asyncio.run(node.batch([Call("a")])))
        assert "is over its limit" in text
    except NodeFailed as error:
        text = "".join(traceback.format_exception(error, chain=True)) + error.why
    for secret in ("0123456789abcdef", "topsecret", "pass-word", "node.example", "sesame-open"):
        assert secret not in text
    assert "node.example" not in repr(Endpoint(name="n", url=SECRET_URL, headers={"authorization": "sesame"}))


def test_statuses_and_fates_do_not_contain_urls() -> None:
    world = World()
    chain = world.open()
    signed = world.submit(world.sign(COIN))
    world.finish()
    world.nodes["b"].down = True
    text = repr(asyncio.run(chain.fate(question(COIN, signed)))) + repr(asyncio.run(chain.nodes()))
    text += repr(asyncio.run(chain.send(signed.raw)))
    assert "b: no answer" in text
    assert "secret-key" not in text
    world.nodes["b"].down = False
    world.now += 60
    assert isinstance(asyncio.run(chain.fate(question(COIN, signed))), Confirmed)
    assert asyncio.run(chain.slot(WALLET)).nonce == 1


@pytest.mark.parametrize(
    "value", ["0x", "0x01", "1", 1, None, "0X1", "0xg", "-0x1", "0x" + 66 * "1", " 0x1", "0x1\n", "0x\uff11"]
)
def test_a_quantity_is_read_strictly(value: Any) -> None:
    with pytest.raises(Malformed):
        quantity(value)


@pytest.mark.parametrize("value", ["0x1", "", None, "0xzz", 5, "0x12 "])
def test_data_is_read_strictly(value: Any) -> None:
    with pytest.raises(Malformed):
        data(value)


def test_values_that_are_right() -> None:
    assert [quantity(value) for value in ("0x0", "0x1f", "0x1F", "0x" + 64 * "f")] == [0, 31, 31, 2**256 - 1]
    assert [data(value) for value in ("0x", "0x00ff")] == [b"", b"\x00\xff"]
    assert fixed("0x" + 40 * "A", 20) == "0x" + 40 * "a"
    for wrong in ("0x" + 39 * "a", "0x" + 42 * "a", None):
        with pytest.raises(Malformed):
            fixed(wrong, 20)
