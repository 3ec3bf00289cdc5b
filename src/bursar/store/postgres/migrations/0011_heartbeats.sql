-- When each process has last seen that the database takes its writes: `/readyz` and the start write here, and nothing else.
-- runs_from: 1

CREATE TABLE bursar.heartbeats (
    worker text COLLATE "C" PRIMARY KEY,  -- as in the history of the records that it drives
    at     timestamptz NOT NULL DEFAULT now()
);
