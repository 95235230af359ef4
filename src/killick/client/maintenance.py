"""`kd.store`: verifies, exports, prunes, seals and erases what the store keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence

from killick.agents.runtime import Runtime
from killick.archive.export import export
from killick.archive.prune import Pruned, choose, prune
from killick.audit import seal as sealing
from killick.audit import seal_check
from killick.audit.proof import Proof, prove
from killick.blocking import C, Group, InThread
from killick.encryption.keyring import ErasedSubject, Keyring
from killick.errors import KeyRefused
from killick.history import vaults
from killick.log import Report
from killick.model.retry import Duration, seconds
from killick.store.records import ENDED


class Maintenance(Group[C]):
    """Maintenance of the store: verification, exports, archives, seals and proofs, erasure and keys."""

    def __init__(self, runtime: Runtime, client: C) -> None:
        super().__init__(client)
        self._runtime = runtime

    @InThread
    def verify(
        self, run: str | None = None, *, checkpoint: str | bytes | None = None, key: str | bytes | None = None
    ) -> Report:
        """Verifies the whole store, or one run, against its hashes and its seals, and locates any damage. Raises
        ProofBroken if the checkpoint or the key is invalid.

        run         the id of a run; by default the whole store
        checkpoint  a checkpoint from `seal`, kept outside the store: the log must match it
        key         the public key, as PEM, of the last seal and of the checkpoint
        """
        return seal_check.verify(self._runtime.log, run, checkpoint=checkpoint, key=key)

    @InThread
    def export(self, run: str) -> bytes:
        """Exports a run as one file that can be loaded, verified and replayed anywhere. Raises RunUnknown."""
        return export(self._runtime.log, run)

    @InThread
    def prune(
        self,
        *,
        older: Duration,
        to: str | os.PathLike[str],
        status: Sequence[str] = ENDED,
        agent: str | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Moves ended runs that did not change for a time into a new archive. Raises ArchiveRefused; no run is removed
        then.

        older   how long a run must be unchanged
        to      the path of the archive
        status  only runs that ended in one of these ways
        agent   only runs of this agent
        """
        log, now_us = self._runtime.log, self._runtime.clock.now_us()
        chosen = choose(log, until_us=now_us - round(seconds(older) * 1_000_000), status=status, agent=agent)
        if dry_run:
            return chosen.untouched(log)
        return prune(log, chosen, to, holder=self._runtime.ids.new("prune"), now_us=now_us)

    @InThread
    def erase(self, subject: str, *, by: str | None = None) -> ErasedSubject:
        """Destroys the key of a data subject. Everything of theirs is unreadable at once, in forks, archives and
        snapshots too; logs still verify. Raises KeyRefused if the subject is unknown, or has runs that have not ended.

        subject  the `subject` that `start` or `run` got
        """
        found, log = self._keyring().erase(subject, by=by), self._runtime.log
        vaults.remove_erased(log, vaults.of_runs(log, ()))
        return found

    @InThread
    def seal(self, key: bytes, *, by: str | None = None) -> sealing.Sealed:
        """Seals the changes since the last seal, with a private key as PEM. Keep the `file` of the result outside the
        store. Raises SealRefused."""
        return sealing.seal(self._runtime.log, key, at_us=self._runtime.clock.now_us(), by=by)

    @InThread
    def prove(self, run: str, seq: int, *, values: bool = False, since: str | bytes | None = None) -> Proof:
        """Returns a proof of one sealed event, which the public key verifies. Raises SealRefused if the event is not
        sealed or does not exist.

        seq     the number of the event
        values  include the values of the event
        since   an older checkpoint of the verifier, to prove that the log extends it
        """
        return prove(self._runtime.log, run, seq, values=values, since=since)

    @InThread
    def rotate_keys(self, *, by: str | None = None) -> int:
        """Wraps every data key by the first of the master keys that the store was opened with. No value is written
        again. Returns the number of data keys."""
        return self._keyring().rotate(by=by)

    def _keyring(self) -> Keyring:
        if not isinstance(self._runtime.log.keys, Keyring):
            raise KeyRefused(self._runtime.store.place, "is not encrypted and has no keys; open a new store with keys=")
        return self._runtime.log.keys
