-- Halts: a switch beside the pause, which stops every signature of a flow, of a rail, or of all (W21).
-- runs_from: 1

-- A halt is a row of `pauses` of a kind of its own, so a program that knows only pauses neither obeys nor lifts it: it
-- finds rows by their kind.
ALTER TABLE bursar.pauses DROP CONSTRAINT pauses_kind_check;
ALTER TABLE bursar.pauses ADD CONSTRAINT pauses_kind_check
    CHECK (kind IN ('flow', 'rail', 'halt flow', 'halt rail', 'halt all'));
