"""Chains, assets on chains, and wallets, as data: versioned documents that operators change with four eyes.

A further chain of a kind that exists is three documents and the URLs of its nodes (configuration); no code. Integers
beyond 2^53 are text, because a document has one exact JSON. What a wallet has reserved and when it was used last are
rows of the flow, not part of its document.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from bursar.model.accounts import check_name
from bursar.model.document_kinds import DocumentKind, Other
from bursar.rails.chain import Network

DECIMALS_MAX = 36
ADDRESS_LENGTH_MAX = 128
PART_LENGTH_MAX = 48


class Ranked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number per priority."""

    high: int
    normal: int
    low: int

    @property
    def in_order(self) -> tuple[int, int, int]:
        """As `Priority` counts."""
        return self.high, self.normal, self.low


NOTHING_RANKED = Ranked(high=0, normal=0, low=0)


class ChainDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chain. Its nodes are configuration (`chain_nodes`)."""

    kind: str
    chain_id: int
    native: str  # code of the asset that fees are paid in
    decimals: int = 18  # of the native coin
    genesis: str = ""
    depth: int = 1
    finalized_tag: bool = True
    legacy_fees: bool = False
    fee_ceilings: Ranked
    tips: Ranked = NOTHING_RANKED
    block_ms: int = 12_000
    bump_after_s: int = 300  # 0: operators alone raise a fee
    unconfirmed_max: int = 16  # transactions of one wallet that are not final yet
    active: bool = True

    def network(self, name: str) -> Network:
        """As its codec and its nodes know it."""
        return Network(
            name=name,
            kind=self.kind,
            chain_id=self.chain_id,
            genesis=self.genesis,
            native=self.native,
            legacy_fees=self.legacy_fees,
            depth=self.depth,
            finalized_tag=self.finalized_tag,
            fee_ceilings=self.fee_ceilings.in_order,
            tips=self.tips.in_order,
        )


class AssetDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An asset on a chain; the document's name is `asset:chain` in lower case."""

    asset: str
    chain: str
    contract: str = ""  # "": the chain's own coin
    decimals: int
    gas_limit_max: int = 200_000
    minimum: str = "0"  # in the chain's smallest units
    one_node_limit: str = "0"  # the same: up to this, one node is enough to confirm or to prove death (W35)
    contracts_allowed: bool = False  # whether it may be sent to an address that has code
    active: bool = True


class Role(StrEnum):
    """What a wallet is for."""

    HOT = "hot_wallet"  # pays out
    COLD = "cold_wallet"  # receives sweeps
    GAS = "gas_wallet"  # refills the coin for fees
    DEPOSIT = "deposit_wallet"  # is swept


class WalletStatus(StrEnum):
    """Whether a wallet is used."""

    ACTIVE = "active"
    DRAINING = "draining"  # takes no new payout
    DISABLED = "disabled"


class WalletDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wallet of ours on a chain. Its name is the name of the signer's key."""

    chain: str
    address: str
    role: Role = Role.HOT
    derivation_path: str = ""
    status: WalletStatus = WalletStatus.ACTIVE


def asset_name(asset: str, chain: str) -> str:
    """The name of an asset's document."""
    return f"{asset.lower()}:{chain}"


