"""HTTP client: the one module that imports httpx. It comes with `bursar[webhook]`, `[evm]` and `[tron]`.

Redirects are not followed and proxies of the environment not used: what is sent goes where the configuration says, or
nowhere. Certificates are checked against the system's own list (or `SSL_CERT_FILE`).

`post` opens a connection for one message. `Pool` keeps connections open for callers that ask the same servers all the
time. No error of a `Pool` contains the URL, and neither do the logs: a node's URL often carries an API key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx

CONNECTIONS_MAX = 32
IDLE_S = 30.0  # servers close idle connections; ours are given up first, so that no request meets one that is closing


async def post(url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> int:
    """POST; the status of the answer, whose body is not read. OSError if there is none, or what came is not HTTP."""
    verify = ssl.create_default_context() if url.startswith("https:") else False
    try:
        async with (
            asyncio.timeout(timeout_s),  # of the whole: httpx limits each read alone, and a drip would never end
            httpx.AsyncClient(verify=verify, trust_env=False, follow_redirects=False, timeout=timeout_s) as client,
            client.stream("POST", url, headers=dict(headers), content=body) as answer,
        ):
            return int(answer.status_code)
    except TimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


class Pool:
    """POST over connections that stay open. A longer answer is not read to its end: it is an OSError (EMSGSIZE)."""

    def __init__(self, answer_bytes_max: int, connections_max: int = CONNECTIONS_MAX) -> None:
        self._answer_bytes_max = answer_bytes_max
        self._limits = httpx.Limits(
            max_connections=connections_max, max_keepalive_connections=connections_max, keepalive_expiry=IDLE_S
        )
        self._verify = ssl.create_default_context()
        self._clients: dict[
            str, httpx.AsyncClient
        ] = {}  # by host: one that hangs must not use up the connections of all
        for name in ("httpx", "httpcore"):  # they log every URL
            logging.getLogger(name).setLevel(logging.WARNING)

    def _client(self, url: str) -> httpx.AsyncClient:
        host = urlsplit(url).netloc
        if host not in self._clients:
            self._clients[host] = httpx.AsyncClient(
                verify=self._verify, trust_env=False, follow_redirects=False, limits=self._limits
            )
        return self._clients[host]

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """POST; status and body of the answer. OSError if there is none, or what came is not HTTP."""
        try:
            client = self._client(url)
            async with (
                asyncio.timeout(timeout_s),
                client.stream("POST", url, headers=dict(headers), content=body, timeout=timeout_s) as answer,
            ):
                return int(answer.status_code), await self._body(answer)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            failure = type(error).__name__
        raise ConnectionError(failure)  # outside of `except`: the error behind it would be printed with its URL

    async def _body(self, answer: httpx.Response) -> bytes:
        parts, size = [], 0
        async for part in answer.aiter_bytes():
            size += len(part)
            if size > self._answer_bytes_max:
                raise OSError(errno.EMSGSIZE, f"the answer has more than {self._answer_bytes_max} bytes")
            parts.append(part)
        return b"".join(parts)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()
