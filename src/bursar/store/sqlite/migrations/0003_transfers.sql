-- Internal transfers: who may make ids under which node number, and the specification's table as a view.

-- Node numbers of Snowflakes, leased. `since` is where the holder's ids begin: after all that any holder before has made.
CREATE TABLE nodes (
    node   INTEGER PRIMARY KEY,
    holder TEXT NOT NULL,
    since  INTEGER NOT NULL,
    until  INTEGER NOT NULL
) STRICT;
INSERT INTO nodes (node, holder, since, until)
WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 1023) SELECT i, '', 0, 0 FROM n;

-- Specification 000 §7.1. Amounts are in smallest units (T40), times in seconds since 1970; 1 = FUNDING, 2 = SPOT, 3 = FUTURE,
-- 4 = MARGIN; transfer_type 1 leaves FUNDING, 2 arrives there, 3 is between cores (T19).
CREATE VIEW transfers_tb AS
SELECT number AS transfer_id, id AS req_id, body ->> 'user' AS user_id, body ->> 'asset_id' AS asset_id,
    body ->> 'amount' AS amount,
    CASE WHEN body ->> 'source' = 'FUNDING' THEN 1 WHEN body ->> 'target' = 'FUNDING' THEN 2 ELSE 3 END AS transfer_type,
    CASE body ->> 'source' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END AS source_type,
    CASE body ->> 'target' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END AS target_type,
    CASE state WHEN 'INIT' THEN 0 WHEN 'SOURCE_PENDING' THEN 10 WHEN 'SOURCE_DONE' THEN 20 WHEN 'TARGET_PENDING' THEN 30
        WHEN 'COMMITTED' THEN 40 WHEN 'FAILED' THEN -10 WHEN 'COMPENSATING' THEN -20 WHEN 'ROLLED_BACK' THEN -30 END AS state,
    nullif(error, '') AS error_message, attempt AS retry_count, nullif(body ->> 'client_order_id', '') AS client_order_id,
    created_at / 1000000.0 AS created_at, updated_at / 1000000.0 AS updated_at
FROM records WHERE flow = 'transfers';
