-- SQLite's statements of the engine. A delay is in microseconds from now; null: never due; -1: unchanged. A timer is in
-- microseconds since 1970; negative: so many from now; 0: none; null: unchanged. What is free text is read as bytes: one row that is not UTF-8 would fail the statement, and with it all other rows.

-- name: batch_record
-- A new record, in the transaction of its group.
INSERT INTO records (@new_records, attempt, since, created_at, updated_at) VALUES (:new_records, 0, :now, :now, :now)

-- name: batch_move
-- A compare-and-set, in the transaction of its group.
UPDATE records
SET @moves.changes, since = CASE WHEN state = :moves.state THEN since ELSE :now END, updated_at = :now
WHERE number = :moves.number AND version = :moves.expected_version

-- name: batch_transition
-- One row of history.
INSERT INTO transitions (@transitions, at) VALUES (:transitions, :now)

-- name: batch_signal
-- A signal that arrives; or, if it has arrived before, its consumption.
INSERT INTO signals (@signals, at) VALUES (:signals, :now)
ON CONFLICT (record, sender) DO UPDATE SET consumed = excluded.consumed
WHERE consumed IS NULL AND excluded.consumed > arrived AND arrived = excluded.arrived

-- name: signals_of
-- The signals that a record was sent, in the order in which they arrived.
SELECT @signal FROM signals WHERE record = ? ORDER BY arrived

-- name: batch_operation
-- What an operation was answered.
INSERT INTO outcomes (@operations, at) VALUES (:operations, :now)

-- name: operation
-- What an operation was answered before.
SELECT fingerprint, outcome, code, detail FROM outcomes WHERE scope = ? AND id = ? AND op = ?

-- name: operations_of
-- What the operations of a request were answered, in one scope.
SELECT op, fingerprint, outcome, code, detail FROM outcomes WHERE scope = ? AND id = ? ORDER BY op

-- name: batch_counter
-- How much of a limit is used up.
SELECT count, amount FROM counters WHERE key = ?

-- name: batch_counters
-- The same for several.
SELECT c.key, c.count, c.amount FROM json_each(?) AS w JOIN counters c ON c.key = w.value

-- name: batch_put_counter
-- How much of it is used up now.
INSERT INTO counters (@counters) VALUES (:counters)
ON CONFLICT (key) DO UPDATE SET count = excluded.count, amount = excluded.amount, count_max = excluded.count_max,
                                amount_max = excluded.amount_max

-- name: drop_counters
-- Buckets whose time is over.
DELETE FROM counters WHERE until < now_us() - ? RETURNING key

-- name: batch_versions
-- Where records stand.
SELECT r.number, r.version FROM json_each(?) AS w JOIN records r ON r.number = w.value

-- name: record
-- One record by its flow's id.
SELECT @record
FROM records WHERE flow = ? AND id = ?

-- name: record_by_number
-- One record by number.
SELECT @record
FROM records WHERE number = ?

-- name: records_by_number
-- Several records.
SELECT @record
FROM records WHERE number IN (SELECT value FROM json_each(?)) ORDER BY number

-- name: transitions_of
-- A record's history.
SELECT @transition FROM transitions WHERE record = ?
ORDER BY version

-- name: claim_due
-- Take records of these flows that are due: ours for the lease. The higher priority first; but an eighth as many of each
-- lower one too, so that those make progress however many higher ones there are. Due later than the cap allows counts as
-- due: a clock had jumped (L24). That is not so of timers, which may lie days ahead: one has fired when its time has come,
-- not before. Arguments: flows, how many, worker, lease, cap. By the indexes of what is due (from both ends) and of
-- timers, and not by that of flows (hence +flow), which has everything that ever ended.
UPDATE records SET due = now_us() + ?4, worker = ?3
WHERE number IN (
    SELECT number FROM (
        SELECT number FROM records
        WHERE priority IN (0, 1, 2) AND due <= now_us() AND +flow IN (SELECT value FROM json_each(?1))
        ORDER BY priority, due LIMIT ?2)
    UNION ALL
    SELECT number FROM (
        SELECT number FROM records
        WHERE priority = 1 AND due <= now_us() AND +flow IN (SELECT value FROM json_each(?1))
        ORDER BY due LIMIT (?2 + 7) / 8)
    UNION ALL
    SELECT number FROM (
        SELECT number FROM records
        WHERE priority = 2 AND due <= now_us() AND +flow IN (SELECT value FROM json_each(?1))
        ORDER BY due LIMIT (?2 + 7) / 8)
    UNION ALL
    SELECT number FROM (
        SELECT number FROM records
        WHERE priority IN (0, 1, 2) AND due > now_us() + ?5 AND +flow IN (SELECT value FROM json_each(?1))
        ORDER BY priority, due LIMIT ?2)
    UNION ALL
    SELECT number FROM (
        SELECT number FROM records
        WHERE timer <= now_us() AND worker = '' AND (due IS NULL OR due > now_us())
          AND +flow IN (SELECT value FROM json_each(?1))
        ORDER BY timer LIMIT ?2))
RETURNING @record

-- name: claim_all
-- At start: take all that are open and that no other worker drives, page by page; leased longer than any lease is not
-- driven: a clock was set back while no worker ran. Arguments as above, with the last number of the page before instead
-- of the cap.
UPDATE records SET due = now_us() + ?4, worker = ?3
WHERE number IN (
    SELECT number FROM records INDEXED BY records_due
    WHERE due IS NOT NULL AND (due <= now_us() OR worker IN ('', ?3) OR due > now_us() + ?4 + 1000000) AND number > ?5
      AND +flow IN (SELECT value FROM json_each(?1))
    ORDER BY number LIMIT ?2)
