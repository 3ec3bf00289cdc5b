"""Golden vectors: every byte on disk and on the wire, kept in a file. A change here breaks cores that are out there.

After a change that is meant, `python -m tests.unit.rails.test_trading_golden` writes the file anew.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.rails.desk import FOLDER, IDENTITY, MemoryPorts, cancel, deposit, refund, run, state_of, withdraw

from bursar.rails.trading import Core, Op, Status, frames, protocol, snapshots
from bursar.rails.trading.errors import CoreDamaged
from bursar.rails.trading.inspection import inspect
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import segment_name

FILE = Path(__file__).parents[1] / "golden" / "trading.json"
SECRET = b"sixteen bytes or more"


def story() -> tuple[CoreState, bytes]:
    """A state with something of everything, and its log."""
    state, log = CoreState(), frames.segment_header("spot", IDENTITY, 1)

    def commit() -> None:
        nonlocal log
        first = state_end[0] + 1
        log += frames.encode(state.drain(), first, state.sequence - first + 1)
        state_end[0] = state.sequence

    state_end = [0]
    run(
        state, [deposit(1_734_912_345_678_901_234, 7, 2**63), deposit(2_000, 8, 5, "BTC"), withdraw(2_001, 8, 6, "BTC")]
    )
    commit()
    run(state, [withdraw(2_002, 7, 40), refund(2_002, 7, 40), cancel(2_003, Op.DEPOSIT)])
    run(state, [(int(Op.LOCK), 2_004, 7, "USDT", 100, 0), (int(Op.UNLOCK), 2_005, 7, "USDT", 1, 0)])
    run(state, [(int(Op.SETTLE), 2_006, 7, "USDT", 9, 8)])
    commit()
    state.set_status(8, Status.DISABLED)
    state.raise_floors(2_002, 2_002, [2_000])
    commit()
    assert state.bind("ledger-1") == "ledger-1"
    run(state, [withdraw(2_007, 7, 50), withdraw(2_008, 7, 60)])
    commit()
    state.raise_floors(2_009, 2_002, [2_000, 2_008])
    run(state, [refund(2_007, 7, 50)])
    commit()
    return state, log


def messages() -> dict[str, protocol.Request | protocol.Answer | protocol.Handshake]:
    nonce, other = bytes(range(32)), bytes(range(32, 64))
    hello = protocol.Hello(2, "spot", IDENTITY, nonce)
    welcome = protocol.Welcome(12, "ledger-1", 2_009, 2_002, b"")
    refused = protocol.Refused(3, "BEHIND", "why", b"")
    login = protocol.prove_login(SECRET, hello, other, 9, "ledger-1")
    return {
        "Hello": hello,
        "Login": protocol.Login(2, other, 9, "ledger-1", login),
        "Welcome": replace(welcome, proof=protocol.prove_answer(SECRET, hello, other, welcome)),
        "Refused": replace(refused, proof=protocol.prove_answer(SECRET, hello, other, refused)),
        "Execute": protocol.Execute(1, ["USDT", "BTC"], [(1, 2**63 - 1, 7, 0, 2**64 - 1, 0), (6, 5, 7, 1, 9, 8)]),
        "Lookup": protocol.Lookup(2, [(5, 1), (6, 3)]),
        "Query": protocol.Query(3, 5, 1),
        "Balances": protocol.Balances(4, [7, 8]),
        "Totals": protocol.Totals(5),
        "SetStatus": protocol.SetStatus(6, 7, 2),
        "Prune": protocol.Prune(7, 200, 100, [1, 2]),
        "Ping": protocol.Ping(8),
        "Subscribe": protocol.Subscribe(9, 41),
        "Bind": protocol.Bind(0, "ledger-1"),
        "Operations": protocol.Operations(10, 41, 4_096),
        "Describe": protocol.Describe(11),
        "Done": protocol.Done(1, 77, b"\x00\x80", [77, 0]),
        "Found": protocol.Found(3, 77, (70, 7, "USDT", 5, 0, 1)),
        "Found nothing": protocol.Found(3, 77, None),
        "Held": protocol.Held(4, 77, [(1, [("USDT", 5, 6)]), (2, [])]),
        "Summed": protocol.Summed(5, 77, [("USDT", str(2**70))]),
        "Noted": protocol.Noted(6, 78),
        "Gone": protocol.Gone(9, 60),
        "Events": protocol.Events(
            [
                (1, 42, 5, 7, "USDT", 5, 0, 0),
                (20, 43, 0, 7, "", 0, 0, 2),
                (21, 44, 100, 0, "", 0, 200, 0),
                (22, 45, 0, 0, "ledger-1", 0, 0, 0),
            ]
        ),
        "Bound": protocol.Bound(0, 78, "ledger-1"),
        "Listed": protocol.Listed(10, 78, 77, [(42, 1, 5, 7, "USDT", 5, 0), (43, 2, 6, 7, "USDT", 9, 1)]),
        "Described": protocol.Described(11, 78, IDENTITY, "ledger-1", 200, 100, 2**63 - 1, 12, 3),
        "Pruned": protocol.Pruned(7, 79, 0, 200, 100),
    }


def made() -> dict[str, dict[str, str]]:
    state, log = story()
    snapshot = b"".join(snapshots.pieces(snapshots.capture(state, "spot", IDENTITY)))
    return {
        "disk": {"segment": log.hex(), "snapshot": snapshot.hex()},
        "wire": {name: protocol.frame(message).hex() for name, message in messages().items()},
    }


GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {"disk": {}, "wire": {}}


def test_what_is_written_to_disk_is_what_it_always_was() -> None:
    assert made()["disk"] == GOLDEN["disk"]


def test_what_was_written_to_disk_can_be_read() -> None:
    state, _ = story()
    restored = snapshots.restore(bytes.fromhex(GOLDEN["disk"]["snapshot"]))
    assert (state_of(restored.state), restored.name, restored.core) == (state_of(state), "spot", IDENTITY)
    data = bytes.fromhex(GOLDEN["disk"]["segment"])
    header = frames.read_segment_header(data)
    assert (header.name, header.core, header.first) == ("spot", IDENTITY, 1)
    assert state_of(replayed(data)) == state_of(state)


def replayed(data: bytes) -> CoreState:
    state, at = CoreState(), frames.SEGMENT_BYTES
    while at < len(data):
        frame = frames.decode(data, at, state.sequence + 1)
        state.replay(frame.records)
        at = frame.end
    return state


@pytest.mark.parametrize("kind", ["segment", "snapshot"])
def test_a_file_of_another_format_is_refused_and_left_as_it_is(kind: str) -> None:
    """Passing over a snapshot as if it were damaged would start an empty core where balances are."""
    ports = MemoryPorts()
    path = f"{FOLDER}/{segment_name(1) if kind == 'segment' else snapshots.snapshot_name(11)}"
    data = bytes.fromhex(GOLDEN["disk"][kind])
    for magic in (b"BURSWAL", b"BURSNAP", b"BURSEND"):
        data = data.replace(magic + b"2", magic + b"1")
    file = ports.disk.create(path)
    file.write(data)
    file.sync()
    with pytest.raises(CoreDamaged, match=rf"it begins with b'BURS(WAL|NAP)1', and a {kind} of this version"):
        asyncio.run(Core.open(ports, FOLDER, "spot"))
    assert ports.disk.read(path) == data
    [report] = inspect(ports.disk, FOLDER, is_folder=True).files
    assert not report.whole and "it begins with" in report.why


@pytest.mark.parametrize("name", list(messages()))
def test_every_message_on_the_wire_is_what_it_always_was(name: str) -> None:
    message = messages()[name]
    assert protocol.frame(message).hex() == GOLDEN["wire"][name]
    [payload] = protocol.Splitter(protocol.ANSWER_BYTES_MAX).feed(bytes.fromhex(GOLDEN["wire"][name]))
    decoders = (protocol.decode_request, protocol.decode_answer, protocol.decode_handshake)
    found = []
    for decode in decoders:
        try:
            found.append(decode(payload))
        except ValueError:
            continue
    assert found == [message]


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n")
