"""Golden vectors: every byte on disk and on the wire, kept in a file. A change here breaks cores that are out there.

After a change that is meant, `python -m tests.unit.rails.test_trading_golden` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.rails.desk import cancel, deposit, refund, run, state_of, withdraw

from bursar.rails.trading import Op, Status, frames, protocol, snapshots
from bursar.rails.trading.book import Book

FILE = Path(__file__).parents[1] / "golden" / "trading.json"
SECRET = b"sixteen bytes or more"


def story() -> tuple[Book, bytes]:
    """A book with something of everything, and its log."""
    book, log = Book(), frames.segment_header("spot", 1)

    def commit() -> None:
        nonlocal log
        first = book_end[0] + 1
        log += frames.encode(book.seal(), first, book.sequence - first + 1)
        book_end[0] = book.sequence

    book_end = [0]
    run(book, [deposit(1_734_912_345_678_901_234, 7, 2**63), deposit(2_000, 8, 5, "BTC"), withdraw(2_001, 8, 6, "BTC")])
    commit()
    run(book, [withdraw(2_002, 7, 40), refund(2_002, 7, 40), cancel(2_003, Op.DEPOSIT)])
    run(book, [(int(Op.LOCK), 2_004, 7, "USDT", 100, 0), (int(Op.UNLOCK), 2_005, 7, "USDT", 1, 0)])
    run(book, [(int(Op.SETTLE), 2_006, 7, "USDT", 9, 8)])
    commit()
    book.set_status(8, Status.DISABLED)
    book.prune(2_002, [2_000])
    commit()
    return book, log


def messages() -> dict[str, protocol.Request | protocol.Answer | protocol.Handshake]:
    nonce, other = bytes(range(32)), bytes(range(32, 64))
    prove = protocol.prove
    return {
        "Hello": protocol.Hello(1, "spot", nonce),
        "Login": protocol.Login(1, other, 9, prove(SECRET, "client", "spot", nonce, other, 9)),
        "Welcome": protocol.Welcome(12, prove(SECRET, "core", "spot", nonce, other, 12)),
        "Refused": protocol.Refused(3, "BEHIND", "why", prove(SECRET, "core", "spot", nonce, other, 3, "BEHIND")),
        "Execute": protocol.Execute(1, ["USDT", "BTC"], [(1, 2**63 - 1, 7, 0, 2**64 - 1, 0), (6, 5, 7, 1, 9, 8)]),
        "Lookup": protocol.Lookup(2, [(5, 1), (6, 3)]),
        "Query": protocol.Query(3, 5, 1),
        "Balances": protocol.Balances(4, [7, 8]),
        "Totals": protocol.Totals(5),
        "SetStatus": protocol.SetStatus(6, 7, 2),
        "Prune": protocol.Prune(7, 100, [1, 2]),
        "Ping": protocol.Ping(8),
        "Subscribe": protocol.Subscribe(9, 41),
        "Done": protocol.Done(1, 77, b"\x00\x80", [77, 0]),
        "Found": protocol.Found(3, 77, (70, 7, "USDT", 5, 0, 1)),
        "Found nothing": protocol.Found(3, 77, None),
        "Held": protocol.Held(4, 77, [(1, [("USDT", 5, 6)]), (2, [])]),
        "Summed": protocol.Summed(5, 77, [("USDT", str(2**70))]),
        "Noted": protocol.Noted(6, 78),
        "Gone": protocol.Gone(9, 60),
        "Events": protocol.Events([(1, 42, 5, 7, "USDT", 5, 0, 0), (20, 43, 0, 7, "", 0, 0, 2)]),
    }


def made() -> dict[str, dict[str, str]]:
    book, log = story()
    snapshot = b"".join(snapshots.pieces(snapshots.capture(book, "spot")))
    return {
        "disk": {"segment": log.hex(), "snapshot": snapshot.hex()},
        "wire": {name: protocol.frame(message).hex() for name, message in messages().items()},
    }


GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {"disk": {}, "wire": {}}


def test_what_is_written_to_disk_is_what_it_always_was() -> None:
    assert made()["disk"] == GOLDEN["disk"]


def test_what_was_written_to_disk_can_be_read() -> None:
    book, _ = story()
    restored, name = snapshots.restore(bytes.fromhex(GOLDEN["disk"]["snapshot"]))
    assert (state_of(restored), name) == (state_of(book), "spot")
    data = bytes.fromhex(GOLDEN["disk"]["segment"])
    assert frames.read_segment_header(data) == ("spot", 1)
    replayed, at = Book(), frames.SEGMENT_BYTES
    while at < len(data):
        frame = frames.decode(data, at, replayed.sequence + 1)
        replayed.replay(frame.notes)
        at = frame.end
    assert state_of(replayed) == state_of(book)


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
