"""Deposits in the withdrawals scenario: users with addresses of their own, strangers who send there, and their oracle.

A user asks a server for an address, again in each of its lives, and always gets the same one. From then on strangers
send tokens and coin to it, by transactions of their own that wait, vanish in reorganisations, and are offered again, as
a wallet does. The judge believes the chain alone: each transfer from outside that is on the chain in the end is one
credit of exactly that amount to exactly that user, and there is no other. What is in a user's wallet is what its
account in the ledger says (I9), also after sweeps.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from bursar.documents import Documents
from bursar.flows.deposits import ChainDeposits
from bursar.flows.deposits.arrivals import ARRIVALS
from bursar.flows.deposits.rules import DEPOSITS, DepositAsset, DepositRules
from bursar.flows.deposits.sweep import SWEEPS
from bursar.flows.payouts.derived import ADDRESSES
from bursar.flows.payouts.documents import ASSET, AssetDocument, asset_name
from bursar.flows.payouts.payout import wallet_account
from bursar.model.errors import BursarError
from bursar.rails.chain import Decoded, Fee, Network, Order, Shape, Slot
from bursar.signer.curve import sign_digest
from bursar.sim import evm_world, expiry_world, tron_world
from bursar.sim.chain_state import Effect
from bursar.sim.evm_tx import RefusedTransaction
from bursar.sim.oracle import Violation
from bursar.sim.payout_chains import (
    CHAIN_NAME,
    GWEI,
    STRANGER_KEY,
    TRON_BLOCK_MS,
    ChainKind,
    address_of,
    deposit_key,
)
from bursar.sim.payout_judge import Judge
from bursar.sim.payout_town import Town, put
from bursar.sim.process import Process

SECTION: Final = "dep"
PATH: Final = "m/44'/60'/1'"
# Of BIP-32's first test vector: the rules want one, and what the simulator derives is its own.
XPUB: Final = (
    "xpub661MyMwAqRbcFtXgS5sYJABqqG9YLmC4Q1Rdap9gSE8NqtwybGhePY2gZ29ESFjqJoCu1Rupje8YtGqsefD265TMg7usUDFdp6W1EGMcet8"
)
SWEEP_AT: Final = "12"  # USDT
AGAIN_S: Final = 0.7
TOKENS: Final = 10**9
REFUSED: Final = (RefusedTransaction, expiry_world.Refused, tron_world.Refused)


def derive(kind: str, _xpub: str, user: int) -> str:
    """The simulator's own derivation: a key per user."""
    return address_of(kind, deposit_key(user))


def signer_policy(kind: ChainKind, limits: str) -> str:
    """What the signer's policy has for deposits."""
    return f"""
[deposits.{SECTION}]
chain = "{CHAIN_NAME}"
key = "main"
path = "{PATH}"
[assets.{CHAIN_NAME}.{kind.native}]
contract = ""
decimals = {kind.decimals}
payment_max = "{kind.coins}"
dual_above = "{kind.coins}"
hourly_max = "{kind.coins}"
daily_max = "{kind.coins}"
[mandates.sweep]
chain = "{CHAIN_NAME}"
asset = "USDT"
payment_max = {TOKENS}
{limits}
own_wallets = true
[mandates.gas]
chain = "{CHAIN_NAME}"
asset = "{kind.native}"
payment_max = "{kind.coins}"
hourly_max = "{kind.coins}"
daily_max = "{kind.coins}"
own_deposits = true
"""


async def furnish(documents: Documents, kind: ChainKind) -> None:
    """The rules, and the coin as an asset that can be brought."""
    coin = AssetDocument(asset=kind.native, chain=CHAIN_NAME, decimals=kind.decimals)
    await put(documents, ASSET, asset_name(kind.native, CHAIN_NAME), coin)  # type: ignore[arg-type]
    rules = DepositRules(
        wallets=SECTION,
        xpub=XPUB,
        assets={"USDT": DepositAsset(sweep_at=SWEEP_AT), kind.native: DepositAsset()},
        sweep_to="hot1",
        sweep_mandate="sweep",
        gas_from="hot2",
        gas_mandate="gas",
    )
    await put(documents, DEPOSITS, CHAIN_NAME, rules)  # type: ignore[arg-type]


