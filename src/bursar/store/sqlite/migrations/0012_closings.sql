-- Accounts that a close has frozen: written with its freeze, so that a close that was interrupted is found.

CREATE TABLE closings (
    path  TEXT PRIMARY KEY,  -- of the account
    token TEXT NOT NULL,     -- of the close: it lifts this freeze and no other
    at    INTEGER NOT NULL   -- when it began
) STRICT, WITHOUT ROWID;
