-- name: meta
SELECT key, value, checksum FROM meta

-- name: put_meta
INSERT INTO meta (key, value, checksum) VALUES (?, ?, ?)

-- name: head
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM heads WHERE run = ?

-- name: heads
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM heads
WHERE number > ? AND NOT removed ORDER BY number LIMIT ?

-- name: put_head
INSERT INTO heads (number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: write_lease
UPDATE heads SET epoch = ?, holder = ?, lease_until_us = ?, removed = ?, checksum = ? WHERE number = ? AND checksum = ?

-- name: write_head
UPDATE heads SET seq = ?, hash = ?, holder = ?, lease_until_us = ?, checksum = ? WHERE number = ?

-- name: next_number
SELECT coalesce(max(number), 0) + 1 FROM heads

-- name: has_fork
SELECT 1 FROM heads WHERE parent = ? AND NOT removed LIMIT 1

-- name: append_events
INSERT INTO appends (
    number, after, before, epoch, holder, lease_until_us, seq, body, data, hash, checksum,
    body_1, data_1, hash_1
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: put_event
INSERT INTO events (id, body, data, hash) VALUES (?, ?, ?, ?)

-- name: events
SELECT id & 4294967295, body, data, hash FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?

-- Overflow pages of data are never read when only bodies are requested.
-- name: bodies
SELECT id & 4294967295, body, NULL, hash FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT ?

-- name: event
SELECT id & 4294967295, body, data, hash FROM events WHERE id = ?

-- name: row
SELECT id & 4294967295, body, data, hash FROM events
WHERE id = (SELECT number << 32 FROM heads WHERE run = ? AND NOT removed) + ?

-- name: erase_event
UPDATE events SET data = NULL WHERE id = ?

-- name: drop_events
DELETE FROM events WHERE id > ? AND id <= ?

-- Storing an erased or a damaged chunk again restores its bytes.
-- name: put_piece
INSERT INTO pieces (hash, codec, body) VALUES (?, ?, ?)
ON CONFLICT (hash) DO UPDATE SET codec = excluded.codec, body = excluded.body WHERE excluded.body IS NOT NULL AND pieces.body IS NOT excluded.body

-- name: restore_piece
INSERT INTO pieces (hash, codec, body) VALUES (?, ?, ?)
ON CONFLICT (hash) DO UPDATE SET codec = excluded.codec, body = excluded.body

-- name: use_piece
INSERT OR IGNORE INTO piece_uses (number, kind, piece) SELECT ?, ?, piece FROM pieces WHERE hash = ?

-- name: piece
SELECT hash, codec, body FROM pieces WHERE hash = ?

-- name: erase_piece
UPDATE pieces SET body = NULL WHERE hash = ?

-- name: uses
SELECT kind, pieces.hash FROM piece_uses JOIN pieces USING (piece)
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed)

-- Keeps every value from the sweep until verification has found the runs that use it.
-- name: keep_pieces
INSERT OR IGNORE INTO piece_uses (number, kind, piece) SELECT 0, 0, piece FROM pieces

-- name: drop_uses
DELETE FROM piece_uses WHERE number = ?

-- name: drop_log_uses
DELETE FROM piece_uses WHERE number = ? AND kind = 0

-- name: drop_snapshot_uses
DELETE FROM piece_uses WHERE number = ? AND kind = 1

-- Runs inside the one write transaction, so that no append can intervene.
-- name: sweep
DELETE FROM pieces WHERE piece IN (
    SELECT piece FROM pieces WHERE piece NOT IN (SELECT piece FROM piece_uses) LIMIT ?
)

-- name: put_snapshot
INSERT OR REPLACE INTO snapshots (number, fold, seq, hash, root) VALUES (?, ?, ?, ?, ?)

-- name: snapshot
SELECT seq, fold, hash, root FROM snapshots
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed) AND fold = ?2 AND seq <= ?3 ORDER BY seq DESC LIMIT 1

-- name: snapshots
SELECT seq, fold, hash, root FROM snapshots
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed) ORDER BY fold, seq

-- name: drop_snapshots
DELETE FROM snapshots WHERE number = ?

-- name: message
SELECT message, id, name, body, sender, at_us, taken, root, pieces FROM inbox WHERE number = ? AND message = ?

-- name: message_by_id
SELECT message, id, name, body, sender, at_us, taken FROM inbox WHERE number = ? AND id = ?

-- name: message_with_id
SELECT message, id, name, body, sender, at_us, taken, root, pieces, number, checksum FROM inbox
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed) AND id = ?2

