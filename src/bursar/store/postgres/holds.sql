-- PostgreSQL's statements of holds.

-- name: holds_by_id
-- Holds by number, each with the newest version of its account.
SELECT @h.hold,
    @a.account
FROM bursar.holds h
CROSS JOIN LATERAL (SELECT * FROM bursar.accounts a WHERE a.id = h.account ORDER BY version DESC LIMIT 1) a
WHERE h.id = ANY ($1::text::bigint[]) ORDER BY h.id

-- name: holds_of_account
-- Open holds of an account.
SELECT @hold FROM bursar.holds
WHERE account = $1 AND state = 'open' ORDER BY id

-- name: holds_due
-- Open holds that have expired and that no record owns.
SELECT @hold FROM bursar.holds
WHERE state = 'open' AND expires_us <= (extract(epoch FROM now()) * 1000000)::bigint AND owner = ''
ORDER BY expires_us, id LIMIT $1

-- name: clock
-- The clock that decides expiry.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
