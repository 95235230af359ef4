"""Typed logs over any store: what is appended is what is read, folded and forked."""

import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest
from stories import START_US, Story, started

from families import fork_of
from folded import fold_ledger, fold_timeline
from killick.errors import (
    EpochStale,
    HandleClosed,
    HeadMoved,
    LogError,
    RunBusy,
    RunExists,
    RunUnknown,
    ValueErased,
    ValueRefused,
)
from killick.log import Entry, Log, RunLog, verify
from killick.model import events as e
from killick.model.chunks import Blob
from killick.model.fold import FOLD, timeline
from killick.model.typed import convert
from killick.store import SqliteStore
from killick.store.protocol import raw_store
from killick.store.records import Append, Snapshot
from leasing import leased_by


def note(text: object, at: int = START_US) -> Entry:
    return Entry(e.NoteMade(at=at), {"note": text})


def begin(log: Log, run: str = "run_1", **fields: object) -> RunLog:
    first = started(run)
    return log.create(first.event, first.values or {}, **fields)  # type: ignore[arg-type]


def tell(log: Log, seed: int, count: int) -> RunLog:
    handle = begin(log)
    for batch in Story(seed).entries(count):
        handle.append(*batch)
    return handle


def root(fold: object) -> bytes:
    return fold.save([])  # type: ignore[attr-defined,no-any-return]


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(4))
def test_the_state_at_every_event_is_the_fold_of_its_timeline(log: Log, seed: int) -> None:
    handle = tell(log, seed, 250)
    told = [(recorded.seq, recorded.event) for recorded in log.read("run_1")]
    assert [seq for seq, _ in told] == list(range(1, handle.seq + 1))
    for seq in range(1, handle.seq + 1):
        fold, ledger = log.folds("run_1", seq)
        assert root(fold) == root(fold_timeline(timeline(told[:seq]))), f"seed {seed}, event {seq}"
        assert root(ledger) == root(fold_ledger(told[:seq])), f"seed {seed}, event {seq}"
    assert root(handle.fold) == root(log.state("run_1").fold)
    assert root(handle.ledger) == root(log.ledger("run_1"))


def test_opening_again_goes_on_where_the_log_ends(log: Log) -> None:
    before = tell(log, 7, 100)
    after = log.open("run_1")
    assert (after.seq, after.hash, root(after.fold)) == (before.seq, before.hash, root(before.fold))
    after.append(note("and on"))
    assert log.head("run_1").seq == before.seq + 1
    assert verify(log).holds


def test_a_fork_shares_its_parents_prefix_and_goes_its_own_way(log: Log) -> None:
    parent = tell(log, 3, 120)
    fork = fork_of(log, e.RunForked(at=START_US, run="fork_1", parent="run_1", cut=60, generation=1), {"set": {"x": 1}})
    fork.append(note("mine"))
    again = fork_of(log, e.RunForked(at=START_US, run="fork_2", parent="fork_1", cut=61, generation=2))
    again.append(note("mine too"))
    assert log.store.head("fork_1").base == 60
    assert [r.seq for r in log.read("fork_2")] == list(range(1, 64))
    assert log.read("fork_2", after=59, limit=3)[0].row == log.store.row("run_1", 60)
    assert log.data("fork_2", 30) == log.data("run_1", 30)
    for run, last in (("run_1", parent.seq), ("fork_1", 62), ("fork_2", 63)):
        told = [(r.seq, r.event) for r in log.read(run)]
        for seq in {1, 17, 60, 61, last}:
            assert root(log.state(run, seq).fold) == root(fold_timeline(timeline(told[:seq])))
    assert verify(log).holds


def test_a_fork_of_a_cut_that_its_parent_does_not_have_is_refused(log: Log) -> None:
    tell(log, 3, 20)
    with pytest.raises(LogError, match="has no event 999"):
        fork_of(log, e.RunForked(at=1, run="f", parent="run_1", cut=999, generation=1))
    with pytest.raises(RunUnknown):
        fork_of(log, e.RunForked(at=1, run="f", parent="nobody", cut=1, generation=1))


