"""How long stopping may take, in all. Requests, records, commits and cores that are being waited for share one time,
which begins with the request to stop; what has not ended by then is left as a crash would leave it, and the next start
resumes it. A client, a database or a core that hangs therefore delays no stop.
"""

from __future__ import annotations

from bursar.ports import Ports

KEPT = 0.85  # of the time is for waiting; the rest is for closing
LEAST_S = 1.0  # for closing, if no time is given at all


class Stopping:
    """One per process."""

    def __init__(self, ports: Ports, seconds: float) -> None:
        self._ports = ports
        self.seconds = max(seconds, LEAST_S)
        self._patience_s = seconds * KEPT
        self._began: float | None = None

    def begin(self) -> None:
        """The process is asked to stop."""
        if self._began is None:
            self._began = self._ports.monotonic()

    def left_s(self, share: float = 1.0) -> float:
        """How long the next one may be waited for: a share of what is left."""
        self.begin()
        assert self._began is not None
        return max(0.0, self._patience_s - (self._ports.monotonic() - self._began)) * share
