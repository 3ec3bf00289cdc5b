"""The demo, run as a newcomer runs it: real kills, curl lines that work, an exit code to trust, nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bursar.cli.state import State
from bursar.config import read
from bursar.demo import command, payout_chains
from bursar.demo import story as demo
from bursar.demo.payout_chains import SimulatedChain
from bursar.demo.payouts import demo_payouts
from bursar.demo.story import Blow, Report, Story
from bursar.testbed import Guard, program
from bursar.testbed.load import Habits, Load
from bursar.testbed.promises import Ask, Found, Kind, Row, Said

COMMAND = [sys.executable, "-c", "from bursar.cli import main; main()"]
DEMO = [*COMMAND, "demo"]
WAIT_S = 110.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which whatever a demo leaves behind can be found: it is gone in the end."""
    mark = f"demo-{os.getpid()}-{time.monotonic_ns()}"
    scratch = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))  # short: a socket lies in it
    yield {**os.environ, "TMPDIR": str(scratch), "DEMO_MARK": mark}
    deadline = time.monotonic() + WAIT_S
    while left := marked(mark) or [path.name for path in scratch.iterdir()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)  # real processes, which tell nobody
    scratch.rmdir()


def marked(mark: str) -> list[str]:
    """Processes that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"DEMO_MARK={mark}\0".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return found


def check(told: dict[str, Any]) -> None:
    """What has to be true of every run."""
    assert told["ok"] is True, told
    assert {kill["victim"] for kill in told["kills"]} == {"core", "server"}
    for victim in ("core", "server"):
        last = [kill for kill in told["kills"] if kill["victim"] == victim][-1]
        assert float(last["in_flight"]) > 0
        assert sum(last["on_their_way"].values()) == sum(last["ends"].values()) > 0
        assert set(last["ends"]) <= {"COMMITTED", "FAILED", "ROLLED_BACK"}
    assert told["transfers"]["COMMITTED"] > 20
    assert told["asked"] == sum(told["transfers"].values()) + sum(told["refusals"].values())
    assert told["wrong"] == []
    assert [f["invariant"] for f in told["audit"]] == ["I1", "I2", "I3", "I4", "I6", "I7", "I8", "I5"]
    assert all(f["ok"] and f["judged"] for f in told["audit"])


def test_payouts_on_a_real_node_end_well(place: dict[str, str]) -> None:
    """The whole story against anvil: bumped and cancelled on one nonce, reorganised away and sent again."""
    words = ["demo-payouts", "--chain", "anvil", "--json"]
    done = subprocess.run([*COMMAND, *words], env=place, capture_output=True, timeout=WAIT_S, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["wrong"]) == (0, True, []), told
    assert Counter((one["status"], one["attempts"]) for one in told["payouts"].values()) == {
        ("confirmed", 1): 8,
        ("confirmed", 2): 1,
        ("failed", 2): 1,
    }
    assert len({one["hash"] for one in told["payouts"].values()}) == 10
    assert len(told["wallets"]) == 4 and all(one["on_chain"] == one["in_ledger"] for one in told["wallets"])
    assert {"I1", "I4", "I7", "I9"} <= {f["invariant"] for f in told["audit"]}
    assert all(f["ok"] and f["judged"] for f in told["audit"])


def test_payouts_on_a_simulated_chain_are_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that shows a payment twice and a unit too few is found out, and nothing else is wrong with the story."""

    class Doubling(SimulatedChain):
        async def arrived(self, to: str) -> list[int]:
            return await super().arrived(to) * (2 if to.lower().endswith("abc0") else 1)

        async def balance(self, address: str, *, token: bool) -> int:
            return await super().balance(address, token=token) - token

    monkeypatch.setattr(payout_chains, "SimulatedChain", Doubling)
    ran = CliRunner().invoke(demo_payouts, obj=State(json=True), standalone_mode=False)
    told = json.loads(ran.stdout)
    assert (ran.return_value, told["ok"]) == (1, False)
    twice, *short = told["wrong"]
    assert re.search(r"is confirmed, and its recipient has received \[(\d+), \1\]", twice)
    assert [words.split()[0] for words in short] == ["hot1", "hot2"]
    assert all(f["ok"] for f in told["audit"])


@pytest.mark.parametrize("after", ["misbehave", "Then the signer gets kill -9"])
def test_ctrl_c_in_the_demo_of_payouts_leaves_nothing_behind(place: dict[str, str], after: str) -> None:
    """Neither the node nor the signer nor a folder, whichever of them is there just then."""
    terminal = Terminal(place, "--chain", "anvil", command=[*COMMAND, "demo-payouts"])
    terminal.until(after)
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130, terminal.text
    assert "Traceback" not in terminal.text and "error" not in terminal.text, terminal.text


