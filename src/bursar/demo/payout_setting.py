"""What the demo of payouts needs besides a chain: a signer in a process of its own, its policy, documents, a ledger.

All of it is made as docs/how-to/pay-out.md says, and thrown away: the signer's keys are made by `bursar signer create`,
its policy has a mandate, every document is proposed by one person and approved by another.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from bursar.cli.errors import Unusable
from bursar.demo.payout_chains import COINS, GWEI, TOKENS, DemoChain
from bursar.documents import Documents
from bursar.engine import Engine
from bursar.flows.payouts import KINDS, Payouts
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
from bursar.instance import Bursar
from bursar.model.document_kinds import DocumentKind
from bursar.model.documents import Proposal
from bursar.model.entries import deposit
from bursar.ports import SystemPorts
from bursar.rails.behind import chain_behind
from bursar.rails.evm.codec import EvmCodec
from bursar.signer.client import SignerClient
from bursar.signer.protocol import SignerUnavailable
from bursar.testbed import Guard, Program
from bursar.testbed.program import COMMAND, environment

BLOCK_S: Final = 0.3
WALLETS: Final = {"hot1": "m/44'/60'/0'/0/0", "hot2": "m/44'/60'/0'/0/1"}
PAYERS: Final = ("user:1", "user:2")  # accounts, each with a deposit
DEPOSIT: Final = 100  # USDT
SIGNER: Final = "hot"
CALLER: Final = "payouts"
MANDATE: Final = "auto"
POLL_S: Final = 0.05

CAPS: Final = 'payment_max = "1000000000"\nhourly_max = "1000000000"\ndaily_max = "1000000000"\n'


class SignerProcess:
    """`bursar signer run`, which can be killed and started again. It keeps its log."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.address = f"unix:{folder}/signer.sock"
        self._folder = folder
        self._guard = guard
        self.secret = private_file(folder / "payouts.secret", random_text())
        self._phrase = private_file(folder / "passphrase", random_text())
        words = ["signer", "create", "--keystore", f"{folder}/keystore.json", "--name", "main"]
        words += [word for path in WALLETS.values() for word in ("--path", path)]
        words += ["--passphrase-file", str(self._phrase)]
        made = subprocess.run([*COMMAND, *words], env=environment({}), capture_output=True, text=True, check=False)
        if made.returncode:
            raise Unusable(f"bursar signer create: {made.stdout}{made.stderr}")
        found: dict[str, str] = json.loads(made.stdout)["addresses"]
        self.wallets = {name: EvmCodec().check_address("", found[path]) for name, path in WALLETS.items()}
        self._program: Program | None = None

    @property
    def pid(self) -> int:
        """Its process; 0: it is dead."""
        return 0 if self._program is None else self._program.pid

    def start(self, chain: DemoChain) -> None:
        """Start it, the first time with a new log, and wait until it is ready."""
        folder, new = self._folder, self._program is None
        (folder / "policy.toml").write_text(policy(chain, self.wallets))
        words = ["signer", "run", "--data", f"{folder}/signer", "--keystore", f"{folder}/keystore.json"]
        words += ["--passphrase-file", str(self._phrase), "--policy", f"{folder}/policy.toml"]
        words += ["--listen", self.address, *(["--new-log"] if new else [])]
        self._program = Program("signer", words, {}, folder / "signer.err", self._guard)
        self._program.start()
        self._program.until_ready()

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._program is not None:
            self._program.kill()


def random_text() -> str:
    """A secret, or a passphrase."""
    return SystemPorts().token() + SystemPorts().token()


def private_file(path: Path, content: str) -> Path:
    """A file for its owner alone."""
    path.touch(mode=0o600)
    path.write_text(content)
    return path


