"""The simulator's kernel: virtual time, seeded order, crashes that are power cuts, and ends without noise."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from bursar import sim
from bursar.ports import Ports
from bursar.sim import CrashAt, Kernel, Moment, run
from bursar.sim.sharing import SharedPorts


async def _raise(error: BaseException, *, after: float = 0) -> None:
    await asyncio.sleep(after)
    raise error


async def _outcome(awaitable: Awaitable[Any]) -> str:
    try:
        return f"got {await awaitable}"
    except BaseException as error:
        return type(error).__name__


def test_time_jumps_to_the_next_timer() -> None:
    async def main(kernel: Kernel) -> float:
        async with asyncio.timeout(1_000_000):
            await asyncio.sleep(86_400)
        return kernel.loop.time()

    assert run(main, 1).value == 86_400.0


def test_chance_orders_what_is_ready_unless_it_is_turned_off() -> None:
    async def main(kernel: Kernel) -> str:
        order: list[str] = []
        for soon, later in ("ae", "bf", "cg", "dh"):
            kernel.loop.call_later(1, order.append, later)
            kernel.loop.call_soon(order.append, soon)
        await asyncio.sleep(2)
        return "".join(order)

    orders = {run(main, seed).value for seed in range(600)}
    assert (len({order[:4] for order in orders}), len({order[4:] for order in orders})) == (24, 24)
    assert run(main, 1, shuffle=False).value == "abcdefgh"


def test_asyncio_works_as_written() -> None:
    async def main(kernel: Kernel) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        lock, event, got = asyncio.Lock(), asyncio.Event(), list[int]()

        async def produce() -> None:
            for number in range(20):
                await queue.put(number)
            await queue.join()

        async def consume() -> None:
            while True:
                got.append(await queue.get())
                async with lock:
                    await asyncio.sleep(0.1)
                queue.task_done()

        async def dropped() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await asyncio.sleep(1)
                event.set()

        consumers = [asyncio.create_task(consume()) for _ in range(3)]
        await asyncio.wait_for(produce(), timeout=60)
        assert sorted(got) == list(range(20))
        assert all(consumer.cancel() for consumer in consumers)
        assert [await _outcome(consumer) for consumer in consumers] == ["CancelledError"] * 3
        assert list(await asyncio.gather(asyncio.sleep(2, "b"), asyncio.sleep(1, "a"))) == ["b", "a"]
        kept = asyncio.create_task(asyncio.sleep(5, "kept"))
        assert [await _outcome(asyncio.wait_for(asyncio.shield(kept), 1)), await kept] == ["TimeoutError", "kept"]
        two = [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (1, 9)]
        assert await asyncio.wait(two, timeout=2) == ({two[0]}, {two[1]})
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(_raise(ValueError("boom"), after=1))
                group.create_task(asyncio.sleep(100))

        async for _ in dropped():
            break
        await event.wait()

    for seed in range(50):
        run(main, seed)


def test_a_deadlock_says_when_who_waits_and_what_else_went_wrong() -> None:
    async def forever(kernel: Kernel) -> None:
        kernel.loop.call_later(50, lambda: None).cancel()
        crashed = kernel.start("crashed")
        crashed.spawn(crashed.ports.sleep(50))
        kernel.start("setter").spawn(_raise(ValueError("the one that should have set it")))
        await asyncio.sleep(1)
        crashed.crash()
        await asyncio.Event().wait()

    # At 1 second: neither a cancelled timer nor one of a dead process moves the clock.
    with pytest.raises(sim.SimDeadlock, match=r"(?s)at 1.0+ s\n1 tasks .*main of the scenario: .*locks.py") as caught:
        run(forever, 7)
    assert all(text in note for text, note in zip(("should have", "seed 7"), caught.value.__notes__, strict=True))


def test_a_livelock_ends() -> None:
    with pytest.raises(sim.SimLivelock, match="over 10 callbacks"):
        run(_three_effects, 1, max_callbacks=10)


def test_errors_nobody_handles_fail_the_run() -> None:
    async def main(kernel: Kernel) -> None:
        kernel.loop.create_task(_raise(ValueError("of a task")))
        kernel.start("worker").spawn(_raise(ValueError("of a process")))
        kernel.loop.call_soon(lambda: 1 // 0)
        kernel.loop.create_future().set_exception(ValueError("of a future"))
        assert await _outcome(kernel.loop.create_task(_raise(KeyError("handled")))) == "KeyError"
        await asyncio.sleep(1)

    with pytest.raises(sim.SimFailure) as caught:
        run(main, 1)
    messages = {str(error) for error in caught.value.exceptions}
    assert messages == {"integer division or modulo by zero", "of a future", "of a process", "of a task"}


def test_errors_of_tasks_of_crashed_processes_are_not_failures_but_are_told() -> None:
    async def main(kernel: Kernel) -> None:
        worker = kernel.start("worker")
        worker.spawn(_raise(ValueError("before the crash")))
        worker.spawn(_raise(ValueError("never raised"), after=10))
        await asyncio.sleep(1)
        worker.crash()

    assert [str(error) for error in run(main, 1).lost_errors] == ["before the crash"]


def test_a_crash_runs_no_finally_and_resumes_nothing_while_others_who_wait_for_the_same_go_on() -> None:
    async def main(kernel: Kernel) -> list[str]:
        shared, log = kernel.loop.create_future(), list[str]()

        async def victim(wait: Callable[[], Awaitable[object]]) -> None:
            try:
                log.append("alive")
                async with asyncio.TaskGroup() as group:
                    group.create_task(_outcome(wait())).add_done_callback(lambda _: log.append("callback"))
            except BaseException as error:
                log.append(f"except {error!r}")
            finally:
                log.append("finally")

        worker, other = kernel.start("worker"), kernel.start("other")
        lane = worker.ports.lane("l")
        waits = (lambda: shared, partial(worker.ports.sleep, 1), partial(asyncio.sleep, 1), partial(lane.run, int))
        tasks = [worker.spawn(victim(wait)) for wait in waits]
        other.spawn(victim(lambda: shared))
        await asyncio.sleep(0.00001)
        worker.crash()
        tasks[0].cancel()
        other.spawn(_outcome(asyncio.sleep(5))).add_done_callback(shared.set_result)
        gc.collect()
        await asyncio.sleep(100)
        return sorted(log)

    for seed in range(20):
        assert run(main, seed).value == ["alive"] * 5 + ["callback", "finally"]


def test_what_still_runs_at_the_end_is_closed_with_its_ports_fenced() -> None:
    log: list[str] = []

    async def last_words(ports: Ports) -> None:
        try:
            await ports.sleep(1_000)
        finally:
            log.append(await _outcome(ports.sleep(1)))

    async def main(kernel: Kernel) -> None:
        worker = kernel.start("worker")
        worker.spawn(last_words(worker.ports))
        await asyncio.sleep(1)

    run(main, 1)
    assert log == ["Fenced"]


async def _three_effects(kernel: Kernel) -> tuple[list[str], list[str]]:
    """What happened, and what the worker heard of."""
    effects, replies = list[str](), list[str]()

    async def work(ports: Ports) -> None:
        lane = ports.lane("disk")
        for number in "123":
            await lane.run(partial(effects.append, number))
            replies.append(number)
        await ports.sleep(1)

    worker = kernel.start("worker")
    worker.spawn(work(worker.ports))
    await asyncio.sleep(60)
    return effects, replies


@pytest.mark.parametrize(("moment", "effects"), [(Moment.BEFORE, ["1", "2"]), (Moment.AFTER, ["1", "2", "3"])])
def test_a_planned_crash_is_before_the_effect_or_after_it(moment: Moment, effects: list[str]) -> None:
    for seed in range(20):
        report = run(_three_effects, seed, crashes=[CrashAt("worker", 3, moment)], verbose=True)
        assert report.value == (effects, ["1", "2"])
        assert [(c.process, c.incarnation, c.call, c.moment) for c in report.crashes] == [("worker", 1, 3, moment)]
        assert report.lines[-1].endswith(f"worker.1 disk list.append crash {moment.value}")


@pytest.mark.parametrize("moment", list(Moment))
def test_a_sleep_has_no_effect_to_die_after_so_it_dies_before(moment: Moment) -> None:
    report = run(_three_effects, 1, crashes=[CrashAt("worker", 4, moment)])
    assert [(crash.where, crash.moment) for crash in report.crashes] == [("sleep", Moment.BEFORE)]


def test_the_run_up_to_a_planned_crash_is_the_run_without_it() -> None:
    whole = run(_three_effects, 5, verbose=True)
    cut = run(_three_effects, 5, verbose=True, crashes=[CrashAt("worker", 3, Moment.BEFORE)])
    assert whole.port_calls_by == {"worker": 4}
    assert cut.lines[:-1] == whole.lines[: len(cut.lines) - 1]


def test_a_lane_keeps_its_order_delivers_errors_and_works_on_for_a_cancelled_caller() -> None:
    async def main(kernel: Kernel) -> tuple[list[int], list[int]]:
        lane, begun, done = kernel.start("worker").ports.lane("disk"), list[int](), list[int]()

        async def call(number: int) -> None:
            begun.append(number)
            await lane.run(partial(done.append, number))

        calls = [kernel.loop.create_task(call(number)) for number in range(30)]
        assert await _outcome(lane.run(lambda: 1 // 0)) == "ZeroDivisionError"
        for task in calls[:10]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await lane.run(int)
        return begun, done

    for seed in range(50):
        begun, done = run(main, seed).value
        assert (begun, len(done) >= 20) == (done, True)


def test_dead_code_is_fenced_and_the_clock_stays_wrong() -> None:
    async def main(kernel: Kernel) -> None:
        old = kernel.start("worker")
        lane = old.ports.lane("disk")
        with pytest.raises(RuntimeError, match="still alive"):
            kernel.start("worker")
        with pytest.raises(RuntimeError, match="cannot crash itself"):
            await lane.run(old.crash)
        old.clock_offset_us -= (before_us := old.ports.now_us())
        old.crash()
        assert (before_us > 0, kernel.start("worker").ports.now_us()) == (True, 0)
        open_database: Callable[[], object] = partial(old.ports.sqlite, "db", read_only=True)
        for door in (old.ports.now_us, old.ports.monotonic, old.ports.random, old.ports.token, open_database):
            with pytest.raises(sim.Fenced):
                door()
        assert [await _outcome(old.ports.sleep(1)), await _outcome(lane.run(int))] == ["Fenced", "Fenced"]

    run(main, 1)


def test_a_disk_keeps_what_was_committed_and_starts_from_an_image() -> None:
    first, disk = sim.SimDisk(), sim.SimDisk()
    first.open("db").executescript("CREATE TABLE t (n); INSERT INTO t VALUES (1)")
    image = first.image("db")
    disk.install("db", image[:18] + b"\x02\x02" + image[20:])  # as the file of a database in WAL mode begins

    async def main(kernel: Kernel) -> list[tuple[int]]:
        old = kernel.start("worker", disk=disk)
        database = old.ports.sqlite("db", read_only=False)
        for statement in ("INSERT INTO t VALUES (2)", "BEGIN", "INSERT INTO t VALUES (3)"):
            await old.ports.lane("l").run(partial(database.execute, statement))
        database.close()
        old.crash()
        return list(kernel.start("worker").ports.sqlite("db", read_only=True).execute("SELECT n FROM t"))

    assert run(main, 1).value == [(1,), (2,)]


def test_two_processes_share_a_disk_but_no_transaction() -> None:
    """Given a transaction of one, then the other is kept out; when the one crashes, then it never was."""
    disk = sim.SimDisk()
    disk.open("db").executescript("CREATE TABLE t (n); INSERT INTO t VALUES (1)")

    async def main(kernel: Kernel) -> list[tuple[int]]:
        one, other = kernel.start("one", disk=disk), kernel.start("other", disk=disk)
        mine, theirs = (p.ports.sqlite("db", read_only=False) for p in (one, other))
        assert mine is not theirs
        mine.execute("BEGIN IMMEDIATE")
        mine.execute("INSERT INTO t VALUES (2)")
        assert (one.disk.held(), other.disk.held()) == (False, True)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            theirs.execute("INSERT INTO t VALUES (3)")
        one.crash()
        assert not other.disk.held()
        theirs.execute("INSERT INTO t VALUES (4)")
        return list(kernel.start("one").ports.sqlite("db", read_only=True).execute("SELECT n FROM t"))

    assert run(main, 1).value == [(1,), (4,)]


def test_a_shared_lane_waits_for_the_transaction_of_another() -> None:
    """Given a transaction of one, when the other writes, then it does so after the transaction is over, in order."""
    disk = sim.SimDisk()
    disk.open("db").executescript("CREATE TABLE t (n)")

    async def main(kernel: Kernel) -> list[tuple[int]]:
        one, other = kernel.start("one", disk=disk), kernel.start("other", disk=disk)
        mine, theirs = (p.ports.sqlite("db", read_only=False) for p in (one, other))
        lane = SharedPorts(other).lane("write")
        mine.execute("BEGIN IMMEDIATE")
        writes = [lane.run(partial(theirs.execute, f"INSERT INTO t VALUES ({n})")) for n in (2, 3)]
        waiting = asyncio.gather(*writes)
        await asyncio.sleep(1)
        assert not waiting.done()
        mine.execute("INSERT INTO t VALUES (1)")
        mine.execute("COMMIT")
        await waiting
        return list(mine.execute("SELECT n FROM t ORDER BY rowid"))

    assert run(main, 1).value == [(1,), (2,), (3,)]


def test_a_paused_process_does_nothing_and_then_all_of_it() -> None:
    """Given a process that counts, when it is paused, then it stands still, and goes on afterwards; unless it died."""

    async def count_up(ports: Ports, counted: list[float]) -> None:
        while True:
            await ports.sleep(1)
            counted.append(ports.monotonic())

    async def main(kernel: Kernel) -> tuple[list[float], list[float]]:
        slow, dead = list[float](), list[float]()
        for name, counted in (("slow", slow), ("dead", dead)):
            process = kernel.start(name)
            process.spawn(count_up(process.ports, counted))
        await asyncio.sleep(2.5)
        for process in kernel.processes.values():
            kernel.pause(process, 5)
        await asyncio.sleep(1)
        kernel.processes["dead"].crash()
        await asyncio.sleep(5.5)
        return slow, dead

    assert run(main, 1).value == ([1, 2, 7.5, 8.5], [1, 2])


def _swarm(seed: int) -> sim.Run[int]:
    """A counter in SQLite, raised to 20 by a worker that crashes up to 5 times, is restarted, and dies untidily."""
    disk = sim.SimDisk()
    disk.open("db").executescript("CREATE TABLE counter (n INTEGER); INSERT INTO counter VALUES (0)")

    def boot(kernel: Kernel) -> None:
        worker = kernel.start("worker", disk=disk)
        worker.spawn(count_up(worker.ports))
        worker.spawn(_untidy(worker.ports))

    async def count_up(ports: Ports) -> None:
        lane, database = ports.lane("db"), ports.sqlite("db", read_only=False)
        while True:
            for statement in ("BEGIN", "UPDATE counter SET n = n + 1", "COMMIT"):
                await lane.run(partial(database.execute, statement))
            await ports.sleep(ports.random())

    async def main(kernel: Kernel) -> int:
        kernel.on_crash = lambda _: kernel.loop.call_later(1, boot, kernel)
        boot(kernel)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(200):  # cancelled in the order in which TaskGroup iterates over its set
                    kernel.loop.create_task(asyncio.sleep(0 if number % 16 else 10_000))
                    group.create_task(asyncio.sleep(1)).add_done_callback(lambda t: kernel.trace.note(t.get_name()))
                group.create_task(_raise(ValueError("boom"), after=0.5))
        while (n := disk.open("db").execute("SELECT n FROM counter").fetchone()[0]) < 20:
            kernel.trace.note(f"{n} so far; {[task.get_name() for task in asyncio.all_tasks()]}")
            await asyncio.sleep(1)
        return int(n)

    return run(main, seed, swarm=sim.CrashSwarm(probability=0.05, budget=5))


async def _untidy(ports: Ports) -> None:
    """Leaves behind all that Python complains about when it is destroyed."""

    def plain() -> Iterator[int]:
        try:
            yield 1
        finally:
            ports.now_us()

    async def asynchronous() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await _outcome(asyncio.sleep(0))
            await ports.sleep(1)

    lock, failed = asyncio.Lock(), asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("nobody looks"))
    held = (plain(), asynchronous(), ports.sleep(1), asyncio.create_task(ports.sleep(10_000)))
    assert (next(held[0]), await anext(held[1])) == (1, 1)
    try:
        async with lock, asyncio.TaskGroup() as group, contextlib.aclosing(asynchronous()) as closing:
            group.create_task(_outcome(asyncio.shield(asyncio.wait_for(lock.acquire(), 10_000))))
            async for _ in closing:
                await ports.sleep(10_000)
    finally:
        await asyncio.sleep(0)
        await ports.lane("l").run(int)


def test_swarms_crash_within_their_budget_roll_back_and_heal() -> None:
    reports = [_swarm(seed) for seed in range(100)]
    assert all(report.value >= 20 for report in reports)
    assert max(len(report.crashes) for report in reports) == 5
    assert {crash.moment for report in reports for crash in report.crashes} == {Moment.BEFORE, Moment.AFTER}


def test_a_seed_is_the_same_run_under_any_hash_seed_and_ends_without_a_word() -> None:
    here = [_swarm(seed).trace_hash for seed in range(5)]
    program = f"import runpy; print([runpy.run_path({__file__!r})['_swarm'](seed).trace_hash for seed in range(5)])"
    assert (len(set(here)), here) == (5, [_swarm(seed).trace_hash for seed in range(5)])
    for hash_seed in ("1", "2"):
        command = ["env", f"PYTHONHASHSEED={hash_seed}", sys.executable, "-W", "always", "-c", program]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (child.stdout.strip(), child.stderr) == (str(here), "")


def test_code_that_cannot_be_stopped_is_a_failure() -> None:
    async def stubborn(ports: Ports) -> None:
        while True:
            with contextlib.suppress(BaseException):
                await ports.sleep(1)

    async def main(kernel: Kernel) -> None:
        worker = kernel.start("worker")
        worker.spawn(stubborn(worker.ports), name="mule")
        await asyncio.sleep(5)

    with pytest.raises(sim.SimFailure, match="would not end: mule"):
        run(main, 1)


def test_seeds_leave_nothing_in_memory() -> None:
    objects: list[int] = []
    for seeds in (range(20), range(20, 120)):
        assert all(_swarm(seed).value for seed in seeds)
        gc.collect()
        objects.append(len(gc.get_objects()))
    assert abs(objects[1] - objects[0]) < 50
