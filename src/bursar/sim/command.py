"""`bursar sim`: seeds by the thousand, every crash point of one seed, or one seed again with its trace.

Seeds are independent, so they run in as many processes as there are cores. A seed that fails is printed with the
command that replays it and the last lines of its trace; it belongs into tests/sim/seeds.json from then on.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import active_children, get_context
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bursar import garbage
from bursar.sim.kernel import CrashAt
from bursar.sim.process import Moment

SCENARIOS = ("documents", "engine", "ledger", "payouts", "restored", "sequence", "transfers", "withdrawals")
CHUNK = 10  # seeds a process is given at a time: at the end, no core waits for another for more than a blink
INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it
TRACE_LINES = 40
FAILURES_SHOWN = 5


class Job(msgspec.Struct, frozen=True):
    """One run: a seed, and where it crashes if not where the seed says."""

    seed: int
    crashes: tuple[tuple[str, int, str], ...] | None = None  # process, port call, moment
    mode: str = "any"
    small: bool = False

    def play(self, scenario: str, *, verbose: bool = False) -> Any:
        """Run it."""
        points = None
        if self.crashes is not None:
            points = [CrashAt(process or scenario, call, Moment(moment)) for process, call, moment in self.crashes]
        split = None if self.mode == "any" else self.mode == "split"
        module = import_module(f"bursar.sim.{scenario}")  # no other: every process would import what it never runs
        size = module.Size(callers=3, entries_each=3) if self.small else None
        return module.play(self.seed, crashes=points, split=split, size=size, verbose=verbose)

    def command(self, scenario: str) -> str:
        """What a person types to see it again."""
        parts = [f"bursar sim {scenario} --seed {self.seed}"]
        parts += [f"--crash-at {who}{':' * bool(who)}{call}:{moment}" for who, call, moment in self.crashes or ()]
        parts += [] if self.mode == "any" else [f"--mode {self.mode}"]
        parts += ["--small"] if self.small else []
        return " ".join([*parts, "--verbose"])


class Tally(msgspec.Struct):
    """What many runs did."""

    seeds: int = 0
    commits: int = 0
    port_calls: int = 0
    crashes: int = 0
    failures: list[tuple[Job, str]] = []

    def add(self, other: Tally) -> None:
        """Add what another process did."""
        self.seeds += other.seeds
        self.commits += other.commits
        self.port_calls += other.port_calls
        self.crashes += other.crashes
        self.failures = [*self.failures, *other.failures]


def run_jobs(scenario: str, jobs: Iterable[Job]) -> Tally:
    """Run jobs one after another, in this process."""
    logging.getLogger("bursar").setLevel(logging.CRITICAL + 1)  # a million simulated troubles are not worth a line each
    garbage.keep_memory()
    gc.freeze()  # what is here now stays; the collector need not look at it between every two seeds
    tally = Tally()
    for job in jobs:
        tally.seeds += 1
        try:
            done = job.play(scenario)
        except Exception as error:  # whatever it is, it is what the seed was looking for; kept, shown, exit code 1
            tally.failures.append((job, f"{type(error).__name__}: {error}"))
            continue
        tally.commits += done.value.commits
        tally.port_calls += done.port_calls
        tally.crashes += len(done.crashes)
    return tally


def run_everywhere(scenario: str, jobs: list[Job], processes: int, *, show: bool) -> Tally:
    """Run jobs on several cores, with a progress bar if `show`."""
    tally = Tally()
    chunks = [jobs[i : i + CHUNK] for i in range(0, len(jobs), CHUNK)]
    with _progress(show) as progress:
        bar = progress.add_task("seeds", total=len(jobs))
        if processes == 1 or len(chunks) == 1:
            for chunk in chunks:
                tally.add(run_jobs(scenario, chunk))
                progress.update(bar, completed=tally.seeds, description=_label(tally))
            return tally
        with _pool(processes) as pool:
            for future in as_completed([pool.submit(run_jobs, scenario, chunk) for chunk in chunks]):
                tally.add(future.result())
                progress.update(bar, completed=tally.seeds, description=_label(tally))
    return tally


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when we are interrupted, whatever they still have to do."""
    # When we are interrupted, the resource tracker cleans up behind us, and need not say so.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    # Ctrl-C reaches them too: a worker would take it for a seed that failed, and go on with the next.
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        yield pool
    except BaseException:  # also an interrupt, which goes on: the seeds that wait are of no use any more
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        raise
    pool.shutdown()


def _label(tally: Tally) -> str:
    return f"seeds, {len(tally.failures)} failed" if tally.failures else "seeds"


@contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        yield progress


def every_crash(scenario: str, seed: int, mode: str, small: bool) -> list[Job]:
    """One run for every port call of a seed at which it can crash, before its effect and after it."""
    calls = Job(seed, (), mode, small).play(scenario).crashable_by
    return [
        Job(seed, ((process, call, moment.value),), mode, small)
        for process, last in sorted(calls.items())
        for call in range(1, last + 1)
        for moment in Moment
    ]


