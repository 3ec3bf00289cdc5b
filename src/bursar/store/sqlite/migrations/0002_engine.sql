-- The engine: records of all flows in one table, what happened to them, what rails and callers were told, and limits.

CREATE TABLE records (
    number     INTEGER PRIMARY KEY,         -- from numbers, like envelopes
    flow       TEXT NOT NULL,
    id         TEXT NOT NULL,
    owner      TEXT NOT NULL,               -- whose it is; "" for none
    state      TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version >= 1),  -- passages so far: what every move compares and sets
    attempt    INTEGER NOT NULL,            -- calls made in this state whose answer is not known
    transit    INTEGER NOT NULL,            -- the posting in transit that belongs to it, or 0
    due        INTEGER,                     -- when a worker should look at it; null: not before a signal comes
    worker     TEXT NOT NULL,               -- its worker until then; "" for none. An optimisation, not a lock
    body       TEXT NOT NULL,               -- JSON, the flow's own
    error      TEXT NOT NULL,               -- what the last call said
    since      INTEGER NOT NULL,            -- when it came into this state
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    UNIQUE (flow, id)
) STRICT;
CREATE INDEX records_due ON records (due) WHERE due IS NOT NULL;
CREATE INDEX records_owner ON records (flow, owner, number);
CREATE UNIQUE INDEX records_transit ON records (transit) WHERE transit <> 0;  -- a posting in transit is one record's (T36)

-- The history of records: one row per arrow taken, and per call whose answer is not known.
CREATE TABLE transitions (
    record   INTEGER NOT NULL,
    version  INTEGER NOT NULL,
    source   TEXT NOT NULL,                 -- "" for the first
    event    TEXT NOT NULL,
    target   TEXT NOT NULL,
    attempt  INTEGER NOT NULL,
    actor    TEXT NOT NULL,                 -- the worker, or the person
    evidence TEXT NOT NULL,                 -- JSON
    at       INTEGER NOT NULL,
    PRIMARY KEY (record, version)
) STRICT, WITHOUT ROWID;

-- What was answered to an operation, refusals included: a repeated request gets the same answer, whatever has happened
-- since. Rails keyed by (rail, request, operation), callers' own keys by (flow and owner, key, "create").
CREATE TABLE outcomes (
    scope       TEXT NOT NULL,
    id          TEXT NOT NULL,
    op          TEXT NOT NULL,
    fingerprint TEXT NOT NULL,              -- of the request: the same key with another request is a mistake
    outcome     TEXT NOT NULL,
    code        TEXT NOT NULL,
    detail      TEXT NOT NULL,              -- JSON
    at          INTEGER NOT NULL,
    PRIMARY KEY (scope, id, op)
) STRICT, WITHOUT ROWID;

-- How much of a limit is used up; the bucket (day, second) is part of the key. Disposable once its time is over.
CREATE TABLE counters (
    key        TEXT PRIMARY KEY,
    count      INTEGER NOT NULL,
    amount     TEXT NOT NULL,
    count_max  INTEGER NOT NULL,
    amount_max TEXT NOT NULL,
    until      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX counters_until ON counters (until);

-- What a person should look at: once per record and reason, until acknowledged.
CREATE TABLE alerts (
    record       INTEGER NOT NULL,          -- 0: of the system as a whole
    reason       TEXT NOT NULL,
    severity     TEXT NOT NULL CHECK (severity IN ('warning', 'critical')),
    message      TEXT NOT NULL,
    raised_at    INTEGER NOT NULL,
    delivered_at INTEGER,
    acknowledged_at INTEGER,
    acknowledged_by TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (record, reason)
) STRICT, WITHOUT ROWID;

-- What is switched off: a flow, or a rail.
CREATE TABLE pauses (
    kind   TEXT NOT NULL CHECK (kind IN ('flow', 'rail')),
    name   TEXT NOT NULL,
    actor  TEXT NOT NULL,
    reason TEXT NOT NULL,
    at     INTEGER NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER transitions_no_update BEFORE UPDATE ON transitions BEGIN SELECT RAISE(ABORT, 'transitions is insert-only'); END;
CREATE TRIGGER transitions_no_delete BEFORE DELETE ON transitions BEGIN SELECT RAISE(ABORT, 'transitions is insert-only'); END;
CREATE TRIGGER outcomes_no_update BEFORE UPDATE ON outcomes BEGIN SELECT RAISE(ABORT, 'outcomes is insert-only'); END;
CREATE TRIGGER outcomes_no_delete BEFORE DELETE ON outcomes BEGIN SELECT RAISE(ABORT, 'outcomes is insert-only'); END;
