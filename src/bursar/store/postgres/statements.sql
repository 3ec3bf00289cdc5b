-- PostgreSQL's statements, one for each of SQLite's. Lists are arrays; a bulk write gets one array per column.
-- Amounts travel as text. The clock is the database's.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM bursar.rules WHERE id = 1

-- name: bump_rules
-- Every change of a rule. Waits for the commits in flight (they hold the row FOR SHARE) and holds back new ones.
UPDATE bursar.rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: take_numbers
-- The next so many envelope numbers; returns the last of them. Only for single callers: a group takes its own.
SELECT max(nextval('bursar.numbers')) FROM generate_series(1, $1::bigint)

-- name: take_account_number
-- The next account number.
SELECT nextval('bursar.account_numbers')

-- name: assets
-- All assets; there are few.
SELECT id, code, precision, min_transfer::text, max_transfer::text, status, internal_transfer_enabled
FROM bursar.assets ORDER BY id

-- name: insert_asset
-- A new asset; an existing code is left alone.
INSERT INTO bursar.assets (code, precision, min_transfer, max_transfer, status, internal_transfer_enabled)
SELECT c, p, lo::numeric, hi::numeric, s, e
FROM unnest($1::text[], $2::smallint[], $3::text[], $4::text[], $5::text[], $6::boolean[]) AS v (c, p, lo, hi, s, e)
ON CONFLICT DO NOTHING

-- name: update_asset
-- Limits and status; code and precision never change.
UPDATE bursar.assets SET min_transfer = v.lo::numeric, max_transfer = v.hi::numeric, status = v.s,
                         internal_transfer_enabled = v.e
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::boolean[]) AS v (c, lo, hi, s, e) WHERE code = v.c

-- name: books
-- All books; there are few.
SELECT id, name, assets, accounts FROM bursar.books ORDER BY id

-- name: insert_book
-- A new book; an existing name is left alone.
INSERT INTO bursar.books (name, assets, accounts) SELECT * FROM unnest($1::text[], $2::text[], $3::text[])
ON CONFLICT DO NOTHING

-- name: heads_by_path
-- Newest version of each account named.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book FROM unnest($1::text[]) AS w (path)
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.path = w.path ORDER BY version DESC LIMIT 1) a

-- name: heads_by_id
-- Newest version of each account numbered.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book FROM unnest($1::bigint[]) AS w (id)
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.id = w.id ORDER BY version DESC LIMIT 1) a

-- name: versions
-- Exact versions of accounts: lists of ids and versions, side by side.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book
FROM unnest($1::bigint[], $2::integer[]) AS w (id, version) JOIN bursar.accounts a USING (id, version)

-- name: account_history
-- Every version of one account, oldest first.
SELECT id, path, version, policy, status, book, (extract(epoch FROM at) * 1000000)::bigint
FROM bursar.accounts WHERE path = $1 ORDER BY version

-- name: list_accounts
-- Heads by path from a prefix range, after a path, so many.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book FROM bursar.accounts a
WHERE a.path > $1 AND a.path >= $2 AND a.path < $3
  AND a.version = (SELECT max(version) FROM bursar.accounts b WHERE b.path = a.path)
ORDER BY a.path LIMIT $4

-- name: insert_account
-- A version of an account. The first needs a path nobody has; a later one must follow directly on the newest.
INSERT INTO bursar.accounts (id, version, path, policy, status, book)
SELECT i, v, p, y, s, b
FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::text[], $5::text[], $6::text[]) AS n (i, v, p, y, s, b)
WHERE v = coalesce((SELECT max(version) FROM bursar.accounts WHERE path = p), 0) + 1
ON CONFLICT DO NOTHING

-- name: envelopes_by_key
-- What the keys stand for already: lists of scopes and keys, side by side.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.legs
FROM unnest($1::text[], $2::text[]) AS w (scope, key) JOIN bursar.envelopes e ON e.scope = w.scope AND e.key = w.key

-- name: envelopes_by_seq
-- Whole envelopes by number.
SELECT seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata::text,
       (extract(epoch FROM at) * 1000000)::bigint
FROM bursar.envelopes WHERE seq = ANY ($1::bigint[]) ORDER BY seq

-- name: envelopes_range
-- Whole envelopes after a number, of one book (0: any), in order of creation.
SELECT seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata::text,
       (extract(epoch FROM at) * 1000000)::bigint
FROM bursar.envelopes WHERE seq > $1 AND ($2::integer = 0 OR book = $2) ORDER BY seq LIMIT $3

