-- Deliveries of an alert: each sink (log, webhook, command) by itself, so that one that is down repeats no other.

CREATE TABLE alert_deliveries (
    record       INTEGER NOT NULL,
    reason       TEXT NOT NULL,
    sink         TEXT NOT NULL,
    raised_at    INTEGER NOT NULL,          -- of the alert this is about: one raised anew is delivered anew
    attempts     INTEGER NOT NULL,
    due          INTEGER NOT NULL,          -- not tried again before; while it is tried, a lease
    delivered_at INTEGER,
    error        TEXT NOT NULL DEFAULT '',  -- why the last attempt failed
    PRIMARY KEY (record, reason, sink)
) STRICT, WITHOUT ROWID;
CREATE INDEX alerts_unseen ON alerts (raised_at) WHERE acknowledged_at IS NULL;

-- So far the log was the only one.
INSERT INTO alert_deliveries (record, reason, sink, raised_at, attempts, due, delivered_at)
SELECT record, reason, 'log', raised_at, 1, delivered_at, delivered_at FROM alerts WHERE delivered_at IS NOT NULL;
