"""The network between the nodes of a cluster under chaos tests, and how one node is cut off from it.

With root's rights each node lives in a network namespace of its own, joined to the others and to us by a bridge in one
more namespace. Cutting a node off takes its port from the bridge: packets vanish without an error, and connections stay
open until a timeout. The namespaces belong to processes that only sleep, so they end with them, however we end.

Without those rights all nodes listen on loopback, behind relays. A relay that is cut keeps its connections open and
passes nothing on. That is weaker: a standby that is cut off still follows the leader, since its way out is the leader's
way in. And no Patroni can reach another one meanwhile, or a leader that is cut off from etcd could still ask them
whether it may stay (failsafe_mode), and would stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bursar.testbed import Guard

TOOLS = ("ip", "nsenter", "unshare")
TOOL_S = 10.0
PORT, REST_PORT, ETCD_PORT = 5432, 8008, 2379
US = 254  # the last byte of our own address
CHUNK_BYTES = 65_536
POLL_S = 0.01


@dataclass(frozen=True)
class Place:
    """Where a node listens, how others reach it, and how it reaches etcd."""

    listen: str
    port: int
    rest_port: int
    reach: str
    reach_port: int
    reach_rest_port: int
    etcd: str
    network: str  # who may connect, as pg_hba says it
    environment: tuple[tuple[str, str], ...] = ()  # for Patroni
    prefix: tuple[str, ...] = ()  # the words before a command that is to run there


class Network(Protocol):
    """Three places, each of which can be cut off."""

    kind: str
    places: list[Place]
    etcd_listen: str

    def cut(self, number: int) -> None:
        """Cut a place off: silence in both directions."""
        ...

    def heal(self, number: int) -> None:
        """Join it again."""
        ...

    def close(self) -> None:
        """Take all of it down."""
        ...


def make_network(count: int, guard: Guard) -> Network:
    """Namespaces where we may make them, else relays."""
    if os.geteuid() == 0 and all(shutil.which(tool) for tool in TOOLS):
        with contextlib.suppress(NoNamespaces):
            return Namespaces(count, guard)
    return Relays(count)


class NoNamespaces(RuntimeError):
    """This machine does not let us make network namespaces."""


class Namespaces:
    """A namespace per node, and one with the bridge."""

    kind = "network namespaces"

    def __init__(self, count: int, guard: Guard) -> None:
        self._guard = guard
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            subnet = _free_subnet()
            self._switch = self._hold()
            _ip(self._switch, "link add br0 type bridge")
            _ip(self._switch, "link set br0 up")
            nodes = [self._hold() for _ in range(count)]
            ends = dict(enumerate(nodes, 1)) | {US: 0}
            for number, pid in ends.items():
                self._plug(subnet, number, pid)
            # Static neighbours: a lost one must be silence, not "no route to host" after three unanswered ARP requests.
            for number, pid in ends.items():
                for other in ends.keys() - {number}:
                    device = _device(subnet, number)
                    _ip(pid, f"neigh replace {subnet}.{other} lladdr {_mac(other)} dev {device} nud permanent")
        except NoNamespaces:
            self.close()
            raise
        self.etcd_listen = f"{subnet}.{US}:{ETCD_PORT}"
        self.places = [
            Place(
                listen=f"{subnet}.{number}",
                port=PORT,
                rest_port=REST_PORT,
                reach=f"{subnet}.{number}",
                reach_port=PORT,
                reach_rest_port=REST_PORT,
                etcd=self.etcd_listen,
                network=f"{subnet}.0/24",
                prefix=("nsenter", f"--net=/proc/{pid}/ns/net"),
            )
            for number, pid in enumerate(nodes, 1)
        ]

    def cut(self, number: int) -> None:
        _ip(self._switch, f"link set port{number + 1} nomaster")

    def heal(self, number: int) -> None:
        _ip(self._switch, f"link set port{number + 1} master br0")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            self._guard.gone(holder.pid)
        self._holders = []

    def _hold(self) -> int:
        """A process in a new network namespace; the namespace lives as long as it does."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._holders.append(holder)
        self._guard.born(holder.pid)
        ours, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + TOOL_S
        while holder.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{holder.pid}/ns/net").readlink() != ours:
                    return holder.pid
            time.sleep(POLL_S)  # it sends no notice
        raise NoNamespaces("unshare --net failed")

    def _plug(self, subnet: str, number: int, pid: int) -> None:
        """A cable from a namespace (0: our own) to the bridge."""
        device, address = _device(subnet, number), f"{subnet}.{number}/24"
        _ip(self._switch, f"link add port{number} type veth peer name {device} netns {pid or os.getpid()}")
        _ip(self._switch, f"link set port{number} up master br0")
        _ip(pid, f"link set {device} address {_mac(number)}")
        _ip(pid, f"addr add {address} dev {device}")
        _ip(pid, f"link set {device} up")
        if pid:
            _ip(pid, "link set lo up")


