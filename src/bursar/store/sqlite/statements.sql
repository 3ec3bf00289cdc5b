-- SQLite's statements. Lists travel as JSON and are opened with json_each; amounts are 16 sortable bytes.
-- now_us() is the port's clock; the store registers it.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM rules WHERE id = 1

-- name: bump_rules
-- Every change of a rule: commits validated against the old generation fail.
UPDATE rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: take_numbers
-- The next so many envelope numbers; returns the last of them.
UPDATE numbers SET envelope = envelope + ? WHERE id = 1 RETURNING envelope

-- name: take_account_number
-- The next account number.
UPDATE numbers SET account = account + 1 WHERE id = 1 RETURNING account

-- name: assets
-- All assets; there are few.
SELECT id, code, precision, min_transfer, max_transfer, status, internal_transfer_enabled FROM assets ORDER BY id

-- name: insert_asset
-- A new asset; an existing code is left alone.
INSERT INTO assets (code, precision, min_transfer, max_transfer, status, internal_transfer_enabled)
VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: update_asset
-- Limits and status; code and precision never change.
UPDATE assets SET min_transfer = ?2, max_transfer = ?3, status = ?4, internal_transfer_enabled = ?5 WHERE code = ?1

-- name: books
-- All books; there are few.
SELECT id, name, assets, accounts FROM books ORDER BY id

-- name: insert_book
-- A new book; an existing name is left alone.
INSERT INTO books (name, assets, accounts) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- name: heads_by_path
-- Newest version of each account named.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book
FROM json_each(?) AS w JOIN accounts a ON a.path = w.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.path = w.value)

-- name: heads_by_id
-- Newest version of each account numbered.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book
FROM json_each(?) AS w JOIN accounts a ON a.id = w.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.id = w.value)

-- name: versions
-- Exact versions of accounts: JSON list of [id, version].
SELECT a.id, a.path, a.version, a.policy, a.status, a.book
FROM json_each(?1) AS i JOIN json_each(?2) AS v ON v.key = i.key JOIN accounts a ON a.id = i.value AND a.version = v.value

-- name: account_history
-- Every version of one account, oldest first.
SELECT id, path, version, policy, status, book, at FROM accounts WHERE path = ? ORDER BY version

-- name: list_accounts
-- Heads by path from a prefix range, after a path, so many.
SELECT a.id, a.path, a.version, a.policy, a.status, a.book FROM accounts a
WHERE a.path > ?1 AND a.path >= ?2 AND a.path < ?3
  AND a.version = (SELECT max(version) FROM accounts b WHERE b.path = a.path)
ORDER BY a.path LIMIT ?4

-- name: insert_account
-- A version of an account. The first needs a path nobody has; a later one must follow directly on the newest.
INSERT INTO accounts (id, version, path, policy, status, book, at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, now_us()
WHERE ?2 = coalesce((SELECT max(version) FROM accounts WHERE path = ?3), 0) + 1
ON CONFLICT DO NOTHING

-- name: envelopes_by_key
-- What the keys stand for already: lists of scopes and keys, side by side.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.legs
FROM json_each(?1) AS s JOIN json_each(?2) AS k ON k.key = s.key JOIN envelopes e ON e.scope = s.value AND e.key = k.value

-- name: envelopes_by_seq
-- Whole envelopes by number.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.kind, e.reverses, e.legs, e.pins, e.consumes, e.metadata, e.at
FROM json_each(?) AS w JOIN envelopes e ON e.seq = w.value ORDER BY e.seq

-- name: envelopes_range
-- Whole envelopes after a number, of one book (0: any), in order of creation.
SELECT seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at FROM envelopes
WHERE seq > ?1 AND (?2 = 0 OR book = ?2) ORDER BY seq LIMIT ?3

-- name: envelopes_of_account
-- Whole envelopes that an account took part in, newest first, below a number, within a span of time.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.kind, e.reverses, e.legs, e.pins, e.consumes, e.metadata, e.at
FROM involved i JOIN envelopes e ON e.seq = i.envelope
WHERE i.account = ?1 AND i.envelope < ?2 AND e.at >= ?3 AND e.at < ?4 ORDER BY i.envelope DESC LIMIT ?5

-- name: envelope_by_hash
-- A scan: hashes have no index, because it would double the write-ahead volume.
SELECT seq FROM envelopes WHERE id = ?

-- name: insert_envelope
-- An envelope; a replay changes nothing.
INSERT INTO envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, now_us()) ON CONFLICT DO NOTHING

-- name: insert_envelope_new
-- An envelope in a unit of its own group; a key or number that is there already is an error.
INSERT INTO envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, now_us())

-- name: insert_envelope_fenced
-- Split mode: the same, if the saga still has its fence: whoever finds the envelope takes it for a receipt.
INSERT INTO envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, now_us()
WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?12 AND fence = ?13) ON CONFLICT DO NOTHING

