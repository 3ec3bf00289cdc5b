"""The documents scenario: three people change versioned documents through two processes, which crash anywhere.

Each person wants a list of limits to be set. A limit that is raised needs a second person; one that is lowered does
not. A person notes the version that a change is based on, and repeats the change until there is an answer. Approvers
approve or withdraw what is proposed, now and then under a name that looks like the author's. Readers ask the cache.

The oracle looks after every commit: versions are never changed, follow from one another, have no gaps, and each limit
that was raised has two people. In the end each change that was wanted is exactly one version.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec

from bursar.documents import DocumentKind, Documents
from bursar.documents.cache import DOCUMENTS_S
from bursar.model.actors import same_person
from bursar.model.documents import (
    Document,
    DocumentMoved,
    ProposalOpen,
    SecondPersonNeeded,
    UnknownDocument,
    UnknownProposal,
    flaws,
)
from bursar.sim.disk import SimDisk
from bursar.sim.engine import beginning
from bursar.sim.kernel import CrashAt, Kernel, Run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.orders import Rail
from bursar.sim.process import Process
from bursar.sim.records import RecordOracle
from bursar.sim.sharing import SharedPorts
from bursar.sim.two_process import PATH, Client, TwoProcessRun, WatchedStore, play_out
from bursar.store.tables import Tables

PROCESSES: Final = ("documents", "documents-2")
PEOPLE: Final = ("bill", "carol", "dave")
LOOK_ALIKE: Final = {"bill": "bi11", "carol": "caro1", "dave": "Dave"}
NAMES: Final = ("btc", "usdt")
CHANGES_EACH: Final = 4
LIMIT_MAX: Final = 9
PAUSE_S: Final = 0.8  # at most, between two things that one person does
COLUMNS: Final = ", ".join(Document.__struct_fields__).replace("at_us", "at")
# A proposal whose base is no longer current can't be approved, and stays listed until its author changes it.
APPROVABLE: Final = """SELECT p.kind, p.name, p.author FROM document_proposals p WHERE p.base =
    (SELECT coalesce(max(d.version), 0) FROM documents d WHERE d.kind = p.kind AND d.name = p.name)"""


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit, and which change it was."""

    most: int
    change: str


LIMITS: Final = DocumentKind(name="limits", body=Limit, two_people=lambda old, new: old is None or new.most > old.most)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # versions
    approved: int  # of them, by a second person
    refused: int  # approvals under a name that looks like the author's
    moved: int  # changes whose base was no longer current
    reads: int  # of the cache


class DocumentOracle(RecordOracle):
    """What must be true of documents."""

    def __init__(self, kernel: Kernel, connection: sqlite3.Connection, past: Oracle | None) -> None:
        super().__init__(connection, past)
        self._kernel = kernel
        self.rows: dict[tuple[str, int], Document] = {}  # every version ever seen
        self.seen_s: dict[tuple[str, int], float] = {}  # when it was seen first

    def records(self) -> None:
        """Versions only ever become more; each follows from the one before it; a raised limit has two people."""
        found = [_document(row) for row in self.db.execute(f"SELECT {COLUMNS} FROM documents ORDER BY name, version")]
        here = {(one.name, one.version): one for one in found}
        if lost := {key: one for key, one in self.rows.items() if here.get(key) != one}:
            raise Violation(f"versions were changed or are gone: {sorted(lost)}")
        if sorted(one.number for one in found) != list(range(1, len(found) + 1)):
            raise Violation(f"the versions have gaps: {sorted(one.number for one in found)}")
        for key, one in here.items():
            if key in self.rows:
                continue
            before = here.get((one.name, one.version - 1))
            if wrong := flaws(one, before):
                raise Violation(f"{one.name} version {one.version} {wrong[0]}")
            raised = before is None or LIMITS.read(one).most > LIMITS.read(before).most
            if raised != bool(one.approved_by) or (raised and same_person(one.author, one.approved_by)):
                raise Violation(f"{one.name} version {one.version} is by {one.author!r} and {one.approved_by!r}")
            self.seen_s[key] = self._kernel.loop.now
        self.rows = here

    def ended(self) -> None:
        """Nothing waits for a second person."""
        if waiting := self.db.execute(APPROVABLE).fetchall():
            raise Violation(f"proposals that no person has looked at: {waiting}")

    def at_least(self, name: str, at_s: float) -> int:
        """The newest version of a document that was there at a time."""
        return max((version for (of, version), seen in self.seen_s.items() if of == name and seen <= at_s), default=0)


class WatchedDocuments(WatchedStore):
    """A store whose every transaction is looked at. Documents do not go through the writer's batches."""

    @contextlib.asynccontextmanager
    async def transaction(self, *, unhurried: bool = False) -> AsyncIterator[Tables]:
        async with super().transaction(unhurried=unhurried) as tables:
            yield tables
        self.watch()


