"""A simulated EVM chain behind real HTTP, and a real signer behind its socket: what a process that pays out talks to.

    with evm_town(folder) as town:
        config = config_for(url, folder, **town.settings)
        town.mine(3)

Two nodes serve the chain `sim`, whose wallet `hot` has coin and tokens. The signer's policy has a mandate `auto` for
small payments, and the approvers of `tests.signing` for all others. Both run in threads, so that a command, which has
an event loop of its own, can reach them, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.signing import SECRET, public_half

from bursar.ports import SystemPorts
from bursar.rails.evm.codec import EvmCodec
from bursar.signer.codecs import codec_of
from bursar.signer.curve import evm_address, public_key, sign_digest
from bursar.signer.keystore import derive, extended_key
from bursar.signer.policy import parse
from bursar.signer.server import Server
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.sim.chain_state import Token
from bursar.sim.evm_nodes import Nodes
from bursar.sim.evm_tx import TRANSFER, Tx
from bursar.sim.evm_world import GWEI, Terms, World

KEY = bytearray(b"\x33" * 32)
CODEC = EvmCodec()
HOT = CODEC.check_address("sim", evm_address(public_key(KEY)))
SHOP = CODEC.check_address("sim", "0x" + "a5" * 20)
STRANGER = "0x" + "b7" * 20  # who pays in
TOKEN = CODEC.check_address("sim", "0x" + "0d" * 20)
CHAIN_ID = 77
COIN = 10**18
USDT = 10**6
CHAIN = {
    "kind": "evm",
    "chain_id": CHAIN_ID,
    "native": "SIM",
    "fee_ceilings": {"high": 500 * GWEI, "normal": 300 * GWEI, "low": 100 * GWEI},
    "tips": {"high": 3 * GWEI, "normal": 2 * GWEI, "low": GWEI},
    "block_ms": 20,
    "bump_after_s": 0,
}
ASSETS = {
    "usdt:sim": {"asset": "USDT", "chain": "sim", "contract": TOKEN, "decimals": 6, "minimum": "1000"},
    "sim:sim": {"asset": "SIM", "chain": "sim", "decimals": 18},
}
WALLET = {"chain": "sim", "address": HOT}
POLICY_OF_WITHDRAWALS: dict[str, Any] = {
    "asset": "USDT",
    "chain": "sim",
    "fee_flat": "1",
    "minimum": "1",
    "maximum": "90",
    "auto_approve_max": "10",
    "mandate": "auto",
    "dual_above": "50",
    "address_book": "off",
}
WORDS = b"legal winner thank year wave sausage worth useful legal winner thank yellow"
DEPOSIT_PATH = "m/44'/60'/1'"
EXTENDED = extended_key(bytearray(WORDS), DEPOSIT_PATH)
XPUB = EXTENDED.text
DEPOSIT_RULES: dict[str, Any] = {"wallets": "dep", "xpub": XPUB, "assets": {"USDT": {"minimum": "1"}, "SIM": {}}}
POLICY = f"""
name = "hot"

[unhalt]
people = ["ann", "ben", "eve"]

[chains.sim]
kind = "evm"
chain_id = {CHAIN_ID}
fee_max = "{COIN}"
cancel_fee_max = "{COIN}"

[wallets.hot]
chain = "sim"
address = "{HOT}"
key = "main"

[approvers.ann]
public_key = "{public_half("ann")}"
[approvers.ben]
public_key = "{public_half("ben")}"

[assets.sim.USDT]
contract = "{TOKEN}"
decimals = 6
payment_max = "{1_000 * USDT}"
dual_above = "{100 * USDT}"
hourly_max = "{5_000 * USDT}"
daily_max = "{9_000 * USDT}"

[deposits.dep]
chain = "sim"
key = "words"
path = "{DEPOSIT_PATH}"

[assets.sim.SIM]
contract = ""
decimals = 18
payment_max = "{COIN}"
dual_above = "0"
hourly_max = "{COIN}"
daily_max = "{COIN}"

[mandates.sweep]
chain = "sim"
asset = "USDT"
payment_max = "{1_000 * USDT}"
hourly_max = "{1_000 * USDT}"
daily_max = "{1_000 * USDT}"
own_wallets = true

[mandates.gas]
chain = "sim"
asset = "SIM"
payment_max = "{COIN}"
hourly_max = "{COIN}"
daily_max = "{COIN}"
own_deposits = true

[mandates.auto]
chain = "sim"
asset = "USDT"
payment_max = "{10 * USDT}"
hourly_max = "{100 * USDT}"
daily_max = "{200 * USDT}"

