-- SQLite's statements of payouts.

-- name: payouts_open
-- How many payouts have each of these statuses: each is looked up along the index of the specification's status. (With a
-- list to compare with, the planners prefer to read all payouts that ever were.)
SELECT w.value, (SELECT count(*) FROM records WHERE flow = 'payouts' AND (CASE state WHEN 'pending' THEN 'pending' WHEN 'processing' THEN 'processing'
    WHEN 'signing' THEN 'processing' WHEN 'sending' THEN 'processing' WHEN 'confirming' THEN 'confirming'
    WHEN 'replacing' THEN 'confirming' WHEN 'disputed' THEN 'confirming' WHEN 'confirmed' THEN 'confirmed'
    WHEN 'failed' THEN 'failed' END) = w.value)
FROM json_each(?) AS w

-- name: payouts_ended
-- Payouts that have ended within so many microseconds, and no more than so many of them, the newest; by chain and state:
-- how many, how many of them were retried, how many have sent, microseconds from the first send to the end, how many have
-- used gas, and how much.
WITH latest AS MATERIALIZED (
    SELECT state, since, body FROM records INDEXED BY records_payout_ended
    WHERE flow = 'payouts' AND state IN ('confirmed', 'failed') AND since > now_us() - ?1
    ORDER BY since DESC LIMIT ?2),
told AS (
    SELECT body ->> '$.payment.chain' AS chain, state,
        coalesce(body ->> 'attempts', 0) > 1 OR coalesce(body ->> 'refusals', 0) > 0 AS retried,
        since - (body ->> 'first_sent_us') AS took_us, body ->> '$.result.gas_used' AS gas
    FROM latest)
SELECT chain, state, count(*), sum(retried), count(took_us), coalesce(sum(took_us), 0), count(gas), coalesce(sum(gas), 0)
FROM told GROUP BY chain, state ORDER BY chain, state

-- name: addresses_issued
-- When users' addresses were issued, and their numbers, in that order: after one, so many. From the index alone.
SELECT created_at, number FROM records INDEXED BY records_addresses
WHERE flow = 'deposit_addresses' AND (created_at, number) > (?1, ?2)
ORDER BY created_at, number LIMIT ?3

-- name: addresses_by_number
-- Some of them: number, name of the wallet, body.
SELECT r.number, r.id, CAST(r.body AS BLOB) FROM json_each(?1) AS w
CROSS JOIN records r ON r.number = w.value WHERE +r.flow = 'deposit_addresses'
