"""A TRON chain behind its nodes: quotes, expirations, sending, balances, the watcher's pages, and nodes that err."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from tests.tron_fake import (
    CODEC,
    HOT,
    NEW,
    OTHER,
    OTHER_KEY,
    SHOP,
    TOKEN,
    TRX,
    USDT,
    TronTown,
    no_sleep,
    sign,
    trx,
    usdt,
)
from tests.unit.rails.test_tron_fates import THREE, on_virtual_chain, says

from bursar.http import Pool
from bursar.model.records import Priority
from bursar.rails.chain import (
    DeepReorganisation,
    Fee,
    FeeTooHigh,
    InvalidAddress,
    NodesUnavailable,
    Order,
    Shape,
    Unbuildable,
    Undecodable,
    WalletShort,
    WouldRevert,
)
from bursar.rails.nodes import ANSWER_BYTES_MAX, Endpoint
from bursar.rails.tron.addresses import bytes_of
from bursar.rails.tron.chain import EXPIRES_MS, TronChain
from bursar.rails.tron.codec import content, encode, spends
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Behaviour


def _instead(answer: Any, _truth: Any) -> Any:
    return answer


async def quoted(town: TronTown, order: Order) -> Fee:
    return await town.chain.quote(HOT, order, Shape.PAY, Priority.NORMAL)


# --- fees ------------------------------------------------------------------------------------------------------------


@on_virtual_chain
async def test_quote_covers_what_each_payment_then_costs() -> None:
    town = TronTown()
    orders = (usdt(), usdt(), trx(), trx(to=NEW), trx(memo="hello"), usdt(memo="hello", to=OTHER), trx(), usdt())
    for number, order in enumerate(orders):
        fee = await quoted(town, order)
        raw, hash_ = sign(town.network, order, await town.slot(), fee)
        assert CODEC.read(raw)[0].fee.worst >= fee.worst - 10_000, "the signer counts no less than the quote"
        await town.chain.send(raw)
        town.mine()
        found = town.world.find(hash_)
        assert found is not None and found[1].result == "SUCCESS", number
        assert found[1].fee <= fee.worst


@on_virtual_chain
async def test_energy_has_a_margin_and_a_ceiling_per_asset() -> None:
    town = TronTown()
    fee = await quoted(town, usdt())
    assert (fee.gas_limit, fee.price) == (27_414 * 5 // 4 + 1 + 15_000, 100)
    tight = await quoted(town, msgspec.structs.replace(usdt(), gas_limit_max=30_000))
    assert tight.gas_limit == 30_000
    with pytest.raises(WouldRevert, match="27414 energy"):
        await quoted(town, msgspec.structs.replace(usdt(), gas_limit_max=27_413))


@on_virtual_chain
async def test_dear_energy_waits_and_trx_needs_none() -> None:
    town = TronTown()
    town.world.terms.energy = 421
    with pytest.raises(FeeTooHigh):
        await quoted(town, usdt())
    assert (await quoted(town, trx())).gas_limit == 0


@pytest.mark.parametrize("order", [usdt(5_001 * USDT), trx(1_000 * TRX), trx(999_800_000)])
@on_virtual_chain
async def test_wallet_that_has_too_little_waits(order: Order) -> None:
    with pytest.raises(WalletShort):
        await quoted(TronTown(), order)


@on_virtual_chain
async def test_payment_that_the_chain_would_refuse_is_not_signed() -> None:
    town = TronTown()
    town.token.blacklist.add(SHOP)
    with pytest.raises(WouldRevert, match="blacklisted"):
        await quoted(town, usdt())
    town.token.blacklist.clear()
    town.token.behaviour = Behaviour.RETURNS_FALSE
    with pytest.raises(WouldRevert, match="returns false"):
        await quoted(town, usdt())
    town.token.behaviour = Behaviour.RETURNS_NOTHING
    assert (await quoted(town, usdt())).gas_limit
    with pytest.raises(WouldRevert, match="contract"):
        await quoted(town, trx(to=TOKEN))
    with pytest.raises(WouldRevert, match="no contract"):
        await quoted(town, msgspec.structs.replace(usdt(), contract=OTHER))
    with pytest.raises(Unbuildable):
        await town.chain.quote(HOT, trx(), Shape.CANCEL, Priority.NORMAL)


@on_virtual_chain
async def test_one_node_alone_refuses_no_payment() -> None:
    town = TronTown()
    town.token.blacklist.add(SHOP)
    town.nodes["two"].down = True
    with pytest.raises(NodesUnavailable, match="only one says"):
        await quoted(town, usdt())
    town.nodes["two"].down = False
    town.wait(60)
    town.token.blacklist.clear()
    town.nodes["one"].lies.append(
        says("wallet/triggerconstantcontract", lambda said: said | {"transaction": {"ret": [{"ret": "FAILED"}]}})
    )
    assert (await quoted(town, usdt())).gas_limit, "the other node says that it works"


@on_virtual_chain
async def test_one_node_of_three_neither_sets_a_price_nor_makes_a_contract() -> None:
    town = TronTown(THREE)
    usual = await quoted(town, usdt())
    wrong = {"chainParameter": [{"key": key, "value": 10**9} for key in ("getEnergyFee", "getTransactionFee")]}
    wrong["chainParameter"].append({"key": "getMaxFeeLimit", "value": 1})
    town.nodes["two"].lies.append(says("wallet/getchainparameters", lambda _: wrong))
    town.nodes["two"].lies.append(says("wallet/triggerconstantcontract", lambda said: said | {"energy_used": 10**9}))
    assert await quoted(town, usdt()) == usual
    town.nodes["two"].lies.append(
        says("wallet/getcontract", lambda _: {"contract_address": bytes_of(SHOP).hex(), "bytecode": "00"})
    )
    assert not await town.chain.is_contract(SHOP)
    town = TronTown()
    town.nodes["two"].lies.append(
        says("wallet/getcontract", lambda _: {"contract_address": bytes_of(SHOP).hex(), "bytecode": "00"})
    )
    with pytest.raises(NodesUnavailable, match="disagree"):
        await town.chain.is_contract(SHOP)


@on_virtual_chain
async def test_dry_run_that_runs_out_of_time_by_chance_is_tried_again() -> None:
    town = TronTown()
    times = iter([True] * 2)

    def once(said: Any) -> Any:
        timeout = {"result": {"code": "OTHER_ERROR", "message": "OutOfTimeException : CPU timeout for 'PUSH1'"}}
        return timeout if next(times, False) else said

    for node in town.nodes.by_name.values():
        node.lies.append(says("wallet/triggerconstantcontract", once))
    assert (await quoted(town, usdt())).gas_limit


@on_virtual_chain
async def test_parameters_without_prices_are_no_quote() -> None:
    town = TronTown()
    for node in town.nodes.by_name.values():
        node.lies.append(says("wallet/getchainparameters", lambda _: {"chainParameter": [{"key": "getEnergyFee"}]}))
    with pytest.raises(NodesUnavailable, match="parameters"):
        await quoted(town, trx())


# --- expirations and sending -----------------------------------------------------------------------------------------


@on_virtual_chain
async def test_slots_of_one_moment_differ_and_count_from_a_final_block() -> None:
    town = TronTown()
    slots = [await town.slot() for _ in range(50)]
    assert len(set(slots)) == 50, "two equal payouts are two transactions (W27)"
    final = town.world.blocks[town.world.finalized]
    for slot in slots:
        assert slot.expires == final.timestamp + EXPIRES_MS
        unsigned = CODEC.build(town.network, HOT, trx(), Shape.PAY, slot, Fee(gas_limit=0, price=0))
        found = content(unsigned)
        assert (found.block_bytes.hex() + found.block_hash.hex()) == final.id[12:32]
        assert found.timestamp <= town.world.head.timestamp


@on_virtual_chain
async def test_slot_needs_two_nodes_that_agree_on_the_block() -> None:
    town = TronTown()
    town.nodes["two"].down = True
    with pytest.raises(NodesUnavailable, match="2 nodes must agree"):
        await town.slot()


@on_virtual_chain
async def test_every_answer_to_a_broadcast_is_evidence_and_none_is_proof() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    town.nodes["one"].script.extend([Fault.NONE, Fault.NONE, Fault.REPLY_LOST])
    sent = await town.chain.send(raw)
    assert (sent.accepted and sent.answers["two"] == "SUCCESS") or "Dup transaction." in sent.answers["two"]
    assert one.hash in town.world.pool
    for path, said, accepted in (
        ("wallet/broadcasthex", {"result": False, "code": "SERVER_BUSY", "message": "Server busy."}, False),
        ("wallet/broadcasthex", {"code": "DUP_TRANSACTION_ERROR", "message": "Transaction already exists."}, False),
        ("wallet/broadcasthex", {"code": "DUP_TRANSACTION_ERROR", "message": "Dup transaction."}, True),
        (
            "wallet/broadcasthex",
            {"code": "NOT_ENOUGH_EFFECTIVE_CONNECTION", "message": "P2P broadcast failed."},
            True,
        ),
        ("wallet/broadcasthex", {"code": "SUCCESS", "txid": "e3b0c442" * 8}, False),
        ("wallet/broadcasthex", {"Error": "class java.lang.NullPointerException : null"}, False),
    ):
        town.wait(60)
        answer = {"txid": one.hash} | said
        for node in town.nodes.by_name.values():
            node.lies = [says(path, partial(_instead, answer))]
        answered = await town.chain.send(raw)
        assert answered.accepted is accepted, said
        assert set(answered.answers) == {"one", "two"} and all(answered.answers.values())


# --- what the chain holds --------------------------------------------------------------------------------------------


@on_virtual_chain
async def test_transaction_of_another_program_is_known_by_its_sender_and_expiration() -> None:
    """Also one that this codec would not make: of the bytes only what all transactions have is read."""
    town = TronTown()
    fee = await quoted(town, usdt())
    raw, hash_ = sign(town.network, usdt(), slot := await town.slot(), fee)
    assert await town.chain.sent_elsewhere(hash_) is None
    await town.chain.send(raw)
    for _ in range(2):
        found = await town.chain.sent_elsewhere("0x" + hash_.upper())
        assert found is not None and found.fee.worst >= fee.worst
        assert (found.hash, found.sender, found.slot) == (hash_, HOT, slot)
        town.mine()
    mine = content(CODEC.build(town.network, HOT, usdt(), Shape.PAY, slot, fee))
    other = encode(mine._replace(timestamp=0, memo=bytes(300)))
    with pytest.raises(Undecodable):
        content(other)
    assert spends(other).sender == HOT and spends(other).slot.expires == slot.expires


@on_virtual_chain
async def test_balances_are_those_of_the_final_block() -> None:
    town = TronTown()
    before = await town.chain.balances(HOT, (TOKEN,))
    raw, _ = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(20)
    during = await town.chain.balances(HOT, (TOKEN,))
    assert (during.coin, during.tokens) == (before.coin, before.tokens), "what is not final does not count"
    town.mine()
    after = await town.chain.balances(HOT, (TOKEN,))
    assert after.tokens == {TOKEN: before.tokens[TOKEN] - 5 * USDT} and after.coin < before.coin
    assert after.block == town.world.finalized and after.block_hash == town.world.blocks[after.block].id
    assert (await town.chain.balances(NEW, ())).coin == 0
    with pytest.raises(InvalidAddress):
        await town.chain.balances(HOT, (OTHER,))


@on_virtual_chain
async def test_balances_on_which_nodes_differ_are_none() -> None:
    town = TronTown()
    town.nodes["two"].lies.append(says("walletsolidity/getaccount", lambda said: said | {"balance": 10**15}))
    with pytest.raises(NodesUnavailable, match="disagree"):
        await town.chain.balances(HOT, ())
    town = TronTown(THREE)
    town.nodes["two"].lies.append(says("walletsolidity/getaccount", lambda said: said | {"balance": 10**15}))
    assert (await town.chain.balances(HOT, ())).coin == 1_000 * TRX


@on_virtual_chain
async def test_node_that_is_a_block_behind_names_no_node_and_gives_no_balance() -> None:
    town = TronTown()
    raw, _ = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(21)
    town.nodes["two"].lag = 1
    with pytest.raises(NodesUnavailable, match="different final blocks"):
        await town.chain.balances(HOT, (TOKEN,))
    assert not any(node.trouble for node in await town.chain.nodes())
    town.mine()  # the same at different blocks is the same
    assert (await town.chain.balances(HOT, (TOKEN,))).block == town.world.finalized - 1
    three = town.rail(("one", "two"))
    assert (await three.balances(HOT, (TOKEN,))).tokens == {TOKEN: 4_995 * USDT}


@on_virtual_chain
async def test_balances_are_never_of_two_blocks_at_once() -> None:
    """A node is asked again if a block became final while it answered."""
    town = TronTown()
    raw, _ = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(20)
    mined = iter([True] + [False] * 100)

    def mines(said: Any) -> Any:
        if next(mined):
            town.mine()
        return said

    town.nodes["one"].lies.append(says("walletsolidity/getaccount", mines))
    found = await town.rail(("one",)).balances(HOT, (TOKEN,))
    assert found.tokens[TOKEN] == 4_995 * USDT and found.coin < 1_000 * TRX


@on_virtual_chain
async def test_address_has_code_or_has_not_if_nodes_agree() -> None:
    town = TronTown()
    assert await town.chain.is_contract(TOKEN)
    assert not await town.chain.is_contract(SHOP)
    town.nodes["two"].down = True
    with pytest.raises(NodesUnavailable):
        await town.chain.is_contract(SHOP)


# --- watching --------------------------------------------------------------------------------------------------------


class LookedUp:
    """Addresses that can't be gone through: there may be a million."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    def __contains__(self, address: object) -> bool:
        return address in self._addresses


