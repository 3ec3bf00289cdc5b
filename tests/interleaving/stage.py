"""A stage on which real ledger operations run against a real PostgreSQL, one round trip at a time, in every order.

An `Actor` is one caller: a ledger of its own on one connection. Its operation is the ledger's own code, unchanged; what
is ours is the connection, which stops before every statement named in `gates` (and before COMMIT) until the director
lets it go on. The director enumerates: it runs the scene once, always taking the first actor that can go on, then goes
back to the last place where it had a choice and takes the other one, until there is none left. A step that waits for a
lock yields to the others, and goes on by itself when the lock is released.

A batch's write and its COMMIT are one statement in production, as are a worker's claim and its COMMIT; here they are
two steps, so that other steps can run while locks are held. Reads of what can't change meanwhile are not gated: their
order makes no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import asyncpg

from bursar.ledger import Ledger
from bursar.ports import SystemPorts
from bursar.store.batch import Lane
from bursar.store.postgres.arrays import SQL
from bursar.store.postgres.connecting import WRITER_SETTINGS
from bursar.store.postgres.errors import explain
from bursar.store.postgres.store import PostgresStore
from bursar.writer import Writer

T = TypeVar("T")

NAMES = {text: name for name, text in SQL.items()}
BLOCKED_POLL_S = 0.005  # how long a step may take before we ask the database whether it waits for a lock
PATIENCE_S = 20.0  # a step that neither ends nor waits for a lock by then is a failure of the test
DEADLOCK_MS = 30  # how soon PostgreSQL looks for a deadlock
GROUP = frozenset({"batch_read", "batch_write_entries"})
WRITES = ("batch_write_entries", "batch_write", "batch_write_records")
RECORDS = frozenset({"batch_read_records", *WRITES})


class StagePorts(SystemPorts):
    """The real machine, but for pauses: between two tries the director decides who goes on, not the clock."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class SteppedConnection:
    """Looks like an asyncpg connection to the store, and stops at every gate."""

    def __init__(self, actor: Actor, real: asyncpg.Connection) -> None:
        self.actor = actor
        self.real = real

    def is_in_transaction(self) -> bool:
        return bool(self.real.is_in_transaction())

    def is_closed(self) -> bool:
        return bool(self.real.is_closed())

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        await self.actor.gate(NAMES.get(sql, sql))
        if NAMES.get(sql) not in (*WRITES, "claim_due") or self.is_in_transaction():
            return await self._watched(self.real.fetch(sql, *args))
        return await self._in_two_steps(self.real.fetch, sql, *args)

    async def execute(self, sql: str, *args: Any) -> Any:
        if "SAVEPOINT" not in sql:  # that is no step: no other transaction can see it
            await self.actor.gate(NAMES.get(sql, sql))
        return await self._watched(self.real.execute(sql, *args))

    async def fetchval(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        await self.actor.gate(NAMES.get(sql, sql))
        return await self._watched(self.real.fetchval(sql, *args))

    async def _in_two_steps(self, run: Callable[..., Awaitable[T]], sql: str, *args: Any) -> T:
        transaction = self.real.transaction()
        await transaction.start()
        try:
            result = await self._watched(run(sql, *args))
        except BaseException:
            await transaction.rollback()
            raise
        await self.commit(transaction)
        return result

    def transaction(self, **options: Any) -> SteppedTransaction:
        return SteppedTransaction(self, self.real.transaction(**options), nested=self.is_in_transaction())

    async def commit(self, transaction: Any) -> None:
        """COMMIT, which is a step."""
        await self.actor.gate("COMMIT")
        await self._watched(transaction.commit())
        self.actor.committed()

    async def _watched(self, statement: Awaitable[T]) -> T:
        try:
            return await statement
        except asyncpg.PostgresError as error:
            if error.sqlstate == "40P01":
                self.actor.stage.deadlocks += 1
            raise


class SteppedTransaction:
    """BEGIN by itself does nothing; COMMIT is a step; a savepoint's end is neither."""

    def __init__(self, connection: SteppedConnection, real: Any, *, nested: bool) -> None:
        self._connection = connection
        self._real = real
        self._nested = nested

    async def start(self) -> None:
        await self._real.start()

    async def rollback(self) -> None:
        await self._real.rollback()

    async def __aenter__(self) -> None:
        await self.start()

    async def __aexit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        await (self.commit() if error is None else self.rollback())

    async def commit(self) -> None:
        await (self._real.commit() if self._nested else self._connection.commit(self._real))


class SteppedStore(PostgresStore):
    """The PostgreSQL store on one given connection."""

    def __init__(self, connection: SteppedConnection) -> None:
        super().__init__(StagePorts(), "stage")
        self._stepped = cast(asyncpg.Connection, connection)
        self._in_use = asyncio.Lock()  # a pool of one

    @contextlib.asynccontextmanager
    async def connection(self, *, unhurried: bool = False, writes: bool = False) -> AsyncIterator[asyncpg.Connection]:
        try:
            async with self._in_use:
                yield self._stepped
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise explain(error) from error

    async def _alive(self, lane: Lane) -> asyncpg.Connection:
        return self._stepped


class Actor:
    """One caller on the stage."""

    def __init__(self, stage: Stage, real: asyncpg.Connection) -> None:
        self.stage = stage
        self.real = real
        self.pid: int = real.get_server_pid()
        self.connection = SteppedConnection(self, real)
        self.ledger = Ledger(SteppedStore(self.connection))
        self.gates: frozenset[str] = frozenset()
        self.task: asyncio.Task[Any] | None = None
        self.waits_at = ""  # the gate it stands before, or nothing: it runs, or has ended
        self._open = asyncio.Event()
        self._idle = asyncio.Event()

    @property
    def name(self) -> str:
        """Its place among the actors."""
        return "abc"[self.stage.actors.index(self)]

    def begin(self, operation: Coroutine[Any, Any, Any], gates: frozenset[str]) -> None:
        """Start an operation; it runs up to its first gate."""
        self.gates = gates | {"COMMIT"}
        # What the last scene left in memory (cached heads) would change how many statements this one needs.
        self.ledger.writer = Writer(self.ledger.store)
        self.waits_at = ""
        self._idle.clear()
        self.task = asyncio.get_running_loop().create_task(operation)
        self.task.add_done_callback(lambda _: self._idle.set())

    async def gate(self, label: str) -> None:
        """Wait here, if this statement is a step."""
        if self.task is None or label not in self.gates:
            return
        self.waits_at = label
        self._open.clear()
        self._idle.set()
        await self._open.wait()

    def committed(self) -> None:
        """Its COMMIT has come back."""
        self.stage.commits.append(self.name)

    def go(self) -> None:
        """Let it through the gate."""
        self.stage.script.append(f"{self.name}:{self.waits_at}")
        self.waits_at = ""
        self._idle.clear()
        self._open.set()

    async def settled(self) -> bool:
        """True at a gate or when it has ended, False if it waits for a lock."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BLOCKED_POLL_S):
                        await self._idle.wait()
                    return True
                if await self.stage.observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", self.pid):
                    return False

    @property
    def ended(self) -> bool:
        """Whether its operation is over."""
        return self.task is None or self.task.done()

    def outcome(self) -> Any:
        """What the operation returned, or the error it raised."""
        assert self.task is not None
        error = self.task.exception()
        return self.task.result() if error is None else error


class Stage:
    """Actors, an observer that asks who is blocked, and a reader that follows the events at every step."""

    def __init__(self, observer: asyncpg.Connection) -> None:
        self.observer = observer
        self.actors: list[Actor] = []
        self.script: list[str] = []  # the steps of the scene as they were taken
        self.commits: list[str] = []  # who committed, in order
        self.deadlocks = 0
        self.scenes = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, actors: int) -> AsyncIterator[Stage]:
        """A stage with so many actors on a database that has the schema."""
        opened: list[asyncpg.Connection] = []
        try:
            for _ in range(actors + 1):
                # A step waits for a lock as long as the director lets it; the writer's own patience would cut it short.
                ours = {"deadlock_timeout": f"{DEADLOCK_MS}ms", "bursar.lock_timeout": "0"}
                opened.append(await asyncpg.connect(url, server_settings=WRITER_SETTINGS | ours))
            stage = cls(opened[0])
            stage.actors = [Actor(stage, connection) for connection in opened[1:]]
            yield stage
        finally:
            for connection in opened:
                connection.terminate()

    async def play(
        self,
        operations: Sequence[Callable[[Actor], Coroutine[Any, Any, Any]]],
        gates: frozenset[str],
        choices: list[int],
        after_step: Callable[[], Awaitable[None]],
    ) -> list[tuple[int, int]]:
        """One scene, following `choices` and then always the first; returns each choice and how many there were."""
        self.script, self.commits, self.deadlocks = [], [], 0
        players = self.actors[: len(operations)]
        for actor, operation in zip(players, operations, strict=True):
            actor.begin(operation(actor), gates)
        taken: list[tuple[int, int]] = []
        while True:
            ready = [a for a in players if not a.ended and await a.settled() and not a.ended]
            if all(a.ended for a in players):
                self.scenes += 1
                return taken
            if not ready:  # all wait for locks: PostgreSQL finds the deadlock and picks a victim
                continue
            width = len(ready)
            choice = min(choices[len(taken)], width - 1) if len(taken) < len(choices) else 0
            taken.append((choice, width))
            actor = ready[choice]
            actor.go()
            await actor.settled()
            await after_step()


def next_choices(taken: list[tuple[int, int]]) -> list[int] | None:
    """The next scene in depth-first order, or None after the last."""
    left = list(taken)
    while left and left[-1][0] + 1 >= left[-1][1]:
        left.pop()
    if not left:
        return None
    choices = [choice for choice, _ in left]
    choices[-1] += 1
    return choices
