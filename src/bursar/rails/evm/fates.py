"""Asking nodes for fates: the questions of many payouts travel together.

Questions that come while a round is under way wait for the next one. A round costs each node four requests, however
many questions it answers: two for where the chain is, the facts, and the blocks that the facts name. Only if a payment
of tokens is confirmed by these, there is a fifth: the balances. What all of it means is decided in `verdict`.

A node that keeps no archive has dropped the state of a block after a while, and can't say what balances were. Then the
payment's event alone decides at that node, and the evidence says so. A block that is so young that the node should have
its state is asked for again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bursar.rails.chain import Confirmed, Fate, NodesUnavailable, Pending, Question, Unknown
from bursar.rails.evm.nodes import Anchor, Answers, Nodes, NodesDisagree, block_call
from bursar.rails.evm.reading import Receipt, Transaction, header_hash, receipt, transaction
from bursar.rails.evm.rpc import Call, CallError, CallFailed, Malformed, quantity, result
from bursar.rails.evm.tokens import CHANGES_CALLS, changes, changes_calls
from bursar.rails.evm.verdict import Facts, abstaining, check, combine, judge

QUESTIONS_MAX = 100  # in one round

_HASH = re.compile(r"0x[0-9a-f]{64}", re.ASCII)

# What one node says about one question, or why that can't be read.
_Said = tuple[int | None, dict[str, Receipt | None], dict[str, Transaction | None]] | Malformed


class _Unchecked(NamedTuple):
    """A payment that a node confirms by its event, and why the node can't say what the balances were."""

    paid: Confirmed
    why: str


# What one node's facts about one question mean; text: why it can't say now.
_Meaning = Fate | _Unchecked | str


def hashes_of(question: Question) -> list[str]:
    """The transactions to look up: every try that has a hash, and the one that the watcher has seen."""
    named = [one.hash for one in question.tries] + [question.consumer]
    return list(dict.fromkeys(hash_ for hash_ in named if hash_))


