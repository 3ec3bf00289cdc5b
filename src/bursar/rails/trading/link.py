"""What a client's ledger knows of a core: the door through which a client asks its owner before it talks.

A ledger's database keeps, durably, which core it is bound to and the highest sequence of it that it relies on. The
client asks before every login, because others who work for the same ledger learn more meanwhile; and at first contact
it has its own side bound before the core binds itself, so that a crash in between leaves nothing that another core or
another ledger could slip into. Not here: how the ledger keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from bursar.model.errors import BursarError


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's ledger knows of a core."""

    ledger: str = ""  # identity of the ledger that this client works for; "": for none
    core: str = ""  # identity of the core that the ledger is bound to; "": none yet
    seen: int = 0  # the highest sequence of this core that the ledger's database relies on (T33)


@dataclass(eq=False)
class CoreRefused(BursarError):
    """The ledger is bound to another core."""

    known: str
    found: str
    code = "OTHER_CORE"
    text = (
        "this ledger is bound to the core with identity {known}, and the one at this address is {found}: restore the "
        "data folder of {known}, or point the setting to its address. Nothing was sent to {found}"
    )


class CoreLink(Protocol):
    """The ledger's side of a connection to a core."""

    async def known(self) -> Known:
        """What to tell the core. Asked before every login; if it raises, the connection is tried again later."""
        ...

    async def bind(self, core: str) -> None:
        """Remember durably that the ledger is bound to this core; CoreRefused if it is bound to another."""
        ...


class FixedLink:
    """A link that knows what it was given. For clients that work for no ledger: a matching engine, tools, tests."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known or Known()

    async def known(self) -> Known:
        """What it was given, and the core that it has met."""
        return self._known

    async def bind(self, core: str) -> None:
        """Remember the core, as long as this object lives."""
        if self._known.core not in ("", core):
            raise CoreRefused(self._known.core, core)
        self._known = msgspec.structs.replace(self._known, core=core)
