-- SQLite's statements of rows of flows' own.

-- name: batch_flow_row
-- One row by its key, in the transaction of its batch.
SELECT @flow_row FROM flow_rows
WHERE flow = ? AND kind = ? AND key = ?

-- name: batch_new_flow_row
-- A new row.
INSERT INTO flow_rows (@flow_rows, created_at, updated_at) VALUES (:flow_rows, :now, :now)

-- name: batch_changed_flow_row
-- A compare-and-set.
UPDATE flow_rows SET @flow_rows.changes, updated_at = :now
WHERE flow = :flow_rows.flow AND kind = :flow_rows.kind AND key = :flow_rows.key AND version = :flow_rows.expected_version

-- name: flow_row
-- One row by its key.
SELECT @flow_row FROM flow_rows
WHERE flow = ? AND kind = ? AND key = ?

-- name: flow_rows_of_record
-- The rows that a record has, of one kind or of all. Arguments: record, kind or "".
SELECT @flow_row FROM flow_rows
WHERE record = ?1 AND ?1 <> 0 AND (?2 = '' OR kind = ?2) ORDER BY kind, key

-- name: flow_rows_of_records
-- The rows that several records have.
SELECT @flow_row FROM flow_rows
WHERE record IN (SELECT value FROM json_each(?)) AND record <> 0 ORDER BY flow, kind, key

-- name: flow_rows_by_keys
-- Several rows of a kind. Arguments: flow, kind, keys.
SELECT @flow_row FROM flow_rows
WHERE flow = ? AND kind = ? AND key IN (SELECT value FROM json_each(?)) ORDER BY key

-- name: flow_rows_by_prefix
-- A page of rows of a kind. Arguments: flow, kind, first key, key before which to end, key after which to begin, limit.
SELECT @flow_row FROM flow_rows
WHERE flow = ?1 AND kind = ?2 AND key >= ?3 AND key < ?4 AND key > ?5 ORDER BY key LIMIT ?6

-- name: all_flow_rows
-- A page of all rows, for the audit, with the flow of the record that has each. Arguments: flow, kind, key after which
-- to begin, limit.
SELECT @w.flow_row, r.flow
FROM flow_rows w LEFT JOIN records r ON r.number = w.record
WHERE (w.flow, w.kind, w.key) > (?1, ?2, ?3) ORDER BY w.flow, w.kind, w.key LIMIT ?4
