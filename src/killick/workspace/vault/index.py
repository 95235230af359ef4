"""A vault's index: object locations, referenced snapshots, unfinished restores.

Owns the transactions. An object without a row does not exist, even if a pack holds its bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from killick.ids import RandomIds
from killick.store.sql import queries
from killick.store.sqlite.file import FileKind, SqliteFile
from killick.workspace.tree import Id

KIND: Final = FileKind("vault", 0x6B656476, 1, "the index of a vault")
"""`kedv` in the file's header."""

Q: Final[Any] = queries("vault")

_LOOKUPS_MAX: Final = 500
_READ_AT_ONCE: Final = 10
"""Up to this many ids, reading all is as fast as looking one up."""

_paths: Final = msgspec.msgpack.Decoder(list[bytes])


class ObjectRow(NamedTuple):
    """An object and its location: pack, offset, stored size and unpacked size."""

    id: Id
    pack: int
    offset: int
    stored: int
    size: int


class Reference(msgspec.Struct, frozen=True):
    """A snapshot and its owner."""

    root: Id
    owner: str
    at_us: int


class RestoreRecord(msgspec.Struct, frozen=True):
    """An unfinished restore; `paths` is None for the whole folder."""

    workspace: str
    target: Id
    before: Id | None
    paths: tuple[bytes, ...] | None
    at_us: int


