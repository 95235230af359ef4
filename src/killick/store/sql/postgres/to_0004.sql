-- From format 3: the notification channel has a secret name. A process of an earlier version hears nothing, and polls.
-- The outbox is read by an index before its table is analyzed, too.

-- The notification channel. Any role of the database may listen to any channel, and read the source of any function: so
-- its name is derived from a secret of the store.
CREATE FUNCTION killick.channel() RETURNS text LANGUAGE sql STABLE
RETURN (SELECT 'killick:' || encode(substring(sha256('channel:'::bytea || value) for 16), 'hex')
    FROM killick.meta WHERE key = 'secret_key');

CREATE OR REPLACE FUNCTION killick.ring(run text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(killick.channel(), CASE WHEN octet_length(run) < 7000 THEN run ELSE '' END);
END $$;

-- Outbox positions are assigned by one reader at a time, to all visible rows: later commits get later positions.
CREATE OR REPLACE FUNCTION killick.place_feed() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    last_ bigint;
BEGIN
    PERFORM 1 FROM killick.feed WHERE feed.position IS NULL LIMIT 1;
    IF FOUND THEN
        PERFORM 1 FROM killick.feed_end FOR UPDATE;
        WITH fresh AS (
            SELECT id, row_number() OVER (ORDER BY id) AS place FROM killick.feed WHERE feed.position IS NULL
        ), placed AS (
            UPDATE killick.feed SET position = feed_end.position + fresh.place FROM fresh, killick.feed_end
            WHERE feed.id = fresh.id AND feed.position IS NULL RETURNING feed.position
        )
        UPDATE killick.feed_end SET position = coalesce((SELECT max(placed.position) FROM placed), feed_end.position);
    END IF;
    SELECT feed_end.position INTO last_ FROM killick.feed_end;
    RETURN last_;
END $$;
