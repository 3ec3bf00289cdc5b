-- Transfers: records that rest on an account being active, and the tables of the specifications, as views.
-- runs_from: 1

-- Records whose accounts must be active are written only under the rules by which that was decided: otherwise an account
-- could close between the decision and the write, and be an end of a transfer all the same. BU001 the rules have changed;
-- 0: they don't matter. In the same order as every group: first the turn, then the row.
CREATE FUNCTION bursar.share_rules_1(expected_generation bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF expected_generation = 0 THEN
        RETURN;
    END IF;
    PERFORM bursar.take_turn_1();
    PERFORM 1 FROM bursar.rules WHERE id = 1 AND generation = expected_generation FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the rules have changed' USING ERRCODE = 'BU001';
    END IF;
END $$;

-- Calls of a record that were repeated, over its whole life: each has left a row that leads nowhere.
CREATE FUNCTION bursar.retries_1(number bigint) RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT count(*)::integer FROM bursar.transitions t WHERE t.record = number AND t.source = t.target
        AND t.event IN ('TIMEOUT', 'PENDING', 'NETWORK_ERROR', 'UNKNOWN', 'EXPLICIT_FAIL')
$$;

-- Specification 000 §7.1, as before (0003); but retries count over the whole life, and a transfer that went back says why.
CREATE OR REPLACE VIEW bursar.transfers_tb AS
SELECT number AS transfer_id, id AS req_id, (body ->> 'user')::bigint AS user_id, (body ->> 'asset_id')::integer AS asset_id,
    (body ->> 'amount')::numeric AS amount,
    (CASE WHEN body ->> 'source' = 'FUNDING' THEN 1 WHEN body ->> 'target' = 'FUNDING' THEN 2 ELSE 3 END)::smallint
        AS transfer_type,
    (CASE body ->> 'source' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END)::smallint AS source_type,
    (CASE body ->> 'target' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END)::smallint AS target_type,
    (CASE state WHEN 'INIT' THEN 0 WHEN 'SOURCE_PENDING' THEN 10 WHEN 'SOURCE_DONE' THEN 20 WHEN 'TARGET_PENDING' THEN 30
        WHEN 'COMMITTED' THEN 40 WHEN 'FAILED' THEN -10 WHEN 'COMPENSATING' THEN -20
        WHEN 'ROLLED_BACK' THEN -30 END)::smallint AS state,
    coalesce(nullif(error, ''), nullif(body ->> 'reason', '')) AS error_message, bursar.retries_1(number) AS retry_count,
    nullif(body ->> 'client_order_id', '') AS client_order_id, created_at, updated_at
FROM bursar.records WHERE flow = 'transfers';

-- Specification 001 §11: the same in its words, times in milliseconds, amounts in smallest units (which bigint can't
-- always hold). A table of that name, left by another program, is left alone.
CREATE SCHEMA IF NOT EXISTS trading;
DO $$
BEGIN
    IF to_regclass('trading.transfers') IS NOT NULL THEN
        RAISE NOTICE 'trading.transfers is there already and is left alone; Bursar has no view of that name';
        RETURN;
    END IF;
    CREATE VIEW trading.transfers AS
    SELECT id AS req_id,
        CASE body ->> 'source' WHEN 'SPOT' THEN 'trading' ELSE lower(body ->> 'source') END AS source,
        CASE body ->> 'target' WHEN 'SPOT' THEN 'trading' ELSE lower(body ->> 'target') END AS target,
        (body ->> 'user')::bigint AS user_id, (body ->> 'asset_id')::integer AS asset_id,
        (body ->> 'amount')::numeric AS amount, lower(state) AS state,
        floor(extract(epoch FROM created_at) * 1000)::bigint AS created_at,
        floor(extract(epoch FROM updated_at) * 1000)::bigint AS updated_at,
        coalesce(nullif(error, ''), nullif(body ->> 'reason', '')) AS error, bursar.retries_1(number) AS retry_count
    FROM bursar.records WHERE flow = 'transfers';
END $$;
