-- What operators do, who did it and why: stops that need two operators to be lifted, and calls whose end was forced.
-- runs_from: 1

-- A pause may need two operators to be lifted (T47). The first one's proposal is kept until another person agrees.
ALTER TABLE bursar.pauses ADD COLUMN two_people boolean NOT NULL DEFAULT false;
ALTER TABLE bursar.pauses ADD COLUMN proposed_by text NOT NULL DEFAULT '';  -- who wants to lift it; "" for none
ALTER TABLE bursar.pauses ADD COLUMN proposed_reason text NOT NULL DEFAULT '';

-- The history of pauses and of commits that were set aside: one row per action.
CREATE TABLE bursar.operator_actions (
    number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    action      text NOT NULL,               -- paused, two people needed, resume proposed, resumed, released
    kind        text NOT NULL,               -- flow, rail or commit
    name        text NOT NULL,
    actor       text NOT NULL,
    reason      text NOT NULL,
    proposed_by text NOT NULL,               -- the first of two operators, where two were needed; else ""
    at          timestamptz NOT NULL DEFAULT now()
);
CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON bursar.operator_actions
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();
CREATE TRIGGER insert_only_all BEFORE TRUNCATE ON bursar.operator_actions
    FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change();

-- Calls whose end two operators decided: their rail is asked until it says what really happened (T34).
CREATE TABLE bursar.forced_calls (
    record  bigint NOT NULL,
    version integer NOT NULL,                -- of the record while it was calling
    state   text COLLATE "C" NOT NULL,       -- in which it was calling
    attempt integer NOT NULL,                -- questions so far
    due     timestamptz,                     -- when to ask next; null: the rail's answer was definite
    said    text NOT NULL,                   -- what the rail said last; "" while nothing
    PRIMARY KEY (record, version)
);
CREATE INDEX forced_calls_due ON bursar.forced_calls (due) WHERE due IS NOT NULL;
