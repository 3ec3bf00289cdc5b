-- PostgreSQL's statements of the engine. Moves, operations and limits are written by bursar.write_records_1.

-- name: group_look
-- What a wary group wants to know: versions of records (1), records that exist (2), operations answered (3), limits (4).
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

-- name: group_numbers
-- Numbers for new records, fetched ahead.
SELECT nextval('bursar.numbers') FROM generate_series(1, $1::bigint)

-- name: group_records
-- The records' part of a group by itself, under these rules if they matter (not 0); and numbers for the next one.
SELECT bursar.share_rules_1($44::bigint), bursar.write_records_1((string_to_array($1::text, E'\x1f'))[2:], (string_to_array($2::text, E'\x1f'))[2:],
    (string_to_array($3::text, E'\x1f'))[2:], (string_to_array($4::text, E'\x1f'))[2:], (string_to_array($5::text,
    E'\x1f'))[2:], (string_to_array($6::text, E'\x1f'))[2:], (string_to_array($7::text, E'\x1f'))[2:],
    (string_to_array($8::text, E'\x1f'))[2:], $9::text::bigint[], $10::text::text[], $11::text::bigint[],
    $12::text::text[], $13::text::bigint[], $14::text::bigint[], (string_to_array($15::text, E'\x1f'))[2:],
    (string_to_array($16::text, E'\x1f'))[2:], (string_to_array($17::text, E'\x1f'))[2:], (string_to_array($18::text,
    E'\x1f'))[2:], $19::text::integer[], $20::text::bigint[], $21::text::bigint[], (string_to_array($22::text,
    E'\x1f'))[2:], (string_to_array($23::text, E'\x1f'))[2:], (string_to_array($24::text, E'\x1f'))[2:],
    $25::text::bigint[], $26::text::integer[], (string_to_array($27::text, E'\x1f'))[2:], $28::text::integer[],
    $29::text::integer[], $30::text::bigint[], $31::text::bigint[], (string_to_array($32::text, E'\x1f'))[2:],
    (string_to_array($33::text, E'\x1f', E'\x1e'))[2:], (string_to_array($34::text, E'\x1f'))[2:],
    $35::text::bigint[], $36::text::integer[], (string_to_array($37::text, E'\x1f'))[2:], (string_to_array($38::text,
    E'\x1f'))[2:], (string_to_array($39::text, E'\x1f'))[2:], $40::text::integer[], (string_to_array($41::text,
    E'\x1f'))[2:], (string_to_array($42::text, E'\x1f'))[2:]),
    bursar.raise_high_water_1((string_to_array($45::text, E'\x1f'))[2:], (string_to_array($46::text,
    E'\x1f'))[2:], $47::text::bigint[]),
    ARRAY(SELECT nextval('bursar.numbers')::text FROM generate_series(1, $43::bigint))

