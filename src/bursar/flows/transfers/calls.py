"""What each state of a transfer calls, and what it asks beside, because the database may have been restored.

A core repeats its answers, and the ledger's end has forgotten its own if the database went back to a backup: asked
again, it may say something else than it said then. So neither end is believed alone:

    a withdraw is refused     the target core promises that nothing arrives (it cancels the deposit), or says that it
                              has arrived. Then it is no refusal: `suspense:transfers` pays, with an alert (T48)
    a withdraw is repeated,   the source core is asked whether it has given the money back since (rails, `gave_back`):
    a deposit is called       then nothing may arrive

Both end in the state that is true at the cores, so that the same money is never on both sides. What a core does not say
just now is asked again later; what it has forgotten (below its floor) waits for two people. The ledger's end as a
target is not asked: it is in the same database as the record, and went back with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from bursar.engine import Answer, FlowRecord
from bursar.flows.transfers.rails import GIVEN_BACK, GIVEN_BACK_UNKNOWN, Rail
from bursar.flows.transfers.request import SUSPENSE, AccountType, Transfer
from bursar.model.outcome import Outcome
from bursar.rails.trading.words import Code

ARRIVED = "ARRIVED"  # the source refuses it now, and the target has it: the database was restored to before that
ARRIVAL_UNKNOWN = "ARRIVAL_UNKNOWN"  # or that can't be said just now
PAID_FROM_SUSPENSE = "paid from suspense"

Alert = Callable[[FlowRecord[Transfer], str, str], Awaitable[None]]  # raises a critical one: record, reason, message


class Calls:
    """The actions of the flow, with how to cancel them and how to ask about them."""

    def __init__(self, rails: Mapping[AccountType, Rail], alert: Alert) -> None:
        self._rails = rails
        self._alert = alert

    # --- actions

    async def withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """Take it at the source; a refusal counts only if nothing has arrived."""
        answer = await self._source(item).withdraw(item)
        return await self._refused(item, answer) if answer.outcome is Outcome.EXPLICIT_FAIL else answer

    async def deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """Give it at the target, unless the source has given it back."""
        match await self._source(item).gave_back(item):
            case True:  # for good: what was given back must not arrive as well
                return await self._target(item).cancel(item, "deposit")
            case None:
                return Answer(outcome=Outcome.UNKNOWN, code=GIVEN_BACK_UNKNOWN)
            case _:
                return await self._target(item).deposit(item)

    async def refund(self, item: FlowRecord[Transfer]) -> Answer:
        """Give it back at the source."""
        return await self._source(item).refund(item)

    # --- before people's word is taken (T34)

    async def cancel_withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """Make sure that it is never taken; or it was, and not given back; or it has arrived, and is paid for."""
        if item.body.source is AccountType.FUNDING and await self._is_unpaid(item):
            return await self.withdraw(item)  # by the user if the account can pay; it could not, once it is cancelled
        answer = await self._source(item).cancel(item, "withdraw")
        if answer.outcome is Outcome.SUCCESS:
            answer = await self._unless_given_back(item, answer, item.record.state)
        if answer.outcome is Outcome.EXPLICIT_FAIL:
            return await self._refused(item, answer, is_forced=True)
        return answer

    async def cancel_deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """Make sure that it never arrives; or it has."""
        return await self._target(item).cancel(item, "deposit")

    # --- and after it

    async def query_withdraw(self, item: FlowRecord[Transfer]) -> Answer:
        """What the source has on record, in the light of what the other end has; nothing is made to happen."""
        answer = await self._source(item).query(item, "withdraw")
        if answer.outcome is Outcome.SUCCESS:
            # In these two no refund was ever asked for. In others the flow has yet to ask, or has given it back itself.
            return await self._unless_given_back(item, answer, "COMMITTED", "FAILED")
        if answer.outcome is not Outcome.EXPLICIT_FAIL or item.body.target is AccountType.FUNDING:
            return answer
        held = await self._target(item).query(item, "deposit")
        if held.outcome is Outcome.SUCCESS:
            return msgspec.structs.replace(held, code=ARRIVED)
        if held.outcome is Outcome.EXPLICIT_FAIL or held.code in (Code.NOT_FOUND.name, Code.BELOW_FLOOR.name):
            return answer
        return _unknown(answer, held)

    async def query_deposit(self, item: FlowRecord[Transfer]) -> Answer:
        """What the target has on record."""
        return await self._target(item).query(item, "deposit")

    # --- what both ends say together

    async def _refused(self, item: FlowRecord[Transfer], answer: Answer, *, is_forced: bool = False) -> Answer:
        """A refusal of the source, once the target core has promised that nothing arrives; or that it has arrived."""
        if item.body.target is AccountType.FUNDING:
            return answer
        target = self._target(item)
        promised = await target.cancel(item, "deposit")
        match promised.outcome:
            case Outcome.EXPLICIT_FAIL:
                evidence = answer.evidence | {"target": promised.evidence}
                high_water = answer.high_water + promised.high_water
                return msgspec.structs.replace(answer, evidence=evidence, high_water=high_water)
            case Outcome.SUCCESS:
                held = await target.query(item, "deposit")
                if held.outcome is not Outcome.SUCCESS:  # not with these parameters, or it can't be asked any more
                    return _unknown(answer, held)
                message = f"transfer {item.id} of user {item.body.user} has arrived at {item.body.target}, and its"
                message += f" source refuses it now ({answer.error}): the database was restored. {SUSPENSE} pays"
                message += f" {item.body.minor} {item.body.asset}; settle that by hand"
                # Before it is written, or a crash in between would leave it untold.
                await self._alert(item, PAID_FROM_SUSPENSE, message)
                evidence = promised.evidence | {"refused": answer.error}
                return msgspec.structs.replace(promised, code=ARRIVED, message=message, evidence=evidence)
            case _ if is_forced and promised.code == Code.BELOW_FLOOR.name:
                # It never arrives any more (T32). That it has not before is the operators' word; I5 compares the sums.
                return answer
            case _:
                return _unknown(answer, promised)

    async def _is_unpaid(self, item: FlowRecord[Transfer]) -> bool:
        """Whether it has arrived, and the source has said nothing of it yet. If it has not arrived, it never will."""
        if (await self._source(item).query(item, "withdraw")).outcome.is_known:
            return False
        return (await self._target(item).cancel(item, "deposit")).outcome is Outcome.SUCCESS

    async def _unless_given_back(self, item: FlowRecord[Transfer], answer: Answer, *states: str) -> Answer:
        """That the source has taken it; or, if it has given it back since, that it has not."""
        match await self._source(item).gave_back(item, *states):
            case True:
                return msgspec.structs.replace(answer, outcome=Outcome.EXPLICIT_FAIL, code=GIVEN_BACK)
            case None:
                return msgspec.structs.replace(answer, outcome=Outcome.UNKNOWN, code=GIVEN_BACK_UNKNOWN)
            case _:
                return answer

    def _source(self, item: FlowRecord[Transfer]) -> Rail:
        return self._rails[item.body.source]

    def _target(self, item: FlowRecord[Transfer]) -> Rail:
        return self._rails[item.body.target]


def _unknown(answer: Answer, asked: Answer) -> Answer:
    """The source refuses, and the target does not say whether it has arrived."""
    message = f"{answer.error}; and the target does not say that nothing has arrived: {asked.error}"
    return Answer(outcome=Outcome.UNKNOWN, code=ARRIVAL_UNKNOWN, message=message, evidence=asked.evidence)
