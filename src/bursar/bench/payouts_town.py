"""What payouts are measured with: an EVM node, a token on it, wallets that have some, a signer, and our configuration.

The node (anvil), the program that has it mine, and the signer (`bursar signer run`) are processes of their own. A block
comes every `BLOCK_MS`, whether or not there is something to put into it, and is final two blocks later; it has room for
more than is ever sent, so that neither the fee nor the room in a block is what is measured.

The token is `good` of testbed/tokens.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from bursar import deposit
from bursar.bench.processes import started
from bursar.config import Config
from bursar.documents import Documents, Proposal
from bursar.flows.payouts import KINDS
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET
from bursar.flows.payouts.payout import wallet_account
from bursar.instance import Bursar
from bursar.model.accounts import ExternalAccount
from bursar.model.document_kinds import DocumentKind
from bursar.ports import SystemPorts
from bursar.rails.chain import Network
from bursar.rails.evm.codec import EvmCodec
from bursar.runtime import Runtime, running
from bursar.signer.curve import evm_address, public_key
from bursar.testbed.anvil import Anvil, throwaway_anvil, token_code

CHAIN_NAME: Final = "anvil"
CHAIN_ID: Final = 31_337
COIN: Final = 10**18
GWEI: Final = 10**9
ASSET_CODE: Final = "USDT"
PRECISION: Final = 6
NATIVE: Final = "ETH"
ACCOUNT: Final = "user:1001:funding"
MANDATE: Final = "auto"
AMOUNT: Final = 1_000  # of one payment: 0.001
AMOUNT_TEXT: Final = "0.001"
PLENTY: Final = 10**15  # of tokens, for each wallet
COINS: Final = 1_000  # the same
BLOCK_MS: Final = 200
GAS_LIMIT: Final = 10**10  # of a block: never a tenth of it is used, so the base fee only falls
CEILING: Final = 500 * GWEI
TIP: Final = 2 * GWEI
SIGNER: Final = "hot"
CALLER: Final = "payouts"
PROGRAM: Final = (sys.executable, "-c", "from bursar.cli import main; main()")
CODEC: Final = EvmCodec()
MINER: Final = (sys.executable, "-m", "bursar.bench.payouts_miner")


def shops() -> Iterator[str]:
    """Recipients, each once: equal payments would share what nodes are asked."""
    while True:
        yield CODEC.check_address("", "0x" + secrets.token_hex(20))


class Key(msgspec.Struct, frozen=True):
    """A wallet of the bare sender."""

    private: bytes
    address: str


class Town(msgspec.Struct, frozen=True):
    """What is there."""

    anvil: Anvil
    folder: Path
    token: str
    wallets: tuple[str, ...]  # addresses of the signer's
    keys: tuple[Key, ...]  # the bare sender's wallets: the watcher would stop ours if another program used them
    network: Network

    def config(self, database: str, **more: Any) -> Config:
        """Our configuration, with the node under two names: two of them have to agree."""
        return Config(
            database=database,
            data=str(self.folder / "data"),
            core_spot="",
            chain_nodes={CHAIN_NAME: tuple(f"{self.anvil.url}/?{name}" for name in ("north", "south"))},
            signer=f"unix:{self.folder}/signer.sock",
            signer_name=SIGNER,
            signer_caller=CALLER,
            signer_secret_file=str(self.folder / "payouts.secret"),
            **more,
        )

    @contextlib.contextmanager
    def mining(self) -> Iterator[None]:
        """Blocks come by the clock meanwhile."""
        with started([*MINER, self.anvil.url, str(BLOCK_MS)]):
            yield

    @contextlib.asynccontextmanager
    async def paying(
        self, database: str, wallets: int, *, scan_ms: int = BLOCK_MS, **chain: Any
    ) -> AsyncIterator[Runtime]:
        """All that runs behind the API, on a new database; `chain` is of the chain's document."""
        async with Bursar(database) as b:
            for code, precision in ((ASSET_CODE, PRECISION), (NATIVE, 18)):
                await b.ledger.create_asset(code, precision)
            await b.ledger.create_account("external:bank", policy=ExternalAccount())
            await b.ledger.create_account(ACCOUNT)
            for number in range(1, wallets + 1):  # what each wallet has on the chain (I9)
                wallet = wallet_account(CHAIN_NAME, f"hot-{number}")
                await b.ledger.create_account(wallet, policy=ExternalAccount())
                for target, code, amount in (
                    (ACCOUNT, ASSET_CODE, PLENTY // 10**PRECISION),
                    ("external:bank", NATIVE, COINS),
                ):
                    await b.ledger.commit(deposit(wallet, target, code, str(amount), key=f"{wallet} {code}"))
            await self._furnish(Documents(b.store, KINDS), wallets, chain)
        async with running(self.config(database, scan_interval_ms=scan_ms), SystemPorts(), "bench") as runtime:
            yield runtime

    async def _furnish(self, documents: Documents, wallets: int, more: dict[str, Any]) -> None:
        fees = dict.fromkeys(("high", "normal", "low"), CEILING)
        tips = dict.fromkeys(fees, TIP)
        chain = {
            "kind": "evm",
            "chain_id": CHAIN_ID,
            "native": NATIVE,
            "fee_ceilings": fees,
            "tips": tips,
            "block_ms": BLOCK_MS,
            "bump_after_s": 0,
        }
        asset = {"asset": ASSET_CODE, "chain": CHAIN_NAME, "contract": self.token, "decimals": PRECISION}
        await _approved(documents, CHAIN, CHAIN_NAME, chain | more)
        await _approved(documents, ASSET, f"{ASSET_CODE.lower()}:{CHAIN_NAME}", asset)
        for number, address in enumerate(self.wallets[:wallets], 1):
            await _approved(documents, WALLET, f"hot-{number}", {"chain": CHAIN_NAME, "address": address})


async def _approved(documents: Documents, kind: DocumentKind[Any], name: str, body: dict[str, Any]) -> None:
    """Proposed by one person, approved by another."""
    made = await documents.put(kind, name, body, base=0, author="ann", reason="the benchmark")
    assert isinstance(made, Proposal)
    await documents.approve(kind, name, made.hash, actor="ben", reason="the benchmark")


@contextlib.contextmanager
def town(folder: Path, wallets: int) -> Iterator[Town]:
    """Node, token, and as many wallets for the signer as for the bare sender, each with coin and tokens."""
    (folder / "data").mkdir(mode=0o700)
    addresses = _keystore(folder, wallets)
    keys = []
    for _ in range(wallets):
        private = secrets.token_bytes(32)
        keys.append(Key(private, CODEC.check_address("", evm_address(public_key(bytearray(private))))))
    with throwaway_anvil(CHAIN_ID, "--gas-limit", str(GAS_LIMIT)) as anvil:
        token = _deployed(anvil, [*addresses, *(key.address for key in keys)])
        (folder / "policy.toml").write_text(_policy(addresses, token))
        words = ["--data", str(folder / "signer"), "--keystore", str(folder / "keystore.json"), "--new-log"]
        words += ["--passphrase-file", str(folder / "passphrase"), "--policy", str(folder / "policy.toml")]
        network = Network(name=CHAIN_NAME, kind="evm", chain_id=CHAIN_ID, native=NATIVE)
        with started([*PROGRAM, "--json", "signer", "run", *words, "--listen", f"unix:{folder}/signer.sock"]):
            yield Town(anvil, folder, token, tuple(addresses), tuple(keys), network)


def _keystore(folder: Path, wallets: int) -> list[str]:
    """A keystore with one mnemonic; the addresses of so many wallets."""
    for name, content in (("passphrase", secrets.token_hex(16)), ("payouts.secret", secrets.token_hex(32))):
        (folder / name).write_text(content)
        (folder / name).chmod(0o600)
    paths = [word for number in range(wallets) for word in ("--path", _path(number))]
    words = ["signer", "create", "--keystore", str(folder / "keystore.json"), "--name", "main", *paths]
    words += ["--passphrase-file", str(folder / "passphrase")]
    done = subprocess.run([*PROGRAM, "--json", *words], capture_output=True, text=True, check=True)
    found: dict[str, str] = msgspec.json.decode(done.stdout)["addresses"]
    return [CODEC.check_address("", found[_path(number)]) for number in range(wallets)]


def _path(number: int) -> str:
    return f"m/44'/60'/0'/0/{number}"


def _deployed(anvil: Anvil, holders: list[str]) -> str:
    """The token's address; each holder has plenty of it, and of coin."""
    bank = anvil.rpc("eth_accounts")[0]
    data = token_code("good", PLENTY * (len(holders) + 1))
    hash_ = anvil.rpc("eth_sendTransaction", {"from": bank, "data": data})
    anvil.mine()
    token = CODEC.check_address("", anvil.rpc("eth_getTransactionReceipt", hash_)["contractAddress"])
    for holder in holders:
        anvil.rpc("anvil_setBalance", holder, hex(COINS * COIN))
        data = f"0xa9059cbb{holder[2:].lower():0>64}{PLENTY:064x}"  # transfer(address,uint256)
        anvil.rpc("eth_sendTransaction", {"from": bank, "to": token, "data": data})
    anvil.mine(200)  # and final, whatever depth is asked for
    return token


def _policy(addresses: list[str], token: str) -> str:
    """Small payments of the token go by mandate."""
    most = f'hourly_max = "{PLENTY}"\ndaily_max = "{PLENTY}"\npayment_max = "{10 * AMOUNT}"\n'
    text = f'name = "{SIGNER}"\n[unhalt]\npeople = ["ann", "ben"]\n'
    text += f'[callers.{CALLER}]\nsecret_file = "payouts.secret"\n'
    text += 'rights = ["preview", "sign", "cancel", "log", "status"]\n'
    text += f'[chains.{CHAIN_NAME}]\nkind = "evm"\nchain_id = {CHAIN_ID}\n'
    text += f'fee_max = "{COIN}"\ncancel_fee_max = "{COIN}"\n'
    for number, address in enumerate(addresses):
        text += f'[wallets.hot-{number + 1}]\nchain = "{CHAIN_NAME}"\naddress = "{address}"\nkey = "main"\n'
        text += f'path = "{_path(number)}"\n'
    text += f'[assets.{CHAIN_NAME}.{ASSET_CODE}]\ncontract = "{token}"\ndecimals = {PRECISION}\n'
    text += f'dual_above = "{10 * AMOUNT}"\n{most}'
    return text + f'[mandates.{MANDATE}]\nchain = "{CHAIN_NAME}"\nasset = "{ASSET_CODE}"\n{most}'
