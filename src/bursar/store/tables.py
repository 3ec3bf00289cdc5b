"""The tables: small, dumb sub-stores over a session. They apply what they are told and return what changed.

One set of classes serves both engines; what differs (SQL, lists, amounts) is behind `Session`. Whether several calls
happen together is the session's affair: inside `store.unit()` they do, in split mode each stands alone. Nothing here
interprets a count, decides a state or retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from bursar.model.accounts import Account, Book, encode_policy
from bursar.model.entries import HoldState
from bursar.model.envelope import Envelope
from bursar.model.money import Asset
from bursar.model.postings import SEQ_MAX, Posting, PostingState, posting_id
from bursar.model.records import (
    Event,
    EventKind,
    HoldRow,
    Saga,
    StoredEnvelope,
    StoredPosting,
    StoredVersion,
    Taken,
)
from bursar.store.rows import (
    Row,
    account_of,
    asset_of,
    book_of,
    envelope_of,
    envelope_row,
    hold_values,
    parse_cursor,
)

LAST_PATH = "\x7f"  # sorts after every character a path may have
FOREVER_US = 2**57  # some 4,500 years after 1970


class Session(Protocol):
    """A connection with named statements."""

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows. Lists are passed as they are."""
        ...

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement once per row, in as few round trips as the engine can; returns how many rows changed."""
        ...

    async def together(self, writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> list[int]:
        """Several writes as one: the largest primitive there is."""
        ...

    def amount(self, minor: int) -> Any:
        """An amount as this engine stores it."""
        ...

    def minor(self, stored: Any) -> int:
        """An amount as it was before it was stored."""
        ...


class Table:
    """Something that talks through a session."""

    def __init__(self, session: Session) -> None:
        self._s = session

    async def _one(self, name: str, *args: Any) -> Any:
        rows = await self._s.rows(name, *args)
        return rows[0][0] if rows else None


class Rules(Table):
    """The one row that guards status, policy and book of all accounts; assets and books, which are few."""

    async def generation(self) -> int:
        """The current generation."""
        return int(await self._one("generation"))

    async def bump(self) -> int:
        """A rule changes: commits validated before this fail. Returns the new generation."""
        return int(await self._one("bump_rules"))

    async def assets(self) -> dict[str, Asset]:
        """All assets by code."""
        return {row[1]: asset_of(row) for row in await self._s.rows("assets")}

    async def create_asset(self, asset: Asset) -> int:
        """1 if it is new, 0 if the code is taken."""
        row = (asset.code, asset.precision, str(asset.min_transfer), str(asset.max_transfer), asset.status.value)
        return await self._s.write("insert_asset", [(*row, asset.internal_transfer_enabled)])

    async def update_asset(self, asset: Asset) -> int:
        """Limits and status."""
        row = (asset.code, str(asset.min_transfer), str(asset.max_transfer), asset.status.value)
        return await self._s.write("update_asset", [(*row, asset.internal_transfer_enabled)])

    async def books(self) -> dict[str, Book]:
        """All books by name."""
        return {row[1]: book_of(row) for row in await self._s.rows("books")}

    async def create_book(self, book: Book) -> int:
        """1 if it is new, 0 if the name is taken."""
        lists = [msgspec.json.encode(list(names)).decode() for names in (book.assets, book.accounts)]
        return await self._s.write("insert_book", [(book.name, *lists)])


class Accounts(Table):
    """Versions of accounts: append only, without gaps."""

    async def take_number(self) -> int:
        """A number nobody has."""
        return int(await self._one("take_account_number"))

    async def append(self, account: Account) -> int:
        """A new version. 0 if it does not follow directly on the newest, or is there already."""
        row = (account.id, account.version, account.path, encode_policy(account.policy), account.status.value)
        return await self._s.write("insert_account", [(*row, account.book)])

    async def heads(self, paths: Iterable[str]) -> dict[str, Account]:
        """Newest versions by path; the missing are missing."""
        return {row[1]: account_of(row) for row in await self._s.rows("heads_by_path", list(paths))}

    async def heads_by_id(self, ids: Iterable[int]) -> dict[int, Account]:
        """Newest versions by number."""
        return {row[0]: account_of(row) for row in await self._s.rows("heads_by_id", list(ids))}

    async def versions(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Account]:
        """Exact versions by (number, version)."""
        pairs = list(wanted)
        rows = await self._s.rows("versions", [i for i, _ in pairs], [v for _, v in pairs])
        return {(row[0], row[2]): account_of(row) for row in rows}

    async def history(self, path: str) -> list[StoredVersion]:
        """Every version, oldest first."""
        rows = await self._s.rows("account_history", path)
        return [StoredVersion(account=account_of(row), at_us=row[6]) for row in rows]

    async def list(self, prefix: str = "", after: str = "", limit: int = 100) -> list[Account]:
        """Heads by path, from those that start with `prefix`, after a path."""
        rows = await self._s.rows("list_accounts", after, prefix, prefix + LAST_PATH, limit)
        return [account_of(row) for row in rows]


class Postings(Table):
    """Postings, who spent them, and the disposable table of what is live."""

    def _stored(self, row: Row) -> StoredPosting:
        posting = Posting(row[0], row[1], row[2], self._s.minor(row[3]))
        if row[5] is not None and not row[6]:
            state = PostingState.SPENT
        else:
            state = PostingState.LIVE if row[4] is None else PostingState.RESERVED
        return StoredPosting(posting=posting, state=state, reservation=row[4], spender=row[5])

    def _rows(self, postings: Sequence[Posting]) -> list[tuple[Any, ...]]:
        return [(p.id, p.account, p.asset, self._s.amount(p.amount)) for p in postings]

    async def insert(self, postings: Sequence[Posting]) -> int:
        """Write postings; those there already don't count."""
        return await self._s.write("insert_posting", self._rows(postings))

    async def enliven(self, postings: Sequence[Posting]) -> int:
        """Make postings live, except those spent already."""
        return await self._s.write("insert_live", self._rows(postings))

    async def get(self, ids: Iterable[int]) -> list[StoredPosting]:
        """Postings by number, in that order; the missing are missing. Spent ones stay readable."""
        return [self._stored(row) for row in await self._s.rows("postings_by_id", list(ids))]

    async def of_envelopes(self, first: int, last: int) -> list[StoredPosting]:
        """What the envelopes from `first` to `last` created."""
        rows = await self._s.rows("postings_of_envelopes", posting_id(first, 0), posting_id(last + 1, 0))
        return [self._stored(row) for row in rows]

    async def of_account(
        self, account: int, *, asset: int = 0, live_only: bool = False, after: int = 0, limit: int = 100
    ) -> list[StoredPosting]:
        """Postings of one account by number; of one asset if given."""
        name = "live_of_account" if live_only else "postings_of_account"
        return [self._stored(row) for row in await self._s.rows(name, account, after, asset, limit)]

    async def candidates(self, name: str, account: int, asset: int, limit: int) -> list[Posting]:
        """Free live postings: `largest`, `most_negative` or `smallest` first."""
        rows = await self._s.rows(name, account, asset, limit)
        return [Posting(row[0], row[1], row[2], self._s.minor(row[3])) for row in rows]

    async def live(self, ids: Iterable[int]) -> list[Posting]:
        """Those of the postings that are live and free."""
        rows = await self._s.rows("live_by_id", list(ids))
        return [Posting(row[0], row[1], row[2], self._s.minor(row[3])) for row in rows]

    async def reserve(self, ids: Sequence[int], saga: str, fence: int) -> int:
        """Claim free postings; what is taken is skipped. Ours count."""
        return await self._s.write("reserve", [(i, saga, fence) for i in ids])

    async def release(self, ids: Sequence[int], saga: str, fence: int) -> int:
        """Give back those that are ours."""
        return await self._s.write("release", [(i, saga, fence) for i in ids])

    async def spend(self, ids: Sequence[int], saga: str, fence: int, envelope: int) -> int:
        """Spend those we reserved, in the name of an envelope; what is spent already is skipped."""
        return await self._s.write("spend", [(i, saga, fence, envelope) for i in ids])

    async def bury(self, ids: Sequence[int], saga: str) -> int:
        """Take what is spent out of the live table."""
        return await self._s.write("bury", [(i, saga) for i in ids])

    async def spenders(self, ids: Iterable[int]) -> dict[int, int]:
        """Who spent them; the unspent are missing."""
        return {row[0]: row[1] for row in await self._s.rows("spends_by_id", list(ids))}

    async def shortage(self, account: int, asset: int) -> tuple[int, int, int]:
        """In one moment: postings claimed by others, commits past their point of no return, what is free to spend."""
        row = (await self._s.rows("shortage", account, asset))[0]
        return row[0], row[1], int(row[2] or 0)

    async def rebuild(self) -> int:
        """Throw the live table away and make it anew from postings and spends."""
        await self._s.rows("clear_live")
        await self._s.rows("rebuild_live")
        return sum(row[3] for row in await self._s.rows("live_sums"))

    async def sums(self) -> list[tuple[int, int, int, int]]:
        """(account, asset, sum, count) of all that is live."""
        return [(r[0], r[1], int(r[2]), r[3]) for r in await self._s.rows("live_sums")]


