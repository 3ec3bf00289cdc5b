"""Alerts reach people: by log, by command, by webhook. Once per record and reason, until somebody acknowledges.

An alert is a row before anybody is told, and is marked as delivered only after; a crash in between tells twice rather
than never.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from bursar.model.records import Alert
from bursar.store import Store

log = logging.getLogger("bursar.alerts")

Sink = Callable[[Alert], Awaitable[None]]  # raises if nobody was told


async def to_log(alert: Alert) -> None:
    """The sink that is always there."""
    level = logging.CRITICAL if alert.severity == "critical" else logging.WARNING
    log.log(level, "%s: %s", alert.reason, alert.message)


class Bell:
    """Delivers what has not been delivered."""

    def __init__(self, store: Store, sinks: Sequence[Sink] = (to_log,)) -> None:
        self._store = store
        self._sinks = sinks

    async def ring(self) -> int:
        """Tell every sink what is new; returns how many alerts went out. One that fails is told again next time."""
        told = 0
        for alert in await self._store.read.alerts.open(undelivered=True):
            failed = False
            for sink in self._sinks:
                try:
                    await sink(alert)
                except Exception:  # whatever a sink does: the alert stays undelivered, so nothing is lost by going on
                    failed = True
                    log.exception("an alert could not be delivered; it will be tried again: %s", alert.message)
            if not failed:
                await self._store.single().alerts.delivered(alert)
                told += 1
        return told
