"""What a signer may sign: its own copy of the policy, a TOML file on its own host. Pure.

The signer believes this file and its own log, and nothing that a caller says (W32). Amounts are integers of the
chain's smallest unit, written as text or as integers. A file that is wrong in any way is refused whole, with every
problem named.

    name = "hot"
    nodes_file = "nodes.toml"         # leave it out: the signer has no nodes of its own (W31)

    [unhalt]                          # who lets it sign again after a halt: two of these people, on the signer's host;
    people = ["ann", "ben", "eve"]    # or, with approvals = true instead, two approvers by signature

    [chains.bsc]
    kind = "evm"
    chain_id = 56
    fee_max = "5000000000000000"      # gas × price of one payment, at most
    cancel_fee_max = "5000000000000000"
    cancels_daily = 200               # cancellations of one wallet in 24 hours
    depth = 15                        # EVM, with own nodes: blocks on top of a transaction that is final
    finalized_tag = true              # and the chain itself calls its block final; false: depth alone decides
    genesis = "0x…"                   # hash of block 0, which a node must have; leave it out: not checked

    [wallets.hot-bsc]
    chain = "bsc"
    address = "0x…"
    key = "main"                      # of the keystore
    path = "m/44'/60'/0'/0/0"         # of a mnemonic; leave it out for a private key

    [deposits.dep-bsc]                # each user's own address; what arrives is swept to the wallets above alone
    chain = "bsc"
    key = "main"                      # of the keystore, a mnemonic
    path = "m/44'/60'/1'"             # the key of user 1001, wallet dep-bsc-1001, is at PATH/0/1001

    [approvers.ann]
    public_key = "…"                  # of `bursar signer approver-key`

    [assets.bsc.USDT]
    contract = "0x…"                  # "": the chain's own coin
    decimals = 18
    payment_max = "…"                 # of one payment
    dual_above = "…"                  # above it, two people
    hourly_max = "…"                  # of one wallet, in any 60 minutes
    daily_max = "…"                   # in any 24 hours
    allow = []                        # destinations; empty: any that is not denied
    deny = []

    [mandates.sweep]                  # payments without approvals
    chain = "bsc"
    asset = "USDT"
    payment_max = "…"
    hourly_max = "…"
    daily_max = "…"
    own_wallets = true                # to the wallets of that chain that are named above
    own_deposits = false              # to users' addresses for deposits: what a sweep costs
    allow = []                        # and to these; with none of the three: to any

    [callers.payouts]
    secret_file = "/etc/bursar/payouts.secret"
    rights = ["preview", "sign", "cancel", "log", "status"]  # and halt, release: for operators

Not here: reading the file and the secrets (the command), deciding (`rules`).
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from bursar.model.actors import check_actor, same_person
from bursar.model.errors import BursarError
from bursar.signer.approvals import is_public_key
from bursar.signer.codecs import WITHOUT_CHAIN, Codecs
from bursar.signer.errors import PolicyRefused
from bursar.signer.keystore import NAME, PATH
from bursar.signer.wallets import (
    SECTION_CHARACTERS_MAX,
    Deposits,
    Wallet,
    check_section_path,
    contradictions,
    deposit_wallet,
)

T = TypeVar("T")

AMOUNT_MAX: Final = 2**256
CHAIN_ID_MAX: Final = 2**53
DECIMALS_MAX: Final = 77
DEPTH_MAX: Final = 100_000
CANCELS_DAILY: Final = 200
LOCAL: Final = "local"  # the caller on the signer's own host: no caller of a policy has that name
_BLOCK_HASH: Final = re.compile(r"0x[0-9a-fA-F]{64}")
_CODE: Final = re.compile(r"[A-Z0-9]{1,32}")
_REQUIRED: Final = object()


class Right(StrEnum):
    """What a caller may ask for."""

    PREVIEW = "preview"
    SIGN = "sign"
    CANCEL = "cancel"
    LOG = "log"
    STATUS = "status"
    HALT = "halt"
    RELEASE = "release"


class ChainPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A chain, and what a transaction there may cost."""

    name: str
    kind: str
    chain_id: int
    fee_max: int
    cancel_fee_max: int
    cancels_daily: int
    depth: int  # 0: not said, which does without own nodes only
    finalized_tag: bool
    genesis: str


class AssetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What may be paid of an asset on a chain."""

    code: str
    chain: str
    contract: str
    decimals: int
    payment_max: int
    dual_above: int
    hourly_max: int
    daily_max: int
    allow: frozenset[str]
    deny: frozenset[str]


class Mandate(msgspec.Struct, frozen=True, kw_only=True):
    """Payments that need no approval."""

    name: str
    chain: str
    asset: str
    payment_max: int
    hourly_max: int
    daily_max: int
    own_wallets: bool
    own_deposits: bool
    allow: frozenset[str]

    @property
    def is_for_some(self) -> bool:
        """Whether it is for some destinations alone."""
        return self.own_wallets or self.own_deposits or bool(self.allow)


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A program that may ask."""

    name: str
    secret_file: str
    rights: frozenset[Right]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    name: str
    digest: str  # SHA-256 of the file
    chains: dict[str, ChainPolicy]
    wallets: dict[str, Wallet]
    deposits: dict[str, Deposits]
    approvers: dict[str, str]  # name → public key
    assets: dict[tuple[str, str], AssetPolicy]  # by (chain, code)
    mandates: dict[str, Mandate]
    callers: dict[str, Caller]
    nodes_file: str  # "": no nodes of its own
    unhalt_people: tuple[str, ...]  # empty: by approvals

    def wallet(self, name: str) -> Wallet | None:
        """The wallet of this name: one of `wallets`, or that of a user's deposits, whose address its key says."""
        return self.wallets.get(name) or deposit_wallet(self.deposits, name)

    def own_addresses(self, chain: str) -> frozenset[str]:
        """The addresses of the wallets of a chain that the policy names."""
        return frozenset(wallet.address for wallet in self.wallets.values() if wallet.chain == chain)


