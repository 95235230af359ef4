"""Ended runs leave the store by way of a file: whichever may go, nothing is lost, and what stays still holds."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.archive import bundle, prune
from killick.archive.export import export
from killick.errors import ArchiveRefused, ExportBroken, RunError, RunUnknown
from killick.log import Entry, Log, verify
from killick.model import events as e
from killick.store import MemoryStore
from killick.store.records import RunIndex
from leasing import leased_by

DAY = 86_400
LONG = "a note that several runs share, and that is long enough to be stored apart " * 40


@killick.tool(effect="idempotent")
async def archive_note(text: str, n: int) -> str:
    return f"{n}: {text}"


@killick.agent
async def archive_leaf(run: killick.Run, n: int) -> str:
    noted = await run.call(archive_note, LONG + str(n % 3), n)
    if n % 5 == 4:
        raise ValueError(f"{n} is no good")
    if n % 7 == 6:
        await run.ask("Right?")
    return noted[:4]


@killick.agent
async def archive_parent(run: killick.Run, n: int) -> str:
    child = await run.spawn(archive_leaf, n)
    with contextlib.suppress(killick.StepFailed):
        await child.result()
    if n % 2:
        await run.ask("Go on?")
    if n % 3 == 2:
        raise ValueError(f"{n} is no good either")
    return "done"


@killick.agent
async def archive_renewing(run: killick.Run, n: int) -> str:
    if n:
        await run.renew(n - 1)
    await run.ask("For ever?")
    return "over"


@pytest.fixture
def clock() -> killick.clock.LeapingClock:
    return killick.clock.LeapingClock()


@pytest.fixture
def kd(clock: killick.clock.LeapingClock) -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(clock=clock), clock=clock) as client:
        yield client


def ran(kd: killick.Client, agent: Any, n: int, run: str) -> str:
    """A run, as far as it comes."""
    with contextlib.suppress(RunError):
        kd.run(agent, n, id=run)
    return run


def forked(kd: killick.Client, parent: str, run: str, cut: int = 3) -> str:
    fork_of(kd.runtime.log, e.RunForked(at=kd.runtime.clock.now_us(), run=run, parent=parent, cut=cut, generation=1))
    return run


def there(kd: killick.Client) -> set[str]:
    return {head.run for _, head in kd.runtime.store.heads()}


def filed(path: Path) -> dict[str, bytes]:
    """Every run of an archive, as it would be exported from a store that it is loaded into."""
    return {found.header.run: export(Log(found.store(MemoryStore)), found.header.run) for found in bundle.read(path)}


def old(kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path, **options: Any) -> prune.Pruned:
    """Everything becomes old, and what may go goes."""
    clock.advance(100 * DAY)
    return kd.store.prune(older="90d", to=tmp_path / "old.gz", **options)


# the file -----------------------------------------------------------------------------------------


def test_a_run_that_went_into_the_file_is_whole_in_it(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    for n in range(3):
        ran(kd, archive_leaf, n, f"r{n}")
    before = {run: (kd.store.export(run), kd.state(run).to_json()) for run in there(kd)}
    done = old(kd, clock, tmp_path)
    assert set(done.runs) == before.keys()
    assert there(kd) == set()
    assert done.size_bytes == (tmp_path / "old.gz").stat().st_size
    for run, told in before.items():
        log = Log(bundle.load(tmp_path / "old.gz", run))
        assert verify(log).holds
        assert (export(log, run), log.state(run).to_json()) == told
    with pytest.raises(RunUnknown):
        bundle.load(tmp_path / "old.gz", "r9")


def test_the_file_says_what_it_is_and_ends_with_a_count(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_leaf, 1, "r")
    done = old(kd, clock, tmp_path)
    first, *_, last = map(json.loads, gzip.decompress((tmp_path / "old.gz").read_bytes()).splitlines())
    assert first == {
        "is": "killick.archive", "version": 1, "format": 1, "store": kd.runtime.store.id,
        "at": kd.runtime.clock.now_us(),
    }  # fmt: skip
    assert (last["is"], last["runs"], last["events"]) == ("end", 1, done.events)
    assert bundle.is_archive(tmp_path / "old.gz")
    assert not bundle.is_archive(__file__)


@pytest.mark.slow
def test_wherever_a_file_is_cut_or_changed_that_is_found(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    for n in range(3):
        ran(kd, archive_leaf, n, f"r{n}")
    old(kd, clock, tmp_path)
    assert bundle.verify(tmp_path / "old.gz").runs == 3
    packed = (tmp_path / "old.gz").read_bytes()
    plain = gzip.decompress(packed)
    lines = plain.splitlines(keepends=True)
    bad = tmp_path / "bad.gz"
    for at in range(0, len(packed), len(packed) // 40):
        bad.write_bytes(packed[:at])
        with pytest.raises(ExportBroken):
            bundle.verify(bad)
    for at in range(len(lines)):  # a line is left out, or stands twice, and is packed anew
        for changed in (lines[:at] + lines[at + 1 :], lines[: at + 1] + lines[at:]):
            bad.write_bytes(gzip.compress(b"".join(changed), 1))
            with pytest.raises(ExportBroken):
                bundle.verify(bad)
    for at in range(0, len(plain), len(plain) // 150):
        bad.write_bytes(gzip.compress(plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :], 1))
        with pytest.raises(ExportBroken):
            bundle.verify(bad)


FOREIGN = [b"", b"{}", b"\x1f\x8b", gzip.compress(b"", mtime=0), gzip.compress(b'{"is":"killick.run"}\n', mtime=0)]


@pytest.mark.parametrize("data", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_file_is_told_to_be_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(data)
    with pytest.raises(ExportBroken, match=r"x\.gz: (is not an archive|was truncated|cannot be read)"):
        bundle.verify(tmp_path / "x.gz")


def test_a_file_that_is_there_is_never_overwritten(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_leaf, 1, "r")
    (tmp_path / "old.gz").write_text("mine")
    with pytest.raises(ArchiveRefused, match="never overwritten"):
        old(kd, clock, tmp_path)
    assert (tmp_path / "old.gz").read_text() == "mine"
    assert there(kd) == {"r"}
    (tmp_path / "old.gz").rename(tmp_path / "old.gz.part")
    with pytest.raises(ArchiveRefused, match=r"old\.gz\.part exists"):
        old(kd, clock, tmp_path)
    assert (tmp_path / "old.gz.part").read_text() == "mine"
    with pytest.raises(ArchiveRefused, match="cannot be written"):
        kd.store.prune(older=0, to=tmp_path / "no" / "such" / "folder.gz")


def test_a_file_that_the_device_did_not_keep_leaves_nothing_behind_and_everything_in_the_store(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(kd, archive_leaf, 1, "r")

    def synced(device: int) -> None:
        os.pwrite(device, b"x", os.fstat(device).st_size // 2)

    monkeypatch.setattr(bundle.os, "fsync", synced)
    with pytest.raises(ExportBroken):
        old(kd, clock, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert there(kd) == {"r"}


# which runs go ------------------------------------------------------------------------------------


def test_only_old_and_ended_runs_of_the_wanted_sort_go(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_leaf, 1, "done")
    ran(kd, archive_leaf, 4, "failed")
    ran(kd, archive_leaf, 6, "waits")
    ran(kd, archive_parent, 0, "other")
    clock.advance(100 * DAY)
    ran(kd, archive_leaf, 1, "young")
    said = kd.store.prune(older="90d", to=tmp_path / "a.gz", status=("completed",), agent="archive_leaf", dry_run=True)
    assert (said.runs, said.file, said.dry_run) == (("other/1", "done"), None, True)
    assert list(tmp_path.iterdir()) == []
    done = kd.store.prune(older="90d", to=tmp_path / "a.gz", status=("completed",), agent="archive_leaf")
    assert (done.runs, done.events) == (said.runs, said.events)
    assert set(kd.store.prune(older="90d", to=tmp_path / "b.gz").runs) == {"failed", "other"}
    assert there(kd) == {"waits", "young"}
    with pytest.raises(ArchiveRefused, match="running: is not the status of an ended run"):
        kd.store.prune(older="90d", to=tmp_path / "c.gz", status=("running",))


def test_an_id_that_was_pruned_is_never_used_again(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_leaf, 1, "r")
    old(kd, clock, tmp_path)
    with pytest.raises(killick.KillickError, match="r: "):
        kd.run(archive_leaf, 1, id="r")


def test_what_a_fork_stands_on_stays_with_it_and_goes_with_it(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_leaf, 1, "r")
    forked(kd, "r", "live")
    forked(kd, ran(kd, archive_leaf, 2, "base"), "gone")
    ran(kd, archive_leaf, 2, "gone")
    assert kd.info("gone").status == "completed"
    done = old(kd, clock, tmp_path)
    assert done.kept == {"r": "live is a fork of it"}
    assert done.runs == ("gone", "base"), "forks go first"
    assert bundle.load(tmp_path / "old.gz", "gone").head("base") is not None, "with what it stands on"


def test_a_child_stays_while_its_parent_may_still_ask_for_it(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_parent, 1, "waits")
    ran(kd, archive_parent, 2, "fails")
    forked(kd, ran(kd, archive_parent, 0, "base"), "fork", kd.runtime.log.head("base").seq - 3)
    done = old(kd, clock, tmp_path, status=("completed",))
    assert done.kept == {
        "waits/1": "its parent waits has not ended",
        "fails/1": "its parent fails failed, and may be resumed",
        "base": "fork is a fork of it",
        "base/1": "its parent fork has not ended",
    }
    assert done.runs == ()
    assert set(kd.store.prune(older="90d", to=tmp_path / "b.gz").runs) == {"fails", "fails/1"}


def test_a_parent_stays_while_its_child_has_not_ended(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    @killick.agent(name="archive_leaving")
    async def leaving(run: killick.Run, n: int) -> str:
        child = await run.spawn(archive_leaf, 6, on_parent_end="abandon")
        return child.id

    ran(kd, leaving, 1, "left")
    assert old(kd, clock, tmp_path).kept == {"left": "its child left/1 has not ended"}


def test_the_old_logs_of_a_run_that_goes_on_are_archived_and_it_is_still_found_by_its_first_id(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    ran(kd, archive_renewing, 2, "r")
    assert there(kd) == {"r", "r+2", "r+3"}
    assert set(old(kd, clock, tmp_path).runs) == {"r", "r+2"}
    kd.answer("r", "approve")
    kd.run(archive_renewing, 2, id="r")
    assert kd.info("r+3").status == "completed"
    clock.advance(100 * DAY)
    assert set(kd.store.prune(older="90d", to=tmp_path / "b.gz").runs) == {"r+3"}


def test_what_does_not_hold_or_says_what_was_erased_stays_and_is_named(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    for n, run in enumerate(("apart", "erased", "broken", "fine")):
        ran(kd, archive_leaf, n, run)
    kd.runtime.store.quarantine("apart", "somebody touched it")
    log = leased_by("test", kd.runtime.log, "erased", seconds=30)
    pieces = kd.runtime.store.references("erased").log
    kd.runtime.log.erase(log, at=1, reason="asked for", pieces=sorted(pieces))
    kd.runtime.store.release("erased", epoch=log.epoch)
    lost = kd.runtime.store.references("broken").log - kd.runtime.store.references("fine").log
    kd.runtime.store._pieces.pop(next(iter(lost)))  # type: ignore[attr-defined]
    done = old(kd, clock, tmp_path)
    assert done.runs == ("fine",)
    assert done.kept["apart"] == "it is quarantined (somebody touched it)"
    assert done.kept["erased"] == "it records the erasure of values that other runs may share"
    assert done.kept["broken"].startswith("its event log fails verification (broken: ")
    assert "(value " in done.kept["broken"]
    assert bundle.verify(tmp_path / "old.gz").runs == 1


def test_a_run_whose_index_lies_stays(kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path) -> None:
    ran(kd, archive_leaf, 6, "r")
    row = kd.runtime.store.index("r")
    assert row is not None
    index = RunIndex(agent=row.agent, status="completed", changed_at_us=row.changed_at_us)
    assert kd.runtime.store.reindex("r", index, at=kd.runtime.log.head("r").seq)
    done = old(kd, clock, tmp_path)
    assert done.kept == {"r": "its log has no end; `killick store verify` corrects the index"}
    assert list(tmp_path.iterdir()) == []
    assert there(kd) == {"r"}


def test_killicks_own_logs_are_never_pruned(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    started = e.RunStarted(at=kd.runtime.clock.now_us(), run="trigger:x", agent="killick.trigger:x")
    log = kd.runtime.log.create(started, {"input": None}, holder="test", seconds=30)
    log.append(Entry(e.RunCompleted(at=kd.runtime.clock.now_us()), {"result": None}))
    assert old(kd, clock, tmp_path).runs == ()
    assert kd.store.prune(older=0, to=tmp_path / "b.gz", agent="killick.trigger:x").runs == ()
    assert there(kd) == {"trigger:x"}


def test_a_run_that_somebody_went_on_with_meanwhile_stays(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path
) -> None:
    for run in ("a", "b", "c"):
        ran(kd, archive_leaf, 4, run)
    clock.advance(100 * DAY)
    chosen = prune.choose(kd.runtime.log, until_us=kd.runtime.clock.now_us() - DAY)

    def meanwhile(what: str, at: int, total: int) -> None:
        if (what, at) == ("writing", 3):
            kd.resume("a")
            kd.runtime.store.lease("b", "somebody", seconds=60)

    done = prune.prune(kd.runtime.log, chosen, tmp_path / "x.gz", holder="me", now_us=1, progress=meanwhile)
    assert done.runs == ("c",)
    assert done.kept == {"b": "it is held by somebody", "a": "it changed meanwhile"}
    kd.runtime.store.release("b", epoch=kd.runtime.log.head("b").epoch)
    assert kd.store.verify().holds


# what must hold whatever the runs are -------------------------------------------------------------


def world(kd: killick.Client, clock: killick.clock.LeapingClock, chance: random.Random) -> None:
    """Runs, children and forks that share values, of all ages and statuses, some with values erased."""
    for n in range(chance.randint(4, 14)):
        known = sorted(there(kd))
        match chance.choice("lllppfffe"):
            case "l":
                ran(kd, archive_leaf, chance.randrange(40), f"l{n}")
            case "p":
                ran(kd, archive_parent, chance.randrange(40), f"p{n}")
            case "f" if known:
                parent = chance.choice(known)
                stands = kd.runtime.log.head(parent)
                forked(kd, parent, f"f{n}", chance.randint(stands.base + 1, stands.seq))
                if chance.random() < 0.7:
                    with contextlib.suppress(killick.KillickError):
                        kd.advance(f"f{n}")
            case "e" if known and chance.random() < 0.3:
                log = leased_by("test", kd.runtime.log, chance.choice(known), seconds=30)
                pieces = sorted(kd.runtime.store.references(log.run).log)[: chance.randrange(2)]
                kd.runtime.log.erase(
                    log, at=kd.runtime.clock.now_us(), reason="asked for", seqs=[log.seq], pieces=pieces
                )
                kd.runtime.store.release(log.run, epoch=log.epoch)
            case _:
                clock.advance(chance.randrange(20) * DAY)


@pytest.mark.gate(8)
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_and_what_stays_holds_as_before(
    kd: killick.Client, clock: killick.clock.LeapingClock, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    world(kd, clock, chance)
    assert not [each for each in kd.store.verify().problems if not each.healed]
    before = {run: kd.store.export(run) for run in there(kd)}
    live = {row.id for row in kd.list(status=("queued", "running", "waiting", "paused"), limit=1_000)}
    older = chance.randrange(60) * DAY
    done = kd.store.prune(older=older, to=tmp_path / "a.gz")
    assert kd.store.verify().problems == []
    assert live <= there(kd)
    kept = {run: kd.store.export(run) for run in there(kd)}
    moved = filed(tmp_path / "a.gz") if done.file else {}
    assert kept.keys() | moved.keys() == before.keys()
    assert not kept.keys() & set(done.runs)
    assert all(before[run] == text for run, text in (kept | moved).items())
    again = kd.store.prune(older=older, to=tmp_path / "b.gz")
    assert (again.runs, again.values, again.kept) == ((), 0, done.kept), "once is enough"


# death --------------------------------------------------------------------------------------------

MANY = 200
MORTAL = """
import os, signal, sys
import killick
from killick.archive import prune

