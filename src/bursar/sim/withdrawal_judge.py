"""What must be true of withdrawals: who allowed each payment, and where all the money is.

`Decisions` follows the rules as they change, from the rows, and judges each withdrawal at two moments: when its payout
is ordered and when the first attempt is made. By some rules that were in force within the last moment, it must be
allowed: by the mandate, or by enough people who have really signed exactly this payment. It asks none of the code that
decides; who is one person, and what the screening hook has said, the simulator knows.

`WithdrawalJudge` looks at one run when it is over, beside what must be true of payouts.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from bursar.flows.payouts.machine import PENDING, PROCESSING
from bursar.flows.payouts.payout import FEES, SUSPENSE, Payout
from bursar.flows.transfers.request import funding_account
from bursar.flows.withdrawals.machine import APPROVED, COMPLETED, QUEUED
from bursar.flows.withdrawals.policy import AddressList, Approver, WithdrawalPolicy
from bursar.flows.withdrawals.withdrawal import Withdrawal
from bursar.model.authorizations import Authorization, Payment
from bursar.rails.chain import Decoded
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_chains import CHAIN_NAME
from bursar.sim.payout_judge import Judge
from bursar.sim.payout_town import Town
from bursar.sim.process import EPOCH_US
from bursar.sim.withdrawal_deposits import SECTION, DepositJudge, Strangers
from bursar.sim.withdrawal_plan import ALL, FUNDS, USERS, UserRequest, person_of
from bursar.sim.withdrawal_rules import BASE, OWNERS, USDT
from bursar.store.sqlite.calls import amount_out

MOMENT_S: Final = 1.0  # between what a decision rests on and its commit
DAY_US: Final = 86_400_000_000
DOCUMENTS: Final = """SELECT kind, name, body FROM documents d
    WHERE kind IN ('withdrawal_policy', 'address_list', 'approver')
    AND version = (SELECT max(version) FROM documents WHERE kind = d.kind AND name = d.name)"""
CHANGES: Final = """SELECT (SELECT max(number) FROM documents), (SELECT count(*) FROM accounts),
    (SELECT group_concat(name, char(10)) FROM pauses WHERE name LIKE 'withdrawals%')"""
FROZEN: Final = """SELECT path FROM accounts a WHERE status <> 'active'
    AND version = (SELECT max(version) FROM accounts WHERE id = a.id)"""
BOOK: Final = """SELECT json_extract(body, '$.added_us') FROM flow_rows
    WHERE flow = 'withdrawal_addresses' AND kind = 'address' AND state = 'held' AND key = ?"""


@dataclass(frozen=True)
class InForce:
    """The rules at one moment."""

    since_s: float = 0.0
    ahead_us: int = 0  # of the clock
    policy: WithdrawalPolicy = BASE
    deny: frozenset[str] = frozenset()
    keys: Mapping[str, str] = field(default_factory=dict)  # of who may approve, by name
    frozen: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()


class Decisions:
    """The rules of a run as they change, and whether what was ordered and begun was allowed by them."""

    def __init__(self, now_s: Callable[[], float], said: Mapping[str, set[str]]) -> None:
        """`said`: the verdicts that the screening hook has signed, by withdrawal."""
        self.now_s = now_s
        self.said = said
        self.ahead_us = 0
        self.began: dict[str, Payment] = {}  # payouts whose first attempt was allowed
        self.policies: list[WithdrawalPolicy] = []  # all that there were
        self.changes = 0
        self._rules = [InForce()]
        self._seen: tuple[object, ...] = ()

    def look(self, db: sqlite3.Connection) -> None:
        """Read the rules, if they have changed; forget those that were replaced some time ago."""
        changes = db.execute(CHANGES).fetchone()
        switches = frozenset((changes[2] or "").split("\n")) - {""}
        seen = (*changes, self.ahead_us)
        if seen == self._seen:
            return
        self._seen = seen
        now_s = self.now_s()
        if not self.policies:
            self._rules = [self._read(db, switches)]
            return
        fresh = [rules for rules, after in zip(self._rules, self._rules[1:], strict=False) if _recent(after, now_s)]
        self._rules = [*fresh, self._rules[-1], self._read(db, switches)]
        self.changes += 1

    def _read(self, db: sqlite3.Connection, switches: frozenset[str]) -> InForce:
        policy, deny, approvers = BASE, set[str](), dict[str, Approver]()
        for kind, name, body in db.execute(DOCUMENTS):
            match kind:
                case "withdrawal_policy":
                    policy = msgspec.json.decode(body, type=WithdrawalPolicy)
                case "address_list":
                    deny |= set(msgspec.json.decode(body, type=AddressList).deny)
                case _:
                    approvers[name] = msgspec.json.decode(body, type=Approver)
        if policy not in self.policies:
            self.policies.append(policy)
        times = Counter(one.public_key for one in approvers.values())
        keys = {name: one.public_key for name, one in approvers.items() if one.active and times[one.public_key] == 1}
        frozen = frozenset(path for (path,) in db.execute(FROZEN))
        return InForce(self.now_s(), self.ahead_us, policy, frozenset(deny), keys, frozen, switches)

    # --- judging -----------------------------------------------------------------------------------------------------

    def judge(self, db: sqlite3.Connection, flow: str, id_: str, steps: list[tuple[object, ...]]) -> None:
        """What a record that has just moved did, if that is what needs to be allowed."""
        if not steps:
            return
        _, source, event, target = steps[-1]
        if event != "SUCCESS" or (source, target) not in ((APPROVED, QUEUED), (PENDING, PROCESSING)):
            return
        (text,) = db.execute("SELECT body FROM records WHERE flow = ? AND id = ?", (flow, id_)).fetchone()
        if flow == "withdrawals":
            body = msgspec.json.decode(text, type=Withdrawal)
            authorization = Authorization(mandate=body.mandate, approvals=() if body.mandate else body.approvals)
            self._allowed(db, id_, body, body.payment, authorization, "ordered")
            return
        payout = msgspec.json.decode(text, type=Payout)
        if payout.attempts > 1 or not payout.parent:
            return  # its first attempt was judged; or only the signer's log remembers what it was for
        parent = payout.parent.partition("/")[2]
        (text,) = db.execute("SELECT body FROM records WHERE flow = 'withdrawals' AND id = ?", (parent,)).fetchone()
        body = msgspec.json.decode(text, type=Withdrawal)
        if payout.payment != body.payment:
            raise Violation(f"W20: {id_} pays {payout.payment}, and {parent} is for {body.payment}")
        self._allowed(db, parent, body, payout.payment, payout.authorization, "begun")
        self.began[id_] = payout.payment

    def _allowed(
        self, db: sqlite3.Connection, id_: str, body: Withdrawal, payment: Payment, by: Authorization, what: str
    ) -> None:
        now_s = self.now_s()
        afters: list[InForce | None] = [*self._rules[1:], None]
        whys = []
        for rules, after in zip(self._rules, afters, strict=True):
            if after is None or _recent(after, now_s):
                why = self._refused(db, id_, body, payment, by, rules)
                if not why:
                    return
                whys.append(why)
        raise Violation(f"{id_} was {what} at {now_s:.3f} s although {'; '.join(dict.fromkeys(whys))}")

    def _refused(
        self, db: sqlite3.Connection, id_: str, body: Withdrawal, payment: Payment, by: Authorization, rules: InForce
    ) -> str:
        """Why these rules don't allow it; "": they do."""
        policy, amount = rules.policy, int(payment.amount)
        now_us = EPOCH_US + int(self.now_s() * 1e6) + rules.ahead_us
        row = db.execute(BOOK, (f"{body.user}/{payment.chain}/{payment.to}",)).fetchone()
        cooled = row is not None and row[0] + policy.cooling_s * 10**6 <= now_us
        verdict = str(body.screening.verdict)
        if body.cancelled or body.rejected:
            return f"it was {'cancelled' if body.cancelled else 'rejected'}"
        if off := rules.switches & {"withdrawals", *(f"withdrawals {which}" for which in _switches(body.user))}:
            return f"{', '.join(off)} are switched off"
        if payment.account in rules.frozen:
            return "the account is frozen"
        if not policy.enabled or amount > int(policy.maximum) * USDT:
            return "the policy offers nothing of this amount"
        if payment.to in rules.deny or verdict == "denied":
            return "its address is denied"
        if verdict in ("clear", "review") and verdict not in self.said[id_]:
            return f"the screening hook has never said {verdict}"
        if policy.screening and not verdict:
            return "it was not screened"
        if policy.address_book == "required" and not cooled:
            return "its address is not in the book, or too new"
        if now_us - MOMENT_S * 1e6 >= payment.expires_us:
            return "it has expired"
        if by.mandate:
            return self._not_by_mandate(body, by.mandate, amount, policy, cooled=cooled)
        people = {OWNERS[key] for approval in by.approvals if (key := self._signed(approval, payment, rules))}
        needed = 2 if amount > int(policy.dual_above) * USDT else 1
        people.discard(person_of(payment.requester))
        return "" if len(people) >= needed else f"{len(people)} people have approved it, and {needed} are needed"

    def _not_by_mandate(
        self, body: Withdrawal, mandate: str, amount: int, policy: WithdrawalPolicy, *, cooled: bool
    ) -> str:
        if mandate != policy.mandate or amount > int(policy.auto_approve_max) * USDT:
            return "its amount is above what is approved automatically"
        if body.over_all or body.returned:
            return "it was to be looked at by people"
        if policy.screening and body.screening.verdict != "clear":
            return "the screening was not clear"
        return (
            "" if cooled or policy.address_book != "auto_only" else "its address is new, and people have to approve it"
        )

    def _signed(self, approval: object, payment: Payment, rules: InForce) -> str:
        """The key that an approval of this payment was really made with, if its name may approve by it."""
        name, signature = getattr(approval, "approver", ""), getattr(approval, "signature", "")
        key = rules.keys.get(name, "")
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), payment.canonical())
        except (InvalidSignature, ValueError):
            return ""
        return key