class Fates:
    """Answers questions in rounds."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._waiting: list[tuple[Question, asyncio.Future[Fate]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Fate:
        """What became of a payout's transactions."""
        if len({one.slot for one in question.tries}) != 1 or question.tries[0].slot.nonce is None:
            raise ValueError("all tries of a question share one nonce")
        if not all(_HASH.fullmatch(hash_) for hash_ in hashes_of(question)):
            raise ValueError("a hash is 0x and 64 hexadecimal digits in lower case")
        answer: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=f"fates of {self._nodes.network.name}")
        return await answer

    async def _run(self) -> None:
        """Rounds, until no question waits."""
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:QUESTIONS_MAX], self._waiting[QUESTIONS_MAX:]
                await self._round([(question, answer) for question, answer in taken if not answer.done()])
        finally:
            self._running = None
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting = []

    async def _round(self, asked: list[tuple[Question, asyncio.Future[Fate]]]) -> None:
        try:
            found = await self._answers([question for question, _ in asked])
        except Exception as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for (_, answer), fate in zip(asked, found, strict=True):
                if not answer.done():
                    answer.set_result(fate)
        finally:
            for _, answer in asked:
                answer.cancel()  # of no effect, unless this round was cancelled: its process ends

    async def _answers(self, questions: Sequence[Question]) -> list[Fate]:
        if not questions:
            return []
        try:
            anchor = await self._nodes.anchor()
        except NodesDisagree as error:
            return [Unknown(why=error.why) for _ in questions]
        facts = await self._facts(questions, anchor)
        if not facts:
            raise NodesUnavailable(self._nodes.network.name, f"no node answers{self._nodes.missing(facts)}")
        meant = {
            name: [_judged(q, one) for q, one in zip(questions, of_node, strict=True)]
            for name, of_node in facts.items()
        }
        checked = await asyncio.gather(*(self._checked(name, questions, fates) for name, fates in meant.items()))
        return [
            self._fate(question, Answers(dict(zip(meant, of_question, strict=True)), facts.silent))
            for question, of_question in zip(questions, zip(*checked, strict=True), strict=True)
        ]

    async def _facts(self, questions: Sequence[Question], anchor: Anchor) -> Answers[list[Facts | Malformed]]:
        """For each node that answers: its facts about each question, or why they can't be read."""
        at = hex(anchor.number)
        calls: list[Call] = []
        for question in questions:
            calls.append(Call("eth_getTransactionCount", (question.sender, at)))
            for hash_ in hashes_of(question):
                calls += [Call("eth_getTransactionReceipt", (hash_,)), Call("eth_getTransactionByHash", (hash_,))]

        def read(results: list[Any]) -> list[_Said]:
            left = iter(results)
            parts = [(q, [next(left) for _ in range(1 + 2 * len(hashes_of(q)))]) for q in questions]
            return [_read(question, part) for question, part in parts]

        said = await self._nodes.ask(calls, anchor.nodes, read)
        for name, of_node in said.items():
            for one in of_node:
                if isinstance(one, Malformed):
                    self._nodes.malformed(name, one)
        found = await asyncio.gather(*(self._canonical(name, of_node) for name, of_node in said.items()))
        facts, silent = {}, said.silent
        for (name, of_node), canonical in zip(said.items(), found, strict=True):
            if isinstance(canonical, str):
                silent[name] = canonical
            else:
                facts[name] = [_with_blocks(one, anchor.number, canonical) for one in of_node]
        return Answers(facts, silent)

    async def _canonical(self, name: str, said: list[_Said]) -> dict[int, str | None] | str:
        """The hashes of the blocks in which a node has seen transactions, at that node; or why it does not say.

        Asked after the receipts, so that a block which was replaced in between is found out. Each node is asked for the
        blocks that it has named itself: others may not know them.
        """
        receipts = [found for one in said if not isinstance(one, Malformed) for found in one[1].values()]
        numbers = sorted({found.block for found in receipts if found is not None})
        if not numbers:
            return {}

        def read(results: list[Any]) -> dict[int, str | None]:
            pairs = zip(numbers, results, strict=True)
            return {n: None if isinstance(one, CallError) else header_hash(one, n) for n, one in pairs}

        answers = await self._nodes.ask([block_call(number) for number in numbers], [name], read)
        return answers.get(name) or answers.silent[name]

    async def _checked(self, name: str, questions: Sequence[Question], fates: list[Fate]) -> list[_Meaning]:
        """One node's fates, after it was asked for the balances around payments of tokens that it confirms."""
        pairs = list(enumerate(zip(questions, fates, strict=True)))
        paid = {p: (q, fate) for p, (q, fate) in pairs if q.order.contract and isinstance(fate, Confirmed)}
        found: list[_Meaning] = list(fates)
        if not paid:
            return found

        def read(results: list[Any]) -> list[_Meaning]:
            left = iter(results)
            return [self._check(name, *one, [next(left) for _ in range(CHANGES_CALLS)]) for one in paid.values()]

        calls = [call for one in paid.values() for call in changes_calls(*one)]
        answers = await self._nodes.ask(calls, [name], read)
        said = answers[name] if name in answers else [answers.silent[name]] * len(paid)
        for place, one in zip(paid, said, strict=True):
            found[place] = one
        return found

    def _check(self, name: str, question: Question, paid: Confirmed, part: list[Any]) -> _Meaning:
        try:
            return check(paid, changes(question, paid, part))
        except CallFailed as error:
            why = f"it can't say what the balances were: {error}"
            return why if self._nodes.has_state(name, paid.block - 1) else _Unchecked(paid, why)
        except Malformed as error:
            return self._nodes.malformed(name, error)

    def _fate(self, question: Question, meant: Answers[_Meaning]) -> Fate:
        silent = meant.silent | {name: one for name, one in meant.items() if isinstance(one, str)}
        unchecked = {name: one.why for name, one in meant.items() if isinstance(one, _Unchecked)}
        fates = {name: one.paid if isinstance(one, _Unchecked) else one for name, one in meant.items()}
        said = {name: fate for name, fate in fates.items() if not isinstance(fate, str)}
        silent |= abstaining(said, unchecked)
        said = {name: fate for name, fate in said.items() if name not in silent}
        missing = self._nodes.missing(Answers(said, silent))
        if not said:
            return Unknown(why=f"no node says what the balances were{missing}")
        verdict = combine(question, said, self._nodes.configured, missing)
        self._nodes.doubt({name: f"the fate of {question.order.payout}: {w}" for name, w in verdict.doubted.items()})
        fate = verdict.fate
        if isinstance(fate, Pending) and not fate.seen and all(self._nodes.is_behind(name) for name in said):
            return Unknown(why=f"{', '.join(sorted(said))} does not know it, but is behind{missing}")
        if isinstance(fate, Confirmed) and unchecked:
            alone = all(name in unchecked for name in fate.evidence["nodes"])
            evidence = {**fate.evidence, "balances_not_checked": unchecked}
            return msgspec.structs.replace(fate, evidence=evidence, by_event_alone=alone)
        return fate


def _judged(question: Question, facts: Facts | Malformed) -> Fate:
    return Unknown(why=str(facts)) if isinstance(facts, Malformed) else judge(question, facts)


def _read(question: Question, part: list[Any]) -> _Said:
    """One node's answers to one question. If they are malformed, that is of this question alone."""
    count, *found = part
    receipts: dict[str, Receipt | None] = {}
    transactions: dict[str, Transaction | None] = {}
    try:
        # Nodes drop old states: if finality stalls, F is too old for them, and receipts are all there is.
        nonce = None if isinstance(count, CallError) else quantity(count)
        for place, hash_ in enumerate(hashes_of(question)):
            receipts[hash_] = receipt(result(found[2 * place]), hash_)
            transactions[hash_] = transaction(result(found[2 * place + 1]), hash_)
    except Malformed as error:
        return error
    return nonce, receipts, transactions


def _with_blocks(said: _Said, final: int, canonical: dict[int, str | None]) -> Facts | Malformed:
    if isinstance(said, Malformed):
        return said
    nonce, receipts, transactions = said
    return Facts(final=final, nonce=nonce, receipts=receipts, transactions=transactions, canonical=canonical)
