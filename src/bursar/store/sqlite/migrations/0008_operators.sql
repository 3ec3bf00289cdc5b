-- What operators do, who did it and why: stops that need two operators to be lifted, and calls whose end was forced.

-- A pause may need two operators to be lifted (T47). The first one's proposal is kept until another person agrees.
ALTER TABLE pauses ADD COLUMN two_people INTEGER NOT NULL DEFAULT 0 CHECK (two_people IN (0, 1));
ALTER TABLE pauses ADD COLUMN proposed_by TEXT NOT NULL DEFAULT '';  -- who wants to lift it; "" for none
ALTER TABLE pauses ADD COLUMN proposed_reason TEXT NOT NULL DEFAULT '';

-- The history of pauses and of commits that were set aside: one row per action.
CREATE TABLE operator_actions (
    number      INTEGER PRIMARY KEY,
    action      TEXT NOT NULL,               -- paused, two people needed, resume proposed, resumed, released
    kind        TEXT NOT NULL,               -- flow, rail or commit
    name        TEXT NOT NULL,
    actor       TEXT NOT NULL,
    reason      TEXT NOT NULL,
    proposed_by TEXT NOT NULL,               -- the first of two operators, where two were needed; else ""
    at          INTEGER NOT NULL
) STRICT;
CREATE TRIGGER operator_actions_no_update BEFORE UPDATE ON operator_actions
BEGIN SELECT RAISE(ABORT, 'operator_actions is insert-only'); END;
CREATE TRIGGER operator_actions_no_delete BEFORE DELETE ON operator_actions
BEGIN SELECT RAISE(ABORT, 'operator_actions is insert-only'); END;

-- Calls whose end two operators decided: their rail is asked until it says what really happened (T34).
CREATE TABLE forced_calls (
    record  INTEGER NOT NULL,
    version INTEGER NOT NULL,                -- of the record while it was calling
    state   TEXT NOT NULL,                   -- in which it was calling
    attempt INTEGER NOT NULL,                -- questions so far
    due     INTEGER,                         -- when to ask next; null: the rail's answer was definite
    said    TEXT NOT NULL,                   -- what the rail said last; "" while nothing
    PRIMARY KEY (record, version)
) STRICT, WITHOUT ROWID;
CREATE INDEX forced_calls_due ON forced_calls (due) WHERE due IS NOT NULL;
