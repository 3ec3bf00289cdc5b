"""The people of the withdrawals scenario: users who ask and call off, approvers, and operators; and the screening hook.

Some approvers are wicked. What they hand in goes to the front door, and past it, straight into a record's inbox, as a
server that was broken into could do. The signer and the decision must not count it.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from bursar.flows.transfers.request import funding_account
from bursar.flows.withdrawals import WithdrawalRequest, Withdrawals, WithdrawalView
from bursar.flows.withdrawals.addresses import AddressRefused
from bursar.flows.withdrawals.machine import APPROVE, CANCELLED, UNDECIDED
from bursar.flows.withdrawals.screening import Screener, answer_signature
from bursar.flows.withdrawals.switches import EVERYTHING, of_asset, of_chain, of_user
from bursar.model.authorizations import Approval, Payment
from bursar.model.errors import BursarError, IdempotencyKeyReused, Refusal
from bursar.sim.kernel import Kernel
from bursar.sim.oracle import Violation
from bursar.sim.payout_chains import CHAIN_NAME
from bursar.sim.payout_people import Office
from bursar.sim.payout_town import Town
from bursar.sim.process import Process
from bursar.sim.withdrawal_plan import USERS, Plan, UserRequest, person_of
from bursar.sim.withdrawal_rules import KEYS, Rules

AGAIN_S: Final = 0.3  # until a user asks again whose request failed for a reason that passes
SECRET: Final = b"the secret of the screening hook"
SETTLED_AFTER: Final = 3  # calm looks: until then what was ordered goes on under the rules as they are
STOPPED_S: Final = 3.0  # that payouts are stopped before the rules change
COOLING_S_MAX: Final = 60.0  # that a healed run waits for an address whose age a jump of the clock has changed


# --- users -----------------------------------------------------------------------------------------------------------


class User:
    """One user at one server. What the user was told outlives it."""

    def __init__(self, withdrawals: Withdrawals, process: Process, town: Town, told: dict[str, str]) -> None:
        self.withdrawals = withdrawals
        self.process = process
        self.town = town
        self.told = told

    async def ask(self, user_request: UserRequest) -> None:
        """Ask until there is an answer; then again, if the request says so, and call it off."""
        if not self.town.calm:
            await self.process.ports.sleep(user_request.after_s)
        wanted = request_of(user_request)
        first = await self._answer(user_request, wanted)
        if user_request.key not in self.told:
            self.told[user_request.key] = first
        elif (
            user_request.again
            and self.told[user_request.key].startswith("wd-")
            and first != self.told[user_request.key]
        ):
            raise Violation(
                f"{user_request.key} was {self.told[user_request.key]}, and is {first} when it is asked again"
            )
        if user_request.again and first.startswith("wd-"):
            await self._ask_otherwise(user_request, wanted)
        if user_request.cancel_s is not None and first.startswith("wd-"):
            if not self.town.calm:
                await self.process.ports.sleep(user_request.cancel_s)
            await self._cancel(user_request, first)

    async def _answer(self, user_request: UserRequest, wanted: WithdrawalRequest) -> str:
        """The withdrawal's id, or why it was refused."""
        while True:
            try:
                if user_request.booked and self.town_has_book:
                    with contextlib.suppress(AddressRefused):
                        await self.withdrawals.addresses.add(
                            str(user_request.user), CHAIN_NAME, user_request.to, "mine"
                        )
                return (
                    await self.withdrawals.request(wanted, key=user_request.key, requester=user_request.requester)
                ).id
            except Refusal as refused:
                return f"refused {getattr(refused, 'reason', refused.code)}"
            except BursarError:
                await self.process.ports.sleep(AGAIN_S)

    async def _ask_otherwise(self, user_request: UserRequest, wanted: WithdrawalRequest) -> None:
        """The same key for another amount is refused, and is no second withdrawal."""
        other = msgspec.structs.replace(wanted, amount="3.75")
        try:
            await self.withdrawals.request(other, key=user_request.key)
        except IdempotencyKeyReused:
            return
        except BursarError:
            return
        raise Violation(f"{user_request.key} was taken a second time, for another amount")

    async def _cancel(self, user_request: UserRequest, id_: str) -> None:
        with contextlib.suppress(BursarError):
            before = await self.withdrawals.view(id_)
            after = await self.withdrawals.cancel(id_, actor=f"user-{user_request.user}", user=user_request.user)
            if before.state in UNDECIDED and after.state in (*UNDECIDED, CANCELLED):
                user_request.cancelled = True

    @property
    def town_has_book(self) -> bool:
        """Whether the policy of this run looks at the address book."""
        plan = self.town.plan
        return isinstance(plan, Plan) and plan.variant in ("cooling", "listed")