def test_values_come_back_verbatim_and_as_the_type_they_are_declared(log: Log) -> None:
    @dataclass
    class Receipt:
        id: str
        amount: Decimal

    handle = begin(log)
    values = {
        "output": Receipt("r1", Decimal("12.50")),
        "raw": {"t": (1, 2), "b": b"\x00\xff", "big": "x" * 100_000},
    }
    handle.append(Entry(e.AttemptEnded(at=1, step="1", attempt=1, outcome="returned"), values))
    assert log.data("run_1", 2)["raw"] == values["raw"]
    assert convert(log.data("run_1", 2)["output"], Receipt) == values["output"]


def test_a_value_that_cannot_be_stored_names_step_and_path_and_changes_nothing(log: Log) -> None:
    handle = begin(log)
    bad = Entry(e.AttemptEnded(at=1, step="6", attempt=1, outcome="returned"), {"output": {"sockets": [object()]}})
    with pytest.raises(ValueRefused, match=r"step 6 .*output\.sockets\[0\]"):
        handle.append(note("fine"), bad)
    assert (handle.seq, log.head("run_1").seq) == (1, 1)
    handle.append(note("goes on"))
    assert verify(log).holds


def test_what_two_handles_append_at_once_is_refused_to_the_second(log: Log) -> None:
    first = begin(log)
    second = log.open("run_1")
    first.append(note(1))
    with pytest.raises(HeadMoved, match="reload and decide again"):
        second.append(note(2))
    with pytest.raises(HandleClosed, match="open the run again"):
        second.append(note(3))
    assert log.head("run_1").seq == 2
    log.open("run_1").append(note(4))


def test_a_holder_that_lost_its_lease_appends_nothing(log: Log) -> None:
    old = begin(log, holder="w1", seconds=0)
    leased_by("w2", log, "run_1")
    with pytest.raises(EpochStale, match="taken over"):
        old.append(note("too late"))
    assert log.head("run_1").seq == 1


def test_a_claim_that_somebody_took_over_since_opens_nothing_and_writes_nothing(log: Log) -> None:
    begin(log)
    claim = log.store.lease("run_1", "frozen", seconds=0)
    taken = log.store.lease("run_1", "w2", seconds=60)
    with pytest.raises(EpochStale, match="taken over"):
        log.open("run_1", head=claim)
    assert log.head("run_1") == taken
    log.open("run_1", head=taken).append(note("goes on under its own"))
    assert log.head("run_1").seq == 2


def test_a_run_that_is_held_is_busy(log: Log) -> None:
    begin(log, holder="w1")
    with pytest.raises(RunBusy, match="w1"):
        leased_by("w2", log, "run_1")


def test_an_id_is_used_once_and_an_unknown_one_is_named(log: Log) -> None:
    begin(log)
    with pytest.raises(RunExists, match="run_1"):
        begin(log)
    with pytest.raises(RunUnknown, match="nobody"):
        log.open("nobody")
    for look in (log.event, log.state, log.ledger, log.data):
        with pytest.raises(LogError, match="has no event 2; it has 1 to 1"):
            look("run_1", 2)
    assert log.state("run_1", 0).seq == 0


def test_what_is_appended_behind_is_there_after_the_barrier(log: Log) -> None:
    handle = begin(log)
    for number in range(50):
        handle.append_behind(note(number))
    handle.barrier()
    assert log.head("run_1").seq == 51
    assert [log.data("run_1", seq)["note"] for seq in range(2, 52)] == list(range(50))


def test_a_failed_append_behind_closes_the_handle_at_the_barrier(log: Log) -> None:
    handle = begin(log)
    log.open("run_1").append(note("somebody else"))
    handle.append_behind(note("refused"))
    with pytest.raises(HandleClosed) as caught:
        handle.barrier()
    assert isinstance(caught.value.cause, HeadMoved)
    assert log.head("run_1").seq == 2


