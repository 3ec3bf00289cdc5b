"""Payouts that operators could not get out of, and documents and requests that name the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_payouts import watch
from tests.paper_chain import PaperCodec
from tests.till import CONTRACT, DOCUMENT, GAS, SUSPENSE, Town, till, wallet_account

from bursar.engine import Operators
from bursar.flows.payouts import PayoutRefused, PayoutRequest
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, Role, WalletDocument
from bursar.flows.payouts.payout import Payout
from bursar.model.authorizations import Approval
from bursar.model.document_kinds import DocumentKind
from bursar.model.documents import InvalidDocument
from bursar.model.errors import InvalidName
from bursar.rails.chain import Balances, Page
from bursar.signer.protocol import SignerRefused

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}


@scenario
async def test_bump_that_the_signer_does_not_sign_does_not_keep_the_payout_from_being_cancelled(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.price = 50
        await t.payouts.bump(made.id, **WHY)
        await t.step(made.id)
        town.signer.refusal = SignerRefused("FEE_TOO_HIGH", "above fee_max", False, 0)
        assert (await t.replace(made.id, 2)).state == "signing"
        await t.payouts.cancel(made.id, **WHY)
        assert (await t.replace(made.id, 2)).state == "dropped", "it will never be signed"
        town.signer.refusal = None
        await t.step(made.id)
        await t.replace(made.id, 3)
        town.chain.mine()
        assert (await t.step(made.id)).state == "failed"
        assert await t.minor("alice") == 100_000_000


@scenario
async def test_payment_under_a_mandate_takes_no_approval(place: Place) -> None:
    """The signer signs neither if it has both, for ever."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        with pytest.raises(PayoutRefused, match="mandate"):
            await t.payouts.approve(made.id, Approval(approver="ann", signature="00" * 64))
        assert (await t.payouts.view(made.id)).approvals == ()


@scenario
async def test_requester_of_a_payout_does_not_approve_it(place: Place) -> None:
    async with till(place, Town()) as t:
        wanted = PayoutRequest(account="alice", asset="USDT", chain="paper", to="@bob", amount="5", source="w-1")
        made = await t.payouts.request(wanted, key="k1", actor="ann")
        with pytest.raises(PayoutRefused) as error:
            await t.payouts.approve(made.id, Approval(approver="Ann", signature="00" * 64))
        assert error.value.reason == "OWN_REQUEST"
        assert (await t.payouts.approve(made.id, Approval(approver="ben", signature="00" * 64))).approvals == ("ben",)


@scenario
async def test_approval_that_another_one_in_the_same_name_has_displaced_can_be_given_again(place: Place) -> None:
    async with till(place, Town()) as t:
        wanted = PayoutRequest(account="alice", asset="USDT", chain="paper", to="@bob", amount="5", source="w-1")
        made = await t.payouts.request(wanted, key="k1")
        right, wrong = (Approval(approver="ben", signature=byte * 64) for byte in ("11", "00"))
        for given in (right, right, wrong, right):
            await t.payouts.approve(made.id, given)
        record = await t.record(made.id)
        assert msgspec.json.decode(record.body, type=Payout).authorization.approvals == (right,)
        assert record.version == 4, "the same one twice leaves one row of history"


