"""The machine of sequences: forward step by step, or back step by step (specification 004, "Saga Composition").

Which step is meant is in the record's body: `index`, how many steps are done and not undone. It moves with these arrows
and in their transactions, so a completed step is never run again (L14). Only an explicit refusal turns round. A refused
compensation goes to operators (L15): it is reported first, then waits; one says RETRY, or two say SKIP.
"""

from __future__ import annotations

from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome

SUCCESS, EXPLICIT_FAIL = Outcome.SUCCESS, Outcome.EXPLICIT_FAIL

RUNNING, STEP_DONE, STEP_REFUSED, STEP_UNDONE = "RUNNING", "STEP_DONE", "STEP_REFUSED", "STEP_UNDONE"
COMPENSATING, REPORTING, COMPENSATION_FAILED = "COMPENSATING", "REPORTING", "COMPENSATION_FAILED"
COMPLETED, FAILED, FAILED_IN_PART = "COMPLETED", "FAILED", "FAILED_IN_PART"
NEXT, END, UNDO, UNDONE, UNDONE_IN_PART = "NEXT", "END", "UNDO", "UNDONE", "UNDONE_IN_PART"
RETRY, SKIP = "RETRY", "SKIP"

MACHINE = Machine(
    name="sequence",
    initial=RUNNING,
    events=(NEXT, END, UNDO, UNDONE, UNDONE_IN_PART, RETRY, SKIP),
    states=(
        State(RUNNING, Kind.CALL, action="run", effect=Effect.SEND),
        State(STEP_DONE, Kind.AUTOMATIC),
        State(COMPLETED, Kind.TERMINAL),
        State(STEP_REFUSED, Kind.AUTOMATIC, compensating=True),
        State(COMPENSATING, Kind.CALL, action="undo", compensating=True, effect=Effect.RETURN),
        State(STEP_UNDONE, Kind.AUTOMATIC, compensating=True),
        State(REPORTING, Kind.CALL, action="report", compensating=True, effect=Effect.RETURN),
        State(COMPENSATION_FAILED, Kind.WAIT, awaits="operator", compensating=True),
        State(FAILED, Kind.TERMINAL, compensating=True),  # nothing of it is left
        State(FAILED_IN_PART, Kind.TERMINAL, compensating=True),  # but for what two operators have skipped
    ),
    arrows=(
        Arrow(RUNNING, SUCCESS, STEP_DONE),
        Arrow(RUNNING, EXPLICIT_FAIL, STEP_REFUSED),
        Arrow(STEP_DONE, NEXT, RUNNING),
        Arrow(STEP_DONE, END, COMPLETED),
        Arrow(STEP_REFUSED, UNDO, COMPENSATING),
        Arrow(STEP_REFUSED, UNDONE, FAILED),
        Arrow(COMPENSATING, SUCCESS, STEP_UNDONE),
        Arrow(COMPENSATING, EXPLICIT_FAIL, REPORTING),
        Arrow(STEP_UNDONE, UNDO, COMPENSATING),
        Arrow(STEP_UNDONE, UNDONE, FAILED),
        Arrow(STEP_UNDONE, UNDONE_IN_PART, FAILED_IN_PART),
        Arrow(REPORTING, SUCCESS, COMPENSATION_FAILED),
        Arrow(REPORTING, EXPLICIT_FAIL, REPORTING),
        Arrow(COMPENSATION_FAILED, RETRY, COMPENSATING),
        Arrow(COMPENSATION_FAILED, SKIP, STEP_UNDONE),
    ),
)
