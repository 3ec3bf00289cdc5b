"""A payment that the chain has reverted is made again on another nonce, with real processes and an EVM node (W31, W36).

The token passes the dry run and refuses the payment in its block. The worker sees that it is dead; the signer does not
take its word. First it has no nodes of its own, and two approvers release the payout, with the commands that
docs/how-to/run-a-signer.md has. Then it is given nodes, and sees the next one for itself.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.system.test_payouts import ACCOUNT, ANNA, BEN, COIN, FIRST, SHOP, Signer, furnish, policy_of, prepared
from tests.system.test_payouts import secret_file as private_file
from tests.system.test_serve import Serve, until

from bursar.rails.evm.codec import EvmCodec, transfer_data
from bursar.testbed.anvil import Anvil, throwaway_anvil, token_code

UNIT = 10**6
PAID = 5 * UNIT
CLOSED = "0x1"  # the slot of `closed` in src/bursar/testbed/tokens/closing.vy


def deployed(node: Anvil, to: str) -> str:
    """The token, of which a wallet has some."""
    maker = node.rpc("eth_accounts")[0]
    made = node.rpc("eth_sendTransaction", {"from": maker, "data": token_code("closing", 10**12)})
    node.mine()
    token = EvmCodec().check_address("", node.rpc("eth_getTransactionReceipt", made)["contractAddress"])
    node.rpc("eth_sendTransaction", {"from": maker, "to": token, "data": "0x" + transfer_data(to, 1_000 * UNIT).hex()})
    node.mine(4)
    return token


class Town:
    """A server, a signer with two approvers, and a node."""

    def __init__(self, folder: Path, here: Signer, node: Anvil, serve: Serve) -> None:
        self.folder, self.here, self.node, self.serve = folder, here, node, serve
        self.token = deployed(node, here.address)
        self.ops = private_file(here.folder / "ops.secret", "o" * 48)
        self.approvers = {}
        (folder / "approvers").mkdir(mode=0o700)
        for name in ("ann", "ben"):
            key = self.key(name)
            made = here.run("signer", "approver-key", "--file", key, "--name", name, *self.phrase)
            self.approvers[name] = json.loads(made)["public_key"]

    @property
    def phrase(self) -> tuple[str, str]:
        return "--passphrase-file", str(self.here.phrase)

    def key(self, name: str) -> str:
        return str(self.folder / "approvers" / f"{name}.key")

    def policy(self, *, nodes: bool) -> str:
        """Small payments of the token by mandate; operators may hand in a release, and no worker may."""
        text = policy_of(self.here.address, FIRST)
        if nodes:
            text = 'nodes_file = "nodes.toml"\n' + text.replace("chain_id =", "depth = 1\nchain_id =")
        caps = "".join(f'{name} = "{100 * UNIT}"\n' for name in ("payment_max", "hourly_max", "daily_max"))
        text += f'[assets.one.USD]\ncontract = "{self.token}"\ndecimals = 6\ndual_above = "{UNIT}"\n{caps}'
        text += f'[mandates.auto-usd]\nchain = "one"\nasset = "USD"\n{caps}'
        text += "".join(f'[approvers.{name}]\npublic_key = "{key}"\n' for name, key in self.approvers.items())
        return text + '[callers.ops]\nsecret_file = "ops.secret"\nrights = ["status", "release"]\n'

    def furnish(self) -> None:
        furnish(self.serve, self.here.address, FIRST)
        fields = ("asset=USD", "chain=one", f"contract={self.token}", "decimals=6")
        sets = [word for field in fields for word in ("--set", field)]
        made = json.loads(self.serve.run("--json", "chain", "asset-put", "usd:one", *sets, *ANNA))
        self.serve.run("chain", "asset-approve", "usd:one", made["hash"], *BEN)

    def state(self, id_: str) -> tuple[str, str]:
        """State and error of a payout, without a process for each look."""
        with closing(sqlite3.connect(f"{self.serve.folder}/bursar.db", timeout=10)) as database:
            found = database.execute("SELECT state, error FROM records WHERE id = ?", [id_]).fetchone()
        assert found[0] != "failed", found
        return found[0], found[1]

    def waits_for(self, id_: str, code: str) -> str:
        """Until it waits for this; what it says about it."""
        until(lambda: self.state(id_)[1].startswith(code))
        return self.state(id_)[1]

    def reverted(self, key: str) -> str:
        """A payout whose transaction the token refuses in its block, after the dry run; and then no more."""
        words = ["--json", "payout", "request", ACCOUNT, "USD", "5", "--chain", "one", "--to", SHOP]
        id_: str = json.loads(self.serve.run(*words, "--source", key, "--key", key, "--mandate", "auto-usd"))["id"]
        until(lambda: self.state(id_)[0] == "confirming")
        self.close(True)
        self.node.mine()
        self.close(False)
        self.node.mine(4)
        return id_

    def close(self, closed: bool) -> None:
        self.node.rpc("anvil_setStorageAt", self.token, CLOSED, f"0x{int(closed):064x}")

    def has(self, address: str) -> int:
        call = {"to": self.token, "data": "0x70a08231" + address[2:].lower().rjust(64, "0")}
        return int(self.node.rpc("eth_call", call, "latest"), 16)

    def at_once(self, id_: str) -> None:
        """Not in half a minute."""
        self.serve.run("flow", "retry", "payouts", id_, *ANNA)

    def confirmed(self, id_: str) -> list[dict[str, Any]]:
        """Mine until it is; its attempts."""

        def is_confirmed() -> bool:
            self.node.mine()
            return self.state(id_)[0] == "confirmed"

        until(is_confirmed)
        attempts: list[dict[str, Any]] = json.loads(self.serve.run("--json", "payout", "show", id_))["attempts"]
        return attempts


def test_payment_that_reverted_is_made_again_by_two_approvers_or_by_own_nodes(tmp_path: Path) -> None:
    here = Signer(tmp_path / "signer")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with throwaway_anvil(FIRST["id"]) as node:
        node.rpc("anvil_setBalance", here.address, hex(3 * COIN))
        serve = Serve(data, BURSAR_DATABASE=f"sqlite:///{data}/bursar.db", **here.environ(one=node))
        town = Town(tmp_path, here, node, serve)
        here.policy.write_text(town.policy(nodes=False))
        with here.running() as process:
            serve.run("migrate")
            prepared(serve, "ONE")
            serve.run("asset", "create", "USD", "--precision", "6")
            serve.run("ledger", "deposit", "external:bank", ACCOUNT, "USD", "20", "--key", "seed-USD")
            serve.start()
            try:
                town.furnish()
                released_by_two_approvers(town)
                here_has_nodes(town, process.pid)
                seen_by_own_nodes(town)
                serve.run("audit")
            finally:
                serve.stop()


def released_by_two_approvers(town: Town) -> None:
    id_ = town.reverted("k1")
    assert "no nodes of its own for one" in town.waits_for(id_, "SECOND_SLOT")
    town.at_once(id_)
    town.waits_for(id_, "NEEDS_RELEASE")
    (alert,) = json.loads(town.serve.run("--json", "alert", "list"))
    assert alert["reason"] == "needs release"
    release = town.folder / "release.json"
    release.write_text(alert["message"].partition("release it: ")[2])
    given = []
    for name in town.approvers:
        words = ("signer", "approve", "--key", town.key(name), "--kind", "release", str(release), "--yes")
        approval = town.folder / f"{name}.json"
        approval.write_text(town.here.run(*words, *town.phrase))
        given += ["--approval", str(approval)]
    at = ("--at", f"unix:{town.here.folder}/signer.sock", "--name", "hot")
    town.here.run("signer", "release", str(release), *given, *at, "--caller", "ops", "--secret-file", str(town.ops))
    town.at_once(id_)
    done = town.confirmed(id_)
    assert [attempt["nonce"] for attempt in done] == [0, 1]
    assert town.has(SHOP) == PAID


def here_has_nodes(town: Town, signer: int) -> None:
    """Given them while it runs."""
    urls = json.dumps([f"{town.node.url}/?a-secret-key", f"{town.node.url}/?another"])
    private_file(town.here.folder / "nodes.toml", f"[chain_nodes]\none = {urls}\n")
    town.here.policy.write_text(town.policy(nodes=True))
    os.kill(signer, signal.SIGHUP)
    until(lambda: "own nodes of one: one-1: it answers, one-2: it answers" in town.here.log.read_text())


def seen_by_own_nodes(town: Town) -> None:
    id_ = town.reverted("k2")
    done = town.confirmed(id_)
    assert [attempt["nonce"] for attempt in done] == [2, 3]
    assert town.has(SHOP) == 2 * PAID
    log = json.loads(town.here.run("signer", "log", "--data", f"{town.here.folder}/data", "--payout", id_))
    kinds = [entry["what"]["type"] for entry in log]
    assert kinds == ["signed", "dead", "signed"], "no person was asked"
    (proof,) = log[1]["what"]["proofs"]
    assert (proof["how"], proof["nodes"]) == ("failed", ["one-1", "one-2"])
    assert proof["consumed_by"]["hash"] == done[0]["hash"]
    everything = json.dumps(log) + town.here.log.read_text()
    assert town.node.url not in everything and "a-secret-key" not in everything