class Envelopes(Table):
    """Committed envelopes, and which accounts they involve."""

    async def take_numbers(self, count: int) -> int:
        """Reserve numbers; returns the last of them."""
        return int(await self._one("take_numbers", count))

    async def store(self, envelope: Envelope, id_: bytes) -> int:
        """Write an envelope; 0 if its number or key is there already."""
        return await self._s.write("insert_envelope", [envelope_row(envelope, id_)])

    async def publish(
        self,
        stored: StoredEnvelope,
        accounts: Iterable[int],
        cache: Sequence[tuple[int, int, int]],
        hold: HoldRow | None,
        saga: str,
        fence: int,
    ) -> int:
        """Store an envelope with all that it announces, if its saga still has its fence. 0: it has not, or was done.

        One primitive, because whoever finds the envelope takes it for a receipt: history, cached balances, hold and
        event must be there with it.
        """
        s = stored
        head = (s.seq, s.id, s.scope, s.key, s.book, int(s.kind), s.reverses)
        writes: list[tuple[str, Sequence[tuple[Any, ...]]]] = [
            ("insert_envelope_fenced", [(*head, s.legs, s.pins, s.consumes, s.metadata, saga, fence)]),
            ("insert_involved_fenced", [(a, s.seq, saga, fence) for a in accounts]),
            ("insert_cache_fenced", [(a, asset, s.seq, str(v), saga, fence) for a, asset, v in cache]),
            ("put_hold_fenced", [] if hold is None else [(*hold_values(hold, self._s.amount), saga, fence)]),
            ("insert_event_fenced", [(int(EventKind.COMMITTED), s.seq, 0, saga, fence)]),
        ]
        return (await self._s.together([(name, rows) for name, rows in writes if rows]))[0]

    async def involve(self, accounts: Iterable[int], envelope: int) -> int:
        """Write who took part."""
        return await self._s.write("insert_involved", [(a, envelope) for a in accounts])

    async def taken(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Taken]:
        """What (scope, key) pairs stand for already."""
        rows = await self._s.rows("envelopes_by_key", [s for s, _ in keys], [k for _, k in keys])
        return {(r[2], r[3]): Taken(r[0], r[1], r[4], r[5]) for r in rows}

    async def get(self, seqs: Iterable[int]) -> list[StoredEnvelope]:
        """Envelopes by number, in order of number."""
        return [envelope_of(row) for row in await self._s.rows("envelopes_by_seq", list(seqs))]

    async def after(self, seq: int, *, book: int = 0, limit: int = 100) -> list[StoredEnvelope]:
        """Envelopes in order of creation, after a number; of one book if given."""
        return [envelope_of(row) for row in await self._s.rows("envelopes_range", seq, book, limit)]

    async def of_account(
        self, account: int, *, before: int = SEQ_MAX, since_us: int = 0, until_us: int = FOREVER_US, limit: int = 100
    ) -> list[StoredEnvelope]:
        """Envelopes an account took part in, newest first."""
        rows = await self._s.rows("envelopes_of_account", account, before, since_us, until_us, limit)
        return [envelope_of(row) for row in rows]

    async def by_hash(self, id_: bytes) -> int | None:
        """Number of the envelope with this content hash, by looking at all of them."""
        found = await self._one("envelope_by_hash", id_)
        return None if found is None else int(found)


