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


def user_of(wallet: str) -> int:
    """Whose wallet this is, if it is one that receives for a user; 0: by its name it is none. Pure."""
    _, _, digits = wallet.rpartition("-")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


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
    """Addresses by the time of their issue, along an index of their own (migration 0019)."""

    async def after(self, at_us: int, number: int, limit: int) -> list[tuple[int, int]]:
        """When addresses were issued, and their numbers: so many that were issued later than this one."""
        return [(row[0], row[1]) for row in await self._s.rows("addresses_issued", at_us, number, limit)]

    async def wallets(self, numbers: Sequence[int]) -> dict[int, tuple[str, DepositWallet]]:
        """Some of them by number: name and body."""
        rows = await self._s.rows("addresses_by_number", list(numbers))
        return {row[0]: (row[1], msgspec.json.decode(row[2], type=DepositWallet)) for row in rows}


class DerivedWallets:
    """All that were issued, as this process knows them: about 250 bytes of memory for each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, dict[str, Owned]] = {}  # by chain and address
        self._whole_us = 0  # all that were issued before this are known
        self._recent: set[int] = set()  # numbers of others that are known

    async def wallet(self, name: str) -> DepositWallet | None:
        """The wallet of a name; None if it was never issued."""
        record = await self._store.read.records.get(ADDRESSES.name, name)
        return None if record is None else body_of(record)

    async def owner(self, chain: str, address: str) -> Owned | None:
        """Whose an address is; None: it is no derived wallet's."""
        row = await self._store.read.flow_rows.get(ADDRESSES.name, ADDRESS.name, address_key(chain, address))
        return None if row is None or row.state is not RowState.HELD else msgspec.json.decode(row.body, type=Owned)

    async def of_chain(self, chain: str) -> Mapping[str, Owned]:
        """Every address of a chain. Of those of the last moments the numbers are read again at each look: a few bytes.

        By the time of their issue, never by their numbers: a process takes numbers ahead, and may use one much later.
        """
        settled_us = await self._store.now_us() - BEHIND_US  # before the read
        after, recent = (min(self._whole_us, settled_us), 0), set[int]()  # a clock may have been set back
        issued = Issued(self._store.read.session)
        while page := await issued.after(*after, PAGE):
            found = await issued.wallets(new) if (new := [n for _, n in page if n not in self._recent]) else {}
            for name, wallet in found.values():
                owned = Owned(wallet=name, user=wallet.user)
                self._known.setdefault(wallet.chain, {}).setdefault(wallet.address, owned)
            recent.update(number for at_us, number in page if at_us >= settled_us)
            after = page[-1]
            self._whole_us = max(self._whole_us, min(after[0], settled_us))
            if len(page) < PAGE:
                break
        self._whole_us, self._recent = max(self._whole_us, settled_us), recent
        return self._known.setdefault(chain, {})


def body_of(record: Record) -> DepositWallet:
    """The body of an address's record."""
    return msgspec.json.decode(record.body, type=DepositWallet)
