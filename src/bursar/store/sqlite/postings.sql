-- SQLite's statements of postings: created, spent, live.

-- name: postings_by_id
-- Postings with their state: (reservation or null, spender or null, is live).
SELECT p.id, p.account, p.asset, p.amount, l.reservation, s.envelope, l.posting IS NOT NULL
FROM json_each(?) AS w JOIN postings p ON p.id = w.value
LEFT JOIN live_postings l ON l.posting = p.id LEFT JOIN spends s ON s.posting = p.id ORDER BY w.key

-- name: postings_of_envelopes
-- What a range of envelopes created: numbers from, below.
SELECT p.id, p.account, p.asset, p.amount, l.reservation, s.envelope, l.posting IS NOT NULL
FROM postings p LEFT JOIN live_postings l ON l.posting = p.id LEFT JOIN spends s ON s.posting = p.id
WHERE p.id >= ?1 AND p.id < ?2 ORDER BY p.id

-- name: postings_of_account
-- All postings an account ever owned, by number, after one, of one asset (0: any).
SELECT p.id, p.account, p.asset, p.amount, l.reservation, s.envelope, l.posting IS NOT NULL
FROM involved i JOIN postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = ?1
LEFT JOIN live_postings l ON l.posting = p.id LEFT JOIN spends s ON s.posting = p.id
WHERE i.account = ?1 AND i.envelope >= ?2 >> 16 AND p.id > ?2 AND (?3 = 0 OR p.asset = ?3) ORDER BY p.id LIMIT ?4

-- name: live_of_account
-- Live postings of an account by number, after one, of one asset (0: any).
SELECT posting, account, asset, amount, reservation, NULL, 1 FROM live_postings
WHERE account = ?1 AND posting > ?2 AND (?3 = 0 OR asset = ?3) ORDER BY posting LIMIT ?4

-- name: largest
-- The largest free positive postings of an account and asset.
SELECT posting, account, asset, amount FROM live_postings
WHERE account = ?1 AND asset = ?2 AND amount > x'80000000000000000000000000000000' AND reservation IS NULL
ORDER BY amount DESC LIMIT ?3

-- name: most_negative
-- The most negative free postings of an account and asset.
SELECT posting, account, asset, amount FROM live_postings
WHERE account = ?1 AND asset = ?2 AND amount < x'80000000000000000000000000000000' AND reservation IS NULL
ORDER BY amount LIMIT ?3

-- name: smallest
-- The smallest free postings of an account and asset, by magnitude within their sign: what compact merges.
SELECT posting, account, asset, amount FROM live_postings
WHERE account = ?1 AND asset = ?2 AND reservation IS NULL ORDER BY amount LIMIT ?3

-- name: clear_live
-- The live table is disposable.
DELETE FROM live_postings

-- name: rebuild_live
-- Live = postings - spends.
INSERT INTO live_postings (posting, account, asset, amount)
SELECT id, account, asset, amount FROM postings p WHERE NOT EXISTS (SELECT 1 FROM spends s WHERE s.posting = p.id)

-- name: live_sums
-- Live sums of every account and asset.
SELECT account, asset, sum_amounts(amount), count(*) FROM live_postings GROUP BY account, asset ORDER BY account, asset

-- name: spends_by_id
-- I2: who spent these postings.
SELECT s.posting, s.envelope FROM json_each(?) AS w JOIN spends s ON s.posting = w.value