class Balances(Table):
    """Sums of what is live, and the two disposable tables that keep some of them."""

    async def of(self, account: int) -> dict[int, tuple[int, int]]:
        """asset → (sum, number of postings), from the live table."""
        return {row[0]: (int(row[1]), row[2]) for row in await self._s.rows("balances", account)}

    async def cached(self, account: int) -> dict[int, int]:
        """asset → sum, from the cache."""
        return {row[0]: int(row[1]) for row in await self._s.rows("cached_balances", account)}

    async def by_prefix(self, prefix: str) -> dict[int, int]:
        """asset → sum over an account and all below it."""
        rows = await self._s.rows("balances_by_prefix", prefix, prefix + ":", prefix + ":" + LAST_PATH)
        return {row[0]: int(row[1]) for row in rows}

    async def at(self, account: int, asset: int, at_us: int) -> int:
        """The sum as it was at a moment."""
        found = await self._one("balance_at", account, asset, at_us)
        return 0 if found is None else int(found)

    async def wide(self) -> set[int]:
        """Accounts that have been given a cache."""
        return {row[0] for row in await self._s.rows("wide_accounts")}

    async def add_cache(self, rows: Sequence[tuple[int, int, int, int]]) -> int:
        """(account, asset, part, amount)."""
        return await self._s.write("insert_cache", [(a, s, p, str(v)) for a, s, p, v in rows])

    async def start_cache(self, account: int, sums: dict[int, int]) -> None:
        """Give an account a cache of its own, beginning with what it has. In a unit that has bumped the rules."""
        await self._s.rows("clear_cache_of", account)
        await self.add_cache([(account, 0, 0, 0), *((account, asset, 0, amount) for asset, amount in sums.items())])

    async def crowds(self, most: int) -> list[tuple[int, int]]:
        """Cached balances in more than so many parts."""
        return [(row[0], row[1]) for row in await self._s.rows("cache_crowds", most)]

    async def fold(self, account: int, asset: int) -> None:
        """Replace the parts of a cached balance by their sum. To be called in a unit."""
        parts = await self._s.rows("take_cache_parts", account, asset)
        await self._s.write("add_to_cache", [(account, asset, str(sum(int(row[0]) for row in parts)))])

    async def clear_cache(self) -> None:
        """Forget the cache."""
        await self._s.rows("clear_cache")

    async def heads(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int, str | None]]:
        """(account, asset) → (guarded balance, turn, reservation)."""
        rows = await self._s.rows("head_balances", [a for a, _ in wanted], [s for _, s in wanted])
        return {(r[0], r[1]): (int(r[2]), r[3], r[4]) for r in rows}

    async def all_heads(self) -> dict[tuple[int, int], int]:
        """Every guarded balance."""
        return {(r[0], r[1]): int(r[2]) for r in await self._s.rows("all_heads")}

    async def put_heads(self, rows: Sequence[tuple[int, int, int]]) -> int:
        """(account, asset, balance)."""
        return await self._s.write("put_head", [(a, s, str(b)) for a, s, b in rows])

    async def clear_heads(self) -> None:
        """Forget the guarded balances."""
        await self._s.rows("clear_heads")

    async def reserve_heads(self, wanted: Sequence[tuple[int, int]], saga: str, fence: int) -> int:
        """Claim guarded balances for a saga; ours count."""
        return await self._s.write("reserve_head", [(a, s, saga, fence) for a, s in wanted])

    async def settle_heads(self, rows: Sequence[tuple[int, int, int]], saga: str) -> int:
        """Write guarded balances that we claimed, and let go of them."""
        return await self._s.write("settle_head", [(a, s, str(b), saga) for a, s, b in rows])

    async def release_heads(self, saga: str, fence: int) -> int:
        """Let go of guarded balances."""
        return await self._s.write("release_heads", [(saga, fence)])


