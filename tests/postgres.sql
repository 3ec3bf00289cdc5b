-- PostgreSQL's statements for rows that tests write behind the ledger's back.

-- name: take_numbers
-- The next so many envelope numbers; returns the last of them. Only for single callers: a group takes its own.
SELECT max(nextval('bursar.numbers')) FROM generate_series(1, $1::bigint)

-- name: insert_envelope
-- An envelope; a replay changes nothing.
INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
SELECT * FROM unnest($1::text::bigint[], $2::text::bytea[], $3::text[], $4::text[], $5::text::integer[],
                     $6::text::smallint[], $7::text::bigint[], $8::text::bytea[], $9::text::bytea[],
                     $10::text::bytea[], $11::text[]::json[])
ON CONFLICT DO NOTHING

-- name: insert_account_history
-- Who took part.
INSERT INTO bursar.involved (account, envelope)
SELECT * FROM unnest($1::text::bigint[], $2::text::bigint[]) ON CONFLICT DO NOTHING

-- name: insert_posting
-- A posting; a replay changes nothing.
INSERT INTO bursar.postings (id, account, asset, amount)
SELECT i, a, s, v::numeric
FROM unnest($1::text::bigint[], $2::text::bigint[], $3::text::integer[], $4::text[]) AS p (i, a, s, v)
ON CONFLICT DO NOTHING

-- name: insert_live
-- It is live, unless it was spent already.
INSERT INTO bursar.live_postings (posting, account, asset, amount)
SELECT i, a, s, v::numeric
FROM unnest($1::text::bigint[], $2::text::bigint[], $3::text::integer[], $4::text[]) AS p (i, a, s, v)
WHERE NOT EXISTS (SELECT 1 FROM bursar.spends WHERE posting = i) ON CONFLICT DO NOTHING

-- name: insert_spend_directly
-- A spend: posting, envelope.
INSERT INTO bursar.spends (posting, envelope) SELECT * FROM unnest($1::text::bigint[], $2::text::bigint[])

-- name: bury_directly
-- It is no longer live.
DELETE FROM bursar.live_postings WHERE posting = ANY ($1::text::bigint[])

-- name: batch_live_by_id
-- Live and free postings by number.
SELECT posting, account, asset, amount::text FROM bursar.live_postings
WHERE posting = ANY ($1::text::bigint[]) AND reservation IS NULL

-- name: age_addresses
-- All of them were issued an hour earlier.
UPDATE bursar.records SET created_at = created_at - interval '1 hour' WHERE flow = 'deposit_addresses'

-- name: renumber_address
-- One has a number that was taken long ago.
UPDATE bursar.records SET number = $2 WHERE flow = 'deposit_addresses' AND id = $1
