"""Has anvil mine a block every so many milliseconds, until it is killed. A process of its own: it costs ours nothing.

python -m bursar.bench.payouts_miner URL MILLISECONDS
"""

from __future__ import annotations

import http.client
import sys
import time
from urllib.parse import urlsplit

BODY = b'{"jsonrpc":"2.0","id":1,"method":"evm_mine","params":[]}'
HEADERS = {"content-type": "application/json"}


def main(url: str, every_ms: float) -> None:
    """Mine, by the clock: a block that took long does not delay those after it for ever."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    print("mining", flush=True)
    due = time.monotonic()
    while True:
        connection.request("POST", "/", BODY, HEADERS)
        connection.getresponse().read()
        due = max(due + every_ms / 1000, time.monotonic() - every_ms / 1000)
        time.sleep(max(0.0, due - time.monotonic()))  # until the next block: its interval is what is simulated


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
