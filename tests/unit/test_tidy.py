"""House rules that no linter knows, as tests (CONTRIBUTING.md states them).

Each test collects every offence and shows them all, as `file:line what`, so that one run is enough to put them right.
Nothing here imports the code it looks at.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "bursar"

MODULE_LINES_MAX = 500
HEADER_WORDS_MIN = 4

# Programs around the library. They own their process, so they may print and open files.
PROGRAMS = ("bench", "cli", "demo", "testbed", "chaos")
MAY_PRINT = PROGRAMS
MAY_OPEN = (*PROGRAMS, "ports")

RULES = ROOT / "docs" / "reference" / "rules.md"
CITATION = re.compile(r"\b[TLWSI][1-9][0-9]?\b")
ENTRY = re.compile(r'^### <a id="([a-z][0-9]+)"></a>([A-Z][0-9]+)\. ', re.MULTILINE)
PLACE = re.compile(r"`((?:src|tests|docs)/[^`\s:*]+)(?:::(\w+))?`")

# Written in two halves, or this file would break the rules it keeps.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
REGISTRY_HOSTS = ("pypi" + ".org", "npm" + "js", "files.python" + "hosted")

# Words that hide who acts. In quotes or backticks they are names: PostgreSQL may run as the user `nobody`.
VAGUE = re.compile(r"(?<![\w`\"])(?:some|no|any|every)body(?![\w`\"])|\bwhoever\b", re.IGNORECASE)
# Files and folders in which these words still are. The list only gets shorter.
STILL_VAGUE = ("docs/status.md",)

NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def belongs_to(path: Path, rooms: tuple[str, ...]) -> bool:
    return path.relative_to(SOURCE).parts[0] in rooms


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} {what}"


def calls_of_builtin(tree: ast.AST, name: str) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node.lineno


def our_files() -> Iterator[Path]:
    """Everything that is, or would be, in the history."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not any(part in NOT_OURS or part.endswith(("_cache", ".egg-info")) for part in parts):
            yield path


# ------------------------------------------------------------------------------------------------------- the modules


def test_every_module_begins_by_saying_what_it_is_for() -> None:
    silent = [
        at(path, 1, "no docstring in prose")
        for path in modules()
        if len((ast.get_docstring(parse(path)) or "").split()) < HEADER_WORDS_MIN
    ]
    assert not silent, "\n".join(silent)


def test_no_file_is_longer_than_one_can_hold_in_mind() -> None:
    long = []
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in {".py", ".sql"}:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MODULE_LINES_MAX:
                long.append(at(path, lines, f"{lines} lines; split it before {MODULE_LINES_MAX}"))
    assert not long, "\n".join(long)


def test_every_method_of_a_protocol_says_what_it_promises() -> None:
    silent = []
    for path in modules():
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ClassDef) or not any("Protocol" in ast.unparse(base) for base in node.bases):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not ast.get_docstring(method):
                    silent.append(at(path, method.lineno, f"{node.name}.{method.name} has no docstring"))
    assert not silent, "\n".join(silent)


def test_only_programs_print() -> None:
    printed = [
        at(path, line, "print()")
        for path in modules()
        if not belongs_to(path, MAY_PRINT)
        for line in calls_of_builtin(parse(path), "print")
    ]
    assert not printed, "\n".join(printed)


def test_files_are_opened_through_the_ports() -> None:
    opened = [
        at(path, line, "open(): go through bursar.ports")
        for path in modules()
        if not belongs_to(path, MAY_OPEN)
        for line in calls_of_builtin(parse(path), "open")
    ]
    assert not opened, "\n".join(opened)


# ----------------------------------------------------------------------------------------------------- the simulator


def test_the_simulator_knows_no_chance_but_its_seed() -> None:
    """Ruff bans the doors everywhere else; here it would also ban `random.Random(seed)`, which the simulator is for.
    Its command is outside of the simulated world: it starts processes and measures time."""
    offences = [
        at(path, line, what)
        for path in sorted((SOURCE / "sim").rglob("*.py"))
        if path.name != "command.py"
        for line, what in open_doors(parse(path))
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import random\nrandom.Random(7)", False),
        ("from random import Random\ndef roll(dice: Random) -> float: return dice.random()", False),
        ("import random\nrandom.Random()", True),
        ("import random\nrandom.random()", True),
        ("from random import choice", True),
        ("from random import SystemRandom", True),
        ("import time", True),
        ("import asyncio as a\na.sleep(1)", True),
        ("from datetime import datetime as d\nd.now()", True),
        ("import asyncio\nasyncio.Event()", False),
    ],
)
def test_that_rule_tells_them_apart(source: str, caught: bool) -> None:
    assert bool(list(open_doors(ast.parse(source)))) is caught


