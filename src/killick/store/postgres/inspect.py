"""Re-reads a PostgreSQL store, reports damaged rows, and checks the preconditions of its guarantees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from killick.clock import Clock
from killick.store.postgres.server import SERVER_NEEDED, PostgresServer, Statements
from killick.store.postgres.wire import Session
from killick.store.records import Condition, Problem
from killick.store.sql.rows import damaged_terms, problems_of

_DERIVED: Final = ("piece_uses", "tags", "snapshots", "feed")
_SKEW_MS_MAX: Final = 2_000
_SPARE_CONNECTIONS_MIN: Final = 5
_TRANSACTION_SECONDS_MAX: Final = 600


def problems(session: Session, q: Statements, *, heal: bool) -> Iterator[Problem]:
    """Returns every row that fails its checksum, has no owner, or is missing."""
    names: dict[int, str] = dict(session.rows(q.names))
    for table, number, label in session.rows(q.wrong_rows):
        yield Problem(where=table, what=f"row {label} is not as it was written", run=names.get(number))
    damaged = damaged_terms(session.rows(q.all_terms), session.rows(q.all_index_positions), names)
    yield from problems_of(session.rows(q.strays), damaged, names, _DERIVED, heal=heal)


def damaged_pieces(session: Session, q: Statements) -> tuple[list[bytes], list[bytes]]:
    """Returns the hashes of damaged chunks: those that logs use, and those that only snapshots use."""
    found = session.rows(q.wrong_pieces)
    return [hash_ for hash_, used in found if used], [hash_ for hash_, used in found if not used]


def conditions(session: Session, server: PostgresServer, clock: Clock) -> Iterator[Condition]:
    """Checks the server settings that commits, leases and reads depend on."""
    before_us = clock.now_us()
    [found] = session.rows(server.q.settings)
    after_us = clock.now_us()
    version, number, fsync, pages, commit, in_recovery, there_us, size, allowed, used, oldest, lock = found
    old = f"Killick needs {SERVER_NEEDED // 10_000} or newer; upgrade the server" if number < SERVER_NEEDED else None
    yield Condition("engine", f"PostgreSQL {version}", old)
    unsafe = "a power cut loses commits that were acknowledged; turn fsync on"
    yield Condition("fsync", fsync, None if fsync == "on" else unsafe)
    torn = "a power cut may leave half-written pages; turn full_page_writes on"
    yield Condition("full_page_writes", pages, None if pages == "on" else torn)
    survives = "a killed process, but no power loss" if commit == "off" else "power loss"
    yield Condition("durability", f"a commit survives {survives} (synchronous_commit {commit})")
    standby = "it cannot be written; connect to the primary" if in_recovery else None
    yield Condition("role", "standby" if in_recovery else "primary", standby)
    skew_ms = (there_us - (before_us + after_us) // 2) // 1_000
    apart = "timers and leases use both clocks; set them by NTP" if abs(skew_ms) > _SKEW_MS_MAX else None
    yield Condition("clock", f"{skew_ms:+} ms from this machine's", apart)
    few = int(allowed) - used < _SPARE_CONNECTIONS_MIN
    full = "there is hardly room for another; raise max_connections or close unused connections" if few else None
    yield Condition("connections", f"{used} of {allowed}, at most {server.sessions_max} from here", full)
    slow = "claims slow down until it ends; end it, and set idle_in_transaction_session_timeout"
    wrong = slow if oldest > _TRANSACTION_SECONDS_MAX else None
    yield Condition("transactions", f"the oldest is open for {oldest:,} s", wrong)
    endless = "a statement may wait for a lock for ever; set the role's lock_timeout" if lock == "0" else None
    yield Condition("lock_timeout", lock, endless)
    yield Condition("size", f"{size / 1_000_000:,.1f} MB")
    yield Condition("schema", server.schema)
    yield Condition("format", str(server.format))
