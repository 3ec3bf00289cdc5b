"""A node's HTTP interface twice over, in front of one anvil, where a test sees each call and bends each answer.

Both names are the same chain, so that they agree to the last byte until one of them is made to lie.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAMES = ("north", "south")
Call = dict[str, Any]  # of JSON-RPC
Bend = Callable[[Call, Any], Any]  # a call and its result → the result that is told instead


class Relay:
    """The two nodes."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.bends: dict[str, Bend] = {}  # by node
        self.seen: Callable[[Call], None] = lambda _call: None
        self.bytes_max = 0  # of an answer


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks may be killed at any time."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def relayed(target: str) -> Iterator[Relay]:
    """Two nodes in front of the one at this URL."""
    relay = Relay()
    forward = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            body = self.rfile.read(size)
            if len(body) < size:
                return  # who asks was killed
            asked = json.loads(body)
            calls = {call["id"]: call for call in (asked if isinstance(asked, list) else [asked])}
            for call in calls.values():
                relay.seen(call)
            request = urllib.request.Request(target, body, {"content-type": "application/json"})
            with forward(request, timeout=30) as answer:
                said = answer.read()
            if (bend := relay.bends.get(self.path.strip("/"))) is not None:
                told = json.loads(said)
                for one in told if isinstance(told, list) else [told]:
                    one["result"] = bend(calls[one["id"]], one.get("result"))
                said = json.dumps(told).encode()
            relay.bytes_max = max(relay.bytes_max, len(said))
            self.send_response(200)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None:
            """Not on the terminal."""

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=lambda: server.serve_forever(0.02))
    thread.start()
    relay.urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in NAMES]
    try:
        yield relay
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