@dataclass
class Gift:
    """What a stranger sends. Outlives every process."""

    user: int
    amount: int
    coin: bool
    after_s: float
    raw: bytes = b""
    hash: str = ""
    expires: int | None = None


@dataclass
class Strangers:
    """Those who send, on one seed."""

    town: Town
    gifts: list[Gift]
    told: dict[int, str] = field(default_factory=dict)  # user → address
    sent: int = 0
    since_s: float = 0.0

    def __post_init__(self) -> None:
        kind, world = self.town.kind, self.town.world
        self.address = address_of(kind.name, STRANGER_KEY)
        if self.gifts:
            world.fund(self.address, kind.coins)
            world.fund(self.address, TOKENS, kind.token)
            self.town.kernel.loop.call_later(1.0, self.tick)

    def tick(self) -> None:
        """Send what is due, and offer what was sent before again: a reorganisation may have taken it away."""
        loop = self.town.kernel.loop
        for gift in self.gifts:
            if not gift.raw and gift.user in self.told and (self.town.calm or loop.now >= gift.after_s):
                self._sign(gift)
                self.sent += 1
        for gift in self.gifts:
            if gift.raw:
                with contextlib.suppress(*REFUSED):  # it is there already, or has expired
                    self.town.world.submit(gift.raw)
        loop.call_later(AGAIN_S, self.tick)

    def _sign(self, gift: Gift) -> None:
        kind, world = self.town.kind, self.town.world
        contract = "" if gift.coin else kind.token
        order = Order(payout=f"gift {self.sent}", to=self.told[gift.user], contract=contract, amount=gift.amount)
        network = Network(name=CHAIN_NAME, kind=kind.name, chain_id=kind.chain_id, native=kind.native)
        if isinstance(world, evm_world.World):
            slot, fee = Slot(nonce=self.sent), Fee(gas_limit=100_000, price=400 * GWEI, tip=3 * GWEI)
        elif isinstance(world, tron_world.World):
            expires = world.head.timestamp + 10 * TRON_BLOCK_MS
            slot = Slot(expires=expires, reference=f"{world.head.id[12:32]}/{self.sent + 1}")
            fee = Fee(gas_limit=0 if gift.coin else 100_000, price=0 if gift.coin else 420)
        else:
            expires = world.head.number + world.terms.window
            slot = Slot(expires=expires, reference=f"{world.head.hash}/{self.sent}")
            fee = Fee(gas_limit=500_000, price=150)
        unsigned = kind.codec.build(network, self.address, order, Shape.PAY, slot, fee)
        signature = sign_digest(STRANGER_KEY, kind.codec.digest(unsigned))
        signed = kind.codec.signed(unsigned, signature, self.address)
        gift.raw, gift.hash, gift.expires = signed.raw, signed.hash, slot.expires

    def waits(self) -> bool:
        """Whether something is to be sent yet, or is not final and can be."""
        world = self.town.world
        now = world.head.timestamp if isinstance(world, tron_world.World) else world.head.number
        for gift in self.gifts:
            found = world.find(gift.hash) if gift.raw else None
            if found is not None and found[0].number > world.finalized:
                return True
            if found is None and not (gift.raw and gift.expires is not None and now > gift.expires):
                return True
        return False

    def arrived(self) -> list[Effect]:
        """What has come to users' addresses from outside, as the canonical chain has it."""
        ours = {address.lower() for address in (*self.told.values(), *self.town.kind.addresses.values())}
        theirs = {address.lower() for address in self.told.values()}
        return self.town.world.effects(
            lambda effect: effect.to.lower() in theirs and effect.sender.lower() not in ours and effect.amount > 0
        )


