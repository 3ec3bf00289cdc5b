-- Holds: how long one was asked to last, and whose it is.
-- runs_from: 1

-- What a repeated request is compared with: the same key with another duration is another request. Null: for ever; or, of
-- a hold that expires, authorized before this was kept.
ALTER TABLE bursar.holds ADD COLUMN lasts_us bigint;

-- From here on an owner is a record of a flow, and only a move of that record settles its hold (W34). Nothing of the kind
-- has been written so far: owners were names that callers made up. Such a hold stays open until a caller ends it, as
-- any hold without an end; with its made-up owner no caller could.
DROP TRIGGER written_once ON bursar.holds;
UPDATE bursar.holds SET owner = '' WHERE owner <> '' AND state = 'open';
CREATE TRIGGER written_once BEFORE UPDATE OF id, account, asset, amount, owner, lasts_us OR DELETE ON bursar.holds
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();

-- The holds of a group, after its entries. Each entry has spent the posting that its hold held, which is the
-- compare-and-set; one that is closed all the same, or belongs to another record, is never changed.
CREATE FUNCTION bursar.write_holds_1(
    o_id bigint[], o_account bigint[], o_asset integer[], o_amount text[], o_remaining text[], o_posting bigint[],
    o_state text[], o_owner text[], o_expires bigint[], o_lasts bigint[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n bigint;
BEGIN
    IF cardinality(o_id) = 0 THEN
        RETURN;
    END IF;
    INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us, lasts_us)
    SELECT i, a, s, v::numeric, r::numeric, p, t, w, x, l
    FROM unnest(o_id, o_account, o_asset, o_amount, o_remaining, o_posting, o_state, o_owner, o_expires, o_lasts)
         AS o (i, a, s, v, r, p, t, w, x, l)
    ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting, state = excluded.state
    WHERE holds.state = 'open' AND holds.owner = excluded.owner;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n <> cardinality(o_id) THEN
        RAISE EXCEPTION 'a hold is closed, or belongs to another record' USING ERRCODE = 'BU006';
    END IF;
END $$;