path, to, what, at = sys.argv[1:]
with killick.open(path) as kd:
    def tell(doing, done, total):
        if doing == what and done >= int(at):
            os.kill(os.getpid(), signal.SIGKILL)
    remove, count = kd.runtime.store.remove, iter(range(1, 1_000))
    def removing(run, **expected):
        tell("leased", next(count), 0)
        return remove(run, **expected)
    kd.runtime.store.remove = removing
    chosen = prune.choose(kd.runtime.log, until_us=kd.runtime.clock.now_us())
    prune.prune(kd.runtime.log, chosen, to, holder="mortal", now_us=1, progress=tell)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with runs, children and forks that have ended, and that share values."""
    path = tmp_path_factory.mktemp("many") / "killick.db"
    with killick.open(str(path), durability="process") as kd:
        for n in range(MANY // 2 - 10):
            kd.run(archive_parent, 12 * (n % 2), id=f"p{n}")
        for n in range(20):
            forked(kd, f"p{n}/1", f"f{n}")
            kd.run(archive_leaf, 12 * (n % 2), id=f"f{n}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at"),
    [
        ("writing", 1), ("writing", 150), ("reading it back", 199), ("reading it back", 200),
        ("leased", 1), ("leased", 130), ("removing", 1), ("removing", 77), ("removing", 200), ("sweeping values", 1),
    ],
)  # fmt: skip
def test_whenever_it_is_killed_every_run_is_in_the_store_or_in_a_file(
    many: Path, tmp_path: Path, what: str, at: int
) -> None:
    path = tmp_path / "killick.db"
    path.write_bytes(many.read_bytes())
    with killick.open(str(path)) as kd:
        before = {run: kd.store.export(run) for run in there(kd)}
        assert len(before) == MANY
    words = [sys.executable, "-c", MORTAL, str(path), str(tmp_path / "a.gz"), what, str(at)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    moved = filed(tmp_path / "a.gz") if (tmp_path / "a.gz").exists() else {}
    assert bool(moved) == (what in ("leased", "removing", "sweeping values"))
    with killick.open(str(path)) as kd:
        assert kd.store.verify().problems == []
        left = {run: kd.store.export(run) for run in there(kd)}
        assert moved | left == before
        done = kd.store.prune(older=0, to=tmp_path / "b.gz")
        assert set(done.runs) == left.keys()
        assert there(kd) == set()
        assert kd.store.verify().problems == []
    again = filed(tmp_path / "b.gz") if left else {}
    assert moved | again == before
