"""The story of the demo of withdrawals: who asks for what, who decides, and what must have come of it.

Users' money arrives from the chains. They ask over HTTP, people decide at the command line, and the server is killed
while payments are signed that no node has. In the end the chains are asked what has arrived, and the money of each user
is added up.

Not here: how money arrives (withdrawal_deposits), what it prints at the end (withdrawals).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Final

from bursar.audit.finding import Finding
from bursar.demo.withdrawal_deposits import UNDER_REVIEW, Deposits, rules_in_words
from bursar.demo.withdrawal_setting import (
    APPROVERS,
    AUTO_MAX,
    COOLING_S,
    DUAL_ABOVE,
    OPERATOR,
    TOKEN,
    USERS,
    Setting,
)
from bursar.testbed.look import audited

PATIENCE_S: Final = 60.0
LOOK_S: Final = 0.2
SIGNED: Final = "confirming"  # a payout whose bytes are stored, and were sent or may have been
ENDED: Final = ("completed", "failed", "rejected", "cancelled")
UNIT: Final = Decimal(10**6)

Tell = Callable[..., None]  # lines of the story
Watch = Callable[[str], None]  # what is awaited
View = dict[str, Any]  # a withdrawal as the API shows it to staff


@dataclass(frozen=True)
class Money:
    """What became of the money of a user, in units of the token. Each figure comes from another place."""

    user: int
    received: Decimal  # that the chain says has arrived at the user's deposit address
    available: Decimal
    held: Decimal
    under_review: Decimal  # in suspense
    paid: Decimal  # that the chains say has arrived at the user's addresses
    fees: Decimal

    @property
    def adds_up(self) -> bool:
        """Whether nothing is missing, and nothing too much."""
        return self.received == self.available + self.held + self.under_review + self.paid + self.fees


@dataclass
class Report:
    """What happened, and whether it is as it must be."""

    deposits: list[View] = field(default_factory=list)
    sweeps: list[View] = field(default_factory=list)
    withdrawals: list[View] = field(default_factory=list)
    money: list[Money] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.wrong and bool(self.findings) and all(f.ok and f.judged for f in self.findings)


class People:
    """Withdrawals that wait for approvers, and what was told of them. `needed`: so many people for each."""

    def __init__(self, view: Callable[[str], View], needed: dict[str, int], say: Tell) -> None:
        self._view = view
        self._needed = needed
        self._say = say
        self._told: dict[str, list[str]] = {id_: [] for id_ in needed}  # who has approved it
        self._ended: set[str] = set()

    def waits(self) -> bool:
        """Whether any waits for an approver."""
        return any(len(self._told[id_]) < count for id_, count in self._needed.items() if id_ not in self._ended)

    def is_missing(self, id_: str, who: str) -> bool:
        """Whether this one waits for that approver."""
        return id_ not in self._ended and who not in self._told[id_] and len(self._told[id_]) < self._needed[id_]

    def look(self) -> bool:
        """Tell what people have done since the last look, and what has ended; whether all has."""
        for id_ in [id_ for id_ in self._needed if id_ not in self._ended]:
            view = self._view(id_)
            names = view["staff"]["approvals"]
            for name in names[len(self._told[id_]) :]:
                self._told[id_].append(name)
                more = self._needed[id_] - len(self._told[id_])
                self._say(f"{name} has approved {id_}{'; one more person is needed' if more > 0 else ''}.")
            if view["status"] in ENDED:
                self._ended.add(id_)
                paid = (f"paid, approved by {' and '.join(names)}:", view["tx_hash"])
                how, *rest = paid if view["status"] == "completed" else (f"{view['status']}.",)
                self._say(f"{id_} is {how}", *rest)
        return self._ended == self._needed.keys()


class Story:
    """The story, inside `Setting.running`. Approvers have `people_s` to run the lines themselves."""

    def __init__(self, setting: Setting, people_s: float, tell: Tell, watch: Watch) -> None:
        self.report = Report()
        self._setting = setting
        self._people_s = people_s
        self._tell = tell
        self._watch = watch
        self._began = time.monotonic()
        self.asked: list[str] = []
        self.deposits = Deposits(setting, self._say, self._until)

    def play(self) -> Report:
        """All of it. What does not happen as it should is in the report."""
        for act in (self._acts, self.judge):
            try:
                act()
            except RuntimeError as error:
                self.report.wrong.append(str(error))
        return self.report

    def _acts(self) -> None:
        self._opening()
        self.deposits.arrive()
        self._address_books()
        cooling = self._small_amounts()
        self._cancelled_and_rejected()
        self._reach([cooling], "completed")
        self._say(f"The address on tron is old enough: {cooling} went on by itself, and is paid.")
        self.deposits.swept()
        self._approved_by_people()
        self._killed()

    # --- acts --------------------------------------------------------------------------------------------------------

    def _opening(self) -> None:
        setting = self._setting
        about = [f"{chain.name} is {chain.what}" for chain in setting.chains.values()]
        self._tell(
            f"Two simulated chains run here: {about[0]};",
            f"{about[1]}. Each is shown by two nodes over HTTP, and",
            "no payment counts as made before both show it in the same final block.",
            "",
            f"bursar serve, process {setting.server.pid}, has the API at http://{setting.config.listen}.",
            f"bursar signer, process {setting.signer.pid}, has the wallets' keys.",
            "",
            "The rules are documents: one person has proposed each, another has approved it.",
            f"  up to {AUTO_MAX} {TOKEN} no person is asked; above, an approver signs; above {DUAL_ABOVE:,}, two",
            f"  on tron an address must have been in its user's book for {COOLING_S['tron']} s",
            *rules_in_words(setting),
        )

    def _address_books(self) -> None:
        setting = self._setting
        self._watch("users ask")
        for user in USERS:
            for name, chain in setting.chains.items():
                setting.ask("POST", "withdrawal_addresses", user, {"chain": name, "address": chain.address(user)})
        self._say(f"Users {', '.join(map(str, USERS))} put their addresses on both chains into their address books.")

    def _small_amounts(self) -> str:
        """Returns the withdrawal that waits for its address."""
        paid, cooling = (self._request(1001, name, "25") for name in ("eth", "tron"))
        self._say(
            f"User 1001 withdraws 25 {TOKEN} on each chain. No person is asked.",
            f"{paid} on eth is ordered at once.",
            f"{cooling} on tron waits until {self._view(cooling)['until'][11:19]} (UTC), and its user reads:",
            *self._as_the_user_reads(cooling),
        )
        self._reach([paid], "completed")
        self._say(f"{paid} is paid: {self._view(paid)['tx_hash']}")
        return cooling

    def _cancelled_and_rejected(self) -> None:
        setting = self._setting
        unwanted = self._request(1003, "eth", "120")
        suspect = self._request(1002, "eth", "450")
        setting.ask("POST", f"withdrawals/{unwanted}/cancel", 1003, {})
        self._reach([unwanted], "cancelled")
        self._say(f"User 1003 asks for 120 on eth, and cancels: {unwanted} ends, the money is back.")
        line = setting.line("reject", suspect, "--actor", OPERATOR, "--reason", "the account was stolen")
        self._watch(f"{OPERATOR} rejects a withdrawal")
        setting.run(line)
        self._reach([suspect], "rejected")
        self._say(
            f"User 1002 asks for 450 on eth. {OPERATOR}, an operator, rejects it, at the command line:",
            f"{suspect} ends, the money is back. Its user reads, and is not told why:",
            f"  {self._view(suspect)['message']}",
        )

    def _approved_by_people(self) -> None:
        one, two = self._request(1002, "eth", "300"), self._request(1003, "tron", "1500")
        self._say(
            f"User 1002 asks for 300 on eth: {one}",
            *self._as_the_user_reads(one),
            f"User 1003 asks for 1,500 on tron: {two}",
            *self._as_the_user_reads(two),
        )
        needed = {one: APPROVERS[:1], two: APPROVERS}
        lines = [(id_, who, self._setting.approval(id_, who)) for id_, names in needed.items() for who in names]
        self._tell(
            f"Each approver has a key of their own. {' and '.join(APPROVERS)} sign by these lines, in any terminal:",
            "",
            *(line for _, _, line in lines),
        )
        if self._people_s:
            self._say(f"If no person runs them within {self._people_s:g} s, the demo does.")
        people = People(self._view, {id_: len(names) for id_, names in needed.items()}, self._say)
        until = time.monotonic() + self._people_s
        while people.waits() and (left := until - time.monotonic()) > 0:
            self._watch(f"waiting for approvers; in {left:.0f} s the demo runs the lines itself")
            time.sleep(LOOK_S)
            people.look()
        for id_, who, line in lines:
            if people.is_missing(id_, who):
                self._run_approval(id_, who, line)
                people.look()
        self._until("these to be paid", people.look)

    def _killed(self) -> None:
        setting = self._setting
        for chain in setting.chains.values():
            chain.takes = False
        signed = [self._request(1001, name, "40") for name in setting.chains]
        payouts = [self._signed(id_) for id_ in signed]
        time.sleep(LOOK_S)  # or a call is under way, whose lease the next server waits for
        pid = setting.server.pid
        setting.kill_server()
        for payout in payouts:
            known = setting.chains[payout["chain"]].knows(payout["attempts"][-1]["hash"])
            self._expect(not known, f"{payout['id']} is known to a node before the server is killed")
        self._say(
            f"The nodes of both chains take no transactions. User 1001 withdraws 40 {TOKEN} on each chain:",
            *signed,
            "Both payments are signed and stored, and no node has them.",
            f"kill -9 of bursar serve, process {pid}.",
        )
        self._watch("bursar serve starts again")
        for chain in setting.chains.values():
            chain.takes = True  # before it starts: a server that finds no node asks again after ten seconds
        setting.server.start()
        setting.server.until_ready(PATIENCE_S)
        self._reach(signed, "completed")
        for id_, payout in zip(signed, payouts, strict=True):
            same = self._view(id_)["tx_hash"] == payout["attempts"][-1]["hash"]
            self._expect(same, f"{id_} was paid by another transaction than the one that was signed first")
        self._say(
            f"It is started again, process {setting.server.pid}, and the nodes take transactions. It sends the",
            "bytes that are stored: both are paid, once, by the transactions that were signed before.",
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        report, setting = self.report, self._setting
        self._watch("the audit")
        report.deposits, report.sweeps = self.deposits.views(), self.deposits.sweeps()
        report.wrong += self.deposits.wrong(report.deposits)
        report.withdrawals = [self._view(id_) for id_ in self.asked]
        for user in USERS:
            paid = Decimal(0)
            ours = [view for view in report.withdrawals if view["user_id"] == user and view["status"] == "completed"]
            for name, chain in setting.chains.items():
                arrived = sorted(chain.arrived(chain.address(user)))
                wanted = sorted(int(Decimal(view["amount"]) * UNIT) for view in ours if view["chain"] == name)
                self._expect(arrived == wanted, f"user {user} has received {arrived} on {name}, not {wanted}")
                paid += sum(arrived) / UNIT
            (account,) = setting.ask("GET", "balances", user)["accounts"]
            (has,) = account["balances"]
            reviewed = [one for one in report.deposits if (one["user_id"], one["status"]) == (user, UNDER_REVIEW)]
            money = Money(
                user=user,
                received=self.deposits.received(user),
                available=Decimal(has["available"]),
                held=Decimal(has["frozen"]),
                under_review=sum((Decimal(one["amount"]) for one in reviewed), Decimal(0)),
                paid=paid,
                fees=sum((Decimal(view["fee"]) for view in ours), Decimal(0)),
            )
            report.money.append(money)
            self._expect(money.adds_up, f"the money of user {user} does not add up")
        for view in report.withdrawals:
            self._expect(view["status"] in ENDED, f"{view['id']} has not ended: {view['status']}")
        report.findings = sorted(asyncio.run(audited(setting.config)), key=lambda finding: finding.invariant)

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.report.wrong.append(otherwise)

    # --- withdrawals -------------------------------------------------------------------------------------------------

    def _request(self, user: int, chain: str, amount: str) -> str:
        to = self._setting.chains[chain].address(user)
        body = {"asset": TOKEN, "chain": chain, "to": to, "amount": amount}
        fee = self._setting.ask("POST", "withdrawals/quote", user, body)["fee"]
        body |= {"max_fee": fee, "client_withdrawal_id": f"demo-{len(self.asked)}"}
        id_ = str(self._setting.ask("POST", "withdrawals", user, body)["id"])
        self.asked.append(id_)
        return id_

    def _view(self, id_: str) -> View:
        view: View = self._setting.ask("GET", f"withdrawals/{id_}", OPERATOR)
        return view

    def _as_the_user_reads(self, id_: str) -> list[str]:
        return [f"  {reason['words']}" for reason in self._view(id_)["waits_for"]]

    def _signed(self, id_: str) -> View:
        """The payout of a withdrawal, once its bytes are signed and stored."""
        found: View = {}

        def is_signed() -> bool:
            nonlocal found
            payout = self._view(id_)["staff"]["payout"]
            found = self._setting.ask("GET", f"payouts/{payout}", OPERATOR) if payout else {}
            return found.get("state") == SIGNED

        self._until(f"{id_} to be signed", is_signed)
        return found

    def _reach(self, ids: list[str], status: str) -> None:
        def is_there(id_: str) -> bool:
            view = self._view(id_)
            if view["status"] in ENDED and view["status"] != status:
                raise RuntimeError(f"{id_} is {view['status']} where it should be {status}: {view['message']}")
            return bool(view["status"] == status)

        for id_ in ids:
            self._until(f"{id_} to be {status}", partial(is_there, id_))

    def _run_approval(self, id_: str, who: str, line: str) -> None:
        self._say(f"The demo runs the line of {who}, with --yes because it can't be asked.")
        self._watch(f"{who} approves {id_}")
        try:
            self._setting.run(f"{line} --yes")
        except RuntimeError:
            if self._view(id_)["status"] not in ENDED:  # else a person was faster
                raise

    # --- time --------------------------------------------------------------------------------------------------------

    def _until(self, what: str, there: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not there():
            if time.monotonic() > until:
                raise RuntimeError(f"waited {PATIENCE_S:g} s for {what}")
            self._watch(f"waiting for {what}")
            time.sleep(LOOK_S)  # real processes, which send no notice

    def _say(self, *lines: str) -> None:
        first, *more = lines
        self._tell(f"{time.monotonic() - self._began:5.1f} s  {first}", *(f"{'':9}{line}" for line in more))
