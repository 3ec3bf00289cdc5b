"""Wallets that receive for one user each: derived from the user's number, swept, and watched as every wallet is.

There may be a million of them, so that they are records and no documents: one per wallet, under the name by which the
signer knows its key. Which addresses are issued, and to whom, is the business of `flows/deposits`. Here is what payouts
need of them: the wallet of a name, the name of an address, and all addresses of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from bursar.flows.payouts.documents import Role, WalletDocument
from bursar.model.flow_rows import Form, RowKind, RowState
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.store import Store
from bursar.store.session import Table
from bursar.store.sql import bring

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

bring("bursar.flows.payouts")


class DepositWallet(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an address's record; its id is the name of the wallet."""

    chain: str
    user: int
    address: str  # as the chain's codec writes it

    def document(self) -> WalletDocument:
        """As payouts know wallets."""
        return WalletDocument(chain=self.chain, address=self.address, role=Role.DEPOSIT)


class Owned(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # of which there may be a million
    """Whose an address is."""

    wallet: str
    user: int


def address_key(chain: str, address: str) -> str:
    """The key of the row that makes an address one wallet's."""
    return f"{chain}/{address}"


class OwnAddresses(Mapping[str, str]):
    """Address → name of all wallets of a chain. Nothing is copied: those that are issued later are in it, too."""

    def __init__(self, documented: Mapping[str, str], derived: Mapping[str, Owned]) -> None:
        self._documented = documented
        self._derived = derived

    def __getitem__(self, address: str) -> str:
        name = self._documented.get(address)
        return self._derived[address].wallet if name is None else name

    def __iter__(self) -> Iterator[str]:
        yield from self._documented
        yield from (address for address in self._derived if address not in self._documented)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Issued(Table):
    """Addresses in the order in which they were issued, along an index of their own (migration 0019)."""

    async def after(self, at_us: int, number: int, limit: int) -> Sequence[tuple[int, int, str, str | bytes]]:
        """So many that were issued later than this one: when, number, name of the wallet, body."""
        return [
            (row[0], row[1], row[2], row[3]) for row in await self._s.rows("addresses_issued", at_us, number, limit)
        ]


class DerivedWallets:
    """All that were issued, as this process knows them: about 300 bytes for each, whatever the chain."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, dict[str, Owned]] = {}  # by chain and address
        self._whole_us = 0  # all that were issued before this are known

    async def wallet(self, name: str) -> DepositWallet | None:
        """The wallet of a name; None if it was never issued."""
        record = await self._store.read.records.get(ADDRESSES.name, name)
        return None if record is None else body_of(record)

    async def owner(self, chain: str, address: str) -> Owned | None:
        """Whose an address is; None: it is no derived wallet's."""
        row = await self._store.read.flow_rows.get(ADDRESSES.name, ADDRESS.name, address_key(chain, address))
        return None if row is None or row.state is not RowState.HELD else msgspec.json.decode(row.body, type=Owned)

    async def of_chain(self, chain: str) -> Mapping[str, Owned]:
        """Every address of a chain. Those of the last moments are read again at each look, and no others.

        By the time of their issue, never by their numbers: a process takes numbers ahead, and may use one much later.
        """
        settled_us = await self._store.now_us() - BEHIND_US  # before the read
        after = min(self._whole_us, settled_us), 0  # a clock may have been set back
        while page := await Issued(self._store.read.session).after(*after, PAGE):
            for _, _, name, body in page:
                wallet = msgspec.json.decode(body, type=DepositWallet)
                known = self._known.setdefault(wallet.chain, {})
                if wallet.address not in known:
                    known[wallet.address] = Owned(wallet=name, user=wallet.user)
            after = page[-1][:2]
            self._whole_us = max(self._whole_us, min(after[0], settled_us))
            if len(page) < PAGE:
                break
        self._whole_us = max(self._whole_us, settled_us)
        return self._known.setdefault(chain, {})


def body_of(record: Record) -> DepositWallet:
    """The body of an address's record."""
    return msgspec.json.decode(record.body, type=DepositWallet)
