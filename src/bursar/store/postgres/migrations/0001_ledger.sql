-- The ledger. Value tables (accounts, envelopes, postings, spends, involved, events) are insert-only and the database
-- itself refuses anything else. Everything else is disposable (rebuilt from them) or small bookkeeping.

CREATE SEQUENCE bursar.numbers;            -- of envelopes and events: one numbering for all that happens
CREATE SEQUENCE bursar.account_numbers;

CREATE TABLE bursar.assets (
    id                        integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    code                      text COLLATE "C" NOT NULL UNIQUE,
    precision                 smallint NOT NULL,
    min_transfer              numeric(39) NOT NULL,
    max_transfer              numeric(39) NOT NULL,
    status                    text NOT NULL CHECK (status IN ('active', 'suspended')),
    internal_transfer_enabled boolean NOT NULL
);

CREATE TABLE bursar.books (
    id       integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name     text COLLATE "C" NOT NULL UNIQUE,
    assets   text NOT NULL,                -- JSON list of asset codes; empty: all
    accounts text NOT NULL                 -- JSON list of paths or prefixes; empty: all
);

-- Guards status, policy and book of every account: commits read it FOR SHARE, every change of a rule bumps it.
CREATE TABLE bursar.rules (
    id         smallint PRIMARY KEY CHECK (id = 1),
    generation bigint NOT NULL
);
INSERT INTO bursar.rules VALUES (1, 1);

-- Transaction numbers order the events. A dump restored into another cluster starts a new epoch.
CREATE TABLE bursar.clock_epoch (
    id    smallint PRIMARY KEY CHECK (id = 1),
    epoch integer NOT NULL
);
INSERT INTO bursar.clock_epoch VALUES (1, 1);

CREATE TABLE bursar.accounts (
    id      bigint NOT NULL,
    version integer NOT NULL CHECK (version >= 1),
    path    text COLLATE "C" NOT NULL,
    policy  text NOT NULL,
    status  text NOT NULL CHECK (status IN ('active', 'frozen', 'closed')),
    book    text NOT NULL,
    at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, version),
    UNIQUE (path, version)
);

CREATE TABLE bursar.envelopes (
    seq      bigint PRIMARY KEY,
    id       bytea NOT NULL,               -- content hash; I8 recomputes it
    scope    text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    book     integer NOT NULL,
    kind     smallint NOT NULL,
    reverses bigint NOT NULL,              -- envelope that this one reverses, or 0
    legs     bytea NOT NULL,               -- the movements, MessagePack: [[source, target, asset, amount], ...]
    pins     bytea NOT NULL,               -- account versions it was validated against: [[account, version], ...]
    consumes bytea NOT NULL,               -- posting numbers, 8 bytes each
    metadata json NOT NULL,
    at       timestamptz NOT NULL DEFAULT now(),
    UNIQUE (scope, key)
);

CREATE TABLE bursar.postings (
    id      bigint PRIMARY KEY,            -- envelope seq << 16 | place in it
    account bigint NOT NULL,
    asset   integer NOT NULL,
    amount  numeric(39) NOT NULL CHECK (amount <> 0)
);

-- The unconditional double-spend guard; says who spent.
CREATE TABLE bursar.spends (
    posting  bigint PRIMARY KEY,
    envelope bigint NOT NULL
);

-- Which envelopes an account took part in: its history.
CREATE TABLE bursar.involved (
    account  bigint NOT NULL,
    envelope bigint NOT NULL,
    PRIMARY KEY (account, envelope)
);

-- The outbox. Ordered by (epoch, xid, seq): a cursor reads only below the oldest transaction still open (L23).
CREATE TABLE bursar.events (
    epoch   integer NOT NULL DEFAULT 1,    -- raised when the database was restored into a cluster with younger xids
    xid     xid8 NOT NULL DEFAULT pg_current_xact_id(),
    seq     bigint NOT NULL,
    kind    smallint NOT NULL,
    subject bigint NOT NULL,               -- envelope, account, asset, book or hold
    version integer NOT NULL,
    PRIMARY KEY (epoch, xid, seq),
    UNIQUE (subject, kind, version)        -- an event happens once, however often its commit is retried
);

