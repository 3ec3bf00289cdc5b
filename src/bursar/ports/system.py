"""The ports of a real process: this machine's clock, threads, files, sockets and programs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import random
import secrets
import signal
import socket
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from bursar.ports.protocols import File, Files, Listener, SerialExecutor, Stream

T = TypeVar("T")

READ_BYTES_MAX = 1 << 20  # of a stream, at a time
BACKLOG = 128  # connections that wait to be accepted
ACCEPT_S, ACCEPT_S_MAX = 0.05, 1.0  # before the next try, where there is no descriptor for a connection

log = logging.getLogger("bursar.ports")


class ThreadLane:
    """`SerialExecutor` on a real thread. Leaner than an executor: one queue in, one wake-up of the loop out."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]] | None]
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"bursar-{name}", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[T] = loop.create_future()
        self._queue.put((loop, reply, work))
        return await reply

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (asked := self._queue.get()) is not None:
            loop, reply, work = asked
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended: no caller waits for the reply
                loop.call_soon_threadsafe(_reply, reply, value, error)
            del asked, work, value, error, reply


def _reply(reply: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if reply.done():
        return  # the caller was cancelled meanwhile: the work has happened, its result is dropped
    if error is None:
        reply.set_result(value)
    else:
        reply.set_exception(error)


class SystemFile:
    """`File` on a descriptor: no buffer in between that could keep what was to be synced."""

    def __init__(self, path: str, flags: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class SystemFiles:
    """`Files` on the real disk."""

    def make_folder(self, path: str) -> None:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in Path(folder).iterdir())

    def size(self, path: str) -> int:
        return Path(path).stat().st_size

    def mode(self, path: str) -> int:
        return stat.S_IMODE(Path(path).stat().st_mode)

    def read(self, path: str, start: int = 0, size: int = -1) -> bytes:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(start)
            return file.read() if size < 0 else file.read(size) or b""

    def create(self, path: str) -> File:
        return SystemFile(path, os.O_CREAT | os.O_TRUNC)

    def append(self, path: str) -> File:
        return SystemFile(path, 0)

    def truncate(self, path: str, size: int) -> None:
        with Path(path).open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        Path(old).replace(new)

    def remove(self, path: str) -> None:
        Path(path).unlink()

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: str) -> Callable[[], None]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:  # another process has the lock: close the descriptor, and raise
            os.close(fd)
            raise
        return lambda: os.close(fd)  # the lock goes with the descriptor, also when the process dies


class SystemStream:
    """`Stream` on asyncio's pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(READ_BYTES_MAX)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    @property
    def unsent(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


class SystemListener:
    """`Listener` on a socket. Not asyncio's, which logs a hundred errors a second while no descriptor is left."""

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        accept: Callable[[Stream], object],
        trouble: Callable[[OSError], object],
    ) -> None:
        self.address = address
        self._socket = listening
        self._task = asyncio.create_task(self._serve(accept, trouble), name="listener")

    async def _serve(self, accept: Callable[[Stream], object], trouble: Callable[[OSError], object]) -> None:
        loop = asyncio.get_running_loop()
        wait_s = ACCEPT_S
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
                reader = asyncio.StreamReader(READ_BYTES_MAX, loop)
                ends = asyncio.StreamReaderProtocol(reader, loop=loop)
                transport, _ = await loop.connect_accepted_socket(lambda ends=ends: ends, connection)  # type: ignore[misc]
            except ConnectionError:
                continue  # the client has gone already
            except OSError as error:
                trouble(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, ACCEPT_S_MAX)
            else:
                wait_s = ACCEPT_S
                accept(SystemStream(reader, asyncio.StreamWriter(transport, ends, reader, loop)))

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()


def _listening(kind: str, where: str, port: int) -> socket.socket:
    """A socket that listens at an address."""
    if kind == "tcp":
        family, *_, end = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.create_server(end[:2], family=family, backlog=BACKLOG)
    else:
        if Path(where).is_socket():  # of a process that died: `_make_way` has checked that no process listens
            Path(where).unlink()
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(where)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    made.setblocking(False)
    return made


