"""The checks: one class per invariant. Each looks at pages of envelopes as the walk brings them, and then finishes.

They trust nothing that they can recompute. Not here: reading in pages (walk), and when not to judge (run).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping

from bursar.audit.finding import EVIDENCE_MAX, Evidence, Progress
from bursar.audit.walk import PAGE_MAX, UNREADABLE, Page, Walk
from bursar.model.accounts import HELD, Account, Book
from bursar.model.documents import Document, flaws
from bursar.model.envelope import Envelope, decode_ids, decode_legs, decode_pins
from bursar.model.money import Asset
from bursar.model.postings import PostingState
from bursar.model.records import StoredEnvelope
from bursar.store.rows import rebuild
from bursar.store.tables import Tables

DOCUMENTS_MAX = 200  # versions read at once: each may be 64 KiB


class Scene:
    """What all checks share: the snapshot, the walk over it, and the few tables that fit into memory."""

    def __init__(self, tables: Tables, progress: Progress) -> None:
        self.tables = tables
        self.progress = progress
        self.walk = Walk(tables)
        self.counts: dict[str, int] = {}
        self.assets: dict[int, Asset] = {}
        self.books: dict[int, Book] = {}

    async def read(self) -> None:
        """Read what fits into memory."""
        self.counts = await self.tables.checks.counts()
        self.assets = {a.id: a for a in (await self.tables.rules.assets()).values()}
        self.books = {b.id: b for b in (await self.tables.rules.books()).values()}

    def money(self, asset: int, minor: int) -> str:
        """An amount for evidence, even of an asset that does not exist."""
        known = self.assets.get(asset)
        return f"{known.of_minor(minor)} {known.code}" if known else f"{minor} of asset #{asset}"

    async def posting(self, number: int) -> str:
        """A posting for evidence."""
        found = await self.tables.postings.get([number])
        if not found:
            return f"posting {number}"
        p = found[0].posting
        heads = await self.tables.accounts.heads_by_id([p.account])
        owner = heads[p.account].path if p.account in heads else f"account #{p.account}"
        return f"posting {number} ({self.money(p.asset, p.amount)} of {owner})"


class Check(ABC):
    """One invariant at work."""

    invariant: str
    walks = False  # whether it has to see every envelope

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.evidence = Evidence()
        self.checked = 0

    async def page(self, page: Page) -> None:  # noqa: B027 (not every check walks)
        """Look at some envelopes."""

    @abstractmethod
    async def finish(self) -> None:
        """Look at what needs no walk, or is known only after it."""


class Conservation(Check):
    """I1: value is neither made nor lost; external accounts carry the other side."""

    invariant = "I1"

    async def finish(self) -> None:
        self.checked = self.scene.counts["live"]
        for asset, total in (await self.scene.tables.checks.asset_sums()).items():
            if total:
                self.evidence.add(f"live postings sum to {self.scene.money(asset, total)} instead of zero")


class Spending(Check):
    """I2: what envelopes list and what spends say are the same pairs.

    Every listed (posting, envelope) must be a spend, and a posting has one spend, so the listed pairs are distinct
    spends; if there are as many of them as spends, there is no spend that no envelope lists.
    """

    invariant = "I2"
    walks = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._listed = 0

    async def page(self, page: Page) -> None:
        for envelope, numbers in page.listed.items():
            self._listed += len(numbers)
            if len(set(numbers)) != len(numbers):
                self.evidence.add(f"envelope {envelope} lists a posting twice")
            for number in numbers:
                stored = page.consumed.get(number)
                if stored is None:
                    self.evidence.add(f"envelope {envelope} consumes posting {number}, which does not exist")
                elif stored.spender != envelope:
                    who = "is not spent" if stored.spender is None else f"was spent by envelope {stored.spender}"
                    self.evidence.add(f"envelope {envelope} lists posting {number}, which {who}")

    async def finish(self) -> None:
        checks = self.scene.tables.checks
        self.checked = await checks.spends()
        for number in await checks.ids("stray_spends", EVIDENCE_MAX + 1):
            self.evidence.add(f"the spend of posting {number} names a posting or an envelope that does not exist")
        if self._listed != self.checked:
            await self._unlisted()
            if not self.evidence.count:
                self.evidence.add(f"there are {self.checked} spends, but envelopes list {self._listed} postings")

    async def _unlisted(self) -> None:
        """Find the spends that no envelope lists: a second walk, from the side of the postings."""
        tables = self.scene.tables
        async for page in self.scene.walk.pages():
            numbers = [p.id for created in page.created.values() for p in created]
            spenders = await tables.postings.spenders(numbers) if numbers else {}
            readable = sorted(set(spenders.values()) - self.scene.walk.unreadable)
            rows = await tables.envelopes.get(readable) if readable else []
            lists = {e.seq: set(decode_ids(e.consumes)) for e in rows}
            for number, envelope in sorted(spenders.items()):
                if number not in lists.get(envelope, ()):
                    self.evidence.add(
                        f"posting {number} is spent in the name of envelope {envelope}, which lists it not"
                    )


class Liveness(Check):
    """I3: the disposable tables are what the value tables say."""

    invariant = "I3"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._held: defaultdict[int, int] = defaultdict(int)  # asset → what open holds say is held

    async def finish(self) -> None:
        self.checked = self.scene.counts["postings"]
        checks = self.scene.tables.checks
        for number in await checks.ids("not_live", EVIDENCE_MAX + 1):
            self.evidence.add(f"{await self.scene.posting(number)} is unspent, but not live as it was created")
        for number in await checks.ids("wrongly_live", EVIDENCE_MAX + 1):
            self.evidence.add(f"{await self.scene.posting(number)} is live, but it was spent or never created")
        for number in await checks.ids("stray_reservations", EVIDENCE_MAX + 1):
            self.evidence.add(
                f"{await self.scene.posting(number)} is reserved, and can't be spent: no commit is under way"
            )
        await self._holds()
        await self._balances()

    async def _holds(self) -> None:
        """Every open hold has its posting, and nothing else is held."""
        after = 0
        while page := await self.scene.tables.checks.open_holds(after, PAGE_MAX):
            after = page[-1][0]
            stored = {p.posting.id: p for p in await self.scene.tables.postings.get([h[3] for h in page])}
            began = {e.seq: e for e in await self.scene.tables.envelopes.get([h[0] for h in page])}
            for hold, asset, remaining, posting, account, amount in page:
                self._held[asset] += remaining
                found = stored.get(posting)
                legs = decode_legs(began[hold].legs) if hold in began else ()
                if (account, asset, amount) not in [(leg.source, leg.asset, leg.minor) for leg in legs]:
                    what = f"{self.scene.money(asset, amount)} of account #{account}"
                    self.evidence.add(f"hold {hold} says it is {what}, which is not what was set aside")
                spent = found is None or found.state is PostingState.SPENT
                if spent or found is None or (found.posting.asset, found.posting.amount) != (asset, remaining):
                    left = self.scene.money(asset, remaining)
                    self.evidence.add(f"hold {hold} says {left} remain, but posting {posting} does not hold that")

    async def _balances(self) -> None:
        """Kept balances: of system, external and wide accounts, of capped overdrafts, of what is held."""
        tables = self.scene.tables
        guarded = await tables.balances.all_guarded()
        cached: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for account, asset, total in await tables.checks.cached_sums():
            cached[account][asset] = total
        wide = await tables.balances.cached_accounts()
        after, seen = "", 0
        while page := await tables.accounts.list("", after, PAGE_MAX):
            after, seen = page[-1].path, seen + len(page)
            self.scene.progress("balances", seen, self.scene.counts["accounts"])
            for head in page:
                if not head.pays_from_postings or head.id in wide:
                    await self._compare(head, cached.get(head.id, {}), "the cache says")
                floors = [a for a in self.scene.assets.values() if head.floor(a) is not None]
                if floors:
                    kept = {a.id: guarded.get((head.id, a.id), 0) for a in floors}
                    await self._compare(head, kept, "its guarded balance is", only=kept)
                if head.path == HELD:
                    await self._compare(head, self._held, "open holds say")

    async def _compare(
        self, head: Account, kept: Mapping[int, int], says: str, only: Mapping[int, int] | None = None
    ) -> None:
        live = {asset: total for asset, (total, _) in (await self.scene.tables.balances.of(head.id)).items()}
        for asset in sorted(kept.keys() | live.keys() if only is None else only):
            if kept.get(asset, 0) != live.get(asset, 0):
                said, true = self.scene.money(asset, kept.get(asset, 0)), self.scene.money(asset, live.get(asset, 0))
                self.evidence.add(f"{head.path}: {says} {said}, live postings sum to {true}")


class Content(Check):
    """I8: an envelope, rebuilt from rows, hashes to its id; and it moves what it says, and nothing else.

    The same of documents: each version hashes to what its row says, and follows from the one before it.
    """

    invariant = "I8"
    walks = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._parts = 0  # parts that accounts took in envelopes

    async def page(self, page: Page) -> None:
        versions = await self.scene.walk.versions(page.envelopes)
        self.checked += len(page.envelopes)
        await self._histories(page)
        for stored in page.envelopes:
            try:
                self._judge(stored, page, versions)
            except UNREADABLE as error:
                what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
                self.evidence.add(f"envelope {stored.seq} can't be rebuilt: {what}")

    async def _histories(self, page: Page) -> None:
        """Every envelope stands in the history of each account that took part."""
        parts: list[tuple[int, int]] = []
        for stored in page.envelopes:
            try:
                parts += [(account, stored.seq) for account, _ in decode_pins(stored.pins)]
            except UNREADABLE:
                continue  # said when it is judged
        self._parts += len(parts)
        if not parts:
            return
        accounts, last = sorted({account for account, _ in parts}), page.envelopes[-1].seq
        there = await self.scene.tables.checks.involved(accounts, page.envelopes[0].seq, last)
        for account, envelope in parts:
            if (account, envelope) not in there:
                self.evidence.add(f"envelope {envelope} is not in the history of account #{account}, which took part")

    def _judge(self, stored: StoredEnvelope, page: Page, versions: Mapping[tuple[int, int], Account]) -> None:
        listed, pins = page.listed[stored.seq], decode_pins(stored.pins)
        missing = [f"posting {number}" for number in listed if number not in page.consumed]
        missing += [
            f"version {version} of account #{account}"
            for account, version in pins
            if (account, version) not in versions
        ]
        if missing:
            self.evidence.add(f"envelope {stored.seq} can't be rebuilt: {', '.join(missing[:3])} does not exist")
            return
        accounts = {account: versions[account, version] for account, version in pins}
        consumes = tuple(page.consumed[number].posting for number in listed)
        creates = tuple(page.created.get(stored.seq, []))
        envelope = rebuild(stored, accounts, self.scene.assets, self.scene.books, consumes, creates)
        if (id_ := envelope.id()) != stored.id:
            self.evidence.add(
                f"envelope {stored.seq} hashes to {id_.hex()[:16]}…, its row says {stored.id.hex()[:16]}…"
            )
        self._conserves(envelope)

    def _conserves(self, envelope: Envelope) -> None:
        moved: defaultdict[tuple[int, int], int] = defaultdict(int)  # account and asset
        total: defaultdict[int, int] = defaultdict(int)  # asset
        for sign, postings in ((-1, envelope.consumes), (1, envelope.creates)):
            for p in postings:
                moved[p.account, p.asset] += sign * p.amount
                total[p.asset] += sign * p.amount
        for leg in envelope.legs:
            moved[leg.source, leg.asset] += leg.minor
            moved[leg.target, leg.asset] -= leg.minor
        for asset, difference in total.items():
            if difference:
                self.evidence.add(f"envelope {envelope.seq} makes {self.scene.money(asset, difference)} out of nothing")
        if any(moved.values()):
            self.evidence.add(f"envelope {envelope.seq}: its postings do not add up to its movements")

    async def finish(self) -> None:
        for number in sorted(self.scene.walk.unreadable):
            self.evidence.add(f"envelope {number} can't be read")
        checks = self.scene.tables.checks
        for number in await checks.ids("unannounced", EVIDENCE_MAX + 1):
            self.evidence.add(f"envelope {number} was never announced: it has no event")
        histories = await checks.histories()
        if not self.evidence.count and histories != self._parts:
            self.evidence.add(f"histories have {histories} lines, envelopes {self._parts} parts of accounts")
        for number in await checks.ids("stray_postings", EVIDENCE_MAX + 1):
            self.evidence.add(f"{await self.scene.posting(number)} belongs to no envelope")
        self.checked += await check_documents(self.scene.tables, self.evidence)


async def check_documents(tables: Tables, evidence: Evidence) -> int:
    """Follow the chain of every document: each version hashes to what its row says and follows from the one before it.
    How many versions were looked at."""
    seen = 0
    last: Document | None = None
    after = ("", "", 0)
    while page := await tables.documents.after(*after, DOCUMENTS_MAX):
        for document in page:
            seen += 1
            same = last is not None and (last.kind, last.name) == (document.kind, document.name)
            for flaw in flaws(document, last if same else None):
                evidence.add(f"document {document.kind} {document.name} version {document.version} {flaw}")
            last = document
        after = (page[-1].kind, page[-1].name, page[-1].version)
    await _check_numbers(tables, evidence)
    return seen


async def _check_numbers(tables: Tables, evidence: Evidence) -> None:
    """Numbers have no gaps. A chain alone would not show that its newest versions were deleted."""
    count, highest = await tables.documents.count()
    number = await tables.documents.number()
    if not count == highest == number:
        text = f"{number} versions of documents were made, {count} are there and the highest number is {highest}"
        evidence.add(f"{text}: versions were deleted or added")
