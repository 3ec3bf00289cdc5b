-- PostgreSQL's statements of balances: summed, cached and guarded.

-- name: balances
-- Live sums per asset of one account, with the number of postings.
SELECT asset, sum(amount)::text, count(*) FROM bursar.live_postings WHERE account = $1 GROUP BY asset ORDER BY asset

-- name: balances_of_many
-- Live sums per account and asset of several accounts.
SELECT l.account, l.asset, sum(l.amount)::text FROM bursar.live_postings l
WHERE l.account = ANY($1::text::bigint[]) GROUP BY l.account, l.asset

-- name: balances_by_prefix
-- Live sums per asset of all accounts in a range of paths.
SELECT l.asset, sum(l.amount)::text, count(*) FROM bursar.live_postings l
JOIN bursar.accounts a ON a.id = l.account AND a.version = 1
WHERE a.path = $1 OR (a.path >= $2 AND a.path < $3) GROUP BY l.asset ORDER BY l.asset

-- name: balances_at
-- What accounts had at a moment, in sum per asset: postings created by then and not spent by then.
SELECT p.asset, sum(p.amount)::text FROM unnest($1::text::bigint[]) AS w (account)
JOIN bursar.involved i ON i.account = w.account
JOIN bursar.envelopes e ON e.seq = i.envelope AND e.at <= to_timestamp(0) + $2::bigint * interval '1 microsecond'
JOIN bursar.postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = w.account
WHERE NOT EXISTS (
    SELECT 1 FROM bursar.spends s JOIN bursar.envelopes x ON x.seq = s.envelope
    WHERE s.posting = p.id AND x.at <= to_timestamp(0) + $2::bigint * interval '1 microsecond')
GROUP BY p.asset ORDER BY p.asset

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum(amount)::text, count(*) FROM bursar.balance_cache WHERE account = $1 AND asset <> 0
GROUP BY asset ORDER BY asset

-- name: cached_balances_of_many
-- The same of several accounts.
SELECT account, asset, sum(amount)::text FROM bursar.balance_cache
WHERE account = ANY($1::text::bigint[]) AND asset <> 0 GROUP BY account, asset

-- name: cached_accounts
-- Accounts with a cache of their own (system and external ones have one by nature).
SELECT account FROM bursar.balance_cache WHERE part = 0 AND asset = 0

-- name: insert_cache
-- A change of a cached balance.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, p, v::numeric
FROM unnest($1::text::bigint[], $2::text::integer[], $3::text::bigint[], $4::text[]) AS c (a, s, p, v)
ON CONFLICT DO NOTHING

-- name: cache_crowds
-- Cached balances in more than so many parts.
SELECT account, asset FROM bursar.balance_cache WHERE asset <> 0 GROUP BY account, asset HAVING count(*) > $1

-- name: take_cache_parts
-- Take the small changes of one cached balance, to add them to its sum. Two folders at once take different ones.
DELETE FROM bursar.balance_cache WHERE account = $1 AND asset = $2 AND part <> 0 RETURNING amount::text

-- name: add_to_cache
-- Add to the sum of one cached balance.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, 0, v::numeric FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[]) AS c (a, s, v)
ON CONFLICT (account, asset, part) DO UPDATE SET amount = balance_cache.amount + excluded.amount

-- name: clear_cache_of
-- Forget the cache of one account.
DELETE FROM bursar.balance_cache WHERE account = $1

-- name: clear_cache
-- The whole cache is disposable.
DELETE FROM bursar.balance_cache

-- name: all_guarded
-- Every guarded balance, for audit.
SELECT account, asset, balance::text FROM bursar.account_heads ORDER BY account, asset

-- name: put_guarded_balance
-- A guarded balance after a commit.
INSERT INTO bursar.account_heads (account, asset, balance, turn)
SELECT a, s, b::numeric, 1 FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[]) AS h (a, s, b)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = account_heads.turn + 1

-- name: drop_guarded
-- The account is no longer capped.
DELETE FROM bursar.account_heads WHERE account = $1

-- name: clear_guarded
-- Guarded balances are disposable.
DELETE FROM bursar.account_heads
