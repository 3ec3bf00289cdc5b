-- Upkeep: disposable balances, holds, and what audit asks.

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum_text(amount), count(*) FROM balance_cache WHERE account = ? AND asset <> 0 GROUP BY asset ORDER BY asset

-- name: cached_accounts
-- Accounts with a cache of their own (system and external ones have one by nature).
SELECT account FROM balance_cache WHERE part = 0 AND asset = 0

-- name: insert_cache
-- A change of a cached balance.
INSERT INTO balance_cache (@cached_balances) VALUES (:cached_balances) ON CONFLICT DO NOTHING

-- name: cache_crowds
-- Cached balances in more than so many parts.
SELECT account, asset FROM balance_cache WHERE asset <> 0 GROUP BY account, asset HAVING count(*) > ?

-- name: take_cache_parts
-- Take the small changes of one cached balance, to add them to its sum.
DELETE FROM balance_cache WHERE account = ? AND asset = ? AND part <> 0 RETURNING amount

-- name: add_to_cache
-- Add to the sum of one cached balance.
INSERT INTO balance_cache (account, asset, part, amount) VALUES (?, ?, 0, ?)
ON CONFLICT (account, asset, part) DO UPDATE SET amount = add_text(amount, excluded.amount)

-- name: clear_cache_of
-- Forget the cache of one account.
DELETE FROM balance_cache WHERE account = ?

-- name: clear_cache
-- The whole cache is disposable.
DELETE FROM balance_cache

-- name: batch_guarded_balances
-- Guarded balances: lists of accounts and assets, side by side.
SELECT h.account, h.asset, h.balance, h.turn, h.reservation
FROM json_each(?1) AS a
JOIN account_heads h ON h.account = a.value AND h.asset = json_extract(?2, '$[' || a.key || ']')

-- name: all_heads
-- Every guarded balance, for audit.
SELECT account, asset, balance FROM account_heads ORDER BY account, asset

-- name: put_guarded_balance
-- A guarded balance after a commit.
INSERT INTO account_heads (account, asset, balance, turn) VALUES (?1, ?2, ?3, 1)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = turn + 1

-- name: drop_head
-- The account is no longer capped.
DELETE FROM account_heads WHERE account = ?

-- name: clear_heads
-- Guarded balances are disposable.
DELETE FROM account_heads

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

-- name: put_hold
-- A hold as it stands after a commit. One that is closed, or belongs to somebody else, does not change.
INSERT INTO holds (@holds) VALUES (:holds)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state
WHERE holds.state = 'open' AND holds.owner = excluded.owner

-- name: holds_by_id
-- Holds by number, each with the newest version of its account.
SELECT @h.hold,
    @a.account
FROM json_each(?) AS w JOIN holds h ON h.id = w.value JOIN accounts a ON a.id = h.account
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.id = h.account) ORDER BY h.id

-- name: holds_of_account
-- Open holds of an account.
SELECT @hold FROM holds
WHERE account = ? AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT @hold FROM holds
WHERE state = 'open' AND expires_us <= now_us() AND owner = '' ORDER BY expires_us, id LIMIT ?

-- name: clock
-- The clock that decides expiry.
SELECT now_us()

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

-- name: spends_by_id
-- I2: who spent these postings.
SELECT s.posting, s.envelope FROM json_each(?) AS w JOIN spends s ON s.posting = w.value

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
SELECT id, asset, remaining, posting, owner FROM holds WHERE state = 'open' AND owner <> '' AND id > ?1 ORDER BY id LIMIT ?2

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
