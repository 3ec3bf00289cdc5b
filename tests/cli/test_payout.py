"""`bursar payout`, `wallet` and `chain` as people use them: documents, a payout from request to the end, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.api.office import ALICE, config_for, until
from tests.commands import Ran
from tests.evm_town import ASSETS, CHAIN, HOT, SHOP, TOKEN, USDT, Town, evm_town
from tests.unit.rails.desk import desk

from bursar import ExternalAccount, deposit
from bursar.cli.app import root
from bursar.config import Config
from bursar.instance import Bursar
from bursar.ports import SystemPorts
from bursar.runtime import Runtime, running
from bursar.signer import approvals
from bursar.signer.protocol import SignerUnavailable

ACCOUNT = f"user:{ALICE}:funding"
ANNA, BEN = (("--actor", name, "--reason", "ticket 17") for name in ("anna", "ben"))
REQUEST = ("payout", "request", ACCOUNT, "USDT", "5", "--chain", "sim", "--to", SHOP, "--source", "test:1")


class Counter:
    """The command on the settings of a process that pays out, and that process when it is wanted."""

    def __init__(self, config: Config, town: Town) -> None:
        self.config = config
        self.town = town

    def __call__(self, *words: str) -> Ran:
        result = CliRunner().invoke(root, list(words))
        assert "Traceback" not in result.output
        assert "127.0.0.1" not in result.output, "a node's URL"
        return Ran(result.exit_code, result.stdout, result.stderr)

    def ok(self, *words: str) -> str:
        ran = self(*words)
        assert ran.code == 0, ran.err + ran.out
        return ran.out

    def json(self, *words: str) -> Any:
        return json.loads(self.ok("--json", *words))

    def furnish(self, folder: Path) -> None:
        """Every document: proposed by one, approved by another."""
        chain, asset = folder / "sim.json", folder / "usdt.toml"
        chain.write_text(json.dumps(CHAIN))
        asset.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in ASSETS["usdt:sim"].items()))
        coin = [f"--set={name}={value}" for name, value in ASSETS["sim:sim"].items()]
        puts: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
            (("chain", "put", "sim", str(chain)), ("chain", "approve", "sim")),
            (("chain", "asset-put", "usdt:sim", str(asset)), ("chain", "asset-approve", "usdt:sim")),
            (("chain", "asset-put", "sim:sim", *coin), ("chain", "asset-approve", "sim:sim")),
            (("wallet", "put", "hot", "--set", "chain=sim", f"--set=address={HOT}"), ("wallet", "approve", "hot")),
        ]
        for put, approve in puts:
            made = self.json(*put, *ANNA)
            assert "version 1" in self.ok(*approve, made["hash"], *BEN)

    def drive(self, id_: str, status: str, flow: str = "payouts") -> None:
        """Run a worker until a payout, or a withdrawal, has a status."""

        async def there(runtime: Runtime) -> bool:
            paying = runtime.paying_out
            assert paying is not None
            view = paying.payouts.view if flow == "payouts" else paying.withdrawals.view
            found = await view(id_)
            return status in (found.status, found.state)

        self.run(there)

    def run(self, there: Callable[[Runtime], Awaitable[bool]]) -> None:
        """Run a worker, on a chain that goes on, until something is so."""

        async def work() -> None:
            async with desk(Path(self.config.data)), running(self.config, SystemPorts(), "test") as runtime:

                async def mined() -> bool:
                    self.town.mine()
                    return await there(runtime)

                await until(mined, 30)

        asyncio.run(work())


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    url = f"sqlite:///{tmp_path}/bursar.db"

    async def fund() -> None:
        async with Bursar(url) as bursar:
            await bursar.ledger.create_asset("USDT", 6)
            await bursar.ledger.create_asset("SIM", 18)
            await bursar.ledger.create_account("external:bank", policy=ExternalAccount())
            await bursar.ledger.create_account(ACCOUNT)
            await bursar.ledger.commit(deposit("external:bank", ACCOUNT, "USDT", "100", key="seed"))

    asyncio.run(fund())
    with evm_town(tmp_path) as town:
        config = config_for(url, tmp_path, **town.settings)
        names = ("database", "data", "core_spot", "core_spot_secret_file", "jwt_key_file")
        for name, value in ({f"BURSAR_{one.upper()}": getattr(config, one) for one in names} | town.environ).items():
            monkeypatch.setenv(name, value)
        yield Counter(config, town)


def test_from_documents_to_a_confirmed_payout(counter: Counter, tmp_path: Path) -> None:
    assert counter.ok("wallet", "list").strip() == "no wallets"
    counter.furnish(tmp_path)
    assert "2 of 2" in counter.ok("chain", "list")
    assert [node["name"] for node in counter.json("chain", "nodes")["sim"]["nodes"]] == ["sim-1", "sim-2"]
    quoted = counter.json("payout", "quote", "USDT", "5", "--chain", "sim", "--to", SHOP)
    assert (quoted["wallet"], quoted["native"]) == ("hot", "SIM")
    made = counter.json(*REQUEST, "--key", "k1", "--mandate", "auto", "--actor", "anna")
    assert made["status"] == "pending"
    assert counter.json(*REQUEST, "--key", "k1", "--mandate", "auto", "--actor", "anna")["id"] == made["id"]
    counter.drive(made["id"], "confirmed")
    assert counter.town.has(SHOP, TOKEN) == 5 * USDT
    shown = counter.json("payout", "show", made["id"])
    assert [one["outcome"] for one in shown["attempts"]] == ["final"]
    assert shown["tx_hash"] in counter.ok("payout", "show", made["id"])
    assert made["id"] in counter.ok("payout", "list", "--status", "confirmed")
    assert counter.ok("payout", "list", "--status", "failed").strip() == "no payouts"
    [wallet] = counter.json("wallet", "list")
    assert (wallet["balances"]["USDT"], wallet["unconfirmed"]) == ("9995.000000", 0)
    entries = counter.json("flow", "show", made["id"])["entries"]
    legs = [(leg["source"], leg["target"]) for entry in entries for leg in entry["movements"]]
    assert legs[0][0] == ACCOUNT
    assert ("expense:gas", "external:wallet:sim:hot") in legs


def test_approve_shows_what_is_paid_and_signs_with_the_approvers_key(counter: Counter, tmp_path: Path) -> None:
    counter.furnish(tmp_path)
    key, phrase = tmp_path / "ann.key", tmp_path / "ann.pass"
    phrase.write_text("correct horse battery staple")
    phrase.chmod(0o600)
    ports = SystemPorts()
    approvals.create_key(ports.files(), str(key), "ann", bytearray(phrase.read_bytes()), ports.token)
    made = counter.json(*REQUEST, "--key", "k1")
    approve = ("payout", "approve", made["id"], "--key", str(key), "--passphrase-file", str(phrase))
    other = counter(*approve, "--yes", "--digest", "0" * 64)
    assert (other.code, "nothing was signed" in other.err) == (4, True)
    assert "say --yes" in counter(*approve).err
    assert counter.json("payout", "show", made["id"])["approvals"] == []
    done = counter(*approve, "--yes", "--digest", made["digest"])
    assert done.code == 0, done.err
    for shown in ("5.000000 USDT", SHOP, "sim (chain id 77)", ACCOUNT, made["digest"]):
        assert shown in done.err
    assert "approved by ann" in done.out
    assert counter.json("payout", "show", made["id"])["approvals"] == ["ann"]


def test_operators_hold_release_and_cancel_what_is_pending(counter: Counter, tmp_path: Path) -> None:
    counter.furnish(tmp_path)
    id_ = counter.json(*REQUEST, "--key", "k1", "--mandate", "auto")["id"]
    assert "it is held" in counter.ok("payout", "hold", id_, *ANNA)
    assert counter.json("payout", "show", id_)["held"] == "ticket 17"
    counter.ok("payout", "release", id_, *ANNA)
    assert counter.json("payout", "show", id_)["held"] == ""
    counter.ok("payout", "cancel", id_, *ANNA)
    counter.drive(id_, "failed")
    assert "100.000000" in counter.ok("ledger", "balance", ACCOUNT)
    assert counter.town.has(SHOP, TOKEN) == 0
    late = counter("payout", "bump", id_, *ANNA)
    assert (late.code, late.err.startswith("error: INVALID_STATE: ")) == (1, True)


def test_a_wallet_is_paused_at_once_and_documents_need_two_people(counter: Counter, tmp_path: Path) -> None:
    counter.furnish(tmp_path)
    assert "is paused" in counter.ok("wallet", "pause", "hot", *ANNA)
    assert "paused by anna: ticket 17" in counter.ok("wallet", "list")
    quote = counter("payout", "quote", "USDT", "5", "--chain", "sim", "--to", SHOP)
    assert (quote.code, "NO_WALLET" in quote.err) == (1, True)
    assert "pays again" in counter.ok("wallet", "resume", "hot", *ANNA)
    made = counter.json("chain", "put", "sim", "--set", "fee_ceilings.low=7", "--set", "tips.low=1", *ANNA)
    assert (made["body"]["fee_ceilings"]["low"], made["body"]["chain_id"], made["base"]) == (7, 77, 1)
    alone = counter("chain", "approve", "sim", made["hash"], *ANNA)
    assert (alone.code, "SECOND_PERSON_NEEDED" in alone.err) == (1, True)
    assert made["hash"] in counter.ok("chain", "show", "sim")
    assert "version 2" in counter.ok("chain", "approve", "sim", made["hash"], *BEN)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*REQUEST[:4], "-5", *REQUEST[5:], "--key", "k"), 2, "No such option"),
        ((*REQUEST[:4], "0", *REQUEST[5:], "--key", "k"), 1, "INVALID_AMOUNT"),
        ((*REQUEST[:6], "nowhere", *REQUEST[7:], "--key", "k"), 1, "UNKNOWN_CHAIN"),
        ((*REQUEST[:8], "0x12", *REQUEST[9:], "--key", "k"), 1, "INVALID_ADDRESS"),
        (REQUEST, 2, "--key"),
        (("payout", "show", "po-1"), 1, "RECORD_NOT_FOUND"),
        (("payout", "list", "--status", "odd"), 2, "--status"),
        (("chain", "put", "sim", "--set", "chain_id=1", *ANNA), 1, "never change"),
        (("chain", "put", "sim", "--set", "colour=red", *ANNA), 1, "colour"),
        (("chain", "put", "sim", *ANNA), 2, "name a file"),
        (("chain", "approve", "sim", "xyz", *ANNA), 2, "not the hash"),
        (("chain", "nodes", "nowhere"), 2, "bursar chain list"),
        (("wallet", "pause", "cold", *ANNA), 1, "DOCUMENT_NOT_FOUND"),
    ],
)
def test_bad_input_is_refused_with_what_to_change(
    counter: Counter, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    counter.furnish(tmp_path)
    ran = counter(*words)
    assert (ran.code, said in ran.err) == (code, True), ran.err + ran.out
    assert counter.json("payout", "list") == []
    assert counter.json("chain", "show", "sim")["proposals"] == []


def test_without_a_signer_lists_work_and_a_request_says_what_is_missing(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter.furnish(tmp_path)
    for name in counter.town.environ:
        monkeypatch.delenv(name)
    assert "no nodes are configured here" in counter.ok("wallet", "list")
    assert counter.ok("payout", "list").strip() == "no payouts"
    ran = counter(*REQUEST, "--key", "k1")
    assert (ran.code, "CONFIG_REFUSED" in ran.err, "signer_name" in ran.err) == (1, True, True)


def test_another_signer_is_bound_by_a_person_and_payouts_are_paused(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is new has forgotten which nonces were used: it is not spoken to before (W33)."""
    counter.furnish(tmp_path)
    counter.drive(counter.json(*REQUEST, "--key", "k1", "--mandate", "auto")["id"], "confirmed")
    same = counter("payout", "signer-rebind", *ANNA)
    assert (same.code, "the one that is known" in same.err) == (1, True)
    (tmp_path / "new").mkdir()
    with evm_town(tmp_path / "new") as other:
        monkeypatch.setenv("BURSAR_SIGNER", other.settings["signer"])
        held = counter.json(*REQUEST[:-1], "test:2", "--key", "k2", "--mandate", "auto")["id"]

        async def refused() -> str:
            config = dataclasses.replace(counter.config, signer=other.settings["signer"])
            async with desk(tmp_path), running(config, SystemPorts(), "test") as runtime:
                assert runtime.payouts is not None
                with pytest.raises(SignerUnavailable) as why:
                    await runtime.payouts.out.signer.status()
                return str(why.value)

        assert "its log has the identity" in asyncio.run(refused())
        assert "payouts are paused until two people" in counter.ok("payout", "signer-rebind", *ANNA)
        [pause] = counter.json("flow", "pauses")
        assert (pause["kind"], pause["name"], pause["two_people"]) == ("flow", "payouts", True)
        assert "Another person must run" in counter.ok("flow", "resume", "payouts", *ANNA)
        assert counter.json("payout", "show", held)["status"] == "pending"
