-- Timers of waiting states, signals (the inbox of each record), and priorities.

ALTER TABLE records ADD COLUMN timer INTEGER;  -- when it leaves its waiting state by itself; null: never
ALTER TABLE records ADD COLUMN priority INTEGER NOT NULL DEFAULT 1 CHECK (priority BETWEEN 0 AND 2);  -- 0 high, 2 low
ALTER TABLE records ADD COLUMN inbox INTEGER NOT NULL DEFAULT 0 CHECK (inbox >= 0);  -- signals that none has consumed

-- What is due, by priority. One index, not two: every move writes an entry of it.
DROP INDEX records_due;
CREATE INDEX records_due ON records (priority, due) WHERE due IS NOT NULL;
CREATE INDEX records_timer ON records (timer) WHERE timer IS NOT NULL;

-- Signals that records were sent: written with a move of their record, and consumed by one.
CREATE TABLE signals (
    record   INTEGER NOT NULL,
    sender   TEXT NOT NULL,                 -- the sender's id of the signal: sent again, it is the same one
    event    TEXT NOT NULL,
    actor    TEXT NOT NULL,
    evidence TEXT NOT NULL,                 -- JSON
    arrived  INTEGER NOT NULL,              -- the record's version with which it arrived: the order of the inbox
    consumed INTEGER CHECK (consumed >= arrived),  -- the version of the transition that consumed it; null: none has
    at       INTEGER NOT NULL,
    PRIMARY KEY (record, sender)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER signals_no_delete BEFORE DELETE ON signals BEGIN SELECT RAISE(ABORT, 'signals are never deleted'); END;
CREATE TRIGGER signals_consumed_once BEFORE UPDATE ON signals
WHEN OLD.consumed IS NOT NULL OR NEW.consumed IS NULL
  OR (NEW.record, NEW.sender, NEW.event, NEW.actor, NEW.evidence, NEW.arrived, NEW.at)
     IS NOT (OLD.record, OLD.sender, OLD.event, OLD.actor, OLD.evidence, OLD.arrived, OLD.at)
BEGIN SELECT RAISE(ABORT, 'a signal is consumed once, and nothing else of it changes'); END;
