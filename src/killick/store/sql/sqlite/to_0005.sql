-- An append takes up to two events in one statement.
DROP VIEW appends;

CREATE VIEW appends AS
SELECT number, seq AS after, hash AS before, epoch, holder, lease_until_us, seq, NULL AS body, NULL AS data, hash, checksum,
    NULL AS body_1, NULL AS data_1, NULL AS hash_1 FROM heads;

CREATE TRIGGER append_moves_the_head INSTEAD OF INSERT ON appends
BEGIN
    UPDATE heads SET seq = new.seq, hash = new.hash, checksum = new.checksum
    WHERE number = new.number AND seq = new.after AND hash = new.before AND epoch = new.epoch
        AND holder IS new.holder AND lease_until_us IS new.lease_until_us AND NOT removed;
    SELECT raise(ABORT, 'head moved') WHERE changes() = 0;
    INSERT INTO events (id, body, data, hash)
    SELECT (new.number << 32) + new.seq - 1, new.body_1, new.data_1, new.hash_1 WHERE new.body_1 IS NOT NULL;
    INSERT INTO events (id, body, data, hash) VALUES ((new.number << 32) + new.seq, new.body, new.data, new.hash);
END;
