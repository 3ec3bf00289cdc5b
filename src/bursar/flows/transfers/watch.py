"""The watch: what must be conserved, looked at before the first transfer is taken and then all the time.

A broken invariant pauses the intake of new transfers and raises a critical alert; transfers under way go on, and so do
refunds. Two operators resume the intake once it holds (T47). A core that does not answer can't be judged: transfers
from and to it are refused until it was, and the others go on. What can't be judged because a row can't be read raises
an alert, and hides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from bursar.audit import UNREADABLE, Finding, audit, said
from bursar.engine import Lift
from bursar.engine.flow import storable
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.request import NEW_TRANSFERS, AccountType
from bursar.flows.transfers.transfers import Transfers
from bursar.model.errors import DatabaseUnavailable, InvalidState, OutcomeUnknown
from bursar.rails.trading import TradingClient

CONSERVED = ("I1", "I4")  # beside I5, and cheap enough to be looked at all the time
ACTOR = "audit"

log = logging.getLogger("bursar.transfers")


async def watch(transfers: Transfers, cores: Mapping[AccountType, TradingClient]) -> list[Finding]:
    """Check what must be conserved, and act if it is not."""
    try:
        findings = await audit(transfers.ledger.store, only=CONSERVED)
    except UNREADABLE as error:  # damage to what every invariant needs: the cores are still compared
        findings = [_not_judged(name, said(error)) for name in CONSERVED]
    for finding in findings:
        await _act(transfers, finding)
    return [*findings, *await look_at_cores(transfers, cores)]


async def look_at_cores(transfers: Transfers, cores: Mapping[AccountType, TradingClient]) -> list[Finding]:
    """Compare each core with the ledger (I5). One that has answered is open for new transfers from now on: if it is
    broken, no rail takes any."""
    findings = []
    for kind, client in cores.items():
        try:
            finding = await conservation(transfers, kind, client, notes=True)
            has_answered = finding.judged or finding.not_judged > 0
        except (DatabaseUnavailable, OutcomeUnknown):
            raise  # it is away for every core
        except Exception as error:  # whatever it is: the other cores are still compared
            log.exception("core %s could not be compared with the ledger", kind)
            finding = _not_judged("I5", f"core {kind} could not be compared: {type(error).__name__}: {error}")
            has_answered = False
        await _act(transfers, finding)
        if has_answered:  # not before: a transfer that is taken between the two would be one from a restored database
            transfers.unchecked.discard(kind)
        findings.append(finding)
    return findings


async def resume_intake(
    transfers: Transfers, cores: Mapping[AccountType, TradingClient], *, actor: str, reason: str
) -> Lift:
    """Take new transfers again. If it takes two operators, as conservation was broken or the database was restored,
    it also takes that everything holds now, at each core: InvalidState says what does not (T47)."""
    pauses = {(pause.kind, pause.name): pause for pause in await transfers.ledger.store.read.pauses.list()}
    pause = pauses.get(NEW_TRANSFERS)
    if pause is not None and pause.two_people:
        findings = await audit(transfers.ledger.store, only=CONSERVED)
        findings += await look_at_cores(transfers, cores)
        for finding in findings:
            if not finding.ok or not finding.judged:
                why = f"{finding.invariant} {'is not judged' if finding.ok else 'is broken'}"
                said_ = "; ".join([*finding.broken[:3], finding.note]).strip("; ")
                raise InvalidState(*NEW_TRANSFERS, "paused", f"{why}: {said_}")
    return await transfers.resume_intake(actor, reason)


async def _act(transfers: Transfers, finding: Finding) -> None:
    """Pause and raise an alert for what is broken; raise one for what can't be judged although every core answers."""
    if not finding.ok:
        reason = f"{finding.invariant} is broken"
        # First: an alert that can't be written must not keep the intake open.
        await transfers.pause_intake(ACTOR, reason, two_people=True)
        message = f"{finding.meaning}: {'; '.join(finding.broken[:3])}"
        await transfers.engine.alert(None, reason, "critical", message)
    if finding.not_judged:
        reason = f"{finding.invariant} can't be judged"
        await transfers.engine.alert(None, reason, "critical", f"{finding.meaning}: {finding.note}")


def _not_judged(invariant: str, note: str) -> Finding:
    return Finding(
        invariant=invariant, ok=True, checked=0, broken=[], seconds=0.0, judged=False, not_judged=1, note=storable(note)
    )
