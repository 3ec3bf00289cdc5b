-- Deliveries of an alert: each sink (log, webhook, command) by itself, so that one that is down repeats no other.
-- runs_from: 1

CREATE TABLE bursar.alert_deliveries (
    record       bigint NOT NULL,
    reason       text COLLATE "C" NOT NULL,
    sink         text COLLATE "C" NOT NULL,
    raised_at    timestamptz NOT NULL,      -- of the alert this is about: one raised anew is delivered anew
    attempts     integer NOT NULL,
    due          timestamptz NOT NULL,      -- not tried again before; while it is tried, a lease
    delivered_at timestamptz,
    error        text NOT NULL DEFAULT '',  -- why the last attempt failed
    PRIMARY KEY (record, reason, sink)
);
CREATE INDEX alerts_unseen ON bursar.alerts (raised_at) WHERE acknowledged_at IS NULL;

-- So far the log was the only one.
INSERT INTO bursar.alert_deliveries (record, reason, sink, raised_at, attempts, due, delivered_at)
SELECT record, reason, 'log', raised_at, 1, delivered_at, delivered_at FROM bursar.alerts WHERE delivered_at IS NOT NULL;