-- A message in a chain of renewals: delivered to the first run, or to a later one.
-- name: message_in_chain
SELECT run, message, id, name, body, sender, at_us, taken FROM (
    SELECT number, message, id, name, body, sender, at_us, taken FROM inbox WHERE root = ?1 AND id = ?2
    UNION ALL
    SELECT number, message, id, name, body, sender, at_us, taken FROM inbox
    WHERE number = (SELECT number FROM heads WHERE run = ?1) AND id = ?2
) JOIN heads USING (number) ORDER BY number DESC LIMIT 1

-- name: put_message
INSERT INTO inbox (number, message, id, name, body, sender, at_us, taken, root, pieces, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: drop_message
DELETE FROM inbox WHERE number = ? AND message = ?

-- name: untaken
SELECT message, id, name, body, sender, at_us, taken, root, pieces FROM inbox
WHERE number = ? AND taken IS NULL ORDER BY message

-- name: slots
SELECT name, token, places, checksum FROM slots WHERE number = ? AND name != ''

-- name: slot
SELECT name, token, places, checksum FROM slots WHERE number = ? AND name = ?

-- name: slots_of
SELECT name, token, places FROM slots
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed) AND name != '' ORDER BY name

-- name: put_slot
INSERT OR REPLACE INTO slots (number, name, token, places, checksum) VALUES (?, ?, ?, ?, ?)

-- name: drop_slot
DELETE FROM slots WHERE number = ? AND name = ?

-- name: drop_slots
DELETE FROM slots WHERE number = ?

-- name: all_slots
SELECT number, name, token, places, checksum FROM slots

-- name: set_taken
UPDATE inbox SET taken = ?, checksum = ? WHERE number = ? AND message = ?

-- name: erase_message
UPDATE inbox SET body = ?, checksum = ? WHERE number = ? AND message = ?

-- name: inbox
SELECT message, id, name, body, sender, at_us, taken, root, pieces, number, checksum FROM inbox
WHERE number = (SELECT number FROM heads WHERE run = ? AND NOT removed) AND message > ? AND taken IS NULL AND (?3 IS NULL OR name = ?3) ORDER BY message LIMIT ?4

-- name: messages
SELECT message, id, name, body, sender, at_us, taken, root, pieces, number, checksum FROM inbox
WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed) ORDER BY message

-- name: unseen
SELECT min(at_us) FROM inbox WHERE number = ? AND message > ? AND taken IS NULL

-- name: names_after
SELECT message, name FROM inbox WHERE number = ? AND message > ? ORDER BY message

-- name: last_message
SELECT coalesce(max(message), 0) FROM inbox WHERE number = ?

-- name: drop_messages
DELETE FROM inbox WHERE number = ?

-- name: owner
SELECT heads.run, claims.seq FROM claims JOIN heads USING (number) WHERE space = ? AND key = ?

-- name: owned
SELECT key, heads.run, claims.seq FROM claims JOIN heads USING (number)
WHERE space = ? AND key >= ? AND key < ? ORDER BY key

-- The oldest run with a tag that no message has made due yet.
-- name: first_waiting
SELECT run FROM tags JOIN runs USING (number) JOIN heads USING (number)
WHERE tag = ? AND coalesce(wake_at_us > ?, 1) AND number NOT IN (SELECT number FROM quarantine)
ORDER BY tags.number LIMIT 1

-- name: claims_of
SELECT space, key, seq FROM claims WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed)

-- name: put_claim
INSERT INTO claims (space, key, number, seq, checksum) VALUES (?, ?, ?, ?, ?)

-- name: drop_claim
DELETE FROM claims WHERE space = ? AND key = ? AND number = ?

-- name: run_row
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum
FROM runs JOIN heads USING (number) WHERE number = ?

-- name: index_before
SELECT wake_at_us, tags, delivered, delivered_checksum FROM runs WHERE number = ?

-- name: indexed
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum
FROM heads JOIN runs USING (number) WHERE run = ? AND NOT removed

-- name: put_run
INSERT INTO runs (number, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum,
    lane)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
ON CONFLICT (number) DO UPDATE SET agent = ?2, status = ?3, priority = ?4, wake_at_us = ?5,
    started_at_us = ?6, changed_at_us = ?7, tags = ?8, delivered = ?9, delivered_checksum = ?10, lane = ?11

-- name: lanes
SELECT number, tags, lane FROM runs

