-- PostgreSQL's statements of envelopes, of account histories, and of events.

-- name: envelopes_by_key
-- What the keys stand for already: lists of scopes and keys, side by side.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.legs
FROM unnest($1::text[], $2::text[]) AS w (scope, key) JOIN bursar.envelopes e ON e.scope = w.scope AND e.key = w.key

-- name: envelopes_by_seq
-- Whole envelopes by number.
SELECT @envelope
FROM bursar.envelopes WHERE seq = ANY ($1::text::bigint[]) ORDER BY seq

-- name: envelopes_range
-- Whole envelopes after a number, of one book (0: any), by number: what audit walks over.
SELECT @envelope
FROM bursar.envelopes WHERE seq > $1 AND ($2::integer = 0 OR book = $2) ORDER BY seq LIMIT $3

-- name: place_of_envelope
-- Where an envelope stands in the order of events.
SELECT epoch, xid::text::bigint, seq FROM bursar.events WHERE subject = $1 AND kind = 1 AND version = 0

-- name: envelopes_after
-- Whole envelopes after a place in the order of events, of one book (0: any); none that a transaction still open could
-- come before (decision 5).
SELECT @e.envelope
FROM bursar.events v JOIN bursar.envelopes e ON e.seq = v.subject
WHERE v.kind = 1 AND (v.epoch, v.xid, v.seq) > ($1::integer, $2::bigint::text::xid8, $3::bigint)
  AND (v.epoch < (SELECT epoch FROM bursar.clock_epoch) OR v.xid < pg_snapshot_xmin(pg_current_snapshot()))
  AND ($4::integer = 0 OR e.book = $4)
ORDER BY v.epoch, v.xid, v.seq LIMIT $5

-- name: envelopes_of_account
-- Whole envelopes that an account took part in, newest first in the order of events, before a place in it, within a span
-- of time. The index is by number, which is nearly that order: so many lines on each side of the place are looked at.
WITH lines AS MATERIALIZED (
    (SELECT envelope FROM bursar.involved WHERE account = $1 AND envelope > $5 ORDER BY envelope LIMIT $9)
    UNION ALL
    (SELECT i.envelope FROM bursar.involved i JOIN bursar.envelopes e ON e.seq = i.envelope
     WHERE i.account = $1 AND i.envelope <= $5
       AND e.at >= to_timestamp(0) + $6::bigint * interval '1 microsecond'
       AND e.at < to_timestamp(0) + $7::bigint * interval '1 microsecond'
     ORDER BY i.envelope DESC LIMIT $8 + $9))
SELECT @e.envelope
FROM lines l
CROSS JOIN LATERAL (
    SELECT epoch, xid, seq FROM bursar.events WHERE subject = l.envelope AND kind = 1 AND version = 0 LIMIT 1) v
JOIN bursar.envelopes e ON e.seq = l.envelope
WHERE (v.epoch, v.xid, v.seq) < ($2::integer, $3::bigint::text::xid8, $4::bigint)
  AND e.at >= to_timestamp(0) + $6::bigint * interval '1 microsecond'
  AND e.at < to_timestamp(0) + $7::bigint * interval '1 microsecond'
ORDER BY v.epoch DESC, v.xid DESC, v.seq DESC LIMIT $8

-- name: envelope_by_hash
-- A scan: hashes have no index, because it would double the write-ahead volume.
SELECT seq FROM bursar.envelopes WHERE id = $1

-- name: insert_event
-- What happened; a second time is ignored.
INSERT INTO bursar.events (epoch, seq, kind, subject, version)
SELECT (SELECT epoch FROM bursar.clock_epoch), nextval('bursar.numbers'), k, s, v
FROM unnest($1::text::smallint[], $2::text::bigint[], $3::text::integer[]) AS e (k, s, v)
ON CONFLICT DO NOTHING

-- name: events_since
-- Events after a cursor, so many, and none that a transaction still open could come before; each with the name of what it
-- is about.
SELECT epoch, xid::text::bigint, seq, kind, subject, version,
       CASE WHEN kind IN (2, 3) THEN (SELECT path FROM bursar.accounts a WHERE a.id = subject AND a.version = 1)
            WHEN kind IN (4, 5) THEN (SELECT code FROM bursar.assets WHERE id = subject)
            WHEN kind = 6 THEN (SELECT name FROM bursar.books WHERE id = subject) END
FROM bursar.events
WHERE (epoch, xid, seq) > ($1::integer, $2::bigint::text::xid8, $3::bigint)
  AND (epoch < (SELECT epoch FROM bursar.clock_epoch) OR xid < pg_snapshot_xmin(pg_current_snapshot()))
ORDER BY epoch, xid, seq LIMIT $4

-- name: raise_epoch
-- After a restore: events written from now on sort after all that were there.
UPDATE bursar.clock_epoch SET epoch = epoch + 1 RETURNING epoch
