"""Where signatures come from: the seam for a hardware module or a key service.

`Keys` is all that the signer needs: the address of a wallet, and a signature over 32 bytes. `KeystoreKeys` is the
encrypted file. To use a hardware module (PKCS #11) or a key service of a cloud, implement these two methods and give
the object to `Service`; the keystore is then not needed at all.

What an implementation must keep: the signature is over exactly the digest that it was given (no hashing again), `s`
is in the lower half of the curve's order, and `v` is the recovery id (0 or 1), which a device that does not give it
finds by recovering the public key twice. A signature that never left is no harm: the log is written after `sign`, and
before an answer. It should be deterministic (RFC 6979), though the signer does not rest on it: it stores the bytes.
"""

from __future__ import annotations

from typing import Protocol

from bursar.signer import vault
from bursar.signer.curve import evm_address, public_key, sign_digest, tron_address
from bursar.signer.errors import KeystoreRefused, KeyUnavailable
from bursar.signer.keystore import Keystore
from bursar.signer.policy import Wallet


class Keys(Protocol):
    """Holds private keys. Never gives one away."""

    def address(self, wallet: Wallet) -> str:
        """The address that the wallet's key has, as its chain writes it. KeystoreRefused if there is no such key."""
        ...

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        """65 bytes: r, s, and the recovery id. KeyUnavailable if it can't be done now."""
        ...


class KeystoreKeys:
    """`Keys` on the encrypted file. Private keys are derived when a wallet is first used, and stay in memory."""

    def __init__(self, keystore: Keystore) -> None:
        self._keystore = keystore
        self._private: dict[tuple[str, str], bytearray] = {}

    def __repr__(self) -> str:
        return f"KeystoreKeys({self._keystore!r})"

    def address(self, wallet: Wallet) -> str:
        public = public_key(self._key(wallet))
        return tron_address(public) if wallet.kind == "tron" else evm_address(public)

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        try:
            key = self._key(wallet)
        except KeystoreRefused as error:
            raise KeyUnavailable(wallet.name, error.why) from None
        return sign_digest(key, digest)

    def wipe(self) -> None:
        """Overwrite every key."""
        for key in self._private.values():
            vault.wipe(key)
        self._private.clear()
        self._keystore.wipe()

    def _key(self, wallet: Wallet) -> bytearray:
        place = (wallet.key, wallet.path)
        if place not in self._private:
            self._private[place] = self._keystore.private_key(*place)
        return self._private[place]
