-- PostgreSQL's statements about trading cores.

-- name: ledger_identity
-- Who this ledger is.
SELECT identity FROM bursar.ledger_identity WHERE id = 1

-- name: make_ledger_identity
-- The first contact with a core: from now on the ledger has an identity. Of two at once, one wins.
INSERT INTO bursar.ledger_identity (id, identity) VALUES (1, $1) ON CONFLICT DO NOTHING

-- name: core
-- The core behind a rail, its floors, and the highest sequence known of it.
SELECT c.rail, c.identity, c.room, c.forget, c.compared, (extract(epoch FROM c.pruned_at) * 1000000)::bigint,
    (SELECT coalesce(max(h.sequence), 0) FROM bursar.core_high_water h WHERE h.rail = c.rail)
FROM bursar.cores c WHERE c.rail = $1

-- name: bind_core
-- Bind a rail to a core for ever; nothing if the rail, or the core, is bound already.
INSERT INTO bursar.cores (rail, identity) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING rail

-- name: rebind_core
-- Operators decided that another core stands behind a rail now.
UPDATE bursar.cores SET identity = $2, room = 1, forget = 1, compared = 0, bound_at = now(), pruned_at = NULL
WHERE rail = $1 AND identity = $3 RETURNING rail

-- name: raise_floors
-- The floors that a core is about to be asked for. They never sink.
UPDATE bursar.cores SET room = greatest(room, $2), forget = greatest(forget, $3) WHERE rail = $1
RETURNING room, forget

-- name: forgotten
-- The highest id below which some core has forgotten all, or is about to.
SELECT coalesce(max(forget), 1) FROM bursar.cores

-- name: floors_taken
-- The core has taken them.
UPDATE bursar.cores SET pruned_at = now() WHERE rail = $1

-- name: compared_to
-- All operations of a core up to a sequence have their records here.
UPDATE bursar.cores SET compared = greatest(compared, $2) WHERE rail = $1

-- name: oldest_open_id
-- The smallest number among the ids of a flow's open records, which begin with a prefix; and the time, by the database's
-- clock. Arguments: flow, prefix.
SELECT min(substr(id, length($2) + 1)::numeric)::text, (extract(epoch FROM now()) * 1000000)::bigint FROM bursar.records
WHERE due IS NOT NULL AND flow || '' = $1 AND starts_with(id, $2) AND substr(id, length($2) + 1) ~ '^[0-9]{1,19}$'

-- name: forced_ids
-- The ids of a flow's records that operators forced, or wanted to.
SELECT DISTINCT r.id FROM bursar.transitions t JOIN bursar.records r ON r.number = t.record
WHERE t.event = 'FORCE ASKED' AND r.flow = $1

-- name: known_ids
-- Which of these ids are records of a flow.
SELECT id FROM bursar.records WHERE flow = $1 AND id = ANY ($2::text[])