[callers.payouts]
secret_file = "payouts.secret"
rights = ["preview", "sign", "cancel", "log", "status"]
"""


class _Keys:
    """The wallet's key, in memory; and the words of users' wallets."""

    def address(self, wallet: Wallet) -> str:
        return evm_address(EXTENDED.of_user(wallet.user).public_key[1:]) if wallet.user else HOT

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        return sign_digest(derive(bytearray(WORDS), wallet.path) if wallet.user else KEY, digest)


class Town:
    """The chain and the signer."""

    def __init__(self, folder: Path, urls: list[str], world: World, lock: threading.Lock) -> None:
        self.world = world
        self.lock = lock
        secret = folder / "payouts.secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self.settings: dict[str, Any] = {
            "chain_nodes": {"sim": tuple(urls)},
            "chain_timeout_ms": 2_000,
            "signer": f"unix:{folder}/signer.sock",
            "signer_name": "hot",
            "signer_caller": "payouts",
            "signer_secret_file": str(secret),
        }

    @property
    def environ(self) -> dict[str, str]:
        """The same settings as variables."""
        found = self.settings | {"chain_nodes": json.dumps(self.settings["chain_nodes"])}
        return {f"BURSAR_{name.upper()}": str(value) for name, value in found.items()}

    def mine(self, blocks: int = 1) -> None:
        with self.lock:
            for _ in range(blocks):
                self.world.mine()

    def pay_in(self, to: str, amount: int, contract: str = TOKEN, *, sender: str = STRANGER) -> str:
        """A payment from outside, in the next block; the hash of its transaction."""
        with self.lock:
            nonce = self.world.nonce(sender)
            hash_ = "0x" + hashlib.sha256(f"{sender}{nonce}".encode()).hexdigest()
            data = TRANSFER + bytes.fromhex(to[2:]).rjust(32, b"\x00") + amount.to_bytes(32) if contract else b""
            fees: dict[str, Any] = {"tip": GWEI, "max_fee": 400 * GWEI, "gas": 100_000}
            where: dict[str, Any] = {"to": (contract or to).lower(), "value": 0 if contract else amount, "data": data}
            self.world.offer(
                Tx(
                    hash=hash_,
                    legacy=False,
                    chain_id=CHAIN_ID,
                    nonce=nonce,
                    sender=sender,
                    v=0,
                    r=1,
                    s=1,
                    raw=bytes.fromhex(hash_[2:]),
                    **fees,
                    **where,
                )
            )
            self.world.mine()
        return hash_

    def has(self, address: str, contract: str = "") -> int:
        with self.lock:
            return self.world.balance(address.lower(), contract.lower())


@contextmanager
def evm_town(folder: Path) -> Iterator[Town]:
    """The chain at two nodes, and the signer, until the end of the context."""
    world, lock = World(Terms(chain_id=CHAIN_ID, finality=2)), threading.Lock()
    world.deploy(Token(TOKEN))
    world.fund(HOT, 10 * COIN)
    world.fund(HOT, 10_000 * USDT, TOKEN)
    world.fund(STRANGER, 10 * COIN)
    world.fund(STRANGER, 10_000 * USDT, TOKEN)
    nodes = Nodes(world, ("one", "two"), seed=1)
    with _served(nodes, lock) as urls, _signing(folder):
        town = Town(folder, urls, world, lock)
        town.mine(4)
        yield town


@contextmanager
def _served(nodes: Nodes, lock: threading.Lock) -> Iterator[list[str]]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                answer = nodes[self.path.strip("/")].serve(body)
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    try:
        yield [f"http://127.0.0.1:{server.server_port}/{name}" for name in nodes.by_name]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _signing(folder: Path) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()
    trouble: list[BaseException] = []

    async def serve() -> None:
        ports = SystemPorts()
        (folder / "signer").mkdir(mode=0o700, exist_ok=True)
        policy = parse("policy", POLICY.encode(), codec_of)
        service = await Service.open(ports, str(folder / "signer"), policy, _Keys(), codec_of, new=True)
        server = Server(ports, service, {"payouts": SECRET}, local_secret=SECRET, log=lambda _: None)
        run = server.run(f"unix:{folder}/signer.sock", f"unix:{folder}/local.sock", lambda _: ready.set())
        task = asyncio.create_task(run)
        while not stop.is_set() and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        server.stop()
        await task
        service.close()

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            trouble.append(error)
            ready.set()
            raise

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    assert not trouble
    try:
        yield
    finally:
        stop.set()
        thread.join()
