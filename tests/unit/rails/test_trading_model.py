"""The state beside a reference that is written for clarity alone: every answer, balance and reserved room agree.

The reference keeps every operation in a dictionary and works out from all of them, each time, how much is reserved.
States are made anew from their log or from a snapshot in between, as after a crash, and must go on as if nothing was.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rails.desk import deposit, prune, refund, run, withdraw

from bursar.rails.trading import snapshots
from bursar.rails.trading.frames import decode, encode
from bursar.rails.trading.rules import U64_MAX, Code, Op
from bursar.rails.trading.state import CoreState

BIG = st.sampled_from([1, 2, 2**62, 2**63, U64_MAX - 1, U64_MAX])


@dataclass
class Reference:
    """What a core of one asset is supposed to be."""

    remembered: dict[tuple[int, Op], tuple[int, int, Code]] = field(default_factory=dict)
    available: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    ledger: str = ""
    room: int = 1
    forget: int = 1
    exempt: set[int] = field(default_factory=set)  # kept when the room floor passed, and ever since
    highest: int = 0

    def reserved(self, user: int) -> int:
        """Held, and withdrawn from the room floor on or exempt, and not refunded."""
        return self.available[user] + sum(
            amount
            for (id_, op), (who, amount, code) in self.remembered.items()
            if (op, who, code) == (Op.WITHDRAW, user, Code.OK)
            and (id_, Op.REFUND) not in self.remembered
            and self.reserves(id_)
        )

    def reserves(self, id_: int) -> bool:
        return id_ >= self.room or id_ in self.exempt

    def execute(self, op: Op, id_: int, user: int, amount: int) -> Code:
        known = self.remembered.get((id_, op))
        if known is not None:
            return known[2] if known[:2] == (user, amount) else Code.MISMATCH
        taken = self.remembered.get((id_, Op.WITHDRAW))
        if id_ < self.forget and not (op is Op.REFUND and taken is not None):
            return Code.PRUNED
        code = self.decide(op, id_, user, amount, taken)
        if code < 128:
            if op is not Op.REFUND:
                self.highest = max(self.highest, id_)
            self.remembered[id_, op] = (user, amount, code)
        return code

    def decide(self, op: Op, id_: int, user: int, amount: int, taken: tuple[int, int, Code] | None) -> Code:
        if op is Op.REFUND:
            if taken is None or taken[2] is not Code.OK:
                return Code.WITHDRAW_NOT_FOUND
            if taken[:2] != (user, amount):
                return Code.MISMATCH
            if not self.reserves(id_) and self.reserved(user) + amount > U64_MAX:
                return Code.NO_ROOM
        elif op is Op.DEPOSIT and self.reserved(user) + amount > U64_MAX:
            return Code.OVERFLOW
        elif op is Op.WITHDRAW and amount > self.available[user]:
            return Code.INSUFFICIENT_BALANCE
        self.available[user] += -amount if op is Op.WITHDRAW else amount
        return Code.OK

    def prune(self, room: int, forget: int, keep: set[int]) -> Code:
        if room < forget:
            return Code.BAD_OPERATION
        if room > max(self.room, self.highest + 1) or forget > max(self.forget, self.highest + 1):
            return Code.FLOOR_TOO_HIGH
        room, forget = max(room, self.room), max(forget, self.forget)
        self.exempt = {id_ for id_ in keep if id_ < room and self.reserves(id_)}
        self.room = room
        if forget > self.forget:
            self.forget = forget
            gone = [key for key in self.remembered if key[0] < forget and key[0] not in keep]
            for key in gone:
                del self.remembered[key]
        return Code.OK


MAKE = {Op.DEPOSIT: deposit, Op.WITHDRAW: withdraw, Op.REFUND: refund}


class Game:
    """A state and its reference, played by dice that know where it hurts: old ids, late refunds, floors in between."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.state, self.reference = CoreState(), Reference()
        self.log: list[bytes] = []
        self.written = 0
        self.next_id = 1
        self.answers: Counter[Code] = Counter()

    def play(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.dice.random()
            if kind < 0.75:
                self.operate(*self.operation(kind))
            elif kind < 0.93:
                self.prune()
            elif kind < 0.95:
                self.reference.ledger = self.state.bind("ledger-1")
            else:
                self.crash(with_snapshot=kind < 0.98)
            self.compare()

    def operation(self, kind: float) -> tuple[Op, int, int, int]:
        dice, known = self.dice, self.reference
        user = dice.randint(1, 2)
        if dice.random() < 0.15 and known.remembered:  # again, or nearly
            (id_, op), (who, amount, _) = dice.choice(sorted(known.remembered.items()))
            return op, id_, who, min(U64_MAX, amount + (dice.random() < 0.2))
        if kind < 0.3:
            taken = [(id_, row) for (id_, op), row in sorted(known.remembered.items()) if op is Op.WITHDRAW]
            if taken:
                id_, (who, amount, _) = dice.choice(taken)
                return Op.REFUND, id_, who, amount
        self.next_id += dice.randint(1, 3)
        id_ = self.next_id if dice.random() < 0.8 else dice.randint(1, self.next_id)
        if kind < 0.55:
            left = known.available[user]
            return Op.WITHDRAW, id_, user, min(U64_MAX, dice.choice((left, left // 2, left + 1, 7)) or 7)
        room = U64_MAX - known.reserved(user)
        return Op.DEPOSIT, id_, user, min(U64_MAX, dice.choice((room, room + 1, room // 2, 7)) or 7)

    def operate(self, op: Op, id_: int, user: int, amount: int) -> None:
        [code], _ = run(self.state, [MAKE[op](id_, user, amount)])
        assert Code(code) is self.reference.execute(op, id_, user, amount), (op, id_, user, amount)
        self.answers[Code(code)] += 1

    def prune(self) -> None:
        dice, top = self.dice, self.reference.highest + 2
        room = dice.randint(max(1, self.reference.room - 1), max(self.reference.room, top))
        forget = dice.randint(1, room) if dice.random() < 0.3 else self.reference.forget
        keep = {id_ for id_, op in self.reference.remembered if op is Op.WITHDRAW and dice.random() < 0.2}
        found = prune(self.state, room, forget, sorted(keep))
        assert found is self.reference.prune(room, forget, keep), (room, forget, keep)
        self.answers[found] += 1

    def crash(self, *, with_snapshot: bool) -> None:
        """Everything so far is on disk; a core starts on the log, or on a snapshot."""
        if self.state.sequence > self.written:
            records = self.state.drain()
            self.log.append(encode(records, self.written + 1, self.state.sequence - self.written))
            self.written = self.state.sequence
        if with_snapshot:
            held = snapshots.capture(self.state, "spot", "0" * 32)
            self.state = snapshots.restore(b"".join(snapshots.pieces(held))).state
            return
        self.state = CoreState()
        for frame in self.log:
            self.state.replay(decode(frame, 0, self.state.sequence + 1).records)

    def compare(self) -> None:
        state, reference = self.state, self.reference
        accounts = state.assets["USDT"].by_user if "USDT" in state.assets else {}
        for user in (1, 2):
            available, _, reserved = accounts.get(user, (0, 0, 0))
            assert (available, reserved) == (reference.available[user], reference.reserved(user))
        floors = (state.floors.room, state.floors.forget)
        assert (*floors, state.ledger) == (reference.room, reference.forget, reference.ledger)


def test_the_core_answers_as_the_reference_does_through_crashes() -> None:
    answers: Counter[Code] = Counter()
    for seed in range(150):
        game = Game(seed)
        game.play(80)
        game.crash(with_snapshot=False)
        game.compare()
        answers += game.answers
    rare = (Code.OVERFLOW, Code.NO_ROOM, Code.PRUNED, Code.MISMATCH, Code.FLOOR_TOO_HIGH, Code.WITHDRAW_NOT_FOUND)
    assert all(answers[code] > 20 for code in rare), answers


@given(st.lists(st.tuples(BIG, st.booleans(), st.booleans()), min_size=8, max_size=40))
def test_what_moves_in_and_out_in_a_life_has_no_limit(rounds: list[tuple[int, bool, bool]]) -> None:
    """Whatever amounts come, go and come back: once the room floor has passed, all of 2^64 - 1 fits again."""
    state, moved = CoreState(), 0
    for number, (amount, comes_back, forgets) in enumerate(rounds):
        id_ = 10 * (number + 1)
        assert run(state, [deposit(id_, amount=amount), withdraw(id_ + 1, amount=amount)])[0] == b"\0\0"
        moved += amount
        if comes_back:
            assert run(state, [refund(id_ + 1, amount=amount), withdraw(id_ + 2, amount=amount)])[0] == b"\0\0"
            moved += amount
        top = id_ + (3 if comes_back else 2)
        assert prune(state, top, top if forgets else 1) is Code.OK
        assert list(state.assets["USDT"].by_user.values()) == [[0, 0, 0]]
    assert run(state, [deposit(10**6, amount=U64_MAX)])[0] == b"\0"
