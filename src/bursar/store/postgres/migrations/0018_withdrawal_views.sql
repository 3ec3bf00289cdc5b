-- Withdrawals: the other table of specification 003 (its layer 1), as a view. Its queries run with search_path=bursar (W45).
-- runs_from: 1

-- The specification's status of a state (flows/withdrawals/machine, STATUS). The view and the index have the same
-- expression: a query by status reads the withdrawals that have it, and not all that ever were.
CREATE INDEX records_withdrawal_status ON bursar.records ((CASE state WHEN 'checking' THEN 'pending' WHEN 'waiting' THEN 'pending'
    WHEN 'approved' THEN 'approved' WHEN 'queued' THEN 'queued' WHEN 'completed' THEN 'completed' WHEN 'failed' THEN 'failed'
    WHEN 'rejected' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END), created_at) WHERE flow = 'withdrawals';
-- What has ended lately, for the metrics.
CREATE INDEX records_withdrawal_ended ON bursar.records (since)
    WHERE flow = 'withdrawals' AND state IN ('completed', 'failed', 'rejected', 'cancelled');

-- tx_hash is final_tx_hash once more: the specification's migration reads it by that name. amount has the decimals of the
-- chain, fee those of the asset. approvals and reasons: names of people, and codes of why it waits.
-- created_at: of what was imported, as the other system had it.
CREATE VIEW bursar.withdrawal_requests AS
SELECT id, body ->> 'user' AS user_id,
    (body -> 'payment' ->> 'amount_raw')::numeric * ('1e-' || (body -> 'payment' ->> 'decimals'))::numeric AS amount,
    body -> 'payment' ->> 'to' AS to_address, body -> 'payment' ->> 'asset' AS asset_id, body -> 'payment' ->> 'chain' AS chain_id,
    CASE state WHEN 'checking' THEN 'pending' WHEN 'waiting' THEN 'pending' WHEN 'approved' THEN 'approved'
        WHEN 'queued' THEN 'queued' WHEN 'completed' THEN 'completed' WHEN 'failed' THEN 'failed'
        WHEN 'rejected' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END AS status,
    timestamptz 'epoch' + nullif((body ->> 'queued_us')::bigint, 0) * interval '1 microsecond' AS queued_at,
    CASE WHEN state = 'completed' THEN nullif(body ->> 'tx_hash', '') END AS final_tx_hash,
    coalesce(timestamptz 'epoch' + (body -> 'imported' ->> 'created_us')::bigint * interval '1 microsecond', created_at) AS created_at,
    updated_at,
    nullif(body -> 'payment' ->> 'memo', '') AS memo, body -> 'payment' ->> 'amount_raw' AS amount_raw,
    CASE WHEN state = 'completed' THEN nullif(body ->> 'tx_hash', '') END AS tx_hash,
    (body -> 'payment' ->> 'fee')::numeric * (SELECT ('1e-' || precision)::numeric FROM bursar.assets
        WHERE code = body -> 'payment' ->> 'asset') AS fee,
    body -> 'payment' ->> 'requester' AS requester,
    ARRAY(SELECT a ->> 'approver' FROM json_array_elements(body -> 'approvals') AS a) AS approvals,
    CASE WHEN state IN ('checking', 'waiting') THEN coalesce((body ->> 'needed')::integer, 0) ELSE 0 END AS approvals_missing,
    nullif(body ->> 'mandate', '') AS mandate,
    CASE WHEN state NOT IN ('checking', 'waiting') THEN timestamptz 'epoch'
        + nullif((body ->> 'approved_us')::bigint, 0) * interval '1 microsecond' END AS approved_at,
    ARRAY(SELECT r ->> 'code' FROM json_array_elements(body -> 'reasons') AS r
        WHERE state IN ('checking', 'waiting', 'approved')) AS reasons,
    nullif(body -> 'screening' ->> 'verdict', '') AS screening_verdict,
    nullif(body -> 'screening' ->> 'reason', '') AS screening_reason,
    timestamptz 'epoch' + nullif((body -> 'payment' ->> 'expires_us')::bigint, 0) * interval '1 microsecond' AS expires_at,
    body -> 'payouts' ->> -1 AS queue_id,
    CASE WHEN state IN ('failed', 'rejected', 'cancelled') THEN coalesce(nullif(body ->> 'cancelled', ''),
        nullif(body ->> 'rejected', ''), nullif(body ->> 'failure', ''), nullif(error, '')) END AS reason
FROM bursar.records WHERE flow = 'withdrawals';
