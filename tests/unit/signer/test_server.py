"""The signer over its socket: callers with their rights, strangers, and an attacker between the two sides."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import signing
from tests.signing import SECRET, FakeKeys, codecs, payment, request

from bursar.model.authorizations import DeadAttempt, Release
from bursar.ports import Stream, SystemPorts
from bursar.signer import wire
from bursar.signer.client import FixedLink, Known, SignerClient, Target
from bursar.signer.protocol import Never, Signature, Signer, SignerRefused, SignerUnavailable
from bursar.signer.server import Server, ServerLimits
from bursar.signer.service import Service

PORTS = SystemPorts()
VIEWER = b"the secret of a viewer, 32 bytes and more"
LOCAL = b"the secret of the command on the host itself"
WAIT_S = 20.0


class Desk:
    """A signer that listens, and what is needed to come to it."""

    def __init__(self, service: Service, server: Server, folder: Path) -> None:
        self.service = service
        self.server = server
        self.address, self.local = f"unix:{folder}/s", f"unix:{folder}/l"

    def client(self, caller: str = "payouts", secret: bytes = SECRET, **options: Any) -> SignerClient:
        given: dict[str, Any] = {"name": "hot", "timeout_s": 5.0, "caller": caller, "secret": secret}
        address = options.pop("address", self.address)
        return SignerClient(PORTS, address, **given | options)


@asynccontextmanager
async def desk(folder: Path, **limits: Any) -> AsyncIterator[Desk]:
    service = await Service.open(PORTS, f"{folder}/data", signing.policy(), FakeKeys(), codecs, new=True)
    secrets = {"payouts": SECRET, "viewer": VIEWER}
    server = Server(PORTS, service, secrets, local_secret=LOCAL, limits=ServerLimits(**limits), log=lambda _: None)
    made = Desk(service, server, folder)
    ready = asyncio.Event()
    running = asyncio.create_task(server.run(made.address, made.local, lambda _: ready.set()))
    await ready.wait()
    try:
        async with asyncio.timeout(WAIT_S):
            yield made
    finally:
        server.stop()
        await running
        service.close()


def play(folder: Path, story: Callable[[Desk], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        async with desk(folder, **limits) as made:
            await story(made)

    asyncio.run(run())


def test_every_question_of_the_protocol(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        async with at.client() as client:
            signer: Signer = client
            assert (await signer.preview(payment(), request().authorization, "hot")).nonce_floor == 0
            signed = await signer.sign(request())
            assert isinstance(signed, Signature)
            assert await signer.cancel("p1", 0) == signed
            assert await signer.cancel("p1", 1) == Never(sequence=2)
            first, second = await signer.log(0)
            assert (first.raw, second.raw) == (signed.raw, b"")
            assert first.request == request()
            status = await signer.status()
            assert (status.name, status.sequence, status.halted) == ("hot", 2, "")
            assert status.identity == at.service.state.identity
            with pytest.raises(SignerRefused) as no:
                await signer.sign(request("p2", nonce=0))
            assert (no.value.reason, no.value.denied, no.value.sequence) == ("NONCE_TAKEN", False, 2)

    play(tmp_path, story)


def test_many_questions_at_once(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        async with at.client() as client:
            found = await asyncio.gather(*(client.cancel(f"p{n}", 0) for n in range(500)))
            assert sorted(never.sequence for never in found) == list(range(1, 501))

    play(tmp_path, story, in_flight=8)


def test_a_caller_without_the_right_is_refused(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        async with at.client("viewer", VIEWER) as viewer:
            assert (await viewer.status()).halted == ""
            for ask in (
                viewer.sign(request()),
                viewer.cancel("p1", 0),
                viewer.log(0),
                viewer.preview(payment(), request().authorization, "hot"),
                viewer.halt("no right to"),
                viewer.release(Release(payout="p1", dead=()), []),
            ):
                with pytest.raises(SignerRefused) as no:
                    await ask
                assert no.value.reason == "NOT_PERMITTED"
        assert not at.service.state.payouts
        assert not at.service.state.halted

    play(tmp_path, story)


def test_a_release_needs_no_right_to_sign(tmp_path: Path) -> None:
    """Operators hand it in, on the host or with a secret of their own: not with the worker's."""

    async def story(at: Desk) -> None:
        async with at.client() as client, at.client("local", LOCAL, address=at.local) as local:
            signed = await client.sign(request())
            assert isinstance(signed, Signature)
            release = Release(payout="p1", dead=(DeadAttempt(attempt=0, hash=signed.hash),))
            with pytest.raises(SignerRefused, match="NOT_RELEASED"):
                await local.release(release, [signing.approval(release, "ann")])
            await local.release(release, [signing.approval(release, name) for name in ("ann", "ben")])
            assert isinstance(await client.sign(request(attempt=1, nonce=7)), Signature)

    play(tmp_path, story)


