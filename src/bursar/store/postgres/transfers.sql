-- PostgreSQL's statements of internal transfers.

-- name: standings
-- Status and policy of accounts and what they have of an asset: lists of paths and assets, side by side.
SELECT w.place - 1, a.status, a.policy::text,
    (SELECT coalesce(sum(amount), 0) FROM bursar.live_postings l WHERE l.account = a.id AND l.asset = w.asset)::text
FROM unnest($1::text[], $2::text::integer[]) WITH ORDINALITY AS w (path, asset, place)
CROSS JOIN LATERAL (SELECT id, status, policy FROM bursar.accounts WHERE path = w.path ORDER BY version DESC LIMIT 1) a

-- name: lease_node
-- A node number that nobody holds, for so long; it begins after whatever its last holder can have made. Held for longer
-- than any lease: a clock was set back. If its holder lives, its ids come before ours, and it gets another number.
UPDATE bursar.nodes SET holder = $1, since = greatest(until, now()), until = now() + $2::bigint * interval '1 microsecond'
WHERE node = (SELECT node FROM bursar.nodes
              WHERE until < now() OR until > now() + ($2::bigint + 1000000) * interval '1 microsecond'
              ORDER BY until, node LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING node, (extract(epoch FROM since) * 1000000)::bigint

-- name: renew_node
-- It is still ours, for so long.
UPDATE bursar.nodes SET until = now() + $3::bigint * interval '1 microsecond' WHERE node = $1 AND holder = $2
RETURNING node

-- name: in_transit_of
-- How many postings in transit an account's own entries have put there: money that may have to come back (T35).
SELECT count(*) FROM bursar.accounts t JOIN bursar.live_postings l ON l.account = t.id
JOIN bursar.involved i ON i.envelope = l.posting >> 16 AND i.account = $1
WHERE t.version = 1 AND t.path >= 'transit:' AND t.path < 'transit;'

-- name: count_open_of
-- How many records of an owner have not ended and are driven. Few are, and they have an index.
SELECT count(*) FROM bursar.records WHERE flow = $1 AND owner = $2 AND due IS NOT NULL

-- name: count_records_of
-- How many records of an owner there are, ended or not.
SELECT count(*) FROM bursar.records WHERE flow = $1 AND owner = $2

-- name: holding_accounts
-- An account and all below it with their cached balances, asset by asset.
SELECT a.path, sum(c.amount)::text FROM bursar.accounts a JOIN bursar.balance_cache c ON c.account = a.id
WHERE a.version = 1 AND (a.path = $1 OR (a.path > $2 AND a.path < $3)) GROUP BY a.path, c.asset
