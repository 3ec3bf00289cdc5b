"""Following a core's events: on a connection of its own, made anew when it breaks, from where it got to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from bursar.model.errors import BursarError
from bursar.model.retry import Retry
from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.connection import Connected, CoreLink, Known, NoConnection, Target, connect
from bursar.rails.trading.events import Event, from_wire
from bursar.rails.trading.replies import NEEDS_A_PERSON

PING_S: Final = 15.0
RECONNECT: Final = Retry(first_s=0.4, cap_s=5.0)


class EventsGone(BursarError):
    """The log no longer reaches back to where a subscriber wants to begin."""

    after: int
    oldest: int
    code = "EVENTS_GONE"
    text = (
        "events behind {after} are no longer kept; the log begins at {oldest}: read the balances and go on from there"
    )


async def follow(ports: Ports, target: Target, link: CoreLink, heard: Known, timeout_s: float) -> AsyncIterator[Event]:
    """Events behind `heard.seen`, for ever. Raises EventsGone, or NoConnection if the core will not have us."""
    failures, core, after = 0, heard.core, heard.seen
    while True:
        try:
            connected = await connect(ports, target, link, Known(core=core, seen=after), timeout_s)
        except NoConnection as error:
            if error.code in NEEDS_A_PERSON:
                raise
            failures += 1
            await ports.sleep(RECONNECT.delay_us(failures, ports.random()) / 1e6)
            continue
        failures, core = 0, connected.core
        pings = asyncio.create_task(_ping(ports, connected.stream), name="core-events-ping")
        try:
            async for event in _events(connected, after):
                after = event.sequence
                yield event
        except (OSError, protocol.ProtocolError, msgspec.MsgspecError):
            pass  # again, from where we got to
        finally:
            pings.cancel()
            connected.stream.abort()


async def _events(connected: Connected, after: int) -> AsyncIterator[Event]:
    connected.stream.write(protocol.frame(protocol.Subscribe(1, after)))
    payloads = connected.payloads
    while True:
        for payload in payloads:
            match protocol.decode_answer(payload):
                case protocol.Events(wires):
                    for wire in wires:
                        # Contiguous, or something was lost on the way, which must not pass for silence.
                        if wire[1] != after + 1:
                            raise protocol.ProtocolError(f"event {wire[1]} came behind {after}")
                        after = wire[1]
                        yield from_wire(wire)
                case protocol.Gone(_, oldest):
                    raise EventsGone(after, oldest)
                case protocol.Noted():
                    pass
                case other:
                    raise protocol.ProtocolError(f"{type(other).__name__} among events")
        data = await connected.stream.read()
        if not data:
            return
        payloads = connected.splitter.feed(data)


async def _ping(ports: Ports, stream: Stream) -> None:
    while True:
        await ports.sleep(PING_S)
        stream.write(protocol.frame(protocol.Ping(0)))
