"""A request that is repeated after a restore, which has forgotten it: it is the same withdrawal, and is paid once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import CONTRACT, FEES, Town
from tests.withdrawing import FUNDS, counter

from bursar.engine import Operators
from bursar.flows.withdrawals import WithdrawalRefused

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)


@scenario
async def test_request_that_was_forgotten_is_not_paid_a_second_time(place: Place, tmp_path: Path) -> None:
    town = Town()
    async with counter(place, town) as c:
        await c.record_count()  # furnished
    copy(Path(place.path), tmp_path / "backup.db")
    async with counter(place, town) as c:
        made = await c.request("5", key="the user's own")
        assert (await c.paid(made.id)).status == "completed"
    copy(tmp_path / "backup.db", Path(place.path))
    async with counter(place, town) as c:  # the signer's log is compared, and the payout is put back
        for person in ("ann", "ben"):
            await Operators(c.till.engine).resume("flow", "payouts", actor=person, reason="looked at it")
        with pytest.raises(WithdrawalRefused, match="ALREADY_ORDERED"):
            await c.request("5", key="the user's own")
        (payout,) = await c.till.payouts.list()
        assert payout.source == made.id
        await c.till.until(payout.id, "confirmed")
        with pytest.raises(WithdrawalRefused, match="ALREADY_ORDERED"):
            await c.request("5", key="the user's own")
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000
        assert (await c.funds(), await c.till.minor(FEES)) == (FUNDS - 6_000_000, 1_000_000)
        other = await c.request("5", key="another one")
        assert (await c.paid(other.id)).status == "completed"
        assert town.chain.tokens[CONTRACT, "@bob"] == 10_000_000


@scenario
async def test_id_of_a_request_follows_from_what_is_asked_for(place: Place, tmp_path: Path) -> None:
    """Asked for before the signer's log is compared, it is the record that the payout which is put back looks for."""
    async with counter(place, Town()) as c:
        await c.record_count()
    copy(Path(place.path), tmp_path / "backup.db")
    ids = []
    for amount, key in (("5", "k"), ("5", "k"), ("6", "k"), ("5", "l")):
        copy(tmp_path / "backup.db", Path(place.path))
        async with counter(place, Town()) as c:
            ids.append((await c.request(amount, key=key)).id)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
