-- Payouts: the tables of specification 003 (its layer 2), as views.

-- The specification's status of a state (flows/payouts/machine, STATUS). The view and the index have the same expression:
-- a query by status reads the payouts that have it, and not all that ever were.
CREATE INDEX records_payout_status ON records ((CASE state WHEN 'pending' THEN 'pending' WHEN 'processing' THEN 'processing'
    WHEN 'signing' THEN 'processing' WHEN 'sending' THEN 'processing' WHEN 'confirming' THEN 'confirming'
    WHEN 'replacing' THEN 'confirming' WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed'
    WHEN 'failed' THEN 'failed' END), created_at) WHERE flow = 'payouts';
-- What has ended lately, for the metrics.
CREATE INDEX records_payout_ended ON records (since) WHERE flow = 'payouts' AND state IN ('confirmed', 'failed');

-- Withdrawals alone: a sweep or a refill names its wallet (W24). Times are in seconds since 1970. priority is a rank (2
-- high, 1 normal, 0 low), because SQLite has no enums and the words do not sort so (W9). amount_human is a number as far
-- as that is exact, to 15 digits, and text above. retry_count: how often the payout was claimed: taken from pending to be
-- paid, or refused as this very payment.
CREATE VIEW withdrawal_queue AS
SELECT r.id, r.body -> 'payment' ->> 'source' AS withdrawal_request_id, r.body ->> '$.payment.chain' AS chain_id,
    lower(r.body ->> '$.payment.asset') || ':' || (r.body ->> '$.payment.chain') AS asset_on_chain_id,
    nullif(r.body ->> 'wallet', '') AS operation_wallet_address_id, r.body ->> '$.payment.to' AS to_address,
    r.body ->> '$.payment.amount_raw' AS amount_raw,
    CASE WHEN length(rtrim(r.body ->> '$.payment.amount_raw', '0')) <= 15
        THEN CAST((r.body ->> '$.payment.amount_raw') || 'e-' || (r.body ->> '$.payment.decimals') AS NUMERIC)
        WHEN r.body ->> '$.payment.decimals' = 0 THEN r.body ->> '$.payment.amount_raw'
        ELSE substr(substr(printf('%036d', 0) || (r.body ->> '$.payment.amount_raw'),
                -max(length(r.body ->> '$.payment.amount_raw'), (r.body ->> '$.payment.decimals') + 1)),
            1, max(length(r.body ->> '$.payment.amount_raw') - (r.body ->> '$.payment.decimals'), 1))
            || '.' || substr(printf('%036d', 0) || (r.body ->> '$.payment.amount_raw'), -(r.body ->> '$.payment.decimals'))
        END AS amount_human,
    CASE r.state WHEN 'pending' THEN 'pending' WHEN 'processing' THEN 'processing' WHEN 'signing' THEN 'processing'
        WHEN 'sending' THEN 'processing' WHEN 'confirming' THEN 'confirming' WHEN 'replacing' THEN 'confirming'
        WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed' WHEN 'failed' THEN 'failed' END AS status,
    2 - r.priority AS priority,
    nullif(CASE WHEN r.state = 'confirmed' THEN r.body ->> '$.result.hash'
        ELSE coalesce(r.body ->> '$.tries[#-1].hash', r.body ->> '$.result.hash') END, '') AS tx_hash,
    CAST(r.body ->> '$.result.gas_used' AS TEXT) AS gas_used, r.body ->> '$.result.gas_price' AS gas_price,
    coalesce(r.body ->> 'refusals', 0) + (SELECT count(*) FROM transitions t
        WHERE t.record = r.number AND t.source = 'pending' AND t.target <> 'pending') AS retry_count,
    5 AS max_retries, nullif(r.error, '') AS error_message, coalesce(r.due, r.since) / 1000000.0 AS scheduled_at,
    CASE WHEN r.state IN ('confirmed', 'failed') THEN r.since / 1000000.0 END AS processed_at,
    r.created_at / 1000000.0 AS created_at
FROM records r WHERE r.flow = 'payouts' AND coalesce(r.body ->> 'requested_wallet', '') = '';

CREATE VIEW asset_on_chain AS
SELECT d.name AS id, d.body ->> 'asset' AS asset_id, d.body ->> 'chain' AS chain_id,
    nullif(d.body ->> 'contract', '') AS contract, d.body ->> 'decimals' AS decimals, d.body ->> 'minimum' AS minimum,
    d.body ->> 'gas_limit_max' AS gas_limit_max, d.body ->> 'active' AS active
FROM documents d
WHERE d.kind = 'asset_on_chain' AND NOT d.retired
    AND d.version = (SELECT max(version) FROM documents n WHERE n.kind = d.kind AND n.name = d.name);

-- last_used_at: when its newest nonce was taken; 0 (1970) if none was, so that such a wallet comes first.
-- balance_reserved: of all assets together, each in its own units: good for ranking, and for nothing else.
CREATE VIEW operation_wallet_addresses AS
SELECT d.name AS id, d.body ->> 'chain' AS chain_id, d.body ->> 'address' AS address, d.body ->> 'role' AS role,
    d.body ->> 'status' AS status, nullif(d.body ->> 'derivation_path', '') AS derivation_path,
    coalesce((SELECT (n.body ->> 'at_us') / 1000000.0
        FROM flow_rows s JOIN flow_rows n ON n.flow = 'payouts' AND n.kind = 'nonce'
            AND n.key = s.key || '/' || printf('%020d', s.amount - 1)
        WHERE s.flow = 'payouts' AND s.kind = 'nonce' AND s.key = (d.body ->> 'chain') || '/' || (d.body ->> 'address')),
        0) AS last_used_at,
    (SELECT total(CAST(w.amount || 'e-' || a.decimals AS NUMERIC)) FROM asset_on_chain a
        JOIN flow_rows w ON w.flow = 'payouts' AND w.kind = 'reserved' AND w.key = d.name || '/' || a.asset_id
        WHERE a.chain_id = d.body ->> 'chain') AS balance_reserved
FROM documents d
WHERE d.kind = 'wallet' AND NOT d.retired
    AND d.version = (SELECT max(version) FROM documents n WHERE n.kind = d.kind AND n.name = d.name);
