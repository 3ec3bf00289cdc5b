"""The one check for restores: of a peer with a log of its own, and of this database (T33, W33)."""

from __future__ import annotations

import pytest

from bursar.model.marks import Restored, restored


@pytest.mark.parametrize(
    ("mark", "sequence", "unknown", "found"),
    [
        (0, 0, 0, Restored.NEITHER),  # they have never met
        (7, 7, 0, Restored.NEITHER),
        (7, 9, 0, Restored.NEITHER),  # two answers were lost, or are on their way
        (7, 6, 0, Restored.PEER),  # it has acknowledged 7
        (1, 0, 0, Restored.PEER),  # an empty disk
        (7, 7, 1, Restored.DATABASE),
        (7, 9, 2, Restored.DATABASE),
        (0, 2, 2, Restored.DATABASE),  # an empty database beside an old peer
        (7, 6, 1, Restored.PEER),  # both: a peer that has forgotten can't say what it has done
    ],
)
def test_who_was_restored(mark: int, sequence: int, unknown: int, found: Restored) -> None:
    assert restored(mark=mark, sequence=sequence, unknown=unknown) is found


def test_nothing_is_unknown_unless_it_was_compared() -> None:
    assert restored(mark=3, sequence=5) is Restored.NEITHER
