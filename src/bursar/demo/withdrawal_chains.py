"""The two chains of the demo of withdrawals, EVM and TRON: each simulated, behind two nodes that speak HTTP.

`bursar serve` knows nothing but their URLs. A stranger lives there, who pays users' deposits. The story asks the
simulated chain itself what has arrived, which owes nothing to Bursar's own rails, and can make the nodes refuse
transactions for a while.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from bursar.rails.chain import Codec, Fee, Network, Order, Shape, Slot
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.tron.addresses import PREFIX, text_of
from bursar.rails.tron.codec import TronCodec
from bursar.signer.curve import evm_address, public_key, sign_digest, tron_address
from bursar.sim import evm_nodes, evm_world, tron_nodes, tron_world
from bursar.sim.chain_state import Token

BLOCK_S: Final = 0.5
FINALITY: Final = 2  # blocks on top of a final one
NODES: Final = ("north", "south")
UNIT: Final = 10**6  # the tokens have six decimals
TOKENS: Final = 10_000  # that each wallet gets
GWEI: Final = 10**9
STRANGER: Final = bytearray(b"\x05" * 32)  # the key of one who is no user
ACCEPTS_MS: Final = 60_000  # how long nodes take the stranger's transactions, where they expire
NOT_NOW: Final = (503, "text/plain", b"not now")

Answer = Callable[[str, bytes], tuple[int, str, bytes]]  # path and body → status, content type, body


class HttpChain(ABC):
    """A chain with a token, and its nodes. Blocks are made while it runs."""

    name: str  # of its documents
    what: str  # it is, for the reader
    kind: str
    coin: str  # that fees are paid in
    coins: int  # that each wallet gets
    decimals: int  # of the coin
    token: str  # its contract
    path: str  # of the key of the wallet that pays users
    gas_path: str  # of the wallet that pays for the gas of sweeps
    users_path: str  # above the keys of users' addresses
    fees: str  # their limits in the signer's policy
    gas: int  # the most that a sweep's gas may cost, in the coin's smallest unit
    sends: bytes  # what is in the path or the body of a request that brings a transaction
    chain_id: int
    codec: Codec
    stranger: str  # the stranger's address

    def __init__(self, world: evm_world.World | tron_world.World) -> None:
        self.takes = True  # whether its nodes take transactions
        self.urls: tuple[str, ...] = ()
        self._world = world
        self._lock = threading.Lock()  # a world is for one thread at a time
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nodes answer and blocks are made inside."""
        with ExitStack() as stack:
            self.urls = tuple(stack.enter_context(_served(self._node(name))) for name in NODES)
            miner = threading.Thread(target=self._mine, name=f"blocks of {self.name}", daemon=True)
            miner.start()
            stack.callback(miner.join)
            stack.callback(self._over.set)
            yield

    def fund(self, wallet: str, *, tokens: int = TOKENS) -> None:
        """Give a wallet coin and tokens, and make that final."""
        with self._lock:
            self._world.fund(wallet, self.coins * 10**self.decimals)
            if tokens:
                self._world.fund(wallet, tokens * UNIT, self._stored(self.token))
            for _ in range(FINALITY + 1):
                self._world.mine()

    def pay_in(self, to: str, amount: int) -> str:
        """The stranger sends tokens, by a transaction of whose hash this is."""
        order = Order(payout="", to=to, contract=self.token, amount=amount)
        network = Network(name=self.name, kind=self.kind, chain_id=self.chain_id)
        with self._lock:
            slot, fee = self._slot_and_fee()
            unsigned = self.codec.build(network, self.stranger, order, Shape.PAY, slot, fee)
            signature = sign_digest(STRANGER, self.codec.digest(unsigned))
            signed = self.codec.signed(unsigned, signature, self.stranger)
            self._world.submit(signed.raw)
        return signed.hash

    def has(self, address: str) -> int:
        """How much of the token an address has."""
        with self._lock:
            return self._world.balance(self._stored(address), self._stored(self.token))

    def arrived(self, to: str) -> list[int]:
        """Every amount of the token that an address has received, as the blocks have it."""
        wanted = (self._stored(to), self._stored(self.token))
        with self._lock:
            return [one.amount for one in self._world.effects(lambda effect: (effect.to, effect.contract) == wanted)]

    def knows(self, hash_: str) -> bool:
        """Whether a transaction waits for a block, or is in one."""
        with self._lock:
            return self._world.pool.get(hash_) is not None or self._world.find(hash_) is not None

    @abstractmethod
    def address(self, number: int) -> str:
        """An address that is not ours."""

    @abstractmethod
    def _answer(self, node: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """What a node answers to a POST."""

    @abstractmethod
    def _slot_and_fee(self) -> tuple[Slot, Fee]:
        """Of the stranger's next transaction."""

    def _stored(self, address: str) -> str:
        """An address as the chain keeps it."""
        return address

    def _node(self, name: str) -> Answer:
        def answer(path: str, body: bytes) -> tuple[int, str, bytes]:
            if not self.takes and (self.sends in body or self.sends in path.encode()):
                return NOT_NOW
            with self._lock:
                return self._answer(name, path, body)

        return answer

    def _mine(self) -> None:
        while not self._over.wait(BLOCK_S):
            with self._lock:
                self._world.mine()


class EvmChain(HttpChain):
    """An EVM chain with an ERC-20 token."""

    name = "eth"
    what = "an EVM chain, with an ERC-20 token"
    kind = "evm"
    coin = "ETH"
    coins = 1
    decimals = 18
    token = EvmCodec().check_address(name, "0x" + "c0" * 20)
    path = "m/44'/60'/0'/0/0"
    gas_path = "m/44'/60'/0'/0/1"
    users_path = "m/44'/60'/1'"
    fees = f'fee_max = "{10**17}"\ncancel_fee_max = "{10**17}"\n'
    gas = 10**17
    sends = b"eth_sendRawTransaction"
    chain_id = 777
    codec = EvmCodec()
    stranger = evm_address(public_key(STRANGER))

    def __init__(self) -> None:
        terms = evm_world.Terms(
            chain_id=self.chain_id, block_time_s=1, finality=FINALITY, base_fee=10 * GWEI, dynamic_base_fee=False
        )
        world = evm_world.World(terms)
        world.deploy(Token(address=self.token))
        self._sent = 0  # by the stranger
        self._nodes = evm_nodes.Nodes(world, NODES, 0)
        super().__init__(world)

    def address(self, number: int) -> str:
        return EvmCodec().check_address(self.name, f"0x{0xCAFE << 144 | number:040x}")

    def _answer(self, node: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        return 200, "application/json", self._nodes[node].serve(body)

    def _slot_and_fee(self) -> tuple[Slot, Fee]:
        self._sent += 1
        return Slot(nonce=self._sent - 1), Fee(gas_limit=100_000, price=30 * GWEI, tip=GWEI)

    def _stored(self, address: str) -> str:
        return address.lower()


class TronChain(HttpChain):
    """A TRON chain with a TRC-20 token."""

    name = "tron"
    what = "a TRON chain, with a TRC-20 token"
    kind = "tron"
    coin = "TRX"
    coins = 1_000
    decimals = 6
    token = text_of(PREFIX + b"\xc0" * 20)
    path = "m/44'/195'/0'/0/0"
    gas_path = "m/44'/195'/0'/0/1"
    users_path = "m/44'/195'/1'"
    fees = 'fee_max = "60000000"\ncancel_fee_max = "1"\n'  # in sun; nothing is ever cancelled there
    gas = 100_000_000
    sends = b"broadcasthex"
    codec = TronCodec()
    stranger = tron_address(public_key(STRANGER))

    def __init__(self) -> None:
        terms = tron_world.Terms(block_ms=int(BLOCK_S * 1000), solidified=FINALITY)
        world = tron_world.World(terms, first=int(time.time() * 1000))
        world.deploy(Token(self.token, gas=12_414))
        self._tron = world
        self._nodes = tron_nodes.Nodes(world, NODES, 0)
        self.chain_id = world.chain_id
        super().__init__(world)

    def address(self, number: int) -> str:
        return text_of(PREFIX + (0xCAFE << 144 | number).to_bytes(20, "big"))

    def _slot_and_fee(self) -> tuple[Slot, Fee]:
        head = self._tron.head
        reference = f"{head.id[12:16]}{head.id[16:32]}/{head.timestamp}"
        return Slot(expires=head.timestamp + ACCEPTS_MS, reference=reference), Fee(gas_limit=100_000, price=100)

    def _answer(self, node: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        return self._nodes[node].serve(path, body)


@contextmanager
def _served(answer: Answer) -> Iterator[str]:
    """A node at a free port of this machine: its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body go together
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            status, kind, said = answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_words: Any) -> None:
            """Nothing: a node's log is not the story."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False  # threads of connections that are kept open end with this process

        def handle_error(self, *_of: Any) -> None:
            """Nothing: a caller that was killed has broken its connections."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
