"""The machine of internal transfers: specification 000 §2, states and numbers as written there.

An unknown answer stays where it is, whatever kind of unknown it is (T1); a refund that is refused stays too (T21).
"""

from __future__ import annotations

from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome

SUCCESS, EXPLICIT_FAIL = Outcome.SUCCESS, Outcome.EXPLICIT_FAIL

MACHINE = Machine(
    name="transfers",
    initial="INIT",
    events=("SOURCE_CALL", "TARGET_CALL"),
    states=(
        State("INIT", Kind.AUTOMATIC, 0),
        State("SOURCE_PENDING", Kind.CALL, 10, action="withdraw", effect=Effect.SEND),
        State("SOURCE_DONE", Kind.AUTOMATIC, 20, in_flight=True),
        State("TARGET_PENDING", Kind.CALL, 30, in_flight=True, action="deposit", effect=Effect.SEND),
        State("COMMITTED", Kind.TERMINAL, 40),
        State("FAILED", Kind.TERMINAL, -10, compensating=True),
        State("COMPENSATING", Kind.CALL, -20, in_flight=True, compensating=True, action="refund", effect=Effect.RETURN),
        State("ROLLED_BACK", Kind.TERMINAL, -30, compensating=True),
    ),
    arrows=(
        Arrow("INIT", "SOURCE_CALL", "SOURCE_PENDING"),
        Arrow("SOURCE_PENDING", SUCCESS, "SOURCE_DONE"),
        Arrow("SOURCE_PENDING", EXPLICIT_FAIL, "FAILED"),
        Arrow("SOURCE_DONE", "TARGET_CALL", "TARGET_PENDING"),
        Arrow("TARGET_PENDING", SUCCESS, "COMMITTED"),
        Arrow("TARGET_PENDING", EXPLICIT_FAIL, "COMPENSATING"),
        Arrow("COMPENSATING", SUCCESS, "ROLLED_BACK"),
        Arrow("COMPENSATING", EXPLICIT_FAIL, "COMPENSATING"),
    ),
)
