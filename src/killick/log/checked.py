"""A store whose reads are compared with the hash chain, before a fold, a reader or code gets what was read.

A row must follow its predecessor in the chain, and its data and chunks must have the hashes that name them. What does
not is damage on the disk: the run is quarantined alone, and the read raises. Hashes are of what is stored, so this is
below encryption. In an encrypted store each row has a MAC, too. Without keys it finds damage, not forgery: a writer of
the file can change a body with its hashes.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast

from msgspec.structs import replace

from killick.errors import KillickError, LogError, RunBroken, ValueBroken
from killick.model import event_codec, hashing
from killick.model.chunks import Blob, check
from killick.model.cipher import Place
from killick.model.events import URL_SAFE, RunRepaired, from_text
from killick.store.protocol import Store
from killick.store.records import READ_LIMIT, Message, Opening, Row

Part: TypeAlias = tuple[Row | None, Sequence[Row]]
"""Rows, and the row before them, if it was read."""

Proof: TypeAlias = Callable[[Place, bytes], bool]
"""Returns whether the body of an event has the MAC of its place."""

MISSING: Final = "the event is missing"
UNCHAINED: Final = "body and hash do not fit the chain"
FORGED: Final = "it was not appended with the key of its run"
UNNAMED: Final = "the data does not match its hash"

_REPAIRED: Final = b'{"kind":"run.repaired"'


def checked(store: Store) -> Store:
    """Returns the store with compared reads. One that compares already, or whose rows are on no disk, is as it is."""
    return store if getattr(store, "is_checked", False) else cast("Store", CheckedStore(store))


def unchecked(store: Store) -> Store:
    """Returns the store with reads as they are, for work that locates and reports the damage itself."""
    if isinstance(store, CheckedStore):
        return store.raw
    below: object = getattr(store, "raw", None)
    if not isinstance(below, CheckedStore):
        return store
    view = object.__new__(type(store))
    vars(view).update(vars(store), raw=below.raw)
    return view


def stored(store: Store) -> Store:
    """Returns the store below encryption: its reads return what is stored, and are compared."""
    below: Store | None = None if isinstance(store, CheckedStore) else getattr(store, "raw", None)
    return store if below is None else below


class CheckedStore:
    """Compares what it reads. Everything else is the store's own."""

    is_checked = True

    def __init__(self, raw: Store, proves: Proof | None = None) -> None:
        self.raw, self._proves = raw, proves

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    # the log ----------------------------------------------------------------------------------

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> Sequence[Row]:
        def rows() -> Part:
            if not after or limit >= READ_LIMIT:
                return None, self.raw.read(run, after=after, limit=limit, data=data)
            found = self.raw.read(run, after=after - 1, limit=limit + 1, data=data)
            return (found[0], found[1:]) if found and found[0].seq == after else (None, found[:limit])

        return self._compared(run, rows)

    def row(self, run: str, seq: int) -> Row | None:
        def rows() -> Part:
            found = self.raw.read(run, after=max(seq - 2, 0), limit=2)
            before = found[0] if found and found[0].seq == seq - 1 else None
            return before, [row for row in found if row.seq == seq]

        return next(iter(self._compared(run, rows)), None)

    def opening(self, run: str, *, fold: int) -> Opening | None:
        found, reason = self.raw.opening(run, fold=fold), ""
        for _ in range(2):  # what fails once is read again
            if found is None or found.quarantined is not None:
                return found
            if not found.intact:
                reason = f"its head is not as it was written at event {found.head.seq}"
                break
            rows = [row for row in found.rows if row.seq <= found.head.seq]
            shot = found.snapshot
            before, after = (self._genesis(run), 0) if shot is None else (shot.hash, shot.seq)
            if fault(run, rows, before, after=after, proves=self._proves) is None or not (
                reason := self._damage(run, None, rows)
            ):
                return found  # of a fork, or after a damaged snapshot, the row before decides
            found = self.raw.opening(run, fold=fold)
        if found is None:
            return None
        quarantine(self.raw, run, reason)
        return replace(found, quarantined=reason)

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        found = self.raw.pieces(hashes)
        for digest, blob in found.items():
            if not check(blob):
                raise ValueBroken(digest, "its bytes do not match its hash")
        return found

    # the inbox --------------------------------------------------------------------------------

    def inbox(self, run: str, **limits: Any) -> list[Message]:
        return self._intact(run, self.raw.inbox(run, **limits))

    def message(self, run: str, id: str) -> Message | None:  # noqa: A002
        found = self.raw.message(run, id)
        return None if found is None else self._intact(run, [found])[0]

    def messages(self, run: str) -> list[Message]:
        return self._intact(run, self.raw.messages(run))

    def _intact(self, run: str, messages: list[Message]) -> list[Message]:
        for message in messages:
            if not message.intact:
                reason = f"message {message.number} in its inbox is not as it was written"
                quarantine(self.raw, run, reason)
                raise RunBroken(run, seq=0, reason=reason)
        return messages

    # judging ----------------------------------------------------------------------------------

    def _compared(self, run: str, read: Callable[[], Part]) -> Sequence[Row]:
        """Returns the rows that `read` finds. What fails once is read again: a repair may have come between."""
        reason = ""
        for _ in range(2):
            before, rows = read()
            if not rows:
                return rows
            hash_, after = (self._genesis(run), 0) if before is None else (before.hash, before.seq)
            if fault(run, rows, hash_, after=after, proves=self._proves) is None or not (
                reason := self._damage(run, before, rows)
            ):
                return rows
        quarantine(self.raw, run, reason)
        raise broken(run, reason)

    def _damage(self, run: str, before: Row | None, rows: Sequence[Row]) -> str:
        """Compares rows with the row before them, whichever run's that is. "": whole, or the run is gone."""
        if not rows or (head := self.raw.head(run)) is None:
            return ""
        after, hash_ = rows[0].seq - 1, None
        try:
            if before is not None:
                hash_, after = before.hash, before.seq
            elif after == head.base:
                hash_ = self._hash_at(head.parent or run, after)
            elif (previous := self.raw.row(run, after)) is not None:
                hash_ = previous.hash
        except RunBroken as parent:
            return f"it forks {parent.run}, where {parent.reason} at event {parent.seq}"
        found = fault(run, rows, hash_, after=after, proves=self._proves)
        return "" if found is None else f"{found[1]} at event {found[0]}"

    def _hash_at(self, run: str, seq: int) -> bytes:
        """Returns the chain hash at an event of a run or of its ancestors."""
        while (head := self.raw.head(run)) is not None and head.parent is not None and seq <= head.base:
            run = head.parent
        if not seq:
            return self._genesis(run)
        if (row := self.raw.row(run, seq)) is None:
            raise RunBroken(run, seq=seq, reason=MISSING)
        return row.hash

    def _genesis(self, run: str) -> bytes:
        return hashing.genesis(self.raw.id, run)


