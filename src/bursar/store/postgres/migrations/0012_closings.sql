-- Accounts that a close has frozen: written with its freeze, so that a close that was interrupted is found.
-- runs_from: 1

CREATE TABLE bursar.closings (
    path  text COLLATE "C" PRIMARY KEY,  -- of the account
    token text NOT NULL,                 -- of the close: it lifts this freeze and no other
    at    timestamptz NOT NULL DEFAULT now()  -- when it began
);
