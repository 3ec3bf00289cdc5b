"""Deposits with real processes: `bursar serve`, `bursar signer run`, and an EVM node (anvil) behind two addresses.

What a stranger sends to a user's address is credited once, swept with gas that another wallet brings, and paid out
again, whatever is killed on the way. Nothing is credited before it is final, nor on the word of one node alone.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.commands import command
from tests.system.relay import Call, Relay, relayed
from tests.system.test_payouts import ANNA, BEN, COIN, FIRST, SHOP, Signer, furnish
from tests.system.test_serve import ALICE, WAIT_S, Serve

from bursar.rails.derivation import ExtendedKey, deposit_address
from bursar.rails.evm.codec import EvmCodec, transfer_data
from bursar.testbed.anvil import Anvil, throwaway_anvil, token_code

BOB = 1002
USDT = 10**6
PATH = "m/44'/60'/1'"
WALLETS = {"hot-one": "m/44'/60'/0'/0/0", "gas-one": "m/44'/60'/0'/0/1"}
ADDRESSES, DEPOSITS = "/api/v1/deposit_addresses", "/api/v1/chain_deposits"
WITHDRAWALS = "/api/v1/withdrawals"
BLOCK_S = 0.3  # between two blocks that a test waits for
# A contract that passes a call on, with its coin: 32 bytes with the target, then the data of the call.
FORWARDER = "0x60198060093d393df3" + "60203603806020600037" + "60006000826000346000355af15000"
TRANSFER = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
CODEC = EvmCodec()


def policy_of(addresses: dict[str, str], token: str) -> str:
    """What the signer may sign: withdrawals, sweeps of both assets to our wallets, gas to users' addresses."""
    coins = f'payment_max = "{5 * COIN}"\nhourly_max = "{9 * COIN}"\ndaily_max = "{9 * COIN}"\n'
    tokens = f'payment_max = "{500 * USDT}"\nhourly_max = "{900 * USDT}"\ndaily_max = "{900 * USDT}"\n'
    text = 'name = "hot"\n[unhalt]\npeople = ["ann", "ben", "eve"]\n'
    text += '[callers.payouts]\nsecret_file = "payouts.secret"\n'
    text += 'rights = ["preview", "sign", "cancel", "log", "status"]\n'
    text += f'[chains.one]\nkind = "evm"\nchain_id = {FIRST["id"]}\nfee_max = "{COIN}"\ncancel_fee_max = "{COIN}"\n'
    for name, path in WALLETS.items():
        text += f'[wallets.{name}]\nchain = "one"\naddress = "{addresses[path]}"\nkey = "main"\npath = "{path}"\n'
    text += f'[deposits.dep-one]\nchain = "one"\nkey = "main"\npath = "{PATH}"\n'
    text += f'[assets.one.ONE]\ncontract = ""\ndecimals = 18\ndual_above = "{COIN}"\n{coins}'
    text += f'[assets.one.USDT]\ncontract = "{token}"\ndecimals = 6\ndual_above = "{COIN}"\n{tokens}'
    for name, asset, caps, more in (
        ("auto", "USDT", tokens, ""),
        ("sweep", "USDT", tokens, "own_wallets = true\n"),
        ("sweep-coin", "ONE", coins, "own_wallets = true\n"),
        ("gas", "ONE", coins, "own_deposits = true\n"),
    ):
        text += f'[mandates.{name}]\nchain = "one"\nasset = "{asset}"\n{caps}{more}'
    return text


def command_of(serve: Serve, *words: str) -> str:
    """What a command prints, however it ends."""
    return command(*words, environ=serve.environ).out


