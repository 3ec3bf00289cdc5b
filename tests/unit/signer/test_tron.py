"""A signer of TRON wallets: the same rules on other bytes, and what is of TRON alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conformance.test_payouts_tron import OpenKeys, policy_of
from tests.tron_fake import CODEC, HOT, OTHER, SHOP, TOKEN, TRX, USDT, usdt

from bursar.model.authorizations import Authorization, Payment
from bursar.ports import SystemPorts
from bursar.rails.chain import Fee, Network, Order, Shape, Slot
from bursar.signer.codecs import codec_of
from bursar.signer.errors import PolicyRefused
from bursar.signer.keys import KeystoreKeys
from bursar.signer.keystore import Keystore
from bursar.signer.policy import parse
from bursar.signer.protocol import Never, Signature, SignerRefused, SignRequest
from bursar.signer.service import Service
from bursar.signer.wallets import Wallet

CHAIN_ID = 728_126_428
NETWORK = Network(name="tron", kind="tron", chain_id=CHAIN_ID)
WORDS = b"abandon " * 11 + b"about"
PATH = "m/44'/195'/0'/0/0"
FEE = Fee(gas_limit=100_000, price=100)


def slot(number: int = 1) -> Slot:
    return Slot(expires=1_794_967_848_168, reference=f"00862dc3400f9103d403/{number}")


def request(
    payout: str = "p1",
    attempt: int = 1,
    *,
    at: Slot | None = None,
    order: Order | None = None,
    owner: str = HOT,
    fee: Fee = FEE,
    **payment: Any,
) -> SignRequest:
    fields: dict[str, Any] = {
        "payout": payout,
        "account": "user:1:funding",
        "asset": "USDT",
        "amount": str(5 * USDT),
        "chain": "tron",
        "chain_id": CHAIN_ID,
        "contract": TOKEN,
        "decimals": 6,
        "amount_raw": str(5 * USDT),
        "to": SHOP,
    }
    return SignRequest(
        payout=payout,
        attempt=attempt,
        shape=Shape.PAY,
        chain="tron",
        wallet="hot",
        sender=HOT,
        unsigned=CODEC.build(NETWORK, owner, order or usdt(), Shape.PAY, at or slot(), fee),
        payment=Payment(**fields | payment),
        authorization=Authorization(mandate="auto"),
    )


def play(folder: Path, story: Any) -> None:
    async def run() -> None:
        (folder / "log").mkdir(mode=0o700)
        policy = policy_of(CHAIN_ID)
        service = await Service.open(SystemPorts(), str(folder / "log"), policy, OpenKeys(), codec_of, new=True)
        running = asyncio.create_task(service.run())
        try:
            await story(service)
        finally:
            service.stop()
            await running
            service.close()

    asyncio.run(run())


async def refused(service: Service, asked: SignRequest, reason: str) -> None:
    with pytest.raises(SignerRefused) as no:
        await service.sign("payouts", asked)
    assert no.value.reason == reason, no.value.why


def test_same_attempt_has_the_same_bytes_and_another_slot_needs_a_death(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        first = await service.sign("payouts", request())
        assert isinstance(first, Signature) and CODEC.read(first.raw)[1:] == (HOT, first.hash)
        assert await service.sign("payouts", request()) == first
        await refused(service, request(at=slot(2)), "OTHER_BYTES")
        await refused(service, request(attempt=2, at=slot(2)), "SECOND_SLOT")
        await refused(service, request("p2"), "NONCE_TAKEN")  # the same transaction for two payouts: one would be paid
        assert isinstance(await service.sign("payouts", request("p2", at=slot(3))), Signature)
        assert isinstance(await service.cancel("payouts", "p3", 1), Never)

    play(tmp_path, story)


def test_what_the_bytes_do_is_compared_with_the_payment_and_the_policy(tmp_path: Path) -> None:
    async def story(service: Service) -> None:
        await refused(service, request(order=usdt(6 * USDT)), "MISMATCH")
        await refused(service, request(order=usdt(to=OTHER)), "MISMATCH")
        await refused(service, request(order=usdt(memo="x")), "MISMATCH")
        await refused(service, request(chain_id=1), "MISMATCH")
        await refused(service, request(fee=Fee(gas_limit=400_000, price=100)), "FEE_TOO_HIGH")
        await refused(service, msgspec.structs.replace(request(), unsigned=b"\x0a\x00"), "UNDECODABLE")
        await refused(service, request(owner=OTHER), "UNDECODABLE")
        cancels = msgspec.structs.replace(request(), shape=Shape.CANCEL)
        await refused(service, cancels, "MISMATCH")
        assert await service.log(0, 10) == ()

    play(tmp_path, story)


def test_one_address_on_two_chains_of_this_kind_is_refused() -> None:
    """The bytes do not name their chain: a payment on a test network would be valid on the real one."""
    text = f"""
name = "hot"
[unhalt]
people = ["ann", "ben"]
[chains.tron]
kind = "tron"
chain_id = {CHAIN_ID}
fee_max = "{TRX}"
cancel_fee_max = "1"
[chains.nile]
kind = "tron"
chain_id = 3448148188
fee_max = "{TRX}"
cancel_fee_max = "1"
[wallets.real]
chain = "tron"
address = "{HOT}"
key = "main"
[wallets.test]
chain = "nile"
address = "%s"
key = "test"
"""
    assert len(parse("policy", (text % OTHER).encode(), codec_of).wallets) == 2
    with pytest.raises(PolicyRefused, match="same address on chains of one kind"):
        parse("policy", (text % HOT).encode(), codec_of)


def test_keystore_lists_and_signs_for_paths_of_tron() -> None:
    store = Keystore("keys", {}, {})
    listed = store.add("main", bytearray(WORDS), (PATH, "m/44'/60'/0'/0/0"))
    assert listed.addresses[PATH] == "TUEZSdKsoDHQMeZwihtdoBiN46zxhGWYdH"
    assert listed.addresses["m/44'/60'/0'/0/0"].startswith("0x")
    wallet = Wallet(name="w", chain="tron", address=listed.addresses[PATH], key="main", path=PATH, kind="tron")
    assert KeystoreKeys(store).address(wallet) == wallet.address