@scenario
async def test_bump_above_the_ceiling_says_so(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.price = 1_000
        await t.payouts.bump(made.id, **WHY)
        assert "FEE_ABOVE_CEILING" in (await t.step(made.id)).error
        town.chain.price = 10
        town.chain.mine()
        assert (await t.step(made.id)).state == "confirmed"


@scenario
async def test_wallets_own_account_pays_for_nothing_but_what_moves_to_the_wallet(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        with pytest.raises(PayoutRefused) as refused:
            await t.request(account=wallet_account("paper", "hot1"))
        assert refused.value.reason == "INVALID_ACCOUNT"


@scenario
async def test_wallet_whose_address_is_misspelt_takes_no_nonce_until_it_is_corrected(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied in lower case from an explorer: the signer, which knows it by its checksum, would sign nothing for it."""
    town = Town()
    monkeypatch.setattr(PaperCodec, "check_address", lambda _self, _chain, text: text.replace("0xa", "0xA"))
    async with till(place, town) as t:
        for name in ("hot1", "hot2"):
            gone = await t.documents.retire(WALLET, name, base=1, author="ann", reason="test")
            await t.documents.approve(WALLET, name, gone.hash, actor="ben", reason="test")
        await t.put(WALLET, "hot3", WalletDocument(chain="paper", address="0xa"))
        town.chain.coin["0xA"], town.chain.tokens[CONTRACT, "0xA"] = 10**9, 10**10
        made = await t.request()
        record = await t.step(made.id)
        assert record.state == "pending"
        assert "hot3: its document has the address 0xa, which is written 0xA" in record.error
        with pytest.raises(PayoutRefused) as refused:
            await t.request(to="0xa", key="k2")
        assert refused.value.reason == "OWN_ADDRESS"
        await t.put(WALLET, "hot3", WalletDocument(chain="paper", address="0xA"))
        await t.until(made.id, "confirming")


@scenario
async def test_after_a_deep_reorganisation_operators_have_the_chain_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bursar flow signal chains NAME REBASE`; before it, each look stops the chain again."""
    town, read = Town(), list[int]()
    scan = town.chain.scan

    async def noted(addresses: frozenset[str], after: int, after_hash: str = "") -> Page:
        read.append(after)
        found = await scan(addresses, after, after_hash)
        upto = min(found.up_to, after + 16)
        return msgspec.structs.replace(found, up_to=upto, up_to_hash=town.chain.hash_of(upto))

    async with till(place, town) as t:
        town.chain.height = 1_000
        await watch(t)
        town.chain.fork = "other"
        await watch(t)
        operators = Operators(t.engine)
        await operators.signal("chains", "paper", "REBASE", actor="ann", reason="ticket 17")
        for person in ("ann", "ben"):
            await operators.resume("rail", "chain paper", actor=person, reason="ticket 17")
        monkeypatch.setattr(town.chain, "scan", noted)
        for _ in range(3):
            await watch(t)
        assert read == [800, 816, 832]
        assert await t.engine.store.read.pauses.list() == []


@scenario
@pytest.mark.parametrize("cancelled", [False, True])
async def test_confirmation_that_came_after_a_replacement_was_made_is_booked_once(
    place: Place, cancelled: bool
) -> None:
    """Two workers poll: one has seen the payment final, the other one was faster to write that it is replaced."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        ask = t.payouts.cancel if cancelled else t.payouts.bump
        await ask(made.id, **WHY)
        seen = await t.record(made.id)
        flow = t.engine.flows["payouts"]
        replaced = await flow.actions["confirm"](flow.item(seen))
        town.chain.mine()
        late = await flow.actions["confirm"](flow.item(seen))
        assert (replaced.event, late.outcome) == ("REPLACE", "SUCCESS")
        await t.engine.apply_answer(seen, replaced)
        await t.engine.apply_answer(seen, late)
        await t.until(made.id, "confirmed")
        assert await t.minor(SUSPENSE) == 0
        assert -sum([await t.minor(wallet_account("paper", name)) for name in ("hot1", "hot2")]) == 20_095_000_000
        assert await t.minor(GAS, "ETH") == -210_000
        assert await t.engine.store.read.alerts.open() == []


@scenario
@pytest.mark.parametrize("state", ["signing", "sending"])
async def test_process_without_nodes_of_the_chain_leaves_a_payout_to_others_and_says_so(
    place: Place, state: str
) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, state)
        chains = t.payouts.out.chains
        assert isinstance(chains, dict)
        there = dict(chains)
        chains.clear()
        assert "CHAIN_NOT_CONFIGURED" in (await t.step(made.id)).error
        chains.update(there)
        await t.until(made.id, "confirming")


@scenario
async def test_wallets_that_never_pay_cost_a_payout_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands that are swept: nodes are asked about the hot ones, and accounts are made once."""
    town, asked = Town(), list[str]()
    balances = town.chain.balances

    async def noted(address: str, contracts: Sequence[str]) -> Balances:
        asked.append(address)
        return await balances(address, contracts)

    async with till(place, town) as t:
        await t.put(WALLET, "swept", WalletDocument(chain="paper", address="@swept", role=Role.DEPOSIT))
        await t.payouts.prepare()
        assert await t.minor(wallet_account("paper", "swept")) == 0
        monkeypatch.setattr(t.ledger, "create_account", None)
        await t.payouts.prepare()
        monkeypatch.setattr(town.chain, "balances", noted)
        made = await t.request()
        await t.until(made.id, "processing")
        assert asked == ["@hot1", "@hot2"]


@scenario
async def test_account_that_is_frozen_after_the_request_pays_nothing(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.ledger.freeze("alice")
        record = await t.step(made.id)
        assert record.state == "pending" and "ACCOUNT_FROZEN" in record.error and town.signer.entries == []
        await t.payouts.cancel(made.id, **WHY)
        assert (await t.step(made.id)).state == "failed" and await t.minor("alice") == 100_000_000


BAD_NAMES = [
    (WALLET, "hot.1", WalletDocument(chain="paper", address="@hot9")),
    (WALLET, "paper:hot", WalletDocument(chain="paper", address="@hot9")),
    (WALLET, "hot9", WalletDocument(chain="Paper", address="@hot9")),
    (CHAIN, "pa.per", DOCUMENT),
    (ASSET, "usdc:paper", AssetDocument(asset="USDT", chain="paper", contract=CONTRACT, decimals=6)),
]


@scenario
@pytest.mark.parametrize(("kind", "name", "body"), BAD_NAMES)
async def test_document_whose_name_fits_no_account_or_not_its_body_is_refused(
    place: Place, kind: DocumentKind[Any], name: str, body: msgspec.Struct
) -> None:
    """No process that pays out would start with it, because its account can't be made."""
    town = Town()
    async with till(place, town) as t:
        with pytest.raises((InvalidDocument, InvalidName)):
            await t.put(kind, name, body)
        await t.payouts.prepare()


@scenario
async def test_people_who_decide_too_early_are_told_why_nothing_happens(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        for person in ("ann", "ben"):
            await t.payouts.resolve(made.id, paid=False, actor=person, reason="ticket 17")
        view = await t.payouts.view(made.id)
        assert view.state == "confirming" and "it may still be included" in view.error


@scenario
async def test_second_attempt_of_another_wallet_has_that_wallets_nonce(place: Place) -> None:
    """The first wallet has paid much, the second one little: the number of the first is no nonce of the second."""
    town = Town()
    async with till(place, town) as t:
        town.chain.nonces["@hot1"] = 100
        made = await t.request()
        town.chain.failing.add("@bob")
        await t.until(made.id, "confirming")
        assert [(a.wallet, a.nonce) for a in (await t.payouts.view(made.id)).attempts] == [("hot1", 100)]
        town.chain.mine()
        town.chain.failing.clear()
        assert (await t.step(made.id)).state == "pending"
        await t.until(made.id, "confirming")
        assert [(a.wallet, a.nonce) for a in (await t.payouts.view(made.id)).attempts][1:] == [("hot2", 0)]
        town.chain.mine()
        await t.until(made.id, "confirmed")
