-- SQLite's statements of the rules: assets, books, accounts.

-- name: generation
-- The rules' generation: cached heads are good as long as it stands.
SELECT generation FROM rules WHERE id = 1

-- name: share_rules
-- Hold the rules as they are until the transaction ends.
SELECT generation FROM rules WHERE id = 1

-- name: bump_rules
-- Every change of a rule: commits validated against the old generation fail.
UPDATE rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: bump_rules_soon
-- The same: a transaction that has come so far is the only writer.
UPDATE rules SET generation = generation + 1 WHERE id = 1 RETURNING generation

-- name: take_account_numbers
-- The next so many account numbers: the first and the last of them.
UPDATE numbers SET account = account + ?1 WHERE id = 1 RETURNING account - ?1 + 1, account

-- name: assets
-- All assets; there are few.
SELECT @asset FROM assets ORDER BY id

-- name: insert_asset
-- A new asset; an existing code is left alone.
INSERT INTO assets (code, precision, min_transfer, max_transfer, status, internal_transfer_enabled)
VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: update_asset
-- Limits and status; code and precision never change.
UPDATE assets SET min_transfer = ?2, max_transfer = ?3, status = ?4, internal_transfer_enabled = ?5 WHERE code = ?1

-- name: books
-- All books; there are few.
SELECT @book FROM books ORDER BY id

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
-- A version of an account. The first needs a new path; a later one must follow directly on the newest.
INSERT INTO accounts (id, version, path, policy, status, book, at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, now_us()
WHERE ?2 = coalesce((SELECT max(version) FROM accounts WHERE path = ?3), 0) + 1
ON CONFLICT DO NOTHING
