"""Switches of the engine scenario: pauses and halts at random moments, and the oracle of what they forbid.

Operators are outside the processes that crash: what they switch is one transaction of their own. The oracle judges each
call of the rail. A pause may be known to a process as late as its cache is old; from then on, nothing is sent that was
not called before (W15). A halt is looked up before each call that signs, so it is obeyed at once (W21), but for
the time that the answer to that look-up takes.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Final

from bursar.engine.pauses import ALL_SIGNING, HALT
from bursar.model.machine import Effect, Machine
from bursar.sim.oracle import Violation

if TYPE_CHECKING:
    from bursar.sim.kernel import Kernel

AGE_S: Final = 0.2  # how old what a process knows of pauses may be: less than in earnest, as leases are here
LATENCY_S: Final = 0.05  # longer than any answer of the database takes
AGAIN_S: Final = 0.001  # while another transaction is open
LASTS_S_MAX: Final = 4.0  # once every process knows of it
BETWEEN_S_MAX: Final = 1.0

Switch = tuple[str, str]


class Switches:
    """What is switched off in one run, since when, and what was called nevertheless."""

    def __init__(self, kernel: Kernel, db: sqlite3.Connection, machine: Machine, rails: dict[str, str]) -> None:
        self.happened: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self._kernel = kernel
        self._db = db
        self._machine = machine
        self._rails = rails  # of each action
        self._since: dict[Switch, float] = {}
        self._called: set[tuple[str, str]] = set()
        self._dice = random.Random(f"{kernel.seed} switches")
        self._ended = False
        paused: list[Switch] = [("flow", machine.name), *(("rail", rail) for rail in sorted(set(rails.values())))]
        halts = [*((f"{HALT} {kind}", name) for kind, name in paused), ALL_SIGNING]
        self._switches = paused if self._dice.random() < 0.5 else halts
        self._later(self._dice.random() * BETWEEN_S_MAX)

    def end(self) -> None:
        """Switch everything on again, and nothing off any more."""
        self._ended = True
        self._act()

    def _later(self, delay_s: float) -> None:
        self._kernel.loop.call_later(delay_s, self._act)

    def _act(self) -> None:
        """Switch something off, or everything on."""
        off = not self._since and not self._ended
        switch = self._dice.choice(self._switches)
        try:
            if off:
                self._db.execute(
                    "INSERT INTO pauses (kind, name, actor, reason, at) VALUES (?, ?, 'ann', '', 0)", switch
                )
            else:
                self._db.execute("DELETE FROM pauses")
        except sqlite3.OperationalError:  # another transaction is open
            return self._later(AGAIN_S)
        self._since = {switch: self._kernel.loop.now} if off else {}
        self.happened[switch[0] if off else "on"] += 1
        if not self._ended:
            self._later(AGE_S + self._dice.random() * LASTS_S_MAX if off else self._dice.random() * BETWEEN_S_MAX)
        return None

    def judge(self, id: str, action: str) -> None:
        """A call begins: no switch that every process must know of by now forbids it."""
        state = next((state for state in self._machine.calls if state.action == action), None)
        if state is None or state.effect is None:
            return  # a call of another flow, which is never switched off here
        named: list[Switch] = [("flow", self._machine.name), ("rail", self._rails[action])]
        halts = [*((f"{HALT} {kind}", name) for kind, name in named), ALL_SIGNING]
        first = (id, action) not in self._called
        self._called.add((id, action))
        if first and not state.effect & (Effect.CONFIRM | Effect.RETURN) and self._known(named, AGE_S + LATENCY_S):
            self.violations.append(Violation(f"W15: {action} of {id} was first sent while {self._since} were paused"))
        if state.signs and self._known(halts, LATENCY_S):
            self.violations.append(Violation(f"W21: {action} of {id} signed while {self._since} were halted"))

    def _known(self, switches: list[Switch], after_s: float) -> bool:
        now = self._kernel.loop.now
        return any(switch in self._since and now - self._since[switch] > after_s for switch in switches)
