"""The book beside a reference that is written for clarity alone: every answer, balance and reserved room agree.

The reference keeps every operation in a dictionary and works out from all of them, each time, how much is reserved.
Books are made anew from their log or from a snapshot in between, as after a crash, and must go on as if nothing was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rails.desk import deposit, prune, refund, run, withdraw

from bursar.rails.trading import snapshots
from bursar.rails.trading.book import Book
from bursar.rails.trading.frames import decode, encode
from bursar.rails.trading.words import U64_MAX, Code, Op

BIG = st.sampled_from([1, 2, 2**62, 2**63, U64_MAX - 1, U64_MAX])
IDS = st.integers(1, 30)
USERS = st.integers(1, 2)


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
            return Code.BELOW_FLOOR
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


OPERATION = st.tuples(st.sampled_from([Op.DEPOSIT, Op.DEPOSIT, Op.WITHDRAW, Op.WITHDRAW, Op.REFUND]), IDS, USERS, BIG)
PRUNE = st.tuples(st.just("prune"), IDS, IDS, st.sets(IDS, max_size=3))
OTHER = st.tuples(st.sampled_from(["bind", "crash", "crash without a snapshot"]))
MAKE = {Op.DEPOSIT: deposit, Op.WITHDRAW: withdraw, Op.REFUND: refund}


@settings(max_examples=300)
@given(st.lists(OPERATION | OPERATION | OPERATION | PRUNE | OTHER, max_size=60))
def test_the_book_answers_as_the_reference_does_through_crashes(steps: list[tuple[object, ...]]) -> None:
    book, reference, log = Book(), Reference(), list[bytes]()

    def write() -> None:
        first = 1 + sum(decode(frame, 0, _first(frame)).count for frame in log)
        if book.sequence >= first:
            log.append(encode(book.seal(), first, book.sequence - first + 1))

    for step in steps:
        match step:
            case (Op() as op, int(id_), int(user), int(amount)):
                [code], _ = run(book, [MAKE[op](id_, user, amount)])
                assert Code(code) is reference.execute(op, id_, user, amount), step
            case ("prune", int(room), int(forget), set() as keep):
                write()
                assert prune(book, room, forget, sorted(keep)) is reference.prune(room, forget, keep), step
            case ("bind",):
                reference.ledger = "ledger-1"
                assert book.bind("ledger-1") == "ledger-1"
            case ("crash",):
                write()
                held = snapshots.capture(book, "spot", "0" * 32)
                book = snapshots.restore(b"".join(snapshots.pieces(held))).book
            case _:
                write()
                book = Book()
                for frame in log:
                    book.replay(decode(frame, 0, _first(frame)).notes)
        accounts = {user: account for user, *account in book.assets["USDT"]} if "USDT" in book.assets else {}
        for user in (1, 2):
            available, _, reserved = accounts.get(user, (0, 0, 0))
            assert (available, reserved) == (reference.available[user], reference.reserved(user)), step
        assert (book.floors.room, book.floors.forget, book.ledger) == (
            reference.room,
            reference.forget,
            reference.ledger,
        )


def _first(frame: bytes) -> int:
    return int.from_bytes(frame[8:16], "little")


@given(st.lists(st.tuples(BIG, st.booleans(), st.booleans()), min_size=8, max_size=40))
def test_what_moves_in_and_out_in_a_life_has_no_limit(rounds: list[tuple[int, bool, bool]]) -> None:
    """Whatever amounts come, go and come back: once the room floor has passed, all of 2^64 - 1 fits again."""
    book, moved = Book(), 0
    for number, (amount, comes_back, forgets) in enumerate(rounds):
        id_ = 10 * (number + 1)
        assert run(book, [deposit(id_, amount=amount), withdraw(id_ + 1, amount=amount)])[0] == b"\0\0"
        moved += amount
        if comes_back:
            assert run(book, [refund(id_ + 1, amount=amount), withdraw(id_ + 2, amount=amount)])[0] == b"\0\0"
            moved += amount
        top = id_ + (3 if comes_back else 2)
        assert prune(book, top, top if forgets else 1) is Code.OK
        assert [account[1:] for account in book.assets["USDT"]] == [(0, 0, 0)]
    assert run(book, [deposit(10**6, amount=U64_MAX)])[0] == b"\0"
