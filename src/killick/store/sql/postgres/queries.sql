-- `killick.` is replaced by the schema of the store.

-- name: set_up_session
SET default_transaction_isolation = 'read committed'; SET bytea_output = 'hex'; SET jit = off;
SET lock_timeout = {lock_ms};
SELECT set_config('synchronous_commit', {synchronous_commit}, false)

-- A commit's durability must not depend on the server's default; a stronger setting is kept.
-- name: durable
CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END

-- What a session has that nobody changed.
-- name: role_settings
SELECT max(reset_val) FILTER (WHERE name = 'synchronous_commit'), max(reset_val) FILTER (WHERE name <> 'synchronous_commit')
FROM pg_settings WHERE name IN ('synchronous_commit', 'default_transaction_isolation')

-- name: parameter_types
SELECT unnest(parameter_types)::oid::integer FROM pg_prepared_statements WHERE name = '{name}'

-- name: lock_schema
SELECT pg_advisory_xact_lock(hashtextextended('{schema}', 20260101))

-- While a migration waits for a table, every other session waits behind it.
-- name: migrate_soon
SET LOCAL lock_timeout = 100; SET LOCAL statement_timeout = 0

-- name: lockers
SELECT concat_ws(' ', 'session', pid, '(' || concat_ws(', ', nullif(application_name, ''), state || ' for '
    || extract(epoch FROM clock_timestamp() - state_change)::bigint || ' s') || ')')
FROM pg_locks JOIN pg_class ON relation = pg_class.oid JOIN pg_stat_activity USING (pid)
WHERE relnamespace = to_regnamespace($1) AND pid <> pg_backend_pid() AND granted ORDER BY xact_start LIMIT 1

-- name: tables
SELECT relname::text FROM pg_class JOIN pg_namespace ON relnamespace = pg_namespace.oid WHERE nspname::text = $1

-- A role that owns its empty schema need not have the right to create one.
-- name: make_schema
DO $$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $$

-- name: namespaces
SELECT nspname::text, sum(pg_total_relation_size(pg_class.oid))::bigint
FROM pg_namespace JOIN pg_class ON relnamespace = pg_namespace.oid AND relkind = 'r'
WHERE nspname ~ '^killick(_[a-z0-9_]+)?$' AND has_schema_privilege(nspname, 'USAGE')
GROUP BY nspname HAVING bool_or(relname = 'meta') ORDER BY nspname

-- name: meta
SELECT key, value, checksum = killick.meta_check(key, value) FROM killick.meta

-- name: put_meta
INSERT INTO killick.meta (key, value, checksum) VALUES ($1, $2, killick.meta_check($1, $2))
ON CONFLICT (key) DO UPDATE SET value = excluded.value, checksum = excluded.checksum

-- name: now_us
SELECT killick.time_us(NULL)

-- name: listen
DO $$ BEGIN EXECUTE format('LISTEN %I', killick.channel()); END $$

-- the log -----------------------------------------------------------------------------------------

-- Moves the head from the position that its writer saw and adds the events, or does nothing.
-- name: append_one
WITH moved AS (
    UPDATE killick.heads SET seq = $5, hash = $6,
        checksum = killick.head_check(number, run, $5, $6, epoch, base, parent, removed)
    WHERE run = $1 AND seq = $2 AND hash = $3 AND epoch = $4 AND NOT removed
    RETURNING number, base, parent, holder, lease_until_us
), put AS (
    INSERT INTO killick.events (number, seq, body, hash, data) SELECT number, given.* FROM moved, (VALUES {rows}) AS given
)
SELECT base, parent, holder, lease_until_us FROM moved

-- name: append_all
SELECT * FROM killick.append_all(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22
)

-- name: acknowledged
SELECT run, events.seq, events.hash, epoch, base, parent, holder, lease_until_us
FROM killick.heads JOIN killick.events USING (number)
WHERE run = $1 AND events.seq = $2 AND events.hash = $3 AND epoch = $4 AND NOT removed

-- name: deliver_items
SELECT * FROM killick.deliver_items($1, $2, $3, $4, $5, $6, $7)

-- name: head
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM killick.heads WHERE run = $1

-- name: head_for_update
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM killick.heads
WHERE run = $1 FOR UPDATE

-- name: heads
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed FROM killick.heads
WHERE number > $1 AND NOT removed ORDER BY number LIMIT $2

