-- name: count_tables
SELECT count(*) FROM sqlite_schema

-- name: locate
SELECT pack, offset, stored, size FROM objects WHERE id = ?

-- name: has
SELECT 1 FROM objects WHERE id = ?

-- name: ids
SELECT id FROM objects

-- name: objects
SELECT id, pack, offset, stored, size FROM objects

-- name: count
SELECT coalesce(sum(objects), 0) FROM packs

-- An object that another process published first stays; our copy is garbage in a pack.
-- name: put_object
INSERT OR IGNORE INTO objects (id, pack, offset, stored, size) VALUES (?, ?, ?, ?, ?)

-- name: drop_object
DELETE FROM objects WHERE id = ?

-- name: move_object
UPDATE objects SET pack = ?, offset = ?, stored = ? WHERE id = ? AND pack = ?

-- name: packs
SELECT number, end FROM packs ORDER BY number

-- The fullest first, so that few packs stay partly filled.
-- name: open_packs
SELECT number FROM packs WHERE end < ? AND members IS NULL ORDER BY end DESC LIMIT ?

-- name: loose_packs
SELECT number FROM packs WHERE members IS NOT NULL ORDER BY number

-- name: members
SELECT members FROM packs WHERE number = ?

-- name: forget_members
UPDATE packs SET members = NULL WHERE number = ?

-- name: pack_end
SELECT end FROM packs WHERE number = ?

-- name: put_pack
INSERT INTO packs (number, end, objects, members) VALUES (?, ?, ?, ?)
ON CONFLICT (number) DO UPDATE SET end = excluded.end, objects = objects + excluded.objects,
    members = CAST(members || excluded.members AS BLOB)

-- name: count_pack
UPDATE packs SET objects = ? WHERE number = ?

-- name: drop_pack
DELETE FROM packs WHERE number = ?

-- name: put_root
INSERT INTO roots (owner, root, at_us) VALUES (?, ?, ?)
ON CONFLICT (owner, root) DO UPDATE SET at_us = max(at_us, excluded.at_us)

-- name: roots
SELECT root, owner, at_us FROM roots ORDER BY at_us, owner, root

-- name: roots_of
SELECT root, owner, at_us FROM roots WHERE owner = ? ORDER BY at_us, root

-- name: has_root
SELECT 1 FROM roots WHERE root = ? LIMIT 1

-- name: drop_roots
DELETE FROM roots WHERE owner = ?

-- Compared by length and text, because a prefix may contain any character.
-- name: owners
SELECT DISTINCT owner FROM roots WHERE substr(owner, 1, length(?1)) = ?1

-- Needed by an unfinished restore.
-- name: needed
SELECT target FROM restores UNION SELECT before FROM restores WHERE before IS NOT NULL

-- name: restore
SELECT workspace, target, before, paths, at_us FROM restores WHERE workspace = ?

-- name: restores
SELECT workspace, target, before, paths, at_us FROM restores ORDER BY workspace

-- name: put_restore
INSERT INTO restores (workspace, target, before, paths, at_us) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (workspace) DO UPDATE SET
    target = excluded.target, before = excluded.before, paths = excluded.paths, at_us = excluded.at_us

-- name: drop_restore
DELETE FROM restores WHERE workspace = ?

-- name: counter
SELECT value FROM counters WHERE name = ?

-- name: raise_counter
UPDATE counters SET value = value + 1 WHERE name = ?

-- name: lift_counter
UPDATE counters SET value = max(value, ?) WHERE name = ?
