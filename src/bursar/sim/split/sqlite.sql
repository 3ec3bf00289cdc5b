-- The primitives of a commit by write-ahead saga, on SQLite. Every one is conditional on the saga's fencing number, or
-- changes nothing the second time.

-- name: take_numbers
-- The next so many envelope numbers; returns the last of them. What a group has used is in the tables themselves.
UPDATE numbers SET envelope = ?1 + max(
    envelope, ifnull((SELECT max(seq) FROM envelopes), 0), ifnull((SELECT max(number) FROM records), 0))
WHERE id = 1 RETURNING envelope

-- name: insert_posting
-- A posting; a replay changes nothing.
INSERT INTO postings (id, account, asset, amount) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: insert_live
-- It is live, unless it was spent already.
INSERT INTO live_postings (posting, account, asset, amount)
SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS (SELECT 1 FROM spends WHERE posting = ?1) ON CONFLICT DO NOTHING

-- name: insert_envelope_fenced
-- The same, if the saga still has its fence: an envelope that is found is taken for a receipt.
INSERT INTO envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, now_us()
WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?12 AND fence = ?13) ON CONFLICT DO NOTHING

-- name: insert_account_history_fenced
-- The same, if the saga still has its fence.
INSERT INTO involved (account, envelope)
SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?3 AND fence = ?4) ON CONFLICT DO NOTHING

-- name: insert_cache_fenced
-- The same, if the saga still has its fence.
INSERT INTO balance_cache (account, asset, part, amount)
SELECT ?1, ?2, ?3, ?4 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?5 AND fence = ?6) ON CONFLICT DO NOTHING

-- name: reserve_head
-- One saga at a time moves a guarded balance.
INSERT INTO account_heads (account, asset, balance, turn, reservation)
SELECT ?1, ?2, '0', 0, ?3 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?3 AND fence = ?4)
ON CONFLICT (account, asset) DO UPDATE SET reservation = excluded.reservation
WHERE account_heads.reservation IS NULL OR account_heads.reservation = excluded.reservation

-- name: settle_head
-- Write the balance and let go of it.
UPDATE account_heads SET balance = ?3, turn = turn + 1, reservation = NULL
WHERE account = ?1 AND asset = ?2 AND reservation = ?4

-- name: release_heads
-- Let go without writing.
UPDATE account_heads SET reservation = NULL
WHERE reservation = ?1 AND EXISTS (SELECT 1 FROM sagas WHERE id = ?1 AND fence = ?2)

-- name: reserve
-- Claim a free posting for a saga that still has its fence. Ours already counts as claimed.
UPDATE live_postings SET reservation = ?2
WHERE posting = ?1 AND (reservation IS NULL OR reservation = ?2)
  AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)

-- name: release
-- Give back what is ours.
UPDATE live_postings SET reservation = NULL
WHERE posting = ?1 AND reservation = ?2 AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)

-- name: spend
-- Spend what is ours, naming the spender. What we spent before counts as spent.
INSERT INTO spends (posting, envelope)
SELECT ?1, ?4 WHERE EXISTS (SELECT 1 FROM live_postings WHERE posting = ?1 AND reservation = ?2)
  AND EXISTS (SELECT 1 FROM sagas WHERE id = ?2 AND fence = ?3)
ON CONFLICT DO NOTHING

-- name: bury
-- What is spent is no longer live.
DELETE FROM live_postings WHERE posting = ?1 AND reservation = ?2
  AND EXISTS (SELECT 1 FROM spends WHERE posting = ?1)

-- name: insert_event_fenced
-- The same, if the saga still has its fence.
INSERT INTO events (kind, subject, version)
SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?4 AND fence = ?5) ON CONFLICT DO NOTHING

-- name: save_saga
-- The write-ahead record of a commit. Key and saga are written first (L20), unless the key is committed
-- already: its holder before us may have finished between our look and now.
INSERT INTO sagas (id, kind, scope, key, phase, fence, lease_us, data)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 WHERE NOT EXISTS (SELECT 1 FROM envelopes WHERE scope = ?3 AND key = ?4)
ON CONFLICT DO NOTHING

-- name: finalize_saga
-- The point of no return. Only with our fence, and only under the rules it was validated against.
UPDATE sagas SET phase = 'finalizing', data = ?3
WHERE id = ?1 AND fence = ?2 AND phase = 'reserving' AND (SELECT generation FROM rules WHERE id = 1) = ?4

-- name: take_saga
-- Recovery takes a saga over, if its lease has run out and it is still in the phase that recovery saw (its
-- owner may be passing the point of no return just now). The old owner's fence is void from here on.
UPDATE sagas SET fence = fence + 1, lease_us = ?3 WHERE id = ?1 AND fence = ?2 AND lease_us <= ?4 AND phase = ?5

-- name: saga_fence
-- Whether a saga is still ours.
SELECT 1 FROM sagas WHERE id = ? AND fence = ?

-- name: break_saga
-- A row that can't be read is set aside; the others go on (L12).
UPDATE sagas SET phase = 'broken' WHERE id = ?

-- name: delete_saga
-- Done, or cleanly abandoned.
DELETE FROM sagas WHERE id = ?1 AND fence = ?2

-- name: sagas
-- All commits under way.
SELECT CAST(id AS BLOB), CAST(kind AS BLOB), CAST(scope AS BLOB), CAST(key AS BLOB), phase, fence, lease_us, data
FROM sagas ORDER BY id

-- name: count_sagas
-- How many commits are under way that have not been set aside.
SELECT count(*) FROM sagas WHERE phase <> 'broken'

-- name: put_hold_fenced
-- The same, if the saga still has its fence and its envelope has not been announced: rolling it forward
-- a second time must not undo what has become of the hold since.
INSERT INTO holds (id, account, asset, amount, remaining, posting, state, owner, expires_us, lasts_us)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 WHERE EXISTS (SELECT 1 FROM sagas WHERE id = ?11 AND fence = ?12)
  AND NOT EXISTS (SELECT 1 FROM events WHERE kind = 1 AND subject = ?13 AND version = 0)
ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state

-- name: shortage
-- All in one moment: postings of an account that a commit has claimed, commits past their point of no return,
-- and what is free. A shortage is a refusal only if the first two are zero (L18).
SELECT (SELECT count(*) FROM live_postings WHERE account = ?1 AND asset = ?2 AND reservation IS NOT NULL),
       (SELECT count(*) FROM sagas WHERE phase = 'finalizing'),
       (SELECT sum_amounts(amount) FROM live_postings WHERE account = ?1 AND asset = ?2 AND reservation IS NULL
          AND amount > x'80000000000000000000000000000000')

-- name: release_set_aside
-- What a commit that was set aside has claimed is free again.
UPDATE live_postings SET reservation = NULL
WHERE reservation = ?1 AND EXISTS (SELECT 1 FROM sagas WHERE id = ?1 AND phase = 'broken') RETURNING posting

-- name: claims_set_aside
-- I3: live postings claimed by commits that were set aside, and by which.
SELECT l.posting, s.id FROM live_postings l JOIN sagas s ON s.id = l.reservation
WHERE s.phase = 'broken' ORDER BY l.posting LIMIT ?1