def test_a_rewind_through_the_handle_folds_as_if_it_were_read_again(log: Log) -> None:
    handle = begin(log)
    for number in range(30):
        handle.append(Entry(e.DecisionMade(at=number, step=str(number + 1)), {"choice": number}))
    handle.append_behind(note("not yet committed"))
    handle.append(Entry(e.RunRewound(at=99, cut=10, generation=1)))
    assert (handle.fold.facts.committed, handle.fold.facts.generation) == (9, 1)
    assert root(handle.fold) == root(log.state("run_1").fold)


def test_a_snapshot_of_another_fold_or_another_chain_is_ignored(log: Log) -> None:
    handle = tell(log, 5, 100)
    expected = root(handle.fold)
    head = log.head("run_1")
    for fold, hash_ in ((FOLD + 1, head.hash), (FOLD, b"\x00" * 32)):
        bogus = Snapshot(seq=head.seq, fold=fold, hash=hash_, root=b"\x01" * 32)
        log.store.append([Append(run="run_1", after=head.seq, before=head.hash, epoch=head.epoch, snapshot=bogus)])
        assert root(log.state("run_1").fold) == expected


def test_a_damaged_snapshot_costs_time_and_nothing_else(log: Log) -> None:
    handle = tell(log, 5, 100)
    head = log.head("run_1")
    root_piece = Blob(b"\x02" * 32, "json", b'{"nonsense": 1}')
    bogus = Snapshot(seq=head.seq, fold=FOLD, hash=head.hash, root=root_piece.hash, pieces=(root_piece,))
    log.store.append([Append(run="run_1", after=head.seq, before=head.hash, epoch=head.epoch, snapshot=bogus)])
    assert root(log.state("run_1").fold) == root(handle.fold)
    assert log.store.snapshots("run_1") == [], "what does not match the log is dropped when it is read"
    assert verify(log, "run_1").problems == []


@pytest.mark.slow
def test_snapshots_of_a_run_twice_as_long_take_twice_the_room(tmp_path: Path) -> None:
    def room(count: int) -> int:
        with_shots = SqliteStore(tmp_path / f"{count}.db", durability="process")
        log = Log(with_shots, snapshot_every=64)
        handle = begin(log)
        for batch in Story(1, rewinds=False).entries(count):
            handle.append_behind(*batch)
        handle.barrier()
        pieces = with_shots.pieces(with_shots.references("run_1").snapshots)
        total = sum(len(piece.body or b"") for piece in pieces.values())
        log.close()
        with_shots.close()
        return total

    assert room(4_000) < 2.5 * room(2_000)


def test_erased_values_leave_their_hash_and_the_rest_of_the_log_holds(log: Log) -> None:
    handle = begin(log)
    secret = "a private matter " * 100
    handle.append(note({"name": "Ann", "story": secret}))
    handle.append(note("harmless"))
    pieces = list(log.pieces_of("run_1", 2))
    assert pieces
    log.erase(handle, at=START_US, reason="asked by Ann", seqs=[2], pieces=pieces, by="dpo")
    with pytest.raises(ValueErased):
        log.data("run_1", 2)
    assert log.data("run_1", 3) == {"note": "harmless"}
    assert all(piece.body is None for piece in log.store.pieces(pieces).values())
    report = verify(log)
    assert report.holds
    assert report.erased == 1
    assert b"private matter" not in _bytes_of(log)


def _bytes_of(log: Log) -> bytes:
    if isinstance(raw_store(log.store), SqliteStore):
        log.close()
        log.store.close()
        return Path(log.store.place).read_bytes()
    return b""


def test_another_process_reads_what_this_one_committed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    begin(Log(store)).append(note("hello from the first"))
    code = (
        "import sys; from killick.log import Log; from killick.store import open_store\n"
        "log = Log(open_store(sys.argv[1]));"
        "print(log.data('run_1', 2)['note'], log.state('run_1').status)"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "killick.db")], text=True)
    assert out.strip() == "hello from the first queued"
    store.close()
