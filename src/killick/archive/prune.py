"""Moves ended runs from a store into an archive: selects them, and orders the steps so that nothing can be lost.

A run stays while a remaining run may need it. Internal logs are never pruned, nor are damaged runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from hashlib import file_digest
from typing import Final

import msgspec

from killick.archive.bundle import Place, Writer
from killick.archive.export import export
from killick.audit import seal
from killick.errors import ArchiveRefused, ExportBroken, LogError, RunBusy, RunUnknown, StoreError, ValueBroken
from killick.history import vaults
from killick.log.log import Log
from killick.log.paging import heads, pages
from killick.log.progress import Progress, silent
from killick.model import event_codec
from killick.model import events as e
from killick.store.protocol import Store
from killick.store.records import ENDED, READ_LIMIT, Head, RunQuery, RunRow
from killick.workers.hooks import unreceived

OWN: Final = "killick."
"""The prefix of agent names of internal logs."""

_LEASE_SECONDS: Final = 60.0


# choosing -----------------------------------------------------------------------------------------


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The runs to prune, forks before their parents; and the reasons why other old runs stay."""

    going: tuple[RunRow, ...]
    kept: dict[str, str]
    events: int

    def untouched(self, log: Log) -> Pruned:
        """The result as a preview, without pruning."""
        runs = tuple(row.run for row in self.going)
        files = tuple(vaults.clean(log, vaults.of_runs(log, runs), going=runs, dry_run=True))
        return Pruned(runs=runs, events=self.events, kept=self.kept, vaults=files, dry_run=True)


class _References(msgspec.Struct, kw_only=True):
    """The references of a run's log to other runs, and the reason why it must stay regardless of them."""

    parent: str | None = None
    children: list[str] = []
    stays: str | None = None


def choose(
    log: Log,
    *,
    until_us: int,
    status: Collection[str] = ENDED,
    agent: str | None = None,
    progress: Progress = silent,
) -> Chosen:
    """Selects ended runs that did not change since a time, unless a remaining run may need them."""
    if unknown := sorted(set(status) - set(ENDED)):
        raise ArchiveRefused(unknown[0], f"is not the status of an ended run; give one of {', '.join(ENDED)}")
    rows = list(_listed(log.store, RunQuery(status=tuple(status), agent=agent, until_us=until_us)))
    references: dict[str, _References] = {}
    for count, row in enumerate(rows, 1):
        references[row.run] = _references(log.store, row.run)
        progress("looking", count, len(rows))
    for run, why in _undelivered(log, rows).items():
        references[run].stays = references[run].stays or why
    known = {head.run: head for _, head in heads(log.store)}
    going, kept = _Choice(log.store, known, references).made()
    events = sum(known[run].seq - known[run].base for run in going)
    return Chosen(going=tuple(row for row in rows if row.run in going), kept=kept, events=events)


def _listed(store: Store, query: RunQuery) -> Iterator[RunRow]:
    """Newest first, so that a fork comes before its parent."""
    before: int | None = None
    while rows := store.runs(query, before=before, limit=READ_LIMIT):
        yield from (row for row in rows if not row.agent.startswith(OWN))
        before = rows[-1].number


_REFERRING: Final = ("run.started", "run.repaired", "child.spawned", "value.erased")
_REFERRING_BODIES: Final = tuple(f'{{"kind":"{kind}'.encode() for kind in _REFERRING)


def _references(store: Store, run: str) -> _References:
    found = _References(children=[])
    reason = store.quarantined(run)
    if reason is not None:
        found.stays = f"it is quarantined ({reason})"
        return found
    for row in (row for rows in pages(store, run, data=False) for row in rows):
        if not row.body.startswith(_REFERRING_BODIES):
            continue
        try:
            event = event_codec.decode(row.body)
        except LogError:
            found.stays = "its log cannot be read"
            return found
        match event:
            case e.RunStarted():
                found.parent = event.parent
            case e.ChildSpawned():
                found.children.append(event.run)
            case e.RunRepaired() if event.set_aside:
                found.stays = "events removed by a repair are only in the store"
            case e.ValueErasedOnPurpose() if event.pieces:
                found.stays = "it records the erasure of values that other runs may share"
            case _:
                pass
    return found


def _undelivered(log: Log, rows: Iterable[RunRow]) -> dict[str, str]:
    """Returns why runs must stay whose events a hook has not received."""
    advice = "has not received its events: resume or mend it, or give its events up with `killick cancel"
    behind = unreceived(log, {row.run: row.agent for row in rows})
    return {run: f"hook {hook.removeprefix('hook:')} {advice} {hook}`" for run, hook in behind.items()}


