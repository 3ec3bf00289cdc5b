"""What the payouts scenario pays on: a simulated chain with its nodes, a signer in a process of its own, and documents.

The chain is an account chain behind JSON-RPC nodes and the real EVM rail, or one without nonces on which transactions
expire. The signer is the real one: its log on a simulated disk, its protocol on a simulated network, its rules, and
keys that are not secret. It has nodes of its own, which show it that an attempt is dead (W31).
"""

from __future__ import annotations

import random
from contextvars import Context
from typing import Final

import msgspec

from bursar.documents import Documents
from bursar.flows.payouts import KINDS
from bursar.flows.payouts.documents import (
    ASSET,
    CHAIN,
    WALLET,
    AssetDocument,
    ChainDocument,
    Ranked,
    WalletDocument,
    asset_name,
)
from bursar.flows.payouts.link import SignerStoreLink
from bursar.flows.payouts.payout import wallet_account
from bursar.ledger import Ledger
from bursar.model.accounts import ExternalAccount
from bursar.model.document_kinds import DocumentKind
from bursar.model.documents import Proposal
from bursar.model.entries import deposit
from bursar.rails.chain import Chain, Codec
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.evm.rpc import Endpoint
from bursar.signer.client import SignerClient
from bursar.signer.curve import evm_address, public_key, sign_digest
from bursar.signer.errors import SignerStopped
from bursar.signer.policy import Policy, parse
from bursar.signer.server import Server
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.signer.witness import Witness
from bursar.sim import evm_nodes, evm_world, expiry_chain, expiry_world
from bursar.sim.chain_state import Behaviour, Effect, Token
from bursar.sim.expiry_codec import ExpiryCodec
from bursar.sim.kernel import Kernel
from bursar.sim.net import SimHost, SimNet
from bursar.sim.payout_faults import Depths, Liar, OldDisk, Plan, change_token, forget_history
from bursar.sim.process import Process
from bursar.store import Store

ADDRESS: Final = "unix:/run/signer.sock"
LOCAL_ADDRESS: Final = "unix:/run/signer-local.sock"
FOLDER: Final = "/signer"
LOG: Final = f"{FOLDER}/log"
SECRET: Final = b"a secret of the simulator, long enough"
SIGNER: Final = "hot"
CALLER: Final = "payouts"
CHAIN_NAME: Final = "sim"
CHAIN_ID: Final = 777
GWEI: Final = 10**9
WALLETS: Final = ("hot1", "hot2")
KEYS: Final = {name: bytearray(bytes([number + 1]) * 32) for number, name in enumerate(WALLETS)}
ADDRESSES: Final = {name: evm_address(public_key(key)) for name, key in KEYS.items()}
TOKEN: Final = EvmCodec().check_address(CHAIN_NAME, "0x" + "c0" * 20)
COINS: Final = 10**18  # of each wallet
TOKENS: Final = 10**9
BLOCK_S: Final = 1.0
FINALITY: Final = 3

POLICY: Final = f"""
name = "{SIGNER}"
[unhalt]
people = ["ann", "ben"]
[chains.{CHAIN_NAME}]
kind = "KIND"
chain_id = {CHAIN_ID}
fee_max = "{10**17}"
cancel_fee_max = "{10**17}"
cancels_daily = 1000
{
    "".join(
        f'''
[wallets.{name}]
chain = "{CHAIN_NAME}"
address = "{address}"
key = "{name}"
'''
        for name, address in ADDRESSES.items()
    )
}
[assets.{CHAIN_NAME}.USDT]
contract = "{TOKEN}"
decimals = 6
payment_max = 1_000_000_000
dual_above = 1_000_000_000
hourly_max = 1_000_000_000
daily_max = 1_000_000_000
[mandates.auto]
chain = "{CHAIN_NAME}"
asset = "USDT"
payment_max = 1_000_000_000
hourly_max = 1_000_000_000
daily_max = 1_000_000_000
[callers.{CALLER}]
secret_file = "payouts.secret"
rights = ["preview", "sign", "cancel", "log", "status"]
"""


def codecs(kind: str) -> Codec:
    """By kind, the simulator's own among them."""
    known: dict[str, Codec] = {"evm": EvmCodec(), "expiry": ExpiryCodec()}
    return known[kind]


class OpenKeys:
    """Keys that are no secret."""

    def address(self, wallet: Wallet) -> str:
        """Of the wallet's key."""
        return ADDRESSES[wallet.key]

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        """Deterministic, as the simulator needs it."""
        return sign_digest(KEYS[wallet.key], digest)


