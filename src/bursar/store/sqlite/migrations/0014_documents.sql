-- Versioned documents: what chains, wallets and policies say, who said so and why. Versions are insert-only.

-- Every change of a document begins with this row: changes happen one after the other, and numbers have no gaps.
CREATE TABLE document_counter (
    id     INTEGER PRIMARY KEY CHECK (id = 1),
    number INTEGER NOT NULL                  -- of the newest version of any document: what caches compare
) STRICT;
INSERT INTO document_counter VALUES (1, 0);

CREATE TABLE documents (
    number          INTEGER PRIMARY KEY,     -- in the order of the commits, without gaps
    kind            TEXT NOT NULL,
    name            TEXT NOT NULL,
    version         INTEGER NOT NULL CHECK (version >= 1),
    body            TEXT NOT NULL,           -- canonical JSON, as it was hashed
    retired         INTEGER NOT NULL CHECK (retired IN (0, 1)),
    previous        BLOB NOT NULL,           -- hash of the version before, with who made it, why and when; empty: none
    hash            BLOB NOT NULL CHECK (length(hash) = 32),
    author          TEXT NOT NULL,
    reason          TEXT NOT NULL,
    approved_by     TEXT NOT NULL,           -- the second person; "" where one was enough
    approved_reason TEXT NOT NULL,
    at              INTEGER NOT NULL,
    UNIQUE (kind, name, version)
) STRICT;
CREATE TRIGGER documents_no_update BEFORE UPDATE ON documents BEGIN SELECT RAISE(ABORT, 'documents is insert-only'); END;
CREATE TRIGGER documents_no_delete BEFORE DELETE ON documents BEGIN SELECT RAISE(ABORT, 'documents is insert-only'); END;
-- INSERT OR REPLACE deletes without asking the triggers above. Documents are few, so each insert can afford this look.
CREATE TRIGGER documents_no_replace BEFORE INSERT ON documents
WHEN EXISTS (SELECT 1 FROM documents WHERE kind = NEW.kind AND name = NEW.name AND version = NEW.version)
    OR EXISTS (SELECT 1 FROM documents WHERE number = NEW.number)
BEGIN SELECT RAISE(IGNORE); END;

-- Changes that wait for a second person: one per document.
CREATE TABLE document_proposals (
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    base     INTEGER NOT NULL CHECK (base >= 0),  -- the version that it follows; 0: none
    body     TEXT NOT NULL,
    retired  INTEGER NOT NULL CHECK (retired IN (0, 1)),
    previous BLOB NOT NULL,
    hash     BLOB NOT NULL CHECK (length(hash) = 32),  -- what the second person approves, and the version will have
    author   TEXT NOT NULL,
    reason   TEXT NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;