@on_virtual_chain
async def test_scan_finds_every_final_transaction_of_our_wallets_once() -> None:
    town = TronTown()
    cursor, hash_ = await town.chain.final_block()
    sent = set()
    for number in range(30):
        order, key = (trx(number + 1), None) if number % 2 else (usdt(number + 1), None)
        if number % 5 == 0:
            raw, other = sign(town.network, trx(to=SHOP), await town.slot(), Fee(gas_limit=0, price=0), OTHER_KEY)
            assert other not in sent and key is None
        else:
            raw, one = await town.signed(order)
            sent.add(one.hash)
        await town.chain.send(raw)
        town.mine()
    town.mine(21)
    found: list[str] = []
    for _ in range(10):
        town.wait()
        page = await town.chain.scan(LookedUp(HOT), cursor, hash_)
        found += [one.hash for one in page.transactions]
        assert all(one.sender == HOT and one.nonce is None for one in page.transactions)
        cursor, hash_ = page.up_to, page.up_to_hash
    assert sorted(found) == sorted(sent)
    assert cursor == town.world.finalized


@on_virtual_chain
async def test_scan_does_not_pass_a_block_that_two_nodes_do_not_show_alike() -> None:
    town = TronTown()
    cursor, hash_ = town.world.head.number, town.world.head.id
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(25)
    town.wait()

    def leaves_out(block: Any) -> Any:
        return {name: value for name, value in block.items() if name != "transactions"}

    town.nodes["two"].lies.append(says("walletsolidity/getblockbynum", leaves_out))
    with pytest.raises(NodesUnavailable, match="disagree"):
        await town.chain.scan(frozenset({HOT}), cursor, hash_)
    town.nodes["two"].lies.clear()
    page = await town.chain.scan(frozenset({HOT}), cursor, hash_)
    assert [found.hash for found in page.transactions] == [one.hash]
    town.nodes["two"].down = True
    town.wait()
    with pytest.raises(NodesUnavailable):
        await town.chain.scan(frozenset({HOT}), page.up_to, page.up_to_hash)