-- name: set_lane
UPDATE runs SET lane = ? WHERE number = ?

-- name: run_delivered
UPDATE runs SET delivered = ?, delivered_checksum = ?, wake_at_us = ? WHERE number = ?

-- name: drop_run
DELETE FROM runs WHERE number = ?

-- name: put_tag
INSERT OR IGNORE INTO tags (tag, number) VALUES (?, ?)

-- name: drop_tag
DELETE FROM tags WHERE tag = ? AND number = ?

-- name: is_tagged
SELECT EXISTS (SELECT 1 FROM tags WHERE tag = ?)

-- name: drop_tags
DELETE FROM tags WHERE number = ?

-- name: tags_of
SELECT tag FROM tags WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed)

-- Unused conditions of a listing are removed, and the rest determines the index.
-- name: runs
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum
FROM {source} WHERE number < ? {conditions} ORDER BY number DESC LIMIT ?

-- Only the runs of a page are joined with their heads. The sort key is `urgency_of`.
-- name: asking
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum
FROM (
    SELECT * FROM (
        SELECT runs.*, CASE
            WHEN status = 'running' OR (wake_at_us <= ?2 AND delivered != 0) THEN 0
            WHEN wake_at_us <= ?2 THEN ?3 + 1
            ELSE coalesce(wake_at_us, ?3)
        END AS at_us
        FROM tags AS tagged CROSS JOIN runs USING (number)
        WHERE tag = ?1 AND status IN ('waiting', 'running')
    )
    WHERE (at_us, -priority, changed_at_us, number) > (?4, ?5, ?6, ?7)
    ORDER BY at_us, -priority, changed_at_us, number LIMIT ?8
)
CROSS JOIN heads USING (number) ORDER BY at_us, -priority, changed_at_us, number

-- name: from_runs
runs JOIN heads USING (number)

-- A tag's runs are indexed by number, for any number of runs.
-- name: from_tags
tags AS tagged CROSS JOIN runs USING (number) CROSS JOIN heads USING (number)

-- Ids are scanned in number order, and only matching runs are read.
-- name: from_heads
heads NOT INDEXED CROSS JOIN runs USING (number)

-- name: from_held
heads INDEXED BY heads_by_holder CROSS JOIN runs USING (number)

-- name: counts
SELECT status, count(*) FROM {source} WHERE true {conditions} GROUP BY +status

-- name: only_quarantined
 AND number IN (SELECT number FROM quarantine)

-- One index seek for each agent.
-- name: agents
WITH RECURSIVE names (agent) AS (
    SELECT min(agent) FROM runs
    UNION ALL
    SELECT (SELECT min(runs.agent) FROM runs WHERE runs.agent > names.agent) FROM names WHERE names.agent IS NOT NULL
)
SELECT agent FROM names WHERE agent IS NOT NULL

-- name: next_status
SELECT min(status) FROM runs WHERE agent = ? AND status > ?

-- name: count_by_status
SELECT count(*) FROM runs INDEXED BY runs_by_standing WHERE agent = ? AND status = ? {conditions}

-- Each agent, priority and lane with waiting runs, and its earliest wake time: one index seek each.
-- name: wake_queues
WITH RECURSIVE lines (number) AS (
    SELECT number FROM (
        SELECT number FROM runs INDEXED BY runs_by_due WHERE wake_at_us IS NOT NULL
        ORDER BY agent, priority, lane, wake_at_us LIMIT 1
    )
    UNION ALL
    SELECT coalesce((
        SELECT number FROM runs AS later INDEXED BY runs_by_due
        WHERE wake_at_us IS NOT NULL AND later.agent = runs.agent AND later.priority = runs.priority
            AND later.lane > runs.lane
        ORDER BY lane, wake_at_us LIMIT 1
    ), (
        SELECT number FROM runs AS later INDEXED BY runs_by_due
        WHERE wake_at_us IS NOT NULL AND later.agent = runs.agent AND later.priority > runs.priority
        ORDER BY priority, lane, wake_at_us LIMIT 1
    ), (
        SELECT number FROM runs AS later INDEXED BY runs_by_due
        WHERE wake_at_us IS NOT NULL AND later.agent > runs.agent
        ORDER BY agent, priority, lane, wake_at_us LIMIT 1
    )) FROM lines JOIN runs USING (number)
)
SELECT agent, priority, lane, wake_at_us FROM lines JOIN runs USING (number)

