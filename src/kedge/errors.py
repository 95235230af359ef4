"""Every error Kedge raises, drawn as one tree. Each carries its fields and names the next move.

KedgeError
├── ValueRefused            a Python value that cannot be stored
├── ValueErased             a stored value that was erased on purpose
├── ValueBroken             stored bytes that are not what their hash says
├── StoreError
│   ├── StoreUnavailable    cannot be opened or reached
│   ├── StoreFormat         written by another version of the format
│   ├── StoreFull           no room left on the device
│   ├── StoreReadOnly       the file or the device cannot be written
│   ├── StoreBusy           another process kept the write lock too long
│   ├── StoreBroken         the store's own structure is damaged
│   └── StoreClosed         used after it was closed
└── LogError
    ├── RunUnknown          no run of that id
    ├── RunExists           that id is taken
    ├── RunBusy             another worker holds the run
    ├── RunBroken           the run's record does not hold; it is quarantined
    ├── HeadMoved           somebody else appended first
    ├── EpochStale          the lease was taken over
    ├── AlreadyClaimed      a unique right was used before
    ├── MessageGone         an inbox message was taken before
    ├── HandleClosed        an earlier commit failed; reopen the run
    ├── EventUnknown        an event kind or version this build cannot read
    └── EventBroken         bytes that are no event
"""

from __future__ import annotations


class KedgeError(Exception):
    """The root of every error that Kedge raises."""


class ValueRefused(KedgeError, TypeError):
    """A value that cannot be stored, named by its path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ValueErased(KedgeError):
    """A value that was erased on purpose; only its hash remains."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"value {digest.hex()[:12]} was erased; only its hash remains on record")
        self.digest = digest


class ValueBroken(KedgeError):
    """A value that is missing or whose bytes do not match their hash."""

    def __init__(self, digest: bytes, reason: str) -> None:
        super().__init__(f"value {digest.hex()[:12]}: {reason}; run verification to locate the break")
        self.digest = digest
        self.reason = reason


class StoreError(KedgeError):
    """The store could not do what was asked; nothing was written."""


class StoreUnavailable(StoreError):
    """The store cannot be opened or reached."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class StoreFormat(StoreError):
    """The store was written by a version of the format this build does not know."""

    def __init__(self, place: str, *, found: object, known: int) -> None:
        super().__init__(f"{place}: format {found}, this build of Kedge knows up to {known}; upgrade kedge to open it")
        self.place = place
        self.found = found
        self.known = known


class StoreFull(StoreError):
    """The device has no room left. Nothing was lost; appending works again when there is room."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: the disk is full; free some space and try again, nothing was lost")
        self.place = place


class StoreReadOnly(StoreError):
    """The file or its device cannot be written."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: cannot be written; check the permissions of the file and its folder")
        self.place = place


class StoreBusy(StoreError):
    """Another process kept the write lock longer than we were told to wait."""

    def __init__(self, place: str, seconds: float) -> None:
        super().__init__(f"{place}: another process has held the write lock for {seconds:g} s; try again")
        self.place = place
        self.seconds = seconds


class StoreBroken(StoreError):
    """The store's own structure is damaged."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}; copy the file away, then run verification")
        self.place = place
        self.reason = reason


class StoreClosed(StoreError):
    """The store was used after it was closed."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: this store is closed; open it again")
        self.place = place


class LogError(KedgeError):
    """A log refused an operation; nothing was written."""


class RunUnknown(LogError):
    """No run of that id is in the store."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: no such run; list the runs to find its id")
        self.run = run


class RunExists(LogError):
    """A run of that id was created before."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run}: a run of this id exists; open it, or choose another id")
        self.run = run


class RunBusy(LogError):
    """Another worker holds the run."""

    def __init__(self, run: str, *, holder: str) -> None:
        super().__init__(f"{run}: held by {holder}; wait for it, or stop that process first")
        self.run = run
        self.holder = holder


class RunBroken(LogError):
    """The run's record does not hold. It is quarantined; other runs are not touched."""

    def __init__(self, run: str, *, seq: int, reason: str) -> None:
        super().__init__(f"{run}: broken at event {seq} ({reason}); verify it, then repair it")
        self.run = run
        self.seq = seq
        self.reason = reason


class HeadMoved(LogError):
    """Somebody else appended first."""

    def __init__(self, run: str, *, expected: int, actual: int) -> None:
        super().__init__(f"{run}: expected head {expected}, found {actual}; reload and decide again")
        self.run = run
        self.expected = expected
        self.actual = actual


class EpochStale(LogError):
    """The lease was taken over: this worker may not advance the run any more."""

    def __init__(self, run: str, *, held: int, actual: int) -> None:
        super().__init__(f"{run}: epoch {held} was taken over by epoch {actual}; stop and let the new holder go on")
        self.run = run
        self.held = held
        self.actual = actual


class AlreadyClaimed(LogError):
    """A right that exists once was used before."""

    def __init__(self, run: str, *, space: str, owner: str, seq: int) -> None:
        super().__init__(f"{run}: {space} was claimed by {owner} at event {seq}; it cannot be used again")
        self.run = run
        self.space = space
        self.owner = owner
        self.seq = seq


class MessageGone(LogError):
    """An inbox message was taken before, or never existed."""

    def __init__(self, run: str, number: int) -> None:
        super().__init__(f"{run}: message {number} is not in the inbox any more; read the inbox again")
        self.run = run
        self.number = number


class HandleClosed(LogError):
    """An earlier commit of this handle failed, so nothing more may be applied through it."""

    def __init__(self, run: str, cause: BaseException) -> None:
        super().__init__(
            f"{run}: closed after a failed commit ({cause}); open the run again, it resumes from the store"
        )
        self.run = run
        self.cause = cause


class EventUnknown(LogError):
    """An event of a kind or version that this build cannot read."""

    def __init__(self, kind: str, version: int) -> None:
        super().__init__(f"event {kind} v{version} is not known to this build of Kedge; upgrade to read this log")
        self.kind = kind
        self.version = version


class EventBroken(LogError):
    """Bytes that stand where an event should and are none."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"an event's body cannot be read ({reason}); verify the run to locate the break")
        self.reason = reason
