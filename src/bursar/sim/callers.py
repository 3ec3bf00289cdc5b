"""What callers of the simulated ledger do: errands of one or a few steps, which can be asked any number of times.

Callers are outside the process: they remember what they asked for and what was answered, and after a crash
they ask again with the same key. An errand is drawn when a caller has time for it, so that all of them are busy until
the end and none is left over alone with a long list.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from bursar.ledger import Ledger
from bursar.model.accounts import NoOverdraft, UncappedOverdraft
from bursar.model.entries import Entry, Movement, deposit, pay, withdraw
from bursar.model.envelope import Receipt
from bursar.model.errors import AccountFrozen, AccountNotEmpty, HoldClosed, KeyReused, Refusal
from bursar.sim.oracle import Violation

USERS = 6
HOT = "user:0"  # pays and is paid more often than the others
CALM, LIVELY = 1.0, 1.3  # how far the dice reach that decide what an errand is
EXPIRY = timedelta(seconds=30)

UNTOLD = ""  # a hold comes with its number, not with its hash

Step = Callable[["Client", Ledger], Awaitable[None]]


@dataclass
class Client:
    """One caller: an errand, how far it has come with it, and what was answered."""

    number: int
    steps: list[Step] = field(default_factory=list)
    done: int = 0  # of these steps
    errands: int = 0
    busy: bool = False  # in the middle of an errand
    told: dict[tuple[str, str], Receipt] = field(default_factory=dict)
    refused: set[tuple[str, str]] = field(default_factory=set)
    holds: dict[str, int] = field(default_factory=dict)
    expiring: set[str] = field(default_factory=set)  # holds that may be given back by themselves

    def draw(self, rng: random.Random, *, lively: bool) -> None:
        """Begin the next errand."""
        self.steps = errand(f"c{self.number}-{self.errands}", self.number, rng, lively=lively)
        self.done = 0
        self.busy = True
        self.errands += 1

    def next(self) -> None:
        """A step has been answered."""
        self.done += 1
        self.busy = self.done < len(self.steps)

    def hear(self, scope: str, key: str, receipt: Receipt) -> None:
        """A receipt: it must never be another one for the same key."""
        before = self.told.setdefault((scope, key), receipt)
        if before.envelope != receipt.envelope or before.id != receipt.id:
            raise Violation(f"key {key} had receipt {before.envelope}, now {receipt.envelope}")


def errand(key: str, number: int, rng: random.Random, *, lively: bool) -> list[Step]:
    """Something to do, decided by the seed. In a lively run, more often something about holds and rules."""
    dice = rng.random() * (LIVELY if lively else CALM)
    if dice < 0.86:
        return [commit(random_entry(rng, key))]
    if dice < 0.90:
        return twice(random_entry(rng, key), rng)
    if dice < 0.94:
        return hold(key, rng, expires=lively and rng.random() < 0.7)
    if dice < 0.965:
        return undo(random_entry(rng, key), again=rng.random() < 0.3)
    if dice < 0.985:
        return freeze(f"frost:{number}", key)
    if dice < CALM:
        return [compact(f"user:{below(rng, USERS)}")]
    if dice < 1.20:
        return hold(key, rng, expires=rng.random() < 0.7)
    if dice < 1.24:
        return flap(f"user:{below(rng, USERS)}")
    return [change_policy(f"frost:{number}")]


Shape = Callable[[str, str, str, str, str, str], Entry]  # payer, payee, asset, amount, small amount, key


def three_legs(payer: str, payee: str, _asset: str, amount: str, small: str, key: str) -> Entry:
    """A purchase with a discount and a fee."""
    movements = (
        Movement(payer, payee, "USD", amount),
        Movement(payee, payer, "EUR", small),
        Movement(payer, "fees", "USD", "0.10"),
    )
    return Entry(movements=movements, key=key)


SHAPES: tuple[Shape, ...] = (
    lambda payer, payee, asset, amount, small, key: pay(payer, payee, asset, amount, key=key),
    lambda payer, payee, asset, amount, small, key: pay(payer, payee, asset, small, key=key),
    lambda payer, payee, asset, amount, small, key: pay(HOT, other(payee), "USD", small, key=key),
    lambda payer, payee, asset, amount, small, key: pay(other(payer), HOT, "USD", small, key=key),
    lambda payer, payee, asset, amount, small, key: deposit("external:bank", payer, asset, amount, key=key),
    lambda payer, payee, asset, amount, small, key: withdraw(payer, "external:bank", asset, small, key=key),
    lambda payer, payee, asset, amount, small, key: pay("credit", payer, "USD", small, key=key),  # races to the floor
    lambda payer, payee, asset, amount, small, key: pay(payer, "credit", "USD", small, key=key),
    lambda payer, payee, asset, amount, small, key: pay("line", payer, "USD", small, key=key),
    lambda payer, payee, asset, amount, small, key: pay(payer, "line", "USD", small, key=key),
    three_legs,
)


def other(user: str) -> str:
    """Anybody but the hot one."""
    return "user:1" if user == HOT else user


def random_entry(rng: random.Random, key: str) -> Entry:
    """One of the shapes that entries have."""
    payer, payee = two_users(rng)
    asset = "USD" if rng.random() < 0.8 else "EUR"
    cents = 100 + below(rng, 40_000)
    shape = SHAPES[below(rng, len(SHAPES))]
    return shape(payer, payee, asset, f"{cents // 100}.{cents % 100:02}", f"{1 + below(rng, 29)}.00", key)


def two_users(rng: random.Random) -> tuple[str, str]:
    """Two different ones."""
    first = below(rng, USERS)
    return f"user:{first}", f"user:{(first + 1 + below(rng, USERS - 1)) % USERS}"


def below(rng: random.Random, limit: int) -> int:
    """What `randrange` gives, in a fifth of its time; a seed draws some five hundred."""
    return int(rng.random() * limit)


def commit(entry: Entry) -> Step:
    """Commit once, and remember the answer."""

    async def step(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        try:
            client.hear("user", entry.key, await ledger.commit(entry))
        except Refusal:
            client.refused.add(("user", entry.key))

    return step


def twice(entry: Entry, rng: random.Random) -> list[Step]:
    """The same key from two hands at once; then with another amount, which must be refused."""
    other = rng.random() < 0.5

    async def step(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        results = await asyncio.gather(ledger.commit(entry), ledger.commit(entry), return_exceptions=True)
        receipts = [r for r in results if isinstance(r, Receipt)]
        for receipt in receipts:
            client.hear("user", entry.key, receipt)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Refusal):
                raise result
        if not receipts:
            client.refused.add(("user", entry.key))

    async def misuse(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        if not other or ("user", entry.key) not in client.told:
            return
        try:
            await ledger.commit(pay("external:bank", "user:1", "USD", "0.01", key=entry.key))
        except KeyReused:
            return
        raise Violation(f"key {entry.key} was accepted for another intent")

    return [step, misuse]


def hold(key: str, rng: random.Random, *, expires: bool) -> list[Step]:
    """Authorize, confirm a part, then confirm or void the rest; unless time is up first."""
    user, payee = two_users(rng)
    part, void = f"{1 + below(rng, 8)}.00", rng.random() < 0.5

    async def authorize(client: Client, ledger: Ledger) -> None:
        expiry = EXPIRY if expires else None
        try:
            held = await ledger.authorize(user, "USD", "10.00", key=f"{key}-auth", expires_in=expiry)
        except Refusal:
            client.refused.add(("user", f"{key}-auth"))
            return
        client.holds[key] = held.id
        if expires:
            client.expiring.add(str(held.id))
        client.hear("user", f"{key}-auth", Receipt(envelope=held.id, id=UNTOLD, key=f"{key}-auth"))

    async def pay_out(client: Client, ledger: Ledger, amount: str | None, own: str) -> None:
        try:
            client.hear("user", own, await ledger.confirm(client.holds[key], payee, amount, key=own))
        except (HoldClosed, AccountFrozen):
            client.refused.add(("user", own))

    async def confirm(client: Client, ledger: Ledger) -> None:
        if key in client.holds:
            await pay_out(client, ledger, part, f"{key}-part")

    async def end(client: Client, ledger: Ledger) -> None:
        if key not in client.holds:
            return
        number = client.holds[key]
        if not void:
            await pay_out(client, ledger, None, f"{key}-rest")
            return
        try:
            client.hear("void", str(number), await ledger.void(number))
        except HoldClosed:
            if not expires:
                raise

    return [authorize, confirm, end]


def undo(entry: Entry, *, again: bool) -> list[Step]:
    """Commit and reverse; now and then twice, which is once."""

    async def reverse(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        told = client.told.get(("user", entry.key))
        if told is None:
            return
        try:
            for _ in range(2 if again else 1):
                client.hear("reverse", str(told.envelope), await ledger.reverse(told.envelope))
        except Refusal:
            return  # the money has been spent since

    return [commit(entry), reverse]


def freeze(account: str, key: str) -> list[Step]:
    """Once a freeze has returned, nothing goes out or in, until the account is thawed."""

    async def cold(client: Client, ledger: Ledger) -> None:
        await ledger.freeze(account)
        try:
            await ledger.commit(deposit("external:bank", account, "USD", "1.00", key=f"{key}-ice"))
        except AccountFrozen:
            client.refused.add(("user", f"{key}-ice"))
            return
        raise Violation(f"{account} was frozen and took money")

    async def thaw(_client: Client, ledger: Ledger) -> None:
        await ledger.unfreeze(account)

    return [cold, thaw, commit(deposit("external:bank", account, "USD", "1.00", key=f"{key}-thaw"))]


def flap(account: str) -> list[Step]:
    """Freeze an account that all callers use, and thaw it: a commit that is half-way has to begin again."""

    async def cold(_client: Client, ledger: Ledger) -> None:
        await ledger.freeze(account)

    async def thaw(_client: Client, ledger: Ledger) -> None:
        await ledger.unfreeze(account)

    return [cold, thaw]


def change_policy(account: str) -> Step:
    """A new policy, which is refused, and rolled back, as long as commits are under way."""

    async def step(_client: Client, ledger: Ledger) -> None:
        old = (await ledger.account(account)).policy
        try:
            await ledger.change_policy(account, UncappedOverdraft() if old == NoOverdraft() else NoOverdraft())
        except AccountNotEmpty:
            return

    return step


def compact(account: str) -> Step:
    """Merge small postings while others pay with them."""

    async def step(_client: Client, ledger: Ledger) -> None:
        await ledger.compact(account)

    return step
