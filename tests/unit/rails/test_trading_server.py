"""The core over real sockets: unauthenticated clients and garbage are rejected, other clients are served, failures have
an outcome."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rails.desk import IDENTITY, NAME, SECRET, WAIT_S, Desk, deposit, desk

from bursar.model.outcome import Outcome
from bursar.ports import Stream, SystemPorts
from bursar.rails.trading import (
    EventsGone,
    FixedLink,
    Floors,
    Known,
    NoConnection,
    Op,
    Operation,
    Reply,
    ServerLimits,
    Status,
    TradingClient,
    protocol,
    replies,
)
from bursar.rails.trading.client import FRAMES_MAX
from bursar.rails.trading.connection import Target, connect
from bursar.rails.trading.history import indexed

Case = Callable[[Desk], Awaitable[None]]


def play(folder: Path, case: Case, **options: Any) -> None:
    async def work() -> None:
        async with asyncio.timeout(WAIT_S), desk(folder, **options) as made:
            await case(made)

    asyncio.run(work())


async def stranger(made: Desk) -> Stream:
    """A bare connection."""
    return await made.ports.connect(made.address)


async def next_frame(stream: Stream) -> bytes:
    splitter = protocol.Splitter(protocol.ANSWER_BYTES_MAX)
    while True:
        data = await stream.read()
        if not data:
            return b""
        if found := splitter.feed(data):
            return found[0]


async def is_closed(stream: Stream) -> bool:
    """Whether the core ends the connection; whatever it still says is read over."""
    try:
        while await stream.read():
            pass
    except OSError:
        pass
    return True


async def log_in(made: Desk, secret: bytes = SECRET, ledger: str = "") -> tuple[Stream, bytes]:
    """A bare connection on which the handshake is made by hand; returns what was sent, too."""
    stream = await stranger(made)
    hello = protocol.decode_handshake(await next_frame(stream))
    proof = protocol.prove_login(secret, hello, b"n" * 32, 0, ledger)
    said = protocol.frame(protocol.Login(protocol.VERSION, b"n" * 32, 0, ledger, proof))
    stream.write(said)
    return stream, said


# --- who is let in


def test_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream, _ = await log_in(made, b"not the right secret")
        assert await is_closed(stream)
        client = await made.client(secret=b"not the right secret")
        reply = await client.deposit("sr-1", 1, "USDT", 1)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_REFUSED")
        assert made.core.state.sequence == 0
        assert any("does not know the secret" in line for line in made.log)

    play(tmp_path, case)


def test_a_core_that_does_not_know_the_secret_is_not_trusted(tmp_path: Path) -> None:
    """Mutual: the server at the address has to prove itself before anything is sent."""
    heard: list[bytes] = []

    async def impostor(stream: Stream) -> None:
        stream.write(protocol.frame(protocol.Hello(protocol.VERSION, NAME, IDENTITY, b"h" * 32)))
        heard.append(await next_frame(stream))
        stream.write(protocol.frame(protocol.Welcome(0, "", 1, 1, b"p" * 32)))
        heard.append(await next_frame(stream))

    async def work() -> Reply:
        ports = SystemPorts()
        tasks: list[asyncio.Task[None]] = []
        address = f"unix:{tmp_path}/impostor"
        listener = await ports.listen(address, lambda stream: tasks.append(asyncio.create_task(impostor(stream))))
        async with TradingClient(ports, address, name=NAME, secret=SECRET) as client:
            reply = await client.deposit("sr-1", 1, "USDT", 1)
        listener.close()
        await asyncio.gather(*tasks)
        return reply

    reply = asyncio.run(work())
    assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_REFUSED")
    assert heard[1:] in ([], [b""])


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    hello, nonce = protocol.Hello(2, "spot", IDENTITY, b"a" * 32), b"b" * 32
    mine = protocol.prove_login(SECRET, hello, nonce, 5, "")
    assert protocol.prove(SECRET, "core", hello, nonce, 5, "") != mine
    for other in (
        protocol.Hello(2, "margin", IDENTITY, b"a" * 32),
        protocol.Hello(2, "spot", "f" * 32, b"a" * 32),
        protocol.Hello(2, "spot", IDENTITY, b"c" * 32),
    ):
        assert protocol.prove_login(SECRET, other, nonce, 5, "") != mine
    assert protocol.prove_login(SECRET, hello, nonce, 5, "ledger") != mine


def test_a_replayed_handshake_is_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        good, said = await log_in(made)
        assert isinstance(protocol.decode_handshake(await next_frame(good)), protocol.Welcome)
        again = await stranger(made)
        again.write(said)
        assert await is_closed(again)

    play(tmp_path, case)


def test_the_wrong_core_is_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client(name="margin")
        reply = await client.deposit("sr-1", 1, "USDT", 1)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_REFUSED")
        assert "'spot', not 'margin'" in reply.detail

    play(tmp_path, case)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        with pytest.raises(ValueError, match="too short"):
            type(made.server)(made.ports, made.core, b"short", log=print)

    play(tmp_path, case)


def test_silence_during_the_handshake_ends_it(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        assert await is_closed(await stranger(made))
        assert made.server.connections == []

    play(tmp_path, case, limits=ServerLimits(handshake_s=0.05))


def test_a_client_that_has_to_make_way_in_its_handshake_comes_back(tmp_path: Path) -> None:
    """It is refused because there are too many, which needs no operator: the secret is right."""

    async def case(made: Desk) -> None:
        waits = await stranger(made)
        hello = protocol.decode_handshake(await next_frame(waits))
        assert isinstance(hello, protocol.Hello)
        await stranger(made)
        said = protocol.decode_handshake(await next_frame(waits))
        assert isinstance(said, protocol.Refused) and said.why == protocol.FULL
        heard: list[NoConnection] = []

        async def full(stream: Stream) -> None:
            stream.write(protocol.frame(hello))
            stream.write(protocol.frame(said))
            stream.close()

        listener = await made.ports.listen(f"unix:{tmp_path}/full", lambda s: asyncio.ensure_future(full(s)))
        try:
            await connect(made.ports, Target(listener.address, NAME, SECRET), FixedLink(), Known(), WAIT_S)
        except NoConnection as why:
            heard.append(why)
        listener.close()
        assert [why.code for why in heard] == ["NOT_CONNECTED"]

    play(tmp_path, case, limits=ServerLimits(strangers=1))


def test_too_many_clients_are_refused_and_room_comes_back(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        first = [await made.client() for _ in range(3)]
        for client in first:
            assert (await client.totals()).outcome is Outcome.SUCCESS
        late = await made.client()
        reply = await late.deposit(1, 1, "USDT", 1)
        assert (reply.outcome, reply.code) == (Outcome.NETWORK_ERROR, "NOT_CONNECTED")
        assert "3 clients are connected already" in reply.detail
        await first[0].close()
        await made.until(lambda: late.is_connected)
        assert (await late.deposit(1, 1, "USDT", 1)).outcome is Outcome.SUCCESS

    play(tmp_path, case, limits=ServerLimits(connections=3))


def test_connections_that_never_log_in_keep_no_client_out(tmp_path: Path) -> None:
    """The oldest makes way for each new one; clients that know the secret are let in, and stay."""

    async def case(made: Desk) -> None:
        old = await made.client()
        assert (await old.deposit(1, 1, "USDT", 1)).outcome is Outcome.SUCCESS
        silent = [await stranger(made) for _ in range(40)]
        new = await made.client()
        assert (await new.deposit(2, 1, "USDT", 1)).outcome is Outcome.SUCCESS
        assert (await old.deposit(3, 1, "USDT", 1)).outcome is Outcome.SUCCESS
        assert len(made.server.connections) == 2
        assert len(made.server.strangers) <= 4
        for stream in silent[:30]:
            assert await is_closed(stream)
        about = [line for line in made.log if "not logged in" in line]
        assert len(about) == 1  # one line for the outage, not one for each of them
        for stream in silent:
            stream.abort()

    play(tmp_path, case, limits=ServerLimits(strangers=4))


# --- garbage


GARBAGE = {
    "garbage bytes": b"GET / HTTP/1.1\r\n\r\n",
    "a frame too large": struct.pack(">I", protocol.REQUEST_BYTES_MAX + 1),
    "not MessagePack": struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
    "an empty frame": struct.pack(">I", 0),
    "no request": struct.pack(">I", 1) + b"\x90",
    "a negative amount": b"\x00\x00\x00\x10\x94\x0a\x01\x91\xa4USDT\x91\x96\x01\x01\x01\x00\xff\x00",
    "an asset out of its place": b"\x00\x00\x00\x0d\x94\x0a\x01\x90\x91\x96\x01\x01\x01\xcd\x01\x00\x05\x00",
    "an answer": protocol.frame(protocol.Noted(1, 1)),
    "an unknown status": protocol.frame(protocol.SetStatus(1, 1, 9)),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("when", ["before the handshake", "after it"])
def test_garbage_ends_its_connection_and_no_other(tmp_path: Path, what: str, when: str) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        assert (await client.deposit("sr-1", 1, "USDT", 5)).outcome is Outcome.SUCCESS
        if when == "before the handshake":
            stream = await stranger(made)
        else:
            stream, _ = await log_in(made)
            await next_frame(stream)
        stream.write(GARBAGE[what])
        assert await is_closed(stream)
        assert (await client.withdraw("sr-2", 1, "USDT", 5)).outcome is Outcome.SUCCESS
        assert made.core.state.sequence == 2
        assert client.is_connected

    play(tmp_path, case)


def test_half_a_frame_is_not_executed(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream, _ = await log_in(made)
        await next_frame(stream)
        whole = protocol.frame(protocol.Execute(1, *indexed([deposit(1)])))
        stream.write(whole[:-1])
        await stream.drain()
        stream.close()
        await made.until(lambda: not made.server.connections)
        assert made.core.state.sequence == 0

    play(tmp_path, case)


def test_a_frame_in_many_pieces_is_one_frame(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream, _ = await log_in(made)
        await next_frame(stream)
        for byte in protocol.frame(protocol.Execute(7, *indexed([deposit(1), deposit(2)]))):
            stream.write(bytes([byte]))
            await asyncio.sleep(0)
        answer = protocol.decode_answer(await next_frame(stream))
        assert answer == protocol.Done(7, 2, b"\0\0", [1, 2])

    play(tmp_path, case)


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        stream, _ = await log_in(made)
        await next_frame(stream)
        assert await is_closed(stream)

    play(tmp_path, case, limits=ServerLimits(idle_s=0.05))


def test_a_connection_with_too_much_waiting_is_not_read_from(tmp_path: Path) -> None:
    """Back-pressure: what one connection has waiting is bounded, and all of it is answered in the end."""

    async def case(made: Desk) -> None:
        stream, _ = await log_in(made)
        await next_frame(stream)
        most = 0
        for number in range(1, 400):
            stream.write(
                protocol.frame(protocol.Execute(number, *indexed([deposit(number * 100 + n) for n in range(50)])))
            )
        splitter = protocol.Splitter(protocol.ANSWER_BYTES_MAX)
        answered = 0
        while answered < 399:
            most = max(most, made.server.connections[0].waiting_bytes)
            answered += len(splitter.feed(await stream.read()))
        assert most < 4 * 1024 * 1024
        assert made.core.state.sequence == 399 * 50

    play(tmp_path, case, limits=ServerLimits(waiting_bytes=2_000))


# --- what the client makes of it


def test_calls_and_their_answers(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        assert await client.deposit("sr-100", 7, "USDT", 500) == Reply(Outcome.SUCCESS, "OK", 1)
        assert await client.deposit("sr-100", 7, "USDT", 500) == Reply(Outcome.SUCCESS, "OK", 1)
        assert (await client.deposit("sr-100", 7, "USDT", 501)).code == "MISMATCH"
        refused = await client.withdraw("sr-101", 7, "USDT", 501)
        assert refused == Reply(Outcome.EXPLICIT_FAIL, "INSUFFICIENT_BALANCE", 2)
        assert (await client.withdraw("sr-102", 7, "USDT", 200)).sequence == 3
        assert (await client.refund("sr-102", 7, "USDT", 200)).sequence == 4
        assert (await client.refund("sr-103", 7, "USDT", 1)).outcome is Outcome.UNKNOWN
        assert (await client.cancel("sr-104", Op.DEPOSIT)).code == "CANCELLED"
        assert (await client.cancel("sr-100", Op.DEPOSIT)).outcome is Outcome.SUCCESS
        assert (await client.lock("sr-105", 7, "USDT", 60)).outcome is Outcome.SUCCESS
        assert (await client.unlock("sr-106", 7, "USDT", 10)).outcome is Outcome.SUCCESS
        assert (await client.settle("sr-107", 7, "USDT", 20, 8)).outcome is Outcome.SUCCESS
        balances = await client.balances(7)
        assert (balances.balances["USDT"].available, balances.balances["USDT"].frozen) == (450, 30)
        totals = await client.totals()
        assert (totals.totals, totals.sequence) == ({"USDT": 500}, 8)
        found = await client.lookup([("sr-100", Op.DEPOSIT), ("sr-101", Op.WITHDRAW), ("sr-999", Op.DEPOSIT)])
        assert [(reply.code, reply.sequence) for reply in found.replies] == [
            ("OK", 1),
            ("INSUFFICIENT_BALANCE", 2),
            ("NOT_FOUND", 0),
        ]
        query = await client.query("sr-102", Op.REFUND)
        assert (query.code, query.user, query.asset, query.amount, query.sequence) == ("OK", 7, "USDT", 200, 4)
        assert (await client.query("sr-9", Op.REFUND)).outcome is Outcome.UNKNOWN
        assert (await client.set_status(7, Status.FROZEN)).sequence == 9
        assert (await client.deposit("sr-110", 7, "USDT", 1)).code == "ACCOUNT_FROZEN"
        assert (await client.balances(7)).status is Status.FROZEN
        assert (await client.prune(room="sr-110", forget="sr-103", keep=["sr-100"])).outcome is Outcome.SUCCESS
        assert client.floors == Floors(110, 103)
        assert (await client.withdraw("sr-102", 7, "USDT", 200)).code == "PRUNED"
        assert (await client.deposit("sr-100", 7, "USDT", 500)).code == "OK"
        assert client.sequence == 12  # both floors, in two steps

    play(tmp_path, case)


@pytest.mark.parametrize("amount", [-1, 2**64, 1.5, "5", True, None])
def test_what_cannot_be_put_on_the_wire_is_no_refusal(tmp_path: Path, amount: Any) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        reply = await client.deposit("sr-1", 1, "USDT", amount)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "MALFORMED")
        assert (await client.deposit("17", 1, "USDT", 1)).code == "MALFORMED"
        assert (await client.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_concurrent_calls_share_frames(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        await client.deposit("sr-1", 1, "USDT", 1)
        before = client._number
        replies = await asyncio.gather(*[client.deposit(10 + n, n % 7, "USDT", 3) for n in range(3000)])
        assert {reply.outcome for reply in replies} == {Outcome.SUCCESS}
        assert len({reply.sequence for reply in replies}) == 3000
        assert client._number - before <= 6

    play(tmp_path, case)


def test_execute_keeps_order_and_answers_each(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        replies = await client.execute(
            [
                Operation(Op.DEPOSIT, "sr-1", 1, "USDT", 10),
                Operation(Op.WITHDRAW, "sr-2", 1, "USDT", 11),
                Operation(Op.WITHDRAW, "bad", 1, "USDT", 11),
                Operation(Op.WITHDRAW, "sr-3", 1, "USDT", 10),
            ]
        )
        assert [reply.code for reply in replies] == ["OK", "INSUFFICIENT_BALANCE", "MALFORMED", "OK"]

    play(tmp_path, case)


def test_an_address_without_a_listener_is_a_network_error_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with TradingClient(SystemPorts(), f"unix:{tmp_path}/none", name=NAME, secret=SECRET) as client:
            for _ in range(3):
                reply = await client.deposit("sr-1", 1, "USDT", 1)
                assert (reply.outcome, reply.code) == (Outcome.NETWORK_ERROR, "NOT_CONNECTED")
            assert (await client.totals()).outcome is Outcome.NETWORK_ERROR
            assert (await client.balances(1)).outcome is Outcome.NETWORK_ERROR
            assert (await client.lookup([("sr-1", Op.DEPOSIT)])).outcome is Outcome.NETWORK_ERROR
        assert (await client.deposit("sr-1", 1, "USDT", 1)).code == "CLOSED"

    asyncio.run(work())


def test_a_core_that_stops_answering_is_a_timeout_and_a_new_connection(tmp_path: Path) -> None:
    """Half-open: the call times out, the silent connection is dropped, and the next one works."""

    async def case(made: Desk) -> None:
        client = await made.client(timeout_s=0.2)
        assert (await client.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS
        answer, made.core.when_durable = made.core.when_durable, lambda answer: None  # type: ignore[method-assign]
        silent = await client.deposit("sr-2", 1, "USDT", 1)
        assert (silent.outcome, silent.code) == (Outcome.TIMEOUT, "NO_REPLY")
        made.core.when_durable = answer  # type: ignore[method-assign]
        while (again := await client.deposit("sr-2", 1, "USDT", 1)).outcome is not Outcome.SUCCESS:
            assert again.outcome in (Outcome.NETWORK_ERROR, Outcome.TIMEOUT)
            await asyncio.sleep(0.01)
        assert (await client.balances(1)).balances["USDT"].available == 2

    play(tmp_path, case)


def test_a_connection_that_breaks_with_calls_on_their_way_is_a_network_error(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        await client.deposit("sr-1", 1, "USDT", 1)
        made.core.when_durable = lambda answer: None  # type: ignore[method-assign]
        calls = [asyncio.create_task(client.deposit(10 + n, 1, "USDT", 1)) for n in range(5)]
        await made.until(lambda: made.core.state.sequence == 6)
        made.server.connections[0].stream.abort()
        for reply in await asyncio.gather(*calls):
            assert (reply.outcome, reply.code) == (Outcome.NETWORK_ERROR, "CONNECTION_LOST")

    play(tmp_path, case)


def test_the_client_comes_back_when_the_core_does(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as made:
            client = TradingClient(made.ports, made.address, name=NAME, secret=SECRET)
            client.start()
            assert (await client.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS
        assert (await client.deposit("sr-2", 1, "USDT", 1)).outcome is Outcome.NETWORK_ERROR
        async with desk(tmp_path) as made:
            while (reply := await client.deposit("sr-1", 1, "USDT", 1)).outcome is not Outcome.SUCCESS:
                assert reply.outcome is Outcome.NETWORK_ERROR
                await asyncio.sleep(0.01)
            assert reply.sequence == 1
            await client.close()

    asyncio.run(work())


def test_a_core_that_has_forgotten_serves_no_client(tmp_path: Path) -> None:
    """T33: a core restored from an old disk is found out by the sequence that a client has seen."""

    async def case(made: Desk) -> None:
        innocent = await made.client()
        assert (await innocent.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS
        knowing = await made.client(link=FixedLink(Known(seen=5)))
        reply = await knowing.deposit("sr-2", 1, "USDT", 1)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_BEHIND")
        await made.until(lambda: innocent.trouble.startswith("CORE_BEHIND"))
        reply = await innocent.deposit("sr-3", 1, "USDT", 1)
        assert (reply.outcome, reply.code) == (Outcome.UNKNOWN, "CORE_BEHIND")
        assert any(line.startswith("CRITICAL") for line in made.log)
        assert made.core.state.sequence == 1

    play(tmp_path, case)


# --- events


def test_a_subscriber_gets_everything_in_order_from_where_it_says(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client()
        for n in range(1, 30):
            await client.deposit(n, 1, "USDT", n)
        await client.withdraw(40, 1, "USDT", 10**6)
        live = [asyncio.create_task(client.deposit(50 + n, 1, "BTC", 1)) for n in range(20)]
        seen = []
        async for event in client.events(10):
            seen.append(event)
            if event.sequence == 50:
                break
        await asyncio.gather(*live)
        assert [event.sequence for event in seen] == list(range(11, 51))
        assert (seen[0].kind, seen[0].id, seen[0].amount, seen[0].happened) == ("DEPOSIT", 11, 11, True)
        refused = seen[19]
        assert (refused.kind, refused.code, refused.happened) == ("WITHDRAW", "INSUFFICIENT_BALANCE", False)

    play(tmp_path, case)


def test_a_subscriber_gets_events_gone_when_the_log_is_pruned(tmp_path: Path) -> None:
    async def work() -> None:
        for n in range(4):
            async with desk(tmp_path, segment_bytes=500) as made:
                client = await made.client()
                for id_ in range(1, 21):
                    await client.deposit(100 * (n + 1) + id_, 1, "USDT", 1)
        async with desk(tmp_path, segment_bytes=500) as made:
            client = await made.client()
            with pytest.raises(EventsGone):
                await anext(client.events(0))
            assert (await anext(client.events(70))).sequence == 71

    asyncio.run(work())


def test_a_slow_subscriber_is_cut_off_and_others_go_on(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        slow, _ = await log_in(made)
        await next_frame(slow)
        slow.write(protocol.frame(protocol.Subscribe(1, 0)))
        await next_frame(slow)
        await made.until(lambda: len(made.core.followers) == 1)
        client = await made.client()
        id_ = 1
        while made.core.followers:
            await client.execute([Operation(Op.DEPOSIT, id_ + n, 1, "USDT", 1) for n in range(1000)])
            id_ += 1000
            assert id_ < 1_000_000
        assert (await client.totals()).totals == {"USDT": id_ - 1}

    play(tmp_path, case, limits=ServerLimits(unsent_bytes=50_000))


def test_a_subscriber_with_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        client = await made.client(secret=b"not the right secret")
        with pytest.raises(NoConnection):
            await anext(client.events(0))

    play(tmp_path, case)


# --- the end


def test_stopping_answers_what_was_asked_and_leaves_a_snapshot(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as made:
            client = await made.client()
            await client.deposit("sr-1", 1, "USDT", 1)
            calls = [asyncio.create_task(client.deposit(10 + n, 1, "USDT", 1)) for n in range(50)]
            await made.until(lambda: made.core.state.sequence == 51)
            made.server.stop()
            assert {(await call).outcome for call in calls} == {Outcome.SUCCESS}
        async with desk(tmp_path) as made:
            assert (made.core.recovery.snapshot, made.core.recovery.frames) == (51, 0)

    asyncio.run(work())


def test_tcp_works_as_well(tmp_path: Path) -> None:
    async def work() -> None:
        async with desk(tmp_path) as made:
            listener = await made.ports.listen("tcp:127.0.0.1:0", made.server._accept)
            async with TradingClient(made.ports, listener.address, name=NAME, secret=SECRET) as client:
                assert (await client.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS
            listener.close()

    asyncio.run(work())


@pytest.mark.parametrize("address", ["spot", "unix:", "tcp:host", "tcp::1", "tcp:host:99999", "udp:host:1", "tcp:h:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="unix:PATH or tcp:HOST:PORT"):
        asyncio.run(SystemPorts().connect(address))


def test_a_socket_that_is_in_use_is_not_taken_over(tmp_path: Path) -> None:
    async def case(made: Desk) -> None:
        with pytest.raises(OSError, match="already"):
            await made.ports.listen(made.address, lambda _: None)
        client = await made.client()
        assert (await client.deposit("sr-1", 1, "USDT", 1)).outcome is Outcome.SUCCESS

    play(tmp_path, case)


def test_a_window_full_of_frames_that_are_never_answered_is_a_silent_connection(tmp_path: Path) -> None:
    """Nothing more can be sent on it, so no later call would notice: it is given up, and the next one is used."""

    async def body() -> None:
        async with desk(tmp_path) as here:
            client = await here.client(timeout_s=0.2)
            assert (await client.deposit(1, 7, "USDT", 5)).outcome is Outcome.SUCCESS
            client._inflight = {number: [] for number in range(-FRAMES_MAX, 0)}  # sent, and lost on the way
            unsent = await client.deposit(2, 7, "USDT", 5)
            assert (unsent.outcome, unsent.code) == (Outcome.NETWORK_ERROR, replies.NOT_SENT_IN_TIME)
            async with asyncio.timeout(10):
                while (await client.deposit(2, 7, "USDT", 5)).outcome is not Outcome.SUCCESS:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # real processes, which send no notice

    asyncio.run(body())
