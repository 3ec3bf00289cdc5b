"""What the demo of withdrawals needs: keys, the signer's policy, documents, opening books, and the two programs.

All of it is made in one folder as docs/how-to/withdraw.md and docs/how-to/deposits.md say, and thrown away. `bursar
serve` and the commands of people read the same file, `bursar.toml`: so the lines that the story prints work in any
other terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from bursar.api.tokens import make_token
from bursar.config import Config, read
from bursar.demo.payout_setting import private_file, put_document, random_text
from bursar.demo.story import with_port
from bursar.demo.withdrawal_chains import BLOCK_S, GWEI, TOKENS, UNIT, EvmChain, HttpChain, TronChain
from bursar.documents import Documents
from bursar.flows.catalog import KINDS
from bursar.flows.deposits.rules import DEPOSITS, DepositAsset, DepositRules
from bursar.flows.payouts.documents import (
    ASSET,
    CHAIN,
    WALLET,
    AssetDocument,
    ChainDocument,
    Ranked,
    Role,
    WalletDocument,
    asset_name,
)
from bursar.flows.payouts.payout import wallet_account
from bursar.flows.withdrawals.policy import APPROVER, POLICY, AddressBookRule, Approver, WithdrawalPolicy
from bursar.instance import Bursar
from bursar.model.accounts import ExternalAccount
from bursar.model.entries import deposit
from bursar.ports import SystemPorts
from bursar.signer.approvals import create_key
from bursar.signer.keystore import Keystore, new_mnemonic
from bursar.testbed import Answered, Caller, Guard, NoAnswer, Program, children_of, environment

TOKEN: Final = "USDT"
SIGNER, CALLER = "hot", "payouts"
APPROVERS: Final = ("ann", "ben")
OPERATOR: Final = "olga"
USERS: Final = {1001: "eth", 1002: "eth", 1003: "tron"}  # the chain from which each has money in the beginning
MINIMUM: Final = "1"  # of a deposit
SWEEP_AT: Final = "500"  # what lies at an address is swept from this on
AUTO_MAX: Final = 100  # up to this no person is asked
DUAL_ABOVE: Final = 1_000  # above this, two people
COOLING_S: Final = {"eth": 0, "tron": 6}
FEE: Final = "0.50"
TOKEN_S: Final = 86_400
WAIT_S: Final = 60.0
AGAIN_S: Final = 0.1


class Setting:
    """Chains, keys and programs of one demo."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.chains: dict[str, HttpChain] = {chain.name: chain for chain in (EvmChain(), TronChain())}
        self._folder = folder
        self._file = folder / "bursar.toml"
        self._guard = guard
        self._tokens: dict[str, str] = {}
        self.first_address = ""  # of user 1 on the first chain, as the signer's host has printed it

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything is up inside, and nothing is left of it afterwards but the folder."""
        evm, tron = self.chains.values()
        with evm.running(), tron.running():
            self._make()
            try:
                for program in (self.signer, self.server):
                    program.start()
                for program in (self.signer, self.server):
                    program.until_ready(WAIT_S)
                yield
            finally:
                self.kill_server()
                self.signer.kill()

    def kill_server(self) -> None:
        """kill -9 of the server, and of its core."""
        cores = children_of(self.server.pid)
        self.server.kill()
        for pid in cores:  # it would end by itself, but not before its folder is removed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- the API and the command line --------------------------------------------------------------------------------

    def ask(self, method: str, path: str, who: int | str, body: dict[str, Any] | None = None) -> Any:
        """What the API answers to a user or to staff. RuntimeError: it refuses, or does not answer."""
        until, why = time.monotonic() + WAIT_S, ""
        while time.monotonic() < until:
            try:
                answered = self._caller.send(method, f"/api/v1/{path}", self._tokens[str(who)], body)
            except NoAnswer as error:
                why = str(error)
            else:
                if answered.status < 300:
                    return answered.body
                why = _why(answered)
                if answered.status != 503:
                    break
            time.sleep(AGAIN_S)  # the server may be starting, or not know its nodes yet
        raise RuntimeError(f"{method} {path}: {why}")

    def line(self, *words: str, group: str = "withdrawal") -> str:
        """A command of `bursar withdrawal`, or of another group, to be copied into another terminal."""
        return shlex.join([*_executable(), group, "--config", str(self._file), *words])

    def approval(self, id_: str, approver: str) -> str:
        """The command by which an approver signs."""
        files = [f"{self._folder}/{approver}.key", "--passphrase-file", f"{self._folder}/{approver}.passphrase"]
        return self.line("approve", id_, "--key", *files)

    def run(self, line: str) -> str:
        """What such a line prints. RuntimeError: it fails."""
        done = subprocess.run(shlex.split(line), env=environment({}), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{line}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    # --- making it ---------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        folder, chains = self._folder, list(self.chains.values())
        wallets, people, xpub = self._make_keys()
        for chain in chains:
            chain.fund(wallets[f"hot-{chain.name}"])
            chain.fund(wallets[f"gas-{chain.name}"], tokens=0)
            chain.fund(chain.stranger)
        private_file(folder / "payouts.secret", random_text())
        private_file(folder / "jwt.key", random_text())
        (folder / "policy.toml").write_text(_signer_policy(chains, wallets, people))
        listen = with_port("127.0.0.1:0")
        self._file.write_text(_settings(folder, listen, chains))
        self.config: Config = read(str(self._file), {})
        asyncio.run(_furnish(self.config, chains, wallets, people, xpub))
        self._put_deposit_rules(chains[0])
        words = ["signer", "run", "--data", f"{folder}/signer", "--keystore", f"{folder}/keystore.json", "--new-log"]
        words += ["--passphrase-file", f"{folder}/passphrase", "--policy", f"{folder}/policy.toml"]
        words += ["--listen", self.config.signer]
        self.signer = Program("bursar signer", words, {}, folder / "signer.err", self._guard)
        words = ["serve", "--config", str(self._file)]
        self.server = Program("bursar serve", words, {}, folder / "serve.err", self._guard)
        self._caller = Caller(lambda: f"http://{listen}")
        roles = dict.fromkeys(map(str, USERS), "user") | {OPERATOR: "operator"}
        now_s = int(time.time())
        for who, role in roles.items():
            self._tokens[who] = make_token(self.config, who, [role], now_s=now_s, seconds=TOKEN_S)

    def _put_deposit_rules(self, chain: HttpChain) -> None:
        """Rules of deposits, by two people at the command line: the second compares the address of user 1."""
        folder, name = self._folder, chain.name
        files = ["--keystore", f"{folder}/keystore.json", "--passphrase-file", f"{folder}/passphrase"]
        xpub = [*_executable(), "--json", "signer", "xpub", "main", "--path", chain.users_path, *files]
        key = json.loads(self.run(shlex.join(xpub)))
        self.first_address = key[chain.kind]
        rules = folder / f"deposits-{name}.json"
        rules.write_bytes(msgspec.json.encode(_deposit_rules(chain, key["xpub"])))
        words = ["rules", "put", name, str(rules), "--actor", OPERATOR, "--reason", f"deposits from {name}"]
        (hash_,) = re.findall(r"\b[0-9a-f]{64}\b", self.run(self.line(*words, group="deposit")))
        words = ["rules", "approve", name, hash_, "--address", self.first_address]
        words += ["--actor", APPROVERS[1], "--reason", "address compared"]
        self.run(self.line(*words, group="deposit"))

    def _make_keys(self) -> tuple[dict[str, str], dict[str, str], str]:
        """Wallets, with their addresses; approvers, with the public halves of their keys; the last chain's xpub."""
        ports, folder = SystemPorts(), self._folder
        phrase = private_file(folder / "passphrase", random_text())
        store = Keystore(f"{folder}/keystore.json", {}, {})
        paths = tuple(path for chain in self.chains.values() for path in _wallets(chain).values())
        listed = store.add("main", new_mnemonic(ports.token), paths).addresses
        xpub = store.extended_key("main", list(self.chains.values())[-1].users_path).text
        store.save(ports.files(), bytearray(phrase.read_bytes()), ports.token)
        store.wipe()
        wallets = {
            name: chain.codec.check_address(chain.name, listed[path])
            for chain in self.chains.values()
            for name, path in _wallets(chain).items()
        }
        people = {}
        for name in APPROVERS:
            own = bytearray(private_file(folder / f"{name}.passphrase", random_text()).read_bytes())
            people[name] = create_key(ports.files(), f"{folder}/{name}.key", name, own, ports.token)
        return wallets, people, xpub


