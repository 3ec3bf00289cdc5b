"""A pause that was forgotten: whatever runs (`bursar serve`, `bursar worker`) raises an alert by itself."""

from __future__ import annotations

from pathlib import Path

from tests.api.office import office, until
from tests.builders import scenario


@scenario
async def test_a_forgotten_pause_raises_an_alert_by_itself(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path, alert_paused_s=1) as here:
        await here.runtime.transfers.pause_intake("anna", "a drill")

        async def reasons() -> list[str]:
            return [alert.reason for alert in await here.runtime.bursar.store.read.alerts.open()]

        assert await until(reasons) == ["flow new transfers is paused"]