-- name: insert_involved
-- Who took part.
INSERT INTO involved (account, envelope) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: insert_involved_new
-- Who took part, in a unit of its own group.
INSERT INTO involved (account, envelope) VALUES (?, ?)

-- name: insert_involved_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO involved (account, envelope)
SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?3 AND fence = ?4) ON CONFLICT DO NOTHING

-- name: insert_posting
-- A posting; a replay changes nothing.
INSERT INTO postings (id, account, asset, amount) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: insert_posting_new
-- A posting in a unit of its own group.
INSERT INTO postings (id, account, asset, amount) VALUES (?, ?, ?, ?)

-- name: insert_live
-- It is live, unless it was spent already.
INSERT INTO live_postings (posting, account, asset, amount)
SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS (SELECT 1 FROM spends WHERE posting = ?1) ON CONFLICT DO NOTHING

-- name: insert_live_new
-- The same for a posting that can't have been spent, because its envelope is being written in this very unit.
INSERT INTO live_postings (posting, account, asset, amount) VALUES (?, ?, ?, ?)

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

-- name: live_by_id
-- Live and free postings by number.
SELECT l.posting, l.account, l.asset, l.amount FROM json_each(?) AS w JOIN live_postings l ON l.posting = w.value
WHERE l.reservation IS NULL

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

-- name: balances
-- Live sums per asset of one account, with the number of postings.
SELECT asset, sum_amounts(amount), count(*) FROM live_postings WHERE account = ? GROUP BY asset ORDER BY asset

-- name: balances_by_prefix
-- Live sums per asset of all accounts in a range of paths.
SELECT l.asset, sum_amounts(l.amount), count(*) FROM live_postings l
JOIN accounts a ON a.id = l.account AND a.version = 1
WHERE a.path = ?1 OR (a.path >= ?2 AND a.path < ?3) GROUP BY l.asset ORDER BY l.asset

-- name: balance_at
-- What an account had of an asset at a moment: postings created by then and not spent by then.
SELECT sum_amounts(p.amount) FROM involved i
JOIN envelopes e ON e.seq = i.envelope AND e.at <= ?3
JOIN postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = ?1 AND p.asset = ?2
WHERE i.account = ?1 AND NOT EXISTS (
    SELECT 1 FROM spends s JOIN envelopes x ON x.seq = s.envelope WHERE s.posting = p.id AND x.at <= ?3)

-- name: cached_balances
-- The cache's view of an account, per asset.
SELECT asset, sum_text(amount), count(*) FROM balance_cache WHERE account = ? AND asset <> 0 GROUP BY asset ORDER BY asset

-- name: wide_accounts
-- Accounts with a cache of their own (system and external ones have one by nature).
SELECT account FROM balance_cache WHERE part = 0 AND asset = 0

-- name: insert_cache
-- A change of a cached balance.
INSERT INTO balance_cache (account, asset, part, amount) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: insert_cache_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO balance_cache (account, asset, part, amount)
SELECT ?1, ?2, ?3, ?4 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?5 AND fence = ?6) ON CONFLICT DO NOTHING

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

-- name: head_balances
-- Guarded balances: lists of accounts and assets, side by side.
SELECT h.account, h.asset, h.balance, h.turn, h.reservation
FROM json_each(?1) AS a JOIN json_each(?2) AS s ON s.key = a.key
JOIN account_heads h ON h.account = a.value AND h.asset = s.value

-- name: all_heads
-- Every guarded balance, for audit.
SELECT account, asset, balance FROM account_heads ORDER BY account, asset

-- name: put_head
-- A guarded balance after a commit.
INSERT INTO account_heads (account, asset, balance, turn) VALUES (?1, ?2, ?3, 1)
ON CONFLICT (account, asset) DO UPDATE SET balance = excluded.balance, turn = turn + 1

-- name: clear_heads
-- Guarded balances are disposable.
DELETE FROM account_heads

-- name: reserve_head
-- Split mode: one saga at a time moves a guarded balance.
INSERT INTO account_heads (account, asset, balance, turn, reservation)
SELECT ?1, ?2, '0', 0, ?3 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?3 AND fence = ?4)
ON CONFLICT (account, asset) DO UPDATE SET reservation = excluded.reservation
WHERE account_heads.reservation IS NULL OR account_heads.reservation = excluded.reservation

-- name: settle_head
-- Split mode: write the balance and let go of it.
UPDATE account_heads SET balance = ?3, turn = turn + 1, reservation = NULL
WHERE account = ?1 AND asset = ?2 AND reservation = ?4

-- name: release_heads
-- Split mode: let go without writing.
UPDATE account_heads SET reservation = NULL
WHERE reservation = ?1 AND EXISTS (SELECT 1 FROM sagas WHERE id = ?1 AND fence = ?2)

-- name: reserve
-- Split mode: claim a free posting for a saga that still has its fence. Ours already counts as claimed.
UPDATE live_postings SET reservation = ?2
WHERE posting = ?1 AND (reservation IS NULL OR reservation = ?2)
  AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)

