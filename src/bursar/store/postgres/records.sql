-- PostgreSQL's statements of the engine. Moves, operations and limits are written by bursar.write_records_2.

-- name: batch_read_records
-- What a pessimistic batch reads: versions of records (1), records that exist (2), operations answered (3), limits (4).
SELECT 1::smallint AS what, 0::bigint AS place, r.number AS a, r.version::bigint AS b, NULL::text[] AS t
FROM bursar.records r WHERE r.number = ANY ($1::text::bigint[])
UNION ALL
SELECT 2, w.place, 0, 0, NULL
FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS w (flow, id, place)
JOIN bursar.records r ON r.flow = w.flow AND r.id = w.id
UNION ALL
SELECT 3, w.place, 0, 0, ARRAY[o.fingerprint, o.outcome, o.code, o.detail::text]
FROM unnest($4::text[], $5::text[], $6::text[]) WITH ORDINALITY AS w (scope, id, op, place)
JOIN bursar.outcomes o ON o.scope = w.scope AND o.id = w.id AND o.op = w.op
UNION ALL
SELECT 4, 0, c.count, 0, ARRAY[c.key, c.amount::text] FROM bursar.counters c WHERE c.key = ANY ($7::text[])

-- name: batch_numbers
-- Numbers for new records, fetched ahead.
SELECT nextval('bursar.numbers') FROM generate_series(1, $1::bigint)

-- name: batch_write_records
-- The records' part of a batch by itself, under these rules if they matter (not 0); and numbers for the next one. A name
-- after @ stands for all columns of that kind of row (columns.py).
SELECT bursar.share_rules_1(@generation:bigint),
    bursar.write_records_2(@operations, @counters, @new_records, @moves, @transitions),
    bursar.write_flow_rows_1(@flow_rows),
    bursar.write_signals_1(@signals),
    bursar.raise_high_water_1(@high_water),
    ARRAY(SELECT nextval('bursar.numbers')::text FROM generate_series(1, @numbers_ahead:bigint))

-- name: batch_write
-- A batch of entries and records: first the ledger's part, then the records'; and numbers for the next one.
SELECT bursar.take_turn_1(),
    bursar.write_group_1(@generation:bigint, (SELECT epoch FROM bursar.clock_epoch), @envelopes, @postings, @spends,
        @spent_live, @account_history, @guarded, @cached_balances,
        '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'),
    bursar.write_holds_1(@holds),
    bursar.write_records_2(@operations, @counters, @new_records, @moves, @transitions),
    bursar.write_flow_rows_1(@flow_rows),
    bursar.write_signals_1(@signals),
    bursar.raise_high_water_1(@high_water),
    ARRAY(SELECT nextval('bursar.numbers')::text FROM generate_series(1, @numbers_ahead:bigint))

-- name: operation
-- What an operation was answered before.
SELECT fingerprint, outcome, code, detail::text FROM bursar.outcomes WHERE scope = $1 AND id = $2 AND op = $3

-- name: operations_of
-- What the operations of a request were answered, in one scope.
SELECT op, fingerprint, outcome, code, detail::text FROM bursar.outcomes WHERE scope = $1 AND id = $2 ORDER BY op

-- name: drop_counters
-- Buckets whose time is over.
DELETE FROM bursar.counters WHERE until < now() - $1::bigint * interval '1 microsecond' RETURNING key

-- name: record
-- One record by its flow's id.
SELECT @record
FROM bursar.records WHERE flow = $1 AND id = $2

-- name: record_by_number
-- One record by number.
SELECT @record
FROM bursar.records WHERE number = $1

-- name: records_by_number
-- Several records.
SELECT @record
FROM bursar.records WHERE number = ANY ($1::text::bigint[]) ORDER BY number

-- name: transitions_of
-- A record's history.
SELECT @transition
FROM bursar.transitions WHERE record = $1 ORDER BY version

-- name: claim_due
-- Take records of these flows that are due: ours for the lease. The higher priority first; but an eighth as many of each
-- lower one too, so that those make progress however many higher ones there are. Due later than the cap allows counts as
-- due: a clock had jumped (L24). That is not so of timers, which may lie days ahead: one has fired when its time has come,
-- not before. Arguments: flows, how many, worker, lease, cap. By the indexes of what is due (from both ends) and of
-- timers, and not by that of flows (hence flow || ''), which has everything that ever ended.
WITH high AS MATERIALIZED (  -- once: run again as part of a join, it would lock more than it may
    SELECT number FROM bursar.records WHERE priority = 0 AND due <= now() AND flow || '' = ANY ($1::text[])
    ORDER BY due LIMIT $2 FOR UPDATE SKIP LOCKED),
