"""The simulated chain without nonces: its formats, its rules, and what proves on it that a transaction is dead."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

import msgspec
import pytest
from coincurve import PrivateKey
from eth_utils.address import to_checksum_address
from tests.unit.sim_chain_builders import ALICE, BOB, assert_conserved

from bursar.model.records import Priority
from bursar.rails.chain import (
    Chain,
    Codec,
    Confirmed,
    Dead,
    DeepReorganisation,
    Fate,
    Fee,
    FeeTooHigh,
    InvalidAddress,
    Mismatch,
    Network,
    NodesUnavailable,
    Order,
    Pending,
    Question,
    Shape,
    Signed,
    Slot,
    Try,
    Unbuildable,
    Undecodable,
    Unknown,
    WalletShort,
    WouldRevert,
)
from bursar.sim.chain_faults import Fault
from bursar.sim.chain_state import Behaviour, Token
from bursar.sim.expiry_chain import ExpiryChain, Nodes
from bursar.sim.expiry_codec import Envelope, ExpiryCodec
from bursar.sim.expiry_world import Refused, Terms, World

T = TypeVar("T")

CAROL = str(to_checksum_address("0x" + "ca" * 20))
USDT = str(to_checksum_address("0x" + "0d" * 20))
NETWORK = Network(name="expiring", kind="expiry", chain_id=728, fee_ceilings=(1_000, 500, 100))
FEE = Fee(gas_limit=60_000, price=100)
COINS = 10**12


def pay(amount: int = 1_000, *, to: str = CAROL, contract: str = USDT, memo: str = "") -> Order:
    return Order(payout="p", to=to, contract=contract, amount=amount, memo=memo)


def sign(unsigned: bytes, key: Any = ALICE) -> Signed:
    codec = ExpiryCodec()
    signature = PrivateKey(bytes(key.key)).sign_recoverable(codec.digest(unsigned), hasher=None)
    return codec.signed(unsigned, signature, key.address)


class Setting:
    """A world with two nodes, and the chain that asks them."""

    def __init__(self, behaviour: Behaviour = Behaviour.HONEST, names: tuple[str, ...] = ("one", "two")) -> None:
        self.world = World(Terms(finality=5, window=20))
        self.world.deploy(Token(USDT, behaviour=behaviour))
        self.world.fund(ALICE.address, COINS)
        self.world.fund(ALICE.address, 1_000_000, USDT)
        self.mine(7)
        self.nodes = Nodes(self.world, names, seed=1)
        tokens = count()
        self.chain = ExpiryChain(NETWORK, self.nodes, no_sleep, lambda: f"{next(tokens):032x}")
        _is_one: Chain = self.chain  # for the type checker

    def mine(self, blocks: int = 1) -> None:
        for _ in range(blocks):
            self.world.mine()

    def slot(self) -> Slot:
        return do(self.chain.slot(ALICE.address))

    def signed(
        self, order: Order | None = None, shape: Shape = Shape.PAY, slot: Slot | None = None
    ) -> tuple[Signed, Try]:
        slot = slot or self.slot()
        unsigned = ExpiryCodec().build(NETWORK, ALICE.address, order or pay(), shape, slot, FEE)
        made = sign(unsigned)
        return made, Try(hash=made.hash, shape=shape, slot=slot)

    def fate(self, *tries: Try, order: Order | None = None, one_node_is_enough: bool = False) -> Fate:
        question = Question(
            sender=ALICE.address, order=order or pay(), tries=tries, one_node_is_enough=one_node_is_enough
        )
        return do(self.chain.fate(question))


async def no_sleep(_seconds: float) -> None:
    return


def do(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture
def setting() -> Setting:
    return Setting()


# --- formats ---------------------------------------------------------------------------------------------------------


def test_codec_reads_what_it_builds() -> None:
    codec: Codec = ExpiryCodec()
    slot = Slot(expires=20, reference="ab/1")
    order = pay(10**30, memo="7")
    unsigned = codec.build(NETWORK, ALICE.address.lower(), order, Shape.PAY, slot, FEE)
    assert unsigned == codec.build(NETWORK, ALICE.address, order, Shape.PAY, slot, FEE)
    done = codec.decode(unsigned)
    assert (done.to, done.contract, done.amount, done.memo) == (CAROL, USDT, 10**30, "7")
    assert (done.chain_id, done.slot, done.fee) == (728, slot, FEE)
    made = sign(unsigned)
    assert codec.read(made.raw) == (done, ALICE.address, made.hash)
    cancel = codec.decode(codec.build(NETWORK, ALICE.address, order, Shape.CANCEL, slot, FEE))
    assert (cancel.to, cancel.contract, cancel.amount, cancel.memo) == (ALICE.address, "", 0, "")


def test_codec_refuses_every_other_encoding_and_signer() -> None:
    codec = ExpiryCodec()
    unsigned = codec.build(NETWORK, ALICE.address, pay(), Shape.PAY, Slot(expires=20, reference="ab"), FEE)
    fields = msgspec.msgpack.decode(unsigned)
    for place, value in (
        (1, BOB.address.lower()),
        (2, ""),
        (4, "01000"),
        (4, "-1"),
        (4, "0"),
        (6, 0),
        (8, ""),
        (9, "20"),
    ):
        with pytest.raises(Undecodable):
            codec.decode(msgspec.msgpack.encode([*fields[:place], value, *fields[place + 1 :]]))
    for wrong in (unsigned + b"\0", unsigned[:-1], msgspec.msgpack.encode([*fields, 1]), b""):
        with pytest.raises(Undecodable):
            codec.decode(wrong)
    made = sign(unsigned)
    with pytest.raises(Undecodable, match="signed by"):
        sign(unsigned, BOB)
    for place in range(len(made.raw)):
        with pytest.raises(Undecodable):
            codec.read(made.raw[:place] + bytes([made.raw[place] ^ 1]) + made.raw[place + 1 :])
    with pytest.raises(Undecodable):
        codec.read(msgspec.msgpack.encode(Envelope(unsigned, bytes(65))))
    with pytest.raises(Unbuildable, match="expiry"):
        codec.build(NETWORK, ALICE.address, pay(), Shape.PAY, Slot(nonce=1), FEE)


@pytest.mark.parametrize("text", ["", "0x12", "0x" + 40 * "0", ALICE.address.swapcase().replace("0X", "0x")])
def test_codec_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidAddress):
        ExpiryCodec().check_address("expiring", text)


# --- the world -------------------------------------------------------------------------------------------------------


def test_pays_once_however_often_it_is_sent(setting: Setting) -> None:
    made, _ = setting.signed()
    for _ in range(3):
        do(setting.chain.send(made.raw))
    setting.mine()
    with pytest.raises(Refused, match="DUP_TRANSACTION_ERROR"):
        setting.world.submit(made.raw)
    setting.mine()
    assert [effect.amount for effect in setting.world.effects()] == [1_000]
    assert_conserved(setting.world)


def test_equal_content_is_one_transaction_and_the_slot_makes_it_two(setting: Setting) -> None:
    slot = setting.slot()
    assert setting.signed(slot=slot)[0] == setting.signed(slot=slot)[0]
    assert setting.signed()[0].hash != setting.signed()[0].hash


def test_no_block_after_the_expiry_includes_it(setting: Setting) -> None:
    made, one = setting.signed()
    assert one.slot.expires is not None
    setting.world.censored.add(made.hash)
    do(setting.chain.send(made.raw))
    setting.mine(one.slot.expires - setting.world.head.number)
    setting.world.censored.clear()
    other = setting.signed(pay(5), slot=msgspec.structs.replace(one.slot, reference=setting.world.head.hash))[0]
    with pytest.raises(Refused, match="TRANSACTION_EXPIRATION_ERROR"):
        setting.world.submit(other.raw)
    setting.mine()
    assert setting.world.effects() == []
    with pytest.raises(Refused, match="TRANSACTION_EXPIRATION_ERROR"):
        setting.world.submit(made.raw)


def test_no_branch_without_its_reference_block_includes_it(setting: Setting) -> None:
    head = setting.world.head
    made, _ = setting.signed(slot=Slot(expires=head.number + 10, reference=head.hash))
    setting.world.submit(made.raw)
    setting.world.reorg(1)
    setting.mine()
    assert setting.world.effects() == []


def test_its_last_height_still_includes_it(setting: Setting) -> None:
    made, one = setting.signed()
    assert one.slot.expires is not None
    setting.mine(one.slot.expires - setting.world.head.number - 1)
    do(setting.chain.send(made.raw))
    setting.mine()
    assert setting.world.head.number == one.slot.expires
    assert setting.world.balance(CAROL, USDT) == 1_000


def test_refuses_unknown_references_long_expiries_and_empty_wallets(setting: Setting) -> None:
    final, hash = do(setting.chain.final_block())
    for slot in (Slot(expires=20, reference="00"), Slot(expires=final + 21, reference=hash)):
        with pytest.raises(Refused, match="TAPOS_ERROR"):
            setting.world.submit(setting.signed(slot=slot)[0].raw)
    with pytest.raises(Refused, match="CONTRACT_VALIDATE_ERROR"):
        setting.world.submit(setting.signed(pay(COINS, contract=""))[0].raw)


def test_failure_costs_all_that_was_offered(setting: Setting) -> None:
    setting.world.tokens[USDT].blacklist.add(CAROL)
    made, _ = setting.signed()
    do(setting.chain.send(made.raw))
    setting.mine()
    assert setting.world.balance(ALICE.address) == COINS - FEE.worst
    assert setting.world.effects() == []
    assert_conserved(setting.world)


def test_reorganisation_takes_payments_back(setting: Setting) -> None:
    made, one = setting.signed()
    do(setting.chain.send(made.raw))
    setting.mine()
    assert [tx.hash for tx in setting.world.reorg(1, empty=True)] == [made.hash]
    assert setting.world.effects() == []
    setting.mine()
    assert len(setting.world.effects()) == 1
    with pytest.raises(ValueError, match="too deep"):
        setting.world.reorg(6)
    setting.mine(6)
    assert isinstance(setting.fate(one), Confirmed)
    assert [tx.hash for tx in setting.world.reorg(8, deep=True, returns=lambda _: False)] == [made.hash]
    assert_conserved(setting.world)


def test_same_calls_give_the_same_hashes() -> None:
    def hashes() -> list[str]:
        setting = Setting()
        for amount in range(1, 4):
            do(setting.chain.send(setting.signed(pay(amount))[0].raw))
            setting.world.advance(setting.world.head.timestamp + 7)
        setting.world.reorg(2, returns=lambda tx: tx.does.amount != 3)
        return [block.hash for block in setting.world.blocks]

    assert hashes() == hashes()


# --- fates -----------------------------------------------------------------------------------------------------------


def sent(setting: Setting, order: Order | None = None) -> Try:
    made, one = setting.signed(order)
    assert do(setting.chain.send(made.raw)).accepted
    return one


def expire(setting: Setting, one: Try) -> None:
    assert one.slot.expires is not None
    setting.mine(one.slot.expires + setting.world.terms.finality - setting.world.head.number + 1)


def test_confirmed_at_the_final_height_and_not_before(setting: Setting) -> None:
    one = sent(setting)
    assert setting.fate(one) == Pending(seen=True)
    setting.mine()
    block = setting.world.head
    for _ in range(5):
        assert setting.fate(one) == Pending(seen=True, block=block.number)
        setting.mine()
    fate = setting.fate(one)
    assert isinstance(fate, Confirmed)
    assert (fate.block, fate.block_hash, fate.fee_paid) == (block.number, block.hash, 30_300 * 100)


def test_not_confirmed_while_one_node_calls_it_not_final(setting: Setting) -> None:
    one = sent(setting)
    setting.mine(6)
    setting.nodes["two"].lag = 1
    assert isinstance(setting.fate(one), Pending)
    setting.nodes["two"].lag = 0
    assert isinstance(setting.fate(one), Confirmed)


def test_dead_when_the_final_height_is_past_the_expiry(setting: Setting) -> None:
    _, one = setting.signed()
    assert setting.fate(one) == Pending(seen=False)
    assert one.slot.expires is not None
    setting.mine(one.slot.expires + 5 - setting.world.head.number)
    assert setting.fate(one) == Pending(seen=False)
    setting.mine()
    assert isinstance(setting.fate(one), Dead)


@pytest.mark.parametrize("trouble", ["behind", "down", "pruned", "hangs"])
def test_not_dead_unless_both_nodes_can_say_so(setting: Setting, trouble: str) -> None:
    _, one = setting.signed()
    expire(setting, one)
    node = setting.nodes["two"]
    match trouble:
        case "behind":
            node.lag = 1
        case "down":
            node.down = True
        case "hangs":
            node.hangs = True
        case "pruned":
            node.keeps = 15
    assert isinstance(setting.fate(one), Pending | Unknown)
    setting.nodes.heal()
    assert isinstance(setting.fate(one), Dead)


def test_paid_but_pruned_everywhere_is_not_dead(setting: Setting) -> None:
    one = sent(setting)
    expire(setting, one)
    assert isinstance(setting.fate(one), Confirmed)
    for node in setting.nodes.by_name.values():
        node.keeps = 10
    fate = setting.fate(one)
    assert isinstance(fate, Unknown) and fate.person


def test_node_that_hides_or_changes_a_payment_is_not_believed(setting: Setting) -> None:
    one = sent(setting)
    expire(setting, one)
    for lie in (
        lambda method, _params, truth: False if method == "find" else truth,
        lambda method, _params, truth: truth._replace(block_hash="00") if method == "find" else truth,
        lambda method, _params, truth: truth._replace(ok=False) if method == "find" else truth,
    ):
        setting.nodes["two"].lies = [lie]
        assert isinstance(setting.fate(one), Unknown)
    setting.nodes.heal()
    assert isinstance(setting.fate(one), Confirmed)


def test_failed_at_the_final_height_is_dead_and_cost_a_fee(setting: Setting) -> None:
    setting.world.tokens[USDT].blacklist.add(CAROL)
    one = sent(setting)
    setting.mine(6)
    fate = setting.fate(one)
    assert isinstance(fate, Dead)
    assert (fate.hash, fate.fee_paid) == (one.hash, FEE.worst)


def test_token_that_pays_less_is_a_mismatch() -> None:
    setting = Setting(Behaviour.TAKES_FEE)
    one = sent(setting)
    setting.mine(6)
    assert isinstance(setting.fate(one), Mismatch)


def test_transaction_without_a_known_hash_is_never_dead_by_absence(setting: Setting) -> None:
    _, one = setting.signed()
    expire(setting, one)
    fate = setting.fate(msgspec.structs.replace(one, hash=""))
    assert isinstance(fate, Unknown) and fate.person


def test_cancellation_does_not_kill_the_payment(setting: Setting) -> None:
    slot = setting.slot()
    _, payment = setting.signed(slot=slot)
    made, cancel = setting.signed(shape=Shape.CANCEL, slot=slot)
    do(setting.chain.send(made.raw))
    setting.mine(6)
    assert setting.fate(payment, cancel) == Pending(seen=False)
    expire(setting, payment)
    fate = setting.fate(payment, cancel)
    assert isinstance(fate, Dead) and fate.hash == made.hash


def test_one_node_is_enough_only_where_there_is_one() -> None:
    single = Setting(names=("one",))
    _, one = single.signed()
    expire(single, one)
    assert isinstance(single.fate(one), Unknown)
    assert isinstance(single.fate(one, one_node_is_enough=True), Dead)
    double = Setting()
    expire(double, one)
    double.nodes["two"].down = True
    assert isinstance(double.fate(one, one_node_is_enough=True), Unknown)


# --- the rest of the chain -------------------------------------------------------------------------------------------


def test_quote_is_for_payments_that_would_succeed(setting: Setting) -> None:
    def quote(order: Order, priority: Priority = Priority.NORMAL, shape: Shape = Shape.PAY) -> Fee:
        return do(setting.chain.quote(ALICE.address, order, shape, priority))

    assert quote(pay()) == Fee(gas_limit=60_600, price=100)
    assert quote(pay(), shape=Shape.CANCEL) == Fee(gas_limit=600, price=100)
    for order in (pay(10**9), pay(COINS, contract="")):
        with pytest.raises(WalletShort):
            quote(order)
    setting.world.terms.price = 101
    with pytest.raises(FeeTooHigh):
        quote(pay(), Priority.LOW)
    setting.world.tokens[USDT].blacklist.add(CAROL)
    with pytest.raises(WouldRevert, match="blacklisted"):
        quote(pay())
    assert do(setting.chain.higher(FEE, Priority.NORMAL)) is None


def test_balances_contracts_and_status(setting: Setting) -> None:
    sent(setting)
    setting.mine()
    before = do(setting.chain.balances(CAROL, [USDT]))
    assert (before.coin, before.tokens) == (0, {USDT: 0})
    setting.mine(5)
    assert do(setting.chain.balances(CAROL, [USDT])).tokens == {USDT: 1_000}
    assert do(setting.chain.is_contract(USDT)) and not do(setting.chain.is_contract(CAROL))
    setting.nodes["two"].down = True
    assert [node.usable for node in do(setting.chain.nodes())] == [True, False]
    with pytest.raises(NodesUnavailable):
        do(setting.chain.balances(CAROL, [USDT]))


def test_transaction_of_another_program_is_known_by_its_bytes_at_nodes_that_agree(setting: Setting) -> None:
    one = sent(setting)
    found = do(setting.chain.sent_elsewhere(one.hash))
    assert found is not None and (found.hash, found.sender) == (one.hash, ALICE.address)
    assert found.slot == one.slot
    assert do(setting.chain.sent_elsewhere("0" * 64)) is None
    setting.nodes["two"].lies = [lambda method, _params, truth: b"" if method == "bytes" else truth]
    with pytest.raises(NodesUnavailable):
        do(setting.chain.sent_elsewhere(one.hash))


def test_scan_reads_whole_ranges_at_nodes_that_agree(setting: Setting) -> None:
    one = sent(setting)
    setting.mine()
    at = setting.world.head.number
    setting.mine(5)
    page = do(setting.chain.scan(frozenset({ALICE.address}), 0))
    assert [(tx.hash, tx.block) for tx in page.transactions] == [(one.hash, at)]
    assert (page.up_to, page.up_to_hash) == do(setting.chain.final_block())
    assert do(setting.chain.scan(frozenset({ALICE.address}), page.up_to)).transactions == ()
    setting.nodes["two"].lies = [
        lambda method, _params, truth: (
            [block._replace(transactions=()) for block in truth] if method == "blocks" else truth
        )
    ]
    with pytest.raises(NodesUnavailable, match="disagree"):
        do(setting.chain.scan(frozenset({ALICE.address}), 0))


def test_scan_notices_that_a_final_block_is_gone(setting: Setting) -> None:
    setting.mine(3)
    page = do(setting.chain.scan(frozenset({ALICE.address}), 0))
    assert do(setting.chain.scan(frozenset(), page.up_to, page.up_to_hash)).up_to == page.up_to
    setting.world.reorg(6, deep=True)
    with pytest.raises(DeepReorganisation):
        do(setting.chain.scan(frozenset({ALICE.address}), page.up_to, page.up_to_hash))


@pytest.mark.parametrize("contract", ["", USDT])
def test_arrivals_are_what_final_blocks_have_brought(setting: Setting, contract: str) -> None:
    made, _ = setting.signed(pay(contract=contract))
    do(setting.chain.send(made.raw))
    setting.mine()
    at = setting.world.head
    setting.mine(5)
    final = do(setting.chain.final_block())
    page = do(setting.chain.arrivals({CAROL}, frozenset({USDT}), 0, "", final[0]))
    (one,) = page.found
    assert (page.up_to, page.up_to_hash, page.one_node) == (*final, False)
    assert (one.hash, one.part, one.contract) == (made.hash, "0" if contract else "coin", contract)
    assert (one.sender, one.to, one.amount, one.disputed) == (ALICE.address, CAROL, 1_000, "")
    assert (one.block, one.block_hash) == (at.number, at.hash)
    earlier = do(setting.chain.arrivals({CAROL}, frozenset({USDT}), 0, "", at.number - 1))
    assert (earlier.up_to, earlier.found) == (at.number - 1, ())
    again = do(setting.chain.arrivals({CAROL}, frozenset({USDT}), page.up_to, page.up_to_hash, final[0]))
    assert (again.up_to, again.up_to_hash, again.found) == (*final, ())
    assert do(setting.chain.arrivals({ALICE.address}, frozenset({USDT}), 0, "", final[0])).found == ()
    setting.nodes["two"].lies = [
        lambda method, _params, truth: [one._replace(events=()) for one in truth] if method == "blocks" else truth
    ]
    with pytest.raises(NodesUnavailable, match="disagree"):
        do(setting.chain.arrivals({CAROL}, frozenset({USDT}), 0, "", final[0]))


def test_an_arrival_of_a_token_that_lies_is_disputed() -> None:
    setting = Setting(Behaviour.LIES)
    made, _ = setting.signed()
    do(setting.chain.send(made.raw))
    setting.mine(6)
    (one,) = do(setting.chain.arrivals({CAROL}, frozenset({USDT}), 0, "", setting.world.finalized)).found
    assert one.disputed == "the balance rose by 0, not by 1000"


def test_node_that_passes_nothing_on_is_not_the_network(setting: Setting) -> None:
    for node in setting.nodes.by_name.values():
        node.isolated = True
    one = sent(setting)
    setting.mine()
    assert setting.fate(one) == Pending(seen=True)
    setting.nodes.heal()
    setting.mine(6)
    assert isinstance(setting.fate(one), Confirmed)


def test_faults_of_a_send_are_answers_and_no_proof(setting: Setting) -> None:
    made, one = setting.signed()
    setting.nodes["one"].script.append(Fault.REPLY_LOST)
    setting.nodes["two"].script.append(Fault.REFUSED)
    told = do(setting.chain.send(made.raw))
    assert not told.accepted and set(told.answers) == {"one", "two"}
    setting.mine(6)
    assert isinstance(setting.fate(one), Confirmed)