-- name: waking
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum, seq, hash, epoch, base, parent, holder, lease_until_us, removed
FROM runs INDEXED BY runs_by_due JOIN heads USING (number)
WHERE agent = ? AND priority = ? AND lane = ? AND wake_at_us <= ? AND status NOT IN ('completed', 'failed', 'cancelled')
AND holder IS NULL AND number NOT IN (SELECT number FROM quarantine) ORDER BY wake_at_us, number LIMIT ?

-- name: holders
SELECT DISTINCT holder FROM heads WHERE holder IS NOT NULL

-- name: holdings
SELECT holder, count(*), min(lease_until_us), max(lease_until_us IS NULL OR lease_until_us > ?) FROM heads
WHERE holder IS NOT NULL GROUP BY holder

-- Without a time, all runs of a holder. A paused run waits for its wake time.
-- name: abandoned
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered, delivered_checksum, seq, hash, epoch, base, parent, holder, lease_until_us, removed,
    CASE status WHEN 'paused' THEN wake_at_us ELSE changed_at_us END AS since
FROM heads JOIN runs USING (number) WHERE holder = ?1 AND (?2 IS NULL OR lease_until_us <= ?2)
AND status NOT IN ('completed', 'failed', 'cancelled') AND (status != 'paused' OR wake_at_us <= ?3)
AND number NOT IN (SELECT number FROM quarantine) {agents} ORDER BY priority DESC, since, number LIMIT ?

-- name: held
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM heads
WHERE holder = ? AND (lease_until_us IS NULL OR lease_until_us > ?)

-- name: put_outbox
INSERT INTO feed (number, seq, kind) VALUES (?, ?, ?)

-- name: outbox
SELECT position, run, feed.seq, kind FROM feed JOIN heads USING (number)
WHERE position > ?1 AND (?2 IS NULL OR kind IN (SELECT value FROM json_each(?2))) ORDER BY position LIMIT ?3

-- The file remembers the last assigned position, also when the outbox is empty.
-- name: outbox_end
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'feed'), 0)

-- name: trim_outbox
DELETE FROM feed WHERE position <= ?

-- name: drop_outbox
DELETE FROM feed WHERE number = ?

-- Everything for resuming a run except its events.
-- name: opening
SELECT heads.number, run, heads.seq, heads.hash, epoch, base, parent, holder, lease_until_us, removed,
    reason, snapshots.seq, snapshots.fold, snapshots.hash, snapshots.root, checksum
FROM heads LEFT JOIN quarantine ON quarantine.number = heads.number
LEFT JOIN snapshots ON snapshots.number = heads.number AND snapshots.fold = ?1 AND snapshots.seq = (
    SELECT max(seq) FROM snapshots AS newer WHERE newer.number = heads.number AND newer.fold = ?1 AND newer.seq <= heads.seq
) WHERE run = ?2

-- name: run_statuses
SELECT heads.number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed, status, reason,
    coalesce(delivered, 0)
FROM heads LEFT JOIN runs USING (number) LEFT JOIN quarantine USING (number)
WHERE run IN (SELECT value FROM json_each(?)) AND NOT removed

-- name: quarantined
SELECT reason FROM quarantine WHERE number = (SELECT number FROM heads WHERE run = ?1 AND NOT removed)

-- name: put_quarantine
INSERT OR REPLACE INTO quarantine (number, reason) VALUES (?, ?)

-- name: drop_quarantine
DELETE FROM quarantine WHERE number = ?

-- name: put_displaced
INSERT OR REPLACE INTO aside (id, body, data, hash, checksum) VALUES (?, ?, ?, ?, ?)

-- name: displaced
SELECT id & 4294967295, body, data, aside.hash FROM heads JOIN aside ON id > number << 32 AND id <= (number << 32) + 4294967295
WHERE run = ? AND NOT removed ORDER BY id

-- name: displaced_row
SELECT id, body, NULL, hash FROM aside WHERE id = ?

-- name: all_heads
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed, checksum FROM heads

-- name: all_messages
SELECT number, message, id, name, body, sender, at_us, taken, root, pieces, checksum FROM inbox

-- name: all_claims
SELECT space, key, number, seq, checksum FROM claims

-- name: all_displaced
SELECT id, body, data, hash, checksum FROM aside

-- name: all_pieces
SELECT piece, hash, codec, body FROM pieces

-- name: log_pieces
SELECT DISTINCT piece FROM piece_uses WHERE kind = 0

-- name: drop_piece
DELETE FROM pieces WHERE hash = ?

