-- From format 3: the notification channel has a secret name. A process of an earlier version hears nothing, and polls.

-- The notification channel. Any role of the database may listen to any channel, and read the source of any function: so
-- its name is derived from a secret of the store.
CREATE FUNCTION killick.channel() RETURNS text LANGUAGE sql STABLE
RETURN (SELECT 'killick:' || encode(substring(sha256('channel:'::bytea || value) for 16), 'hex')
    FROM killick.meta WHERE key = 'secret_key');

CREATE OR REPLACE FUNCTION killick.ring(run text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(killick.channel(), CASE WHEN octet_length(run) < 7000 THEN run ELSE '' END);
END $$;
