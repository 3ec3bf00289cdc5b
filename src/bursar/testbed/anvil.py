"""A throw-away EVM node (anvil) for tests, chaos tests and the demo, in a process of its own.

`with throwaway_anvil(chain_id=56) as anvil:` starts one on a free port of the loopback and ends it, also if this
process is killed. It mines only when it is asked to (`anvil.rpc("anvil_mine", "0x3")`), and its finalized block is two
behind the newest. `make test` and `make demo-evm` fetch the program; `BURSAR_ANVIL_BIN` names another. `token_code` is
what deploys an ERC-20 token on it.

Not here: any node that holds value. No part of the library imports this.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bursar.testbed.guard import Guard

BINARY_VARIABLE = "BURSAR_ANVIL_BIN"
TOKENS = Path(__file__).parent / "tokens" / "compiled.json"
FETCHED = Path(sys.prefix) / "anvil" / "node_modules" / "@foundry-rs"
START_TIMEOUT_SECONDS = 30.0
CALL_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.01

_LISTENING = re.compile(r"Listening on 127\.0\.0\.1:(\d+)")


class AnvilNotFoundError(RuntimeError):
    """This machine has no anvil that we could start."""

    def __init__(self) -> None:
        super().__init__(
            f"No anvil found in {FETCHED}. Run `make .venv/.stamp-anvil`, which fetches it, or name the program in "
            f"{BINARY_VARIABLE}."
        )


class AnvilFailedError(RuntimeError):
    """Anvil was found but did not start, or refused a call; the message ends with what it said."""


def find_anvil() -> Path:
    """The program: what BURSAR_ANVIL_BIN names, else the one that was fetched for this platform."""
    if named := os.environ.get(BINARY_VARIABLE):
        return Path(named).absolute()
    found = sorted(FETCHED.glob("anvil-*/bin/anvil"))
    if not found:
        raise AnvilNotFoundError
    return found[0]


def token_code(name: str, supply: int) -> str:
    """The data of a transaction that deploys one of our tokens (`tokens/`): its sender then has all there is."""
    return f"{json.loads(TOKENS.read_text())[name]['bytecode']}{supply:064x}"


class Anvil:
    """One node of an empty chain with that id, on a free port of the loopback; further options go to the program.

    It can be killed and started again at the same address. What it knew is gone then, unless options bring it back.
    """

    def __init__(self, chain_id: int, *options: str, guard: Guard) -> None:
        self.port = 0  # any that is free; then the one that it got
        self._words = ["--chain-id", str(chain_id), "--no-mining", "--slots-in-an-epoch", "1", *options]
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    @property
    def pid(self) -> int:
        """Its process id; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        """Start it, and wait until it listens; with more options, this time."""
        words = [str(find_anvil()), "--host", "127.0.0.1", "--port", str(self.port), *self._words, *options]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is for us, who then end it
            )
            self._process = process
            self._guard.born(process.pid)
            self.port = _port(process, log)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._guard.gone(process.pid)

    def rpc(self, method: str, *params: Any) -> Any:
        """Call a method; AnvilFailedError if the node gives an error."""
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        request = urllib.request.Request(self.url, body, {"content-type": "application/json"})
        with self._open(request, timeout=CALL_TIMEOUT_SECONDS) as answer:
            said = json.loads(answer.read())
        if "error" in said:
            raise AnvilFailedError(f"{method}: {said['error']}")
        return said["result"]

    def mine(self, blocks: int = 1) -> None:
        """Mine that many blocks, with what is in the pool in the first."""
        self.rpc("anvil_mine", hex(blocks))


@contextmanager
def throwaway_anvil(chain_id: int, *options: str) -> Iterator[Anvil]:
    """A node, until the end of the context."""
    guard = Guard("")
    anvil = Anvil(chain_id, *options, guard=guard)
    try:
        anvil.start()
        yield anvil
    finally:
        anvil.kill()
        guard.close()


def _port(process: subprocess.Popen[bytes], log: IO[str]) -> int:
    """Where it listens, once it does."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        said = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")  # its end writes on: no seeking
        if found := _LISTENING.search(said):
            return int(found[1])
        if process.poll() is not None or time.monotonic() > deadline:
            raise AnvilFailedError(f"anvil does not start:\n{said}")
        time.sleep(POLL_SECONDS)  # a real program, which sends no notice when it is ready
