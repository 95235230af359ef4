"""R35: whoever rewrites a store, hashes and all, is caught against the last checkpoint, and the run is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import killick
import servers
from families import fork_of
from faulty_store import faulty
from killick.archive.prune import choose, prune
from killick.audit import seal_check
from killick.audit.checkpoint import SealedRun, checkpoint, new_key
from killick.audit.proof import verify_proof
from killick.audit.seal import AGENT, SEALS, seal
from killick.errors import KillickError, ProofBroken, SealRefused, StoreUnavailable
from killick.log import Entry, Log, repair
from killick.log import verify as verify_logs
from killick.model import events as e
from killick.model import hashing as chain
from killick.model import system_events
from killick.model.chunks import pack
from killick.model.merkle import Frontier
from killick.store import MemoryStore, SqliteStore
from killick.store.protocol import Store
from killick.store.records import row_check

KEY, PUB = new_key()
OTHER_KEY, OTHER_PUB = new_key()
DAY_US = 86_400_000_000


def note(text: str, at: int = 2) -> Entry:
    return Entry(e.NoteMade(at=at), {"note": text})


def started(log: Log, run: str, notes: int = 5) -> None:
    handle = log.create(e.RunStarted(at=1, run=run, agent="claims"), {"input": run})
    handle.append(*(note(f"{run} says {number}") for number in range(notes)))


def more(log: Log, run: str, count: int = 1) -> None:
    log.open(run).append(*(note(f"{run} goes on {number}") for number in range(count)))


def ended(log: Log, run: str) -> None:
    log.open(run).append(Entry(e.RunCompleted(at=3), {"result": None}))


def names(problems: list[Any]) -> set[str | None]:
    return {problem.run for problem in problems}


@pytest.fixture(params=["sqlite", "memory", pytest.param("postgres", marks=pytest.mark.slow)])
def kd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[killick.Client]:
    places = {"memory": lambda: "memory:", "postgres": servers.postgres_store}
    with killick.open(places.get(request.param, lambda: str(tmp_path / "killick.db"))()) as kd:
        for run in ("a", "b", "c"):
            started(kd.runtime.log, run)
        yield kd


# sealing ------------------------------------------------------------------------------------------


def test_a_seal_has_an_entry_for_every_run_and_the_checkpoint_is_its_signed_root(kd: killick.Client) -> None:
    done = kd.store.seal(KEY, by="ann")
    kept = checkpoint(done.file)
    kept.check(_public(PUB))
    assert (kept.origin, kept.size, e.to_text(kept.root)) == (kd.runtime.store.id, 3, done.root)
    entries = [SealedRun.read(line) for line in kept.entries]
    assert [(entry.run, entry.seq) for entry in entries] == [("a", 6), ("b", 6), ("c", 6)]
    assert [entry.hash for entry in entries] == [e.to_text(kd.runtime.log.head(run).hash) for run in ("a", "b", "c")]
    event = kd.events(SEALS)[-1].event
    assert isinstance(event, system_events.StoreSealed)
    assert (event.size, event.root, event.key, event.by) == (3, done.root, done.key, "ann")
    assert kd.store.verify(key=PUB, checkpoint=done.file).holds


def test_the_next_seal_has_what_changed_since_and_the_seals_themselves(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    more(kd.runtime.log, "b")
    started(kd.runtime.log, "d")
    done = kd.store.seal(KEY)
    assert set(done.runs) == {"b", "d", SEALS}
    assert (done.number, done.size) == (2, 6)
    assert kd.store.verify(key=PUB, checkpoint=done.file).seals == 2


def test_a_run_that_no_seal_has_is_read_once_to_be_verified(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(seal_check, "leaves", lambda store, head, **at: read.append(head.run) or ())
    assert kd.store.verify("a").holds
    assert not read


def test_nothing_new_makes_no_seal_and_gives_the_same_checkpoint(kd: killick.Client) -> None:
    first = kd.store.seal(KEY)
    again = kd.store.seal(KEY)
    assert (again.fresh, again.file, again.number) == (False, first.file, 1)
    assert kd.runtime.log.head(SEALS).seq == 2


def test_another_key_seals_anew_even_if_nothing_changed(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    done = kd.store.seal(OTHER_KEY)
    assert (done.fresh, done.number) == (True, 2)
    assert done.other_key == kd.events(SEALS)[1].event.key  # type: ignore[attr-defined]
    assert kd.store.verify(key=OTHER_PUB, checkpoint=done.file).holds
    report = kd.store.verify(key=PUB)
    assert [problem.what for problem in report.problems] == ["seal 2: its checkpoint is not signed with this key"]


def test_the_log_of_seals_is_not_listed_and_never_due_whatever_comes_to_it(kd: killick.Client, tmp_path: Path) -> None:
    kd.store.seal(KEY)
    for run in ("a", "b", "c"):
        ended(kd.runtime.log, run)
    assert _prune(kd, tmp_path / "one.gz", "a") == ("a",)
    row = kd.runtime.store.index(SEALS)
    assert row is not None
    assert (row.agent, row.status, row.wake_at_us) == (AGENT, "completed", None)
    assert SEALS not in {listed.id for listed in kd.list()}
    assert kd.runtime.store.due(1 << 60) == []
    assert kd.advance_due() == []


def test_ten_seals_find_every_run_again_by_reading_few_of_them(kd: killick.Client) -> None:
    for number in range(10):
        started(kd.runtime.log, f"new_{number}")
        assert set(kd.store.seal(KEY).runs) - {SEALS} == (
            {"a", "b", "c", "new_0"} if number == 0 else {f"new_{number}"}
        )
    more(kd.runtime.log, "new_3")
    counting = Counting(kd.runtime.store)
    done = seal(Log(counting.store), KEY, at_us=9)
    assert set(done.runs) - {SEALS} == {"new_3"}
    assert counting.looked_up < 8, "of ten seals"
    assert kd.store.verify(key=PUB).holds


def test_sealing_again_reads_only_the_events_that_are_new() -> None:
    store = MemoryStore()
    log = Log(store)
    started(log, "long", 5_000)
    for number in range(200):
        started(log, f"other_{number}")
    counting = Counting(store)
    first = seal(Log(counting.store), KEY, at_us=1)
    assert (first.events, counting.rows) == (5_001 + 200 * 6, 5_001 + 200 * 6)
    more(log, "long")
    counting = Counting(store)
    done = seal(Log(counting.store), KEY, at_us=2)
    assert done.events == 3, "the new one, and the two of the first seal"
    assert counting.rows == 3
    assert counting.calls < 20


class Counting:
    """Counts what is read through a store."""

    def __init__(self, store: Store) -> None:
        self.rows = self.looked_up = self.calls = 0
        counting = self

        class Proxy:
            def __getattr__(self, name: str) -> Any:
                found = getattr(store, name)
                if not callable(found):
                    return found

                def counted(*args: Any, **kwargs: Any) -> Any:
                    counting.calls += 1
                    answer = found(*args, **kwargs)
                    counting.rows += len(answer) if name == "read" else 0
                    counting.looked_up += name == "row" and args[0] == SEALS
                    return answer

                return counted

        self.store: Any = Proxy()


def test_a_fork_is_sealed_over_its_whole_lineage(kd: killick.Client) -> None:
    forked = e.RunForked(at=4, run="a-fork", parent="a", cut=4, generation=1)
    fork_of(kd.runtime.log, forked).append(note("another way"))
    nested = e.RunForked(at=5, run="a-fork-2", parent="a-fork", cut=2, generation=2)
    fork_of(kd.runtime.log, nested).append(note("and another"))
    done = kd.store.seal(KEY)
    assert {"a-fork", "a-fork-2"} <= set(done.runs)
    assert kd.store.verify(key=PUB, checkpoint=done.file).holds
    more(kd.runtime.log, "a-fork-2")
    assert kd.store.seal(KEY).events == 3
    assert kd.store.verify("a-fork-2", key=PUB).holds


def test_somebody_who_seals_at_the_same_time_is_told_to_seal_again(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    more(kd.runtime.log, "a")
    log, store = kd.runtime.log, kd.runtime.store

    class Meanwhile:
        def __getattr__(self, name: str) -> Any:
            if name == "heads" and not done:
                done.append(seal(log, KEY, at_us=8))
            return getattr(store, name)

    done: list[Any] = []
    racing: Any = Meanwhile()
    with pytest.raises(SealRefused, match="another process sealed the store at the same time; seal it again"):
        seal(Log(racing), KEY, at_us=9)
    assert kd.store.verify(key=PUB, checkpoint=done[0].file).holds


def test_a_run_of_that_name_that_is_not_killicks_own_is_left_alone() -> None:
    with killick.open("memory:") as kd:
        started(kd.runtime.log, SEALS)
        with pytest.raises(SealRefused, match="is a run of claims"):
            kd.store.seal(KEY)


@pytest.mark.parametrize("pem", [b"", b"nonsense", PUB])
def test_what_is_no_private_key_is_refused_with_the_next_move(kd: killick.Client, pem: bytes) -> None:
    with pytest.raises(SealRefused, match="is not a private key in PEM; killick store seal --new-key FILE makes one"):
        kd.store.seal(pem)


def test_a_checkpoint_is_checked_before_anything_is_believed(kd: killick.Client) -> None:
    done = kd.store.seal(KEY)
    with pytest.raises(ProofBroken, match="give the public key too"):
        kd.store.verify(checkpoint=done.file)
    with pytest.raises(ProofBroken, match="is not signed with this key"):
        kd.store.verify(checkpoint=done.file, key=OTHER_PUB)
    with pytest.raises(ProofBroken, match="is a private key"):
        kd.store.verify(key=KEY)
    with pytest.raises(ProofBroken, match="its signature is invalid"):
        kd.store.verify(checkpoint=done.file.partition("\n{")[0].replace("\n3\n", "\n2\n"), key=PUB)
    with pytest.raises(ProofBroken, match="its entries do not hash to its root"):
        kd.store.verify(checkpoint=done.file.replace('"run":"b"', '"run":"x"'), key=PUB)
    for nothing in ("", "a\nb\nc\n", done.file[:30], b"\xff\xfe"):
        with pytest.raises(ProofBroken, match="is not a checkpoint"):
            kd.store.verify(checkpoint=nothing, key=PUB)


# tampering ----------------------------------------------------------------------------------------


class Forger:
    """Somebody who has the file, and knows everything but the key: rewrites logs with every hash, head and checksum."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)

    def __enter__(self) -> Forger:
        return self

    def __exit__(self, *told: object) -> None:
        self.db.commit()
        self.db.close()

    def number(self, run: str) -> int:
        return int(self.db.execute("SELECT number FROM heads WHERE run = ?", (run,)).fetchone()[0])

    def edit(self, run: str, seq: int, old: bytes, new: bytes) -> None:
        """Change an event's body or data, and everything that follows from it."""
        id_ = (self.number(run) << 32) + seq
        body, data = self.db.execute("SELECT body, data FROM events WHERE id = ?", (id_,)).fetchone()
        assert (old in body) != (old in (data or b"")), "in one of them"
        body = body.replace(old, new)
        if data is not None and old in data:
            before, data = data, data.replace(old, new)
            named = [e.to_text(chain.data_hash(each)).encode() for each in (before, data)]
            body = body.replace(*named)
        self.db.execute("UPDATE events SET body = ?, data = ? WHERE id = ?", (body, data, id_))
        self.chain(run, seq)

    def chain(self, run: str, seq: int) -> None:
        """Compute all hashes from an event on anew, and move the head onto the last."""
        number = self.number(run)
        before = self.db.execute("SELECT hash FROM events WHERE id = ?", ((number << 32) + seq - 1,)).fetchone()[0]
        rows = "SELECT id, body FROM events WHERE number = ? AND seq >= ? ORDER BY id"
        for id_, body in self.db.execute(rows, (number, seq)).fetchall():
            before = chain.link(before, body)
            self.db.execute("UPDATE events SET hash = ? WHERE id = ?", (before, id_))
        self.head(run)
        self.db.execute("DELETE FROM snapshots WHERE number = ?", (number,))

    def head(self, run: str) -> None:
        number = self.number(run)
        last = "SELECT seq, hash FROM events WHERE number = ? ORDER BY id DESC LIMIT 1"
        seq, hash_ = self.db.execute(last, (number,)).fetchone()
        self.db.execute("UPDATE heads SET seq = ?, hash = ? WHERE number = ?", (seq, hash_, number))
        columns = "number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed"
        row = self.db.execute(f"SELECT {columns} FROM heads WHERE number = ?", (number,)).fetchone()
        self.db.execute("UPDATE heads SET checksum = ? WHERE number = ?", (row_check(*row), number))

    def cut(self, run: str, after: int) -> None:
        self.db.execute("DELETE FROM events WHERE number = ? AND seq > ?", (self.number(run), after))
        self.head(run)

    def put(self, run: str, seq: int, values: Any) -> None:
        """Give an event other values, and everything that follows from them."""
        number, id_ = self.number(run), (self.number(run) << 32) + seq
        packed = pack(values)
        body, before = self.db.execute("SELECT body, data FROM events WHERE id = ?", (id_,)).fetchone()
        for piece in packed.blobs:
            put = "INSERT OR IGNORE INTO pieces (hash, codec, body) VALUES (?, ?, ?)"
            self.db.execute(put, (piece.hash, piece.codec, piece.body))
            use = "INSERT OR IGNORE INTO piece_uses SELECT ?, 0, piece FROM pieces WHERE hash = ?"
            self.db.execute(use, (number, piece.hash))
        named = [e.to_text(chain.data_hash(each)).encode() for each in (before, packed.raw)]
        columns = (body.replace(*named), packed.raw, id_)
        self.db.execute("UPDATE events SET body = ?, data = ? WHERE id = ?", columns)
        self.chain(run, seq)

    def remove(self, run: str) -> None:
        """Take a run out as if it had never been; runs that came after it move up."""
        number = self.number(run)
        for table in ("events", "runs", "tags", "piece_uses", "inbox", "snapshots", "marks", "marked", "feed", "heads"):
            self.db.execute(f"DELETE FROM {table} WHERE number = ?", (number,))
        for table in ("runs", "tags", "piece_uses", "inbox", "snapshots", "marks", "marked", "feed", "heads"):
            self.db.execute(f"UPDATE {table} SET number = number - 1 WHERE number > ?", (number,))
        self.db.execute("UPDATE events SET id = id - (1 << 32) WHERE number > ?", (number,))
        later = "SELECT run FROM heads WHERE number >= ?"
        for (each,) in self.db.execute(later, (number,)).fetchall():
            self.head(each)
        counts = self.db.execute("SELECT number, delivered FROM runs").fetchall()
        for place, delivered in counts:
            check = row_check(place, delivered)
            self.db.execute("UPDATE runs SET delivered_checksum = ? WHERE number = ?", (check, place))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that was sealed twice, with `monday.seal` and `tuesday.seal` kept outside; `monday.db` is a copy."""
    with killick.open(str(tmp_path / "killick.db")) as kd:
        for run in ("a", "b", "c"):
            started(kd.runtime.log, run)
        (tmp_path / "monday.seal").write_text(kd.store.seal(KEY).file)
    shutil.copy(tmp_path / "killick.db", tmp_path / "monday.db")
    with killick.open(str(tmp_path / "killick.db")) as kd:
        more(kd.runtime.log, "a", 3)
        more(kd.runtime.log, "b", 2)
        started(kd.runtime.log, "d")
        (tmp_path / "tuesday.seal").write_text(kd.store.seal(KEY).file)
    return tmp_path / "killick.db"


def found(path: Path, day: str = "tuesday") -> dict[str | None, tuple[int | None, str]]:
    """What verification says against a checkpoint that was kept; the record by itself holds, for the forger is good."""
    with killick.open(str(path)) as kd:
        assert verify_logs(kd.runtime.log).holds, "the forger forgot something"
        report = kd.store.verify(checkpoint=path.with_name(f"{day}.seal").read_text(), key=PUB)
        assert not report.holds
        assert not report.explained
        problems = [problem for problem in report.problems if not problem.healed]
        return {problem.run: (problem.seq, problem.what) for problem in reversed(problems)}


def test_an_untouched_store_holds_against_every_checkpoint_that_was_kept(path: Path) -> None:
    with killick.open(str(path)) as kd:
        for day in ("monday", "tuesday"):
            report = kd.store.verify(checkpoint=path.with_name(f"{day}.seal").read_bytes(), key=PUB)
            assert (report.holds, report.problems, report.explained, report.seals) == (True, [], [], 2)


def test_an_event_that_was_edited_with_all_hashes_is_found_between_the_two_seals_around_it(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit("a", 8, b"goes on 1", b"goes on 7")
    assert found(path)["a"] == (7, "an event from 7 to 9 differs from its seal")
    assert found(path, "monday")["a"][0] == 7, "the store's own seals tell it still"


def test_a_body_that_was_edited_is_found_like_a_value(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit("c", 3, b'"at":2', b'"at":1')
    assert found(path) == {"c": (1, "an event from 1 to 6 differs from its seal")}


def test_a_run_that_was_removed_with_all_its_rows_is_named(path: Path) -> None:
    with Forger(path) as forger:
        forger.remove("b")
    assert found(path) == {"b": (None, "is missing: it was sealed at event 8, and no prune is on record")}


def test_a_store_that_was_rolled_back_to_yesterday_is_said_to_be_and_names_what_is_lost(path: Path) -> None:
    shutil.copy(path.with_name("monday.db"), path)
    told = found(path)
    assert told[None] == (None, "was rolled back or cut: its seals have 3 of the 7 entries of the checkpoint")
    assert told["a"] == (7, "ends at event 6, and was sealed at event 9")
    assert told["b"] == (7, "ends at event 6, and was sealed at event 8")
    assert told["d"] == (None, "is missing: it was sealed at event 6, and no prune is on record")
    assert "c" not in told


def test_events_cut_off_the_end_are_missed(path: Path) -> None:
    with Forger(path) as forger:
        forger.cut("a", 8)
    assert found(path) == {"a": (9, "ends at event 8, and was sealed at event 9")}


def test_a_run_that_was_replaced_by_another_of_its_name_is_found(path: Path) -> None:
    with Forger(path) as forger:
        forger.remove("c")
    with killick.open(str(path)) as kd:
        handle = kd.runtime.log.create(e.RunStarted(at=1, run="c", agent="claims"), {"input": "c"})
        handle.append(*(note("nothing happened") for _ in range(9)))
    assert found(path) == {"c": (1, "an event from 1 to 6 differs from its seal")}


def test_seals_that_were_forged_with_another_key_hold_by_themselves_and_not_against_the_checkpoint(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit("b", 8, b"goes on 1", b"goes on 7")
        forger.remove(SEALS)
    with killick.open(str(path)) as kd:
        kd.store.seal(OTHER_KEY)
        more(kd.runtime.log, "c")
        kd.store.seal(OTHER_KEY)
        assert kd.store.verify().holds, "the forgery is perfect in itself"
        assert names(kd.store.verify(key=PUB).problems) == {SEALS}, "but it is not signed"
    told = found(path)
    assert told["b"] == (1, "an event from 1 to 8 differs from its seal")
    assert told[None][1].startswith("was rolled back or cut: its seals have ")
    assert "a" not in told


def test_an_entry_that_was_changed_in_the_seals_is_named_by_what_the_checkpoint_has(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit("a", 2, b"a says 0", b"a says 7")
        forger.remove(SEALS)
    with killick.open(str(path)) as kd:
        for run in range(9):
            started(kd.runtime.log, f"filler_{run}")
        kd.store.seal(OTHER_KEY)
    told = found(path)
    assert told["a"][1] == "an event from 1 to 9 differs from its seal"
    with killick.open(str(path)) as kd:
        report = kd.store.verify(checkpoint=path.with_name("tuesday.seal").read_text(), key=PUB)
    what = "its first 7 entries are not what the checkpoint signs: one of a, b was changed there"
    assert what in {problem.what for problem in report.problems if problem.run == SEALS}


def test_a_store_without_its_seals_is_caught_by_the_key_alone(path: Path) -> None:
    with Forger(path) as forger:
        forger.remove(SEALS)
    with killick.open(str(path)) as kd:
        assert kd.store.verify().holds
        assert [each.what for each in kd.store.verify(key=PUB).problems] == [
            "has no seals for the key to prove; `killick store seal` makes one"
        ]
    assert None in found(path)


def test_a_checkpoint_of_another_store_is_no_proof_of_this_one(path: Path, tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "other.db")) as kd:
        started(kd.runtime.log, "a")
        other = kd.store.seal(KEY).file
    with killick.open(str(path)) as kd:
        [problem] = kd.store.verify(checkpoint=other, key=PUB).problems
        assert problem.what.startswith("the checkpoint is of another store, store_")


def test_the_next_seal_refuses_what_is_not_what_was_sealed_and_seals_the_rest(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit("a", 8, b"goes on 1", b"goes on 7")
        forger.edit("c", 3, b'"at":2', b'"at":1')
        forger.cut("d", 4)
    with killick.open(str(path)) as kd:
        more(kd.runtime.log, "a")
        more(kd.runtime.log, "b")
        done = kd.store.seal(KEY)
        assert set(done.refused) == {"a", "c", "d"}
        assert set(done.runs) == {"b", SEALS}
        assert done.refused["c"] == "differs from the log sealed at event 6"
        assert names(kd.store.verify(checkpoint=done.file, key=PUB).problems) == {"a", "c", "d"}


def test_a_seal_that_the_key_did_not_sign_is_not_gone_on_from(path: Path) -> None:
    with Forger(path) as forger:
        forger.edit(SEALS, 3, b'"size":7', b'"size":9')
    with killick.open(str(path)) as kd:
        with pytest.raises(SealRefused, match="the last seal differs from its signature"):
            kd.store.seal(KEY)
        assert [(each.run, each.seq) for each in kd.store.verify().problems] == [(SEALS, 3)]


def test_a_seal_that_was_led_to_go_on_from_a_forged_run_is_found_against_the_older_checkpoint(path: Path) -> None:
    """What a seal knows of runs for the next one is not in the tree, and the last seal is not sealed itself yet."""
    old = SealedRun.read(checkpoint(path.with_name("monday.seal").read_text()).entries[2])
    with Forger(path) as forger:
        forger.edit("c", 3, b'"at":2', b'"at":1')
    with killick.open(str(path)) as kd:
        rows = [kd.runtime.store.row("c", seq) for seq in range(1, 7)]
        tree = Frontier()
        for row in rows:
            assert row is not None
            tree.add(chain.leaf(row.body))
        hash_ = e.to_text(kd.runtime.log.head("c").hash)
        data = kd.runtime.log.data(SEALS, 3)
        lines = [json.loads(line) for line in data["runs"].splitlines()]
        for line in lines:
            if line[0] == "c":
                line[2], line[4] = hash_, [e.to_text(peak) for peak in tree.peaks]
        data["runs"] = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    with Forger(path) as forger:
        forger.put(SEALS, 3, data)
    with killick.open(str(path)) as kd:
        more(kd.runtime.log, "c")
        done = kd.store.seal(KEY)
        assert "c" in done.runs, "the forger led the sealer on"
        assert old.hash != hash_
        for kept in (path.with_name("tuesday.seal").read_text(), done.file):
            report = kd.store.verify(checkpoint=kept, key=PUB)
            first = report.first("c")
            assert first is not None
            assert (first.seq, first.what) == (1, "an event from 1 to 6 differs from its seal")


@pytest.mark.parametrize("column", ["body", "data"])
def test_seals_that_cannot_be_read_are_told_and_hide_nothing_else(path: Path, column: str) -> None:
    with Forger(path) as forger:
        forger.edit("c", 3, b'"at":2', b'"at":1')
        id_ = (forger.number(SEALS) << 32) + 3
        forger.db.execute(f"UPDATE events SET {column} = CAST('nonsense' AS BLOB) WHERE id = ?", (id_,))
    with killick.open(str(path)) as kd:
        report = kd.store.verify(checkpoint=path.with_name("monday.seal").read_text(), key=PUB)
        assert names(report.problems) == {SEALS, "c"}
        with pytest.raises(KillickError):
            kd.store.seal(KEY)


# what is no fault ---------------------------------------------------------------------------------


def _public(pem: bytes) -> Any:
    from killick.audit.checkpoint import public_key

    return public_key(pem)


def _prune(kd: killick.Client, to: Path, run: str) -> tuple[str, ...]:
    chosen = choose(kd.runtime.log, until_us=DAY_US)
    chosen = msgspec.structs.replace(chosen, going=tuple(row for row in chosen.going if row.run == run))
    return prune(kd.runtime.log, chosen, to, holder="test", now_us=7).runs


def test_values_that_were_erased_change_nothing_that_was_sealed(path: Path) -> None:
    with killick.open(str(path)) as kd:
        kd.runtime.log.erase(kd.runtime.log.open("a"), at=9, reason="asked for it", seqs=[3])
        report = kd.store.verify(checkpoint=path.with_name("tuesday.seal").read_text(), key=PUB)
        assert (report.holds, report.erased, report.problems, report.explained) == (True, 1, [], [])
        assert kd.store.seal(KEY).refused == {}


def _damage(path: Path, run: str, seq: int, column: str) -> None:
    with Forger(path) as forger:
        id_ = (forger.number(run) << 32) + seq
        damaged = "CAST(replace(body, '\"at\":2', '\"at\":4') AS BLOB)" if column == "body" else "zeroblob(32)"
        forger.db.execute(f"UPDATE events SET {column} = {damaged} WHERE id = ?", (id_,))


@pytest.mark.parametrize("seq", [3, 6, 7, 8, 9])
@pytest.mark.parametrize("column", ["body", "hash"])
def test_what_a_repair_set_aside_is_told_as_repaired_and_not_as_changed(path: Path, seq: int, column: str) -> None:
    _damage(path, "a", seq, column)
    kept = path.with_name("tuesday.seal").read_text()
    with killick.open(str(path)) as kd:
        assert not kd.store.verify(checkpoint=kept, key=PUB).holds
        repair(kd.runtime.log, "a", at=9, reason="a bad disk", by="ann")
        report = kd.store.verify(checkpoint=kept, key=PUB)
        assert (report.holds, report.repaired) == (True, 1)
        assert names(report.explained) == {"a"}
        what = f"was sealed at event 9; a repair by ann removed events {seq} to 9 since"
        assert report.explained[-1].what == what
        more(kd.runtime.log, "a")
        done = kd.store.seal(KEY)
        assert "a" in done.runs
        assert kd.store.verify(checkpoint=done.file, key=PUB).holds
        assert verify_proof(kd.store.prove("a", 11).file, PUB, done.file).run == "a"
        if seq > 2:
            assert verify_proof(kd.store.prove("a", 2).file, PUB).seq == 2
        with pytest.raises(SealRefused, match=f"event {seq} was removed from the log by a repair"):
            kd.store.prove("a", seq)


def test_a_repair_after_what_was_sealed_concerns_no_seal(path: Path) -> None:
    kept = path.with_name("tuesday.seal").read_text()
    with killick.open(str(path)) as kd:
        more(kd.runtime.log, "a", 3)
    _damage(path, "a", 11, "body")
    with killick.open(str(path)) as kd:
        assert kd.store.seal(KEY).refused == {"a": "body and hash do not fit the chain"}
        repair(kd.runtime.log, "a", at=9, reason="a bad disk")
        done = kd.store.seal(KEY)
        assert set(done.runs) == {"a", SEALS}
        for each in (kept, done.file):
            report = kd.store.verify(checkpoint=each, key=PUB)
            assert (report.holds, report.explained) == (True, [])


def test_rows_that_were_lost_before_a_repair_are_told_as_repaired(path: Path) -> None:
    with Forger(path) as forger:
        forger.db.execute("DELETE FROM events WHERE number = ? AND seq > 4", (forger.number("a"),))
    with killick.open(str(path)) as kd:
        repair(kd.runtime.log, "a", at=9, reason="a bad disk")
        report = kd.store.verify(checkpoint=path.with_name("tuesday.seal").read_text(), key=PUB)
        assert report.holds
        assert [(problem.run, problem.seq) for problem in report.explained] == [("a", 9)]


def test_a_repair_does_not_cover_what_was_changed_before_what_it_set_aside(path: Path) -> None:
    with Forger(
        path
    ) as forger:  # all but the head is computed anew, which verification finds, and a repair goes on from
        number = forger.number("c")
        head = forger.db.execute("SELECT * FROM heads WHERE number = ?", (number,)).fetchone()
        forger.edit("c", 3, b'"at":2', b'"at":1')
        forger.db.execute("UPDATE heads SET hash = ?, checksum = ? WHERE number = ?", (head[3], head[10], number))
    with killick.open(str(path)) as kd:
        repair(kd.runtime.log, "c", at=9, reason="it was broken")
        assert verify_logs(kd.runtime.log).holds
        report = kd.store.verify(checkpoint=path.with_name("tuesday.seal").read_text(), key=PUB)
        assert [(each.run, each.what) for each in report.problems] == [
            ("c", "an event from 1 to 6 differs from its seal")
        ]


def test_a_pruned_run_is_told_of_at_once_and_sealed_with_the_file_it_went_into(path: Path) -> None:
    kept = path.with_name("tuesday.seal").read_text()
    with killick.open(str(path)) as kd:
        for run in ("b", "c"):
            ended(kd.runtime.log, run)
        to = path.with_name("old.gz")
        assert _prune(kd, to, "c") == ("c",)
        report = kd.store.verify(checkpoint=kept, key=PUB)
        assert report.holds
        assert [(each.run, each.what) for each in report.explained] == [
            ("c", "was pruned into old.gz, which no seal records yet")
        ]
        done = kd.store.seal(KEY)
        assert done.gone == {"c": "old.gz"}
        [entry] = [SealedRun.read(line) for line in checkpoint(done.file).entries if '"gone"' in line]
        assert (entry.run, entry.gone, entry.sha256) == ("c", "pruned", hashlib.sha256(to.read_bytes()).hexdigest())
        assert entry.seq == 7, "as it was when it left, one event after the last seal of it"
        for each in (kept, done.file):
            report = kd.store.verify(checkpoint=each, key=PUB)
            assert (report.holds, report.explained) == (True, [])
        assert kd.store.seal(KEY).fresh is False


def test_a_run_that_was_never_sealed_is_told_of_too_when_it_is_pruned(path: Path) -> None:
    with killick.open(str(path)) as kd:
        started(kd.runtime.log, "short")
        ended(kd.runtime.log, "short")
        assert _prune(kd, path.with_name("old.gz"), "short") == ("short",)
        assert kd.store.seal(KEY).gone == {"short": "old.gz"}
        assert kd.store.verify(key=PUB).holds


def test_a_seal_between_the_telling_and_the_leaving_of_a_run_does_no_harm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.open(str(path)) as kd:
        ended(kd.runtime.log, "c")
        remove = kd.runtime.store.remove

        def sealing_first(run: str, **seen: int) -> bool:
            assert set(kd.store.seal(KEY).runs) == {"c", SEALS}, "it is there still"
            return remove(run, **seen)

        monkeypatch.setattr(kd.runtime.store, "remove", sealing_first)
        assert _prune(kd, path.with_name("old.gz"), "c") == ("c",)
        assert names(kd.store.verify(key=PUB).explained) == {"c"}
        assert kd.store.seal(KEY).gone == {"c": "old.gz"}
        assert kd.store.verify(key=PUB).holds


def test_a_run_that_left_without_a_word_is_a_fault_for_ever(kd: killick.Client) -> None:
    first = kd.store.seal(KEY)
    kd.runtime.store.remove("b")
    assert names(kd.store.verify(checkpoint=first.file, key=PUB).problems) == {"b"}
    done = kd.store.seal(KEY)
    assert done.gone == {"b": None}
    [problem] = kd.store.verify(checkpoint=done.file, key=PUB).problems
    assert problem.what == "is missing: it was removed after event 6, and no prune is on record"


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_that_honest_people_do_is_called_a_fault(seed: int, tmp_path: Path) -> None:
    """Runs, forks, repairs, prunes, erasures and seals in any order: every checkpoint ever kept still holds."""
    chance = random.Random(seed)
    kept: list[str] = []
    with killick.open("memory:") as kd:
        started(kd.runtime.log, "run_0")
        for number in range(1, 60):
            runs = [head.run for _, head in kd.runtime.store.heads() if head.run != SEALS]
            act = chance.choice(["start", "more", "more", "fork", "repair", "prune", "erase", "seal", "seal"])
            run = chance.choice(runs) if runs else ""
            if act == "start" or not runs:
                started(kd.runtime.log, f"run_{number}", chance.randrange(1, 9))
            elif act == "more":
                more(kd.runtime.log, run, chance.randrange(1, 5))
            elif act == "fork":
                cut = chance.randrange(1, kd.runtime.log.head(run).seq + 1)
                if kd.runtime.store.row(kd.runtime.log.owner(run, cut), cut) is not None:
                    fork_of(
                        kd.runtime.log, e.RunForked(at=3, run=f"fork_{number}", parent=run, cut=cut, generation=number)
                    )
            elif act == "repair":
                _break(kd, chance.choice(runs), chance)
            elif act == "prune":
                ended(kd.runtime.log, run)
                if run in {row.run for row in choose(kd.runtime.log, until_us=DAY_US).going}:
                    _prune(kd, tmp_path / f"{number}.gz", run)
            elif act == "erase":
                kd.runtime.log.erase(
                    kd.runtime.log.open(run), at=4, reason="asked for it", seqs=[kd.runtime.log.head(run).seq]
                )
            else:
                done = kd.store.seal(KEY)
                assert done.refused == {}
                kept.append(done.file)
        for each in kept:
            report = kd.store.verify(checkpoint=each, key=PUB)
            assert report.problems == []
        for head in [head for _, head in kd.runtime.store.heads()] if kept else []:
            with contextlib.suppress(SealRefused):
                assert (
                    verify_proof(kd.store.prove(head.run, chance.randrange(1, head.seq + 1)).file, PUB).run == head.run
                )


def _break(kd: killick.Client, run: str, chance: random.Random) -> None:
    """Damage an own event of a run that no fork stands on, and repair what follows."""
    rows, head = kd.runtime.store._runs[run].rows, kd.runtime.log.head(run)  # type: ignore[attr-defined]
    if len(rows) < 2 or any(other.parent == run for _, other in kd.runtime.store.heads()):
        return
    seq = chance.choice(sorted(rows)[1:])
    rows[seq] = msgspec.structs.replace(rows[seq], hash=bytes(32))
    if seq == head.seq or chance.random() < 0.5:
        rows[seq] = msgspec.structs.replace(rows[seq], body=rows[seq].body + b" ", hash=rows[seq].hash)
    repair(kd.runtime.log, run, at=9, reason="a bad disk")


# dying --------------------------------------------------------------------------------------------


@pytest.mark.gate(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_failing_any_operation_of_a_seal_leaves_the_seals_whole(
    tmp_path: Path, kind: str, when: Literal["before", "after"]
) -> None:
    def make(name: str) -> Store:
        return MemoryStore() if kind == "memory" else SqliteStore(tmp_path / f"{name}.db", durability="process")

    def tell(store: Store, act: Callable[[Log], object]) -> None:
        log = Log(store)
        for run in ("a", "b"):
            started(log, run)
        seal(log, KEY, at_us=1)
        more(log, "a")
        log.close()
        act(log)

    counting = faulty(make("clean"), fail_at=10**9, when="before")
    tell(counting, lambda log: None)
    before = counting.operations
    seal(Log(counting), KEY, at_us=2)
    counting.close()
    for failing in range(before + 1, counting.operations + 1):
        store = make(str(failing))
        broken = faulty(store, fail_at=failing, when=when, error=StoreUnavailable("disk", "it failed this once"))
        tell(broken, lambda log: None)
        with pytest.raises(KillickError):
            seal(Log(broken), KEY, at_us=2)
        with killick.Client(store) as kd:
            assert kd.store.verify(key=PUB).holds
            done = kd.store.seal(KEY)
            assert done.size == 4
            assert kd.store.verify(checkpoint=done.file, key=PUB).holds


SEALING = """
import sys
import killick
from killick.model import events as e
kd = killick.open(sys.argv[1])
key = open(sys.argv[2], "rb").read()
number = 0
while True:
    number += 1
    kd.runtime.log.create(e.RunStarted(at=1, run=f"run_{number}_{sys.argv[3]}", agent="claims"), {"input": "x" * 3000})
    done = kd.store.seal(key)
    open(sys.argv[4], "w").write(done.file)
    print(done.number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_sealer_leaves_seals_that_hold_and_go_on(tmp_path: Path) -> None:
    store, key, kept = tmp_path / "killick.db", tmp_path / "key.pem", tmp_path / "kept.seal"
    key.write_bytes(KEY)
    sealed = 0
    for life in range(4):
        words = [sys.executable, "-c", SEALING, str(store), str(key), str(life), str(kept)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(3 + life):
                sealed = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        with killick.open(str(store)) as kd:
            report = kd.store.verify(key=PUB)
            assert report.holds
            assert report.seals >= sealed
    with killick.open(str(store)) as kd:
        assert kd.store.verify(checkpoint=kd.store.seal(KEY).file, key=PUB).holds
