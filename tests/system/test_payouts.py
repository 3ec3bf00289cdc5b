"""Payouts with real processes: `bursar serve`, `bursar signer run` and an EVM node (anvil).

From nothing to a confirmed payout with the commands that docs/how-to/pay-out.md has; then a second chain, which is
documents, a part of the signer's policy, and the URLs of its nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.commands import command
from tests.system.test_serve import COMMAND, Serve, until

from bursar.rails.evm.codec import EvmCodec
from bursar.testbed.anvil import Anvil, throwaway_anvil

COIN = 10**18
GWEI = 10**9
SHOP = EvmCodec().check_address("", "0x" + "a1" * 20)
ACCOUNT = "user:1001:funding"
ANNA, BEN = (("--actor", name, "--reason", "set up") for name in ("anna", "ben"))
FIRST: dict[str, Any] = {"chain": "one", "id": 31_337, "coin": "ONE"}
SECOND: dict[str, Any] = {"chain": "two", "id": 31_338, "coin": "TWO"}


def secret_file(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def policy_of(address: str, *chains: dict[str, Any]) -> str:
    """A policy that lets small payments of each chain's coin go by mandate."""
    text = 'name = "hot"\n[unhalt]\npeople = ["ann", "ben", "eve"]\n'
    text += (
        '[callers.payouts]\nsecret_file = "payouts.secret"\nrights = ["preview", "sign", "cancel", "log", "status"]\n'
    )
    for one in chains:
        name, coin = one["chain"], one["coin"]
        text += (
            f'[chains.{name}]\nkind = "evm"\nchain_id = {one["id"]}\nfee_max = "{COIN}"\ncancel_fee_max = "{COIN}"\n'
        )
        text += f'[wallets.hot-{name}]\nchain = "{name}"\naddress = "{address}"\nkey = "main"\n'
        caps = f'payment_max = "{5 * COIN}"\nhourly_max = "{9 * COIN}"\ndaily_max = "{9 * COIN}"\n'
        text += f'[assets.{name}.{coin}]\ncontract = ""\ndecimals = 18\ndual_above = "{COIN}"\n{caps}'
        text += f'[mandates.auto-{name}]\nchain = "{name}"\nasset = "{coin}"\n{caps}'
    return text


class Signer:
    """A signer with one secret, in a folder of its own: a key, or words with some paths."""

    def __init__(self, folder: Path, *, kind: str = "key", paths: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self.phrase = secret_file(folder / "passphrase", "correct horse battery staple")
        self.secret = secret_file(folder / "payouts.secret", "s" * 48)
        self.policy = folder / "policy.toml"
        self.keystore = folder / "keystore.json"
        self.log = folder / "stderr.log"
        words = ["signer", "create", "--keystore", str(self.keystore), "--name", "main", "--kind", kind]
        words += [word for path in paths for word in ("--path", path)]
        said = self.run(*words, "--passphrase-file", str(self.phrase))
        self.addresses: dict[str, str] = json.loads(said)["addresses"]  # by path
        self.address = EvmCodec().check_address("", next(iter(self.addresses.values())))

    def run(self, *words: str) -> str:
        ran = command("--json", *words)
        assert ran.code == 0, ran.err + ran.out
        return ran.out

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        words = [*COMMAND, "--json", "signer", "run", "--data", str(self.folder / "data")]
        words += [] if (self.folder / "data").exists() else ["--new-log"]
        words += ["--keystore", str(self.keystore), "--passphrase-file", str(self.phrase)]
        words += ["--policy", str(self.policy), "--listen", f"unix:{self.folder}/signer.sock"]
        with self.log.open("a") as log:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), self.log.read_text()
            yield process
        finally:
            process.kill()
            process.wait()

    def environ(self, **nodes: Anvil) -> dict[str, str]:
        urls = {name: [f"{node.url}/?north", f"{node.url}/?south"] for name, node in nodes.items()}
        return {
            "BURSAR_SIGNER": f"unix:{self.folder}/signer.sock",
            "BURSAR_SIGNER_NAME": "hot",
            "BURSAR_SIGNER_CALLER": "payouts",
            "BURSAR_SIGNER_SECRET_FILE": str(self.secret),
            "BURSAR_CHAIN_NODES": json.dumps(urls),
        }


