-- SQLite's statements of node numbers, which Snowflakes are made under.

-- name: lease_node
-- A node number without a holder, for so long; it begins after whatever its last holder can have made. Held for longer
-- than any lease: a clock was set back. If its holder lives, its ids come before ours, and it gets another number.
UPDATE nodes SET holder = ?1, since = max(until, now_us()), until = now_us() + ?2
WHERE node = (SELECT node FROM nodes WHERE until < (SELECT now_us()) OR until > (SELECT now_us()) + ?2 + 1000000
              ORDER BY until, node LIMIT 1)
RETURNING node, since

-- name: renew_node
-- It is still ours, for so long.
UPDATE nodes SET until = now_us() + ?3 WHERE node = ?1 AND holder = ?2 RETURNING node
