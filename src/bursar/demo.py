"""The demo: a day at a small payments company, killed in the middle on purpose, and nothing is lost.

The day's traffic is planned from a seed, so that everybody who needs it can make the same plan. The morning runs in a
child process with many callers at once; on the way from and to each caller a message takes some milliseconds, as on a
network. In the middle the child is killed (SIGKILL: nothing of it runs any more). This process then opens the ledger
again, sends once more everything whose receipt had not arrived, under the same keys, finishes the day, and compares:
what it knows it asked for and was promised, against what the ledger says.

The child tells what it does on its standard output, one line before and one after each request; lines written before
the kill are in the pipe and survive it. Not here: how any of it looks (cli/commands/demo).
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from bursar.audit import Finding, audit
from bursar.instance import Bursar
from bursar.ledger import Ledger
from bursar.model.accounts import HELD, AccountStatus, CappedOverdraft, ExternalAccount, Policy, SystemAccount
from bursar.model.entries import Entry, Movement
from bursar.model.errors import DatabaseUnavailable, Refusal, UnknownEnvelope
from bursar.model.money import Money
from bursar.model.records import Event
from bursar.model.views import EnvelopeView

USERS, SHOPS, CALLERS = 50, 5, 32
CASES_PER_SECOND = 150
MESSAGE_S = (0.01, 0.09)  # how long a message travels, each way
DAY_MINUTES = 24 * 60
OVERHEAD_S = 2.0  # set-up, starting the child, audit, tables
MORNING_S_MIN = 1.0
CLOSING_S = 0.6  # left for the audit when the time is up

NOTHING = "NOTHING_TO_DO"  # what it is about was refused before

ASSETS = {"EUR": 2, "USDT": 6}
BANK, CHAIN, FEES, CREDIT, SUSPECT = "external:bank", "external:chain", "system:fees", "shop:credit", "user:13"
USER_NAMES = [f"user:{n:02d}" for n in range(1, USERS + 1)]
SHOP_NAMES = [f"shop:{n}" for n in range(1, SHOPS + 1)]
SPECIAL: dict[str, Policy] = {
    BANK: ExternalAccount(),
    CHAIN: ExternalAccount(),
    FEES: SystemAccount(),
    CREDIT: CappedOverdraft(floor="-500.00", asset="EUR"),
}


# --- the plan ----------------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the ledger."""

    number: int  # its place in the day; also its key
    minute: int
    what: str  # entry, authorize, confirm, void, reverse, freeze, unfreeze
    moves: tuple[Movement, ...] = ()  # what it moves, if it is accepted
    about: int = -1  # the earlier request that it confirms, voids or reverses
    account: str = ""

    @property
    def key(self) -> str:
        """Its idempotency key: the same however often it is sent."""
        return f"day-{self.number}"


Case = tuple[Ask, ...]  # requests of one caller, each sent when the one before has been answered