normal AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE priority = 1 AND due <= now() AND flow || '' = ANY ($1::text[])
    ORDER BY due LIMIT greatest($2 - (SELECT count(*) FROM high), ($2 + 7) / 8) FOR UPDATE SKIP LOCKED),
low AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE priority = 2 AND due <= now() AND flow || '' = ANY ($1::text[])
    ORDER BY due LIMIT greatest($2 - (SELECT count(*) FROM high) - (SELECT count(*) FROM normal), ($2 + 7) / 8)
    FOR UPDATE SKIP LOCKED),
far AS MATERIALIZED (
    SELECT number FROM bursar.records
    WHERE priority = ANY ('{0,1,2}'::smallint[]) AND due > now() + $5::bigint * interval '1 microsecond'
      AND flow || '' = ANY ($1::text[])
    ORDER BY priority, due LIMIT $2 FOR UPDATE SKIP LOCKED),
fired AS MATERIALIZED (  -- unless another worker has just claimed it
    SELECT number FROM bursar.records
    WHERE timer <= now() AND worker = '' AND coalesce(due, 'infinity') > now() AND flow || '' = ANY ($1::text[])
    ORDER BY timer LIMIT $2 FOR UPDATE SKIP LOCKED),
found AS (
    SELECT number FROM high UNION ALL SELECT number FROM normal UNION ALL SELECT number FROM low
    UNION ALL SELECT number FROM far UNION ALL SELECT number FROM fired)
UPDATE bursar.records r SET due = now() + $4::bigint * interval '1 microsecond', worker = $3
FROM found WHERE r.number = found.number
RETURNING @r.record

-- name: claim_all
-- At start: take all that are open and that no other worker drives, page by page; leased longer than any lease is not
-- driven: a clock was set back while no worker ran. Arguments as above, with the last number of the page before instead
-- of the cap.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records
    WHERE due IS NOT NULL AND number > $5 AND flow || '' = ANY ($1::text[])
      AND (due <= now() OR worker IN ('', $3) OR due > now() + ($4::bigint + 1000000) * interval '1 microsecond')
    ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = now() + $4::bigint * interval '1 microsecond', worker = $3
FROM found WHERE r.number = found.number
RETURNING @r.record

-- name: wake_held
-- Due now, those of these that are still the worker's: what held them up is over. A transaction that is moving one
-- needs no waking of it. Arguments: numbers, worker.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE number = ANY ($1::text::bigint[]) AND worker = $2 AND due IS NOT NULL
    ORDER BY number FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = now() FROM found WHERE r.number = found.number RETURNING r.number

-- name: look_again
-- After so long, or not before a signal comes; those that have moved meanwhile, not. One that another transaction is
-- moving is not waited for: it will have another version. Arguments: numbers, versions, delays.
WITH looked AS MATERIALIZED (
    SELECT r.number, l.delay FROM bursar.records r
    JOIN unnest($1::text::bigint[], $2::text::integer[], $3::text::bigint[]) AS l (number, version, delay)
        ON r.number = l.number AND r.version = l.version
    ORDER BY r.number FOR UPDATE OF r SKIP LOCKED)
UPDATE bursar.records r SET due = now() + looked.delay * interval '1 microsecond', worker = ''
FROM looked WHERE r.number = looked.number

-- name: signals_of
-- The signals that a record was sent, in the order in which they arrived.
SELECT @signal FROM bursar.signals WHERE record = $1 ORDER BY arrived

-- name: raise_alert
-- An alert; once per record and reason until it is acknowledged.
INSERT INTO bursar.alerts AS a (record, reason, severity, message) VALUES ($1, $2, $3, $4)
ON CONFLICT (record, reason) DO UPDATE
SET severity = excluded.severity, message = excluded.message, raised_at = now(), delivered_at = NULL,
    acknowledged_at = NULL, acknowledged_by = ''
WHERE a.acknowledged_at IS NOT NULL
RETURNING record

-- name: raise_alert_since
-- The same, but not again for what was raised less than so long ago. Arguments as above, and how long.
INSERT INTO bursar.alerts AS a (record, reason, severity, message) VALUES ($1, $2, $3, $4)
ON CONFLICT (record, reason) DO UPDATE
SET severity = excluded.severity, message = excluded.message, raised_at = now(), delivered_at = NULL,
    acknowledged_at = NULL, acknowledged_by = ''
