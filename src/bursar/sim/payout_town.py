"""What the payouts scenario pays on: a simulated chain with its nodes, a signer in a process of its own, and documents.

The chain is one of `payout_chains`. The signer is the real one: its log on a simulated disk, its protocol on a
simulated network, its rules, and keys that are not secret. It has nodes of its own, which show it that an attempt is
dead (W31).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Final

import msgspec

from bursar.documents import Documents
from bursar.flows.payouts import KINDS
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, WalletDocument, asset_name
from bursar.flows.payouts.link import SignerStoreLink
from bursar.flows.payouts.payout import wallet_account
from bursar.ledger import Ledger
from bursar.model.accounts import ExternalAccount
from bursar.model.document_kinds import DocumentKind
from bursar.model.documents import Proposal
from bursar.model.entries import deposit
from bursar.rails.chain import Chain
from bursar.signer.client import SignerClient
from bursar.signer.curve import sign_digest
from bursar.signer.errors import SignerStopped
from bursar.signer.policy import Policy, parse
from bursar.signer.server import Server
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet
from bursar.signer.witness import Witness
from bursar.sim import evm_world, expiry_world, payout_chains, tron_world
from bursar.sim.chain_state import Behaviour, Effect
from bursar.sim.kernel import Kernel
from bursar.sim.net import SimHost, SimNet
from bursar.sim.payout_chains import (
    CHAIN_NAME,
    FINALITY,
    GWEI,
    KEYS,
    TOKENS,
    WALLETS,
    ChainKind,
    address_of,
    codecs,
    deposit_key,
)
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
UNLIMITED: Final = 1_000_000_000  # of the token, in smallest units: more than a run pays


def rules(
    kind: ChainKind,
    *,
    people: str = "",
    mandate_max: int = UNLIMITED,
    dual_above: int = UNLIMITED,
    more: Callable[[ChainKind, str], str] = lambda _kind, _limits: "",
) -> Policy:
    """The signer's own policy. `people`: its section of approvers; `more`: other sections."""
    limits = f"hourly_max = {UNLIMITED}\ndaily_max = {UNLIMITED}"
    wallets = "".join(
        f'[wallets.{name}]\nchain = "{CHAIN_NAME}"\naddress = "{address}"\nkey = "{name}"\n'
        for name, address in kind.addresses.items()
    )
    text = f"""
name = "{SIGNER}"
[unhalt]
people = ["ann", "ben"]
[chains.{CHAIN_NAME}]
kind = "{kind.name}"
chain_id = {kind.chain_id}
fee_max = "{kind.fee_max}"
cancel_fee_max = "{kind.fee_max}"
cancels_daily = 1000
{wallets}
{people}
[assets.{CHAIN_NAME}.USDT]
contract = "{kind.token}"
decimals = 6
payment_max = {UNLIMITED}
dual_above = {dual_above}
{limits}
[mandates.auto]
chain = "{CHAIN_NAME}"
asset = "USDT"
payment_max = {mandate_max}
{limits}
[callers.{CALLER}]
secret_file = "payouts.secret"
rights = ["preview", "sign", "cancel", "log", "status"]
{more(kind, limits)}
"""
    return parse("policy", text.encode(), codecs)


class OpenKeys:
    """Keys that are no secret."""

    def __init__(self, kind: ChainKind) -> None:
        self.kind = kind

    def address(self, wallet: Wallet) -> str:
        """Of the wallet's key."""
        if wallet.user:
            return address_of(self.kind.name, deposit_key(wallet.user))
        return self.kind.addresses[wallet.key]

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        """Deterministic, as the simulator needs it."""
        return sign_digest(deposit_key(wallet.user) if wallet.user else KEYS[wallet.key], digest)


