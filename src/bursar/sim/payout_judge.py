"""What must be true of payouts when nothing breaks any more: of the chain, of the books, and of what was signed.

What a payout says is its state, or what was heard of it after that: people may have decided wrongly, and a chain may
take back what was final. Then its record stays where it is, and the contradiction must be there three times: in its
history, as a critical alert, and in the suspense account (T34, W19).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from bursar.flows.payouts.payout import GAS, SCOPE, SUSPENSE, Payout, wallet_account
from bursar.model.accounts import HELD
from bursar.model.envelope import decode_legs
from bursar.rails.chain import Decoded, Shape
from bursar.signer.entries import for_callers
from bursar.signer.log import check_next, read_frames
from bursar.signer.state import State
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_chains import CHAIN_NAME, WALLETS, fees_of
from bursar.sim.payout_town import LOG, Town
from bursar.store.sqlite.calls import amount_out

LATE_ANSWERS: Final = "SELECT event FROM transitions WHERE record = ? AND event LIKE 'LATE %' ORDER BY version"
ALERTS: Final = "SELECT count(*) FROM alerts WHERE record = ? AND reason = 'contradiction' AND severity = 'critical'"
DECIDED: Final = """SELECT count(*) FROM transitions WHERE record = ? AND source <> target
    AND (evidence ->> '$.forced_by' IS NOT NULL OR source = 'disputed')"""


@dataclass(frozen=True)
class Told:
    """What a payout says of itself."""

    id: str
    number: int
    state: str
    body: Payout
    late: str  # what was heard of it after its end; "": nothing
    decided: bool  # people have said how it ended
    disputed: bool  # something else was moved than what was ordered

    @property
    def is_paid(self) -> bool:
        """Whether, by all that is written down, it was paid."""
        return self.late == "LATE SUCCESS" if self.late else self.state == "confirmed"


class Judge:
    """Looks at one run when it is over."""

    def __init__(self, oracle: Oracle, town: Town, wanted: Mapping[str, int]) -> None:
        """`wanted`: what each recipient should get, in the token's smallest units."""
        self.oracle = oracle
        self.town = town
        self.wanted = wanted
        self.wallets = {name: town.kind.addresses[name] for name in WALLETS}  # of ours, that pay for gas
        self.db: sqlite3.Connection = oracle.db
        rows = self.db.execute("SELECT number, id, state, body FROM records WHERE flow = 'payouts'").fetchall()
        self.payouts = [self._told(*row) for row in rows]

    def everything(self) -> None:
        """Of the chain, of the books, and of what was signed."""
        self.effects()
        self.contradictions()
        self.signatures()
        self.money()
        self.gas()

    def _told(self, number: int, id_: str, state: str, body: str) -> Told:
        late = [event for (event,) in self.db.execute(LATE_ANSWERS, (number,))]
        (decided,) = self.db.execute(DECIDED, (number,)).fetchone()
        disputed = "SELECT count(*) FROM transitions WHERE record = ? AND target = 'disputed'"
        (was_disputed,) = self.db.execute(disputed, (number,)).fetchone()
        read = msgspec.json.decode(body, type=Payout)
        return Told(id_, number, state, read, late[-1] if late else "", bool(decided), bool(was_disputed))

    def effects(self) -> None:
        """At most one transaction for each reason took effect: exactly one if a payout for it says that it is paid."""
        paid: Counter[str] = Counter()
        disputed = {one.body.payment.to for one in self.payouts if one.disputed}
        decided = {one.body.payment.to for one in self.payouts if one.decided}
        for one in self.payouts:
            paid[one.body.payment.to] += one.is_paid
        for to, amount in self.wanted.items():
            effects = self.town.effects(to)
            if len(effects) > 1:
                raise Violation(f"I7: {to} was paid {len(effects)} times: {effects}")
            if to in disputed:
                continue  # something moved, and people have decided what to call it
            if len(effects) != paid[to]:
                raise Violation(f"{to} was paid {len(effects)} times, and {paid[to]} payouts say so")
            if effects and effects[0].amount != amount and to not in decided:
                raise Violation(f"{to} was paid {effects[0].amount}, not {amount}")

    def contradictions(self) -> None:
        """What was heard after an end has an alert and is in suspense; and it happens only where it can."""
        suspense = 0
        for one in self.payouts:
            amount = int(one.body.payment.amount)
            if one.late and one.is_paid is not (one.state == "confirmed"):
                suspense += amount if one.state == "confirmed" else -amount
            if one.body.booked_from == SUSPENSE and one.state == "confirmed":
                suspense -= amount
            if not one.late or one.is_paid is (one.state == "confirmed"):
                continue  # nothing was heard, or what people had decided before
            if not (one.decided or self.town.depths.happened):
                raise Violation(f"{one.id} is {one.state}, and heard {one.late} without a cause")
            if not self.db.execute(ALERTS, (one.number,)).fetchone()[0]:
                raise Violation(f"T34: {one.id} is {one.state}, heard {one.late}, and no alert says so")
        if (found := self.balance(SUSPENSE, "USDT")) != suspense:
            raise Violation(f"T34: {found} are in suspense, and contradictions add up to {suspense}")

    def signatures(self) -> None:
        """Every signature is of what a client asked for, or moves nothing."""
        state, codec = State(), self.town.kind.codec
        files = self.town.signer_host.files(self.town.kernel.processes["signer"])
        for offset, entries in read_frames(files, LOG):
            for hash_, data in entries if isinstance(entries, list) else ():
                entry = check_next("log", offset, state, hash_, data)
                state.apply(entry, hash_)
                shown = for_callers(entry)
                if shown is None or not shown.raw or shown.request is None:
                    continue
                does, sender, _ = codec.read(shown.raw)
                if shown.request.shape is Shape.CANCEL:
                    fine = does.to == sender and does.amount == 0 and not does.contract
                else:
                    fine = does.contract == self.town.kind.token and self.wanted.get(does.to) == does.amount
                    fine = fine or self.is_between_wallets(sender, does)
                if not fine:
                    raise Violation(f"{shown.payout} {shown.attempt} was signed, and no client asked for it: {does}")

    def is_between_wallets(self, sender: str, does: Decoded) -> bool:
        """Whether it is a sweep, or gas for one: no run has any, unless it says so."""
        return False

    def money(self) -> None:
        """Wallets have what their accounts say (I9); nothing is reserved or held any more."""
        unpaid: Counter[str] = Counter()  # by wallet: what left it, and people have called not paid
        for one in self.payouts:
            if one.disputed and not one.is_paid and self.town.effects(one.body.payment.to):
                unpaid[one.body.wallet] += int(one.body.payment.amount)
        for name in WALLETS:
            here = -self.balance(wallet_account(CHAIN_NAME, name), "USDT") - unpaid[name]
            there = self.town.world.balance(self.town.kind.addresses[name], self.town.kind.token)
            if here != there:
                raise Violation(f"I9: {name} has {there} USDT on the chain, and {here} by the books")
        rows = "SELECT kind, key, amount FROM flow_rows WHERE kind IN ('reserved', 'unconfirmed') AND state = 'total'"
        if left := [row for row in self.db.execute(rows) if int(row[2])]:
            raise Violation(f"reserved by no payout: {left}")
        if self.balance(HELD, "USDT"):
            raise Violation("something is held by no payout")

    def gas(self) -> None:
        """Gas is booked as the chain took it. Where a final block was taken back, or people have decided before the
        chain has, what differs is the gas of exactly those payouts."""
        booked, burned = self._booked_gas(), self._burned_gas()
        known = {one.id: one for one in self.payouts}
        for id_ in booked.keys() | burned.keys():
            one, undone = known.get(id_), self.town.depths.undone & self._hashes(id_)
            if booked[id_] != burned[id_] and not undone and not (one is not None and one.decided):
                raise Violation(f"I9: gas of {id_} is {burned[id_]} on the chain, and {booked[id_]} by the books")
        kind = self.town.kind
        here = -sum(self.balance(wallet_account(CHAIN_NAME, name), kind.native) for name in self.wallets)
        there = sum(self.town.world.balance(address) for address in self.wallets.values())
        if here - there != sum(burned.values()) - sum(booked.values()):
            raise Violation(f"I9: wallets have {there} {kind.native} on the chain, and {here} by the books")

    def _booked_gas(self) -> Counter[str]:
        """By payout."""
        found: Counter[str] = Counter()
        (account,) = self.db.execute("SELECT id FROM accounts WHERE path = ?", (GAS,)).fetchone()
        for row in self.oracle.envelopes.values():
            if row[2] == SCOPE and ":gas:" in row[3]:
                (leg,) = decode_legs(row[7])
                assert leg.source == account
                found[row[3].partition(":")[0]] += leg.minor
        return found

    def _burned_gas(self) -> Counter[str]:
        """By payout, what its transactions have cost on the chain; "": those of no payout."""
        found: Counter[str] = Counter()
        ours = {address.lower() for address in self.wallets.values()}
        payouts = dict(self._rows_of_hashes())
        for hash_, sender, fee in fees_of(self.town.world):
            if sender.lower() in ours:
                found[payouts.get(hash_, "")] += fee
        return found

    def _hashes(self, payout: str) -> set[str]:
        return {hash_ for hash_, id_ in self._rows_of_hashes() if id_ == payout}

    def _rows_of_hashes(self) -> list[tuple[str, str]]:
        """Every hash that was signed, and its payout."""
        rows = self.db.execute("SELECT key, body ->> '$.payout' FROM flow_rows WHERE kind = 'hash'")
        return [(key.partition("/")[2], payout) for key, payout in rows]

    def balance(self, account: str, asset: str) -> int:
        """By the live postings, in smallest units."""
        sql = """SELECT l.amount FROM live_postings l WHERE l.account = (SELECT id FROM accounts WHERE path = ?)
                 AND l.asset = (SELECT id FROM assets WHERE code = ?)"""
        return sum(amount_out(amount) for (amount,) in self.db.execute(sql, (account, asset)))
