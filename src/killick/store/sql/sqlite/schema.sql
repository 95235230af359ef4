-- Format 8. Truth: meta, heads, events, pieces, inbox, claims, slots. Derived and rebuilt when wrong: piece_uses, snapshots,
-- runs, tags, quarantine, marks, marked. A queue: feed. Rows outside the hash chain have a checksum.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One row a run: its log's length and its lease. A removed run keeps its row as a tombstone.
CREATE TABLE heads (
    number INTEGER PRIMARY KEY,
    run TEXT NOT NULL UNIQUE,
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    base INTEGER NOT NULL,
    parent TEXT,
    holder TEXT,
    lease_until_us INTEGER,
    removed INTEGER NOT NULL DEFAULT 0,
    checksum INTEGER NOT NULL
) STRICT;

-- Each holder's runs, and the ends of their leases.
CREATE INDEX heads_by_holder ON heads (holder, lease_until_us) WHERE holder IS NOT NULL;

-- Removing a run looks for its forks.
CREATE INDEX heads_by_parent ON heads (parent) WHERE parent IS NOT NULL;

-- The id combines the run's number and the seq, so that a run's events are stored in reading order without a second
-- index.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    body BLOB NOT NULL,
    hash BLOB NOT NULL,
    data BLOB, -- last, so that reading the rest of a row stops before it
    number INTEGER GENERATED ALWAYS AS (id >> 32) VIRTUAL,
    seq INTEGER GENERATED ALWAYS AS (id & 4294967295) VIRTUAL
) STRICT;

-- The only way to append events: it moves the head from the position that its writer saw, or fails. One statement takes
-- up to two events: the append that starts a step also has the end of the step before.
CREATE VIEW appends AS
SELECT number, seq AS after, hash AS before, epoch, holder, lease_until_us, seq, NULL AS body, NULL AS data, hash, checksum,
    NULL AS body_1, NULL AS data_1, NULL AS hash_1 FROM heads;

CREATE TRIGGER append_moves_the_head INSTEAD OF INSERT ON appends
BEGIN
    UPDATE heads SET seq = new.seq, hash = new.hash, checksum = new.checksum
    WHERE number = new.number AND seq = new.after AND hash = new.before AND epoch = new.epoch
        AND holder IS new.holder AND lease_until_us IS new.lease_until_us AND NOT removed;
    SELECT raise(ABORT, 'head moved') WHERE changes() = 0;
    INSERT INTO events (id, body, data, hash)
    SELECT (new.number << 32) + new.seq - 1, new.body_1, new.data_1, new.hash_1 WHERE new.body_1 IS NOT NULL;
    INSERT INTO events (id, body, data, hash) VALUES ((new.number << 32) + new.seq, new.body, new.data, new.hash);
END;

-- Content-addressed values; a null body was erased.
CREATE TABLE pieces (
    piece INTEGER PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    codec TEXT NOT NULL,
    body BLOB
) STRICT;

-- The chunks that a run keeps alive: by its log and inbox (kind 0) or its snapshots (kind 1).
CREATE TABLE piece_uses (
    number INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    piece INTEGER NOT NULL,
    PRIMARY KEY (number, kind, piece)
) STRICT, WITHOUT ROWID;

CREATE TABLE inbox (
    number INTEGER NOT NULL,
    message INTEGER NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    body BLOB NOT NULL,
    sender TEXT,
    at_us INTEGER NOT NULL,
    taken INTEGER,
    root TEXT, -- of a renewed run: the id of the first run in the chain
    pieces BLOB, -- the hashes of the chunks of its body, which move with it
    checksum INTEGER NOT NULL,
    PRIMARY KEY (number, message),
    UNIQUE (number, id)
) STRICT, WITHOUT ROWID;

-- Messages are deduplicated over all renewals of a run.
CREATE INDEX inbox_by_root ON inbox (root, id) WHERE root IS NOT NULL;

-- The conditions of deliveries to a run: whether it is open, and what its waits still take. The row without a name has
-- the sum of the other checksums, by which a lost row is noticed.
CREATE TABLE slots (
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    token TEXT NOT NULL,
    places INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (number, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE claims (
    space TEXT NOT NULL,
    key BLOB NOT NULL,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (space, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX claims_by_run ON claims (number);

CREATE TABLE runs (
    number INTEGER PRIMARY KEY,
    agent TEXT NOT NULL,
    status TEXT NOT NULL,
    priority INTEGER NOT NULL,
    wake_at_us INTEGER,
    started_at_us INTEGER NOT NULL,
    changed_at_us INTEGER NOT NULL,
    tags TEXT NOT NULL,
    delivered INTEGER NOT NULL,
    delivered_checksum INTEGER NOT NULL, -- an inbox that lost its last message is known by this count alone
    lane INTEGER NOT NULL DEFAULT 0 -- of its fairness key
) STRICT;

-- Waiting runs by agent, priority and lane, so that one backlog does not slow down others.
CREATE INDEX runs_by_due ON runs (agent, priority, lane, wake_at_us, number) WHERE wake_at_us IS NOT NULL;
CREATE INDEX runs_by_status ON runs (status, number);
CREATE INDEX runs_by_agent ON runs (agent, number);

-- Used only to count an agent's runs by status.
CREATE INDEX runs_by_standing ON runs (agent, status, number, changed_at_us);

CREATE TABLE tags (
    tag TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (tag, number)
) STRICT, WITHOUT ROWID;

CREATE INDEX tags_by_run ON tags (number);

CREATE TABLE snapshots (
    number INTEGER NOT NULL,
    fold INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL,
    root BLOB NOT NULL,
    PRIMARY KEY (number, fold, seq)
) STRICT, WITHOUT ROWID;

-- Runs that verification found broken; it would find them again.
CREATE TABLE quarantine (
    number INTEGER PRIMARY KEY,
    reason TEXT NOT NULL
) STRICT;

-- Rows that repairs removed from a log, kept unchanged.
CREATE TABLE aside (
    id INTEGER PRIMARY KEY,
    body BLOB NOT NULL,
    data BLOB,
    hash BLOB NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;

-- The search index: a term, as a number, at an event. Ordered as queries read it, newest first.
CREATE TABLE marks (
    term INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (term, at_us, number, seq)
) STRICT, WITHOUT ROWID;

-- Each run's index position, and the sum of its terms' checksums, which detects lost or changed rows.
CREATE TABLE marked (
    number INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    total INTEGER NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;

-- The outbox: events for hooks in commit order, until every hook received them.
CREATE TABLE feed (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL
) STRICT;

CREATE INDEX feed_by_run ON feed (number);

-- Rate limits: when each bucket of tokens will be full again. Losing a row only forgets calls.
CREATE TABLE rate_limits (
    bucket BLOB PRIMARY KEY,
    full_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
