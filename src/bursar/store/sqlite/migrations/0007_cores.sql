-- Trading cores: which core this ledger is bound to, how far its log is known, and what it may forget.

-- Who this ledger is. One row, made by the first program that contacts a core, and the same for ever.
CREATE TABLE ledger_identity (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    identity TEXT NOT NULL,
    at       INTEGER NOT NULL
) STRICT;

-- The one core behind each rail. Another core, or an empty data folder, under the same name is refused.
CREATE TABLE cores (
    rail     TEXT PRIMARY KEY,
    identity TEXT NOT NULL UNIQUE,          -- of the core: one core is never two rails
    room     INTEGER NOT NULL DEFAULT 1,    -- floors, written here before the core is asked to raise its own (T32)
    forget   INTEGER NOT NULL DEFAULT 1,
    compared INTEGER NOT NULL DEFAULT 0,    -- the sequence of its log up to which every operation has its record here
    bound_at INTEGER NOT NULL,
    pruned_at INTEGER                       -- when the core last took these floors
) STRICT, WITHOUT ROWID;

-- The highest sequence of a core's log that transitions in this database rely on (T33), by worker. The highest counts.
CREATE TABLE core_high_water (
    rail     TEXT NOT NULL,
    worker   TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (rail, worker)
) STRICT, WITHOUT ROWID;

-- Records that two operators forced: a core never forgets their operations (T34).
CREATE INDEX transitions_forced ON transitions (record) WHERE event = 'FORCE ASKED';