class Scenario(TwoProcessRun[Outcome]):
    """One run."""

    processes = PROCESSES
    open = APPROVABLE

    def __init__(self, kernel: Kernel, disk: SimDisk, size: Size) -> None:
        super().__init__(kernel, disk, size)
        self.bases: dict[str, int] = {}  # what each person has noted: the version that a change is based on
        self.refused = self.moved = self.reads = 0

    def make_rail(self) -> Rail:
        return Rail(self.kernel, random.Random(0))  # which is never called

    def make_oracle(self) -> DocumentOracle:
        self.judging = DocumentOracle(self.kernel, self.disk.open(PATH), beginning()[1])
        return self.judging

    def make_client(self, number: int, how_many: int) -> Client:
        person = PEOPLE[number % len(PEOPLE)]
        choices = [(self.rng.choice(NAMES), self.rng.randrange(1, LIMIT_MAX)) for _ in range(how_many)]
        return Client(person, {f"{person}-{number}-{n}": choice for n, choice in enumerate(choices)})

    async def serve(self, process: Process) -> None:
        """One life of a process."""
        store = WatchedDocuments(SharedPorts(process), PATH)
        store.watch = self.watch
        await store.open()
        documents = Documents(store, [LIMITS])
        async with asyncio.TaskGroup() as group:
            group.create_task(self.approve(process, documents), name="approver")
            # With a cache of its own: a change made in this process would have the other one read at once.
            group.create_task(self.read(process, Documents(store, [LIMITS])), name="reader")
            if process.name == PROCESSES[0]:
                for client in self.clients:
                    group.create_task(self.change(process, documents, client), name=client.user)

    async def change(self, process: Process, documents: Documents, client: Client) -> None:
        """One change after the other; after a crash again, also what was answered, to get the same answer."""
        for key, (name, most) in client.wants.items():
            if key in client.told and self.rng.random() < 0.5:
                continue
            told = await self.put(process, documents, client, key, name, most)
            if client.told.setdefault(key, told) != told:
                self.violations.append(Violation(f"{key} was {client.told[key]}, and now {told}"))

    async def put(self, process: Process, documents: Documents, client: Client, key: str, name: str, most: int) -> str:
        """Until the change is a version."""
        while True:
            if key not in self.bases:
                self.bases[key] = await _version(documents, name)
            with contextlib.suppress(ProposalOpen):  # another person's: it is approved or withdrawn some time
                try:
                    made = await documents.put(
                        LIMITS, name, Limit(most, key), base=self.bases[key], author=client.user, reason=key
                    )
                except DocumentMoved:
                    self.moved += 1
                    del self.bases[key]
                    continue
                if isinstance(made, Document):
                    return made.hash.hex()
            await self.pause(process)

    async def approve(self, process: Process, documents: Documents) -> None:
        """Approve what is proposed; some of it is withdrawn, and some tried by its own author."""
        while True:
            await self.pause(process)
            for made in await documents.proposals(LIMITS):
                other = self.rng.choice([person for person in PEOPLE if person != made.author])
                if self.kernel.armed and self.rng.random() < 0.2:
                    await documents.withdraw(LIMITS, made.name, made.hash, actor=other, reason="not now")
                    continue
                actor = LOOK_ALIKE[made.author] if self.rng.random() < 0.3 else other
                try:
                    await documents.approve(LIMITS, made.name, made.hash, actor=actor, reason="seen")
                except SecondPersonNeeded:
                    self.refused += 1
                except (DocumentMoved, UnknownProposal):
                    pass  # it was approved, withdrawn or replaced meanwhile

    async def read(self, process: Process, documents: Documents) -> None:
        """What the cache returns is at most `DOCUMENTS_S` old."""
        while True:
            await self.pause(process)
            name = self.rng.choice(NAMES)
            oldest = self.judging.at_least(name, self.kernel.loop.now - DOCUMENTS_S)
            found = await documents.current(LIMITS, name)
            version = found.document.version if found else 0
            self.reads += 1
            if version < oldest:
                self.violations.append(Violation(f"the cache has version {version} of {name}, which is not {oldest}"))

    async def pause(self, process: Process) -> None:
        await process.ports.sleep(self.rng.random() * PAUSE_S)

    def judge(self) -> Outcome:
        """Every change is one version, and it is what its author was answered."""
        oracle = self.judging
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        made = {(LIMITS.read(one).change, one.hash.hex()) for one in oracle.rows.values()}
        told = {pair for client in self.clients for pair in client.told.items()}
        if made != told or len(made) != len(oracle.rows):
            raise Violation(f"changes that were not made once: {sorted(made ^ told)}")
        approved = sum(bool(one.approved_by) for one in oracle.rows.values())
        noted = "SELECT count(*) FROM operator_actions WHERE action = 'change approved'"
        if oracle.db.execute(noted).fetchone() != (approved,):
            raise Violation("an approval is not among the operators' actions, or is there twice")
        return Outcome(
            commits=len(oracle.rows),
            approved=approved,
            refused=self.refused,
            moved=self.moved,
            reads=self.reads,
        )


def _document(row: tuple[object, ...]) -> Document:
    fields = dict(zip(Document.__struct_fields__, row, strict=True))
    return msgspec.convert(fields | {"retired": bool(fields["retired"])}, Document)


async def _version(documents: Documents, name: str) -> int:
    try:
        return (await documents.get(LIMITS, name)).version
    except UnknownDocument:
        return 0


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere."""
    wanted = size or Size(callers=len(PEOPLE), entries_each=CHANGES_EACH)
    return play_out(Scenario, beginning()[0], wanted, seed, crashes, split=split, verbose=verbose)
