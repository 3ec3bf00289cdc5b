"""Which connections are closed to make room, whose they are, how many there may be, and what happens where the machine
has no descriptor for one more."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from bursar.cli.http_connection import network_of
from bursar.cli.http_server import Listener, connections_of, evictable
from bursar.config import Config


def connection(name: str, rank: int | None, address: str, since: float, *, is_closing: bool = False) -> Any:
    transport = SimpleNamespace(is_closing=lambda: is_closing)
    return SimpleNamespace(name=name, rank=rank, address=address, since=since, transport=transport)


def names(found: Any) -> list[str]:
    return [one.name for one in found]


def test_the_oldest_connection_of_the_network_with_the_most_is_closed_first() -> None:
    """A client with one connection does not lose it to a client with many, however long it has been silent."""
    open_now = [
        connection("alone", 0, "10.0.0.1", 1),
        connection("newer", 0, "10.0.0.2", 5),
        connection("older", 0, "10.0.0.2", 3),
        connection("known", 1, "10.0.0.2", 0),
        connection("busy", None, "10.0.0.2", 0),
        connection("going", 0, "10.0.0.2", 0, is_closing=True),
    ]
    assert names(evictable(open_now)) == ["older", "newer", "alone"]


def test_users_connections_are_closed_only_when_no_anonymous_one_is_left() -> None:
    known = [connection("first", 1, "a", 1), connection("body", 3, "a", 0), connection("second", 1, "a", 2)]
    assert names(evictable(known)) == ["first", "second"]
    assert evictable([connection("busy", None, "a", 0)]) == []


@pytest.mark.parametrize(
    ("client", "network"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5), "20010db800010002"),
        (("2001:db8:1:2::9", 5), "20010db800010002"),
        (("fe80::1%eth0", 5), "fe80000000000000"),
        (("", 0), ""),
        (None, ""),
    ],
)
def test_an_address_stands_for_its_network(client: tuple[str, int] | None, network: str) -> None:
    """A customer of IPv6 gets as many addresses as he likes, all with one first half."""
    assert network_of(client) == network


@pytest.mark.parametrize(("files", "connections"), [(1_024, 768), (256, 128), (65_536, 4_096)])
def test_connections_never_get_the_last_files(files: int, connections: int) -> None:
    assert connections_of(Config(), files) == connections


class NoDescriptor(socket.socket):
    """A socket with a waiting client, which can't accept it for the first few times."""

    tries = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.tries <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_accepting_backs_off_and_an_outage_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The system reports the waiting client at once, and refuses again: without a pause that is an endless loop."""

    async def scene() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        accepted = asyncio.Event()

        def made() -> Any:
            accepted.set()
            return asyncio.Protocol()

        with NoDescriptor() as listening, socket.socket() as caller:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            listener = Listener(listening, made, lambda: False)
            began = loop.time()
            caller.connect(listening.getsockname())
            async with asyncio.timeout(20):
                await accepted.wait()
            listener.close()
            await listener.wait_closed()
            return listening.tries, loop.time() - began

    with caplog.at_level(logging.WARNING, "bursar.http"):
        tries, took_s = asyncio.run(scene())
    assert tries <= 5  # three that failed, one that did not, and one that found no other client
    assert took_s > 0.6  # 0.1, 0.2 and 0.4 s
    assert [record.getMessage().partition(",")[0].partition(":")[0] for record in caplog.records] == [
        "no connection can be accepted",
        "connections are accepted again",
    ]
