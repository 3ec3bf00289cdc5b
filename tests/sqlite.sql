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