-- name: envelopes_of_account
-- Whole envelopes that an account took part in, newest first, below a number, within a span of time.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.kind, e.reverses, e.legs, e.pins, e.consumes, e.metadata::text,
       (extract(epoch FROM e.at) * 1000000)::bigint
FROM bursar.involved i JOIN bursar.envelopes e ON e.seq = i.envelope
WHERE i.account = $1 AND i.envelope < $2
  AND e.at >= to_timestamp(0) + $3::bigint * interval '1 microsecond'
  AND e.at < to_timestamp(0) + $4::bigint * interval '1 microsecond'
ORDER BY i.envelope DESC LIMIT $5

-- name: envelope_by_hash
-- A scan: hashes have no index, because it would double the write-ahead volume.
SELECT seq FROM bursar.envelopes WHERE id = $1

-- name: insert_envelope
-- An envelope; a replay changes nothing.
INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::text[], $4::text[], $5::integer[], $6::smallint[], $7::bigint[],
                     $8::bytea[], $9::bytea[], $10::bytea[], $11::text[]::json[])
ON CONFLICT DO NOTHING

-- name: insert_envelope_fenced
-- Split mode: the same, if the saga still has its fence: whoever finds the envelope takes it for a receipt.
INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
SELECT a, b, c, d, e, f, g, h, i, j, k::json
FROM unnest($1::bigint[], $2::bytea[], $3::text[], $4::text[], $5::integer[], $6::smallint[], $7::bigint[],
            $8::bytea[], $9::bytea[], $10::bytea[], $11::text[], $12::text[], $13::bigint[])
     AS v (a, b, c, d, e, f, g, h, i, j, k, saga, fence)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.saga AND sagas.fence = v.fence) ON CONFLICT DO NOTHING

-- name: insert_involved
-- Who took part.
INSERT INTO bursar.involved (account, envelope) SELECT * FROM unnest($1::bigint[], $2::bigint[]) ON CONFLICT DO NOTHING

-- name: insert_involved_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.involved (account, envelope)
SELECT a, e FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[]) AS v (a, e, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: insert_posting
-- A posting; a replay changes nothing.
INSERT INTO bursar.postings (id, account, asset, amount)
SELECT i, a, s, v::numeric FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::text[]) AS p (i, a, s, v)
ON CONFLICT DO NOTHING

-- name: insert_live
-- It is live, unless it was spent already.
INSERT INTO bursar.live_postings (posting, account, asset, amount)
SELECT i, a, s, v::numeric FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::text[]) AS p (i, a, s, v)
WHERE NOT EXISTS (SELECT 1 FROM bursar.spends WHERE posting = i) ON CONFLICT DO NOTHING

-- name: postings_by_id
-- Postings with their state: (reservation or null, spender or null, is live).
SELECT p.id, p.account, p.asset, p.amount::text, l.reservation, s.envelope, l.posting IS NOT NULL
FROM unnest($1::bigint[]) WITH ORDINALITY AS w (id, place) JOIN bursar.postings p ON p.id = w.id
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

-- name: live_by_id
-- Live and free postings by number.
SELECT posting, account, asset, amount::text FROM bursar.live_postings
WHERE posting = ANY ($1::bigint[]) AND reservation IS NULL

-- name: largest
-- The largest free positive postings of an account and asset.
SELECT posting, account, asset, amount::text FROM bursar.live_postings
WHERE account = $1 AND asset = $2 AND amount > 0 AND reservation IS NULL ORDER BY amount DESC LIMIT $3

-- name: most_negative
-- The most negative free postings of an account and asset.
SELECT posting, account, asset, amount::text FROM bursar.live_postings
WHERE account = $1 AND asset = $2 AND amount < 0 AND reservation IS NULL ORDER BY amount LIMIT $3

-- name: smallest
-- The smallest free postings of an account and asset, by magnitude within their sign: what compact merges.
SELECT posting, account, asset, amount::text FROM bursar.live_postings
WHERE account = $1 AND asset = $2 AND reservation IS NULL ORDER BY amount LIMIT $3

-- name: balances
-- Live sums per asset of one account, with the number of postings.
SELECT asset, sum(amount)::text, count(*) FROM bursar.live_postings WHERE account = $1 GROUP BY asset ORDER BY asset

-- name: balances_by_prefix
-- Live sums per asset of all accounts in a range of paths.
SELECT l.asset, sum(l.amount)::text, count(*) FROM bursar.live_postings l
JOIN bursar.accounts a ON a.id = l.account AND a.version = 1
WHERE a.path = $1 OR (a.path >= $2 AND a.path < $3) GROUP BY l.asset ORDER BY l.asset

