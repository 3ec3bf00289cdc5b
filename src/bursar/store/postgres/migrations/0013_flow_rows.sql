-- Rows of flows' own: unique values, numbers of sequences, reserved amounts, cursors and lists, one table for all flows.
-- runs_from: 1

CREATE TABLE bursar.flow_rows (
    flow      text COLLATE "C" NOT NULL,
    kind      text COLLATE "C" NOT NULL,      -- declared by the flow
    key       text COLLATE "C" NOT NULL,
    record    bigint NOT NULL,                -- the record that has it; 0: the flow's own
    state     text NOT NULL CHECK (state IN ('held', 'released', 'value', 'sequence', 'total')),
    amount    numeric(39) NOT NULL,           -- a number, what is reserved, or the flow's own
    version   bigint NOT NULL CHECK (version >= 1),  -- what every change compares and sets
    permanent boolean NOT NULL,               -- never another record's
    body      json NOT NULL,                  -- the flow's own
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (flow, kind, key)
);
CREATE INDEX flow_rows_record ON bursar.flow_rows (record, kind) WHERE record <> 0;

CREATE FUNCTION bursar.guard_flow_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'UPDATE' OR (NEW.flow, NEW.kind, NEW.key, NEW.permanent) IS DISTINCT FROM
                            (OLD.flow, OLD.kind, OLD.key, OLD.permanent)
       OR NEW.version <= OLD.version OR (NEW.record <> OLD.record AND OLD.state <> 'released')
       OR (OLD.permanent AND NEW.state <> OLD.state) THEN
        RAISE EXCEPTION 'bursar.flow_rows: % would lose what a record has', TG_OP USING ERRCODE = 'BU100';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard BEFORE UPDATE OR DELETE ON bursar.flow_rows
    FOR EACH ROW EXECUTE FUNCTION bursar.guard_flow_row();
CREATE TRIGGER guard_all BEFORE TRUNCATE ON bursar.flow_rows
    FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change();

-- Rows of flows' own, in the transaction of their records' moves, sorted. Expected version 0: there is none. BU004: one
-- has changed since it was read. One that is there already is an ordinary unique violation.
CREATE FUNCTION bursar.write_flow_rows_1(
    r_expected bigint[], r_flow text[], r_kind text[], r_key text[], r_record bigint[], r_state text[],
    r_amount text[], r_version bigint[], r_permanent boolean[], r_body text[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n bigint;
        m bigint;
BEGIN
    IF cardinality(r_key) = 0 THEN
        RETURN;
    END IF;
    INSERT INTO bursar.flow_rows (flow, kind, key, record, state, amount, version, permanent, body)
    SELECT f, k, y, r, s, a::numeric, v, p, b::json
    FROM unnest(r_expected, r_flow, r_kind, r_key, r_record, r_state, r_amount, r_version, r_permanent, r_body)
         AS t (x, f, k, y, r, s, a, v, p, b)
    WHERE x = 0;
    GET DIAGNOSTICS n = ROW_COUNT;
    UPDATE bursar.flow_rows w
    SET record = t.r, state = t.s, amount = t.a::numeric, version = t.v, body = t.b::json, updated_at = now()
    FROM unnest(r_expected, r_flow, r_kind, r_key, r_record, r_state, r_amount, r_version, r_permanent, r_body)
         AS t (x, f, k, y, r, s, a, v, p, b)
    WHERE t.x > 0 AND w.flow = t.f AND w.kind = t.k AND w.key = t.y AND w.version = t.x;
    GET DIAGNOSTICS m = ROW_COUNT;
    IF n + m <> cardinality(r_key) THEN
        RAISE EXCEPTION 'a row of a flow has changed' USING ERRCODE = 'BU004';
    END IF;
END $$;
