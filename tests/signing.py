"""Builders for tests of the signer: a small codec, a policy, keys, approvers, and requests that a signer would sign."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from coincurve import PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bursar.model.authorizations import Approval, Authorization, Payment
from bursar.rails.chain import (
    Decoded,
    Fee,
    InvalidAddress,
    Network,
    Order,
    Shape,
    Signed,
    Slot,
    Undecodable,
)
from bursar.signer.approvals import Approvable
from bursar.signer.curve import evm_address, public_key, sign_digest
from bursar.signer.errors import KeystoreRefused
from bursar.signer.policy import Policy, parse
from bursar.signer.protocol import SignRequest
from bursar.signer.state import State
from bursar.signer.wallets import Wallet

HOUR_US = 3_600_000_000
NOW_US = 1_700_000_000_000_000
CHAIN_ID = 56
TOKEN = "0x" + "c0" * 20
# Addresses as the codec below writes them.
SHOP = "0x" + "51" * 20
BANK = "0x" + "52" * 20
DENIED = "0x" + "66" * 20
KEYS = {"main": bytearray(b"\x11" * 32), "cold": bytearray(b"\x22" * 32)}
HOT = evm_address(public_key(KEYS["main"])).lower()
COLD = evm_address(public_key(KEYS["cold"])).lower()
SECRET = b"a secret of thirty-two bytes, or more"
FEE = Fee(gas_limit=21_000, price=10)


class FakeCodec:
    """A codec with the interface of the real ones, and bytes that a test can read."""

    kind = "evm"

    def check_address(self, chain: str, text: str) -> str:
        if len(text) != 42 or not text.startswith("0x") or not all(c in "0123456789abcdefABCDEF" for c in text[2:]):
            raise InvalidAddress(chain, text, "0x and 40 digits")
        return text.lower()

    def check_memo(self, chain: str, text: str) -> None:
        return  # any text goes

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        to, contract, amount = (sender, "", 0) if shape is Shape.CANCEL else (order.to, order.contract, order.amount)
        memo = "" if shape is Shape.CANCEL else order.memo
        return unsigned(to, contract, amount, nonce=slot.nonce, fee=fee, chain_id=network.chain_id, memo=memo)

    def decode(self, unsigned: bytes) -> Decoded:
        try:
            parts = msgspec.msgpack.decode(unsigned, type=tuple[int, int | None, str, str, str, int, int, str])
        except msgspec.MsgspecError as error:
            raise Undecodable("fake", str(error)) from None
        chain_id, nonce, to, contract, amount, gas, price, memo = parts
        return Decoded(
            chain_id=chain_id,
            to=to,
            contract=contract,
            amount=int(amount),
            slot=Slot(nonce=nonce),
            fee=Fee(gas_limit=gas, price=price),
            memo=memo,
        )

    def digest(self, unsigned: bytes) -> bytes:
        return hashlib.sha256(unsigned).digest()

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        found = PublicKey.from_signature_and_message(signature, self.digest(unsigned), hasher=None)
        if evm_address(found.format(compressed=False)[1:]).lower() != sender:
            raise Undecodable("fake", "another key has signed")
        raw = msgspec.msgpack.encode([unsigned, signature])
        return Signed(raw=raw, hash="0x" + hashlib.sha256(raw).hexdigest())

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        unsigned, signature = msgspec.msgpack.decode(raw, type=tuple[bytes, bytes])
        found = PublicKey.from_signature_and_message(signature, self.digest(unsigned), hasher=None)
        sender = evm_address(found.format(compressed=False)[1:]).lower()
        return self.decode(unsigned), sender, "0x" + hashlib.sha256(raw).hexdigest()


def codecs(kind: str) -> FakeCodec:
    return {"evm": FakeCodec}[kind]()


class FakeKeys:
    """`Keys` without a file."""

    def address(self, wallet: Wallet) -> str:
        if wallet.key not in KEYS:
            raise KeystoreRefused("double", f"it has no key {wallet.key!r}")
        return evm_address(public_key(KEYS[wallet.key]))

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        return sign_digest(KEYS[wallet.key], digest)


def unsigned(
    to: str = SHOP,
    contract: str = TOKEN,
    amount: int = 500,
    *,
    nonce: int | None = 0,
    fee: Fee = FEE,
    chain_id: int = CHAIN_ID,
    memo: str = "",
) -> bytes:
    return msgspec.msgpack.encode([chain_id, nonce, to, contract, str(amount), fee.gas_limit, fee.price, memo])


def cancelling(nonce: int = 0, fee: Fee = FEE, **other: Any) -> bytes:
    fields: dict[str, Any] = {"to": HOT, "contract": "", "amount": 0, "nonce": nonce, "fee": fee}
    return unsigned(**fields | other)


# --- approvers

APPROVERS = {
    name: Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()) for name in ("ann", "ben", "eve")
}


def public_half(name: str) -> str:
    return APPROVERS[name].public_key().public_bytes_raw().hex()


def approval(what: Approvable, name: str) -> Approval:
    return Approval(approver=name, signature=APPROVERS[name].sign(what.canonical()).hex())


def approved(what: Payment, *names: str) -> Authorization:
    return Authorization(approvals=tuple(approval(what, name) for name in names))


# --- requests


def payment(payout: str = "p1", amount: int = 500, **other: Any) -> Payment:
    fields: dict[str, Any] = {
        "payout": payout,
        "account": "user:1:funding",
        "asset": "USDT",
        "amount": str(amount),
        "chain": "bsc",
        "chain_id": CHAIN_ID,
        "contract": TOKEN,
        "decimals": 18,
        "amount_raw": str(amount),
        "to": SHOP,
    }
    return Payment(**fields | other)


def request(
    payout: str = "p1",
    attempt: int = 0,
    *,
    nonce: int = 0,
    pays: Payment | None = None,
    by: Authorization | None = None,
    shape: Shape = Shape.PAY,
    data: bytes | None = None,
    wallet: str = "hot",
    **other: Any,
) -> SignRequest:
    """A request that the policy below allows, unless a test says otherwise."""
    pays = pays or payment(payout)
    if data is None and shape is Shape.CANCEL:
        data = cancelling(nonce)
    fields: dict[str, Any] = {
        "payout": payout,
        "attempt": attempt,
        "shape": shape,
        "chain": pays.chain,
        "wallet": wallet,
        "sender": HOT if wallet == "hot" else COLD,
        "unsigned": data or unsigned(pays.to, pays.contract, int(pays.amount_raw), nonce=nonce, memo=pays.memo),
        "payment": pays,
        "authorization": by or approved(pays, "ann"),
    }
    return SignRequest(**fields | other)


# --- the policy

POLICY = f"""
name = "hot"