-- name: group_write_all
-- A group of entries and records together: first the ledger's part, then the records'; and numbers for the next one.
SELECT bursar.take_turn_1(), bursar.write_group_1($1::bigint, (SELECT epoch FROM bursar.clock_epoch), $2::text::bigint[], $3::text::bytea[],
    (string_to_array($4::text, E'\x1f'))[2:], (string_to_array($5::text, E'\x1f'))[2:], $6::text::integer[],
    $7::text::smallint[], $8::text::bigint[], $9::text::bytea[], $10::text::bytea[], $11::text::bytea[],
    (string_to_array($12::text, E'\x1f'))[2:], $13::text::bigint[], $14::text::bigint[],
    $15::text::integer[], $16::text::text[], $17::text::boolean[], $18::text::bigint[],
    $19::text::bigint[], $20::text::bigint[], $21::text::bigint[],
    $22::text::bigint[], $23::text::bigint[], $24::text::integer[], $25::text::bigint[], $26::text::text[],
    $27::text::bigint[], $28::text::integer[], $29::text::bigint[], $30::text::text[], '{}', '{}', '{}', '{}', '{}',
    '{}', '{}', '{}', '{}'),
    bursar.write_holds_1($31::text::bigint[], $32::text::bigint[], $33::text::integer[], $34::text::text[],
    $35::text::text[], $36::text::bigint[], (string_to_array($37::text, E'\x1f'))[2:],
    (string_to_array($38::text, E'\x1f'))[2:], $39::text::bigint[], $40::text::bigint[]),
    bursar.write_records_1((string_to_array($41::text, E'\x1f'))[2:], (string_to_array($42::text, E'\x1f'))[2:],
    (string_to_array($43::text, E'\x1f'))[2:], (string_to_array($44::text, E'\x1f'))[2:], (string_to_array($45::text,
    E'\x1f'))[2:], (string_to_array($46::text, E'\x1f'))[2:], (string_to_array($47::text, E'\x1f'))[2:],
    (string_to_array($48::text, E'\x1f'))[2:], $49::text::bigint[], $50::text::text[], $51::text::bigint[],
    $52::text::text[], $53::text::bigint[], $54::text::bigint[], (string_to_array($55::text, E'\x1f'))[2:],
    (string_to_array($56::text, E'\x1f'))[2:], (string_to_array($57::text, E'\x1f'))[2:], (string_to_array($58::text,
    E'\x1f'))[2:], $59::text::integer[], $60::text::bigint[], $61::text::bigint[], (string_to_array($62::text,
    E'\x1f'))[2:], (string_to_array($63::text, E'\x1f'))[2:], (string_to_array($64::text, E'\x1f'))[2:],
    $65::text::bigint[], $66::text::integer[], (string_to_array($67::text, E'\x1f'))[2:], $68::text::integer[],
    $69::text::integer[], $70::text::bigint[], $71::text::bigint[], (string_to_array($72::text, E'\x1f'))[2:],
    (string_to_array($73::text, E'\x1f', E'\x1e'))[2:], (string_to_array($74::text, E'\x1f'))[2:],
    $75::text::bigint[], $76::text::integer[], (string_to_array($77::text, E'\x1f'))[2:], (string_to_array($78::text,
    E'\x1f'))[2:], (string_to_array($79::text, E'\x1f'))[2:], $80::text::integer[], (string_to_array($81::text,
    E'\x1f'))[2:], (string_to_array($82::text, E'\x1f'))[2:]),
    bursar.raise_high_water_1((string_to_array($84::text, E'\x1f'))[2:], (string_to_array($85::text,
    E'\x1f'))[2:], $86::text::bigint[]),
    ARRAY(SELECT nextval('bursar.numbers')::text FROM generate_series(1, $83::bigint))

-- name: outcome
-- What an operation was answered before.
SELECT fingerprint, outcome, code, detail::text FROM bursar.outcomes WHERE scope = $1 AND id = $2 AND op = $3

-- name: outcomes_of
-- What the operations of a request were answered, in one scope.
SELECT op, fingerprint, outcome, code, detail::text FROM bursar.outcomes WHERE scope = $1 AND id = $2 ORDER BY op

-- name: drop_counters
-- Buckets whose time is over.
DELETE FROM bursar.counters WHERE until < now() - $1::bigint * interval '1 microsecond' RETURNING key

-- name: record
-- One record by its flow's id.
SELECT number, flow, id, owner, state, version, attempt, transit, (extract(epoch FROM due) * 1000000)::bigint,
    worker, body::text, error, (extract(epoch FROM since) * 1000000)::bigint,
    (extract(epoch FROM created_at) * 1000000)::bigint, (extract(epoch FROM updated_at) * 1000000)::bigint
FROM bursar.records WHERE flow = $1 AND id = $2

-- name: record_by_number
-- One record by number.
SELECT number, flow, id, owner, state, version, attempt, transit, (extract(epoch FROM due) * 1000000)::bigint,
    worker, body::text, error, (extract(epoch FROM since) * 1000000)::bigint,
    (extract(epoch FROM created_at) * 1000000)::bigint, (extract(epoch FROM updated_at) * 1000000)::bigint
