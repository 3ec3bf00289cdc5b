"""Deliver alerts to operators: by log, webhook or command. Once per record and reason, until an operator acknowledges.

An alert is a row before it is delivered, and so is each attempt to deliver it to a sink; success is written down only
after the sink has taken it. A crash in between delivers twice rather than never (at-least-once delivery). Sinks are
independent: each has a task and rows of its own, so that one that is down, slow or broken neither delays nor repeats
another, and the engine waits for none of them. Of several processes one delivers: the attempt is leased.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import msgspec

from bursar.engine.flow import ERROR_LENGTH_MAX, storable
from bursar.model.errors import BursarError
from bursar.model.records import Alert
from bursar.model.retry import Retry
from bursar.model.views import moment
from bursar.store import Store

POLL_S = 0.5  # between two polls for alerts that a sink has not received
PAGE = 100
LEASE_S = 120.0  # longer than any attempt may take; if its process dies, others wait so long
FAILURES_MAX = 3  # in a row, and the sink is left alone until the next poll
SHARE_MAX = 0.05  # of the time is spent on polling, however many alerts are not acknowledged
BACK_OFF = Retry(first_s=1.0, cap_s=60.0)

log = logging.getLogger("bursar.alerts")


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as it is delivered to a sink."""

    id: str  # the same for every delivery of this alert; another one when it is raised anew
    reason: str
    severity: str  # "warning" or "critical"
    message: str
    raised_at: datetime
    attempt: int  # to deliver it to this sink
    record: int = 0  # 0: the system as a whole
    flow: str = ""
    record_id: str = ""  # the flow's own id of the record


Sink = Callable[[Notice], Awaitable[None]]  # raises if the alert was not delivered


async def to_log(notice: Notice) -> None:
    """The sink that is always there."""
    level = logging.CRITICAL if notice.severity == "critical" else logging.WARNING
    log.log(level, "%s: %s", notice.reason, notice.message)


LOG: Mapping[str, Sink] = {"log": to_log}


class AlertDispatcher:
    """Delivers alerts to sinks. A sink's name is stored with its deliveries: don't change it."""

    def __init__(
        self, store: Store, sinks: Mapping[str, Sink] = LOG, *, poll_s: float = POLL_S, back_off: Retry = BACK_OFF
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._poll_s = poll_s
        self._back_off = back_off

    async def run(self) -> None:
        """Poll and deliver until cancelled; each sink for itself."""
        tasks = [asyncio.create_task(self._keep(name), name=f"bursar-alerts-{name}") for name in self._sinks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def dispatch(self) -> int:
        """Deliver to every sink what is due now; returns the number of successful deliveries."""
        return sum([delivered for delivered, _ in await asyncio.gather(*[self._round(name) for name in self._sinks])])

    async def _keep(self, name: str) -> None:
        while True:
            polled_s = 0.0
            try:
                _, polled_s = await self._round(name)
            except Exception as error:  # whatever it is: alerts wait in their table, and the next poll finds them
                surprise = not isinstance(error, BursarError)
                log.error("alerts can't be delivered to %s just now: %s", name, error, exc_info=surprise)
            await self._store.ports.sleep(max(self._poll_s, polled_s / SHARE_MAX))

    async def _round(self, name: str) -> tuple[int, float]:
        """Deliver to one sink; returns how many alerts it took, and how many seconds it took to find them."""
        started = self._store.ports.monotonic()
        found = await self._store.read.alerts.untold(name, PAGE)
        polled_s = self._store.ports.monotonic() - started
        delivered = failures = 0
        for alert in found:
            attempt = await self._store.single().alerts.claim(alert, name, int(LEASE_S * 1e6))
            if attempt is None:
                continue  # another process is delivering it, or it was acknowledged meanwhile
            if await self._deliver(name, alert, attempt):
                delivered, failures = delivered + 1, 0
            else:
                failures += 1
            if failures == FAILURES_MAX:
                break
        return delivered, polled_s

    async def _deliver(self, name: str, alert: Alert, attempt: int) -> bool:
        alerts = self._store.single().alerts
        try:
            await self._sinks[name](await self._notice(alert, attempt))
        except Exception as error:  # whatever a sink does: the alert stays undelivered there, and is not lost
            why = storable(f"{type(error).__name__}: {error}")[:ERROR_LENGTH_MAX]
            text = "%s did not take the alert %r (attempt %s; it will be retried): %s"
            log.error(text, name, alert.message, attempt, why)
            await alerts.not_told(alert, name, why, self._back_off.delay_us(attempt, self._store.ports.random()))
            return False
        await alerts.told(alert, name)
        return True

    async def _notice(self, alert: Alert, attempt: int) -> Notice:
        record = await self._store.read.records.by_number(alert.record) if alert.record else None
        return Notice(
            id=f"{alert.record}:{alert.reason}:{alert.raised_us}",
            reason=alert.reason,
            severity=alert.severity,
            message=alert.message,
            raised_at=moment(alert.raised_us),
            attempt=attempt,
            record=alert.record,
            flow="" if record is None else record.flow,
            record_id="" if record is None else record.id,
        )
