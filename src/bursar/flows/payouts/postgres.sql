-- PostgreSQL's statements of payouts.

-- name: payouts_open
-- How many payouts have each of these statuses: each is looked up along the index of the specification's status. (With a
-- list to compare with, the planners prefer to read all payouts that ever were.)
SELECT w.value, (SELECT count(*) FROM bursar.records WHERE flow = 'payouts' AND (CASE state WHEN 'pending' THEN 'pending' WHEN 'processing' THEN 'processing'
    WHEN 'signing' THEN 'processing' WHEN 'sending' THEN 'processing' WHEN 'confirming' THEN 'confirming'
    WHEN 'replacing' THEN 'confirming' WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed'
    WHEN 'failed' THEN 'failed' END) = w.value)
FROM unnest($1::text[]) AS w (value)

-- name: payouts_ended
-- Payouts that have ended within so many microseconds, and no more than so many of them, the newest; by chain and state:
-- how many, how many of them were retried, how many have sent, microseconds from the first send to the end, how many have
-- used gas, and how much.
WITH latest AS MATERIALIZED (
    SELECT state, since, body FROM bursar.records
    WHERE flow = 'payouts' AND state IN ('confirmed', 'failed') AND since > now() - $1::bigint * interval '1 microsecond'
    ORDER BY since DESC LIMIT $2),
told AS (
    SELECT body -> 'payment' ->> 'chain' AS chain, state,
        coalesce((body ->> 'attempts')::bigint, 0) > 1 OR coalesce((body ->> 'refusals')::bigint, 0) > 0 AS retried,
        (extract(epoch FROM since) * 1000000)::bigint - (body ->> 'first_sent_us')::bigint AS took_us,
        (body -> 'result' ->> 'gas_used')::bigint AS gas
    FROM latest)
SELECT chain, state, count(*), count(*) FILTER (WHERE retried), count(took_us), coalesce(sum(took_us), 0)::bigint, count(gas),
    coalesce(sum(gas), 0)::bigint
FROM told GROUP BY chain, state ORDER BY chain, state

-- name: addresses_issued
-- When users' addresses were issued, and their numbers, in that order: after one, so many. From the index alone.
SELECT (extract(epoch FROM created_at) * 1000000)::bigint, number FROM bursar.records
WHERE flow = 'deposit_addresses'
  AND (created_at, number) > (to_timestamp(0) + $1::bigint * interval '1 microsecond', $2::bigint)
ORDER BY created_at, number LIMIT $3

-- name: addresses_by_number
-- Some of them: number, name of the wallet, body.
SELECT number, id, body::text FROM bursar.records
WHERE number = ANY ($1::text::bigint[]) AND flow || '' = 'deposit_addresses'
