-- Leases that name their holder, an index of waiting runs, and the outbox.

-- Each holder's runs, and the ends of their leases.
CREATE INDEX heads_by_holder ON heads (holder, lease_until_us) WHERE holder IS NOT NULL;

-- An ended run has no holder. A damaged head is left for verification.
UPDATE heads SET holder = NULL, lease_until_us = NULL,
    checksum = row_check(number, run, seq, hash, epoch, base, parent, NULL, NULL, removed)
WHERE holder IS NOT NULL AND number IN (SELECT number FROM runs WHERE status IN ('completed', 'failed', 'cancelled'))
    AND checksum = row_check(number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed);

DROP INDEX runs_by_wake;

-- Waiting runs by agent and priority, so that one agent's backlog does not slow down others.
CREATE INDEX runs_by_due ON runs (agent, priority, wake_at_us, number) WHERE wake_at_us IS NOT NULL;

-- The outbox: events for hooks in commit order, until every hook received them.
CREATE TABLE feed (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL
) STRICT;

CREATE INDEX feed_by_run ON feed (number);