-- name: balance_at
-- What an account had of an asset at a moment: postings created by then and not spent by then.
SELECT sum(p.amount)::text FROM bursar.involved i
JOIN bursar.envelopes e ON e.seq = i.envelope AND e.at <= to_timestamp(0) + $3::bigint * interval '1 microsecond'
JOIN bursar.postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = $1 AND p.asset = $2
WHERE i.account = $1 AND NOT EXISTS (
    SELECT 1 FROM bursar.spends s JOIN bursar.envelopes x ON x.seq = s.envelope
    WHERE s.posting = p.id AND x.at <= to_timestamp(0) + $3::bigint * interval '1 microsecond')

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum(amount)::text, count(*) FROM bursar.balance_cache WHERE account = $1 AND asset <> 0
GROUP BY asset ORDER BY asset

-- name: wide_accounts
-- Accounts with a cache of their own (system and external ones have one by nature).
SELECT account FROM bursar.balance_cache WHERE part = 0 AND asset = 0

-- name: insert_cache
-- A change of a cached balance.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, p, v::numeric FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[]) AS c (a, s, p, v)
ON CONFLICT DO NOTHING

-- name: insert_cache_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, p, v::numeric
FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[], $5::text[], $6::bigint[]) AS c (a, s, p, v, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: cache_crowds
-- Cached balances in more than so many parts.
SELECT account, asset FROM bursar.balance_cache WHERE asset <> 0 GROUP BY account, asset HAVING count(*) > $1

-- name: take_cache_parts
-- Take the small changes of one cached balance, to add them to its sum. Two folders at once take different ones.
DELETE FROM bursar.balance_cache WHERE account = $1 AND asset = $2 AND part <> 0 RETURNING amount::text

-- name: add_to_cache
-- Add to the sum of one cached balance.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, 0, v::numeric FROM unnest($1::bigint[], $2::integer[], $3::text[]) AS c (a, s, v)
ON CONFLICT (account, asset, part) DO UPDATE SET amount = balance_cache.amount + excluded.amount

-- name: clear_cache_of
-- Forget the cache of one account.
DELETE FROM bursar.balance_cache WHERE account = $1

-- name: clear_cache
-- The whole cache is disposable.
DELETE FROM bursar.balance_cache

-- name: head_balances
-- Guarded balances: lists of accounts and assets, side by side.
SELECT h.account, h.asset, h.balance::text, h.turn, h.reservation
FROM unnest($1::bigint[], $2::integer[]) AS w (account, asset) JOIN bursar.account_heads h USING (account, asset)

-- name: all_heads
-- Every guarded balance, for audit.
SELECT account, asset, balance::text FROM bursar.account_heads ORDER BY account, asset

-- name: put_head
-- A guarded balance after a commit.
INSERT INTO bursar.account_heads (account, asset, balance, turn)
SELECT a, s, b::numeric, 1 FROM unnest($1::bigint[], $2::integer[], $3::text[]) AS h (a, s, b)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = account_heads.turn + 1

-- name: clear_heads
-- Guarded balances are disposable.
DELETE FROM bursar.account_heads

-- name: reserve_head
-- Split mode: one saga at a time moves a guarded balance.
INSERT INTO bursar.account_heads (account, asset, balance, turn, reservation)
SELECT a, s, 0, 0, g FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::bigint[]) AS h (a, s, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f)
ON CONFLICT (account, asset) DO UPDATE SET reservation = excluded.reservation
WHERE account_heads.reservation IS NULL OR account_heads.reservation = excluded.reservation

-- name: settle_head
-- Split mode: write the balance and let go of it.
UPDATE bursar.account_heads k SET balance = h.b::numeric, turn = k.turn + 1, reservation = NULL
FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::text[]) AS h (a, s, b, g)
WHERE k.account = h.a AND k.asset = h.s AND k.reservation = h.g

-- name: release_heads
-- Split mode: let go without writing.
UPDATE bursar.account_heads k SET reservation = NULL FROM unnest($1::text[], $2::bigint[]) AS v (g, f)
WHERE k.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: reserve
-- Split mode: claim a free posting for a saga that still has its fence. Ours already counts as claimed.
UPDATE bursar.live_postings l SET reservation = v.g FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS v (i, g, f)
WHERE l.posting = v.i AND (l.reservation IS NULL OR l.reservation = v.g)
  AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: release
-- Split mode: give back what is ours.
UPDATE bursar.live_postings l SET reservation = NULL FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS v (i, g, f)
WHERE l.posting = v.i AND l.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: spend
-- Split mode: spend what is ours, naming the spender. What we spent before counts as spent.
INSERT INTO bursar.spends (posting, envelope)
SELECT v.i, v.e FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS v (i, g, f, e)
WHERE EXISTS (SELECT 1 FROM bursar.live_postings WHERE posting = v.i AND reservation = v.g)
  AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)
