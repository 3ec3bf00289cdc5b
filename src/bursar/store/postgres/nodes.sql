-- PostgreSQL's statements of node numbers, which Snowflakes are made under.

-- name: lease_node
-- A node number without a holder, for so long; it begins after whatever its last holder can have made. Held for longer
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
