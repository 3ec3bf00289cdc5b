"""Keys, raw transactions made with eth_account, and chains to send them to: shared by the tests of simulated chains."""

from __future__ import annotations

from typing import Any, Final

from eth_account import Account
from eth_account.signers.local import LocalAccount
from eth_utils.address import to_checksum_address

from bursar.sim.chain_state import Behaviour, Token
from bursar.sim.evm_world import GWEI, Terms, World

COIN_UNIT: Final = 10**18
ALICE: Final[LocalAccount] = Account.from_key(b"\x01" * 32)
BOB: Final[LocalAccount] = Account.from_key(b"\x02" * 32)
CAROL: Final = "0x" + "ca" * 20
USDT: Final = "0x" + "0d" * 20


def transfer_data(to: str, amount: int) -> bytes:
    return bytes.fromhex("a9059cbb") + bytes(12) + bytes.fromhex(to[2:]) + amount.to_bytes(32, "big")


def signed(
    key: LocalAccount = ALICE,
    nonce: int = 0,
    to: str = CAROL,
    value: int = COIN_UNIT,
    *,
    data: bytes = b"",
    gas: int = 21_000,
    max_fee: int = 100 * GWEI,
    tip: int = 2 * GWEI,
    chain_id: int = 1,
    **more: Any,
) -> bytes:
    """Raw bytes of type 2, or legacy if a gas price is given."""
    fees = {"maxFeePerGas": max_fee, "maxPriorityFeePerGas": tip}
    fields: dict[str, Any] = {"nonce": nonce, "to": to_checksum_address(to)}
    fields |= {"value": value, "data": data, "gas": gas, "chainId": chain_id}
    return bytes(key.sign_transaction({**fields, **({} if "gasPrice" in more else fees), **more}).raw_transaction)


def pays_token(amount: int, *, key: LocalAccount = ALICE, nonce: int = 0, to: str = CAROL, **more: Any) -> bytes:
    return signed(key, nonce, USDT, 0, data=transfer_data(to, amount), **{"gas": 100_000, **more})


def a_world(behaviour: Behaviour = Behaviour.HONEST, **terms: Any) -> World:
    """Alice and Bob have coin; Alice has tokens."""
    world = World(Terms(**terms))
    world.deploy(Token(USDT, behaviour=behaviour))
    world.fund(ALICE.address, 100 * COIN_UNIT)
    world.fund(BOB.address, 100 * COIN_UNIT)
    world.fund(ALICE.address, 1_000_000, USDT)
    world.mine()
    return world


def assert_conserved(world: Any) -> None:
    for asset, (total, minted) in world.totals().items():
        assert total == minted, f"{asset or 'coin'}: {total} exist, {minted} were minted"