-- name: number
SELECT number FROM killick.heads WHERE run = $1 AND NOT removed

-- The run's number is a subquery, not a join: then the index gives the order, and a page reads no more than itself.
-- name: events
SELECT seq, body, data, hash FROM killick.events
WHERE number = (SELECT number FROM killick.heads WHERE run = $1 AND NOT removed) AND seq > $2 ORDER BY seq LIMIT $3

-- TOASTed data is never read when only bodies are requested.
-- name: bodies
SELECT seq, body, NULL::bytea, hash FROM killick.events
WHERE number = (SELECT number FROM killick.heads WHERE run = $1 AND NOT removed) AND seq > $2 ORDER BY seq LIMIT $3

-- name: row
SELECT events.seq, body, data, events.hash FROM killick.heads JOIN killick.events USING (number)
WHERE run = $1 AND NOT removed AND events.seq = $2

-- One statement reads one database snapshot: the first row is the head with its fold snapshot, the others are events.
-- name: opening
WITH head AS MATERIALIZED (SELECT * FROM killick.heads WHERE run = $1 AND NOT removed), shot AS MATERIALIZED (
    SELECT snapshots.* FROM head JOIN killick.snapshots USING (number)
    WHERE fold = $2 AND snapshots.seq <= head.seq ORDER BY snapshots.seq DESC LIMIT 1
)
SELECT number, run, head.seq, head.hash, epoch, base, parent, holder, lease_until_us, removed, quarantined,
    shot.seq, fold, shot.hash, root, NULL::bytea, NULL::bytea
FROM head LEFT JOIN shot USING (number)
UNION ALL (
    SELECT NULL, NULL, events.seq, events.hash, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        body, data
    FROM head JOIN killick.events USING (number)
    WHERE events.seq > coalesce((SELECT seq FROM shot), -1) ORDER BY events.seq
)

-- values ------------------------------------------------------------------------------------------

-- name: pieces
SELECT hash, codec, body FROM killick.pieces WHERE hash = ANY ($1)

-- name: uses
SELECT kind::bigint, pieces.hash FROM killick.heads JOIN killick.piece_uses USING (number) JOIN killick.pieces USING (piece)
WHERE run = $1 AND NOT removed

-- name: use_pieces
INSERT INTO killick.piece_uses (number, kind, piece)
SELECT $1, 0, piece FROM killick.pieces WHERE hash = ANY ($2) FOR KEY SHARE

-- name: drop_log_uses
DELETE FROM killick.piece_uses WHERE number = $1 AND kind = 0

-- name: drop_snapshot_uses
DELETE FROM killick.piece_uses WHERE number = $1 AND kind = 1

-- Chunks that a writer is about to reference are locked by it and skipped.
-- name: unused
SELECT piece FROM killick.pieces WHERE NOT EXISTS (SELECT FROM killick.piece_uses WHERE piece_uses.piece = pieces.piece)
LIMIT $1 FOR UPDATE SKIP LOCKED

-- Checks again, because a reference may have been added between the first check and the lock.
-- name: sweep
WITH gone AS (
    DELETE FROM killick.pieces WHERE piece = ANY ($1) AND NOT EXISTS (
        SELECT FROM killick.piece_uses WHERE piece_uses.piece = ANY ($1) AND piece_uses.piece = pieces.piece
    )
    RETURNING piece
)
SELECT count(*) FROM gone

-- name: snapshot
SELECT seq, fold, hash, root FROM killick.snapshots
WHERE number = (SELECT number FROM killick.heads WHERE run = $1 AND NOT removed) AND fold = $2 AND seq <= $3
ORDER BY seq DESC LIMIT 1

-- name: snapshots
SELECT snapshots.seq, fold, snapshots.hash, root FROM killick.heads JOIN killick.snapshots USING (number)
WHERE run = $1 AND NOT removed ORDER BY fold, snapshots.seq

-- name: drop_snapshots
DELETE FROM killick.snapshots WHERE number = $1

-- leases ------------------------------------------------------------------------------------------

-- name: lease
UPDATE killick.heads SET epoch = epoch + 1, holder = $2, lease_until_us = killick.until_us($3, $4),
    checksum = killick.head_check(number, run, seq, hash, epoch + 1, base, parent, removed)
