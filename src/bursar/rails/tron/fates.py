"""Asking nodes for the facts about transactions. What the facts mean is decided in `verdict`.

Questions that come at the same time are answered in one round, and those that come meanwhile wait for the next. A node
has no request for many transactions, so each costs a few small ones, of which so many are under way at once. What a
round shares is what is large or would be asked again and again: the final block of each node, the blocks that
transactions are in or refer to, and what became of the older ones. A node that fails a few times in a row is not asked
about the rest.

The order of the questions to one node is what a proof of death rests on: first what the node calls final, then whether
it has the transaction. The other way round, a transaction could be included in between.

`{}` also stands for what a node has forgotten. So an absence counts only at a node that has shown that it keeps what is
older: it has the block that the transaction refers to, by its hash, and knows what became of a transaction in that
block or in one shortly before it. Where those blocks are empty, every block that could contain the transaction is read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

from bursar.rails.chain import Fate, NodesUnavailable, Pending, Question, Try, Unknown
from bursar.rails.nodes import Answers, Malformed, NodeFailed
from bursar.rails.tron.http import Http
from bursar.rails.tron.nodes import Nodes
from bursar.rails.tron.reading import Block, Header, Info, block, info, raw_data
from bursar.rails.tron.verdict import Facts, combine, judge, of_all
from bursar.together import Together

QUESTIONS_MAX: Final = 500  # in one round
FAILURES_MAX: Final = 3  # of a node in a row, then it is not asked about the rest of the round
OLDER_BLOCKS_MAX: Final = 20  # that are looked at for an older transaction
RANGE_BLOCKS_MAX: Final = 2_000  # that are read whole where there is none
AT_ONCE: Final = 16  # of a round's transactions at one node, and of the blocks of a range
CYCLE: Final = 2**16  # a reference names a block by the last two bytes of its number
CYCLES_MAX: Final = 8  # that a transaction may be old: two weeks

_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)

T = TypeVar("T")


class Fates:
    """Answers what became of transactions, in rounds."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._rounds: Together[Question, Fate | NodesUnavailable] = Together(self._round, QUESTIONS_MAX)

    async def ask(self, question: Question) -> Fate:
        """What became of a payout's transactions."""
        if not question.tries or any(one.slot.expires is None for one in question.tries):
            raise ValueError("each try has an expiration")
        if not all(_HASH.fullmatch(one.hash) for one in question.tries if one.hash):
            raise ValueError("a hash is 64 hexadecimal digits in lower case")
        found = await self._rounds.ask(question)
        assert found is not None  # a round answers all of its questions
        if isinstance(found, NodesUnavailable):
            raise NodesUnavailable(found.chain, found.why)
        return found

    async def _round(self, questions: list[Question]) -> dict[Question, Fate | NodesUnavailable]:
        tries = list(dict.fromkeys(one for question in questions for one in question.tries if one.hash))
        said = await self._nodes.ask(None, lambda http: self._look(http, tries))
        found: dict[Question, Fate | NodesUnavailable] = {}
        for question in questions:
            try:
                found[question] = of_all([self._fate(question, one, said) for one in question.tries])
            except NodesUnavailable as error:
                found[question] = error
        return found

    def _fate(self, question: Question, one: Try, answers: Answers[dict[Try, Facts | str]]) -> Fate:
        if not one.hash:
            return Unknown(why="a transaction whose hash is not known can't be looked for", person=True)
        of_one = {name: told[one] for name, told in answers.items()}
        silent = answers.silent | {name: why for name, why in of_one.items() if isinstance(why, str)}
        facts = Answers({name: found for name, found in of_one.items() if isinstance(found, Facts)}, silent)
        missing = self._nodes.missing(facts)
        if not facts:
            raise NodesUnavailable(self._nodes.network.name, f"no node answers{missing}")
        said = {name: judge(question, one, found) for name, found in facts.items()}
        verdict = combine(question, said, self._nodes.configured, missing)
        self._nodes.doubt({name: f"the fate of {one.hash}: {word}" for name, word in verdict.doubted.items()})
        fate = verdict.fate
        if isinstance(fate, Pending) and not fate.seen and all(self._nodes.is_behind(name) for name in said):
            return Unknown(why=f"{', '.join(sorted(said))} does not know it, but is behind{missing}")
        return fate

    async def _look(self, http: Http, tries: Sequence[Try]) -> dict[Try, Facts | str]:
        """The facts about each transaction at one node, or why it says nothing about that one."""
        gate, look = asyncio.Semaphore(AT_ONCE), _Look(http, await self._nodes.head(http))  # first: see above
        failed: list[str] = []  # in a row

        async def ask(one: Try) -> Facts | str:
            async with gate:
                if len(failed) >= FAILURES_MAX:
                    return failed[-1]
                try:
                    found: Facts | str = await look.facts(one)
                except NodeFailed as error:
                    failed.append(error.why)
                    return error.why
                except Malformed as error:
                    found = self._nodes.malformed(http.name, error)
                failed.clear()
                return found

        try:
            found = await asyncio.gather(*(ask(one) for one in tries))
        finally:
            look.close()
        if failed and len(failed) >= min(len(tries), FAILURES_MAX):
            raise NodeFailed(http.name, failed[-1])
        return dict(zip(tries, found, strict=True))


