"""What withdrawals are allowed, cost and need: policies, lists of addresses and approvers, as versioned documents.

Each kind of document needs two people for every change, because each decides whether money leaves. Amounts are text in
units of the asset. A document does not know how many decimals its asset has; `Asset.minor` says so when the policy is
used, and refuses an amount that the asset can't express. Nothing is rounded.

The fee is the flat part and the share of the amount together, at most `fee_max`. The share is rounded down, in the
user's favour: a user never pays more than the published rate.

Not here: what the rules say about one withdrawal (`risk`), and the signer's own limits, which no document changes
(`signer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Final

import msgspec

from bursar.flows.payouts.checks import NAME_LENGTH_MAX
from bursar.flows.payouts.documents import ADDRESS_LENGTH_MAX, CHAIN, PART_LENGTH_MAX, ChainDocument, asset_name
from bursar.model.accounts import check_name
from bursar.model.actors import check_actor
from bursar.model.document_kinds import DocumentKind
from bursar.model.money import MINOR_MAX, PRECISION_MAX, Asset, check_asset
from bursar.rails.chain import Codec, InvalidAddress
from bursar.signer.codecs import codec_of

AMOUNT_LENGTH_MAX = 60
BPS: Final = 10_000  # a hundredth of a percent: 10000 is all of it
COOLING_S_MAX = 30 * 86_400
EXPIRES_S_MIN, EXPIRES_S_MAX = 60, 30 * 86_400
LISTED_MAX = 700  # of each list: both, of EVM addresses, are as much as one document holds
SCOPES_MAX = 100  # chains or assets of an approver
_AMOUNT = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]+))?", re.ASCII)
_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


class AddressBookRule(StrEnum):
    """Where a user's money may go."""

    OFF = "off"  # the book is not looked at
    REQUIRED = "required"  # only to addresses in the user's book
    AUTO_ONLY = "auto_only"  # to others only if people approve it


class PriorityName(StrEnum):
    """How urgent the payout is."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class WithdrawalPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Withdrawals of an asset on a chain; the document's name is `asset:chain` in lower case."""

    asset: str
    chain: str
    enabled: bool = True
    fee_flat: str = "0"
    fee_bps: int = 0
    fee_max: str = ""  # "": no limit
    minimum: str = "0"
    maximum: str
    auto_approve_max: str = "0"  # up to this no person is asked; "0": people approve each one
    mandate: str = ""  # in the signer's policy, for what no person approves
    dual_above: str  # above this, what people approve needs two of them
    hourly_user: str = ""  # "": no limit
    daily_user: str = ""
    hourly_all: str = ""
    daily_all: str = ""
    address_book: AddressBookRule = AddressBookRule.REQUIRED
    cooling_s: int = 0  # how long an address must have been in the book
    expires_s: int = 86_400  # how long a request may wait for approval and signature
    screening: bool = False  # whether the hook outside is asked
    priority: PriorityName = PriorityName.NORMAL


class AddressList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of a chain, or of an asset on a chain: the name is `chain` or `asset:chain`."""

    allow: tuple[str, ...] = ()  # (): all
    deny: tuple[str, ...] = ()


class Approver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person who may approve withdrawals; the document's name is the person's."""

    public_key: str  # Ed25519, 64 hexadecimal digits
    chains: tuple[str, ...] = ()  # (): all
    assets: tuple[str, ...] = ()  # (): all
    active: bool = True


class Lists(msgspec.Struct, frozen=True, kw_only=True):
    """All lists that apply to a withdrawal, their addresses as its chain's codec writes them."""

    allow: tuple[frozenset[str], ...] = ()  # an address has to be in each of them
    deny: frozenset[str] = frozenset()


# --- money -----------------------------------------------------------------------------------------------------------


def fee_of(policy: WithdrawalPolicy, asset: Asset, minor: int) -> int:
    """What a withdrawal of this amount costs, in smallest units. The share is rounded down, in the user's favour."""
    fee = asset.minor(policy.fee_flat) + minor * policy.fee_bps // BPS
    return min(fee, optional(asset, policy.fee_max))


def send_all(policy: WithdrawalPolicy, asset: Asset, available: int, step: int) -> int:
    """The largest amount that `available` covers together with its fee, a multiple of `step`; 0 if there is none.

    `step` is the smallest amount that the chain can express. Minimum and maximum are not looked at.
    """
    least, most = 0, max(available, 0) // step
    while least < most:  # amount and fee together never become less as the amount grows
        middle = (least + most + 1) // 2
        amount = middle * step
        if amount + fee_of(policy, asset, amount) <= available:
            least = middle
        else:
            most = middle - 1
    return least * step


