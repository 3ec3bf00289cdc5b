-- PostgreSQL's statements of what operators do: pauses, their history, calls whose end was forced,
-- and accounts that are being closed.

-- name: pauses
-- What is switched off.
SELECT @pause
FROM bursar.pauses ORDER BY kind, name

-- name: lock_pause
-- One pause, locked until the transaction ends.
SELECT @pause
FROM bursar.pauses WHERE kind = $1 AND name = $2 FOR UPDATE

-- name: put_pause
-- Switch a flow or a rail off.
INSERT INTO bursar.pauses (kind, name, actor, reason, two_people) VALUES ($1, $2, $3, $4, $5::boolean)
ON CONFLICT DO NOTHING RETURNING name

-- name: change_pause
-- Why it is off, whether two operators are needed to lift it, and who wants to.
UPDATE bursar.pauses SET reason = $3, two_people = $4::boolean, proposed_by = $5, proposed_reason = $6
WHERE kind = $1 AND name = $2

-- name: drop_pause
-- And on again.
DELETE FROM bursar.pauses WHERE kind = $1 AND name = $2 RETURNING name

-- name: note_action
-- One thing that an operator did.
INSERT INTO bursar.operator_actions (action, kind, name, actor, reason, proposed_by) VALUES ($1, $2, $3, $4, $5, $6)

-- name: actions
-- What operators did, newest first. Arguments: kind and name, or "" for all; below which number; how many.
SELECT @action
FROM bursar.operator_actions
WHERE ($1 = '' OR kind = $1) AND ($2 = '' OR name = $2) AND number < $3 ORDER BY number DESC LIMIT $4

-- name: put_forced
-- Ask the rail about a call whose end was forced; once more, if it was definite before. Arguments: record, version,
-- state, delay.
INSERT INTO bursar.forced_calls (record, version, state, attempt, due, said)
VALUES ($1, $2, $3, 0, now() + $4::bigint * interval '1 microsecond', '')
ON CONFLICT (record, version) DO UPDATE SET due = excluded.due, attempt = 0 WHERE forced_calls.due IS NULL

-- name: claim_forced
-- Take forced calls whose rail is to be asked. Arguments: how many, lease, cap.
WITH found AS MATERIALIZED (
    SELECT record, version FROM bursar.forced_calls
    WHERE due IS NOT NULL AND (due <= now() OR due > now() + $3::bigint * interval '1 microsecond')
    ORDER BY due LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE bursar.forced_calls f SET due = now() + $2::bigint * interval '1 microsecond', attempt = attempt + 1
FROM found WHERE f.record = found.record AND f.version = found.version
RETURNING @f.forced_call

-- name: forced_said
-- What the rail said, and when to ask again; null: it was definite. Arguments: record, version, said, delay.
UPDATE bursar.forced_calls SET said = $3, due = now() + $4::bigint * interval '1 microsecond'
WHERE record = $1 AND version = $2

-- name: forced_open
-- Forced calls whose rail has not said anything definite.
SELECT @forced_call FROM bursar.forced_calls WHERE due IS NOT NULL
ORDER BY record, version LIMIT $1

-- name: closing_of
-- The close that has frozen an account, and how long ago it began.
SELECT @closing FROM bursar.closings WHERE path = $1

-- name: put_closing
-- A close freezes an account, or takes over the freeze of another close.
INSERT INTO bursar.closings (path, token) VALUES ($1, $2)
ON CONFLICT (path) DO UPDATE SET token = excluded.token, at = excluded.at

-- name: drop_closing
-- No close has frozen the account any more: it has ended, or a person has changed the account's status.
DELETE FROM bursar.closings WHERE path = $1

-- name: closings
-- Closes that have not ended, and how long ago each began. The oldest first.
SELECT @closing FROM bursar.closings ORDER BY at, path LIMIT $1
