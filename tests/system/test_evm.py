"""The EVM rail against a real node (anvil): payments, fee bumps, cancellations, reorganisations, tokens of all kinds.

Both configured nodes are the same program, so that the quorum is met; nodes that contradict each other are in
`tests/unit/rails/test_evm_fates.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import pytest
from coincurve import PrivateKey

from bursar.http import Pool
from bursar.model.records import Priority
from bursar.rails.chain import (
    Arrival,
    Confirmed,
    Dead,
    DeepReorganisation,
    Fate,
    Fee,
    Mismatch,
    Network,
    NodesUnavailable,
    Order,
    Page,
    Pending,
    Question,
    Sent,
    Shape,
    Signed,
    Slot,
    Try,
    Unknown,
    WalletShort,
    WouldRevert,
)
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec, address_of, transfer_data
from bursar.rails.evm.rpc import ANSWER_BYTES_MAX, Endpoint
from bursar.testbed.anvil import Anvil, throwaway_anvil, token_code

T = TypeVar("T")

CODEC = EvmCodec()
KEY = PrivateKey(b"\x2a" * 32)
WALLET = address_of(KEY.public_key.format(compressed=False))
ALICE = CODEC.check_address("", "0x" + 20 * "a1")
BOB = CODEC.check_address("", "0x" + 20 * "b0")
GWEI = 10**9
COIN = 10**18
PAY, CANCEL = Shape.PAY, Shape.CANCEL


class Desk:
    """A wallet with coin on a chain of its own."""

    def __init__(self, anvil: Anvil, runner: asyncio.Runner, pool: Pool, **network: Any) -> None:
        self.anvil = anvil
        self._runner = runner
        genesis = anvil.rpc("eth_getBlockByNumber", "0x0", False)["hash"]
        settings: dict[str, Any] = {"fee_ceilings": (500 * GWEI,) * 3, "tips": (3 * GWEI, 2 * GWEI, GWEI)} | network
        self.network = Network(name="test", kind="evm", genesis=genesis, **settings)
        endpoints = [Endpoint(name=name, url=f"{anvil.url}/?{name}") for name in ("north", "south")]
        self.chain = EvmChain(self.network, endpoints, pool.post, time.monotonic)
        anvil.rpc("anvil_setBalance", WALLET, hex(10 * COIN))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def deploy(self, name: str) -> str:
        """A token of which the wallet has all there is."""
        self.anvil.rpc("anvil_impersonateAccount", WALLET)
        hash_ = self.anvil.rpc("eth_sendTransaction", {"from": WALLET, "data": token_code(name, 10**12)})
        self.anvil.mine()
        return CODEC.check_address("", self.anvil.rpc("eth_getTransactionReceipt", hash_)["contractAddress"])

    def close(self, token: str) -> None:
        """What is in the pool runs after this."""
        stranger = self.anvil.rpc("eth_accounts")[0]
        call = {"from": stranger, "to": token, "data": "0x43d726d6", "gasPrice": hex(400 * GWEI)}
        self.anvil.rpc("eth_sendTransaction", call)

    def nonce(self) -> int:
        nonce = self.run(self.chain.slot(WALLET)).nonce
        assert nonce is not None
        return nonce

    def quote(self, order: Order, shape: Shape = PAY) -> Fee:
        return self.run(self.chain.quote(WALLET, order, shape, Priority.NORMAL))

    def sign(self, order: Order, fee: Fee, shape: Shape = PAY, nonce: int | None = None) -> Signed:
        slot = Slot(nonce=self.nonce() if nonce is None else nonce)
        unsigned = CODEC.build(self.network, WALLET, order, shape, slot, fee)
        return CODEC.signed(unsigned, KEY.sign_recoverable(CODEC.digest(unsigned), hasher=None), WALLET)

    def send(self, signed: Signed) -> Sent:
        return self.run(self.chain.send(signed.raw))

    def pay(self, order: Order) -> Signed:
        """Quoted, signed and sent."""
        signed = self.sign(order, self.quote(order))
        assert self.send(signed).accepted
        return signed

    def fate(self, order: Order, *tries: Signed, cancel: Signed | None = None, consumer: str = "") -> Fate:
        shapes = [(one, PAY) for one in tries] + ([(cancel, CANCEL)] if cancel else [])
        named = tuple(Try(hash=one.hash, shape=shape, slot=CODEC.read(one.raw)[0].slot) for one, shape in shapes)
        return self.run(self.chain.fate(Question(sender=WALLET, order=order, tries=named, consumer=consumer)))

    def finish(self) -> None:
        """Mine what is in the pool until it is final."""
        self.anvil.mine(3)

    def coin_of(self, address: str) -> int:
        return int(self.anvil.rpc("eth_getBalance", address, "latest"), 16)

    def scan(self, after: int = 0, after_hash: str = "") -> Page:
        return self.run(self.chain.scan(frozenset({WALLET}), after, after_hash))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def pool(runner: asyncio.Runner) -> Iterator[Pool]:
    pool = Pool(ANSWER_BYTES_MAX)
    yield pool
    runner.run(pool.close())


@pytest.fixture
def desk(runner: asyncio.Runner, pool: Pool) -> Iterator[Desk]:
    with throwaway_anvil(56) as anvil:
        yield Desk(anvil, runner, pool, chain_id=56)


def order(amount: int = COIN, contract: str = "", to: str = ALICE) -> Order:
    return Order(payout="payout-1", to=to, contract=contract, amount=amount)


# --- payments --------------------------------------------------------------------------------------------------------


def test_a_payment_of_coin_arrives_and_is_confirmed_when_it_is_final(desk: Desk) -> None:
    payment = order()
    signed = desk.pay(payment)
    assert desk.fate(payment, signed) == Pending(seen=True)
    desk.anvil.mine(2)
    assert desk.fate(payment, signed) == Pending(seen=True, block=1)
    desk.anvil.mine()
    found = desk.fate(payment, signed)
    assert isinstance(found, Confirmed)
    assert desk.coin_of(ALICE) == COIN
    assert desk.coin_of(WALLET) == 10 * COIN - COIN - found.fee_paid


@pytest.mark.parametrize("token", ["good", "silent"])
def test_a_payment_of_tokens_arrives_and_is_confirmed(desk: Desk, token: str) -> None:
    """Whether the token returns true or nothing at all."""
    contract = desk.deploy(token)
    payment = order(2_500_000, contract)
    signed = desk.pay(payment)
    desk.finish()
    assert isinstance(desk.fate(payment, signed), Confirmed)
    found = desk.run(desk.chain.balances(ALICE, [contract]))
    assert found.tokens == {contract: 2_500_000}
    assert desk.run(desk.chain.balances(WALLET, [contract])).tokens == {contract: 10**12 - 2_500_000}


@pytest.mark.parametrize("chain", [{"chain_id": 137}, {"chain_id": 97, "legacy_fees": True}])
def test_a_second_chain_is_only_data(runner: asyncio.Runner, pool: Pool, chain: dict[str, Any]) -> None:
    with throwaway_anvil(chain["chain_id"]) as anvil:
        desk = Desk(anvil, runner, pool, **chain)
        contract = desk.deploy("good")
        for payment in (order(), order(7, contract)):
            signed = desk.pay(payment)
            desk.finish()
            assert isinstance(desk.fate(payment, signed), Confirmed)


def test_the_same_bytes_may_be_sent_at_any_time(desk: Desk) -> None:
    payment = order()
    signed = desk.pay(payment)
    assert desk.send(signed).accepted  # already known
    desk.finish()
    assert not desk.send(signed).accepted  # nonce too low: the fate says why
    assert isinstance(desk.fate(payment, signed), Confirmed)
    assert desk.coin_of(ALICE) == COIN


def test_a_payment_behind_a_gap_of_nonces_waits_for_the_gap_to_be_filled(desk: Desk) -> None:
    first, second = order(1), order(2)
    fee = desk.quote(first)
    early, late = desk.sign(first, fee, nonce=0), desk.sign(second, fee, nonce=1)
    assert desk.send(late).accepted
    desk.finish()
    assert desk.fate(second, late) == Pending(seen=True)
    assert desk.nonce() == 0  # not what the pool says
    desk.send(early)
    desk.finish()
    assert isinstance(desk.fate(first, early), Confirmed)
    assert isinstance(desk.fate(second, late), Confirmed)


# --- fees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mined", ["first", "second"])
def test_after_a_fee_bump_either_transaction_confirms_the_payment_once(desk: Desk, mined: str) -> None:
    payment = order()
    fee = desk.quote(payment)
    dearer = desk.run(desk.chain.higher(fee, Priority.NORMAL))
    assert dearer is not None
    first, second = desk.sign(payment, fee, nonce=0), desk.sign(payment, dearer, nonce=0)
    desk.send(first)
    if mined == "first":
        desk.anvil.mine()
    sent = desk.send(second)
    assert sent.accepted is (mined == "second"), sent
    desk.finish()
    found = desk.fate(payment, first, second)
    assert isinstance(found, Confirmed)
    assert found.hash == (first if mined == "first" else second).hash
    assert desk.coin_of(ALICE) == COIN


def test_a_cancellation_that_wins_proves_the_payment_dead(desk: Desk) -> None:
    payment = order()
    fee = desk.quote(payment)
    dearer = desk.run(desk.chain.higher(fee, Priority.HIGH))
    assert dearer is not None
    signed = desk.sign(payment, fee, nonce=0)
    desk.send(signed)
    cancel = desk.sign(payment, dearer, CANCEL, nonce=0)
    assert desk.send(cancel).accepted
    desk.finish()
    found = desk.fate(payment, signed, cancel=cancel)
    assert isinstance(found, Dead)
    assert (found.proof["how"], found.hash) == ("cancelled", cancel.hash)
    assert desk.coin_of(ALICE) == 0
    assert desk.coin_of(WALLET) == 10 * COIN - found.fee_paid


def test_a_wallet_that_is_short_is_no_refusal_and_a_funded_one_pays(desk: Desk) -> None:
    contract = desk.deploy("good")
    with pytest.raises(WalletShort):
        desk.quote(order(10**12 + 1, contract))
    with pytest.raises(WalletShort):
        desk.quote(order(11 * COIN))
    desk.anvil.rpc("anvil_setBalance", WALLET, hex(12 * COIN))
    assert desk.quote(order(11 * COIN)).gas_limit == 21_000


# --- what is lost ----------------------------------------------------------------------------------------------------


def test_a_dropped_transaction_is_not_dead_and_the_same_bytes_bring_it_back(desk: Desk) -> None:
    payment = order()
    signed = desk.pay(payment)
    desk.anvil.rpc("anvil_dropTransaction", signed.hash)
    desk.finish()
    assert desk.fate(payment, signed) == Pending(seen=False)
    assert desk.send(signed).accepted
    desk.finish()
    assert isinstance(desk.fate(payment, signed), Confirmed)


def test_a_reorganisation_before_finality_reopens_the_question(desk: Desk) -> None:
    payment = order()
    signed = desk.pay(payment)
    desk.anvil.mine(2)
    assert desk.fate(payment, signed) == Pending(seen=True, block=1)
    desk.anvil.rpc("anvil_reorg", 2, [])
    desk.anvil.mine(3)
    assert desk.fate(payment, signed) == Pending(seen=False)
    assert desk.coin_of(ALICE) == 0
    desk.send(signed)
    desk.finish()
    assert isinstance(desk.fate(payment, signed), Confirmed)


def test_a_reorganisation_of_final_blocks_is_noticed_by_the_watcher(desk: Desk) -> None:
    payment = order()
    signed = desk.pay(payment)
    desk.anvil.mine(5)
    page = desk.scan()
    assert [one.hash for one in page.transactions] == [signed.hash]
    assert isinstance(desk.fate(payment, signed), Confirmed)
    desk.anvil.rpc("anvil_reorg", 5, [])
    desk.anvil.mine(5)
    with pytest.raises(DeepReorganisation):
        desk.scan(page.up_to, page.up_to_hash)
    assert desk.fate(payment, signed) == Pending(seen=False)


# --- what arrives ----------------------------------------------------------------------------------------------------


def test_coin_and_tokens_that_arrive_are_found_once_and_tokens_that_lie_are_disputed(desk: Desk) -> None:
    good, skimming = desk.deploy("good"), desk.deploy("skimming")
    listed, ours = frozenset({good, skimming}), {ALICE}
    payments = [order(), order(7, good), order(1_000, skimming), order(9, good, to=BOB), order(8, good)]
    fee, first = desk.quote(payments[2]), desk.nonce()
    signed = [desk.sign(one, fee, nonce=first + place) for place, one in enumerate(payments)]
    for one in signed:
        assert desk.send(one).accepted
    desk.finish()
    after, after_hash = 0, ""
    found: list[Arrival] = []
    final, _ = desk.run(desk.chain.final_block())
    while after < final:
        page = desk.run(desk.chain.arrivals(ours, listed, after, after_hash, final))
        found += page.found
        after, after_hash = page.up_to, page.up_to_hash
    assert [(one.hash, one.part, one.contract, one.amount) for one in found] == [
        (signed[0].hash, "coin", "", COIN),
        (signed[1].hash, "0", good, 7),
        (signed[2].hash, "0", skimming, 1_000),
        (signed[4].hash, "0", good, 8),
    ]
    assert [one.disputed for one in found if one.contract != skimming] == ["", "", ""]
    assert "rose by 1000, but it rose by 990" in found[2].disputed
    assert {(one.sender, one.to) for one in found} == {(WALLET, ALICE)}
    desk.anvil.rpc("anvil_reorg", final, [])
    desk.anvil.mine(5)
    with pytest.raises(DeepReorganisation):
        desk.run(desk.chain.arrivals(ours, listed, after, after_hash, final + 5))


def test_events_that_a_node_does_not_list_are_found_in_the_receipts_of_the_block(desk: Desk, pool: Pool) -> None:
    contract = desk.deploy("good")
    desk.pay(order(5, contract))
    desk.finish()

    async def without_logs(url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        emptied = [one["id"] for one in json.loads(body) if one["method"] == "eth_getLogs"]
        status, said = await pool.post(url, headers, body, timeout_s)
        told = [one | ({"result": []} if one["id"] in emptied else {}) for one in json.loads(said)]
        return status, json.dumps(told).encode()

    endpoints = [Endpoint(name=name, url=f"{desk.anvil.url}/?{name}") for name in ("north", "south")]
    chain = EvmChain(desk.network, endpoints, without_logs, time.monotonic)
    with pytest.raises(NodesUnavailable, match=f"lack those of {contract.lower()}"):
        desk.run(chain.arrivals({BOB}, frozenset({contract}), 0, "", 100))


# --- what comes from outside -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
def test_a_nonce_used_from_outside_is_judged_by_what_the_watcher_found(desk: Desk, same: bool) -> None:
    contract = desk.deploy("good")
    payment = order(5, contract)
    stored = desk.sign(payment, desk.quote(payment))
    other = payment if same else order(5, contract, to=BOB)
    outside = desk.sign(other, Fee(gas_limit=200_000, price=90 * GWEI, tip=9 * GWEI))
    desk.send(outside)
    desk.finish()
    unknown = desk.fate(payment, stored)
    assert isinstance(unknown, Unknown)
    assert unknown.person
    watched = {one.nonce: one.hash for one in desk.scan().transactions}
    found = desk.fate(payment, stored, consumer=watched[1])
    assert watched[1] == outside.hash
    if same:
        assert isinstance(found, Mismatch)
    else:
        assert isinstance(found, Dead)
        assert found.proof["consumed_by"]["hash"] == outside.hash


# --- tokens that behave badly (W36) ----------------------------------------------------------------------------------


def test_a_token_that_returns_false_is_found_by_the_dry_run_and_a_mismatch_if_mined(desk: Desk) -> None:
    payment = order(100, desk.deploy("refusing"))
    with pytest.raises(WouldRevert, match="returns false"):
        desk.quote(payment)
    signed = desk.sign(payment, Fee(gas_limit=100_000, price=50 * GWEI, tip=GWEI))
    desk.send(signed)
    desk.finish()
    found = desk.fate(payment, signed)
    assert isinstance(found, Mismatch)
    assert "0 transfers" in found.why


@pytest.mark.parametrize(
    ("token", "why"), [("taking", "2 transfers where there should be one"), ("lying", "reports 2000 from")]
)
def test_a_token_that_moves_or_reports_something_else_is_a_mismatch(desk: Desk, token: str, why: str) -> None:
    payment = order(1_000, desk.deploy(token))
    signed = desk.pay(payment)
    desk.finish()
    found = desk.fate(payment, signed)
    assert isinstance(found, Mismatch)
    assert why in found.why
    assert found.fee_paid > 0


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("pretending", "recipient's balance rose by 1000, but it did not change"),
        ("skimming", "recipient's balance rose by 1000, but it rose by 990"),
        ("charging", "wallet's balance fell by 1000, but it fell by 1010"),
    ],
)
def test_a_token_whose_one_event_is_right_and_whose_balances_are_not_is_a_mismatch(
    desk: Desk, token: str, why: str
) -> None:
    contract = desk.deploy(token)
    payment = order(1_000, contract)
    signed = desk.pay(payment)
    desk.finish()
    found = desk.fate(payment, signed)
    assert isinstance(found, Mismatch)
    assert why in found.why
    assert [one["amount"] for one in found.evidence["transfers"]] == ["1000"]


def test_several_payments_to_one_recipient_in_one_block_are_all_confirmed(desk: Desk) -> None:
    """The recipient pays on in the same block, too."""
    contract = desk.deploy("good")
    payments = [order(amount, contract) for amount in (1_000, 2_000, 3_000)]
    fee, first = desk.quote(payments[0]), desk.nonce()
    signed = [desk.sign(one, fee, nonce=first + place) for place, one in enumerate(payments)]
    for one in signed:
        assert desk.send(one).accepted
    onward = {"from": ALICE, "to": contract, "data": "0x" + transfer_data(BOB, 500).hex(), "gas": hex(100_000)}
    desk.anvil.rpc("anvil_setBalance", ALICE, hex(COIN))
    desk.anvil.rpc("anvil_impersonateAccount", ALICE)
    desk.anvil.rpc("eth_sendTransaction", onward | {"gasPrice": hex(GWEI * 3)})
    desk.finish()
    found = [desk.fate(payment, one) for payment, one in zip(payments, signed, strict=True)]
    assert [type(one) for one in found] == 3 * [Confirmed]
    assert len({one.block for one in found if isinstance(one, Confirmed)}) == 1
    assert desk.run(desk.chain.balances(ALICE, [contract])).tokens == {contract: 5_500}
    assert not any("balances_not_checked" in one.evidence for one in found if isinstance(one, Confirmed))


def test_a_payment_that_reverts_in_its_block_is_dead_at_our_cost(desk: Desk) -> None:
    contract = desk.deploy("closing")
    payment = order(1_000, contract)
    before = desk.coin_of(WALLET)
    signed = desk.sign(payment, desk.quote(payment))
    desk.close(contract)
    desk.send(signed)
    desk.finish()
    found = desk.fate(payment, signed)
    assert isinstance(found, Dead)
    assert (found.proof["how"], found.hash) == ("failed", signed.hash)
    assert desk.coin_of(WALLET) == before - found.fee_paid
    with pytest.raises(WouldRevert, match="the token is closed"):
        desk.quote(payment)


def test_code_at_an_address_is_seen(desk: Desk) -> None:
    assert desk.run(desk.chain.is_contract(desk.deploy("good")))
    assert not desk.run(desk.chain.is_contract(ALICE))


def test_both_nodes_are_usable(desk: Desk) -> None:
    desk.anvil.mine(3)
    assert [(node.name, node.usable, node.height, node.trouble) for node in desk.run(desk.chain.nodes())] == [
        ("north", True, 3, ""),
        ("south", True, 3, ""),
    ]
    assert desk.run(desk.chain.final_block())[0] == 1
