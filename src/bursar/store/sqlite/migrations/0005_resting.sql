-- What rests, by state: records that nobody drives, because they have ended or wait for a person. Those that are driven
-- are few, and have an index already. One entry per record, made at its end, and none per move on the way there.

CREATE INDEX records_resting ON records (flow, state, number) WHERE due IS NULL;
