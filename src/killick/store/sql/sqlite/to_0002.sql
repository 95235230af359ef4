-- Marks: an index for questions across runs. It is filled when somebody asks.

-- What questions across runs are answered from: a term, as a number, stands at an event. In the order that
-- questions read them, newest first.
CREATE TABLE marks (
    term INTEGER NOT NULL,
    at_us INTEGER NOT NULL,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (term, at_us, number, seq)
) STRICT, WITHOUT ROWID;

-- How far each run is marked, and the sum of its marks' checksums, by which a lost or changed mark is known.
CREATE TABLE marked (
    number INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    total INTEGER NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;