class _Choice:
    """Decides which runs may be pruned. A run that stays may keep others: repeats until nothing changes."""

    def __init__(self, store: Store, heads: Mapping[str, Head], references: Mapping[str, _References]) -> None:
        self._store, self._heads, self._references = store, heads, references
        self._prunable = dict.fromkeys(run for run in references if run in heads)
        self._forks: defaultdict[str, list[str]] = defaultdict(list)
        for head in heads.values():
            if head.parent is not None:
                self._forks[head.parent].append(head.run)

        @cache
        def status(run: str) -> str:
            row = store.index(run) if run in heads else None
            return row.status if row is not None else "gone"

        self._status = status

    def made(self) -> tuple[set[str], dict[str, str]]:
        kept: dict[str, str] = {}
        while staying := {run: why for run in self._prunable if (why := self._needed(run)) is not None}:
            kept |= staying
            for run in staying:
                del self._prunable[run]
        return set(self._prunable), kept

    def _needed(self, run: str) -> str | None:
        references = self._references[run]
        if references.stays is not None:
            return references.stays
        for fork in self._forks[run]:
            if fork not in self._prunable:
                return f"{fork} is a fork of it"
        for child in references.children:
            if self._is_live(child):
                return f"its child {child} has not ended"
        return self._needed_by(references.parent) if references.parent is not None else None

    def _is_live(self, run: str) -> bool:
        return self._status(run) not in (*ENDED, "gone")

    def _needed_by(self, parent: str) -> str | None:
        """Why a parent, or a fork of it, may still need its child's outcome."""
        if parent not in self._heads or parent in self._prunable:
            return None
        if self._is_live(parent):
            return f"its parent {parent} has not ended"
        if self._status(parent) == "failed":
            return f"its parent {parent} failed, and may be resumed"
        return next(filter(None, map(self._needed_by, self._forks[parent])), None)


# pruning ------------------------------------------------------------------------------------------


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of pruning, or its preview. `kept` are old runs that stay, with reasons; `values` counts the deleted
    values."""

    runs: tuple[str, ...]
    events: int
    kept: dict[str, str]
    file: str | None = None
    size_bytes: int = 0
    values: int = 0
    vaults: tuple[vaults.Cleaned, ...] = ()
    dry_run: bool = False


class _Copied(msgspec.Struct, frozen=True):
    """A run as it was written: if it is unchanged, the file is complete for it."""

    head: Head
    delivered: int


def prune(
    log: Log, chosen: Chosen, to: Place, *, holder: str, now_us: int, by: str | None = None, progress: Progress = silent
) -> Pruned:
    """Writes runs into a new archive, verifies it, and removes them from the store; then deletes unreferenced values.

    A run is removed only when its archive is complete and synced, each in its own transaction, which finds it as it
    was written. A crash in between leaves runs in both places, never in neither.
    """
    kept, copied = dict(chosen.kept), dict[str, _Copied]()
    places = vaults.of_runs(log, [row.run for row in chosen.going])
    if not chosen.going:
        values = _sweep(log.store, progress)
        return Pruned(runs=(), events=0, kept=kept, values=values, vaults=tuple(vaults.clean(log, places)))
    with Writer(to, store=log.store.id, at_us=now_us) as file:
        for count, row in enumerate(chosen.going, 1):
            found = _copy(log, row.run, file)
            if isinstance(found, str):
                kept[row.run] = found
            else:
                copied[row.run] = found
            progress("writing", count, len(chosen.going))
        size_bytes = file.finish(progress) if copied else 0
    _announce(log, file, copied, now_us, by)
    # After the copies: a later event of a run moves its head, and so refuses the removal.
    undelivered = _undelivered(log, chosen.going)
    gone: dict[str, int] = {}
    for count, (run, copy) in enumerate(copied.items(), 1):
        why = undelivered.get(run) or _remove(log, copy, holder)
        if why is None:
            gone[run] = copy.head.seq - copy.head.base
        else:
            kept[run] = why
        progress("removing", count, len(copied))
    _announce(log, file, copied, now_us, by)  # the first seal may have been made meanwhile
    return Pruned(
        runs=tuple(gone),
        events=sum(gone.values()),
        kept=kept,
        file=str(file.path) if copied else None,
        size_bytes=size_bytes,
        values=_sweep(log.store, progress),
        vaults=tuple(vaults.clean(log, places)),
    )


def _announce(log: Log, file: Writer, copied: Mapping[str, _Copied], now_us: int, by: str | None) -> None:
    """Records for the next seal which runs are removed, and into which file, before the removal."""
    if not copied or log.store.head(seal.SEALS) is None:
        return
    with file.path.open("rb") as written:
        digest = file_digest(written, "sha256").hexdigest()
    runs = [(run, copy.head.seq, e.to_text(copy.head.hash)) for run, copy in copied.items()]
    seal.announce_prune(log, seal.Pruned(file.path.name, digest, runs, by), at_us=now_us)


def _copy(log: Log, run: str, file: Writer) -> _Copied | str:
    """Writes a run into the file; or returns the reason why not, because only verified runs are written."""
    try:
        head, row = log.head(run), log.store.index(run)
        file.add(export(log, run))
    except RunUnknown:
        return "another process removed it"
    except ExportBroken as broken:
        return broken.reason
    except (LogError, ValueBroken) as broken:
        return f"its event log fails verification ({broken})"
    return _Copied(head, -1 if row is None else row.delivered)


def _remove(log: Log, copied: _Copied, holder: str) -> str | None:
    """Removes a run if it is still as the file has it; otherwise returns the reason."""
    run, store = copied.head.run, log.store
    try:
        head, left, _ = log.lease(run, holder, seconds=_LEASE_SECONDS)
    except RunBusy as busy:
        return f"it is held by {busy.holder}"
    except RunUnknown:
        return "another process removed it"
    why = "it changed meanwhile"
    try:
        if store.remove(run, at=copied.head.seq, delivered=copied.delivered):
            return None
    except StoreError as refused:
        why = str(refused)
    store.release(run, epoch=head.epoch, holder=holder, left=left is not None)
    return why


def _sweep(store: Store, progress: Progress) -> int:
    total = 0
    while swept := store.sweep(limit=READ_LIMIT):
        total += swept
        progress("sweeping values", total, 0)
    return total
