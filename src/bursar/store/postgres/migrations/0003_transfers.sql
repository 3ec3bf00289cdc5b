-- Internal transfers: who may make ids under which node number, and the specification's table as a view.
-- runs_from: 1

-- Node numbers of Snowflakes, leased. `since` is where the holder's ids begin: after all that any holder before has made.
CREATE TABLE bursar.nodes (
    node   integer PRIMARY KEY,
    holder text NOT NULL,
    since  timestamptz NOT NULL,
    until  timestamptz NOT NULL
);
INSERT INTO bursar.nodes (node, holder, since, until)
SELECT i, '', '-infinity', '-infinity' FROM generate_series(0, 1023) AS i;

-- Specification 000 §7.1. Amounts are in smallest units (T40); 1 = FUNDING, 2 = SPOT, 3 = FUTURE, 4 = MARGIN;
-- transfer_type 1 leaves FUNDING, 2 arrives there, 3 is between cores (T19).
CREATE VIEW bursar.transfers_tb AS
SELECT number AS transfer_id, id AS req_id, (body ->> 'user')::bigint AS user_id, (body ->> 'asset_id')::integer AS asset_id,
    (body ->> 'amount')::numeric AS amount,
    (CASE WHEN body ->> 'source' = 'FUNDING' THEN 1 WHEN body ->> 'target' = 'FUNDING' THEN 2 ELSE 3 END)::smallint
        AS transfer_type,
    (CASE body ->> 'source' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END)::smallint AS source_type,
    (CASE body ->> 'target' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END)::smallint AS target_type,
    (CASE state WHEN 'INIT' THEN 0 WHEN 'SOURCE_PENDING' THEN 10 WHEN 'SOURCE_DONE' THEN 20 WHEN 'TARGET_PENDING' THEN 30
        WHEN 'COMMITTED' THEN 40 WHEN 'FAILED' THEN -10 WHEN 'COMPENSATING' THEN -20
        WHEN 'ROLLED_BACK' THEN -30 END)::smallint AS state,
    nullif(error, '') AS error_message, attempt AS retry_count, nullif(body ->> 'client_order_id', '') AS client_order_id,
    created_at, updated_at
FROM bursar.records WHERE flow = 'transfers';
