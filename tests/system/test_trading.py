"""The trading core as a real process: `kill -9` under load, SIGTERM, a full disk. Nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from bursar.model.outcome import Outcome
from bursar.ports import SystemPorts
from bursar.rails.trading import FixedLink, Known, Op, Operation, Reply, TradingClient, protocol
from bursar.rails.trading.connection import Target, connect

SECRET = b"sixteen bytes or more"
WAIT_S = 60.0


@dataclass
class CoreProcess:
    """A core, as `bursar core` runs it."""

    folder: Path
    process: subprocess.Popen[str]
    ready: dict[str, int]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def start(folder: Path, *options: str, limit: Callable[[], None] | None = None) -> CoreProcess:
    secret = folder / "secret"
    if not secret.exists():
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
    words = ["--data", f"{folder}/data", "--listen", f"unix:{folder}/s", "--secret-file", str(secret), "--name", "spot"]
    command = [sys.executable, "-c", "from bursar.cli import main; main()", "--json", "core", *words, *options]
    errors = (folder / "stderr").open("a")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=limit)  # noqa: PLW1509
    errors.close()
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listen" in line, line + (folder / "stderr").read_text()
    return CoreProcess(folder, process, json.loads(line))


@contextmanager
def core(folder: Path, *options: str, limit: Callable[[], None] | None = None) -> Iterator[CoreProcess]:
    started = start(folder, *options, limit=limit)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()
        assert started.process.stdout is not None
        started.process.stdout.close()


def client_of(folder: Path, seen: int = 0) -> TradingClient:
    link = FixedLink(Known(seen=seen))
    return TradingClient(SystemPorts(), f"unix:{folder}/s", name="spot", secret=SECRET, link=link, timeout_s=WAIT_S)


async def until_known(client: TradingClient, operation: Operation) -> Reply:
    while True:
        [reply] = await client.execute([operation])
        if reply.outcome.is_known:
            return reply
        assert reply.outcome in (Outcome.NETWORK_ERROR, Outcome.TIMEOUT), reply
        await asyncio.sleep(0.01)


@pytest.mark.timeout(300)
def test_kill_9_at_random_under_load_loses_nothing(tmp_path: Path) -> None:
    """Callers ask until they know; the core is killed again and again; every answer stays true, and sums agree."""
    rounds, callers = 6, 8
    told: dict[int, tuple[Operation, Reply]] = {}
    rng = random.Random(7)

    async def caller(client: TradingClient, number: int, stop: asyncio.Event) -> None:
        mine = random.Random(number)
        step = 0
        while not stop.is_set():
            step += 1
            op = mine.choice((Op.DEPOSIT, Op.DEPOSIT, Op.WITHDRAW))
            operation = Operation(op, number * 10**6 + step, mine.randint(1, 5), "USDT", mine.randint(1, 9))
            told[int(operation.req_id)] = (operation, await until_known(client, operation))

    async def work() -> None:
        stop = asyncio.Event()
        process = start(tmp_path, "--snapshot-mib", "1")
        client = client_of(tmp_path)
        client.start()
        tasks = [asyncio.create_task(caller(client, number, stop)) for number in range(1, callers + 1)]
        for _ in range(rounds):
            enough = len(told) + rng.randint(100, 400)
            while len(told) < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.kill()
            assert process.process.stdout is not None
            process.process.stdout.close()
            process = await asyncio.to_thread(start, tmp_path, "--snapshot-mib", "1")
        stop.set()
        await asyncio.gather(*tasks)
        found = await client.lookup([(id_, operation.op) for id_, (operation, _) in told.items()])
        assert found.replies == [reply for _, reply in told.values()]
        balances: dict[int, int] = {}
        for operation, reply in told.values():
            if reply.outcome is Outcome.SUCCESS:
                sign = 1 if operation.op is Op.DEPOSIT else -1
                balances[operation.user_id] = balances.get(operation.user_id, 0) + sign * operation.amount
        for user, amount in balances.items():
            assert (await client.balances(user)).balances["USDT"].available == amount
        await client.close()
        assert process.stop() == 0
        assert process.process.stdout is not None
        process.process.stdout.close()

    asyncio.run(work())
    assert len(told) > rounds * 100


def test_sigterm_answers_snapshots_and_exits_with_0(tmp_path: Path) -> None:
    async def ask() -> list[Reply]:
        async with client_of(tmp_path) as client:
            await client.deposit("sr-1", 1, "USDT", 1)
            calls = [asyncio.create_task(client.deposit(10 + n, 1, "USDT", 1)) for n in range(500)]
            await asyncio.sleep(0)
            first.process.send_signal(signal.SIGTERM)
            return list(await asyncio.gather(*calls))

    with core(tmp_path) as first:
        replies = asyncio.run(ask())
        assert first.process.wait(WAIT_S) == 0
    assert {reply.outcome for reply in replies} <= {Outcome.SUCCESS, Outcome.NETWORK_ERROR, Outcome.UNKNOWN}
    done = sum(reply.outcome is Outcome.SUCCESS for reply in replies)
    assert len(list((tmp_path / "data").glob("snap-*"))) == 1
    with core(tmp_path) as second:
        assert second.ready["sequence"] >= 1 + done
        assert second.stop() == 0


def test_a_second_core_on_the_same_folder_does_not_start(tmp_path: Path) -> None:
    with core(tmp_path), pytest.raises(AssertionError, match="CORE_IN_USE"):
        start(tmp_path)


def test_a_full_disk_ends_the_process_with_a_message_and_no_answer(tmp_path: Path) -> None:
    """Disk full, by a limit on the size of files: exit code 4, nothing acknowledged is lost, and it goes on later."""

    async def fill() -> int:
        done = 0
        async with client_of(tmp_path) as client:
            for n in range(1, 10_000):
                reply = await client.deposit(n, 1, "USDT", 1)
                if reply.outcome is not Outcome.SUCCESS:
                    assert not reply.outcome.is_known
                    return done
                done += 1
        raise AssertionError("the disk was never full")

    with core(tmp_path, limit=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, 20_000))) as full:
        done = asyncio.run(fill())
        assert full.process.wait(WAIT_S) == 4
        assert full.process.stdout is not None
        assert "CORE_STOPPED" in full.process.stdout.read()
    assert done > 50
    with core(tmp_path) as again:
        assert again.ready["sequence"] in (done, done + 1)
        assert "cut a torn end" in (tmp_path / "stderr").read_text()


def test_a_core_restored_from_an_old_disk_refuses_to_serve(tmp_path: Path) -> None:
    """T33, with real files: the folder of yesterday, put back."""

    async def ask(id_: int, seen: int = 0) -> tuple[Reply, int]:
        async with client_of(tmp_path, seen) as client:
            return await client.deposit(id_, 1, "USDT", 1), client.sequence

    with core(tmp_path):
        asyncio.run(ask(1))
    old = {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with core(tmp_path):
        reply, seen = asyncio.run(ask(2))
        assert (reply.outcome, seen) == (Outcome.SUCCESS, 2)
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    for path, content in old.items():
        path.write_bytes(content)
    with core(tmp_path):
        reply, _ = asyncio.run(ask(3, seen))
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_BEHIND")
        reply, _ = asyncio.run(ask(3))
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_BEHIND")


def test_the_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    with core(tmp_path):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert os.access(tmp_path / "data", os.W_OK)


def test_a_running_core_says_who_it_is(tmp_path: Path) -> None:
    async def ask() -> None:
        async with client_of(tmp_path) as client:
            assert (await client.deposit(41, 1, "USDT", 1)).outcome is Outcome.SUCCESS

    def describe(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from bursar.cli import main; main()", "--json", "core", "describe", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    words = ["--at", f"unix:{tmp_path}/s", "--secret-file", f"{tmp_path}/secret", "--name", "spot"]
    with core(tmp_path):
        asyncio.run(ask())
        said = json.loads(describe(*words).stdout)
        assert (len(said["core"]), said["ledger"], said["sequence"]) == (32, "", 1)
        assert (said["highest_id"], said["remembered"], said["accounts"]) == (41, 1, 1)
        assert said["floors"] == {"room": 1, "forget": 1}
        wrong = describe(*words[:-1], "margin")
        assert (wrong.returncode, "this is the core 'spot'" in wrong.stdout + wrong.stderr) == (4, True)


def silent(folder: Path, count: int) -> list[socket.socket]:
    """Connections that never say anything."""
    made = []
    for _ in range(count):
        each = socket.socket(socket.AF_UNIX)
        each.connect(f"{folder}/s")
        made.append(each)
    return made


def test_silent_connections_keep_nobody_out_and_fill_no_log(tmp_path: Path) -> None:
    """More of them than the core may have open files: clients get in, money moves, and the log has a line or two."""

    async def ask(client: TradingClient, id_: int) -> Reply:
        return await until_known(client, Operation(Op.DEPOSIT, id_, 1, "USDT", 1))

    async def work() -> None:
        async with client_of(tmp_path) as before:
            assert (await ask(before, 1)).outcome is Outcome.SUCCESS
            strangers = await asyncio.to_thread(silent, tmp_path, 300)
            async with client_of(tmp_path) as new:
                for id_ in range(2, 400):
                    assert (await ask(new if id_ % 2 else before, id_)).outcome is Outcome.SUCCESS
            for each in strangers:
                each.close()

    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (80, 80))
    with core(tmp_path, limit=few) as served:
        asyncio.run(work())
        assert served.stop() == 0
    errors = (tmp_path / "stderr").read_text()
    assert "36 clients fit into the limit of open files" in errors
    assert len(errors.splitlines()) < 10, errors


def test_a_client_that_asks_and_never_reads_is_bounded_in_a_real_process(tmp_path: Path) -> None:
    """Answers count: more than 800 MiB of them are asked for in 3 MiB, and the core stays small."""
    users, assets, questions = 1_024, 60, 1_000

    def resident(pid: int) -> int:
        [line] = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
        return int(line.split()[1]) // 1024

    async def work(pid: int) -> None:
        async with client_of(tmp_path) as client:
            for asset in range(assets):
                many = [Operation(Op.DEPOSIT, 10**6 * (asset + 1) + n, n, f"ASSET{asset}", 2**40) for n in range(users)]
                assert {reply.outcome for reply in await client.execute(many)} == {Outcome.SUCCESS}
            before = resident(pid)
            target = Target(f"unix:{tmp_path}/s", "spot", SECRET)
            greedy = await connect(SystemPorts(), target, FixedLink(), Known(), WAIT_S)
            question = protocol.frame(protocol.Balances(1, list(range(users))))
            greedy.stream.write(question * questions)
            for id_ in range(50, 150):  # long enough for it to read what it will ever read
                assert (await client.withdraw(id_, 1, "ASSET1", 1)).outcome is Outcome.SUCCESS
            grown = resident(pid) - before
            assert grown < 64, f"{grown} MiB for {len(question) * questions / 2**20:.0f} MiB of questions"
            greedy.stream.abort()
            assert (await client.totals()).outcome is Outcome.SUCCESS

    with core(tmp_path) as served:
        asyncio.run(work(served.process.pid))
