-- Rows of flows' own: unique values, numbers of sequences, reserved amounts, cursors and lists, one table for all flows.

CREATE TABLE flow_rows (
    flow      TEXT NOT NULL,
    kind      TEXT NOT NULL,                 -- declared by the flow
    key       TEXT NOT NULL,
    record    INTEGER NOT NULL,              -- the record that has it; 0: the flow's own
    state     TEXT NOT NULL CHECK (state IN ('held', 'released', 'value', 'sequence', 'total')),
    amount    TEXT NOT NULL,                 -- a number, what is reserved, or the flow's own
    version   INTEGER NOT NULL CHECK (version >= 1),  -- what every change compares and sets
    permanent INTEGER NOT NULL,              -- never another record's
    body      TEXT NOT NULL,                 -- JSON, the flow's own
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (flow, kind, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX flow_rows_record ON flow_rows (record, kind) WHERE record <> 0;

CREATE TRIGGER flow_rows_guard BEFORE UPDATE ON flow_rows
WHEN (NEW.flow, NEW.kind, NEW.key, NEW.permanent) IS NOT (OLD.flow, OLD.kind, OLD.key, OLD.permanent)
  OR NEW.version <= OLD.version OR (NEW.record <> OLD.record AND OLD.state <> 'released')
  OR (OLD.permanent AND NEW.state <> OLD.state)
BEGIN SELECT RAISE(ABORT, 'flow_rows: UPDATE would lose what a record has'); END;
CREATE TRIGGER flow_rows_no_delete BEFORE DELETE ON flow_rows
BEGIN SELECT RAISE(ABORT, 'flow_rows: DELETE would lose what a record has'); END;