def _why(answered: Answered) -> str:
    said = answered.body if isinstance(answered.body, dict) else {}
    return f"{answered.status} {said.get('code', '')} {said.get('detail', answered.body)}"


def _executable() -> list[str]:
    """The command of this installation."""
    beside = Path(sys.executable).with_name("bursar")
    return [str(beside)] if beside.exists() else [sys.executable, "-P", "-c", "from bursar.cli import main; main()"]


def _wallets(chain: HttpChain) -> dict[str, str]:
    """Our wallets on a chain, and the paths of their keys."""
    return {f"hot-{chain.name}": chain.path, f"gas-{chain.name}": chain.gas_path}


# --- files and documents ---------------------------------------------------------------------------------------------


def _settings(folder: Path, listen: str, chains: Sequence[HttpChain]) -> str:
    """The file that `bursar serve` and the commands of people read."""
    given = {
        "data": f"{folder}/data",
        "database": f"sqlite:///{folder}/bursar.db",
        "listen": listen,
        "jwt_key_file": f"{folder}/jwt.key",
        "signer": f"unix:{folder}/signer.sock",
        "signer_name": SIGNER,
        "signer_caller": CALLER,
        "signer_secret_file": f"{folder}/payouts.secret",
        "retry_backoff_max_ms": 500,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    return "\n".join([*lines, "[chain_nodes]", *(f"{chain.name} = {json.dumps(chain.urls)}" for chain in chains), ""])


def _signer_policy(chains: Sequence[HttpChain], wallets: Mapping[str, str], people: Mapping[str, str]) -> str:
    """What the signer signs: small payments, sweeps and their gas by mandates, others with approvals."""
    caps = "\n".join(f'{name} = "{TOKENS * UNIT}"' for name in ("hourly_max", "daily_max"))
    parts = [f'name = "{SIGNER}"\n[unhalt]\npeople = {json.dumps(APPROVERS)}']
    parts += [f'[approvers.{name}]\npublic_key = "{key}"' for name, key in people.items()]
    parts += [f'[callers.{CALLER}]\nsecret_file = "payouts.secret"']
    parts += ['rights = ["preview", "sign", "cancel", "log", "status"]']
    for chain in chains:
        name, payment = chain.name, f'chain = "{chain.name}"\nasset = "{TOKEN}"'
        coins = "\n".join(f'{which}_max = "{chain.gas}"' for which in ("payment", "hourly", "daily"))
        parts += [
            f'[chains.{name}]\nkind = "{chain.kind}"\nchain_id = {chain.chain_id}\n{chain.fees}',
            *(
                f'[wallets.{wallet}]\nchain = "{name}"\naddress = "{wallets[wallet]}"\nkey = "main"\npath = "{path}"'
                for wallet, path in _wallets(chain).items()
            ),
            f'[deposits.dep-{name}]\nchain = "{name}"\nkey = "main"\npath = "{chain.users_path}"',
            f'[assets.{name}.{TOKEN}]\ncontract = "{chain.token}"\ndecimals = 6',
            f'payment_max = "{TOKENS * UNIT}"\ndual_above = "{DUAL_ABOVE * UNIT}"\n{caps}',
            f'[mandates.auto-{name}]\n{payment}\npayment_max = "{AUTO_MAX * UNIT}"\n{caps}',
            f'[mandates.sweep-{name}]\n{payment}\npayment_max = "{TOKENS * UNIT}"\n{caps}\nown_wallets = true',
            f'[assets.{name}.{chain.coin}]\ncontract = ""\ndecimals = {chain.decimals}\ndual_above = "0"\n{coins}',
            f'[mandates.gas-{name}]\nchain = "{name}"\nasset = "{chain.coin}"\n{coins}\nown_deposits = true',
        ]
    return "\n".join(parts) + "\n"


def _deposit_rules(chain: HttpChain, xpub: str) -> DepositRules:
    """What is accepted from a chain."""
    name = chain.name
    return DepositRules(
        wallets=f"dep-{name}",
        xpub=xpub,
        assets={TOKEN: DepositAsset(minimum=MINIMUM, sweep_at=SWEEP_AT)},
        sweep_to=f"hot-{name}",
        sweep_mandate=f"sweep-{name}",
        gas_from=f"gas-{name}",
        gas_mandate=f"gas-{name}",
    )


async def _furnish(
    config: Config, chains: Sequence[HttpChain], wallets: Mapping[str, str], people: Mapping[str, str], xpub: str
) -> None:
    """The database: documents, but for the first chain's rules of deposits, and books of what the wallets have."""
    async with Bursar(config.database_url, migrate=True) as b:
        documents, ledger = Documents(b.store, KINDS), b.ledger
        await ledger.create_asset(TOKEN, precision=6)
        await ledger.create_account("house")
        for name, key in people.items():
            await put_document(documents, APPROVER, name, Approver(public_key=key))
        for chain in chains:
            await ledger.create_asset(chain.coin, precision=chain.decimals)
            network = ChainDocument(
                kind=chain.kind,
                chain_id=chain.chain_id,
                native=chain.coin,
                decimals=chain.decimals,
                fee_ceilings=Ranked(high=500 * GWEI, normal=500 * GWEI, low=500 * GWEI),
                tips=Ranked(high=3 * GWEI, normal=2 * GWEI, low=GWEI),
                block_ms=int(BLOCK_S * 1000),
            )
            name = asset_name(TOKEN, chain.name)
            token = AssetDocument(asset=TOKEN, chain=chain.name, contract=chain.token, decimals=6)
            coin = AssetDocument(asset=chain.coin, chain=chain.name, contract="", decimals=chain.decimals)
            rules = WithdrawalPolicy(
                asset=TOKEN,
                chain=chain.name,
                fee_flat=FEE,
                maximum="5000",
                auto_approve_max=str(AUTO_MAX),
                mandate=f"auto-{chain.name}",
                dual_above=str(DUAL_ABOVE),
                address_book=AddressBookRule.REQUIRED,
                cooling_s=COOLING_S[chain.name],
            )
            await put_document(documents, CHAIN, chain.name, network)
            await put_document(documents, ASSET, name, token)
            await put_document(documents, ASSET, asset_name(chain.coin, chain.name), coin)
            await put_document(documents, POLICY, name, rules)
            for wallet, role in zip(_wallets(chain), (Role.HOT, Role.GAS), strict=True):
                where = WalletDocument(chain=chain.name, address=wallets[wallet], role=role)
                await put_document(documents, WALLET, wallet, where)
                books = wallet_account(chain.name, wallet)
                await ledger.create_account(books, policy=ExternalAccount())
                # All that the wallets have in the beginning is our own: users' money comes from the chains.
                await ledger.commit(deposit(books, "house", chain.coin, str(chain.coins), key=f"{wallet} coin"))
                if role is Role.HOT:
                    await ledger.commit(deposit(books, "house", TOKEN, str(TOKENS), key=wallet))
        await put_document(documents, DEPOSITS, chains[-1].name, _deposit_rules(chains[-1], xpub))