def test_two_at_once_for_programs_and_one_is_kept(place: dict[str, str]) -> None:
    """Each has its own port and folder, and prints one JSON object; what is kept can be audited afterwards; a folder
    with something in it is refused."""
    folder = Path(place["TMPDIR"]) / "kept"
    brief = [*DEMO, "--seconds", "5", "--json"]
    words = [*brief, "--folder", str(folder), "--listen", "127.0.0.1:0"]
    for one in [subprocess.Popen(run, env=place, stdout=subprocess.PIPE, text=True) for run in (words, brief)]:
        out, _ = one.communicate(timeout=WAIT_S)
        assert one.returncode == 0, out
        check(json.loads(out))
    audit = [*COMMAND, "--database", f"sqlite:///{folder}/bursar.db", "audit"]
    assert subprocess.run(audit, capture_output=True, check=False).returncode == 0
    again = subprocess.run(words, env=place, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert again.returncode == 2
    assert "not an empty folder" in again.stdout
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_it_tells_its_story_the_curl_lines_work_and_it_ends_by_itself(place: dict[str, str]) -> None:
    """Without a terminal: no colours, no bar, no waiting. The very lines that it prints are run while it is up. The
    usual port is taken: it finds another."""
    with (
        taken(8080) as ours,
        subprocess.Popen([*DEMO, "--seconds", "12"], env=place, stdout=subprocess.PIPE, text=True) as ran,
    ):
        assert ran.stdout is not None
        told: list[str] = []
        answers: dict[str, Any] = {}
        for line in ran.stdout:
            told.append(line)
            if line == "\n" and any(text.startswith("curl") for text in told) and not answers:
                answers = try_out(told)
        assert ran.wait(WAIT_S) == 0, "".join(told)
    assert answers["balances"] == {"FUNDING": "100.000000"}
    assert answers["transfer"]["state"] in ("COMMITTED", "PENDING")
    assert answers["list"] == [answers["transfer"]["req_id"]]
    text = "".join(told)
    assert not ours or ":8080" not in text
    story = ["all of it", "It is ready at", "TOKEN=", "kill -9 of the core", "are on their way", "The server starts it"]
    story += ["kill -9 of the server", "It is started again", "The end", "Balances", "Audit", "I5", "All is well"]
    rest = text
    for words in story:
        _, found, rest = rest.partition(words)
        assert found, f"{words!r} is not told where it belongs, in:\n{text}"
    assert "\x1b" not in text


def test_an_amount_for_programs_is_a_plain_number() -> None:
    report = Report("")
    report.blows = [Blow("core", 1, 0.0, {"sr-1": ("TARGET_PENDING", 1_417_750_000)})]
    assert command._json(report)["kills"][0]["in_flight"] == "1417.75"


def try_out(told: list[str]) -> dict[str, Any]:
    """Run the lines that were printed, as they are."""
    token = next(line for line in told if line.startswith("TOKEN="))
    balances, transfer, listed = (line for line in told if line.startswith("curl"))

    def run(line: str) -> Any:
        deadline = time.monotonic() + WAIT_S
        while True:
            ran = subprocess.run(["bash", "-c", token + line], capture_output=True, text=True, check=False)
            if ran.returncode == 0 and '"status":503' not in ran.stdout:
                return json.loads(ran.stdout)
            assert time.monotonic() < deadline, ran
            time.sleep(0.05)  # the server may be dead just now: that is what the demo is about

    before = run(balances)["accounts"]
    return {
        "balances": {a["account"]: line["available"] for a in before for line in a["balances"] if a["balances"]},
        "transfer": run(transfer),
        "again": run(transfer),
        "list": [one["req_id"] for one in run(listed)["transfers"]],
    }


@contextlib.contextmanager
def taken(port: int) -> Iterator[bool]:
    """We listen there; or somebody else does, who may stop at any time: False."""
    with socket.socket() as listener:
        ours = False
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            listener.listen()
            ours = True
        yield ours


def test_a_port_that_was_asked_for_and_is_taken_is_refused(place: dict[str, str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        words = [*DEMO, "--listen", where]
        ran = subprocess.run(words, env=place, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ran.returncode == 4
    assert f"can't listen at {where}" in ran.stderr


class Terminal:
    """A demo in a terminal."""

    def __init__(self, environ: dict[str, str], *words: str, columns: int = 80, command: Sequence[str] = DEMO) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*command, *words], environ)
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.text = ""

    def until(self, words: str) -> None:
        """Read until it is there, or the end."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if not self._read():
                break
        assert words in self.text, self.text

    def press_ctrl_c(self) -> None:
        os.write(self._screen, b"\x03")

    def exit_code(self) -> int:
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._screen], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self._screen, 65_536)
        except OSError:
            return False
        self.text += found.decode(errors="replace")
        return bool(found)


def test_in_a_terminal_it_stays_up_until_ctrl_c(place: dict[str, str]) -> None:
    """The bar moves, the lines work as long as it is up, and Ctrl-C then is no failure."""
    terminal = Terminal(place)
    terminal.until("internal_transfer?limit=5")
    terminal.until("\n")
    plain = [line.strip("\r") + "\n" for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text).split("\n")]
    answers = try_out([line for line in plain if line.startswith(("TOKEN=", "curl"))])
    assert answers["transfer"]["state"] == "COMMITTED"
    assert answers["again"]["req_id"] == answers["transfer"]["req_id"]
    assert "transfers at their end" in terminal.text
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("after", ["all of it", "kill -9 of the core", "kill -9 of the server"])
def test_ctrl_c_at_any_moment_leaves_nothing_behind(place: dict[str, str], after: str) -> None:
    """Also while something is dead, or starting."""
    terminal = Terminal(place, "--seconds", "8")
    terminal.until(after)
    terminal.press_ctrl_c()
    assert terminal.exit_code() == 130, terminal.text
    if "TOKEN=" in terminal.text:  # to be copied: whole, however narrow the screen
        assert re.search(r"TOKEN=[\w.-]{150,}\r?\n", terminal.text)


def test_ctrl_c_in_the_moment_of_starting_a_process_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is there, and whoever started it has not noted it yet."""
    pids: list[int] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pids.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)

    guard = Guard("")
    monkeypatch.setattr(program, "COMMAND", ("sleep",))
    sleeper = program.Program("sleep", [str(WAIT_S)], {}, tmp_path / "log", guard)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("bursar.testbed.program.subprocess.Popen", Interrupted)
        sleeper.start()
    assert sleeper.pid == pids[0]
    guard.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == -signal.SIGKILL


def test_a_process_that_is_born_after_the_guard_has_gone_is_ended(tmp_path: Path) -> None:
    guard = Guard("")
    guard.close()
    with subprocess.Popen(["sleep", str(WAIT_S)]) as late:
        guard.born(late.pid)
        assert late.wait(WAIT_S) == -signal.SIGKILL


def test_a_child_core_whose_server_is_gone_does_not_bring_its_folder_back(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 32)
    words = ["core", "--data", str(tmp_path / "gone" / "spot"), "--listen", f"unix:{tmp_path}/s", "--until-eof"]
    words += ["--secret-file", str(secret), "--name", "spot"]
    ran = subprocess.run([*COMMAND, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ran.returncode, "needs a pipe" in ran.stderr) == (2, True), ran
    ran = subprocess.run([*COMMAND, *words], input="", capture_output=True, text=True, check=False)
    assert ran.returncode == 4
    assert "is gone" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_however_it_is_ended_nothing_is_left(place: dict[str, str], number: int, code: int) -> None:
    with subprocess.Popen([*DEMO, "--seconds", "20"], env=place, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert any("It is ready" in line for line in ran.stdout)
        ran.send_signal(number)
        assert ran.wait(WAIT_S) == code


@pytest.mark.parametrize("lie", ["forgotten", "invented", "spared"])
def test_a_broken_promise_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """The verdict compares: a transfer that nobody asked for, or that was promised and is not there, is found; and a
    kill with nothing in flight does not count."""
    story = Story(tmp_path, None, 5, lambda _what, _report: None)
    row = Row("mine", 1001, "sr-1", "FUNDING", "SPOT", "USDT", 10, "COMMITTED")
    found = Found(rows=[row], balances={(1001, "FUNDING", "USDT"): 90, (1001, "SPOT", "USDT"): 10})
    asks = [Ask("mine", 1001, "FUNDING", "SPOT", "USDT", 10, [Said(Kind.ACCEPTED, "sr-1", "COMMITTED")])]
    if lie == "forgotten":
        found.rows = []
    if lie == "invented":
        asks = []
    amount = 0 if lie == "spared" else 1
    story.report.blows = [Blow(v, 1, 0.0, {"sr-9": ("TARGET_PENDING", amount)}) for v in ("core", "server")]
    (tmp_path / "jwt.key").touch(mode=0o600)
    (tmp_path / "jwt.key").write_bytes(b"k" * 32)
    config = read("", {"BURSAR_DATA": str(tmp_path)})
    habits = Habits(users=range(1001, 1002), accounts=("FUNDING", "SPOT"), assets={"USDT": 6}, opening=100)
    load = Load(config, habits, [lambda: None], 1)
    load.asks, load.deposits = asks, Counter({(1001, "FUNDING", "USDT"): 100})
    monkeypatch.setattr(story, "_load", load, raising=False)
    monkeypatch.setattr(story, "_config", config, raising=False)
    monkeypatch.setattr(story, "_tick", lambda: None)
    monkeypatch.setattr(demo, "look", lambda _config, _users: found)

    async def audited(_config: object) -> list[Any]:
        return []

    monkeypatch.setattr(demo, "audited", audited)
    story._judge()
    report: Report = story.report
    wanted = {"forgotten": "accepted and is lost", "invented": "never acknowledged", "spared": "not killed with money"}
    assert any(wanted[lie] in text for text in report.wrong), report.wrong
    assert not report.ok
