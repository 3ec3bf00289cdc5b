-- SQLite's statements about high-water marks. The table's name and columns are from when only cores had any: `rail` is the
-- peer, `worker` is the writer (migration 0016 says why they stay).

-- name: batch_high_water
-- Raise a high-water mark, in the transaction of the transitions that rely on it.
INSERT INTO core_high_water (rail, worker, sequence, at) VALUES (?, ?, ?, ?)
ON CONFLICT (rail, worker) DO UPDATE SET sequence = excluded.sequence, at = excluded.at
WHERE excluded.sequence > sequence

-- name: forget_high_water
-- What was known of a peer's predecessor.
DELETE FROM core_high_water WHERE rail = ?

-- name: high_water
-- The highest sequence known of a peer.
SELECT coalesce(max(sequence), 0) FROM core_high_water WHERE rail = ?
