"""The chains that payouts are simulated on: what each is like, its nodes, and the rail that asks them.

- `evm`: an account chain behind JSON-RPC nodes, and the real EVM rail.
- `tron`: TRON behind the HTTP interface of its nodes, and the real TRON rail. Its blocks are far apart, so that a
  transaction expires within a few of them.
- `expiry`: a plain chain on which transactions expire. Its rail is the simulator's own.

The same wallets, by the same keys, and one token are on each. The keys are no secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bursar.flows.payouts.documents import ChainDocument, Ranked
from bursar.rails.chain import Chain, Codec, Fee, Network, Order, Shape, Slot
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.nodes import Endpoint
from bursar.rails.tron.addresses import PREFIX, text_of
from bursar.rails.tron.chain import TronChain
from bursar.rails.tron.codec import TronCodec
from bursar.signer.curve import evm_address, public_key, sign_digest, tron_address
from bursar.sim import evm_nodes, evm_world, expiry_chain, expiry_world, tron_nodes, tron_world
from bursar.sim.chain_state import Token
from bursar.sim.expiry_codec import ExpiryCodec
from bursar.sim.process import Process

CHAIN_NAME: Final = "sim"
CHAIN_ID: Final = 777
GWEI: Final = 10**9
SUN: Final = 10**6  # of one TRX
WALLETS: Final = ("hot1", "hot2")
KEYS: Final = {name: bytearray(bytes([number + 1]) * 32) for number, name in enumerate(WALLETS)}
OTHER_KEY: Final = bytearray(b"\x55" * 32)  # of a wallet that is not ours
STRANGER_KEY: Final = bytearray(b"\x77" * 32)  # of one that sends to users
TOKENS: Final = 10**9  # of each wallet, in smallest units
FINALITY: Final = 3
TRON_BLOCK_MS: Final = 60_000  # by the chain's own clock: its transactions expire after ten blocks

World = evm_world.World | expiry_world.World | tron_world.World
Nodes = evm_nodes.Nodes | expiry_chain.Nodes | tron_nodes.Nodes


@dataclass(frozen=True, kw_only=True)
class ChainKind:
    """What there is of a chain before a run begins."""

    name: str
    codec: Codec
    chain_id: int
    token: str  # its contract
    native: str  # coin that fees are paid in
    decimals: int  # of it
    coins: int  # of each wallet, in smallest units
    fee_max: int  # of one transaction, for the signer
    addresses: Mapping[str, str]  # of wallets, by name
    ceilings: Ranked
    tips: Ranked
    block_s: float = 1.0  # between two blocks, by the processes' clock

    def address(self, number: int) -> str:
        """An address that no one has the key of."""
        if self.name == "tron":
            return text_of(PREFIX + number.to_bytes(20, "big"))
        return self.codec.check_address(CHAIN_NAME, f"0x{number:040x}")

    def document(self) -> ChainDocument:
        """The chain as operators have described it."""
        return ChainDocument(
            kind=self.name,
            chain_id=self.chain_id,
            native=self.native,
            decimals=self.decimals,
            depth=1,
            finalized_tag=True,
            fee_ceilings=self.ceilings,
            tips=self.tips,
            block_ms=int(self.block_s * 2000),  # what it is asked every so often; each poll costs, and finds little new
            bump_after_s=8,
            unconfirmed_max=4,
        )


EVM: Final = ChainKind(
    name="evm",
    codec=EvmCodec(),
    chain_id=CHAIN_ID,
    token=EvmCodec().check_address(CHAIN_NAME, "0x" + "c0" * 20),
    native="ETH",
    decimals=18,
    coins=10**18,
    fee_max=10**17,
    addresses={name: evm_address(public_key(key)) for name, key in KEYS.items()},
    ceilings=Ranked(high=400 * GWEI, normal=300 * GWEI, low=200 * GWEI),
    tips=Ranked(high=3 * GWEI, normal=2 * GWEI, low=GWEI),
)
EXPIRY: Final = replace(EVM, name="expiry", codec=ExpiryCodec())
TRON: Final = ChainKind(
    name="tron",
    codec=TronCodec(),
    chain_id=tron_world.World().chain_id,
    token=text_of(PREFIX + b"\xc0" * 20),
    native="TRX",
    decimals=6,
    coins=10_000 * SUN,
    fee_max=100 * SUN,
    addresses={name: tron_address(public_key(key)) for name, key in KEYS.items()},
    ceilings=Ranked(high=420, normal=420, low=420),
    tips=Ranked(high=1, normal=1, low=1),
    block_s=2.0,
)
KINDS: Final = {kind.name: kind for kind in (EVM, EXPIRY, TRON)}


def deposit_key(user: int) -> bytearray:
    """The key of a user's wallet for deposits."""
    return bytearray(bytes([0x80 + user]) * 32)


