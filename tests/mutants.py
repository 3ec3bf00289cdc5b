"""Mutation testing of `model`: does a unit test fail when a decision about money is changed?

A mutant is one module of `src/bursar/model` with one operator changed: a comparison moved by one or negated, arithmetic
or a sign swapped, `and` made `or`, a `not` or a `raise` left out. The unit tests that import nothing of Bursar but the
model run against it, in a process of its own, until one of them fails: the mutant is killed. One that survives is a
line that could be wrong without a test noticing. No database, no network, and no file is changed: a mutant exists only
in the memory of the process that tests it.

    make mutants                      a seeded sample, a few minutes on two cores
    make mutants MUTANTS=--all        every mutant
    python -m tests.mutants --module plan --all

Mutants that behave as the original does can't be killed. They are in EQUIVALENT with the reason, do not count, and the
run fails if one of them no longer exists or is killed after all.

Not here: code outside `model`, whose tests need a database; and constants, calls and statements other than `raise`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from hypothesis import Phase, is_hypothesis_test, settings
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "bursar" / "model"
TESTS = ROOT / "tests" / "unit"
PURE = ("bursar.model", "bursar.flows.transfers")  # of flows only the machine, which the tests of machines draw

THRESHOLD = 0.85
SAMPLE = 240
CPU_FACTOR, CPU_MIN_S = 4, 20  # of processor time, so that a busy machine is not taken for an endless loop
MEMORY_MAX = 4 * 2**30  # an endless loop that collects something ends here

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

# "module.function: before → after": why no test can tell the two apart.
EQUIVALENT: dict[str, str] = {
    "ledger_state.LedgerState._exchange: p.amount > 0 → p.amount >= 0": "no posting is empty: plan refuses it",
    "money._from_decimal: shift < 0 → shift <= 0": "nothing is shifted either way",
    "money._from_decimal: -shift >= len(digits) → -shift > len(digits)": "so few digits are no multiple of that power",
    "plan._check_shape: len(consumes) > 1 → len(consumes) >= 1": "one posting alone is no duplicate",
    "plan._check_value: amount < 0 → amount <= 0": "an empty posting was refused above",
    "plan._check_floors: change < 0 → change <= 0": "what does not change was passed over above",
    "resolve._payment: len(chosen) > POSTINGS_MAX → len(chosen) >= POSTINGS_MAX": "the long way does the same",
    "resolve._payment: source.path < target.path → source.path <= target.path": "two accounts never share a path",
}


# ------------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """One change to one module. `index` is its place among the module's mutants."""

    module: str
    index: int
    line: int
    function: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """What it is known by, whatever line it is on."""
        return f"{self.module}.{self.function}: {self.before} → {self.after}"

    def __str__(self) -> str:
        return f"{(MODEL / self.module).relative_to(ROOT)}.py:{self.line}  {self.before}  →  {self.after}"


