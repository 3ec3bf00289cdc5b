-- When each process has last seen that the database takes its writes: `/readyz` and the start write here, and nothing else.

CREATE TABLE heartbeats (
    worker TEXT PRIMARY KEY,  -- as in the history of the records that it drives
    at     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
