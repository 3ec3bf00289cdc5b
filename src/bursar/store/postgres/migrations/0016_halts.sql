-- Halts: a switch beside the pause, which stops every signature of a flow, of a rail, or of all (W21).
-- runs_from: 1

-- A halt is a row of `pauses` of a kind of its own, so a program that knows only pauses neither obeys nor lifts it: it
-- finds rows by their kind.
ALTER TABLE bursar.pauses DROP CONSTRAINT pauses_kind_check;
ALTER TABLE bursar.pauses ADD CONSTRAINT pauses_kind_check
    CHECK (kind IN ('flow', 'rail', 'halt flow', 'halt rail', 'halt all'));

-- High-water marks are of any peer now, not only of trading cores (T33, W33), and stay in `core_high_water`: `rail` is the
-- peer, `worker` the writer. In a rolling upgrade version N and N+1 run side by side. N reads and raises marks here; had
-- N+1 a table of its own, each would miss what the other has acknowledged, and a restored core would be let in. So both
-- keep this one, and no row is moved. A peer that is no core has a colon in its name, which no rail has.
COMMENT ON TABLE bursar.core_high_water IS
    'The highest sequence of the log of each peer (rail) that transitions rely on, by writer (worker).';
