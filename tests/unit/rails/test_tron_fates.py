"""What became of a TRON transaction, at nodes that lag, forget, fork, fall silent and lie."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from tests.tron_fake import HOT, NEW, USDT, TronTown, other_timestamp, sign, trx, usdt

from bursar.rails.chain import (
    Confirmed,
    Dead,
    Fee,
    Mismatch,
    NodesUnavailable,
    Pending,
    Question,
    Shape,
    Slot,
    Try,
    Unknown,
)
from bursar.rails.tron.fates import AT_ONCE, FAILURES_MAX
from bursar.rails.tron.reading import Header
from bursar.rails.tron.verdict import Facts, judge
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Behaviour

Lie = Callable[[str, Sequence[Any], Any], Any]
THREE = ("one", "two", "three")


def on_virtual_chain(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def says(path: str, change: Callable[[Any], Any]) -> Lie:
    """A node that changes what it says to one question."""
    return lambda method, _params, truth: change(truth) if method == path else truth


def nothing(path: str) -> Lie:
    """A node that has nothing but its genesis block."""
    return says(path, lambda truth: truth if truth.get("blockID", "").startswith("0" * 16) else {})


def hides(hash_: str) -> Lie:
    """A node that denies one transaction everywhere."""

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        asked = json.loads(params[0] or b"{}").get("value")
        return {} if asked == hash_ and "gettransaction" in method else truth

    return lie


# --- life ------------------------------------------------------------------------------------------------------------


@on_virtual_chain
async def test_transaction_is_pending_until_it_is_solidified() -> None:
    town = TronTown()
    for order in (trx(), usdt(), trx(to=NEW, memo="hello")):
        raw, one = await town.signed(order)
        assert await town.fate(order, one) == Pending(seen=False)
        assert (await town.chain.send(raw)).accepted
        assert await town.fate(order, one) == Pending(seen=True)
        town.mine(20)
        block = town.world.find(one.hash)[0].number  # type: ignore[index]
        assert await town.fate(order, one) == Pending(seen=True, block=block), "20 blocks are not enough"
        town.mine()
        found = await town.fate(order, one)
        assert isinstance(found, Confirmed)
        assert (found.block, found.block_hash) == (block, town.world.blocks[block].id)
        assert found.evidence["nodes"] == ["one", "two"]
        assert found.by_event_alone is bool(order.contract), "no older balance can be asked for"


@on_virtual_chain
async def test_costs_are_those_of_the_receipt() -> None:
    town = TronTown()
    paid: list[int] = []
    for order in (trx(), trx(), trx(), usdt(), usdt(), trx(to=NEW), trx(memo="hi")):
        raw, one = await town.signed(order, other_timestamp(await town.slot(), len(paid) + 1))
        await town.chain.send(raw)
        town.mine(21)
        found = await town.fate(order, one)
        assert isinstance(found, Confirmed)
        paid.append(found.fee_paid)
    size = 203 + 64 - 5  # a small timestamp
    assert paid[:2] == [0, 0], "free bandwidth"
    assert abs(paid[2] - size * 1_000) < 3_000
    assert paid[5] == 1_100_000, "a new account"
    assert paid[3] - paid[4] == 1_500_000, "the first token of a holder"
    assert paid[6] > 1_000_000


@on_virtual_chain
async def test_call_that_reverts_or_runs_out_of_energy_is_dead_at_our_cost() -> None:
    town = TronTown()
    for limit, cost in ((10**8, 47_500), (100_000, 100_000)):
        slot = await town.slot()
        order = usdt(10**12) if cost == 47_500 else usdt()
        raw, hash_ = sign(town.network, order, slot, Fee(gas_limit=limit, price=1))
        assert (await town.chain.send(raw)).answers["one"] == "SUCCESS"
        town.mine(22)
        found = await town.fate(order, Try(hash=hash_, shape=Shape.PAY, slot=slot))
        assert isinstance(found, Dead)
        assert found.hash == hash_ and found.fee_paid >= cost
        assert found.proof["result"] == ("REVERT" if cost == 47_500 else "OUT_OF_ENERGY")


@on_virtual_chain
async def test_expired_transaction_is_dead_only_by_the_final_block() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.world.censored.add(one.hash)
    assert one.slot.expires is not None
    while town.world.head.timestamp <= one.slot.expires:
        town.mine()
    again = await town.chain.send(raw)
    assert "Transaction expired" in again.answers["one"] and not again.accepted
    assert isinstance(await town.fate(trx(), one), Pending), "the newest block proves nothing"
    town.expire(one.slot)
    found = await town.fate(trx(), one)
    assert isinstance(found, Dead) and found.proof["how"] == "expired" and found.fee_paid == 0


@on_virtual_chain
async def test_expired_answer_for_a_paid_transaction_changes_nothing() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine()
    town.expire(one.slot)
    assert "Transaction expired" in (await town.chain.send(raw)).answers["one"]
    assert isinstance(await town.fate(trx(), one), Confirmed)


@on_virtual_chain
async def test_transaction_included_after_its_expiration_is_confirmed() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    assert one.slot.expires is not None
    town.world.censored.add(one.hash)
    while town.world.head.timestamp + 3_000 < one.slot.expires:
        town.mine()
    town.world.censored.clear()
    town.mine(missed=5)
    assert town.world.head.timestamp > one.slot.expires
    for _ in range(20):
        assert isinstance(await town.fate(trx(), one), Pending)
        town.mine()
    assert isinstance(await town.fate(trx(), one), Confirmed)


@on_virtual_chain
async def test_transaction_of_a_replaced_block_is_pending_again() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(3)
    assert (await town.fate(trx(), one)).block is not None  # type: ignore[union-attr]
    town.world.reorg(3, returns=lambda _: False)
    assert await town.fate(trx(), one) == Pending(seen=False)
    assert (await town.chain.send(raw)).accepted, "the same bytes once more"
    town.mine(22)
    assert isinstance(await town.fate(trx(), one), Confirmed)


@on_virtual_chain
async def test_node_that_restarts_forgets_what_is_not_final() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(5)
    town.world.restart()
    assert await town.fate(trx(), one) == Pending(seen=False)
    await town.chain.send(raw)
    town.mine(22)
    assert isinstance(await town.fate(trx(), one), Confirmed)


# --- what moved ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [Behaviour.TAKES_FEE, Behaviour.RETURNS_FALSE])
@on_virtual_chain
async def test_success_without_exactly_the_transfer_is_a_mismatch(behaviour: Behaviour) -> None:
    town = TronTown()
    raw, one = await town.signed(usdt())
    town.token.behaviour = behaviour
    await town.chain.send(raw)
    town.mine(22)
    assert isinstance(await town.fate(usdt(), one), Mismatch)


@pytest.mark.parametrize("order", [usdt(1), usdt(to=NEW), trx(5 * USDT), usdt(memo="other")])
@on_virtual_chain
async def test_another_payment_than_the_one_ordered_is_a_mismatch(order: Any) -> None:
    town = TronTown()
    raw, one = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(22)
    assert isinstance(await town.fate(order, one), Mismatch)


@on_virtual_chain
async def test_second_transfer_of_the_token_is_a_mismatch() -> None:
    """A fee that the token takes from the wallet, beside a payment that is as it was ordered."""
    town = TronTown()
    raw, one = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(22)

    def takes_more(info: Any) -> Any:
        return info | {"log": [*info["log"], info["log"][0] | {"data": f"{1:064x}"}]} if "log" in info else info

    for node in town.nodes.by_name.values():
        node.lies.append(says("walletsolidity/gettransactioninfobyid", takes_more))
    found = await town.fate(usdt(), one)
    assert isinstance(found, Mismatch) and "2 transfers" in found.why


# --- nodes that can't be believed ------------------------------------------------------------------------------------


@on_virtual_chain
async def test_node_that_denies_a_paid_transaction_is_named_and_not_believed() -> None:
    town = TronTown(THREE)
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine()
    town.expire(one.slot)
    town.nodes["three"].lies.append(hides(one.hash))
    assert isinstance(await town.fate(trx(), one), Confirmed)
    assert "contradicts other nodes" in (await town.chain.nodes())[1].trouble


@on_virtual_chain
async def test_two_nodes_that_contradict_each_other_prove_nothing() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine()
    town.expire(one.slot)
    town.nodes["two"].lies.append(hides(one.hash))
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and not found.person and "nodes disagree" in found.why


def invents(town: TronTown, one: Try, raw: bytes) -> Lie:
    """A node that says that a transaction was paid, in the block of another."""
    block = town.world.blocks[town.world.finalized]

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        asked = json.loads(params[0] or b"{}")
        if asked.get("value") == one.hash:
            if method.endswith("infobyid"):
                where = {"blockNumber": block.number, "blockTimeStamp": block.timestamp}
                return {"id": one.hash, **where, "contractResult": [""], "receipt": {"net_usage": 268}}
            return {"txID": one.hash, "raw_data_hex": raw[3:-67].hex()}
        if method.endswith("getblockbynum") and asked.get("num") == block.number:
            found = {"txID": one.hash, "raw_data": {"contract": []}, "raw_data_hex": raw[3:-67].hex()}
            return truth | {"transactions": [*truth.get("transactions", []), found]}
        return truth

    return lie


@pytest.mark.parametrize("names", [("one", "two"), THREE])
@on_virtual_chain
async def test_one_node_can_neither_invent_a_payment_nor_hold_up_its_death(names: tuple[str, ...]) -> None:
    town = TronTown(names)
    raw, one = await town.signed(trx())
    town.nodes["two"].lies.append(invents(town, one, raw))
    lied = await town.fate(trx(), one)
    assert isinstance(lied, Pending), "one node is ahead of the others, as far as they can tell"
    town.expire(one.slot)
    lied = await town.fate(trx(), one)
    assert isinstance(lied, Dead if len(names) == 3 else Unknown)


@on_virtual_chain
async def test_one_node_that_claims_a_late_final_block_kills_nothing() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    assert one.slot.expires is not None
    late = says(
        "walletsolidity/getnowblock",
        lambda block: (
            block | {"block_header": {"raw_data": block["block_header"]["raw_data"] | {"timestamp": one.slot.expires}}}
        ),
    )
    town.nodes["one"].lies += [late, hides(one.hash)]
    assert isinstance(await town.fate(trx(), one), Pending)
    town.mine(22)
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and "disagree" in found.why


@on_virtual_chain
async def test_node_that_lags_holds_up_a_death() -> None:
    town = TronTown()
    _, one = await town.signed(trx())
    town.expire(one.slot)
    town.nodes["two"].lag = 5
    assert isinstance(await town.fate(trx(), one), Pending)
    town.nodes["two"].lag = 0
    assert isinstance(await town.fate(trx(), one), Dead)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.REPLY_LOST, Fault.HANGS, Fault.BUSY, Fault.BROKEN])
@on_virtual_chain
async def test_one_silent_node_of_two_proves_nothing(fault: Fault) -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)
    town.nodes["two"].script.extend([fault] * 20)
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and "only one answers" in found.why and "two" in found.why
    town.nodes["two"].script.clear()
    town.wait(60)
    assert isinstance(await town.fate(trx(), one), Confirmed)


@on_virtual_chain
async def test_no_node_that_answers_is_no_fate() -> None:
    town = TronTown()
    _, one = await town.signed(trx())
    for node in town.nodes.by_name.values():
        node.down = True
    with pytest.raises(NodesUnavailable):
        await town.fate(trx(), one)


@pytest.mark.parametrize("forgetful", ["pruned", "lite"])
@on_virtual_chain
async def test_node_without_history_shows_no_death(forgetful: str) -> None:
    """`{}` is also what it says of what it has forgotten."""
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)
    town.expire(one.slot)
    for node in town.nodes.by_name.values():
        if forgetful == "pruned":
            node.keeps = 10
        else:
            node.lite = True
    if forgetful == "lite":
        with pytest.raises(NodesUnavailable, match="lite fullnode"):
            await town.fate(trx(), one)
        return
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and found.person and "does not keep history" in found.why


@on_virtual_chain
async def test_one_node_without_history_leaves_it_to_people() -> None:
    town = TronTown()
    _, one = await town.signed(trx())
    town.expire(one.slot)
    town.nodes["two"].keeps = 10
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and found.person


@on_virtual_chain
async def test_on_a_quiet_chain_every_block_that_could_contain_it_is_read() -> None:
    town = TronTown()
    town.mine(60)  # no transaction near the block that it refers to
    _, one = await town.signed(trx())
    town.expire(one.slot)
    assert isinstance(await town.fate(trx(), one), Dead)
    town.nodes["two"].lies.append(
        lambda method, params, truth: (
            {}
            if method == "walletsolidity/getblockbynum"
            and json.loads(params[0]).get("num") == town.world.finalized - 60
            else truth
        )
    )
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and found.person and "has no block" in found.why


@on_virtual_chain
async def test_transaction_on_a_block_of_another_chain_is_left_to_people() -> None:
    town = TronTown()
    slot = await town.slot()
    slot = msgspec.structs.replace(slot, reference=slot.reference[:4] + "00" * 8 + slot.reference[20:])
    raw, hash_ = sign(town.network, trx(), slot, Fee(gas_limit=0, price=0))
    assert "TAPOS_ERROR" in (await town.chain.send(raw)).answers["one"]
    town.expire(slot)
    found = await town.fate(trx(), Try(hash=hash_, shape=Shape.PAY, slot=slot))
    assert isinstance(found, Unknown) and found.person and "refers to" in found.why


@on_virtual_chain
async def test_one_configured_node_is_enough_within_the_limit_only() -> None:
    town = TronTown(("one",))
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and found.person
    assert isinstance(await town.fate(trx(), one, one_node_is_enough=True), Confirmed)


@on_virtual_chain
async def test_transaction_without_a_hash_and_several_of_one_payout() -> None:
    town = TronTown()
    raw, paid = await town.signed(trx())
    _, expired = await town.signed(trx())
    unknown = msgspec.structs.replace(paid, hash="")
    found = await town.fate(trx(), unknown)
    assert isinstance(found, Unknown) and found.person
    await town.chain.send(raw)
    town.mine()
    town.expire(expired.slot)
    assert isinstance(await town.fate(trx(), expired, paid), Confirmed)
    assert isinstance(await town.fate(trx(), expired, unknown), Unknown)
    _, other = await town.signed(trx())
    assert isinstance(await town.fate(trx(), expired, other), Pending)
    town.expire(other.slot)
    both = await town.fate(trx(), expired, other)
    assert isinstance(both, Dead) and len(both.proof["tries"]) == 2


@on_virtual_chain
async def test_final_block_is_read_before_the_node_is_asked() -> None:
    """Else a transaction that becomes final between the two questions would be dead."""
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.world.censored.add(one.hash)
    assert one.slot.expires is not None
    while town.world.head.timestamp + 3_000 < one.slot.expires:
        town.mine()
    town.world.censored.clear()
    town.mine(missed=5)
    once = iter([True])

    def then_it_is_final(said: Any) -> Any:
        if next(once, False):
            town.mine(25)
        return said

    town.nodes["one"].lies.append(says("walletsolidity/gettransactioninfobyid", then_it_is_final))
    found = await town.fate(trx(), one, chain=town.rail(("one",)), one_node_is_enough=True)
    assert isinstance(found, Pending)
    assert isinstance(await town.fate(trx(), one), Confirmed)


@on_virtual_chain
async def test_url_behind_which_one_node_is_behind_another_shows_no_death() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine()
    town.expire(one.slot)
    for node in town.nodes.by_name.values():
        knows = iter([False, True, True])  # who answers changes from one question to the next

        def lie(method: str, params: Sequence[Any], truth: Any, knows: Any = knows) -> Any:
            asked = json.loads(params[0] or b"{}").get("value")
            return {} if method.endswith("infobyid") and asked == one.hash and not next(knows, True) else truth

        node.lies.append(lie)
    with pytest.raises(NodesUnavailable, match="said a moment ago"):
        await town.fate(trx(), one)
    assert isinstance(await town.fate(trx(), one), Confirmed)


# --- answers that can't be read --------------------------------------------------------------------------------------


MALFORMED: dict[str, Callable[[Any], Any]] = {
    "another id": lambda info: info | {"id": "00" * 32},
    "no id": lambda info: {name: value for name, value in info.items() if name != "id"},
    "a block as text": lambda info: info | {"blockNumber": str(info["blockNumber"])},
    "a fee as float": lambda info: info | {"fee": 1.5},
    "a negative fee": lambda info: info | {"fee": -1},
    "failed and a success": lambda info: info | {"result": "FAILED"},
    "a failure that is none": lambda info: info | {"receipt": info["receipt"] | {"result": "REVERT"}},
    "another result": lambda info: info | {"result": "SUCCESS"},
    "logs that are no list": lambda info: info | {"log": {}},
    "a list": lambda info: [info],
    "an error": lambda _: {"Error": "class java.lang.NullPointerException : null"},
}


@pytest.mark.parametrize("name", MALFORMED)
@on_virtual_chain
async def test_malformed_info_is_no_verdict(name: str) -> None:
    town = TronTown()
    raw, one = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(22)
    for node in town.nodes.by_name.values():
        node.lies.append(says("walletsolidity/gettransactioninfobyid", MALFORMED[name]))
    with pytest.raises(NodesUnavailable):
        await town.fate(usdt(), one)


@pytest.mark.parametrize(
    "path",
    ["walletsolidity/gettransactionbyid", "walletsolidity/getblockbynum"],
)
@on_virtual_chain
async def test_half_of_an_answer_is_no_verdict(path: str) -> None:
    town = TronTown()
    raw, one = await town.signed(usdt())
    await town.chain.send(raw)
    town.mine(22)
    for node in town.nodes.by_name.values():
        node.lies.append(nothing(path))
    assert isinstance(await town.fate(usdt(), one), Unknown)


@on_virtual_chain
async def test_transaction_that_its_block_does_not_contain_is_no_verdict() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)
    for node in town.nodes.by_name.values():
        node.lies.append(
            says("walletsolidity/getblockbynum", lambda b: {k: v for k, v in b.items() if k != "transactions"})
        )
    found = await town.fate(trx(), one)
    assert isinstance(found, Unknown) and "is not there as such" in found.why


@on_virtual_chain
async def test_bytes_of_another_transaction_are_no_verdict() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)
    for node in town.nodes.by_name.values():
        node.lies.append(
            says("walletsolidity/gettransactionbyid", lambda t: t | {"raw_data_hex": t["raw_data_hex"][:-2] + "00"})
        )
    with pytest.raises(NodesUnavailable, match="other bytes"):
        await town.fate(trx(), one)


@on_virtual_chain
async def test_a_block_whose_transaction_is_not_what_its_bytes_say_is_malformed() -> None:
    town = TronTown()
    raw, one = await town.signed(trx())
    await town.chain.send(raw)
    town.mine(22)

    def change(block: Any) -> Any:
        if "transactions" not in block:
            return block
        return block | {"transactions": [block["transactions"][0] | {"raw_data_hex": "00"}]}

    for node in town.nodes.by_name.values():
        node.lies.append(says("walletsolidity/getblockbynum", change))
    with pytest.raises(NodesUnavailable, match="not what its bytes say"):
        await town.fate(trx(), one)


def test_judge_needs_the_final_block_at_the_expiration_itself() -> None:
    """The edge: a block takes a transaction that expires *after* its parent."""
    order = trx()
    one = Try(hash="11" * 32, shape=Shape.PAY, slot=Slot(expires=1_000, reference="x"))
    question = Question(sender=HOT, order=order, tries=(one,))
    for timestamp, kind in ((999, Pending), (1_000, Dead), (1_001, Dead)):
        head = Header(1, "00" * 32, "00" * 32, timestamp)
        assert isinstance(judge(question, one, Facts(final=head)), kind)
        assert not isinstance(judge(question, one, Facts(final=head, forgets="it forgets")), Dead)


# --- many at once ----------------------------------------------------------------------------------------------------


class Watched:
    """Counts what a node is asked, and how much of it at once."""

    def __init__(self, town: TronTown, name: str) -> None:
        self.asked: Counter[str] = Counter()
        self.most = 0
        node, under_way = town.nodes[name], 0
        serve = node.serve

        def counted(path: str, body: bytes) -> tuple[int, str, bytes]:
            self.asked[path] += 1
            return serve(path, body)

        node.serve = counted  # type: ignore[method-assign]
        call = town.nodes.call

        async def passing(sleep: Any, machine: Any, effect: Any, timeout_s: float) -> Any:
            nonlocal under_way
            under_way += machine is node
            self.most = max(self.most, under_way)
            try:
                await asyncio.sleep(0)
                return await call(sleep, machine, effect, timeout_s)
            finally:
                under_way -= machine is node

        town.nodes.call = passing  # type: ignore[method-assign]


async def questions(town: TronTown, count: int) -> list[Question]:
    """Payments that were never sent."""
    slot = await town.slot()
    tries = [Try(hash=f"{number:064x}", shape=Shape.PAY, slot=slot) for number in range(count)]
    return [Question(sender=HOT, order=trx(), tries=(one,)) for one in tries]


@on_virtual_chain
async def test_each_of_many_costs_as_little_as_one_of_few_and_a_node_gets_so_many_requests_at_once() -> None:
    costs = []
    for count in (20, 1_200):
        town = TronTown()
        asked = await questions(town, count)
        town.wait()
        one = Watched(town, "one")
        fates = await asyncio.gather(*(town.chain.fate(question) for question in asked))
        assert fates == [Pending(seen=False)] * count
        assert one.asked["/walletsolidity/getnowblock"] == 1 and one.most <= AT_ONCE
        costs.append(one.asked.total() / count)
    assert costs[1] <= costs[0]


@on_virtual_chain
async def test_payments_of_one_block_and_deaths_of_one_moment_share_the_blocks() -> None:
    town = TronTown()
    paid = [await town.signed(usdt(number + 1)) for number in range(30)]
    dead = [await town.signed(trx(number + 1)) for number in range(30)]
    for raw, _ in paid:
        await town.chain.send(raw)
    town.expire(dead[0][1].slot)
    town.wait()
    one = Watched(town, "one")
    orders = [usdt(number + 1) for number in range(30)] + [trx(number + 1) for number in range(30)]
    tries = [found for _, found in (*paid, *dead)]
    asked = [Question(sender=HOT, order=order, tries=(found,)) for order, found in zip(orders, tries, strict=True)]
    fates = await asyncio.gather(*(town.chain.fate(question) for question in asked))
    assert [type(fate) for fate in fates] == [Confirmed] * 30 + [Dead] * 30
    # The block with the payments, and those down to an older transaction.
    assert one.asked["/walletsolidity/getblockbynum"] <= 4
    assert all(town.world.find(found.hash) is None for _, found in dead)


@on_virtual_chain
async def test_question_that_comes_during_a_round_is_answered_by_the_next() -> None:
    """Its answer is not older than itself."""
    town = TronTown()
    raw, one = await town.signed(trx())
    town.wait()
    first = asyncio.create_task(town.chain.fate(Question(sender=HOT, order=trx(), tries=(one,))))
    started = asyncio.Event()

    def tell(_method: str, _params: Sequence[Any], truth: Any) -> Any:
        started.set()
        return truth

    town.nodes["one"].lies.append(tell)
    await started.wait()
    await town.chain.send(raw)
    town.mine(22)
    town.wait()
    second = await town.chain.fate(Question(sender=HOT, order=trx(), tries=(one,), one_node_is_enough=True))
    assert isinstance(second, Confirmed)
    assert isinstance(await first, Pending | Confirmed)


@on_virtual_chain
async def test_one_broken_request_costs_one_answer_and_a_dead_node_is_left_after_a_few() -> None:
    town = TronTown()
    asked = await questions(town, 200)
    town.wait()
    await town.chain.nodes()  # the rounds begin with requests about transactions
    town.nodes["one"].script.extend([Fault.NONE] * 7 + [Fault.BROKEN])
    fates = await asyncio.gather(*(town.chain.fate(question) for question in asked))
    assert fates == [Pending(seen=False)] * 200, "the other node answers that one alone"
    assert all(node.usable for node in await town.chain.nodes())

    town.wait()
    await town.chain.nodes()
    one = Watched(town, "one")
    town.nodes["one"].down = True
    before = town.nodes.calls
    fates = await asyncio.gather(*(town.chain.fate(question) for question in asked))
    assert fates == [Pending(seen=False)] * 200
    assert one.asked.total() == 0 and town.nodes.calls - before <= 3 * 200 + AT_ONCE + FAILURES_MAX
    assert any("no answer" in node.trouble for node in await town.chain.nodes())


@on_virtual_chain
async def test_malformed_answer_about_one_says_nothing_about_the_others() -> None:
    town = TronTown(("one",))
    asked = await questions(town, 20)
    wrong = asked[3].tries[0].hash

    def lie(method: str, params: Sequence[Any], truth: Any) -> Any:
        return {"id": "what"} if method.endswith("infobyid") and wrong.encode() in params[0] else truth

    town.nodes["one"].lies.append(lie)
    town.wait()
    fates = await asyncio.gather(*(town.chain.fate(question) for question in asked), return_exceptions=True)
    assert isinstance(fates.pop(3), NodesUnavailable)
    assert fates == [Pending(seen=False)] * 19
