"""Rows of many old runs in a PostgreSQL store."""

from __future__ import annotations

from typing import Final

FILLED: Final = """
INSERT INTO heads (run, base, seq, hash, epoch, checksum, holder, lease_until_us, agent, status, priority, wake_at_us,
    started_at_us, changed_at_us, tags, delivered_checksum)
SELECT 'old' || n, 0, 2, '', 0, '', CASE n % 50 WHEN 0 THEN 'w' || n % 7 END, CASE n % 50 WHEN 0 THEN 9e15 END,
    'agent' || n % 5, (ARRAY['waiting', 'completed', 'failed'])[1 + n % 3], n % 4, CASE n % 2 WHEN 1 THEN 9e15 END,
    n, n, ARRAY['tag' || n % 100], ''
FROM generate_series(1, {runs}) AS n;
INSERT INTO events SELECT number, n, '', '', '' FROM heads, generate_series(1, 3) AS n;
INSERT INTO inbox SELECT number, message, message::text, 'note', '', NULL, 1, 1, 'root' || number % 1000, NULL, ''
FROM heads, generate_series(1, 2) AS message;
INSERT INTO slots SELECT number, slot, 'x', 1, '' FROM heads, unnest(ARRAY['root', 'wait:1']) AS slot;
INSERT INTO slots SELECT number, 'renewed', 'old' || number + 1, 1, '' FROM heads WHERE number % 1000 = 7;
INSERT INTO tags SELECT unnest(tags), number FROM heads;
INSERT INTO claims SELECT 'space', int8send(number), number, 1, '' FROM heads;
INSERT INTO pieces (hash, codec, body) SELECT sha256(int8send(number)), 'x', '' FROM heads;
INSERT INTO piece_uses SELECT number, 0, number FROM heads;
INSERT INTO snapshots SELECT number, 1, 1, '', '' FROM heads;
INSERT INTO feed (position, number, seq, kind) SELECT number, number, 1, 'run.started' FROM heads;
UPDATE feed_end SET position = {runs};
INSERT INTO aside SELECT number, 1, '', '', '', '' FROM heads;
INSERT INTO marks SELECT number % 1000, number, number, 1 FROM heads;
INSERT INTO marked SELECT number, 2, 0, 0 FROM heads;
INSERT INTO rate_limits SELECT int8send(number), 9e15 FROM heads;
"""