-- Disposable: postings minus spends.
CREATE TABLE bursar.live_postings (
    posting     bigint PRIMARY KEY,
    account     bigint NOT NULL,
    asset       integer NOT NULL,
    amount      numeric(39) NOT NULL,
    reservation text
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX live_postings_largest ON bursar.live_postings (account, asset, amount);

-- Disposable: balances of capped overdrafts; `turn` is compared and set by every commit that moves one.
CREATE TABLE bursar.account_heads (
    account     bigint NOT NULL,
    asset       integer NOT NULL,
    balance     numeric NOT NULL,
    turn        bigint NOT NULL,
    reservation text,
    PRIMARY KEY (account, asset)
) WITH (fillfactor = 50);

-- Disposable: balances of accounts with many postings, as a sum of small changes. Never used to decide a commit.
CREATE TABLE bursar.balance_cache (
    account bigint NOT NULL,
    asset   integer NOT NULL,
    part    bigint NOT NULL,               -- 0: everything up to the last fold; else the envelope of the change
    amount  numeric NOT NULL,
    PRIMARY KEY (account, asset, part)
);

CREATE TABLE bursar.holds (
    id         bigint PRIMARY KEY,         -- number of the envelope that authorized it
    account    bigint NOT NULL,
    asset      integer NOT NULL,
    amount     numeric(39) NOT NULL,
    remaining  numeric(39) NOT NULL,
    posting    bigint NOT NULL,            -- the posting that is held; spending it is the compare-and-set (L21)
    state      text NOT NULL CHECK (state IN ('open', 'confirmed', 'voided', 'expired')),
    owner      text NOT NULL,              -- a record that owns it; such a hold never expires
    expires_us bigint                      -- microseconds since 1970, or null: never
);
CREATE INDEX holds_open ON bursar.holds (account, id) WHERE state = 'open';
CREATE INDEX holds_due ON bursar.holds (expires_us) WHERE state = 'open' AND expires_us IS NOT NULL;

-- Commits under way where a transaction is one statement (split mode).
CREATE TABLE bursar.sagas (
    id       text PRIMARY KEY,
    kind     text NOT NULL,
    scope    text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    phase    text NOT NULL CHECK (phase IN ('reserving', 'finalizing', 'broken')),
    fence    bigint NOT NULL,
    lease_us bigint NOT NULL,
    data     bytea NOT NULL,
    UNIQUE (scope, key)
);

CREATE FUNCTION bursar.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'bursar.% is insert-only: % is refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'BU100';
END $$;

DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['accounts', 'envelopes', 'postings', 'spends', 'involved', 'events'] LOOP
        EXECUTE format('CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON bursar.%I
                        FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change()', name);
        EXECUTE format('CREATE TRIGGER insert_only_all BEFORE TRUNCATE ON bursar.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change()', name);
    END LOOP;
END $$;

INSERT INTO bursar.books (name, assets, accounts) VALUES ('main', '[]', '[]');

-- Where held money sits: one account for all holds, since each hold consumes its own posting by number.
INSERT INTO bursar.accounts (id, version, path, policy, status, book)
VALUES (nextval('bursar.account_numbers'), 1, 'held', '{"policy":"no_overdraft"}', 'active', '');

-- One group of commits: all of it or nothing, in one round trip. It checks its own counts and fails whole, with a
-- SQLSTATE that the writer knows: BU001 rules changed, BU002 posting taken, BU003 floor moved. A key that another
-- process has just used is an ordinary unique violation. Locks are taken in one order everywhere: rules, keys,
-- account heads, spends; each sorted by the caller.
CREATE FUNCTION bursar.write_group_1(
    expected_generation bigint, event_epoch integer,
    e_seq bigint[], e_id bytea[], e_scope text[], e_key text[], e_book integer[], e_kind smallint[],
    e_reverses bigint[], e_legs bytea[], e_pins bytea[], e_consumes bytea[], e_metadata text[],
    p_id bigint[], p_account bigint[], p_asset integer[], p_amount text[], p_live boolean[],
    s_posting bigint[], s_envelope bigint[], dead bigint[],
    i_account bigint[], i_envelope bigint[],
    h_account bigint[], h_asset integer[], h_turn bigint[], h_balance text[],
    c_account bigint[], c_asset integer[], c_part bigint[], c_amount text[],
    o_id bigint[], o_account bigint[], o_asset integer[], o_amount text[], o_remaining text[], o_posting bigint[],
    o_state text[], o_owner text[], o_expires bigint[]
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    n bigint;
    patience text := current_setting('lock_timeout');
BEGIN
    PERFORM 1 FROM bursar.rules WHERE id = 1 AND generation = expected_generation FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the rules have changed' USING ERRCODE = 'BU001';
    END IF;
    -- A change of rules is short and worth waiting for. Another transaction that holds what we need may take all
    -- day (a caller's own), and all changes of this group would wait for it.
    PERFORM set_config('lock_timeout', coalesce(nullif(current_setting('bursar.lock_timeout', true), ''), '250ms'), true);

    INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
    SELECT * FROM unnest(e_seq, e_id, e_scope, e_key, e_book, e_kind, e_reverses, e_legs, e_pins, e_consumes,
                         e_metadata::json[]);

    IF cardinality(h_account) > 0 THEN
        INSERT INTO bursar.account_heads (account, asset, balance, turn)
        SELECT a, s, 0, 0 FROM unnest(h_account, h_asset, h_turn) AS h (a, s, t) WHERE t = 0
        ON CONFLICT DO NOTHING;
        -- FOR UPDATE in sorted order first: an UPDATE alone locks in whatever order its plan finds the rows.
        PERFORM 1 FROM bursar.account_heads k JOIN unnest(h_account, h_asset) AS h (a, s) ON k.account = a AND k.asset = s
        ORDER BY k.account, k.asset FOR UPDATE OF k;
        UPDATE bursar.account_heads k SET balance = h.b::numeric, turn = h.t + 1
        FROM unnest(h_account, h_asset, h_turn, h_balance) AS h (a, s, t, b)
        WHERE k.account = h.a AND k.asset = h.s AND k.turn = h.t AND k.reservation IS NULL;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n <> cardinality(h_account) THEN
            RAISE EXCEPTION 'a guarded balance has moved' USING ERRCODE = 'BU003';
        END IF;
    END IF;

    INSERT INTO bursar.spends (posting, envelope) SELECT * FROM unnest(s_posting, s_envelope);
    DELETE FROM bursar.live_postings WHERE posting = ANY (dead) AND reservation IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n <> cardinality(dead) THEN
        RAISE EXCEPTION 'a posting was taken' USING ERRCODE = 'BU002';
    END IF;

    INSERT INTO bursar.postings (id, account, asset, amount)
    SELECT i, a, s, v::numeric FROM unnest(p_id, p_account, p_asset, p_amount) AS p (i, a, s, v);
    INSERT INTO bursar.live_postings (posting, account, asset, amount)
    SELECT i, a, s, v::numeric FROM unnest(p_id, p_account, p_asset, p_amount, p_live) AS p (i, a, s, v, l) WHERE l;
    INSERT INTO bursar.involved (account, envelope) SELECT * FROM unnest(i_account, i_envelope);
    IF cardinality(c_account) > 0 THEN
        INSERT INTO bursar.balance_cache (account, asset, part, amount)
        SELECT a, s, p, v::numeric FROM unnest(c_account, c_asset, c_part, c_amount) AS c (a, s, p, v);
    END IF;
    IF cardinality(o_id) > 0 THEN
        INSERT INTO bursar.holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
        SELECT i, a, s, v::numeric, r::numeric, p, t, w, x
        FROM unnest(o_id, o_account, o_asset, o_amount, o_remaining, o_posting, o_state, o_owner, o_expires)
             AS o (i, a, s, v, r, p, t, w, x)
        ON CONFLICT (id) DO UPDATE SET remaining = excluded.remaining, posting = excluded.posting,
                                       state = excluded.state;
    END IF;
    INSERT INTO bursar.events (epoch, seq, kind, subject, version)
    SELECT event_epoch, s, 1, s, 0 FROM unnest(e_seq) AS e (s);
    PERFORM set_config('lock_timeout', patience, true);
END $$;