def plan(seed: int, cases: int) -> list[Case]:
    """A day of mixed traffic; the same seed gives the same day."""
    dice = random.Random(seed)
    numbers = iter(range(10**9))
    days = [tuple(_opening(dice, numbers))]
    marks = {cases * 10 // 24: "freeze", cases * 15 // 24: "unfreeze"}
    for place in range(cases):
        minute = DAY_MINUTES * place // cases
        if place in marks:
            days.append((Ask(number=next(numbers), minute=minute, what=marks[place], account=SUSPECT),))
        days.append(tuple(_case(dice, numbers, minute)))
    return days


def _opening(dice: random.Random, numbers: Iterator[int]) -> Iterator[Ask]:
    for user in USER_NAMES:
        moves = (
            Movement(BANK, user, "EUR", f"{dice.randint(50, 900)}.00"),
            Movement(CHAIN, user, "USDT", f"{dice.randint(10, 400)}.000000"),
        )
        yield Ask(number=next(numbers), minute=0, what="entry", moves=moves)


def _case(dice: random.Random, numbers: Iterator[int], minute: int) -> Iterator[Ask]:
    user, other = dice.sample(USER_NAMES, 2)
    if dice.random() < 0.03:
        user = SUSPECT
        other = "user:07"
    shop = dice.choice(SHOP_NAMES)
    code = dice.choice(("EUR", "EUR", "USDT"))
    amount = _amount(dice, code, 1, 120)

    def ask(what: str, *moves: Movement, about: int = -1) -> Ask:
        return Ask(number=next(numbers), minute=minute, what=what, moves=moves, about=about)

    match dice.choices(("in", "pay", "buy", "out", "hold", "undo", "credit"), (22, 22, 26, 10, 10, 5, 5))[0]:
        case "in":
            yield ask("entry", Movement(BANK if code == "EUR" else CHAIN, user, code, amount))
        case "pay":
            yield ask("entry", Movement(user, other, code, amount))
        case "buy":  # the shop gets the price and we get a fee, in one entry
            fee = Movement(user, FEES, code, _amount(dice, code, 0, 1))
            yield ask("entry", Movement(user, shop, code, amount), fee)
        case "out":
            yield ask("entry", Movement(user, BANK if code == "EUR" else CHAIN, code, amount))
        case "hold":  # an order: set aside, paid in part, the rest given back
            whole = Movement(user, HELD, code, _amount(dice, code, 40, 80))
            part = Movement(HELD, shop, code, _amount(dice, code, 5, 30))
            held = ask("authorize", whole)
            yield held
            yield ask("confirm", part, about=held.number)
            rest = _minor(code, str(whole.amount)) - _minor(code, str(part.amount))
            yield ask("void", Movement(HELD, user, code, _text(code, rest)), about=held.number)
        case "undo":
            paid = ask("entry", Movement(user, shop, code, amount))
            yield paid
            yield ask("reverse", Movement(shop, user, code, amount), about=paid.number)
        case "credit":  # lives on its overdraft, and meets the floor
            yield ask("entry", Movement(CREDIT, shop, "EUR", _amount(dice, "EUR", 20, 90)))


def _amount(dice: random.Random, code: str, low: int, high: int) -> str:
    return _text(code, dice.randint(low * 10 ** ASSETS[code] + 1, high * 10 ** ASSETS[code]))


def _text(code: str, minor: int) -> str:
    return str(Money(code, ASSETS[code], minor))


def _minor(code: str, text: str) -> int:
    return int(text.replace(".", "")) if text else 0


# --- asking ------------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """What came of a request."""

    envelope: int = 0  # 0 for a freeze
    refused: str = ""  # the code of a refusal
    replayed: bool = False  # it had happened before we asked this time


async def send(ledger: Ledger, ask: Ask, answers: dict[int, Answer]) -> Answer | None:
    """Make one request. None: what it is about was refused, so there is nothing to ask."""
    about = answers.get(ask.about)
    if ask.about >= 0 and (about is None or about.refused):
        return None
    subject = 0 if about is None else about.envelope
    try:
        match ask.what:
            case "entry":
                receipt = await ledger.commit(Entry(movements=ask.moves, key=ask.key))
            case "authorize":
                return await _authorize(ledger, ask)
            case "confirm":
                receipt = await ledger.confirm(subject, ask.moves[0].target, ask.moves[0].amount, key=ask.key)
            case "void":
                receipt = await ledger.void(subject)
            case "reverse":
                receipt = await ledger.reverse(subject)
            case _:
                return await _set_status(ledger, ask)
    except Refusal as refusal:
        return Answer(refused=refusal.code)
    return Answer(envelope=receipt.envelope, replayed=receipt.replayed)


async def _authorize(ledger: Ledger, ask: Ask) -> Answer:
    before = 0
    with suppress(UnknownEnvelope):
        before = (await ledger.envelope_by_key(ask.key)).envelope
    move = ask.moves[0]
    hold = await ledger.authorize(move.source, move.asset, move.amount, key=ask.key)
    return Answer(envelope=hold.id, replayed=hold.id == before)


async def _set_status(ledger: Ledger, ask: Ask) -> Answer:
    wanted = AccountStatus.FROZEN if ask.what == "freeze" else AccountStatus.ACTIVE
    before = (await ledger.account(ask.account)).status
    await (ledger.freeze if ask.what == "freeze" else ledger.unfreeze)(ask.account)
    return Answer(replayed=before is wanted)


Told = Callable[[Ask, Answer | None], None]  # once before (None) and once after each request


async def work_through(
    ledger: Ledger, cases: list[Case], answers: dict[int, Answer], told: Told, *, seconds: float, until: float
) -> None:
    """Many callers share the cases, spread over so many seconds; none begins another after `until`."""
    waiting = iter(list(enumerate(cases)))
    start = time.monotonic()
    dice = random.Random(len(cases))

    async def caller() -> None:
        for place, case in waiting:
            await asyncio.sleep(start + seconds * place / len(cases) - time.monotonic())
            if time.monotonic() > until:
                return
            for ask in case:
                if ask.number in answers:
                    continue
                told(ask, None)
                await asyncio.sleep(dice.uniform(*MESSAGE_S))  # on its way to the ledger
                answer = await send(ledger, ask, answers) or Answer(refused=NOTHING)
                await asyncio.sleep(dice.uniform(*MESSAGE_S))  # and its answer on the way back
                answers[ask.number] = answer
                told(ask, answer)

    await asyncio.gather(*[caller() for _ in range(CALLERS)])


# --- the child ---------------------------------------------------------------------------------------------------


async def child(url: str, seed: int, count: int, seconds: float) -> None:
    """The morning, until somebody kills us; then the afternoon too, if nobody does."""

    def told(ask: Ask, answer: Answer | None) -> None:
        # os.write, not print: what is told has left this process before it goes on, and so survives the kill.
        line = f"? {ask.number}" if answer is None else f"! {ask.number} {answer.envelope} {answer.refused}"
        os.write(1, line.encode() + b"\n")

    async with Bursar(url) as b:
        cases = plan(seed, count)[1:]
        await work_through(b.ledger, cases, {}, told, seconds=seconds, until=float("inf"))


# --- the day -----------------------------------------------------------------------------------------------------


class Report(msgspec.Struct, kw_only=True):
    """What happened."""

    killed_pid: int = 0
    killed_minute: int = 0
    reopened_s: float = 0.0
    recovered: dict[str, int] = {}
    unanswered: int = 0  # requests that were on their way when the child died
    were_there: int = 0  # of these: they had happened, only the answer was lost
    were_new: int = 0
    were_refused: int = 0
    ended_minute: int = 0
    committed: int = 0
    refusals: dict[str, int] = {}
    balances: dict[str, dict[str, Money]] = {}
    wrong: list[str] = []  # where the ledger is not what was promised
    findings: list[Finding] = []
    envelopes: int = 0  # in the ledger
    events: list[Event] = []
    example: EnvelopeView | None = None
    example_lost: bool = False  # its answer was lost in the crash
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything was well."""
        return not self.wrong and bool(self.findings) and all(f.ok and f.judged for f in self.findings)


Clock = Callable[[int, int], None]  # told the virtual minute, and how many requests have been answered
Tell = Callable[[str, Report], None]  # told what has just happened: "killed", "sent again", "over"


class Day:
    """The demo from the first account to the verdict."""

    def __init__(self, url: str, seconds: float, clock: Clock, tell: Tell, seed: int = 1) -> None:
        self.url = url
        self.seconds = seconds
        self.seed = seed
        self.clock = clock
        self.tell = tell
        self.start = time.monotonic()
        self.traffic_s = max(2 * MORNING_S_MIN, seconds - OVERHEAD_S)
        self.count = int(self.traffic_s * CASES_PER_SECOND)
        self.cases = plan(seed, self.count)
        self.asks = {ask.number: ask for case in self.cases for ask in case}
        self.answers: dict[int, Answer] = {}
        self.lost: set[int] = set()  # asked, and not answered
        self.report = Report()

    async def open_accounts(self) -> None:
        """A fresh ledger with some money in it."""
        async with Bursar(self.url) as b:
            if (await b.store.read.checks.counts())["accounts"] > 1:
                raise DatabaseUnavailable("the demo wants an empty database, and there are accounts in this one")
            for code, precision in ASSETS.items():
                await b.ledger.create_asset(code, precision)
            for path, policy in SPECIAL.items():
                await b.ledger.create_account(path, policy=policy)
            for path in USER_NAMES + SHOP_NAMES:
                await b.ledger.create_account(path)
            opening = self.cases[0]
            results = await asyncio.gather(*[send(b.ledger, ask, self.answers) for ask in opening])
            self.answers.update({a.number: r for a, r in zip(opening, results, strict=True) if r is not None})

    def morning(self) -> None:
        """Run the child, and kill it at noon."""
        words = (self.url, str(self.seed), str(self.count), str(self.traffic_s))
        process = subprocess.Popen([sys.executable, "-m", "bursar.demo", *words], stdout=subprocess.PIPE)
        assert process.stdout is not None
        latest = self.start + self.seconds * 0.6
        try:
            for line in process.stdout:
                minute = self._hear(line.decode().split(" "))
                noon = minute >= DAY_MINUTES // 2 and len(self.lost) >= CALLERS // 4
                if not self.report.killed_pid and (noon or time.monotonic() > latest):
                    process.kill()
                    self.report.killed_pid = process.pid
                    self.report.killed_minute = minute
        finally:
            process.kill()
            process.wait()
        self.report.unanswered = len(self.lost)
        if not self.report.killed_pid:
            self.report.wrong.append("the morning's process ended before it was killed")

    def _hear(self, words: list[str]) -> int:
        """What the child says: it asks, or it was answered."""
        number = int(words[1])
        if words[0] == "?":
            self.lost.add(number)
        else:
            self.lost.discard(number)
            self.answers[number] = Answer(envelope=int(words[2]), refused=words[3].strip())
        minute = self.asks[number].minute
        self.clock(minute, len(self.answers))
        return minute

    async def send_again(self, b: Bursar) -> None:
        """Ask once more for everything that was not answered, under the same keys."""
        for number in sorted(self.lost):
            answer = await send(b.ledger, self.asks[number], self.answers) or Answer(refused=NOTHING)
            self.answers[number] = answer
            self.report.were_there += answer.replayed
            self.report.were_refused += bool(answer.refused)
            self.report.were_new += not answer.replayed and not answer.refused

    async def afternoon(self, b: Bursar) -> None:
        """Go on with the day."""
        rest = [case for case in self.cases if any(ask.number not in self.answers for ask in case)]

        def told(ask: Ask, answer: Answer | None) -> None:
            self.report.ended_minute = max(self.report.ended_minute, ask.minute)
            self.clock(self.report.ended_minute, len(self.answers))

        self.report.ended_minute = self.report.killed_minute
        seconds = self.traffic_s * len(rest) / len(self.cases)
        until = self.start + self.seconds - CLOSING_S
        await work_through(b.ledger, rest, self.answers, told, seconds=seconds, until=until)
        if all(number in self.answers for number in self.asks):
            self.report.ended_minute = DAY_MINUTES
        self.clock(self.report.ended_minute, len(self.answers))

    async def judge(self, b: Bursar) -> None:
        """Compare what was promised with what is there."""
        report, promised = self.report, Counter[tuple[str, str]]()
        refusals: Counter[str] = Counter()
        for number, answer in self.answers.items():
            if answer.refused:
                refusals[answer.refused] += 1
                continue
            report.committed += answer.envelope > 0
            for move in self.asks[number].moves:
                minor = _minor(move.asset, str(move.amount))
                promised[move.source, move.asset] -= minor
                promised[move.target, move.asset] += minor
        refusals.pop(NOTHING, None)
        report.refusals = dict(refusals.most_common())
        for path in [*SPECIAL, HELD, *USER_NAMES, *SHOP_NAMES]:
            report.balances[path] = await b.ledger.balances(path)
            for code in ASSETS:
                found = report.balances[path].get(code)
                minor = 0 if found is None else found.minor
                if minor != promised[path, code]:
                    wanted = _text(code, promised[path, code])
                    report.wrong.append(f"{path} should have {wanted} {code} and has {_text(code, minor)}")
        report.envelopes = (await b.store.read.checks.counts())["envelopes"]
        if report.envelopes != report.committed:
            report.wrong.append(f"{report.committed} entries were promised, {report.envelopes} are in the ledger")
        report.findings = await audit(b.store)
        report.events = await _last_events(b.ledger)
        await self._example(b.ledger)

    async def _example(self, ledger: Ledger) -> None:
        """A purchase whose answer was lost, if there is one; else any purchase."""
        bought = [
            n for n, a in self.answers.items() if a.envelope and self.asks[n].what == "entry" and self.asks[n].minute
        ]
        lost = {n for n in self.lost if self.answers[n].replayed}
        bought.sort(key=lambda n: (n in lost, len(self.asks[n].moves), n))
        if bought:
            self.report.example = await ledger.envelope(self.answers[bought[-1]].envelope)
            self.report.example_lost = bought[-1] in lost

    def run(self) -> Report:
        """The whole day. Needs a thread without an event loop: it blocks while the child works."""
        asyncio.run(self.open_accounts())
        self.morning()
        self.tell("killed", self.report)
        asyncio.run(self._after_noon())
        self.report.seconds = time.monotonic() - self.start
        return self.report

    async def _after_noon(self) -> None:
        opening = time.monotonic()
        async with Bursar(self.url) as b:
            self.report.recovered = await b.ledger.recover()
            self.report.reopened_s = time.monotonic() - opening
            await self.send_again(b)
            self.tell("sent again", self.report)
            await self.afternoon(b)
            await self.judge(b)
            self.tell("over", self.report)


async def _last_events(ledger: Ledger, count: int = 5) -> list[Event]:
    last: list[Event] = []
    while page := await ledger.events(last[-1].cursor if last else "", limit=500):
        last = (last + page)[-count:]
    return last


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
