-- Timers of waiting states, signals (the inbox of each record), and priorities.
-- runs_from: 1

ALTER TABLE bursar.records
    ADD COLUMN timer timestamptz,                       -- when it leaves its waiting state by itself; null: never
    ADD COLUMN priority smallint NOT NULL DEFAULT 1 CHECK (priority BETWEEN 0 AND 2),  -- 0 high, 1 normal, 2 low
    ADD COLUMN inbox integer NOT NULL DEFAULT 0 CHECK (inbox >= 0);  -- signals that no transition has consumed

-- What is due, by priority. One index, not two: every move writes an entry of it.
DROP INDEX bursar.records_due;
CREATE INDEX records_due ON bursar.records (priority, due) WHERE due IS NOT NULL;
CREATE INDEX records_timer ON bursar.records (timer) WHERE timer IS NOT NULL;

-- Signals that records were sent: written with a move of their record, and consumed by one.
CREATE TABLE bursar.signals (
    record   bigint NOT NULL,
    sender   text COLLATE "C" NOT NULL,      -- the sender's id of the signal: sent again, it is the same one
    event    text COLLATE "C" NOT NULL,
    actor    text COLLATE "C" NOT NULL,
    evidence json NOT NULL,
    arrived  integer NOT NULL,               -- the record's version with which it arrived: the order of the inbox
    consumed integer CHECK (consumed >= arrived),  -- the version of the transition that consumed it; null: none has
    at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (record, sender)
);

CREATE FUNCTION bursar.guard_signal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'UPDATE' OR OLD.consumed IS NOT NULL OR NEW.consumed IS NULL
       OR (NEW.record, NEW.sender, NEW.event, NEW.actor, NEW.evidence::text, NEW.arrived, NEW.at) IS DISTINCT FROM
          (OLD.record, OLD.sender, OLD.event, OLD.actor, OLD.evidence::text, OLD.arrived, OLD.at) THEN
        RAISE EXCEPTION 'bursar.signals: a signal is consumed once, and nothing else of it changes'
            USING ERRCODE = 'BU100';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard BEFORE UPDATE OR DELETE ON bursar.signals
    FOR EACH ROW EXECUTE FUNCTION bursar.guard_signal();
CREATE TRIGGER guard_all BEFORE TRUNCATE ON bursar.signals
    FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change();

-- Signals of a batch, after their records' moves. One that is there already is consumed; BU004: it was, or it is another.
CREATE FUNCTION bursar.write_signals_1(
    s_record bigint[], s_sender text[], s_event text[], s_actor text[], s_evidence text[], s_arrived integer[],
    s_consumed integer[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE n bigint;
BEGIN
    IF cardinality(s_record) = 0 THEN
        RETURN;
    END IF;
    INSERT INTO bursar.signals AS s (record, sender, event, actor, evidence, arrived, consumed)
    SELECT r, i, e, a, x::json, v, c
    FROM unnest(s_record, s_sender, s_event, s_actor, s_evidence, s_arrived, s_consumed) AS t (r, i, e, a, x, v, c)
    ON CONFLICT (record, sender) DO UPDATE SET consumed = excluded.consumed
    WHERE s.consumed IS NULL AND excluded.consumed > s.arrived AND s.arrived = excluded.arrived;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n <> cardinality(s_record) THEN
        RAISE EXCEPTION 'a signal was sent or consumed before' USING ERRCODE = 'BU004';
    END IF;
END $$;

-- A timer as a batch brings it (below), in the database's clock.
CREATE FUNCTION bursar.timer_1(us bigint) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN us > 0 THEN timestamptz 'epoch' + us * interval '1 microsecond'
                WHEN us < 0 THEN now() - us * interval '1 microsecond' END
$$;

-- The records' part of a batch, as write_records_1, which the version before calls; and with timers, priorities and the
-- count of the inbox. A delay is in microseconds from now; null: never due; -1: unchanged. A timer is in microseconds
-- since 1970; negative: so many from now; 0: none; null: unchanged. The count of the inbox changes by so much.
CREATE FUNCTION bursar.write_records_2(
    o_scope text[], o_id text[], o_op text[], o_fingerprint text[], o_outcome text[], o_code text[], o_detail text[],
    c_key text[], c_count bigint[], c_amount text[], c_count_max bigint[], c_amount_max text[], c_until bigint[],
    n_number bigint[], n_flow text[], n_id text[], n_owner text[], n_state text[], n_version integer[],
    n_transit bigint[], n_delay bigint[], n_worker text[], n_body text[], n_error text[], n_timer bigint[],
    n_priority smallint[],
    m_number bigint[], m_expected integer[], m_state text[], m_version integer[], m_attempt integer[],
    m_transit bigint[], m_delay bigint[], m_worker text[], m_body text[], m_error text[], m_timer bigint[],
    m_inbox integer[],
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
        INSERT INTO bursar.records (number, flow, id, owner, state, version, attempt, transit, due, worker, body, error,
                                    timer, priority)
        SELECT u, f, i, o, s, v, 0, p, now() + d * interval '1 microsecond', w, b::json, e, bursar.timer_1(t), y
        FROM unnest(n_number, n_flow, n_id, n_owner, n_state, n_version, n_transit, n_delay, n_worker, n_body, n_error,
                    n_timer, n_priority) AS r (u, f, i, o, s, v, p, d, w, b, e, t, y);
    END IF;
    IF cardinality(m_number) > 0 THEN
        UPDATE bursar.records r
        SET state = m.s, version = m.v, attempt = m.a, transit = m.p, worker = m.w, error = m.e, updated_at = now(),
            due = CASE WHEN m.d = -1 THEN r.due ELSE now() + m.d * interval '1 microsecond' END,
            since = CASE WHEN m.s = r.state THEN r.since ELSE now() END, body = coalesce(m.b::json, r.body),
            timer = CASE WHEN m.t IS NULL THEN r.timer ELSE bursar.timer_1(m.t) END, inbox = r.inbox + m.i
        FROM unnest(m_number, m_expected, m_state, m_version, m_attempt, m_transit, m_delay, m_worker, m_body, m_error,
                    m_timer, m_inbox) AS m (u, x, s, v, a, p, d, w, b, e, t, i)
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
