-- Format 1 of a vault's index. Every row is truth: an object without one is not there, whatever the packs hold.

-- Where each object is. What is stored as it is has stored = size; all else is one zstd frame.
CREATE TABLE objects (
    id BLOB PRIMARY KEY,
    pack INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    stored INTEGER NOT NULL,
    size INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How far each pack is published; what lies behind that in its file was never finished, and is cut off by who appends
-- next. A loose pack was filled in a hurry: members are the ids of what is in it, one behind the other, all as they are
-- and to be compressed when there is time.
CREATE TABLE packs (
    number INTEGER PRIMARY KEY,
    end INTEGER NOT NULL,
    objects INTEGER NOT NULL,
    members BLOB
) STRICT;

-- The snapshots that are wanted, and by whom.
CREATE TABLE roots (
    owner TEXT NOT NULL,
    root BLOB NOT NULL,
    at_us INTEGER NOT NULL,
    PRIMARY KEY (owner, root)
) STRICT, WITHOUT ROWID;

-- Restores that have begun and not ended.
CREATE TABLE restores (
    workspace TEXT PRIMARY KEY,
    target BLOB NOT NULL,
    before BLOB,
    paths BLOB,
    at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- sweeps: goes up when one deletes anything. commits: moved where a commit is wanted for its own sake. packs: the highest
-- number that was taken away, for no number is used twice.
CREATE TABLE counters (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO counters (name, value) VALUES ('sweeps', 0), ('commits', 0), ('packs', 0);
