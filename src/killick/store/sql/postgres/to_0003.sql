-- From format 2: rate limits, which all processes of a store share.

-- Rate limits: when each bucket of tokens will be full again. Losing a row only forgets calls.
CREATE TABLE killick.rate_limits (
    bucket bytea PRIMARY KEY,
    full_at_us bigint NOT NULL
);

-- Takes a token of each bucket and returns 0, or takes none and returns how long to wait. Locks the buckets in order.
CREATE FUNCTION killick.take_tokens(buckets bytea[], tokens_us bigint[], capacities_us bigint[], clock_us bigint)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    now_us bigint;
    wait_us bigint;
BEGIN
    INSERT INTO killick.rate_limits SELECT bucket, 0 FROM unnest(buckets) AS bucket ORDER BY bucket ON CONFLICT DO NOTHING;
    PERFORM FROM killick.rate_limits WHERE bucket = ANY (buckets) ORDER BY bucket FOR UPDATE;
    now_us := killick.time_us(clock_us);
    SELECT max(least(greatest(full_at_us, now_us), now_us + capacity_us) + token_us - now_us - capacity_us) INTO wait_us
    FROM unnest(buckets, tokens_us, capacities_us) AS given (bucket, token_us, capacity_us)
    JOIN killick.rate_limits USING (bucket);
    IF wait_us > 0 THEN
        RETURN wait_us;
    END IF;
    UPDATE killick.rate_limits AS kept
    SET full_at_us = least(greatest(kept.full_at_us, now_us), now_us + given.capacity_us) + given.token_us
    FROM unnest(buckets, tokens_us, capacities_us) AS given (bucket, token_us, capacity_us)
    WHERE kept.bucket = given.bucket;
    RETURN 0;
END $$;