def parse(file: str, contents: bytes, codecs: Codecs) -> Policy:
    """The policy in a file, or PolicyRefused with all that is wrong."""
    try:
        found = tomllib.loads(contents.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyRefused(file, f"it is not TOML: {error}") from None
    reader = _Reader(codecs)
    policy = reader.policy(found, hashlib.sha256(contents).hexdigest())
    if reader.problems:
        raise PolicyRefused(file, "; ".join(reader.problems))
    return policy


def _impossible(mandate: Mandate, policy: Policy) -> Iterator[str]:
    """What a mandate says that can never be."""
    asset = policy.assets.get((mandate.chain, mandate.asset))
    if asset is None:
        yield f"there is no asset {mandate.asset} on {mandate.chain}"
    elif mandate.own_deposits and asset.allow:
        yield f"own_deposits: assets.{mandate.chain}.{mandate.asset}.allow lets nothing go to users' addresses"
    if mandate.own_deposits and all(section.chain != mandate.chain for section in policy.deposits.values()):
        yield f"own_deposits: there are no deposits on {mandate.chain}"


class _Reader:
    """Reads tables, and collects what is wrong with them."""

    def __init__(self, codecs: Codecs) -> None:
        self.problems: list[str] = []
        self._codecs = codecs
        self._chains: dict[str, ChainPolicy] = {}

    def policy(self, found: dict[str, Any], digest: str) -> Policy:
        sections = {"chains", "wallets", "deposits", "approvers", "assets", "mandates", "callers"}
        self._unknown("", found, {"name", "nodes_file", "unhalt", *sections})
        # Chains first: addresses are read with their codecs.
        self._chains = self._section(found, "chains", self._chain)
        assets: dict[tuple[str, str], AssetPolicy] = {}
        for chain, listed in self._tables(found, "assets").items():
            if chain not in self._chains:
                self.problems.append(f"assets.{chain}: there is no such chain")
                continue
            for code, table in self._tables({f"assets.{chain}": listed}, f"assets.{chain}").items():
                assets[chain, code] = self._asset(chain, code, table)
        policy = Policy(
            name=self._name(found.get("name"), "name"),
            digest=digest,
            chains=self._chains,
            wallets=self._section(found, "wallets", self._wallet),
            deposits=self._section(found, "deposits", self._deposits),
            approvers=self._section(found, "approvers", self._approver),
            assets=assets,
            mandates=self._section(found, "mandates", self._mandate),
            callers=self._section(found, "callers", self._caller),
            nodes_file=self._text("policy", found, "nodes_file", ""),
            unhalt_people=self._unhalt(found.get("unhalt")),
        )
        self._contradictions(policy)
        return policy

    # --- sections

    def _chain(self, name: str, table: dict[str, Any]) -> ChainPolicy:
        where = f"chains.{name}"
        amounts = {"chain_id", "fee_max", "cancel_fee_max", "cancels_daily", "depth"}
        self._unknown(where, table, {"kind", "finalized_tag", "genesis", *amounts})
        self._name(name, where)
        kind = self._text(where, table, "kind")
        try:
            self._codecs(kind)
        except (KeyError, ImportError):
            self.problems.append(f"{where}.kind: no codec for {kind!r} is installed")
        genesis = self._text(where, table, "genesis", "")
        if genesis and not _BLOCK_HASH.fullmatch(genesis):
            self.problems.append(f"{where}.genesis: 0x and 64 hexadecimal digits are expected")
        return ChainPolicy(
            name=name,
            kind=kind,
            chain_id=self._number(where, table, "chain_id", CHAIN_ID_MAX),
            fee_max=self._number(where, table, "fee_max"),
            cancel_fee_max=self._number(where, table, "cancel_fee_max"),
            cancels_daily=self._number(where, table, "cancels_daily", default=CANCELS_DAILY),
            depth=self._number(where, table, "depth", DEPTH_MAX, default=0),
            finalized_tag=self._yes_or_no(where, table, "finalized_tag", default=True),
            genesis=genesis,
        )

    def _wallet(self, name: str, table: dict[str, Any]) -> Wallet:
        where = f"wallets.{name}"
        self._unknown(where, table, {"chain", "address", "key", "path"})
        self._name(name, where)
        chain, path = self._chain_name(where, table), self._text(where, table, "path", "")
        if path and not PATH.fullmatch(path):
            self.problems.append(f"{where}.path: {path!r} is no derivation path")
        address = self._address(f"{where}.address", chain, self._text(where, table, "address"))
        kind = self._chains[chain].kind if chain in self._chains else ""
        key = self._text(where, table, "key")
        return Wallet(name=name, chain=chain, address=address, key=key, path=path, kind=kind)

    def _deposits(self, name: str, table: dict[str, Any]) -> Deposits:
        where = f"deposits.{name}"
        self._unknown(where, table, {"chain", "key", "path"})
        self._name(name, where)
        if len(name) > SECTION_CHARACTERS_MAX:
            self.problems.append(f"{where}: a name of at most {SECTION_CHARACTERS_MAX} characters is expected")
        chain, path = self._chain_name(where, table), self._text(where, table, "path")
        try:
            check_section_path(path)
        except ValueError as error:
            self.problems.append(f"{where}.path: {error}")
        kind = self._chains[chain].kind if chain in self._chains else ""
        return Deposits(name=name, chain=chain, key=self._text(where, table, "key"), path=path, kind=kind)

    def _approver(self, name: str, table: dict[str, Any]) -> str:
        where = f"approvers.{name}"
        self._unknown(where, table, {"public_key"})
        self._actor(name, where)
        key = self._text(where, table, "public_key").lower()
        if key and not is_public_key(key):
            self.problems.append(f"{where}.public_key: that is no Ed25519 key in 64 hexadecimal digits")
        return key

    def _asset(self, chain: str, code: str, table: dict[str, Any]) -> AssetPolicy:
        where = f"assets.{chain}.{code}"
        amounts = ("payment_max", "dual_above", "hourly_max", "daily_max")
        self._unknown(where, table, {"contract", "decimals", "allow", "deny", *amounts})
        if not _CODE.fullmatch(code):
            self.problems.append(f"{where}: {code!r} is no code of an asset: A to Z and digits")
        contract = self._text(where, table, "contract")
        return AssetPolicy(
            code=code,
            chain=chain,
            contract=self._address(f"{where}.contract", chain, contract) if contract else "",
            decimals=self._number(where, table, "decimals", DECIMALS_MAX),
            allow=self._addresses(where, table, "allow", chain),
            deny=self._addresses(where, table, "deny", chain),
            **{name: self._number(where, table, name) for name in amounts},
        )

    def _mandate(self, name: str, table: dict[str, Any]) -> Mandate:
        where = f"mandates.{name}"
        amounts = ("payment_max", "hourly_max", "daily_max")
        self._unknown(where, table, {"chain", "asset", "own_wallets", "own_deposits", "allow", *amounts})
        self._name(name, where)
        chain = self._chain_name(where, table)
        return Mandate(
            name=name,
            chain=chain,
            asset=self._text(where, table, "asset"),
            own_wallets=self._yes_or_no(where, table, "own_wallets", default=False),
            own_deposits=self._yes_or_no(where, table, "own_deposits", default=False),
            allow=self._addresses(where, table, "allow", chain),
            **{amount: self._number(where, table, amount) for amount in amounts},
        )

    def _caller(self, name: str, table: dict[str, Any]) -> Caller:
        where = f"callers.{name}"
        self._unknown(where, table, {"secret_file", "rights"})
        self._name(name, where)
        if name == LOCAL:
            self.problems.append(f"{where}: the command on the signer's own host has that name")
        rights = self._texts(where, table, "rights")
        known = {right.value for right in Right}
        self.problems += [f"{where}.rights: {text!r} is none of {', '.join(sorted(known))}" for text in rights - known]
        file = self._text(where, table, "secret_file")
        return Caller(name=name, secret_file=file, rights=frozenset(Right(text) for text in rights & known))

    def _unhalt(self, table: object) -> tuple[str, ...]:
        if not isinstance(table, dict) or not ({"approvals", "people"} & table.keys()):
            self.problems.append("unhalt: say who lifts a halt: approvals = true, or people = [two or more names]")
            return ()
        self._unknown("unhalt", table, {"approvals", "people"})
        if table.get("approvals") is True and "people" not in table:
            return ()
        people = sorted(self._texts("unhalt", table, "people"))
        for name in people:
            self._actor(name, "unhalt.people")
        if len(people) < 2 or "approvals" in table:
            self.problems.append("unhalt.people: two people at least, and then no approvals")
        self._distinct("unhalt.people", people)
        return tuple(people)

    def _contradictions(self, policy: Policy) -> None:
        """What is right by itself and wrong together."""
        self._distinct("approvers", list(policy.approvers))
        self._once("approvers", "public key", [key for key in policy.approvers.values() if key])
        self._once("chains", "chain_id", [str(chain.chain_id) for chain in policy.chains.values()])
        wallets = policy.wallets.values()
        self._once("wallets", "chain and address", [f"{w.chain} {w.address}" for w in wallets])
        # Or the rules of a test network could be used for a payment on the real one: the same bytes are valid there.
        self._once("wallets", "address on chains of one kind", [w.address for w in wallets if w.kind in WITHOUT_CHAIN])
        for chain in policy.chains:
            self._once(f"assets.{chain}", "contract", [a.contract for a in policy.assets.values() if a.chain == chain])
        self.problems += contradictions(policy.wallets, policy.deposits)
        for mandate in policy.mandates.values():
            self.problems += [f"mandates.{mandate.name}: {why}" for why in _impossible(mandate, policy)]
        self._once("callers", "secret_file", [caller.secret_file for caller in policy.callers.values()])
        if not policy.unhalt_people and len(policy.approvers) < 2:
            self.problems.append("unhalt: approvals of two approvers lift a halt, and there are fewer")

    # --- values

    def _tables(self, found: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
        tables = found.get(name, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            self.problems.append(f"{name}: tables are expected, as in [{name}.NAME]")
            return {}
        return tables

    def _section(self, found: dict[str, Any], name: str, read: Callable[[str, dict[str, Any]], T]) -> dict[str, T]:
        return {each: read(each, table) for each, table in self._tables(found, name).items()}

    def _unknown(self, where: str, table: dict[str, Any], known: set[str]) -> None:
        place = f"{where}." if where else ""
        self.problems += [f"{place}{name}: there is no such setting" for name in table if name not in known]

    def _text(self, where: str, table: dict[str, Any], name: str, default: object = _REQUIRED) -> str:
        value = table.get(name, default)
        if not isinstance(value, str):
            self.problems.append(f"{where}.{name}: {'it is missing' if value is _REQUIRED else 'text is expected'}")
            return ""
        return value

    def _texts(self, where: str, table: dict[str, Any], name: str) -> set[str]:
        value = table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problems.append(f"{where}.{name}: a list of texts is expected")
            return set()
        return set(value)

    def _number(
        self, where: str, table: dict[str, Any], name: str, most: int = AMOUNT_MAX, default: object = _REQUIRED
    ) -> int:
        value = table.get(name, default)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 80:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            missing = "it is missing" if value is _REQUIRED else f"a whole number is expected, at most {most}"
            self.problems.append(f"{where}.{name}: {missing}")
            return 0
        return value

    def _yes_or_no(self, where: str, table: dict[str, Any], name: str, *, default: bool) -> bool:
        value = table.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{where}.{name}: true or false")
        return value is True

    def _name(self, value: object, where: str) -> str:
        if not isinstance(value, str) or not NAME.fullmatch(value):
            self.problems.append(f"{where}: a name is expected: lower-case letters, digits, - and _")
            return ""
        return value

    def _actor(self, name: str, where: str) -> None:
        try:
            if check_actor(name) != name:
                self.problems.append(f"{where}: write {name!r} in lower case")
        except BursarError as error:
            self.problems.append(f"{where}: {error}")

    def _chain_name(self, where: str, table: dict[str, Any]) -> str:
        name = self._text(where, table, "chain")
        if name and name not in self._chains:
            self.problems.append(f"{where}.chain: there is no chain {name!r}")
        return name

    def _address(self, where: str, chain: str, text: str) -> str:
        known = self._chains.get(chain)
        if known is None:
            return text  # said already
        try:
            return self._codecs(known.kind).check_address(chain, text)
        except (KeyError, ImportError):
            return text
        except BursarError as error:
            self.problems.append(f"{where}: {error}")
            return text

    def _addresses(self, where: str, table: dict[str, Any], name: str, chain: str) -> frozenset[str]:
        texts = sorted(self._texts(where, table, name))
        return frozenset(self._address(f"{where}.{name}", chain, text) for text in texts)

    def _distinct(self, where: str, names: list[str]) -> None:
        """Two names that one person could use for two."""
        for index, one in enumerate(names):
            alike = [other for other in names[index + 1 :] if same_person(one, other)]
            self.problems += [f"{where}: {one!r} and {other!r} could be one person" for other in alike]

    def _once(self, where: str, what: str, values: list[str]) -> None:
        twice = sorted({value for value in values if values.count(value) > 1})
        self.problems += [f"{where}: two have the same {what}, {value!r}" for value in twice]
