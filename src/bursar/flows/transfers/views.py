"""A transfer as its owner sees it, and which of them are to be listed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, Transfer
from bursar.model.machine import Kind
from bursar.model.money import Asset
from bursar.model.records import Record
from bursar.store.records import Wanted

NEWEST = 2**63 - 1
PENDING = "PENDING"
OPEN = tuple(state.name for state in MACHINE.states if state.kind is not Kind.TERMINAL)
TERMINAL = {state.name for state in MACHINE.states if state.kind is Kind.TERMINAL}


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer as its owner sees it."""

    transfer_id: int
    req_id: str
    user: int
    source: AccountType
    target: AccountType
    asset: str
    amount: str  # in units of the asset
    fsm_state: str
    error: str  # what the last call said
    reason: str  # why it failed, or went back
    created_us: int
    updated_us: int
    client_order_id: str = ""
    replayed: bool = False

    @property
    def state(self) -> str:
        """The state where it is an end, else PENDING (T18)."""
        return self.fsm_state if self.fsm_state in TERMINAL else PENDING


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which transfers are to be listed. Nothing said: all."""

    state: str = ""  # PENDING, or an exact one
    asset: str = ""
    source: AccountType | None = None
    target: AccountType | None = None
    since_us: int = 0  # created then or later
    until_us: int = NEWEST  # created before

    def of(self, owner: str) -> Wanted:
        """As the store asks for it."""
        said = {"asset": self.asset, "source": self.source, "target": self.target}
        return Wanted(
            owner=owner,
            states=OPEN if self.state == PENDING else (self.state,) if self.state else (),
            facts={name: str(value) for name, value in said.items() if value},
            since_us=self.since_us,
            until_us=self.until_us,
        )


def view_of(record: Record, transfer: Transfer, assets: Mapping[str, Asset], replayed: bool = False) -> View:
    """The view of a record."""
    return View(
        transfer_id=record.number,
        req_id=record.id,
        user=transfer.user,
        source=transfer.source,
        target=transfer.target,
        asset=transfer.asset,
        amount=str(assets[transfer.asset].of_minor(transfer.minor)),
        fsm_state=record.state,
        error=record.error,
        reason=transfer.reason or (record.error if record.state in TERMINAL else ""),
        created_us=record.created_us,
        updated_us=record.updated_us,
        client_order_id=transfer.client_order_id,
        replayed=replayed,
    )
