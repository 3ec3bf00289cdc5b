"""Calls of a client: somebody who waits, and what an answer means to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bursar.deadlines import Pending
from bursar.model.outcome import Outcome
from bursar.rails.trading import protocol
from bursar.rails.trading.history import Named
from bursar.rails.trading.replies import (
    CORE_REFUSED,
    Balance,
    BalancesReply,
    DescribeReply,
    Floors,
    OperationRow,
    OperationsReply,
    Reply,
)
from bursar.rails.trading.rules import Op, Status, code_name, outcome_of


class Call:
    """Somebody who waits: for one operation, for a user's balances, or for a request of another kind."""

    __slots__ = ("asked_at", "expire", "future", "item", "pending", "request", "user", "written_at")

    def __init__(
        self, item: Named | None, request: Callable[[int], protocol.Request] | None, user: int | None = None
    ) -> None:
        self.item = item
        self.request = request
        self.user = user
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.expire: Callable[[], None] | None = None
        self.pending: Pending = {}  # where it is to be taken out of when it is over
        self.asked_at = 0.0
        self.written_at: float | None = None

    def finish(self, answer: Any) -> None:
        """Answer, once."""
        if self.expire is not None:
            self.pending.pop(self.expire, None)
        if not self.future.done():
            self.future.set_result(answer if self.user is None else balances_of(answer))


def trouble_of(answer: Any) -> Reply:
    """A reply that is trouble; an answer of the wrong kind is trouble too."""
    if isinstance(answer, Reply):
        return answer
    return Reply(Outcome.UNKNOWN, CORE_REFUSED, detail=f"an answer of the wrong kind: {type(answer).__name__}")


def balances_of(answer: Any) -> BalancesReply:
    """A user's balances."""
    match answer:
        case (int(sequence), (status, held)):
            balances = {asset: Balance(available, frozen) for asset, available, frozen in held}
            return BalancesReply(Outcome.SUCCESS, "OK", sequence, Status(status), balances)
        case _:
            trouble = trouble_of(answer)
            return BalancesReply(trouble.outcome, trouble.code, detail=trouble.detail)


def noted_of(answer: Any) -> Reply:
    """That something is so."""
    if isinstance(answer, protocol.Noted):
        return Reply(Outcome.SUCCESS, "OK", answer.sequence)
    return trouble_of(answer)


def pruned_of(answer: Any) -> tuple[Reply, Floors | None]:
    """What became of a request to raise the floors, and where they are if the core has said so."""
    if isinstance(answer, protocol.Pruned):
        reply = Reply(outcome_of(answer.code), code_name(answer.code), answer.sequence)
        return reply, Floors(answer.room, answer.forget)
    return trouble_of(answer), None


def operations_of(answer: Any) -> OperationsReply:
    """A list of operations."""
    if isinstance(answer, protocol.Listed):
        items = [
            OperationRow(sequence, Op(op), id_, user, asset, amount, code_name(code))
            for sequence, op, id_, user, asset, amount, code in answer.operations
        ]
        return OperationsReply(Outcome.SUCCESS, "OK", answer.sequence, items, answer.complete_to)
    trouble = trouble_of(answer)
    return OperationsReply(trouble.outcome, trouble.code, detail=trouble.detail)


def described_of(answer: Any) -> DescribeReply:
    """Who a core is."""
    if isinstance(answer, protocol.Described):
        return DescribeReply(
            Outcome.SUCCESS,
            "OK",
            answer.sequence,
            answer.core,
            answer.ledger,
            Floors(answer.room, answer.forget),
            answer.highest,
            answer.remembered,
            answer.accounts,
        )
    trouble = trouble_of(answer)
    return DescribeReply(trouble.outcome, trouble.code, detail=trouble.detail)