def _device(subnet: str, number: int) -> str:
    # Ours is the only one in a namespace that others use, too.
    return f"bursar{subnet.rpartition('.')[2]}" if number == US else "eth0"


def _mac(number: int) -> str:
    return f"02:62:75:72:73:{number:02x}"


def _free_subnet() -> str:
    """One of RFC 2544's networks for tests that no device here has."""
    taken = _run(["ip", "-o", "addr"])
    for number in range(256):
        subnet = f"198.18.{(os.getpid() + number) % 256}"
        if f"{subnet}." not in taken:
            return subnet
    raise NoNamespaces("198.18.0.0/16 is all in use")


def _ip(pid: int, words: str) -> None:
    prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    _run([*prefix, "ip", *words.split()])


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TOOL_S)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Relays:
    """Everything on loopback, with a relay before every port of a node and one between it and etcd."""

    kind = "relays on loopback"

    def __init__(self, count: int) -> None:
        self._thread = RelayThread()
        etcd_port, *others = free_ports(5 * count + 1)
        self.etcd_listen, taken = f"127.0.0.1:{etcd_port}", iter(others)
        self.places = []
        self._relays: list[list[Relay]] = []
        self._rest: list[Relay] = []  # between one Patroni and another
        for _ in range(count):
            port, rest_port, reach_port, reach_rest_port, to_etcd = (next(taken) for _ in range(5))
            pairs = [(reach_port, port), (reach_rest_port, rest_port), (to_etcd, etcd_port)]
            relays = [self._thread.relay(*pair) for pair in pairs]
            self._relays.append(relays)
            self._rest.append(relays[1])
            self.places.append(
                Place(
                    listen="127.0.0.1",
                    port=port,
                    rest_port=rest_port,
                    reach="127.0.0.1",
                    reach_port=reach_port,
                    reach_rest_port=reach_rest_port,
                    etcd=f"127.0.0.1:{to_etcd}",
                    network="127.0.0.1/32",
                    # Or it would ask etcd where etcd is, and go there past the relay.
                    environment=(
                        ("PATRONI_ETCD3_USE_PROXIES", "true"),
                        ("PATRONI_ETCD3_HOSTS", f"127.0.0.1:{to_etcd}"),
                    ),
                )
            )

    def cut(self, number: int) -> None:
        for relay in [*self._relays[number], *self._rest]:
            self._thread.silence(relay)

    def heal(self, number: int) -> None:
        for relay in [*self._relays[number], *self._rest]:
            self._thread.pass_on(relay)

    def close(self) -> None:
        self._thread.close()


class RelayThread:
    """Where relays run: an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()

    def relay(self, listen: int, target: int) -> Relay:
        """A relay that listens at one port of the loopback and leads to another."""
        relay = Relay(target)
        asyncio.run_coroutine_threadsafe(relay.listen(listen), self._loop).result(TOOL_S)
        return relay

    def silence(self, relay: Relay) -> None:
        """Pass nothing on."""
        self._loop.call_soon_threadsafe(relay.passing.clear)

    def pass_on(self, relay: Relay, after_s: float = 0.0) -> None:
        """Pass everything on again, what was held back too."""
        self._loop.call_soon_threadsafe(self._loop.call_later, after_s, relay.passing.set)

    def close(self) -> None:
        """End all of them."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(TOOL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Relay:
    """Passes bytes on between a port and another, or holds them back without closing anything."""

    def __init__(self, target: int) -> None:
        self.passing = asyncio.Event()
        self.passing.set()
        self._target = target
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> None:
        """Begin."""
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", port)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.passing.wait()
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self.passing.wait()
                writer.write(chunk)
                await writer.drain()
        await self.passing.wait()  # the end of a connection is held back, too
        writer.close()


def free_ports(count: int) -> list[int]:
    """Free ports; held until all are known, so that none comes twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
