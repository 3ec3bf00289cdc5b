-- PostgreSQL's statements, one for each of SQLite's. Lists are arrays; a bulk write gets one array per column.
-- Amounts travel as text. The clock is the database's.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM bursar.rules WHERE id = 1

-- name: share_rules
-- Hold the rules as they are until the unit ends.
SELECT generation FROM bursar.rules WHERE id = 1 FOR SHARE

-- name: bump_rules
-- Every change of a rule. Waits for the commits in flight (they hold the row FOR SHARE), holds back new ones, and gives up
-- when a transaction stays open (see the migration).
SELECT bursar.bump_rules_1(3000)

-- name: bump_rules_soon
-- The same for what can be done another time: waits for nobody for long.
SELECT bursar.bump_rules_1(50)

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
FROM unnest($1::text[], $2::text::smallint[], $3::text[], $4::text[], $5::text[], $6::text::boolean[])
     AS v (c, p, lo, hi, s, e)
ON CONFLICT DO NOTHING

-- name: update_asset
-- Limits and status; code and precision never change.
UPDATE bursar.assets SET min_transfer = v.lo::numeric, max_transfer = v.hi::numeric, status = v.s,
                         internal_transfer_enabled = v.e
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text::boolean[]) AS v (c, lo, hi, s, e) WHERE code = v.c

-- name: books
-- All books; there are few.
SELECT id, name, assets, accounts FROM bursar.books ORDER BY id

-- name: insert_book
-- A new book; an existing name is left alone.
INSERT INTO bursar.books (name, assets, accounts) SELECT * FROM unnest($1::text[], $2::text[], $3::text[])
ON CONFLICT DO NOTHING

-- name: heads_by_path
-- Newest version of each account named.
SELECT @a.account FROM unnest($1::text[]) AS w (path)
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.path = w.path ORDER BY version DESC LIMIT 1) a

-- name: heads_by_id
-- Newest version of each account numbered.
SELECT @a.account FROM unnest($1::text::bigint[]) AS w (id)
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.id = w.id ORDER BY version DESC LIMIT 1) a

-- name: versions
-- Exact versions of accounts: lists of ids and versions, side by side.
SELECT @a.account
FROM unnest($1::text::bigint[], $2::text::integer[]) AS w (id, version) JOIN bursar.accounts a USING (id, version)

-- name: account_history
-- Every version of one account, oldest first.
SELECT @account, (extract(epoch FROM at) * 1000000)::bigint
FROM bursar.accounts WHERE path = $1 ORDER BY version

-- name: in_transit_of
-- How many postings in transit an account's own entries have put there: money that may have to come back (T35).
SELECT count(*) FROM bursar.accounts t JOIN bursar.live_postings l ON l.account = t.id
JOIN bursar.involved i ON i.envelope = l.posting >> 16 AND i.account = $1
WHERE t.version = 1 AND t.path >= 'transit:' AND t.path < 'transit;'

-- name: holding_accounts
-- An account and all below it with their cached balances, asset by asset.
SELECT a.path, sum(c.amount)::text FROM bursar.accounts a JOIN bursar.balance_cache c ON c.account = a.id
WHERE a.version = 1 AND (a.path = $1 OR (a.path > $2 AND a.path < $3)) GROUP BY a.path, c.asset

-- name: list_accounts
-- Heads by path from a prefix range, after a path, so many.
SELECT @a.account FROM bursar.accounts a
WHERE a.path > $1 AND a.path >= $2 AND a.path < $3
  AND a.version = (SELECT max(version) FROM bursar.accounts b WHERE b.path = a.path)
ORDER BY a.path LIMIT $4

-- name: insert_account
-- A version of an account. The first needs a path nobody has; a later one must follow directly on the newest.
INSERT INTO bursar.accounts (id, version, path, policy, status, book)
SELECT i, v, p, y, s, b
FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[], $4::text[], $5::text[], $6::text[])
     AS n (i, v, p, y, s, b)
WHERE v = coalesce((SELECT max(version) FROM bursar.accounts WHERE path = p), 0) + 1
ON CONFLICT DO NOTHING

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

-- name: postings_by_id
-- Postings with their state: (reservation or null, spender or null, is live).
SELECT p.id, p.account, p.asset, p.amount::text, l.reservation, s.envelope, l.posting IS NOT NULL
FROM unnest($1::text::bigint[]) WITH ORDINALITY AS w (id, place) JOIN bursar.postings p ON p.id = w.id
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

-- name: largest
-- The largest free positive postings of an account and asset.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.amount > 0 AND l.reservation IS NULL ORDER BY l.amount DESC LIMIT $3

-- name: most_negative
-- The most negative free postings of an account and asset.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.amount < 0 AND l.reservation IS NULL ORDER BY l.amount LIMIT $3