def _crash(text: str) -> tuple[str, int, str]:
    where, _, moment = text.rpartition(":")
    process, _, call = where.rpartition(":")
    if not call.isdigit() or moment not in ("before", "after"):
        raise click.BadParameter(f"{text!r} is not [PROCESS:]CALL:before or …:after, such as 17:after or core:17:after")
    return process, int(call), moment


@click.command("sim")
@click.argument("scenario", type=click.Choice(SCENARIOS))
@click.option("--seeds", type=click.IntRange(1), default=1000, show_default=True, help="How many seeds to run.")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=click.IntRange(0), help="Run this one seed.")
@click.option("--every-crash", "every", is_flag=True, help="With --seed: crash at each of its port calls in turn.")
@click.option(
    "--crash-at", multiple=True, metavar="[PROCESS:]CALL:MOMENT", help="With --seed: crash there and nowhere else."
)
@click.option("--mode", type=click.Choice(["any", "group", "split"]), default="any", show_default=True)
@click.option("--small", is_flag=True, help="Three callers with three entries each, instead of eight with nine.")
@click.option("--jobs", type=click.IntRange(1), default=lambda: os.cpu_count() or 1, help="Processes. Default: cores.")
@click.option("--verbose", is_flag=True, help="With --seed: print the trace.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def command(
    context: click.Context,
    scenario: str,
    seeds: int,
    start: int,
    seed: int | None,
    every: bool,
    crash_at: tuple[str, ...],
    mode: str,
    small: bool,
    jobs: int,
    verbose: bool,
    as_json: bool,
) -> None:
    """Run the system on a virtual clock, crash it, and check that no money is lost or made.

    \b
    Examples:
      bursar sim ledger --seeds 10000
      bursar sim ledger --seed 17 --every-crash
      bursar sim transfers --seeds 500
      bursar sim engine --seeds 500
      bursar sim sequence --seeds 500
      bursar sim payouts --seeds 300
      bursar sim withdrawals --seeds 300
      bursar sim ledger --seed 17 --crash-at 40:after --verbose
    """
    as_json = as_json or bool((context.obj or {}).get("json") if isinstance(context.obj, dict) else False)
    if seed is None and (every or crash_at or verbose):
        raise click.UsageError("--every-crash, --crash-at and --verbose go with --seed")
    if seed is None:
        work = [Job(n, None, mode, small) for n in range(start, start + seeds)]
    elif every:
        work = every_crash(scenario, seed, mode, small)
    else:
        work = [Job(seed, tuple(_crash(text) for text in crash_at) or None, mode, small)]
    began = time.perf_counter()
    if verbose:
        _print_trace(work[0], scenario)
    try:
        tally = run_everywhere(scenario, work, jobs, show=sys.stderr.isatty() and len(work) > 1)
    except KeyboardInterrupt:
        # A worker that died in the middle of a word leaves the pool's own thread waiting for the rest, and Python would
        # wait for that thread. Nothing else here is worth an orderly end.
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    seconds = time.perf_counter() - began
    _report(scenario, tally, seconds, as_json)
    if tally.failures:
        context.exit(1)


def _print_trace(job: Job, scenario: str) -> None:
    try:
        lines = job.play(scenario, verbose=True).lines
    except Exception as error:
        lines = getattr(error, "__notes__", [])
    for line in lines:
        click.echo(line)


def _report(scenario: str, tally: Tally, seconds: float, as_json: bool) -> None:
    if as_json:
        result = {
            "scenario": scenario,
            "seeds": tally.seeds,
            "commits": tally.commits,
            "port_calls": tally.port_calls,
            "crashes": tally.crashes,
            "violations": len(tally.failures),
            "seconds": round(seconds, 3),
            "failures": [{"seed": j.seed, "error": e, "replay": j.command(scenario)} for j, e in tally.failures],
        }
        click.echo(msgspec.json.encode(result).decode())
        return
    rate = tally.seeds / seconds * 60
    click.echo(
        f"{tally.seeds:,} seeds, {tally.commits:,} commits, {tally.port_calls:,} port calls, "
        f"{tally.crashes:,} crashes, {len(tally.failures)} violations, {seconds:.1f} s ({rate:,.0f} seeds a minute)"
    )
    for job, error in tally.failures[:FAILURES_SHOWN]:
        click.echo(f"\nseed {job.seed} failed: {error}\nreplay it with: {job.command(scenario)}")
        try:
            job.play(scenario, verbose=True)
        except Exception as again:
            for line in getattr(again, "__notes__", [])[-TRACE_LINES:]:
                click.echo(f"  {line}")
    if len(tally.failures) > FAILURES_SHOWN:
        click.echo(f"\nand {len(tally.failures) - FAILURES_SHOWN} more")