def optional(asset: Asset, text: str) -> int:
    """A limit in smallest units; one that is not set is never reached."""
    return asset.minor(text) if text else MINOR_MAX


# --- lists and people ------------------------------------------------------------------------------------------------


def list_names(asset: str, chain: str) -> tuple[str, str]:
    """Names of the lists that apply to withdrawals of an asset on a chain."""
    return chain, asset_name(asset, chain)


def joined(chain: str, codec: Codec, lists: Iterable[AddressList]) -> Lists:
    """Lists as one, written as the chain writes its addresses; InvalidAddress if an entry is no address there.

    An entry that can't be read can't be compared either: a denied address would be paid.
    """
    found = [
        AddressList(
            allow=tuple(codec.check_address(chain, address) for address in one.allow),
            deny=tuple(codec.check_address(chain, address) for address in one.deny),
        )
        for one in lists
    ]
    return Lists(
        allow=tuple(frozenset(one.allow) for one in found if one.allow),
        deny=frozenset(address for one in found for address in one.deny),
    )


def keys_of(approvers: Mapping[str, Approver], asset: str, chain: str) -> dict[str, str]:
    """Who may approve withdrawals of this asset on this chain, and with which key.

    A key that two names share is one person with two votes: it counts for neither of them.
    """
    names: dict[str, list[str]] = {}
    for name, one in approvers.items():
        names.setdefault(one.public_key, []).append(name)
    return {
        name: one.public_key
        for name, one in approvers.items()
        if one.active
        and names[one.public_key] == [name]
        and (not one.chains or chain in one.chains)
        and (not one.assets or asset in one.assets)
    }


# --- checks ----------------------------------------------------------------------------------------------------------


def _amount(what: str, text: str) -> Decimal:
    match = _AMOUNT.fullmatch(text) if len(text) <= AMOUNT_LENGTH_MAX else None
    if match is None:
        raise ValueError(f'{what} is not an amount in units of the asset: write plain digits, as in "100.00"')
    if len(match.group(2) or "") > PRECISION_MAX:
        raise ValueError(f"{what} has more than {PRECISION_MAX} decimals")
    return Decimal(text)


