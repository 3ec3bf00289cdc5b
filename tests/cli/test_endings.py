"""How the command ends when it does not end well: one line, and a code that means something."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from tests.cli.conftest import Shell
from tests.commands import Ran

import bursar
from bursar.audit import Finding
from bursar.cli.app import explain, root
from bursar.cli.commands.audit import advice
from bursar.cli.commands.serve import LOCK
from bursar.ledger import Ledger
from bursar.model.errors import DatabaseUnavailable, OutcomeUnknown
from bursar.ports import SystemPorts

PAY = ("ledger", "pay", "user:1", "shop", "USDT")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((*PAY, "1000"), "INSUFFICIENT_BALANCE"),
        ((*PAY, "1e3"), "INVALID_AMOUNT"),
        ((*PAY, ""), "INVALID_AMOUNT"),
        ((*PAY, "\uff11"), "INVALID_AMOUNT"),
        ((*PAY, "0"), "INVALID_AMOUNT"),
        ((*PAY, "0.0000001"), "PRECISION_OVERFLOW"),
        ((*PAY, "9" * 40), "AMOUNT_TOO_LARGE"),
        ((*PAY, "1", "--key", "dep-1"), "DUPLICATE_REQUEST"),
        ((*PAY, "1", "--book", "nope"), "BOOK_NOT_FOUND"),
        (("ledger", "pay", "user:1", "nobody", "USDT", "1"), "ACCOUNT_NOT_FOUND"),
        (("ledger", "pay", "user:1", "user:1", "USDT", "1"), "SAME_ACCOUNT"),
        (("ledger", "pay", "user:1", "Shop", "USDT", "1"), "INVALID_NAME"),
        (("ledger", "pay", "user:1", "shop", "EUR", "1"), "INVALID_ASSET"),
        (("ledger", "pay", "shop", "user:1", "USDT", "500.000001"), "OVERDRAFT_FLOOR"),
        (("ledger", "show", "77"), "ENVELOPE_NOT_FOUND"),
        (("ledger", "show", "--key", "nope"), "ENVELOPE_NOT_FOUND"),
        (("ledger", "reverse", "77"), "ENVELOPE_NOT_FOUND"),
        (("account", "show", "nobody"), "ACCOUNT_NOT_FOUND"),
        (("account", "create", "user:1", "--policy", "system"), "ALREADY_EXISTS"),
        (("account", "create", "x", "--policy", "capped", "--floor", "5", "--asset", "USDT"), "INVALID_NAME"),
        (("account", "close", "user:1"), "ACCOUNT_NOT_EMPTY"),
        (("asset", "create", "usdt", "--precision", "2"), "INVALID_NAME"),
        (("asset", "suspend", "EUR"), "INVALID_ASSET"),
        (("hold", "void", "77"), "HOLD_NOT_FOUND"),
    ],
)
def test_a_refusal_is_one_line_and_code_1(shell: Shell, words: tuple[str, ...], code: str) -> None:
    before = shell.json("ledger", "events", "--limit", "1000")
    ran = shell(*words)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"error: {code}: ")
    assert ran.err.count("\n") == 1
    told = shell("--json", *words)
    assert (told.code, told.err, told.json["code"]) == (1, "", code)
    assert set(told.json) == {"code", "message", "facts"}
    assert shell.json("ledger", "events", "--limit", "1000") == before


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("ledger", "pya"),
        ("ledger", "pay", "user:1"),
        (*PAY, "-1"),
        (*PAY, "1", "--meta", "novalue"),
        (*PAY, "1", "--kay", "x"),
        ("ledger", "show"),
        ("ledger", "show", "1", "--key", "x"),
        ("ledger", "show", "12ab"),
        ("ledger", "show", "9" * 30),
        ("ledger", "events", "--after", "garbage"),
        ("ledger", "history", "user:1", "--limit", "0"),
        ("ledger", "balance", "user:1", "--at", "yesterday"),
        ("account", "create", "x", "--policy", "rich"),
        ("account", "create", "x", "--policy", "capped"),
        ("account", "create", "x", "--floor", "-5"),
        ("hold", "authorize", "user:1", "USDT", "1", "--expires-in", "soon"),
        ("hold", "authorize", "user:1", "USDT", "1", "--expires-in", "0s"),
        ("hold", "confirm", "x", "shop"),
        ("audit", "--only", "I5"),
        ("audit", "--watch", "0"),
        ("demo", "--seconds", "0"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(shell: Shell, words: tuple[str, ...]) -> None:
    ran = shell(*words)
    assert ran.code == 2
    assert ran.err.startswith("error: USAGE: ")
    assert "--help`" in ran.err
    assert ran.err.count("\n") == 1
    told = shell("--json", *words)
    assert (told.code, told.json["code"]) == (2, "USAGE")


@pytest.mark.parametrize("words", [(), ("ledger",), ("ledger", "hold")], ids=" ".join)
def test_a_missing_command_is_answered_with_the_help(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(root, words)
    asked = CliRunner().invoke(root, [*words, "--help"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", asked.stdout)
    assert result.stderr.startswith("Usage: bursar")


def test_a_missing_command_is_an_object_for_programs(shell: Shell) -> None:
    told = shell("--json", "ledger")
    assert (told.code, told.json["code"]) == (2, "USAGE")
    assert told.json["message"] == "a command is missing (see `bursar ledger --help`)"


def test_recover_is_for_restores_only(shell: Shell) -> None:
    ran = shell("recover")
    assert (ran.code, ran.out) == (2, "")
    assert "after a restore from a backup, say --restored" in ran.err


def test_a_posting_that_something_has_reserved_is_named_and_freed(shell: Shell, broken: Callable[[str], None]) -> None:
    broken("UPDATE live_postings SET reservation = 's1' WHERE posting = 65537")
    ran = shell("audit")
    assert (ran.code, "I3: posting 65537 (100.000000 USDT of user:1) is reserved, and can't be spent" in ran.out) == (
        1,
        True,
    )
    assert shell("rebuild").code == 0
    assert shell("audit").code == 0


def test_a_broken_ledger_is_code_1_with_evidence(shell: Shell, broken: Callable[[str], None]) -> None:
    broken("DELETE FROM live_postings WHERE posting = 65537")
    ran = shell("audit")
    assert ran.code == 1
    assert "BROKEN" in ran.out
    assert "I3: posting 65537 (100.000000 USDT of user:1) is unspent, but not live as it was created" in ran.out
    assert "→ The value is intact: run `bursar rebuild`, then audit again." in ran.out
    assert "→ If I1 is still broken after that: stop writing" in ran.out
    told = shell("--json", "audit")
    assert (told.code, [f["ok"] for f in told.json]) == (1, [False, True, False, True, True, True, True])
    assert "Audit I2 and I8 too" in shell("audit", "--only", "I3").out
    shell.ok("rebuild")
    assert "→" not in shell.ok("audit")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ((), []),
        (("I3",), ["run `bursar rebuild`"]),
        (("I1", "I3"), ["run `bursar rebuild`", "If I1 is still broken"]),
        (("I8",), ["restore from a backup"]),
        (("I1", "I2", "I3"), ["restore from a backup"]),
        (("I5",), ["suspense:transfers"]),
        (("I6",), ["Pause withdrawals"]),
        (("I9",), ["Pause payouts"]),
    ],
)
def test_what_to_do_is_said_for_what_is_broken(broken: tuple[str, ...], says: list[str]) -> None:
    names = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9")
    lines = advice([Finding(invariant=n, ok=n not in broken, checked=1, broken=[], seconds=0.0) for n in names])
    assert len(lines) == len(says)
    assert all(text in line for text, line in zip(says, lines, strict=True)), lines


@pytest.mark.parametrize("held", [False, True])
def test_closing_the_account_of_holds_is_refused_for_what_it_is(shell: Shell, held: bool) -> None:
    if held:
        shell.ok("hold", "authorize", "user:1", "USDT", "30")
    ran = shell("account", "close", "held")
    assert ran.code == 1
    assert "this account belongs to holds" in ran.err
    assert "compact" not in ran.err


def test_an_unknown_outcome_is_code_5_and_names_the_key(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(*_args: Any, **_more: Any) -> None:
        raise OutcomeUnknown("o7", "connection reset")

    monkeypatch.setattr(Ledger, "commit", commit)
    ran = shell(*PAY, "1", "--key", "o7")
    assert ran.code == 5
    assert "repeat with the same key" in ran.err
    assert ran.err.rstrip().endswith("o7")


def test_the_unexpected_is_one_line_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def commit(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(Ledger, "commit", commit)
    ran = shell(*PAY, "1")
    assert ran.code == 4
    assert ran.err.startswith("error: UNEXPECTED: RuntimeError: two lines; ")
    assert ran.err.count("\n") == 1


# --- databases that can't be used -----------------------------------------------------------------------------------


def no_file(folder: Path) -> str:
    return f"sqlite:///{folder}/missing.db"


def a_folder(folder: Path) -> str:
    return f"sqlite:///{folder}"


def garbage(folder: Path) -> str:
    (folder / "garbage.db").write_bytes(b"\x07" * 10_000)
    return f"sqlite:///{folder}/garbage.db"


def corrupt(folder: Path) -> str:
    url = f"sqlite:///{folder}/corrupt.db"
    Shell(url).ok("migrate")
    content = bytearray((folder / "corrupt.db").read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    (folder / "corrupt.db").write_bytes(content)
    return url


def somebody_elses(folder: Path) -> str:
    with sqlite3.connect(folder / "other.db") as file:
        file.execute("CREATE TABLE things (x)")
    file.close()
    return f"sqlite:///{folder}/other.db"


def newer(folder: Path) -> str:
    url = f"sqlite:///{folder}/newer.db"
    Shell(url).ok("migrate")
    with sqlite3.connect(folder / "newer.db") as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    return url


def nobody_listens(_folder: Path) -> str:
    return "postgresql://bursar@127.0.0.1:1/money"


def no_such_port(_folder: Path) -> str:
    return "postgresql://bursar@127.0.0.1:many/money"


def other_engine(_folder: Path) -> str:
    return "mysql://db/money"


def no_address(_folder: Path) -> str:
    return "sqlite://"


@pytest.mark.parametrize("command", [("audit",), ("account", "list"), ("migrate",)], ids=" ".join)
@pytest.mark.parametrize(
    "make",
    [
        no_file,
        a_folder,
        garbage,
        corrupt,
        somebody_elses,
        newer,
        nobody_listens,
        no_such_port,
        other_engine,
        no_address,
    ],
)
def test_a_database_that_cannot_be_used_is_code_4(
    tmp_path: Path, make: Callable[[Path], str], command: tuple[str, ...]
) -> None:
    if make is no_file and command == ("migrate",):
        return  # that is what migrate is for
    shell = Shell(make(tmp_path))
    if make is corrupt and command == ("migrate",):
        command = ("audit",)  # the schema's number is on the page that is left
    ran = shell(*command)
    assert ran.code == 4, ran.out
    assert ran.err.startswith("error: DATABASE_")
    assert ran.err.count("\n") == 1
    told = shell("--json", *command)
    assert (told.code, told.json["code"][:9]) == (4, "DATABASE_")


def test_migrate_leaves_somebody_elses_database_alone(tmp_path: Path) -> None:
    ran = Shell(somebody_elses(tmp_path))("migrate")
    assert ran.code == 4
    with sqlite3.connect(tmp_path / "other.db") as file:
        assert file.execute("SELECT name FROM sqlite_master").fetchall() == [("things",)]
    file.close()


def test_only_what_sets_things_up_makes_a_file(empty: Shell, tmp_path: Path) -> None:
    ran = empty("account", "freeze", "user:1")
    assert ran.code == 4
    assert "migrate" in ran.err
    assert list(tmp_path.iterdir()) == []


WRITES_NOTHING = [
    ("audit",),
    ("account", "list"),
    ("account", "freeze", "user:1"),
    (*PAY, "1"),
    ("hold", "expire"),
    ("rebuild",),
    ("recover", "--restored"),
    ("transfer", "list"),
    ("flow", "list"),
    ("alert", "list"),
    ("transfer", "stop", "--actor", "anna", "--reason", "ticket 17"),
]


@pytest.mark.parametrize("words", WRITES_NOTHING, ids=" ".join)
def test_an_empty_file_is_not_praised_but_refused_and_left_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "empty.db").touch()
    ran = Shell(f"sqlite:///{tmp_path}/empty.db")(*words)
    assert (ran.code, ran.out) == (4, "")
    assert "empty.db is empty" in ran.err
    assert "bursar migrate" in ran.err
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("empty.db", 0)]


@pytest.mark.parametrize("words", WRITES_NOTHING, ids=" ".join)
def test_a_postgresql_database_without_our_schema_too(fresh_postgres: str, words: tuple[str, ...]) -> None:
    ran = Shell(fresh_postgres)(*words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (4, "", 1)
    assert "bursar migrate" in ran.err

    async def ours() -> int:
        connection = await asyncpg.connect(fresh_postgres)
        try:
            return int(await connection.fetchval("SELECT count(*) FROM pg_namespace WHERE nspname = 'bursar'"))
        finally:
            await connection.close()

    assert asyncio.run(ours()) == 0


@pytest.mark.parametrize("url", ["sqlite://typo.db", "sqlite://some/typo.db"])
@pytest.mark.parametrize("words", [("audit",), ("migrate",), ("asset", "create", "EUR", "--precision", "2")])
def test_two_slashes_are_refused_with_the_address_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = Shell(url)(*words)
    assert ran.code == 4
    assert f"write {url.replace('//', '///')} " in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_library_refuses_two_slashes_and_sets_up_what_is_new(tmp_path: Path) -> None:
    async def read(url: str) -> int:
        async with bursar.open(url) as b:
            return len(await b.ledger.books())

    with pytest.raises(DatabaseUnavailable, match=r"write sqlite:///typo\.db"):
        asyncio.run(read("sqlite://typo.db"))
    (tmp_path / "new.db").touch()
    assert asyncio.run(read(f"sqlite:///{tmp_path}/new.db")) == 1


# --- what is no database ---------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def unusable(ran: Ran, *says: str) -> None:
    """It ended with one line, which does not speak of the database."""
    assert (ran.code, ran.out, ran.err.count("\n")) == (4, "", 1)
    assert ran.err.startswith("error: UNUSABLE: ")
    assert "database" not in ran.err
    assert all(word in ran.err for word in says), ran.err


def test_a_folder_that_cannot_be_written_is_named_before_any_work(empty: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    data = ("--data", folder)
    unusable(empty("serve", *data), folder, "Not a directory", "--data")
    unusable(empty("worker", *data), folder, "--data")
    unusable(empty("demo", "--seconds", "5", "--folder", folder), folder, "--folder")
    unusable(empty("bench", "ledger", "--out", folder), folder, "--out")


def test_an_address_that_is_taken_is_named(empty: Shell, tmp_path: Path, taken: str) -> None:
    unusable(empty("serve", "--data", str(tmp_path / "d"), "--listen", taken), taken, "already in use", "--listen")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700  # its secrets are there already


def test_one_serve_for_a_folder(empty: Shell, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    unlock = SystemPorts().files().lock(f"{tmp_path}/d/{LOCK}")
    try:
        unusable(empty("serve", "--data", str(tmp_path / "d")), "another `bursar serve` runs on", "--data")
    finally:
        unlock()


def test_a_file_behind_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    for words in (("audit",), ("migrate",)):
        ran = Shell(f"sqlite:///{tmp_path}/closed/funds.db")(*words)
        assert (ran.code, ran.err.startswith("error: DATABASE_UNAVAILABLE: ")) == (4, True)
        assert "funds.db can't be reached: Permission denied" in ran.err


def test_errors_for_programs_carry_the_facts(shell: Shell) -> None:
    told = shell("--json", *PAY, "1000").json
    assert told["facts"] == {"account": "user:1", "asset": "USDT", "needed": "1000.000000", "available": "100.000000"}
    assert json.dumps(told)


def test_what_failed_after_an_error_is_said_in_the_same_line() -> None:
    """A close whose COMMIT was lost, and whose freeze could not be lifted: the code is that of the first error."""
    error = OutcomeUnknown("none", "it broke")
    error.add_note("account user:1:funding may still be frozen")
    name, message, _, _ = explain(error)
    assert name == "OUTCOME_UNKNOWN"
    assert message.endswith("; account user:1:funding may still be frozen")
