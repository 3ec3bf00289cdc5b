"""The wallets of a policy: those that it names, and one for each user's deposits. Pure.

A section `[deposits.NAME]` stands for as many wallets as there are users: wallet `NAME-1001` is that of user 1001, and
its key is at the section's path, then where `rails.derivation` puts a user. The server derives the same addresses from
the extended public key of that path. A wallet has one name and one key: a name with a leading zero is none, and no two
places of a policy may name or hold the same key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from bursar.model.errors import BursarError
from bursar.rails.derivation import HARDENED, USER_MAX, user_path
from bursar.signer.codecs import WITHOUT_CHAIN
from bursar.signer.keystore import PATH

SECTION_PARTS_MAX: Final = 8  # of its path: two more are the user's
SECTION_CHARACTERS_MAX: Final = 44  # of its name: a wallet's has 64, of which a user's number may take 20
_USER: Final = re.compile(r"[1-9][0-9]{0,18}")
_DIGITS: Final = re.compile(r"[0-9]+")


class Wallet(msgspec.Struct, frozen=True, kw_only=True):
    """A key, by name: where it pays, and where it is kept."""

    name: str
    chain: str
    address: str  # "" for a user's deposits: the key says it
    key: str
    path: str
    kind: str = ""  # of the chain
    user: int = 0  # whose deposits it takes; 0: it is a wallet that the policy names
    section_path: str = ""  # of such a wallet: the path of its section, whose extended public key the server has


class Deposits(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet for each user's deposits on a chain."""

    name: str
    chain: str
    key: str
    path: str
    kind: str = ""  # of the chain

    def wallet(self, user: int) -> Wallet:
        """The wallet of a user."""
        return Wallet(
            name=f"{self.name}-{user}",
            chain=self.chain,
            address="",
            key=self.key,
            path=f"{self.path}/{user_path(user)}",
            kind=self.kind,
            user=user,
            section_path=self.path,
        )


def deposit_wallet(deposits: Mapping[str, Deposits], name: str) -> Wallet | None:
    """The wallet of a user's deposits with this name, if it is the name of one."""
    section, _, digits = name.rpartition("-")
    if section not in deposits or not _USER.fullmatch(digits) or int(digits) > USER_MAX:
        return None
    return deposits[section].wallet(int(digits))


def check_section_path(path: str) -> None:
    """Whether keys for deposits may be below a path; ValueError, with the reason, if not."""
    if not PATH.fullmatch(path) or any(place >= HARDENED for place, _ in _places(path)):
        raise ValueError(f"{path!r} is no derivation path; write m/44'/60'/1'")
    if not path.endswith("'"):
        raise ValueError(
            f"the last part of {path!r} must be hardened (write {path}'): an extended public key and one private key "
            "below it give its own private key away, and hardened it is the key of these deposits alone"
        )
    if path.count("/") > SECTION_PARTS_MAX:
        raise ValueError(f"{path!r} has more than {SECTION_PARTS_MAX} parts")


def contradictions(wallets: Mapping[str, Wallet], deposits: Mapping[str, Deposits]) -> Iterator[str]:
    """What is right by itself and wrong together: names or keys that two places have."""
    names = {**dict.fromkeys(wallets, "wallets"), **dict.fromkeys(deposits, "deposits")}
    for name in sorted(wallets.keys() & deposits.keys()):
        yield f"deposits.{name}: there is a wallet of that name"
    for name, where in names.items():
        known, _, digits = name.rpartition("-")
        if known in deposits and _DIGITS.fullmatch(digits):
            yield f"{where}.{name}: that could be a user's wallet of deposits.{known}; choose another name"
    for section in deposits.values():
        for wallet in wallets.values():
            if wallet.key == section.key and _is_below(wallet.path, section.path):
                yield f"wallets.{wallet.name}: its key is one of deposits.{section.name}; choose another path"
    listed = list(deposits.values())
    for index, one in enumerate(listed):
        for other in listed[index + 1 :]:
            # The same path is right for chains whose transactions name them: a user has one address on all of them.
            nested = _is_below(one.path, other.path) != _is_below(other.path, one.path)
            same = _is_below(one.path, other.path) and _is_below(other.path, one.path)
            if one.key == other.key and (nested or (same and _excludes(one, other))):
                yield f"deposits.{one.name} and deposits.{other.name}: their keys would be the same; use two paths"


def _excludes(one: Deposits, other: Deposits) -> bool:
    """Whether two sections must not give a user one address."""
    return one.chain == other.chain or (one.kind == other.kind and one.kind in WITHOUT_CHAIN)


def wrong_keys(
    wallets: Mapping[str, Wallet], deposits: Mapping[str, Deposits], address: Callable[[Wallet], str]
) -> Iterator[str]:
    """Where the keys are not what the policy says; `address`: of a wallet's key, or a BursarError."""
    for wallet in wallets.values():
        try:
            found = address(wallet)
        except BursarError as error:
            yield f"wallets.{wallet.name}: {error}"
            continue
        if found != wallet.address:
            yield f"wallets.{wallet.name}: its key has the address {found}, not {wallet.address}"
    first: list[tuple[Deposits, str]] = []
    for section in deposits.values():
        try:
            found = address(section.wallet(1))
        except BursarError as error:
            yield f"deposits.{section.name}: {error}"
            continue
        # The keystore may have the same words under two names.
        if twins := [one.name for one, its in first if its == found and _excludes(one, section)]:
            yield f"deposits.{section.name}: user 1 has the address {found} in deposits.{twins[0]}, too"
        first.append((section, found))


def _places(path: str) -> tuple[tuple[int, bool], ...]:
    """A path as BIP-32 counts, each place with whether it is hardened: it can be written in more than one way."""
    return tuple((int(part.rstrip("'")), part.endswith("'")) for part in path.split("/")[1:])


def _is_below(path: str, above: str) -> bool:
    if not (PATH.fullmatch(path) and PATH.fullmatch(above)):  # said already, or a private key, which has none
        return False
    return _places(path)[: len(_places(above))] == _places(above)
