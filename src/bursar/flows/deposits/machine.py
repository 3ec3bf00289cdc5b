"""The machine of deposits that wait for a second person. Nothing is called: a person speaks, and it is booked."""

from __future__ import annotations

from bursar.model.machine import Arrow, Kind, Machine, State

ASKED, BOOKED, REJECTED = "ASKED", "BOOKED", "REJECTED"
CONFIRM, REJECT = "CONFIRM", "REJECT"

MACHINE = Machine(
    name="deposits",
    initial=ASKED,
    events=(CONFIRM, REJECT),
    states=(
        State(ASKED, Kind.WAIT, awaits="a second person"),
        State(BOOKED, Kind.TERMINAL),
        State(REJECTED, Kind.TERMINAL),
    ),
    arrows=(Arrow(ASKED, CONFIRM, BOOKED), Arrow(ASKED, REJECT, REJECTED)),
)