def open_doors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What a module uses of pyproject's banned-api, other than a generator with a seed."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    banned: dict[str, dict[str, str]] = ruff["lint"]["flake8-tidy-imports"]["banned-api"]
    known: dict[str, str] = {}
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                used.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.append((node.lineno, f"{node.module}.{alias.name}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := full_name(node, known)):
            used.append((node.lineno, name))
        if isinstance(node, ast.Call) and not node.args and full_name(node.func, known) == "random.Random":
            yield node.lineno, "random.Random() without a seed"
    for line, name in used:
        if name in {"random", "random.Random"}:
            continue
        for door, ban in banned.items():
            if name == door or name.startswith(f"{door}."):
                yield line, f"{name}: {ban['msg']}"


def full_name(node: ast.AST, known: dict[str, str]) -> str | None:
    """`a.b.c` with `a` replaced by what was imported under that name; None if it was not imported."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := full_name(node.value, known)):
        return f"{owner}.{node.attr}"
    return None


# ----------------------------------------------------------------------------------------------------------- the SQL


def test_every_statement_has_a_name() -> None:
    """Files of statements, not migrations: those run from top to bottom and are known by their number."""
    nameless = [
        at(path, line, "no `-- name: ...` above this statement")
        for path in sorted((ROOT / "src").rglob("*.sql"))
        if not is_migration(path)
        for line in nameless_statements(path.read_text(encoding="utf-8"))
    ]
    assert not nameless, "\n".join(nameless)


def test_every_migration_begins_by_saying_what_it_changes() -> None:
    silent = [
        at(path, 1, "no comment at the top")
        for path in sorted((ROOT / "src").rglob("*.sql"))
        if is_migration(path) and not path.read_text(encoding="utf-8").startswith("--")
    ]
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize(
    ("sql", "lines"),
    [
        ("-- name: one\n-- Why.\nSELECT 1;\n", []),
        ("-- Why.\nSELECT 1;\n", [2]),
        ("-- name: one\nSELECT 1;\n\nSELECT 2;\n", [4]),
        ("-- name: one\nSELECT 1\n\n-- name: two\nSELECT 2\n", []),
        ("-- name: one\nDO $$ BEGIN\n  PERFORM 1;\n  PERFORM 2;\nEND $$;\nSELECT 2;\n", [6]),
        ("-- name: one\nSELECT 1, -- a remark;\n  2;\n", []),
    ],
)
def test_that_rule_finds_the_nameless(sql: str, lines: list[int]) -> None:
    assert list(nameless_statements(sql)) == lines


def is_migration(path: Path) -> bool:
    return path.name[0].isdigit() or any("migration" in part for part in path.relative_to(ROOT).parts)


def nameless_statements(sql: str) -> Iterator[int]:
    """The first line of each statement that has no name since the statement before it."""
    named = inside = quoted = False
    for number, line in enumerate(sql.splitlines(), start=1):
        code, _, remark = line.partition("--")
        if not quoted and not code.strip():
            if remark.strip().startswith("name:"):
                named, inside = True, False
            continue
        if not inside:
            if not named:
                yield number
            named, inside = False, True
        quoted ^= len(re.findall(r"\$\w*\$", code)) % 2 == 1
        if not quoted and code.rstrip().endswith(";"):
            inside = False


# ---------------------------------------------------------------------------------------------------- the repository


def test_nothing_is_left_for_later() -> None:
    found = [
        at(path, number, line.strip())
        for path in our_files()
        if path.suffix in {".py", ".sql", ".html", ".js", ".css"}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not found, "\n".join(found)


def test_nothing_is_there_only_to_say_that_it_is_not_there() -> None:
    found = [
        at(path, node.lineno, ast.unparse(node))
        for path in modules()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the business of the machine that installs them."""
    found = [
        at(path, number, host)
        for path in our_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        for host in REGISTRY_HOSTS
        if host in line
    ]
    assert not found, "\n".join(found)


# --------------------------------------------------------------------------------------------------------- the rules


def test_every_cited_rule_is_in_the_reference() -> None:
    """A reader who meets `T7` in a comment must be able to look it up."""
    known = {name for _, name in ENTRY.findall(RULES.read_text(encoding="utf-8"))}
    unknown = [
        at(path, number, f"{name} has no entry in {RULES.relative_to(ROOT)}")
        for path in texts_that_cite()
        for number, name in citations(path.read_text(encoding="utf-8"))
        if name not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_every_rule_has_one_entry_and_an_anchor_of_its_name() -> None:
    entries = ENTRY.findall(RULES.read_text(encoding="utf-8"))
    assert entries
    assert [anchor for anchor, _ in entries] == [name.lower() for _, name in entries]
    assert len(entries) == len(set(entries))


def test_every_place_in_the_code_that_prose_names_exists() -> None:
    """In the rules above all; but a place that is gone misleads everywhere."""
    gone = [
        at(path, number, what)
        for path in texts_that_cite()
        if path.suffix == ".md"
        for number, what in missing_places(path.read_text(encoding="utf-8").splitlines(), ROOT)
    ]
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("kept in one transaction (T36).", ["T36"]),
        ("decisions T6 to T9, I4", ["T6", "T9", "I4"]),
        ("W34: hold 7 was settled", ["W34"]),
        ("TypeVar('T'), t1, T100, L0, XT1, T1_MAX, sha256", []),
    ],
)
def test_that_rule_knows_a_citation(text: str, cited: list[str]) -> None:
    assert [name for _, name in citations(text)] == cited


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("`src/a.py::there`, `src/a.py`, `docs/b.md`", []),
        ("`src/a.py::gone`", ["`gone` is not in src/a.py"]),
        ("`src/a.py::ther`", ["`ther` is not in src/a.py"]),
        ("`src/c.py::there`", ["src/c.py does not exist"]),
        ("`tests/d.py`", ["tests/d.py does not exist"]),
    ],
)
def test_that_rule_knows_a_place(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "src" / "a.py").write_text("def there() -> None: ...")
    (tmp_path / "docs" / "b.md").write_text("")
    assert list(missing_places(["", line], tmp_path)) == [(2, what) for what in found]


