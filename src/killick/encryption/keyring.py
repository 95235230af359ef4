"""The data keys of a store: each owner's in a log, wrapped by a master key. Destroying one erases its data.

The store has one key, and each data subject another. A run tree derives its own from one of them, so that its values
are shared within the tree alone. A key's name has the owner (12 bytes), the owner's key (2), and the run tree (8).
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, TypeVar

import msgspec

from killick.clock import Clock
from killick.encryption.master_key import DestroysKeys, MasterKey
from killick.errors import HeadMoved, KeyRefused, RunExists
from killick.ids import RandomIds
from killick.log.log import Log
from killick.log.slots import root_of
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.model import system_events
from killick.model.cipher import Cipher, Place, derived, key_in
from killick.model.event_codec import decode
from killick.model.facts import LIVE
from killick.sanitizer import visible_line
from killick.store.protocol import Store
from killick.store.records import KEY_DESTROYED, OWN_RUNS, SUBJECT, Append, RunQuery

T = TypeVar("T")

AGENT: Final = "killick.keys"
_LOGS: Final = f"{OWN_RUNS}key:"
_OWN_EVENTS: Final = frozenset({
    e.RunStarted, e.RunPaused, e.RunResumed, e.RunCompleted, e.RunRepaired, e.ValueErasedOnPurpose,
    system_events.EntryKept,
})  # fmt: skip
"""The events in a log of keys."""
_OWNER_BYTES: Final = 12
_ID_BYTES: Final = 14
_STORE: Final = bytes(_OWNER_BYTES)
_TRIES: Final = 10
_KNOWN_MAX: Final = 10_000

KNOWN_SECONDS: Final = 10.0
"""How long a process uses a key before it checks whether the key was destroyed."""


class ErasedSubject(msgspec.Struct, frozen=True, kw_only=True):
    """An erasure: how many runs are unreadable now. `purged` is False while a reader keeps the wrapped key in the
    store's write-ahead log. `in_backups` is True if backups of the store are unreadable, too."""

    subject: str
    runs: int
    purged: bool
    in_backups: bool = False


class _Secret(NamedTuple):
    wrapped: bytes | None
    secret: bytes | None
    until: float


