"""The chain under the demo of payouts as a real EVM node: anvil, in a process of its own, with an ERC-20 token.

It runs in a clone of the repository only: anvil does not ship (docs/decisions/0030-what-the-wheel-ships.md). There is
one node, and it is configured as one. The same node under two URLs would be its own witness, and a second anvil is
another chain; so the document of the token says up to which amount a single node is believed (W35).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.error import URLError

from bursar.cli.errors import Unusable
from bursar.demo.payout_chains import CALM_FEE, COINS, FINALITY, TOKENS, DemoChain
from bursar.http import Pool
from bursar.rails.evm.codec import EvmCodec, transfer_data
from bursar.rails.evm.rpc import ANSWER_BYTES_MAX, Post
from bursar.testbed.anvil import (
    BINARY_VARIABLE,
    Anvil,
    AnvilFailedError,
    AnvilNotFoundError,
    find_anvil,
    throwaway_anvil,
    token_code,
)

CHAIN_ID: Final = 31_337
ONE_NODE_LIMIT: Final = 50 * 10**6
GAS_PRICE: Final = hex(2 * CALM_FEE)  # of what is not Bursar's
TRANSFER: Final = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"  # Transfer(from, to, amount)
BALANCE_OF: Final = "0x70a08231"


class AnvilChain:
    """One node, and a token that one of its own accounts has deployed."""

    name = "anvil"
    chain_id = CHAIN_ID
    one_node_limit = ONE_NODE_LIMIT

    def __init__(self, node: Anvil, post: Post) -> None:
        self._node = node
        self._fee = CALM_FEE
        self._bank = node.rpc("eth_accounts")[0]
        self.post = post
        self.urls: tuple[str, ...] = (node.url,)
        self.token = self._deploy()
        version, limit = node.rpc("web3_clientVersion"), ONE_NODE_LIMIT // 10**6
        self.about: tuple[str, ...] = (
            f"The chain is a real EVM node, {version}, process {node.pid}, with an ERC-20 token.",
            "It is one node, and one node could lie. So it is believed, alone, only for payouts up to",
            f"{limit} USDT (one_node_limit in the token's document). In production, configure two nodes of",
            "different operators: then nothing ends a payout unless both say the same.",
        )

    def _deploy(self) -> str:
        data = token_code("good", 10**12)
        made = self._node.rpc("eth_sendTransaction", {"from": self._bank, "data": data, "gasPrice": GAS_PRICE})
        self._node.mine()
        receipt = self._node.rpc("eth_getTransactionReceipt", made)
        return EvmCodec().check_address(self.name, receipt["contractAddress"])

    async def _rpc(self, method: str, *params: Any) -> Any:
        return await asyncio.to_thread(self._node.rpc, method, *params)

    async def fund(self, wallets: Iterable[str]) -> None:
        for address in wallets:
            await self._rpc("anvil_setBalance", address, hex(COINS))
            data = "0x" + transfer_data(address, TOKENS).hex()
            sent = {"from": self._bank, "to": self.token, "data": data, "gasPrice": GAS_PRICE}
            await self._rpc("eth_sendTransaction", sent)
        for _ in range(FINALITY + 1):
            await self.mine()

    async def mine(self) -> None:
        await self._rpc("anvil_mine", "0x1")
        await self.set_fee(
            self._fee
        )  # half-full blocks of others would hold it; here it would fall by an eighth a block

    async def set_fee(self, base_fee: int) -> None:
        self._fee = base_fee
        await self._rpc("anvil_setNextBlockBaseFeePerGas", hex(base_fee))

    async def reorganise(self, depth: int) -> None:
        await self._rpc("anvil_reorg", depth, [])
        await self.set_fee(self._fee)

    async def height(self) -> int:
        return int(await self._rpc("eth_blockNumber"), 16)

    async def knows(self, hash_: str) -> bool:
        return await self._rpc("eth_getTransactionByHash", hash_) is not None

    async def arrived(self, to: str) -> list[int]:
        topics = [TRANSFER, None, f"0x{int(to, 16):064x}"]
        wanted = {"fromBlock": "0x0", "toBlock": "latest", "address": self.token, "topics": topics}
        return [int(log["data"], 16) for log in await self._rpc("eth_getLogs", wanted)]

    async def balance(self, address: str, *, token: bool) -> int:
        if not token:
            return int(await self._rpc("eth_getBalance", address, "latest"), 16)
        call = {"to": self.token, "data": f"{BALANCE_OF}{int(address, 16):064x}"}
        return int(await self._rpc("eth_call", call, "latest"), 16)


@asynccontextmanager
async def on_anvil() -> AsyncIterator[DemoChain]:
    """An anvil of its own, which ends with this."""
    pool = Pool(ANSWER_BYTES_MAX)
    try:
        with throwaway_anvil(CHAIN_ID, "--base-fee", str(CALM_FEE)) as node:
            yield AnvilChain(node, pool.post)
    except (AnvilFailedError, URLError) as error:
        raise Unusable(f"the EVM node failed: {error}") from error
    finally:
        await pool.close()


def require_anvil() -> None:
    """Refuse, with what to do, if there is no anvil that could be started."""
    try:
        program = find_anvil()
    except AnvilNotFoundError:
        raise Unusable("there is no anvil here: make demo-evm fetches and uses it") from None
    if not program.is_file():
        raise Unusable(
            f"{BINARY_VARIABLE} names {program}, which is not there; unset it, and make demo-evm fetches one"
        )
