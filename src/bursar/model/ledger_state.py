"""The ledger's state, as far as one batch of changes needs it: what decisions are made on.

It is filled from the store, and every accepted envelope is applied to it, so that the next one in the batch sees what
it would have seen had it come alone afterwards (L17). It decides nothing; `resolve` and `plan` do.
"""

from __future__ import annotations

from bursar.model.accounts import Account, Book
from bursar.model.envelope import Plan
from bursar.model.errors import UnknownAccount, UnknownAsset, UnknownBook
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.model.selection import Pool, PoolKey

PLUS, MINUS = 1, -1


class LedgerState:
    """Heads, live postings and guarded balances, by row number."""

    __slots__ = ("accounts", "assets", "assets_by_id", "balances", "books", "live", "pools")

    def __init__(self, accounts: dict[str, Account], assets: dict[str, Asset], books: dict[str, Book]) -> None:
        self.accounts = accounts
        self.assets = assets
        self.assets_by_id = {a.id: a for a in assets.values()}
        self.books = books
        self.live: dict[int, Posting] = {}
        self.pools: dict[PoolKey, Pool] = {}
        self.balances: dict[tuple[int, int], int] = {}  # of capped accounts only: what the floor is checked against

    def account(self, path: str) -> Account:
        """The head of an account."""
        found = self.accounts.get(path)
        if found is None:
            raise UnknownAccount(path)
        return found

    def asset(self, code: str) -> Asset:
        """An asset by code."""
        found = self.assets.get(code)
        if found is None:
            raise UnknownAsset(code)
        return found

    def book(self, name: str) -> Book:
        """A book by name."""
        found = self.books.get(name)
        if found is None:
            raise UnknownBook(name)
        return found

    def add_postings(self, postings: list[Posting], *, key: PoolKey | None, complete: bool = True) -> None:
        """Postings that the store says are live; with `key`, they are the pool of that account, asset and sign."""
        for p in postings:
            self.live[p.id] = p
        if key is not None:
            self.pools[key] = Pool([(abs(p.amount), -p.id) for p in postings], complete)

    def extend_pool(self, key: PoolKey, postings: list[Posting], *, complete: bool) -> None:
        """More postings of a pool, which it did not know of."""
        self.add_postings(postings, key=None)
        pool = self.pools[key]
        pool.items = sorted([*pool.items, *((abs(p.amount), -p.id) for p in postings)])
        pool.complete = complete

    def apply(self, plan: Plan) -> None:
        """An envelope is accepted: spend and create."""
        self._exchange(plan.envelope.consumes, plan.envelope.creates)
        for account, asset, _before, after in plan.floors:
            self.balances[account, asset] = after

    def undo(self, plan: Plan) -> None:
        """An accepted envelope is withdrawn, because another of the same change is refused. Newest first."""
        self._exchange(plan.envelope.creates, plan.envelope.consumes)
        for account, asset, before, _after in plan.floors:
            self.balances[account, asset] = before

    def _exchange(self, spent: tuple[Posting, ...], created: tuple[Posting, ...]) -> None:
        live, pools = self.live, self.pools
        for p in spent:
            live.pop(p.id, None)
            pool = pools.get((p.account, p.asset, PLUS if p.amount > 0 else MINUS))
            if pool is not None:
                pool.drop(abs(p.amount), p.id)
        for p in created:
            live[p.id] = p
            pool = pools.get((p.account, p.asset, PLUS if p.amount > 0 else MINUS))
            if pool is not None:
                pool.put(abs(p.amount), p.id)
