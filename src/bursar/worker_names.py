"""The name under which a process drives records: kept across restarts, and never shared by two.

A record's lease names its worker. A process that restarts under the same name resumes its records at once; under a
random one it would wait for its own lease. Two processes under one name would take each other's records, and share a
row of the high-water marks (T33). So the name is made of the host, of an identity of the data folder that is made once,
and of the role; and a lock in that folder belongs to it as long as the process lives. A second worker on the same
folder gets the next name.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from bursar.config import ConfigRefused
from bursar.ports import Files, Ports

IDENTITY = "folder.id"
IDENTITY_CHARACTERS = 8
PLACES_MAX = 1_000  # workers of one role on one data folder


@contextlib.contextmanager
def held_name(ports: Ports, folder: str, role: str, wanted: str = "") -> Iterator[str]:
    """A name that no other process on this folder has, for as long as this lasts; the one that is wanted, if any."""
    files, folder = ports.files(), str(Path(folder).absolute())
    files.make_folder(folder)
    if wanted:
        name = wanted
        unlock = _lock(files, f"{folder}/worker-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock")
        if unlock is None:
            why = f"worker_name: another process on {folder} is called {name!r}; give each its own, or none"
            raise ConfigRefused(why)
    else:
        base = f"{platform.node()}:{_identity(files, folder, ports)}:{role}"
        for place in range(1, PLACES_MAX + 1):
            unlock = _lock(files, f"{folder}/worker-{role}-{place}.lock")
            if unlock is not None:
                name = base if place == 1 else f"{base}-{place}"
                break
        else:
            raise ConfigRefused(f"data: {PLACES_MAX} processes work on {folder} already")
    try:
        yield name
    finally:
        unlock()


def _lock(files: Files, path: str) -> Callable[[], None] | None:
    try:
        return files.lock(path)
    except BlockingIOError:
        return None
    except OSError as error:
        raise ConfigRefused(f"data: can't write to {path}: {error.strerror}; see who may write there") from error


def _identity(files: Files, folder: str, ports: Ports) -> str:
    """The folder's identity: a few random characters, made once. Of two processes that make it at once, one wins."""
    path = f"{folder}/{IDENTITY}"
    if IDENTITY not in files.names(folder):
        aside = f"{path}.{ports.token()}"
        file = files.create(aside)
        file.write((ports.token()[:IDENTITY_CHARACTERS] + "\n").encode())
        file.sync()
        file.close()
        if IDENTITY in files.names(folder):
            files.remove(aside)
        else:
            files.rename(aside, path)
            files.sync_folder(folder)
    return files.read(path).decode("ascii", "replace").strip()[:IDENTITY_CHARACTERS]