@on_virtual_chain
async def test_scan_asks_a_third_node_where_two_differ() -> None:
    town = TronTown(THREE)
    cursor, hash_ = town.world.head.number, town.world.head.id
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(25)
    town.wait()
    town.nodes["one"].lies.append(
        says("walletsolidity/getblockbynum", lambda b: {k: v for k, v in b.items() if k != "transactions"})
    )
    page = await town.chain.scan(frozenset({HOT}), cursor, hash_)
    assert [found.hash for found in page.transactions] == [one.hash]


@on_virtual_chain
async def test_final_block_that_is_gone_is_a_deep_reorganisation() -> None:
    town = TronTown()
    cursor, hash_ = await town.chain.final_block()
    town.world.reorg(22, deep=True)
    town.mine(5)
    town.wait()
    with pytest.raises(DeepReorganisation):
        await town.chain.scan(frozenset({HOT}), cursor, hash_)


@on_virtual_chain
async def test_scan_sees_a_transaction_of_a_kind_that_is_never_built_here() -> None:
    """A stolen key would rather change permissions than pay."""
    town = TronTown()
    cursor, hash_ = town.world.head.number, town.world.head.id
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(25)
    town.wait()

    def is_of_another_kind(block: Any) -> Any:
        for found in block.get("transactions", ()):
            contract = found["raw_data"]["contract"][0]
            contract["type"] = "AccountPermissionUpdateContract"
            contract["parameter"]["value"] = {"owner_address": contract["parameter"]["value"]["owner_address"]}
        return block

    for node in town.nodes.by_name.values():
        node.lies.append(says("walletsolidity/getblockbynum", is_of_another_kind))
    page = await town.chain.scan(frozenset({HOT}), cursor, hash_)
    assert [found.hash for found in page.transactions] == [one.hash]


