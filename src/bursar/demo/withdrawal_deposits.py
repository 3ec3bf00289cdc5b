"""Where users' money comes from in the demo of withdrawals: a stranger sends it to addresses of their own.

It is credited once it is final and both nodes show it. What gathered at an address is swept to the wallet that pays
users, with gas that another wallet brings. In the end the chains are asked what has arrived.

Not here: the rules of deposits, which people make before the server starts (withdrawal_setting).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NamedTuple

from bursar.demo.payouts import HASH_SHOWN
from bursar.demo.withdrawal_chains import UNIT
from bursar.demo.withdrawal_setting import APPROVERS, MINIMUM, OPERATOR, SWEEP_AT, TOKEN, USERS, Setting

CREDITED, UNDER_REVIEW = "credited", "under_review"
PAID_IN: Final = {  # what the stranger sends to each user, and what must become of it
    1001: (("300", CREDITED), ("0.50", UNDER_REVIEW)),
    1002: (("1000", CREDITED),),
    1003: (("2000", CREDITED),),
}

Say = Callable[..., None]
View = dict[str, Any]


class Sent(NamedTuple):
    """A transaction of the stranger's."""

    hash: str
    user: int
    amount: Decimal
    status: str  # that its deposit must have


class Deposits:
    """The part of the story in which money arrives. `until` waits for something that `say` tells then."""

    def __init__(self, setting: Setting, say: Say, until: Callable[[str, Callable[[], bool]], None]) -> None:
        self.addresses: dict[int, str] = {}
        self.sent: list[Sent] = []
        self._setting = setting
        self._say = say
        self._until = until

    # --- acts --------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Users ask for addresses, a stranger pays, and the server credits."""
        setting = self._setting
        for user, chain in USERS.items():
            asked = setting.ask("POST", "deposit_addresses", user, {"chain": chain})
            self.addresses[user] = asked["address"]
        self._say(
            "Each user asks for an address of their own: POST /api/v1/deposit_addresses.",
            *(f"user {user} on {USERS[user]}: {address}" for user, address in self.addresses.items()),
        )
        for user, payments in PAID_IN.items():
            for amount, status in payments:
                units = int(Decimal(amount) * UNIT)
                hash_ = setting.chains[USERS[user]].pay_in(self.addresses[user], units)
                self.sent.append(Sent(hash_, user, Decimal(amount), status))
        self._until("the deposits to be final and credited", lambda: len(self.views()) == len(self.sent))
        self._until("the deposits to be judged", lambda: all(one["status"] != "pending" for one in self.views()))
        credited = ", ".join(f"{one.amount:,} to {one.user}" for one in self.sent if one.status == CREDITED)
        (small,) = (one for one in self.views() if one["status"] == UNDER_REVIEW)
        self._say(
            f"A stranger's transactions bring {TOKEN}: {credited}. Each is",
            "credited when its block is final on both nodes, and is the money that its user withdraws below.",
            f"{Decimal(small['amount']):.2f} more to {small['user_id']} is in suspense, and its user reads:",
            f"  {small['message']}",
        )

    def swept(self) -> None:
        """What has gathered is in the hot wallets: one line per sweep."""
        expected = sum(one.amount >= Decimal(SWEEP_AT) for one in self.sent)

        def are_swept() -> bool:
            return [one["state"] for one in self.sweeps()] == ["swept"] * expected

        self._until("addresses to be swept", are_swept)
        self._say(
            f"Meanwhile addresses with {SWEEP_AT} {TOKEN} or more were swept, with gas that another wallet brought:",
            *(self._line(sweep) for sweep in self.sweeps()),
        )

    def _line(self, sweep: View) -> str:
        payouts = [self._setting.ask("GET", f"payouts/{id_}", OPERATOR) for id_ in sweep["payouts"]]
        gas = [f"{Decimal(one['amount']).normalize():f} {one['asset']} from {one['wallet']}" for one in payouts[:-1]]
        moved = payouts[-1]
        to = f"{Decimal(moved['amount']):,.2f} {moved['asset']} to hot-{sweep['chain']}"
        return f"{sweep['wallet']}: {to}, gas {' and '.join(gas) or 'there'}: {moved['tx_hash'][:HASH_SHOWN]}"

    # --- what there is -----------------------------------------------------------------------------------------------

    def views(self) -> list[View]:
        """Deposits as the API shows them to staff, as they were sent, without the gas that payouts of ours brought."""
        found = self._setting.ask("GET", "chain_deposits", OPERATOR)["deposits"]
        order = {one.hash: number for number, one in enumerate(self.sent)}
        shown = (one for one in found if one["status"] != "ignored")
        return sorted(shown, key=lambda one: order.get(one["tx_hash"], len(order)))

    def sweeps(self) -> list[View]:
        """Sweeps, oldest first."""
        found: list[View] = self._setting.ask("GET", "sweeps", OPERATOR)["sweeps"]
        return found[::-1]

    def received(self, user: int) -> Decimal:
        """What the chain says has arrived at a user's address."""
        if user not in self.addresses:
            return Decimal(0)
        return Decimal(sum(self._setting.chains[USERS[user]].arrived(self.addresses[user]))) / UNIT

    def wrong(self, views: list[View]) -> list[str]:
        """What is not as it must be: each transaction is one deposit, and what is swept is gone from its address."""
        found = []
        booked = sorted(Sent(one["tx_hash"], one["user_id"], Decimal(one["amount"]), one["status"]) for one in views)
        if booked != sorted(self.sent):
            found.append(f"the deposits are {booked}, and the stranger has sent {sorted(self.sent)}")
        for user, address in self.addresses.items():
            mine = [one.amount for one in self.sent if one.user == user]
            left = sum(amount for amount in mine if amount < Decimal(SWEEP_AT))
            chain = self._setting.chains[USERS[user]]
            if (there := Decimal(chain.has(address)) / UNIT) != left:
                found.append(f"{address} of user {user} has {there} on {chain.name}, not {left}")
        return found


def rules_in_words(setting: Setting) -> list[str]:
    """How the rules of deposits came to be, for the beginning."""
    chain, *_ = setting.chains
    return [
        f"  deposits from {MINIMUM} {TOKEN} on are credited. At the command line {OPERATOR} proposed that for {chain},",
        f"  with the key that bursar signer xpub had printed; and {APPROVERS[1]} approved it, comparing the address",
        "  that it gives user 1 with the one printed there:",
        f"  {setting.first_address}",
    ]
