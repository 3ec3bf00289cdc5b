-- PostgreSQL's statements of internal transfers.

-- name: standings
-- Status and policy of accounts and what they have of an asset: lists of paths and assets, side by side.
SELECT w.place - 1, a.status, a.policy::text,
    (SELECT coalesce(sum(amount), 0) FROM bursar.live_postings l WHERE l.account = a.id AND l.asset = w.asset)::text
FROM unnest($1::text[], $2::text::integer[]) WITH ORDINALITY AS w (path, asset, place)
CROSS JOIN LATERAL (SELECT id, status, policy FROM bursar.accounts WHERE path = w.path ORDER BY version DESC LIMIT 1) a
