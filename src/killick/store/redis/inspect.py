"""Re-reads a Redis store, reports damaged rows, and checks the preconditions of its guarantees.

Reads one run or page at a time, each atomically, so that other clients can continue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from redis.exceptions import ResponseError

from killick.clock import Clock
from killick.model.hashing import value_hash
from killick.store.records import Condition, Problem
from killick.store.redis.rows import blob_of
from killick.store.redis.server import BinaryArgs, RedisServer

_PAGE: Final = 500
_RUNS_AT_ONCE: Final = 20
"""The number of runs that one script checks; the server blocks meanwhile."""

_PLACED: Final = ("places", "tags", "marks")
"""The derived data of a run, which is repaired by writing it again."""

_SETS: Final = ("line", "stand", "tag", "mark", "held", "unmarked", "runs")
_TRUTH: Final = ("log", "data", "aside", "mail", "mail_ids", "untaken", "slots")
_DERIVED: Final = ("shots", "uses", "shot_uses", "claimed", "tags", "marks", "telling")
_SKEW_MS_MAX: Final = 2_000


def inspect(server: RedisServer, *, heal: bool) -> list[Problem]:
    """Returns every row that fails its checksum, has no owner, or is missing. Derived rows are repaired."""
    found = list[Problem]()
    found_keys = chain.from_iterable(_scanned(server, ("SCAN",), "MATCH", f"{server.prefix}*"))
    keys = sorted({key.decode()[len(server.prefix) :] for key in found_keys})  # one may occur twice
    named = [key.removeprefix("run:") for key in keys if key.startswith("run:")]
    for first in range(0, len(named), _RUNS_AT_ONCE):
        found += _runs(server, named[first : first + _RUNS_AT_ONCE], heal=heal)
    runs = set(named)
    for key in keys:
        kind, _, rest = key.partition(":")
        if kind in _SETS:
            found += _set(server, key, kind, rest, heal=heal)
        elif kind in (*_TRUTH, *_DERIVED) and rest not in runs:
            healed = heal and kind in _DERIVED
            if server.ask("look_at_stray", {"kind": kind, "run": rest, "heal": healed}):
                found.append(Problem(where=kind, what="belongs to nothing that exists", run=rest, healed=healed))
    return [*found, *_claims(server), *_uses(server, runs, heal=heal), *_pieces(server, runs, heal=heal)]


def _runs(server: RedisServer, runs: list[str], *, heal: bool) -> Iterator[Problem]:
    for run, where, what in server.ask("look_at_runs", {"runs": runs}):
        healed = heal and where.decode() in _PLACED
        if healed:
            server.ask("settle_run", {"run": run.decode(), "marks": where == b"marks"})
        yield Problem(where=where.decode(), what=what.decode(), run=run.decode(), healed=healed)


def _set(server: RedisServer, key: str, kind: str, of: str, *, heal: bool) -> Iterator[Problem]:
    wrong = sum(map(int, _asked(server, "look_at_set", {"key": key, "kind": kind, "of": of, "heal": heal})))
    if wrong:
        yield Problem(where=key, what=f"{wrong} rows belong to nothing that exists", healed=heal)


def _claims(server: RedisServer) -> Iterator[Problem]:
    for space in chain.from_iterable(_asked(server, "look_at_claims", {})):
        yield Problem(where="claims", what=f"a claim in {space.decode()} is not as it was written")


def _uses(server: RedisServer, runs: set[str], *, heal: bool) -> Iterator[Problem]:
    """Finds chunks with a wrong reference count: a used chunk without a count would be swept."""
    counted: Counter[bytes] = Counter()
    kept = [f"{server.prefix}{kind}:{run}" for run in runs for kind in ("uses", "shot_uses")]
    for first in range(0, len(kept), _PAGE):
        for used in server.many(("SMEMBERS", key) for key in kept[first : first + _PAGE]):
            counted.update(used)
    stored = {hash_: int(count) for hash_, count in _fields(server, "refs")}
    odd = sorted(hash_ for hash_ in counted.keys() | stored.keys() if counted[hash_] != stored.get(hash_, 0))
    for first in range(0, len(odd), _PAGE):
        binary = BinaryArgs()
        places = [binary.put(hash_) for hash_ in odd[first : first + _PAGE]]
        for at in server.ask("look_at_uses", {"hashes": places, "heal": heal}, binary.blobs):
            what = f"value {binary.blobs[int(at) - 1].hex()[:12]} is used more or less often than was counted"
            yield Problem(where="uses", what=what, healed=heal)


def _pieces(server: RedisServer, runs: set[str], *, heal: bool) -> Iterator[Problem]:
    for hash_, text in _fields(server, "pieces"):
        piece = blob_of(hash_, text)
        if piece.body is None or value_hash(piece.codec, piece.body) == hash_:
            continue
        used = any(_command(server, "SISMEMBER", f"{server.prefix}uses:{run}", hash_) for run in runs)
        healed = heal and not used
        if healed:
            _command(server, "HDEL", f"{server.prefix}pieces", hash_)
        yield Problem(where="pieces", what=f"value {hash_.hex()[:12]} does not match its hash", healed=healed)


# reading in pages ---------------------------------------------------------------------------------


def _asked(server: RedisServer, script: str, args: dict[str, Any]) -> Iterator[Any]:
    """Yields the replies of a script that reads page by page."""
    cursor = b"0"
    while True:
        cursor, found = server.ask(script, {**args, "cursor": cursor.decode()})
        yield found
        if cursor == b"0":
            return


def _scanned(server: RedisServer, command: tuple[str, ...], *words: Any) -> Iterator[Any]:
    """Yields the pages of a scan."""
    cursor: Any = 0
    while True:
        cursor, page = _command(server, *command, cursor, *words, "COUNT", _PAGE)
        yield page
        if not int(cursor):
            return


def _fields(server: RedisServer, kind: str) -> Iterator[tuple[bytes, bytes]]:
    return chain.from_iterable(page.items() for page in _scanned(server, ("HSCAN", f"{server.prefix}{kind}")))


def _command(server: RedisServer, *words: Any) -> Any:
    return server.run(lambda _: server.client.execute_command(*words))


# preconditions ------------------------------------------------------------------------------------


def conditions(server: RedisServer, clock: Clock) -> Iterator[Condition]:
    """Checks the server settings that commits, leases and memory depend on."""
    info: dict[str, Any] = _command(server, "INFO")
    set_ = settings(server)
    engine = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    yield Condition("engine", engine)
    yield _durability(info, set_, waits=server.waits)
    failing = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(name, "ok") != "ok"]
    wrong = "it could not write to its disk; see the server's log" if failing else None
    yield Condition("saving", " and ".join(f"{name} failed" for name in failing) or "ok", wrong)
    yield _memory(info, set_)
    replica = info.get("role") != "master"
    yield Condition("role", _role(info), "it cannot be written; connect to the primary" if replica else None)
    yield _skew(server, clock)
    cluster = str(info.get("cluster_enabled", 0)) == "1"
    alone = "a store lies on one server; give it one that is in no cluster" if cluster else None
    yield Condition("cluster", "yes" if cluster else "no", alone)
    yield Condition("connections", f"{info.get('connected_clients', '?')} of {info.get('maxclients', '?')}")
    yield Condition("prefix", server.prefix)


def should_wait(server: RedisServer) -> bool:
    """Returns whether a commit must wait to be on disk: the server flushes its append-only file only periodically.
    False for a server that is too old, or that denies the command."""
    info: dict[str, Any] = _command(server, "INFO", "persistence")
    if str(info.get("aof_enabled", 0)) != "1" or settings(server).get("appendfsync") in ("always", "no"):
        return False

    def wait(_: int) -> bool:
        try:
            return bool(server.client.execute_command("WAITAOF", 0, 0, 1))
        except ResponseError:
            return False

    return server.run(wait)


def _durability(info: dict[str, Any], set_: dict[str, str], *, waits: bool) -> Condition:
    """Describes what an acknowledged commit survives, by the server's persistence settings."""
    appends = str(info.get("aof_enabled", 0)) == "1"
    flushes = set_.get("appendfsync", "unknown") if appends else ""
    how = f"appendonly yes, appendfsync {flushes}"
    always = "set appendonly yes and appendfsync always, and no commit is lost"
    twice = "what is lost may happen twice"
    if flushes == "always":
        return Condition("durability", f"a commit survives power loss ({how})")
    if waits:
        slow = "each waits for the flush; appendfsync always is quicker"
        return Condition("durability", f"a commit survives power loss ({how}; {slow})")
    if appends and flushes != "no":
        value = f"a commit survives a killed process; power loss takes the last second or two ({how})"
        return Condition("durability", value)
    if appends:
        value = f"a commit survives a killed process; power loss takes what the system had not written yet ({how})"
        return Condition("durability", value, f"that may be half a minute, and {twice}; {always}")
    if "save" not in set_ or set_["save"]:
        value = (
            f"a commit survives only if a snapshot comes after it (appendonly no, save {set_.get('save', 'unknown')})"
        )
        return Condition("durability", value, f"any end of the server takes minutes, and {twice}; {always}")
    gone = "nothing survives the end of the server (appendonly no, no save)"
    return Condition("durability", gone, f"this setting promises nothing; {always}")


