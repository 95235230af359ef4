"""The vault: what is published is there, whole and for good; what is not was never there; nothing is stored twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from killick.clock import ManualClock
from killick.errors import SnapshotBroken, StoreClosed, StoreUnavailable
from killick.workspace import tree
from killick.workspace.vault import snapshot_writer
from killick.workspace.vault.compression import compressed, decompressed
from killick.workspace.vault.vault import Reference, RestoreRecord, Swept, Vault
from seeds import draw_seed
from workspace.vaults import add, packed_bytes, packs, publish, read, some_files

TESTS = Path(__file__).parent.parent


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path / "files")
    yield made
    made.close()


def in_another_process(program: str, vault: Vault, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, os.fspath(vault.path), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# what is published --------------------------------------------------------------------------------


def test_a_published_snapshot_is_read_back_as_it_was(vault: Vault) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    files = {**some_files(chance, 300), b"empty": b"", b"long": chance.randbytes(2_500_000), b"zeros": bytes(3_000_000)}
    root = publish(vault, files)
    assert read(vault, root) == files, seed
    assert vault.verify() == [], seed


def test_another_process_reads_what_was_published(vault: Vault) -> None:
    root = publish(vault, {b"a": b"one" * 1000})
    program = (
        "import sys; from killick.workspace.vault.vault import Vault; from workspace.vaults import read\n"
        "print(read(Vault(sys.argv[1]), bytes.fromhex(sys.argv[2])) == {b'a': b'one' * 1000})"
    )
    assert in_another_process(program, vault, root.hex()) == "True\n"


def test_what_is_not_published_was_never_there(vault: Vault) -> None:
    publish(vault, {b"a": b"one"})
    before = packed_bytes(vault)
    with vault.writing() as unfinished:
        ref = unfinished.add(os.urandom(5_000_000))
        assert vault.has([ref]) == set()
        with pytest.raises(SnapshotBroken, match="is missing from the vault"):
            vault.load(ref)
    assert vault.has([ref]) == set()
    assert packed_bytes(vault) == before
    assert len(vault.references()) == 1


def test_a_new_vault_that_nothing_is_published_in_has_no_packs(vault: Vault) -> None:
    with vault.writing() as unfinished:
        unfinished.add(b"x" * 100)
    assert packs(vault) == []


def test_an_error_inside_leaves_nothing_behind_and_comes_out_as_it_is(vault: Vault) -> None:
    with pytest.raises(ZeroDivisionError), vault.writing() as unfinished:
        unfinished.add(b"x" * 100)
        _ = 1 // 0
    assert vault.references() == []


def test_an_error_of_the_system_inside_is_not_taken_for_the_vaults(vault: Vault) -> None:
    with pytest.raises(FileNotFoundError), vault.writing():
        os.stat(vault.path / "nothing")
    with pytest.raises(FileNotFoundError), vault.lock("here"):
        os.stat(vault.path / "nothing")


def test_a_root_that_was_not_added_is_not_published(vault: Vault) -> None:
    with vault.writing() as one, pytest.raises(SnapshotBroken, match="was not added"):
        one.publish(bytes(32), "", 1)
    assert vault.references() == []


def test_several_snapshots_may_be_published_in_one_writing(vault: Vault) -> None:
    with vault.writing() as one:
        first = add(one, {b"a": b"one" * 50})
        one.publish(first, "x", 1)
        second = add(one, {b"a": b"two" * 50})
        one.publish(second, "x", 2)
        add(one, {b"a": b"three" * 5_000})
    assert [reference.root for reference in vault.references()] == [first, second]
    assert read(vault, first) == {b"a": b"one" * 50}
    assert read(vault, second) == {b"a": b"two" * 50}
    assert vault.verify() == []


def test_what_was_added_may_change_as_soon_as_it_is_added(vault: Vault) -> None:
    buffer = bytearray(os.urandom(4_000))
    was = bytes(buffer)
    with vault.writing() as one:
        ref = one.add(memoryview(buffer))
        buffer[:] = bytes(4_000)
        one.publish(ref, "", 1)
    assert vault.load(ref) == was


def test_a_writing_that_is_over_takes_nothing_more(vault: Vault) -> None:
    with vault.writing() as one:
        pass
    with pytest.raises(StoreUnavailable, match="start a new one"):
        one.add(b"x")
    with pytest.raises(StoreUnavailable, match="start a new one"):
        one.publish(bytes(32), "", 1)
    assert packs(vault) == []


# once each ----------------------------------------------------------------------------------------


def test_what_is_there_is_not_stored_again(vault: Vault) -> None:
    files = some_files(random.Random(1), 50)
    publish(vault, files)
    before = packed_bytes(vault)
    publish(vault, files, "another")
    publish(vault, {**files, b"one more": b"y" * 10}, "another")
    assert packed_bytes(vault) - before < 8_000  # the folders, which are other ones


def test_what_is_there_is_found_whichever_way_it_is_looked_for(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {b"%d" % number: b"content %d" % number * 10 for number in range(500)}
    root = publish(vault, files)
    before = packed_bytes(vault)
    for asked, known in ((0, 10**6), (100, 10**6), (10**6, 0), (0, 0)):
        monkeypatch.setattr(snapshot_writer, "_LOOKUPS_MAX", asked)
        monkeypatch.setattr(snapshot_writer, "_KNOWN_MAX", known)
        assert publish(vault, files) == root
    assert packed_bytes(vault) == before


def test_threads_that_add_the_same_store_it_once(vault: Vault) -> None:
    contents = [os.urandom(3_000) for _ in range(200)]
    with vault.writing() as one:
        gate = threading.Barrier(4)

        def work(_: int) -> list[bytes]:
            gate.wait()
            return [one.add(data) for data in contents]

        with ThreadPoolExecutor(4) as threads:
            ids = list(threads.map(work, range(4)))
        assert ids[0] == ids[1] == ids[2] == ids[3]
        one.publish(ids[0][0], "", 1)
    assert packed_bytes(vault) == 200 * 3_000
    assert [vault.load(ref) for ref in ids[0]] == contents


def test_threads_with_writings_of_their_own_do_not_disturb_each_other(vault: Vault) -> None:
    seed = draw_seed()

    def work(number: int) -> dict[bytes, dict[bytes, bytes]]:
        chance = random.Random(seed + number)
        made = {}
        for _ in range(20):
            files = some_files(chance)
            made[publish(vault, files, str(number))] = files
        return made

    with ThreadPoolExecutor(4) as threads:
        for made in list(threads.map(work, range(4))):
            for root, files in made.items():
                assert read(vault, root) == files, seed
    assert vault.verify() == [], seed
    assert len(packs(vault)) < 20  # 80 publications share packs; one that is being closed is not taken


def test_what_two_processes_publish_at_once_is_whole_for_both(vault: Vault) -> None:
    files = some_files(random.Random(2), 30)
    other = Vault(vault.path)
    with vault.writing() as one, other.writing() as two:
        roots = add(one, files), add(two, files)
        one.publish(roots[0], "one", 1)
        two.publish(roots[1], "two", 1)
    assert roots[0] == roots[1]
    assert read(vault, roots[0]) == files
    assert vault.verify() == other.verify() == []
    other.close()


def test_what_does_not_compress_is_kept_as_it_is_and_all_else_is_not(vault: Vault) -> None:
    with vault.writing() as one:
        raw, text = one.add(os.urandom(100_000)), one.add(b"again and again " * 6_000)
        one.publish(raw, "", 1)
    assert 100_000 <= packed_bytes(vault) < 101_000
    assert vault.load(text) == b"again and again " * 6_000


@pytest.mark.parametrize("size", [0, 1, 47, 48, 500, 1 << 20])
def test_a_frame_holds_exactly_what_was_said_or_nothing(size: int) -> None:
    data = b"ab" * (size // 2) + b"c" * (size % 2)
    stored = bytes(compressed(data))
    if len(stored) < size:
        assert decompressed(stored, size) == data
        for wrong in (size - 1, size + 1, 0, 1 << 40):
            assert decompressed(stored, wrong) is None
        assert decompressed(stored[:-1], size) is None
        assert decompressed(stored + b"x", size) is None
    else:
        assert stored == data


# packs --------------------------------------------------------------------------------------------


def test_many_short_lives_leave_one_pack(vault: Vault) -> None:
    for number in range(40):
        with_own = Vault(vault.path)
        publish(with_own, {b"a": os.urandom(100)}, str(number))
        with_own.close()
    assert len(packs(vault)) == 1
    assert vault.verify() == []


def test_a_pack_is_filled_and_then_another_is_begun(vault: Vault) -> None:
    vault._packs.pack_bytes_max = 100_000
    files = {b"%d" % number: os.urandom(9_000) for number in range(60)}
    root = publish(vault, files)
    assert len(packs(vault)) == 6
    assert all(path.stat().st_size < 110_000 for path in packs(vault))
    assert read(vault, root) == files
    publish(vault, {b"little": b"x" * 100})
    assert len(packs(vault)) == 6


def test_what_a_death_left_behind_in_a_pack_is_cut_off_by_the_next(vault: Vault) -> None:
    root = publish(vault, {b"a": b"one" * 100})
    (path,) = packs(vault)
    length = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"torn" * 10_000)
    other = publish(vault, {b"a": b"two" * 100})
    assert length < path.stat().st_size < length + 1_000
    assert read(vault, root) == {b"a": b"one" * 100}
    assert read(vault, other) == {b"a": b"two" * 100}


def test_a_pack_that_nobody_published_is_used_by_the_next(vault: Vault) -> None:
    publish(vault, {})
    (vault.path / "packs" / "0002.pack").write_bytes(b"torn" * 1_000)
    with vault.writing() as has_the_first:
        has_the_first.add(b"x")
        root = publish(vault, {b"a": b"two" * 100})
    assert [path.name for path in packs(vault)] == ["0001.pack", "0002.pack"]
    assert packs(vault)[1].stat().st_size < 1_000
    assert read(vault, root) == {b"a": b"two" * 100}


def test_a_pack_that_is_too_short_is_left_alone(vault: Vault) -> None:
    root = publish(vault, {b"a": os.urandom(5_000)})
    (path,) = packs(vault)
    os.truncate(path, 1_000)
    publish(vault, {b"b": os.urandom(5_000)})
    assert path.stat().st_size == 1_000
    assert len(packs(vault)) == 2
    assert [line for line in vault.verify() if line.startswith("pack 1 ")]
    assert [line for line in vault.verify() if line.startswith(f"snapshot {root.hex()[:12]}")]


# references and the journal -----------------------------------------------------------------------


def test_references_are_by_owner_oldest_first_and_can_be_forgotten(vault: Vault) -> None:
    one, two = publish(vault, {b"a": b"1"}, "store/run_b", 20), publish(vault, {b"a": b"2"}, "store/run_a", 10)
    publish(vault, {b"a": b"1"}, "store/run_a", 30)
    assert vault.references() == [
        Reference(two, "store/run_a", 10), Reference(one, "store/run_b", 20), Reference(one, "store/run_a", 30),
    ]  # fmt: skip
    assert vault.references("store/run_a") == [Reference(two, "store/run_a", 10), Reference(one, "store/run_a", 30)]
    assert vault.forget("store/run_a") == 2
    assert vault.forget("store/run_a") == 0
    assert vault.references() == [Reference(one, "store/run_b", 20)]


def test_owners_are_forgotten_by_how_their_names_begin_unless_they_are_kept(vault: Vault) -> None:
    for owner in ("store_1/a", "store_1/b", "store%1/a", "STORE_1/a", "/home/me"):
        publish(vault, {b"a": owner.encode()}, owner)
    assert vault.forget_owners("store_1/", lambda owner: owner.endswith("/b")) == 1
    assert {reference.owner for reference in vault.references()} == {"store_1/b", "store%1/a", "STORE_1/a", "/home/me"}
    assert vault.forget_owners("none/", lambda owner: False) == 0


def test_a_snapshot_that_is_published_again_keeps_the_later_time(vault: Vault) -> None:
    root = publish(vault, {}, "me", 7)
    publish(vault, {}, "me", 9)
    publish(vault, {}, "me", 8)
    assert vault.references() == [Reference(root, "me", 9)]


def test_the_journal_keeps_what_is_being_restored_until_it_ends(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "files", clock=ManualClock(5))
    target, before = publish(vault, {b"a": b"1"}), publish(vault, {b"a": b"2"})
    assert vault.restoring("/w") is None
    vault.begin_restoring("/w", target, before, [b"a", b"\xff/b"])
    vault.begin_restoring("/other", before, None, None)
    another = Vault(vault.path)
    assert another.restoring("/w") == RestoreRecord("/w", target, before, (b"a", b"\xff/b"), 5)
    assert another.restoring("/other") == RestoreRecord("/other", before, None, None, 5)
    another.begin_restoring("/w", before, None, [])
    assert vault.restoring("/w") is not None
    assert vault.restoring("/w").paths == ()  # type: ignore[union-attr]
    vault.end_restoring("/w")
    vault.end_restoring("/w")
    assert another.restoring("/w") is None
    assert another.restoring("/other") is not None
    another.close()
    vault.close()


# locks --------------------------------------------------------------------------------------------


def test_one_at_a_time_has_a_folder_among_threads_and_vaults(vault: Vault) -> None:
    inside, most, mutex = 0, 0, threading.Lock()
    vaults = [vault, Vault(vault.path)]

    def work(number: int) -> None:
        nonlocal inside, most
        for _ in range(50):
            with vaults[number % 2].lock("/w"):
                with mutex:
                    inside += 1
                    most = max(most, inside)
                with mutex:
                    inside -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert most == 1
    assert not list(vault.path.glob("workspace-*"))
    vaults[1].close()


def test_folders_are_locked_apart(vault: Vault) -> None:
    with vault.lock("/w"), vault.lock("/v"), vault.lock("/w\udcff"):
        assert len(list(vault.path.glob("workspace-*"))) == 3


def test_a_lock_of_a_killed_process_is_free(vault: Vault) -> None:
    program = (
        "import os, signal, sys; from killick.workspace.vault.vault import Vault\n"
        "with Vault(sys.argv[1]).lock('/w'), Vault(sys.argv[1]).writing() as w:\n"
        "    w.add(b'x' * 100); print('in', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, os.fspath(vault.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"in\n"
    waiting = threading.Thread(target=lambda: vault.lock("/w").__enter__())
    waiting.start()
    child.kill()
    child.communicate()
    waiting.join(300)
    assert not waiting.is_alive()
    assert vault.sweep() == Swept(0, 0, 0)


def test_a_forked_process_uses_nothing_that_its_parent_has_open(vault: Vault) -> None:
    publish(vault, {b"a": b"1"})
    with vault.writing() as one:
        ref = one.add(os.urandom(1_000))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                publish(vault, {b"a": os.urandom(100)}, "child")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        one.publish(ref, "parent", 1)
    assert len(vault.load(ref)) == 1_000
    assert {reference.owner for reference in vault.references()} == {"", "child", "parent"}
    assert [line for line in vault.verify() if "child" in line] == []
    assert len(packs(vault)) == 2


# a vault that is not there, and other places ------------------------------------------------------


def test_reading_makes_no_vault(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "none" / "files")
    root = bytes(32)
    assert vault.has([root]) == set()
    assert vault.references() == []
    assert vault.restoring("/w") is None
    assert vault.forget("me") == vault.forget_owners("", lambda owner: False) == vault.size_bytes() == 0
    assert vault.sweep() == vault.sweep(dry_run=True) == Swept(0, 0, 0)
    assert vault.verify() == []
    assert vault.verify([root]) == [f"snapshot 000000000000: there is no vault at {vault.path}"]
    vault.end_restoring("/w")
    with pytest.raises(SnapshotBroken, match="there is no vault at"):
        vault.load(root)
    vault.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["with space", "ünï", "a%20b?c=d#e", "file:x", "-", "\udcff\udcfe", "'\"\n;"])
def test_a_vault_may_have_any_name(tmp_path: Path, name: str) -> None:
    vault = Vault(tmp_path / name)
    root = publish(vault, {b"a": b"1" * 100})
    assert read(vault, root) == {b"a": b"1" * 100}
    assert vault.sweep().objects == 0
    assert vault.verify() == []
    assert vault.size_bytes() > 0
    vault.close()
    assert (tmp_path / name / "index.db").exists()


def test_a_vault_may_be_given_relative_and_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vault = Vault("files")
    monkeypatch.chdir("/")
    publish(vault, {})
    assert vault.path == tmp_path / "files"
    assert (tmp_path / "files" / "index.db").exists()
    vault.close()


def test_only_its_owner_may_look_into_a_vault(vault: Vault) -> None:
    publish(vault, {})
    assert vault.path.stat().st_mode & 0o777 == 0o700


def test_a_closed_vault_says_so(vault: Vault) -> None:
    root = publish(vault, {})
    vault.close()
    vault.close()
    with pytest.raises(StoreClosed):
        vault.load(root)
    with pytest.raises(StoreClosed), vault.writing():
        pass


# damage -------------------------------------------------------------------------------------------


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)


def test_a_damaged_object_is_named_with_its_vault(vault: Vault) -> None:
    root = publish(vault, {b"sub/\xffnote": b"".join(b"line %d\n" % number for number in range(900))})
    ref = sha256(b"".join(b"line %d\n" % number for number in range(900))).digest()
    assert vault.verify() == []
    flipped(packs(vault)[0], 400)
    with pytest.raises(SnapshotBroken, match=f"{ref.hex()}: is damaged in the vault .*files"):
        vault.load(ref)
    (line,) = vault.verify()
    assert line.startswith(f"snapshot {root.hex()[:12]}: sub/\\xffnote: {ref.hex()}: is damaged in the vault")
    assert vault.verify([root]) == [line]


def test_verification_tells_of_everything_that_cannot_be_read_once(vault: Vault) -> None:
    files = {b"%d" % number: os.urandom(2_000) for number in range(30)}
    publish(vault, files, "first")
    publish(vault, {**files, b"more": b""}, "second")
    packs(vault)[0].unlink()
    problems = vault.verify()
    assert problems[0].startswith("pack 1 of the vault")
    # Neither root can be read, so nothing is known of what is below.
    assert len(problems) == 3
    assert all("is not there" in problem for problem in problems[1:])


@pytest.mark.slow
def test_no_flipped_bit_of_a_pack_is_ever_taken_for_content(vault: Vault) -> None:
    seed = draw_seed()
    files = some_files(random.Random(seed), 12, size_max=300)
    root = publish(vault, files)
    (path,) = packs(vault)
    found = 0
    for at in range(0, path.stat().st_size, 2):
        flipped(path, at)
        fresh = Vault(vault.path)
        try:
            assert read(fresh, root) == files, (seed, at)  # some bits of a frame mean nothing
            assert vault.verify() == []
        except SnapshotBroken:
            assert len(vault.verify()) == 1, (seed, at)
            found += 1
        fresh.close()
        flipped(path, at)
    assert found > 0.9 * path.stat().st_size / 2, seed
    assert vault.verify() == []


def test_verification_tells_how_far_it_is(vault: Vault) -> None:
    publish(vault, {b"%d" % number: b"%d" % number for number in range(1_200)})
    told: list[tuple[int, int]] = []
    assert vault.verify(progress=lambda done, total: told.append((done, total))) == []
    assert [done for done, _ in told[:2]] == [500, 1_000]
    assert 1_200 <= told[-1][0] <= told[-1][1]


def test_a_file_that_holds_the_bytes_of_a_folder_hides_nothing_from_verification(vault: Vault) -> None:
    listed: list[bytes] = []
    with vault.writing() as one:

        def noted(data: bytes) -> bytes:
            listed.append(data)
            return one.add(data)

        inner = tree.store_folder([tree.Entry(b"x", tree.FILE, 0o644, 1, 5_000, one.add(os.urandom(5_000)))], noted)
        top = tree.store_folder(
            [
                tree.Entry(b"a folder", tree.FOLDER, 0o755, 1, 0, inner),
                tree.Entry(b"z copy", tree.FILE, 0o644, 1, len(listed[0]), one.add(listed[0])),
            ],
            one.add,
        )
        one.publish(tree.store_root(tree.Entry(b"", tree.FOLDER, 0o755, 1, 0, top), one.add), "", 1)
    flipped(packs(vault)[0], 100)
    assert len(vault.verify()) == 1
