-- The ledger. Value tables (accounts, envelopes, postings, spends, involved, events) are insert-only and the database
-- itself refuses anything else. Everything else is disposable (rebuilt from them) or small bookkeeping.
-- Amounts are 16 bytes, big-endian, offset by 2^127, so that bytes sort as numbers do (SQLite's integers end at 2^63).
-- Sums, which may be wider, are decimal text. Times are microseconds since 1970, UTC.

CREATE TABLE numbers (                     -- the last envelope number taken ahead (split mode), the last account number
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    envelope INTEGER NOT NULL,
    account  INTEGER NOT NULL
) STRICT;
INSERT INTO numbers VALUES (1, 0, 1);

CREATE TABLE assets (
    id                        INTEGER PRIMARY KEY,
    code                      TEXT NOT NULL UNIQUE,
    precision                 INTEGER NOT NULL,
    min_transfer              TEXT NOT NULL,
    max_transfer              TEXT NOT NULL,
    status                    TEXT NOT NULL CHECK (status IN ('active', 'suspended')),
    internal_transfer_enabled INTEGER NOT NULL
) STRICT;

CREATE TABLE books (
    id       INTEGER PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE,
    assets   TEXT NOT NULL,                -- JSON list of asset codes; empty: all
    accounts TEXT NOT NULL                 -- JSON list of paths or prefixes; empty: all
) STRICT;

-- Bumped by every freeze, close or policy change: account heads may be cached as long as it stands.
CREATE TABLE rules (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    generation INTEGER NOT NULL
) STRICT;
INSERT INTO rules VALUES (1, 1);

CREATE TABLE accounts (
    id      INTEGER NOT NULL,
    version INTEGER NOT NULL CHECK (version >= 1),
    path    TEXT NOT NULL,
    policy  TEXT NOT NULL,
    status  TEXT NOT NULL CHECK (status IN ('active', 'frozen', 'closed')),
    book    TEXT NOT NULL,
    at      INTEGER NOT NULL,
    PRIMARY KEY (id, version),
    UNIQUE (path, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE envelopes (
    seq      INTEGER PRIMARY KEY,
    id       BLOB NOT NULL,                -- content hash; I8 recomputes it
    scope    TEXT NOT NULL,
    key      TEXT NOT NULL,
    book     INTEGER NOT NULL,
    kind     INTEGER NOT NULL,
    reverses INTEGER NOT NULL,             -- envelope that this one reverses, or 0
    legs     BLOB NOT NULL,                -- the movements, MessagePack: [[source, target, asset, amount], ...]
    pins     BLOB NOT NULL,                -- account versions it was validated against: [[account, version], ...]
    consumes BLOB NOT NULL,                -- posting numbers, 8 bytes each
    metadata TEXT NOT NULL,
    at       INTEGER NOT NULL,
    UNIQUE (scope, key)
) STRICT;

CREATE TABLE postings (
    id      INTEGER PRIMARY KEY,           -- envelope seq << 16 | place in it
    account INTEGER NOT NULL,
    asset   INTEGER NOT NULL,
    amount  BLOB NOT NULL CHECK (length(amount) = 16)
) STRICT;

-- The unconditional double-spend guard; says who spent.
CREATE TABLE spends (
    posting  INTEGER PRIMARY KEY,
    envelope INTEGER NOT NULL
) STRICT;

-- Which envelopes an account took part in: its history.
CREATE TABLE involved (
    account  INTEGER NOT NULL,
    envelope INTEGER NOT NULL,
    PRIMARY KEY (account, envelope)
) STRICT, WITHOUT ROWID;

-- The outbox. One writer at a time, so numbers are given in the order in which events are written and a cursor can't skip any.
CREATE TABLE events (
    seq     INTEGER PRIMARY KEY,
    kind    INTEGER NOT NULL,
    subject INTEGER NOT NULL,              -- envelope, account, asset, book or hold
    version INTEGER NOT NULL,
    UNIQUE (subject, kind, version)        -- an event happens once, however often its commit is retried
) STRICT;

-- Disposable: postings minus spends.
CREATE TABLE live_postings (
    posting     INTEGER PRIMARY KEY,
    account     INTEGER NOT NULL,
    asset       INTEGER NOT NULL,
    amount      BLOB NOT NULL,
    reservation TEXT
) STRICT;
CREATE INDEX live_postings_largest ON live_postings (account, asset, amount);

-- Disposable: balances of capped overdrafts; `turn` is compared and set by every commit that moves one.
CREATE TABLE account_heads (
    account     INTEGER NOT NULL,
    asset       INTEGER NOT NULL,
    balance     TEXT NOT NULL,
    turn        INTEGER NOT NULL,
    reservation TEXT,
    PRIMARY KEY (account, asset)
) STRICT, WITHOUT ROWID;

-- Disposable: balances of accounts with many postings, as a sum of small changes. Never used to decide a commit.
CREATE TABLE balance_cache (
    account INTEGER NOT NULL,
    asset   INTEGER NOT NULL,
    part    INTEGER NOT NULL,              -- 0: everything up to the last fold; else the envelope of the change
    amount  TEXT NOT NULL,
    PRIMARY KEY (account, asset, part)
) STRICT, WITHOUT ROWID;

CREATE TABLE holds (
    id         INTEGER PRIMARY KEY,        -- number of the envelope that authorized it
    account    INTEGER NOT NULL,
    asset      INTEGER NOT NULL,
    amount     BLOB NOT NULL,
    remaining  BLOB NOT NULL,
    posting    INTEGER NOT NULL,           -- the posting that is held; spending it is the compare-and-set (L21)
    state      TEXT NOT NULL CHECK (state IN ('open', 'confirmed', 'voided', 'expired')),
    owner      TEXT NOT NULL,              -- a record that owns it; such a hold never expires
    expires_us INTEGER                     -- microseconds since 1970, or null: never
) STRICT;
CREATE INDEX holds_open ON holds (account, id) WHERE state = 'open';
CREATE INDEX holds_due ON holds (expires_us) WHERE state = 'open' AND expires_us IS NOT NULL;

-- Commits under way where a transaction is one statement (split mode).
CREATE TABLE sagas (
    id       TEXT PRIMARY KEY,
    kind     TEXT NOT NULL,
    scope    TEXT NOT NULL,
    key      TEXT NOT NULL,
    phase    TEXT NOT NULL CHECK (phase IN ('reserving', 'finalizing', 'broken')),
    fence    INTEGER NOT NULL,
    lease_us INTEGER NOT NULL,
    data     BLOB NOT NULL,
    UNIQUE (scope, key)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER accounts_no_update BEFORE UPDATE ON accounts BEGIN SELECT RAISE(ABORT, 'accounts is insert-only'); END;
CREATE TRIGGER accounts_no_delete BEFORE DELETE ON accounts BEGIN SELECT RAISE(ABORT, 'accounts is insert-only'); END;
CREATE TRIGGER envelopes_no_update BEFORE UPDATE ON envelopes BEGIN SELECT RAISE(ABORT, 'envelopes is insert-only'); END;
CREATE TRIGGER envelopes_no_delete BEFORE DELETE ON envelopes BEGIN SELECT RAISE(ABORT, 'envelopes is insert-only'); END;
CREATE TRIGGER postings_no_update BEFORE UPDATE ON postings BEGIN SELECT RAISE(ABORT, 'postings is insert-only'); END;
CREATE TRIGGER postings_no_delete BEFORE DELETE ON postings BEGIN SELECT RAISE(ABORT, 'postings is insert-only'); END;
CREATE TRIGGER spends_no_update BEFORE UPDATE ON spends BEGIN SELECT RAISE(ABORT, 'spends is insert-only'); END;
CREATE TRIGGER spends_no_delete BEFORE DELETE ON spends BEGIN SELECT RAISE(ABORT, 'spends is insert-only'); END;
CREATE TRIGGER involved_no_update BEFORE UPDATE ON involved BEGIN SELECT RAISE(ABORT, 'involved is insert-only'); END;
CREATE TRIGGER involved_no_delete BEFORE DELETE ON involved BEGIN SELECT RAISE(ABORT, 'involved is insert-only'); END;
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events is insert-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events is insert-only'); END;

INSERT INTO books (name, assets, accounts) VALUES ('main', '[]', '[]');

-- Where held money sits: one account for all holds, since each hold consumes its own posting by number.
INSERT INTO accounts (id, version, path, policy, status, book, at)
VALUES (1, 1, 'held', '{"policy":"no_overdraft"}', 'active', '', 0);
