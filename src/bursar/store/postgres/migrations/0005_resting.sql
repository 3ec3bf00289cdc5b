-- What rests, by state: records that nobody drives, because they have ended or wait for a person. Those that are driven
-- are few, and have an index already. One entry per record, made at its end, and none per move on the way there.
-- runs_from: 1

CREATE INDEX records_resting ON bursar.records (flow, state, number) WHERE due IS NULL;
