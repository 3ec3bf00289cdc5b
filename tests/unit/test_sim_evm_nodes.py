"""Simulated EVM nodes: JSON-RPC as real nodes speak it, views that differ, requests that break, and lies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from eth_abi.abi import decode as abi_decode
from eth_utils.address import to_checksum_address
from eth_utils.crypto import keccak
from tests.unit.sim_chain_builders import (
    ALICE,
    BOB,
    CAROL,
    COIN_UNIT,
    USDT,
    a_world,
    pays_token,
    signed,
    transfer_data,
)

from bursar.rails.chain import Arrival, Network, NodesUnavailable
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.rpc import Endpoint
from bursar.sim import Kernel, run
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Behaviour
from bursar.sim.evm_nodes import Nodes, all_final, hidden, invented, receipt_says
from bursar.sim.evm_rpc import TRANSFER_TOPIC, RpcError
from bursar.sim.evm_world import GWEI, World

TIMEOUT_S = 5.0


async def no_sleep(_seconds: float) -> None:
    return


def post(nodes: Nodes, body: Any, node: str = "one") -> Any:
    async def main() -> tuple[int, bytes]:
        return await nodes.transport(no_sleep)(nodes[node].url, {}, msgspec.json.encode(body), TIMEOUT_S)

    status, answer = asyncio.run(main())
    assert status == 200
    return msgspec.json.decode(answer)


def ask(nodes: Nodes, method: str, *params: Any, node: str = "one") -> Any:
    answer = post(nodes, {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}, node)
    assert answer["id"] == 7
    return answer["result"] if "result" in answer else answer["error"]


def send(nodes: Nodes, raw: bytes, node: str = "one") -> Any:
    return ask(nodes, "eth_sendRawTransaction", "0x" + raw.hex(), node=node)


@pytest.fixture
def world() -> World:
    return a_world()


@pytest.fixture
def nodes(world: World) -> Nodes:
    return Nodes(world, ("one", "two"), seed=1)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_transaction_from_pool_to_receipt(world: World, nodes: Nodes) -> None:
    hash = send(nodes, pays_token(1_000))
    waiting = ask(nodes, "eth_getTransactionByHash", hash, node="two")
    assert waiting["blockHash"] is None and waiting["from"] == ALICE.address.lower()
    assert ask(nodes, "eth_getTransactionReceipt", hash) is None
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "pending") == "0x1"
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "latest") == "0x0"
    block = world.mine()
    receipt = ask(nodes, "eth_getTransactionReceipt", hash)
    assert (receipt["status"], receipt["blockHash"], receipt["blockNumber"]) == ("0x1", block.hash, "0x2")
    assert int(receipt["effectiveGasPrice"], 16) == block.base_fee + 2 * GWEI
    (log,) = receipt["logs"]
    assert log["address"] == USDT and log["topics"][0] == TRANSFER_TOPIC
    assert log["topics"][2] == "0x" + 24 * "0" + CAROL[2:] and int(log["data"], 16) == 1_000
    shown = ask(nodes, "eth_getBlockByNumber", "latest", True)
    assert shown["hash"] == block.hash and shown["transactions"] == [ask(nodes, "eth_getTransactionByHash", hash)]
    assert ask(nodes, "eth_getBlockByHash", block.hash, False)["transactions"] == [hash]
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "0x1") == "0x0"
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "finalized") == "0x0"


def test_balances_code_ids_and_calls(world: World, nodes: Nodes) -> None:
    world.mine()
    balance_of = "0x70a08231" + 24 * "0" + ALICE.address[2:].lower()
    assert int(ask(nodes, "eth_call", {"to": USDT, "data": balance_of}, "latest"), 16) == 1_000_000
    assert int(ask(nodes, "eth_call", {"to": USDT, "data": balance_of}, {"blockNumber": "0x0"}), 16) == 0
    assert int(ask(nodes, "eth_call", {"to": USDT, "data": "0x313ce567"}, "latest"), 16) == 6
    assert int(ask(nodes, "eth_getBalance", ALICE.address, "latest"), 16) == 100 * COIN_UNIT
    assert ask(nodes, "eth_getCode", USDT, "latest") != "0x"
    assert ask(nodes, "eth_getCode", CAROL, "latest") == "0x"
    assert (ask(nodes, "eth_chainId"), ask(nodes, "net_version"), ask(nodes, "eth_blockNumber")) == ("0x1", "1", "0x2")


def transfer_call(to: str, amount: int) -> dict[str, str]:
    return {"from": ALICE.address, "to": USDT, "data": "0x" + transfer_data(to, amount).hex()}


def test_dry_run_of_a_transfer(world: World, nodes: Nodes) -> None:
    assert int(ask(nodes, "eth_call", transfer_call(CAROL, 5), "latest"), 16) == 1
    assert int(ask(nodes, "eth_estimateGas", transfer_call(CAROL, 5)), 16) > 51_000
    assert ask(nodes, "eth_estimateGas", {"from": ALICE.address, "to": CAROL, "value": "0x1"}) == hex(21_000)
    world.tokens[USDT].blacklist.add(CAROL)
    error = ask(nodes, "eth_call", transfer_call(CAROL, 5), "latest")
    assert (error["code"], error["message"]) == (3, "execution reverted: Blacklistable: account is blacklisted")
    assert abi_decode(["string"], bytes.fromhex(error["data"][10:])) == ("Blacklistable: account is blacklisted",)
    assert "exceeds balance" in ask(nodes, "eth_estimateGas", transfer_call(BOB.address, 10**9))["message"]
    world.tokens[USDT].behaviour = Behaviour.RETURNS_NOTHING
    assert ask(nodes, "eth_call", transfer_call(BOB.address, 5), "latest") == "0x"


def test_estimate_is_what_the_transaction_uses(world: World, nodes: Nodes) -> None:
    estimate = int(ask(nodes, "eth_estimateGas", transfer_call(CAROL, 5)), 16)
    send(nodes, pays_token(5, gas=estimate))
    (receipt,) = world.mine().receipts
    assert receipt.ok and receipt.gas_used == estimate


def test_fees(world: World, nodes: Nodes) -> None:
    world.terms.background_gas, world.terms.background_tip = 30_000_000, 3 * GWEI
    world.mine()
    world.mine()
    history = ask(nodes, "eth_feeHistory", "0x2", "latest", [50])
    assert history["oldestBlock"] == "0x2" and history["gasUsedRatio"] == [1.0, 1.0]
    assert [int(fee, 16) for fee in history["baseFeePerGas"]] == [
        world.blocks[2].base_fee,
        world.blocks[3].base_fee,
        world.base_fee(),
    ]
    assert history["reward"] == [[hex(3 * GWEI)]] * 2
    assert ask(nodes, "eth_maxPriorityFeePerGas") == hex(3 * GWEI)
    assert int(ask(nodes, "eth_gasPrice"), 16) == world.base_fee() + 3 * GWEI


def test_logs_by_range_hash_and_topic(world: World, nodes: Nodes) -> None:
    send(nodes, pays_token(1))
    first = world.mine()
    send(nodes, pays_token(2, nonce=1, to=BOB.address))
    world.mine()
    to_carol = [TRANSFER_TOPIC, None, "0x" + 24 * "0" + CAROL[2:]]
    everything = {"fromBlock": "0x0", "toBlock": "latest", "address": USDT}
    assert [int(log["data"], 16) for log in ask(nodes, "eth_getLogs", everything)] == [1, 2]
    assert [int(log["data"], 16) for log in ask(nodes, "eth_getLogs", everything | {"topics": to_carol})] == [1]
    assert [int(log["data"], 16) for log in ask(nodes, "eth_getLogs", {"blockHash": first.hash})] == [1]
    assert ask(nodes, "eth_getLogs", {"blockHash": "0x" + 64 * "1"})["message"] == "unknown block"
    assert ask(nodes, "eth_getLogs", everything | {"address": [CAROL]}) == []


def test_batch_and_errors(nodes: Nodes) -> None:
    batch = [
        {"jsonrpc": "2.0", "id": id, "method": method, "params": []} for id, method in enumerate(["eth_chainId", "x"])
    ]
    good, bad = post(nodes, batch)
    assert good == {"jsonrpc": "2.0", "id": 0, "result": "0x1"}
    assert (bad["id"], bad["error"]["code"]) == (1, -32601)
    assert ask(nodes, "eth_getBalance")["code"] == -32602
    assert send(nodes, b"\x02\xc0")["code"] == -32000


def test_send_answers_as_nodes_do(world: World, nodes: Nodes) -> None:
    raw = signed()
    assert send(nodes, raw) == "0x" + keccak(raw).hex()
    assert send(nodes, raw)["message"] == "already known"
    assert send(nodes, signed(value=1))["message"] == "replacement transaction underpriced"
    world.mine()
    assert send(nodes, raw)["message"].startswith("nonce too low")


# --- views -----------------------------------------------------------------------------------------------------------


def test_lagging_node_is_consistent_with_itself(world: World, nodes: Nodes) -> None:
    for _ in range(2):
        world.mine()
    nodes["two"].lag = 2
    hash = send(nodes, signed())
    world.mine()
    world.mine()
    assert ask(nodes, "eth_getTransactionReceipt", hash)["status"] == "0x1"
    assert ask(nodes, "eth_getTransactionReceipt", hash, node="two") is None
    assert ask(nodes, "eth_getTransactionByHash", hash, node="two")["blockHash"] is None
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "latest", node="two") == "0x0"
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "pending", node="two") == "0x1"
    assert ask(nodes, "eth_getBlockByNumber", "0x5", False, node="two") is None
    assert ask(nodes, "eth_getBalance", CAROL, "0x5", node="two")["message"] == "header not found"
    nodes["two"].lag = 0
    assert ask(nodes, "eth_getTransactionReceipt", hash, node="two")["status"] == "0x1"


def test_pruning_node_forgets_old_receipts_and_state(world: World, nodes: Nodes) -> None:
    hash = send(nodes, pays_token(1))
    world.mine()
    for _ in range(5):
        world.mine()
    nodes["two"].keeps = 3
    assert ask(nodes, "eth_getTransactionReceipt", hash) is not None
    assert ask(nodes, "eth_getTransactionReceipt", hash, node="two") is None
    assert ask(nodes, "eth_getTransactionByHash", hash, node="two") is None
    assert "pruned" in ask(nodes, "eth_getTransactionCount", ALICE.address, "0x1", node="two")["message"]
    assert "pruned" in ask(nodes, "eth_getLogs", {"fromBlock": "0x0"}, node="two")["message"]


def test_isolated_node_keeps_its_transactions_to_itself(world: World, nodes: Nodes) -> None:
    nodes["one"].isolated = True
    raw = signed()
    hash = send(nodes, raw)
    assert ask(nodes, "eth_getTransactionByHash", hash, node="two") is None
    assert world.mine().receipts == ()
    nodes["one"].isolated = False
    assert send(nodes, raw)["message"] == "already known"
    assert [one.tx.hash for one in world.mine().receipts] == [hash]


def test_healed_nodes_pass_on_what_they_hold(world: World, nodes: Nodes) -> None:
    nodes["one"].isolated = True
    hash = send(nodes, signed())
    nodes.heal()
    assert ask(nodes, "eth_getTransactionByHash", hash, node="two") is not None
    assert [one.tx.hash for one in world.mine().receipts] == [hash]


def test_dropped_everywhere(world: World, nodes: Nodes) -> None:
    hash = send(nodes, signed())
    nodes.drop(hash)
    assert ask(nodes, "eth_getTransactionByHash", hash) is None
    assert world.mine().receipts == ()


def test_node_on_a_fork_of_its_own(world: World, nodes: Nodes) -> None:
    hash = send(nodes, signed())
    world.mine()
    nodes["two"].world = world.branch("two", depth=1)
    told, true = (ask(nodes, "eth_getTransactionReceipt", hash, node=node) for node in ("two", "one"))
    assert told["status"] == true["status"] == "0x1" and told["blockHash"] != true["blockHash"]
    nodes.heal()
    assert ask(nodes, "eth_getTransactionReceipt", hash, node="two") == true


# --- requests that break ---------------------------------------------------------------------------------------------


def failing_send(nodes: Nodes, fault: Fault, raw: bytes) -> type[BaseException] | int:
    nodes["one"].script.append(fault)
    body = msgspec.json.encode({"id": 1, "method": "eth_sendRawTransaction", "params": ["0x" + raw.hex()]})

    async def main() -> int:
        return (await nodes.transport(no_sleep)(nodes["one"].url, {}, body, TIMEOUT_S))[0]

    try:
        return asyncio.run(main())
    except OSError as error:
        return type(error)


@pytest.mark.parametrize(
    ("fault", "heard", "arrived"),
    [
        (Fault.REFUSED, ConnectionResetError, False),
        (Fault.REPLY_LOST, ConnectionResetError, True),
        (Fault.HANGS, TimeoutError, False),
        (Fault.SLOW, TimeoutError, True),
        (Fault.BUSY, 429, False),
        (Fault.BROKEN, 502, True),
        (Fault.LATE, TimeoutError, False),
    ],
)
def test_what_a_fault_leaves_behind(
    world: World, nodes: Nodes, fault: Fault, heard: type[BaseException] | int, arrived: bool
) -> None:
    assert failing_send(nodes, fault, signed()) == heard
    assert len(world.pool) == arrived
    if fault is Fault.LATE:
        nodes.heal()
        assert len(world.pool) == 1


def test_node_that_is_down_hangs_or_is_slow(nodes: Nodes) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    def outcome(node: str) -> type[BaseException] | int:
        body = msgspec.json.encode({"id": 1, "method": "eth_chainId"})

        async def main() -> int:
            return (await nodes.transport(sleep)(nodes[node].url, {}, body, TIMEOUT_S))[0]

        try:
            return asyncio.run(main())
        except OSError as error:
            return type(error)

    nodes["one"].down = True
    assert outcome("one") is ConnectionRefusedError
    nodes["two"].hangs = True
    assert outcome("two") is TimeoutError and waited[-1] == TIMEOUT_S
    nodes.heal()
    nodes["two"].slow_s = 3.0
    assert outcome("two") == 200 and waited[-1] >= 3.0
    assert outcome("one") == 200


# --- lies ------------------------------------------------------------------------------------------------------------


def test_scripted_lies_are_of_one_node(world: World, nodes: Nodes) -> None:
    hash = send(nodes, pays_token(1_000))
    world.mine()
    truth = ask(nodes, "eth_getTransactionReceipt", hash)
    other = "0x" + 64 * "a"
    nodes["two"].lies = [receipt_says(hash, status=0, block_hash=other, amount=7)]
    told = ask(nodes, "eth_getTransactionReceipt", hash, node="two")
    assert (told["status"], told["blockHash"], told["logs"][0]["data"][-1]) == ("0x0", other, "7")
    assert ask(nodes, "eth_getTransactionReceipt", hash) == truth
    nodes["two"].lies = [hidden(hash)]
    assert ask(nodes, "eth_getTransactionByHash", hash, node="two") is None
    assert ask(nodes, "eth_getBlockByNumber", "latest", True, node="two")["transactions"] == []
    assert ask(nodes, "eth_getBlockByNumber", "latest", False, node="two")["transactions"] == []
    assert ask(nodes, "eth_getLogs", {"fromBlock": "0x0"}, node="two") == []
    nodes["two"].chain_id = 5
    assert ask(nodes, "eth_chainId", node="two") == "0x5"


@pytest.mark.parametrize("behaviour", [Behaviour.HONEST, Behaviour.TAKES_FEE, Behaviour.LIES])
def test_the_rail_finds_what_arrives_through_trouble_and_never_what_a_liar_says(behaviour: Behaviour) -> None:
    """The same chain that judges payouts, asked about arrivals by the real rail."""
    world = a_world(behaviour)
    nodes = Nodes(world, ("one", "two", "three"), seed=3)
    paid = [send(nodes, raw) for raw in (pays_token(1_000), signed(nonce=1), pays_token(500, nonce=2))]
    for _ in range(20):
        world.mine()
    invention = invented(world, signed(BOB, value=5), 2)
    nodes["two"].lies = [hidden(paid[2]), invention]
    nodes.trouble = 0.2
    network = Network(name="sim", kind="evm", chain_id=1)
    endpoints = [Endpoint(name=name, url=nodes[name].url) for name in nodes.by_name]
    moments = iter(range(0, 10**9, 100))
    chain = EvmChain(network, endpoints, nodes.transport(no_sleep), lambda: next(moments))
    ours, listed = {to_checksum_address(CAROL)}, frozenset({to_checksum_address(USDT)})
    found: list[Arrival] = []
    after, after_hash = 0, ""
    for _ in range(300):
        with suppress(NodesUnavailable):
            page = asyncio.run(chain.arrivals(ours, listed, after, after_hash, world.finalized))
            after, after_hash = page.up_to, page.up_to_hash
            found += page.found
        if after == world.finalized:
            break
    assert after == world.finalized
    kept = 99 if behaviour is Behaviour.TAKES_FEE else 100
    expected = [(paid[0], "0", 10 * kept), (paid[1], "coin", COIN_UNIT), (paid[2], "0", 5 * kept)]
    assert [(one.hash, one.part, one.amount) for one in found] == expected
    assert [bool(one.disputed) for one in found if one.contract] == 2 * [behaviour is Behaviour.LIES]


def test_invented_transaction(world: World, nodes: Nodes) -> None:
    world.mine()
    raw = pays_token(1_000)
    nodes["two"].lies = [invented(world, raw, 2)]
    hash = ask(nodes, "eth_getBlockByNumber", "latest", False, node="two")["transactions"][0]
    assert ask(nodes, "eth_getTransactionReceipt", hash, node="two")["status"] == "0x1"
    assert ask(nodes, "eth_getTransactionCount", ALICE.address, "latest", node="two") == "0x1"
    assert ask(nodes, "eth_getTransactionReceipt", hash) is None
    assert world.effects() == []


def test_node_that_calls_its_head_final(world: World, nodes: Nodes) -> None:
    for _ in range(20):
        world.mine()
    assert ask(nodes, "eth_getBlockByNumber", "finalized", False)["number"] == hex(world.finalized)
    assert ask(nodes, "eth_getBlockByNumber", "safe", False)["number"] == hex(world.finalized + 6)
    nodes["two"].lies = [all_final(nodes["two"])]
    assert ask(nodes, "eth_getBlockByNumber", "finalized", False, node="two")["number"] == hex(world.head.number)


def test_lie_of_any_kind(nodes: Nodes) -> None:
    nodes["two"].lies = [lambda method, _params, truth: "0x0" if method == "eth_getBalance" else truth]
    assert ask(nodes, "eth_getBalance", ALICE.address, node="two") == "0x0"
    with pytest.raises(RpcError):
        nodes["two"].say("eth_unknown", [])


# --- in the simulator ------------------------------------------------------------------------------------------------


def traffic(trouble: float) -> Callable[[Kernel], Any]:
    async def main(kernel: Kernel) -> tuple[list[str], list[str]]:
        world = a_world()
        nodes = Nodes(world, ("one", "two"), kernel.seed, trouble=trouble)
        caller = kernel.start("caller")
        heard: list[str] = []

        async def work() -> None:
            send_to = nodes.transport(caller.ports.sleep)
            for nonce in range(8):
                raw = "0x" + signed(nonce=nonce).hex()
                body = msgspec.json.encode({"id": 1, "method": "eth_sendRawTransaction", "params": [raw]})
                for node in ("one", "two"):
                    try:
                        status, _ = await send_to(nodes[node].url, {}, body, TIMEOUT_S)
                        heard.append(str(status))
                    except OSError as error:
                        heard.append(type(error).__name__)
                world.mine()

        await caller.spawn(work())
        nodes.heal()
        world.mine()
        return heard, [block.hash for block in world.blocks]

    return main


def test_same_seed_gives_the_same_troubles() -> None:
    first, second = (run(traffic(0.5), 3) for _ in range(2))
    assert first.value == second.value and first.trace_hash == second.trace_hash
    assert len(set(first.value[0])) > 2
    assert run(traffic(0.5), 4).value[0] != first.value[0]
    assert set(run(traffic(0.0), 3).value[0]) == {"200"}
