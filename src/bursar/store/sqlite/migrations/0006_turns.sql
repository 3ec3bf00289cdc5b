-- Epochs of events. A file restored from a backup gives numbers again that a reader's cursor has passed; after
-- `bursar recover --restored` what is written belongs to a new epoch, which no cursor of an older one has passed.

CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY,
    after INTEGER NOT NULL                 -- the last event before it
) STRICT;
INSERT INTO epochs VALUES (0, 0);