-- name: release
-- Split mode: give back what is ours.
UPDATE live_postings SET reservation = NULL
WHERE posting = ?1 AND reservation = ?2 AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)

-- name: spend
-- Split mode: spend what is ours, naming the spender. What we spent before counts as spent.
INSERT INTO spends (posting, envelope)
SELECT ?1, ?4 WHERE EXISTS (SELECT 1 FROM live_postings WHERE posting = ?1 AND reservation = ?2)
  AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)
ON CONFLICT DO NOTHING

-- name: bury
-- Split mode: what is spent is no longer live.
DELETE FROM live_postings WHERE posting = ?1 AND reservation = ?2
  AND EXISTS (SELECT 1 FROM spends WHERE posting = ?1)

-- name: insert_spend
-- A spend within a unit; a second one of the same posting is an error.
INSERT INTO spends (posting, envelope) VALUES (?, ?)

-- name: delete_live
-- A posting stops being live.
DELETE FROM live_postings WHERE posting = ? AND reservation IS NULL

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

-- name: insert_event
-- What happened; a second time is ignored.
INSERT INTO events (kind, subject, version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- name: insert_event_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO events (kind, subject, version)
SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?4 AND fence = ?5) ON CONFLICT DO NOTHING

-- name: insert_event_new
-- What happened, in a unit of its own group.
INSERT INTO events (kind, subject, version) VALUES (?, ?, ?)

-- name: events_since
-- Events after a cursor (epoch and xid are for PostgreSQL), so many.
SELECT 0, 0, seq, kind, subject, version FROM events WHERE ?1 = ?1 AND ?2 = ?2 AND seq > ?3 ORDER BY seq LIMIT ?4

-- name: save_saga
-- Split mode: the write-ahead record of a commit. Key and saga are written first (L20), unless the key is committed
-- already: whoever had it before us may have finished between our look and now.
INSERT INTO sagas (id, kind, scope, key, phase, fence, lease_us, data)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 WHERE NOT EXISTS (SELECT 1 FROM envelopes WHERE scope = ?3 AND key = ?4)
ON CONFLICT DO NOTHING

-- name: finalize_saga
-- Split mode: the point of no return. Only with our fence, and only under the rules it was validated against.
UPDATE sagas SET phase = 'finalizing', data = ?3
WHERE id = ?1 AND fence = ?2 AND phase = 'reserving' AND (SELECT generation FROM rules WHERE id = 1) = ?4

-- name: take_saga
-- Split mode: recovery takes a saga over, if its lease has run out and it is still in the phase that recovery saw (its
-- owner may be passing the point of no return just now). The old owner's fence is void from here on.
UPDATE sagas SET fence = fence + 1, lease_us = ?3 WHERE id = ?1 AND fence = ?2 AND lease_us <= ?4 AND phase = ?5

-- name: saga_fence
-- Split mode: whether a saga is still ours.
SELECT 1 FROM sagas WHERE id = ? AND fence = ?

-- name: break_saga
-- Split mode: a row that can't be read is set aside; the others go on (L12).
UPDATE sagas SET phase = 'broken' WHERE id = ?

-- name: delete_saga
-- Split mode: done, or cleanly abandoned.
DELETE FROM sagas WHERE id = ?1 AND fence = ?2

-- name: sagas
-- Split mode: all commits under way.
SELECT id, kind, scope, key, phase, fence, lease_us, data FROM sagas ORDER BY id

-- name: count_sagas
-- Split mode: how many commits are under way that have not been set aside.
SELECT count(*) FROM sagas WHERE phase <> 'broken'

-- name: put_hold
-- A hold as it stands after a commit.
INSERT INTO holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: put_hold_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?10 AND fence = ?11)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: holds_by_id
-- Holds by number.
SELECT h.id, h.account, h.asset, h.amount, h.remaining, h.posting, h.state, h.owner, h.expires_us
FROM json_each(?) AS w JOIN holds h ON h.id = w.value ORDER BY h.id

-- name: holds_of_account
-- Open holds of an account.
SELECT id, account, asset, amount, remaining, posting, state, owner, expires_us FROM holds
WHERE account = ? AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT id, account, asset, amount, remaining, posting, state, owner, expires_us FROM holds
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

-- name: shortage
-- Split mode, all in one moment: postings of an account that a commit has claimed, commits past their point of no return,
-- and what is free. A shortage is a refusal only if the first two are zero (L18).
SELECT (SELECT count(*) FROM live_postings WHERE account = ?1 AND asset = ?2 AND reservation IS NOT NULL),
       (SELECT count(*) FROM sagas WHERE phase = 'finalizing'),
       (SELECT sum_amounts(amount) FROM live_postings WHERE account = ?1 AND asset = ?2 AND reservation IS NULL
          AND amount > x'80000000000000000000000000000000')
