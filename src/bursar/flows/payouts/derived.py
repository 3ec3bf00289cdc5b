"""Wallets that receive for one user each: derived from the user's number, swept, and watched as every wallet is.

There may be a million of them, so that they are records and no documents: one per wallet, under the name by which the
signer knows its key. Which addresses are issued, and to whom, is the business of `flows/deposits`. Here is what payouts
need of them: the wallet of a name, the name of an address, and all addresses of a chain.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.flows.payouts.documents import Role, WalletDocument
from bursar.model.flow_rows import Form, RowKind, RowState
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.store import Store
from bursar.store.records import NEWEST

NEW, ISSUED = "new", "issued"
ADDRESSES: Final = Machine(
    name="deposit_addresses",
    initial=NEW,
    states=(
        State(NEW, Kind.CALL, action="look", effect=Effect.CONFIRM, poll_s=15.0),
        State(ISSUED, Kind.TERMINAL),
    ),
    arrows=(Arrow(NEW, Outcome.SUCCESS, ISSUED), Arrow(NEW, Outcome.EXPLICIT_FAIL, ISSUED)),
)
ADDRESS: Final = RowKind("address", Form.UNIQUE)  # "chain/address": one user's for ever

PAGE: Final = 1_000
BEHIND_US: Final = 120_000_000  # an older record may be written later by so much: hosts' clocks, and slow transactions


class DepositWallet(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an address's record; its id is the name of the wallet."""

    chain: str
    user: int
    address: str  # as the chain's codec writes it

    def document(self) -> WalletDocument:
        """As payouts know wallets."""
        return WalletDocument(chain=self.chain, address=self.address, role=Role.DEPOSIT)


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """Whose an address is."""

    wallet: str
    user: int


def user_of(wallet: str) -> int:
    """Whose wallet this is, if it is one that receives for a user; 0: by its name it is none. Pure."""
    _, _, digits = wallet.rpartition("-")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def address_key(chain: str, address: str) -> str:
    """The key of the row that makes an address one wallet's."""
    return f"{chain}/{address}"


class DerivedWallets:
    """All that were issued, as this process knows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, dict[str, Owned]] = {}  # by chain and address
        self._read_us = 0  # created later than this: read again

    async def wallet(self, name: str) -> DepositWallet | None:
        """The wallet of a name; None if it was never issued."""
        record = await self._store.read.records.get(ADDRESSES.name, name)
        return None if record is None else body_of(record)

    async def owner(self, chain: str, address: str) -> Owned | None:
        """Whose an address is; None: it is no derived wallet's."""
        row = await self._store.read.flow_rows.get(ADDRESSES.name, ADDRESS.name, address_key(chain, address))
        return None if row is None or row.state is not RowState.HELD else msgspec.json.decode(row.body, type=Owned)

    async def of_chain(self, chain: str) -> dict[str, Owned]:
        """Every address of a chain. Those of the last moments are read again at each look, and no others."""
        before, newest_us = NEWEST, self._read_us
        while page := await self._store.read.records.list(ADDRESSES.name, before=before, limit=PAGE):
            before = page[-1].number
            for record in page:
                body = body_of(record)
                self._known.setdefault(body.chain, {})[body.address] = Owned(wallet=record.id, user=body.user)
                newest_us = max(newest_us, record.created_us)
            if page[-1].created_us < self._read_us:
                break
        self._read_us = newest_us - BEHIND_US
        return self._known.setdefault(chain, {})


def body_of(record: Record) -> DepositWallet:
    """The body of an address's record."""
    return msgspec.json.decode(record.body, type=DepositWallet)