WHERE run = $1 AND NOT removed AND (holder IS NULL OR lease_until_us <= killick.time_us($3) OR epoch = $5)
RETURNING number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed

-- name: claim
SELECT (head).number, (head).run, (head).seq, (head).hash, (head).epoch, (head).base, (head).parent, (head).holder,
    (head).lease_until_us, (head).removed,
    (head).agent, (head).status, (head).priority, (head).wake_at_us, (head).started_at_us, (head).changed_at_us,
    (head).tags, (head).delivered, (head).delivered_checksum = killick.count_check((head).number, (head).delivered),
    left_by, left_until_us
FROM killick.claim_runs($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- As an array, because the planner may underestimate a join on holders. A row that another session has locked is passed
-- over, so that it costs its holder no other lease.
-- name: renew
UPDATE killick.heads SET lease_until_us = killick.until_us($2, $3) WHERE number = ANY (ARRAY(
    SELECT number FROM killick.heads
    WHERE holder = $1 AND run = ANY ($4::text[]) AND (lease_until_us IS NULL OR lease_until_us > killick.time_us($2))
    ORDER BY run FOR NO KEY UPDATE {locked}
)) RETURNING run, epoch

-- name: release
WITH freed AS (
    UPDATE killick.heads SET holder = CASE WHEN $4 THEN holder END,
        lease_until_us = CASE WHEN $4 THEN 0 END
    WHERE run = $1 AND epoch = $2 AND holder IS NOT NULL AND ($3::text IS NULL OR holder = $3) AND NOT removed
    RETURNING run, wake_at_us, status
)
SELECT killick.ring(run) FROM freed
WHERE $4 OR wake_at_us IS NOT NULL AND status NOT IN ('completed', 'failed', 'cancelled')

-- the inbox ---------------------------------------------------------------------------------------

-- name: inbox
SELECT message, id, name, body, sender, at_us, taken,
    inbox.checksum = killick.message_check(number, message, id, name, body, sender, at_us, taken, root, pieces)
FROM killick.heads JOIN killick.inbox USING (number)
WHERE run = $1 AND NOT removed AND message > $2 AND taken IS NULL AND ($3::text IS NULL OR name = $3)
ORDER BY message LIMIT $4

-- name: messages
SELECT message, id, name, body, sender, at_us, taken,
    inbox.checksum = killick.message_check(number, message, id, name, body, sender, at_us, taken, root, pieces)
FROM killick.heads JOIN killick.inbox USING (number)
WHERE run = $1 AND NOT removed ORDER BY message

-- name: message_with_id
SELECT message, id, name, body, sender, at_us, taken,
    inbox.checksum = killick.message_check(number, message, id, name, body, sender, at_us, taken, root, pieces)
FROM killick.heads JOIN killick.inbox USING (number)
WHERE run = $1 AND id = $2 AND NOT removed

-- name: slots_of
SELECT slots.name, token, places FROM killick.heads JOIN killick.slots USING (number)
WHERE run = $1 AND NOT removed ORDER BY slots.name

-- name: write_slots
SELECT killick.write_slots($1, $2)

-- name: drop_slots
DELETE FROM killick.slots WHERE number = $1

-- name: last_message
SELECT coalesce(max(message), 0) FROM killick.inbox WHERE number = $1

-- finding -----------------------------------------------------------------------------------------

-- name: owned
SELECT key, run, claims.seq FROM killick.claims JOIN killick.heads USING (number)
WHERE space = $1 AND key >= $2 AND key < $3 ORDER BY key

-- name: claims_of
SELECT space, key, claims.seq FROM killick.heads JOIN killick.claims USING (number) WHERE run = $1 AND NOT removed

-- name: indexed
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered,
    delivered_checksum = killick.count_check(number, delivered)
FROM killick.heads WHERE run = $1 AND NOT removed AND agent IS NOT NULL

-- name: tags_of
SELECT tag FROM killick.heads JOIN killick.tags USING (number) WHERE run = $1 AND NOT removed

-- name: count_inbox
UPDATE killick.heads SET delivered = $2, delivered_checksum = killick.count_check(number, $2) WHERE number = $1

-- name: drop_tags
DELETE FROM killick.tags WHERE number = $1

-- name: put_tags
INSERT INTO killick.tags (tag, number) SELECT tag, $1 FROM unnest($2::text[]) AS tag ON CONFLICT DO NOTHING

-- name: write_index
SELECT killick.write_head(killick.with_index(heads, $2), tags, wake_at_us) FROM killick.heads WHERE number = $1

-- Unused conditions of a listing are removed, and the rest determines the index.
-- name: runs
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered,
    delivered_checksum = killick.count_check(number, delivered)
FROM killick.heads WHERE number < $1 AND agent IS NOT NULL {conditions} ORDER BY number DESC LIMIT $2

-- name: runs_by_status
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered,
    delivered_checksum = killick.count_check(number, delivered)
FROM ({found}) AS found ORDER BY number DESC LIMIT $2

-- The status is no parameter: the planner would take a rare one for a common one, and read every newer run.
-- name: runs_of_status
(SELECT * FROM killick.heads WHERE status = '{status}' AND number < $1 AND agent IS NOT NULL {conditions}
ORDER BY number DESC LIMIT $2)

-- The sort key is `urgency_of`.
-- name: asking
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered,
    delivered_checksum = killick.count_check(number, delivered)
FROM (
    SELECT heads.*, CASE
        WHEN status = 'running' OR (wake_at_us <= $2::bigint AND delivered != 0) THEN 0::bigint
        WHEN wake_at_us <= $2::bigint THEN $3::bigint + 1
        ELSE coalesce(wake_at_us, $3::bigint)
    END AS at_us
    FROM killick.heads
    WHERE number IN (SELECT number FROM killick.tags WHERE tag = $1) AND status IN ('waiting', 'running')
) AS found
WHERE (at_us, -priority, changed_at_us, number) > ($4::bigint, $5::bigint, $6::bigint, $7::bigint)
ORDER BY at_us, -priority, changed_at_us, number LIMIT $8

-- name: tagged
number IN (SELECT number FROM killick.tags WHERE tag = {value})

-- name: run_statuses
SELECT number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed, status, quarantined,
    delivered
FROM killick.heads WHERE run = ANY ($1::text[]) AND NOT removed

-- name: counts
SELECT status, count(*) FROM killick.heads WHERE agent IS NOT NULL {conditions} GROUP BY status

-- Only ASCII letters are case-insensitive, independent of the database's locale.
-- name: containing
strpos(lower(run), lower({value}::text COLLATE "C")) > 0

-- A loose index scan: one index seek for each agent.
-- name: agents
WITH RECURSIVE names (agent) AS (
    SELECT min(agent) FROM killick.heads WHERE agent IS NOT NULL
    UNION ALL
    SELECT (SELECT min(heads.agent) FROM killick.heads WHERE heads.agent > names.agent)
    FROM names WHERE names.agent IS NOT NULL
)
SELECT agent FROM names WHERE agent IS NOT NULL

-- name: holdings
SELECT holder, count(*), min(lease_until_us),
    bool_or(lease_until_us IS NULL OR lease_until_us > killick.time_us($1))
FROM killick.heads WHERE holder IS NOT NULL AND NOT removed GROUP BY holder ORDER BY holder

-- name: due
SELECT number, run, agent, status, priority, wake_at_us, started_at_us, changed_at_us, tags, delivered,
    delivered_checksum = killick.count_check(number, delivered)
FROM killick.due_runs($1, killick.time_us($2), $3, NULL, NULL, $4, 63) JOIN killick.heads USING (number) ORDER BY place

-- name: soonest
SELECT killick.soonest_us($1::text[])

-- the feed ----------------------------------------------------------------------------------------

-- name: place_outbox
SELECT killick.place_feed()

-- name: outbox
SELECT position, run, feed.seq, kind FROM killick.feed JOIN killick.heads USING (number)
WHERE position > $1 AND ($2::text[] IS NULL OR kind = ANY ($2)) ORDER BY position LIMIT $3

-- name: trim_outbox
WITH gone AS (DELETE FROM killick.feed WHERE position <= $1 RETURNING id) SELECT count(*) FROM gone

-- keeping -----------------------------------------------------------------------------------------

-- name: quarantine
UPDATE killick.heads SET quarantined = $2 WHERE run = $1 AND NOT removed RETURNING number

-- name: quarantined
SELECT quarantined FROM killick.heads WHERE run = $1 AND NOT removed

-- name: displace
INSERT INTO killick.aside (number, seq, body, hash, data, checksum)
SELECT number, seq, body, hash, data, killick.aside_check(number, seq, body, hash, data)
FROM killick.events WHERE number = $1 AND seq > $2
ON CONFLICT (number, seq) DO UPDATE
SET body = excluded.body, hash = excluded.hash, data = excluded.data, checksum = excluded.checksum

-- name: drop_events
DELETE FROM killick.events WHERE number = $1 AND seq > $2

-- name: drop_rows
DELETE FROM killick.events WHERE number = $1 AND seq = ANY ($2::bigint[])

-- name: restore_pieces
INSERT INTO killick.pieces (hash, codec, body) SELECT * FROM unnest($1::bytea[], $2::text[], $3::bytea[])
ON CONFLICT (hash) DO UPDATE SET codec = excluded.codec, body = excluded.body

-- name: restore_message
INSERT INTO killick.inbox (number, message, id, name, body, sender, at_us, taken, root, pieces, checksum)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, killick.message_check(
    $1::bigint, $2::bigint, $3::text, $4::text, $5::bytea, $6::text, $7::bigint, $8::bigint, $9::text, $10::bytea
)
ON CONFLICT (number, message) DO UPDATE SET id = excluded.id, name = excluded.name, body = excluded.body,
    sender = excluded.sender, at_us = excluded.at_us, taken = excluded.taken, root = excluded.root,
    pieces = excluded.pieces, checksum = excluded.checksum

-- name: put_events
INSERT INTO killick.events (number, seq, body, hash, data)
SELECT $1, * FROM unnest($2::bigint[], $3::bytea[], $4::bytea[], $5::bytea[])

-- name: repair_head
INSERT INTO killick.heads (run, seq, hash, epoch, base, parent, holder, lease_until_us, checksum, delivered_checksum)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, '', '')
ON CONFLICT (run) DO UPDATE SET seq = excluded.seq, hash = excluded.hash, epoch = excluded.epoch, base = excluded.base,
    parent = excluded.parent, holder = excluded.holder, lease_until_us = excluded.lease_until_us, removed = false