def texts_that_cite() -> Iterator[Path]:
    """Code and prose of ours: a number in other files (JSON, lock files) may look like a rule and be none."""
    for path in our_files():
        top = path.relative_to(ROOT).parts[0]
        is_code = top in {"src", "tests"} and path.suffix in {".py", ".sql"} and path != Path(__file__).resolve()
        is_prose = path.suffix == ".md" and (top == "docs" or path.parent == ROOT)
        if is_code or is_prose:
            yield path


def citations(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        for name in CITATION.findall(line):
            yield number, name


def missing_places(lines: Iterable[str], root: Path) -> Iterator[tuple[int, str]]:
    """`path` and `path::name` in these lines that lead nowhere."""
    for number, line in enumerate(lines, start=1):
        for path, name in PLACE.findall(line):
            if not (root / path).exists():
                yield number, f"{path} does not exist"
            elif name and not re.search(rf"\b{name}\b", (root / path).read_text(encoding="utf-8")):
                yield number, f"`{name}` is not in {path}"


# --------------------------------------------------------------------------------------------------------- the words


def test_text_says_who_acts() -> None:
    """ "The worker", "the caller", "another transaction": a reader must not have to guess."""
    found = [
        at(path, number, f"{word!r}: say who")
        for path, number, word in vague_words()
        if not any(covers(place, path) for place in STILL_VAGUE)
    ]
    assert not found, "\n".join(found)


def test_the_list_of_vague_places_gets_shorter() -> None:
    """A place that says who acts leaves the list, so that the words can't come back there."""
    paths = {path for path, _, _ in vague_words()}
    done = [
        f"{place} is done: take it off the list" for place in STILL_VAGUE if not any(covers(place, p) for p in paths)
    ]
    assert not done, "\n".join(done)


@pytest.mark.parametrize(
    ("text", "vague"),
    [
        ("Somebody waits, nobody's turn, whoever comes", ["Somebody", "nobody", "whoever"]),
        ("runs as `postgres` or `nobody`", []),
        ('for name in ("postgres", "nobody"):', []),
        ("NOBODY_AWAITED, antibody", []),
    ],
)
def test_that_rule_knows_a_vague_word(text: str, vague: list[str]) -> None:
    assert VAGUE.findall(text) == vague


def vague_words() -> Iterator[tuple[Path, int, str]]:
    """In the documentation and the source."""
    for path in our_files():
        is_text = path.is_relative_to(ROOT / "docs") or path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        if is_text or path.is_relative_to(SOURCE):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                for word in VAGUE.findall(line):
                    yield path, number, word


def covers(place: str, path: Path) -> bool:
    return path.is_relative_to(ROOT / place)
