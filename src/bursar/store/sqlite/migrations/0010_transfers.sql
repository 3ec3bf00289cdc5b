-- Transfers: the tables of the specifications, as views.

-- Specification 000 §7.1, as before (0003); but amounts are integers as far as SQLite has them (2^63 - 1), and text above;
-- retries (calls whose row leads nowhere) count over the whole life; and a transfer that went back says why.
DROP VIEW transfers_tb;
CREATE VIEW transfers_tb AS
SELECT r.number AS transfer_id, r.id AS req_id, r.body ->> 'user' AS user_id, r.body ->> 'asset_id' AS asset_id,
    CASE WHEN length(r.body ->> 'amount') < 19 OR (length(r.body ->> 'amount') = 19
        AND r.body ->> 'amount' <= '9223372036854775807') THEN CAST(r.body ->> 'amount' AS INTEGER)
        ELSE r.body ->> 'amount' END AS amount,
    CASE WHEN r.body ->> 'source' = 'FUNDING' THEN 1 WHEN r.body ->> 'target' = 'FUNDING' THEN 2 ELSE 3 END AS transfer_type,
    CASE r.body ->> 'source' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END AS source_type,
    CASE r.body ->> 'target' WHEN 'FUNDING' THEN 1 WHEN 'SPOT' THEN 2 WHEN 'FUTURE' THEN 3 ELSE 4 END AS target_type,
    CASE r.state WHEN 'INIT' THEN 0 WHEN 'SOURCE_PENDING' THEN 10 WHEN 'SOURCE_DONE' THEN 20 WHEN 'TARGET_PENDING' THEN 30
        WHEN 'COMMITTED' THEN 40 WHEN 'FAILED' THEN -10 WHEN 'COMPENSATING' THEN -20 WHEN 'ROLLED_BACK' THEN -30 END AS state,
    coalesce(nullif(r.error, ''), nullif(r.body ->> 'reason', '')) AS error_message,
    (SELECT count(*) FROM transitions t WHERE t.record = r.number AND t.source = t.target
        AND t.event IN ('TIMEOUT', 'PENDING', 'NETWORK_ERROR', 'UNKNOWN', 'EXPLICIT_FAIL')) AS retry_count,
    nullif(r.body ->> 'client_order_id', '') AS client_order_id,
    r.created_at / 1000000.0 AS created_at, r.updated_at / 1000000.0 AS updated_at
FROM records r WHERE r.flow = 'transfers';

-- Specification 001 §11 (`trading.transfers` there; SQLite has no schemas): the same in its words, times in milliseconds.
CREATE VIEW trading_transfers AS
SELECT r.id AS req_id,
    CASE r.body ->> 'source' WHEN 'SPOT' THEN 'trading' ELSE lower(r.body ->> 'source') END AS source,
    CASE r.body ->> 'target' WHEN 'SPOT' THEN 'trading' ELSE lower(r.body ->> 'target') END AS target,
    r.body ->> 'user' AS user_id, r.body ->> 'asset_id' AS asset_id,
    CASE WHEN length(r.body ->> 'amount') < 19 OR (length(r.body ->> 'amount') = 19
        AND r.body ->> 'amount' <= '9223372036854775807') THEN CAST(r.body ->> 'amount' AS INTEGER)
        ELSE r.body ->> 'amount' END AS amount,
    lower(r.state) AS state, r.created_at / 1000 AS created_at, r.updated_at / 1000 AS updated_at,
    coalesce(nullif(r.error, ''), nullif(r.body ->> 'reason', '')) AS error,
    (SELECT count(*) FROM transitions t WHERE t.record = r.number AND t.source = t.target
        AND t.event IN ('TIMEOUT', 'PENDING', 'NETWORK_ERROR', 'UNKNOWN', 'EXPLICIT_FAIL')) AS retry_count
FROM records r WHERE r.flow = 'transfers';
