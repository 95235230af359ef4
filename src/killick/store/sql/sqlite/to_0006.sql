-- From format 5: rate limits, which all processes of a store share.
CREATE TABLE rate_limits (
    bucket BLOB PRIMARY KEY,
    full_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