def test_a_halt_is_lifted_on_the_host_alone(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        async with at.client() as client:
            await client.halt("a drill")
            with pytest.raises(SignerRefused, match="NOT_PERMITTED"):
                await client.unhalt(["ann", "ben"], [])
            with pytest.raises(SignerRefused, match="HALTED"):
                await client.sign(request())
            async with at.client("local", LOCAL, address=at.local) as local:
                with pytest.raises(SignerRefused, match="NOT_PERMITTED"):
                    await local.sign(request())
                await local.unhalt(["ann", "ben"], [])
            assert isinstance(await client.sign(request()), Signature)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("caller", "secret", "where"),
    [
        ("payouts", VIEWER, "address"),  # wrong secret
        ("stranger", SECRET, "address"),  # unknown caller
        ("local", LOCAL, "address"),  # the host's own secret, from outside
        ("payouts", SECRET, "local"),  # a caller's, on the host's socket
        ("viewer", SECRET, "address"),  # another caller's
    ],
)
def test_who_does_not_know_the_secret_hears_nothing(tmp_path: Path, caller: str, secret: bytes, where: str) -> None:
    async def story(at: Desk) -> None:
        async with at.client(caller, secret, address=getattr(at, where)) as client:
            with pytest.raises(SignerUnavailable, match="ended the handshake"):
                await client.status()

    play(tmp_path, story)


def test_a_signer_that_does_not_know_the_secret_is_not_believed(tmp_path: Path) -> None:
    """An impostor at the address: it can greet, and prove nothing."""

    async def run() -> None:
        def accept(stream: Stream) -> None:
            stream.write(wire.frame(wire.Hello(wire.VERSION, "hot", "1" * 32, b"n" * 32)))
            stream.write(wire.frame(wire.Welcome(7, b"p" * 32)))

        listener = await PORTS.listen(f"unix:{tmp_path}/i", accept)
        options = {"name": "hot", "caller": "payouts", "secret": SECRET}
        async with SignerClient(PORTS, f"unix:{tmp_path}/i", **options) as client:  # type: ignore[arg-type]
            with pytest.raises(SignerUnavailable, match="does not know the secret"):
                await client.sign(request())
        listener.close()

    asyncio.run(run())


async def by_hand(at: Desk) -> tuple[Stream, wire.Hello, wire.Login]:
    """Log in without the client."""
    stream = await PORTS.connect(at.address)
    hello = wire.decode_handshake((await frames(stream, 1))[0])
    assert isinstance(hello, wire.Hello)
    login = wire.Login(wire.VERSION, "payouts", b"n" * 32, "", 0, b"")
    login = msgspec.structs.replace(login, proof=wire.prove_login(SECRET, hello, login))
    stream.write(wire.frame(login))
    assert isinstance(wire.decode_handshake((await frames(stream, 1))[0]), wire.Welcome)
    return stream, hello, login


async def frames(stream: Stream, count: int) -> list[bytes]:
    splitter, found = wire.Splitter(wire.ANSWER_BYTES_MAX), list[bytes]()
    while len(found) < count:
        data = await stream.read()
        if not data:
            raise EOFError
        found += splitter.feed(data)
    return found


async def is_closed(stream: Stream) -> None:
    """The other side ends it, without another word."""
    try:
        assert not await stream.read()
    except OSError:
        return


def test_a_replayed_handshake_is_worth_nothing(tmp_path: Path) -> None:
    """Given a recorded login, then sending it again on a new connection proves nothing: the signer's nonce is new."""

    async def story(at: Desk) -> None:
        stream, _, login = await by_hand(at)
        again = await PORTS.connect(at.address)
        await frames(again, 1)
        again.write(wire.frame(login))
        await is_closed(again)
        stream.close()

    play(tmp_path, story)


def test_a_proof_sent_back_is_worth_nothing() -> None:
    """The role is in the proof: what a caller proves is no proof of a signer, nor a session key of the other way."""
    hello = wire.Hello(wire.VERSION, "hot", "1" * 32, b"n" * 32)
    roles = ("caller", "signer", "session of the caller", "session of the signer")
    proofs = {wire.prove(SECRET, role, hello, "payouts", b"m" * 32) for role in roles}
    assert len(proofs) == 4


