"""Opening Bursar: a store, and the ledger on it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from bursar.ledger import Ledger
from bursar.ports import Ports, SystemPorts
from bursar.store import connect
from bursar.store.options import USUAL, Options


class Bursar:
    """An open database. Use it as `async with bursar.open(url) as b:`."""

    def __init__(
        self,
        url: str,
        *,
        ports: Ports | None = None,
        migrate: bool = False,
        options: Options = USUAL,
    ) -> None:
        self.url = url
        self._ports = SystemPorts() if ports is None else ports
        self._migrate = migrate
        self._options = options

    async def __aenter__(self) -> Self:
        self.store = connect(self.url, self._ports, options=self._options)
        try:
            await self.store.open(migrate=self._migrate)
        except BaseException:  # also a cancellation: nothing was written yet, let go and pass it on
            await self.store.close()
            raise
        self.ledger = Ledger(self.store)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, timeout_s: float | None = None) -> None:
        """Finish what is being written, in that time, and let go."""
        await self.ledger.writer.close(timeout_s)
        await self.store.close()


def open(url: str, *, migrate: bool = False, require_synchronous: bool = False) -> Bursar:
    """Open `sqlite:///funds.db` or `postgresql://…`. A new database is set up; an older one is refused, unless
    `migrate` is given or `bursar migrate` was run. With `require_synchronous`, a PostgreSQL server is refused whose
    commits are not at a synchronous standby before they are told."""
    return Bursar(url, migrate=migrate, options=Options(require_synchronous=require_synchronous))
