"""What deposits are measured with: a simulated EVM chain, two nodes that agree, and users whose addresses are derived.

The rail is the real one. The nodes are in this process, since no others are there that agree with each other on a chain
which can be made in seconds. What they use of the CPU is counted apart (`nodes_s`), so that it can be left out; so is
making blocks. Nothing goes over HTTP: reading and writing that is not in what is measured.

A block has `DEPOSITS` transfers to addresses of ours, three of four of a token and the others of coin, and as many
between strangers. Their signatures are left out: a rail does not look at them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from bursar.bench.withdrawals import _put as put
from bursar.documents import Documents
from bursar.engine import Engine
from bursar.flows.deposits import KINDS as DEPOSIT_KINDS
from bursar.flows.deposits import ChainDeposits
from bursar.flows.deposits.rules import DEPOSITS as RULES
from bursar.flows.deposits.rules import DepositAsset, DepositRules, derive
from bursar.flows.payouts import KINDS as PAYOUT_KINDS
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, ChainDocument, Ranked, WalletDocument
from bursar.instance import Bursar
from bursar.rails.chain import Chain
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.evm.rpc import Endpoint
from bursar.signer.absent import AbsentSigner
from bursar.sim.chain_state import Token
from bursar.sim.evm_nodes import Node
from bursar.sim.evm_tx import TRANSFER, Tx
from bursar.sim.evm_world import Terms, World

NAME: Final = "sim"
CHAIN_ID: Final = 777
GWEI: Final = 10**9
COIN: Final = 10**18
FINALITY: Final = 2
DEPOSITS: Final = 20  # in a block
GAS: Final = 100_000
PLENTY: Final = 10**30
CODEC: Final = EvmCodec()
TOKEN: Final = CODEC.check_address(NAME, "0x" + 20 * "c0")
SENDER: Final = "0x" + 20 * "5e"
HOT: Final = CODEC.check_address(NAME, "0x" + 20 * "a1")
UNITS: Final = 5 * 10**6  # of the token, in a deposit
WEI: Final = 10**15  # of coin
# Of a mnemonic that is no secret.
XPUB: Final = (
    "xpub661MyMwAqRbcFtXgS5sYJABqqG9YLmC4Q1Rdap9gSE8NqtwybGhePY2gZ29ESFjqJoCu1Rupje8YtGqsefD265TMg7usUDFdp6W1EGMcet8"
)


class Town:
    """The chain and its nodes."""

    def __init__(self) -> None:
        terms = Terms(
            chain_id=CHAIN_ID,
            finality=FINALITY,
            base_fee=GWEI,
            dynamic_base_fee=False,
            gas_limit=10**9,
            pool_size=10**6,
        )
        self.world = World(terms)
        self.world.deploy(Token(address=TOKEN))
        self.world.fund(SENDER, PLENTY)
        self.world.fund(SENDER, PLENTY, TOKEN)
        self.world.mine()
        self.dice = random.Random("deposits")
        self.nodes_s = 0.0  # of CPU
        self._nodes = {f"http://{name}": Node(self.world, name, 1) for name in ("north", "south")}
        self._sent = 0
        self.settle()

    def chain(self) -> Chain:
        """The rail, on both nodes."""
        endpoints = [Endpoint(name=node.name, url=url) for url, node in self._nodes.items()]
        return EvmChain(document().network(NAME), endpoints, self._post, time.monotonic, 60.0)

    async def _post(self, url: str, _headers: Mapping[str, str], body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        begun = time.thread_time()
        answer = self._nodes[url].serve(body)
        self.nodes_s += time.thread_time() - begun
        return 200, answer

    # --- blocks ------------------------------------------------------------------------------------------------------

    def give(self, addresses: Sequence[str]) -> None:
        """A transfer to each, in blocks that are final afterwards."""
        for start in range(0, len(addresses), DEPOSITS):
            for place, address in enumerate(addresses[start : start + DEPOSITS], start):
                self._send(address, token=place % 4 > 0)
            self.strangers()
        self.settle()

    def strangers(self) -> None:
        """A block, with transfers that are not ours too."""
        for place in range(DEPOSITS):
            self._send("0x" + self.dice.randbytes(20).hex(), token=place % 2 > 0)
        self.world.mine()

    def settle(self) -> None:
        """All blocks are final that are there now."""
        for _ in range(FINALITY):
            self.world.mine()

    def _send(self, to: str, *, token: bool) -> None:
        to = to.lower()
        data = TRANSFER + bytes(12) + bytes.fromhex(to[2:]) + UNITS.to_bytes(32, "big") if token else b""
        tx = Tx(
            hash="0x" + sha256(f"{self._sent}".encode()).hexdigest(),
            legacy=False,
            chain_id=CHAIN_ID,
            nonce=self._sent,
            tip=GWEI,
            max_fee=3 * GWEI,
            gas=GAS,
            to=TOKEN.lower() if token else to,
            value=0 if token else WEI,
            data=data,
            sender=SENDER,
            v=0,
            r=1,
            s=1,
            raw=b"",
        )
        self.world.offer(tx)
        self._sent += 1


class Intake(msgspec.Struct, frozen=True):
    """What takes deposits, on one database."""

    bursar: Bursar
    engine: Engine
    deposits: ChainDeposits

    @property
    def written(self) -> int:
        """Transactions of the ledger's writer so far."""
        return self.bursar.ledger.writer.batches


async def opened(bursar: Bursar, chain: Chain) -> Intake:
    """Documents, flows, and a scan that begins at the last final block."""
    ledger = bursar.ledger
    await ledger.create_asset("USDT", precision=6)
    await ledger.create_asset("ETH", precision=18)
    documents = Documents(bursar.store, (*PAYOUT_KINDS, *DEPOSIT_KINDS))
    await put(documents, CHAIN, NAME, document())
    await put(documents, ASSET, f"usdt:{NAME}", AssetDocument(asset="USDT", chain=NAME, contract=TOKEN, decimals=6))
    await put(documents, WALLET, "hot-1", WalletDocument(chain=NAME, address=HOT))
    await put(documents, RULES, NAME, rules())
    engine = Engine(bursar.store, ledger.writer, ())
    payouts = Payouts(ledger, documents, {NAME: chain}, AbsentSigner(), engine=engine)
    intake = Intake(bursar, engine, ChainDeposits(payouts, engine=engine))
    await intake.deposits.prepare()
    await engine.step(await engine.record("deposit_scans", NAME))
    return intake


def document() -> ChainDocument:
    """The chain as operators have described it."""
    ceilings = Ranked(high=GWEI, normal=GWEI, low=GWEI)
    return ChainDocument(kind="evm", chain_id=CHAIN_ID, native="ETH", fee_ceilings=ceilings, block_ms=1_000)


def rules() -> DepositRules:
    """Both assets are accepted. The token is swept from so much on that it never is: what that takes is looked up."""
    assets = {"USDT": DepositAsset(minimum="1", sweep_at="1000000000"), "ETH": DepositAsset()}
    return DepositRules(wallets="dep", xpub=XPUB, assets=assets, sweep_to="hot-1", sweep_mandate="sweep")


def address_of(user: int) -> str:
    """Of a user, as the server derives it."""
    return derive("evm", XPUB, user)