-- Rows without an owning run: their head is gone, or they were inserted by another program.
-- name: strays
SELECT 'events', number, count(*) FROM events WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'inbox', number, count(*) FROM inbox WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'claims', number, count(*) FROM claims WHERE number NOT IN (SELECT number FROM heads) GROUP BY number
UNION ALL SELECT 'slots', number, count(*) FROM slots WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'runs', number, count(*) FROM runs WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'tags', number, count(*) FROM tags WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'snapshots', number, count(*) FROM snapshots WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'quarantine', number, count(*) FROM quarantine WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'feed', number, count(*) FROM feed WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'piece_uses', number, count(*) FROM piece_uses WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)
    OR piece NOT IN (SELECT piece FROM pieces) OR kind NOT IN (0, 1) GROUP BY number

-- name: count_heads
SELECT count(*), coalesce(max(number), 0) FROM heads

-- name: count_tables
SELECT count(*) FROM sqlite_master

-- name: drop_head
DELETE FROM heads WHERE number = ?

-- name: clear_uses
DELETE FROM piece_uses WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed) OR piece NOT IN (SELECT piece FROM pieces) OR kind NOT IN (0, 1)

-- name: clear_runs
DELETE FROM runs WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)

-- name: clear_tags
DELETE FROM tags WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)

-- name: clear_snapshots
DELETE FROM snapshots WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)

-- name: clear_outbox
DELETE FROM feed WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)

-- name: clear_quarantine
DELETE FROM quarantine WHERE number NOT IN (SELECT number FROM heads WHERE NOT removed)

-- name: unindexed
SELECT heads.number, run, base, coalesce(marked.seq, base) FROM heads LEFT JOIN marked USING (number)
WHERE heads.number > ? AND NOT removed AND heads.seq > coalesce(marked.seq, base) ORDER BY heads.number LIMIT ?

-- name: index_position
SELECT heads.number, base, coalesce(marked.seq, base), coalesce(total, 0) FROM heads LEFT JOIN marked USING (number)
WHERE run = ? AND NOT removed

-- name: put_term
INSERT OR IGNORE INTO marks (term, at_us, number, seq) VALUES (?, ?, ?, ?)

-- name: put_index_position
INSERT OR REPLACE INTO marked (number, seq, total, checksum) VALUES (?, ?, ?, ?)

-- name: newest_term
SELECT at_us, number, seq FROM marks WHERE term = ? AND (at_us, number, seq) <= (?, ?, ?)
ORDER BY at_us DESC, number DESC, seq DESC LIMIT 1

-- The terms of a removed run wait for the sweep; a run whose terms were dropped has none.
-- name: indexed_run
SELECT run FROM heads JOIN marked USING (number) WHERE number = ? AND NOT removed

-- name: drop_terms
DELETE FROM marks WHERE number IN ({numbers})

-- name: drop_index_positions
DELETE FROM marked WHERE number IN ({numbers})

-- name: stale_index_positions
SELECT number FROM marked JOIN heads USING (number) WHERE removed

-- name: all_terms
SELECT number, term, at_us, seq FROM marks

-- name: all_index_positions
SELECT number, seq, total, checksum FROM marked

-- name: full_at
SELECT full_at_us FROM rate_limits WHERE bucket = ?

-- name: put_full_at
INSERT OR REPLACE INTO rate_limits (bucket, full_at_us) VALUES (?, ?)

-- name: sweep_full
DELETE FROM rate_limits WHERE full_at_us <= ?

-- name: tables
SELECT name FROM sqlite_schema WHERE type = 'table'

-- name: indexes
SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ?

-- name: tree_sql
SELECT sql FROM sqlite_schema WHERE name = ?

-- Reads the index alone, which knows the runs whose heads are lost.
-- name: known_runs
SELECT run FROM heads INDEXED BY sqlite_autoindex_heads_1

-- Reads a table around its damaged pages.
-- name: readable
SELECT {columns} FROM {table} NOT INDEXED {conditions}

-- name: known_pieces
SELECT hash FROM pieces INDEXED BY sqlite_autoindex_pieces_1

-- Reads a table as the store does.
-- name: kept
SELECT {columns} FROM {table} WHERE {conditions}

-- name: rebuilt_index
CREATE INDEX {fresh} ON {table} ({columns}) {conditions}

-- name: put_rebuilt
INSERT OR IGNORE INTO {fresh} VALUES ({values})

-- The damaged tree keeps its pages until VACUUM.
-- name: swap_tree
UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?

-- name: drop_tree
DELETE FROM sqlite_schema WHERE name = ?
