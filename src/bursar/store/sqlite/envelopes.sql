-- SQLite's statements of envelopes, of account histories, and of events.

-- name: envelopes_by_key
-- What the keys stand for already: lists of scopes and keys, side by side. Each is looked up whole: joined to a second
-- list, SQLite looks up the scope alone, and walks over all that it has.
SELECT e.seq, e.id, e.scope, e.key, e.book, e.legs
FROM json_each(?1) AS s JOIN envelopes e ON e.scope = s.value AND e.key = json_extract(?2, '$[' || s.key || ']')

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

-- name: insert_event
-- What happened; a second time is ignored.
INSERT INTO events (kind, subject, version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

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
