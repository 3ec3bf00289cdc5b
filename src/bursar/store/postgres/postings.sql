-- PostgreSQL's statements of postings: created, spent, live.

-- name: postings_by_id
-- Postings with their state: (reservation or null, spender or null, is live).
SELECT p.id, p.account, p.asset, p.amount::text, l.reservation, s.envelope, l.posting IS NOT NULL
FROM unnest($1::text::bigint[]) WITH ORDINALITY AS w (id, place) JOIN bursar.postings p ON p.id = w.id
LEFT JOIN bursar.live_postings l ON l.posting = p.id LEFT JOIN bursar.spends s ON s.posting = p.id ORDER BY w.place

-- name: postings_of_envelopes
-- What a range of envelopes created: numbers from, below.
SELECT p.id, p.account, p.asset, p.amount::text, l.reservation, s.envelope, l.posting IS NOT NULL
FROM bursar.postings p LEFT JOIN bursar.live_postings l ON l.posting = p.id LEFT JOIN bursar.spends s ON s.posting = p.id
WHERE p.id >= $1 AND p.id < $2 ORDER BY p.id

-- name: postings_of_account
-- All postings an account ever owned, by number, after one, of one asset (0: any).
SELECT p.id, p.account, p.asset, p.amount::text, l.reservation, s.envelope, l.posting IS NOT NULL
FROM bursar.involved i
JOIN bursar.postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = $1
LEFT JOIN bursar.live_postings l ON l.posting = p.id LEFT JOIN bursar.spends s ON s.posting = p.id
WHERE i.account = $1 AND i.envelope >= $2::bigint >> 16 AND p.id > $2 AND ($3::integer = 0 OR p.asset = $3)
ORDER BY p.id LIMIT $4

-- name: live_of_account
-- Live postings of an account by number, after one, of one asset (0: any).
SELECT posting, account, asset, amount::text, reservation, NULL::bigint, true FROM bursar.live_postings
WHERE account = $1 AND posting > $2 AND ($3::integer = 0 OR asset = $3) ORDER BY posting LIMIT $4

-- name: largest
-- The largest free positive postings of an account and asset.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.amount > 0 AND l.reservation IS NULL ORDER BY l.amount DESC LIMIT $3

-- name: most_negative
-- The most negative free postings of an account and asset.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.amount < 0 AND l.reservation IS NULL ORDER BY l.amount LIMIT $3

-- name: smallest
-- The smallest free postings of an account and asset, by magnitude within their sign: what compact merges.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.reservation IS NULL ORDER BY l.amount LIMIT $3

-- name: clear_live
-- The live table is disposable.
DELETE FROM bursar.live_postings

-- name: rebuild_live
-- Live = postings - spends.
INSERT INTO bursar.live_postings (posting, account, asset, amount)
SELECT id, account, asset, amount FROM bursar.postings p
WHERE NOT EXISTS (SELECT 1 FROM bursar.spends s WHERE s.posting = p.id)

-- name: live_sums
-- Live sums of every account and asset.
SELECT account, asset, sum(amount)::text, count(*) FROM bursar.live_postings
GROUP BY account, asset ORDER BY account, asset

-- name: spends_by_id
-- I2: who spent these postings.
SELECT posting, envelope FROM bursar.spends WHERE posting = ANY ($1::text::bigint[])
