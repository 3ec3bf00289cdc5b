"""The signer's log: what a crash may leave is cut and kept aside, any other damage stops the signer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests import signing
from tests.signing import FakeKeys, codecs, payment, request, unsigned

from bursar.ports import SystemPorts
from bursar.signer.entries import Entry, Started, Tombstone
from bursar.signer.errors import NoLog, SignerDamaged, SignerInUse
from bursar.signer.log import HEADER_BYTES, Log, read_frames
from bursar.signer.protocol import LogEntry, Never, Signature
from bursar.signer.service import Service
from bursar.signer.state import State

PORTS = SystemPorts()


async def opened(folder: Path, *, new: bool = False) -> Service:
    return await Service.open(PORTS, str(folder), signing.policy(), FakeKeys(), codecs, new=new)


async def work(service: Service, *questions: Any) -> list[Any]:
    """Ask all of it at once, and close."""
    running = asyncio.create_task(service.run())
    answers = await asyncio.gather(*questions)
    service.stop()
    await running
    service.close()
    return answers


def filled(folder: Path) -> bytes:
    """A log with a few frames: created, started, and two attempts in frames of their own."""

    async def fill() -> None:
        service = await opened(folder, new=True)
        await work(service, service.sign("payouts", request("p1", nonce=0)))
        service = await opened(folder)
        await work(service, service.cancel("payouts", "p2", 0))

    asyncio.run(fill())
    return (folder / "log").read_bytes()


def loaded(folder: Path) -> State:
    async def load() -> State:
        service = await opened(folder)
        service.close()
        return service.state

    return asyncio.run(load())


def test_what_was_signed_is_known_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path)
    state = loaded(tmp_path)
    first = state.attempt("p1", 0)
    second = state.attempt("p2", 0)
    assert first is not None
    assert second is not None
    assert isinstance(first.answer, Signature)
    assert second.answer == Never(sequence=2)
    assert state.nonce_floor(56, signing.HOT) == 1
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_many_waiting_requests_share_one_frame(tmp_path: Path) -> None:
    """Group commit: a hundred requests that wait together are one fsync."""

    async def story() -> None:
        service = await opened(tmp_path, new=True)
        await work(service, *(service.cancel("payouts", f"p{n}", 0) for n in range(100)))

    asyncio.run(story())
    frames = list(read_frames(PORTS.files(), f"{tmp_path}/log"))
    assert len(frames) <= 3
    assert loaded(tmp_path).sequence == 100


def test_a_cut_at_every_byte_of_the_last_frame_is_a_torn_end(tmp_path: Path) -> None:
    """Cut at every byte: the end is cut off and kept aside, what was before it is whole, and the signer goes on."""
    data = filled(tmp_path)
    last = data.rfind(b"bursar-log 1 ")
    for size in range(last + 1, len(data)):
        (tmp_path / "log").write_bytes(data[:size])
        state = loaded(tmp_path)
        assert state.attempt("p1", 0) is not None
        assert state.attempt("p2", 0) is None
        kept = tmp_path / f"torn-{last:012d}"
        assert kept.read_bytes() == data[last:size]
        kept.unlink()


def test_a_flipped_bit_before_the_last_frame_stops_the_signer(tmp_path: Path) -> None:
    """One flipped bit anywhere else: refused, nothing changed, and the message says what to do."""
    data = filled(tmp_path)
    last = data.rfind(b"bursar-log 1 ")
    for at in range(0, last, 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x04
        (tmp_path / "log").write_bytes(damaged)
        with pytest.raises(SignerDamaged, match="newest whole copy"):
            loaded(tmp_path)
        assert (tmp_path / "log").read_bytes() == damaged


def test_an_edited_entry_with_a_right_checksum_breaks_the_chain(tmp_path: Path) -> None:
    """Given an attacker who changes an entry and mends its frame, then the hash of the entry gives it away."""
    data = filled(tmp_path)
    frames = [b"bursar-log 1 " + part for part in data.split(b"bursar-log 1 ")[1:]]
    for rehash in (False, True):
        payload = json.loads(frames[1][HEADER_BYTES:])
        payload[0][1]["at_us"] += 1
        text = json.dumps(payload[0][1], separators=(",", ":")).encode()
        hash_ = hashlib.sha256(b"bursar signer log 1\n" + text).hexdigest() if rehash else payload[0][0]
        rest = json.dumps(payload[1:], separators=(",", ":")).encode()[1:-1]
        made = b'[["%s",%s]%s]' % (hash_.encode(), text, b"," + rest if rest else b"")
        header = b"bursar-log 1 %010d %s " % (len(made), hashlib.sha256(made).hexdigest().encode())
        (tmp_path / "log").write_bytes(b"".join([frames[0], header, made, b"\n", *frames[2:]]))
        with pytest.raises(SignerDamaged, match=r"does not follow|not what its hash says"):
            loaded(tmp_path)


def test_a_frame_that_was_left_out_is_noticed(tmp_path: Path) -> None:
    data = filled(tmp_path)
    frames = [b"bursar-log 1 " + part for part in data.split(b"bursar-log 1 ")[1:]]
    for left_out in range(len(frames) - 1):
        (tmp_path / "log").write_bytes(b"".join(frames[:left_out] + frames[left_out + 1 :]))
        with pytest.raises(SignerDamaged):
            loaded(tmp_path)


def test_two_signers_never_share_a_log(tmp_path: Path) -> None:
    async def story() -> None:
        one = await opened(tmp_path, new=True)
        with pytest.raises(SignerInUse):
            await opened(tmp_path)
        one.close()

    asyncio.run(story())


def test_a_log_is_made_once_and_on_purpose(tmp_path: Path) -> None:
    """Given a missing log, then no empty one takes its place by itself: it would have forgotten every signature."""

    async def story() -> None:
        with pytest.raises(NoLog, match="--new-log once"):
            await opened(tmp_path)
        (await opened(tmp_path, new=True)).close()
        with pytest.raises(NoLog, match="already"):
            await opened(tmp_path, new=True)

    asyncio.run(story())


def test_pages_of_the_log(tmp_path: Path) -> None:
    """Signatures and tombstones alone, in order, each once, whatever the page's size."""

    async def story() -> None:
        service = await opened(tmp_path, new=True)
        running = asyncio.create_task(service.run())
        for number in range(6):
            await service.sign("payouts", request(f"p{number}", nonce=number))
            await service.halt("payouts", "a drill")
            await service.unhalt(["ann", "ben"], [])
            await service.cancel("payouts", f"p{number}", 1)
        for size in (1, 2, 5, 100):
            at = 0
            found: list[LogEntry] = []
            while page := await service.log(at, size):
                assert len(page) <= size
                found += page
                at = page[-1].sequence
            assert [entry.sequence for entry in found] == list(range(1, 13))
            assert [bool(entry.raw) for entry in found] == [True, False] * 6
            assert found[0].request is not None
            assert found[0].request.unsigned == unsigned(nonce=0)
            assert found[1].request is None
        service.stop()
        await running
        service.close()

    asyncio.run(story())


