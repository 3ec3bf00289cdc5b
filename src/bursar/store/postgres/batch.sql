-- PostgreSQL's statements of a batch: what it reads, and the ledger's part of what it writes.

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