def gifts_of(seed: int, users: range, kind: ChainKind, *, small: bool) -> list[Gift]:
    """What strangers send, on one seed."""
    dice = random.Random(f"{seed} gifts")
    if small:
        return [Gift(user=1, amount=7_000_000, coin=False, after_s=0.0)]
    found = []
    for user in users:
        for _ in range(dice.choice((0, 1, 1, 2))):
            coin = dice.random() < 0.25
            amount = dice.randint(1, kind.coins // 1_000) if coin else dice.randint(1, 20) * 10**6 + dice.randint(0, 9)
            found.append(Gift(user=user, amount=amount, coin=coin, after_s=dice.random() * 10))
    return found


class Receiver:
    """A user who asks for an address, in one life of a server."""

    def __init__(self, deposits: ChainDeposits, process: Process, strangers: Strangers) -> None:
        self.deposits = deposits
        self.process = process
        self.strangers = strangers

    async def ask(self, user: int) -> None:
        """Until there is an answer, which is the same for ever."""
        while True:
            try:
                address = (await self.deposits.issue(user, CHAIN_NAME)).address
            except BursarError:
                await self.process.ports.sleep(AGAIN_S)
                continue
            known = self.strangers.told.setdefault(user, address)
            if known != address:
                raise Violation(f"user {user} was given {known}, and then {address}")
            return


OPEN: Final = (
    f"SELECT id, state, error FROM records WHERE flow = '{ARRIVALS.name}' AND state = 'arrived' "
    f"UNION ALL SELECT id, state, error FROM records WHERE flow = '{SWEEPS.name}' AND state = 'sweeping' "
    f"UNION ALL SELECT id, state, error FROM records WHERE flow = '{ADDRESSES.name}' AND state = 'new'"
)


class DepositJudge:
    """Looks at the deposits of one run when it is over."""

    def __init__(self, judge: Judge, strangers: Strangers) -> None:
        self.judge = judge
        self.strangers = strangers
        self.town = strangers.town
        self.credited: Counter[tuple[int, str]] = Counter()  # by user and asset
        self.credits: Counter[int] = Counter()  # how many, by user

    def everything(self) -> None:
        """Each transfer is one credit, no other is, and wallets have what the ledger says."""
        kind, told = self.town.kind, self.strangers.told
        users = {address.lower(): user for user, address in told.items()}
        there: Counter[tuple[int, str, str, int]] = Counter()
        for effect in self.strangers.arrived():
            asset = "USDT" if effect.contract else kind.native
            there[users[effect.to.lower()], effect.hash.lower(), asset, effect.amount] += 1
        here: Counter[tuple[int, str, str, int]] = Counter()
        rows = """SELECT id, state, body ->> '$.user', body ->> '$.hash', body ->> '$.asset', body ->> '$.minor'
                  FROM records WHERE flow = ?"""
        for id_, state, user, hash_, asset, minor in self.judge.db.execute(rows, (ARRIVALS.name,)):
            if state == "credited":
                here[int(user), hash_.lower(), asset, int(minor)] += 1
                self.credited[int(user), asset] += int(minor)
                self.credits[int(user)] += 1
            elif state != "own":
                raise Violation(f"arrival {id_} is {state}, and nothing was wrong with it")
        if there != here:
            raise Violation(f"on the chain, and not credited: {there - here}; credited, and not there: {here - there}")
        for user, address in told.items():
            self._wallet(user, address)

    def swept(self) -> int:
        """How many sweeps have brought something."""
        rows = "SELECT count(*) FROM records WHERE flow = ? AND state = 'swept'"
        return int(self.judge.db.execute(rows, (SWEEPS.name,)).fetchone()[0])

    def is_between_wallets(self, sender: str, does: Decoded) -> bool:
        """A sweep goes from a user's wallet to ours, and gas to a user's wallet."""
        kind, theirs = self.town.kind, self.strangers.told.values()
        if does.contract:
            return does.contract == kind.token and sender in theirs and does.to == kind.addresses["hot1"]
        return sender == kind.addresses["hot2"] and does.to in theirs

    def _wallet(self, user: int, address: str) -> None:
        kind = self.town.kind
        account = wallet_account(CHAIN_NAME, f"{SECTION}-{user}")
        for asset, contract in (("USDT", kind.token), (kind.native, "")):
            booked = -self.judge.balance(account, asset)
            there = self.town.world.balance(address, contract) if contract else self.town.world.balance(address)
            if booked != there:
                raise Violation(f"I9: the wallet of user {user} has {there} {asset}, and {booked} by the books")


__all__: list[str] = [
    "OPEN",
    "DepositJudge",
    "Gift",
    "Receiver",
    "Strangers",
    "derive",
    "furnish",
    "gifts_of",
    "signer_policy",
]
