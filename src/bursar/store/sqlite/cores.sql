-- SQLite's statements about trading cores.

-- name: ledger_identity
-- Who this ledger is.
SELECT identity FROM ledger_identity WHERE id = 1

-- name: make_ledger_identity
-- The first contact with a core: from now on the ledger has an identity. Of two at once, one wins.
INSERT INTO ledger_identity (id, identity, at) VALUES (1, ?, now_us()) ON CONFLICT DO NOTHING

-- name: core
-- The core behind a rail, its floors, and the highest sequence known of it.
SELECT c.rail, c.identity, c.room, c.forget, c.compared, c.pruned_at,
    (SELECT coalesce(max(h.sequence), 0) FROM core_high_water h WHERE h.rail = c.rail)
FROM cores c WHERE c.rail = ?

-- name: bind_core
-- Bind a rail to a core for ever; nothing if the rail, or the core, is bound already.
INSERT INTO cores (rail, identity, bound_at) VALUES (?, ?, now_us()) ON CONFLICT DO NOTHING RETURNING rail

-- name: rebind_core
-- Operators decided that another core stands behind a rail now.
UPDATE cores SET identity = ?2, room = 1, forget = 1, compared = 0, bound_at = now_us(), pruned_at = NULL
WHERE rail = ?1 AND identity = ?3 RETURNING rail

-- name: raise_floors
-- The floors that a core is about to be asked for. They never sink.
UPDATE cores SET room = max(room, ?2), forget = max(forget, ?3) WHERE rail = ?1 RETURNING room, forget

-- name: forgotten
-- The highest id below which some core has forgotten all, or is about to.
SELECT coalesce(max(forget), 1) FROM cores

-- name: floors_taken
-- The core has taken them.
UPDATE cores SET pruned_at = now_us() WHERE rail = ?

-- name: compared_to
-- All operations of a core up to a sequence have their records here.
UPDATE cores SET compared = max(compared, ?2) WHERE rail = ?1

-- name: oldest_open_id
-- The smallest number among the ids of a flow's open records, which begin with a prefix; and the time, by the database's
-- clock. Arguments: flow, prefix.
SELECT min(CAST(substr(id, length(?2) + 1) AS INTEGER)), now_us() FROM records INDEXED BY records_due
WHERE due IS NOT NULL AND +flow = ?1 AND substr(id, 1, length(?2)) = ?2
  AND substr(id, length(?2) + 1) NOT GLOB '*[^0-9]*' AND length(id) BETWEEN length(?2) + 1 AND length(?2) + 19

-- name: forced_ids
-- The ids of a flow's records that operators forced, or wanted to.
SELECT DISTINCT r.id FROM transitions t JOIN records r ON r.number = t.record
WHERE t.event = 'FORCE ASKED' AND r.flow = ?

-- name: known_ids
-- Which of these ids are records of a flow.
SELECT r.id FROM json_each(?2) AS w JOIN records r ON r.flow = ?1 AND r.id = w.value