def _check_chain(old: ChainDocument | None, new: ChainDocument) -> None:
    if old is not None and (old.kind, old.chain_id, old.native, old.decimals) != (
        new.kind,
        new.chain_id,
        new.native,
        new.decimals,
    ):
        raise ValueError("kind, chain_id, native and decimals never change: give another chain another name")
    ranks = (*new.fee_ceilings.in_order, *new.tips.in_order)
    if min(ranks) < 0 or any(tip > top for tip, top in zip(new.tips.in_order, new.fee_ceilings.in_order, strict=True)):
        raise ValueError("ceilings and tips are not negative, and no tip is above its ceiling")
    bounds = {
        "chain_id": (new.chain_id, 1, 2**53 - 1),
        "decimals": (new.decimals, 0, DECIMALS_MAX),
        "depth": (new.depth, 0, 100_000),
        "block_ms": (new.block_ms, 1, 3_600_000),
        "bump_after_s": (new.bump_after_s, 0, 86_400 * 30),
        "unconfirmed_max": (new.unconfirmed_max, 1, 10_000),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; from {least} to {most}")
    if not new.finalized_tag and new.depth < 1:
        raise ValueError("a chain that calls no block final needs a depth of at least 1")


def _check_asset(old: AssetDocument | None, new: AssetDocument) -> None:
    if old is not None and (old.asset, old.chain, old.contract, old.decimals) != (
        new.asset,
        new.chain,
        new.contract,
        new.decimals,
    ):
        raise ValueError("asset, chain, contract and decimals never change: a token that moves is another asset")
    if not 0 <= new.decimals <= DECIMALS_MAX:
        raise ValueError(f"decimals are {new.decimals}; from 0 to {DECIMALS_MAX}")
    if not 21_000 <= new.gas_limit_max <= 30_000_000:
        raise ValueError("gas_limit_max is not from 21000 to 30000000")
    for name, text in (("minimum", new.minimum), ("one_node_limit", new.one_node_limit)):
        if not (text.isascii() and text.isdigit() and len(text) <= 39):
            raise ValueError(f"{name} is not a whole number of the chain's smallest unit")


def _coin_or_token(one: AssetDocument) -> tuple[str, str]:
    return one.chain, _digits(one.contract)


def _check_same_token(new: AssetDocument, others: Iterable[Other[AssetDocument]]) -> None:
    """One token under two names: what arrives would be either, and each would be paid from what is there of both."""
    for one in others:
        if not one.retired:
            what = f"the contract {new.contract}" if new.contract else "the chain's own coin"
            raise ValueError(f"{one.name} is {what} already: retire that, or use it")


def _check_wallet(old: WalletDocument | None, new: WalletDocument) -> None:
    if old is not None and (old.chain, _digits(old.address)) != (new.chain, _digits(new.address)):
        raise ValueError("chain and address of a wallet never change: give another wallet another name")
    if not 0 < len(new.address) <= ADDRESS_LENGTH_MAX or not new.address.isascii():
        raise ValueError("the address is missing or too long")


def _digits(address: str) -> str:
    """Without the checksum that upper and lower case of hexadecimal digits are: that can be corrected."""
    return address.lower() if address.startswith("0x") else address


def _chain_itself(one: ChainDocument) -> tuple[str, int]:
    return one.kind, one.chain_id


def _check_same_chain(new: ChainDocument, others: Iterable[Other[ChainDocument]]) -> None:
    """One chain under two names would have two counts of nonces and two watchers, and pay from one wallet twice."""
    for one in others:
        if not one.retired:
            raise ValueError(f"chain {one.name} has the chain_id {new.chain_id} already: retire that, or use it")


def _place(one: WalletDocument) -> tuple[str, str]:
    return one.chain, _digits(one.address)


def _check_same_place(new: WalletDocument, others: Iterable[Other[WalletDocument]]) -> None:
    """Two wallets at one address would each be held against all that is there, so that a loss could hide (I9)."""
    for one in others:
        what = "is retired: bring that back" if one.retired else "is in use"
        raise ValueError(f"wallet {one.name} has the address {new.address} already, and {what}")


def _check_part(what: str, name: str) -> None:
    """It becomes a part of the path of an account, `external:wallet:CHAIN:WALLET`."""
    if len(check_name(f"name of a {what}", name)) > PART_LENGTH_MAX:
        raise ValueError(f"the name of a {what} has at most {PART_LENGTH_MAX} characters")


def _check_chain_named(name: str, _new: ChainDocument) -> None:
    _check_part("chain", name)


def _check_asset_named(name: str, new: AssetDocument) -> None:
    if name != (right := asset_name(new.asset, new.chain)):
        raise ValueError(f"the document of {new.asset} on {new.chain} has the name {right}")


def _check_wallet_named(name: str, new: WalletDocument) -> None:
    _check_part("wallet", name)
    _check_part("chain", new.chain)


CHAIN: Final = DocumentKind(
    name="chain",
    body=ChainDocument,
    two_people=True,
    check=_check_chain,
    check_named=_check_chain_named,
    likeness=_chain_itself,
    check_alike=_check_same_chain,
)
ASSET: Final = DocumentKind(
    name="asset_on_chain",
    body=AssetDocument,
    two_people=True,
    check=_check_asset,
    check_named=_check_asset_named,
    likeness=_coin_or_token,
    check_alike=_check_same_token,
)
WALLET: Final = DocumentKind(
    name="wallet",
    body=WalletDocument,
    two_people=True,
    check=_check_wallet,
    check_named=_check_wallet_named,
    likeness=_place,
    check_alike=_check_same_place,
)
KINDS: Final = (CHAIN, ASSET, WALLET)