ON CONFLICT DO NOTHING

-- name: bury
-- Split mode: what is spent is no longer live.
DELETE FROM bursar.live_postings l USING unnest($1::bigint[], $2::text[]) AS v (i, g)
WHERE l.posting = v.i AND l.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.spends WHERE posting = v.i)

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

-- name: insert_event
-- What happened; a second time is ignored.
INSERT INTO bursar.events (epoch, seq, kind, subject, version)
SELECT (SELECT epoch FROM bursar.clock_epoch), nextval('bursar.numbers'), k, s, v
FROM unnest($1::smallint[], $2::bigint[], $3::integer[]) AS e (k, s, v)
ON CONFLICT DO NOTHING

-- name: insert_event_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.events (epoch, seq, kind, subject, version)
SELECT (SELECT epoch FROM bursar.clock_epoch), nextval('bursar.numbers'), k, s, v
FROM unnest($1::smallint[], $2::bigint[], $3::integer[], $4::text[], $5::bigint[]) AS e (k, s, v, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: events_since
-- Events after a cursor, so many, and none that a transaction still open could come before.
SELECT epoch, xid::text::bigint, seq, kind, subject, version FROM bursar.events
WHERE (epoch, xid, seq) > ($1::integer, $2::bigint::text::xid8, $3::bigint)
  AND (epoch < (SELECT epoch FROM bursar.clock_epoch) OR xid < pg_snapshot_xmin(pg_current_snapshot()))
ORDER BY epoch, xid, seq LIMIT $4

-- name: save_saga
-- Split mode: the write-ahead record of a commit. Key and saga are written first (L20), unless the key is committed
-- already: whoever had it before us may have finished between our look and now.
INSERT INTO bursar.sagas (id, kind, scope, key, phase, fence, lease_us, data)
SELECT i, k, s, y, p, f, l, d
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bytea[])
     AS v (i, k, s, y, p, f, l, d)
WHERE NOT EXISTS (SELECT 1 FROM bursar.envelopes e WHERE e.scope = s AND e.key = y)
ON CONFLICT DO NOTHING

-- name: finalize_saga
-- Split mode: the point of no return. Only with our fence, and only under the rules it was validated against.
UPDATE bursar.sagas s SET phase = 'finalizing', data = v.d
FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::bigint[]) AS v (i, f, d, g)
WHERE s.id = v.i AND s.fence = v.f AND s.phase = 'reserving' AND (SELECT generation FROM bursar.rules WHERE id = 1) = v.g

-- name: take_saga
-- Split mode: recovery takes a saga over, if its lease has run out and it is still in the phase that recovery saw (its
-- owner may be passing the point of no return just now). The old owner's fence is void from here on.
UPDATE bursar.sagas s SET fence = s.fence + 1, lease_us = v.l
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[]) AS v (i, f, l, n, p)
WHERE s.id = v.i AND s.fence = v.f AND s.lease_us <= v.n AND s.phase = v.p

-- name: saga_fence
-- Split mode: whether a saga is still ours.
SELECT 1 FROM bursar.sagas WHERE id = $1 AND fence = $2

-- name: break_saga
-- Split mode: a row that can't be read is set aside; the others go on (L12).
UPDATE bursar.sagas SET phase = 'broken' WHERE id = ANY ($1::text[])

-- name: delete_saga
-- Split mode: done, or cleanly abandoned.
DELETE FROM bursar.sagas s USING unnest($1::text[], $2::bigint[]) AS v (i, f) WHERE s.id = v.i AND s.fence = v.f

-- name: sagas
-- Split mode: all commits under way.
SELECT id, kind, scope, key, phase, fence, lease_us, data FROM bursar.sagas ORDER BY id

-- name: count_sagas
-- Split mode: how many commits are under way that have not been set aside.
SELECT count(*) FROM bursar.sagas WHERE phase <> 'broken'

-- name: put_hold
-- A hold as it stands after a commit.
INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
SELECT i, a, s, v::numeric, r::numeric, p, t, w, x
FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[],
            $9::bigint[]) AS o (i, a, s, v, r, p, t, w, x)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: put_hold_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