FROM bursar.records WHERE number = $1

-- name: records_by_number
-- Several records.
SELECT number, flow, id, owner, state, version, attempt, transit, (extract(epoch FROM due) * 1000000)::bigint,
    worker, body::text, error, (extract(epoch FROM since) * 1000000)::bigint,
    (extract(epoch FROM created_at) * 1000000)::bigint, (extract(epoch FROM updated_at) * 1000000)::bigint
FROM bursar.records WHERE number = ANY ($1::text::bigint[]) ORDER BY number

-- name: transitions_of
-- A record's history.
SELECT record, version, source, event, target, attempt, actor, evidence::text,
    (extract(epoch FROM at) * 1000000)::bigint
FROM bursar.transitions WHERE record = $1 ORDER BY version

-- name: claim_due
-- Take records of these flows that are due: ours for the lease. Due later than the cap allows counts as due: a clock had
-- jumped (L24). Arguments: flows, how many, worker, lease, cap. By the index of what is due, from both its ends, and
-- not by that of flows (hence flow || ''), which has everything that ever ended.
WITH late AS MATERIALIZED (  -- once: run again as part of a join, it would lock more than it may
    SELECT number FROM bursar.records WHERE due <= now() AND flow || '' = ANY ($1::text[])
    ORDER BY due LIMIT $2 FOR UPDATE SKIP LOCKED),
far AS MATERIALIZED (
    SELECT number FROM bursar.records
    WHERE due > now() + $5::bigint * interval '1 microsecond' AND flow || '' = ANY ($1::text[])
    ORDER BY due LIMIT $2 FOR UPDATE SKIP LOCKED),
found AS (SELECT number FROM late UNION ALL SELECT number FROM far LIMIT $2)
UPDATE bursar.records r SET due = now() + $4::bigint * interval '1 microsecond', worker = $3
FROM found WHERE r.number = found.number
RETURNING r.number, r.flow, r.id, r.owner, r.state, r.version, r.attempt, r.transit,
    (extract(epoch FROM r.due) * 1000000)::bigint, r.worker, r.body::text, r.error,
    (extract(epoch FROM r.since) * 1000000)::bigint, (extract(epoch FROM r.created_at) * 1000000)::bigint,
    (extract(epoch FROM r.updated_at) * 1000000)::bigint

-- name: claim_all
-- At start: take all that are open and that nobody else drives, page by page; leased for longer than any lease is not
-- driven: a clock was set back while nobody looked. Arguments as above, with the last number of the page before instead
-- of the cap.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records
    WHERE due IS NOT NULL AND number > $5 AND flow || '' = ANY ($1::text[])
      AND (due <= now() OR worker IN ('', $3) OR due > now() + ($4::bigint + 1000000) * interval '1 microsecond')
    ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = now() + $4::bigint * interval '1 microsecond', worker = $3
FROM found WHERE r.number = found.number
RETURNING r.number, r.flow, r.id, r.owner, r.state, r.version, r.attempt, r.transit,
    (extract(epoch FROM r.due) * 1000000)::bigint, r.worker, r.body::text, r.error,
    (extract(epoch FROM r.since) * 1000000)::bigint, (extract(epoch FROM r.created_at) * 1000000)::bigint,
    (extract(epoch FROM r.updated_at) * 1000000)::bigint

-- name: wake_record
-- Due now, whatever it was: a person says so. Nothing for a record that waits for nobody.
UPDATE bursar.records SET due = now(), worker = '' WHERE flow = $1 AND id = $2 AND due IS NOT NULL RETURNING number

-- name: wake_held
-- Due now, those of these that are still the worker's: what held them up is over. Whoever is just moving one needs no
-- waking of it. Arguments: numbers, worker.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE number = ANY ($1::text::bigint[]) AND worker = $2 AND due IS NOT NULL
    ORDER BY number FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = now() FROM found WHERE r.number = found.number RETURNING r.number

