-- SQLite's statements of the audit.

-- name: counts
-- How much there is.
SELECT (SELECT count(*) FROM accounts WHERE version = 1), (SELECT count(*) FROM envelopes),
       (SELECT count(*) FROM postings), (SELECT count(*) FROM live_postings), (SELECT count(*) FROM events)

-- name: asset_sums
-- I1: live sums per asset.
SELECT asset, sum_amounts(amount) FROM live_postings GROUP BY asset ORDER BY asset

-- name: stray_spends
-- I2: spends of postings or by envelopes that don't exist.
SELECT s.posting, s.envelope FROM spends s LEFT JOIN postings p ON p.id = s.posting LEFT JOIN envelopes e ON e.seq = s.envelope
WHERE p.id IS NULL OR e.seq IS NULL LIMIT ?

-- name: not_live
-- I3: unspent postings that are not live, or live as something else.
SELECT p.id FROM postings p LEFT JOIN spends s ON s.posting = p.id LEFT JOIN live_postings l ON l.posting = p.id
WHERE s.posting IS NULL AND (l.posting IS NULL OR l.account <> p.account OR l.asset <> p.asset OR l.amount <> p.amount)
LIMIT ?

-- name: wrongly_live
-- I3: live rows of postings that are spent or never were.
SELECT l.posting FROM live_postings l LEFT JOIN postings p ON p.id = l.posting LEFT JOIN spends s ON s.posting = l.posting
WHERE p.id IS NULL OR s.posting IS NOT NULL LIMIT ?

-- name: stray_postings
-- I8: postings without their envelope.
SELECT p.id FROM postings p LEFT JOIN envelopes e ON e.seq = p.id >> 16 WHERE e.seq IS NULL LIMIT ?

-- name: count_spends
-- I2: how many spends there are.
SELECT count(*) FROM spends

-- name: cached_sums
-- I3: all cached balances.
SELECT account, asset, sum_text(amount) FROM balance_cache WHERE asset <> 0 GROUP BY account, asset ORDER BY account, asset

-- name: open_holds
-- I3: open holds by number, after one.
SELECT id, asset, remaining, posting, account, amount FROM holds WHERE state = 'open' AND id > ?1 ORDER BY id LIMIT ?2

-- name: owned_holds
-- I4: open holds that records own, by number, after one.
-- Along the index of what is open: the table has every hold that ever was.
SELECT id, asset, remaining, posting, owner FROM holds INDEXED BY holds_open
WHERE state = 'open' AND owner <> '' AND id > ?1 ORDER BY id LIMIT ?2

-- name: stray_reservations
-- I3: live postings that can't be spent because something has claimed them; nothing does.
SELECT posting FROM live_postings WHERE reservation IS NOT NULL LIMIT ?

-- name: involved_between
-- I8: what stands in the histories of accounts, from an envelope to another.
SELECT i.account, i.envelope FROM json_each(?1) AS a
CROSS JOIN involved i ON i.account = a.value AND i.envelope BETWEEN ?2 AND ?3

-- name: count_involved
-- I8: how many lines all histories have.
SELECT count(*) FROM involved

-- name: unannounced
-- I8: envelopes without an event.
SELECT e.seq FROM envelopes e
WHERE NOT EXISTS (SELECT 1 FROM events v WHERE v.subject = e.seq AND v.kind = 1 AND v.version = 0) LIMIT ?

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
-- I4: records that are driven; after a number.
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

-- name: count_operations
-- How many answers are remembered.
SELECT count(*) FROM outcomes
