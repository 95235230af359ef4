-- Format 1 of a vault's index. Every row is truth: an object without a row does not exist, even if a pack holds its
-- bytes.

-- The location of each object. Uncompressed objects have stored = size; all others are one zstd frame.
CREATE TABLE objects (
    id BLOB PRIMARY KEY,
    pack INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    stored INTEGER NOT NULL,
    size INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How far each pack is published. Bytes beyond that were never committed, and the next writer truncates them. A loose
-- pack was filled uncompressed: members are the ids of its objects in order, to be compressed later.
CREATE TABLE packs (
    number INTEGER PRIMARY KEY,
    end INTEGER NOT NULL,
    objects INTEGER NOT NULL,
    members BLOB
) STRICT;

-- The referenced snapshots, and their owners.
CREATE TABLE roots (
    owner TEXT NOT NULL,
    root BLOB NOT NULL,
    at_us INTEGER NOT NULL,
    PRIMARY KEY (owner, root)
) STRICT, WITHOUT ROWID;

-- Unfinished restores.
CREATE TABLE restores (
    workspace TEXT PRIMARY KEY,
    target BLOB NOT NULL,
    before BLOB,
    paths BLOB,
    at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- sweeps: incremented by each sweep that deletes anything. commits: changed to force a commit. packs: the highest
-- number of a deleted pack, because numbers are never reused.
CREATE TABLE counters (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO counters (name, value) VALUES ('sweeps', 0), ('commits', 0), ('packs', 0);
