-- PostgreSQL's statements about high-water marks. The table's name and columns are from when only cores had any: `rail` is the
-- peer, `worker` is the writer (migration 0016 says why they stay).
-- Those of a batch are raised by bursar.raise_high_water_1.

-- name: forget_high_water
-- What was known of a peer's predecessor.
DELETE FROM bursar.core_high_water WHERE rail = $1

-- name: high_water
-- The highest sequence known of a peer.
SELECT coalesce(max(sequence), 0) FROM bursar.core_high_water WHERE rail = $1