# --- nodes -----------------------------------------------------------------------------------------------------------


@on_virtual_chain
async def test_node_on_another_chain_is_not_used() -> None:
    town = TronTown()
    wrong = TronTown(chain_id=7)
    for chain in (wrong.chain, wrong.rail(("one",))):
        (first, *_) = await chain.nodes()
        assert not first.usable and "it is on chain" in first.trouble
    other = town.rail(("one", "two"))
    town.nodes["two"].lies.append(
        says("walletsolidity/getblockbynum", lambda b: b | {"blockID": b["blockID"][:-8] + "00000007"})
    )
    assert "different chains" in (await other.nodes())[1].trouble


@on_virtual_chain
async def test_node_with_another_genesis_block_is_not_used() -> None:
    right = TronTown()
    genesis = right.world.blocks[0].id
    assert all(node.usable for node in await TronTown(genesis="0x" + genesis).chain.nodes())
    assert not any(node.usable for node in await TronTown(genesis="11" * 32).chain.nodes())


@on_virtual_chain
async def test_node_that_is_behind_is_named_and_one_that_fails_is_left_alone() -> None:
    town = TronTown(THREE)
    town.mine(20)
    town.nodes["two"].lag = 15
    town.nodes["three"].down = True
    town.wait()
    one, three, two = await town.chain.nodes()
    assert one.usable and not three.usable and not two.usable
    assert "15 blocks behind" in two.trouble and "no answer" in three.trouble
    calls = town.nodes.calls
    await town.chain.nodes()
    assert town.nodes.calls == calls, "heads are fresh, and a node that failed is not asked at once"
    town.nodes["three"].down = False
    town.wait(60)
    assert (await town.chain.nodes())[1].usable