[unhalt]
people = ["ann", "ben", "carol"]

[chains.bsc]
kind = "evm"
chain_id = {CHAIN_ID}
fee_max = 2_000_000
cancel_fee_max = "1000000"
cancels_daily = 3

[wallets.hot]
chain = "bsc"
address = "{HOT}"
key = "main"

[wallets.cold]
chain = "bsc"
address = "{COLD}"
key = "cold"

[approvers.ann]
public_key = "{public_half("ann")}"
[approvers.ben]
public_key = "{public_half("ben")}"

[assets.bsc.USDT]
contract = "{TOKEN}"
decimals = 18
payment_max = 5_000
dual_above = 1_000
hourly_max = 8_000
daily_max = 12_000
deny = ["{DENIED}"]

[assets.bsc.BNB]
contract = ""
decimals = 18
payment_max = 100
dual_above = 100
hourly_max = 1_000
daily_max = 1_000
allow = ["{BANK}"]

[mandates.swaps]
chain = "bsc"
asset = "USDT"
payment_max = 900
hourly_max = 1_500
daily_max = 2_000

[mandates.sweep]
chain = "bsc"
asset = "USDT"
payment_max = 5_000
hourly_max = 8_000
daily_max = 12_000
own_wallets = true

[callers.payouts]
secret_file = "payouts.secret"
rights = ["preview", "sign", "cancel", "log", "status", "halt", "release"]

[callers.viewer]
secret_file = "viewer.secret"
rights = ["status"]
"""


def policy(text: str = POLICY, **replaced: str) -> Policy:
    """The policy, with some of its text replaced."""
    for old, new in replaced.items():
        text = text.replace(old, new)
    return parse("policy.toml", text.encode(), codecs)


def empty_state() -> State:
    return State(name="hot", identity="1" * 32, number=1)