class Town:
    """The chain and the signer of one run. Both outlive every process."""

    def __init__(self, kernel: Kernel, plan: Plan, policy: Policy | None = None) -> None:
        self.kernel = kernel
        self.plan = plan
        self.kind = payout_chains.KINDS[plan.kind]
        self.net = SimNet(kernel)
        self.signer_host = SimHost(self.net, f"{kernel.seed} signer")
        self.dice = random.Random(f"{kernel.seed} town")
        self.policy = policy or rules(self.kind)
        self.world = payout_chains.world_of(self.kind)
        self.nodes = payout_chains.nodes_of(self.world, plan.nodes, kernel.seed)
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

    def chain(self, process: Process) -> Chain:
        """The chain as one process sees it."""
        return payout_chains.rail_of(self.kind, self.nodes, process)

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
                process.ports, FOLDER, self.policy, OpenKeys(self.kind), codecs, witness=witness, new=new
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
        if not self.calm:
            self._change_price()
        if not self.calm and dice.random() < 0.2:
            node = self.nodes[dice.choice(self.plan.nodes)]
            node.lag, node.down = dice.choice(((0, False), (2, False), (5, False), (0, True)))
        if not self.calm:
            if self.plan.lied:
                self.liar.turn()
            if self.plan.deep:
                self.depths.turn()
            if self.plan.forced:
                (change_token if self.kind.name == "evm" else forget_history)(self, dice)
        world.mine(empty=not self.calm and dice.random() < 0.2)
        self.kernel.loop.call_later(self.kind.block_s, self.tick, context=Context())

    def _change_price(self) -> None:
        """The chain gets dear, or cheap."""
        dice, world = self.dice, self.world
        if isinstance(world, evm_world.World):
            if dice.random() < 0.1:
                world.spike(dice.choice((20, 60, 150)) * GWEI)
        elif dice.random() < 0.2:
            price = dice.choice((50, 100, 150))
            if isinstance(world, expiry_world.World):
                world.terms.price = price
            else:
                world.terms.energy = price

    def heal(self) -> None:
        """From now on nothing breaks."""
        self.calm = True
        self.net.heal()
        self.nodes.heal()
        if isinstance(self.world, expiry_world.World):
            self.world.terms.price = 50
        elif isinstance(self.world, tron_world.World):
            self.world.terms.energy = 50
        for token in self.world.tokens.values():
            token.behaviour = Behaviour.HONEST
        if len(self.plan.nodes) > 2:
            self.liar.for_good()

    def effects(self, to: str) -> list[Effect]:
        """What the chain has paid to an address."""
        wanted = (to.lower(), self.kind.token.lower())
        return self.world.effects(lambda effect: (effect.to.lower(), effect.contract.lower()) == wanted)


# --- the database ----------------------------------------------------------------------------------------------------


async def put(documents: Documents, kind: DocumentKind[msgspec.Struct], name: str, body: msgspec.Struct) -> None:
    """A document, by two people."""
    done = await documents.put(kind, name, body, base=0, author="ann", reason="the simulator")
    if isinstance(done, Proposal):
        await documents.approve(kind, name, done.hash, actor="ben", reason="the simulator")


async def furnish(ledger: Ledger, kind: ChainKind, accounts: Sequence[str], funds: int) -> None:
    """Assets, documents, accounts, and money that is really in the wallets."""
    await ledger.create_asset("USDT", precision=6)
    await ledger.create_asset(kind.native, precision=kind.decimals)
    documents = Documents(ledger.store, KINDS)
    await put(documents, CHAIN, CHAIN_NAME, kind.document())  # type: ignore[arg-type]
    token = AssetDocument(asset="USDT", chain=CHAIN_NAME, contract=kind.token, decimals=6)
    await put(documents, ASSET, asset_name("USDT", CHAIN_NAME), token)  # type: ignore[arg-type]
    coins = str(kind.coins // 10**kind.decimals)
    for name, address in kind.addresses.items():
        await put(documents, WALLET, name, WalletDocument(chain=CHAIN_NAME, address=address))  # type: ignore[arg-type]
        books = wallet_account(CHAIN_NAME, name)
        await ledger.create_account(books, policy=ExternalAccount())
        await ledger.create_account(f"owner:{name}")
        await ledger.commit(deposit(books, f"owner:{name}", kind.native, coins, key=f"coins {name}"))
    for number, account in enumerate(accounts):
        await ledger.create_account(account)
        source = wallet_account(CHAIN_NAME, WALLETS[number % len(WALLETS)])
        await ledger.commit(deposit(source, account, "USDT", str(funds), key=f"user {number}"))
    for number, name in enumerate(WALLETS):
        given = sum(funds for user in range(len(accounts)) if user % len(WALLETS) == number)
        rest = TOKENS // 10**6 - given
        await ledger.commit(
            deposit(wallet_account(CHAIN_NAME, name), f"owner:{name}", "USDT", str(rest), key=f"rest {name}")
        )
