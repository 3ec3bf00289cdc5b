"""The signer under the simulator: real service, server and client, a disk that loses writes and a network that breaks.

Callers ask for signatures, bumps, cancellations and tombstones, and ask again until they know. Two of them fight for
the same payouts and the same nonces, as a worker and a stolen worker would. An oracle keeps every answer that left:

- never two different signatures for one (payout, attempt), nor a signature after a tombstone, nor the other way round;
- never two payouts on one nonce of a wallet;
- never two slots of one payout in which it could be paid;
- no answer before its entry is on disk: after each restart the log has all that was answered, and its chain is intact.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest
from tests import signing
from tests.signing import HOT, SECRET, FakeCodec, FakeKeys, codecs, payment, request, unsigned

from bursar.model.authorizations import Authorization
from bursar.model.errors import BursarError
from bursar.rails.chain import Fee, Shape
from bursar.signer.client import FixedLink, Known, SignerClient
from bursar.signer.entries import Signed, Tombstone, for_callers
from bursar.signer.errors import SignerStopped
from bursar.signer.log import Log, check_next, read_frames
from bursar.signer.protocol import LogEntry, Never, Signature, SignerRefused, SignerUnavailable, SignRequest
from bursar.signer.server import Server
from bursar.signer.service import Service
from bursar.signer.state import State
from bursar.sim import CrashAt, CrashSwarm, Kernel, Moment, Process, Run, SimHost, SimNet, run
from bursar.sim.files import SimFiles

SEEDS = int(os.environ.get("BURSAR_SIGNER_SEEDS", "150"))
ADDRESS, LOCAL_ADDRESS = "unix:/run/signer.sock", "unix:/run/signer-local.sock"
FOLDER = "/signer"
PAYOUTS, NONCES, ATTEMPTS = 4, 5, 4
POLICY = signing.policy(
    signing.POLICY.replace("payment_max = 900", "payment_max = 900_000")
    .replace("hourly_max = 1_500", "hourly_max = 900_000")
    .replace("daily_max = 2_000\n", "daily_max = 900_000\n")
    .replace("hourly_max = 8_000", "hourly_max = 800_000")
    .replace("daily_max = 12_000", "daily_max = 900_000")
    .replace("cancels_daily = 3", "cancels_daily = 1_000")
)
MANDATE = Authorization(mandate="swaps")

T = TypeVar("T")


class Broken(AssertionError):
    """A promise of the signer is broken."""


@dataclass
class Oracle:
    """Everything that was ever answered."""

    answers: dict[tuple[str, int], Signature | Never] = field(default_factory=dict)
    nonces: dict[int, str] = field(default_factory=dict)  # of the one wallet
    pays: dict[str, int] = field(default_factory=dict)  # payout → the nonce in which it can be paid
    highest: int = 0

    def heard(self, payout: str, attempt: int, answer: Signature | Never) -> None:
        before = self.answers.setdefault((payout, attempt), answer)
        if before != answer:
            raise Broken(f"{payout} {attempt} was answered {before}, now {answer}")
        self.highest = max(self.highest, answer.sequence)
        if isinstance(answer, Signature):
            self.signature(payout, answer.raw)

    def signature(self, payout: str, raw: bytes) -> None:
        decoded, sender, _ = FakeCodec().read(raw)
        nonce = decoded.slot.nonce
        assert nonce is not None
        assert sender == HOT
        if self.nonces.setdefault(nonce, payout) != payout:
            raise Broken(f"nonce {nonce} was signed for {self.nonces[nonce]} and for {payout}")
        if decoded.amount and self.pays.setdefault(payout, nonce) != nonce:
            raise Broken(f"{payout} can be paid in {self.pays[payout]} and in {nonce}")

    def check_disk(self, files: SimFiles) -> None:
        """What was answered is on disk, in a log whose chain is intact."""
        state, found = State(), dict[tuple[str, int], LogEntry]()
        for offset, entries in read_frames(files, f"{FOLDER}/log"):
            if not isinstance(entries, list):
                break  # a torn end, of which nothing was answered: or it is missing below
            for hash_, data in entries:
                entry = check_next("log", offset, state, hash_, data)
                if isinstance(entry.what, Signed | Tombstone):
                    shown = for_callers(entry)
                    assert shown is not None
                    if (shown.payout, shown.attempt) in found:
                        raise Broken(f"{shown.payout} {shown.attempt} is in the log twice")
                    found[shown.payout, shown.attempt] = shown
                    if shown.raw:
                        self.signature(shown.payout, shown.raw)
        for key, answer in self.answers.items():
            entry_found = found.get(key)
            raw = answer.raw if isinstance(answer, Signature) else b""
            if entry_found is None or entry_found.raw != raw or entry_found.sequence != answer.sequence:
                raise Broken(f"{key} was answered {answer}, and the disk has {entry_found}")


@dataclass
class Scene:
    """One run: a signer that is restarted whenever it dies, and callers in a process of their own."""

    kernel: Kernel
    steps: int = 10
    callers: int = 2
    oracle: Oracle = field(default_factory=Oracle)
    stops: list[str] = field(default_factory=list)
    starts: int = 0
    torn: int = 0
    refused: int = 0
    broken: Exception | None = None  # found when the signer was started

    def __post_init__(self) -> None:
        self.net = SimNet(self.kernel)
        self.host = SimHost(self.net, f"{self.kernel.seed} disk")
        self.client_host = SimHost(self.net, f"{self.kernel.seed} client")

    def start_signer(self) -> None:
        process = self.kernel.start("signer", disk=self.host)
        process.spawn(self._serve(process), name="signer")

    async def _serve(self, process: Process) -> None:
        files = process.ports.files()
        new = "log" not in files.names(FOLDER)
        assert not new or not self.oracle.answers  # a log never goes away
        try:
            if not new:
                self.oracle.check_disk(self.host.files(process))
        except (Broken, BursarError) as error:
            self.broken = error
            return
        try:
            service = await Service.open(process.ports, FOLDER, POLICY, FakeKeys(), codecs, new=new)
            self.starts += 1
            self.torn += service.torn is not None
            secrets = {"payouts": SECRET, "viewer": SECRET + b"!"}
            server = Server(process.ports, service, secrets, local_secret=SECRET, log=lambda _: None)
            await server.run(ADDRESS, LOCAL_ADDRESS, lambda _: None)
        except SignerStopped as error:
            self.stops.append(str(error))
        except OSError as error:
            self.stops.append(str(error))
        self.kernel.loop.call_soon(process.crash, context=Context())

    def restart(self, dead: Process) -> None:
        if dead.name == "signer":
            delay = 0.01 + self.kernel.rng.random() * 0.05
            self.kernel.loop.call_later(delay, self.start_signer, context=Context())

    async def play(self) -> None:
        self.start_signer()
        process = self.kernel.start("callers", disk=self.client_host)
        await process.spawn(self._callers(process), name="callers")

    def client(self, process: Process, known: Known | None = None) -> SignerClient:
        link = FixedLink(known)
        return SignerClient(
            process.ports, ADDRESS, name="hot", caller="payouts", secret=SECRET, link=link, timeout_s=0.5
        )

    async def _callers(self, process: Process) -> None:
        async with self.client(process) as one, self.client(process) as other:
            async with asyncio.TaskGroup() as group:
                for number in range(self.callers):
                    client = (one, other)[number % 2]
                    group.create_task(self._caller(process, client, number), name=f"caller-{number}")
            self.kernel.calm()
            self.net.heal()
            self.host.state.cut_probability = 0.0
            await self._settle(process, one)

    async def _caller(self, process: Process, client: SignerClient, number: int) -> None:
        rng = random.Random(f"{self.kernel.seed} caller {number}")
        for _ in range(self.steps):
            await self._step(process, client, rng)
            if rng.random() < 0.3:
                await process.ports.sleep(rng.random() * 0.02)

    async def _step(self, process: Process, client: SignerClient, rng: random.Random) -> None:
        """One question, asked until it is answered or refused; both are what they will ever be, for an attempt."""
        payout, attempt = f"p{rng.randrange(PAYOUTS)}", rng.randrange(ATTEMPTS)
        asked = make_request(rng, payout, attempt)
        cancels = rng.random() < 0.25
        for _ in range(60):
            try:
                answer = await (client.cancel(payout, attempt) if cancels else client.sign(asked))
            except SignerUnavailable:
                await self._wait(process)
                continue
            except SignerRefused as no:
                self.refused += 1
                assert no.reason in EXPECTED, no
                return
            self.oracle.heard(payout, attempt, answer)
            if isinstance(answer, Signature) and not cancels and FakeCodec().read(answer.raw)[0] != decode(asked):
                raise Broken(f"{payout} {attempt}: other bytes than those asked for were signed")
            return

    async def _wait(self, process: Process) -> None:
        if self.broken is not None:
            raise self.broken
        await process.ports.sleep(0.02)

    async def _settle(self, process: Process, client: SignerClient) -> None:
        """Calm: everything can be asked again, and the log says the same."""
        for (payout, attempt), answer in sorted(self.oracle.answers.items()):
            assert await self._insist(process, partial(client.cancel, payout, attempt)) == answer
        at, found = 0, dict[tuple[str, int], Signature | Never]()
        while page := await self._insist(process, partial(client.log, at, 7)):
            for entry in page:
                assert entry.sequence > at
                at = entry.sequence
                found[entry.payout, entry.attempt] = (
                    Signature(raw=entry.raw, hash=entry.hash, sequence=at) if entry.raw else Never(sequence=at)
                )
        assert {key: found[key] for key in self.oracle.answers} == self.oracle.answers
        self.oracle.check_disk(self.host.files(self.kernel.processes["signer"]))

    async def _insist(self, process: Process, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except SignerUnavailable:
                await self._wait(process)


EXPECTED = {"OTHER_BYTES", "NONCE_TAKEN", "SECOND_SLOT", "NOTHING_TO_CANCEL"}


async def until_behind(process: Process, client: SignerClient) -> None:
    """Ask until the client has noticed; no question may be answered meanwhile."""
    while True:
        with pytest.raises(SignerUnavailable) as unanswered:
            await client.cancel("p2", 0)
        if "BEHIND" in str(unanswered.value):
            return
        await process.ports.sleep(0.1)


def decode(asked: SignRequest) -> object:
    return FakeCodec().decode(asked.unsigned)


def make_request(rng: random.Random, payout: str, attempt: int) -> SignRequest:
    """For a payout at some nonce, with some fee; payment or cancellation. Mostly its own nonce, often another's."""
    nonce = int(payout[1:]) if rng.random() < 0.5 else rng.randrange(NONCES)
    fee = Fee(gas_limit=21_000, price=rng.randint(10, 13))
    pays = payment(payout)
    if rng.random() < 0.3:
        data = signing.cancelling(nonce, fee)
        return request(payout, attempt, pays=pays, by=MANDATE, shape=Shape.CANCEL, data=data)
    return request(payout, attempt, pays=pays, by=MANDATE, data=unsigned(nonce=nonce, fee=fee))


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    swarm: CrashSwarm | None = None,
    cut_at: int | None = None,
    chaos: bool = False,
    steps: int = 10,
    failing_syncs: int = 0,
    free_bytes: int | None = None,
) -> Run[Scene]:
    """One run, with what is to go wrong in it."""
    scenes: list[Scene] = []

    async def main(kernel: Kernel) -> Scene:
        scene = Scene(kernel, steps=steps)
        scenes.append(scene)
        scene.host.state.cut_at = cut_at
        if chaos:
            scene.host.state.cut_probability = 0.02
            scene.net.cut_probability = 0.02
        if failing_syncs or free_bytes is not None:
            kernel.loop.call_later(0.02, break_disk, scene, failing_syncs, free_bytes)
        await scene.play()
        return scene

    return run(main, seed, crashes=crashes or (), swarm=swarm, on_crash=partial(restart, scenes))


