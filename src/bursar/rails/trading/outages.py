"""One log line when trouble of a kind begins, and one when it is over: never one for each time it happens.

Whoever can make a core refuse something could otherwise fill its disk with lines about it.
"""

from __future__ import annotations

from collections.abc import Callable


class Outages:
    """Trouble that is going on, by kind."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._times: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # how often, when last looked at

    def happened(self, kind: str, detail: str = "") -> None:
        """It happened again."""
        times = self._times[kind] = self._times.get(kind, 0) + 1
        if times == 1:
            self._log(f"{kind}{f': {detail}' if detail else ''}")

    def look(self) -> None:
        """What has not happened since the last look is over."""
        for kind, times in list(self._times.items()):
            if self._quiet.get(kind) == times:
                del self._times[kind], self._quiet[kind]
                if times > 1:
                    self._log(f"{kind}: it happened {times:,} times, and is over")
            else:
                self._quiet[kind] = times
