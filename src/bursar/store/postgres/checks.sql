-- PostgreSQL's statements of the audit.

-- name: counts
-- How much there is.
SELECT (SELECT count(*) FROM bursar.accounts WHERE version = 1), (SELECT count(*) FROM bursar.envelopes),
       (SELECT count(*) FROM bursar.postings), (SELECT count(*) FROM bursar.live_postings),
       (SELECT count(*) FROM bursar.events)

-- name: asset_sums
-- I1: live sums per asset.
SELECT asset, sum(amount)::text FROM bursar.live_postings GROUP BY asset ORDER BY asset

-- name: stray_spends
-- I2: spends of postings or by envelopes that don't exist.
SELECT s.posting, s.envelope FROM bursar.spends s
LEFT JOIN bursar.postings p ON p.id = s.posting LEFT JOIN bursar.envelopes e ON e.seq = s.envelope
WHERE p.id IS NULL OR e.seq IS NULL LIMIT $1

-- name: not_live
-- I3: unspent postings that are not live, or live as something else.
SELECT p.id FROM bursar.postings p
LEFT JOIN bursar.spends s ON s.posting = p.id LEFT JOIN bursar.live_postings l ON l.posting = p.id
WHERE s.posting IS NULL AND (l.posting IS NULL OR l.account <> p.account OR l.asset <> p.asset OR l.amount <> p.amount)
LIMIT $1

-- name: wrongly_live
-- I3: live rows of postings that are spent or never were.
SELECT l.posting FROM bursar.live_postings l
LEFT JOIN bursar.postings p ON p.id = l.posting LEFT JOIN bursar.spends s ON s.posting = l.posting
WHERE p.id IS NULL OR s.posting IS NOT NULL LIMIT $1

-- name: stray_postings
-- I8: postings without their envelope.
SELECT p.id FROM bursar.postings p LEFT JOIN bursar.envelopes e ON e.seq = p.id >> 16 WHERE e.seq IS NULL LIMIT $1

-- name: count_spends
-- I2: how many spends there are.
SELECT count(*) FROM bursar.spends

-- name: cached_sums
-- I3: all cached balances.
SELECT account, asset, sum(amount)::text FROM bursar.balance_cache WHERE asset <> 0 GROUP BY account, asset ORDER BY account, asset

-- name: open_holds
-- I3: open holds by number, after one.
SELECT id, asset, remaining::text, posting, account, amount::text FROM bursar.holds WHERE state = 'open' AND id > $1 ORDER BY id LIMIT $2

-- name: owned_holds
-- I4: open holds that records own, by number, after one.
SELECT id, asset, remaining::text, posting, owner FROM bursar.holds
WHERE state = 'open' AND owner <> '' AND id > $1 ORDER BY id LIMIT $2

-- name: stray_reservations
-- I3: live postings that can't be spent because something has claimed them; nothing does.
SELECT posting FROM bursar.live_postings WHERE reservation IS NOT NULL LIMIT $1

-- name: involved_between
-- I8: what stands in the histories of accounts, from an envelope to another.
SELECT account, envelope FROM bursar.involved
WHERE account = ANY ($1::text::bigint[]) AND envelope BETWEEN $2 AND $3

-- name: count_involved
-- I8: how many lines all histories have.
SELECT count(*) FROM bursar.involved

-- name: unannounced
-- I8: envelopes without an event. (Each is looked up: left to choose, the planner compares all with all while it has no
-- statistics.)
SELECT e.seq FROM bursar.envelopes e
WHERE (SELECT v.seq FROM bursar.events v WHERE v.subject = e.seq AND v.kind = 1 AND v.version = 0) IS NULL LIMIT $1

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
-- I4: records that are driven; after a number.
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

-- name: count_operations
-- How many answers are remembered.
SELECT count(*) FROM bursar.outcomes
