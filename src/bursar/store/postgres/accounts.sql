-- PostgreSQL's statements of the rules: assets, books, accounts. Here and in the other files: one for each of SQLite's;
-- lists are arrays, and a bulk write gets one array per column; amounts travel as text; the clock is the database's.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM bursar.rules WHERE id = 1

-- name: share_rules
-- Hold the rules as they are until the transaction ends.
SELECT generation FROM bursar.rules WHERE id = 1 FOR SHARE

-- name: bump_rules
-- Every change of a rule. Waits for the commits in flight (they hold the row FOR SHARE), holds back new ones, and gives up
-- when a transaction stays open (see the migration).
SELECT bursar.bump_rules_1(3000)

-- name: bump_rules_soon
-- The same for what can be done another time: waits for no lock for long.
SELECT bursar.bump_rules_1(50)

-- name: take_account_numbers
-- The next so many account numbers, in ranges of one: others may take some meanwhile.
SELECT n, n FROM (SELECT nextval('bursar.account_numbers') AS n FROM generate_series(1, $1::bigint)) AS taken

-- name: assets
-- All assets; there are few.
SELECT @asset FROM bursar.assets ORDER BY id

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
SELECT @book FROM bursar.books ORDER BY id

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
-- A version of an account. The first needs a new path; a later one must follow directly on the newest.
INSERT INTO bursar.accounts (id, version, path, policy, status, book)
SELECT i, v, p, y, s, b
FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[], $4::text[], $5::text[], $6::text[])
     AS n (i, v, p, y, s, b)
WHERE v = coalesce((SELECT max(version) FROM bursar.accounts WHERE path = p), 0) + 1
ON CONFLICT DO NOTHING
