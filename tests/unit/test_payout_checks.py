"""What is refused before a payout exists, because of documents that contradict themselves or of where it goes."""

from __future__ import annotations

import msgspec
import pytest

from bursar.flows.payouts.checks import PayoutRefused, PayoutRequest, check_request
from bursar.flows.payouts.documents import AssetDocument, ChainDocument, Ranked
from bursar.model.authorizations import Payment
from bursar.model.money import Asset
from bursar.rails.evm.codec import EvmCodec

CHAIN = ChainDocument(kind="evm", chain_id=1, native="ETH", fee_ceilings=Ranked(high=1, normal=1, low=1))
TOKEN = "0xdAC17F958D2ee523a2206206994597C13D831ec7"
BOB = "0x" + "b" * 40
USDT = AssetDocument(asset="USDT", chain="eth", contract=TOKEN, decimals=6)
ETH = AssetDocument(asset="ETH", chain="eth", decimals=18)
PRECISIONS = {"USDT": 6, "ETH": 18}


def checked(document: AssetDocument, asset: str, to: str = BOB, own: dict[str, str] | None = None) -> Payment:
    known = Asset(id=1, code=asset, precision=PRECISIONS[asset])
    request = PayoutRequest(account="alice", asset=asset, chain="eth", to=to, amount="1", source="test")
    return check_request(request, "po-1", known, CHAIN, document, EvmCodec(), own or {})


def test_documents_that_agree_are_paid_by() -> None:
    assert checked(USDT, "USDT").amount_raw == str(10**6)
    assert checked(ETH, "ETH").amount_raw == str(10**18)


@pytest.mark.parametrize(
    ("document", "asset", "why"),
    [
        (ETH, "USDT", "of ETH on eth"),
        (msgspec.structs.replace(USDT, chain="bsc"), "USDT", "of USDT on bsc"),
        (msgspec.structs.replace(USDT, contract=""), "USDT", "no contract"),
        (msgspec.structs.replace(ETH, contract=TOKEN), "ETH", "a contract"),
        (msgspec.structs.replace(ETH, decimals=6), "ETH", "6 decimals, and the coin has 18"),
    ],
)
def test_document_that_means_another_asset_is_not_paid_by(document: AssetDocument, asset: str, why: str) -> None:
    """A forgotten contract would pay coin instead of tokens; decimals of another coin, a millionth or a million."""
    with pytest.raises(PayoutRefused, match=why) as refused:
        checked(document, asset)
    assert refused.value.reason == "ASSET_NOT_ON_CHAIN"


def test_token_is_recognised_as_destination_however_its_document_writes_it() -> None:
    with pytest.raises(PayoutRefused) as refused:
        checked(msgspec.structs.replace(USDT, contract=TOKEN.lower()), "USDT", to=TOKEN)
    assert refused.value.reason == "DESTINATION_IS_TOKEN"
