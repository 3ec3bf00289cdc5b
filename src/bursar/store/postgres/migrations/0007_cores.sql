-- Trading cores: which core this ledger is bound to, how far its log is known, and what it may forget.
-- runs_from: 1

-- Who this ledger is. One row, made by the first program that contacts a core, and the same for ever.
CREATE TABLE bursar.ledger_identity (
    id       smallint PRIMARY KEY CHECK (id = 1),
    identity text COLLATE "C" NOT NULL,
    at       timestamptz NOT NULL DEFAULT now()
);

-- The one core behind each rail. Another core, or an empty data folder, under the same name is refused.
CREATE TABLE bursar.cores (
    rail     text COLLATE "C" PRIMARY KEY,
    identity text COLLATE "C" NOT NULL UNIQUE,  -- of the core: one core is never two rails
    room     bigint NOT NULL DEFAULT 1,         -- floors, written here before the core is asked to raise its own (T32)
    forget   bigint NOT NULL DEFAULT 1,
    compared bigint NOT NULL DEFAULT 0,         -- the sequence of its log up to which every operation has its record here
    bound_at timestamptz NOT NULL DEFAULT now(),
    pruned_at timestamptz                       -- when the core last took these floors
);

-- The highest sequence of a core's log that transitions in this database rely on (T33). A row per worker: one row per core
-- would be a lock that every host holds through its fsync. The highest of a rail's rows counts.
CREATE TABLE bursar.core_high_water (
    rail     text COLLATE "C" NOT NULL,
    worker   text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (rail, worker)
) WITH (fillfactor = 50);

-- Raise high-water marks, in the transaction of the transitions that rely on them.
CREATE FUNCTION bursar.raise_high_water_1(h_rail text[], h_worker text[], h_sequence bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF cardinality(h_rail) > 0 THEN
        INSERT INTO bursar.core_high_water AS k (rail, worker, sequence)
        SELECT r, w, s FROM unnest(h_rail, h_worker, h_sequence) AS h (r, w, s)
        ON CONFLICT (rail, worker) DO UPDATE SET sequence = excluded.sequence, at = now()
        WHERE excluded.sequence > k.sequence;
    END IF;
END $$;

-- Records that two operators forced: a core never forgets their operations (T34).
CREATE INDEX transitions_forced ON bursar.transitions (record) WHERE event = 'FORCE ASKED';
