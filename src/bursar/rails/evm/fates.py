"""Asking nodes for fates: the questions of many payouts travel together.

Questions that come while a round is under way wait for the next one. A round costs each node three requests, however
many questions it answers: where the chain is, the facts, and the blocks that the facts name. What the facts mean is
decided in `verdict`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bursar.rails.chain import Fate, NodesUnavailable, Pending, Question, Unknown
from bursar.rails.evm.nodes import Anchor, Nodes, NodesDisagree, block_call, result
from bursar.rails.evm.reading import Receipt, Transaction, header_hash, receipt, transaction
from bursar.rails.evm.rpc import Call, CallError, quantity
from bursar.rails.evm.verdict import Facts, combine, judge

QUESTIONS_MAX = 100  # in one round

_Said = tuple[int | None, dict[str, Receipt | None], dict[str, Transaction | None]]


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
            network = self._nodes.network.name
            raise NodesUnavailable(network, f"no node answers{self._nodes.missing(facts)}")
        return [
            self._fate(question, {name: of[i] for name, of in facts.items()}) for i, question in enumerate(questions)
        ]

    async def _facts(self, questions: Sequence[Question], anchor: Anchor) -> dict[str, list[Facts]]:
        """For each node that answers: its facts about each question."""
        at = hex(anchor.number)
        calls: list[Call] = []
        for question in questions:
            calls.append(Call("eth_getTransactionCount", (question.sender, at)))
            for hash_ in hashes_of(question):
                calls += [Call("eth_getTransactionReceipt", (hash_,)), Call("eth_getTransactionByHash", (hash_,))]

        def read(results: list[Any]) -> list[_Said]:
            left = iter(results)
            found = []
            for question in questions:
                count = next(left)
                # Nodes drop old states: if finality stalls, F is too old for them, and receipts are all there is.
                nonce = None if isinstance(count, CallError) else quantity(count)
                receipts: dict[str, Receipt | None] = {}
                transactions: dict[str, Transaction | None] = {}
                for hash_ in hashes_of(question):
                    receipts[hash_] = receipt(result(next(left)), hash_)
                    transactions[hash_] = transaction(result(next(left)), hash_)
                found.append((nonce, receipts, transactions))
            return found

        said = await self._nodes.ask(calls, anchor.nodes, read)
        canonical = await self._canonical(said)
        return {
            name: [
                Facts(
                    final=anchor.number,
                    nonce=nonce,
                    receipts=receipts,
                    transactions=transactions,
                    canonical=canonical[name],
                )
                for nonce, receipts, transactions in of_node
            ]
            for name, of_node in said.items()
            if name in canonical
        }

    async def _canonical(self, said: dict[str, list[_Said]]) -> dict[str, dict[int, str | None]]:
        """For each node: the hashes of the blocks in which any of them has seen a transaction.

        Asked after the receipts: a block that was replaced in between is found out.
        """
        numbers = sorted(
            {
                found.block
                for of_node in said.values()
                for _, receipts, _ in of_node
                for found in receipts.values()
                if found is not None
            }
        )
        if not numbers:
            return {name: {} for name in said}

        def read(results: list[Any]) -> dict[int, str | None]:
            return {n: header_hash(result(one), n) for n, one in zip(numbers, results, strict=True)}

        return await self._nodes.ask([block_call(number) for number in numbers], said, read)

    def _fate(self, question: Question, facts: dict[str, Facts]) -> Fate:
        said = {name: judge(question, of_node) for name, of_node in facts.items()}
        verdict = combine(question, said, self._nodes.configured, self._nodes.missing(said))
        self._nodes.doubt({name: f"the fate of {question.order.payout}: {w}" for name, w in verdict.doubted.items()})
        fate = verdict.fate
        if isinstance(fate, Pending) and not fate.seen and all(self._nodes.is_behind(name) for name in said):
            return Unknown(why=f"{', '.join(sorted(said))} does not know it, but is behind{self._nodes.missing(said)}")
        return fate