def _memory(info: dict[str, Any], set_: dict[str, str]) -> Condition:
    policy = str(info.get("maxmemory_policy") or set_.get("maxmemory-policy") or "unknown")
    most = int(info.get("maxmemory", 0))
    used = f"{int(info.get('used_memory', 0)) / 1_000_000:,.1f} MB"
    value = f"{used} of {most / 1_000_000:,.1f} MB, {policy}" if most else f"{used}, without a limit"
    evicts = policy not in ("noeviction", "unknown") and not policy.startswith("volatile-")
    wrong = "when it is full it throws runs away; set maxmemory-policy noeviction" if most and evicts else None
    return Condition("memory", value, wrong)


def _role(info: dict[str, Any]) -> str:
    replicas = int(info.get("connected_slaves", 0))
    if info.get("role") != "master":
        return "replica"
    return "primary" if not replicas else f"primary with {replicas} replicas, which may lack the last commits"


def _skew(server: RedisServer, clock: Clock) -> Condition:
    before_us = clock.now_us()
    there_us = int(server.ask("now_us", {}))
    skew_ms = (there_us - (before_us + clock.now_us()) // 2) // 1_000
    apart = "timers and leases use both clocks; set them by NTP" if abs(skew_ms) > _SKEW_MS_MAX else None
    return Condition("clock", f"{skew_ms:+} ms from this machine's", apart)


def settings(server: RedisServer) -> dict[str, str]:
    """Returns the server's settings; nothing if it hides them, as hosted servers often do."""

    def ask(_: int) -> dict[str, str]:
        found = dict[str, str]()
        try:
            for name in ("appendfsync", "save", "maxmemory-policy"):
                words: Any = server.client.execute_command("CONFIG", "GET", name)
                if len(words) == 2:
                    found[name] = words[1].decode()
        except ResponseError:
            return {}
        return found

    return server.run(ask)
