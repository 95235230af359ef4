"""The store on a Redis or Valkey server: the script calls of each operation, and their results.

Knows no event types. Decisions that depend on the written data are made on the server, in one script. A commit is as
durable as the server's settings make it; `conditions` reports that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from killick.clock import Clock, SystemClock
from killick.errors import (
    LogError,
    RunBusy,
    RunUnknown,
    StoreBroken,
    StoreError,
    StoreFormat,
    StoreUnavailable,
)
from killick.ids import Ids, RandomIds
from killick.model.chunks import Blob
from killick.store import limits, records
from killick.store.protocol import Transaction, holders_of
from killick.store.redis.inspect import conditions, inspect, should_wait
from killick.store.redis.notify import RedisListener
from killick.store.redis.rows import (
    append_args,
    blob_of,
    check,
    delivery_args,
    head_of,
    index_args,
    int_of,
    lease_us,
    message_args,
    message_of,
    pieces_args,
    row_args,
    row_of,
    run_row_of,
    slot_args,
    slot_of,
    snapshot_of,
    str_of,
    text_of,
    unpacked,
)
from killick.store.redis.server import BinaryArgs, RedisServer, namespaces
from killick.store.server_replies import acknowledged, delivered, refusal_of
from killick.store.slots import Slot

FORMAT: Final = 1
"""The layout of a Redis store that this build reads and writes."""

CONNECTIONS: Final = 8
_RUN_KEYS: Final = (
    "log", "data", "aside", "mail", "mail_ids", "untaken", "slots", "shots", "claimed", "tags", "marks", "telling",
    "run",
)  # fmt: skip
"""All keys of a run that can simply be deleted."""

_REFUSED: Final = 2
"""The code of a delivery that a script refused."""

_BEYOND: Final = 10**16
"""More than any number of a run."""


class RedisStore:
    """A store under one prefix of a database. Any number of processes may open it at once.

    url           `redis://host/0`; `?namespace=acme` selects a tenant's store
    durability    "power": a commit waits for the append-only file; "process": it does not
    busy_seconds  how long to retry while the server is away
    create        whether to create a missing store
    connections   the maximum number of connections
    """

    def __init__(
        self,
        url: str,
        *,
        durability: records.Durability = "power",
        busy_seconds: float = 60.0,
        create: bool = True,
        clock: Clock | None = None,
        ids: Ids | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        # Leases end by the server's clock, which all machines share, unless a test supplies a clock.
        self._clock = None if isinstance(clock, SystemClock) else clock
        self._ids, self._lane = ids or RandomIds(), 0
        self._server = RedisServer(url, busy_seconds=busy_seconds, connections=connections)
        self.place: Final = self._server.place
        self.proves_life: Final = False
        try:
            self.id, self.secret_key = self._opened(create=create)
            self._server.waits = durability == "power" and should_wait(self._server)
        except BaseException:
            self._server.close()
            raise
        self._server.store_id = self.id
        self._server.patience_seconds = busy_seconds
        self._listener = RedisListener(self._server)

    def _opened(self, *, create: bool) -> tuple[str, bytes]:
        binary, id_ = BinaryArgs(), self._ids.new("store")
        new = {"own_id": id_.encode(), "secret_key": self._ids.key(), "format": str(FORMAT).encode()}
        meta = [(name, binary.put(value)) for name, value in new.items()]
        found = self._server.ask("open", {"create": create, "id": id_, "meta": meta}, binary.blobs)
        if not found:
            raise StoreUnavailable(self.place, "no store is under this prefix; a run, or create=True, makes one")
        kept = {found[at]: found[at + 1] for at in range(0, len(found), 2)}
        sound = {name: unpacked(text[8:])[0] for name, text in kept.items() if check(name + text[8:]) == text[:8]}
        format_, key, own = (sound.get(name) for name in (b"format", b"secret_key", b"own_id"))
        if format_ is None or key is None or own is None or own != kept.get(b"id"):
            raise StoreBroken(self.place, "its own id, key or format is damaged")
        if int(format_) > FORMAT:
            raise StoreFormat(self.place, found=int(format_), known=FORMAT)
        return own.decode(), key

    namespaces = staticmethod(namespaces)

    def now_us(self) -> int:
        return int(self._ask("now_us", {})) if self._clock is None else self._clock.now_us()

    def close(self) -> None:
        self._listener.close()
        self._server.close()

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[records.Append]) -> list[records.Head | LogError]:
        records.refuse_misnumbered(items)
        if not items:
            self._server.refuse_closed()
            return []
        binary = BinaryArgs()
        args = append_args(items, binary)

        def write(tries: int) -> list[records.Head | LogError]:
            found = self._server.once("append", args, binary.blobs, clock_us=self._clock_us())
            results = [head_of(rest[0]) if done else refusal_of(*map(str_of, rest)) for done, *rest in found]
            return acknowledged(items, results, self._committed) if tries else results

        return self._server.run(write)

    def _committed(self, item: records.Append) -> records.Head | None:
        """Returns the head after an append that is in the log."""
        binary, (seq, hash_) = BinaryArgs(), item.last
        args = {"run": item.run, "epoch": item.epoch, "seq": seq, "hash": binary.put(hash_)}
        found = self._server.once("acknowledged", args, binary.blobs)
        return head_of(found) if found else None

    def head(self, run: str) -> records.Head | None:
        found = self._ask("head", {"run": run})
        return None if found is None else head_of(found)

    def heads(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[tuple[int, records.Head]]:
        found = self._ask("heads", {"after": str(after), "limit": limit})
        return [(int(each[0]), head_of(each)) for each in found]

    def read(
        self, run: str, *, after: int = 0, limit: int = records.READ_LIMIT, data: bool = True
    ) -> list[records.Row]:
        args = {"run": run, "after": after, "limit": min(limit, records.READ_LIMIT), "data": data}
        return [row_of(each) for each in self._ask("read", args)]

    def row(self, run: str, seq: int) -> records.Row | None:
        found = self._ask("row", {"run": run, "seq": seq})
        return None if found is None else row_of(found)

    def opening(self, run: str, *, fold: int) -> records.Opening | None:
        found = self._ask("opening", {"run": run, "fold": fold})
        if found is None:
            return None
        head, reason, shot, rows = found
        return records.Opening(
            head=head_of(head),
            quarantined=text_of(reason),
            snapshot=None if shot is None else snapshot_of(*shot),
            rows=[row_of(each) for each in rows],
        )

    # transactions of others -------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[Transaction]:
        raise self._without_transactions()

    def join(self, connection: Any) -> Transaction:
        raise self._without_transactions()

    def _without_transactions(self) -> StoreError:
        return StoreError(f"{self.place}: Redis cannot join a transaction of yours; use a SQLite file or PostgreSQL")

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        names = list(hashes)
        if not names:
            self._server.refuse_closed()
            return {}
        found = self._command("HMGET", self._key("pieces"), *names)
        return {hash_: blob_of(hash_, text) for hash_, text in zip(names, found, strict=True) if text is not None}

    def references(self, run: str) -> records.References:
        return records.References(
            *(set(self._command("SMEMBERS", self._key(kind, run))) for kind in ("uses", "shot_uses"))
        )

    def set_references(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        binary = BinaryArgs()
        places = [binary.put(hash_) for hash_ in hashes]
        args = {"run": run, "at": at, "delivered": delivered, "hashes": places}
        return bool(self._ask("set_references", args, binary.blobs))

    def sweep(self, *, limit: int = records.READ_LIMIT) -> int:
        return int(self._ask("sweep", {"limit": limit}))

    # snapshots --------------------------------------------------------------------------------

    def snapshot(self, run: str, *, fold: int, at: int) -> records.Snapshot | None:
        fitting = [one for one in self.snapshots(run) if one.fold == fold and one.seq <= at]
        return max(fitting, key=lambda one: one.seq, default=None)

    def snapshots(self, run: str) -> list[records.Snapshot]:
        found = self._command("HGETALL", self._key("shots", run))
        return sorted((snapshot_of(*each) for each in found.items()), key=lambda one: (one.seq, one.fold))

    def forget_snapshots(self, run: str) -> None:
        if not self._ask("forget_snapshots", {"run": run}):
            raise RunUnknown(run)

    # search terms -----------------------------------------------------------------------------

    def unindexed(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[records.UnindexedRun]:
        found = self._ask("unindexed", {"after": str(after), "limit": limit})
        return [
            records.UnindexedRun(number=int(number), run=run.decode(), base=int(base), indexed_to=int(marked))
            for number, run, base, marked in found
        ]

    def index_terms(self, items: Sequence[records.TermBatch]) -> None:
        args = [
            {
                "run": item.run,
                "after": item.after,
                "up_to": item.up_to,
                "anew": item.reset,
                # Terms and times are texts, because numbers in a script are doubles.
                "marks": [(str(each.term), str(each.at_us), each.seq) for each in item.terms],
            }
            for item in items
        ]
        self._ask("index_terms", args)

    def search(self, query: records.IndexQuery) -> list[records.TermPosition]:
        at_us, name = ("+inf", "~") if query.until_us is None else (str(query.until_us), "")
        before, limit = query.before, query.limit
        if before is not None and (query.until_us is None or before.at_us < query.until_us):
            at_us, name = str(before.at_us), f"{before.number:016}{before.seq:012}"
        groups = [[str(term) for term in group] for group in query.all_of]
        since = None if query.since_us is None else str(query.since_us)
        places: list[records.TermPosition] = []
        while True:
            args = {"all_of": groups, "at_us": at_us, "name": name, "since_us": since, "limit": limit - len(places)}
            found, on = self._ask("search", args)
            places += [
                records.TermPosition(int(at), int(number), int(seq), run.decode()) for at, number, seq, run in found
            ]
            if on is None:
                return places
            at_us, name = on[0].decode(), on[1].decode() + ("" if int(on[2]) else "~")

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> records.Head:
        nonce = self._ids.new("asking")
        args = {"run": run, "holder": holder, "lease_us": lease_us(seconds), "nonce": nonce, "handed": handed}
        what, *rest = self._ask("lease", args)
        if what == b"unknown":
            raise RunUnknown(run)
        if what == b"busy":
            raise RunBusy(run, holder=rest[0].decode())
        return head_of(rest[0])

    def claim(
        self,
        holder: str,
        *,
        now_us: int,
        seconds: float,
        limit: int,
        agents: Collection[str] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> list[records.Claimed]:
        args = {
            "holder": holder,
            "now_us": str(now_us),
            "lease_us": lease_us(seconds),
            "limit": limit,
            "agents": None if agents is None else list(agents),
            "room": dict(room or {}),
            "nonce": self._ids.new("asking"),
            "lane": self._lane,
        }

        def take(tries: int) -> Any:
            return self._server.once("claim", {**args, "again": tries > 0}, clock_us=self._clock_us())

        taken = list[records.Claimed]()
        for head, row, left, left_until in self._server.run(take):
            line = run_row_of((head[1], row))
            if line is not None:
                until = None if left_until is None else int(left_until)
                taken.append(records.Claimed(head=head_of(head), row=line, left=text_of(left), left_until_us=until))
                self._lane = line.lane
        return taken

    def renew(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        args = {"holder": holder, "runs": list(runs), "lease_us": lease_us(seconds)}
        return {run.decode(): int(epoch) for run, epoch in self._ask("renew", args)}

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        self._ask("release", {"run": run, "epoch": epoch, "holder": holder, "left": left})

    def lives(self, holder: str) -> bool:
        return True

    def take_tokens(self, buckets: Sequence[limits.TokenBucket]) -> int:
        args = {each.id.hex(): (each.token_us, each.capacity_us) for each in buckets}
        return int(self._ask("take_tokens", {"buckets": args})) if args else 0

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | LogError]:
        if not deliveries:
            self._server.refuse_closed()
            return []
        binary = BinaryArgs()
        args = [delivery_args(sent, binary) for sent in deliveries]

        def write(tries: int) -> list[records.Delivered | LogError]:
            found = self._server.once("deliver", args, binary.blobs)
            return [
                refusal_of(*map(str_of, rest))
                if code == _REFUSED
                else delivered(sent, message_of(str_of(rest[0]), *rest[1:]), fresh=bool(code), again=tries > 0)
                for sent, (code, *rest) in zip(deliveries, found, strict=True)
            ]

        return self._server.run(write)

    def inbox(
        self, run: str, *, name: str | None = None, after: int = 0, limit: int = records.READ_LIMIT
    ) -> list[records.Message]:
        args = {"run": run, "name": name, "after": str(after), "limit": limit}
        return [message_of(run, *each) for each in self._ask("inbox", args)]

    def message(self, run: str, id: str) -> records.Message | None:  # noqa: A002
        found = self._ask("message", {"run": run, "id": id})
        return None if found is None else message_of(run, *found)

    def messages(self, run: str) -> list[records.Message]:
        return [message_of(run, *each) for each in self._ask("inbox", {"run": run, "all": True})]

    def slots(self, run: str) -> list[Slot]:
        found = self._command("HGETALL", self._key("slots", run))
        return sorted((slot_of(*each) for each in found.items()), key=lambda slot: slot.name)

    # finding ----------------------------------------------------------------------------------

    def owned(self, space: str, prefix: bytes = b"") -> dict[records.UniqueRight, records.Owner]:
        found = self._ask("owned", {"space": space, "prefix": 1}, [prefix])
        return {records.UniqueRight(space, key): records.Owner(run.decode(), int(seq)) for key, run, seq in found}

    def claimed(self, run: str) -> dict[records.UniqueRight, int]:
        found = self._ask("claimed", {"run": run})
        return {records.UniqueRight(space.decode(), key): int(seq) for space, key, seq in found}

    def index(self, run: str) -> records.RunRow | None:
        found = self._ask("index", {"run": run})
        return None if found is None else run_row_of(found)

    def tags(self, run: str) -> set[str]:
        return {tag.decode() for tag in self._command("SMEMBERS", self._key("tags", run))}

    def reindex(
        self, run: str, index: records.RunIndex, *, at: int, slots: Collection[Slot] | None = None,
        delivered: int | None = None,
    ) -> bool:  # fmt: skip
        written = None if slots is None else slot_args(slots)
        args = {"run": run, "at": at, "index": index_args(index), "slots": written, "delivered": delivered}
        return bool(self._ask("reindex", args))

    def runs(self, query: records.RunQuery, *, before: int | None = None, limit: int = 100) -> list[records.RunRow]:
        below, rows = str(_BEYOND if before is None else before), list[records.RunRow]()
        while True:
            args = {**_query_args(query), "below": below, "limit": limit - len(rows)}
            found, on = self._ask("listed", args)
            rows += [row for each in found if (row := run_row_of(each)) is not None]
            if on is None:
                return rows
            below = on.decode()

    def asking(self, now_us: int, *, after: records.Urgency | None = None, limit: int) -> list[records.RunRow]:
        rows = self.runs(records.RunQuery(tag=records.ASKS, status=records.ASKING), limit=_BEYOND)
        found = {records.urgency_of(row, now_us): row for row in rows}
        return [found[key] for key in sorted(found) if after is None or key > after][:limit]

    def statuses(self, runs: Collection[str]) -> dict[str, records.RunStatus]:
        found = self._ask("run_statuses", {"runs": list(runs)})
        made = (
            records.RunStatus(head_of(head), text_of(status), text_of(why), mail) for head, status, why, mail in found
        )
        return {each.head.run: each for each in made}

    def counts(self, query: records.RunQuery) -> dict[str, int]:
        below, counts = str(_BEYOND), Counter[str]()
        while True:
            found, on = self._ask("counted", {**_query_args(query), "below": below})
            counts.update({status.decode(): count for status, count in found})
            if on is None:
                return dict(counts)
            below = on.decode()

    def agents(self) -> list[str]:
        return sorted({agent.decode() for agent in self._ask("agents", {})})

    def holders(self) -> list[records.Holder]:
        now, found = self._ask("holders", {})
        return holders_of(((holder.decode(), int_of(until)) for holder, until in found), int(now))

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[records.RunRow]:
        args = {"now_us": str(now_us), "limit": limit, "agents": None if agents is None else list(agents)}
        return [row for each in self._ask("due", args) if (row := run_row_of(each)) is not None]

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        found = self._ask("soonest", {"agents": None if agents is None else list(agents)})
        return None if found is None else int(found)

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._listener.watch(callback)

    # the outbox -------------------------------------------------------------------------------

    def outbox(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = records.READ_LIMIT
    ) -> list[records.OutboxItem]:
        limit, items, position = min(limit, records.READ_LIMIT), list[records.OutboxItem](), str(after)
        while True:
            args = {"after": position, "kinds": None if kinds is None else list(kinds), "limit": limit}
            found, on = self._ask("outbox", args)
            items += [
                records.OutboxItem(position=int(at), run=run.decode(), seq=int(seq), kind=kind.decode())
                for at, run, seq, kind in found
            ]
            if on is None or len(items) >= limit:
                return items[:limit]
            position = on.decode()

    def outbox_end(self) -> int:
        return int(self._command("GET", self._key("outbox_end")) or 0)

    def trim_outbox(self, up_to: int) -> int:
        return int(self._ask("trim_outbox", {"up_to": str(up_to)}))

    # maintenance ------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        if not self._ask("quarantine", {"run": run, "reason": reason}):
            raise RunUnknown(run)

    def quarantined(self, run: str) -> str | None:
        return text_of(self._command("HGET", self._key("run", run), "quarantined"))

    def repair(self, head: records.Head, *, keep: int, rows: Sequence[records.Row]) -> None:
        binary = BinaryArgs()
        until = None if head.lease_until_us is None else str(head.lease_until_us)
        args = {
            "run": head.run,
            "seq": head.seq,
            "hash": binary.put(head.hash),
            "epoch": head.epoch,
            "base": head.base,
            "parent": head.parent,
            "holder": head.holder,
            "till": until,
            "keep": keep,
            "least": min([head.seq, *(row.seq for row in rows)]),
            "rows": row_args(rows, binary),
        }

        def write(tries: int) -> None:
            what, *rest = self._server.once("repair", args, binary.blobs)
            if what == b"behind" or (what == b"there" and not tries):
                at = int(rest[0])
                raise StoreError(f"{head.run}: a repair moves the head forward, {at} to {head.seq} does not")

        self._server.run(write)

    def restore(
        self, run: str, rows: Sequence[records.Row], pieces: Sequence[Blob], messages: Sequence[records.InboxRow] = ()
    ) -> None:
        binary = BinaryArgs()
        args = {
            "run": run,
            "rows": row_args(rows, binary),
            "pieces": pieces_args(pieces, binary),
            "messages": [message_args(row, binary) for row in messages],
        }
        if not self._ask("restore", args, binary.blobs):
            raise RunUnknown(run)

    def displaced(self, run: str) -> list[records.Row]:
        found = self._command("LRANGE", self._key("aside", run), 0, -1)
        return [row_of(unpacked(text[8:])) for text in found]

    def remove(self, run: str, *, at: int | None = None, delivered: int | None = None) -> bool:
        args = {"run": run, "kinds": _RUN_KEYS, "at": at, "delivered": delivered}

        def write(tries: int) -> bool:
            what, *rest = self._server.once("remove", args)
            if what == b"fork":
                raise StoreError(f"{run}: {rest[0].decode()} is a fork of it; remove that run first")
            if what == b"unknown" and not tries:
                raise RunUnknown(run)
            return bool(what != b"changed")

        return self._server.run(write)

    def purge(self) -> bool:
        return True

    def inspect(self, *, heal: bool = False) -> list[records.Problem]:
        return inspect(self._server, heal=heal)

    def conditions(self) -> list[records.Condition]:
        return list(conditions(self._server, SystemClock()))

    # inside -----------------------------------------------------------------------------------

    def _ask(self, script: str, args: dict[str, Any] | list[Any], blobs: Sequence[bytes] = ()) -> Any:
        return self._server.ask(script, args, blobs, clock_us=self._clock_us())

    def _command(self, *words: Any) -> Any:
        return self._server.run(lambda _: self._server.client.execute_command(*words))

    def _key(self, kind: str, run: str | None = None) -> str:
        return self._server.prefix + (kind if run is None else f"{kind}:{run}")

    def _clock_us(self) -> int | None:
        """The time passed to scripts; None: the server's."""
        return None if self._clock is None else self._clock.now_us()


def _query_args(query: records.RunQuery) -> dict[str, Any]:
    part = None if query.contains is None else query.contains.encode().lower().decode()  # of bytes only ASCII has cases
    named = {name: getattr(query, name) for name in query.__struct_fields__}
    times = {name: str(named[name]) for name in ("since_us", "until_us") if named[name] is not None}
    return {**named, **times, "part": part}