RETURNING number

-- name: seal_head
UPDATE killick.heads SET checksum = killick.head_check(number, run, seq, hash, epoch, base, parent, removed),
    delivered_checksum = CASE delivered_checksum WHEN '' THEN killick.count_check(number, 0) ELSE delivered_checksum END
WHERE number = $1

-- name: displaced
SELECT aside.seq, body, data, aside.hash FROM killick.heads JOIN killick.aside USING (number)
WHERE run = $1 AND NOT removed ORDER BY aside.seq

-- name: has_fork
SELECT run FROM killick.heads WHERE parent = $1 AND NOT removed LIMIT 1

-- name: write_tombstone
UPDATE killick.heads SET removed = true, holder = NULL, lease_until_us = NULL, agent = NULL, status = NULL, tags = NULL,
    wake_at_us = NULL, quarantined = NULL,
    checksum = killick.head_check(number, run, seq, hash, epoch, base, parent, true)
WHERE number = $1

-- name: drop_uses
DELETE FROM killick.piece_uses WHERE number = $1

-- name: drop_messages
DELETE FROM killick.inbox WHERE number = $1

-- name: drop_outbox
DELETE FROM killick.feed WHERE number = $1

-- marks -------------------------------------------------------------------------------------------

-- name: unindexed
SELECT heads.number, run, base, coalesce(marked.seq, base) FROM killick.heads LEFT JOIN killick.marked USING (number)
WHERE heads.number > $1 AND NOT removed AND heads.seq > coalesce(marked.seq, base) ORDER BY heads.number LIMIT $2

