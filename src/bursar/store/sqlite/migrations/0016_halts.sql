-- Halts: a switch beside the pause, which stops every signature of a flow, of a rail, or of all (W21).

-- A halt is a row of `pauses` of a kind of its own, so a program that knows only pauses neither obeys nor lifts it: it
-- finds rows by their kind. It is copied because a check can't be changed in place.
ALTER TABLE pauses RENAME TO pauses_15;
CREATE TABLE pauses (
    kind   TEXT NOT NULL CHECK (kind IN ('flow', 'rail', 'halt flow', 'halt rail', 'halt all')),
    name   TEXT NOT NULL,
    actor  TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     INTEGER NOT NULL,
    two_people INTEGER NOT NULL DEFAULT 0 CHECK (two_people IN (0, 1)),
    proposed_by TEXT NOT NULL DEFAULT '',
    proposed_reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;
INSERT INTO pauses (kind, name, actor, reason, at, two_people, proposed_by, proposed_reason)
SELECT kind, name, actor, reason, at, two_people, proposed_by, proposed_reason FROM pauses_15;
DROP TABLE pauses_15;

-- High-water marks are of any peer now, not only of trading cores (T33, W33), and stay in `core_high_water`: `rail` is the
-- peer, `worker` the writer. In a rolling upgrade version N and N+1 run side by side. N reads and raises marks here; had
-- N+1 a table of its own, each would miss what the other has acknowledged, and a restored core would be let in. So both
-- keep this one, and no row is moved. A peer that is no core has a colon in its name, which no rail has.
