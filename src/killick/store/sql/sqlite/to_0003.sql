-- Leases that say who is at work on what, an index of what is to wake, and the feed.

-- What each holder has, and until when.
CREATE INDEX heads_by_holder ON heads (holder, lease_until_us) WHERE holder IS NOT NULL;

-- A run that is over has no holder. A head that is not as it was written is left to be found.
UPDATE heads SET holder = NULL, lease_until_us = NULL,
    checksum = row_check(number, run, seq, hash, epoch, base, parent, NULL, NULL, removed)
WHERE holder IS NOT NULL AND number IN (SELECT number FROM runs WHERE status IN ('completed', 'failed', 'cancelled'))
    AND checksum = row_check(number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed);

DROP INDEX runs_by_wake;

-- What is to wake, by agent and priority: a long line of one agent keeps nobody from the lines of others.
CREATE INDEX runs_by_due ON runs (agent, priority, wake_at_us, number) WHERE wake_at_us IS NOT NULL;

-- Events that hooks may want to hear of, in the order of their commits, until all have heard them.
CREATE TABLE feed (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL
) STRICT;

CREATE INDEX feed_by_run ON feed (number);