def places(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node that runs, with the function it is in. Annotations do not run."""
    yield function, node
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from places(child, function)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What to put in the place of a node, one change at a time."""
    match node:
        case ast.Compare():
            for place, old in enumerate(node.ops):
                for new in COMPARISONS[type(old)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = new()
                    yield changed
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            changed_op = copy.deepcopy(node)
            changed_op.op = ARITHMETIC[type(op)]()
            yield changed_op
        case ast.BoolOp():
            swapped = copy.deepcopy(node)
            swapped.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield swapped
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Raise():
            yield ast.copy_location(ast.Pass(), node)


def mutations(module: str) -> Iterator[tuple[Mutant, ast.Module, ast.AST, ast.AST]]:
    """Every mutant of a module, with the tree, the node that changes and what comes in its place."""
    tree = ast.parse((MODEL / f"{module}.py").read_text(encoding="utf-8"))
    index = 0
    for function, node in places(tree):
        for new in changes(node):
            line = getattr(node, "lineno", 0)
            yield Mutant(module, index, line, function, ast.unparse(node), ast.unparse(new)), tree, node, new
            index += 1


def population(modules: Sequence[str]) -> list[Mutant]:
    """Every mutant of these modules; of all of them, if none is named."""
    names = modules or sorted(path.stem for path in MODEL.glob("*.py"))
    return [mutant for name in names for mutant, *_ in mutations(name)]


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def compiled(mutant: Mutant, path: str) -> CodeType:
    """The module with that change."""
    _, tree, old, new = next(found for found in mutations(mutant.module) if found[0].index == mutant.index)
    Replace(old, new).visit(tree)
    return compile(ast.fix_missing_locations(tree), path, "exec")


# ------------------------------------------------------------------------------------------------------ testing one


class MutantLoader(SourceFileLoader):
    """Loads the mutant as if it were the file."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        return compiled(self.mutant, self.path)


class MutantFinder:
    """Finds the mutant where the module would be found."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != f"bursar.model.{self.mutant.module}":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = MutantLoader(name, spec.origin)
        spec.loader.mutant = self.mutant
        return spec


class Hurry:
    """A pytest plugin: examples before properties, and no search for the least failure."""

    def pytest_configure(self) -> None:
        quick = settings(settings.get_profile("bursar"), phases=(Phase.explicit, Phase.generate))
        settings.register_profile("mutants", quick)
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: is_hypothesis_test(getattr(item, "obj", None)))


def pure_tests() -> list[str]:
    """The files of unit tests that use nothing but the model."""
    return [str(path) for path in sorted(TESTS.glob("test_*.py")) if _is_pure(path)]


def _is_pure(path: Path) -> bool:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    ours = [name for name in names if name.split(".")[0] in ("bursar", "tests")]
    return bool(ours) and all(name in PURE or name.startswith("bursar.model.") for name in ours)


def run_tests(tests: list[str], mutant: Mutant | None, cpu_s: int) -> None:
    """The tests in this process, which ends with pytest's exit code, or with a signal if they never end."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    with contextlib.suppress(ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.dont_write_bytecode = False  # or the tests would be compiled again for each mutant, which takes longest
    if mutant is not None:
        sys.meta_path.insert(0, MutantFinder(mutant))
    # Most mutants are killed by the tests of their own module: the others are not even collected then.
    own = [test for test in tests if mutant is not None and Path(test).name == f"test_{mutant.module}.py"]
    for part in (own, [test for test in tests if test not in own]):
        arguments = ["-x", "-q", "--no-header", "--tb=no", "-pno:cacheprovider", "-pno:xdist", f"--rootdir={ROOT}"]
        code = pytest.main([*arguments, *part], plugins=[Hurry()]) if part else 0
        if code != 0:
            os._exit(int(code))
    os._exit(0)


_context = multiprocessing.get_context("forkserver")


def fate(tests: list[str], mutant: Mutant | None, cpu_s: int) -> str:
    """Whether the tests kill the mutant; without one, whether they pass."""
    process = _context.Process(target=run_tests, args=(tests, mutant, cpu_s))
    process.start()
    process.join()
    if process.exitcode == 0:
        return "survived"
    return "timed out" if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else "killed"


# --------------------------------------------------------------------------------------------------------- the program


def main(argv: Sequence[str] | None = None) -> int:
    """Test a sample of the mutants; 1 if too many survive."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Mutation testing of bursar.model.")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="how many mutants to test (default %(default)s)")
    parser.add_argument("--all", action="store_true", help="test every mutant")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default %(default)s)")
    parser.add_argument("--module", action="append", default=[], help="only mutants of this module of the model")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="the least ratio (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: the cores)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)

    mutants = population(options.module)
    if stale := sorted(EQUIVALENT.keys() - {mutant.name for mutant in population(())}):
        print("in EQUIVALENT, but not a mutant any more:", *stale, sep="\n  ", file=sys.stderr)
        return 2
    chosen = mutants
    if not options.all and options.sample < len(mutants):
        chosen = random.Random(options.seed).sample(mutants, options.sample)

    _context.set_forkserver_preload(["asyncpg", "hypothesis", "pytest", "rich.table"])
    tests = pure_tests()
    began = time.monotonic()
    if fate(tests, None, 600) != "survived":
        print("the tests fail without any mutant:", *tests, sep="\n  ", file=sys.stderr)
        return 2
    cpu_s = max(CPU_MIN_S, int(CPU_FACTOR * (time.monotonic() - began)))

    pool = ThreadPoolExecutor(options.jobs)
    try:
        fates = pool.map(lambda mutant: fate(tests, mutant, cpu_s), chosen)
        found = dict(progress(zip(chosen, fates, strict=True), len(chosen)))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C: no further ones
    return report(found, len(mutants), options.threshold, as_json=options.json)


def progress(fates: Iterable[tuple[Mutant, str]], count: int) -> Iterator[tuple[Mutant, str]]:
    """The same, with survivors as they are found, and a bar on a terminal or a line for every fifty elsewhere."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    shown = track(fates, "mutants", count, console=console) if console.is_terminal else fates
    for number, (mutant, end) in enumerate(shown, start=1):
        if end == "survived" and mutant.name not in EQUIVALENT:
            console.print(f"survived  {mutant}", markup=False)
        if number % 50 == 0 and not console.is_terminal:
            console.print(f"{number} of {count} mutants")
        yield mutant, end


def report(found: dict[Mutant, str], mutants: int, threshold: float, *, as_json: bool) -> int:
    """Print what became of them; 1 if the ratio is too low or EQUIVALENT is wrong."""
    told_apart = [mutant for mutant, end in found.items() if mutant.name in EQUIVALENT and end != "survived"]
    counted = {mutant: end for mutant, end in found.items() if mutant.name not in EQUIVALENT or end != "survived"}
    survivors = [mutant for mutant, end in counted.items() if end == "survived"]
    survivors.sort(key=lambda mutant: (mutant.module, mutant.line, mutant.index))
    ratio = 1 - len(survivors) / len(counted) if counted else 1.0
    passed = ratio >= threshold and not told_apart
    if as_json:
        ends = Counter(counted.values())
        facts = {
            "mutants": mutants,
            "tested": len(found),
            "killed": ends["killed"],
            "timed_out": ends["timed out"],
            "survived": ends["survived"],
            "equivalent": len(found) - len(counted),
            "ratio": round(ratio, 4),
            "threshold": threshold,
            "passed": passed,
            "survivors": [str(mutant) for mutant in survivors],
            "not_equivalent": [mutant.name for mutant in told_apart],
        }
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return int(not passed)
    table = Table("module", *("tested", "killed", "timed out", "survived", "ratio"))
    for module in sorted({mutant.module for mutant in counted}):
        table.add_row(module, *_row([end for mutant, end in counted.items() if mutant.module == module]))
    table.add_section()
    table.add_row("all", *_row(list(counted.values())))
    Console().print(table)
    for mutant in survivors:
        print(f"survived  {mutant}")
    for mutant in told_apart:
        print(f"killed, so it is not equivalent; take it out of EQUIVALENT: {mutant.name}")
    print(
        f"{ratio:.3f} of {len(counted)} mutants killed (at least {threshold}); {len(found) - len(counted)} equivalent"
        f" ones left out; {mutants} mutants in all"
    )
    return int(not passed)


def _row(ends: list[str]) -> list[str]:
    count = Counter(ends)
    ratio = 1 - count["survived"] / len(ends)
    return [str(len(ends)), *(str(count[end]) for end in ("killed", "timed out", "survived")), f"{ratio:.2f}"]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