class Town:
    """The chain, the signer and the server, with everything that two people have to say."""

    def __init__(self, folder: Path, node: Anvil, relay: Relay) -> None:
        self.node = node
        self.relay = relay
        self.here = Signer(folder / "signer", kind="mnemonic", paths=tuple(WALLETS.values()))
        self.stranger = node.rpc("eth_accounts")[0]
        self.token = self.deployed(token_code("good", 10**12))
        addresses = {path: CODEC.check_address("", text) for path, text in self.here.addresses.items()}
        self.hot, self.gas = (addresses[path] for path in WALLETS.values())
        self.here.policy.write_text(policy_of(addresses, self.token))
        node.rpc("anvil_setBalance", self.hot, hex(COIN))
        node.rpc("anvil_setBalance", self.gas, hex(COIN))
        node.mine(4)
        words = ["signer", "xpub", "main", "--path", PATH, "--keystore", str(self.here.keystore)]
        self.xpub = json.loads(self.here.run(*words, "--passphrase-file", str(self.here.phrase)))
        data = folder / "data"
        data.mkdir(mode=0o700)
        environ = self.here.environ() | {"BURSAR_CHAIN_NODES": json.dumps({"one": relay.urls})}
        self.serve = Serve(data, BURSAR_DATABASE=f"sqlite:///{data}/bursar.db", **environ)

    # --- the chain ---------------------------------------------------------------------------------------------------

    def deployed(self, code: str) -> str:
        hash_ = self.send(data=code)
        self.node.mine()
        return CODEC.check_address("", self.node.rpc("eth_getTransactionReceipt", hash_)["contractAddress"])

    def send(self, to: str = "", *, value: int = 0, data: str = "0x") -> str:
        """A transaction of the stranger's, in the pool."""
        call = {"from": self.stranger, "value": hex(value), "data": data, "gas": hex(2_000_000)}
        return str(self.node.rpc("eth_sendTransaction", call | ({"to": to} if to else {})))

    def pay_in(self, to: str, amount: int) -> str:
        """Tokens, from a stranger."""
        return self.send(self.token, data="0x" + transfer_data(to, amount).hex())

    def has(self, address: str) -> int:
        data = "0x70a08231" + address[2:].lower().rjust(64, "0")
        return int(self.node.rpc("eth_call", {"to": self.token, "data": data}, "latest"), 16)

    def when(self, condition: Callable[[], Any], *, mines: bool = True) -> Any:
        """Blocks, until something is true."""
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"it never came true: {self.serve.log()[-3_000:]}"
            time.sleep(BLOCK_S)  # between two looks at real processes
            if mines:
                self.node.mine()
        return found

    def dies_at(self, method: str) -> None:
        """Kill the server, with -9, when it asks a node this for the second time: of what the first said it has all."""
        asked: list[Call] = []

        def look(call: Call) -> None:
            if call["method"] == method:
                asked.append(call)
                if len(asked) == 2 and self.serve.process is not None:
                    self.serve.process.kill()

        self.relay.seen = look

    def looks(self, times: int) -> None:
        """Until the server has asked the nodes so often where the chain is."""
        asked: list[Call] = []
        self.relay.seen = lambda call: asked.append(call) if call["params"] == ["finalized", False] else None
        self.when(lambda: len(asked) >= 2 * times, mines=False)

    def lies(self, real: str, told: str) -> None:
        """From now on one node says of everything that went to one address that it went to another."""
        old, new = (address[2:].lower() for address in (real, told))
        self.relay.bends["south"] = lambda _call, result: json.loads(json.dumps(result).replace(old, new))

    # --- the server --------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        answer = self.serve.send("GET", path, who="anna", role="operator")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def put(self, *words: str, fields: list[str], approve: tuple[str, ...]) -> None:
        """A document: by one person, and another."""
        made = json.loads(self.serve.run("--json", *words, *(w for one in fields for w in ("--set", one)), *ANNA))
        self.serve.run(*approve, made["hash"], *BEN)

    def furnish(self) -> None:
        """All documents."""
        self.serve.run("migrate")
        self.serve.run("asset", "create", "ONE", "--precision", "18")
        self.serve.run("asset", "create", "USDT", "--precision", "6")
        furnish(self.serve, self.hot, FIRST | {"block_ms": 400})
        usdt = ["asset=USDT", "chain=one", "decimals=6", f"contract={self.token}"]
        self.put("chain", "asset-put", "usdt:one", fields=usdt, approve=("chain", "asset-approve", "usdt:one"))
        gas = ["chain=one", f"address={self.gas}", "role=gas_wallet"]
        self.put("wallet", "put", "gas-one", fields=gas, approve=("wallet", "approve", "gas-one"))
        policy = ["asset=USDT", "chain=one", 'maximum="100"', 'auto_approve_max="50"', "mandate=auto"]
        policy += ['dual_above="100"', "address_book=off", 'fee_flat="1"']
        words = ("withdrawal", "policy", "approve", "usdt:one")
        self.put("withdrawal", "policy", "put", "usdt:one", fields=policy, approve=words)

    def rules(self) -> None:
        """By two people, at the command line, who compare the first address with the signer's."""
        usdt = 'assets.USDT={"minimum": "1", "sweep_at": "50"}'
        coin = 'assets.ONE={"minimum": "0.01", "sweep_at": "0.3", "sweep_mandate": "sweep-coin"}'
        fields = ["wallets=dep-one", f"xpub={self.xpub['xpub']}", usdt, coin, "sweep_to=hot-one"]
        fields += ["sweep_mandate=sweep", "gas_from=gas-one", "gas_mandate=gas"]
        words = ("deposit", "rules", "approve", "one", "--address", self.xpub["evm"])
        self.put("deposit", "rules", "put", "one", fields=fields, approve=words)

    def address(self, user: int = ALICE) -> str:
        """A user's own, which the user asks for over HTTP until deposits are set up."""
        asked = {"chain": "one"}

        def issued() -> Any:
            answer = self.serve.send("POST", ADDRESSES, asked, who=str(user))
            assert answer.status_code in (200, 409, 422, 503), answer.text
            return answer.json() if answer.status_code == 200 else None

        address = str(self.when(issued)["address"])
        assert address == deposit_address("evm", ExtendedKey.parse(self.xpub["xpub"]), user)
        return address

    def deposits(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(DEPOSITS)["deposits"]
        return found

    def credited(self, hash_: str, *, mines: bool = True) -> dict[str, Any]:
        """The deposit of a transaction, once it is credited."""

        def is_credited() -> Any:
            return [one for one in self.deposits() if one["tx_hash"] == hash_ and one["status"] == "credited"]

        (found,) = self.when(is_credited, mines=mines)
        return dict(found)

    def funds(self, user: int = ALICE, asset: str = "USDT") -> str:
        words = ("--json", "ledger", "balance", f"user:{user}:funding", asset)
        (found,) = json.loads(self.serve.run(*words))
        return str(found["amount"])

    def again(self) -> None:
        """After it was killed."""
        assert self.serve.process is not None
        assert self.serve.process.wait(WAIT_S) == -signal.SIGKILL
        self.serve.start()

    def payouts(self) -> list[dict[str, Any]]:
        """Oldest first."""
        found: list[dict[str, Any]] = self.get("/api/v1/payouts")["payouts"]
        return found[::-1]

    def balanced(self, address: str) -> None:
        """All invariants hold, users' addresses among what is asked for: one that is robbed is named."""
        t, hash_ = self, self.pay_in(address, 5 * USDT)
        self.credited(hash_)
        found = self.audit()
        assert {"I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9"} <= found.keys()
        assert [one for one in found.values() if not (one["ok"] and one["judged"])] == []
        t.node.rpc("anvil_impersonateAccount", address)
        t.node.rpc("anvil_setBalance", address, hex(COIN))
        data = "0x" + transfer_data(SHOP, USDT).hex()
        t.node.rpc("eth_sendTransaction", {"from": address, "to": t.token, "data": data})
        t.node.mine(4)
        robbed = json.loads(command_of(self.serve, "--json", "audit", "--data", str(self.serve.folder)))
        (nine,) = (one for one in robbed if one["invariant"] == "I9")
        assert "dep-one-1002 has 4.000000 USDT" in str(nine["broken"])

    def audit(self) -> dict[str, dict[str, Any]]:
        """Every finding, by its invariant; the nodes are asked, too."""
        found = json.loads(self.serve.run("--json", "audit", "--data", str(self.serve.folder)))
        return {one["invariant"]: one for one in found}


@contextmanager
def town(folder: Path) -> Iterator[Town]:
    """Everything, with the server at work."""
    with throwaway_anvil(FIRST["id"]) as node, relayed(node.url) as relay:
        made = Town(folder, node, relay)
        made.furnish()
        made.rules()
        made.serve.start()
        try:
            yield made
        finally:
            made.serve.stop()


def test_money_that_a_stranger_sends_makes_the_whole_round_whatever_is_killed(tmp_path: Path) -> None:
    with town(tmp_path) as t:
        with t.here.running():
            alice, bob = t.address(ALICE), t.address(BOB)
            forwarder = t.deployed(FORWARDER)
            t.pay_in(forwarder, 60 * USDT)
            t.node.mine()
            # The tokens come from inside the call of a contract, and the server dies while it reads that block.
            t.dies_at("eth_getTransactionReceipt")
            inside = bytes(12) + bytes.fromhex(t.token[2:]) + transfer_data(alice, 60 * USDT)
            first = t.send(forwarder, data="0x" + inside.hex())
            t.node.mine()
            assert t.deposits() == [], "it is in a block, and not final"
            t.node.mine(2)
            t.again()
            assert t.credited(first, mines=False)["amount"] == "60.000000"
            # Gas is under way, and no block comes: the server dies, and the signer is started again.
            (gas,) = t.when(lambda: [one for one in t.payouts() if one["status"] == "confirming"], mines=False)
            assert (gas["asset"], gas["wallet"], gas["to"]) == ("ONE", "gas-one", alice)
            t.serve.kill()
        with t.here.running():
            log = tmp_path / "signer" / "data" / "log"
            signed = log.stat().st_size
            t.again()
            # The sweep is signed at this moment, and what came of it is not written down or just so.
            t.when(lambda: log.stat().st_size > signed)
            t.serve.kill()
            t.again()
            t.when(lambda: [one for one in t.get("/api/v1/sweeps")["sweeps"] if one["state"] == "swept"])
            assert (t.has(alice), t.has(t.hot)) == (0, 60 * USDT)
            assert [(one["wallet"], one["status"]) for one in t.payouts()] == [
                ("gas-one", "confirmed"),
                ("dep-one-1001", "confirmed"),
            ]
            # Coin, too, of which what is left of the gas is no part.
            t.credited(t.send(alice, value=COIN // 2))
            t.when(lambda: len([one for one in t.get("/api/v1/sweeps")["sweeps"] if one["state"] == "swept"]) == 2)
            assert int(t.node.rpc("eth_getBalance", alice, "latest"), 16) < COIN // 100
            assert (t.funds(), t.funds(asset="ONE")) == ("60.000000", "0.500000000000000000")
            assert sorted((one["status"], one["asset"]) for one in t.deposits()) == [
                ("credited", "ONE"),
                ("credited", "USDT"),
                ("ignored", "ONE"),
            ]
            # To another user's address nothing is withdrawn; to the world it is, by what was swept.
            asked = {"asset": "USDT", "chain": "one", "amount": "20"}
            refused = t.serve.send("POST", WITHDRAWALS, asked | {"to": bob, "client_withdrawal_id": "w-1"})
            assert (refused.status_code, refused.json()["code"]) == (422, "OWN_ADDRESS")
            paid = t.serve.send("POST", WITHDRAWALS, asked | {"to": SHOP, "client_withdrawal_id": "w-2"}).json()
            path = f"{WITHDRAWALS}/{paid['id']}"
            t.when(lambda: t.serve.send("GET", path).json()["status"] == "completed")
            assert (t.has(SHOP), t.has(t.hot), t.funds()) == (20 * USDT, 40 * USDT, "39.000000")
            too_high = t.serve.send("POST", ADDRESSES, {"chain": "one"}, who=str(2**62))
            assert (too_high.status_code, too_high.json()["code"]) == (400, "INVALID_NAME")
            t.balanced(bob)


def test_nothing_is_credited_before_it_is_final_nor_on_the_word_of_one_node(tmp_path: Path) -> None:
    with town(tmp_path) as t:
        alice = t.address(ALICE)
        # Its block is replaced before it is final.
        t.pay_in(alice, 7 * USDT)
        t.node.mine(2)
        assert t.has(alice) == 7 * USDT
        t.looks(3)
        assert t.deposits() == []
        t.node.rpc("anvil_reorg", 2, [])
        t.node.mine(4)
        assert t.has(alice) == 0
        first = t.pay_in(alice, 2 * USDT)
        assert [one["tx_hash"] for one in (t.credited(first), *t.deposits())] == [first, first]
        # One node says that what went to a shop went to the user; then, that what went to the user went to a shop.
        for real, told in ((SHOP, alice), (alice, SHOP)):
            before = t.deposits()
            t.lies(real, told)
            sent = [t.pay_in(real, 3 * USDT), t.send(real, value=COIN // 10)]
            t.node.mine(4)
            (scan,) = t.when(lambda: [one for one in t.get("/api/v1/deposit_scans") if one["error"]], mines=False)
            nothing, something = ("one-1", "one-2") if real == SHOP else ("one-2", "one-1")
            assert f"{nothing} says nothing" in scan["error"]
            assert f"{something} says 3000000 in {sent[0]}" in scan["error"]
            t.looks(3)
            assert t.deposits() == before, "nothing is credited on its word"
            t.relay.bends.clear()
            for hash_ in sent if real == alice else [t.pay_in(alice, 2 * USDT)]:
                t.credited(hash_)
        assert (t.funds(), t.funds(asset="ONE")) == ("7.000000", "0.100000000000000000")
        assert len(t.deposits()) == 4
        # An operator stops crediting: what arrives is seen, and waits.
        t.serve.run("flow", "pause", "--rail", "deposits one", *ANNA)
        late = t.pay_in(alice, USDT)
        (seen,) = t.when(lambda: [one for one in t.deposits() if one["tx_hash"] == late])
        t.looks(5)
        assert (seen["status"], t.funds()) == ("pending", "7.000000")
        t.serve.run("flow", "resume", "--rail", "deposits one", *ANNA)
        t.credited(late)
        assert t.funds() == "8.000000"