def _check_policy(old: WithdrawalPolicy | None, new: WithdrawalPolicy) -> None:
    if old is not None and (old.asset, old.chain) != (new.asset, new.chain):
        raise ValueError("asset and chain never change: another asset has a policy of its own")
    check_asset(new.asset, 0)
    _check_part("chain", new.chain)
    names = ("fee_flat", "minimum", "maximum", "auto_approve_max", "dual_above")
    limits = ("fee_max", "hourly_user", "daily_user", "hourly_all", "daily_all")
    amounts = {name: _amount(name, getattr(new, name)) for name in names}
    amounts |= {name: _amount(name, text) for name in limits if (text := getattr(new, name))}
    for name in ("maximum", "hourly_user", "daily_user", "hourly_all", "daily_all"):
        if amounts.get(name) == 0:
            raise ValueError(f"{name} is zero, which allows nothing: set enabled to false instead")
    in_order = (
        ("minimum", "maximum"),
        ("auto_approve_max", "maximum"),
        ("auto_approve_max", "dual_above"),
        ("fee_flat", "fee_max"),
        ("hourly_user", "daily_user"),
        ("hourly_all", "daily_all"),
        ("hourly_user", "hourly_all"),
        ("daily_user", "daily_all"),
    )
    for less, more in in_order:
        if less in amounts and more in amounts and amounts[less] > amounts[more]:
            raise ValueError(f"{less} is above {more}")
    bounds = {
        "fee_bps": (new.fee_bps, 0, BPS),
        "cooling_s": (new.cooling_s, 0, COOLING_S_MAX),
        "expires_s": (new.expires_s, EXPIRES_S_MIN, EXPIRES_S_MAX),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; from {least} to {most}")
    _check_mandate(new.mandate, needed=amounts["auto_approve_max"] > 0)
    if new.cooling_s and new.address_book is AddressBookRule.OFF:
        raise ValueError("cooling_s needs the address book: without it, no address has an age")
    if new.cooling_s >= new.expires_s:
        raise ValueError("cooling_s is not below expires_s: a request to a new address would always expire")


def _check_mandate(mandate: str, *, needed: bool) -> None:
    if needed and not mandate:
        raise ValueError(
            "auto_approve_max needs a mandate: the signer signs nothing that no person and no mandate allows"
        )
    if len(mandate) > NAME_LENGTH_MAX or not (mandate.isascii() and mandate.isprintable()):
        raise ValueError(f"mandate is at most {NAME_LENGTH_MAX} printable ASCII characters")


def _check_list(_old: AddressList | None, new: AddressList) -> None:
    for name, addresses in (("allow", new.allow), ("deny", new.deny)):
        if len(addresses) > LISTED_MAX:
            raise ValueError(f"{name} has more than {LISTED_MAX} addresses: use the screening hook for long lists")
        for address in addresses:
            plain = address.isascii() and address.isprintable() and " " not in address
            if not 0 < len(address) <= ADDRESS_LENGTH_MAX or not plain:
                raise ValueError(f"{name}: {address!a} is no address of 1 to {ADDRESS_LENGTH_MAX} ASCII characters")
        _check_sorted(name, addresses)


def _check_sorted(what: str, texts: tuple[str, ...]) -> None:
    """One way to write one set, so that two people who compare two versions see what has changed."""
    if list(texts) != sorted(set(texts)):
        raise ValueError(f"{what} is not sorted, or has an entry twice")


def _check_approver(_old: Approver | None, new: Approver) -> None:
    if not _PUBLIC_KEY.fullmatch(new.public_key):
        raise ValueError("public_key is not 64 lower-case hexadecimal digits; `bursar signer approver-key` prints it")
    if len(new.chains) > SCOPES_MAX or len(new.assets) > SCOPES_MAX:
        raise ValueError(f"at most {SCOPES_MAX} chains and {SCOPES_MAX} assets; none at all means all")
    _check_sorted("chains", new.chains)
    _check_sorted("assets", new.assets)
    for chain in new.chains:
        _check_part("chain", chain)
    for asset in new.assets:
        check_asset(asset, 0)


def _check_part(what: str, name: str) -> None:
    if len(check_name(f"name of a {what}", name)) > PART_LENGTH_MAX:
        raise ValueError(f"the name of a {what} has at most {PART_LENGTH_MAX} characters")


def _check_policy_named(name: str, new: WithdrawalPolicy) -> None:
    if name != (right := asset_name(new.asset, new.chain)):
        raise ValueError(f"the policy of {new.asset} on {new.chain} has the name {right}")


def _check_list_named(name: str, _new: AddressList) -> None:
    asset, colon, chain = name.rpartition(":")
    _check_part("chain", chain)
    if colon:
        if asset != asset.lower():
            raise ValueError(f"{name} is not in lower case: no withdrawal would look at it")
        check_asset(asset.upper(), 0)


def _chain_of_list(name: str) -> tuple[DocumentKind[ChainDocument], str]:
    return CHAIN, name.rpartition(":")[2]


def _check_list_beside(name: str, new: AddressList, chain: ChainDocument) -> None:
    """Each entry is an address there: one that can't be read would stop every withdrawal (`joined`).

    Not checked are chains whose codec is not at hand: kinds that are not shipped, or whose extra is missing here.
    """
    try:
        codec = codec_of(chain.kind)
    except (KeyError, ModuleNotFoundError):
        return
    for which, addresses in (("allow", new.allow), ("deny", new.deny)):
        for address in addresses:
            try:
                codec.check_address(name.rpartition(":")[2], address)
            except InvalidAddress as refused:
                raise ValueError(f"{which}: {refused}") from refused


def _check_approver_named(name: str, _new: Approver) -> None:
    if name != check_actor(name):
        raise ValueError(f"the name of a person is written in lower case: {check_actor(name)}")


POLICY: Final = DocumentKind(
    name="withdrawal_policy",
    body=WithdrawalPolicy,
    two_people=True,
    check=_check_policy,
    check_named=_check_policy_named,
)
ADDRESS_LIST: Final = DocumentKind(
    name="address_list",
    body=AddressList,
    two_people=True,
    check=_check_list,
    check_named=_check_list_named,
    beside=_chain_of_list,
    check_beside=_check_list_beside,
)
APPROVER: Final = DocumentKind(
    name="approver", body=Approver, two_people=True, check=_check_approver, check_named=_check_approver_named
)
KINDS: Final = (POLICY, ADDRESS_LIST, APPROVER)