class Index:
    """An open index. Threads and processes may share it."""

    def __init__(self, path: Path, *, busy_seconds: float) -> None:
        def setup(writer: sqlite3.Cursor) -> None:
            # Detects a vault that replaced a removed one.
            first = int.from_bytes(RandomIds().key()[:6], "big")
            writer.execute(Q.lift_counter, (first, "sweeps"))

        self._file = SqliteFile(
            path, durability="power", busy_seconds=busy_seconds, create=True, setup=setup, kind=KIND
        )

    def close(self) -> None:
        self._file.close()

    # objects ----------------------------------------------------------------------------------

    def locate(self, ref: Id) -> ObjectRow | None:
        found = self._rows(Q.locate, ref)
        return ObjectRow(ref, *found[0]) if found else None

    def has(self, refs: Iterable[Id]) -> set[Id]:
        ids = set(refs)
        if len(ids) > _LOOKUPS_MAX and self.count() < _READ_AT_ONCE * len(ids):
            return ids & self.ids()
        with self._file.reading() as db:
            return {ref for ref in ids if db.execute(Q.has, (ref,)).fetchone() is not None}

    def count(self) -> int:
        """Returns the approximate number of objects."""
        return self._number(Q.count)

    def ids(self) -> set[Id]:
        """Returns all ids; check the count first."""
        return {ref for (ref,) in self._rows(Q.ids)}

    def objects(self) -> Iterator[ObjectRow]:
        """Yields every object from one database snapshot."""
        with self._file.reading() as db:
            for row in db.execute(Q.objects):
                yield ObjectRow(*row)

    # packs ------------------------------------------------------------------------------------

    def packs(self) -> dict[int, int]:
        """Returns every pack, and its published length."""
        return dict(self._rows(Q.packs))

    def open_packs(self, *, below_bytes: int, limit: int) -> list[int]:
        return [number for (number,) in self._rows(Q.open_packs, below_bytes, limit)]

    def pack_end(self, pack: int) -> int | None:
        found = self._rows(Q.pack_end, pack)
        return int(found[0][0]) if found else None

    def loose_packs(self) -> list[int]:
        """Returns packs whose objects are to be compressed."""
        return [number for (number,) in self._rows(Q.loose_packs)]

    def members(self, pack: int) -> list[ObjectRow]:
        """Returns a loose pack's objects in file order."""
        with self._file.reading() as db:
            ids: bytes = (db.execute(Q.members, (pack,)).fetchone() or (None,))[0] or b""
            refs = [ids[at : at + 32] for at in range(0, len(ids), 32)]
            found = [ObjectRow(ref, *row) for ref in refs for row in db.execute(Q.locate, (ref,))]
        return sorted((each for each in found if each.pack == pack), key=lambda each: each.offset)

    def settle(self, pack: int) -> None:
        """Turns a loose pack into an ordinary one."""
        with self._file.writing() as db:
            db.execute(Q.forget_members, (pack,))

    def last_deleted_pack(self) -> int:
        """Returns the highest number of a deleted pack."""
        return self._number(Q.counter, "packs")

    def sweeps(self) -> int:
        """Returns a counter that each deleting sweep increments. No two vaults start with the same value."""
        return self._number(Q.counter, "sweeps")

    def supersede(self) -> None:
        """Forces a commit.

        A process that dies in a commit may leave an invisible transaction, which recovery could bring back. The next
        commit overwrites it permanently. So this precedes the truncation of unreferenced pack bytes.
        """
        with self._file.writing() as db:
            db.execute(Q.raise_counter, ("commits",))

    # publishing -------------------------------------------------------------------------------

    def publish(
        self, rows: Sequence[ObjectRow], ends: Mapping[int, int], reference: Reference, *, loose: Collection[int] = ()
    ) -> None:
        """Publishes a whole snapshot at once: its objects, the packs' lengths, the loose packs, and its owner."""
        ordered = sorted(rows)
        members: dict[int, list[Id]] = {pack: [] for pack in ends}
        for row in ordered:
            members[row.pack].append(row.id)
        with self._file.writing() as db:
            # In index order, so that each index page is written once.
            db.executemany(Q.put_object, ordered)
            for pack, own in members.items():
                db.execute(Q.put_pack, (pack, ends[pack], len(own), b"".join(own) if pack in loose else None))
            db.execute(Q.put_root, (reference.owner, reference.root, reference.at_us))

    def references(self, owner: str | None = None) -> list[Reference]:
        rows = self._rows(Q.roots) if owner is None else self._rows(Q.roots_of, owner)
        return [Reference(*row) for row in rows]

    def is_referenced(self, root: Id) -> bool:
        return bool(self._rows(Q.has_root, root))

    def forget(self, owner: str) -> int:
        with self._file.writing() as db:
            return db.execute(Q.drop_roots, (owner,)).rowcount

    def forget_owners(self, prefix: str, keep: Callable[[str], bool]) -> int:
        dropped = [owner for (owner,) in self._rows(Q.owners, prefix) if not keep(owner)]
        if not dropped:
            return 0
        with self._file.writing() as db:
            return sum(db.execute(Q.drop_roots, (owner,)).rowcount for owner in dropped)

    # restoring --------------------------------------------------------------------------------

    def restoring(self, workspace: str) -> RestoreRecord | None:
        found = self._rows(Q.restore, workspace)
        return _restoring(*found[0]) if found else None

    def unfinished(self) -> list[RestoreRecord]:
        return [_restoring(*row) for row in self._rows(Q.restores)]

    def begin_restoring(self, restoring: RestoreRecord) -> None:
        paths = None if restoring.paths is None else msgspec.msgpack.encode(restoring.paths)
        row = (restoring.workspace, restoring.target, restoring.before, paths, restoring.at_us)
        with self._file.writing() as db:
            db.execute(Q.put_restore, row)

    def end_restoring(self, workspace: str) -> None:
        with self._file.writing() as db:
            db.execute(Q.drop_restore, (workspace,))

    # sweeping ---------------------------------------------------------------------------------

    def live_roots(self, without: Callable[[str], bool] = lambda owner: False) -> list[Id]:
        """Returns the snapshots that must stay: the referenced ones, and those of unfinished restores."""
        with self._file.reading() as db:
            roots = dict.fromkeys(root for root, owner, _ in db.execute(Q.roots) if not without(owner))
            return list(roots | dict.fromkeys(root for (root,) in db.execute(Q.needed)))

    def discard(self, refs: Collection[Id], counts: Mapping[int, int]) -> None:
        """Deletes objects; `counts` is each pack's remaining number."""
        with self._file.writing() as db:
            db.executemany(Q.drop_object, ((ref,) for ref in refs))
            db.executemany(Q.count_pack, ((count, pack) for pack, count in counts.items()))
            db.execute(Q.raise_counter, ("sweeps" if refs else "commits",))

    def move(
        self, moves: Sequence[tuple[ObjectRow, ObjectRow]], ends: Mapping[int, int], dropped: Collection[int]
    ) -> None:
        """Moves objects to new locations, and deletes their former packs."""
        counts = dict.fromkeys(ends, 0)
        for _, to in moves:
            counts[to.pack] += 1
        with self._file.writing() as db:
            db.executemany(Q.move_object, ((to.pack, to.offset, to.stored, was.id, was.pack) for was, to in moves))
            db.executemany(Q.put_pack, ((pack, end, counts[pack], None) for pack, end in ends.items()))
            db.executemany(Q.drop_pack, ((pack,) for pack in dropped))
            db.execute(Q.lift_counter, (max(dropped, default=0), "packs"))

    def damage(self) -> str | None:
        """Returns SQLite's report of damage to the file itself."""
        found = str(self._rows("PRAGMA quick_check(1)")[0][0])
        return None if found == "ok" else found

    def _rows(self, query: str, *columns: object) -> list[Any]:
        with self._file.reading() as db:
            return db.execute(query, columns).fetchall()

    def _number(self, query: str, *columns: object) -> int:
        return int(self._rows(query, *columns)[0][0])


def _restoring(workspace: str, target: Id, before: Id | None, paths: bytes | None, at_us: int) -> RestoreRecord:
    return RestoreRecord(workspace, target, before, None if paths is None else tuple(_paths.decode(paths)), at_us)