def quarantine(store: Store, run: str, reason: str) -> None:
    """Quarantines a run that is not quarantined yet. A reader that may not write leaves that to the next one."""
    with suppress(KillickError):
        if store.quarantined(run) is None:
            store.quarantine(run, reason)


def broken(run: str, reason: str, *, seq: int = 0) -> RunBroken:
    """Returns the error of a damaged run. A reason names the event at its end; `seq` is for one that does not."""
    what, _, at = reason.rpartition(" at event ")
    return RunBroken(run, seq=int(at), reason=what) if what and at.isdigit() else RunBroken(run, seq=seq, reason=reason)


def fault(
    run: str, rows: Sequence[Row], before: bytes | None, *, after: int, proves: Proof | None = None
) -> tuple[int, str] | None:
    """Returns the first row that is not as it was written, by its seq, and what is wrong; None if all are.

    `before` is the chain hash at `after`; None where no event is there, and only a repair may follow. `proves` compares
    the MACs.
    """
    linked, dated, expected, last = hashing.LINKED.copy, hashing.DATED.copy, after + 1, before or b""
    for row in rows:
        seq, body, data = row.seq, row.body, row.data
        chain = linked()  # as `hashing.link`, without a call for every event
        chain.update(last + body)
        if seq != expected or chain.digest() != row.hash:
            if (repaired := _hash_before_repair(row)) is None:
                return (seq, UNCHAINED) if seq == expected and (before or seq > after + 1) else (expected, MISSING)
            last = repaired
        if proves is not None and not proves(Place(run, seq, last), body):
            return seq, FORGED
        last = row.hash
        if data is not None:
            digest = dated()
            digest.update(data)
            if b2a_base64(digest.digest(), newline=False)[:43].translate(URL_SAFE) != body[-45:-2]:
                return seq, UNNAMED
        expected = seq + 1
    return None


def _hash_before_repair(row: Row) -> bytes | None:
    """Returns what a repair follows: the head's own hash, and the events it set aside. None: the event is no repair."""
    if not row.body.startswith(_REPAIRED):
        return None
    try:
        event = event_codec.decode(row.body)
    except LogError:
        return None
    if not isinstance(event, RunRepaired) or event.last != row.seq - 1:
        return None
    before = from_text(event.hash_head)
    return before if hashing.link(before, row.body) == row.hash else None
