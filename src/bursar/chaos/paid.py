"""What became of payouts, seen from outside: the database by SQL, the chain by its own node, the signer by its log.

Every payout is paid to an address of its own, so the chain alone says how often each was paid. `judge_payouts` is pure;
`look_at_payouts` reads what it judges.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bursar.chaos.chain import Chain, Paid
from bursar.chaos.paying import COIN, MANDATE, TOKEN
from bursar.config import Config
from bursar.testbed.look import minor_of, select
from bursar.testbed.program import COMMAND
from bursar.testbed.promises import CONFIRMED, ENDS, FUNDING, Ask, Row, judge_rows, shortened

EVERYTHING = "1000000000"

# Not through the store: the system under test does not report on itself.
PAYOUTS = "SELECT id, state, body FROM {schema}records WHERE flow = 'payouts'"
REPLACEMENTS = "SELECT id, state FROM {schema}records WHERE flow = 'replacements'"
UNSPENT = """SELECT path, code, amount FROM {schema}postings
    JOIN (SELECT DISTINCT id, path FROM {schema}accounts) AS named ON named.id = postings.account
    JOIN {schema}assets ON assets.id = postings.asset
    WHERE (path LIKE 'external:wallet:%' OR path = 'held')
        AND NOT EXISTS (SELECT 1 FROM {schema}spends WHERE posting = postings.id)"""
DONE = frozenset({"sent", "dropped"})  # of replacements


@dataclass(frozen=True)
class Signed:
    """A signature in the signer's log."""

    payout: str
    shape: str
    to: str
    amount: int
    mandate: str


@dataclass(frozen=True)
class PaidOut:
    """What is there in the end."""

    rows: list[Row]
    replacements: dict[str, str]  # id → state
    paid: list[Paid]
    signed: dict[str, Signed]  # by hash
    on_chain: dict[tuple[str, str], int]  # what each wallet has, by wallet and asset
    booked: dict[tuple[str, str], int]  # the same as the ledger says
    held: int  # in the ledger, for whatever payout
    log: str  # what is wrong with the signer's log; "": nothing


def judge_payouts(asks: Iterable[Ask], found: PaidOut) -> list[str]:
    """Everything that is not as it must be; nothing, if all is well."""
    wrong = judge_rows(asks, found.rows, "payouts")
    paid: defaultdict[str, list[Paid]] = defaultdict(list)
    for one in found.paid:
        paid[one.to].append(one)
    for row in found.rows:
        wrong += _effects(row, paid.pop(row.target, []), found.signed)
    wrong += [f"the chain has paid {to}, which no payout pays" for to in sorted(paid)]
    wrong += _signatures({row.req_id: row for row in found.rows}, found.signed)
    wrong += [f"{id_} has not ended: {state}" for id_, state in found.replacements.items() if state not in DONE]
    for place in sorted(found.on_chain.keys() | found.booked.keys()):
        has, says = found.on_chain.get(place, 0), found.booked.get(place, 0)
        if has != says:
            wrong.append(f"{place[0]} has {has} {place[1]} on the chain, and the ledger says {says}")
    if found.held:
        wrong.append(f"{found.held} smallest units are held, though every payout has ended")
    return shortened([*wrong, *([found.log] if found.log else [])])


def _effects(row: Row, paid: list[Paid], signed: Mapping[str, Signed]) -> Iterable[str]:
    wanted = [row.minor] if row.state == CONFIRMED else []
    if [one.amount for one in paid] != wanted:
        yield f"{row.req_id} is {row.state} of {row.minor}, and the chain has paid {[one.amount for one in paid]}"
    for one in paid:
        known = signed.get(one.hash)
        if known is None or known.payout != row.req_id or known.shape != "pay":
            yield f"{row.req_id} was paid by {one.hash}, which the signer has not signed for it: {known}"


def _signatures(rows: Mapping[str, Row], signed: Mapping[str, Signed]) -> Iterable[str]:
    """Nothing is signed but what was requested, under the mandate."""
    for hash_, one in signed.items():
        row = rows.get(one.payout)
        if row is None or (one.to, one.amount, one.mandate) != (row.target, row.minor, MANDATE):
            yield f"{hash_} was signed without authorization: {one}"


def look_at_payouts(config: Config, chain: Chain, signer: Path) -> PaidOut:
    """Everything that is judged; nothing is on its way any more."""
    payouts, replacements, unspent = select(config, PAYOUTS, REPLACEMENTS, UNSPENT)
    booked: defaultdict[tuple[str, str], int] = defaultdict(int)
    held = 0
    for path, code, amount in unspent:
        if path == "held":
            held += minor_of(amount)
        else:
            booked[path.rpartition(":")[2], code] -= minor_of(amount)
    on_chain: dict[tuple[str, str], int] = {}
    for wallet, (tokens, coin) in chain.balances().items():
        on_chain |= {(wallet, TOKEN): tokens, (wallet, COIN): coin}
    verified, log = _signer("verify", signer), ""
    if verified.returncode:
        log = f"the signer's log is damaged: {verified.stdout}{verified.stderr}"
    return PaidOut(
        rows=[_row(*row) for row in payouts],
        replacements=dict(replacements),
        paid=chain.paid(),
        signed={} if log else _signed(json.loads(_signer("log", signer, "--limit", EVERYTHING).stdout)),
        on_chain=on_chain,
        booked=dict(booked),
        held=held,
        log=log,
    )


def open_payouts(config: Config) -> int:
    """How many payouts and replacements have not ended."""
    payouts, replacements = select(config, PAYOUTS, REPLACEMENTS)
    return sum(row[1] not in ENDS for row in payouts) + sum(row[1] not in DONE for row in replacements)


def _row(id_: str, state: str, body: str) -> Row:
    payment = json.loads(body)["payment"]
    user, to = int(payment["account"].split(":")[1]), payment["to"].lower()
    return Row(payment["source"], user, id_, FUNDING, to, payment["asset"], int(payment["amount_raw"]), state)


def _signer(word: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [*COMMAND, "signer", word, "--data", str(folder), *more]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _signed(entries: list[dict[str, Any]]) -> dict[str, Signed]:
    found = {}
    for what in [entry["what"] for entry in entries if "request" in entry["what"]]:
        request = what["request"]
        payment = request["payment"]
        found[what["hash"]] = Signed(
            request["payout"],
            request["shape"],
            payment["to"].lower(),
            int(payment["amount_raw"]),
            request["authorization"]["mandate"],
        )
    return found
