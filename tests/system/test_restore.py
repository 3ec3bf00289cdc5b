"""A database that goes back to a backup beside a core that goes on; two servers on one database; a core that is not
ours.

All with the real programs: no money is in two places, nobody is told that all is well, and people can put it right.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests import commands
from tests.commands import Ran
from tests.system.test_serve import COMMAND, TRANSFERS, Serve, serve, until


def command(here: Serve, *words: str) -> Ran:
    """A command on the same folder, however it ends."""
    return commands.command(*words, environ=here.environ)


@contextlib.contextmanager
def traded(folder: Path, **environ: str) -> Iterator[Serve]:
    """A server whose user has 1,000 in funding and 100 at the core."""
    with serve(folder, BURSAR_AUDIT_INTERVAL_S="0", **environ) as here:
        fact = here.start()
        here.run("--database", fact["database"], "asset", "create", "USDT", "--precision", "6")
        here.fund("1100", "wire-1")
        here.committed("FUNDING", "SPOT", "100", "early")
        yield here


def back_up(folder: Path) -> Path:
    copy = folder.parent / "backup.db"
    with (
        contextlib.closing(sqlite3.connect(folder / "bursar.db")) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    return copy


def put_back(folder: Path, copy: Path) -> None:
    for name in ("bursar.db-wal", "bursar.db-shm"):
        (folder / name).unlink(missing_ok=True)
    shutil.copyfile(copy, folder / "bursar.db")


def test_a_restored_database_takes_no_transfer_before_it_was_reconciled(tmp_path: Path) -> None:
    """575 went to the core after the backup: it is not moved a second time, and not there twice."""
    folder = tmp_path / "data"
    with traded(folder) as here:
        copy = back_up(folder)
        here.committed("FUNDING", "SPOT", "575", "late")
        here.stop()
        put_back(folder, copy)

        here.start()  # nobody has said that it was restored
        answer = here.transfer("FUNDING", "SPOT", "575", "late")
        assert (answer.status_code, answer.json()["code"]) == (503, "TRANSFERS_PAUSED")
        audited = command(here, "audit", "--data", str(folder))
        assert audited.code == 1
        assert "is ahead of this database" in audited.out
        assert "DEPOSIT of 575000000 USDT for user 1001" in audited.out.replace("\n", " ")
        alone = command(here, "transfer", "allow", "--actor", "anna", "--reason", "looks fine")
        assert (alone.code, "I5 is broken" in alone.err) == (1, True)
        assert here.transfer("FUNDING", "SPOT", "1", "other").status_code == 503

        seen = command(here, "transfer", "reconcile")
        assert "575000000 USDT of user 1001, COMMITTED" in seen.out.replace("\n", " ")
        booked = command(here, "transfer", "reconcile", "--book", "--actor", "anna", "--reason", "ticket 17")
        assert booked.code == 0, booked.err
        assert command(here, "audit", "--data", str(folder)).code == 0
        again = command(here, "transfer", "reconcile")
        assert "know the same" in again.out

        for person in ("anna", "ben"):
            assert command(here, "transfer", "allow", "--actor", person, "--reason", "reconciled").code == 0
        until(lambda: here.transfer("SPOT", "FUNDING", "675", "back").json().get("state") == "COMMITTED")
        assert command(here, "audit", "--data", str(folder)).code == 0
        everything = here.transfer("FUNDING", "SPOT", "1100", "all").json()
        assert everything["state"] == "COMMITTED", "all of it is there, once"


def test_recover_says_it_too_and_pauses(tmp_path: Path) -> None:
    """Nobody runs the child core then: it is started for the question. A core that runs already is asked as it is."""
    folder = tmp_path / "data"
    with traded(folder) as here:
        copy = back_up(folder)
        here.committed("FUNDING", "SPOT", "575", "late")
        here.stop()
        put_back(folder, copy)
        alone = command(here, "--database", f"sqlite:///{folder}/bursar.db", "recover", "--restored")
        assert (alone.code, "the cores were not asked" in alone.out) == (0, True), alone.err
        said = command(here, "recover", "--restored", "--data", str(folder))
        assert said.code == 0, said.err
        assert "core spot is ahead of this database" in said.out
        assert "DEPOSIT of 575000000 USDT for user 1001" in said.out
        assert "paused" in said.out
        here.start()
        assert here.transfer("FUNDING", "SPOT", "1", "a").json()["code"] == "TRANSFERS_PAUSED"
        again = command(here, "recover", "--restored", "--data", str(folder))
        assert "DEPOSIT of 575000000 USDT for user 1001" in again.out, again.err
        booked = command(here, "transfer", "reconcile", "--book", "--actor", "anna", "--reason", "ticket 17")
        assert booked.code == 0, booked.err
        for person in ("anna", "ben"):
            assert command(here, "transfer", "allow", "--actor", person, "--reason", "compared").code == 0
        until(lambda: here.transfer("FUNDING", "SPOT", "1", "b").json().get("state") == "COMMITTED")


def test_a_transfer_made_by_command_looks_at_the_cores_first(tmp_path: Path) -> None:
    """Beside a server, and on a database that went back."""
    folder = tmp_path / "data"
    with traded(folder) as here:
        copy = back_up(folder)
        words = ("transfer", "create", "--user", "1001", "--from", "FUNDING", "--to", "SPOT", "USDT", "10", "--order")
        made = command(here, *words, "by-hand")
        assert (made.code, "is COMMITTED" in made.out) == (0, True), made.err
        here.stop()
        put_back(folder, copy)
        here.start()
        refused = command(here, *words, "by-hand")
        assert (refused.code, "TRANSFERS_PAUSED" in refused.err) == (1, True), refused.err


def test_two_servers_on_one_database_are_not_two_cores(tmp_path: Path) -> None:
    """The second one, with a data folder of its own, is refused while the first runs, and afterwards too: its core is a
    new one, and the ledger is bound to the old one."""
    folder, other = tmp_path / "data", tmp_path / "other" / "data"
    other.mkdir(parents=True)
    with traded(folder) as here, serve(other, BURSAR_DATABASE=f"sqlite:///{folder}/bursar.db") as second:
        refused = second.refused()
        assert refused.returncode == 4
        assert "another `bursar serve` runs on the database" in refused.stderr
        here.stop()
        empty = second.refused()
        assert empty.returncode == 4, empty.stderr
        assert "this ledger is bound to the core with identity" in empty.stderr
        here.start()
        here.committed("SPOT", "FUNDING", "100", "back")


def test_a_core_of_another_ledger_is_refused(tmp_path: Path) -> None:
    """The data folder is right, and the database is a new one: the core says whose it is."""
    folder = tmp_path / "data"
    with traded(folder) as here:
        here.stop()
        here.environ |= {"BURSAR_DATABASE": f"sqlite:///{tmp_path}/new.db"}
        refused = here.refused()
        assert refused.returncode == 4, refused.stderr
        assert "this core is bound to the ledger" in refused.stderr


def test_a_core_that_does_not_answer_refuses_its_own_rail_only(tmp_path: Path) -> None:
    """FUTURE is away from the beginning: SPOT works, and FUTURE as soon as it was compared."""
    folder = tmp_path / "data"
    away = f"unix:{tmp_path}/future.sock"
    secret = tmp_path / "future.secret"
    secret.write_text("0" * 32)
    secret.chmod(0o600)
    more = {"BURSAR_CORE_FUTURE": away, "BURSAR_CORE_FUTURE_SECRET_FILE": str(secret), "BURSAR_CORE_TIMEOUT_MS": "500"}
    with traded(folder, **more) as here:
        body = {"from": "FUNDING", "to": "FUTURE", "asset": "USDT", "amount": "1", "client_order_id": "f"}
        answer = here.send("POST", TRANSFERS, body)
        assert (answer.status_code, answer.json()["code"]) == (503, "CORE_UNAVAILABLE")
        words = ["core", "--data", str(tmp_path / "future"), "--listen", away, "--secret-file", str(secret)]
        core = subprocess.Popen([*COMMAND, *words, "--name", "future"], env=here.environ, stdout=subprocess.PIPE)
        try:
            until(lambda: here.send("POST", TRANSFERS, body).json().get("state") == "COMMITTED")
        finally:
            core.terminate()
            core.communicate()


def test_a_core_that_is_lost_is_replaced_by_people(tmp_path: Path) -> None:
    """An empty core stands at the old one's address: nothing goes there until it was bound, and then two must agree."""
    folder = tmp_path / "data"
    with traded(folder) as here:
        here.stop()
        shutil.rmtree(folder / "spot")
        refused = here.refused()
        assert (refused.returncode, "OTHER_CORE" in refused.stderr) == (4, True)
        listen, secret = f"unix:{folder}/spot.sock", str(folder / "core.secret")
        words = ["core", "--data", str(folder / "spot"), "--listen", listen, "--secret-file", secret, "--name", "spot"]
        core = subprocess.Popen([*COMMAND, *words], env=here.environ, stdout=subprocess.PIPE)
        try:
            assert core.stdout is not None and core.stdout.readline()
            rebind = ("transfer", "rebind", "spot", "--actor", "anna", "--reason", "its disk is lost")
            done = command(here, *rebind)
            assert (done.code, "is bound to core" in done.out) == (0, True), done.err
            assert command(here, *rebind).code == 4, "twice is once"
            shown = command(here, "transfer", "cores")
            assert (shown.code, "spot" in shown.out) == (0, True), shown.err
        finally:
            core.terminate()
            core.communicate()
        here.start()
        assert here.transfer("FUNDING", "SPOT", "1", "a").json()["code"] == "TRANSFERS_PAUSED"
        for person in ("anna", "ben"):
            alone = command(here, "transfer", "allow", "--actor", person, "--reason", "it is there again")
            assert (alone.code, "I5 is broken" in alone.err) == (1, True), "100 are missing there"
