"""Making a call: an action is awaited with a time limit, and whatever happens becomes an `Answer`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from bursar.deadlines import Deadlines
from bursar.engine.flow import Action, Answer, Flow, FlowRecord
from bursar.model.errors import BursarError
from bursar.model.outcome import Outcome

log = logging.getLogger("bursar.engine")


async def call(deadlines: Deadlines, flow: Flow[Any], action: Action, item: FlowRecord[Any]) -> Answer:
    """Call an action, for at most `call_timeout_s`. Whatever happens, it comes back as an answer."""
    try:
        answer: object = await deadlines.keep(flow.call_timeout_s, action(item))
        if not isinstance(answer, Answer) or not isinstance(answer.outcome, Outcome):
            raise TypeError(f"{answer!r} is not an Answer with an Outcome")
    except TimeoutError:
        return Answer(outcome=Outcome.TIMEOUT, message=f"no answer within {flow.call_timeout_s} s")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # we are to stop; the next worker calls again for the record
        return _surprised(flow, item, error)  # something inside the action was cancelled, not we
    except Exception as error:  # whatever it is: what happened on the other side is unknown (T26)
        return _surprised(flow, item, error)
    return answer


def _surprised(flow: Flow[Any], item: FlowRecord[Any], error: BaseException) -> Answer:
    unexpected = not isinstance(error, BursarError | OSError)
    log.log(logging.WARNING, "a call for %s %s: %s", flow.name, item.id, error, exc_info=unexpected)
    return Answer(outcome=Outcome.UNKNOWN, message=f"{type(error).__name__}: {error}")