def _switches(user: int) -> tuple[str, ...]:
    """What a switch of this withdrawal is called, but for how all of them begin."""
    return f"of user {user}", "of USDT", f"on {CHAIN_NAME}"


def _recent(after: InForce, now_s: float) -> bool:
    """Whether the rules that these have replaced were in force a moment ago."""
    return now_s - after.since_s <= MOMENT_S


# --- when it is over -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A withdrawal as the database has it."""

    id: str
    state: str
    body: Withdrawal
    created_us: int


class WithdrawalJudge(Judge):
    """Looks at one run when it is over."""

    def __init__(
        self,
        oracle: Oracle,
        town: Town,
        user_requests: Iterable[tuple[UserRequest, str]],
        decisions: Decisions,
        lost: list[Payment],
        strangers: Strangers,
    ) -> None:
        """`user_requests` with what their users were told; `lost`: what a database that was put back has forgotten."""
        rows = oracle.db.execute("SELECT id, state, body, created_at FROM records WHERE flow = 'withdrawals'")
        self.withdrawals = [
            Ended(id_, state, msgspec.json.decode(body, type=Withdrawal), at) for id_, state, body, at in rows
        ]
        self.user_requests = list(user_requests)
        self.decisions = decisions
        known = [one.body.payment for one in self.withdrawals]
        self.lost = [payment for payment in lost if payment.to not in {one.to for one in known}]
        super().__init__(oracle, town, {one.to: int(one.amount_raw) for one in (*known, *self.lost)})
        self.deposits = DepositJudge(self, strangers)
        self.wallets |= {f"{SECTION}-{user}": address for user, address in strangers.told.items()}

    def everything(self) -> None:
        """Of payouts, of what users were told, and of where the money is."""
        super().everything()
        self.deposits.everything()
        self.requests()
        self.payments()
        self.sums()
        self.limits()

    def requests(self) -> None:
        """One withdrawal for each request that was taken, exactly as it was made; none for one that was refused."""
        by_address: defaultdict[str, list[Ended]] = defaultdict(list)
        for one in self.withdrawals:
            by_address[one.body.payment.to].append(one)
        for user_request, told in self.user_requests:
            found = by_address.pop(user_request.to, [])
            if len(found) > 1:
                raise Violation(f"{user_request.key} was asked for once, and is {', '.join(one.id for one in found)}")
            if told.startswith("refused"):
                if found:
                    raise Violation(f"{user_request.key} was {told}, and is {found[0].id}")
                continue
            if [one.id for one in found] != [told]:
                raise Violation(f"{user_request.key} is {told}, and the database has {[one.id for one in found]}")
            (one,) = found
            payment = one.body.payment
            if (
                payment.requester != (user_request.requester or str(user_request.user))
                or one.body.user != user_request.user
            ):
                raise Violation(f"{one.id} is of {one.body.user} by {payment.requester}, not as {user_request}")
            if user_request.amount != ALL and int(payment.amount) != _minor(user_request.amount):
                raise Violation(f"{one.id} is of {payment.amount}, not of {user_request.amount}")
            if user_request.max_fee and int(payment.fee) > _minor(user_request.max_fee):
                raise Violation(f"W42: {one.id} costs {payment.fee}, above {user_request.max_fee}")
            if user_request.cancelled and one.state == COMPLETED and not one.body.adopted:
                raise Violation(f"{one.id} was called off before it was ordered, and was paid")
        if by_address:
            raise Violation(f"no user has asked for what goes to {', '.join(by_address)}")

    def payments(self) -> None:
        """What took effect was allowed when it began; a withdrawal is completed if, and only if, it was paid."""
        begun = {payment.to: payment for payment in self.decisions.began.values()}
        for to in self.wanted:
            for effect in self.town.effects(to):
                if to not in begun or int(begun[to].amount_raw) != effect.amount:
                    raise Violation(f"{effect.amount} went to {to}, and no decision has allowed that")
        for one in self.withdrawals:
            paid = len(self.town.effects(one.body.payment.to))
            if paid != (one.state == COMPLETED):
                raise Violation(f"{one.id} is {one.state}, and was paid {paid} times")
            if paid and (one.body.rejected or one.body.cancelled) and not one.body.adopted:
                raise Violation(f"{one.id} was paid although it was rejected or cancelled")

    def sums(self) -> None:
        """Of each user: what is held, available, paid and kept as fees is what there was."""
        spent: Counter[str] = Counter()
        fees = 0
        for payment in (*(one.body.payment for one in self.withdrawals), *self.lost):
            if self.town.effects(payment.to):
                spent[payment.account] += int(payment.amount) + int(payment.fee)
                fees += int(payment.fee)
        for one in self.payouts:  # put back from the signer's log when the account could not pay it any more
            if one.body.booked_from == SUSPENSE and one.is_paid:
                spent[one.body.payment.account] -= int(one.body.payment.amount) + int(one.body.payment.fee)
        held = self._held()
        for user in range(USERS):
            account = funding_account(user)
            has = self.balance(account, "USDT") + held[account]
            had = FUNDS * USDT + self.deposits.credited[user, "USDT"]
            if has + spent[account] != had:
                raise Violation(f"I6: {account} has {has} and was paid {spent[account]} of {had}")
        if (kept := self.balance(FEES, "USDT")) != fees:
            raise Violation(f"I6: {kept} are kept as fees, and withdrawals that were paid cost {fees}")

    def is_between_wallets(self, sender: str, does: Decoded) -> bool:
        return self.deposits.is_between_wallets(sender, does)

    def _held(self) -> Counter[str]:
        found: Counter[str] = Counter()
        sql = """SELECT a.path, h.remaining FROM holds h JOIN accounts a ON a.id = h.account AND a.version = 1
                 WHERE h.state = 'open'"""
        for path, remaining in self.db.execute(sql):
            found[path] += amount_out(remaining)
        return found

    def limits(self) -> None:
        """What was taken from one user, and from all, within a day was within what the policy allowed (W44)."""
        for_user = max(_limit(policy.daily_user) for policy in self.decisions.policies)
        for_all = max(_limit(policy.daily_all) for policy in self.decisions.policies)
        used: Counter[tuple[str, int]] = Counter()
        for one in self.withdrawals:
            day, amount = one.created_us // DAY_US, int(one.body.payment.amount)
            used[str(one.body.user), day] += amount
            used["", day] += 0 if one.body.over_all else amount
        for (user, _), amount in used.items():
            if amount > (for_user if user else for_all):
                raise Violation(f"W44: {amount} were taken in a day from {f'user {user}' if user else 'all'}")


def _limit(text: str) -> int:
    return int(text) * USDT if text else 10**18


def _minor(text: str) -> int:
    whole, _, part = text.partition(".")
    return int(whole) * USDT + int(part.ljust(6, "0") or 0)