-- name: lock_heads
SELECT killick.lock_heads($1, '{}')

-- name: index_position
SELECT heads.number, base, coalesce(marked.seq, base), coalesce(total, 0)
FROM killick.heads LEFT JOIN killick.marked USING (number) WHERE run = $1 AND NOT removed FOR NO KEY UPDATE OF heads

-- name: put_terms
INSERT INTO killick.marks (term, at_us, number, seq)
SELECT term, at_us, $1, seq FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS given(term, at_us, seq)
ON CONFLICT DO NOTHING RETURNING term, at_us, number, seq

-- name: put_index_position
INSERT INTO killick.marked (number, seq, total, checksum) VALUES ($1, $2, $3, $4)
ON CONFLICT (number) DO UPDATE SET seq = excluded.seq, total = excluded.total, checksum = excluded.checksum

-- name: search
SELECT at_us, number, seq, run FROM killick.marked_places($1, $2, $3, $4, $5, $6)

-- name: drop_terms
DELETE FROM killick.marks WHERE number = ANY ($1)

-- name: drop_index_positions
DELETE FROM killick.marked WHERE number = ANY ($1)

-- name: stale_index_positions
SELECT number FROM killick.marked JOIN killick.heads USING (number) WHERE removed

-- inspection --------------------------------------------------------------------------------------

