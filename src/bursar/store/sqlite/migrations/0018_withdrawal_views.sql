-- Withdrawals: the other table of specification 003 (its layer 1), as a view.

-- The specification's status of a state (flows/withdrawals/machine, STATUS). The view and the index have the same
-- expression: a query by status reads the withdrawals that have it, and not all that ever were.
CREATE INDEX records_withdrawal_status ON records ((CASE state WHEN 'checking' THEN 'pending' WHEN 'waiting' THEN 'pending'
    WHEN 'approved' THEN 'approved' WHEN 'queued' THEN 'queued' WHEN 'completed' THEN 'completed' WHEN 'failed' THEN 'failed'
    WHEN 'rejected' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END), created_at) WHERE flow = 'withdrawals';
-- What has ended lately, for the metrics.
CREATE INDEX records_withdrawal_ended ON records (since)
    WHERE flow = 'withdrawals' AND state IN ('completed', 'failed', 'rejected', 'cancelled');

-- Times are in seconds since 1970. amount and fee are numbers as far as that is exact, to 15 digits, and text above; amount
-- has the decimals of the chain, fee those of the asset. tx_hash is final_tx_hash once more: the specification's migration
-- reads it by that name. approvals and reasons are lists in JSON: names of people, and codes of why it waits.
-- created_at: of what was imported, as the other system had it.
CREATE VIEW withdrawal_requests AS
SELECT id, user_id,
    CASE WHEN length(rtrim(amount_raw, '0')) <= 15
        THEN CAST(amount_raw || 'e-' || decimals AS NUMERIC)
        WHEN decimals = 0 THEN amount_raw
        ELSE substr(substr(printf('%036d', 0) || amount_raw, -max(length(amount_raw), decimals + 1)),
            1, max(length(amount_raw) - decimals, 1)) || '.' || substr(printf('%036d', 0) || amount_raw, -decimals)
        END AS amount,
    to_address, asset_id, chain_id,
    CASE state WHEN 'checking' THEN 'pending' WHEN 'waiting' THEN 'pending' WHEN 'approved' THEN 'approved'
        WHEN 'queued' THEN 'queued' WHEN 'completed' THEN 'completed' WHEN 'failed' THEN 'failed'
        WHEN 'rejected' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END AS status,
    nullif(queued_us, 0) / 1000000.0 AS queued_at, CASE WHEN state = 'completed' THEN nullif(hash, '') END AS final_tx_hash,
    coalesce(body ->> '$.imported.created_us', created_at) / 1000000.0 AS created_at, updated_at / 1000000.0 AS updated_at, nullif(memo, '') AS memo, amount_raw,
    CASE WHEN state = 'completed' THEN nullif(hash, '') END AS tx_hash,
    CASE WHEN length(rtrim(fee_raw, '0')) <= 15
        THEN CAST(fee_raw || 'e-' || precision AS NUMERIC)
        WHEN precision = 0 THEN fee_raw
        ELSE substr(substr(printf('%036d', 0) || fee_raw, -max(length(fee_raw), precision + 1)),
            1, max(length(fee_raw) - precision, 1)) || '.' || substr(printf('%036d', 0) || fee_raw, -precision)
        END AS fee,
    body ->> '$.payment.requester' AS requester,
    (SELECT json_group_array(value ->> 'approver') FROM json_each(body, '$.approvals')) AS approvals,
    CASE WHEN state IN ('checking', 'waiting') THEN coalesce(body ->> 'needed', 0) ELSE 0 END AS approvals_missing,
    nullif(body ->> 'mandate', '') AS mandate,
    CASE WHEN state NOT IN ('checking', 'waiting') THEN nullif(body ->> 'approved_us', 0) / 1000000.0 END AS approved_at,
    (SELECT json_group_array(value ->> 'code') FROM json_each(body, '$.reasons')
        WHERE state IN ('checking', 'waiting', 'approved')) AS reasons,
    nullif(body ->> '$.screening.verdict', '') AS screening_verdict,
    nullif(body ->> '$.screening.reason', '') AS screening_reason,
    nullif(body ->> '$.payment.expires_us', 0) / 1000000.0 AS expires_at,
    body ->> '$.payouts[#-1]' AS queue_id,
    CASE WHEN state IN ('failed', 'rejected', 'cancelled') THEN coalesce(nullif(body ->> 'cancelled', ''),
        nullif(body ->> 'rejected', ''), nullif(body ->> 'failure', ''), nullif(error, '')) END AS reason
FROM (SELECT r.*, CAST(r.body ->> 'user' AS TEXT) AS user_id, r.body ->> '$.payment.amount_raw' AS amount_raw,
        r.body ->> '$.payment.decimals' AS decimals, r.body ->> '$.payment.to' AS to_address,
        r.body ->> '$.payment.asset' AS asset_id, r.body ->> '$.payment.chain' AS chain_id,
        r.body ->> '$.payment.memo' AS memo, r.body ->> '$.payment.fee' AS fee_raw, r.body ->> 'queued_us' AS queued_us,
        r.body ->> 'tx_hash' AS hash,
        (SELECT a.precision FROM assets a WHERE a.code = r.body ->> '$.payment.asset') AS precision
    FROM records r WHERE r.flow = 'withdrawals');
