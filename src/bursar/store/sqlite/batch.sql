-- SQLite's statements of a batch: what it reads, and the ledger's part of what it writes. Here and in
-- the other files lists travel as JSON and are opened with json_each; amounts are 16 sortable bytes; now_us() is the
-- port's clock, which the store registers.

-- name: batch_begin
-- The rules' generation, and the last number that was used, or taken by split mode: a group uses those after it.
SELECT generation, max(
    (SELECT envelope FROM numbers WHERE id = 1),
    ifnull((SELECT max(seq) FROM envelopes), 0), ifnull((SELECT max(number) FROM records), 0))
FROM rules WHERE id = 1

-- name: batch_claim
-- Changes nothing, but takes the write lock, which only a transaction that sees the newest state can have.
UPDATE rules SET generation = generation WHERE 0

-- name: batch_key
-- What one key stands for already.
SELECT seq, id, book, legs FROM envelopes WHERE scope = ? AND key = ?

-- name: insert_envelope_new
-- An envelope in its group's transaction; a key or number that is there already is an error. Here and in what else a
-- group inserts: OR FAIL, as the transaction is rolled back whatever fails. Without it, SQLite copies every page that a
-- statement of several rows changes, in case that one of them fails; that cost as much again as the rows.
INSERT OR FAIL INTO envelopes (@envelopes, at) VALUES (:envelopes, :now)

-- name: insert_account_history_new
-- Who took part, in its group's transaction.
INSERT OR FAIL INTO involved (@account_history) VALUES (:account_history)

-- name: insert_posting_new
-- A posting in its group's transaction.
INSERT OR FAIL INTO postings (@postings) VALUES (:postings)

-- name: insert_live_new
-- The same for one of a few that a group has made, and has not spent itself.
INSERT OR FAIL INTO live_postings (posting, account, asset, amount) VALUES (?, ?, ?, ?)

-- name: batch_live
-- The same for all that a group has made: the postings from a number on, but for those that it has spent itself.
INSERT OR FAIL INTO live_postings (posting, account, asset, amount)
SELECT id, account, asset, amount FROM postings WHERE id >= ?1 AND id NOT IN (SELECT value FROM json_each(?2))
ORDER BY id

-- name: batch_live_by_id
-- Live and free postings by number.
SELECT l.posting, l.account, l.asset, l.amount FROM json_each(?) AS w JOIN live_postings l ON l.posting = w.value
WHERE l.reservation IS NULL

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

-- name: insert_spend
-- A spend within a transaction; a second one of the same posting is an error.
INSERT OR FAIL INTO spends (@spends) VALUES (:spends)

-- name: batch_dead_one
-- A posting that stops being live.
DELETE FROM live_postings WHERE posting = ? AND reservation IS NULL

-- name: batch_dead
-- Postings that stop being live: JSON list of numbers.
DELETE FROM live_postings WHERE posting IN (SELECT value FROM json_each(?)) AND reservation IS NULL

-- name: batch_events
-- A group's envelopes, which are those from a number on.
INSERT OR FAIL INTO events (kind, subject, version) SELECT 1, seq, 0 FROM envelopes WHERE seq >= ? ORDER BY seq

-- name: batch_guarded_balances
-- Guarded balances: lists of accounts and assets, side by side.
SELECT h.account, h.asset, h.balance, h.turn, h.reservation
FROM json_each(?1) AS a
JOIN account_heads h ON h.account = a.value AND h.asset = json_extract(?2, '$[' || a.key || ']')

-- name: batch_hold
-- A hold as it stands after a commit. One that is closed, or belongs to another record, does not change.
INSERT INTO holds (@holds) VALUES (:holds)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state
WHERE holds.state = 'open' AND holds.owner = excluded.owner
