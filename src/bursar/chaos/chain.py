"""The chain of chaos tests: one EVM node (anvil) behind two relays, which are its two nodes, and what happens to it.

Anvil gets `kill -9` like every other program. Blocks survive that, as they do on a chain with more nodes than ours: no
block is made while its state is read, and it starts with that state again. What was in its pool is gone for good. A
reorganisation is never deeper than `DEPTH`, from where on blocks are final, and what it removes does not return to the
pool. So a payout survives either only if its own bytes are sent again.

Relays go silent, one or both, without closing anything. Not here: nodes that contradict each other, and any node that
holds value.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bursar.chaos.network import RelayThread, free_ports
from bursar.signer.curve import evm_address, public_key
from bursar.testbed import Guard
from bursar.testbed.anvil import Anvil, AnvilFailedError, token_code

NAME: Final = "anvil"
CHAIN_ID: Final = 31_337
DEPTH: Final = 3
BLOCK_S: Final = 0.6
BETWEEN_S: Final = (0.5, 2.5)  # two faults
GWEI: Final = 10**9
KEYS: Final = {"hot-1": bytearray(b"\x11" * 32), "hot-2": bytearray(b"\x12" * 32)}  # worth nothing anywhere
WALLETS: Final = {name: evm_address(public_key(key)) for name, key in KEYS.items()}
COINS: Final = 10 * 10**18  # of each wallet, in the smallest unit
TOKENS: Final = 10**12
DECIMALS: Final = 6
TRANSFER: Final = "0xa9059cbb"  # transfer(address,uint256)
BALANCE_OF: Final = "0x70a08231"
TRANSFERRED: Final = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"  # Transfer(…)
# Without the state of old blocks, and without the contract that writes each block's hash into the state (Prague), or
# what has to be read and loaded with every kill would grow with every block. Every start makes the same first block,
# or there would be two of them, and the node would show either.
OPTIONS: Final = (
    *("--accounts", "1", "--prune-history", "64", "--hardfork", "cancun"),
    *("--timestamp", "1700000000"),
)
FAULTS: Final = ("reorganised", "pool emptied", "mining stopped", "fees up", "a node silent", "both nodes silent")


@dataclass(frozen=True)
class Paid:
    """A transfer of the token, as the chain has it."""

    sender: str
    to: str
    amount: int
    hash: str


class Chain:
    """The chain, and a victim: what kills and pauses hit is anvil. Addresses are in lower case."""

    name = NAME

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.faults: Counter[str] = Counter()
        self.is_ready = False
        self.token = ""
        self.genesis = ""
        self.urls: list[str] = []
        self._anvil = Anvil(CHAIN_ID, *OPTIONS, guard=guard)
        self._state = folder / "chain.json"
        self._lock = threading.Lock()  # only its holder makes blocks, or kills anvil
        self._loaded = 0  # the last block that anvil has not made since it started
        self._stopped_until = 0.0
        self._over = threading.Event()
        self._healed = threading.Event()
        self._failed = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It mines inside, and its wallets have coin and tokens."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._anvil.kill)
            self._anvil.start()
            self._furnish()
            self._relays = RelayThread()
            stack.callback(self._relays.close)
            ports = free_ports(2)
            self._nodes = [self._relays.relay(port, self._anvil.port) for port in ports]
            self.urls = [f"http://127.0.0.1:{port}" for port in ports]
            mining = threading.Thread(target=self._mine, name="miner", daemon=True)
            mining.start()
            stack.callback(mining.join)
            stack.callback(self._over.set)
            yield

    def _furnish(self) -> None:
        rpc = self._anvil.rpc
        [giver] = rpc("eth_accounts")
        deployed = rpc("eth_sendTransaction", {"from": giver, "data": token_code("good", TOKENS * len(WALLETS))})
        self._anvil.mine()
        self.token = rpc("eth_getTransactionReceipt", deployed)["contractAddress"]
        for address in WALLETS.values():
            rpc("anvil_setBalance", address, hex(COINS))
            words = f"{TRANSFER}{address[2:].lower():0>64}{TOKENS:064x}"
            rpc("eth_sendTransaction", {"from": giver, "to": self.token, "data": words})
        self._anvil.mine(DEPTH + 1)
        self.genesis = rpc("eth_getBlockByNumber", "0x0", False)["hash"]
        self.is_ready = True

    def _mine(self) -> None:
        while not self._over.wait(BLOCK_S):
            with self._lock, contextlib.suppress(OSError, AnvilFailedError):
                if self.is_ready and time.monotonic() > self._stopped_until:
                    self._anvil.mine()

    # --- as a victim -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9, at whatever it is doing for those who ask it."""
        with self._lock:
            if self.is_ready:
                state: str = self._anvil.rpc("anvil_dumpState", True)  # with what is needed to ask about final blocks
                self._state.write_bytes(gzip.decompress(bytes.fromhex(state.removeprefix("0x"))))
                self.is_ready = False
            self._anvil.kill()

    def pause(self) -> None:
        """Hold it still."""
        os.kill(self._anvil.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        os.kill(self._anvil.pid, signal.SIGCONT)

    def revive(self) -> None:
        """Start it at the same address, with the same blocks and an empty pool."""
        with self._lock:
            self._anvil.start("--load-state", str(self._state))
            self._loaded = self._height()
            self.is_ready = True

    def _height(self) -> int:
        return int(self._anvil.rpc("eth_blockNumber"), 16)

    # --- what happens to a chain -------------------------------------------------------------------------------------

    def strike(self, seed: int) -> None:
        """From now on one fault after the other, at random, until `heal`."""
        self._striking = threading.Thread(target=self._strike, args=(seed,), name="chain faults", daemon=True)
        self._striking.start()

    def heal(self) -> str:
        """Nothing breaks any more; returns what went wrong with the faults themselves, or nothing."""
        self._healed.set()
        self._striking.join()
        self._stopped_until = 0.0
        for node in self._nodes:
            self._relays.pass_on(node)
        return self._failed

    def _strike(self, seed: int) -> None:
        try:
            self._strike_and_strike(seed)
        except Exception as error:
            self._failed = f"the faults of the chain ended: {error!r}"  # fewer of them would prove less
            raise

    def _strike_and_strike(self, seed: int) -> None:
        rng = random.Random(f"{seed}:chain")
        while not self._healed.wait(rng.uniform(*BETWEEN_S)):
            name, seconds, own = rng.choice(FAULTS), rng.uniform(0.5, 4.0), random.Random(rng.random())
            while not self._struck(name, seconds, own):
                if self._healed.wait(BLOCK_S):  # anvil is down: it comes when it is back
                    return

    def _struck(self, name: str, seconds: float, rng: random.Random) -> bool:
        """One fault, if anvil is up. What lasts ends by itself."""
        with self._lock:
            if not self.is_ready:
                return False
            match name:
                case "reorganised":
                    self._reorganise(rng.randint(1, DEPTH))
                case "pool emptied":
                    self._forget(rng)
                case "mining stopped":
                    self._stopped_until = time.monotonic() + seconds
                case "fees up":
                    self._anvil.rpc("anvil_setNextBlockBaseFeePerGas", hex(rng.choice((20, 60, 150)) * GWEI))
                case "a node silent":
                    self._silence(rng.randrange(2), seconds)
                case _:
                    for number in range(2):
                        self._silence(number, seconds)
            self.faults[name] += 1
            return True

    def _reorganise(self, depth: int) -> None:
        """Replace the newest blocks by empty ones. Only those made since anvil started: going back to a block that it
        has loaded, it loses the code of all contracts."""
        missing = self._loaded + 1 + depth - self._height()
        if missing > 0:
            self._anvil.mine(missing)
        self._anvil.rpc("anvil_reorg", depth, [])

    def _forget(self, rng: random.Random) -> None:
        """Some of the pool, or all of it."""
        share = rng.choice((0.3, 1.0))
        content = self._anvil.rpc("txpool_content")
        of_senders = [by_nonce for part in content.values() for by_nonce in part.values()]
        for hash_ in [one["hash"] for by_nonce in of_senders for one in by_nonce.values()]:
            if rng.random() < share:
                self._anvil.rpc("anvil_dropTransaction", hash_)

    def _silence(self, number: int, seconds: float) -> None:
        self._relays.silence(self._nodes[number])
        self._relays.pass_on(self._nodes[number], seconds)

    # --- what is there in the end ------------------------------------------------------------------------------------

    def paid(self) -> list[Paid]:
        """Every transfer of the token by one of the wallets, on the chain as it is now."""
        question = {"fromBlock": "0x0", "toBlock": "latest", "address": self.token, "topics": [TRANSFERRED]}
        found = [_paid(log) for log in self._anvil.rpc("eth_getLogs", question)]
        ours = {address.lower() for address in WALLETS.values()}
        return [paid for paid in found if paid.sender in ours]

    def balances(self) -> dict[str, tuple[int, int]]:
        """What each wallet has: tokens and coin."""
        return {name: (self._tokens(address), self._coin(address)) for name, address in WALLETS.items()}

    def _tokens(self, address: str) -> int:
        call = {"to": self.token, "data": f"{BALANCE_OF}{address[2:].lower():0>64}"}
        return int(self._anvil.rpc("eth_call", call, "latest"), 16)

    def _coin(self, address: str) -> int:
        return int(self._anvil.rpc("eth_getBalance", address, "latest"), 16)


def _paid(log: dict[str, Any]) -> Paid:
    _, sender, to = log["topics"]
    return Paid(f"0x{sender[-40:]}", f"0x{to[-40:]}", int(log["data"], 16), log["transactionHash"])
