-- SQLite's statements of internal transfers.

-- name: standings
-- Status and policy of accounts and what they have of an asset: lists of paths and assets, side by side.
SELECT p.key, a.status, a.policy, (SELECT sum_amounts(amount) FROM live_postings l
                         WHERE l.account = a.id AND l.asset = json_extract(?2, '$[' || p.key || ']'))
FROM json_each(?1) AS p JOIN accounts a ON a.path = p.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.path = p.value)

-- name: lease_node
-- A node number that nobody holds, for so long; it begins after whatever its last holder can have made. Held for longer
-- than any lease: a clock was set back. If its holder lives, its ids come before ours, and it gets another number.
UPDATE nodes SET holder = ?1, since = max(until, now_us()), until = now_us() + ?2
WHERE node = (SELECT node FROM nodes WHERE until < (SELECT now_us()) OR until > (SELECT now_us()) + ?2 + 1000000
              ORDER BY until, node LIMIT 1)
RETURNING node, since

-- name: renew_node
-- It is still ours, for so long.
UPDATE nodes SET until = now_us() + ?3 WHERE node = ?1 AND holder = ?2 RETURNING node

-- name: in_transit_of
-- How many postings in transit an account's own entries have put there: money that may have to come back (T35).
SELECT count(*) FROM accounts t JOIN live_postings l ON l.account = t.id
JOIN involved i ON i.envelope = l.posting >> 16 AND i.account = ?1
WHERE t.version = 1 AND t.path >= 'transit:' AND t.path < 'transit;'

-- name: count_open_of
-- How many records of an owner have not ended and are driven. Few are, and they have an index.
SELECT count(*) FROM records WHERE flow = ?1 AND owner = ?2 AND due IS NOT NULL

-- name: count_records_of
-- How many records of an owner there are, ended or not.
SELECT count(*) FROM records WHERE flow = ?1 AND owner = ?2

-- name: holding_accounts
-- An account and all below it with their cached balances, asset by asset.
SELECT a.path, sum_text(c.amount) FROM accounts a JOIN balance_cache c ON c.account = a.id
WHERE a.version = 1 AND (a.path = ?1 OR (a.path > ?2 AND a.path < ?3)) GROUP BY a.path, c.asset
