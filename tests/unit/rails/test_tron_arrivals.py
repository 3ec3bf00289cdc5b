"""What arrives on a TRON chain: found once it is final, exactly once, at nodes that agree; else the cursor stays."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest
from tests.tron_fake import HOT, NEW, OTHER, OTHER_KEY, SHOP, TOKEN, TRX, USDT, TronTown, sign, trx, usdt
from tests.unit.rails.test_tron_fates import THREE, on_virtual_chain, says

from bursar.rails.chain import Arrival, DeepReorganisation, Fee, NodesUnavailable
from bursar.rails.nodes import NodesDisagree
from bursar.rails.tron.chain import SCAN_BLOCKS_MAX, TronChain
from bursar.sim.chain_faults import Fault, Lie
from bursar.sim.chain_state import Behaviour, Token
from bursar.sim.tron_nodes import Node

BLOCKS, INFOS = "walletsolidity/getblockbynum", "walletsolidity/gettransactioninfobyblocknum"
OTHER_TOKEN = "TDmV28fHh8w6nE2TRZTRxwApobXeHXh8Qk"


class Ours(Container[str]):
    """Addresses of ours, which can be asked for one by one and not be listed."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    def __contains__(self, address: object) -> bool:
        return address in self._addresses


class Cursor:
    """Reads page after page, as a caller that keeps its place does."""

    def __init__(self, town: TronTown, chain: TronChain | None = None, ours: Container[str] = Ours(SHOP, NEW)) -> None:
        self.town = town
        self.chain = chain or town.chain
        self.ours = ours
        head = town.world.blocks[town.world.finalized]
        self.after, self.hash = head.number, head.id

    async def page(self, up_to: int | None = None) -> tuple[Arrival, ...]:
        """The next page."""
        self.town.wait()
        last = self.town.world.finalized if up_to is None else up_to
        found = await self.chain.arrivals(self.ours, frozenset({TOKEN}), self.after, self.hash, last)
        assert found.one_node is (self.chain is not self.town.chain)
        self.after, self.hash = found.up_to, found.up_to_hash
        assert self.town.world.blocks[self.after].id == self.hash
        return found.found

    async def rest(self) -> list[Arrival]:
        """Every page up to the last final block."""
        found: list[Arrival] = []
        while self.after < self.town.world.finalized:
            found += await self.page()
        return found


async def paid(town: TronTown, *orders: Any) -> list[str]:
    """Payments, sent; their hashes."""
    hashes = []
    for order in orders:
        raw, one = await town.signed(order)
        assert (await town.chain.send(raw)).accepted
        hashes.append(one.hash)
    return hashes


@on_virtual_chain
async def test_trx_and_tokens_that_came_to_our_addresses_are_found_once() -> None:
    town = TronTown()
    cursor = Cursor(town)
    expected = []
    for number in range(1, 25):
        (hash_,) = await paid(town, trx(number) if number % 2 else usdt(number))
        block = town.mine_one()
        part, contract = ("coin", "") if number % 2 else ("0", TOKEN)
        expected.append((hash_, part, HOT, SHOP, contract, number, block.number, block.id, "", bool(contract)))
    (hash_,) = await paid(town, trx(TRX, to=NEW))
    block = town.mine_one()
    expected.append((hash_, "coin", HOT, NEW, "", TRX, block.number, block.id, "", False))
    town.mine(20)
    found = await cursor.rest()
    assert [tuple(getattr(one, name) for name in Arrival.__struct_fields__) for one in found] == expected
    assert await cursor.page() == () and cursor.after == town.world.finalized


@on_virtual_chain
async def test_what_is_not_for_us_or_moved_nothing_is_no_arrival() -> None:
    town = TronTown()
    other = town.world.deploy(Token(OTHER_TOKEN, gas=12_414))
    town.world.fund(HOT, 100, OTHER_TOKEN)
    town.mine()
    cursor = Cursor(town)
    await paid(town, trx(to=OTHER), usdt(to=OTHER), usdt(7))
    foreign = usdt(7)
    raw, failed = await town.signed(foreign)  # reverts in its block, and has waited as a success
    await town.chain.send(raw)
    town.token.blacklist.add(SHOP)
    fee = Fee(gas_limit=100_000, price=100)
    raw, _ = sign(
        town.network, type(foreign)(payout="p", to=SHOP, contract=other.address, amount=5), await town.slot(), fee
    )
    assert (await town.chain.send(raw)).accepted
    town.mine(21)
    found = town.world.find(failed.hash)
    assert found is not None and found[1].result == "REVERT"
    assert await cursor.rest() == []
    assert cursor.after == town.world.finalized


