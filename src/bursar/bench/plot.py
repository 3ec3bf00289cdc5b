"""The plot: two panels per store, ratio to the baseline by number of callers, and rate by size of the database.

Written out as SVG by hand. Colours are mid-tones and the background is left empty, so that it reads on a light and on
a dark page alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bursar.bench.measure import Row

WIDTH, PANEL_W, PANEL_H = 860, 400, 230
LEFT, TOP, GAP = 46, 64, 24
INK = "#7d8590"
COLOURS = ("#3b82c4", "#d9822b", "#2f9e6e")
FONT = "font-family='system-ui, sans-serif'"
STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
SHAPES = ("uniform", "hot-source", "hot-target")


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: int = 400) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{INK}' {FONT} font-size='{size}' font-weight='{weight}' "
        f"text-anchor='{anchor}'>{escape(words)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, *, dash: str = "", opacity: float = 0.35) -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{INK}' stroke-opacity='{opacity}'"
        f"{dashes}/>"
    )


class Panel:
    """Grouped bars: one cluster per label, one bar per series."""

    def __init__(self, x: float, y: float, title: str, top: float) -> None:
        self.x, self.y, self.title, self.top = x, y, title, top
        self.width, self.height = PANEL_W - LEFT, PANEL_H - 50

    def _at(self, value: float) -> float:
        return self.y + self.height * (1 - min(value, self.top) / self.top)

    def draw(self, labels: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]]) -> list[str]:
        """The panel's elements."""
        out = [_text(self.x, self.y - 14, self.title, size=13, weight=600)]
        ticks = int(self.top / 0.25)
        for tick in range(ticks + 1):
            value = tick * 0.25
            height = self._at(value)
            out.append(_line(self.x, height, self.x + self.width, height, opacity=0.9 if tick == 0 else 0.25))
            out.append(_text(self.x - 6, height + 4, f"{value:.2f}", size=11, anchor="end"))
        if self.top > 1:
            out.append(_line(self.x, self._at(1), self.x + self.width, self._at(1), dash="5 4", opacity=0.9))
        cluster = self.width / len(labels)
        bar = cluster * 0.74 / len(series)
        for place, label in enumerate(labels):
            start = self.x + cluster * place + cluster * 0.13
            out.append(_text(start + cluster * 0.37, self.y + self.height + 18, label, anchor="middle"))
            for number, (_, values) in enumerate(series):
                ratio = values[place]
                if ratio is None:
                    continue
                x, height = start + bar * number, self._at(ratio)
                out.append(
                    f"<rect x='{x:.1f}' y='{height:.1f}' width='{bar - 3:.1f}' "
                    f"height='{self.y + self.height - height:.1f}' fill='{COLOURS[number]}' rx='2'/>"
                )
                out.append(_text(x + (bar - 3) / 2, height - 4, f"{ratio:.2f}", size=10, anchor="middle"))
        return out


def _legend(x: float, y: float, names: Sequence[str]) -> list[str]:
    out = []
    for number, name in enumerate(names):
        out.append(f"<rect x='{x:.1f}' y='{y - 9:.1f}' width='10' height='10' fill='{COLOURS[number]}' rx='2'/>")
        out.append(_text(x + 15, y, name))
        x += 34 + 7 * len(name)
    return out


def _scale(values: Sequence[float]) -> float:
    """The top of the axis: a quarter above the highest, at least 1."""
    return max(1.0, -(-max(values, default=1.0) // 0.25) * 0.25) + 0.25


def plot(rows: Sequence[Row]) -> str:
    """All panels as one SVG document."""
    found = {(row.store, row.case, row.callers): row.ratio for row in rows}
    stores = [store for store in STORES if any(row.store == store for row in rows)]
    callers = sorted({row.callers for row in rows if row.case in SHAPES})
    sizes = sorted({int(row.case.rsplit("-", 1)[1]) for row in rows if row.case.startswith("growth-")})
    ratios = [row.ratio for row in rows if row.case in SHAPES or row.case.startswith("growth-")]
    top, height = _scale(ratios), TOP + len(stores) * (PANEL_H + GAP)
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>",
        _text(LEFT, 24, "The ledger beside its baseline, and beside itself on a small database", size=15, weight=600),
        *_legend(LEFT, 44, ["uniform", "hot account pays", "hot account receives (right: does both)"]),
    ]
    for place, store in enumerate(stores):
        y = TOP + 30 + place * (PANEL_H + GAP)
        beside = Panel(LEFT, y, f"{STORES[store]}: share of the baseline's rate, by callers", top)
        bars = [(shape, [found.get((store, shape, n)) for n in callers]) for shape in SHAPES]
        out += beside.draw([str(n) for n in callers], bars)
        grown = Panel(LEFT + PANEL_W + 20, y, f"{STORES[store]}: rate by number of postings, 10⁴ is 1", top)
        many = max((row.callers for row in rows), default=0)
        lines: list[tuple[str, Sequence[float | None]]] = [
            (shape, [found.get((store, f"growth-{shape}-{size}", many)) for size in sizes])
            for shape in ("uniform", "hot")
        ]
        if sizes:
            out += grown.draw([_power(size) for size in sizes], [lines[0], ("", [None] * len(sizes)), lines[1]])
    return "\n".join([*out, "</svg>", ""])


def _power(size: int) -> str:
    zeros = len(str(size)) - 1
    return "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(zeros)) if size == 10**zeros else f"{size:,}"
