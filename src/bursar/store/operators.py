"""Tables of what operators do: pauses and their history, calls whose end was forced, accounts that are being closed."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.model.accounts import Closing
from bursar.model.records import ForcedCall, OperatorAction, Pause
from bursar.store.columns import reader
from bursar.store.session import Table

NEWEST = 2**63 - 1

_action = reader("action", OperatorAction)
_closing = reader("closing", Closing)
_forced_call = reader("forced_call", ForcedCall)
_pause = reader("pause", Pause)


class Pauses(Table):
    """Flows and rails that are switched off."""

    async def list(self) -> list[Pause]:
        """All that is off."""
        return await self._all(_pause, "pauses")

    async def lock(self, kind: str, name: str) -> Pause | None:
        """One of them, locked until the transaction ends."""
        return await self._first(_pause, "lock_pause", kind, name)

    async def add(self, kind: str, name: str, actor: str, reason: str, *, two_people: bool = False) -> bool:
        """Whether it was on before."""
        return bool(await self._s.rows("put_pause", kind, name, actor, reason, two_people))

    async def change(self, pause: Pause) -> None:
        """Write what may change of a pause: why, whether it needs two operators, and who wants to lift it."""
        what = (pause.reason, pause.two_people, pause.proposed_by, pause.proposed_reason)
        await self._s.rows("change_pause", pause.kind, pause.name, *what)

    async def drop(self, kind: str, name: str) -> bool:
        """Whether it was off before."""
        return await self._one("drop_pause", kind, name) is not None


class Actions(Table):
    """What operators did, and why: one row each, for ever."""

    async def note(self, action: str, kind: str, name: str, *, actor: str, reason: str, proposed_by: str = "") -> None:
        """Write one down."""
        await self._s.rows("note_action", action, kind, name, actor, reason, proposed_by)

    async def list(
        self, *, kind: str = "", name: str = "", before: int = NEWEST, limit: int = 100
    ) -> list[OperatorAction]:
        """Newest first; of one thing, if it is named."""
        return await self._all(_action, "actions", kind, name, before, limit)


class ForcedCalls(Table):
    """Calls whose end two operators decided, until their rail has said what really happened (T34)."""

    async def add(self, record: int, version: int, state: str, delay_us: int) -> None:
        """Ask the rail about this one, after so long. Twice is once."""
        await self._s.rows("put_forced", record, version, state, delay_us)

    async def claim(self, limit: int, lease_us: int, cap_us: int) -> Sequence[ForcedCall]:
        """Take what is due, for so long; due later than the cap allows counts as due (L24)."""
        return await self._all(_forced_call, "claim_forced", limit, lease_us, cap_us)

    async def ask_again(self, call: ForcedCall, said: str, delay_us: int | None) -> None:
        """What the rail said, and when to ask again; None: it was definite."""
        await self._s.rows("forced_said", call.record, call.version, said, delay_us)

    async def open(self, limit: int = 1000) -> Sequence[ForcedCall]:
        """Those whose rail has not said anything definite yet."""
        return await self._all(_forced_call, "forced_open", limit)


class Closings(Table):
    """Accounts that a close has frozen, until it ends or a person changes their status."""

    async def of(self, path: str) -> Closing | None:
        """The close that has frozen this account. In a transaction that bumped the rules it stays so until the end."""
        return await self._first(_closing, "closing_of", path)

    async def put(self, path: str, token: str) -> None:
        """The account's freeze belongs to the close of this token from now on."""
        await self._s.rows("put_closing", path, token)

    async def drop(self, path: str) -> None:
        """It belongs to no close."""
        await self._s.rows("drop_closing", path)

    async def list(self, limit: int = 1000) -> Sequence[Closing]:
        """Closes that are under way or were interrupted, oldest first."""
        return await self._all(_closing, "closings", limit)
