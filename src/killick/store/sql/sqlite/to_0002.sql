-- The search index, filled on the first query.

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
