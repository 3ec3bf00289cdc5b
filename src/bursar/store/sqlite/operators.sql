-- SQLite's statements of what operators do: pauses, their history, calls whose end was forced,
-- and accounts that are being closed.

-- name: pauses
-- What is switched off.
SELECT @pause FROM pauses ORDER BY kind, name

-- name: lock_pause
-- One pause. Only one transaction writes at a time.
SELECT @pause FROM pauses
WHERE kind = ? AND name = ?

-- name: put_pause
-- Switch a flow or a rail off.
INSERT INTO pauses (kind, name, actor, reason, two_people, at) VALUES (?, ?, ?, ?, ?, now_us())
ON CONFLICT DO NOTHING RETURNING name

-- name: change_pause
-- Why it is off, whether two operators are needed to lift it, and who wants to.
UPDATE pauses SET reason = ?3, two_people = ?4, proposed_by = ?5, proposed_reason = ?6 WHERE kind = ?1 AND name = ?2

-- name: drop_pause
-- And on again.
DELETE FROM pauses WHERE kind = ? AND name = ? RETURNING name

-- name: note_action
-- One thing that an operator did.
INSERT INTO operator_actions (action, kind, name, actor, reason, proposed_by, at) VALUES (?, ?, ?, ?, ?, ?, now_us())

-- name: actions
-- What operators did, newest first. Arguments: kind and name, or "" for all; below which number; how many.
SELECT @action FROM operator_actions
WHERE (?1 = '' OR kind = ?1) AND (?2 = '' OR name = ?2) AND number < ?3 ORDER BY number DESC LIMIT ?4

-- name: put_forced
-- Ask the rail about a call whose end was forced; once more, if it was definite before. Arguments: record, version,
-- state, delay.
INSERT INTO forced_calls (record, version, state, attempt, due, said) VALUES (?1, ?2, ?3, 0, now_us() + ?4, '')
ON CONFLICT (record, version) DO UPDATE SET due = excluded.due, attempt = 0 WHERE forced_calls.due IS NULL

-- name: claim_forced
-- Take forced calls whose rail is to be asked. Arguments: how many, lease, cap.
UPDATE forced_calls SET due = now_us() + ?2, attempt = attempt + 1
WHERE (record, version) IN (
    SELECT record, version FROM forced_calls WHERE due IS NOT NULL AND (due <= now_us() OR due > now_us() + ?3)
    ORDER BY due LIMIT ?1)
RETURNING @forced_call

-- name: forced_said
-- What the rail said, and when to ask again; null: it was definite. Arguments: record, version, said, delay.
UPDATE forced_calls SET said = ?3, due = now_us() + ?4 WHERE record = ?1 AND version = ?2

-- name: forced_open
-- Forced calls whose rail has not said anything definite.
SELECT @forced_call FROM forced_calls WHERE due IS NOT NULL ORDER BY record, version LIMIT ?

-- name: closing_of
-- The close that has frozen an account, and how long ago it began.
SELECT @closing FROM closings WHERE path = ?

-- name: put_closing
-- A close freezes an account, or takes over the freeze of another close.
INSERT INTO closings (path, token, at) VALUES (?, ?, now_us())
ON CONFLICT (path) DO UPDATE SET token = excluded.token, at = excluded.at

-- name: drop_closing
-- No close has frozen the account any more: it has ended, or a person has changed the account's status.
DELETE FROM closings WHERE path = ?

-- name: closings
-- Closes that have not ended, and how long ago each began. The oldest first.
SELECT @closing FROM closings ORDER BY at, path LIMIT ?
