"""Asking nodes for the facts about a transaction. What the facts mean is decided in `verdict`.

The order of the questions to one node is what a proof of death rests on: first what the node calls final, then whether
it has the transaction. The other way round, a transaction could be included in between.

`{}` also stands for what a node has forgotten. So an absence counts only at a node that has shown that it keeps what is
older: it has the block that the transaction refers to, by its hash, and knows what became of a transaction in that
block or in one shortly before it. Where those blocks are empty, every block that could contain the transaction is read.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from bursar.rails.chain import Fate, NodesUnavailable, Pending, Question, Try, Unknown
from bursar.rails.nodes import Malformed
from bursar.rails.tron.http import Http
from bursar.rails.tron.nodes import Nodes
from bursar.rails.tron.reading import Block, Header, block, info, raw_data
from bursar.rails.tron.verdict import Facts, combine, judge, of_all

OLDER_BLOCKS_MAX: Final = 20  # that are looked at for an older transaction
RANGE_BLOCKS_MAX: Final = 2_000  # that are read whole where there is none
AT_ONCE: Final = 16
CYCLE: Final = 2**16  # a reference names a block by the last two bytes of its number
CYCLES_MAX: Final = 8  # that a transaction may be old: two weeks

_HASH: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Fates:
    """Answers what became of transactions."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def ask(self, question: Question) -> Fate:
        """What became of a payout's transactions."""
        if not question.tries or any(one.slot.expires is None for one in question.tries):
            raise ValueError("each try has an expiration")
        if not all(_HASH.fullmatch(one.hash) for one in question.tries if one.hash):
            raise ValueError("a hash is 64 hexadecimal digits in lower case")
        return of_all([await self._fate(question, one) for one in question.tries])

    async def _fate(self, question: Question, one: Try) -> Fate:
        if not one.hash:
            return Unknown(why="a transaction whose hash is not known can't be looked for", person=True)

        async def look(http: Http) -> Facts:
            return await self._facts(http, one)

        facts = await self._nodes.ask(None, look)
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

    async def _facts(self, http: Http, one: Try) -> Facts:
        final = await self._nodes.head(http)  # first: see above
        became = info(await http.solid("gettransactioninfobyid", value=one.hash), one.hash)
        if became is not None:
            raw = raw_data(await http.solid("gettransactionbyid", value=one.hash), one.hash)
            place = await _final_block(http, became.block)
            return Facts(final=final, info=became, raw=raw or b"", block=place)
        assert one.slot.expires is not None  # `ask` has checked
        if final.timestamp >= one.slot.expires:
            forgets = await _forgets(http, final, one)
            # Once more: behind a URL there may be several nodes after all, of which one is behind the others.
            if info(await http.solid("gettransactioninfobyid", value=one.hash), one.hash) is not None:
                raise Malformed(f"it has {one.hash}, and said a moment ago that it does not")
            return Facts(final=final, forgets=forgets)
        newest = info(await http.wallet("gettransactioninfobyid", value=one.hash), one.hash)
        if newest is not None:
            return Facts(final=final, included=newest.block)
        raw = raw_data(await http.wallet("gettransactionbyid", value=one.hash), one.hash)
        return Facts(final=final, waiting=raw is not None)


async def _final_block(http: Http, number: int) -> Block | None:
    value = await http.solid("getblockbynum", num=number)
    return None if value == {} else block(value, number)


async def _forgets(http: Http, final: Header, one: Try) -> str:
    """Why the node could have had the transaction and forgotten it; "" if it has shown that it keeps what is older."""
    reference = await _reference(http, final, one.slot.reference)
    if isinstance(reference, str):
        return reference
    found: Block | None = reference
    for number in range(reference.header.number, max(-1, reference.header.number - OLDER_BLOCKS_MAX), -1):
        if found is None:
            return f"the node has no block {number}"
        if number and found.hashes:  # the transactions of the genesis block have no outcome
            older = found.hashes[0]
            if info(await http.solid("gettransactioninfobyid", value=older), older) is not None:
                return ""
            return f"the node does not know what became of {older} in block {number}: it does not keep history"
        found = await _final_block(http, number - 1) if number else None
    return await _read_range(http, reference.header.number, final, one)


async def _reference(http: Http, final: Header, reference: str) -> Block | str:
    """The block that a transaction refers to; or why it is not at this node."""
    low, hash8 = int(reference[:4], 16), reference[4:20]
    number = final.number - (final.number - low) % CYCLE
    for _ in range(CYCLES_MAX):
        found = await _final_block(http, number) if number >= 0 else None
        if found is None:
            break
        if found.header.id[16:32] == hash8:
            return found
        number -= CYCLE
    return "the node does not have the block that it refers to"


async def _read_range(http: Http, after: int, final: Header, one: Try) -> str:
    """Read every block that could contain the transaction: up to the first at or past its expiration."""
    assert one.slot.expires is not None  # `ask` has checked
    for start in range(after + 1, min(final.number, after + RANGE_BLOCKS_MAX) + 1, AT_ONCE):
        numbers = range(start, min(final.number, start + AT_ONCE - 1) + 1)
        for number, found in zip(numbers, await asyncio.gather(*(_final_block(http, n) for n in numbers)), strict=True):
            if found is None:
                return f"the node has no block {number}"
            if one.hash in found.hashes:
                raise Malformed(f"it has {one.hash} in block {number}, and says that it does not know it")
            if found.header.timestamp >= one.slot.expires:
                return ""
    return "there is no older transaction to ask the node for, and too many blocks could contain this one"
