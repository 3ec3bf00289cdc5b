"""The event stream: a subscriber says behind which sequence to begin, and gets everything from there on, in order.

First from the segments of the log that are still kept, then live, each frame when it is on disk. A subscriber who asks
for what is no longer kept gets that as its answer. One that reads too slowly is cut off instead of being buffered
without end: it comes back and asks from where it got to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import islice

from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.core import Core
from bursar.rails.trading.events import Wire, to_wire
from bursar.rails.trading.frames import Frame
from bursar.rails.trading.journal import JournalRecord

FRAMES_AT_A_TIME = 64
EVENTS_AT_A_TIME = 8_192


class Feed:
    """Subscribers of one core."""

    def __init__(self, ports: Ports, core: Core, unsent_bytes: int) -> None:
        self._core = core
        self._unsent_bytes = unsent_bytes
        self._lane = ports.lane(f"core-{core.name}-feed")

    async def serve(
        self, stream: Stream, request: protocol.Subscribe, idle_s: float, heard: Callable[[], None]
    ) -> None:
        """Feed one subscriber until it goes, is too slow, or falls behind what is kept. `heard`: it is alive."""
        core = self._core
        if not self._kept(request.after):
            stream.write(protocol.frame(protocol.Gone(request.number, core.log.segments[0].first)))
            await stream.drain()
            return
        stream.write(protocol.frame(protocol.Noted(request.number, core.durable)))
        position = request.after
        while position < core.durable:
            position = await self._catch_up(stream, position, idle_s, heard)
        # No await between the last look and this line: nothing is missed, nothing comes twice.
        follow = partial(self._follow, stream)
        core.followers.append(follow)
        try:
            while await stream.read():  # pings
                heard()
        finally:
            core.followers.remove(follow)

    def _kept(self, after: int) -> bool:
        return self._core.log.segments[0].first <= after + 1

    async def _catch_up(self, stream: Stream, position: int, idle_s: float, heard: Callable[[], None]) -> int:
        """Send what the log holds behind `position`; returns how far it got."""
        frames = self._core.log.frames_after(position)
        while True:
            try:
                some = await self._lane.run(partial(list[Frame], islice(frames, FRAMES_AT_A_TIME)))
            except FileNotFoundError:  # the segment was dropped while it was being read
                if self._kept(position):
                    return position  # the reader starts anew
                stream.write(protocol.frame(protocol.Gone(0, self._core.log.segments[0].first)))
                raise protocol.ProtocolError("a subscriber fell behind what is kept") from None
            if not some:
                return position
            for frame in some:
                self._send(stream, to_wire(frame.records, position, self._core.state.asset_code))
                position = frame.last
                async with asyncio.timeout(idle_s):
                    await stream.drain()
                heard()  # it reads

    def _follow(self, stream: Stream, records: list[JournalRecord]) -> None:
        if stream.unsent > self._unsent_bytes:
            stream.abort()  # it will ask again from where it got to
        else:
            self._send(stream, to_wire(records, 0, self._core.state.asset_code))

    @staticmethod
    def _send(stream: Stream, events: list[Wire]) -> None:
        for start in range(0, len(events), EVENTS_AT_A_TIME):
            stream.write(protocol.frame(protocol.Events(events[start : start + EVENTS_AT_A_TIME])))

    def close(self) -> None:
        """No more reading."""
        self._lane.close()
