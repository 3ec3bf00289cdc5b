"""What tests of trouble have in common: try to open, to pay in and to look, and hold every error to one line."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from tests.builders import check_sound
from tests.system.crew import ASSET, BANK

from bursar import BursarError, Receipt, deposit
from bursar import open as open_bursar
from bursar.model.errors import Refusal


async def opens(url: str, **more: Any) -> BursarError | None:
    """The error that opening raises, in one line; None if it opens and its books are sound."""
    try:
        async with open_bursar(url, **more) as bursar:
            await check_sound(bursar.ledger)
    except BursarError as error:
        assert "\n" not in str(error)
        assert str(error)
        return error
    return None


async def put_in(url: str, key: str, amount: str = "1") -> Receipt | BursarError:
    """A deposit, or the error it meets, in one line."""
    try:
        async with open_bursar(url) as bursar:
            return await bursar.ledger.commit(deposit(BANK, "a", ASSET, amount, key=key))
    except BursarError as error:
        assert "\n" not in str(error)
        return error


async def balance(url: str) -> str:
    """What `a` has, in a database whose books are sound."""
    async with open_bursar(url) as bursar:
        await check_sound(bursar.ledger)
        return str((await bursar.ledger.balance("a", ASSET)).decimal)


async def open_once(_say: Any, url: str) -> str:
    """A member of a crew that opens the database; what it was told, or nothing."""
    return str(await opens(url) or "")


async def absurd_expiry(url: str) -> None:
    """A hold that expires after the end of time, in one group with an honest deposit."""
    async with open_bursar(url) as bursar:
        held, paid = await asyncio.gather(
            bursar.ledger.authorize("a", ASSET, "1", expires_in=timedelta.max),
            bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second")),
            return_exceptions=True,
        )
        assert isinstance(paid, Receipt), repr(paid)
        assert isinstance(held, Refusal), repr(held)