SELECT i, a, s, v::numeric, r::numeric, p, t, w, x
FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::text[], $5::text[], $6::bigint[], $7::text[], $8::text[],
            $9::bigint[], $10::text[], $11::bigint[]) AS o (i, a, s, v, r, p, t, w, x, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: holds_by_id
-- Holds by number.
SELECT id, account, asset, amount::text, remaining::text, posting, state, owner, expires_us FROM bursar.holds
WHERE id = ANY ($1::bigint[]) ORDER BY id

-- name: holds_of_account
-- Open holds of an account.
SELECT id, account, asset, amount::text, remaining::text, posting, state, owner, expires_us FROM bursar.holds
WHERE account = $1 AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT id, account, asset, amount::text, remaining::text, posting, state, owner, expires_us FROM bursar.holds
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
SELECT posting, envelope FROM bursar.spends WHERE posting = ANY ($1::bigint[])

-- name: count_spends
-- I2: how many spends there are.
SELECT count(*) FROM bursar.spends

-- name: shortage
-- Split mode, all in one moment: postings of an account that a commit has claimed, commits past their point of no return,
-- and what is free. A shortage is a refusal only if the first two are zero (L18).
SELECT (SELECT count(*) FROM bursar.live_postings WHERE account = $1 AND asset = $2 AND reservation IS NOT NULL),
       (SELECT count(*) FROM bursar.sagas WHERE phase = 'finalizing'),
       (SELECT coalesce(sum(amount), 0)::text FROM bursar.live_postings
        WHERE account = $1 AND asset = $2 AND reservation IS NULL AND amount > 0)

-- name: group_read
-- All that a group needs to know, in one round trip: the generation (1), fresh numbers (2), keys used already (3), the
-- largest positive (4) and most negative (5) postings per account and asset, postings named by number (6), guarded
-- balances (7). Columns: what, place in the caller's list, two numbers, text, bytes.
SELECT 1::smallint AS what, 0::bigint AS place, generation AS a, 0::bigint AS b, NULL::text AS t, NULL::bytea AS x
FROM bursar.rules WHERE id = 1
UNION ALL
SELECT 2, 0, nextval('bursar.numbers'), 0, NULL, NULL FROM generate_series(1, $1::bigint)
UNION ALL
SELECT 3, w.place, e.seq, e.book, NULL, e.id || e.legs
FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS w (scope, key, place)
JOIN bursar.envelopes e ON e.scope = w.scope AND e.key = w.key
UNION ALL
SELECT 4, w.place, l.posting, 0, l.amount::text, NULL
FROM unnest($4::bigint[], $5::integer[], $6::integer[]) WITH ORDINALITY AS w (account, asset, most, place)
CROSS JOIN LATERAL (
    SELECT posting, amount FROM bursar.live_postings
    WHERE account = w.account AND asset = w.asset AND amount > 0 AND reservation IS NULL
    ORDER BY amount DESC LIMIT w.most) l
UNION ALL
SELECT 5, w.place, l.posting, 0, l.amount::text, NULL
FROM unnest($7::bigint[], $8::integer[], $9::integer[]) WITH ORDINALITY AS w (account, asset, most, place)
CROSS JOIN LATERAL (
    SELECT posting, amount FROM bursar.live_postings
    WHERE account = w.account AND asset = w.asset AND amount < 0 AND reservation IS NULL
    ORDER BY amount LIMIT w.most) l
UNION ALL
SELECT 6, asset, posting, account, amount::text, NULL
FROM bursar.live_postings WHERE posting = ANY ($10::bigint[]) AND reservation IS NULL
UNION ALL
SELECT 7, w.place, h.turn, 0, h.balance::text, NULL
FROM unnest($11::bigint[], $12::integer[]) WITH ORDINALITY AS w (account, asset, place)
JOIN bursar.account_heads h ON h.account = w.account AND h.asset = w.asset

-- name: group_write
-- One group of commits, whole or not at all (see the migration).
SELECT bursar.write_group_1($1::bigint, (SELECT epoch FROM bursar.clock_epoch), $2::bigint[], $3::bytea[],
    $4::text[], $5::text[], $6::integer[], $7::smallint[], $8::bigint[], $9::bytea[], $10::bytea[],
    $11::bytea[], $12::text[], $13::bigint[], $14::bigint[], $15::integer[], $16::text[], $17::boolean[],
    $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::bigint[], $23::bigint[], $24::integer[],
    $25::bigint[], $26::text[], $27::bigint[], $28::integer[], $29::bigint[], $30::text[], $31::bigint[],
    $32::bigint[], $33::integer[], $34::text[], $35::text[], $36::bigint[], $37::text[], $38::text[],
    $39::bigint[])

-- name: raise_epoch
-- After a restore: events written from now on sort after all that were there.
UPDATE bursar.clock_epoch SET epoch = epoch + 1 RETURNING epoch
