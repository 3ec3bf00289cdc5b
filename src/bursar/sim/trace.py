"""What happened in a run, as one hash: two runs of a seed that differ anywhere differ here.

An event is a few plain values. They are packed and hashed in batches, because a formatted line for each would cost
more than the port call that it reports. Readable lines are kept only when asked for. Nothing that depends on memory
addresses, hash seeds or the real clock may be noted: it would make every seed look nondeterministic.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final, Protocol

import msgspec

BATCH: Final = 512
LINES_MAX: Final = 100_000

_Event = tuple[float, str, str, str, str]


class Clock(Protocol):
    """Whatever knows the virtual time; the loop does."""

    now: float


class Trace:
    """A running hash over (virtual time, who, where, what, how)."""

    __slots__ = ("_batch", "_clock", "_encode", "_hash", "_kept", "_sealed")

    def __init__(self, clock: Clock, *, verbose: bool = False) -> None:
        self._clock = clock
        self._batch: list[_Event] = []
        self._kept: deque[_Event] | None = deque(maxlen=LINES_MAX) if verbose else None
        self._hash = hashlib.blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sealed = False

    def event(self, who: str, where: str, what: str, how: str) -> None:
        """Add one event, now."""
        if self._sealed:
            return
        batch = self._batch
        batch.append((self._clock.now, who, where, what, how))
        if len(batch) >= BATCH:
            self._hash.update(self._encode(batch))
            if self._kept is not None:
                self._kept.extend(batch)
            batch.clear()

    def note(self, text: str) -> None:
        """Add something the scenario wants in the hash and in the lines."""
        self.event("", "", text, "")

    def seal(self) -> None:
        """Ignore everything from now on: the run has been judged, what follows is coroutines being closed."""
        self._sealed = True

    def digest(self) -> str:
        """The hash of all events so far, as 32 hexadecimal digits. Asking does not change it."""
        hashed = self._hash.copy()
        hashed.update(self._encode(self._batch))
        return hashed.hexdigest()

    def lines(self) -> list[str]:
        """The last events, readable; none unless the trace is verbose."""
        if self._kept is None:
            return []
        return [" ".join(filter(None, (f"{now:.6f}", *words))) for now, *words in [*self._kept, *self._batch]]
