"""A look at a store names every run that is stuck once, says why, and stays quick."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import killick
from killick.errors import RunError
from killick.history import doctor
from killick.history.doctor import Diagnosis, Finding, examine
from killick.log import Entry, Log
from killick.model import events as e
from killick.store import MemoryStore, Store, open_store
from killick.store.records import Condition, RunIndex
from killick.store.sqlite.conditions import kind_of_file_system
from killick.store.sqlite.file import PAGE_BYTES
from leasing import leased_by

DAY = 86_400


@killick.tool(effect="idempotent")
async def doctor_look(n: int) -> int:
    return n


@killick.agent
async def doctor_asking(run: killick.Run, timeout: str | None) -> str:
    await run.call(doctor_look, 1)
    await run.ask("Right?", timeout=timeout, default="reject")
    return "done"


@killick.agent
async def doctor_parent(run: killick.Run, n: int) -> str:
    child = await run.spawn(doctor_asking, None)
    await child.result()
    return "done"


@pytest.fixture
def clock() -> killick.clock.ManualClock:
    return killick.clock.ManualClock()


@pytest.fixture
def kd(clock: killick.clock.ManualClock) -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(clock=clock), clock=clock) as client:
        yield client


def ran(kd: killick.Client, agent: Any, given: Any, run: str) -> None:
    with contextlib.suppress(RunError):
        kd.run(agent, given, id=run)


def look(kd: killick.Client, **options: Any) -> Diagnosis:
    return examine(kd.runtime.log, clock=kd.runtime.clock, **options)


def found(kd: killick.Client, **options: Any) -> dict[str, list[str]]:
    """The runs of each finding."""
    return {each.reason: [named.run for named in each.runs] for each in look(kd, **options).findings}


def only(kd: killick.Client) -> Finding:
    [finding] = look(kd).findings
    return finding


def taken(kd: killick.Client, run: str, *, seconds: float = 30) -> None:
    """Somebody takes a run and is at work on it."""
    log = leased_by("worker-1", kd.runtime.log, run, seconds=seconds)
    log.append(Entry(e.RunTaken(at=kd.runtime.clock.now_us(), epoch=log.epoch, holder="worker-1")))


def test_a_store_where_nothing_is_wrong_is_said_to_be_so(kd: killick.Client, clock: killick.clock.ManualClock) -> None:
    ran(kd, doctor_asking, None, "waits")
    kd.start(doctor_asking, None, id="fresh")
    diagnosis = look(kd)
    assert (diagnosis.wrong, diagnosis.findings, diagnosis.unseen) == (0, (), ())
    assert diagnosis.runs == {"queued": 1, "waiting": 1}
    assert {each.name for each in diagnosis.conditions} >= {"place", "clock"}
    clock.advance(30 * DAY)
    assert found(kd) == {"queued": ["fresh"]}, "whoever waits for a person may wait for long"


def test_a_queued_run_that_nobody_takes_is_told_after_a_while(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    kd.start(doctor_asking, None, id="r")
    clock.advance(50)
    assert found(kd) == {}
    clock.advance(50)
    finding = only(kd)
    assert finding.what == "run is queued, and no worker takes it"
    assert finding.means == "Is a worker for doctor_asking running, and has it slots to spare?"
    assert finding.next == (("worker",), ("run", "--id", "r"))
    assert finding.wrong


def test_a_run_that_was_left_in_the_middle_is_told_with_who_left_it(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    kd.start(doctor_asking, None, id="r")
    taken(kd, "r")
    clock.advance(20)
    assert found(kd) == {}
    clock.advance(200)
    finding = only(kd)
    assert (finding.reason, finding.runs[0].about) == ("left", "by worker-1")
    assert ("run", "--id", "r") in finding.next


def test_a_run_that_waits_for_an_answer_whose_time_was_up_is_due(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    kd.start(doctor_asking, "1h", id="r")
    kd.advance("r")
    clock.advance(3_500)
    assert found(kd) == {}
    clock.advance(500)
    assert found(kd) == {"due": ["r"]}


def test_a_run_that_was_answered_and_that_nobody_takes_is_due(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    ran(kd, doctor_asking, None, "r")
    kd.answer("r", "approve")
    clock.advance(100)
    assert found(kd) == {"due": ["r"]}


def test_a_run_that_waits_for_a_child_that_is_over_is_told(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    ran(kd, doctor_parent, 1, "r")
    clock.advance(100)
    assert found(kd) == {}
    kd.runtime.store.remove("r/1")
    assert found(kd) == {"child": ["r"]}


def test_a_diverged_run_is_told_with_its_step(kd: killick.Client) -> None:
    ran(kd, doctor_asking, None, "r")
    log = leased_by("test", kd.runtime.log, "r", seconds=30)
    log.append(
        Entry(e.RunDiverged(at=kd.runtime.clock.now_us(), step="2"), {"recorded": "a", "found": "b", "builds": []})
    )
    kd.runtime.store.release("r", epoch=log.epoch)
    finding = only(kd)
    assert (finding.reason, finding.runs[0].about) == ("diverged", "at step 2")
    assert finding.next == (("show", "r"), ("resume", "r"))


def test_a_run_that_was_set_apart_is_told_with_its_reason_and_nothing_else_of_it(kd: killick.Client) -> None:
    ran(kd, doctor_asking, None, "r")
    kd.runtime.store.quarantine("r", "somebody touched it")
    finding = only(kd)
    assert (finding.reason, finding.runs[0].about) == ("broken", "somebody touched it")
    assert finding.next == (("store", "repair", "r"),)


def test_what_may_be_meant_so_is_told_and_is_not_wrong(kd: killick.Client, clock: killick.clock.ManualClock) -> None:
    kd.start(doctor_asking, None, id="silent")
    taken(kd, "silent", seconds=float("inf"))
    clock.advance(3_000)
    assert found(kd) == {}
    clock.advance(8 * DAY)
    assert found(kd) == {"silent": ["silent"]}
    assert look(kd).wrong == 0


def test_a_lease_without_end_is_wrong_where_nobody_can_tell_that_its_holder_died(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kd.start(doctor_asking, None, id="r")
    taken(kd, "r", seconds=float("inf"))
    monkeypatch.setattr(kd.runtime.store, "proves_life", False)
    assert found(kd) == {"endless": ["r"]}


def test_runs_of_agents_that_no_code_knows_are_told_where_the_code_is_at_hand(kd: killick.Client) -> None:
    ran(kd, doctor_asking, None, "r")
    ran(kd, doctor_parent, 1, "p")
    assert found(kd) == {}
    assert found(kd, knows=lambda agent: agent == "doctor_asking") == {"unknown": ["p"]}


def test_triggers_and_hooks_that_are_behind_are_told(kd: killick.Client, clock: killick.clock.ManualClock) -> None:
    for name in ("trigger:nightly", "hook:mail"):
        kd.runtime.log.create(
            e.RunStarted(at=kd.runtime.clock.now_us(), run=name, agent=f"killick.{name}"), {"input": None}
        )
    clock.advance(100)
    assert found(kd) == {"trigger": ["trigger:nightly"], "hook": ["hook:mail"]}
    assert look(kd).runs == {}, "they are no runs of anybody's"


def test_a_finding_names_a_few_the_longest_first_and_counts_the_rest(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    for n in range(8):
        kd.start(doctor_asking, None, id=f"r{n}")
        clock.advance(60)
    clock.advance(60)
    finding = only(kd)
    assert (finding.count, [named.run for named in finding.runs]) == (8, ["r0", "r1", "r2"])
    assert finding.what == "runs are queued, and no worker takes them"


def test_clocks_that_differ_are_wrong(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a database on another machine is: its leases end by its own wall clock.
    monkeypatch.setattr(kd.runtime.store, "proves_life", False)
    monkeypatch.setattr(kd.runtime.store, "now_us", kd.runtime.clock.now_us)
    ours = killick.clock.ManualClock(kd.runtime.clock.now_us() + 5_000_000)
    [clocks] = [each for each in examine(kd.runtime.log, clock=ours).conditions if each.name == "clock"]
    assert clocks.value == "5.0 s ahead of the store's"
    assert clocks.wrong


def test_what_was_not_looked_at_is_said(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        ran(kd, doctor_asking, None, f"r{n}")
    monkeypatch.setattr(doctor, "FOLDED_MAX", 3)
    monkeypatch.setattr(doctor, "LOOKED_MAX", 3)
    assert look(kd).unseen == (
        "whether 1 older runs hold (killick store verify proves all)",
        "1 of 4 waiting runs",
    )
    monkeypatch.setattr(doctor, "COUNTED_MAX", 3)
    assert look(kd).unseen[0] == "runs beyond the newest 3, if there are more"


# what a SQLite store rests on ---------------------------------------------------------------------


def conditions(path: Path) -> dict[str, Condition]:
    store: Store = open_store(str(path))
    try:
        return {each.name: each for each in store.conditions()}
    finally:
        store.close()


def test_a_sqlite_store_on_a_local_disk_says_what_it_rests_on(tmp_path: Path) -> None:
    said = conditions(tmp_path / "killick.db")
    assert said["journal"].value == "WAL"
    assert said["durability"].value == "a commit survives power loss (synchronous FULL)"
    assert said["file"].value == "whole, by a quick check"
    assert said["size"].value.endswith("in the write-ahead log")
    assert not [each for each in said.values() if each.wrong]
    (tmp_path / "killick.db").chmod(0o666)
    assert "other users may read or change it" in str(conditions(tmp_path / "killick.db")["permissions"].wrong)


def test_a_damaged_file_is_told_by_a_quick_check(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    with killick.open(str(path)) as kd:
        for n in range(20):
            kd.start(doctor_asking, None, id=f"r{n}")
    data = bytearray(path.read_bytes())
    page = data.index(b"run.started") // PAGE_BYTES * PAGE_BYTES
    data[page : page + 8] = b"\xff" * 8
    path.write_bytes(data)
    assert conditions(path)["file"].wrong


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /mnt/far\\040away rw - nfs4 server:/x rw
31 22 0:27 / /mnt/far rw shared:1 - fuse.sshfs me@there: rw
32 31 0:28 / /mnt/far/near rw - tmpfs tmpfs rw
33 22 0:29 / /mnt/far/near rw - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/killick.db", "ext4"), ("/mnt/far away/killick.db", "nfs4"), ("/mnt/far/killick.db", "fuse.sshfs"),
        ("/mnt/far/near/killick.db", "xfs"), ("/mnt/farther/killick.db", "ext4"),
    ],
)  # fmt: skip
def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert kind_of_file_system(Path(path), mounts) == kind
    assert kind_of_file_system(Path(path), tmp_path / "none") is None


def test_a_network_file_system_under_a_sqlite_store_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:26 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr("killick.store.sqlite.identity.MOUNTS", mounts)
    said = conditions(tmp_path / "killick.db")["file system"]
    assert said.value == "nfs4"
    assert str(said.wrong).endswith("move the file to a local disk")


# however many runs there are ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_look_reads_no_more_of_a_large_store_than_of_a_small_one(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = kd.runtime.clock.now_us() - DAY * 1_000_000
    for n in range(5_000):
        index = RunIndex(agent="a", status="completed" if n % 2 else "waiting", started_at_us=at, changed_at_us=at)
        item = kd.runtime.log.begin(f"r{n}").built(
            [Entry(e.RunStarted(at=at, run=f"r{n}", agent="a"), {"input": None})]
        )
        kd.runtime.store.append([msgspec.structs.replace(item, index=index)])
    asked: dict[str, int] = {}
    store = Counted(kd.runtime.store, asked)
    examine(Log(store), clock=kd.runtime.clock)  # type: ignore[arg-type]
    assert asked["read"] + asked.get("opening", 0) <= 2 * doctor.FOLDED_MAX
    assert asked["quarantined"] <= 2 * doctor.LOOKED_MAX


class Counted:
    """A store that counts how often it is asked for what."""

    def __init__(self, store: Store, asked: dict[str, int]) -> None:
        self._store, self._asked = store, asked

    def __getattr__(self, name: str) -> Any:
        self._asked[name] = self._asked.get(name, 0) + 1
        return getattr(self._store, name)
