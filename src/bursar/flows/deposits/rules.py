"""What is accepted from a chain, and what becomes of it: one document per chain, which two people change.

The server has an extended public key, from which it derives an address for each user, and no key that could sign. The
address follows from the user's number alone: after a restore from a backup a user has the same address, and no address
is ever a second user's. The signer has the private side under the same name (`deposits` in its policy).

Not here: which transfers the scan sees (rails), when one is credited (`judging`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from bursar.flows.payouts.documents import PART_LENGTH_MAX
from bursar.model.accounts import check_name
from bursar.model.document_kinds import DocumentKind, Other

ASSETS_MAX = 200
USER_MAX: Final = 2**62 - 1  # that an address can be derived for (`rails.derivation`)
USER_DIGITS_MAX = 19
_AMOUNT = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]+))?", re.ASCII)
AMOUNT_LENGTH_MAX = 60

Derive = Callable[[str, str, int], str]  # kind of chain, extended public key, user → address


class DepositAsset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An asset that is accepted. Amounts are in units of the asset."""

    minimum: str = "0"  # less is booked in suspense
    sweep_at: str = ""  # swept once an address has so much of it; "": never
    sweep_mandate: str = ""  # in the signer's policy, where a mandate is for one asset; "": that of the rules


class DepositRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deposits from a chain; the document has the chain's name."""

    wallets: str  # the section of the signer's policy: the wallet of user 1001 is NAME-1001
    xpub: str  # of `bursar signer xpub`
    assets: dict[str, DepositAsset]  # by code
    active: bool = True  # whether new addresses are issued; what arrives at others is credited all the same
    sweep_to: str = ""  # the wallet that receives sweeps; "": nothing is swept
    sweep_mandate: str = ""  # of the asset that has none of its own
    gas_from: str = ""  # the wallet that pays for the gas of sweeps of tokens; "": those wait for coin
    gas_mandate: str = ""


def wallet_name(rules: DepositRules, user: int) -> str:
    """The name of a user's wallet, as the signer knows it."""
    return f"{rules.wallets}-{user}"


def mandate_of(rules: DepositRules, code: str) -> str:
    """What the signer signs sweeps of an asset under."""
    accepted = rules.assets.get(code)
    return (accepted.sweep_mandate if accepted is not None else "") or rules.sweep_mandate


def derive(kind: str, xpub: str, user: int) -> str:
    """The address of a user on a chain of this kind."""
    from bursar.rails.derivation import ExtendedKey, deposit_address  # noqa: PLC0415 (an extra: the curve)

    return deposit_address(kind, ExtendedKey.parse(xpub), user)


def _check(old: DepositRules | None, new: DepositRules) -> None:
    from bursar.rails.derivation import ExtendedKey  # noqa: PLC0415 (an extra: the curve)

    ExtendedKey.parse(new.xpub)
    if old is not None and (old.xpub != new.xpub) != (old.wallets != new.wallets):
        raise ValueError("another xpub needs another name of its wallets, and the other way round: keys have one name")
    if len(check_name("name of wallets", new.wallets)) > PART_LENGTH_MAX - USER_DIGITS_MAX - 1:
        raise ValueError(f"the name of the wallets has at most {PART_LENGTH_MAX - USER_DIGITS_MAX - 1} characters")
    if len(new.assets) > ASSETS_MAX:
        raise ValueError(f"at most {ASSETS_MAX} assets")
    for code, asset in new.assets.items():
        for name, text in (("minimum", asset.minimum), ("sweep_at", asset.sweep_at or "0")):
            if len(text) > AMOUNT_LENGTH_MAX or not _AMOUNT.fullmatch(text):
                raise ValueError(f"{name} of {code} is {text!r}, which is no amount")
    swept = [code for code, asset in sorted(new.assets.items()) if asset.sweep_at]
    if swept and not (new.sweep_to and all(mandate_of(new, code) for code in swept)):
        raise ValueError("sweep_at needs sweep_to and sweep_mandate: where to, and what the signer signs it under")
    for mandate in {mandate_of(new, code) for code in swept}:
        if len(alike := [code for code in swept if mandate_of(new, code) == mandate]) > 1:
            raise ValueError(f"{', '.join(alike)} have one sweep_mandate: the signer has one for each asset")
    if bool(new.gas_from) != bool(new.gas_mandate):
        raise ValueError("gas_from and gas_mandate go together")


def _wallets(rules: DepositRules) -> str:
    return rules.wallets


def _check_same_wallets(new: DepositRules, others: Iterable[Other[DepositRules]]) -> None:
    """A user has one wallet of a name, on one chain: on another its address would be shown, and nothing seen there."""
    for one in others:
        raise ValueError(f"the rules of {one.name} have wallets of that name ({new.wallets}): choose another")


DEPOSITS: Final = DocumentKind(
    name="deposits",
    body=DepositRules,
    two_people=True,
    check=_check,
    likeness=_wallets,
    check_alike=_check_same_wallets,
)
KINDS: Final = (DEPOSITS,)
