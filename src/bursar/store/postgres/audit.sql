-- What audit asks of records, operations and transit.

-- name: transit_postings
-- I4: what lies in transit accounts, with the key of the entry that put it there; after a number.
SELECT l.posting, l.asset, l.amount::text, e.scope, e.key
FROM bursar.accounts a JOIN bursar.live_postings l ON l.account = a.id JOIN bursar.envelopes e ON e.seq = l.posting >> 16
WHERE a.version = 1 AND a.path >= 'transit:' AND a.path < 'transit;' AND l.posting > $1 ORDER BY l.posting LIMIT $2

-- name: records_in_transit
-- I4: records to which a posting in transit belongs; after a number.
SELECT number, flow, id, state, transit, due IS NOT NULL FROM bursar.records WHERE transit <> 0 AND number > $1
ORDER BY number LIMIT $2

-- name: open_records
-- I4: records that somebody drives; after a number.
SELECT number, id FROM bursar.records WHERE due IS NOT NULL AND number > $1 ORDER BY number LIMIT $2

-- name: effects_refused
-- I7: entries of operations that were answered with a refusal. (Each is looked up by its key: left to choose, the
-- planner compares all with all while it has no statistics.)
SELECT e.seq FROM bursar.outcomes o CROSS JOIN LATERAL (
    SELECT seq FROM bursar.envelopes WHERE scope = o.scope AND key = o.id || ':' || o.op LIMIT 1) e
WHERE o.outcome <> 'SUCCESS' LIMIT $1

-- name: effects_unanswered
-- I7: entries of a rail's scope whose operation has no answer. (Looked up, as above.)
SELECT e.seq FROM bursar.envelopes e
WHERE e.scope IN (SELECT DISTINCT scope FROM bursar.outcomes WHERE op <> 'create') AND (
    SELECT o.outcome FROM bursar.outcomes o
    WHERE o.scope = e.scope AND o.id = regexp_replace(e.key, ':[^:]*$', '') AND o.op = regexp_replace(e.key, '^.*:', '')
) IS DISTINCT FROM 'SUCCESS'
LIMIT $1

-- name: count_outcomes
-- How many answers are remembered.
SELECT count(*) FROM bursar.outcomes
