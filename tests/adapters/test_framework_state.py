"""The shelf keeps what frameworks give it: whole, for many processes at once, and gone when it is forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
import servers
from killick.adapters.framework_state import TRIES, FrameworkState, StateEntry
from killick.audit.checkpoint import new_key
from killick.errors import HeadMoved, RunUnknown, ValueRefused
from killick.store import Store
from killick.store.records import RunQuery


@pytest.fixture
def client(store: Store) -> Iterator[killick.Client]:
    with killick.Client(store) as made:
        yield made


@pytest.fixture
def shelf(client: killick.Client) -> FrameworkState:
    return FrameworkState(client, "tests")


def names(shelf: FrameworkState, id: str = "a") -> list[str]:  # noqa: A002
    return [kept.name for kept in shelf.entries(id)]


def test_what_is_kept_is_there_with_its_labels_place_and_time(shelf: FrameworkState) -> None:
    seq = shelf.put("a", StateEntry("one", {"x": [1, b"2", (3, 4)]}, {"of": "me"}), StateEntry("two", None))
    first, second = shelf.entries("a")
    assert (first.name, first.value, first.labels) == ("one", {"x": [1, b"2", (3, 4)]}, {"of": "me"})
    assert (second.value, second.labels) == (None, {})
    assert (first.seq, second.seq) == (seq - 1, seq) == (shelf.head("a") - 1, shelf.head("a"))
    assert 0 < first.at_us <= shelf.client.runtime.clock.now_us()
    assert shelf.get("a", "two") is second
    assert shelf.get("a", "three") is shelf.get("b", "one") is None


def test_the_last_one_of_a_name_stands_and_comes_last(shelf: FrameworkState) -> None:
    shelf.put("a", StateEntry("one", 1), StateEntry("two", 2))
    shelf.put("a", StateEntry("one", 3))
    assert [(kept.name, kept.value) for kept in shelf.entries("a")] == [("two", 2), ("one", 3)]


def test_what_is_dropped_is_gone_until_it_is_kept_again(shelf: FrameworkState) -> None:
    shelf.put("a", *(StateEntry(str(n), n) for n in range(3)))
    shelf.drop("a", "1", "1", "no such thing")
    shelf.drop("nobody", "1")
    assert names(shelf) == names(FrameworkState(shelf.client, "tests")) == ["0", "2"]
    shelf.put("a", StateEntry("1"))
    assert names(shelf) == ["0", "2", "1"]


def test_a_value_belongs_to_whoever_reads_it(shelf: FrameworkState) -> None:
    shelf.put("a", StateEntry("one", [1]))
    [kept] = shelf.entries("a")
    kept.value.append(2)
    assert kept.value == [1]


def test_values_of_many_entries_are_read_at_once_and_share_nothing(
    shelf: FrameworkState, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ["x" * 5_000]
    shelf.put("a", *(StateEntry(str(n), [n, shared]) for n in range(300)))
    store, reads = shelf.client.runtime.store, list[str]()
    for name in ("head", "read", "pieces"):
        own = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda *given, _own=own, _name=name, **more: reads.append(_name) or _own(*given, **more)
        )
    found = FrameworkState(shelf.client, "tests").values("a")
    assert len(reads) <= 3
    assert found == [[n, shared] for n in range(300)]
    found[0][1].append("changed")
    assert found[1][1] == shared == shelf.values("a", lambda entries: entries[:1])[0][1]
    assert shelf.values("nobody") == []


def test_values_that_were_read_before_come_back_whole_however_they_were_changed(shelf: FrameworkState) -> None:
    long = ["z" * 600, "$5 " * 300, b"b" * 600, {"$ref": "z" * 600}, [*range(9_000)], '"{$ref' * 100]
    values = [
        {"x": [1, {"y": "z" * 600}]},
        {"x": (1, b"2")},
        {"$ref": "no reference"},
        2**70,
        float("inf"),
        None,
        *long,
    ]
    shelf.put("a", *(StateEntry(str(place), value) for place, value in enumerate(values)))
    for _ in range(3):
        found = shelf.values("a")
        assert found == values
        assert type(found[1]["x"]) is tuple
        found[0]["x"][1]["y"] = "changed"
        found[2].clear()


def test_those_who_share_a_client_share_what_was_read(client: killick.Client) -> None:
    one, two = FrameworkState.of(client, "tests"), FrameworkState.of(client, "tests")
    assert one is two
    assert FrameworkState.of(client, "other") is not one


def test_entries_that_cannot_be_stored_leave_nothing(shelf: FrameworkState) -> None:
    with pytest.raises(ValueRefused):
        shelf.put("a", StateEntry("one", 1), StateEntry("two", object()))
    assert names(shelf) == [] == list(shelf.ids())
    shelf.put("a", StateEntry("one", 1))
    with pytest.raises(ValueRefused):
        shelf.put("a", StateEntry("two", 1), StateEntry("three", object()))
    shelf.put("a", StateEntry("four"))
    assert names(shelf) == ["one", "four"]


def test_whoever_expects_another_head_writes_nothing_and_is_told_where_it_is(shelf: FrameworkState) -> None:
    other = FrameworkState(shelf.client, "tests")
    assert shelf.head("a") == 0
    seq = shelf.put("a", StateEntry("one"), expect=0)
    for expected in (0, seq - 1, seq + 1):
        for one in (shelf, other, FrameworkState(shelf.client, "tests")):
            with pytest.raises(HeadMoved) as moved:
                one.put("a", StateEntry("two"), expect=expected)
            assert moved.value.actual == seq
    with pytest.raises(HeadMoved):
        shelf.put("b", StateEntry("two"), expect=1)
    assert names(shelf) == ["one"]
    later = other.put("a", StateEntry("two"), expect=seq)
    assert shelf.put("a", StateEntry("three"), expect=later) == later + 1


def test_spaces_and_ids_do_not_meet(client: killick.Client) -> None:
    one, two = FrameworkState(client, "one"), FrameworkState(client, "two")
    one.put("a", StateEntry("x", 1))
    two.put("a", StateEntry("x", 2))
    one.put("b", StateEntry("x", 3))
    assert [each.entries("a")[0].value for each in (one, two)] == [1, 2]
    assert (list(one.ids()), list(two.ids())) == (["b", "a"], ["a"])


def test_what_is_kept_is_nobody_s_run_and_never_due(shelf: FrameworkState) -> None:
    shelf.put("a", StateEntry("one"))
    store = shelf.client.runtime.store
    assert store.runs(RunQuery()) == store.due(shelf.client.runtime.clock.now_us() + 1) == []
    assert shelf.client.store.verify().holds


@pytest.mark.parametrize("id", ["a", "a~", "a~1", "a~~1", "~", "1", "a:b", "ä/b c#?", "~~~2"])
def test_what_is_forgotten_is_gone_and_its_id_can_be_used_again(shelf: FrameworkState, id: str) -> None:  # noqa: A002
    other = FrameworkState(shelf.client, "tests")
    for turn in range(3):
        shelf.put(id, StateEntry("one", f"{turn} " * 1_000))
        [kept] = other.entries(id)
        assert kept.value == f"{turn} " * 1_000
        assert list(shelf.ids()) == [id]
        (shelf if turn % 2 else other).forget(id)
        for one in (shelf, other):
            assert (one.entries(id), list(one.ids()), one.head(id)) == ([], [], 0)
        with pytest.raises(RunUnknown):
            _ = kept.value
    shelf.forget(id, "and another")
    assert shelf.client.store.verify().holds


def test_forgetting_takes_the_values_too_but_none_that_others_share(shelf: FrameworkState) -> None:
    both, mine = "shared " * 1_000, "mine alone " * 1_000
    shelf.put("a", StateEntry("one", [both, mine]))
    shelf.put("b", StateEntry("one", [both]))
    pieces = [set(shelf.client.runtime.log.pieces_of(f"killick:tests:{each}", 2)) for each in ("a", "b")]
    shelf.forget("a")
    assert set(shelf.client.runtime.store.pieces(pieces[0] | pieces[1])) == pieces[1]
    assert shelf.entries("b")[0].value == [both]


def test_a_growing_value_costs_what_is_new(tmp_path: Path) -> None:
    shelf = FrameworkState(tmp_path / "killick.db", "tests")
    said: list[str] = []
    for turn in range(100):
        said.append(f"{turn} said " + "this and that " * 150)
        shelf.put("a", StateEntry("state", said))
    assert shelf.entries("a")[0].value == said
    shelf.close()
    assert (tmp_path / "killick.db").stat().st_size < 1_000_000  # all of it once is 210 KB; as often as written, 10 MB


def test_threads_lose_nothing(shelf: FrameworkState) -> None:
    shelves = [shelf, FrameworkState(shelf.client, "tests")]

    def write(number: int) -> None:
        for turn in range(10):
            shelves[number % 2].put("a", StateEntry(f"{number}-{turn}", turn), StateEntry(f"last-{number}", turn))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {f"{number}-{turn}" for number in range(4) for turn in range(10)} | {f"last-{n}" for n in range(4)}
    assert set(names(shelf)) == set(names(shelves[1])) == expected
    assert shelf.head("a") == 1 + 2 * 40


def test_one_of_many_that_expect_the_same_head_succeeds(shelf: FrameworkState) -> None:
    seq, won = shelf.put("a", StateEntry("one")), []

    def write(number: int) -> None:
        try:
            FrameworkState(shelf.client, "tests").put("a", StateEntry("two", number), expect=seq)
        except HeadMoved:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [shelf.entries("a")[-1].value] == won


WRITER = """
import os, signal, sys
from killick.adapters.framework_state import FrameworkState, StateEntry

