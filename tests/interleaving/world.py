"""The world of a scene: accounts and money of its own, a follower of the events, and the books.

`every_order(url, prepare, check)` plays one scene in every order of its steps. Each has fresh accounts in the same
database, and nothing wrong is ever repaired: so the books, which hold all that has ever happened, are checked after
every few scenes and after the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import asyncpg
from tests.interleaving.stage import GROUP, Actor, Stage, next_choices

from bursar import Bursar, ExternalAccount, NoOverdraft, Receipt, deposit
from bursar.ledger import Ledger
from bursar.model.accounts import Policy
from bursar.model.envelope import decode_pins

ASSET = "USDT"
BANK = "bank"
SCENES_MAX = 2_000
BOOKS_EVERY = 10  # scenes
TEST_S = 60.0

Operation = Callable[[Actor], Coroutine[Any, Any, Any]]
Prepare = Callable[["World"], Awaitable[Sequence[Operation]]]
Check = Callable[["World", list[Any]], Awaitable[None]]

# Each returns what is wrong; no rows is good.
AUDIT = {
    "I1: an asset's live postings do not sum to zero": """
        SELECT asset, sum(amount) FROM bursar.live_postings GROUP BY asset HAVING sum(amount) <> 0""",
    "I1: an envelope does not conserve an asset": """
        SELECT coalesce(c.envelope, d.envelope) FROM
          (SELECT id >> 16 AS envelope, asset, sum(amount) AS total FROM bursar.postings GROUP BY 1, 2) c
        FULL JOIN (SELECT s.envelope, p.asset, sum(p.amount) AS total
                   FROM bursar.spends s JOIN bursar.postings p ON p.id = s.posting GROUP BY 1, 2) d
        ON c.envelope = d.envelope AND c.asset = d.asset WHERE coalesce(c.total, 0) <> coalesce(d.total, 0)""",
    "I2: an envelope consumes other postings than it spent": """
        SELECT e.seq FROM bursar.envelopes e
        WHERE octet_length(e.consumes) / 8 <> (SELECT count(*) FROM bursar.spends s WHERE s.envelope = e.seq)""",
    "I2: a spend or posting without its envelope": """
        SELECT posting FROM bursar.spends s LEFT JOIN bursar.envelopes e ON e.seq = s.envelope WHERE e.seq IS NULL
        UNION ALL
        SELECT p.id FROM bursar.postings p LEFT JOIN bursar.envelopes e ON e.seq = p.id >> 16 WHERE e.seq IS NULL""",
    "I3: live is not postings - spends": """
        (SELECT id, account, asset, amount FROM bursar.postings p
         WHERE NOT EXISTS (SELECT 1 FROM bursar.spends s WHERE s.posting = p.id)
         EXCEPT SELECT posting, account, asset, amount FROM bursar.live_postings)
        UNION ALL
        (SELECT posting, account, asset, amount FROM bursar.live_postings
         EXCEPT SELECT id, account, asset, amount FROM bursar.postings p
         WHERE NOT EXISTS (SELECT 1 FROM bursar.spends s WHERE s.posting = p.id))""",
    "a cached balance is not the sum": """
        WITH heads AS (SELECT DISTINCT ON (id) id, path, policy::json->>'policy' AS policy FROM bursar.accounts
                       ORDER BY id, version DESC),
             cached AS (SELECT account, asset, sum(amount) AS total FROM bursar.balance_cache
                        WHERE asset <> 0 GROUP BY 1, 2),
             live AS (SELECT account, asset, sum(amount) AS total FROM bursar.live_postings GROUP BY 1, 2)
        SELECT h.path, c.total, l.total FROM cached c FULL JOIN live l ON c.account = l.account AND c.asset = l.asset
        JOIN heads h ON h.id = coalesce(c.account, l.account)
        WHERE (h.policy IN ('system', 'external') OR EXISTS (SELECT 1 FROM bursar.balance_cache w
               WHERE w.account = h.id AND w.asset = 0)) AND coalesce(c.total, 0) <> coalesce(l.total, 0)""",
    "a guarded balance is not the sum, or is below its floor": """
        WITH capped AS (SELECT id, path, policy::json->>'asset' AS asset, (policy::json->>'floor')::numeric AS floor
                        FROM (SELECT DISTINCT ON (id) * FROM bursar.accounts ORDER BY id, version DESC) a
                        WHERE policy::json->>'policy' = 'capped_overdraft')
        SELECT c.path, h.balance, l.total FROM capped c JOIN bursar.assets s ON s.code = c.asset
        LEFT JOIN bursar.account_heads h ON h.account = c.id AND h.asset = s.id
        LEFT JOIN LATERAL (SELECT sum(amount) AS total FROM bursar.live_postings
                           WHERE account = c.id AND asset = s.id) l ON true
        WHERE coalesce(h.balance, 0) <> coalesce(l.total, 0) OR coalesce(l.total, 0) < c.floor * 10 ^ s.precision""",
    "an account without overdraft owns a negative posting": """
        SELECT l.posting FROM bursar.live_postings l
        JOIN (SELECT DISTINCT ON (id) id, policy FROM bursar.accounts ORDER BY id, version DESC) a ON a.id = l.account
        WHERE l.amount < 0 AND a.policy::json->>'policy' = 'no_overdraft'""",
    "a closed account has a balance or an open hold": """
        SELECT a.path FROM (SELECT DISTINCT ON (id) * FROM bursar.accounts ORDER BY id, version DESC) a
        WHERE a.status = 'closed' AND (
            EXISTS (SELECT 1 FROM bursar.live_postings l WHERE l.account = a.id
                    GROUP BY l.asset HAVING sum(l.amount) <> 0)
            OR EXISTS (SELECT 1 FROM bursar.holds h WHERE h.account = a.id AND h.state = 'open'))""",
    "a hold does not have its posting": """
        SELECT h.id FROM bursar.holds h LEFT JOIN bursar.live_postings l ON l.posting = h.posting
        WHERE (h.state = 'open') <> (l.posting IS NOT NULL) OR (h.state = 'open' AND l.amount <> h.remaining)
        UNION ALL
        SELECT l.posting FROM bursar.live_postings l JOIN bursar.accounts a ON a.id = l.account AND a.path = 'held'
        WHERE NOT EXISTS (SELECT 1 FROM bursar.holds h WHERE h.posting = l.posting AND h.state = 'open')""",
    "an envelope without its event, or with two": """
        SELECT e.seq FROM bursar.envelopes e
        WHERE (SELECT count(*) FROM bursar.events v WHERE v.kind = 1 AND v.subject = e.seq) <> 1""",
}


class World:
    """One database, one stage, scene after scene."""

    def __init__(self, stage: Stage, ledger: Ledger) -> None:
        self.stage = stage
        self.ledger = ledger
        self.cursor = ""
        self.seen: list[str] = []
        self.unchecked: list[list[str]] = []  # scripts of the scenes since the books were checked

    def path(self, name: str) -> str:
        """An account of this scene."""
        return f"r{self.stage.scenes}:{name}"

    def key(self, name: str) -> str:
        """A key of this scene."""
        return f"{self.stage.scenes}/{name}"

    async def account(self, name: str, *amounts: str, policy: Policy | None = None) -> str:
        """A new account, with a posting for each amount."""
        path = self.path(name)
        await self.ledger.create_account(path, policy=policy or NoOverdraft())
        for receipt in await self.ledger.commit_many([deposit(BANK, path, ASSET, amount) for amount in amounts]):
            assert isinstance(receipt, Receipt)
        return path

    async def balance(self, name: str) -> str:
        """What an account of this scene has, by its postings."""
        head = await self.ledger.account(self.path(name))
        asset = await self.ledger.asset(ASSET)
        sums = await self.ledger.store.read.balances.of(head.id)
        return str(asset.of_minor(sums.get(asset.id, (0, 0))[0]).decimal)

    async def look(self) -> None:
        """The follower reads on, in the middle of everything."""
        while page := await self.ledger.events(self.cursor, limit=1000):
            self.seen += [event.cursor for event in page]
            self.cursor = page[-1].cursor

    async def check_books(self) -> None:
        """All that must hold after any scene."""
        for what, sql in AUDIT.items():
            assert not (wrong := await self.stage.observer.fetch(sql)), f"{what}: {wrong} after {self.unchecked}"
        await self.look()
        rows = await self.stage.observer.fetch(
            "SELECT epoch || '.' || xid || '.' || seq AS cursor FROM bursar.events ORDER BY epoch, xid, seq"
        )
        there = [row["cursor"] for row in rows]
        assert self.seen == there, f"the follower skipped or repeated after {self.unchecked}"
        self.unchecked.clear()

    async def pinned(self, receipt: Receipt, name: str) -> int:
        """The version of an account that an envelope was validated against."""
        head = await self.ledger.account(self.path(name))
        row = (await self.ledger.store.read.envelopes.get([receipt.envelope]))[0]
        return dict(decode_pins(row.pins))[head.id]


async def every_order(
    url: str,
    prepare: Prepare,
    check: Check,
    *,
    actors: int = 2,
    gates: frozenset[str] = GROUP,
    deadlocks: bool = False,
    at_least: int = 2,
) -> int:
    """Play a scene in every order. Returns how many there were, which must be more than a few or nothing was tried."""
    async with asyncio.timeout(TEST_S), Bursar(url) as bursar, Stage.open(url, actors) as stage:
        await bursar.ledger.create_asset(ASSET, 2)
        await bursar.ledger.create_account(BANK, policy=ExternalAccount())
        world = World(stage, bursar.ledger)
        choices: list[int] | None = []
        while choices is not None:
            operations = await prepare(world)
            taken = await stage.play(operations, gates, choices, world.look)
            stage.scenes -= 1  # the scene's names are still wanted
            outcomes = [actor.outcome() for actor in stage.actors[: len(operations)]]
            try:
                _no_surprise(outcomes)
                await check(world, outcomes)
            except AssertionError as error:
                error.add_note(f"scene {choices}: {stage.script}, commits {stage.commits}, outcomes {outcomes}")
                raise
            assert deadlocks or stage.deadlocks == 0, f"deadlock: {stage.script}"
            world.unchecked.append(stage.script)
            stage.scenes += 1
            assert stage.scenes <= SCENES_MAX, "too many orders: gate fewer statements"
            choices = next_choices(taken)
            if choices is None or len(world.unchecked) == BOOKS_EVERY:
                await world.check_books()
        assert stage.scenes >= at_least, f"only {stage.scenes} orders"
        return stage.scenes


def _no_surprise(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert not isinstance(outcome, asyncpg.PostgresError | asyncpg.InterfaceError), repr(outcome)
