-- Split mode: the primitives of a commit by write-ahead saga. Every one is conditional on the saga's fencing number, or
-- changes nothing the second time.

-- name: insert_envelope_fenced
-- Split mode: the same, if the saga still has its fence: whoever finds the envelope takes it for a receipt.
INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
SELECT a, b, c, d, e, f, g, h, i, j, k::json
FROM unnest($1::text::bigint[], $2::text::bytea[], $3::text[], $4::text[], $5::text::integer[], $6::text::smallint[],
            $7::text::bigint[], $8::text::bytea[], $9::text::bytea[], $10::text::bytea[], $11::text[], $12::text[], $13::text::bigint[])
     AS v (a, b, c, d, e, f, g, h, i, j, k, saga, fence)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.saga AND sagas.fence = v.fence) ON CONFLICT DO NOTHING

-- name: insert_account_history_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.involved (account, envelope)
SELECT a, e FROM unnest($1::text::bigint[], $2::text::bigint[], $3::text[], $4::text::bigint[]) AS v (a, e, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: insert_cache_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.balance_cache (account, asset, part, amount)
SELECT a, s, p, v::numeric
FROM unnest($1::text::bigint[], $2::text::integer[], $3::text::bigint[], $4::text[], $5::text[], $6::text::bigint[])
     AS c (a, s, p, v, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: reserve_head
-- Split mode: one saga at a time moves a guarded balance.
INSERT INTO bursar.account_heads (account, asset, balance, turn, reservation)
SELECT a, s, 0, 0, g FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[], $4::text::bigint[])
     AS h (a, s, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f)
ON CONFLICT (account, asset) DO UPDATE SET reservation = excluded.reservation
WHERE account_heads.reservation IS NULL OR account_heads.reservation = excluded.reservation

-- name: settle_head
-- Split mode: write the balance and let go of it.
UPDATE bursar.account_heads k SET balance = h.b::numeric, turn = k.turn + 1, reservation = NULL
FROM unnest($1::text::bigint[], $2::text::integer[], $3::text[], $4::text[]) AS h (a, s, b, g)
WHERE k.account = h.a AND k.asset = h.s AND k.reservation = h.g

-- name: release_heads
-- Split mode: let go without writing.
UPDATE bursar.account_heads k SET reservation = NULL FROM unnest($1::text[], $2::text::bigint[]) AS v (g, f)
WHERE k.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: reserve
-- Split mode: claim a free posting for a saga that still has its fence. Ours already counts as claimed.
UPDATE bursar.live_postings l SET reservation = v.g
FROM unnest($1::text::bigint[], $2::text[], $3::text::bigint[]) AS v (i, g, f)
WHERE l.posting = v.i AND (l.reservation IS NULL OR l.reservation = v.g)
  AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: release
-- Split mode: give back what is ours.
UPDATE bursar.live_postings l SET reservation = NULL
FROM unnest($1::text::bigint[], $2::text[], $3::text::bigint[]) AS v (i, g, f)
WHERE l.posting = v.i AND l.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)

-- name: spend
-- Split mode: spend what is ours, naming the spender. What we spent before counts as spent.
INSERT INTO bursar.spends (posting, envelope)
SELECT v.i, v.e FROM unnest($1::text::bigint[], $2::text[], $3::text::bigint[], $4::text::bigint[]) AS v (i, g, f, e)
WHERE EXISTS (SELECT 1 FROM bursar.live_postings WHERE posting = v.i AND reservation = v.g)
  AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = v.g AND fence = v.f)
ON CONFLICT DO NOTHING

-- name: bury
-- Split mode: what is spent is no longer live.
DELETE FROM bursar.live_postings l USING unnest($1::text::bigint[], $2::text[]) AS v (i, g)
WHERE l.posting = v.i AND l.reservation = v.g AND EXISTS (SELECT 1 FROM bursar.spends WHERE posting = v.i)

-- name: insert_event_fenced
-- Split mode: the same, if the saga still has its fence.
INSERT INTO bursar.events (epoch, seq, kind, subject, version)
SELECT (SELECT epoch FROM bursar.clock_epoch), nextval('bursar.numbers'), k, s, v
FROM unnest($1::text::smallint[], $2::text::bigint[], $3::text::integer[], $4::text[], $5::text::bigint[])
     AS e (k, s, v, g, f)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f) ON CONFLICT DO NOTHING