def address_of(kind: str, key: bytearray) -> str:
    """Of a key, as its chain writes it."""
    return (tron_address if kind == "tron" else evm_address)(public_key(key))


def codecs(kind: str) -> Codec:
    """By kind, the simulator's own among them."""
    return KINDS[kind].codec


def world_of(kind: ChainKind) -> World:
    """A chain whose wallets have money."""
    world: World
    match kind.name:
        case "evm":
            terms = evm_world.Terms(chain_id=CHAIN_ID, block_time_s=1, finality=FINALITY, base_fee=10 * GWEI)
            world = evm_world.World(terms)
        case "expiry":
            world = expiry_world.World(
                expiry_world.Terms(chain_id=CHAIN_ID, block_time_s=1, finality=FINALITY, window=12)
            )
        case _:
            world = tron_world.World(tron_world.Terms(block_ms=TRON_BLOCK_MS, solidified=FINALITY))
    world.deploy(Token(address=kind.token))
    for address in kind.addresses.values():
        world.fund(address, kind.coins)
        world.fund(address, TOKENS, kind.token)
    if isinstance(world, tron_world.World):
        _older(world)
    for _ in range(FINALITY + 1):
        world.mine()
    return world


def _older(world: tron_world.World) -> None:
    """A transaction of another wallet: a node that has it has the history in which ours would be (W28)."""
    sender = tron_address(public_key(OTHER_KEY))
    world.fund(sender, 100 * SUN)
    world.fund(to := TRON.address(0xE1DE), SUN)
    world.mine()
    network = Network(name=CHAIN_NAME, kind="tron", chain_id=world.chain_id, native="TRX", fee_ceilings=(420, 420, 420))
    slot = Slot(expires=world.head.timestamp + 10 * TRON_BLOCK_MS, reference=f"{world.head.id[12:32]}/1")
    order = Order(payout="older", to=to, amount=1)
    unsigned = TRON.codec.build(network, sender, order, Shape.PAY, slot, Fee(gas_limit=0, price=0))
    world.submit(TRON.codec.signed(unsigned, sign_digest(OTHER_KEY, TRON.codec.digest(unsigned)), sender).raw)


def nodes_of(world: World, names: Sequence[str], seed: int) -> Nodes:
    """The chain's nodes."""
    if isinstance(world, evm_world.World):
        return evm_nodes.Nodes(world, names, seed)
    if isinstance(world, expiry_world.World):
        return expiry_chain.Nodes(world, names, seed)
    return tron_nodes.Nodes(world, names, seed)


def rail_of(kind: ChainKind, nodes: Nodes, process: Process) -> Chain:
    """The chain as one process sees it."""
    network, ports = kind.document().network(CHAIN_NAME), process.ports
    if isinstance(nodes, expiry_chain.Nodes):
        return expiry_chain.ExpiryChain(network, nodes, ports.sleep, ports.token)
    if isinstance(nodes, evm_nodes.Nodes):
        endpoints = [Endpoint(name=node.name, url=node.url) for node in nodes.by_name.values()]
        return EvmChain(network, endpoints, nodes.transport(ports.sleep), ports.monotonic, timeout_s=2.0)
    endpoints = [Endpoint(name=name, url=nodes.url(name)) for name in nodes.by_name]
    post = nodes.transport(ports.sleep)
    return TronChain(network, endpoints, post, ports.monotonic, ports.now_us, ports.token, timeout_s=2.0)


def fees_of(world: World) -> Iterator[tuple[str, str, int]]:
    """Of every transaction on the canonical chain: hash, sender, and the fee that it has cost."""
    for block in world.blocks:
        for one in _included(block):
            if isinstance(one, tron_world.Included):
                yield one.tx.id, text_of(one.tx.contracts[0].owner), one.fee
            else:
                yield one.tx.hash, one.tx.sender, one.fee if hasattr(one, "fee") else one.gas_used * one.price


def hashes_in(block: Any) -> list[str]:
    """Hashes of the transactions in a block of any kind."""
    return [one.tx.id if isinstance(one, tron_world.Included) else one.tx.hash for one in _included(block)]


def _included(block: Any) -> Sequence[Any]:
    found: Sequence[Any] = block.receipts if hasattr(block, "receipts") else block.included
    return found
