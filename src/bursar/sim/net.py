"""A simulated network: connections between simulated processes, with everything that happens to connections.

Bytes take time and arrive in order; some take so long that the waiting client has asked again by then, on
another connection, and the same request arrives twice. A connection may be cut before or after a piece of it arrives,
and then each side may or may not hear of it; a partition swallows what is sent, without a word; a process that dies
resets its connections or simply falls silent, as a machine without power does. A side that must know has a deadline.

Each write is a port call of the writer: the process may die before its bytes leave, or after.

`SimHost` is a machine: a disk of databases, a disk of files, and a plug in the network.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bursar.ports import Listener, Stream
from bursar.sim.disk import SimDisk
from bursar.sim.files import FilesState, SimFiles
from bursar.sim.loop import SimLoop

if TYPE_CHECKING:
    from bursar.sim.kernel import Kernel
    from bursar.sim.process import Process

UNSENT_BYTES_MAX: Final = 64 * 1024
BEFORE, AFTER = "before", "after"  # process.Moment by value: that module imports this one


class SimHost(SimDisk):
    """A machine. Give it to each incarnation of one process, as a disk."""

    def __init__(self, net: SimNet, seed: str) -> None:
        super().__init__()
        self.net = net
        self._seed = seed
        self.state = FilesState(random.Random(seed))

    def another(self) -> SimHost:
        """The same machine for one more process of it: its databases are shared, its plug is its own."""
        return SimHost(self.net, f"{self._seed} {len(self._drives)}")

    def files(self, process: Process) -> SimFiles:
        """The door of one incarnation."""
        return SimFiles(process, self.state)

    def power_cut(self) -> None:
        """All of it at once."""
        super().power_cut()
        self.state.power_cut()
        self.net.died(self)


class SimNet:
    """Who listens where, who is connected to whom, and what goes wrong."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.loop: SimLoop = kernel.loop
        self.rng = random.Random(f"{kernel.seed} net")
        self.cut_probability = 0.0  # of each write
        self.silence_probability = 0.3  # that a side does not hear of the end
        self.late_probability = 0.0  # of each write: it is on its way for a long time, and all behind it
        self.late_s_max = 1.0
        self.happened: Counter[str] = Counter()  # what went wrong, for scenarios that want to know
        self._partitions: set[frozenset[str]] = set()
        self._listeners: dict[str, SimListener] = {}
        self._streams: list[SimStream] = []

    # --- what a scenario does to it

    def partition(self, one: str, other: str) -> None:
        """Swallow everything between two processes, by name."""
        self._partitions.add(frozenset((one, other)))

    def mend(self, one: str, other: str) -> None:
        """End a partition. Connections that have lost bytes stay silent: they can't be mended."""
        self._partitions.discard(frozenset((one, other)))

    def heal(self) -> None:
        """Nothing goes wrong from now on."""
        self._partitions.clear()
        self.cut_probability = 0.0
        self.late_probability = 0.0

    def died(self, host: SimHost) -> None:
        """A process is gone: those it was connected to hear of it, or not."""
        self._listeners = {at: found for at, found in self._listeners.items() if found.process.disk is not host}
        streams, self._streams = self._streams, []
        for stream in streams:
            if stream.process.disk is host:
                if self.rng.random() >= self.silence_probability:
                    stream.peer.end_later(broken=True)
            else:
                self._streams.append(stream)

    def parted(self, one: Process, other: Process) -> bool:
        """Whether nothing gets from one to the other."""
        return frozenset((one.name, other.name)) in self._partitions

    # --- the ports

    async def connect(self, process: Process, address: str) -> Stream:
        """A connection, after a while; or nothing at all, through a partition."""
        reply: asyncio.Future[Stream] = self.loop.create_future()
        number = self.begin(process, f"connect {address}")
        due = self.loop.now + self.kernel.latency()
        self.loop.call_at(due, self._connect, process, number, address, reply, context=process.context)
        return await reply

    def listen(self, process: Process, address: str, accept: Callable[[Stream], object]) -> Listener:
        """From now on, connections to an address are this process's."""
        if address in self._listeners:
            raise OSError(f"another process listens at {address}")
        listener = self._listeners[address] = SimListener(self, process, address, accept)
        return listener

    def unlisten(self, listener: SimListener) -> None:
        """Nobody is at that address any more."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def delay(self) -> float:
        """How long the next bytes are on their way."""
        usual = self.kernel.latency()
        if self.late_probability and self.rng.random() < self.late_probability:
            self.happened["late"] += 1
            return usual + self.rng.random() * self.late_s_max
        return usual

    def begin(self, process: Process, what: str) -> int:
        """Count a port call."""
        process.port_calls = number = process.port_calls + 1
        self.kernel.port_calls += 1
        self.kernel.trace.event(process.who, "net", what, "begin")
        return number

    def moment(self, process: Process, number: int) -> str:
        """Whether the process dies at this port call: `before` it, `after` it, or not (empty)."""
        found = self.kernel.fate(process, number) if self.kernel.armed else None
        return "" if found is None else found.value

    def kill(self, process: Process, number: int, moment: str) -> None:
        """The process dies at a port call of the network."""
        self.kernel.kill(process, number, f"net {moment}", None)

    def _connect(self, process: Process, number: int, address: str, reply: asyncio.Future[Stream]) -> None:
        moment = self.moment(process, number)
        if moment == BEFORE:
            self.kill(process, number, moment)
            return
        listener = self._listeners.get(address)
        if listener is None or not listener.process.alive:
            if not reply.done():
                reply.set_exception(ConnectionRefusedError(f"no process listens at {address}"))
        elif not self.parted(process, listener.process):
            near, far = SimStream(self, process), SimStream(self, listener.process)
            near.peer, far.peer = far, near
            self._streams += (near, far)
            self.loop.call_soon(listener.accept, far, context=listener.process.context)
            if not reply.done():
                reply.set_result(near)
        if moment == AFTER:
            self.kill(process, number, moment)

    def forget(self, stream: SimStream) -> None:
        """A connection is over, both ways."""
        if stream in self._streams:
            self._streams.remove(stream)


class SimListener:
    """`bursar.ports.Listener`."""

    def __init__(self, net: SimNet, process: Process, address: str, accept: Callable[[Stream], object]) -> None:
        self.address = address
        self.process = process
        self.accept = accept
        self._net = net

    def close(self) -> None:
        self._net.unlisten(self)


class SimStream:
    """`bursar.ports.Stream`: one end of a connection."""

    peer: SimStream

    def __init__(self, net: SimNet, process: Process) -> None:
        self.process = process
        self._net = net
        self._outgoing: deque[tuple[bytes, int]] = deque()
        self._free_at = 0.0
        self._inbox: list[bytes] = []
        self._reader: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None
        self._ended = False  # nothing more will come
        self._broken = False
        self._closed = False
        self._swallows = False  # something was lost on the way: nothing behind it can arrive either

    # --- the port

    async def read(self) -> bytes:
        if not self._inbox and not self._ended:
            self._reader = self._net.loop.create_future()
            await self._reader
        if self._inbox:
            data = b"".join(self._inbox)
            self._inbox.clear()
            return data
        if self._broken:
            raise ConnectionResetError("the connection broke")
        return b""

    def write(self, data: bytes) -> None:
        if self._closed or self._broken or not self.process.alive:
            return
        self._queue(data, self._net.begin(self.process, "write"))

    @property
    def unsent(self) -> int:
        return sum(len(data) for data, _ in self._outgoing)

    async def drain(self) -> None:
        while self.unsent > UNSENT_BYTES_MAX and not self._broken:
            self._drainer = self._net.loop.create_future()
            await self._drainer
        if self._broken:
            raise ConnectionResetError("the connection broke")

    def close(self) -> None:
        if not self._closed and self.process.alive:
            self._closed = True
            self._queue(b"", 0)
            self._end(broken=False)

    def abort(self) -> None:
        if not self._broken and self.process.alive:
            self._closed = True
            self._outgoing.clear()
            self.peer.end_later(broken=True)
            self._end(broken=True)

    # --- what happens

    def _queue(self, data: bytes, number: int) -> None:
        loop = self._net.loop
        self._outgoing.append((data, number))
        self._free_at = due = max(self._free_at, loop.now) + self._net.delay()
        # The sender's: what a dead process had not sent never leaves.
        loop.call_at(due, self._deliver, context=self.process.context)

    def _deliver(self) -> None:
        if not self._outgoing:
            return  # aborted
        data, number = self._outgoing.popleft()
        _wake(self._drainer)
        net, peer = self._net, self.peer
        moment = net.moment(self.process, number) if number else ""
        if moment == BEFORE:
            net.kill(self.process, number, moment)
            return
        if not self._swallows and net.parted(self.process, peer.process):
            self._swallows = True
            net.happened["swallowed"] += 1
        cut = ""
        if number and net.cut_probability and net.rng.random() < net.cut_probability:
            cut = BEFORE if net.rng.random() < 0.5 else AFTER
        if not self._swallows and cut != BEFORE:
            peer.arrive(data)
        if cut:
            net.happened[f"cut {cut}"] += 1
            self._swallows = peer._swallows = True
            for side in (self, peer):
                if net.rng.random() >= net.silence_probability:
                    side.end_later(broken=True)
        if moment == AFTER:
            net.kill(self.process, number, moment)

    def arrive(self, data: bytes) -> None:
        """Bytes from the other side; none: it has closed."""
        self._net.kernel.trace.event(self.process.who, "net", "", "arrive" if data else "end")
        if not data:
            self._end(broken=False)
        elif not self._ended:
            self._inbox.append(data)
            _wake(self._reader)

    def end_later(self, *, broken: bool) -> None:
        """Hear of the end, after a while."""
        loop = self._net.loop
        due = loop.now + self._net.kernel.latency()
        loop.call_at(due, lambda: self._end(broken=broken), context=self.process.context)

    def _end(self, *, broken: bool) -> None:
        self._ended = True
        self._broken = self._broken or broken
        _wake(self._reader)
        _wake(self._drainer)
        self._net.forget(self)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