def restart(scenes: list[Scene], dead: Process) -> None:
    scenes[0].restart(dead)


def break_disk(scene: Scene, failing_syncs: int, free_bytes: int | None) -> None:
    scene.host.state.failing_syncs = failing_syncs
    scene.host.state.free_bytes = free_bytes
    scene.kernel.loop.call_later(0.3, setattr, scene.host.state, "free_bytes", None)


def test_many_seeds_with_crashes_cuts_and_lost_writes() -> None:
    crashes = torn = answered = refused = 0
    for seed in range(SEEDS):
        swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({"signer"}))
        done = play(seed, swarm=swarm, chaos=True)
        crashes += len(done.crashes)
        torn += done.value.torn
        answered += len(done.value.oracle.answers)
        refused += done.value.refused
    assert crashes > 2 * SEEDS
    assert torn > SEEDS // 20
    assert answered > 5 * SEEDS
    assert refused > SEEDS


@pytest.mark.parametrize("moment", list(Moment))
def test_a_crash_at_every_port_call(moment: Moment) -> None:
    calls = died = 0
    for seed in range(5):
        everywhere = range(1, play(seed, steps=6).port_calls_by["signer"] + 1)
        calls += len(everywhere)
        for call in everywhere:
            died += len(play(seed, steps=6, crashes=[CrashAt("signer", call, moment)]).crashes)
    assert calls > 150
    assert died >= calls * 0.4  # the judge's own questions are among the calls, and nothing crashes any more by then


