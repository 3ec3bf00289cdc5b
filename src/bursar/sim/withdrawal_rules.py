"""The rules of the withdrawals scenario: policies, lists and approvers as documents, and how people change them.

Each change is made by two people, as every change of such a document is. The signer has its own copy of who approves,
which no change reaches.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bursar.documents import Documents
from bursar.flows.catalog import KINDS
from bursar.flows.payouts.documents import asset_name
from bursar.flows.transfers.request import funding_account
from bursar.flows.withdrawals.policy import (
    ADDRESS_LIST,
    APPROVER,
    POLICY,
    AddressBookRule,
    AddressList,
    Approver,
    WithdrawalPolicy,
)
from bursar.ledger import Ledger
from bursar.model.document_kinds import DocumentKind
from bursar.model.documents import Proposal
from bursar.model.errors import BursarError
from bursar.signer.policy import Policy
from bursar.sim import payout_town, withdrawal_deposits
from bursar.sim.payout_chains import CHAIN_NAME, ChainKind
from bursar.sim.payout_town import put
from bursar.sim.withdrawal_plan import FUNDS, USERS

USDT: Final = 10**6
NAME: Final = asset_name("USDT", CHAIN_NAME)
APPROVERS: Final = ("ann", "ben", "eve", "rex", "mallory")
KEYS: Final = {
    name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32)) for name in (*APPROVERS, "mal.lory", "trudy")
}
PUBLIC: Final = {name: key.public_key().public_bytes_raw().hex() for name, key in KEYS.items()}
OWNERS: Final = {public: "mallory" if name == "mal.lory" else name for name, public in PUBLIC.items()}
BASE: Final = WithdrawalPolicy(
    asset="USDT",
    chain=CHAIN_NAME,
    fee_flat="1",
    minimum="1",
    maximum="1000",
    auto_approve_max="10",
    mandate="auto",
    dual_above="30",
    address_book=AddressBookRule.OFF,
)
POLICIES: Final[dict[str, WithdrawalPolicy]] = {
    "plain": BASE,
    "screened": msgspec.structs.replace(BASE, screening=True),
    "cooling": msgspec.structs.replace(BASE, address_book=AddressBookRule.REQUIRED, cooling_s=4),
    "limited": msgspec.structs.replace(BASE, daily_user="60", daily_all="80", expires_s=60),
    "listed": msgspec.structs.replace(BASE, address_book=AddressBookRule.AUTO_ONLY, cooling_s=4, screening=True),
}


def signer_rules(kind: ChainKind) -> Policy:
    """The signer's own policy: by its mandate it pays more than any document does, so that documents count."""
    people = "".join(f'[approvers.{name}]\npublic_key = "{PUBLIC[name]}"\n' for name in APPROVERS)
    more = withdrawal_deposits.signer_policy
    return payout_town.rules(kind, people=people, mandate_max=50 * USDT, dual_above=30 * USDT, more=more)


async def furnish(ledger: Ledger, kind: ChainKind, variant: str) -> None:
    """Everything that payouts need, a policy and people who approve."""
    await payout_town.furnish(ledger, kind, [funding_account(user) for user in range(USERS)], FUNDS)
    documents = Documents(ledger.store, KINDS)
    await withdrawal_deposits.furnish(documents, kind)
    await put(documents, POLICY, NAME, POLICIES[variant])  # type: ignore[arg-type]
    for name in (*APPROVERS, "mal.lory"):
        await put(documents, APPROVER, name, Approver(public_key=PUBLIC[name]))  # type: ignore[arg-type]


class Rules:
    """People who change the rules, at one server."""

    def __init__(self, documents: Documents, variant: str, dice: random.Random) -> None:
        self.documents = documents
        self.base = POLICIES[variant]
        self.dice = dice

    async def change(self, addresses: list[str]) -> None:
        """Any one of them."""
        dice = self.dice
        what = dice.choice(("tighter", "tighter", "looser", "off", "deny", "revoke", "revoke", "twin"))
        match what:
            case "tighter":
                tighter = dice.choice(({"auto_approve_max": "0"}, {"dual_above": "10"}, {"maximum": "11"}))
                await self._policy(**tighter)
            case "looser":
                await self._policy(auto_approve_max="20", mandate="auto")
            case "off":
                await self._policy(enabled=False)
            case "deny":
                await self._put(ADDRESS_LIST, CHAIN_NAME, AddressList(deny=(dice.choice(addresses),)))
            case "revoke":
                name = dice.choice(("ann", "ben", "mallory"))
                await self._put(APPROVER, name, Approver(public_key=PUBLIC[name], active=False))
            case _:  # another name with ann's key: it counts for neither
                await self._put(APPROVER, "trudy", Approver(public_key=PUBLIC["ann"]))

    async def settle(self) -> None:
        """Everything as it was in the beginning."""
        await self._put(POLICY, NAME, self.base)
        for name in APPROVERS:
            await self._put(APPROVER, name, Approver(public_key=PUBLIC[name]))
        if await self.documents.current(APPROVER, "trudy") is not None:
            await self._put(APPROVER, "trudy", Approver(public_key=PUBLIC["trudy"], active=False))
        if await self.documents.current(ADDRESS_LIST, CHAIN_NAME) is not None:
            await self._put(ADDRESS_LIST, CHAIN_NAME, AddressList())

    async def _policy(self, **changes: Any) -> None:
        await self._put(POLICY, NAME, msgspec.structs.replace(self.base, **changes))

    async def _put(self, kind: DocumentKind[Any], name: str, body: msgspec.Struct) -> None:
        """A version after the newest; by two people. Another server may be faster."""
        current = await self.documents.current(kind, name, fresh=True)
        if current is not None and current.body == body:
            return
        base = 0 if current is None else current.document.version
        with contextlib.suppress(BursarError):
            done = await self.documents.put(kind, name, body, base=base, author="ann", reason="a change")
            if isinstance(done, Proposal):
                await self.documents.approve(kind, name, done.hash, actor="ben", reason="a change")
