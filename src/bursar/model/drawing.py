"""Drawing: a state machine as Mermaid text, which Markdown viewers show as a picture.

Not here: what the boxes mean. `machine` says it in looks and notes; this file knows nothing of money.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COLOURS = {  # by look
    "rest": "fill:#f1f5f9,stroke:#94a3b8",
    "call": "fill:#dbeafe,stroke:#3b82f6",
    "wait": "fill:#fef3c7,stroke:#d97706",
    "end": "fill:#dcfce7,stroke:#16a34a",
    "back": "fill:#ede9fe,stroke:#8b5cf6",
}
IN_FLIGHT = "money in flight"
MERMAIDS_WORDS = re.compile("acc[a-z]+|class(def)?|click|default|href|note|scale|state|style", re.IGNORECASE)


@dataclass(frozen=True)
class Box:
    """A state, as it looks."""

    name: str
    look: str  # a key of COLOURS
    note: str
    in_flight: bool


@dataclass(frozen=True)
class Line:
    """An arrow, or several between the same two boxes."""

    source: str
    target: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Picture:
    """What is to be drawn. Every box can be reached from the start."""

    start: str
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def mermaid(picture: Picture) -> str:
    """A `stateDiagram-v2`, readable as text too."""
    ids = {box.name: _mermaid_id(box.name) for box in picture.boxes}
    rows = ["stateDiagram-v2"]
    for box in picture.boxes:
        note = f"{box.note}<br/>{IN_FLIGHT}" if box.in_flight else box.note
        rows.append(f'    state "{box.name}<br/>{note}" as {ids[box.name]}')
    rows += ["", f"    [*] --> {ids[picture.start]}"]
    rows += [f"    {ids[line.source]} --> {ids[line.target]}: {', '.join(line.labels)}" for line in picture.lines]
    for look, colours in COLOURS.items():
        if names := [ids[box.name] for box in picture.boxes if box.look == look]:
            rows.append(f"    classDef {look} {colours},color:#1f2937")
            rows.append(f"    class {','.join(names)} {look}")
    return "\n".join([*rows, ""])


def _mermaid_id(name: str) -> str:
    """One word, and none of Mermaid's own."""
    return f"{name}_" if MERMAIDS_WORDS.fullmatch(name) else name.replace(" ", "_")