-- name: smallest
-- The smallest free postings of an account and asset, by magnitude within their sign: what compact merges.
SELECT l.posting, l.account, l.asset, l.amount::text FROM bursar.live_postings l
WHERE l.account = $1 AND l.asset = $2 AND l.reservation IS NULL ORDER BY l.amount LIMIT $3

-- name: balances
-- Live sums per asset of one account, with the number of postings.
SELECT asset, sum(amount)::text, count(*) FROM bursar.live_postings WHERE account = $1 GROUP BY asset ORDER BY asset

-- name: balances_by_prefix
-- Live sums per asset of all accounts in a range of paths.
SELECT l.asset, sum(l.amount)::text, count(*) FROM bursar.live_postings l
JOIN bursar.accounts a ON a.id = l.account AND a.version = 1
WHERE a.path = $1 OR (a.path >= $2 AND a.path < $3) GROUP BY l.asset ORDER BY l.asset

-- name: balances_at
-- What accounts had at a moment, in sum per asset: postings created by then and not spent by then.
SELECT p.asset, sum(p.amount)::text FROM unnest($1::text::bigint[]) AS w (account)
JOIN bursar.involved i ON i.account = w.account
JOIN bursar.envelopes e ON e.seq = i.envelope AND e.at <= to_timestamp(0) + $2::bigint * interval '1 microsecond'
JOIN bursar.postings p ON p.id >= i.envelope << 16 AND p.id < (i.envelope + 1) << 16 AND p.account = w.account
WHERE NOT EXISTS (
    SELECT 1 FROM bursar.spends s JOIN bursar.envelopes x ON x.seq = s.envelope
    WHERE s.posting = p.id AND x.at <= to_timestamp(0) + $2::bigint * interval '1 microsecond')
GROUP BY p.asset ORDER BY p.asset

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

-- name: batch_read
-- All that a batch needs, in one round trip: the generation (1), fresh numbers (2), keys used already (3), the
-- largest positive (4) and most negative (5) postings per account and asset, postings named by number (6), guarded
-- balances (7). Columns: what, place in the caller's list, two numbers, text, bytes.
SELECT 1::smallint AS what, 0::bigint AS place, generation AS a, 0::bigint AS b, NULL::text AS t, NULL::bytea AS x
FROM bursar.rules WHERE id = 1
UNION ALL
SELECT 2, 0, nextval('bursar.numbers'), 0, NULL, NULL FROM generate_series(1, @numbers:bigint)
UNION ALL
SELECT 3, w.place, e.seq, e.book, NULL, e.id || e.legs
FROM unnest(@keys)
     WITH ORDINALITY AS w (scope, key, place)
CROSS JOIN LATERAL (SELECT seq, book, id, legs FROM bursar.envelopes WHERE scope = w.scope AND key = w.key LIMIT 1) e
UNION ALL
SELECT 4, w.place, l.posting, 0, l.amount::text, NULL
FROM unnest(@positive_pools)
     WITH ORDINALITY AS w (account, asset, most, place)
CROSS JOIN LATERAL (
    SELECT posting, amount FROM bursar.live_postings
    WHERE account = w.account AND asset = w.asset AND amount > 0 AND reservation IS NULL
    ORDER BY amount DESC LIMIT w.most) l
UNION ALL
SELECT 5, w.place, l.posting, 0, l.amount::text, NULL
FROM unnest(@negative_pools)
     WITH ORDINALITY AS w (account, asset, most, place)
CROSS JOIN LATERAL (
    SELECT posting, amount FROM bursar.live_postings
    WHERE account = w.account AND asset = w.asset AND amount < 0 AND reservation IS NULL
    ORDER BY amount LIMIT w.most) l
UNION ALL
SELECT 6, asset, posting, account, amount::text, NULL
FROM bursar.live_postings WHERE posting = ANY (@named_postings) AND reservation IS NULL
UNION ALL
SELECT 7, w.place, h.turn, 0, h.balance::text, NULL
FROM unnest(@guarded_keys) WITH ORDINALITY AS w (account, asset, place)
JOIN bursar.account_heads h ON h.account = w.account AND h.asset = w.asset

-- name: batch_write_entries
-- The ledger's part of a batch by itself (see the migrations), its holds after it; and numbers for the next one.
SELECT bursar.take_turn_1(),
    bursar.write_group_1(@generation:bigint, (SELECT epoch FROM bursar.clock_epoch), @envelopes, @postings, @spends,
        @spent_live, @account_history, @guarded, @cached_balances,
        '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'),
    bursar.write_holds_1(@holds),
    ARRAY(SELECT nextval('bursar.numbers')::text FROM generate_series(1, @numbers_ahead:bigint))