class Keyring:
    """Finds, makes, wraps again and destroys the data keys of a store. Thread-safe."""

    def __init__(self, store: Store, masters: Sequence[MasterKey], clock: Clock) -> None:
        self._store, self._masters, self._clock = store, masters, clock
        self._log = Log(store, clock=clock, behind=False)
        self._secrets: dict[bytes, _Secret] = {}
        self._ciphers: dict[bytes, Cipher] = {}
        self._runs: dict[str, tuple[str, str]] = {}
        self._store_id = self._current(_STORE)
        store_secret = self._secret(self._store_id)
        assert store_secret is not None, "only a subject's key is ever destroyed"
        self._store_secret = store_secret
        self.own = Cipher(self._store_id + bytes(8), store_secret)
        self.secret_key = self.own.digest_key
        """The key for digests that are compared between unrelated runs."""

    def close(self) -> None:
        self._log.close()

    # the keys of runs -------------------------------------------------------------------------

    def started(self, event: e.RunStarted) -> e.RunStarted:
        """Returns a run's first event with its key: as given, as the run that it comes from has it, or the store's."""
        if event.agent == AGENT or event.key is not None:
            return event
        before = event.follows or event.parent
        key = self.key_for(None, event.run) if before is None else self.key_of(before)
        return msgspec.structs.replace(event, key=key)

    def key_of(self, run: str) -> str:
        """Returns the name of a run's key; a fork has its parent's. An unknown run has one of the store's."""
        return self._of(run)[0]

    def root_of(self, run: str) -> str:
        """Returns the first run in the chain of renewals of a run, for which its messages are sealed."""
        return self._of(run)[1]

    def _of(self, run: str) -> tuple[str, str]:
        found = self._runs.get(run)
        if found is None:
            head = self._store.head(run)
            if head is None:
                return self.key_for(None, run), run
            first = self._log.event(run, 1)
            named, tags = (first.key, first.tags) if isinstance(first, e.RunStarted) else (None, ())
            found = named or self.key_for(None, run), root_of(run, tags)
            if len(self._runs) >= _KNOWN_MAX:
                self._runs.clear()
            self._runs[run] = found
        return found

    def keeps_plain(self, run: str) -> bool:
        """Returns whether a run is a log of keys, which a master key protects."""
        return run.startswith(_LOGS)

    def proves(self, place: Place, body: bytes) -> bool:
        """Returns whether a process with the keys appended an event there, also one of an erased subject."""
        if self.keeps_plain(place.run):
            event = decode(body)
            return type(event) in _OWN_EVENTS and getattr(event, "agent", AGENT) == AGENT
        return self.own.proves(place, body)

    def key_for(self, subject: str | None, run: str) -> str:
        """Returns the name of the key of a new run."""
        key = self._store_id if subject is None else self._current(self._owner(subject))
        return e.to_text(key + sha256(run.encode()).digest()[:8])

    def cipher(self, key: str) -> Cipher:
        """Returns a data key for use. Raises KeyRefused if it was destroyed: no effect may go unrecorded."""
        found = self._cipher(e.from_text(key))
        if found is None:
            raise KeyRefused(self._store.place, KEY_DESTROYED)
        return found

    def fence(self, key: str) -> Append | None:
        """Returns a condition for an append that makes a run live: the log of its key is as it is now. None: the key is
        the store's, which is never destroyed. Raises KeyRefused if the key was destroyed, or is about to be."""
        key_id = e.from_text(key)[:_ID_BYTES]
        owner, run = key_id[:_OWNER_BYTES], _LOGS + key_id[:_OWNER_BYTES].hex()
        if owner == _STORE:
            return None
        head = self._log.head(run)
        name = str(int.from_bytes(key_id[_OWNER_BYTES:], "big"))
        kept = [each for each in self._kept(owner) if each.name == name]
        if not kept or kept[-1].wrapped is None:
            raise KeyRefused(self._store.place, KEY_DESTROYED)
        if self._log.state(run).fold.facts.paused:
            raise KeyRefused(self._store.place, "its data subject is being erased; erase it again, then start the run")
        return Append(run=run, after=head.seq, before=head.hash, epoch=head.epoch)

    def vault(self, name: str | None) -> Cipher | None:
        """Returns the cipher of a vault by its name, as `vault_name` gives it; None if its key was destroyed."""
        key_id = self._store_id if name is None else bytes.fromhex(name)
        secret = self._secret(key_id)
        return None if secret is None else Cipher(key_id + bytes(8), derived(secret, b"vault"))

    def vault_name(self, key: str) -> str | None:
        """Returns the name of the vault of runs under a data subject's key; None: the store's."""
        key_id = e.from_text(key)[:_ID_BYTES]
        return None if key_id == self._store_id else key_id.hex()

    def decrypted(self, sealed: bytes, place: bytes) -> bytes | None:
        """Returns plain bytes; None if their key was destroyed. ValueError if they are not what was sealed there."""
        cipher = self._cipher(key_in(sealed))
        if cipher is None:
            return None
        body = cipher.decrypt(sealed, place)
        if body is None:
            raise ValueError("it was not sealed for this place by the key that it names")
        return body

    def _cipher(self, key: bytes) -> Cipher | None:
        secret = self._secret(key[:_ID_BYTES])
        if secret is None:
            return None
        found = self._ciphers.get(key)
        if found is None:
            if len(self._ciphers) >= _KNOWN_MAX:
                self._ciphers.clear()
            found = self._ciphers[key] = Cipher(key, derived(secret, key[_ID_BYTES:]), self.secret_key)
        return found

    # the keys of owners -----------------------------------------------------------------------

    def _owner(self, subject: str) -> bytes:
        """Returns the id of a data subject: keyed, because it stays when the subject is erased."""
        if not subject or visible_line(subject.strip()) != subject:
            raise KeyRefused(repr(subject), "give the exact name, without blanks around it or invisible characters")
        return hmac.digest(derived(self._store_secret, b"subjects"), subject.encode(), "sha256")[:_OWNER_BYTES]

    def _current(self, owner: bytes) -> bytes:
        """Returns the id of an owner's key. Makes a key if there is none, or if the last was destroyed."""
        last = self._last(owner)
        if last is None or self._is_destroyed(owner, last):
            last = self._changed(owner, lambda log: self._make(owner, log))
        return owner + int(last.name).to_bytes(2, "big")

    def _is_destroyed(self, owner: bytes, kept: _Kept) -> bool:
        # In a backup of the store, a key that the key service destroyed is still there.
        return kept.wrapped is None or self._secret(owner + int(kept.name).to_bytes(2, "big")) is None

    def _last(self, owner: bytes) -> _Kept | None:
        return next(iter([*self._kept(owner)][-1:]), None)

    def _make(self, owner: bytes, log: RunLog) -> _Kept:
        last, at = self._last(owner), self._clock.now_us()
        if last is not None and not self._is_destroyed(owner, last):
            return last  # another process made it
        made = _Kept(str(1 if last is None else int(last.name) + 1), 0, self._wrapped(RandomIds().key()))
        kept = Entry(system_events.EntryKept(at=at, name=made.name), {"value": made.wrapped})
        if log.seq:
            self._resume(log, None)  # after an erasure that was interrupted
            log.append(kept)
        else:
            started = Entry(e.RunStarted(at=at, run=log.run, agent=AGENT), {"input": None})
            log.append(started, kept, Entry(e.RunCompleted(at=at), {"result": None}))
        return made

    def _changed(self, owner: bytes, change: Callable[[RunLog], T]) -> T:
        """Changes a key log, and repeats if another process changed it first: a destroyed key stays destroyed."""
        run = _LOGS + owner.hex()
        for _ in range(_TRIES):
            try:
                return change(self._log.begin(run) if self._store.head(run) is None else self._log.open(run))
            except (RunExists, HeadMoved):
                continue
        raise KeyRefused(self._store.place, "other processes keep changing the same key; try again")

    def _kept(self, owner: bytes) -> Iterator[_Kept]:
        """Yields the content of a key log: every wrapping of every key, oldest first."""
        run, after = _LOGS + owner.hex(), 0
        while self._store.head(run) is not None and (found := self._log.read(run, after=after)):
            for seq, event, row in found:
                if isinstance(event, system_events.EntryKept):
                    wrapped = None if row.data is None else self._log.data(run, seq)["value"]
                    yield _Kept(event.name, seq, wrapped)
            after = found[-1].seq

    def _secret(self, key_id: bytes) -> bytes | None:
        """Returns an owner's key; None if it was destroyed. Keeps it for a few seconds, then looks again."""
        known, now = self._secrets.get(key_id), self._clock.monotonic()
        if known is not None and now < known.until:
            return known.secret
        name, found, is_here = str(int.from_bytes(key_id[_OWNER_BYTES:], "big")), None, False
        for kept in self._kept(key_id[:_OWNER_BYTES]):
            if kept.name == name:
                found, is_here = kept.wrapped or found, True
        if not is_here:
            reason = f"has no key {key_id.hex()}; values of another store are read through that store"
            raise KeyRefused(self._store.place, reason)
        same = known is not None and known.wrapped == found
        secret = known.secret if known and same else None if found is None else self._unwrapped(found)
        self._secrets[key_id] = _Secret(found, secret, now + KNOWN_SECONDS)
        return secret

    def _wrapped(self, key: bytes) -> bytes:
        try:
            return self._masters[0].wrap(key)
        except Exception as error:
            raise KeyRefused(self._store.place, f"the key service failed to wrap a data key ({error})") from error

    def _unwrapped(self, wrapped: bytes) -> bytes | None:
        reasons: list[str] = []
        for master in self._masters:
            try:
                return master.unwrap(wrapped)
            except Exception as error:  # a key service raises its own types
                reasons.append(str(error) or type(error).__name__)
        reason = f"none of the given keys opens its data keys: {'; '.join(reasons)}"
        raise KeyRefused(self._store.place, f"{reason}; give the key that wrapped them") from None

    # rotation and erasure ---------------------------------------------------------------------

    def rotate(self, *, by: str | None = None) -> int:
        """Wraps every data key by the first master key, and erases its earlier wrappings. Returns the number of keys.

        Values stay as they are. An interrupted rotation is completed by the next.
        """
        count, before = 0, None
        while rows := self._store.runs(RunQuery(agent=AGENT), before=before):
            for row in rows:
                owner = bytes.fromhex(row.run.removeprefix(_LOGS))
                count += self._changed(owner, partial(self._rotate, owner=owner, by=by))
            before = rows[-1].number
        return count

    def _rotate(self, log: RunLog, owner: bytes, by: str | None) -> int:
        kept_keys = {kept.name: kept for kept in self._kept(owner) if kept.wrapped is not None}
        newest: dict[str, int] = {}
        for name, kept in kept_keys.items():
            key, newest[name] = self._unwrapped(kept.wrapped or b""), kept.seq
            if key is not None and (wrapped := self._wrapped(key)) != kept.wrapped:
                entry = Entry(system_events.EntryKept(at=self._clock.now_us(), name=name), {"value": wrapped})
                newest[name] = log.append(entry).seq
        self._destroy(log, owner, "wrapped again", by, keep=tuple(newest.values()))
        return len(kept_keys)

    def erase(self, subject: str, *, by: str | None = None) -> ErasedSubject:
        """Destroys the key of a data subject: everything under it is unreadable. Raises KeyRefused if the subject has
        no key, or runs that have not ended."""
        owner = self._owner(subject)
        if self._store.head(_LOGS + owner.hex()) is None:
            raise KeyRefused(subject, "no run was started with this subject here; compare the spelling with `subject=`")
        tag = SUBJECT + e.to_text(owner)
        # From here on no run of the subject is accepted. Those that were accepted before are seen by the next read.
        self._changed(owner, partial(self._pause, by=by))
        if live := self._store.runs(RunQuery(tag=tag, status=LIVE), limit=4):
            named = ", ".join(row.run for row in live[:3]) + (" and others" if len(live) > 3 else "")
            self._changed(owner, partial(self._resume, by=by))
            raise KeyRefused(subject, f"has runs that have not ended ({named}); cancel them, then erase")
        # The key service first: an interrupted erasure can be repeated while the store has the wrapped key.
        outside = [self._destroyed_outside(kept.wrapped) for kept in self._kept(owner) if kept.wrapped is not None]
        why, in_backups = "the data subject was erased", bool(outside) and all(outside)
        purged = self._changed(owner, partial(self._destroy, owner=owner, reason=why, by=by))
        self._changed(owner, partial(self._resume, by=by))
        self._secrets.clear()
        self._ciphers.clear()
        runs = sum(self._store.counts(RunQuery(tag=tag)).values())
        return ErasedSubject(subject=subject, runs=runs, purged=purged, in_backups=in_backups)

    def _pause(self, log: RunLog, by: str | None) -> None:
        if not log.fold.facts.paused:
            log.append(Entry(e.RunPaused(at=self._clock.now_us(), by=by)))

    def _resume(self, log: RunLog, by: str | None) -> None:
        if log.fold.facts.paused:
            at = self._clock.now_us()
            log.append(Entry(e.RunResumed(at=at, by=by)), Entry(e.RunCompleted(at=at), {"result": None}))

    def _destroyed_outside(self, wrapped: bytes) -> bool:
        try:
            return any(each.destroy(wrapped) for each in self._masters if isinstance(each, DestroysKeys))
        except Exception as error:
            raise KeyRefused(self._store.place, f"the key service failed to destroy a data key ({error})") from error

    def _destroy(self, log: RunLog, owner: bytes, reason: str, by: str | None, keep: Collection[int] = ()) -> bool:
        seqs = [kept.seq for kept in self._kept(owner) if kept.wrapped is not None and kept.seq not in keep]
        if not seqs:
            return self._store.purge()
        pieces = {digest for seq in seqs for digest in self._log.pieces_of(log.run, seq)}
        return self._log.erase(log, at=self._clock.now_us(), reason=reason, seqs=seqs, pieces=sorted(pieces), by=by)


class _Kept(NamedTuple):
    """One wrapping of a key: its number, the event, and the wrapped key; None: destroyed."""

    name: str
    seq: int
    wrapped: bytes | None
