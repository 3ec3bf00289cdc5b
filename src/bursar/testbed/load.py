"""The load: users who move their money in both directions, and repeat requests after every failure.

Every request has a client_order_id and is sent until there is a definite answer. `Habits` says what is requested and
how callers misbehave: some requests are sent by several callers at once, some again much later, some are for more than
there is. Now and then money arrives from outside, under a reference that is repeated in the same way. Where there are
payouts, some requests are for one, to an address of its own, and operators raise the fees of some and cancel others.
"""

from __future__ import annotations

import hashlib
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bursar.api.tokens import make_token
from bursar.config import Config
from bursar.testbed.caller import Answered, Caller, NoAnswer
from bursar.testbed.promises import ADDRESS, ENDS, FUNDING, Ask, Kind, Place, Said

TRANSFERS = "/api/v1/internal_transfer"
PAYOUTS = "/api/v1/payouts"
OPERATOR = "olga"
TIMEOUT_S = 4.0
TOKEN_S = 7 * 86_400
OPEN_S = 60.0
AGAIN_S = 0.2
# Refusals that a well-behaved caller may get here: too little money, or an account that is frozen at the moment.
FAIR = frozenset({"INSUFFICIENT_BALANCE", "ACCOUNT_FROZEN", "SOURCE_ACCOUNT_NOT_FOUND"})
TOO_LATE = (409, "INVALID_STATE")  # what an operator is answered about a payout that has ended
RECENT = 3  # payouts of which an operator picks one: later it is in a block, and a higher fee is no use