@on_virtual_chain
async def test_each_event_of_a_transaction_has_its_own_number() -> None:
    """A token that takes a fee: the second event is the fee's, and it goes to an address of ours as well."""
    town = TronTown()
    town.token.behaviour = Behaviour.TAKES_FEE
    cursor = Cursor(town, ours=Ours(SHOP, TOKEN))
    (hash_,) = await paid(town, usdt(1_000))
    town.mine(21)
    found = await cursor.rest()
    assert [(one.hash, one.part, one.to, one.amount) for one in found] == [
        (hash_, "0", SHOP, 990),
        (hash_, "1", TOKEN, 10),
    ]


@on_virtual_chain
async def test_transfer_of_nothing_is_no_arrival() -> None:
    town = TronTown()
    cursor = Cursor(town)
    await paid(town, usdt(5))
    town.mine(21)
    for node in town.nodes.by_name.values():
        node.lies.append(says(INFOS, lambda infos: [_with_amount(one, 0) for one in infos]))
    assert await cursor.rest() == []


@on_virtual_chain
async def test_what_an_address_sends_to_itself_is_no_arrival() -> None:
    town = TronTown()
    cursor = Cursor(town, ours=Ours(HOT))
    (hash_,) = await paid(town, usdt(7, to=HOT))
    town.mine(21)
    found = town.world.find(hash_)
    assert found is not None and found[1].result == "SUCCESS"
    assert await cursor.rest() == []


def _with_amount(info: dict[str, Any], amount: int) -> dict[str, Any]:
    return info | {"log": [log | {"data": f"{amount:064x}"} for log in info.get("log", [])]}


@on_virtual_chain
async def test_page_is_bounded_and_never_passes_the_block_that_the_caller_names() -> None:
    town = TronTown()
    cursor = Cursor(town)
    start = cursor.after
    town.mine(60)
    assert await cursor.page(up_to=start) == () and cursor.after == start
    await cursor.page(up_to=start + 2)
    assert cursor.after == start + 2
    await cursor.page()
    assert cursor.after == start + 2 + SCAN_BLOCKS_MAX
    assert await cursor.page(up_to=town.world.head.number + 9) == ()
    assert cursor.after <= town.world.finalized


@on_virtual_chain
async def test_payment_in_a_block_that_is_replaced_arrives_where_it_is_final() -> None:
    town = TronTown()
    cursor = Cursor(town)
    (hash_,) = await paid(town, trx(5))
    town.mine(3)
    assert await cursor.rest() == []
    town.world.reorg(3)
    town.mine(22)
    (found,) = await cursor.rest()
    place = town.world.find(hash_)
    assert place is not None and (found.block, found.block_hash) == (place[0].number, place[0].id)


@on_virtual_chain
async def test_final_block_that_is_gone_is_a_deep_reorganisation() -> None:
    town = TronTown()
    ahead, at_the_end = Cursor(town), Cursor(town)
    town.world.reorg(22, deep=True)
    for node in town.nodes.by_name.values():
        node.lag = 1  # the last final block is the one at which the cursor is
    with pytest.raises(DeepReorganisation):
        await at_the_end.page(up_to=at_the_end.after)
    town.mine(5)
    with pytest.raises(DeepReorganisation):
        await ahead.page()


@on_virtual_chain
async def test_one_node_is_believed_and_the_answer_says_so() -> None:
    town = TronTown()
    cursor = Cursor(town, town.rail(("one",)))
    await paid(town, trx(5), usdt(6))
    town.mine(21)
    assert [one.amount for one in await cursor.rest()] == [5, 6]


# --- nodes that err --------------------------------------------------------------------------------------------------


def _one_less(found: Any) -> Any:
    return found[:-1] if isinstance(found, list) else {**found, "transactions": found.get("transactions", [])[:-1]}


def _other_block(infos: Any) -> Any:
    return [one | {"blockNumber": one["blockNumber"] + 1} for one in infos]


def _first_of_coin(block: Any, **value: Any) -> Any:
    for one in block.get("transactions", ()):
        one["raw_data"]["contract"][0]["parameter"]["value"] |= value
    return block


def _other_hash(block: Any) -> Any:
    return block if block["blockID"].startswith("0" * 16) else block | {"blockID": block["blockID"][:-4] + "0000"}


def _without_logs(infos: Any) -> Any:
    return [{name: value for name, value in one.items() if name != "log"} for one in infos]


def _fails(infos: Any) -> Any:
    return [one | {"result": "FAILED", "receipt": {"result": "REVERT"}} for one in infos]