def request_of(user_request: UserRequest) -> WithdrawalRequest:
    """What the user asks for."""
    return WithdrawalRequest(
        user=user_request.user,
        asset="USDT",
        chain=CHAIN_NAME,
        to=user_request.to,
        amount=user_request.amount,
        max_fee=user_request.max_fee,
    )


# --- approvers -------------------------------------------------------------------------------------------------------


class Approvers:
    """The people who approve, at one server."""

    def __init__(self, withdrawals: Withdrawals, town: Town, dice: random.Random, now_s: Callable[[], float]) -> None:
        self.withdrawals = withdrawals
        self.town = town
        self.dice = dice
        self.now_s = now_s

    async def look(self) -> None:
        """Each of them looks at what waits."""
        found, _ = await self.withdrawals.page(states=UNDECIDED, limit=20)
        for view in found:
            with contextlib.suppress(BursarError):
                await self._judge(view)

    async def _judge(self, view: WithdrawalView) -> None:
        waits = view.state == "waiting"
        if self.town.calm:
            if waits and not view.approvals_missing and self.now_s() > COOLING_S_MAX:
                await self.withdrawals.cancel(view.id, actor="ann", reason="its address is still too new")
            for name in ("ann", "ben", "eve") if waits and view.approvals_missing else ():
                await self._approve(view, name)
            return
        dice = self.dice
        for name, share in (("ann", 0.5), ("ben", 0.5), ("eve", 0.15), ("rex", 0.1)):
            if waits and name not in view.approvals and dice.random() < share:
                await self._approve(view, name)
        if dice.random() < 0.04:
            await self.withdrawals.reject(view.id, actor="rex", reason="it looks strange")
        if dice.random() < 0.3:
            await self._wicked(view)

    async def _approve(self, view: WithdrawalView, name: str) -> None:
        with contextlib.suppress(BursarError):
            await self.withdrawals.approve(view.id, signed(name, await self.withdrawals.payment(view.id)))

    async def _wicked(self, view: WithdrawalView) -> None:
        """Something that must count for nothing, or for one person."""
        past, forged = self.dice.random() < 0.5, self._forged(await self.withdrawals.payment(view.id))
        for approval in forged:
            with contextlib.suppress(BursarError):
                if past:
                    record = await self.withdrawals.engine.record("withdrawals", view.id)
                    evidence = {"approval": msgspec.to_builtins(approval)}
                    await self.withdrawals.engine.signal(
                        record, APPROVE, approval.approver, evidence, sender=f"forged {approval.signature[:8]}"
                    )
                else:
                    await self.withdrawals.approve(view.id, approval)

    def _forged(self, payment: Payment) -> tuple[Approval, ...]:
        replace, more = msgspec.structs.replace, str(int(payment.amount) * 2)
        what = self.dice.choice(("names", "twice", "replayed", "amount", "address", "stolen name", "no key", "nothing"))
        if person_of(payment.requester) == "mallory" and self.dice.random() < 0.5:
            what = "own"
        match what:
            case "own":  # what she has asked for herself, under another name
                return (signed("mallory", payment),)
            case "names":  # one person, two names with a key each
                return signed("mallory", payment), signed("mal.lory", payment)
            case "twice":
                return signed("mallory", payment), signed("mallory", payment)
            case "replayed":  # an approval of another payout
                return (signed("ann", replace(payment, payout="po-0")),)
            case "amount":
                return (signed("ben", replace(payment, amount=more, amount_raw=more)),)
            case "address":
                return (signed("ben", replace(payment, to=self.town.kind.address(0xBAD))),)
            case "stolen name":
                return (Approval(approver="ann", signature=signed("mallory", payment).signature),)
            case "no key":
                return (Approval(approver="nemo", signature=signed("mallory", payment).signature),)
            case _:
                return Approval(approver="ANN", signature="00" * 64), Approval(approver="ben", signature="")


def signed(name: str, payment: Payment) -> Approval:
    """The approval of a payment with the key of that name."""
    return Approval(approver=name, signature=KEYS[name].sign(payment.canonical()).hex())


# --- operators -------------------------------------------------------------------------------------------------------


