"""What payouts need before the first program starts: a signer with its keys and policy, documents, and opening books.

The wallets' keys are no secret, and what their chain holds is worth nothing. Everything is paid under one mandate, with
caps that are never reached; fees are capped far above what the chain ever asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Final

from bursar.chaos.chain import BLOCK_S, CHAIN_ID, COINS, DECIMALS, DEPTH, GWEI, KEYS, TOKENS, WALLETS, Chain
from bursar.config import Config
from bursar.documents import Documents
from bursar.flows.payouts import KINDS
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, ChainDocument, Ranked, WalletDocument
from bursar.flows.payouts.documents import asset_name as named
from bursar.flows.payouts.payout import wallet_account
from bursar.instance import Bursar
from bursar.model.accounts import ExternalAccount
from bursar.model.documents import Proposal
from bursar.model.entries import deposit
from bursar.ports import SystemPorts
from bursar.rails.evm.codec import EvmCodec
from bursar.signer.codecs import codec_of
from bursar.signer.keys import KeystoreKeys
from bursar.signer.keystore import Keystore
from bursar.signer.policy import parse
from bursar.signer.service import Service

SIGNER: Final = "hot"
CALLER: Final = "payouts"
CHAIN_NAME: Final = "chaos"
TOKEN: Final = "USDT"
COIN: Final = "ETH"
MANDATE: Final = "auto"
PASSPHRASE: Final = "correct horse battery staple"
CAPS: Final = "\n".join(f'{name} = "{TOKENS}"' for name in ("payment_max", "hourly_max", "daily_max"))


class SignerFolder:
    """A signer: its keys, its policy, its log, and how it is run and asked."""

    def __init__(self, folder: Path, chain: Chain) -> None:
        """Make it, with a new log."""
        self.data = folder / "signer"
        self.data.mkdir(mode=0o700)
        self._passphrase = _secret(folder / "passphrase", PASSPHRASE)
        self._secret = _secret(folder / "payouts.secret", os.urandom(32).hex())
        self._policy = folder / "policy.toml"
        self._policy.write_text(_policy(check(chain.token)), encoding="utf-8")
        self._keystore = folder / "keystore.json"
        self._address = f"unix:{folder}/signer.sock"
        asyncio.run(self._create())

    async def _create(self) -> None:
        ports = SystemPorts()
        keys = Keystore(str(self._keystore), {}, {})
        for name, key in KEYS.items():
            keys.add(name, bytearray(key.hex().encode()), ())
        keys.save(ports.files(), bytearray(PASSPHRASE.encode()), ports.token)
        policy = parse(str(self._policy), self._policy.read_bytes(), codec_of)
        service = await Service.open(ports, str(self.data), policy, KeystoreKeys(keys), codec_of, new=True)
        service.close()

    def words(self) -> list[str]:
        """The command that runs the signer."""
        files = ["--keystore", str(self._keystore), "--policy", str(self._policy)]
        given = ["--passphrase-file", self._passphrase, "--listen", self._address]
        return ["signer", "run", "--data", str(self.data), *files, *given]

    def settings(self, chain: Chain) -> dict[str, str]:
        """How others reach the signer and the chain. Whatever is silent is found out soon."""
        return {
            "signer": self._address,
            "signer_name": SIGNER,
            "signer_caller": CALLER,
            "signer_secret_file": self._secret,
            "signer_timeout_ms": "1000",
            "chain_nodes": json.dumps({CHAIN_NAME: chain.urls}),
            "chain_timeout_ms": "1000",
        }


def check(address: str) -> str:
    """An address as it is stored."""
    return EvmCodec().check_address(CHAIN_NAME, address)


def _secret(path: Path, content: str) -> str:
    path.touch(mode=0o600)
    path.write_text(content, encoding="utf-8")
    return str(path)


def _policy(token: str) -> str:
    parts = [
        f'name = "{SIGNER}"',
        '[unhalt]\npeople = ["ann", "ben"]',
        f'[chains.{CHAIN_NAME}]\nkind = "evm"\nchain_id = {CHAIN_ID}',
        f'fee_max = "{COINS}"\ncancel_fee_max = "{COINS}"\ncancels_daily = 1000000',
        f'[assets.{CHAIN_NAME}.{TOKEN}]\ncontract = "{token}"\ndecimals = {DECIMALS}\ndual_above = "{TOKENS}"\n{CAPS}',
        f'[mandates.{MANDATE}]\nchain = "{CHAIN_NAME}"\nasset = "{TOKEN}"\n{CAPS}',
        f'[callers.{CALLER}]\nsecret_file = "payouts.secret"',
        'rights = ["preview", "sign", "cancel", "log", "status"]',
    ]
    for name, address in WALLETS.items():
        parts.append(f'[wallets.{name}]\nchain = "{CHAIN_NAME}"\naddress = "{check(address)}"\nkey = "{name}"')
    return "\n".join(parts) + "\n"


async def furnish(config: Config, chain: Chain) -> None:
    """The documents, by two people, and books that say what the wallets have."""
    network = ChainDocument(
        kind="evm",
        chain_id=CHAIN_ID,
        native=COIN,
        genesis=chain.genesis,
        depth=DEPTH,
        fee_ceilings=Ranked(high=500 * GWEI, normal=500 * GWEI, low=500 * GWEI),
        tips=Ranked(high=3 * GWEI, normal=2 * GWEI, low=GWEI),
        block_ms=int(BLOCK_S * 1000),
        bump_after_s=0,  # or a replacement would make up for bytes that are not sent again
    )
    token = AssetDocument(asset=TOKEN, chain=CHAIN_NAME, contract=check(chain.token), decimals=DECIMALS)
    wanted: list[tuple[Any, str, Any]] = [(CHAIN, CHAIN_NAME, network), (ASSET, named(TOKEN, CHAIN_NAME), token)]
    for name, address in WALLETS.items():
        wanted.append((WALLET, name, WalletDocument(chain=CHAIN_NAME, address=check(address))))
    async with Bursar(config.database_url) as b:
        await b.ledger.create_asset(COIN, 18)
        documents = Documents(b.store, KINDS)
        for kind, name, body in wanted:
            done = await documents.put(kind, name, body, base=0, author="ann", reason="chaos")
            if isinstance(done, Proposal):
                await documents.approve(kind, name, done.hash, actor="ben", reason="chaos")
        for name in WALLETS:
            books, treasury = wallet_account(CHAIN_NAME, name), f"treasury:{name}"
            await b.ledger.create_account(books, policy=ExternalAccount())
            await b.ledger.create_account(treasury)
            for asset, minor, decimals in ((TOKEN, TOKENS, DECIMALS), (COIN, COINS, 18)):
                amount = str(minor // 10**decimals)
                await b.ledger.commit(deposit(books, treasury, asset, amount, key=f"opening-{name}-{asset}"))
