-- What audit asks of records, operations and transit.

-- name: transit_postings
-- I4: what lies in transit accounts, with the key of the entry that put it there; after a number.
SELECT l.posting, l.asset, l.amount, e.scope, e.key
FROM accounts a JOIN live_postings l ON l.account = a.id JOIN envelopes e ON e.seq = l.posting >> 16
WHERE a.version = 1 AND a.path >= 'transit:' AND a.path < 'transit;' AND l.posting > ?1 ORDER BY l.posting LIMIT ?2

-- name: records_in_transit
-- I4: records to which a posting in transit belongs; after a number.
SELECT number, CAST(flow AS BLOB), CAST(id AS BLOB), CAST(state AS BLOB), transit, due IS NOT NULL FROM records WHERE transit <> 0 AND number > ?1
ORDER BY number LIMIT ?2

-- name: open_records
-- I4: records that somebody drives; after a number.
SELECT number, CAST(id AS BLOB) FROM records WHERE due IS NOT NULL AND number > ?1 ORDER BY number LIMIT ?2

-- name: effects_refused
-- I7: entries of operations that were answered with a refusal.
SELECT e.seq FROM outcomes o JOIN envelopes e ON e.scope = o.scope AND e.key = o.id || ':' || o.op
WHERE o.outcome <> 'SUCCESS' LIMIT ?

-- name: effects_unanswered
-- I7: entries of a rail's scope whose operation has no answer.
SELECT e.seq FROM envelopes e
WHERE e.scope IN (SELECT DISTINCT scope FROM outcomes WHERE op <> 'create') AND NOT EXISTS (
    SELECT 1 FROM outcomes o  -- a key is the request, a colon and the operation, which has none
    WHERE o.scope = e.scope AND o.id = rtrim(rtrim(e.key, replace(e.key, ':', '')), ':')
      AND o.op = substr(e.key, length(rtrim(e.key, replace(e.key, ':', ''))) + 1) AND o.outcome = 'SUCCESS')
LIMIT ?

-- name: count_outcomes
-- How many answers are remembered.
SELECT count(*) FROM outcomes