@pytest.mark.parametrize("attack", ["flip", "replay", "swap", "drop", "unsealed"])
def test_an_altered_frame_ends_the_connection_and_signs_nothing(tmp_path: Path, attack: str) -> None:
    """In the middle: a frame is changed, repeated, put before another, left out, or made without the key."""

    async def story(at: Desk) -> None:
        stream, hello, login = await by_hand(at)
        seals = wire.Seals(SECRET, hello, "payouts", login.nonce, is_signer=False)
        first, second = (seals.seal(wire.AskCancel(n, f"p{n}", 0)) for n in (1, 2))
        match attack:
            case "flip":
                sent = [first[:-1] + bytes([first[-1] ^ 1])]
            case "replay":
                sent = [first, first]
            case "swap":
                sent = [second, first]
            case "drop":
                sent = [second]
            case _:
                payload = msgspec.msgpack.encode(wire.AskCancel(1, "p1", 0))
                sent = [struct.pack(">I", len(payload) + 32) + bytes(32) + payload]
        stream.write(b"".join(sent))
        if attack == "replay":
            with pytest.raises(EOFError):
                await frames(stream, 2)
        else:
            await is_closed(stream)
        assert len(at.service.state.payouts) == (1 if attack == "replay" else 0)

    play(tmp_path, story)


def test_altered_answers_are_not_believed(tmp_path: Path) -> None:
    """Given an attacker who changes one bit of each answer, then the caller learns nothing, and knows that."""

    async def story(at: Desk) -> None:
        seen = 0

        async def pump(read: Stream, write: Stream, *, alter: bool) -> None:
            nonlocal seen
            while data := await read.read():
                if alter:
                    seen += 1
                    if seen > 2:  # behind Hello and Welcome
                        data = data[:-1] + bytes([data[-1] ^ 1])
                write.write(data)
            write.close()

        async def relay(near: Stream) -> None:
            far = await PORTS.connect(at.address)
            await asyncio.gather(pump(near, far, alter=False), pump(far, near, alter=True), return_exceptions=True)

        tasks: list[asyncio.Task[None]] = []
        address = at.address + "-relay"
        listener = await PORTS.listen(address, lambda stream: tasks.append(asyncio.create_task(relay(stream))))
        async with at.client(address=address) as client:
            with pytest.raises(SignerUnavailable):
                await client.sign(request())
        async with at.client() as honest:
            signed = await honest.sign(request())
            assert isinstance(signed, Signature)
            assert signed.sequence == 1
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(tmp_path, story)


