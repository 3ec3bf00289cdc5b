"""Drawing: where boxes, lines, labels and counts are put, and one picture to look at that has everything in it.

golden/picture.svg is that picture. If a change is meant to move something, look at the new one in a browser (a failing
test says where it is) and put it in the old one's place.
"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model import drawing
from bursar.model.drawing import LOOKS, Box, Line, Picture, lay_out

GOLDEN = Path(__file__).parent / "golden" / "picture.svg"
SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"(?<![#\w])-?\d+(?:\.\d+)?")

# Every look; lines that pass rows, rise, share two boxes' rows and would cross if the boxes were not put in order;
# loops.
EVERYTHING = Picture(
    title="every thing",
    start="BEGUN",
    boxes=(
        Box("BEGUN", "rest", "moves on", False),
        Box("ASKING_FOR_IT", "wait", "waits for an approver", False),
        Box("CALLING", "call", "10 · calls the bank", True),
        Box("SENDING", "call", "20 · calls another chain", True),
        Box("RETURNING", "call", "calls", True),
        Box("OK", "end", "end", False),
        Box("RETURNED", "back", "end", False),
        Box("REJECTED", "back", "end", False),
    ),
    lines=(
        Line("BEGUN", "ASKING_FOR_IT", ("ASK", "ASK_TWICE"), ("ASK", "ASK_TWICE")),
        Line("BEGUN", "CALLING", ("GO",), ("GO",)),
        Line("ASKING_FOR_IT", "REJECTED", ("REJECT",), ("REJECT",)),
        Line("ASKING_FOR_IT", "CALLING", ("APPROVE",), ("APPROVE",)),
        Line("ASKING_FOR_IT", "ASKING_FOR_IT", ("REMIND",), ("REMIND",)),
        Line("CALLING", "RETURNED", ("REFUSED_AT_ONCE",), ("REFUSED_AT_ONCE",)),
        Line("CALLING", "SENDING", ("SUCCESS",), ("SUCCESS",)),
        Line("CALLING", "CALLING", ("retry",), ("TIMEOUT", "UNKNOWN")),
        Line("SENDING", "OK", ("SUCCESS",), ("SUCCESS",)),
        Line("SENDING", "RETURNING", ("EXPLICIT_FAIL",), ("EXPLICIT_FAIL",)),
        Line("SENDING", "ASKING_FOR_IT", ("DOUBT",), ("DOUBT",)),
        Line("RETURNING", "RETURNED", ("SUCCESS",), ("SUCCESS",)),
        Line("RETURNING", "RETURNING", ("retry", "EXPLICIT_FAIL too"), ("TIMEOUT", "EXPLICIT_FAIL")),
    ),
)
COUNTS = {"BEGUN": 7, "CALLING": 99_999, "SENDING": 100_000, "OK": 9_999_999, "RETURNED": 10_000_000}


def pair(*labels: str, back: tuple[str, ...] = ()) -> Picture:
    """One box, and one below it."""
    lines = [Line("A", "B", labels or ("GO",), ("GO",)), *([Line("B", "A", back, ("BACK",))] if back else [])]
    return Picture("pair", "A", (Box("A", "rest", "note", False), Box("B", "end", "note", False)), tuple(lines))


def test_the_picture_of_everything(tmp_path: Path) -> None:
    """Given a picture with everything in it, then nothing has moved: the same text, and no number a whole pixel off."""
    svg = drawing.svg(lay_out(EVERYTHING), COUNTS)
    (drawn := tmp_path / GOLDEN.name).write_text(svg, encoding="utf-8")
    golden = GOLDEN.read_text(encoding="utf-8")
    assert NUMBER.sub("0", svg) == NUMBER.sub("0", golden), drawn
    assert [float(n) for n in NUMBER.findall(svg)] == pytest.approx(
        [float(n) for n in NUMBER.findall(golden)], abs=0.3
    ), drawn


def test_the_same_layout_is_drawn_with_and_without_counts() -> None:
    layout = lay_out(EVERYTHING)
    with_counts, without = drawing.svg(layout, COUNTS), drawing.svg(layout, {})
    assert len(re.findall('class="count ground"', with_counts)) == len(COUNTS)
    assert re.sub(r"<g><title>[\d,]+</title>.*?</g>", "", with_counts) == without


@pytest.mark.parametrize(
    ("count", "short"),
    [
        (1, "1"),
        (1_000, "1,000"),
        (99_999, "99,999"),
        (100_000, "100k"),
        (9_999_999, "9,999k"),
        (10_000_000, "10M"),
        (1_234_567_890, "1,234M"),
    ],
)
def test_a_count_is_short_and_its_title_is_exact(count: int, short: str) -> None:
    root = ET.fromstring(drawing.svg(lay_out(pair()), {"A": count}))
    (badge,) = [text.text for text in root.iter(f"{SVG}text") if text.attrib["class"].startswith("count")]
    assert badge == short
    assert f"{count:,}" in {title.text for title in root.iter(f"{SVG}title")}


def test_boxes_stand_in_rows_by_the_longest_way_to_them() -> None:
    """Given a way of one step and a way of two to a box, then it stands below both; a line back moves nothing."""
    ranks, rising = drawing._ranks(EVERYTHING)
    assert ranks == {
        "BEGUN": 0,
        "ASKING_FOR_IT": 1,
        "CALLING": 2,
        "REJECTED": 2,
        "SENDING": 3,
        "OK": 4,
        "RETURNING": 4,
        "RETURNED": 5,
    }
    loops = {(line.source, line.target) for line in EVERYTHING.lines if line.source == line.target}
    assert rising == {("SENDING", "ASKING_FOR_IT"), *loops}


def test_a_line_is_labelled_beside_its_source_and_bends_elsewhere() -> None:
    layout = lay_out(EVERYTHING)
    rows = {id(spot): number for number, row in enumerate(layout.rows) for spot in row}
    for line, (top, *middle, bottom), rises in layout.threads:
        source, target = layout.boxes[line.source], layout.boxes[line.target]
        assert (top, bottom) == ((target, source) if rises else (source, target))
        (label,) = [spot for spot in middle if spot.height]
        assert abs(rows[id(label)] - rows[id(source)]) == 1
        assert [rows[id(spot)] for spot in (top, *middle, bottom)] == list(range(rows[id(top)], rows[id(bottom)] + 1))


@pytest.mark.parametrize(
    "ways",
    [
        "A-B A-C B-E C-D",  # D and E change places
        "A-B A-C A-D B-E C-F D-E",  # the upper ones do: B and D lead to the same box
        "A-B B-C A-C A-D B-D B-E A-F",  # both, one after the other
    ],
)
def test_boxes_change_places_until_no_lines_cross(ways: str) -> None:
    """Given boxes listed in an order in which lines would cross, and another in which none does, then it is found."""
    lines = [Line(way[0], way[-1], ("GO",), ("GO",)) for way in ways.split()]
    names = sorted({name for line in lines for name in (line.source, line.target)})
    boxes = [Box(name, "wait", "note", False) for name in names]
    assert drawing._crossings(lay_out(Picture("crossed", "A", tuple(boxes), tuple(lines))).rows) == 0


def test_crossings_are_counted_pair_by_pair() -> None:
    upper, lower = ([drawing._Spot(1, 1, 1) for _ in range(3)] for _ in range(2))
    for place, other in enumerate((2, 1, 0)):
        upper[place].below.append(lower[other])
    assert drawing._crossings([upper, lower]) == 3
    assert drawing._crossings([upper, lower[::-1]]) == 0


def test_lines_that_meet_do_not_cross() -> None:
    upper, lower = [drawing._Spot(1, 1, 1), drawing._Spot(1, 1, 1)], drawing._Spot(1, 1, 1)
    for spot in upper:
        spot.below.append(lower)
    assert drawing._crossings([upper, [lower]]) == 0


@pytest.mark.parametrize(
    ("box", "width"),
    [
        (Box("TEN_LETTER", "rest", "note", False), 10 * 7.9),
        (Box("TEN_LETTER", "rest", "note", True), 10 * 7.9 + 16),
        (Box("SHORT", "rest", "a note of 20 letters", True), 20 * 6.3),
    ],
    ids=["name", "name and coin", "note"],
)
def test_a_box_is_as_wide_as_what_is_written_in_it(box: Box, width: float) -> None:
    """And 18 pixels wider on either side."""
    boxes = box, Box("B", "end", "note", False)
    layout = lay_out(Picture("p", box.name, boxes, (Line(box.name, "B", ("GO",), ("GO",)),)))
    assert layout.boxes[box.name].left == layout.boxes[box.name].right == pytest.approx(width / 2 + 18)


# --- spreading -------------------------------------------------------------------------------------------------------

some = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4)


def test_what_has_room_gets_the_place_it_wants() -> None:
    assert drawing._spread([0, 10, 30], [5, 20], [1, 1, 1]) == [0, 10, 30]


def test_what_is_crowded_meets_in_the_middle_by_weight() -> None:
    assert drawing._spread([0, 0], [8], [1, 1]) == [-4, 4]
    assert drawing._spread([0, 0], [8], [3, 1]) == [-2, 6]


@given(some)
def test_places_are_in_order_and_none_is_nearer_to_the_wanted_ones(spots: list[tuple[int, int, int]]) -> None:
    """Given any wanted places, then the places keep their gaps, and no other places that do are less far off in sum."""
    wanted, gaps, weights = [w for w, _, _ in spots], [g for _, g, _ in spots[1:]], [h for _, _, h in spots]
    places = drawing._spread(wanted, gaps, weights)
    assert all(b - a >= gap - 1e-9 for (a, b), gap in zip(itertools.pairwise(places), gaps, strict=True))

    def off(xs: list[float]) -> float:
        return sum(weight * (x - want) ** 2 for x, want, weight in zip(xs, wanted, weights, strict=True))

    for first in range(len(places)):
        for step in (-0.01, 0.01):
            moved = [x + step if n >= first else x for n, x in enumerate(places)]
            if all(b - a >= gap - 1e-9 for (a, b), gap in zip(itertools.pairwise(moved), gaps, strict=True)):
                assert off(moved) >= off(places) - 1e-9


# --- the edges of a box ----------------------------------------------------------------------------------------------


def test_a_line_leaves_a_box_straight_below_what_it_leads_to() -> None:
    box, near = drawing._Spot(100, 100, 0, x=500), drawing._Spot(5, 5, 0, x=540)
    assert drawing._ports(box, [near]) == {near: 540}


def test_lines_to_what_is_far_aside_stay_on_the_edge_of_the_box() -> None:
    box = drawing._Spot(100, 100, 0, x=500)
    left, right, further = (drawing._Spot(5, 5, 0, x=x) for x in (0, 2000, 3000))
    assert drawing._ports(box, [further, left, right]) == {left: 430, right: 570 - 16, further: 570}


def test_a_narrow_box_has_its_lines_closer_together() -> None:
    box = drawing._Spot(40, 40, 0, x=500)
    spots = [drawing._Spot(5, 5, 0, x=500) for _ in range(3)]
    assert sorted(drawing._ports(box, spots).values()) == [490, 500, 510]


# --- the legend ------------------------------------------------------------------------------------------------------


def test_the_legend_explains_what_is_there_and_nothing_else() -> None:
    texts = {text.text for text in ET.fromstring(drawing.svg(lay_out(pair()), {})).iter(f"{SVG}text")}
    said = {look: words in texts for look, (words, _) in LOOKS.items()}
    assert said == {"rest": True, "call": False, "wait": False, "end": True, "back": False}
    assert drawing.IN_FLIGHT not in texts


def test_a_legend_wider_than_the_picture_goes_on_below() -> None:
    _, one_row = drawing._legend(EVERYTHING, 10_000, 100)
    rows, several = drawing._legend(EVERYTHING, 360, 100)
    assert (one_row, len(rows)) == (100 + 12 + drawing.MARGIN, len(LOOKS) + 1)
    assert several > one_row
    root = ET.fromstring(f"<svg>{''.join(rows)}</svg>")
    ends = [float(text.attrib["x"]) + drawing.NOTE_CHAR * len(text.text or "") for text in root.iter("text")]
    assert max(ends) <= 360 - drawing.MARGIN


def test_a_legend_that_fits_exactly_stays_in_its_row() -> None:
    """Given "moves on by itself" (18 letters) and "end" (3), each with a swatch, and the gap between them."""
    width = 24 + (24 + 18 * 6.3) + 20 + (24 + 3 * 6.3) + 24
    assert drawing._legend(pair(), width + 0.01, 100)[1] == 136
    assert drawing._legend(pair(), width, 100)[1] == 136
    assert drawing._legend(pair(), width - 0.01, 100)[1] == 136 + 22