class Events(Table):
    """The outbox."""

    async def append(self, kind: EventKind, subject: int, version: int = 0) -> int:
        """1, or 0 if that event is there already."""
        return await self._s.write("insert_event", [(int(kind), subject, version)])

    async def since(self, cursor: str, limit: int) -> list[Event]:
        """Events after a cursor, in order; never one that another could still come before."""
        epoch, xid, seq = parse_cursor(cursor)
        rows = await self._s.rows("events_since", epoch, xid, seq, limit)
        return [Event(cursor=f"{r[0]}.{r[1]}.{r[2]}", kind=EventKind(r[3]), subject=r[4], version=r[5]) for r in rows]


class Sagas(Table):
    """Commits under way (split mode)."""

    async def save(self, saga: Saga) -> int:
        """1, or 0 if its key is under way or committed already."""
        row = (saga.id, saga.kind, saga.scope, saga.key, saga.phase, saga.fence, saga.lease_us, saga.data)
        return await self._s.write("save_saga", [row])

    async def finalize(self, saga: str, fence: int, data: bytes, generation: int) -> int:
        """The point of no return; 0 if the fence is lost or the rules have changed."""
        return await self._s.write("finalize_saga", [(saga, fence, data, generation)])

    async def take(self, saga: Saga, lease_us: int, now_us: int) -> int:
        """Take over an abandoned saga, if it is still as we saw it; its fence rises by one."""
        return await self._s.write("take_saga", [(saga.id, saga.fence, lease_us, now_us, saga.phase)])

    async def has_fence(self, saga: str, fence: int) -> bool:
        """Whether nobody has taken it over, or finished it."""
        return bool(await self._s.rows("saga_fence", saga, fence))

    async def set_aside(self, saga: str) -> int:
        """It can't be read; leave it for a person."""
        return await self._s.write("break_saga", [(saga,)])

    async def delete(self, saga: str, fence: int) -> int:
        """It is over."""
        return await self._s.write("delete_saga", [(saga, fence)])

    async def list(self) -> list[Saga]:
        """All of them."""
        return [
            Saga(id=r[0], kind=r[1], scope=r[2], key=r[3], phase=r[4], fence=r[5], lease_us=r[6], data=r[7])
            for r in await self._s.rows("sagas")
        ]

    async def count(self) -> int:
        """Those that are not set aside."""
        return int(await self._one("count_sagas"))


