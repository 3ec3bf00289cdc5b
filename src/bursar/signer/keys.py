"""Where signatures come from: the seam for a hardware module or a key service.

`Keys` is all that the signer needs: the address of a wallet, and a signature over 32 bytes. `KeystoreKeys` is the
encrypted file. To use a hardware module (PKCS #11) or a key service of a cloud, implement these two methods and give
the object to `Service`; the keystore is then not needed at all.

What an implementation must keep: the signature is over exactly the digest that it was given (no hashing again), `s`
is in the lower half of the curve's order, and `v` is the recovery id (0 or 1), which a device that does not give it
finds by recovering the public key twice. A signature that never left is no harm: the log is written after `sign`, and
before an answer. It should be deterministic (RFC 6979), though the signer does not rest on it: it stores the bytes.

Wallets of users' deposits (`Wallet.user` above 0) are as many as there are users. Their addresses are derived from the
extended public key of `Wallet.section_path` (`rails.derivation`): let the device give that key once, and keep it, for
`address` is asked for each request and must not wait for a device. To sign, the device derives the private key at
`Wallet.path` (BIP-32) inside. One that can't derive can't hold deposits: keep their mnemonic in a keystore, apart from
the keys of the wallets that they are swept to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Protocol

from bursar.rails.derivation import ExtendedKey
from bursar.signer import vault
from bursar.signer.curve import evm_address, public_key, sign_digest, tron_address
from bursar.signer.errors import KeystoreRefused, KeyUnavailable
from bursar.signer.keystore import Keystore
from bursar.signer.wallets import Wallet

ADDRESSES_MAX: Final = 10_000  # of users, in memory: each costs a tenth of a millisecond to derive again


class Keys(Protocol):
    """Holds private keys. Never gives one away."""

    def address(self, wallet: Wallet) -> str:
        """The address that the wallet's key has, as its chain writes it. KeystoreRefused if there is no such key."""
        ...

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        """65 bytes: r, s, and the recovery id. KeyUnavailable if it can't be done now."""
        ...


class KeystoreKeys:
    """`Keys` on the encrypted file.

    The private key of a wallet that the policy names is derived when it is first used, and stays in memory. That of a
    user's wallet is derived for each signature, and wiped: there is no end to users.
    """

    def __init__(self, keystore: Keystore) -> None:
        self._keystore = keystore
        self._private: dict[tuple[str, str], bytearray] = {}
        self._extended: dict[tuple[str, str], ExtendedKey] = {}  # of the sections for deposits
        self._user_public = lru_cache(ADDRESSES_MAX)(self._derived)

    def __repr__(self) -> str:
        return f"KeystoreKeys({self._keystore!r})"

    def address(self, wallet: Wallet) -> str:
        if wallet.user:
            public = self._user_public(wallet.key, wallet.section_path, wallet.user)
        else:
            public = public_key(self._key(wallet))
        return tron_address(public) if wallet.kind == "tron" else evm_address(public)

    async def sign(self, wallet: Wallet, digest: bytes) -> bytes:
        try:
            if not wallet.user:
                return sign_digest(self._key(wallet), digest)
            key = self._keystore.private_key(wallet.key, wallet.path)
        except KeystoreRefused as error:
            raise KeyUnavailable(wallet.name, error.why) from None
        try:
            return sign_digest(key, digest)
        finally:
            vault.wipe(key)

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

    def _derived(self, key: str, section_path: str, user: int) -> bytes:
        """The public key of a user's wallet, by the extended public key alone, as the server derives it."""
        place = (key, section_path)
        if place not in self._extended:
            self._extended[place] = self._keystore.extended_key(*place)
        try:
            return self._extended[place].of_user(user).public_key[1:]
        except ValueError as error:  # one user in 2^127
            raise KeystoreRefused(key, str(error)) from None
