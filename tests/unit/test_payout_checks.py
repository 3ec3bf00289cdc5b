"""What is refused before a payout exists, because of documents that contradict themselves or of where it goes."""

from __future__ import annotations

import msgspec
import pytest

from bursar.documents import InvalidDocument
from bursar.flows.payouts.checks import PayoutRefused, PayoutRequest, check_request
from bursar.flows.payouts.documents import ASSET, WALLET, AssetDocument, ChainDocument, Ranked, WalletDocument
from bursar.flows.payouts.documents import CHAIN as CHAIN_KIND
from bursar.flows.payouts.words import on_chain
from bursar.model.authorizations import Payment
from bursar.model.document_kinds import Other
from bursar.model.money import Asset
from bursar.rails.chain import Codec, InvalidMemo
from bursar.rails.evm.codec import EvmCodec
from bursar.rails.tron.codec import TronCodec

CHAIN = ChainDocument(kind="evm", chain_id=1, native="ETH", fee_ceilings=Ranked(high=1, normal=1, low=1))
TOKEN = "0xdAC17F958D2ee523a2206206994597C13D831ec7"
BOB = "0x" + "b" * 40
USDT = AssetDocument(asset="USDT", chain="eth", contract=TOKEN, decimals=6)
ETH = AssetDocument(asset="ETH", chain="eth", decimals=18)
PRECISIONS = {"USDT": 6, "ETH": 18}


def checked(
    document: AssetDocument, asset: str, to: str = BOB, own: dict[str, str] | None = None, memo: str = ""
) -> Payment:
    known = Asset(id=1, code=asset, precision=PRECISIONS[asset])
    request = PayoutRequest(account="alice", asset=asset, chain="eth", to=to, amount="1", source="test", memo=memo)
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


CHAINS: dict[str, Codec] = {"evm": EvmCodec(), "tron": TronCodec()}


@pytest.mark.parametrize(("kind", "memo"), [("evm", "7"), ("tron", 171 * "€"), ("tron", "a\nb")])
def test_memo_that_the_chain_can_not_carry_is_refused_before_money_is_held(kind: str, memo: str) -> None:
    CHAINS[kind].check_memo("here", "")
    with pytest.raises(InvalidMemo, match="on here"):
        CHAINS[kind].check_memo("here", memo)


def test_memo_is_asked_of_the_chain_of_the_request() -> None:
    with pytest.raises(InvalidMemo, match="its transactions have none"):
        checked(USDT, "USDT", memo="invoice 7")


# --- documents that contradict others --------------------------------------------------------------------------------


def test_a_chain_id_has_one_chain_in_use() -> None:
    """Of two chains with one id, each would count the nonces of the same wallet."""
    alike = CHAIN_KIND.likeness
    assert alike is not None
    assert alike(CHAIN) == alike(msgspec.structs.replace(CHAIN, native="BNB", depth=7))
    assert len({alike(CHAIN), alike(renumbered(56)), alike(msgspec.structs.replace(CHAIN, kind="tron"))}) == 3
    CHAIN_KIND.judge_alike("eth", CHAIN, [Other("old", CHAIN, True)])
    with pytest.raises(InvalidDocument, match="chain main has the chain_id 1 already"):
        CHAIN_KIND.judge_alike("eth", CHAIN, [Other("old", CHAIN, True), Other("main", CHAIN, False)])


def renumbered(chain_id: int) -> ChainDocument:
    return msgspec.structs.replace(CHAIN, chain_id=chain_id)


def test_an_address_has_one_wallet_for_ever() -> None:
    alike, hot = WALLET.likeness, WalletDocument(chain="eth", address=TOKEN)
    assert alike is not None
    assert alike(hot) == alike(msgspec.structs.replace(hot, address=TOKEN.lower()))
    others = [{"chain": "bsc"}, {"address": BOB}, {"address": "TAbc"}, {"address": "TABC"}]
    assert len({alike(hot), *(alike(msgspec.structs.replace(hot, **other)) for other in others)}) == 5
    for retired, why in ((False, "and is in use"), (True, "is retired: bring that back")):
        with pytest.raises(InvalidDocument, match=f"wallet cold has the address {TOKEN} already.*{why}"):
            WALLET.judge_alike("hot", hot, [Other("cold", hot, retired)])


def test_a_token_has_one_asset_in_use() -> None:
    alike, lower = ASSET.likeness, msgspec.structs.replace(USDT, contract=TOKEN.lower())
    assert alike is not None
    assert alike(USDT) == alike(msgspec.structs.replace(lower, asset="USDX"))
    assert len({alike(USDT), alike(ETH), alike(msgspec.structs.replace(USDT, chain="bsc"))}) == 3
    ASSET.judge_alike("usdx:eth", lower, [Other("usdt:eth", USDT, True)])
    with pytest.raises(InvalidDocument, match=f"usdt:eth is the contract {TOKEN.lower()} already"):
        ASSET.judge_alike("usdx:eth", lower, [Other("usdt:eth", USDT, False)])
    with pytest.raises(InvalidDocument, match="eth:eth is the chain's own coin already"):
        ASSET.judge_alike("weth:eth", msgspec.structs.replace(ETH, asset="WETH"), [Other("eth:eth", ETH, False)])


def test_what_the_chain_is_told_to_move_is_shown_exactly_or_not_at_all() -> None:
    """An approver's own machine knows the payment, and nothing of the ledger's assets."""

    def told(raw: str, decimals: int) -> str:
        return on_chain(msgspec.structs.replace(checked(USDT, "USDT"), amount_raw=raw, decimals=decimals))

    assert told("20000000", 6) == "20.000000" and told("1", 18) == "0.000000000000000001" and told("7", 0) == "7"
    most = str(2**256 - 1)
    assert told(most, 18) == f"{most[:-18]}.{most[-18:]}"
    for raw, decimals in (("", 6), ("-1", 6), ("1e9", 6), ("²", 6), ("1", -1), ("1", 10**9)):
        with pytest.raises(ValueError, match="is no amount"):
            told(raw, decimals)
