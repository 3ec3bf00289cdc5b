"""Every flow that this package has, on one engine that drives nothing: what operators' commands work on.

`Operators` needs the machine of a flow to judge what may be said to a record, and its body to read it; which rails can
be called depends on what the caller hands in. Flows of other programs are not here: their records can be shown, and
only those programs can act on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bursar.documents import Documents
from bursar.engine import Engine
from bursar.engine.late import LATE
from bursar.flows import deposits as deposit_flow
from bursar.flows import sequence as sequence_flow
from bursar.flows.deposits import ARRIVALS, ChainDeposits, Deposits
from bursar.flows.deposits import KINDS as DEPOSIT_KINDS
from bursar.flows.payouts import KINDS as PAYOUT_KINDS
from bursar.flows.payouts import MACHINE as PAYOUTS
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.payout import SCOPE as PAYOUTS_SCOPE
from bursar.flows.sequence import Sequences
from bursar.flows.sequence.flow import SCOPE as SEQUENCE_SCOPE
from bursar.flows.sequence.flow import entry_key
from bursar.flows.transfers import Transfers
from bursar.flows.transfers.incoming import DEPOSITS
from bursar.flows.transfers.machine import MACHINE as TRANSFERS
from bursar.flows.transfers.rails import FUNDING_SCOPE
from bursar.flows.transfers.reconcile import RECONCILED
from bursar.flows.transfers.request import SCOPE as TRANSFERS_SCOPE
from bursar.flows.withdrawals import KINDS as WITHDRAWAL_KINDS
from bursar.flows.withdrawals import MACHINE as WITHDRAWALS
from bursar.flows.withdrawals import Withdrawals
from bursar.flows.withdrawals.withdrawal import SCOPE as WITHDRAWALS_SCOPE
from bursar.ledger import Ledger
from bursar.model.records import Record, Transition
from bursar.model.views import EnvelopeView
from bursar.signer.absent import AbsentSigner

KINDS = (*PAYOUT_KINDS, *WITHDRAWAL_KINDS, *DEPOSIT_KINDS)  # of documents: every process declares all of them
FUNDING_OPERATIONS = ("withdraw", "deposit", "refund")


@dataclass(frozen=True)
class Catalog:
    """All flows, and the engine that knows them."""

    engine: Engine
    ledger: Ledger
    transfers: Transfers
    payouts: Payouts
    withdrawals: Withdrawals
    arrivals: ChainDeposits

    @classmethod
    def on(cls, ledger: Ledger) -> Catalog:
        """On a database alone: no core, chain or signer is known, so no call can be made."""
        engine = Engine(ledger.store, ledger.writer, ())
        transfers = Transfers(ledger, {}, engine=engine)
        Deposits(transfers, confirm_above={}, engine=engine)
        Sequences(ledger, engine=engine)
        return cls(engine, ledger, transfers, *_read_only(ledger, engine))

    @classmethod
    def beside(
        cls,
        transfers: Transfers,
        payouts: Payouts | None = None,
        withdrawals: Withdrawals | None = None,
        arrivals: ChainDeposits | None = None,
    ) -> Catalog:
        """On the engine of a process that has transfers and deposits, and their cores. No worker may run on it: it
        would claim sequences whose own steps only another program has."""
        engine, ledger = transfers.engine, transfers.ledger
        Sequences(ledger, engine=engine)
        if payouts is None or withdrawals is None or arrivals is None:
            payouts, withdrawals, arrivals = _read_only(ledger, engine)
        return cls(engine, ledger, transfers, payouts, withdrawals, arrivals)


def _read_only(ledger: Ledger, engine: Engine) -> tuple[Payouts, Withdrawals, ChainDeposits]:
    """What concerns chains where there are neither nodes nor signer: to look at, and to write signals down."""
    documents = Documents(ledger.store, KINDS)
    payouts = Payouts(ledger, documents, {}, AbsentSigner(), engine=engine)
    withdrawals = Withdrawals(ledger, documents, payouts, engine=engine)
    return payouts, withdrawals, ChainDeposits(payouts, engine=engine)


async def entries_of(ledger: Ledger, record: Record, history: Sequence[Transition]) -> list[EnvelopeView]:
    """The ledger's entries that a record has made, and their reversals, in the order in which they were booked."""
    keys = entry_keys(record, history)
    taken = await ledger.store.read.envelopes.existing(keys) if keys else {}
    views = {found.seq: await ledger.envelope(found.seq) for found in taken.values()}
    for view in list(views.values()):
        if view.reversed_by is not None:
            views[view.reversed_by] = await ledger.envelope(view.reversed_by)
    return [views[seq] for seq in sorted(views)]


def entry_keys(record: Record, history: Sequence[Transition]) -> list[tuple[str, str]]:
    """Scope and key of every entry that a record can have made. The body is not read: it may be unreadable. Pure."""
    if record.flow == TRANSFERS.name:
        states = [state.name for state in TRANSFERS.calls]
        late = [row.version - 1 for row in history if row.event.startswith(LATE)]
        names = [*states, RECONCILED, *(f"{state}:late:{version}" for state in states for version in late)]
        funding = [(FUNDING_SCOPE, f"{record.id}:{op}") for op in FUNDING_OPERATIONS]
        return [*funding, *((TRANSFERS_SCOPE, f"{record.id}:{name}") for name in names)]
    if record.flow in (deposit_flow.MACHINE.name, ARRIVALS.name):
        return [(DEPOSITS, record.id)]
    if record.flow == PAYOUTS.name:
        late = [row.version - 1 for row in history if row.event.startswith(LATE)]
        names = ["hold", "confirm", "void", *(f"gas:{number}" for number in range(1, len(history) + 1))]
        names += [f"late:{version}" for version in late]
        return [(PAYOUTS_SCOPE, f"{record.id}:{name}") for name in names]
    if record.flow == WITHDRAWALS.name:
        return [(WITHDRAWALS_SCOPE, f"{record.id}:{name}") for name in ("hold", "confirm", "void")]
    if record.flow == sequence_flow.MACHINE.name:
        return [(SEQUENCE_SCOPE, entry_key(record.id, step)) for step in range(record.version + 1)]
    return []
