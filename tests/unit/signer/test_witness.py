"""The signer's own look at the chain: what counts as a death, by nodes that are honest, lie, lag or hang (W31, W35)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.rails.evm_fake import ALICE, COIN, TOKENS, WALLET, World, question

from bursar.rails.chain import Chain, Dead, Fate, NodesUnavailable, Order, Question, Shape, Signed, Slot, Try
from bursar.signer import witness as module
from bursar.signer.witness import Proof, Witness, proof_of_death

CANCEL = Shape.CANCEL
STRANGE = Order(payout="another", to=ALICE, amount=7)


def looked(chain: Chain, *asked: Question) -> tuple[str, list[Proof]]:
    """Why it is not dead, and the proofs if it is."""
    told: list[Proof] = []

    async def declare(proofs: tuple[Proof, ...]) -> None:
        told.extend(proofs)

    async def look() -> str:
        return await Witness({"bsc": chain}).look("p1", [("bsc", one) for one in asked], declare)

    return asyncio.run(look()), told


def failed(world: World, order: Order = TOKENS) -> Signed:
    """A payment that is final and failed."""
    signed = world.sign(order)
    world.chain.failing.add(signed.hash)
    world.submit(signed)
    world.finish()
    return signed


def test_a_payment_that_failed_is_dead_at_two_nodes_that_agree() -> None:
    world = World()
    signed = failed(world)
    why, proofs = looked(world.open(), question(TOKENS, signed))
    assert why == ""
    (proof,) = proofs
    assert (proof["how"], proof["consumed_by"]["hash"], proof["nodes"]) == ("failed", signed.hash, ["a", "b"])


def test_a_payment_whose_cancellation_is_final_is_dead() -> None:
    world = World()
    payment, cancel = world.sign(COIN), world.submit(world.sign(COIN, shape=CANCEL, price=9 * 10**9))
    world.finish()
    why, proofs = looked(world.open(), question(COIN, payment, (cancel, CANCEL)))
    assert (why, [proof["how"] for proof in proofs]) == ("", ["cancelled"])


def paid(world: World) -> Question:
    signed = world.submit(world.sign(COIN))
    world.finish()
    return question(COIN, signed)


def in_the_pool(world: World) -> Question:
    return question(COIN, world.submit(world.sign(COIN)))


def dropped(world: World) -> Question:
    world.chain.mine(50)
    return question(COIN, world.sign(COIN))


def not_final(world: World) -> Question:
    signed = world.sign(TOKENS)
    world.chain.failing.add(signed.hash)
    world.submit(signed)
    world.chain.mine(2)
    return question(TOKENS, signed)


def used_by_a_stranger(world: World) -> Question:
    """A transaction that the log does not have took the nonce: a stolen key, or a log that has lost signatures."""
    world.submit(world.sign(STRANGE, price=8 * 10**9))
    world.finish()
    return question(COIN, world.sign(COIN))


def paid_by_lost_bytes(world: World) -> Question:
    """The same payment with another fee: signed, forgotten by the log, and final."""
    world.submit(world.sign(COIN, price=8 * 10**9))
    world.finish()
    return question(COIN, world.sign(COIN))


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (paid, "final and successful"),
        (in_the_pool, "may still be mined"),
        (dropped, "may still be mined"),
        (not_final, "may still be mined"),
        (used_by_a_stranger, "not known by which transaction"),
        (paid_by_lost_bytes, "not known by which transaction"),
    ],
)
def test_nothing_else_is_a_death(prepare: Callable[[World], Question], said: str) -> None:
    world = World()
    why, proofs = looked(world.open(), prepare(world))
    assert said in why
    assert proofs == []


def test_a_death_that_a_rail_proves_by_an_unknown_transaction_is_not_believed() -> None:
    """The watcher of a worker may know the consumer. The signer has only its log, and the log may have lost it."""
    one = question(COIN, World().sign(COIN))
    proof = {"how": "replaced", "consumed_by": {"hash": "0x" + "ab" * 32}}
    assert "not in this signer's log" in str(proof_of_death(one, Dead(proof=proof)))
    assert proof_of_death(one, Dead(proof=proof, hash=one.tries[0].hash)) == proof
    expiring = msgspec.structs.replace(one, tries=(Try(hash="h", shape=Shape.PAY, slot=Slot(expires=9)),))
    assert proof_of_death(expiring, Dead(proof={"how": "expired"})) == {"how": "expired"}


def test_one_node_alone_is_never_believed() -> None:
    world = World("a")
    why, proofs = looked(world.open(), question(TOKENS, failed(world)))
    assert "only one node" in why
    assert proofs == []


def test_with_one_of_two_nodes_away_nothing_is_seen() -> None:
    world = World()
    signed = failed(world)
    world.nodes["b"].down = True
    why, proofs = looked(world.open(), question(TOKENS, signed))
    assert "only a answers" in why
    assert proofs == []
    assert "secret-key" not in why


def test_a_silent_node_among_three_costs_its_timeout_and_nothing_else() -> None:
    world = World("abc")
    signed = failed(world)
    world.nodes["c"].hangs = True
    assert looked(world.open(), question(TOKENS, signed))[0] == ""


def fails_in(hash_: str) -> Callable[[list[Any], Any], Any]:
    """A lie about a receipt: that transaction has failed."""
    return lambda params, honest: honest | {"status": "0x0", "logs": []} if honest and params[0] == hash_ else honest


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_one_node_that_lies_about_a_failure_is_not_believed(names: str) -> None:
    """The payment was made. If this node were believed, it would be made again."""
    world = World(names)
    asked = paid(world)
    world.nodes["a"].lies["eth_getTransactionReceipt"] = fails_in(asked.tries[0].hash)
    why, proofs = looked(world.open(), asked)
    assert why
    assert proofs == []


def test_nodes_that_are_all_away_are_named_without_their_urls() -> None:
    world = World()
    for node in world.nodes.values():
        node.down = True
    why, _ = looked(world.open(), question(COIN, world.sign(COIN)))
    assert "no node answers" in why
    assert "secret-key" not in why
    assert "example" not in why


def test_a_chain_without_nodes_is_named() -> None:
    async def look() -> str:
        return await Witness({}).look("p1", [("bsc", question(COIN, World().sign(COIN)))], never)

    assert asyncio.run(look()) == "this signer has no nodes of its own for bsc"


async def never(_proofs: tuple[Proof, ...]) -> None:
    raise AssertionError("nothing is dead")


class Slow:
    """A chain that answers when the test says so."""

    def __init__(self, fate: Fate) -> None:
        self.goes_on = asyncio.Event()
        self.asked = 0
        self._fate = fate

    async def fate(self, _question: Question) -> Fate:
        self.asked += 1
        await self.goes_on.wait()
        return self._fate


DEAD_HASH = "0x" + "dd" * 32
ASKED = Question(sender=WALLET, order=COIN, tries=(Try(hash=DEAD_HASH, shape=Shape.PAY, slot=Slot(nonce=3)),))


def test_a_look_goes_on_when_its_request_has_stopped_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one payout share a look; what it shows is declared though no request waits any more."""
    monkeypatch.setattr(module, "ANSWER_S", 0.02)

    async def story() -> None:
        slow, seen = Slow(Dead(proof={"how": "failed"}, hash=DEAD_HASH)), asyncio.Event()

        async def declare(_proofs: tuple[Proof, ...]) -> None:
            seen.set()

        eyes = Witness({"bsc": slow})  # type: ignore[dict-item]
        words = await asyncio.gather(*(eyes.look("p1", [("bsc", ASKED)], declare) for _ in range(5)))
        assert all("have not answered" in one for one in words)
        assert slow.asked == 1
        slow.goes_on.set()
        await asyncio.wait_for(seen.wait(), 5)

    asyncio.run(story())


def test_looks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.02)
    monkeypatch.setattr(module, "LOOKS_MAX", 3)

    async def story() -> None:
        slow = Slow(Dead(proof={}, hash=DEAD_HASH))
        eyes = Witness({"bsc": slow})  # type: ignore[dict-item]
        words = await asyncio.gather(*(eyes.look(f"p{n}", [("bsc", ASKED)], never) for n in range(5)))
        assert sum("other payouts" in one for one in words) == 2
        assert slow.asked == 3
        eyes.close()

    asyncio.run(story())


@pytest.mark.parametrize("error", [NodesUnavailable("bsc", "no node answers"), RuntimeError("https://a/secret-key")])
def test_a_look_that_fails_is_an_answer_without_secrets(error: Exception) -> None:
    """A request that fails would end its connection, by which all other payouts are signed."""

    class Broken:
        async def fate(self, _question: Question) -> Fate:
            raise error

    why, _ = looked(Broken(), ASKED)  # type: ignore[arg-type]
    assert ("no node answers" if isinstance(error, NodesUnavailable) else "RuntimeError") in why
    assert "secret-key" not in why
