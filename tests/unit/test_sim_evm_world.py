"""The simulated EVM chain: nonces, fees, blocks, tokens, reorganisations, as a real one would have them.

Raw transactions are made with eth_account, so that the chain's own reading of bytes is checked against another's.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import rlp  # type: ignore[import-untyped]
from eth_account import Account
from tests.unit.sim_chain_builders import (
    ALICE,
    BOB,
    CAROL,
    COIN_UNIT,
    USDT,
    a_world,
    assert_conserved,
    pays_token,
    signed,
)

from bursar.sim.chain_state import BURNED, Behaviour, Effect, Token
from bursar.sim.evm_tx import RefusedTransaction, read_transaction
from bursar.sim.evm_world import GWEI, MAKER, World

CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fees", [{}, {"gasPrice": 50 * GWEI}])
def test_reads_what_eth_account_signs(fees: dict[str, int]) -> None:
    raw = signed(BOB, 7, CAROL, 5, data=b"\1\2", gas=40_000, chain_id=56, **fees)
    tx = read_transaction(raw)
    assert tx.sender == BOB.address.lower() == Account.recover_transaction(raw).lower()
    assert (tx.nonce, tx.to, tx.value, tx.data, tx.gas, tx.chain_id) == (7, CAROL, 5, b"\1\2", 40_000, 56)
    assert (tx.tip, tx.max_fee) == ((50 * GWEI, 50 * GWEI) if fees else (2 * GWEI, 100 * GWEI))


def test_every_changed_byte_of_a_transaction_has_another_sender_or_is_refused() -> None:
    raw = signed()
    for place in range(len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        try:
            tx = read_transaction(changed)
        except RefusedTransaction:
            continue
        assert tx.sender != ALICE.address.lower(), place
    assert read_transaction(raw).sender == ALICE.address.lower()


def test_second_signature_of_the_same_transaction_is_refused() -> None:
    """EIP-2: for each signature there is another with s negated, which would give the transaction another hash."""
    *content, v, r, s = rlp.decode(signed()[1:])
    parity, negated = 1 - int.from_bytes(v, "big"), CURVE_ORDER - int.from_bytes(s, "big")
    with pytest.raises(RefusedTransaction, match="invalid transaction v, r, s values"):
        read_transaction(b"\x02" + rlp.encode([*content, parity, r, negated]))


@pytest.mark.parametrize("raw", [b"", b"\x02", b"\x01\xc0", b"\xc0", b"\x02\xc1\xc0", b"\x02" + b"\xff" * 40])
def test_bytes_that_are_no_transaction_are_refused(raw: bytes) -> None:
    with pytest.raises(RefusedTransaction):
        read_transaction(raw)


def test_transaction_of_another_chain_is_refused() -> None:
    with pytest.raises(RefusedTransaction, match="invalid chain id"):
        a_world().submit(signed(chain_id=5))


# --- the pool --------------------------------------------------------------------------------------------------------


def test_mines_in_nonce_order_and_waits_for_a_gap() -> None:
    world = a_world()
    third, first = world.submit(signed(nonce=2)), world.submit(signed(nonce=0))
    assert [one.tx.hash for one in world.mine().receipts] == [first.hash]
    second = world.submit(signed(nonce=1))
    assert [one.tx.hash for one in world.mine().receipts] == [second.hash, third.hash]
    assert world.nonce(ALICE.address) == 3
    assert world.balance(CAROL) == 3 * COIN_UNIT
    assert_conserved(world)


def test_refusals_are_in_the_words_of_real_nodes() -> None:
    world = a_world(tip_min=GWEI)
    world.submit(signed())
    for raw, words in (
        (signed(), "already known"),
        (signed(value=1, max_fee=109 * GWEI, tip=3 * GWEI), "replacement transaction underpriced"),
        (signed(value=1, max_fee=120 * GWEI, tip=2 * GWEI), "replacement transaction underpriced"),
        (signed(nonce=1, value=10**21), r"insufficient funds for gas \* price \+ value"),
        (signed(nonce=1, gas=20_999), "intrinsic gas too low"),
        (signed(nonce=1, gas=30_000_001), "exceeds block gas limit"),
        (signed(nonce=1, tip=1), "transaction underpriced"),
    ):
        with pytest.raises(RefusedTransaction, match=words):
            world.submit(raw)
    world.mine()
    with pytest.raises(RefusedTransaction, match="nonce too low: next nonce 1, tx nonce 0"):
        world.submit(signed())


def test_replacement_with_ten_percent_more_takes_the_slot() -> None:
    world = a_world()
    old = world.submit(signed())
    new = world.submit(signed(value=0, to=ALICE.address, max_fee=110 * GWEI, tip=2_200_000_000))
    world.mine()
    assert world.find(old.hash) is None and world.find(new.hash) is not None
    assert world.balance(CAROL) == 0


def test_block_makers_may_mine_the_one_that_was_replaced() -> None:
    world = a_world()
    old = world.submit(signed())
    new = world.submit(signed(value=0, max_fee=200 * GWEI, tip=4 * GWEI))
    world.mine(first=[old.hash])
    assert world.balance(CAROL) == COIN_UNIT
    world.mine()
    assert world.find(new.hash) is None and world.pool.get(new.hash) is None


def test_full_pool_drops_its_cheapest() -> None:
    world = a_world(pool_size=2)
    world.submit(signed(tip=GWEI))
    world.submit(signed(BOB, tip=3 * GWEI))
    with pytest.raises(RefusedTransaction, match="txpool is full"):
        world.submit(signed(BOB, nonce=1, tip=GWEI))
    world.submit(signed(BOB, nonce=1, tip=2 * GWEI))
    assert [tx.sender for tx in world.pool] == [BOB.address.lower()] * 2


def test_dropped_transaction_can_be_sent_again() -> None:
    world = a_world()
    tx = world.submit(signed())
    assert world.drop(tx.hash)
    assert world.mine().receipts == ()
    world.submit(tx.raw)
    assert world.mine().receipts[0].tx.hash == tx.hash


def test_censored_transaction_waits() -> None:
    world = a_world()
    tx = world.submit(signed())
    world.censored.add(tx.hash)
    assert world.mine().receipts == ()
    world.censored.clear()
    assert len(world.mine().receipts) == 1


# --- fees ------------------------------------------------------------------------------------------------------------


def test_base_fee_rises_by_an_eighth_over_full_blocks_and_falls_over_empty_ones() -> None:
    world = a_world(base_fee=80 * GWEI, background_gas=30_000_000)
    world.spike(80 * GWEI)
    fees = [world.mine().base_fee for _ in range(3)]
    assert fees == [80 * GWEI, 90 * GWEI, 101_250_000_000]
    world.terms.background_gas = 0
    world.mine()
    assert world.base_fee() == world.head.base_fee * 7 // 8


def test_transaction_below_the_base_fee_waits_until_it_falls() -> None:
    world = a_world()
    world.submit(signed(max_fee=20 * GWEI, tip=GWEI))
    world.spike(21 * GWEI)
    assert world.mine().receipts == ()
    assert world.mine().receipts[0].price == world.head.base_fee + GWEI


def test_congestion_keeps_low_tips_out() -> None:
    world = a_world(gas_limit=63_000, background_gas=42_000, background_tip=2 * GWEI)
    cheap = [world.submit(signed(nonce=nonce, tip=GWEI)) for nonce in range(2)]
    dear = world.submit(signed(BOB, tip=3 * GWEI))
    assert [one.tx.hash for one in world.mine().receipts] == [dear.hash]
    assert world.head.gas_used == 63_000
    assert [one.tx.hash for one in world.mine().receipts] == [cheap[0].hash]


def test_fee_is_burned_and_tipped() -> None:
    world = a_world()
    before = world.balance(ALICE.address)
    world.submit(signed(tip=3 * GWEI))
    receipt = world.mine().receipts[0]
    assert receipt.price == world.head.base_fee + 3 * GWEI
    assert before - world.balance(ALICE.address) == COIN_UNIT + 21_000 * receipt.price
    assert world.balance(BURNED) == 21_000 * world.head.base_fee
    assert world.balance(MAKER) == 21_000 * 3 * GWEI
    assert_conserved(world)


def test_chain_without_base_fee() -> None:
    world = a_world(base_fee=0, dynamic_base_fee=False, background_gas=30_000_000, background_tip=0)
    world.submit(signed(gasPrice=5 * GWEI))
    assert world.mine().receipts[0].price == 5 * GWEI
    assert world.base_fee() == 0


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "paid", "claimed"),
    [
        (Behaviour.HONEST, 1_000, [1_000]),
        (Behaviour.RETURNS_NOTHING, 1_000, [1_000]),
        (Behaviour.RETURNS_FALSE, 0, []),
        (Behaviour.TAKES_FEE, 990, [990, 10]),
        (Behaviour.LIES, 0, [1_000]),
    ],
)
def test_token_behaviours(behaviour: Behaviour, paid: int, claimed: list[int]) -> None:
    world = a_world(behaviour)
    world.submit(pays_token(1_000))
    receipt = world.mine().receipts[0]
    assert receipt.ok
    assert world.balance(CAROL, USDT) == paid
    assert [event.amount for event in receipt.events] == claimed
    assert sum(effect.amount for effect in world.effects(lambda effect: effect.to == CAROL)) == paid
    assert_conserved(world)


def test_revert_moves_nothing_and_costs_gas() -> None:
    world = a_world()
    world.tokens[USDT].blacklist.add(CAROL)
    before = world.balance(ALICE.address)
    world.submit(pays_token(1_000))
    world.submit(pays_token(2_000_000, nonce=1, to=BOB.address))
    world.submit(pays_token(1, nonce=2, to=BOB.address, gas=40_000))
    blacklisted, too_much, out_of_gas = world.mine().receipts
    assert not blacklisted.ok and not too_much.ok and not out_of_gas.ok
    assert out_of_gas.gas_used == 40_000
    assert blacklisted.gas_used < 100_000
    assert world.effects() == []
    assert world.nonce(ALICE.address) == 3
    assert before - world.balance(ALICE.address) == sum(
        one.gas_used * one.price for one in (blacklisted, too_much, out_of_gas)
    )
    assert_conserved(world)


def test_contract_may_refuse_coin() -> None:
    world = a_world()
    world.contracts |= {CAROL: False, BOB.address.lower(): True}
    world.submit(signed(gas=60_000))
    world.submit(signed(nonce=1, to=BOB.address, gas=60_000))
    world.submit(signed(nonce=2, to=BOB.address, gas=21_000))
    assert [one.ok for one in world.mine().receipts] == [False, True, False]


# --- time, finality, reorganisations ---------------------------------------------------------------------------------


def test_advance_mines_the_blocks_that_are_due() -> None:
    world = a_world()
    start = world.head.timestamp
    assert [block.timestamp for block in world.advance(start + 30)] == [start + 12, start + 24]
    assert world.advance(start + 30) == []


def test_state_of_any_block_can_be_read() -> None:
    world = a_world()
    for nonce in range(3):
        world.submit(signed(nonce=nonce))
        world.mine()
    assert [world.balance(CAROL, at=at) // COIN_UNIT for at in range(5)] == [0, 0, 1, 2, 3]
    assert [world.nonce(ALICE.address, at) for at in range(5)] == [0, 0, 1, 2, 3]


def test_reorganised_transactions_return_or_are_lost() -> None:
    world = a_world()
    kept, lost = world.submit(signed()), world.submit(signed(BOB))
    old = world.mine()
    world.mine()
    assert world.reorg(2, returns=lambda tx: tx.hash == kept.hash) == [lost]
    assert world.head.number == old.number + 2
    assert world.blocks[old.number].hash != old.hash
    assert world.find(lost.hash) is None and world.nonce(BOB.address) == 0
    found = world.find(kept.hash)
    assert found is not None and found[0].hash != old.hash
    assert world.balance(CAROL) == COIN_UNIT
    assert_conserved(world)
    world.submit(lost.raw)
    world.mine()
    assert world.balance(CAROL) == 2 * COIN_UNIT


def test_reorganisation_into_empty_blocks_undoes_payments_and_keeps_grants() -> None:
    world = a_world()
    tx = world.submit(signed())
    world.fund(CAROL, 5, USDT)
    world.mine()
    assert world.reorg(1, empty=True) == [tx]
    assert world.balance(CAROL) == 0 and world.balance(CAROL, USDT) == 5
    assert world.effects() == []
    assert_conserved(world)
    world.mine()
    assert [effect.hash for effect in world.effects()] == [tx.hash]


def test_final_blocks_stay_unless_asked() -> None:
    world = a_world(finality=3)
    tx = world.submit(signed())
    world.mine()
    for _ in range(3):
        world.mine()
    assert world.finalized == 2
    with pytest.raises(ValueError, match="too deep"):
        world.reorg(4)
    assert world.reorg(4, deep=True, returns=lambda _: False) == [tx]
    assert world.balance(CAROL) == 0


def test_branch_leaves_the_chain_as_it_is() -> None:
    world = a_world()
    world.submit(signed())
    world.mine()
    fork = world.branch("liar", depth=1)
    assert fork.blocks[1] == world.blocks[1] and fork.blocks[2].hash != world.blocks[2].hash
    fork.submit(signed(BOB))
    fork.mine()
    assert fork.balance(CAROL) == 2 * COIN_UNIT and world.balance(CAROL) == COIN_UNIT


def test_effects_name_payer_recipient_and_transaction() -> None:
    world = a_world()
    tx = world.submit(pays_token(1_000))
    world.mine()
    alice = ALICE.address.lower()
    assert world.effects() == [Effect(tx.hash, 2, 0, alice, USDT, alice, CAROL, 1_000)]


def test_same_calls_give_the_same_hashes() -> None:
    def run() -> list[str]:
        world = a_world(gas_limit=100_000)
        for nonce in range(6):
            world.submit(signed(nonce=nonce))
            world.submit(signed(BOB, nonce=nonce, tip=nonce + 1))
        world.advance(world.head.timestamp + 60)
        world.reorg(3, returns=lambda tx: tx.nonce % 2 == 0)
        world.mine()
        return [block.hash for block in world.blocks]

    assert run() == run()
    assert run()[0] == World().blocks[0].hash


def random_life(seed: int) -> World:
    """A chain with a bit of everything."""
    dice = random.Random(f"{seed} chain")
    world = a_world(Behaviour.TAKES_FEE, gas_limit=400_000, finality=6, pool_size=12)
    for _ in range(150):
        key = dice.choice((ALICE, BOB))
        nonce = world.nonce(key.address) + dice.randint(0, 3)
        fees: dict[str, Any] = {"tip": dice.randint(1, 5) * GWEI, "max_fee": dice.randint(5, 60) * GWEI}
        raw = (
            pays_token(dice.randint(1, 5_000), key=key, nonce=nonce, **fees)
            if dice.random() < 0.5
            else signed(key, nonce, dice.choice((CAROL, ALICE.address)), dice.randint(0, COIN_UNIT), **fees)
        )
        with suppress(RefusedTransaction):
            world.submit(raw)
        match dice.randint(0, 9):
            case 0 | 1 | 2 | 3:
                world.mine()
            case 4:
                world.reorg(dice.randint(1, min(6, world.head.number)), returns=lambda tx: tx.nonce % 3 != 0)
            case 5:
                world.fund(BOB.address, dice.randint(1, 1_000), USDT)
            case 6:
                world.drop(dice.choice(list(world.seen)))
            case 7:
                world.spike(dice.randint(1, 50) * GWEI)
            case 8:
                world.mine(first=[dice.choice(list(world.seen))])
            case 9:
                world.terms.background_gas = dice.choice((0, 200_000, 400_000))
    return world


@pytest.mark.parametrize("seed", range(8))
def test_state_is_what_the_canonical_blocks_make_of_it(seed: int) -> None:
    """Whatever was reorganised, dropped or replaced: a new chain that mines the same blocks has the same state."""
    world = random_life(seed)
    assert_conserved(world)
    assert len(world.effects()) > 10
    again = World(world.terms)
    again.deploy(Token(USDT, behaviour=Behaviour.TAKES_FEE))
    for block in world.blocks[1:]:
        for grant in block.grants:
            again.fund(*grant)
        for receipt in block.receipts:
            again.seen[receipt.tx.hash] = receipt.tx
        again.spike(block.base_fee)
        again.terms.background_gas = 0
        assert again.mine(first=[receipt.tx.hash for receipt in block.receipts]).receipts == block.receipts
    assert again.totals() == world.totals()
    assert again.effects() == world.effects()
    for at in range(len(world.blocks)):
        for address in (ALICE.address, BOB.address, CAROL, BURNED, MAKER, USDT):
            for asset in ("", USDT):
                assert again.balance(address, asset, at) == world.balance(address, asset, at)
            assert again.nonce(address, at) == world.nonce(address, at)