-- name: look_again
-- After so long, or not before somebody speaks; unless it has moved meanwhile. Arguments: number, version, delay.
UPDATE bursar.records SET due = now() + $3::bigint * interval '1 microsecond', worker = ''
WHERE number = $1 AND version = $2

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
-- The clock was set back by so much: what is due in the future is due as much earlier (L24). Whoever is just moving one
-- writes a new due time.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records WHERE due > now() ORDER BY number FOR UPDATE SKIP LOCKED)
UPDATE bursar.records r SET due = greatest(now(), due - $1::bigint * interval '1 microsecond')
FROM found WHERE r.number = found.number RETURNING r.number

-- name: set_back_deliveries
-- The same for alerts that a sink has to be told.
UPDATE bursar.alert_deliveries SET due = greatest(now(), due - $1::bigint * interval '1 microsecond')
WHERE delivered_at IS NULL AND due > now()

-- name: set_back_forced
-- The same for forced calls whose rail is asked.
UPDATE bursar.forced_calls SET due = greatest(now(), due - $1::bigint * interval '1 microsecond') WHERE due > now()

-- name: alerts_open
-- Alerts that nobody has acknowledged.
SELECT record, reason, severity, message, (extract(epoch FROM raised_at) * 1000000)::bigint,
    (extract(epoch FROM delivered_at) * 1000000)::bigint, (extract(epoch FROM acknowledged_at) * 1000000)::bigint,
    acknowledged_by
FROM bursar.alerts WHERE acknowledged_at IS NULL
ORDER BY raised_at, record, reason LIMIT $1

-- name: alerts_untold
-- Alerts that this sink has to be told now: those it was never told first. Due later than any
-- back-off here counts as due: a clock had jumped (L24). Arguments: sink, how many.
SELECT a.record, a.reason, a.severity, a.message, (extract(epoch FROM a.raised_at) * 1000000)::bigint,
    (extract(epoch FROM a.delivered_at) * 1000000)::bigint, (extract(epoch FROM a.acknowledged_at) * 1000000)::bigint,
    a.acknowledged_by
FROM bursar.alerts a LEFT JOIN bursar.alert_deliveries d
  ON d.record = a.record AND d.reason = a.reason AND d.sink = $1 AND d.raised_at = a.raised_at
WHERE a.acknowledged_at IS NULL AND (d.record IS NULL OR (d.delivered_at IS NULL
  AND (d.due <= now() OR d.due > now() + interval '10 minutes')))
ORDER BY coalesce(d.attempts, 0), a.raised_at, a.record, a.reason LIMIT $2

-- name: claim_delivery
-- Tell a sink of an alert, unless another process is just doing so. Arguments: record, reason, raised, sink, lease.
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
-- It was told; or why not, and when to try again. Arguments: record, reason, raised, sink, error, delay.
UPDATE bursar.alert_deliveries
SET delivered_at = CASE WHEN $5 = '' THEN now() END, error = $5, due = now() + $6::bigint * interval '1 microsecond'
WHERE record = $1 AND reason = $2 AND (extract(epoch FROM raised_at) * 1000000)::bigint = $3 AND sink = $4

-- name: deliver_alert
-- Somebody has been told of it for the first time.
UPDATE bursar.alerts SET delivered_at = now() WHERE record = $1 AND reason = $2
  AND (extract(epoch FROM raised_at) * 1000000)::bigint = $3 AND delivered_at IS NULL

-- name: acknowledge_alert
-- A person has seen it.
UPDATE bursar.alerts SET acknowledged_at = now(), acknowledged_by = $3 WHERE record = $1 AND reason = $2
  AND acknowledged_at IS NULL RETURNING record

-- name: beat
-- A small durable write: this process is here, and the database takes what it writes.
INSERT INTO bursar.heartbeats (worker) SELECT * FROM unnest($1::text[]) ON CONFLICT (worker) DO UPDATE SET at = now()

-- name: group_hanging
-- How many of our role's commits wait for a synchronous standby, for longer than so many microseconds.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND wait_event = 'SyncRep'
    AND query_start < clock_timestamp() - $1::bigint * interval '1 microsecond'
