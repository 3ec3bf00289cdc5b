-- PostgreSQL's statements of the engine. Moves, operations and limits are written by bursar.write_records_1.

-- name: group_look
-- What a wary group wants to know: versions of records (1), records that exist (2), operations answered (3), limits (4).
SELECT 1::smallint AS what, 0::bigint AS place, r.number AS a, r.version::bigint AS b, NULL::text[] AS t
FROM bursar.records r WHERE r.number = ANY ($1::bigint[])
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
-- The records' part of a group by itself.
SELECT bursar.write_records_1($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
    $8::text[], $9::bigint[],
    $10::text[], $11::bigint[], $12::text[], $13::bigint[], $14::bigint[], $15::text[], $16::text[], $17::text[],
    $18::text[], $19::integer[], $20::bigint[], $21::bigint[], $22::text[], $23::text[], $24::text[],
    $25::bigint[], $26::integer[], $27::text[], $28::integer[], $29::integer[], $30::bigint[], $31::bigint[],
    $32::text[], $33::text[], $34::text[], $35::bigint[], $36::integer[], $37::text[], $38::text[], $39::text[],
    $40::integer[], $41::text[], $42::text[])

-- name: group_write_all
-- A group of entries and records together: first the ledger's part, then the records'.
SELECT bursar.write_group_1($1::bigint, (SELECT epoch FROM bursar.clock_epoch), $2::bigint[], $3::bytea[],
    $4::text[], $5::text[], $6::integer[], $7::smallint[], $8::bigint[], $9::bytea[], $10::bytea[],
    $11::bytea[], $12::text[], $13::bigint[], $14::bigint[], $15::integer[], $16::text[], $17::boolean[],
    $18::bigint[], $19::bigint[], $20::bigint[], $21::bigint[], $22::bigint[], $23::bigint[], $24::integer[],
    $25::bigint[], $26::text[], $27::bigint[], $28::integer[], $29::bigint[], $30::text[], $31::bigint[],
    $32::bigint[], $33::integer[], $34::text[], $35::text[], $36::bigint[], $37::text[], $38::text[],
    $39::bigint[]),
  bursar.write_records_1($40::text[], $41::text[], $42::text[], $43::text[], $44::text[], $45::text[], $46::text[],
    $47::text[],
    $48::bigint[], $49::text[], $50::bigint[], $51::text[], $52::bigint[], $53::bigint[], $54::text[],
    $55::text[], $56::text[], $57::text[], $58::integer[], $59::bigint[], $60::bigint[], $61::text[], $62::text[],
    $63::text[], $64::bigint[], $65::integer[], $66::text[], $67::integer[], $68::integer[], $69::bigint[],
    $70::bigint[], $71::text[], $72::text[], $73::text[], $74::bigint[], $75::integer[], $76::text[], $77::text[],
    $78::text[], $79::integer[], $80::text[], $81::text[])

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
-- At start: take all that are open and that nobody else drives, page by page. Arguments as above, with the last number
-- of the page before instead of the cap.
WITH found AS MATERIALIZED (
    SELECT number FROM bursar.records
    WHERE due IS NOT NULL AND (due <= now() OR worker IN ('', $3)) AND number > $5 AND flow || '' = ANY ($1::text[])
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

-- name: put_pause
-- Switch a flow or a rail off.
INSERT INTO bursar.pauses (kind, name, actor, reason)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) ON CONFLICT DO NOTHING

-- name: drop_pause
-- And on again.
DELETE FROM bursar.pauses WHERE kind = $1 AND name = $2 RETURNING name

-- name: pauses
-- What is switched off.
SELECT kind, name, actor, reason, (extract(epoch FROM at) * 1000000)::bigint FROM bursar.pauses ORDER BY kind, name
