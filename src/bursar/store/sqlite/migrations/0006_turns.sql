-- Epochs of events. A file restored from a backup gives numbers again that a reader's cursor has passed; after
-- `bursar recover --restored` what is written belongs to a new epoch, which no cursor of an older one has passed.

CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY,
    after INTEGER NOT NULL                 -- the last event before it
) STRICT;
INSERT INTO epochs VALUES (0, 0);

-- What else is written once: books whole, of assets what amounts mean, of holds whose they are.
CREATE TRIGGER books_no_update BEFORE UPDATE ON books BEGIN SELECT RAISE(ABORT, 'books is insert-only'); END;
CREATE TRIGGER books_no_delete BEFORE DELETE ON books BEGIN SELECT RAISE(ABORT, 'books is insert-only'); END;
CREATE TRIGGER assets_no_update BEFORE UPDATE OF id, code, precision ON assets
BEGIN SELECT RAISE(ABORT, 'what an asset is can''t be changed'); END;
CREATE TRIGGER assets_no_delete BEFORE DELETE ON assets BEGIN SELECT RAISE(ABORT, 'assets are never deleted'); END;
CREATE TRIGGER holds_no_update BEFORE UPDATE OF id, account, asset, amount, owner ON holds
BEGIN SELECT RAISE(ABORT, 'whose a hold is can''t be changed'); END;
CREATE TRIGGER holds_no_delete BEFORE DELETE ON holds BEGIN SELECT RAISE(ABORT, 'holds are never deleted'); END;
