"""The chain under the demo of payouts: what the story asks of it, and the simulated one.

The story is told once, on `DemoChain`. Bursar itself knows only the nodes (`urls`, `post`), as it does in production;
all else is what a chain does to those who use it, and a look at the chain that owes nothing to Bursar's own rail. The
other chain is a real EVM node (`payout_anvil`), which does not ship.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from bursar.rails.evm.codec import EvmCodec
from bursar.rails.evm.rpc import Post
from bursar.sim.chain_state import Token
from bursar.sim.evm_nodes import Nodes
from bursar.sim.evm_world import Terms, World

GWEI: Final = 10**9
CALM_FEE: Final = 10 * GWEI
FINALITY: Final = 2  # blocks on top of a final one
COINS: Final = 10**18  # that each wallet gets
TOKENS: Final = 1_000 * 10**6


class DemoChain(Protocol):
    """A chain with a token of six decimals, which can be made to misbehave. Blocks are made by `mine` alone."""

    name: str  # of its documents
    about: tuple[str, ...]  # what it is and which nodes are believed: for the reader
    chain_id: int
    token: str
    urls: tuple[str, ...]
    post: Post
    one_node_limit: int  # up to which a single node is believed (W35), in the token's smallest units

    async def fund(self, wallets: Iterable[str]) -> None:
        """Give each address `COINS` and `TOKENS`, and make that final."""
        ...

    async def mine(self) -> None:
        """Make a block of what is in the pool and offers enough."""
        ...

    async def set_fee(self, base_fee: int) -> None:
        """What every block asks for from now on, per unit of gas."""
        ...

    async def reorganise(self, depth: int) -> None:
        """Replace the last blocks by empty ones. What was in them is forgotten: it is in no pool either."""
        ...

    async def height(self) -> int:
        """Of the newest block."""
        ...

    async def knows(self, hash_: str) -> bool:
        """Whether a transaction is in the pool or in a block."""
        ...

    async def arrived(self, to: str) -> list[int]:
        """Every amount of the token that an address has received, as the blocks have it."""
        ...

    async def balance(self, address: str, *, token: bool) -> int:
        """What an address has of the token, or of the chain's own coin."""
        ...


class SimulatedChain:
    """The simulator's chain, behind two nodes that speak JSON-RPC inside this process."""

    name = "sim"
    about: tuple[str, ...] = (
        "The chain is simulated: blocks, a pool, fees, and an ERC-20 token. Two nodes show it, and",
        "nothing ends a payout unless both say the same of a final block.",
    )
    chain_id = 777
    token = EvmCodec().check_address(name, "0x" + "c0" * 20)
    one_node_limit = 0

    def __init__(self) -> None:
        terms = Terms(
            chain_id=self.chain_id, block_time_s=1, finality=FINALITY, base_fee=CALM_FEE, dynamic_base_fee=False
        )
        self._world = World(terms)
        self._world.deploy(Token(address=self.token))
        self._nodes = Nodes(self._world, ("north", "south"), 0)
        self.urls: tuple[str, ...] = tuple(node.url for node in self._nodes.by_name.values())
        self.post = self._nodes.transport(asyncio.sleep)

    async def fund(self, wallets: Iterable[str]) -> None:
        for address in wallets:
            self._world.fund(address, COINS)
            self._world.fund(address, TOKENS, self.token)
        for _ in range(FINALITY + 1):
            self._world.mine()

    async def mine(self) -> None:
        self._world.mine()

    async def set_fee(self, base_fee: int) -> None:
        self._world.spike(base_fee)

    async def reorganise(self, depth: int) -> None:
        for lost in self._world.reorg(depth, empty=True):
            self._nodes.drop(lost.hash)

    async def height(self) -> int:
        return self._world.head.number

    async def knows(self, hash_: str) -> bool:
        return self._world.pool.get(hash_) is not None or self._world.find(hash_) is not None

    async def arrived(self, to: str) -> list[int]:
        wanted = (to.lower(), self.token.lower())
        moved = self._world.effects(lambda effect: (effect.to.lower(), effect.contract.lower()) == wanted)
        return [effect.amount for effect in moved]

    async def balance(self, address: str, *, token: bool) -> int:
        return self._world.balance(address, self.token if token else "")


@asynccontextmanager
async def simulated() -> AsyncIterator[DemoChain]:
    """A simulated chain of its own."""
    yield SimulatedChain()