def _block_fails(block: Any) -> Any:
    for one in block.get("transactions", ()):
        one["ret"] = [{"contractRet": "OUT_OF_ENERGY"}]
    return block


WRONG: dict[str, Lie | Callable[[Node], None]] = {
    "a block without its last transaction": says(BLOCKS, _one_less),
    "no outcome of the last transaction": says(INFOS, _one_less),
    "no outcomes": says(INFOS, lambda _: []),
    "no list of outcomes": says(INFOS, lambda _: {}),
    "an outcome twice": says(INFOS, lambda infos: infos + infos[:1]),
    "outcomes of another block": says(INFOS, _other_block),
    "another amount of TRX": says(BLOCKS, lambda block: _first_of_coin(block, amount=10**9)),
    "another recipient": says(BLOCKS, lambda block: _first_of_coin(block, to_address="41" + "11" * 20)),
    "another amount of tokens": says(INFOS, lambda infos: [_with_amount(one, 9) for one in infos]),
    "no events": says(INFOS, _without_logs),
    "a failure, by the outcome alone": says(INFOS, _fails),
    "a failure, by the block alone": says(BLOCKS, _block_fails),
    "another hash of the block": says(BLOCKS, _other_hash),
    "no block": says(BLOCKS, lambda block: block if block.get("blockID", "").startswith("0" * 16) else {}),
    "it has forgotten what became of old transactions": lambda node: setattr(node, "keeps", 4),
    "it is a lite node": lambda node: setattr(node, "lite", True),
    "it is down": lambda node: setattr(node, "down", True),
    "it breaks off": lambda node: node.script.extend([Fault.REPLY_LOST] * 40),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_virtual_chain
async def test_cursor_does_not_pass_what_two_nodes_do_not_show_whole(wrong: str) -> None:
    town = TronTown()
    cursor = Cursor(town)
    hashes = await paid(town, trx(5), usdt(6))
    town.mine(21)
    place = town.world.find(hashes[0])
    node, does = town.nodes["two"], WRONG[wrong]
    if wrong.startswith("it "):
        does(node)  # type: ignore[call-arg, arg-type]
    else:
        node.lies.append(does)  # type: ignore[arg-type]
    with pytest.raises(NodesUnavailable):
        await cursor.rest()
    assert place is not None and cursor.after < place[0].number
    node.repair()
    node.lite = False
    town.wait(60)
    assert [(one.hash, one.amount) for one in await cursor.rest()] == [(hashes[0], 5), (hashes[1], 6)]


@on_virtual_chain
async def test_node_that_is_behind_keeps_the_cursor_where_two_nodes_are() -> None:
    town = TronTown(THREE)
    cursor = Cursor(town)
    await paid(town, trx(5))
    town.mine(21)
    town.nodes["one"].lag = town.nodes["two"].lag = 5
    for _ in range(3):
        assert await cursor.page() == ()
    assert cursor.after == town.world.finalized - 5
    town.nodes["two"].lag = 0
    assert [one.amount for one in await cursor.rest()] == [5]


@on_virtual_chain
async def test_third_node_decides_where_two_differ_and_the_liar_is_named() -> None:
    town = TronTown(THREE)
    cursor = Cursor(town)
    await paid(town, trx(5), usdt(6))
    town.mine(21)
    town.nodes["one"].lies.append(says(INFOS, lambda infos: [_with_amount(one, 9) for one in infos]))
    assert [one.amount for one in await cursor.rest()] == [5, 6]
    one, *others = await town.chain.nodes()
    assert "contradicts other nodes" in one.trouble and not any(node.trouble for node in others)


@on_virtual_chain
async def test_failure_by_which_a_node_hides_an_arrival_is_a_contradiction() -> None:
    """Block and outcome both say that it failed: the other node says that it did not."""
    town = TronTown()
    cursor = Cursor(town)
    await paid(town, usdt(6))
    town.mine(21)
    node = town.nodes["one"]
    node.lies += [says(BLOCKS, _block_fails), says(INFOS, _fails)]
    with pytest.raises(NodesDisagree):
        await cursor.rest()
    two = town.nodes["two"]
    two.lies += node.lies
    assert await cursor.rest() == [], "it failed, by all that there is"


@on_virtual_chain
async def test_payment_of_another_wallet_arrives_with_its_sender() -> None:
    town = TronTown()
    cursor = Cursor(town)
    raw, hash_ = sign(town.network, trx(USDT), await town.slot(), Fee(gas_limit=0, price=0), OTHER_KEY)
    await town.chain.send(raw)
    town.mine(21)
    (found,) = await cursor.rest()
    assert (found.hash, found.sender, found.to, found.amount) == (hash_, OTHER, SHOP, USDT)
