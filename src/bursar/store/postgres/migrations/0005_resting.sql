-- What rests, by state: records that no worker drives: they have ended or wait for a person. Those that are driven
-- are few, and have an index already. One entry per record, made when it ends, and none per move on the way there.
-- runs_from: 1

CREATE INDEX records_resting ON bursar.records (flow, state, number) WHERE due IS NULL;
