"""Compares a store with its seals: names each run that differs, and its first differing event.

Recorded repairs, prunes and erasures are reported as explanations, not as faults. Changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from killick.audit.checkpoint import Checkpoint, SealedRun, checked, frontier, public_key
from killick.audit.checkpoint import checkpoint as read_checkpoint
from killick.audit.seal import SEALS, Leaf, LogMismatch, Seal, leaves, recorded_prunes, seals
from killick.errors import ProofBroken, StoreBroken
from killick.log.log import Log
from killick.log.paging import heads
from killick.log.verify import Progress, Report
from killick.log.verify import verify as verify_logs
from killick.model import events as e
from killick.model import hashing
from killick.model.merkle import Frontier, root
from killick.store.records import Head, Problem

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_NAMED_MAX = 5
"""How many runs are named if any of several may be meant."""


def verify(
    log: Log,
    run: str | None = None,
    *,
    checkpoint: str | bytes | None = None,
    key: str | bytes | None = None,
    progress: Progress | None = None,
    resumed: Report | None = None,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Verifies one run, or the whole store, and compares it with its seals.

    With a public key, the last seal must be signed by it. With a checkpoint that was kept outside, also signed by it,
    the seals must extend that checkpoint.
    """
    proves = None if key is None else public_key(key)
    kept = None if checkpoint is None else checked(checkpoint, proves)
    report = verify_logs(log, run, progress=progress, report=resumed, keep=keep)
    check = _Check(log, report)
    try:
        made = check.seals()
        if proves is not None and made is not None:
            check.signature(made, proves)
        if kept is not None:
            check.against(kept)
        elif proves is not None and made is None:
            check.say(None, "has no seals for the key to prove; `killick store seal` makes one")
        check.runs(run, progress)
    except StoreBroken as error:
        check.say(None, f"the seals cannot be compared: {error.reason}")
    return report


