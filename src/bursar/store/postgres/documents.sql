-- PostgreSQL's statements of documents: their versions, and proposals that wait for a second person.

-- name: lock_documents
-- The number of the newest version of any document. No other transaction changes documents until this one ends.
SELECT number FROM bursar.document_counter WHERE id = 1 FOR UPDATE

-- name: documents_number
-- The number of the newest version of any document.
SELECT number FROM bursar.document_counter WHERE id = 1

-- name: insert_document
-- A new version, unless there is one of that number. Arguments: the columns in order, without the time.
INSERT INTO bursar.documents (number, kind, name, version, body, retired, previous, hash, author, reason, approved_by,
    approved_reason)
VALUES ($1, $2, $3, $4, $5, $6::boolean, $7, $8, $9, $10, $11, $12)
ON CONFLICT DO NOTHING RETURNING @document

-- name: count_document
-- There is a newer version: what caches compare.
UPDATE bursar.document_counter SET number = $1 WHERE id = 1

-- name: document_head
-- The newest version of a document.
SELECT @document
FROM bursar.documents WHERE kind = $1 AND name = $2 ORDER BY version DESC LIMIT 1

-- name: document_version
-- One version of a document.
SELECT @document
FROM bursar.documents WHERE kind = $1 AND name = $2 AND version = $3

-- name: document_of_hash
-- The version of a document that has a hash.
SELECT @document
FROM bursar.documents WHERE kind = $1 AND name = $2 AND hash = $3

-- name: document_history
-- The versions of a document, newest first. Arguments: kind, name, below which version, how many.
SELECT @document
FROM bursar.documents WHERE kind = $1 AND name = $2 AND version < $3 ORDER BY version DESC LIMIT $4

-- name: document_list
-- The newest version of each document of a kind. Arguments: kind, after which name, how many.
SELECT @d.document
FROM bursar.documents d WHERE d.kind = $1 AND d.name > $2
    AND NOT EXISTS (SELECT 1 FROM bursar.documents n WHERE n.kind = d.kind AND n.name = d.name AND n.version = d.version + 1)
ORDER BY d.name LIMIT $3

-- name: document_heads
-- The newest version of each document that has changed. Arguments: after which number, how many.
SELECT @d.document
FROM bursar.documents d WHERE d.number > $1
    AND NOT EXISTS (SELECT 1 FROM bursar.documents n WHERE n.kind = d.kind AND n.name = d.name AND n.version = d.version + 1)
ORDER BY d.number LIMIT $2

-- name: documents_after
-- All versions of all documents, in the order in which each follows from the one before. Arguments: kind, name and version
-- after which to go on; how many.
SELECT @document
FROM bursar.documents WHERE (kind, name, version) > ($1, $2, $3::integer) ORDER BY kind, name, version LIMIT $4

-- name: documents_count
-- How many versions there are, and the highest number.
SELECT count(*), coalesce(max(number), 0) FROM bursar.documents

-- name: document_proposal
-- The open proposal for a document.
SELECT @proposal FROM bursar.document_proposals WHERE kind = $1 AND name = $2

-- name: document_proposals
-- Open proposals, of one kind or of all ("").
SELECT @proposal FROM bursar.document_proposals WHERE ($1 = '' OR kind = $1) ORDER BY kind, name LIMIT $2

-- name: put_proposal
-- A proposal, instead of the one that is open. Arguments: the columns in order, without the time.
INSERT INTO bursar.document_proposals (kind, name, base, body, retired, previous, hash, author, reason)
VALUES ($1, $2, $3, $4, $5::boolean, $6, $7, $8, $9)
ON CONFLICT (kind, name) DO UPDATE SET base = excluded.base, body = excluded.body, retired = excluded.retired,
    previous = excluded.previous, hash = excluded.hash, author = excluded.author, reason = excluded.reason, at = excluded.at
RETURNING (extract(epoch FROM document_proposals.at) * 1000000)::bigint

-- name: drop_proposal
-- It was approved or withdrawn.
DELETE FROM bursar.document_proposals WHERE kind = $1 AND name = $2
