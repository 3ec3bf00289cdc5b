-- SQLite's statements of rows of flows' own.

-- name: batch_flow_row
-- One row by its key, in the transaction of its batch.
SELECT flow, kind, key, record, state, amount, version, permanent, body FROM flow_rows
WHERE flow = ? AND kind = ? AND key = ?

-- name: batch_new_flow_row
-- A new row. Arguments: expected version (0), row, time.
INSERT INTO flow_rows (flow, kind, key, record, state, amount, version, permanent, body, created_at, updated_at)
VALUES (?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?11)

-- name: batch_changed_flow_row
-- A compare-and-set. Arguments as above.
UPDATE flow_rows SET record = ?5, state = ?6, amount = ?7, version = ?8, body = ?10, updated_at = ?11
WHERE flow = ?2 AND kind = ?3 AND key = ?4 AND version = ?1

-- name: flow_row
-- One row by its key.
SELECT flow, kind, key, record, state, amount, version, permanent, body FROM flow_rows
WHERE flow = ? AND kind = ? AND key = ?

-- name: flow_rows_of_record
-- The rows that a record has, of one kind or of all. Arguments: record, kind or "".
SELECT flow, kind, key, record, state, amount, version, permanent, body FROM flow_rows
WHERE record = ?1 AND ?1 <> 0 AND (?2 = '' OR kind = ?2) ORDER BY kind, key

-- name: flow_rows_by_prefix
-- A page of rows of a kind. Arguments: flow, kind, first key, key before which to end, key after which to begin, limit.
SELECT flow, kind, key, record, state, amount, version, permanent, body FROM flow_rows
WHERE flow = ?1 AND kind = ?2 AND key >= ?3 AND key < ?4 AND key > ?5 ORDER BY key LIMIT ?6

-- name: all_flow_rows
-- A page of all rows, for the audit, with the flow of the record that has each. Arguments: flow, kind, key after which
-- to begin, limit.
SELECT w.flow, w.kind, w.key, w.record, w.state, w.amount, w.version, w.permanent, w.body, r.flow
FROM flow_rows w LEFT JOIN records r ON r.number = w.record
WHERE (w.flow, w.kind, w.key) > (?1, ?2, ?3) ORDER BY w.flow, w.kind, w.key LIMIT ?4
