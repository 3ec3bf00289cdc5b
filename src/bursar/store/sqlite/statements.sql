-- SQLite's statements. Lists travel as JSON and are opened with json_each; amounts are 16 sortable bytes.
-- now_us() is the port's clock; the store registers it.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM rules WHERE id = 1

-- name: share_rules
-- Hold the rules as they are until the unit ends.
SELECT generation FROM rules WHERE id = 1

-- name: bump_rules
-- Every change of a rule: commits validated against the old generation fail.
UPDATE rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: bump_rules_soon
-- The same: whoever has come so far has the file to himself.
UPDATE rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: batch_begin
-- The rules' generation, and the last number that was used, or taken by split mode: a group uses those after it.
SELECT generation, max(
    (SELECT envelope FROM numbers WHERE id = 1),
    ifnull((SELECT max(seq) FROM envelopes), 0), ifnull((SELECT max(number) FROM records), 0))
FROM rules WHERE id = 1

-- name: batch_claim
-- Changes nothing, but only whoever sees the newest state and may write can do it: the transaction has the lock from now on.
UPDATE rules SET generation = generation WHERE 0

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
SELECT @a.account
FROM json_each(?) AS w JOIN accounts a ON a.path = w.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.path = w.value)

-- name: heads_by_id
-- Newest version of each account numbered.
SELECT @a.account
FROM json_each(?) AS w JOIN accounts a ON a.id = w.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.id = w.value)

-- name: versions
-- Exact versions of accounts: JSON list of [id, version].
SELECT @a.account
FROM json_each(?1) AS i JOIN accounts a ON a.id = i.value AND a.version = json_extract(?2, '$[' || i.key || ']')

-- name: account_history
-- Every version of one account, oldest first.
SELECT @account, at FROM accounts WHERE path = ? ORDER BY version

-- name: in_transit_of
-- How many postings in transit an account's own entries have put there: money that may have to come back (T35).
SELECT count(*) FROM accounts t JOIN live_postings l ON l.account = t.id
JOIN involved i ON i.envelope = l.posting >> 16 AND i.account = ?1
WHERE t.version = 1 AND t.path >= 'transit:' AND t.path < 'transit;'

-- name: holding_accounts
-- An account and all below it with their cached balances, asset by asset.
SELECT a.path, sum_text(c.amount) FROM accounts a JOIN balance_cache c ON c.account = a.id
WHERE a.version = 1 AND (a.path = ?1 OR (a.path > ?2 AND a.path < ?3)) GROUP BY a.path, c.asset

-- name: list_accounts
-- Heads by path from a prefix range, after a path, so many.
SELECT @a.account FROM accounts a
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
-- What the keys stand for already: lists of scopes and keys, side by side. Each is looked up whole: joined to a second
-- list, SQLite looks up the scope alone, and walks over all that it has.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.legs
FROM json_each(?1) AS s JOIN envelopes e ON e.scope = s.value AND e.key = json_extract(?2, '$[' || s.key || ']')

-- name: batch_key
-- What one key stands for already.
SELECT seq, id, book, legs FROM envelopes WHERE scope = ? AND key = ?

-- name: envelopes_by_seq
-- Whole envelopes by number.
SELECT @e.envelope
FROM json_each(?) AS w JOIN envelopes e ON e.seq = w.value ORDER BY e.seq

-- name: envelopes_range
-- Whole envelopes after a number, of one book (0: any), by number: what audit walks over.
SELECT @envelope FROM envelopes
WHERE seq > ?1 AND (?2 = 0 OR book = ?2) ORDER BY seq LIMIT ?3

-- name: place_of_envelope
-- Where an envelope stands in the order of events (epoch and xid are for PostgreSQL: here their numbers are the order).
SELECT 0, 0, seq FROM events WHERE subject = ? AND kind = 1 AND version = 0

-- name: envelopes_after
-- Whole envelopes after a place in the order of events, of one book (0: any).
SELECT @e.envelope
FROM events v CROSS JOIN envelopes e ON e.seq = v.subject
WHERE ?1 = ?1 AND ?2 = ?2 AND v.kind = 1 AND v.seq > ?3 AND (?4 = 0 OR e.book = ?4) ORDER BY v.seq LIMIT ?5

-- name: envelopes_of_account
-- Whole envelopes that an account took part in, newest first in the order of events, before a place in it, within a span
-- of time. The index is by number, which is nearly that order (in split mode two programs take numbers ahead): so many
-- lines on each side of the place are looked at.
WITH lines AS MATERIALIZED (
    SELECT * FROM (
        SELECT envelope FROM involved WHERE account = ?1 AND envelope > ?5 ORDER BY envelope LIMIT ?9)
    UNION ALL
    SELECT * FROM (
        SELECT i.envelope FROM involved i JOIN envelopes e ON e.seq = i.envelope
        WHERE i.account = ?1 AND i.envelope <= ?5 AND e.at >= ?6 AND e.at < ?7 ORDER BY i.envelope DESC LIMIT ?8 + ?9))
