-- Versioned documents: what chains, wallets and policies say, who said so and why. Versions are insert-only.
-- runs_from: 1

-- Every change of a document begins with this row's lock: changes happen one after the other, and numbers have no gaps.
-- A sequence would give a later number to a transaction that commits first, and a cache would never see the other.
CREATE TABLE bursar.document_counter (
    id     smallint PRIMARY KEY CHECK (id = 1),
    number bigint NOT NULL                   -- of the newest version of any document: what caches compare
);
INSERT INTO bursar.document_counter VALUES (1, 0);

CREATE TABLE bursar.documents (
    number          bigint PRIMARY KEY,      -- in the order of the commits, without gaps
    kind            text COLLATE "C" NOT NULL,
    name            text COLLATE "C" NOT NULL,
    version         integer NOT NULL CHECK (version >= 1),
    body            text NOT NULL,           -- canonical JSON, as it was hashed
    retired         boolean NOT NULL,
    previous        bytea NOT NULL,          -- hash of the version before, with who made it, why and when; empty: none
    hash            bytea NOT NULL CHECK (length(hash) = 32),
    author          text NOT NULL,
    reason          text NOT NULL,
    approved_by     text NOT NULL,           -- the second person; "" where one was enough
    approved_reason text NOT NULL,
    at              timestamptz NOT NULL DEFAULT now(),
    UNIQUE (kind, name, version)
);
CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON bursar.documents
    FOR EACH ROW EXECUTE FUNCTION bursar.refuse_change();
CREATE TRIGGER insert_only_all BEFORE TRUNCATE ON bursar.documents
    FOR EACH STATEMENT EXECUTE FUNCTION bursar.refuse_change();

-- Changes that wait for a second person: one per document.
CREATE TABLE bursar.document_proposals (
    kind     text COLLATE "C" NOT NULL,
    name     text COLLATE "C" NOT NULL,
    base     integer NOT NULL CHECK (base >= 0),  -- the version that it follows; 0: none
    body     text NOT NULL,
    retired  boolean NOT NULL,
    previous bytea NOT NULL,
    hash     bytea NOT NULL CHECK (length(hash) = 32),  -- what the second person approves, and the version will have
    author   text NOT NULL,
    reason   text NOT NULL,
    at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, name)
);
