"""The throw-away EVM node: it serves, says what is missing, and never outlives the process that started it."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bursar.testbed import Guard, anvil
from bursar.testbed.anvil import Anvil, AnvilFailedError, AnvilNotFoundError, find_anvil, throwaway_anvil

WAIT_S = 20.0


def lives(pid: int) -> bool:
    """Whether a process runs. One that has ended and is not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_mines_when_it_is_asked_to_and_calls_that_fail_say_why() -> None:
    with throwaway_anvil(77) as node:
        assert node.rpc("eth_chainId") == hex(77)
        node.mine(5)
        assert node.rpc("eth_getBlockByNumber", "latest", False)["number"] == "0x5"
        assert node.rpc("eth_getBlockByNumber", "finalized", False)["number"] == "0x3"
        with pytest.raises(AnvilFailedError, match="eth_nothing"):
            node.rpc("eth_nothing")


def test_it_starts_again_at_the_same_address_after_kill_9(tmp_path: Path) -> None:
    """What it knew is gone; a state that was read before brings its blocks back, as they were."""
    guard = Guard("")
    node = Anvil(77, "--timestamp", "1700000000", guard=guard)
    try:
        node.start()
        node.mine(5)
        url, last = node.url, node.rpc("eth_getBlockByNumber", "latest", False)["hash"]
        state = gzip.decompress(bytes.fromhex(node.rpc("anvil_dumpState", True).removeprefix("0x")))
        (tmp_path / "state.json").write_bytes(state)
        node.kill()
        assert node.pid == 0
        node.start()
        assert (node.url, node.rpc("eth_blockNumber")) == (url, "0x0")
        node.kill()
        node.start("--load-state", str(tmp_path / "state.json"))
        assert node.rpc("eth_getBlockByNumber", "latest", False)["hash"] == last
    finally:
        node.kill()
        guard.close()


def test_a_program_that_does_not_start_is_reported_with_its_own_words() -> None:
    with pytest.raises(AnvilFailedError, match="unexpected argument"), throwaway_anvil(1, "--no-such-option"):
        pass


def test_a_machine_without_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(anvil.BINARY_VARIABLE, raising=False)
    monkeypatch.setattr(anvil, "FETCHED", tmp_path)
    with pytest.raises(AnvilNotFoundError, match="stamp-anvil"):
        find_anvil()
    monkeypatch.setenv(anvil.BINARY_VARIABLE, "/somewhere/anvil")
    assert find_anvil() == Path("/somewhere/anvil")


def test_it_ends_with_the_process_that_started_it_also_after_kill_9() -> None:
    program = (
        "import time\n"
        "from bursar.testbed.anvil import throwaway_anvil\n"
        "with throwaway_anvil(1) as node:\n"
        "    print(node.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        node = int(parent.stdout.readline())
        assert lives(node)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while lives(node):
        assert time.monotonic() < deadline, f"anvil {node} is still there"
        time.sleep(0.01)