SELECT @e.envelope
FROM lines l CROSS JOIN events v ON v.subject = l.envelope AND v.kind = 1 AND v.version = 0
CROSS JOIN envelopes e ON e.seq = l.envelope
WHERE ?2 = ?2 AND ?3 = ?3 AND v.seq < ?4 AND e.at >= ?6 AND e.at < ?7 ORDER BY v.seq DESC LIMIT ?8

-- name: envelope_by_hash
-- A scan: hashes have no index, because it would double the write-ahead volume.
SELECT seq FROM envelopes WHERE id = ?

-- name: insert_envelope_new
-- An envelope in a unit of its own group; a key or number that is there already is an error. Here and in what else a
-- group inserts: OR FAIL, because the unit is rolled back whatever fails. Without it, SQLite copies every page that a
-- statement of several rows changes, in case that one of them fails; that cost as much again as the rows.
INSERT OR FAIL INTO envelopes (@envelopes, at) VALUES (:envelopes, :now)

-- name: insert_account_history_new
-- Who took part, in a unit of its own group.
INSERT OR FAIL INTO involved (@account_history) VALUES (:account_history)

-- name: insert_posting_new
-- A posting in a unit of its own group.
INSERT OR FAIL INTO postings (@postings) VALUES (:postings)

-- name: insert_live_new
-- The same for one of a few that a group has made, and has not spent itself.
INSERT OR FAIL INTO live_postings (posting, account, asset, amount) VALUES (?, ?, ?, ?)

-- name: batch_live
-- The same for all that a group has made: the postings from a number on, but for those that it has spent itself.
INSERT OR FAIL INTO live_postings (posting, account, asset, amount)
SELECT id, account, asset, amount FROM postings WHERE id >= ?1 AND id NOT IN (SELECT value FROM json_each(?2))
ORDER BY id

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

-- name: batch_live_by_id
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

-- name: batch_largest
-- The same of many at once: JSON list of [account, asset, ...]. The key is the place in that list.
SELECT w.key, l.posting, l.amount
FROM json_each(?1) AS w JOIN live_postings l ON l.posting IN (
    SELECT posting FROM live_postings
    WHERE account = w.value ->> 0 AND asset = w.value ->> 1 AND amount > x'80000000000000000000000000000000'
      AND reservation IS NULL
    ORDER BY amount DESC LIMIT ?2)

-- name: batch_most_negative
-- The same of many at once.
SELECT w.key, l.posting, l.amount
FROM json_each(?1) AS w JOIN live_postings l ON l.posting IN (
    SELECT posting FROM live_postings
    WHERE account = w.value ->> 0 AND asset = w.value ->> 1 AND amount < x'80000000000000000000000000000000'
      AND reservation IS NULL
    ORDER BY amount LIMIT ?2)

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

-- name: balances_at
-- What accounts had at a moment, in sum per asset: postings created by then and not spent by then.
SELECT p.asset, sum_amounts(p.amount) FROM json_each(?1) AS w CROSS JOIN involved i ON i.account = w.value
JOIN envelopes e ON e.seq = i.envelope AND e.at <= ?2
JOIN postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = w.value
WHERE NOT EXISTS (
    SELECT 1 FROM spends s JOIN envelopes x ON x.seq = s.envelope WHERE s.posting = p.id AND x.at <= ?2)
GROUP BY p.asset ORDER BY p.asset

-- name: insert_spend
-- A spend within a unit; a second one of the same posting is an error.
INSERT OR FAIL INTO spends (@spends) VALUES (:spends)

-- name: batch_dead_one
-- A posting that stops being live.
DELETE FROM live_postings WHERE posting = ? AND reservation IS NULL

-- name: batch_dead
-- Postings that stop being live: JSON list of numbers.
DELETE FROM live_postings WHERE posting IN (SELECT value FROM json_each(?)) AND reservation IS NULL

-- name: insert_event
-- What happened; a second time is ignored.
INSERT INTO events (kind, subject, version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- name: batch_events
-- A group's envelopes, which are those from a number on.
INSERT OR FAIL INTO events (kind, subject, version) SELECT 1, seq, 0 FROM envelopes WHERE seq >= ? ORDER BY seq

-- name: events_since
-- Events after a cursor (xid is for PostgreSQL), so many, each with the name of what it is about. A cursor of an older
-- epoch may be past the end of that one.
SELECT (SELECT max(epoch) FROM epochs WHERE after < e.seq), 0, seq, kind, subject, version,
       CASE WHEN kind IN (2, 3) THEN (SELECT path FROM accounts a WHERE a.id = subject AND a.version = 1)
            WHEN kind IN (4, 5) THEN (SELECT code FROM assets WHERE id = subject)
            WHEN kind = 6 THEN (SELECT name FROM books WHERE id = subject) END
FROM events e
WHERE ?2 = ?2 AND seq > min(?3, ifnull((SELECT min(after) FROM epochs WHERE epoch > ?1), ?3)) ORDER BY seq LIMIT ?4

-- name: raise_epoch
-- After a restore: events written from now on come after every cursor that there is.
INSERT INTO epochs SELECT max(epoch) + 1, ifnull((SELECT max(seq) FROM events), 0) FROM epochs RETURNING epoch