RETURNING @record

-- name: wake_held
-- Due now, those of these that are still the worker's: what held them up is over. Arguments: numbers, worker.
UPDATE records SET due = now_us()
WHERE number IN (SELECT value FROM json_each(?1)) AND worker = ?2 AND due IS NOT NULL RETURNING number

-- name: look_again
-- After so long, or not before a signal comes; unless it has moved meanwhile. Arguments: number, version, delay.
UPDATE records SET due = now_us() + ?3, worker = '' WHERE number = ?1 AND version = ?2

-- name: raise_alert
-- An alert; once per record and reason until it is acknowledged.
INSERT INTO alerts (record, reason, severity, message, raised_at) VALUES (?1, ?2, ?3, ?4, now_us())
ON CONFLICT (record, reason) DO UPDATE
SET severity = excluded.severity, message = excluded.message, raised_at = excluded.raised_at, delivered_at = NULL,
    acknowledged_at = NULL, acknowledged_by = ''
WHERE acknowledged_at IS NOT NULL
RETURNING record

-- name: raise_alert_since
-- The same, but not again for what was raised less than so long ago. Arguments as above, and how long.
INSERT INTO alerts (record, reason, severity, message, raised_at) VALUES (?1, ?2, ?3, ?4, now_us())
ON CONFLICT (record, reason) DO UPDATE
SET severity = excluded.severity, message = excluded.message, raised_at = excluded.raised_at, delivered_at = NULL,
    acknowledged_at = NULL, acknowledged_by = ''
WHERE acknowledged_at IS NOT NULL AND raised_at < now_us() - ?5
RETURNING record

-- name: clock_now
-- The clock that due times are in: this machine's.
SELECT now_us()

-- name: set_back_records
-- The clock was set back by so much: what is due in the future is due as much earlier (L24).
UPDATE records SET due = max(now_us(), due - ?1) WHERE due > now_us() RETURNING number

-- name: set_back_deliveries
-- The same for alerts to be delivered to a sink.
UPDATE alert_deliveries SET due = max(now_us(), due - ?1) WHERE delivered_at IS NULL AND due > now_us()

-- name: set_back_forced
-- The same for forced calls whose rail is asked.
UPDATE forced_calls SET due = max(now_us(), due - ?1) WHERE due > now_us()

-- name: alerts_open
-- Alerts that are not acknowledged.
SELECT @alert FROM alerts
WHERE acknowledged_at IS NULL ORDER BY raised_at, record, reason LIMIT ?

-- name: alerts_untold
-- Alerts to deliver to this sink now: fewest attempts first. Due later than any
-- back-off here counts as due: a clock had jumped (L24). Arguments: sink, how many.
SELECT @a.alert
FROM alerts a LEFT JOIN alert_deliveries d
  ON d.record = a.record AND d.reason = a.reason AND d.sink = ?1 AND d.raised_at = a.raised_at
WHERE a.acknowledged_at IS NULL AND (d.record IS NULL OR (d.delivered_at IS NULL
  AND (d.due <= now_us() OR d.due > now_us() + 600000000)))
ORDER BY coalesce(d.attempts, 0), a.raised_at, a.record, a.reason LIMIT ?2

-- name: claim_delivery
-- Claim a delivery to a sink, unless another process has claimed it. Arguments: record, reason, raised, sink, lease.
INSERT INTO alert_deliveries (record, reason, sink, raised_at, attempts, due)
SELECT record, reason, ?4, raised_at, 1, now_us() + ?5 FROM alerts
WHERE record = ?1 AND reason = ?2 AND raised_at = ?3 AND acknowledged_at IS NULL
ON CONFLICT (record, reason, sink) DO UPDATE
SET attempts = CASE WHEN raised_at = excluded.raised_at THEN attempts + 1 ELSE 1 END, raised_at = excluded.raised_at,
    due = excluded.due, delivered_at = NULL
WHERE raised_at <> excluded.raised_at OR (delivered_at IS NULL
  AND (due <= now_us() OR due > now_us() + 600000000))
RETURNING attempts

-- name: end_delivery
-- It was delivered; or why not, and when to try again. Arguments: record, reason, raised, sink, error, delay.
UPDATE alert_deliveries SET delivered_at = CASE WHEN ?5 = '' THEN now_us() END, error = ?5, due = now_us() + ?6
WHERE record = ?1 AND reason = ?2 AND raised_at = ?3 AND sink = ?4

-- name: deliver_alert
-- It has been delivered to a sink for the first time.
UPDATE alerts SET delivered_at = now_us()
WHERE record = ? AND reason = ? AND raised_at = ? AND delivered_at IS NULL

-- name: acknowledge_alert
-- A person has seen it.
UPDATE alerts SET acknowledged_at = now_us(), acknowledged_by = ?3 WHERE record = ?1 AND reason = ?2
  AND acknowledged_at IS NULL RETURNING record

-- name: beat
-- A small durable write: this process is here, and the database takes what it writes.
INSERT INTO heartbeats (worker, at) VALUES (?, now_us()) ON CONFLICT (worker) DO UPDATE SET at = excluded.at