WHERE a.acknowledged_at IS NOT NULL AND a.raised_at < now() - $5::bigint * interval '1 microsecond'
RETURNING record

-- name: clock_now
-- The clock that due times are in.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: set_back_records
-- The clock was set back by so much: what is due in the future is due as much earlier (L24). A transaction that is
-- moving one writes a new due time.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE due > now() ORDER BY number FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = greatest(now(), due - $1::bigint * interval '1 microsecond')
FROM found WHERE r.number = found.number RETURNING r.number

-- name: set_back_deliveries
-- The same for alerts to be delivered to a sink.
UPDATE bursar.alert_deliveries SET due = greatest(now(), due - $1::bigint * interval '1 microsecond')
WHERE delivered_at IS NULL AND due > now()

-- name: set_back_forced
-- The same for forced calls whose rail is asked.
UPDATE bursar.forced_calls SET due = greatest(now(), due - $1::bigint * interval '1 microsecond') WHERE due > now()

-- name: alerts_open
-- Alerts that are not acknowledged.
SELECT @alert
FROM bursar.alerts WHERE acknowledged_at IS NULL
ORDER BY raised_at, record, reason LIMIT $1

-- name: alerts_untold
-- Alerts to deliver to this sink now: fewest attempts first. Due later than any
-- back-off here counts as due: a clock had jumped (L24). Arguments: sink, how many.
SELECT @a.alert
FROM bursar.alerts a LEFT JOIN bursar.alert_deliveries d
  ON d.record = a.record AND d.reason = a.reason AND d.sink = $1 AND d.raised_at = a.raised_at
WHERE a.acknowledged_at IS NULL AND (d.record IS NULL OR (d.delivered_at IS NULL
  AND (d.due <= now() OR d.due > now() + interval '10 minutes')))
ORDER BY coalesce(d.attempts, 0), a.raised_at, a.record, a.reason LIMIT $2

-- name: claim_delivery
-- Claim a delivery to a sink, unless another process has claimed it. Arguments: record, reason, raised, sink, lease.
INSERT INTO bursar.alert_deliveries AS d (record, reason, sink, raised_at, attempts, due)
SELECT record, reason, $4, raised_at, 1, now() + $5::bigint * interval '1 microsecond' FROM bursar.alerts
WHERE record = $1 AND reason = $2 AND (extract(epoch FROM raised_at) * 1000000)::bigint = $3
  AND acknowledged_at IS NULL
ON CONFLICT (record, reason, sink) DO UPDATE
SET attempts = CASE WHEN d.raised_at = excluded.raised_at THEN d.attempts + 1 ELSE 1 END,
    raised_at = excluded.raised_at, due = excluded.due, delivered_at = NULL
WHERE d.raised_at <> excluded.raised_at OR (d.delivered_at IS NULL
  AND (d.due <= now() OR d.due > now() + interval '10 minutes'))
RETURNING attempts

-- name: end_delivery
-- It was delivered; or why not, and when to try again. Arguments: record, reason, raised, sink, error, delay.
UPDATE bursar.alert_deliveries
SET delivered_at = CASE WHEN $5 = '' THEN now() END, error = $5, due = now() + $6::bigint * interval '1 microsecond'
WHERE record = $1 AND reason = $2 AND (extract(epoch FROM raised_at) * 1000000)::bigint = $3 AND sink = $4

-- name: deliver_alert
-- It has been delivered to a sink for the first time.
UPDATE bursar.alerts SET delivered_at = now() WHERE record = $1 AND reason = $2
  AND (extract(epoch FROM raised_at) * 1000000)::bigint = $3 AND delivered_at IS NULL

-- name: acknowledge_alert
-- A person has seen it.
UPDATE bursar.alerts SET acknowledged_at = now(), acknowledged_by = $3 WHERE record = $1 AND reason = $2
  AND acknowledged_at IS NULL RETURNING record

-- name: beat
-- A small durable write: this process is here, and the database takes what it writes.
INSERT INTO bursar.heartbeats (worker) SELECT * FROM unnest($1::text[]) ON CONFLICT (worker) DO UPDATE SET at = now()

-- name: hanging_commits
-- How many of our role's commits wait for a synchronous standby, for longer than so many microseconds.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND wait_event = 'SyncRep'
    AND query_start < clock_timestamp() - $1::bigint * interval '1 microsecond'