def furnish(serve: Serve, address: str, one: dict[str, Any]) -> None:
    """The documents of a chain: proposed by one person, approved by another."""
    name, coin = one["chain"], one["coin"]
    fees = f'fee_ceilings={{"high": {500 * GWEI}, "normal": {500 * GWEI}, "low": {500 * GWEI}}}'
    tips = f'tips={{"high": {2 * GWEI}, "normal": {2 * GWEI}, "low": {GWEI}}}'
    chain = ["kind=evm", f"chain_id={one['id']}", f"native={coin}", "bump_after_s=0", fees, tips]
    chain.append(f"block_ms={one.get('block_ms', 50)}")
    asset = [f"asset={coin}", f"chain={name}", "decimals=18"]
    for group, put, approve, document, fields in (
        ("chain", "put", "approve", name, chain),
        ("chain", "asset-put", "asset-approve", f"{coin.lower()}:{name}", asset),
        ("wallet", "put", "approve", f"hot-{name}", [f"chain={name}", f"address={address}"]),
    ):
        sets = [word for field in fields for word in ("--set", field)]
        made = json.loads(serve.run("--json", group, put, document, *sets, *ANNA))
        serve.run(group, approve, document, made["hash"], *BEN)


def pay(serve: Serve, node: Anvil, one: dict[str, Any], key: str) -> dict[str, Any]:
    """Half a coin, by mandate; until it is confirmed."""
    words = ["--json", "payout", "request", ACCOUNT, one["coin"], "0.5", "--chain", one["chain"], "--to", SHOP]
    words += ["--source", f"test:{key}", "--key", key, "--mandate", f"auto-{one['chain']}"]
    made = json.loads(serve.run(*words))

    def is_confirmed() -> dict[str, Any] | None:
        node.mine()
        found: dict[str, Any] = json.loads(serve.run("--json", "payout", "show", made["id"]))
        assert found["status"] != "failed", found["error"]
        return found if found["status"] == "confirmed" else None

    confirmed: dict[str, Any] = until(is_confirmed)
    assert int(node.rpc("eth_getBalance", SHOP, "latest"), 16) == COIN // 2
    assert int(node.rpc("eth_chainId"), 16) == one["id"]
    return confirmed


def prepared(serve: Serve, *coins: str) -> None:
    """A user with two of each coin."""
    for coin in coins:
        serve.run("asset", "create", coin, "--precision", "18")
    serve.run("account", "create", "external:bank", "--policy", "external")
    serve.run("account", "create", ACCOUNT)
    for coin in coins:
        serve.run("ledger", "deposit", "external:bank", ACCOUNT, coin, "2", "--key", f"seed-{coin}")


def test_payout_from_nothing_and_a_second_chain_by_documents_and_urls(tmp_path: Path) -> None:
    here = Signer(tmp_path / "signer")
    here.policy.write_text(policy_of(here.address, FIRST))
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with throwaway_anvil(FIRST["id"]) as one, throwaway_anvil(SECOND["id"]) as two, here.running() as signer:
        for node in (one, two):
            node.rpc("anvil_setBalance", here.address, hex(3 * COIN))
            node.mine(4)
        database = f"sqlite:///{data}/bursar.db"
        serve = Serve(data, BURSAR_DATABASE=database, **here.environ(one=one))
        serve.run("migrate")
        prepared(serve, "ONE", "TWO")
        serve.start()
        try:
            furnish(serve, here.address, FIRST)
            done = pay(serve, one, FIRST, "k1")
            assert [attempt["nonce"] for attempt in done["attempts"]] == [0]
            furnish(serve, here.address, SECOND)
            here.policy.write_text(policy_of(here.address, FIRST, SECOND))
            os.kill(signer.pid, signal.SIGHUP)
            until(lambda: "was read again" in here.log.read_text())
            serve.stop()
            serve.environ |= here.environ(one=one, two=two)
            serve.start()
            pay(serve, two, SECOND, "k2")
            serve.run("audit")  # fails unless every unit of value is accounted for
        finally:
            serve.stop()