def split_address(address: str) -> tuple[str, str, int]:
    """The kind of an address (`unix` or `tcp`), its path or host, and its port."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return kind, rest, 0
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and colon and host and port.isascii() and port.isdigit() and int(port) < 65_536:
        return kind, host.removeprefix("[").removesuffix("]"), int(port)
    raise ValueError(f"{address!r} is not unix:PATH or tcp:HOST:PORT")


def _keep_private(path: str) -> None:
    """Create a database's file with mode 0600 before SQLite creates it with a wider one, and narrow an existing one.

    SQLite gives its other files (the log, the shared memory) the mode of the first. No existing file is opened here:
    closing it would drop the locks that SQLite holds on it in this process.
    """
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
        return
    except FileExistsError:
        pass
    except OSError:  # not available (macOS), or there is no such folder, which SQLite will report
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return
    opened = False
    for name in (path, *(f"{path}-{beside}" for beside in ("wal", "shm", "journal"))):
        with contextlib.suppress(FileNotFoundError):
            file = Path(name)
            found = file.stat()
            if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077:
                opened = True
                with contextlib.suppress(PermissionError):
                    file.chmod(0o600)
    if opened and stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
        log.warning("%s can be read by others, and is not ours: its owner should chmod 600 it", path)
    elif opened:
        log.warning("%s could be read by others; it is for its owner alone now (600)", path)


def notice_silence(connected: socket.socket, seconds: float) -> None:
    """Have the kernel end a TCP connection whose other side acknowledges nothing for so long, idle or not."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    part_s = max(1, math.ceil(seconds / 3))
    wanted = {"TCP_KEEPIDLE": part_s, "TCP_KEEPALIVE": part_s, "TCP_KEEPINTVL": part_s, "TCP_KEEPCNT": 2}
    wanted["TCP_USER_TIMEOUT"] = math.ceil(seconds * 1000)
    for name, value in wanted.items():
        if hasattr(socket, name):  # each system has its own
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _make_way(path: str) -> None:
    """Refuse an address at which a process still listens: binding would take its Unix socket over."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return  # a socket of a process that died, or nothing; anything else makes the binding fail
    writer.close()
    raise OSError(f"another process listens at {path} already")


async def run_program(words: Sequence[str], given: bytes, timeout_s: float) -> int:
    """Run a program with this on its stdin; its exit code. Not ended in time: it and all it started are killed.

    Its stdout goes nowhere, its stderr where ours goes. It need not read what it is given.
    """
    nowhere, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=nowhere, start_new_session=True)
    try:
        async with asyncio.timeout(timeout_s):
            await process.communicate(given)
    except TimeoutError:
        raise TimeoutError(f"{words[0]} had not ended after {timeout_s:g} s, and was killed") from None
    finally:
        if process.returncode is None:  # also if we are cancelled: nothing else would wait for it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None  # it has ended
    return process.returncode


def exit_after(seconds: float, code: int, last_words: str) -> None:
    """End this process after so long, whatever it does then: also if its event loop hangs."""

    def end() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{last_words}\n".encode())
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


class SystemPorts:
    """The real machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return random.random()

    def token(self) -> str:
        return secrets.token_hex(16)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def lane(self, name: str) -> SerialExecutor:
        return ThreadLane(name)

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            _keep_private(path)
        uri = Path(path).absolute().as_uri() + ("?mode=ro" if read_only else "?mode=rwc")
        # autocommit: every BEGIN and COMMIT in this code base is written out, none is implied by the driver.
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256)

    def identity(self, path: str) -> tuple[int, int] | None:
        try:
            found = os.stat(path)  # noqa: PTH116 (a Path would cost as much again, at every batch)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def files(self) -> Files:
        return SystemFiles()

    async def connect(self, address: str) -> Stream:
        kind, where, port = split_address(address)
        if kind == "unix":
            return SystemStream(*await asyncio.open_unix_connection(where, limit=READ_BYTES_MAX))
        return SystemStream(*await asyncio.open_connection(where, port, limit=READ_BYTES_MAX))

    async def listen(
        self,
        address: str,
        accept: Callable[[Stream], object],
        trouble: Callable[[OSError], object] = lambda _: None,
    ) -> Listener:
        kind, where, port = split_address(address)
        if kind == "unix":
            await _make_way(where)
        before = os.umask(0o177)  # not a chmod afterwards: in between, any user could connect
        try:
            listening = _listening(kind, where, port)
        finally:
            os.umask(before)
        address = address if kind == "unix" else f"tcp:{where}:{listening.getsockname()[1]}"
        return SystemListener(listening, address, accept, trouble)
