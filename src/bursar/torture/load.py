"""The load: users who move their money in both directions, and ask again after every kind of trouble.

Every wish has a client_order_id and is sent until there is a definite answer. Some are sent by several callers at once,
some again much later, some for more than there is. Now and then money arrives from outside, under a reference that is
repeated just as stubbornly.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from bursar.api.auth import make_token
from bursar.config import Config
from bursar.staging import Answered, Caller, NoAnswer
from bursar.torture.model import ENDS, FUNDING, Ask, Kind, Place, Said
from bursar.torture.scene import Scene

TRANSFERS = "/api/v1/internal_transfer"
ASSETS = {"USDT": 6, "BTC": 8}
OPENING = 1_000_000  # smallest units, of each asset
FIRST_USER = 1_001
CALLERS = 10
TIMEOUT_S = 4.0
TOKEN_S = 7 * 86_400
THINK_S = 0.04
AGAIN_S = 0.2
# Refusals that a well-behaved caller may get here: too little money, or an account that is frozen at the moment.
FAIR = frozenset({"INSUFFICIENT_BALANCE", "ACCOUNT_FROZEN", "SOURCE_ACCOUNT_NOT_FOUND"})


def text_of(minor: int, asset: str) -> str:
    """Smallest units as the API wants them."""
    scale = 10 ** ASSETS[asset]
    return f"{minor // scale}.{minor % scale:0{ASSETS[asset]}d}"


@dataclass
class Tally:
    """What happened on the way."""

    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # why there was no answer
    refusals: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)


class Load:
    """The callers and what they know."""

    def __init__(self, scene: Scene, seed: int, users: int, callers: int = CALLERS) -> None:
        self.scene = scene
        self.asks: list[Ask] = []
        self.deposits: Counter[Place] = Counter()
        self.tally = Tally()
        self.users = range(FIRST_USER, FIRST_USER + users)
        self._seed = seed
        self._again: queue.SimpleQueue[Ask] = queue.SimpleQueue()  # asks for others to send as well
        self._lock = threading.Lock()
        self._over = threading.Event()  # no new wishes
        self._give_up = float("inf")
        self._tokens: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._call, args=(n,), name=f"caller-{n}", daemon=True) for n in range(callers)
        ]

    def open(self) -> None:
        """Give every user something to move."""
        make_tokens(self._tokens, self.scene.config, self.users)
        caller = Caller(lambda: self.scene.address(0), timeout_s=TIMEOUT_S)
        for user in self.users:
            for asset in ASSETS:
                self._deposit(caller, random.Random(user), user, asset, OPENING, f"opening-{user}-{asset}")

    def start(self) -> None:
        """Let them loose."""
        for thread in self._threads:
            thread.start()

    def finish(self, timeout_s: float) -> None:
        """No new wishes; everybody asks until there is an answer, or the time is up."""
        self._give_up = time.monotonic() + timeout_s
        self._over.set()
        for thread in self._threads:
            thread.join()

    def settle(self, timeout_s: float, sample: int) -> None:
        """When everything is up and nothing is on its way: ask again where a lost request might have been carried out
        after all, and for some others, which must get the answer that they got before."""
        self._give_up = time.monotonic() + timeout_s
        rng = random.Random(self._seed)
        caller = Caller(lambda: self.scene.address(0), timeout_s=TIMEOUT_S)
        unsure = [ask for ask in self.asks if not ask.is_settled]
        known = [ask for ask in self.asks if ask.was(Kind.ACCEPTED)]
        for ask in unsure:
            while not ask.is_settled and time.monotonic() < self._give_up:
                # What was said before is about requests that are all dead by now; only the next answer counts.
                ask.said = []
                self._until_definite(caller, rng, ask)
        for ask in rng.sample(known, min(sample, len(known))):
            self._until_definite(caller, rng, ask)

    def _call(self, number: int) -> None:
        try:
            self._ask_and_ask(number)
        except Exception as error:
            self._odd(f"caller {number} fell over: {error!r}")  # a load that grew less would prove less
            raise

    def _ask_and_ask(self, number: int) -> None:
        rng = random.Random(f"{self._seed}:{number}")
        place = [number]
        caller = Caller(lambda: self.scene.address(place[0]), timeout_s=TIMEOUT_S)
        made = 0
        while not self._over.is_set():
            place[0] = rng.randrange(len(self.scene.apis))
            try:
                self._until_definite(caller, rng, self._again.get_nowait())
                continue
            except queue.Empty:
                pass
            made += 1
            if rng.random() < 0.02:
                user, asset = rng.choice(self.users), rng.choice(list(ASSETS))
                self._deposit(caller, rng, user, asset, rng.randint(1, OPENING // 10), f"wire-{number}-{made}")
                continue
            ask = self._wish(rng, f"{number}-{made}")
            if rng.random() < 0.15:  # several callers at once
                for _ in range(rng.randint(1, 3)):
                    self._again.put(ask)
            self._until_definite(caller, rng, ask)
            if rng.random() < 0.05 and len(self.asks) > 50:  # once more, long after
                self._again.put(rng.choice(self.asks))
            self._over.wait(rng.random() * 2 * THINK_S)

    def _wish(self, rng: random.Random, order: str) -> Ask:
        source, target = rng.sample(self.scene.accounts, 2)
        kind = rng.random()
        # Mostly small; sometimes so much that two at once can't both be right; sometimes more than there ever is.
        most = OPENING // 100 if kind < 0.7 else OPENING if kind < 0.95 else 10**12
        least = 10**11 if most == 10**12 else 1
        user = rng.choice(self.users)
        ask = Ask(order, user, source, target, rng.choice(list(ASSETS)), rng.randint(least, most))
        with self._lock:
            self.asks.append(ask)
        return ask

    def _until_definite(self, caller: Caller, rng: random.Random, ask: Ask) -> None:
        body = {
            "from": ask.source,
            "to": ask.target,
            "asset": ask.asset,
            "amount": text_of(ask.minor, ask.asset),
            "client_order_id": ask.order,
        }
        while True:
            said = self._said(caller, "POST", TRANSFERS, str(ask.user), body)
            ask.said.append(said)
            if said.kind is not Kind.LOST:
                break
            if time.monotonic() > self._give_up:
                return
            time.sleep(rng.random() * AGAIN_S)  # a caller waits before it asks again, or it would do nothing else
        if said.kind is Kind.ACCEPTED and said.state not in ENDS and rng.random() < 0.3:
            ask.said.append(self._said(caller, "GET", f"{TRANSFERS}/{said.req_id}", str(ask.user), None))

    def _deposit(self, caller: Caller, rng: random.Random, user: int, asset: str, minor: int, reference: str) -> None:
        body = {"user_id": user, "asset": asset, "amount": text_of(minor, asset), "reference": reference}
        while True:
            said = self._said(caller, "POST", "/api/v1/deposits", "operator", body)
            if said.kind is Kind.ACCEPTED:
                with self._lock:
                    self.deposits[user, FUNDING, asset] += minor
                return
            if (said.kind is Kind.REFUSED and said.code != "ACCOUNT_FROZEN") or time.monotonic() > self._give_up:
                self._odd(f"deposit {reference} was not accepted: {said}")
                return
            time.sleep(rng.random() * AGAIN_S)  # as above

    def _said(self, caller: Caller, method: str, path: str, who: str, body: object) -> Said:
        """One request, and what its answer means."""
        answer: Answered | NoAnswer
        try:
            answer = caller.send(method, path, self._tokens[who], body)
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
            return Said(Kind.ACCEPTED, body.get("req_id", ""), body.get("fsm_state", ""))
        if answer.status == 503 and answer.code != "TRANSFERS_PAUSED":
            self.tally.lost[answer.code] += 1
            return Said(Kind.LOST)
        self.tally.refusals[answer.code] += 1
        if answer.status == 422 and answer.code in FAIR:
            return Said(Kind.REFUSED, code=answer.code)
        self._odd(f"{request}: {answer.status} {answer.body}")
        return Said(Kind.LOST, code=answer.code)

    def _odd(self, text: str) -> None:
        self.tally.unexpected.append(text)


def make_tokens(tokens: dict[str, str], config: Config, users: range) -> None:
    """A token for every user, and the operator's."""
    now_s = int(time.time())
    for user in users:
        tokens[str(user)] = make_token(config, str(user), ["user"], now_s=now_s, seconds=TOKEN_S)
    tokens["operator"] = make_token(config, "torturer", ["operator"], now_s=now_s, seconds=TOKEN_S)
