-- Users' addresses for deposits, by the time of their issue: every scan of a chain looks for new ones. Numbers of records
-- are taken ahead, and don't say which is new.
-- runs_from: 1

CREATE INDEX records_addresses ON bursar.records (created_at, number) WHERE flow = 'deposit_addresses';
