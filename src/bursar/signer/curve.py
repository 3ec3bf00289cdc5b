"""Keys and signatures on the curve secp256k1, and the addresses that a key has on EVM chains and on TRON."""

from __future__ import annotations

from coincurve import PrivateKey
from eth_utils.address import to_checksum_address
from eth_utils.crypto import keccak

from bursar.rails.tron.addresses import PREFIX, text_of


def sign_digest(private_key: bytearray, digest: bytes) -> bytes:
    """A signature on secp256k1, with the nonce of RFC 6979: the same bytes each time."""
    if len(digest) != 32:
        raise ValueError("a digest has 32 bytes")
    return PrivateKey(bytes(private_key)).sign_recoverable(digest, hasher=None)


def public_key(private_key: bytearray) -> bytes:
    """The public key, 64 bytes: x and y."""
    return PrivateKey(bytes(private_key)).public_key.format(compressed=False)[1:]


def compressed_key(private_key: bytearray) -> bytes:
    """The public key, 33 bytes: as BIP-32 counts with it."""
    return PrivateKey(bytes(private_key)).public_key.format()


def evm_address(public: bytes) -> str:
    """The address of a public key on EVM chains, with the checksum of EIP-55."""
    return str(to_checksum_address(keccak(public)[-20:]))


def tron_address(public: bytes) -> str:
    """The address of a public key on TRON."""
    return text_of(PREFIX + keccak(public)[-20:])