@dataclass(frozen=True, kw_only=True)
class PayoutHabits:
    """What is paid out, and how often."""

    callers: int  # who request nothing else
    think_s: float
    operated: float  # so many of them make an operator raise a fee, or cancel
    asset: str
    chain: str
    mandate: str
    fee: int  # that the user pays us for each, in smallest units


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What users request, and how. Shares are probabilities; amounts are smallest units."""

    users: range
    accounts: tuple[str, ...]
    assets: dict[str, int]  # code → precision
    opening: int  # what each user has of each asset in the beginning
    step: int = 1  # amounts are multiples of this
    callers: int = 10
    think_s: float = 0.04
    deposits: float = 0.0
    several_at_once: float = 0.0
    once_more: float = 0.0
    large: float = 0.0  # so much that two at once can't both be right
    impossible: float = 0.0  # more than there ever is
    payouts: PayoutHabits | None = None
    quiet: range = range(0)  # more users with the same opening, for whom only `Load.once` asks

    def next_request(self, rng: random.Random, order: str) -> Ask:
        """The next transfer."""
        source, target = rng.sample(self.accounts, 2)
        kind = rng.random()
        least, most = self.step, self.opening // 100
        if kind < self.impossible:
            least, most = 10**5 * self.opening, 10**6 * self.opening
        elif kind < self.impossible + self.large:
            most = self.opening
        minor = rng.randint(least // self.step, most // self.step) * self.step
        return Ask(order, rng.choice(self.users), source, target, rng.choice(list(self.assets)), minor)

    def next_payout(self, rng: random.Random, order: str, asset: str) -> Ask:
        """The next payout."""
        minor = rng.randint(1, rng.choice((self.opening // 50, self.opening // 2)))
        return Ask(order, rng.choice(self.users), FUNDING, address_of(order), asset, minor)

    def text_of(self, minor: int, asset: str) -> str:
        """Smallest units as the API wants them."""
        digits = self.assets[asset]
        return f"{minor // 10**digits}.{minor % 10**digits:0{digits}d}"


@dataclass
class Tally:
    """What happened on the way."""

    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # why there was no answer
    refusals: Counter[str] = field(default_factory=Counter)
    operated: Counter[str] = field(default_factory=Counter)  # what operators did to payouts
    unexpected: list[str] = field(default_factory=list)


class Load:
    """The callers and what they know."""

    def __init__(self, config: Config, habits: Habits, addresses: list[Callable[[], str | None]], seed: int) -> None:
        self.habits = habits
        self.asks: list[Ask] = []
        self.deposits: Counter[Place] = Counter()
        self.tally = Tally()
        self._addresses = addresses  # of every server, as they are at the moment
        self._seed = seed
        self._again: queue.SimpleQueue[Ask] = queue.SimpleQueue()  # asks for others to send as well
        self._lock = threading.Lock()
        self._over = threading.Event()  # no new requests
        self._give_up = float("inf")
        self._tokens = make_tokens(config, [*habits.users, *habits.quiet])
        self._threads = [
            threading.Thread(target=self._call, args=(n,), name=f"caller-{n}", daemon=True)
            for n in range(habits.callers + (habits.payouts.callers if habits.payouts else 0))
        ]

    def open(self) -> None:
        """Give every user something to move."""
        self._give_up = time.monotonic() + OPEN_S
        caller = Caller(self._addresses[0], timeout_s=TIMEOUT_S)
        for user in [*self.habits.users, *self.habits.quiet]:
            for asset in self.habits.assets:
                opening, reference = self.habits.opening, f"opening-{user}-{asset}"
                self._deposit(caller, random.Random(user), user, asset, opening, reference)
        self._give_up = float("inf")

    def start(self) -> None:
        """Start the callers."""
        for thread in self._threads:
            thread.start()

    def finish(self, timeout_s: float) -> bool:
        """No new requests; each caller repeats its own until there is an answer, or the time is up. Whether all got
        one."""
        self._give_up = time.monotonic() + timeout_s
        self._over.set()
        for thread in self._threads:
            thread.join()
        return time.monotonic() < self._give_up

    def settle(self, timeout_s: float, sample: int) -> None:
        """When everything is up and nothing is in flight: repeat each lost request, which might have been carried out
        after all, and some others, which must get the answer that they got before."""
        self._give_up = time.monotonic() + timeout_s
        rng = random.Random(self._seed)
        caller = Caller(self._addresses[0], timeout_s=TIMEOUT_S)
        unsure = [ask for ask in self.asks if not ask.is_settled]
        known = [ask for ask in self.asks if ask.was(Kind.ACCEPTED)]
        for ask in unsure:
            while not ask.is_settled and time.monotonic() < self._give_up:
                # Earlier answers are about requests that are all over by now; only the next answer counts.
                ask.said = []
                self._until_definite(caller, rng, ask)
        for ask in rng.sample(known, min(sample, len(known))):
            self._until_definite(caller, rng, ask)

    def once(self, caller: Caller, ask: Ask) -> Said:
        """Send a given request a single time; if there is no answer, `settle` repeats it."""
        with self._lock:
            self.asks.append(ask)
        said = self._requested(caller, ask)
        ask.said.append(said)
        return said

    def _call(self, number: int) -> None:
        try:
            self._ask_and_ask(number)
        except Exception as error:
            self._odd(f"caller {number} failed: {error!r}")  # a load that grew less would prove less
            raise

    def _ask_and_ask(self, number: int) -> None:
        rng, habits = random.Random(f"{self._seed}:{number}"), self.habits
        payouts = habits.payouts if number >= habits.callers else None
        callers = [Caller(address, timeout_s=TIMEOUT_S) for address in self._addresses]
        made = 0
        while not self._over.is_set():
            caller = rng.choice(callers)
            try:
                self._until_definite(caller, rng, self._again.get_nowait())
                continue
            except queue.Empty:
                pass
            made += 1
            if rng.random() < habits.deposits:
                user, asset = rng.choice(habits.users), rng.choice(list(habits.assets))
                self._deposit(caller, rng, user, asset, rng.randint(1, habits.opening // 10), f"wire-{number}-{made}")
                continue
            order = f"{number}-{made}"
            ask = habits.next_payout(rng, order, payouts.asset) if payouts else habits.next_request(rng, order)
            with self._lock:
                self.asks.append(ask)
            if rng.random() < habits.several_at_once:
                for _ in range(rng.randint(1, 3)):
                    self._again.put(ask)
            self._until_definite(caller, rng, ask)
            if payouts is not None and rng.random() < payouts.operated:
                self._operate(caller, rng, order)
            if rng.random() < habits.once_more:
                self._again.put(rng.choice(self.asks))
            self._over.wait(rng.random() * 2 * (payouts or habits).think_s)

    def _until_definite(self, caller: Caller, rng: random.Random, ask: Ask) -> None:
        while True:
            said = self._requested(caller, ask)
            ask.said.append(said)
            if said.kind is not Kind.LOST:
                break
            if time.monotonic() > self._give_up:
                return
            time.sleep(rng.random() * AGAIN_S)  # a caller waits before it retries, or it would do nothing else
        if said.kind is Kind.ACCEPTED and said.state not in ENDS and rng.random() < 0.3:
            path, who = (PAYOUTS, OPERATOR) if ask.is_payout else (TRANSFERS, str(ask.user))
            ask.said.append(self._said(caller, "GET", f"{path}/{said.req_id}", who, None))

    def _requested(self, caller: Caller, ask: Ask) -> Said:
        if ask.is_payout:
            return self._said(caller, "POST", PAYOUTS, OPERATOR, self._payout(ask))
        return self._said(caller, "POST", TRANSFERS, str(ask.user), self._transfer(ask))

    def _payout(self, ask: Ask) -> dict[str, str]:
        habits = self.habits.payouts
        assert habits is not None
        return {
            "account": f"user:{ask.user}:funding",
            "asset": ask.asset,
            "chain": habits.chain,
            "to": ask.target,
            "amount": self.habits.text_of(ask.minor, ask.asset),
            "fee": self.habits.text_of(habits.fee, ask.asset),
            "source": ask.order,
            "mandate": habits.mandate,
            "key": ask.order,
        }

    def _transfer(self, ask: Ask) -> dict[str, str]:
        return {
            "from": ask.source,
            "to": ask.target,
            "asset": ask.asset,
            "amount": self.habits.text_of(ask.minor, ask.asset),
            "client_order_id": ask.order,
        }

    def _operate(self, caller: Caller, rng: random.Random, key: str) -> None:
        """Raise the fee of a payout that was requested lately, or cancel it; until the answer is definite."""
        with self._lock:
            known = [ask for ask in self.asks if ask.is_payout and ask.was(Kind.ACCEPTED)][-RECENT:]
        if not known:
            return
        id_ = next(said.req_id for said in rng.choice(known).said if said.req_id)
        verb, body = rng.choice(("bump", "cancel")), {"reason": f"chaos {key}"}
        while True:
            said = self._said(caller, "POST", f"{PAYOUTS}/{id_}/{verb}", OPERATOR, body, key)
            if said.kind is not Kind.LOST:
                self.tally.operated[verb if said.kind is Kind.ACCEPTED else f"{verb}, too late"] += 1
            if said.kind is not Kind.LOST or time.monotonic() > self._give_up:
                return
            time.sleep(rng.random() * AGAIN_S)  # as above

    def _deposit(self, caller: Caller, rng: random.Random, user: int, asset: str, minor: int, reference: str) -> None:
        amount = self.habits.text_of(minor, asset)
        body = {"user_id": user, "asset": asset, "amount": amount, "reference": reference}
        while True:
            said = self._said(caller, "POST", "/api/v1/deposits", OPERATOR, body)
            if said.kind is Kind.ACCEPTED:
                with self._lock:
                    self.deposits[user, FUNDING, asset] += minor
                return
            if (said.kind is Kind.REFUSED and said.code != "ACCOUNT_FROZEN") or time.monotonic() > self._give_up:
                self._odd(f"deposit {reference} was not accepted: {said}")
                return
            time.sleep(rng.random() * AGAIN_S)  # as above

    def _said(self, caller: Caller, method: str, path: str, who: str, body: object, key: str = "") -> Said:
        """One request, and what its answer means."""
        answer: Answered | NoAnswer
        try:
            answer = caller.send(method, path, self._tokens[who], body, key)
        except NoAnswer as error:
            answer = error
        with self._lock:
            self.tally.requests += 1
            if isinstance(answer, NoAnswer):
                self.tally.lost[str(answer).partition(":")[0]] += 1
                return Said(Kind.LOST)
            return self._meaning(answer, f"{method} {path}")

    def _meaning(self, answer: Answered, request: str) -> Said:
        if answer.status in (200, 202):
            body = answer.body
            id_, state = ("id", "status") if PAYOUTS in request else ("req_id", "fsm_state")
            return Said(Kind.ACCEPTED, body.get(id_, ""), body.get(state, ""))
        if answer.status == 503 and answer.code != "TRANSFERS_PAUSED":
            self.tally.lost[answer.code] += 1
            return Said(Kind.LOST)
        self.tally.refusals[answer.code] += 1
        if (answer.status == 422 and answer.code in FAIR) or (answer.status, answer.code) == TOO_LATE:
            return Said(Kind.REFUSED, code=answer.code)
        self._odd(f"{request}: {answer.status} {answer.body}")
        return Said(Kind.LOST, code=answer.code)

    def _odd(self, text: str) -> None:
        self.tally.unexpected.append(text)


def make_tokens(config: Config, users: Iterable[int]) -> dict[str, str]:
    """A token for every user, and the operator's."""
    now_s = int(time.time())
    roles = {str(user): "user" for user in users} | {OPERATOR: "operator"}
    return {name: make_token(config, name, [role], now_s=now_s, seconds=TOKEN_S) for name, role in roles.items()}


def address_of(order: str) -> str:
    """Where a payout goes: an address that no other payout has."""
    return ADDRESS + hashlib.sha256(order.encode()).hexdigest()[:40]