class _Look:
    """One node in one round. Blocks, and what became of older transactions, are read once."""

    def __init__(self, http: Http, final: Header) -> None:
        self._http = http
        self._final = final
        self._read: dict[Hashable, asyncio.Task[Any]] = {}

    def close(self) -> None:
        """End what is still under way."""
        for task in self._read.values():
            task.cancel()

    async def facts(self, one: Try) -> Facts:
        """What the node knows of one transaction."""
        became = await self._outcome(one.hash)
        if became is not None:
            raw = raw_data(await self._http.solid("gettransactionbyid", value=one.hash), one.hash)
            return Facts(final=self._final, info=became, raw=raw or b"", block=await self._block(became.block))
        assert one.slot.expires is not None  # `ask` has checked
        if self._final.timestamp >= one.slot.expires:
            forgets = await self._forgets(one)
            # Once more: behind a URL there may be several nodes after all, of which one is behind the others.
            if await self._outcome(one.hash) is not None:
                raise Malformed(f"it has {one.hash}, and said a moment ago that it does not")
            return Facts(final=self._final, forgets=forgets)
        newest = info(await self._http.wallet("gettransactioninfobyid", value=one.hash), one.hash)
        if newest is not None:
            return Facts(final=self._final, included=newest.block)
        raw = raw_data(await self._http.wallet("gettransactionbyid", value=one.hash), one.hash)
        return Facts(final=self._final, waiting=raw is not None)

    async def _outcome(self, hash_: str) -> Info | None:
        return info(await self._http.solid("gettransactioninfobyid", value=hash_), hash_)

    async def _block(self, number: int) -> Block | None:
        async def read() -> Block | None:
            value = await self._http.solid("getblockbynum", num=number)
            return None if value == {} else block(value, number)

        return await self._once(number, read)

    async def _knows(self, hash_: str) -> bool:
        """Whether the node knows what became of an older transaction."""

        async def read() -> bool:
            return await self._outcome(hash_) is not None

        return await self._once(hash_, read)

    async def _once(self, what: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that others of this round may ask too."""
        if what not in self._read:
            self._read[what] = asyncio.ensure_future(read())
        found: T = await asyncio.shield(self._read[what])
        return found

    async def _forgets(self, one: Try) -> str:
        """Why the node could have had the transaction and forgotten it; "" if it shows that it keeps what is older."""
        reference = await self._reference(one.slot.reference)
        if isinstance(reference, str):
            return reference
        found: Block | None = reference
        for number in range(reference.header.number, max(-1, reference.header.number - OLDER_BLOCKS_MAX), -1):
            if found is None:
                return f"the node has no block {number}"
            if number and found.hashes:  # the transactions of the genesis block have no outcome
                older = found.hashes[0]
                if await self._knows(older):
                    return ""
                return f"the node does not know what became of {older} in block {number}: it does not keep history"
            found = await self._block(number - 1) if number else None
        return await self._read_range(reference.header.number, one)

    async def _reference(self, reference: str) -> Block | str:
        """The block that a transaction refers to; or why it is not at this node."""
        low, hash8 = int(reference[:4], 16), reference[4:20]
        number = self._final.number - (self._final.number - low) % CYCLE
        for _ in range(CYCLES_MAX):
            found = await self._block(number) if number >= 0 else None
            if found is None:
                break
            if found.header.id[16:32] == hash8:
                return found
            number -= CYCLE
        return "the node does not have the block that it refers to"

    async def _read_range(self, after: int, one: Try) -> str:
        """Read every block that could contain the transaction: up to the first at or past its expiration."""
        assert one.slot.expires is not None  # `ask` has checked
        last = self._final.number
        for start in range(after + 1, min(last, after + RANGE_BLOCKS_MAX) + 1, AT_ONCE):
            numbers = range(start, min(last, start + AT_ONCE - 1) + 1)
            for number, found in zip(numbers, await asyncio.gather(*map(self._block, numbers)), strict=True):
                if found is None:
                    return f"the node has no block {number}"
                if one.hash in found.hashes:
                    raise Malformed(f"it has {one.hash} in block {number}, and says that it does not know it")
                if found.header.timestamp >= one.slot.expires:
                    return ""
        return "there is no older transaction to ask the node for, and too many blocks could contain this one"