class Town:
    """The chain and the signer of one run. Both outlive every process."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel = kernel
        self.plan = plan
        self.expires = plan.expires
        self.net = SimNet(kernel)
        self.signer_host = SimHost(self.net, f"{kernel.seed} signer")
        self.dice = random.Random(f"{kernel.seed} town")
        self.policy: Policy = parse("policy", POLICY.replace("KIND", self.kind).encode(), codecs)
        self.evm = evm_world.World(
            evm_world.Terms(chain_id=CHAIN_ID, block_time_s=1, finality=FINALITY, base_fee=10 * GWEI)
        )
        self.expiry = expiry_world.World(
            expiry_world.Terms(chain_id=CHAIN_ID, block_time_s=1, finality=FINALITY, window=12)
        )
        self.evm_nodes = evm_nodes.Nodes(self.evm, plan.nodes, kernel.seed)
        self.expiry_nodes = expiry_chain.Nodes(self.expiry, plan.nodes, kernel.seed)
        world = self.world
        world.deploy(Token(address=TOKEN))
        for address in ADDRESSES.values():
            world.fund(address, COINS)
            world.fund(address, TOKENS, TOKEN)
        for _ in range(FINALITY + 1):
            world.mine()
        self.reorgs = 0
        self.stops: list[str] = []
        self.calm = plan.small
        self.service: Service | None = None  # of the signer's last life
        self.liar = Liar(self)
        self.depths = Depths(self)
        self.old_disk = OldDisk(self)
        self.forgetful = False  # the database was put back to a backup
        self.named: set[str] = set()  # nodes with which there was trouble, by what processes say
        self.decided = 0  # times that two people have decided what became of a payout
        self.rebound = 0  # times that a new signer was put in the place of one whose log is lost

    @property
    def kind(self) -> str:
        """Of the chain that is in use."""
        return "expiry" if self.expires else "evm"

    @property
    def world(self) -> evm_world.World | expiry_world.World:
        """The chain that is in use."""
        return self.expiry if self.expires else self.evm

    @property
    def nodes(self) -> evm_nodes.Nodes | expiry_chain.Nodes:
        """Its nodes."""
        return self.expiry_nodes if self.expires else self.evm_nodes

    def chain(self, process: Process) -> Chain:
        """The chain as one process sees it."""
        network = document(self.kind).network(CHAIN_NAME)
        if self.expires:
            return expiry_chain.ExpiryChain(network, self.expiry_nodes, process.ports.sleep, process.ports.token)
        endpoints = [Endpoint(name=node.name, url=node.url) for node in self.evm_nodes.by_name.values()]
        post = self.evm_nodes.transport(process.ports.sleep)
        return EvmChain(network, endpoints, post, process.ports.monotonic, timeout_s=2.0)

    def client(self, process: Process, store: Store) -> SignerClient:
        """The signer as one process asks it."""
        return SignerClient(
            process.ports,
            ADDRESS,
            name=SIGNER,
            caller=CALLER,
            secret=SECRET,
            link=SignerStoreLink(store, SIGNER),
            timeout_s=2.0,
        )

    # --- the signer --------------------------------------------------------------------------------------------------

    def start_signer(self) -> None:
        """One life of the signer."""
        process = self.kernel.start("signer", disk=self.signer_host)
        process.spawn(self._sign(process), name="signer")

    async def _sign(self, process: Process) -> None:
        files = process.ports.files()
        files.make_folder(FOLDER)
        new = "log" not in files.names(FOLDER)
        try:
            witness = Witness({CHAIN_NAME: self.chain(process)})
            service = await Service.open(
                process.ports, FOLDER, self.policy, OpenKeys(), codecs, witness=witness, new=new
            )
            self.service = service
            server = Server(process.ports, service, {CALLER: SECRET}, local_secret=SECRET, log=lambda _: None)
            await server.run(ADDRESS, LOCAL_ADDRESS, lambda _: None)
        except (SignerStopped, OSError) as error:
            self.stops.append(str(error))
        self.kernel.loop.call_soon(process.crash, context=Context())

    def stop_signer(self) -> None:
        """It ends at once, and is started again a moment later."""
        self.service = None
        if (process := self.kernel.processes["signer"]).alive:
            process.crash()

    def is_behind(self) -> bool:
        """Whether it has noticed that its log is an old one, and answers no caller any more."""
        return self.service is not None and bool(self.service.state.behind)

    def signer_sequence(self) -> int:
        """How many promises its log has."""
        return -1 if self.service is None else self.service.state.sequence

    def signer_log(self) -> bytes:
        """What its disk has of it for sure."""
        inode = self.signer_host.state.names.get(LOG)
        return b"" if inode is None else bytes(inode.data[: inode.synced])

    def write_signer_log(self, data: bytes) -> None:
        """Another log in its place; empty: none, so that it starts a new one."""
        state = self.signer_host.state
        if data and (inode := state.names.get(LOG)) is not None:
            inode.data[:], inode.synced = data, len(data)
        elif not data:
            state.name(LOG, None)
            state.sync_folder(FOLDER)

    # --- the chain ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """A block, and now and then what can happen to a chain. Comes again by itself."""
        dice, world = self.dice, self.world
        if not self.calm and dice.random() < 0.15:
            depth = dice.randint(1, FINALITY - 1)
            comes_back = dice.random() < 0.5  # or the nodes have forgotten it
            world.reorg(depth, returns=lambda _: comes_back)
            self.reorgs += 1
        if not self.calm and not self.expires and dice.random() < 0.1:
            self.evm.spike(dice.choice((20, 60, 150)) * GWEI)
        if not self.calm and self.expires and dice.random() < 0.2:
            self.expiry.terms.price = dice.choice((50, 100, 150))
        if not self.calm and dice.random() < 0.2:
            node = self.nodes[dice.choice(self.plan.nodes)]
            node.lag, node.down = dice.choice(((0, False), (2, False), (5, False), (0, True)))
        if not self.calm:
            if self.plan.lied:
                self.liar.turn()
            if self.plan.deep:
                self.depths.turn()
            if self.plan.forced:
                (forget_history if self.expires else change_token)(self, dice)
        world.mine(empty=not self.calm and dice.random() < 0.2)
        self.kernel.loop.call_later(BLOCK_S, self.tick, context=Context())

    def heal(self) -> None:
        """From now on nothing breaks."""
        self.calm = True
        self.net.heal()
        self.nodes.heal()
        self.expiry.terms.price = 50
        for token in self.world.tokens.values():
            token.behaviour = Behaviour.HONEST
        if len(self.plan.nodes) > 2:
            self.liar.for_good()

    def effects(self, to: str) -> list[Effect]:
        """What the chain has paid to an address."""
        wanted = (to.lower(), TOKEN.lower())
        return self.world.effects(lambda effect: (effect.to.lower(), effect.contract.lower()) == wanted)


# --- the database ----------------------------------------------------------------------------------------------------


def document(kind: str) -> ChainDocument:
    """The chain as operators have described it."""
    return ChainDocument(
        kind=kind,
        chain_id=CHAIN_ID,
        native="ETH",
        decimals=18,
        depth=1,
        finalized_tag=True,
        fee_ceilings=Ranked(high=400 * GWEI, normal=300 * GWEI, low=200 * GWEI),
        tips=Ranked(high=3 * GWEI, normal=2 * GWEI, low=GWEI),
        block_ms=int(BLOCK_S * 2000),  # what it is asked every so often; each poll costs, and finds little new
        bump_after_s=8,
        unconfirmed_max=4,
    )


async def put(documents: Documents, kind: DocumentKind[msgspec.Struct], name: str, body: msgspec.Struct) -> None:
    """A document, by two people."""
    done = await documents.put(kind, name, body, base=0, author="ann", reason="the simulator")
    if isinstance(done, Proposal):
        await documents.approve(kind, name, done.hash, actor="ben", reason="the simulator")


async def furnish(ledger: Ledger, kind: str, users: int, funds: int) -> None:
    """Assets, documents, accounts, and money that is really in the wallets."""
    await ledger.create_asset("USDT", precision=6)
    await ledger.create_asset("ETH", precision=18)
    documents = Documents(ledger.store, KINDS)
    await put(documents, CHAIN, CHAIN_NAME, document(kind))  # type: ignore[arg-type]
    token = AssetDocument(asset="USDT", chain=CHAIN_NAME, contract=TOKEN, decimals=6)
    await put(documents, ASSET, asset_name("USDT", CHAIN_NAME), token)  # type: ignore[arg-type]
    for name, address in ADDRESSES.items():
        await put(documents, WALLET, name, WalletDocument(chain=CHAIN_NAME, address=address))  # type: ignore[arg-type]
        books = wallet_account(CHAIN_NAME, name)
        await ledger.create_account(books, policy=ExternalAccount())
        await ledger.create_account(f"owner:{name}")
        await ledger.commit(deposit(books, f"owner:{name}", "ETH", "1", key=f"coins {name}"))
    for user in range(users):
        await ledger.create_account(f"user:{user}")
        source = wallet_account(CHAIN_NAME, WALLETS[user % len(WALLETS)])
        await ledger.commit(deposit(source, f"user:{user}", "USDT", str(funds), key=f"user {user}"))
    for number, name in enumerate(WALLETS):
        given = sum(funds for user in range(users) if user % len(WALLETS) == number)
        rest = TOKENS // 10**6 - given
        await ledger.commit(
            deposit(wallet_account(CHAIN_NAME, name), f"owner:{name}", "USDT", str(rest), key=f"rest {name}")
        )
