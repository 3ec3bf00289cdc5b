-- SQLite's statements of holds.

-- name: holds_by_id
-- Holds by number, each with the newest version of its account.
SELECT @h.hold,
    @a.account
FROM json_each(?) AS w JOIN holds h ON h.id = w.value JOIN accounts a ON a.id = h.account
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.id = h.account) ORDER BY h.id

-- name: holds_of_account
-- Open holds of an account.
SELECT @hold FROM holds
WHERE account = ? AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT @hold FROM holds
WHERE state = 'open' AND expires_us <= now_us() AND owner = '' ORDER BY expires_us, id LIMIT ?

-- name: clock
-- The clock that decides expiry.
SELECT now_us()
