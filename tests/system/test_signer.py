"""The signer as a real process: killed for real under load, started again, and still of the same opinion."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import signing
from tests.signing import KEYS, SECRET, payment, request, unsigned
from tests.unit.signer import test_deposits as deposits

from bursar.model.authorizations import Authorization
from bursar.ports import SystemPorts
from bursar.rails.derivation import ExtendedKey
from bursar.signer.client import SignerClient
from bursar.signer.keystore import Keystore
from bursar.signer.protocol import Never, Signature, SignerRefused, SignerUnavailable

ROOT = Path(__file__).parents[2]
# The command with the small codec of the tests in the place of a chain's.
PROGRAM = (
    "import sys; from bursar.signer import codecs; codecs.PLACES['evm'] = 'tests.signing:FakeCodec'; "
    "from bursar.cli import main; main()"
)
MANDATE = Authorization(mandate="swaps")
CALLERS = 8
KILLS = 4
OTHER_SECRET = b"another secret of thirty-two bytes or more"


class Running:
    """A signer in a folder."""

    def __init__(self, folder: Path, program: str = PROGRAM) -> None:
        self.folder = folder
        self.program = program
        self.data = folder / "data"
        self.address = f"unix:{folder}/s"
        self.process: subprocess.Popen[str] | None = None
        ports = SystemPorts()
        phrase = bytearray(b"correct horse battery")
        store = Keystore(f"{folder}/keys/keystore.json", {}, {})
        if program is PROGRAM:
            for name, key in KEYS.items():
                store.add(name, bytearray(key.hex().encode()), ())
        else:
            store.add("main", bytearray(deposits.WORDS), ())
        store.save(ports.files(), phrase, ports.token)
        self.write("phrase", phrase)
        self.write("payouts.secret", SECRET)
        self.write("viewer.secret", OTHER_SECRET)
        text = signing.POLICY
        for old in ("payment_max = 900", "hourly_max = 1_500", "daily_max = 2_000\n", "hourly_max = 8_000"):
            text = text.replace(old, f"{old.split(' = ', maxsplit=1)[0]} = 100_000_000\n")
        self.policy_text = text.replace("daily_max = 12_000", "daily_max = 100_000_000")
        self.write("policy.toml", self.policy_text.encode())

    def write(self, name: str, data: bytes | bytearray) -> None:
        path = self.folder / name
        path.write_bytes(data)
        path.chmod(0o600)

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-c", self.program, "--json", "signer", *words]

    def start(self, *, new: bool = False) -> None:
        files = ("--keystore", f"{self.folder}/keys/keystore.json", "--passphrase-file", f"{self.folder}/phrase")
        words = self.words("run", "--data", str(self.data), *files, "--policy", f"{self.folder}/policy.toml")
        words += ["--listen", self.address, *(["--new-log"] if new else [])]
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        assert json.loads(line)["signer"] == "hot"

    def stop(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        self.process = None
        return code

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*words), cwd=ROOT, capture_output=True, text=True, check=False)

    def client(self) -> SignerClient:
        return SignerClient(SystemPorts(), self.address, name="hot", caller="payouts", secret=SECRET, timeout_s=5.0)


@pytest.fixture
def signer(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    running.start(new=True)
    yield running
    if running.process is not None:
        running.stop(signal.SIGKILL)


def test_a_users_wallet_has_one_key_and_one_memory_through_kill_9(tmp_path: Path) -> None:
    """Given words, the real codecs and the command itself, then the sweep that was signed is the one, after kill -9."""
    running = Running(tmp_path, "from bursar.cli import main; main()")
    running.write("policy.toml", deposits.POLICY.encode())
    running.start(new=True)

    async def before() -> Signature | Never:
        async with running.client() as client:
            asked = deposits.sweep(1001, number=3)
            await client.preview(asked.payment, asked.authorization, asked.wallet)
            return await client.sign(asked)

    async def after() -> None:
        async with running.client() as client:
            assert await client.sign(deposits.sweep(1001, number=3)) == first
            for thief in (
                deposits.sweep(1001, payout="p2", number=3),  # the same nonce for another payout
                deposits.sweep(1001, deposits.THIEF, payout="p3", number=4),
                deposits.gas(deposits.THIEF, deposits.account(1001)),
            ):
                with pytest.raises(SignerRefused) as no:
                    await client.sign(thief)
                assert no.value.reason in ("NONCE_TAKEN", "DESTINATION")
            await client.sign(deposits.gas(deposits.own("bsc", 1001), deposits.account(1001)))

    try:
        first = asyncio.run(before())
        assert isinstance(first, Signature)
        running.stop(signal.SIGKILL)
        running.start()
        asyncio.run(after())
        files = ("--keystore", f"{tmp_path}/keys/keystore.json", "--passphrase-file", f"{tmp_path}/phrase")
        told = json.loads(running.command("xpub", "main", "--path", deposits.EVM_PATH, *files).stdout)
        assert ExtendedKey.parse(told["xpub"]) == deposits.EVM_KEY
        assert told["evm"] == deposits.own("bsc", 1)
    finally:
        running.stop(signal.SIGKILL)


def test_kill_9_under_load_changes_no_answer(signer: Running) -> None:
    """Given callers at work, when the process is killed again and again, then every answer that was given stands."""
    told: dict[str, Signature | Never] = {}

    async def caller(client: SignerClient, number: int, until: asyncio.Event) -> None:
        turn = 0
        while not until.is_set():
            payout = f"p{turn * CALLERS + number}"
            asked = request(payout, pays=payment(payout), by=MANDATE, data=unsigned(nonce=turn * CALLERS + number))
            try:
                told[payout] = await (client.cancel(payout, 0) if turn % 5 == 4 else client.sign(asked))
                turn += 1
            except SignerUnavailable:
                await asyncio.sleep(0.01)  # the same question again

    async def story() -> None:
        done = asyncio.Event()
        async with signer.client() as client:
            callers = [asyncio.create_task(caller(client, number, done)) for number in range(CALLERS)]
            for kill in range(KILLS):
                while len(told) < 150 * (kill + 1):  # noqa: ASYNC110 (the callers are not to know of it)
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(signer.stop, signal.SIGKILL)
                await asyncio.to_thread(signer.start)
            done.set()
            await asyncio.gather(*callers)
            assert len(told) >= 150 * KILLS
        async with signer.client() as fresh:
            for payout, answer in told.items():
                assert await fresh.cancel(payout, 0) == answer
            assert (await fresh.status()).sequence >= len(told)

    asyncio.run(story())
    assert signer.stop(signal.SIGTERM) == 0
    verified = json.loads(signer.command("verify", "--data", str(signer.data)).stdout)
    assert verified["sequence"] >= len(told)
    assert verified["incomplete_end"] == ""


def test_halt_and_unhalt_on_the_host(signer: Running) -> None:
    """Halted by the command, over a restart; lifted by two people; the local socket is for its owner alone."""
    data = str(signer.data)
    assert json.loads(signer.command("status", "--data", data).stdout)["halted"] == ""
    assert signer.command("halt", "--data", data, "--reason", "a drill").returncode == 0
    assert signer.stop(signal.SIGTERM) == 0
    signer.start()
    assert json.loads(signer.command("status", "--data", data).stdout)["halted"] == "a drill"
    one = signer.command("unhalt", "--data", data, "--by", "ann")
    assert one.returncode == 1
    assert "NOT_RELEASED" in one.stdout
    assert signer.command("unhalt", "--data", data, "--by", "ann", "--by", "ben").returncode == 0
    assert json.loads(signer.command("status", "--data", data).stdout)["halted"] == ""
    for name in ("log", "local.secret", "local.sock"):
        assert (signer.data / name).stat().st_mode & 0o077 == 0
    second = signer.command(
        "run", "--data", data, "--keystore", f"{signer.folder}/keys/keystore.json", "--passphrase-file",
        f"{signer.folder}/phrase", "--policy", f"{signer.folder}/policy.toml", "--listen", "unix:/tmp/x",
    )  # fmt: skip
    assert (second.returncode, json.loads(second.stdout)["code"]) == (4, "SIGNER_IN_USE")


def test_the_policy_is_read_again_at_sighup(signer: Running) -> None:
    """A wrong one is refused, named, and changes nothing; a right one holds from then on."""
    assert signer.process is not None
    assert signer.process.stderr is not None
    signer.write("policy.toml", signer.policy_text.replace("chain_id = 56", "chain_id = no").encode())
    os.kill(signer.process.pid, signal.SIGHUP)
    assert "the policy was not changed" in signer.process.stderr.readline()
    signer.write("policy.toml", signer.policy_text.encode())
    (signer.folder / "policy.toml").chmod(0o622)
    os.kill(signer.process.pid, signal.SIGHUP)
    assert "other users may change it" in signer.process.stderr.readline()
    stricter = signer.policy_text.replace("payment_max = 5_000\ndual", "payment_max = 400\ndual")
    signer.write("policy.toml", stricter.encode())
    os.kill(signer.process.pid, signal.SIGHUP)
    assert "was read again" in signer.process.stderr.readline()

    async def ask() -> str:
        async with signer.client() as client:
            try:
                await client.sign(request("p1", by=MANDATE))
            except Exception as error:
                return str(error)
        return ""

    assert "OVER_LIMIT" in asyncio.run(ask())
