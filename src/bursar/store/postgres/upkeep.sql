-- Upkeep: disposable balances, holds, and what audit asks.

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum(amount)::text, count(*) FROM bursar.balance_cache WHERE account = $1 AND asset <> 0
GROUP BY asset ORDER BY asset

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

-- name: all_heads
-- Every guarded balance, for audit.
SELECT account, asset, balance::text FROM bursar.account_heads ORDER BY account, asset

-- name: put_guarded_balance
-- A guarded balance after a commit.
INSERT INTO bursar.account_heads (account, asset, balance, turn)
SELECT a, s, b::numeric, 1 FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[]) AS h (a, s, b)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = account_heads.turn + 1

-- name: drop_head
-- The account is no longer capped.
DELETE FROM bursar.account_heads WHERE account = $1

-- name: clear_heads
-- Guarded balances are disposable.
DELETE FROM bursar.account_heads

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

-- name: put_hold
-- A hold as it stands after a commit. One that is closed, or belongs to somebody else, does not change.
INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us, lasts_us)
SELECT i, a, s, v::numeric, r::numeric, p, t, w, x, l
FROM unnest($1::text::bigint[], $2::text::bigint[], $3::text::integer[], $4::text[], $5::text[], $6::text::bigint[],
            $7::text[], $8::text[], $9::text::bigint[], $10::text::bigint[]) AS o (i, a, s, v, r, p, t, w, x, l)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state
WHERE holds.state = 'open' AND holds.owner = excluded.owner

-- name: holds_by_id
-- Holds by number, each with the newest version of its account.
SELECT @h.hold,
    @a.account
FROM bursar.holds h
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.id = h.account ORDER BY version DESC LIMIT 1) a
WHERE h.id = ANY ($1::text::bigint[]) ORDER BY h.id

-- name: holds_of_account
-- Open holds of an account.
SELECT @hold FROM bursar.holds
WHERE account = $1 AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT @hold FROM bursar.holds
WHERE state = 'open' AND expires_us <= (extract(epoch FROM now()) * 1000000)::bigint AND owner = ''
ORDER BY expires_us, id LIMIT $1

-- name: clock
-- The clock that decides expiry.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

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

-- name: spends_by_id
-- I2: who spent these postings.
SELECT posting, envelope FROM bursar.spends WHERE posting = ANY ($1::text::bigint[])

-- name: count_spends
-- I2: how many spends there are.
SELECT count(*) FROM bursar.spends

-- name: raise_epoch
-- After a restore: events written from now on sort after all that were there.
UPDATE bursar.clock_epoch SET epoch = epoch + 1 RETURNING epoch

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
