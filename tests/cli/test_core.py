"""`bursar core` as a person runs it: wrong options are refused in words, `inspect` says what is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cli.conftest import Shell

from bursar.ports import SystemPorts
from bursar.rails.trading import Core, Op, Status
from bursar.rails.trading.history import indexed

SECRET = "sixteen bytes or more"


def fill(folder: Path, first: int = 1, count: int = 5) -> None:
    """A core that has worked and was stopped."""

    async def work() -> None:
        core = await Core.open(SystemPorts(), str(folder), "spot")
        running = asyncio.create_task(core.run())
        items = [(int(Op.DEPOSIT), first + n, 7, "USDT", 10, 0) for n in range(count)]
        core.state.execute(*indexed([*items, (int(Op.WITHDRAW), first + 90, 7, "BTC", 1, 0)]))
        core.state.set_status(8, Status.FROZEN)
        answered = asyncio.Event()
        core.when_durable(answered.set)
        await answered.wait()
        core.stop()
        await running
        await core.snapshot()
        core.close()

    asyncio.run(work())


def segment(folder: Path) -> Path:
    return sorted(folder.glob("wal-*.log"))[0]


def test_inspect_says_what_is_there_and_that_it_is_whole(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    found = empty.json("core", "inspect", str(tmp_path / "spot"))
    assert found["whole"] is True
    assert (found["sequence"], found["remembered"]) == (7, 6)
    assert found["totals"] == {"USDT": 50, "BTC": 0}
    assert (len(found["identity"]), found["ledger"], found["highest"]) == (32, "", 91)
    assert (found["room"], found["forget"], found["accounts"]) == (1, 1, 1)
    assert found["answers"] == {"DEPOSIT OK": 5, "WITHDRAW INSUFFICIENT_BALANCE": 1}
    assert [(file["kind"], file["last"], file["operations"]) for file in found["files"]] == [
        ("snapshot", 7, 6),
        ("segment", 7, 6),
    ]
    shown = empty.ok("core", "inspect", str(tmp_path / "spot"))
    assert "DEPOSIT OK" in shown
    assert f"core {found['identity']}, not bound to a ledger yet" in shown
    assert "whole" in shown


def test_inspect_of_one_file(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    for path in sorted((tmp_path / "spot").iterdir()):
        if path.name != "lock":
            assert empty.json("core", "inspect", str(path))["sequence"] == 7
    ran = empty("core", "inspect", str(tmp_path / "spot" / "lock"))
    assert ran.code == 2
    assert "neither a segment nor a snapshot" in ran.err


def test_inspect_of_a_torn_end_is_whole_and_says_so(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    fill(tmp_path / "spot", first=200)
    path = segment(tmp_path / "spot")
    for snapshot in (tmp_path / "spot").glob("snap-*"):
        snapshot.unlink()
    path.write_bytes(path.read_bytes()[:-3])
    before = path.read_bytes()
    found = empty.json("core", "inspect", str(tmp_path / "spot"))
    assert (found["whole"], found["sequence"]) == (True, 7)
    assert "torn end" in found["files"][0]["why"]
    assert path.read_bytes() == before


def test_inspect_of_damage_exits_with_1_and_says_where(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    fill(tmp_path / "spot", first=200)
    path = segment(tmp_path / "spot")
    data = bytearray(path.read_bytes())
    data[140] ^= 1
    path.write_bytes(bytes(data))
    ran = empty("core", "inspect", str(tmp_path / "spot"), "--json")
    assert ran.code == 1
    assert ran.json["whole"] is False
    assert "damaged at byte 116" in ran.json["files"][-1]["why"]
    assert empty("core", "inspect", str(path)).code == 1
    assert "DAMAGED" in empty("core", "inspect", str(tmp_path / "spot")).out


def test_inspect_of_a_damaged_snapshot_exits_with_1(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    path = next((tmp_path / "spot").glob("snap-*"))
    path.write_bytes(path.read_bytes()[:-20])
    found = empty("core", "inspect", str(tmp_path / "spot"), "--json")
    assert (found.code, found.json["files"][0]["whole"], found.json["sequence"]) == (1, False, 7)


def test_inspect_of_an_empty_folder_exits_with_1(empty: Shell, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    ran = empty("core", "inspect", str(tmp_path / "nothing"))
    assert ran.code == 1
    assert "neither a log nor a snapshot" in ran.out


def test_inspect_of_two_cores_files_in_one_folder_exits_with_1(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "spot")
    fill(tmp_path / "other")
    next((tmp_path / "spot").glob("snap-*")).unlink()
    snapshot = next((tmp_path / "other").glob("snap-*"))
    snapshot.rename(tmp_path / "spot" / snapshot.name)
    ran = empty("core", "inspect", str(tmp_path / "spot"), "--json")
    assert (ran.code, "several cores are mixed" in ran.json["why"]) == (1, True)
    started = empty(*options(tmp_path, data=str(tmp_path / "spot")))
    assert (started.code, "CORE_DAMAGED" in started.err) == (4, True)


def options(tmp_path: Path, **changed: str) -> list[str]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    given = {
        "--data": str(tmp_path / "data"),
        "--listen": f"unix:{tmp_path}/core.sock",
        "--secret-file": str(secret),
        "--name": "spot",
    }
    given |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return ["core", *[word for pair in given.items() for word in pair]]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"listen": "spot"}, "unix:PATH or tcp:HOST:PORT"),
        ({"secret_file": "/no/such/file"}, "can't be read"),
        ({"name": ""}, "a core needs --name"),
    ],
)
def test_wrong_options_are_refused_in_words(empty: Shell, tmp_path: Path, changed: dict[str, str], says: str) -> None:
    ran = empty(*options(tmp_path, **changed))
    assert ran.code == 2
    assert says in ran.err
    assert not (tmp_path / "data").exists()


def test_there_is_no_default_secret(empty: Shell, tmp_path: Path) -> None:
    """Default secrets are one of the mistakes seen in the wild."""
    ran = empty("core", "--data", str(tmp_path / "d"), "--listen", "unix:x", "--name", "spot")
    assert ran.code == 2
    assert "--secret-file" in ran.err


@pytest.mark.parametrize(("mode", "content", "says"), [(0o644, SECRET, "chmod 600"), (0o600, "short", "at least 16")])
def test_a_secret_that_is_none_is_refused(empty: Shell, tmp_path: Path, mode: int, content: str, says: str) -> None:
    words = options(tmp_path)
    (tmp_path / "secret").write_text(content)
    (tmp_path / "secret").chmod(mode)
    ran = empty(*words)
    assert ran.code == 2
    assert says in ran.err


def test_damaged_files_end_the_core_with_a_message(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "data")
    fill(tmp_path / "data", first=200)
    path = segment(tmp_path / "data")
    data = bytearray(path.read_bytes())
    data[140] ^= 1
    path.write_bytes(bytes(data))
    ran = empty(*options(tmp_path))
    assert ran.code == 4
    assert "CORE_DAMAGED" in ran.err
    assert "Put back a good copy" in ran.err
    assert path.read_bytes() == bytes(data)


@pytest.mark.parametrize("path", ["no/such/folder/core.sock", "x" * 150])
def test_an_address_where_nobody_can_listen_is_named(empty: Shell, tmp_path: Path, path: str) -> None:
    ran = empty(*options(tmp_path, listen=f"unix:{tmp_path}/{path}"))
    assert (ran.code, ran.err.startswith(f"error: UNUSABLE: can't listen at unix:{tmp_path}/")) == (4, True)
    assert "--listen" in ran.err


def test_another_cores_folder_is_refused(empty: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "data")
    ran = empty(*options(tmp_path, name="margin"))
    assert ran.code == 4
    assert "WRONG_CORE" in ran.err
