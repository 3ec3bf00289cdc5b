"""Alerts reach people: by log, by webhook, by command. Once per record and reason, until somebody acknowledges.

An alert is a row before anybody is told, and so is each attempt to tell a sink of it; that it was told is written down
only after. A crash in between tells twice rather than never. Sinks know nothing of each other: each is told by a task
of its own and has its own rows, so that one that is down, slow or broken neither delays nor repeats any other, and the
engine waits for none of them. Of several processes one tells: the attempt is leased.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from bursar.engine.flow import ERROR_LENGTH_MAX, storable
from bursar.model.errors import BursarError
from bursar.model.records import Alert
from bursar.model.retry import Retry
from bursar.store import Store

RING_S = 0.5  # between two looks for what a sink has not been told
PAGE = 100
LEASE_S = 120.0  # longer than any attempt may take; whoever dies over one leaves it to others for so long
FAILURES_MAX = 3  # in a row, and the sink is left alone until the next look
SHARE_MAX = 0.05  # of the time is spent on looking, however many alerts nobody has acknowledged
BACK_OFF = Retry(first_s=1.0, cap_s=60.0)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

log = logging.getLogger("bursar.alerts")


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as people and programs are told of it."""

    id: str  # the same each time this alert is told; another one when it is raised anew
    reason: str
    severity: str  # "warning" or "critical"
    message: str
    raised_at: datetime
    attempt: int  # to tell this sink of it
    record: int = 0  # 0: the system as a whole
    flow: str = ""
    record_id: str = ""  # the flow's own id of the record


Sink = Callable[[Notice], Awaitable[None]]  # raises if nobody was told


async def to_log(notice: Notice) -> None:
    """The sink that is always there."""
    level = logging.CRITICAL if notice.severity == "critical" else logging.WARNING
    log.log(level, "%s: %s", notice.reason, notice.message)


LOG: Mapping[str, Sink] = {"log": to_log}


class Bell:
    """Tells sinks what they have not been told. A sink's name is kept with what it was told: don't change it."""

    def __init__(
        self, store: Store, sinks: Mapping[str, Sink] = LOG, *, ring_s: float = RING_S, back_off: Retry = BACK_OFF
    ) -> None:
        self._store = store
        self._sinks = sinks
        self._ring_s = ring_s
        self._back_off = back_off

    async def run(self) -> None:
        """Until cancelled: look, tell, look again; each sink for itself."""
        tasks = [asyncio.create_task(self._keep(name), name=f"bursar-alerts-{name}") for name in self._sinks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ring(self) -> int:
        """Tell every sink what is due now; returns how many times somebody was told."""
        return sum([told for told, _ in await asyncio.gather(*[self._round(name) for name in self._sinks])])

    async def _keep(self, name: str) -> None:
        while True:
            looked_s = 0.0
            try:
                _, looked_s = await self._round(name)
            except Exception as error:  # whatever it is: alerts wait in their table, and the next look finds them
                surprise = not isinstance(error, BursarError)
                log.error("%s can't be told of alerts just now: %s", name, error, exc_info=surprise)
            await self._store.ports.sleep(max(self._ring_s, looked_s / SHARE_MAX))

    async def _round(self, name: str) -> tuple[int, float]:
        """Tell one sink; returns how many alerts it was told of, and how many seconds it took to find them."""
        started = self._store.ports.monotonic()
        found = await self._store.read.alerts.untold(name, PAGE)
        looked_s = self._store.ports.monotonic() - started
        told = failures = 0
        for alert in found:
            attempt = await self._store.single().alerts.claim(alert, name, int(LEASE_S * 1e6))
            if attempt is None:
                continue  # another process is at it, or somebody has seen the alert meanwhile
            if await self._tell(name, alert, attempt):
                told, failures = told + 1, 0
            else:
                failures += 1
            if failures == FAILURES_MAX:
                break
        return told, looked_s

    async def _tell(self, name: str, alert: Alert, attempt: int) -> bool:
        alerts = self._store.single().alerts
        try:
            await self._sinks[name](await self._notice(alert, attempt))
        except Exception as error:  # whatever a sink does: the alert stays untold there, and nothing is lost
            why = storable(f"{type(error).__name__}: {error}")[:ERROR_LENGTH_MAX]
            text = "%s could not be told of %r (attempt %s; it will be tried again): %s"
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
            raised_at=EPOCH + timedelta(microseconds=alert.raised_us),
            attempt=attempt,
            record=alert.record,
            flow="" if record is None else record.flow,
            record_id="" if record is None else record.id,
        )
