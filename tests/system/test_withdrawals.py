"""Withdrawals with real processes: `bursar serve`, `bursar signer run` and an EVM node (anvil), as the how-to has them.

A user asks over HTTP; what policy approves is paid, and what is above waits for a person, who signs with a key of their
own at the command line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.system.test_payouts import ANNA, BEN, COIN, FIRST, SHOP, Signer, furnish, policy_of, prepared, secret_file
from tests.system.test_serve import ALICE, Serve, until

from bursar.testbed.anvil import Anvil, throwaway_anvil

WITHDRAWALS = "/api/v1/withdrawals"
RULES = ["asset=ONE", "chain=one", 'maximum="2"', 'auto_approve_max="0.5"', "mandate=auto-one", 'dual_above="1"']
RULES += ['fee_flat="0.01"', "address_book=off"]


def completed(serve: Serve, node: Anvil, id_: str) -> dict[str, Any]:
    """The withdrawal when it is paid."""

    def is_completed() -> dict[str, Any] | None:
        node.mine()
        found: dict[str, Any] = serve.send("GET", f"{WITHDRAWALS}/{id_}").json()
        assert found["status"] not in ("failed", "rejected"), found["message"]
        return found if found["status"] == "completed" else None

    done: dict[str, Any] = until(is_completed)
    return done


def test_user_asks_over_http_and_an_approver_signs_at_the_command_line(tmp_path: Path) -> None:
    here = Signer(tmp_path / "signer")
    key, phrase = tmp_path / "ann.key", secret_file(tmp_path / "ann.pass", "correct horse battery staple")
    words = ("signer", "approver-key", "--file", str(key), "--name", "ann", "--passphrase-file", str(phrase))
    public = json.loads(here.run(*words))["public_key"]
    here.policy.write_text(policy_of(here.address, FIRST) + f'[approvers.ann]\npublic_key = "{public}"\n')
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with throwaway_anvil(FIRST["id"]) as node, here.running():
        node.rpc("anvil_setBalance", here.address, hex(3 * COIN))
        node.mine(4)
        serve = Serve(data, BURSAR_DATABASE=f"sqlite:///{data}/bursar.db", **here.environ(one=node))
        serve.run("migrate")
        prepared(serve, "ONE")
        serve.start()
        try:
            furnish(serve, here.address, FIRST)
            rules = [word for field in RULES for word in ("--set", field)]
            for name, document, sets in (
                ("policy", "one:one", rules),
                ("approver", "ann", ["--set", f"public_key={public}"]),
            ):
                made = json.loads(serve.run("--json", "withdrawal", name, "put", document, *sets, *ANNA))
                serve.run("withdrawal", name, "approve", document, made["hash"], *BEN)
            asked = {"asset": "ONE", "chain": "one", "to": SHOP, "amount": "0.5"}
            until(lambda: serve.send("POST", f"{WITHDRAWALS}/quote", asked).status_code == 200)  # it follows documents
            small = serve.send("POST", WITHDRAWALS, asked | {"client_withdrawal_id": "w-1"}).json()
            large = serve.send("POST", WITHDRAWALS, asked | {"amount": "1", "client_withdrawal_id": "w-2"}).json()
            assert completed(serve, node, small["id"])["tx_hash"].startswith("0x")
            assert large["waits_for"], large
            assert large["id"] in serve.run("withdrawal", "waiting")
            digest = json.loads(serve.run("--json", "withdrawal", "show", large["id"]))["digest"]
            sign = ["--key", str(key), "--passphrase-file", str(phrase), "--digest", digest, "--yes"]
            serve.run("withdrawal", "approve", large["id"], *sign)
            completed(serve, node, large["id"])
            assert int(node.rpc("eth_getBalance", SHOP, "latest"), 16) == 3 * COIN // 2
            serve.run("audit")  # fails unless every unit of value is accounted for
        finally:
            serve.stop()
    assert ALICE == 1001, "whose account was prepared"
