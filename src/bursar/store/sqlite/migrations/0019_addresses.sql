-- Users' addresses for deposits, by the time of their issue: every scan of a chain looks for new ones.

CREATE INDEX records_addresses ON records (created_at, number) WHERE flow = 'deposit_addresses';
