"""HTTP client: the one module that imports httpx. It comes with `bursar[webhook]`.

Redirects are not followed and proxies of the environment not used: what is sent goes where the configuration says, or
nowhere. Certificates are checked against the system's own list (or `SSL_CERT_FILE`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx


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
