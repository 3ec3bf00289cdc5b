-- PostgreSQL's statements of rows of flows' own. They are written by bursar.write_flow_rows_1.

-- name: batch_flow_rows
-- Rows by their keys.
SELECT @w.flow_row
FROM unnest($1::text[], $2::text[], $3::text[]) AS k (flow, kind, key)
JOIN bursar.flow_rows w ON w.flow = k.flow AND w.kind = k.kind AND w.key = k.key

-- name: flow_row
-- One row by its key.
SELECT @flow_row FROM bursar.flow_rows
WHERE flow = $1 AND kind = $2 AND key = $3

-- name: flow_rows_of_record
-- The rows that a record has, of one kind or of all. Arguments: record, kind or "".
SELECT @flow_row FROM bursar.flow_rows
WHERE record = $1::bigint AND record <> 0 AND ($2::text = '' OR kind = $2) ORDER BY kind, key

-- name: flow_rows_of_records
-- The rows that several records have.
SELECT @flow_row FROM bursar.flow_rows
WHERE record = ANY ($1::text::bigint[]) AND record <> 0 ORDER BY flow, kind, key

-- name: flow_rows_by_keys
-- Several rows of a kind. Arguments: flow, kind, keys.
SELECT @flow_row FROM bursar.flow_rows
WHERE flow = $1 AND kind = $2 AND key = ANY ($3::text[]) ORDER BY key

-- name: flow_rows_by_prefix
-- A page of rows of a kind. Arguments: flow, kind, first key, key before which to end, key after which to begin, limit.
SELECT @flow_row FROM bursar.flow_rows
WHERE flow = $1 AND kind = $2 AND key >= $3 AND key < $4 AND key > $5 ORDER BY key LIMIT $6

-- name: all_flow_rows
-- A page of all rows, for the audit, with the flow of the record that has each. Arguments: flow, kind, key after which
-- to begin, limit.
SELECT @w.flow_row, r.flow
FROM bursar.flow_rows w LEFT JOIN bursar.records r ON r.number = w.record
WHERE (w.flow, w.kind, w.key) > ($1::text, $2::text, $3::text) ORDER BY w.flow, w.kind, w.key LIMIT $4