def test_strangers_disturb_no_caller(tmp_path: Path) -> None:
    """Silence, garbage, half a frame, one that is too large: each ends its own connection, and callers are served."""

    async def story(at: Desk) -> None:
        async with at.client() as client:
            await client.status()
            strangers = [await PORTS.connect(at.address) for _ in range(12)]
            for number, stream in enumerate(strangers):
                garbage = (b"", b"\x00" * 40, b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x10half")
                stream.write(garbage[number % len(garbage)])
            assert isinstance(await client.sign(request()), Signature)
            async with at.client() as another:  # though there are more strangers than places for them
                assert isinstance(await another.sign(request()), Signature)
            for stream in strangers:
                while await _open(stream):
                    pass
            assert isinstance(await client.sign(request()), Signature)

    play(tmp_path, story, strangers=4, handshake_s=0.3)


async def _open(stream: Stream) -> bool:
    try:
        return bool(await stream.read())
    except OSError:
        return False


def test_a_request_that_is_too_large_ends_its_connection(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        stream, hello, login = await by_hand(at)
        seals = wire.Seals(SECRET, hello, "payouts", login.nonce, is_signer=False)
        stream.write(seals.seal(wire.AskHalt(1, "x" * wire.REQUEST_BYTES_MAX)))
        await is_closed(stream)
        assert not at.service.state.halted

    play(tmp_path, story)


def test_too_many_callers_are_refused_and_the_host_is_not(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        async with at.client() as one:
            await one.status()
            async with at.client() as other:
                with pytest.raises(SignerUnavailable, match="FULL"):
                    await other.status()
            async with at.client("local", LOCAL, address=at.local) as local:
                assert (await local.status()).name == "hot"

    play(tmp_path, story, connections=1)


def test_one_caller_leaves_room_for_others(tmp_path: Path) -> None:
    """A thief with a worker's secret connects as often as it can: an operator still halts from elsewhere."""

    async def story(at: Desk) -> None:
        async with at.client() as one, at.client() as two:
            await asyncio.gather(one.status(), two.status())
            async with at.client() as three:
                with pytest.raises(SignerUnavailable, match="FULL"):
                    await three.status()
            async with at.client("viewer", VIEWER) as viewer:
                assert (await viewer.status()).name == "hot"

    play(tmp_path, story, connections=4, connections_of_caller=2)


def test_strangers_in_the_network_do_not_keep_the_host_out(tmp_path: Path) -> None:
    """A halt on the host is heard though the network opens connections faster than one logs in."""

    async def story(at: Desk) -> None:
        near = await PORTS.connect(at.local)
        assert await near.read(), "the greeting"
        far = [await PORTS.connect(at.address) for _ in range(12)]
        for stream in far[-4:]:
            assert await stream.read()
        assert [one.is_local for one in at.server.strangers].count(True) == 1
        near.close()
        for stream in far:
            stream.close()

    play(tmp_path, story, strangers=4)


def test_a_caller_that_may_only_look_can_not_stop_the_signer(tmp_path: Path) -> None:
    """To claim a sequence that never was is a halt that two people have to lift: not for whom nothing rests on it."""

    async def story(at: Desk) -> None:
        known = Known(identity=at.service.state.identity, seen=2**60)
        async with at.client("viewer", VIEWER, link=FixedLink(known)) as liar:
            with pytest.raises(SignerUnavailable, match="BEHIND"):
                await liar.status()
        assert not at.service.state.behind
        async with at.client() as client:
            assert isinstance(await client.sign(request()), Signature)

    play(tmp_path, story)


def test_a_caller_that_has_seen_more_is_not_served(tmp_path: Path) -> None:
    """Restored from an old disk: the caller is refused, and so is every other from then on (W33)."""

    async def story(at: Desk) -> None:
        async with at.client() as client:
            await client.sign(request())
            known = Known(identity=at.service.state.identity, seen=2)
            async with at.client(link=FixedLink(known)) as ahead:
                with pytest.raises(SignerUnavailable, match="BEHIND"):
                    await ahead.cancel("p2", 0)
            with pytest.raises(SignerUnavailable):
                await client.cancel("p2", 0)
        async with at.client("local", LOCAL, address=at.local) as local:
            assert "behind" in (await local.status()).halted
        assert list(at.service.state.payouts) == ["p1"]

    play(tmp_path, story)


def test_another_log_is_not_spoken_to(tmp_path: Path) -> None:
    async def story(at: Desk) -> None:
        known = Known(identity="f" * 32, seen=10)
        async with at.client(link=FixedLink(known)) as client:
            with pytest.raises(SignerUnavailable, match="identity"):
                await client.status()
        assert not at.service.state.behind  # it was not even told the sequence

        async with at.client(name="cold") as client:
            with pytest.raises(SignerUnavailable, match="this is the signer 'hot'"):
                await client.status()

    play(tmp_path, story)


def test_a_caller_whose_secret_changed_is_put_out(tmp_path: Path) -> None:
    """Given a policy that was read anew, then old secrets end with their connections."""

    async def story(at: Desk) -> None:
        async with at.client() as client, at.client("viewer", VIEWER) as viewer:
            await client.status()
            await viewer.status()
            at.server.use({"payouts": SECRET[::-1], "viewer": VIEWER})
            with pytest.raises(SignerUnavailable):
                await client.sign(request())
            assert (await viewer.status()).name == "hot"

    play(tmp_path, story)


def test_a_client_comes_back_when_the_signer_does(tmp_path: Path) -> None:
    async def run() -> None:
        client = SignerClient(PORTS, f"unix:{tmp_path}/s", name="hot", caller="payouts", secret=SECRET)
        async with client:
            with pytest.raises(SignerUnavailable):
                await client.status()
            async with desk(tmp_path):
                signed = None
                while signed is None:
                    try:
                        signed = await client.sign(request())
                    except SignerUnavailable:
                        await asyncio.sleep(0.01)
            assert isinstance(signed, Signature)
            with pytest.raises(SignerUnavailable):
                await client.sign(request())
        with pytest.raises(SignerUnavailable):
            await client.status()

    asyncio.run(run())


def test_no_secret_is_in_a_repr() -> None:
    assert "thirty-two" not in repr(Target("unix:/s", "hot", "payouts", SECRET))
