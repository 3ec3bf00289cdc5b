"""What callers read: times with their zone, to the microsecond."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from bursar.model.errors import InvalidName
from bursar.model.views import microseconds, moment

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
NEW_YEAR_US = 1_767_225_600_000_000


@pytest.mark.parametrize(
    ("at", "us"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (NEW_YEAR, NEW_YEAR_US),
        (NEW_YEAR + timedelta(microseconds=1), NEW_YEAR_US + 1),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
    ],
)
def test_a_time_is_so_many_microseconds_since_1970_and_back(at: datetime, us: int) -> None:
    assert (moment(us), microseconds(at)) == (at, us)


def test_the_same_moment_in_another_zone_is_the_same_number() -> None:
    assert microseconds(NEW_YEAR.astimezone(timezone(timedelta(hours=9)))) == NEW_YEAR_US


@pytest.mark.parametrize("at", [datetime(2026, 1, 1), NEW_YEAR.date(), "2026-01-01T00:00:00Z", NEW_YEAR_US, None])  # noqa: DTZ001
def test_a_time_without_a_zone_is_refused_as_ambiguous(at: Any) -> None:
    with pytest.raises(InvalidName, match="no time zone"):
        microseconds(at)
