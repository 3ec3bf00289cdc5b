-- SQLite's statements for rows that tests write behind the ledger's back.

-- name: insert_envelope
-- An envelope; a replay changes nothing.
INSERT INTO envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, now_us()) ON CONFLICT DO NOTHING

-- name: insert_account_history
-- Who took part.
INSERT INTO involved (account, envelope) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: insert_spend_directly
-- A spend: posting, envelope.
INSERT INTO spends (posting, envelope) VALUES (?, ?)

-- name: bury_directly
-- It is no longer live.
DELETE FROM live_postings WHERE posting = ?

-- name: age_addresses
-- All of them were issued an hour earlier.
UPDATE records SET created_at = created_at - 3600000000 WHERE flow = 'deposit_addresses'

-- name: renumber_address
-- One has a number that was taken long ago.
UPDATE records SET number = ?2 WHERE flow = 'deposit_addresses' AND id = ?1
