-- Payouts: the tables of specification 003 (its layer 2), as views. Its queries run with search_path=bursar (W45).
-- runs_from: 1

-- In the order of the declaration, so that ORDER BY priority DESC begins with what is urgent (W9).
CREATE TYPE bursar.payout_priority AS ENUM ('low', 'normal', 'high');

-- The specification's status of a state (flows/payouts/machine, STATUS). The view and the index have the same expression:
-- a query by status reads the payouts that have it, and not all that ever were.
CREATE INDEX records_payout_status ON bursar.records ((CASE state WHEN 'pending' THEN 'pending'
    WHEN 'processing' THEN 'processing' WHEN 'signing' THEN 'processing' WHEN 'sending' THEN 'processing'
    WHEN 'confirming' THEN 'confirming' WHEN 'replacing' THEN 'confirming' WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed'
    WHEN 'failed' THEN 'failed' END), created_at) WHERE flow = 'payouts';
-- What has ended lately, for the metrics.
CREATE INDEX records_payout_ended ON bursar.records (since) WHERE flow = 'payouts' AND state IN ('confirmed', 'failed');

-- Withdrawals alone: a sweep or a refill names its wallet (W24). A product of numerics is exact, a quotient is not.
-- retry_count: how often the payout was claimed: taken from pending to be paid, or refused as this very payment.
CREATE VIEW bursar.withdrawal_queue AS
SELECT id, body -> 'payment' ->> 'source' AS withdrawal_request_id, body -> 'payment' ->> 'chain' AS chain_id,
    lower(body -> 'payment' ->> 'asset') || ':' || (body -> 'payment' ->> 'chain') AS asset_on_chain_id,
    nullif(body ->> 'wallet', '') AS operation_wallet_address_id, body -> 'payment' ->> 'to' AS to_address,
    body -> 'payment' ->> 'amount_raw' AS amount_raw,
    (body -> 'payment' ->> 'amount_raw')::numeric * ('1e-' || (body -> 'payment' ->> 'decimals'))::numeric AS amount_human,
    CASE state WHEN 'pending' THEN 'pending' WHEN 'processing' THEN 'processing' WHEN 'signing' THEN 'processing'
        WHEN 'sending' THEN 'processing' WHEN 'confirming' THEN 'confirming' WHEN 'replacing' THEN 'confirming'
        WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed' WHEN 'failed' THEN 'failed' END AS status,
    (CASE priority WHEN 0 THEN 'high' WHEN 1 THEN 'normal' ELSE 'low' END)::bursar.payout_priority AS priority,
    nullif(CASE WHEN state = 'confirmed' THEN body -> 'result' ->> 'hash'
        ELSE coalesce(body -> 'tries' -> -1 ->> 'hash', body -> 'result' ->> 'hash') END, '') AS tx_hash,
    body -> 'result' ->> 'gas_used' AS gas_used, body -> 'result' ->> 'gas_price' AS gas_price,
    coalesce((body ->> 'refusals')::integer, 0) + (SELECT count(*)::integer FROM bursar.transitions t
        WHERE t.record = records.number AND t.source = 'pending' AND t.target <> 'pending') AS retry_count,
    5 AS max_retries, nullif(error, '') AS error_message, coalesce(due, since) AS scheduled_at,
    CASE WHEN state IN ('confirmed', 'failed') THEN since END AS processed_at, created_at
FROM bursar.records WHERE flow = 'payouts' AND coalesce(body ->> 'requested_wallet', '') = '';

CREATE VIEW bursar.asset_on_chain AS
SELECT name AS id, body::json ->> 'asset' AS asset_id, body::json ->> 'chain' AS chain_id,
    nullif(body::json ->> 'contract', '') AS contract, (body::json ->> 'decimals')::integer AS decimals,
    (body::json ->> 'minimum')::numeric AS minimum, (body::json ->> 'gas_limit_max')::bigint AS gas_limit_max,
    (body::json ->> 'active')::boolean AS active
FROM bursar.documents d
WHERE kind = 'asset_on_chain' AND NOT retired
    AND version = (SELECT max(version) FROM bursar.documents n WHERE n.kind = d.kind AND n.name = d.name);

-- last_used_at: when its newest nonce was taken; 1970 if none was, so that such a wallet comes first and not, as a null
-- would, last. balance_reserved: of all assets together, each in its own units: good for ranking, and for nothing else.
CREATE VIEW bursar.operation_wallet_addresses AS
SELECT name AS id, body::json ->> 'chain' AS chain_id, body::json ->> 'address' AS address, body::json ->> 'role' AS role,
    body::json ->> 'status' AS status, nullif(body::json ->> 'derivation_path', '') AS derivation_path,
    coalesce((SELECT timestamptz 'epoch' + (n.body ->> 'at_us')::bigint * interval '1 microsecond'
        FROM bursar.flow_rows s JOIN bursar.flow_rows n ON n.flow = 'payouts' AND n.kind = 'nonce'
            AND n.key = s.key || '/' || lpad((s.amount - 1)::text, 20, '0')
        WHERE s.flow = 'payouts' AND s.kind = 'nonce'
            AND s.key = (d.body::json ->> 'chain') || '/' || (d.body::json ->> 'address')),
        timestamptz 'epoch') AS last_used_at,
    coalesce((SELECT sum(w.amount * ('1e-' || a.decimals)::numeric) FROM bursar.asset_on_chain a
        JOIN bursar.flow_rows w ON w.flow = 'payouts' AND w.kind = 'reserved' AND w.key = d.name || '/' || a.asset_id
        WHERE a.chain_id = d.body::json ->> 'chain'), 0) AS balance_reserved
FROM bursar.documents d
WHERE kind = 'wallet' AND NOT retired
    AND version = (SELECT max(version) FROM bursar.documents n WHERE n.kind = d.kind AND n.name = d.name);