shelf, me, dies = FrameworkState(sys.argv[1], "tests"), sys.argv[2], sys.argv[3] == "dies"
if dies:
    store = shelf.client.runtime.store
    append, left = store.append, [20]
    def dying(items):
        left[0] -= 1
        done = append(items) if left[0] else None
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    store.append = dying
for turn in range(40):
    shelf.put("a", StateEntry(f"{me}-{turn}", "x" * 2000), StateEntry(f"{me}-{turn}'", turn))
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_processes_that_write_at_once_and_die_leave_whole_entries(tmp_path: Path) -> None:
    place = str(tmp_path / "killick.db")
    FrameworkState(place, "tests").close()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, place, str(number), how], stdout=subprocess.PIPE, text=True)
        for number, how in enumerate(["lives", "dies"])
    ]
    told = [writer.communicate(timeout=300)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, -signal.SIGKILL]
    shelf = FrameworkState(place, "tests")
    found = names(shelf)
    assert len(told[0]) == 40
    assert len(told[1]) < 40
    for number in (0, 1):
        mine = [name for name in found if name.startswith(f"{number}-")]
        whole = [part for turn in told[number] for part in (f"{number}-{turn}", f"{number}-{turn}'")]
        assert mine == whole
    assert shelf.client.store.verify().holds
    shelf.close()
    assert os.path.exists(place)


