-- SQLite's statements of internal transfers.

-- name: standings
-- Status and policy of accounts and what they have of an asset: lists of paths and assets, side by side.
SELECT p.key, a.status, a.policy, (SELECT sum_amounts(amount) FROM live_postings l
                         WHERE l.account = a.id AND l.asset = json_extract(?2, '$[' || p.key || ']'))
FROM json_each(?1) AS p JOIN accounts a ON a.path = p.value
WHERE a.version = (SELECT max(version) FROM accounts b WHERE b.path = p.value)
