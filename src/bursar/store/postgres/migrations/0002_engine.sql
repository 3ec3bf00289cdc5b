-- The engine: records of all flows in one table, what happened to them, what rails and callers were told, and limits.
-- runs_from: 1

CREATE TABLE bursar.records (
    number     bigint PRIMARY KEY,          -- from bursar.numbers
    flow       text COLLATE "C" NOT NULL,
    id         text COLLATE "C" NOT NULL,
    owner      text COLLATE "C" NOT NULL,   -- whose it is; "" for none
    state      text COLLATE "C" NOT NULL,
    version    integer NOT NULL CHECK (version >= 1),  -- passages so far: what every move compares and sets
    attempt    integer NOT NULL,            -- calls made in this state whose answer is not known
    transit    bigint NOT NULL,             -- the posting in transit that belongs to it, or 0
    due        timestamptz,                 -- when a worker should look at it; null: not before a signal comes
    worker     text COLLATE "C" NOT NULL,   -- its worker until then; "" for none. An optimisation, not a lock
    body       json NOT NULL,               -- the flow's own
    error      text NOT NULL,               -- what the last call said
    since      timestamptz NOT NULL DEFAULT now(),  -- when it came into this state
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (flow, id)
) WITH (fillfactor = 70);
CREATE INDEX records_due ON bursar.records (due) WHERE due IS NOT NULL;
CREATE INDEX records_owner ON bursar.records (flow, owner, number);
CREATE UNIQUE INDEX records_transit ON bursar.records (transit) WHERE transit <> 0;  -- a posting in transit is one record's (T36)

-- The history of records: one row per arrow taken, and per call whose answer is not known.
CREATE TABLE bursar.transitions (
    record   bigint NOT NULL,
    version  integer NOT NULL,
    source   text COLLATE "C" NOT NULL,     -- "" for the first
    event    text COLLATE "C" NOT NULL,
    target   text COLLATE "C" NOT NULL,
    attempt  integer NOT NULL,
    actor    text COLLATE "C" NOT NULL,     -- the worker, or the person
    evidence json NOT NULL,
    at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (record, version)
);

-- What was answered to an operation, refusals included: a repeated request gets the same answer, whatever has happened
-- since. Rails keyed by (rail, request, operation), callers' own keys by (flow and owner, key, "create").
CREATE TABLE bursar.outcomes (
    scope       text COLLATE "C" NOT NULL,
    id          text COLLATE "C" NOT NULL,
    op          text COLLATE "C" NOT NULL,
    fingerprint text COLLATE "C" NOT NULL,  -- of the request: the same key with another request is a mistake
    outcome     text COLLATE "C" NOT NULL,
    code        text COLLATE "C" NOT NULL,
    detail      json NOT NULL,
    at          timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (scope, id, op)
);

-- How much of a limit is used up; the bucket (day, second) is part of the key. Disposable once its time is over.
CREATE TABLE bursar.counters (
    key        text COLLATE "C" PRIMARY KEY,
    count      bigint NOT NULL,
    amount     numeric NOT NULL,
    count_max  bigint NOT NULL,
    amount_max numeric NOT NULL,
    until      timestamptz NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX counters_until ON bursar.counters (until);

-- What a person should look at: once per record and reason, until acknowledged.
CREATE TABLE bursar.alerts (
    record       bigint NOT NULL,           -- 0: of the system as a whole
    reason       text COLLATE "C" NOT NULL,
    severity     text NOT NULL CHECK (severity IN ('warning', 'critical')),
    message      text NOT NULL,
    raised_at    timestamptz NOT NULL DEFAULT now(),
    delivered_at timestamptz,
    acknowledged_at timestamptz,
    acknowledged_by text NOT NULL DEFAULT '',
    PRIMARY KEY (record, reason)
);

-- What is switched off: a flow, or a rail.
CREATE TABLE bursar.pauses (
    kind   text COLLATE "C" NOT NULL CHECK (kind IN ('flow', 'rail')),
    name   text COLLATE "C" NOT NULL,
    actor  text NOT NULL,
    reason text NOT NULL,
    at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, name)
);

DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['transitions', 'outcomes'] LOOP
        EXECUTE format('CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON bursar.%I
                        FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change()', name);
        EXECUTE format('CREATE TRIGGER insert_only_all BEFORE TRUNCATE ON bursar.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change()', name);
    END LOOP;
END $$;

-- The records' part of a group, whole or not at all: BU004 a record has moved, BU005 a limit is used up. A record, an
-- operation or a passage that is there already is an ordinary unique violation. Everything comes sorted, and after the
-- ledger's part: one order of locks for all. A delay is in microseconds from now; null: never due; -1: unchanged.
CREATE FUNCTION bursar.write_records_1(
    o_scope text[], o_id text[], o_op text[], o_fingerprint text[], o_outcome text[], o_code text[], o_detail text[],
    c_key text[], c_count bigint[], c_amount text[], c_count_max bigint[], c_amount_max text[], c_until bigint[],
    n_number bigint[], n_flow text[], n_id text[], n_owner text[], n_state text[], n_version integer[],
    n_transit bigint[], n_delay bigint[], n_worker text[], n_body text[], n_error text[],
    m_number bigint[], m_expected integer[], m_state text[], m_version integer[], m_attempt integer[],
    m_transit bigint[], m_delay bigint[], m_worker text[], m_body text[], m_error text[],
    t_record bigint[], t_version integer[], t_source text[], t_event text[], t_target text[], t_attempt integer[],
    t_actor text[], t_evidence text[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n bigint;
BEGIN
    IF cardinality(o_id) > 0 THEN
        INSERT INTO bursar.outcomes (scope, id, op, fingerprint, outcome, code, detail)
        SELECT s, i, o, f, u, c, d::json FROM unnest(o_scope, o_id, o_op, o_fingerprint, o_outcome, o_code, o_detail)
                                              AS o (s, i, o, f, u, c, d);
    END IF;
    IF cardinality(c_key) > 0 THEN
        INSERT INTO bursar.counters AS k (key, count, amount, count_max, amount_max, until)
        SELECT y, c, a::numeric, cm, am::numeric, to_timestamp(u / 1e6)
        FROM unnest(c_key, c_count, c_amount, c_count_max, c_amount_max, c_until) AS c (y, c, a, cm, am, u)
        ON CONFLICT (key) DO UPDATE SET count = k.count + excluded.count, amount = k.amount + excluded.amount,
                                        count_max = excluded.count_max, amount_max = excluded.amount_max
        WHERE k.count + excluded.count <= excluded.count_max AND k.amount + excluded.amount <= excluded.amount_max;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n <> cardinality(c_key) THEN
            RAISE EXCEPTION 'a limit is used up' USING ERRCODE = 'BU005';
        END IF;
    END IF;
    IF cardinality(n_number) > 0 THEN
        INSERT INTO bursar.records (number, flow, id, owner, state, version, attempt, transit, due, worker, body, error)
        SELECT u, f, i, o, s, v, 0, p, now() + d * interval '1 microsecond', w, b::json, e
        FROM unnest(n_number, n_flow, n_id, n_owner, n_state, n_version, n_transit, n_delay, n_worker, n_body, n_error)
             AS r (u, f, i, o, s, v, p, d, w, b, e);
    END IF;
    IF cardinality(m_number) > 0 THEN
        UPDATE bursar.records r
        SET state = m.s, version = m.v, attempt = m.a, transit = m.p, worker = m.w, error = m.e, updated_at = now(),
            due = CASE WHEN m.d = -1 THEN r.due ELSE now() + m.d * interval '1 microsecond' END,
            since = CASE WHEN m.s = r.state THEN r.since ELSE now() END, body = coalesce(m.b::json, r.body)
        FROM unnest(m_number, m_expected, m_state, m_version, m_attempt, m_transit, m_delay, m_worker, m_body, m_error)
             AS m (u, x, s, v, a, p, d, w, b, e)
        WHERE r.number = m.u AND r.version = m.x;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n <> cardinality(m_number) THEN
            RAISE EXCEPTION 'a record has moved' USING ERRCODE = 'BU004';
        END IF;
    END IF;
    IF cardinality(t_record) > 0 THEN
        INSERT INTO bursar.transitions (record, version, source, event, target, attempt, actor, evidence)
        SELECT r, v, s, e, t, a, w, x::json
        FROM unnest(t_record, t_version, t_source, t_event, t_target, t_attempt, t_actor, t_evidence)
             AS t (r, v, s, e, t, a, w, x);
    END IF;
END $$;