def test_a_power_cut_before_every_file_operation() -> None:
    operations = died = 0
    for seed in range(5):
        everywhere = range(1, play(seed, steps=6).value.host.state.operations + 1)
        operations += len(everywhere)
        for cut_at in everywhere:
            died += len(play(seed, steps=6, cut_at=cut_at).crashes)
    assert operations > 80
    assert died >= operations * 0.8


def test_a_sync_that_fails_ends_the_signer_without_an_answer() -> None:
    stopped = 0
    for seed in range(15):
        done = play(seed, failing_syncs=1)
        assert len(done.value.stops) <= 1
        stopped += len(done.value.stops)
    assert stopped >= 8


def test_a_full_disk_ends_the_signer_without_an_answer() -> None:
    stopped = 0
    for seed in range(15):
        stopped += bool(play(seed, free_bytes=100 + 150 * seed).value.stops)
    assert stopped >= 6


def test_the_same_seed_is_the_same_run() -> None:
    """Signatures are deterministic, so the whole run is."""
    swarm = CrashSwarm(probability=0.05, budget=5, processes=frozenset({"signer"}))
    here = play(3, swarm=swarm, chaos=True).trace_hash
    assert play(3, swarm=swarm, chaos=True).trace_hash == here
    assert play(4, swarm=swarm, chaos=True).trace_hash != here


