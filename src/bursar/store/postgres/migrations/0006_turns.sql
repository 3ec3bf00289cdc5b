-- Whose turn it is, and when something happened.
-- runs_from: 1

-- When something happened is when it was written, not when the transaction began that it is part of. A caller's own
-- transaction may have been open for long, and pay with what came in meanwhile: it would have paid before that came, and
-- between the two moments the money was in two places. And a freeze that waited for the last commits would seem older.
-- All rows of a group still have one time: that of the statement which writes them.
ALTER TABLE bursar.envelopes ALTER COLUMN at SET DEFAULT statement_timestamp();
ALTER TABLE bursar.accounts ALTER COLUMN at SET DEFAULT statement_timestamp();

-- A transaction that shares the rules takes this lock first. Row locks are not fair: new sharers pass a transaction
-- that waits to change the row, and it waits for as long as there is a sharer. This lock is fair: a sharer that comes
-- after a transaction that waits to change the rules, waits too.
CREATE FUNCTION bursar.take_turn_1() RETURNS void LANGUAGE sql AS $$
    SELECT pg_advisory_xact_lock_shared(108271206724722)
$$;

-- A rule changes: no new sharer is let in, and only those that were there before are waited for. A transaction that
-- stays open for longer than this waits stops the change (lock_not_available), and the commits for no longer than that.
CREATE FUNCTION bursar.bump_rules_1(patience_ms integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    found bigint;
    before text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', patience_ms || 'ms', true);
    PERFORM pg_advisory_xact_lock(108271206724722);
    UPDATE bursar.rules SET generation = generation + 1 WHERE id = 1 RETURNING generation INTO found;
    PERFORM set_config('lock_timeout', before, true);
    RETURN found;
END $$;

-- What else is written once: books whole, of assets what amounts mean, of holds whose they are.
CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON bursar.books
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();
CREATE TRIGGER written_once BEFORE UPDATE OF id, code, precision OR DELETE ON bursar.assets
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();
CREATE TRIGGER written_once BEFORE UPDATE OF id, account, asset, amount, owner OR DELETE ON bursar.holds
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();
DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['books', 'assets', 'holds'] LOOP
        EXECUTE format('CREATE TRIGGER insert_only_all BEFORE TRUNCATE ON bursar.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change()', name);
    END LOOP;
END $$;
