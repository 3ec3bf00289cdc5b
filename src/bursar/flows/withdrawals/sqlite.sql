-- SQLite's statements of withdrawals.

-- name: withdrawals_open
-- How many withdrawals have each of these statuses: each is looked up along the index of the specification's status. (With
-- a list to compare with, the planners prefer to read all withdrawals that ever were.)
SELECT w.value, (SELECT count(*) FROM records WHERE flow = 'withdrawals' AND (CASE state WHEN 'checking' THEN 'pending'
    WHEN 'waiting' THEN 'pending' WHEN 'approved' THEN 'approved' WHEN 'queued' THEN 'queued' WHEN 'completed' THEN 'completed'
    WHEN 'failed' THEN 'failed' WHEN 'rejected' THEN 'rejected' WHEN 'cancelled' THEN 'cancelled' END) = w.value)
FROM json_each(?) AS w

-- name: withdrawals_ended
-- Withdrawals that have ended within so many microseconds, and no more than so many of them, the newest; by chain, state and
-- whether a mandate has approved them: how many, how many of them were approved, microseconds from the request to that.
WITH latest AS MATERIALIZED (
    SELECT state, created_at, body FROM records INDEXED BY records_withdrawal_ended
    WHERE flow = 'withdrawals' AND state IN ('completed', 'failed', 'rejected', 'cancelled') AND since > now_us() - ?1
    ORDER BY since DESC LIMIT ?2),
told AS (
    SELECT body ->> '$.payment.chain' AS chain, state, coalesce(body ->> 'mandate', '') <> '' AS automatic,
        nullif(body ->> 'approved_us', 0) - created_at AS took_us
    FROM latest)
SELECT chain, state, automatic, count(*), count(took_us), coalesce(sum(took_us), 0)
FROM told GROUP BY chain, state, automatic ORDER BY chain, state, automatic

-- name: withdrawals_ended_lately
-- Withdrawals that have ended within so many microseconds, and no more than so many of them, the newest.
SELECT @record
FROM records INDEXED BY records_withdrawal_ended
WHERE flow = 'withdrawals' AND state IN ('completed', 'failed', 'rejected', 'cancelled') AND since > now_us() - ?1
ORDER BY since DESC LIMIT ?2

-- name: records_by_id
-- Several records of a flow, by their ids.
SELECT @record
FROM records WHERE flow = ?1 AND id IN (SELECT value FROM json_each(?2)) ORDER BY number