def test_starts_and_halts_are_entries_and_no_promises(tmp_path: Path) -> None:
    """A restored signer must not catch up with a caller's mark by being started a few times."""
    filled(tmp_path)
    before = loaded(tmp_path)
    for _ in range(3):
        asyncio.run(_halt(tmp_path))
    after = loaded(tmp_path)
    assert after.number > before.number + 3
    assert after.sequence == before.sequence == 2
    kinds = {type(entry.what) for entry in entries_of(tmp_path)}
    assert {Started, Tombstone} <= kinds


async def _halt(folder: Path) -> None:
    service = await opened(folder)
    await work(service, service.halt("local", "a drill"))


def entries_of(folder: Path) -> list[Entry]:
    log, state = Log(PORTS.files(), str(folder)), State()
    log.open(state, None)
    log.close()
    return log.read(-1, 10**9, 10**6, 10**9)


def test_payments_are_in_the_log_whole(tmp_path: Path) -> None:
    """An auditor finds who approved what, in the log alone."""
    filled(tmp_path)
    (signed,) = [entry.what for entry in entries_of(tmp_path) if entry.what.__class__.__name__ == "Signed"]
    assert signed.request.payment == payment("p1")  # type: ignore[union-attr]
    assert signed.request.authorization.approvals[0].approver == "ann"  # type: ignore[union-attr]
