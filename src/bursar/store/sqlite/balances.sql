-- SQLite's statements of balances: summed, cached and guarded.

-- name: balances
-- Live sums per asset of one account, with the number of postings.
SELECT asset, sum_amounts(amount), count(*) FROM live_postings WHERE account = ? GROUP BY asset ORDER BY asset

-- name: balances_of_many
-- Live sums per account and asset of several accounts.
SELECT l.account, l.asset, sum_amounts(l.amount) FROM json_each(?1) AS w
CROSS JOIN live_postings l ON l.account = w.value GROUP BY l.account, l.asset

-- name: balances_by_prefix
-- Live sums per asset of all accounts in a range of paths.
SELECT l.asset, sum_amounts(l.amount), count(*) FROM live_postings l
JOIN accounts a ON a.id = l.account AND a.version = 1
WHERE a.path = ?1 OR (a.path >= ?2 AND a.path < ?3) GROUP BY l.asset ORDER BY l.asset

-- name: balances_at
-- What accounts had at a moment, in sum per asset: postings created by then and not spent by then.
SELECT p.asset, sum_amounts(p.amount) FROM json_each(?1) AS w CROSS JOIN involved i ON i.account = w.value
JOIN envelopes e ON e.seq = i.envelope AND e.at <= ?2
JOIN postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = w.value
WHERE NOT EXISTS (
    SELECT 1 FROM spends s JOIN envelopes x ON x.seq = s.envelope WHERE s.posting = p.id AND x.at <= ?2)
GROUP BY p.asset ORDER BY p.asset

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum_text(amount), count(*) FROM balance_cache WHERE account = ? AND asset <> 0 GROUP BY asset ORDER BY asset

-- name: cached_balances_of_many
-- The same of several accounts.
SELECT c.account, c.asset, sum_text(c.amount) FROM json_each(?1) AS w
CROSS JOIN balance_cache c ON c.account = w.value WHERE c.asset <> 0 GROUP BY c.account, c.asset

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

-- name: all_guarded
-- Every guarded balance, for audit.
SELECT account, asset, balance FROM account_heads ORDER BY account, asset

-- name: put_guarded_balance
-- A guarded balance after a commit.
INSERT INTO account_heads (account, asset, balance, turn) VALUES (?1, ?2, ?3, 1)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = turn + 1

-- name: drop_guarded
-- The account is no longer capped.
DELETE FROM account_heads WHERE account = ?

-- name: clear_guarded
-- Guarded balances are disposable.
DELETE FROM account_heads
