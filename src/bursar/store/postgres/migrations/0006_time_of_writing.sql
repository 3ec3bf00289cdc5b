-- When something happened is when it was written, not when the transaction began that it is part of. A caller's own
-- transaction may have been open for long, and pay with what came in meanwhile: it would have paid before that came, and
-- between the two moments the money was in two places. And a freeze that waited for the last commits would seem older.
-- All rows of a group still have one time: that of the statement which writes them.
-- runs_from: 1

ALTER TABLE bursar.envelopes ALTER COLUMN at SET DEFAULT statement_timestamp();
ALTER TABLE bursar.accounts ALTER COLUMN at SET DEFAULT statement_timestamp();