class Holds(Table):
    """Holds as they stand."""

    def _hold(self, row: Row) -> HoldRow:
        id_, account, asset, amount, remaining, posting, state, owner, expires_us = row
        return HoldRow(
            id=id_,
            account=account,
            asset=asset,
            amount=self._s.minor(amount),
            remaining=self._s.minor(remaining),
            posting=posting,
            state=HoldState(state),
            owner=owner,
            expires_us=expires_us,
        )

    async def put(self, hold: HoldRow) -> int:
        """Write a hold, new or changed."""
        return await self._s.write("put_hold", [hold_values(hold, self._s.amount)])

    async def get(self, ids: Iterable[int]) -> list[HoldRow]:
        """Holds by number."""
        return [self._hold(row) for row in await self._s.rows("holds_by_id", list(ids))]

    async def open_of(self, account: int) -> list[HoldRow]:
        """Open holds of an account."""
        return [self._hold(row) for row in await self._s.rows("holds_of_account", account)]

    async def due(self, limit: int) -> list[HoldRow]:
        """Open holds whose time is up."""
        return [self._hold(row) for row in await self._s.rows("holds_due", limit)]

    async def clock_us(self) -> int:
        """The clock that decides whose time is up."""
        return int(await self._one("clock"))


class Checks(Table):
    """What audit asks. Rows are evidence of something broken; none is good."""

    async def asset_sums(self) -> dict[int, int]:
        """I1."""
        return {row[0]: int(row[1]) for row in await self._s.rows("asset_sums")}

    async def ids(self, name: str, limit: int) -> list[int]:
        """Numbers of rows that break an invariant: `stray_spends`, `not_live`, `wrongly_live`, `stray_postings`."""
        return [row[0] for row in await self._s.rows(name, limit)]

    async def spends(self) -> int:
        """How many spends there are."""
        return int(await self._one("count_spends"))

    async def counts(self) -> dict[str, int]:
        """How much there is."""
        row = (await self._s.rows("counts"))[0]
        return dict(zip(("accounts", "envelopes", "postings", "live", "events"), map(int, row), strict=True))


class Tables:
    """All tables over one session."""

    def __init__(self, session: Session) -> None:
        self.rules = Rules(session)
        self.accounts = Accounts(session)
        self.postings = Postings(session)
        self.envelopes = Envelopes(session)
        self.balances = Balances(session)
        self.events = Events(session)
        self.sagas = Sagas(session)
        self.holds = Holds(session)
        self.checks = Checks(session)