-- name: names
SELECT number, run FROM killick.heads

-- Rows that fail their checksum.
-- name: wrong_rows
SELECT 'meta', NULL::bigint, key FROM killick.meta WHERE checksum <> killick.meta_check(key, value)
UNION ALL SELECT 'heads', number, concat(number, ', ', run) FROM killick.heads
    WHERE checksum <> killick.head_check(number, run, seq, hash, epoch, base, parent, removed)
UNION ALL SELECT 'inbox', number, concat(number, ', ', message) FROM killick.inbox
    WHERE checksum <> killick.message_check(number, message, id, name, body, sender, at_us, taken, root, pieces)
UNION ALL SELECT 'slots', number, concat(number, ', ', name) FROM killick.slots
    WHERE checksum <> killick.slot_check(number, name, token, places)
UNION ALL SELECT 'claims', number, space FROM killick.claims
    WHERE checksum <> killick.claim_check(space, key, number, seq)
UNION ALL SELECT 'aside', number, concat(number, ', ', seq) FROM killick.aside
    WHERE checksum <> killick.aside_check(number, seq, body, hash, data)

-- Damaged values, and whether a log uses them. A full scan of all values.
-- name: wrong_pieces
SELECT hash, EXISTS (SELECT FROM killick.piece_uses WHERE kind = 0 AND piece_uses.piece = pieces.piece) FROM killick.pieces
WHERE body IS NOT NULL AND sha256('\x02'::bytea || convert_to(codec, 'UTF8') || '\x00'::bytea || body) <> hash

-- Rows without an owning run: their head is gone, or they were inserted by another program.
-- name: strays
SELECT 'events', number, count(*) FROM killick.events
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'inbox', number, count(*) FROM killick.inbox
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'slots', number, count(*) FROM killick.slots
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'claims', number, count(*) FROM killick.claims
    WHERE number NOT IN (SELECT number FROM killick.heads) GROUP BY number
UNION ALL SELECT 'tags', number, count(*) FROM killick.tags
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'snapshots', number, count(*) FROM killick.snapshots
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'feed', number, count(*) FROM killick.feed
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed) GROUP BY number
UNION ALL SELECT 'piece_uses', number, count(*) FROM killick.piece_uses
    WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed)
        OR piece NOT IN (SELECT piece FROM killick.pieces) OR kind NOT IN (0, 1) GROUP BY number

-- name: all_terms
SELECT number, term, at_us, seq FROM killick.marks

-- name: all_index_positions
SELECT number, seq, total, checksum FROM killick.marked

-- name: drop_pieces
DELETE FROM killick.pieces WHERE hash = ANY ($1)

-- name: clear_uses
DELETE FROM killick.piece_uses WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed)
    OR piece NOT IN (SELECT piece FROM killick.pieces) OR kind NOT IN (0, 1)

-- name: clear_tags
DELETE FROM killick.tags WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed)

-- name: clear_snapshots
DELETE FROM killick.snapshots WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed)

-- name: clear_outbox
DELETE FROM killick.feed WHERE number NOT IN (SELECT number FROM killick.heads WHERE NOT removed)

-- conditions --------------------------------------------------------------------------------------

-- name: settings
SELECT current_setting('server_version'), current_setting('server_version_num')::bigint, current_setting('fsync'),
    current_setting('full_page_writes'), current_setting('synchronous_commit'), pg_is_in_recovery(),
    killick.time_us(NULL), pg_database_size(current_database())::bigint, current_setting('max_connections'),
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
    (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start))::bigint, 0) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL),
    current_setting('lock_timeout')

-- name: take_tokens
SELECT killick.take_tokens($1, $2, $3, $4)

-- name: sweep_full
DELETE FROM killick.rate_limits WHERE full_at_us <= killick.time_us($1)