class Desk:
    """Operators of withdrawals, at one server; beside those of payouts."""

    def __init__(self, withdrawals: Withdrawals, office: Office, rules: Rules, addresses: list[str]) -> None:
        self.withdrawals = withdrawals
        self.office = office
        self.rules = rules
        self.addresses = addresses
        self.town = office.town
        self.dice = office.dice
        self.calm_looks = 0

    async def look(self) -> None:
        """Meddle; in calm times, put everything right."""
        with contextlib.suppress(BursarError):
            await self.office.look()
        with contextlib.suppress(BursarError):
            if self.town.calm:
                await self.unapproved()
                self.calm_looks += 1
                if self.calm_looks == SETTLED_AFTER:
                    await self.settle()
            elif not self.town.calm and self.town.plan.meddled:
                await self.meddle()

    async def meddle(self) -> None:
        """Something that people do to withdrawals."""
        dice, withdrawals = self.dice, self.withdrawals
        what = dice.choice(("rules", "rules", "stop", "stop", "switch", "freeze", "unfreeze"))
        account = funding_account(dice.randrange(USERS))
        match what:
            case "rules":
                await self.rules.change(self.addresses)
            case "switch":
                switch = dice.choice(
                    (EVERYTHING, of_user(dice.randrange(USERS)), of_asset("USDT"), of_chain(CHAIN_NAME))
                )
                await withdrawals.pause(switch, actor="ann", reason="drill")
            case "freeze":
                await withdrawals.ledger.freeze(account)
            case "unfreeze":
                await withdrawals.ledger.unfreeze(account)
            case _:  # payouts are ordered, and stay where they are while the rules change
                await self.office.operators.pause("flow", "payouts", actor="ann", reason="drill")
                await withdrawals.engine.ports.sleep(STOPPED_S)
                await self.rules.change(self.addresses)

    async def unapproved(self) -> None:
        """End what documents allow, and the signer's own policy does not: it would wait for ever."""
        for one in await self.office.payouts.list(states=("pending",), limit=20):
            if one.error.startswith("NOT_APPROVED"):
                await self.office.payouts.cancel(one.id, actor="ann", reason="the signer does not know who approved it")

    async def settle(self) -> None:
        """Rules as they were, accounts thawed. Switches are lifted by the operators of payouts."""
        await self.rules.settle()
        for user in range(USERS):
            account = await self.withdrawals.ledger.account(funding_account(user))
            if account.status != "active":
                await self.withdrawals.ledger.unfreeze(account.path)


# --- the screening hook ----------------------------------------------------------------------------------------------


@dataclass
class Hook:
    """The screening hook. It knows the truth of each address; what it answers is another matter."""

    kernel: Kernel
    town: Town

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.kernel.seed} hook")
        self.said: defaultdict[str, set[str]] = defaultdict(set)  # withdrawal → verdicts that it has signed
        self.lied = 0

    def screener(self, process: Process) -> Screener:
        """As one server asks it."""
        ports = process.ports

        async def post(_url: str, _headers: Mapping[str, str], body: bytes, timeout_s: float) -> tuple[int, bytes]:
            await ports.sleep(0.02)
            mood = "answers" if self.town.calm or self.dice.random() < 0.6 else self.dice.choice(MOODS)
            if mood == "hangs":
                await ports.sleep(timeout_s)
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            if mood == "away":
                return 503, b""
            return 200, self._answer(body, mood)

        return Screener(
            url="http://hook",
            secret=SECRET,
            post=post,
            now_us=ports.now_us,
            token=ports.token,
            timeout_s=2.0,
        )

    def verdict(self, to: str) -> str:
        """The truth about an address."""
        return random.Random(f"{self.kernel.seed} {to}").choice(("clear", "clear", "clear", "review", "denied"))

    def _answer(self, body: bytes, mood: str) -> bytes:
        """A signed answer; or one that says that all is clear, and is not the hook's."""
        question = json.loads(body)
        verdict = self.verdict(question["to"])
        if mood == "answers":
            self.said[question["withdrawal"]].add(verdict)
            return _signed_answer(SECRET, body, verdict)
        self.lied += 1
        match mood:
            case "unsigned":
                return json.dumps({"verdict": "clear", "reason": "", "signature": ""}).encode()
            case "other question":
                return _signed_answer(SECRET, body.replace(question["nonce"].encode(), b"0" * 32), "clear")
            case _:
                return _signed_answer(b"another secret", body, "clear")


MOODS: Final = ("hangs", "away", "unsigned", "other question", "other secret")


def _signed_answer(secret: bytes, question: bytes, verdict: str) -> bytes:
    signature = answer_signature(secret, question, verdict, "")
    return json.dumps({"verdict": verdict, "reason": "", "signature": signature}).encode()