def test_a_seal_is_told_what_was_forgotten(tmp_path: Path) -> None:
    key, _ = new_key()
    with killick.open(str(tmp_path / "killick.db")) as client:
        shelf = FrameworkState(client, "tests")
        shelf.put("a", StateEntry("one"))
        client.store.seal(key)
        shelf.forget("a")
        assert client.store.verify().holds
        client.store.seal(key)
        assert client.store.verify().holds


def test_whoever_is_always_too_late_is_told(shelf: FrameworkState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("killick.adapters.framework_state.TRIES", 2)
    assert TRIES > 2
    other, begin = FrameworkState(shelf.client, "tests"), shelf.client.runtime.log.open
    shelf.put("a", StateEntry("one"))

    def open_and_lose(run: str) -> object:
        handle = begin(run)
        other.put("a", StateEntry("theirs"))
        return handle

    late = FrameworkState(shelf.client, "tests")
    other.entries("a")
    other.put("a", StateEntry("theirs"))
    monkeypatch.setattr(shelf.client.runtime.log, "open", open_and_lose)
    with pytest.raises(HeadMoved):
        late.put("a", StateEntry("mine"))
    assert names(shelf) == ["one", "theirs"]


@pytest.mark.slow
def test_a_shelf_on_postgresql_is_no_other_shelf() -> None:
    url = servers.postgres_store()
    with killick.open(url) as client, killick.open(url) as another:
        shelf, other = FrameworkState(client, "tests"), FrameworkState(another, "tests")
        for turn in range(2):
            seq = shelf.put("a", StateEntry("one", ["x" * 2_000, turn]), StateEntry("two"), expect=0)
            with pytest.raises(HeadMoved):
                other.put("a", StateEntry("three"), expect=seq - 1)
            other.put("a", StateEntry("three"), expect=seq)
            shelf.drop("a", "two")
            assert names(shelf) == names(other) == ["one", "three"]
            assert other.entries("a")[0].value == ["x" * 2_000, turn]
            assert list(other.ids()) == ["a"]
            other.forget("a")
            assert names(shelf) == list(shelf.ids()) == []