-- name: save_saga
-- Split mode: the write-ahead record of a commit. Key and saga are written first (L20), unless the key is committed
-- already: whoever had it before us may have finished between our look and now.
INSERT INTO bursar.sagas (id, kind, scope, key, phase, fence, lease_us, data)
SELECT i, k, s, y, p, f, l, d
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text::bigint[], $7::text::bigint[],
            $8::text::bytea[])
     AS v (i, k, s, y, p, f, l, d)
WHERE NOT EXISTS (SELECT 1 FROM bursar.envelopes e WHERE e.scope = s AND e.key = y)
ON CONFLICT DO NOTHING

-- name: finalize_saga
-- Split mode: the point of no return. Only with our fence, and only under the rules it was validated against.
UPDATE bursar.sagas s SET phase = 'finalizing', data = v.d
FROM unnest($1::text[], $2::text::bigint[], $3::text::bytea[], $4::text::bigint[]) AS v (i, f, d, g)
WHERE s.id = v.i AND s.fence = v.f AND s.phase = 'reserving' AND (SELECT generation FROM bursar.rules WHERE id = 1) = v.g

-- name: take_saga
-- Split mode: recovery takes a saga over, if its lease has run out and it is still in the phase that recovery saw (its
-- owner may be passing the point of no return just now). The old owner's fence is void from here on.
UPDATE bursar.sagas s SET fence = s.fence + 1, lease_us = v.l
FROM unnest($1::text[], $2::text::bigint[], $3::text::bigint[], $4::text::bigint[], $5::text[]) AS v (i, f, l, n, p)
WHERE s.id = v.i AND s.fence = v.f AND s.lease_us <= v.n AND s.phase = v.p

-- name: saga_fence
-- Split mode: whether a saga is still ours.
SELECT 1 FROM bursar.sagas WHERE id = $1 AND fence = $2

-- name: break_saga
-- Split mode: a row that can't be read is set aside; the others go on (L12).
UPDATE bursar.sagas SET phase = 'broken' WHERE id = ANY ($1::text[])

-- name: delete_saga
-- Split mode: done, or cleanly abandoned.
DELETE FROM bursar.sagas s USING unnest($1::text[], $2::text::bigint[]) AS v (i, f) WHERE s.id = v.i AND s.fence = v.f

-- name: sagas
-- Split mode: all commits under way.
SELECT id, kind, scope, key, phase, fence, lease_us, data FROM bursar.sagas ORDER BY id

-- name: count_sagas
-- Split mode: how many commits are under way that have not been set aside.
SELECT count(*) FROM bursar.sagas WHERE phase <> 'broken'

-- name: put_hold_fenced
-- Split mode: the same, if the saga still has its fence and its envelope has not been announced: whoever rolls it forward
-- a second time must not undo what has become of the hold since.
INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us, lasts_us)
SELECT i, a, s, v::numeric, r::numeric, p, t, w, x, l
FROM unnest($1::text::bigint[], $2::text::bigint[], $3::text::integer[], $4::text[], $5::text[], $6::text::bigint[],
            $7::text[], $8::text[], $9::text::bigint[], $10::text::bigint[], $11::text[], $12::text::bigint[],
            $13::text::bigint[])
     AS o (i, a, s, v, r, p, t, w, x, l, g, f, e)
WHERE EXISTS (SELECT 1 FROM bursar.sagas WHERE id = g AND fence = f)
  AND NOT EXISTS (SELECT 1 FROM bursar.events WHERE kind = 1 AND subject = e AND version = 0)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: shortage
-- Split mode, all in one moment: postings of an account that a commit has claimed, commits past their point of no return,
-- and what is free. A shortage is a refusal only if the first two are zero (L18).
SELECT (SELECT count(*) FROM bursar.live_postings WHERE account = $1 AND asset = $2 AND reservation IS NOT NULL),
       (SELECT count(*) FROM bursar.sagas WHERE phase = 'finalizing'),
       (SELECT coalesce(sum(amount), 0)::text FROM bursar.live_postings
        WHERE account = $1 AND asset = $2 AND reservation IS NULL AND amount > 0)

-- name: release_set_aside
-- Split mode: what a commit that was set aside has claimed is free again.
UPDATE bursar.live_postings SET reservation = NULL
WHERE reservation = $1 AND EXISTS (SELECT 1 FROM bursar.sagas WHERE id = $1 AND phase = 'broken') RETURNING posting

-- name: claims_set_aside
-- I3: live postings claimed by commits that were set aside, and by which.
SELECT l.posting, s.id FROM bursar.live_postings l JOIN bursar.sagas s ON s.id = l.reservation
WHERE s.phase = 'broken' ORDER BY l.posting LIMIT $1
