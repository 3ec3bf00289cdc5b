-- PostgreSQL's statements that list and count records. Arguments of all lists, after whose or which: states, created
-- from and before, names and values of what the body must say, from number, below number, how many. Newest first.
--
-- What narrows (state, time, body) is judged row by row along an index. `floor_…` say from which number on to look, so
-- that a filter which fits hardly anything does not read everything: the number of the n-th row below another, along the
-- same index; none if there are not so many.

-- name: list_records
-- Records of a flow, along the primary key.
SELECT @record
FROM bursar.records
WHERE flow || '' = $1 AND ($2::text[] = '{}' OR state = ANY ($2))
  AND ($3::bigint <= 0 OR (extract(epoch FROM created_at) * 1000000)::bigint >= $3)
  AND ($4::bigint = 9223372036854775807 OR (extract(epoch FROM created_at) * 1000000)::bigint < $4)
  AND NOT EXISTS (SELECT FROM unnest($5::text[], $6::text[]) AS f (name, said) WHERE body ->> f.name IS DISTINCT FROM f.said)
  AND number >= $7 AND number < $8
ORDER BY number DESC LIMIT $9

-- name: list_records_of
-- Records of a flow and an owner, along the index of owners.
SELECT @record
FROM bursar.records
WHERE flow = $1 AND owner = $2 AND ($3::text[] = '{}' OR state = ANY ($3))
  AND ($4::bigint <= 0 OR (extract(epoch FROM created_at) * 1000000)::bigint >= $4)
  AND ($5::bigint = 9223372036854775807 OR (extract(epoch FROM created_at) * 1000000)::bigint < $5)
  AND NOT EXISTS (SELECT FROM unnest($6::text[], $7::text[]) AS f (name, said) WHERE body ->> f.name IS DISTINCT FROM f.said)
  AND number >= $8 AND number < $9
ORDER BY number DESC LIMIT $10

-- name: list_records_in
-- Records of a flow in these states: the open ones along the index of what is due, the others along that of what rests.
-- One state by itself is compared as such: only then does the index give the right order, and the planner know how many.
WITH driven AS MATERIALIZED (
    SELECT * FROM bursar.records
    WHERE due IS NOT NULL AND flow || '' = $1 AND state = ANY ($2)
      AND ($3::bigint <= 0 OR (extract(epoch FROM created_at) * 1000000)::bigint >= $3)
      AND ($4::bigint = 9223372036854775807 OR (extract(epoch FROM created_at) * 1000000)::bigint < $4)
      AND NOT EXISTS (SELECT FROM unnest($5::text[], $6::text[]) AS f (name, said) WHERE body ->> f.name IS DISTINCT FROM f.said)
      AND number >= $7 AND number < $8),
found AS (
    SELECT * FROM driven
    UNION ALL
    (SELECT * FROM bursar.records
     WHERE due IS NULL AND flow = $1
       AND (cardinality($2::text[]) = 1 AND state = ($2)[1] OR cardinality($2) <> 1 AND state = ANY ($2))
       AND ($3::bigint <= 0 OR (extract(epoch FROM created_at) * 1000000)::bigint >= $3)
       AND ($4::bigint = 9223372036854775807 OR (extract(epoch FROM created_at) * 1000000)::bigint < $4)
       AND NOT EXISTS (SELECT FROM unnest($5::text[], $6::text[]) AS f (name, said) WHERE body ->> f.name IS DISTINCT FROM f.said)
       AND number >= $7 AND number < $8
     ORDER BY number DESC LIMIT $9))
SELECT @record
FROM found ORDER BY number DESC LIMIT $9

-- name: floor_records
-- For `list_records`: below a number, the n-th (counted from 0) of all flows.
SELECT number FROM bursar.records WHERE number < $1 ORDER BY number DESC LIMIT 1 OFFSET $2

-- name: floor_records_of
-- For `list_records_of`: flow, owner, below, n.
SELECT number FROM bursar.records WHERE flow = $1 AND owner = $2 AND number < $3 ORDER BY number DESC LIMIT 1 OFFSET $4

-- name: floor_records_in
-- For `list_records_in`: flow, states, below, n. Of the open ones all are looked at.
SELECT number FROM bursar.records
WHERE due IS NULL AND flow = $1
  AND (cardinality($2::text[]) = 1 AND state = ($2)[1] OR cardinality($2) <> 1 AND state = ANY ($2))
  AND number < $3
ORDER BY number DESC LIMIT 1 OFFSET $4

-- name: count_driven
-- How many records are driven, by flow and state, and since when the oldest of them is there.
SELECT flow, state, count(*), (extract(epoch FROM min(since)) * 1000000)::bigint FROM bursar.records
WHERE due IS NOT NULL GROUP BY flow, state ORDER BY flow, state

-- name: count_resting
-- The same of those that no worker drives, in one state of one flow.
SELECT count(*), (extract(epoch FROM min(since)) * 1000000)::bigint FROM bursar.records
WHERE due IS NULL AND flow = $1 AND state = $2

-- name: count_records
-- How many records are in each state of each flow, and since when the oldest of them is there. Reads them all.
SELECT flow, state, count(*), (extract(epoch FROM min(since)) * 1000000)::bigint FROM bursar.records GROUP BY flow,
    state ORDER BY flow, state

-- name: count_open_of
-- How many records of an owner have not ended and are driven. Few are, and they have an index.
SELECT count(*) FROM bursar.records WHERE flow = $1 AND owner = $2 AND due IS NOT NULL

-- name: count_records_of
-- How many records of an owner there are, ended or not.
SELECT count(*) FROM bursar.records WHERE flow = $1 AND owner = $2
