-- SQLite's statements of internal transfers.

-- name: standings
-- Status of accounts and what they have of an asset: lists of paths and assets, side by side.
SELECT p.key, a.status, (SELECT sum_amounts(amount) FROM live_postings l
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