def test_a_signer_on_an_old_disk_is_refused_and_refuses_all() -> None:
    """Given a log that was restored from a backup, then a caller that has seen more gets nothing, and from then on no
    caller does: neither a signature nor, worse, the word that something was never signed (W33)."""

    async def main(kernel: Kernel) -> None:
        scene = Scene(kernel)
        scene.start_signer()
        process = kernel.start("callers", disk=scene.client_host)

        async def sign(client: SignerClient, payout: str, nonce: int) -> Signature:
            asked = request(payout, pays=payment(payout), by=MANDATE, data=unsigned(nonce=nonce))
            answer = await scene._insist(process, partial(client.sign, asked))
            assert isinstance(answer, Signature)
            return answer

        async def story() -> None:
            async with scene.client(process) as client:
                await sign(client, "p1", 0)
                old = {path: bytes(inode.data) for path, inode in scene.host.state.names.items()}
                last = await sign(client, "p2", 1)
                identity = client.identity
                kernel.processes["signer"].crash()
                scene.host.state.names[f"{FOLDER}/log"].data[:] = old[f"{FOLDER}/log"]
                scene.start_signer()
                # The same client, which has seen more, hears nothing any more.
                await until_behind(process, client)
            # One that has seen less would believe it; it is not served either, also after a restart.
            for _ in range(2):
                async with scene.client(process, Known(identity=identity, seen=1)) as innocent:
                    await until_behind(process, innocent)
                kernel.processes["signer"].crash()
                scene.start_signer()
                await process.ports.sleep(1)
            # A caller that knows another log speaks to this one not at all.
            async with scene.client(process, Known(identity="f" * 32, seen=last.sequence)) as stranger:
                with pytest.raises(SignerUnavailable, match="identity"):
                    await stranger.status()

        await process.spawn(story(), name="story")

    for seed in range(5):
        run(main, seed)


def test_an_answer_before_its_fsync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signer that answers before the disk has it is found out: this simulation can fail."""

    async def at_once(self: Service) -> None:
        return None

    monkeypatch.setattr(Service, "_until_durable", at_once)
    with pytest.raises((Broken, ExceptionGroup)):
        for seed in range(40):
            swarm = CrashSwarm(probability=0.05, budget=6, processes=frozenset({"signer"}))
            play(seed, swarm=swarm, chaos=True)


def test_a_log_that_is_not_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Log, data: bytes, first: int) -> None:
        assert self._file is not None
        self._file.write(data)
        self._firsts.append(first)
        self._offsets.append(self._end)
        self._end += len(data)

    monkeypatch.setattr(Log, "append", careless)
    with pytest.raises((Broken, BursarError, ExceptionGroup)):
        for seed in range(40):
            swarm = CrashSwarm(probability=0.05, budget=6, processes=frozenset({"signer"}))
            play(seed, swarm=swarm, chaos=True)
