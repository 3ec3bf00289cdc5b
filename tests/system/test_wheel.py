"""The wheel: built here, unpacked, and run with nothing but the packages that it declares (decision 30)."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
NOT_SHIPPED = (
    "bursar/bench/",
    "bursar/chaos/",
    "bursar/demo/payout_anvil.py",
    "bursar/testbed/anvil.py",
    "bursar/testbed/devdb.py",
    "bursar/testbed/tokens/",
)
MAIN = "from bursar.cli import main; main()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files and the dependencies that it needs without an extra, and no other package."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    for name in sorted(required("bursar") - {"bursar"}):
        for path in {Path(file.parts[0]) for file in distribution(name).files or () if file.parts[0] != ".."}:
            place = Path(str(distribution(name).locate_file(path)))
            if place.exists() and not (folder / path).exists():
                (folder / path).symlink_to(place)
    return folder


def required(name: str) -> set[str]:
    """A distribution and all that it needs, extras left out."""
    found, left = set[str](), [name]
    while left:
        found.add(one := left.pop())
        needs = [text for text in distribution(one).requires or () if "extra ==" not in text and "python_" not in text]
        names = [re.split(r"[ ;<>=!~\[]", text)[0] for text in needs]
        left += [each for each in names if each not in found]
    return found


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python without this environment's site-packages."""
    command = [sys.executable, "-S", "-P", *words]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def shipped() -> Iterator[str]:
    """Every module and statement of the source tree, but for what stays in the repository."""
    for path in sorted((SOURCE / "bursar").rglob("*")):
        name = path.relative_to(SOURCE).as_posix()
        if path.is_file() and "__pycache__" not in name and not name.startswith(NOT_SHIPPED):
            yield name


def test_the_wheel_has_the_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    assert names == set(shipped())
    assert {"bursar/sim/kernel.py", "bursar/demo/command.py", "bursar/testbed/program.py"} <= names


def test_it_is_imported_and_gives_help_without_development_packages(installed: Path) -> None:
    imported = run(installed, "-c", "import bursar, sys; print(bursar.__file__, 'pytest' in sys.modules)")
    assert imported.stdout == f"{installed}/bursar/__init__.py False\n", imported.stderr
    assert run(installed, "-c", "import pytest").returncode == 1
    helped = run(installed, "-c", MAIN, "--help")
    assert helped.returncode == 0, helped.stderr
    listed = {line.split()[0] for line in helped.stdout.splitlines() if re.match(r"  [a-z]+ +[A-Z]", line)}
    assert {"serve", "sim", "demo", "audit"} <= listed
    assert not {"bench", "chaos"} & listed


@pytest.mark.parametrize("name", ["bench", "chaos"])
def test_a_command_of_the_repository_says_where_it_runs(installed: Path, name: str) -> None:
    refused = run(installed, "-c", MAIN, name)
    assert refused.returncode == 2
    assert f"make setup && .venv/bin/bursar {name}" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo-payouts", "--chain", "anvil"], "make demo-evm"),
        (["demo-payouts"], "bursar[evm,signer]"),
        (["demo-withdrawals"], "bursar[api,evm,tron,signer]"),
    ],
)
def test_a_demo_says_what_it_lacks(installed: Path, words: list[str], said: str) -> None:
    refused = run(installed, "-c", MAIN, *words)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_it_keeps_a_ledger(installed: Path) -> None:
    database = f"sqlite:///{installed}/it.db"
    assert (
        run(installed, "-c", MAIN, "--database", database, "asset", "create", "EUR", "--precision", "2").returncode == 0
    )
    audited = run(installed, "-c", MAIN, "--database", database, "audit")
    assert audited.returncode == 0, audited.stderr


def test_the_simulator_runs_from_the_wheel(installed: Path) -> None:
    ran = run(installed, "-c", MAIN, "sim", "ledger", "--seed", "1", "--small")
    assert ran.returncode == 0, ran.stderr
