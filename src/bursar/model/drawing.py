"""Drawing: boxes and lines become a picture, as Mermaid text or as SVG. No dependencies, no state, no surprises.

The SVG is laid out in rows (Sugiyama's method): every line points down, except those that close a circle, which are
dashed and point up. Labels and the bends of long lines take places in rows of their own, so nothing can lie upon
anything else, whatever the machine. The same picture always gives the same bytes, and counts never move a box, so that
a console can redraw it every second and nothing jumps.

Not here: what the boxes mean. `machine` says it in looks and notes; this file knows nothing of money.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, chain, pairwise

# look → what the legend says, and its colours. Two colours with a bar between them are one by day and one in the dark.
LOOKS = {
    "rest": ("moves on by itself", "fill:#f1f5f9|#1e293b;stroke:#94a3b8|#64748b"),
    "call": ("calls another system", "fill:#dbeafe|#172a54;stroke:#3b82f6|#60a5fa"),
    "wait": ("waits for an event", "fill:#fef3c7|#42290a;stroke:#d97706|#fbbf24"),
    "end": ("end", "fill:#dcfce7|#0b3320;stroke:#16a34a|#4ade80"),
    "back": ("end, money with its owner", "fill:#ede9fe|#2e1f57;stroke:#8b5cf6|#a78bfa"),
}
STYLE = """\
text{font:10.4px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;text-anchor:middle}
.name{font-size:13px;font-weight:700}
.count{font-weight:700}
.aside{text-anchor:start}
.line{fill:none;stroke-width:1.4;stroke:#64748b|#94a3b8}
.rises{stroke-dasharray:5 3}
.head{fill:#64748b|#94a3b8}
.coin{fill:#d97706|#fbbf24}
.note{fill:#475569|#b6c2d1}
.ink{fill:#1f2937|#e2e8f0}
.ground{fill:#ffffff|#0f172a}
"""
IN_FLIGHT = "money in flight"
MERMAIDS_WORDS = re.compile("acc[a-z]+|class(def)?|click|default|href|note|scale|state|style", re.IGNORECASE)

# All in pixels. Text is in fonts of fixed width, so that its length is known without measuring it.
NAME_CHAR, NOTE_CHAR = 7.9, 6.3
BOX_HEIGHT, BOX_PAD, LABEL_HEIGHT = 46.0, 18.0, 15.0
BOX_GAP, LABEL_GAP, BEND_GAP = 36.0, 14.0, 18.0
ROW_GAP, PORT_GAP, PORT_MARGIN, LOOP, COIN = 18.0, 16.0, 30.0, 34.0, 16.0
MARGIN, HEADING, WIDTH_MIN = 24.0, 62.0, 360.0
ORDER_SWEEPS, PLACE_SWEEPS = 24, 300


@dataclass(frozen=True)
class Box:
    """A state, as it looks."""

    name: str
    look: str  # a key of LOOKS
    note: str
    in_flight: bool


@dataclass(frozen=True)
class Line:
    """An arrow, or several between the same two boxes."""

    source: str
    target: str
    labels: tuple[str, ...]  # one row each
    events: tuple[str, ...]  # all of them, shown as the line's tooltip

    @property
    def width(self) -> float:
        """How much room the labels need."""
        return NOTE_CHAR * max(len(label) for label in self.labels)


@dataclass(frozen=True)
class Picture:
    """What is to be drawn. Every box can be reached from the start."""

    title: str
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
    for look, (_, colours) in LOOKS.items():
        if names := [ids[box.name] for box in picture.boxes if box.look == look]:
            rows.append(f"    classDef {look} {_lit(colours, 1).replace(';', ',')},color:#1f2937")
            rows.append(f"    class {','.join(names)} {look}")
    return "\n".join([*rows, ""])


def _mermaid_id(name: str) -> str:
    """One word, and none of Mermaid's own."""
    return f"{name}_" if MERMAIDS_WORDS.fullmatch(name) else name.replace(" ", "_")


@dataclass(eq=False)
class _Spot:
    """Anything that takes a place in a row: a box, a label, or a bend of a line that passes through."""

    left: float  # how far it reaches to either side of x
    right: float
    gap: float  # the least space beside it
    height: float = 0.0
    pull: float = 1.0  # how hard it pulls at its neighbours: what should be straight pulls hardest
    x: float = 0.0
    y: float = 0.0  # the top of its row
    row_height: float = 0.0
    above: list[_Spot] = field(default_factory=list)
    below: list[_Spot] = field(default_factory=list)


@dataclass
class Layout:
    """Where everything is. It takes longer to compute than to draw, and depends on the picture alone: cache it."""

    picture: Picture
    boxes: dict[str, _Spot]
    rows: list[list[_Spot]]
    threads: list[tuple[Line, list[_Spot], bool]]  # the spots of a line from top to bottom, and whether it points up


def lay_out(picture: Picture) -> Layout:
    """Find a place for everything."""
    ranks, rising = _ranks(picture)
    layout = Layout(picture, {}, [[] for _ in range(2 * max(ranks.values()) + 1)], [])
    for box in picture.boxes:
        half = max(NAME_CHAR * len(box.name) + COIN * box.in_flight, NOTE_CHAR * len(box.note)) / 2 + BOX_PAD
        loops = [LOOP + line.width for line in picture.lines if line.source == line.target == box.name]
        layout.boxes[box.name] = _Spot(half, half + max(loops, default=0.0), BOX_GAP, BOX_HEIGHT)
        layout.rows[2 * ranks[box.name]].append(layout.boxes[box.name])
    for line in picture.lines:
        if line.source != line.target:
            _thread(layout, ranks, line, (line.source, line.target) in rising)
    _order(layout.rows)
    _place(layout.rows)
    _stack(layout.rows)
    return layout


def _ranks(picture: Picture) -> tuple[dict[str, int], set[tuple[str, str]]]:
    """The row of every box (the longest way to it from the start), and the lines that close a circle and must rise."""
    onward: dict[str, list[str]] = {box.name: [] for box in picture.boxes}
    for line in picture.lines:
        onward[line.source].append(line.target)
    rising: set[tuple[str, str]] = set()
    path: list[str] = []
    finished: list[str] = []

    def visit(name: str) -> None:
        path.append(name)
        for target in onward[name]:
            if target in path:
                rising.add((name, target))
            elif target not in finished:
                visit(target)
        finished.append(path.pop())

    visit(picture.start)
    ranks = dict.fromkeys(reversed(finished), 0)
    for name in ranks:
        for target in onward[name]:
            if (name, target) not in rising:
                ranks[target] = max(ranks[target], ranks[name] + 1)
    return ranks, rising


def _thread(layout: Layout, ranks: Mapping[str, int], line: Line, rises: bool) -> None:
    """Give a line a label in the row next to its source, and a bend in every other row that it passes."""
    top, bottom = (line.target, line.source) if rises else (line.source, line.target)
    rows = range(2 * ranks[top] + 1, 2 * ranks[bottom])
    half = line.width / 2 + 4
    label = _Spot(half, half, LABEL_GAP, LABEL_HEIGHT * len(line.labels), pull=8.0)
    middle = [label if row == rows[-1 if rises else 0] else _Spot(0, 0, BEND_GAP, pull=64.0) for row in rows]
    for row, spot in zip(rows, middle, strict=True):
        layout.rows[row].append(spot)
    spots = [layout.boxes[top], *middle, layout.boxes[bottom]]
    for upper, lower in pairwise(spots):
        upper.below.append(lower)
        lower.above.append(upper)
    layout.threads.append((line, spots, rises))


def _order(rows: list[list[_Spot]]) -> None:
    """Put what belongs together side by side: sweep down and up by barycentre, keep the order that crosses least."""
    best, crossings = [list(row) for row in rows], _crossings(rows)
    for sweep in range(ORDER_SWEEPS):
        down = sweep % 2 == 0
        for index in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            beside = {spot: place for place, spot in enumerate(rows[index - 1 if down else index + 1])}
            centres: dict[_Spot, float] = {}
            for place, spot in enumerate(rows[index]):
                near = [beside[other] for other in (spot.above if down else spot.below)]
                centres[spot] = sum(near) / len(near) if near else place
            rows[index].sort(key=centres.__getitem__)
        if (count := _crossings(rows)) < crossings:
            best, crossings = [list(row) for row in rows], count
    rows[:] = best


def _crossings(rows: list[list[_Spot]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        place = {spot: index for index, spot in enumerate(lower)}
        ends = [end for over in upper for end in sorted(place[spot] for spot in over.below)]
        count += sum(after < before for index, before in enumerate(ends) for after in ends[index + 1 :])
    return count


def _place(rows: list[list[_Spot]]) -> None:
    """Pull every spot towards its neighbours above and below, without leaving its place in the row."""
    for sweep in range(PLACE_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            near = [[(other.x, spot.pull * other.pull) for other in spot.above + spot.below] for spot in row]
            weights = [sum(pull for _, pull in pulls) for pulls in near]
            wanted = [sum(x * pull for x, pull in pulls) / sum(pull for _, pull in pulls) for pulls in near]
            gaps = [a.right + max(a.gap, b.gap) + b.left for a, b in pairwise(row)]
            for spot, x in zip(row, _spread(wanted, gaps, weights), strict=True):
                spot.x = x
    left = min(spot.x - spot.left for spot in chain.from_iterable(rows))
    for spot in chain.from_iterable(rows):
        spot.x += MARGIN - left


def _spread(wanted: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The places nearest to the desired ones, in order and `gaps` apart (pooling adjacent violators)."""
    offsets = list(accumulate(gaps, initial=0.0))[: len(wanted)]
    pools: list[tuple[float, float, int]] = []  # where, how heavy, how many
    for want, offset, weight in zip(wanted, offsets, weights, strict=True):
        pool = (want - offset, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            x, heavy, many = pools.pop()
            pool = ((x * heavy + pool[0] * pool[1]) / (heavy + pool[1]), heavy + pool[1], many + pool[2])
        pools.append(pool)
    places = (x for x, _, many in pools for _ in range(many))
    return [x + offset for x, offset in zip(places, offsets, strict=True)]


def _stack(rows: list[list[_Spot]]) -> None:
    """Set the rows below each other, farther apart where lines have far to go sideways."""
    y = HEADING
    for row in rows:
        height = max(spot.height for spot in row)
        for spot in row:
            spot.y, spot.row_height = y, height
        aside = max((abs(spot.x - other.x) for spot in row for other in spot.below), default=0.0)
        y += height + ROW_GAP + min(aside / 10, ROW_GAP)


def svg(layout: Layout, counts: Mapping[str, int]) -> str:
    """The whole picture as one element that needs nothing else."""
    picture = layout.picture
    width = max(WIDTH_MIN, 1.5 * MARGIN + max(spot.x + spot.right for spot in chain.from_iterable(layout.rows)))
    legend, height = _legend(picture, width, layout.rows[-1][0].y + BOX_HEIGHT + 34)
    arrow = f"arrow-{_mermaid_id(picture.title)}"  # ids are the whole page's: two pictures in one page must differ
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bursar-machine" role="img" width="{width:.0f}"'
        f' height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(picture.title)}</title><style>{_style()}</style>",
        f'<defs><marker id="{arrow}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
        ' markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0.5L8 4L0 7.5Z"/></marker></defs>',
        _rect("ground", 0, 0, width, height, 8) + _text("name ink aside", MARGIN, 26, picture.title),
        *_draw_lines(layout, f'marker-end="url(#{arrow})"'),
        *(_draw_box(box, layout.boxes[box.name], counts.get(box.name, 0)) for box in picture.boxes),
        *legend,
    ]
    return "\n".join([*parts, "</svg>", ""])


def _rect(look: str, x: float, y: float, width: float, height: float, rx: float = 0) -> str:
    return f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{rx:.0f}"/>'


def _text(look: str, x: float, y: float, *rows: str) -> str:
    return "".join(
        f'<text class="{look}" x="{x:.1f}" y="{y + LABEL_HEIGHT * index:.1f}">{escape(row)}</text>'
        for index, row in enumerate(rows)
    )


def _draw_lines(layout: Layout, head: str) -> list[str]:
    """Lines first, then labels, so that no line is drawn across a label."""
    start = layout.boxes[layout.picture.start]
    paths = [
        f'<circle class="head" cx="{start.x:.1f}" cy="{HEADING - 24:.1f}" r="5"/>',
        f'<path class="line" {head} d="M{start.x:.1f} {HEADING - 19:.1f}V{HEADING - 1:.1f}"/>',
    ]
    labels: list[str] = []
    for line, (top, *middle, bottom), rises in layout.threads:
        points = [(_ports(top, top.below)[middle[0]], top.y + BOX_HEIGHT)]
        for spot in middle:
            points += [(spot.x, spot.y), (spot.x, spot.y + spot.row_height)]
            if spot.height:
                labels.append(_label(line, spot))
        points.append((_ports(bottom, bottom.above)[middle[-1]], bottom.y))
        look, path = ("line rises", points[::-1]) if rises else ("line", points)
        paths.append(f'<path class="{look}" {head} d="{_curve(path)}">{_tip(line)}</path>')
    paths += [_loop(x, layout.boxes[x.source], head) for x in layout.picture.lines if x.source == x.target]
    return paths + labels


def _ports(box: _Spot, beside: Sequence[_Spot]) -> dict[_Spot, float]:
    """Where lines meet the edge of a box: straight below or above what they lead to, as far as there is room."""
    ordered = sorted(beside, key=lambda spot: spot.x)
    last = len(ordered) - 1
    room = max(box.left - PORT_MARGIN, 0.0)
    gap = min(PORT_GAP, 2 * room / max(last, 1))
    places = _spread([spot.x - box.x for spot in ordered], [gap] * last, [1.0] * len(ordered))
    return {
        spot: box.x + min(max(x, gap * index - room), room - gap * (last - index))
        for index, (spot, x) in enumerate(zip(ordered, places, strict=True))
    }


def _curve(points: list[tuple[float, float]]) -> str:
    """A smooth way through the points, upright wherever it passes one."""
    path = "M{:.1f} {:.1f}".format(*points[0])
    for (x, y), (to_x, to_y) in pairwise(points):
        half = (y + to_y) / 2
        path += f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}"
    return path


def _tip(line: Line) -> str:
    events = ", ".join(line.events)
    return f"<title>{escape(f'{line.source} → {line.target}: {events}')}</title>"


def _label(line: Line, spot: _Spot) -> str:
    """The events of a line, upon a piece of background that interrupts it."""
    top = spot.y + (spot.row_height - spot.height) / 2
    ground = _rect("ground", spot.x - spot.left, top, spot.left + spot.right, spot.height)
    return f"<g>{_tip(line)}{ground}{_text('note', spot.x, top + 11, *line.labels)}</g>"


def _loop(line: Line, box: _Spot, head: str) -> str:
    """A line from a box to itself: one small loop at its right side."""
    x, y = box.x + box.left, box.y + BOX_HEIGHT / 2
    path = f"M{x:.1f} {y - 9:.1f}C{x + 32:.1f} {y - 20:.1f} {x + 32:.1f} {y + 20:.1f} {x:.1f} {y + 9:.1f}"
    words = _text("note aside", x + LOOP - 4, y + 4 - LABEL_HEIGHT * (len(line.labels) - 1) / 2, *line.labels)
    return f'<g>{_tip(line)}<path class="line" {head} d="{path}"/>{words}</g>'


def _draw_box(box: Box, spot: _Spot, count: int) -> str:
    left, width = spot.x - spot.left, 2 * spot.left
    parts = [_rect("box", left, spot.y, width, BOX_HEIGHT, 9)]
    if box.look in ("end", "back"):
        parts.append(_rect("box", left + 3.5, spot.y + 3.5, width - 7, BOX_HEIGHT - 7, 6))
    if box.in_flight:
        parts.append(_coin(spot.x - NAME_CHAR * len(box.name) / 2 - 4, spot.y + 16))
    parts.append(_text("name ink", spot.x + COIN * box.in_flight / 2, spot.y + 20.5, box.name))
    parts.append(_text("note", spot.x, spot.y + 36, box.note))
    if count:
        short = f"{count:,}" if count < 10**5 else f"{count // 10**3:,}k" if count < 10**7 else f"{count // 10**6:,}M"
        wide, x = NOTE_CHAR * len(short) + 14, left + width - 20
        badge = _rect("ink", x, spot.y - 9, wide, 18, 9) + _text("count ground", x + wide / 2, spot.y + 4, short)
        parts.append(f"<g><title>{count:,}</title>{badge}</g>")
    return f'<g class="{box.look}" data-state="{escape(box.name)}">' + "".join(parts) + "</g>"


def _coin(x: float, y: float) -> str:
    return f'<circle class="coin" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{IN_FLIGHT}</title></circle>'


def _legend(picture: Picture, width: float, y: float) -> tuple[list[str], float]:
    """What the colours mean, of those that are there; and how high the picture is with it."""
    items = [(look, LOOKS[look][0]) for look in LOOKS if any(box.look == look for box in picture.boxes)]
    items += [("", IN_FLIGHT)] if any(box.in_flight for box in picture.boxes) else []
    drawn, x = [], MARGIN
    for look, text in items:
        reach = 24 + NOTE_CHAR * len(text)
        if x + reach > width - MARGIN:
            x, y = MARGIN, y + LABEL_HEIGHT + 7
        swatch = _rect("box", x, y, 16, 12, 3) if look else _coin(x + 8, y + 6)
        drawn.append(f'<g class="{look}">{swatch}{_text("note aside", x + 22, y + 10, text)}</g>')
        x += reach + 20
    return drawn, y + 12 + MARGIN


def _style() -> str:
    """One sheet for light and dark. Every rule is below our own class: a style in an inline SVG is the whole page's."""
    sheet = STYLE + "".join(f".{look} .box{{{colours}}}\n" for look, (_, colours) in LOOKS.items())
    sheet = "".join(f".bursar-machine {rule}" for rule in sheet.splitlines())
    return f"{_lit(sheet, 1)}@media (prefers-color-scheme:dark){{{_lit(sheet, 2)}}}"


def _lit(rules: str, light: int) -> str:
    return re.sub(r"(#\w+)\|(#\w+)", lambda colours: colours[light], rules)
