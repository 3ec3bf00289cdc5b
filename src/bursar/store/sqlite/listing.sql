-- SQLite's statements that list and count records. Arguments of all lists, after whose or which: states, created from and
-- before, names and values of what the body must say, from number, below number, how many. Newest first.
--
-- What narrows (state, time, body) is judged row by row along an index; a body that is no JSON fits no filter, and does not
-- fail the statement. `floor_…` say from which number on to look, so that a filter which fits hardly anything does not
-- read everything: the number of the n-th row below another, along the same index; none if there are not so many.

-- name: list_records
-- Records of a flow, along the primary key.
SELECT @record
FROM records NOT INDEXED
WHERE flow = ?1 AND (?2 = '[]' OR state IN (SELECT value FROM json_each(?2)))
  AND created_at >= ?3 AND created_at < ?4
  AND (?5 = '[]' OR CASE WHEN json_valid(body) THEN NOT EXISTS (
      SELECT 1 FROM json_each(?5) AS f JOIN json_each(?6) AS s ON s.key = f.key
      WHERE records.body ->> f.value IS NOT s.value) END)
  AND number >= ?7 AND number < ?8
ORDER BY number DESC LIMIT ?9

-- name: list_records_of
-- Records of a flow and an owner, along the index of owners.
SELECT @record
FROM records INDEXED BY records_owner
WHERE flow = ?1 AND owner = ?2 AND (?3 = '[]' OR state IN (SELECT value FROM json_each(?3)))
  AND created_at >= ?4 AND created_at < ?5
  AND (?6 = '[]' OR CASE WHEN json_valid(body) THEN NOT EXISTS (
      SELECT 1 FROM json_each(?6) AS f JOIN json_each(?7) AS s ON s.key = f.key
      WHERE records.body ->> f.value IS NOT s.value) END)
  AND number >= ?8 AND number < ?9
ORDER BY number DESC LIMIT ?10

-- name: list_records_in
-- Records of a flow in these states: the open ones along the index of what is due, the others along that of what rests.
SELECT @record
FROM records
WHERE number IN (
    SELECT number FROM records INDEXED BY records_due
    WHERE due IS NOT NULL AND +flow = ?1 AND state IN (SELECT value FROM json_each(?2))
    UNION ALL
    SELECT number FROM records INDEXED BY records_resting
    WHERE due IS NULL AND flow = ?1 AND state IN (SELECT value FROM json_each(?2)) AND number >= ?7 AND number < ?8)
  AND created_at >= ?3 AND created_at < ?4
  AND (?5 = '[]' OR CASE WHEN json_valid(body) THEN NOT EXISTS (
      SELECT 1 FROM json_each(?5) AS f JOIN json_each(?6) AS s ON s.key = f.key
      WHERE records.body ->> f.value IS NOT s.value) END)
  AND number >= ?7 AND number < ?8
ORDER BY number DESC LIMIT ?9

-- name: floor_records
-- For `list_records`: below a number, the n-th (counted from 0) of all flows.
SELECT number FROM records WHERE number < ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2

-- name: floor_records_of
-- For `list_records_of`: flow, owner, below, n.
SELECT number FROM records INDEXED BY records_owner WHERE flow = ?1 AND owner = ?2 AND number < ?3
ORDER BY number DESC LIMIT 1 OFFSET ?4

-- name: floor_records_in
-- For `list_records_in`: flow, states, below, n. Of the open ones all are looked at.
SELECT max((SELECT number FROM records INDEXED BY records_resting
            WHERE due IS NULL AND flow = ?1 AND state = w.value AND number < ?3 ORDER BY number DESC LIMIT 1 OFFSET ?4))
FROM json_each(?2) AS w

-- name: count_driven
-- How many records are driven, by flow and state, and since when the oldest of them is there.
SELECT flow, state, count(*), min(since) FROM records INDEXED BY records_due
WHERE due IS NOT NULL GROUP BY flow, state ORDER BY flow, state

-- name: count_resting
-- The same of those that no worker drives, in one state of one flow.
SELECT count(*), min(since) FROM records INDEXED BY records_resting WHERE due IS NULL AND flow = ?1 AND state = ?2

-- name: count_records
-- How many records are in each state of each flow, and since when the oldest of them is there. Reads them all.
SELECT flow, state, count(*), min(since) FROM records GROUP BY flow, state ORDER BY flow, state

-- name: count_open_of
-- How many records of an owner have not ended and are driven. Few are, and they have an index.
SELECT count(*) FROM records WHERE flow = ?1 AND owner = ?2 AND due IS NOT NULL

-- name: count_records_of
-- How many records of an owner there are, ended or not.
SELECT count(*) FROM records WHERE flow = ?1 AND owner = ?2
