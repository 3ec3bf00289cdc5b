-- Holds: how long one was asked to last, and whose it is.

-- What a repeated request is compared with: the same key with another duration is another request. Null: for ever; or, of
-- a hold that expires, authorized before this was kept.
ALTER TABLE holds ADD COLUMN lasts_us INTEGER;

-- From here on an owner is a record of a flow, and only a move of that record settles its hold (W34). Nothing of the kind
-- has been written so far: owners were names that callers made up. Such a hold stays open until a caller ends it, as
-- any hold without an end; with its made-up owner no caller could.
DROP TRIGGER holds_no_update;
UPDATE holds SET owner = '' WHERE owner <> '' AND state = 'open';
CREATE TRIGGER holds_no_update BEFORE UPDATE OF id, account, asset, amount, owner, lasts_us ON holds
BEGIN SELECT RAISE(ABORT, 'whose a hold is can''t be changed'); END;
