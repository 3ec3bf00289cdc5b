"""One request, decided: what a core answers, and how much memory that answer takes while it waits.

An answer may leave only when all that it rests on is on disk, and then waits until the client reads it. Answers that
tell what is held are made into bytes at once: as objects they would take ten times as much, and a client that asks and
does not read could fill the memory with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, assert_never

from bursar.rails.trading import protocol
from bursar.rails.trading.core import Core
from bursar.rails.trading.protocol import Answer, ProtocolError
from bursar.rails.trading.rules import Status

DONE_BYTES: Final = 48  # that an answer to one operation takes, waiting: its code, its sequence
SMALL_BYTES: Final = 512  # that any answer takes, waiting


class Waiting(NamedTuple):
    """An answer that waits for the disk."""

    frame: Callable[[int], bytes]  # given the sequence that is on disk by then
    size: int


def decide(core: Core, request: protocol.Request) -> Waiting:
    """Decide a request; returns its answer. Not here: Subscribe and Prune, which take longer than a moment."""
    state, number = core.state, request.number
    match request:
        case protocol.Execute(_, assets, items):
            codes, sequences = state.execute(assets, items)
            return _later(lambda at: protocol.Done(number, at, codes, sequences), DONE_BYTES * len(codes))
        case protocol.Lookup(_, pairs):
            codes, sequences = state.lookup(pairs)
            return _later(lambda at: protocol.Done(number, at, codes, sequences), DONE_BYTES * len(codes))
        case protocol.Ping():
            return _later(lambda at: protocol.Noted(number, at))
        case protocol.Query(_, id_, op):
            row = state.operation(id_, op)
            found = row and (row.sequence, row.user, state.asset_code(row.asset), row.amount, row.other, row.code)
            return _now(protocol.Found(number, state.sequence, found))
        case protocol.Balances(_, users):
            accounts = [(int(state.status(user)), state.balances(user)) for user in users]
            return _now(protocol.Held(number, state.sequence, accounts))
        case protocol.Totals():
            return _now(protocol.Summed(number, state.sequence, [(code, str(total)) for code, total in state.totals()]))
        case protocol.SetStatus(_, user, status_number):
            return _now(protocol.Noted(number, state.set_status(user, Status(status_number))))
        case protocol.Bind(_, ledger):
            bound_to = state.bind(ledger)
            return _now(protocol.Bound(number, state.sequence, bound_to))
        case protocol.Operations(_, after, limit):
            rows, complete_to = state.transfers(after, limit)
            wires = [(r.sequence, r.op, r.id, r.user, state.asset_code(r.asset), r.amount, r.code) for r in rows]
            return _now(protocol.Listed(number, state.sequence, complete_to, wires))
        case protocol.Describe():
            return _now(_described(core, number))
        case protocol.Prune() | protocol.Subscribe():
            raise ProtocolError(f"{type(request).__name__} is not a request among others")
        case _:
            assert_never(request)


def _now(answer: Answer) -> Waiting:
    frame = protocol.frame(answer)
    return Waiting(lambda _: frame, len(frame) + SMALL_BYTES)


def _later(answer: Callable[[int], Answer], size: int = 0) -> Waiting:
    return Waiting(lambda at: protocol.frame(answer(at)), size + SMALL_BYTES)


def _described(core: Core, number: int) -> protocol.Described:
    state = core.state
    return protocol.Described(
        number,
        state.sequence,
        core.identity,
        state.ledger,
        state.floors.room,
        state.floors.forget,
        state.highest,
        state.history.count + state.pending,
        state.accounts,
    )
