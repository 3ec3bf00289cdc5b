"""What is refused before a payout exists, and why. Pure: what is known of chain, asset and wallets comes in.

Nothing was written when one of these is raised. The wallet, the fee and a dry run are looked at when it is about to be
paid (assigning), because they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from bursar.flows.payouts.documents import AssetDocument, ChainDocument
from bursar.flows.payouts.payout import WALLETS, wallet_account
from bursar.model.accounts import check_path
from bursar.model.authorizations import Payment
from bursar.model.errors import Refusal
from bursar.model.money import MINOR_MAX, Asset
from bursar.model.records import Priority
from bursar.rails.chain import Codec

TEXT_LENGTH_MAX = 200  # of source and memo
NAME_LENGTH_MAX = 128  # of mandate and wallet
PRIORITIES = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}


class PayoutCode(StrEnum):
    """Why a request for a payout, or an operator's request about one, is refused."""

    UNKNOWN_CHAIN = "UNKNOWN_CHAIN"
    CHAIN_INACTIVE = "CHAIN_INACTIVE"
    ASSET_NOT_ON_CHAIN = "ASSET_NOT_ON_CHAIN"
    ASSET_INACTIVE = "ASSET_INACTIVE"
    INVALID_PRIORITY = "INVALID_PRIORITY"
    INVALID_REQUEST = "INVALID_REQUEST"
    INVALID_AMOUNT = "INVALID_AMOUNT"
    PRECISION_OVERFLOW = "PRECISION_OVERFLOW"
    BELOW_MINIMUM = "BELOW_MINIMUM"
    AMOUNT_TOO_LARGE = "AMOUNT_TOO_LARGE"
    DESTINATION_IS_TOKEN = "DESTINATION_IS_TOKEN"
    NOT_OWN_ADDRESS = "NOT_OWN_ADDRESS"
    OWN_ADDRESS = "OWN_ADDRESS"
    INVALID_ACCOUNT = "INVALID_ACCOUNT"
    NATIVE_PRECISION = "NATIVE_PRECISION"
    PAYOUT_EXISTS = "PAYOUT_EXISTS"
    INVALID_STATE = "INVALID_STATE"
    OWN_REQUEST = "OWN_REQUEST"
    NO_WALLET = "NO_WALLET"  # of a quote: a payout would wait


@dataclass(eq=False)
class PayoutRefused(Refusal):
    """A payout is refused before anything is written. `reason` is the code that an API answers with."""

    reason: PayoutCode
    why: str
    code = "PAYOUT_REFUSED"
    text = "{reason}: {why}"


class PayoutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller asks for."""

    account: str  # whose money it is, in the ledger
    asset: str
    chain: str
    to: str
    amount: str  # in units of the asset
    fee: str = "0"  # that the account pays us beside it
    memo: str = ""
    priority: str = "normal"
    source: str  # what it is for; one payout that has not failed per source (W3)
    mandate: str = ""  # under which the signer signs; "": people approve it
    wallet: str = ""  # the wallet that pays; only for sweeps and refills, else it is chosen
    expires_us: int = 0


def check_request(
    request: PayoutRequest,
    id_: str,
    asset: Asset,
    chain: ChainDocument | None,
    on_chain: AssetDocument | None,
    codec: Codec | None,
    own: Mapping[str, str],
    requester: str = "",
) -> Payment:
    """The exact payment that is requested; raises why it can't be. `own`: address → name of our wallets there."""
    if chain is None or codec is None:
        raise PayoutRefused(PayoutCode.UNKNOWN_CHAIN, f"there is no chain {request.chain!r} here; `bursar chain list`")
    if not chain.active:
        raise PayoutRefused(PayoutCode.CHAIN_INACTIVE, f"chain {request.chain} is switched off")
    if on_chain is None:
        raise PayoutRefused(PayoutCode.ASSET_NOT_ON_CHAIN, f"{request.asset} is not paid out on {request.chain}")
    if wrong := _mistaken(asset, request.chain, chain, on_chain):
        raise PayoutRefused(
            PayoutCode.ASSET_NOT_ON_CHAIN, f"the document of {request.asset} on {request.chain} {wrong}"
        )
    if not on_chain.active:
        raise PayoutRefused(PayoutCode.ASSET_INACTIVE, f"{request.asset} on {request.chain} is switched off")
    if request.priority not in PRIORITIES:
        raise PayoutRefused(
            PayoutCode.INVALID_PRIORITY, f"priority is {request.priority!r}: one of {', '.join(PRIORITIES)}"
        )
    for name, text in (("source", request.source), ("memo", request.memo)):
        if len(text) > TEXT_LENGTH_MAX or not text.isprintable() or (name == "source" and not text):
            raise PayoutRefused(PayoutCode.INVALID_REQUEST, f"{name} is 1 to {TEXT_LENGTH_MAX} printable characters")
    for name, text in (("mandate", request.mandate), ("wallet", request.wallet)):
        if len(text) > NAME_LENGTH_MAX or not (text.isascii() and text.isprintable()):
            raise PayoutRefused(PayoutCode.INVALID_REQUEST, f"{name} is at most {NAME_LENGTH_MAX} ASCII characters")
    check_path(request.account)
    amount, fee = asset.minor(request.amount), asset.minor(request.fee)
    if amount <= 0 or fee < 0:
        raise PayoutRefused(
            PayoutCode.INVALID_AMOUNT, f"{request.amount} with a fee of {request.fee} is not an amount to pay"
        )
    raw = to_chain_units(amount, asset.precision, on_chain.decimals)
    if raw is None:
        why = f"{request.amount} {asset.code} has more decimals than {request.chain} keeps ({on_chain.decimals})"
        raise PayoutRefused(PayoutCode.PRECISION_OVERFLOW, why)
    if raw < int(on_chain.minimum) and not request.wallet:  # what moves between our own wallets has no minimum
        raise PayoutRefused(
            PayoutCode.BELOW_MINIMUM, f"{request.amount} {asset.code} is below the minimum on {request.chain}"
        )
    if raw > MINOR_MAX:
        raise PayoutRefused(PayoutCode.AMOUNT_TOO_LARGE, f"{request.amount} {asset.code} does not fit")
    codec.check_memo(request.chain, request.memo)
    to = codec.check_address(request.chain, request.to)
    contract = codec.check_address(request.chain, on_chain.contract) if on_chain.contract else ""
    _check_destination(request, to, contract, own)
    return Payment(
        payout=id_,
        source=request.source,
        requester=requester,
        account=request.account,
        asset=asset.code,
        amount=str(amount),
        fee=str(fee),
        chain=request.chain,
        chain_id=chain.chain_id,
        contract=on_chain.contract,
        decimals=on_chain.decimals,
        amount_raw=str(raw),
        to=to,
        memo=request.memo,
        expires_us=request.expires_us,
    )


def _mistaken(asset: Asset, name: str, chain: ChainDocument, on_chain: AssetDocument) -> str:
    """How a document contradicts its own name, or the chain about its coin: another asset would be paid. Pure."""
    if (on_chain.asset, on_chain.chain) != (asset.code, name):
        return f"is of {on_chain.asset} on {on_chain.chain}"
    is_native = asset.code == chain.native
    if is_native is bool(on_chain.contract):
        return f"has {'a' if is_native else 'no'} contract, and the coin of the chain is {chain.native}"
    if is_native and on_chain.decimals != chain.decimals:
        return f"has {on_chain.decimals} decimals, and the coin has {chain.decimals}"
    return ""


def _check_destination(request: PayoutRequest, to: str, contract: str, own: Mapping[str, str]) -> None:
    """Money to the token's contract is lost; to a wallet of ours it is no payout, unless it is a sweep of ours."""
    if to == contract:
        raise PayoutRefused(
            PayoutCode.DESTINATION_IS_TOKEN, f"{to} is the contract of {request.asset}: what it gets is lost"
        )
    target = own.get(to)
    if target is None and not request.wallet:
        if request.account.startswith(WALLETS):
            why = f"{request.account} is a wallet's own account: only what moves to that wallet is booked from it"
            raise PayoutRefused(PayoutCode.INVALID_ACCOUNT, why)
        return
    if target is None:
        raise PayoutRefused(
            PayoutCode.NOT_OWN_ADDRESS, f"{request.wallet} is named as payer, so {to} must be a wallet of ours"
        )
    if not request.wallet:
        raise PayoutRefused(PayoutCode.OWN_ADDRESS, f"{to} is an address of our own, and not outside")
    if request.wallet == target:
        raise PayoutRefused(PayoutCode.OWN_ADDRESS, f"{target} would pay itself")
    books = wallet_account(request.chain, target)
    if request.account != books:
        raise PayoutRefused(PayoutCode.INVALID_ACCOUNT, f"what moves to {target} is booked from {books}")


def to_chain_units(minor: int, precision: int, decimals: int) -> int | None:
    """Smallest units of the ledger as those of the chain, exactly; None if they can't be."""
    if decimals >= precision:
        return minor * int(10 ** (decimals - precision))
    whole, rest = divmod(minor, 10 ** (precision - decimals))
    return None if rest else whole