def policy(chain: DemoChain, wallets: dict[str, str]) -> str:
    """What the signer may sign: payments of the token within caps, by mandate, and cancellations."""
    name = chain.name
    parts = [
        f'name = "{SIGNER}"\n[unhalt]\npeople = ["ann", "ben"]\n',
        f'[chains.{name}]\nkind = "evm"\nchain_id = {chain.chain_id}\nfee_max = "{COINS // 10}"\n'
        f'cancel_fee_max = "{COINS // 10}"\n',
        *(
            f'[wallets.{wallet}]\nchain = "{name}"\naddress = "{address}"\nkey = "main"\npath = "{WALLETS[wallet]}"\n'
            for wallet, address in wallets.items()
        ),
        f'[assets.{name}.USDT]\ncontract = "{chain.token}"\ndecimals = 6\ndual_above = "{TOKENS}"\n{CAPS}',
        f'[mandates.{MANDATE}]\nchain = "{name}"\nasset = "USDT"\n{CAPS}',
        f'[callers.{CALLER}]\nsecret_file = "payouts.secret"\n'
        'rights = ["preview", "sign", "cancel", "log", "status"]\n',
    ]
    return "\n".join(parts)


@asynccontextmanager
async def paying_out(folder: Path, chain: DemoChain, signer: SignerProcess) -> AsyncIterator[Payouts]:
    """Payouts on a new database, with the signer's log compared, and money that is really in the wallets."""
    await chain.fund(signer.wallets.values())
    async with Bursar(f"sqlite:///{folder}/funds.db") as bursar:
        documents = Documents(bursar.store, KINDS)
        bodies = await _documents(bursar, documents, chain, signer.wallets)
        rail = chain_behind(bodies.network(chain.name), chain.urls, chain.post, bursar.store.ports, 2.0)
        client = SignerClient(
            bursar.store.ports,
            signer.address,
            name=SIGNER,
            caller=CALLER,
            secret=signer.secret.read_bytes(),
            link=SignerStoreLink(bursar.store, SIGNER),
            timeout_s=2.0,
        )
        async with client:
            engine = Engine(bursar.store, bursar.ledger.writer, ())
            payouts = Payouts(bursar.ledger, documents, {chain.name: rail}, client, engine=engine)
            await payouts.prepare()
            await _deposits(bursar, chain)
            await answers(client)
            await payouts.reconciling.look()
            yield payouts


async def answers(signer: SignerClient) -> None:
    """Wait until the signer answers."""
    while True:
        with suppress(SignerUnavailable):
            await signer.status()
            return
        await asyncio.sleep(POLL_S)


async def _documents(bursar: Bursar, documents: Documents, chain: DemoChain, wallets: dict[str, str]) -> ChainDocument:
    """Assets, and the documents of chain, token and wallets."""
    await bursar.ledger.create_asset("USDT", precision=6)
    await bursar.ledger.create_asset("ETH", precision=18)
    network = ChainDocument(
        kind="evm",
        chain_id=chain.chain_id,
        native="ETH",
        fee_ceilings=Ranked(high=500 * GWEI, normal=500 * GWEI, low=500 * GWEI),
        tips=Ranked(high=3 * GWEI, normal=2 * GWEI, low=GWEI),
        block_ms=int(BLOCK_S * 1000),
        bump_after_s=0,
    )
    token = AssetDocument(
        asset="USDT", chain=chain.name, contract=chain.token, decimals=6, one_node_limit=str(chain.one_node_limit)
    )
    await put_document(documents, CHAIN, chain.name, network)
    await put_document(documents, ASSET, asset_name("USDT", chain.name), token)
    for name, address in wallets.items():
        await put_document(documents, WALLET, name, WalletDocument(chain=chain.name, address=address))
    return network


async def put_document(documents: Documents, kind: DocumentKind[Any], name: str, body: msgspec.Struct) -> None:
    """A document as it comes into use: one person proposes it, and where it takes two, another one approves it."""
    done = await documents.put(kind, name, body, base=0, author="ann", reason="the demo")
    if isinstance(done, Proposal):
        await documents.approve(kind, name, done.hash, actor="ben", reason="the demo")


async def _deposits(bursar: Bursar, chain: DemoChain) -> None:
    """What the wallets have, booked: the users' part, and the rest as our own."""
    ledger = bursar.ledger
    await ledger.create_account("house")
    for user in PAYERS:
        await ledger.create_account(user)
    for number, name in enumerate(WALLETS):
        books = wallet_account(chain.name, name)
        for account, asset, amount in (
            (PAYERS[number], "USDT", DEPOSIT),
            ("house", "USDT", TOKENS // 10**6 - DEPOSIT),
            ("house", "ETH", COINS // 10**18),
        ):
            await ledger.commit(deposit(books, account, asset, str(amount), key=f"{name} {account} {asset}"))