class _Check:
    """One pass over the seals, then one over the sealed runs."""

    def __init__(self, log: Log, report: Report) -> None:
        self._log, self._report = log.unchecked(), report
        self._store = self._log.store
        self._lines: list[str] = []
        self._hashed: list[bytes] = []
        self._wanted: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def say(self, run: str | None, what: str, seq: int | None = None) -> None:
        self._report.problems.append(Problem(where="seals", what=what, run=run, seq=seq))

    def _explain(self, run: str, what: str, seq: int | None = None) -> None:
        """Adds an explanation; of several for one run, the last is kept."""
        others = [problem for problem in self._report.explained if problem.run != run]
        self._report.explained = [*others, Problem(where="seals", what=what, run=run, seq=seq)]

    def _want(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._wanted[SealedRun.read(line).run][line] = None

    # the seals themselves ---------------------------------------------------------------------

    def seals(self) -> Seal | None:
        """Verifies every seal against the one before; returns the last."""
        tree, made = Frontier(), None
        for found in seals(self._log):
            if not isinstance(found, Seal):
                self.say(SEALS, found[1], found[0])
                break
            try:
                wrong = self._seal(found, tree, made.event.number if made is not None else 0)
            except (ValueError, IndexError, ProofBroken, msgspec.DecodeError) as error:
                self.say(SEALS, f"seal {found.event.number} cannot be read ({error})", found.seq)
                break
            if wrong is not None:
                self.say(SEALS, f"seal {found.event.number} {wrong}", found.seq)
            made = found
            self._report.seals += 1
        return made

    def _seal(self, made: Seal, tree: Frontier, before: int) -> str | None:
        """Adds a seal's entries; or reports its problem."""
        event = made.event
        follows = (event.number, made.listed.first) == (before + 1, tree.size)
        if not follows or [*made.listed.peaks] != [e.to_text(peak) for peak in tree.peaks]:
            return "does not follow the one before it"
        self._want(made.lines)
        for line in made.lines:
            self._lines.append(line)
            self._hashed.append(hashing.leaf(line.encode()))
            tree.add(self._hashed[-1])
        signed = read_checkpoint(made.note)
        if (event.size, event.root) != (tree.size, e.to_text(tree.root)) or frontier(
            tree.size, made.peaks
        ).root != tree.root:
            return "does not hash to its root"
        if (signed.origin, signed.size, signed.root) != (self._store.id, tree.size, tree.root):
            return "differs from its checkpoint"
        for known in made.known:
            entry = SealedRun.read(self._lines[known.index])
            fits = (known.run, known.seq, known.hash, known.gone) == (
                entry.run, entry.seq, entry.hash, entry.gone is not None,
            )  # fmt: skip
            if not fits or (entry.root and frontier(known.seq, known.peaks).root != e.from_text(entry.root)):
                return f"does not know {known.run} as it was sealed"
        return None

    def signature(self, made: Seal, key: Ed25519PublicKey) -> None:
        """Checks the last checkpoint's signature, which covers all earlier seals, also those of other keys."""
        try:
            read_checkpoint(made.note).check(key)
        except ProofBroken as broken:
            self.say(SEALS, f"seal {made.event.number}: its checkpoint {broken.reason}", made.seq)

    def against(self, kept: Checkpoint) -> None:
        """Compares the seals with a kept checkpoint, which they must extend."""
        if kept.origin != self._store.id:
            self.say(None, f"the checkpoint is of another store, {kept.origin}; this one is {self._store.id}")
            return
        size = len(self._hashed)
        if kept.size > size:
            what = f"was rolled back or cut: its seals have {size} of the {kept.size} entries of the checkpoint"
            self.say(None, what)
        elif root(self._hashed[: kept.size]) == kept.root:
            return
        else:
            self.say(SEALS, f"its first {kept.size} entries are not what the checkpoint signs{self._among(kept)}")
        if kept.listed is not None:
            # An unsigned entry proves nothing about where a run differs.
            before = frontier(kept.listed.first, kept.listed.peaks)
            signed = root(self._hashed[: before.size]) == before.root or before.size > size
            self._wanted.clear()
            self._want(self._lines[: before.size] if signed else ())
        self._want(kept.entries)

    def _among(self, kept: Checkpoint) -> str:
        """The entries that may have been changed: before the checkpoint's own seal only peaks are known."""
        if kept.listed is None:
            return ""
        for peak, span in zip(kept.listed.peaks, frontier(kept.listed.first, kept.listed.peaks).spans, strict=True):
            if root(self._hashed[index] for index in span) != e.from_text(peak):
                runs = list(dict.fromkeys(SealedRun.read(self._lines[index]).run for index in span))
                more = f" or {len(runs) - _NAMED_MAX} others" if len(runs) > _NAMED_MAX else ""
                return f": one of {', '.join(runs[:_NAMED_MAX])}{more} was changed there"
        changed = (SealedRun.read(line).run for line in kept.entries if line not in self._lines)
        return f": that of {next(changed, 'another run')} was changed there"

    # the sealed runs --------------------------------------------------------------------------

    def runs(self, only: str | None, progress: Progress | None) -> None:
        """Every sealed run; then those that no longer exist."""
        present = {head.run: head for _, head in heads(self._store) if only in (None, head.run)}
        for run, head in present.items():
            if run in self._wanted:
                self._run(head, [*map(SealedRun.read, self._wanted[run])])
            if progress is not None:
                progress(f"seal of {run}", head.seq - head.base)
        gone = [run for run in self._wanted if only in (None, run) and run not in present]
        if gone:
            self._gone(gone)

    def _run(self, head: Head, entries: list[SealedRun]) -> None:
        """Compares a run with its entries; a fork from the first event of its eldest ancestor."""
        at: defaultdict[int, list[SealedRun]] = defaultdict(list)
        for entry in entries:
            at[entry.seq].append(entry)
        back = next((entry for entry in entries if entry.gone is not None), None)
        wrong, fitted = None if back is None else (1, f"was sealed as {back.gone}, and exists again"), 0
        tree = Frontier()
        try:
            for leaf in leaves(self._store, head):
                tree.add(leaf.leaf)
                for entry in at.pop(leaf.seq, ()):
                    if wrong is None and entry.gone is None:
                        wrong = self._judged(entry, leaf, tree, fitted)
                        fitted = leaf.seq
        except LogMismatch as mismatch:
            if wrong is None and self._report.first(head.run) is None:
                wrong = (mismatch.seq, mismatch.what)
        except StoreBroken:
            if self._report.first(head.run) is None:
                raise
        else:
            beyond = max(at, default=0)
            if wrong is None and beyond > head.seq:
                wrong = (head.seq + 1, f"ends at event {head.seq}, and was sealed at event {beyond}")
        if wrong is not None:
            self.say(head.run, wrong[1], wrong[0])

    def _judged(self, entry: SealedRun, leaf: Leaf, tree: Frontier, fitted: int) -> tuple[int, str] | None:
        """The problem of a run at a sealed event, if any."""
        if leaf.aside is not None:
            # Of removed events only the last hash is certain, because the head had it.
            if entry.seq != leaf.aside.last or entry.hash == leaf.aside.hash_head:
                by = f" by {leaf.aside.by}" if leaf.aside.by else ""
                span = f"events {leaf.aside.first} to {leaf.aside.last}"
                self._explain(
                    entry.run, f"was sealed at event {entry.seq}; a repair{by} removed {span} since", entry.seq
                )
                return None
        elif leaf.hash is not None and e.to_text(leaf.hash) == entry.hash:
            if entry.root == e.to_text(tree.root):
                return None
            return entry.seq, f"the root over its events up to {entry.seq} differs from its seal"
        first = fitted + 1
        span = f"event {first}" if first == entry.seq else f"an event from {first} to {entry.seq}"
        return first, f"{span} differs from its seal"

    def _gone(self, runs: list[str]) -> None:
        pruned_runs = recorded_prunes(self._log)
        for run in runs:
            last = SealedRun.read(list(self._wanted[run])[-1])
            if last.gone == "removed":
                self.say(run, f"is missing: it was removed after event {last.seq}, and no prune is on record")
            elif last.gone is None and run in pruned_runs:
                self._explain(run, f"was pruned into {pruned_runs[run][0].file}, which no seal records yet", last.seq)
            elif last.gone is None:
                self.say(run, f"is missing: it was sealed at event {last.seq}, and no prune is on record")