def test_two_ports_of_one_node_and_urls_that_are_never_shown() -> None:
    """The URL names wallet; behind # is the port of walletsolidity."""
    town = TronTown()
    asked: list[str] = []

    async def post(url: str, _headers: Mapping[str, str], _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        asked.append(url)
        return 200, b"<secret-key> is no JSON"

    def rail(*urls: str) -> TronChain:
        endpoints = [Endpoint(name=f"n{number}", url=url) for number, url in enumerate(urls)]
        return TronChain(town.network, endpoints, post, lambda: 0.0, lambda: 0, lambda: "0" * 32)

    (node,) = asyncio.run(rail("http://user:secret-key@[::1]:8090#8091").nodes())
    assert asked[0] == "http://user:secret-key@[::1]:8090/wallet/getblockbynum"
    assert "secret" not in node.trouble and "no JSON" in node.trouble

    async def answers(url: str, _headers: Mapping[str, str], _body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        asked.append(url)
        status, _, answer = town.nodes["one"].serve(url[url.index("/wallet") :], _body)
        return status, answer

    asked.clear()
    endpoint = Endpoint(name="n", url="https://tron.example:8090/key#8091")
    chain = TronChain(town.network, [endpoint], answers, lambda: 0.0, lambda: 0, lambda: "0" * 32)
    (node,) = asyncio.run(chain.nodes())
    assert node.usable
    assert {url.partition("/wallet")[0] for url in asked} == {
        "https://tron.example:8090/key",
        "https://tron.example:8091/key",
    }
    for wrong in (("http://one",) * 2, ("http://one:1#2", "http://one:1#3"), ("http://one#x",), ()):
        with pytest.raises(ValueError):
            rail(*wrong)


def test_node_over_real_http_with_a_port_for_each_interface() -> None:
    """As java-tron serves them: each port knows only its own interface."""
    town = TronTown()
    servers = [_server(town, interface) for interface in ("wallet", "walletsolidity")]
    try:
        first, second = (server.server_port for server in servers)

        async def pays() -> None:
            pool = Pool(ANSWER_BYTES_MAX)
            endpoint = Endpoint(name="one", url=f"http://127.0.0.1:{first}#{second}")
            chain = TronChain(town.network, [endpoint], pool.post, lambda: 0.0, town._now_us, town._token)
            fee = await chain.quote(HOT, usdt(), Shape.PAY, Priority.NORMAL)
            raw, hash_ = sign(town.network, usdt(), await chain.slot(HOT), fee)
            assert (await chain.send(raw)).accepted and hash_ in town.world.pool
            assert (await chain.balances(HOT, (TOKEN,))).tokens == {TOKEN: 5_000 * USDT}
            assert (await chain.nodes())[0].usable
            await pool.close()

        asyncio.run(pays())
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _server(town: TronTown, interface: str) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, kind, answer = 405, "text/html", b"another port"
            if self.path.startswith(f"/{interface}/"):
                status, kind, answer = town.nodes["one"].serve(self.path, body)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True).start()
    return server


@on_virtual_chain
async def test_payments_at_the_same_time_do_not_disturb_each_other() -> None:
    town = TronTown()
    orders: Sequence[Order] = [usdt(n + 1) for n in range(8)]
    signed = [await town.signed(order) for order in orders]
    await asyncio.gather(*(town.chain.send(raw) for raw, _ in signed))
    town.mine(22)
    town.wait()
    fates = await asyncio.gather(*(town.fate(order, one) for order, (_, one) in zip(orders, signed, strict=True)))
    assert [type(fate).__name__ for fate in fates] == ["Confirmed"] * 8
    await no_sleep(0)
