"""What the database knows of the signer: read before every login, written at first contact (signer/client, W33).

The database is bound to one signer's log for ever. Another signer, or the same one with a new log, has forgotten which
nonces it has used: it is not spoken to, under whatever name, until operators put it in the old one's place (`rebind`).
Payouts are paused with that, and two people resume them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bursar.engine import set_pause
from bursar.flows.payouts.machine import MACHINE
from bursar.flows.payouts.outside import SIGNER_PEER
from bursar.model.actors import check_actor, check_reason
from bursar.model.errors import Refusal
from bursar.signer.client import Known
from bursar.signer.protocol import SignerUnavailable
from bursar.store import Store

BOUND = f"{SIGNER_PEER}{MACHINE.name}"  # the row that names the log; no rail of a core has a colon in its name


@dataclass(eq=False)
class SignerNotReplaced(Refusal):
    """The signer that answers can't be put in the place of the one that this database knows."""

    why: str
    code = "SIGNER_NOT_REPLACED"
    text = "the signer is not replaced: {why}"


class SignerStoreLink:
    """The database's side of the signer."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    async def known(self) -> Known:
        """Which log this database is bound to, and how far it is known."""
        bound = await self._store.read.cores.get(BOUND)
        seen = await self._store.read.marks.highest(SIGNER_PEER + self._name)
        return Known(identity="" if bound is None else bound.identity, seen=seen)

    async def bind(self, identity: str) -> None:
        """First contact: from now on the signer is that one."""
        if await self._store.single().cores.bind(BOUND, identity):
            return
        bound = await self._store.read.cores.get(BOUND)
        if bound is None or bound.identity != identity:
            was = "another signer" if bound is None else bound.identity
            raise SignerUnavailable(self._name, f"its log has the identity {identity}, and this database knows {was}")


async def rebind(store: Store, name: str, identity: str, *, actor: str, reason: str) -> str:
    """Put the signer that answers in the place of the one that is lost; returns the old one's identity.

    What the old one has signed is not in the new one's log. So payouts are paused, and two people resume them when
    every transaction of the wallets is accounted for.
    """
    person, why = check_actor(actor), check_reason(reason)
    bound = await store.read.cores.get(BOUND)
    if bound is None:
        raise SignerNotReplaced("this database has not met any signer yet: the first one it meets is bound by itself")
    if bound.identity == identity:
        raise SignerNotReplaced(f"the one that answers is the one that is known ({identity})")
    text = f"the signer was replaced: {why}"
    await set_pause(store, "flow", MACHINE.name, actor=person, reason=text, two_people=True)
    async with store.transaction() as tables:
        if not await tables.cores.rebind(BOUND, identity, bound.identity):
            raise SignerNotReplaced("another person has replaced it meanwhile")
        await tables.marks.forget(SIGNER_PEER + name)
    return bound.identity
