"""A simulated TRON chain with two nodes or more, a rail that asks them, and wallets whose keys a test has.

town = TronTown()
raw, hash_ = await town.signed(order)
await town.chain.send(raw)
town.mine(21)
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.model.records import Priority
from bursar.rails.chain import Fate, Fee, Network, Order, Question, Shape, Slot, Try
from bursar.rails.nodes import Endpoint
from bursar.rails.tron.chain import TronChain
from bursar.rails.tron.codec import TronCodec
from bursar.signer.curve import public_key, sign_digest, tron_address
from bursar.sim.chain_state import Token
from bursar.sim.tron_nodes import Nodes
from bursar.sim.tron_world import Block, Terms, World

CODEC = TronCodec()
KEY = bytearray(b"\x44" * 32)
OTHER_KEY = bytearray(b"\x55" * 32)
HOT = tron_address(public_key(KEY))
OTHER = tron_address(public_key(OTHER_KEY))
SHOP = tron_address(public_key(bytearray(b"\x66" * 32)))
NEW = tron_address(public_key(bytearray(b"\x77" * 32)))  # no account
TOKEN = "TB4YUMD83V4ZtHDP6BAHYfA4E7f63Hrjmk"
TRX = 1_000_000
USDT = 1_000_000
ENERGY_SUN = 100


async def no_sleep(_seconds: float) -> None:
    """The network takes no time."""


class TronTown:
    """The chain, its nodes, and a rail."""

    def __init__(self, names: tuple[str, ...] = ("one", "two"), **network: Any) -> None:
        self.world = World(Terms())
        self.token = self.world.deploy(Token(TOKEN, gas=12_414))
        for address in (HOT, OTHER, SHOP):
            self.world.fund(address, 1_000 * TRX)
        self.world.fund(HOT, 5_000 * USDT, TOKEN)
        self.nodes = Nodes(self.world, names, seed=1)
        self.world.mine()
        self.now_s = 0.0
        self.tokens = 0
        fields: dict[str, Any] = {"name": "tron", "kind": "tron", "chain_id": self.world.chain_id, "native": "TRX"}
        fields |= {"fee_ceilings": (420, 420, 420)}
        self.network = Network(**fields | network)
        self.chain = self.rail(names)
        self.transfer_before()
        self.mine(22)

    def rail(self, names: tuple[str, ...]) -> TronChain:
        """A rail at some of the nodes."""
        endpoints = [Endpoint(name=name, url=self.nodes.url(name)) for name in names]
        post = self.nodes.transport(no_sleep)
        return TronChain(self.network, endpoints, post, lambda: self.now_s, self._now_us, self._token, timeout_s=2.0)

    def _now_us(self) -> int:
        return self.world.head.timestamp * 1_000

    def _token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:08x}"

    def transfer_before(self) -> None:
        """A transaction of another wallet, older than all of a test: nodes are asked for one."""
        slot = Slot(expires=self.world.head.timestamp + 60_000, reference=f"{self.world.head.id[12:32]}/1")
        order = Order(payout="older", to=SHOP, amount=1)
        raw, _ = sign(self.network, order, slot, Fee(gas_limit=0, price=0), key=OTHER_KEY)
        self.world.submit(raw)

    def mine(self, blocks: int = 1, *, missed: int = 0) -> None:
        """Blocks, and the time that they take."""
        for _ in range(blocks):
            self.world.mine(missed=missed)
            self.now_s += 3.0 * (1 + missed)

    def mine_one(self) -> Block:
        """A block."""
        self.mine()
        return self.world.head

    def expire(self, slot: Slot, *, empty: bool = False) -> None:
        """Let the chain's final block pass an expiration."""
        assert slot.expires is not None
        while self.world.blocks[self.world.finalized].timestamp < slot.expires:
            self.world.mine(empty=empty)
            self.now_s += 3.0

    def wait(self, seconds: float = 2.0) -> None:
        """Let what is known about nodes grow old."""
        self.now_s += seconds

    async def slot(self) -> Slot:
        """A new expiration."""
        return await self.chain.slot(HOT)

    async def signed(self, order: Order, slot: Slot | None = None) -> tuple[bytes, Try]:
        """A payment as the rail quotes it, signed."""
        fee = await self.chain.quote(HOT, order, Shape.PAY, Priority.NORMAL)
        slot = slot or await self.slot()
        raw, hash_ = sign(self.network, order, slot, fee)
        return raw, Try(hash=hash_, shape=Shape.PAY, slot=slot)

    async def fate(self, order: Order, *tries: Try, chain: TronChain | None = None, **question: Any) -> Fate:
        """What became of it, asked when nothing that is remembered of the nodes is fresh."""
        self.wait()
        fields = {"sender": HOT, "order": order, "tries": tries, **question}
        return await (chain or self.chain).fate(Question(**fields))


def sign(network: Network, order: Order, slot: Slot, fee: Fee, key: bytearray = KEY) -> tuple[bytes, str]:
    """The bytes of a payment, and their hash."""
    sender = tron_address(public_key(key))
    unsigned = CODEC.build(network, sender, order, Shape.PAY, slot, fee)
    made = CODEC.signed(unsigned, sign_digest(key, CODEC.digest(unsigned)), sender)
    return made.raw, made.hash


def trx(amount: int = 3 * TRX, to: str = SHOP, **other: Any) -> Order:
    """A payment of TRX."""
    return Order(payout="p1", to=to, amount=amount, **other)


def usdt(amount: int = 5 * USDT, to: str = SHOP, **other: Any) -> Order:
    """A payment of tokens."""
    return Order(payout="p1", to=to, contract=TOKEN, amount=amount, gas_limit_max=200_000, **other)


def other_timestamp(slot: Slot, timestamp: int) -> Slot:
    """The same slot with another timestamp."""
    return msgspec.structs.replace(slot, reference=f"{slot.reference.partition('/')[0]}/{timestamp}")
