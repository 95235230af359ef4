"""Sweeping: what no snapshot needs goes, what one needs stays, whoever reads or writes meanwhile."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from killick.errors import SnapshotBroken, StoreBusy
from killick.workspace import tree
from killick.workspace.vault import sweep
from killick.workspace.vault.vault import Swept, Vault
from seeds import draw_seed
from workspace.vaults import add, packed_bytes, packs, publish, read, some_files

TESTS = Path(__file__).parent.parent


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path / "files")
    yield made
    made.close()


def process(program: str, vault: Vault, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, os.fspath(vault.path), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )


def swept_elsewhere(vault: Vault) -> str:
    """How many objects another process sweeps, or why it does not."""
    program = (
        "import sys; from killick.errors import StoreBusy; from killick.workspace.vault.vault import Vault\n"
        "try: print(Vault(sys.argv[1], busy_seconds=0.05).sweep().objects)\n"
        "except StoreBusy: print('StoreBusy')"
    )
    told, errors = process(program, vault).communicate(timeout=300)
    return told.strip() or errors


def test_what_no_reference_reaches_goes_and_what_one_reaches_stays(vault: Vault) -> None:
    kept = {b"a": os.urandom(3_000), b"sub/b": os.urandom(3_000), b"long": os.urandom(1_500_000)}
    gone = {b"a": kept[b"a"], b"c": os.urandom(400_000), b"sub/long": os.urandom(2_500_000)}
    root, old = publish(vault, kept, "kept"), publish(vault, gone, "gone")
    before = packed_bytes(vault)
    assert vault.sweep().objects == 0
    vault.forget("gone")
    swept = vault.sweep()
    # One file, three blocks and their list, two folders and the root; of the other nothing.
    assert swept.objects == 1 + 4 + 2 + 1
    assert swept.bytes_freed == before - packed_bytes(vault) > 2_500_000
    assert swept.bytes_kept == packed_bytes(vault)
    assert read(vault, root) == kept
    assert vault.verify() == []
    with pytest.raises(SnapshotBroken, match="is missing"):
        vault.load(old)
    assert vault.sweep() == Swept(0, 0, packed_bytes(vault))


def test_a_dry_run_tells_what_a_sweep_does_and_does_nothing(vault: Vault) -> None:
    publish(vault, {b"a": os.urandom(3_000)}, "kept")
    publish(vault, {b"a": os.urandom(90_000)}, "gone")
    assert vault.sweep(dry_run=True) == Swept(0, 0, packed_bytes(vault))
    foretold = vault.sweep(dry_run=True, without=lambda owner: owner == "gone")
    vault.forget("gone")
    before = packed_bytes(vault)
    assert vault.sweep(dry_run=True) == foretold
    assert packed_bytes(vault) == before
    assert vault.sweep() == foretold
    with pytest.raises(ValueError, match="dry run"):
        vault.sweep(without=lambda owner: True)


def test_a_pack_that_is_mostly_needed_is_not_rewritten(vault: Vault) -> None:
    publish(vault, {b"a": os.urandom(90_000)}, "kept")
    publish(vault, {b"b": os.urandom(50_000)}, "gone")
    vault.forget("gone")
    names = packs(vault)
    assert vault.sweep().objects == 3
    assert packs(vault) == names


def test_a_restore_that_has_not_ended_keeps_what_it_needs(vault: Vault) -> None:
    target, before = publish(vault, {b"a": b"1" * 100}, "x"), publish(vault, {b"a": b"2" * 100}, "x")
    vault.begin_restoring("/w", target, before, None)
    vault.forget("x")
    assert vault.sweep().objects == 0
    assert read(vault, target) == {b"a": b"1" * 100}
    vault.end_restoring("/w")
    assert vault.sweep().objects == 6
    assert packs(vault) == []


def test_the_generation_moves_when_something_was_deleted_and_only_then(vault: Vault) -> None:
    assert vault.generation == 0
    publish(vault, {b"a": b"1"}, "x")
    first = vault.generation
    vault.sweep()
    assert vault.generation == first > 0
    vault.forget("x")
    vault.sweep(dry_run=True)
    assert vault.generation == first
    vault.sweep()
    with vault.writing() as one:
        assert vault.generation == one.sweeps == first + 1


def test_a_vault_in_the_place_of_another_is_of_another_generation(tmp_path: Path) -> None:
    seen = set[int]()
    for number in range(3):
        vault = Vault(tmp_path / "files")
        publish(vault, {b"a": b"1"})
        seen.add(vault.generation)
        vault.close()
        os.rename(tmp_path / "files", tmp_path / str(number))
    assert len(seen) == 3


def test_what_was_swept_can_be_stored_again(vault: Vault) -> None:
    files = some_files(random.Random(3), 40)
    for _ in range(3):
        root = publish(vault, files, "x")
        assert read(vault, root) == files
        vault.forget("x")
        assert vault.sweep().objects > 30
        assert packed_bytes(vault) == 0


def test_a_number_of_a_pack_is_never_used_again(vault: Vault) -> None:
    names = set[str]()
    for number in range(4):
        publish(vault, {b"a": os.urandom(100)}, "x")
        (path,) = packs(vault)
        assert path.name not in names, number
        names.add(path.name)
        vault.forget("x")
        vault.sweep()


def test_a_file_that_holds_the_bytes_of_a_folder_hides_nothing_from_the_sweep(vault: Vault) -> None:
    listed: list[bytes] = []
    data = os.urandom(500)
    with vault.writing() as one:

        def noted(data: bytes) -> bytes:
            listed.append(data)
            return one.add(data)

        inner = tree.store_folder([tree.Entry(b"x", tree.FILE, 0o644, 1, 500, one.add(data))], noted)
        copy = tree.Entry(b"a copy", tree.FILE, 0o644, 1, len(listed[0]), one.add(listed[0]))
        folder = tree.Entry(b"b folder", tree.FOLDER, 0o755, 1, 0, inner)
        for entries in ([copy, folder], [folder, copy]):
            top = tree.store_folder(entries, one.add)
            root = tree.store_root(tree.Entry(b"", tree.FOLDER, 0o755, 1, 0, top), one.add)
            one.publish(root, "x", 1)
    assert vault.sweep().objects == 0
    assert read(vault, root)[b"b folder/x"] == data


def test_a_snapshot_that_cannot_be_followed_stops_the_sweep_and_nothing_is_deleted(vault: Vault) -> None:
    root = publish(vault, {b"a": os.urandom(100)}, "broken")
    other = publish(vault, {b"a": os.urandom(100)}, "gone")
    vault.forget("gone")
    (path,) = packs(vault)
    data = bytearray(path.read_bytes())
    data[110] ^= 1  # in the folder of the first
    path.write_bytes(data)
    with pytest.raises(SnapshotBroken, match=f"snapshot {root.hex()[:12]} needs it, so nothing was swept"):
        vault.sweep()
    assert vault.has([other]) == {other}
    vault.forget("broken")
    assert vault.sweep().objects == 6


def test_what_processes_left_behind_that_died_is_cleared_away(vault: Vault) -> None:
    publish(vault, {b"a": os.urandom(100)}, "x")
    (vault.path / "packs" / "0007.pack").write_bytes(bytes(5_000))
    (vault.path / "packs" / "notes.txt").write_text("of somebody else")
    assert vault.sweep().bytes_freed == 5_000
    assert [path.name for path in packs(vault)] == ["0001.pack", "notes.txt"]


def test_packs_that_somebody_appends_to_are_left_alone(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(vault, {b"a": os.urandom(50_000)}, "gone")
    vault.forget("gone")
    writer = Vault(vault.path)
    files = {b"b": os.urandom(1_000)}
    rewrite = sweep._rewrite
    left = list[int]()

    def with_a_writer_in_between(*arguments: object) -> None:
        # Others may write again by now, and take the very pack that is about to be rewritten.
        with writer.writing() as one:
            root = add(one, {b"b": files[b"b"] + bytes(len(left))})
            rewrite(*arguments)  # type: ignore[arg-type]
            left.append(packed_bytes(vault))
            one.publish(root, "new", len(left))

    monkeypatch.setattr(sweep, "_rewrite", with_a_writer_in_between)
    assert vault.sweep().objects == 3
    monkeypatch.undo()
    assert left
    assert all(size > 50_000 for size in left)
    for number, reference in enumerate(vault.references()):
        assert read(vault, reference.root) == {b"b": files[b"b"] + bytes(number)}
    assert len(packs(vault)) == 1
    assert vault.sweep().bytes_freed > 49_000
    assert vault.verify() == []
    writer.close()


def test_objects_of_many_packs_are_gathered_in_few(vault: Vault) -> None:
    vault._packs.pack_bytes_max = 20_000
    kept, gone = {}, {}
    for number in range(40):
        kept[b"k%d" % number] = os.urandom(900)
        gone[b"g%d" % number] = os.urandom(3_000)
        publish(vault, {b"k": kept[b"k%d" % number], b"g": gone[b"g%d" % number]}, "gone")
    root = publish(vault, kept, "kept")
    many = len(packs(vault))
    vault.forget("gone")
    vault.sweep()
    assert len(packs(vault)) <= 4 < many
    assert packed_bytes(vault) < 45_000
    assert read(vault, root) == kept
    assert vault.verify() == []


# while others write and read ----------------------------------------------------------------------


@pytest.mark.slow
def test_what_an_open_writing_found_there_is_not_swept_before_it_is_published(vault: Vault) -> None:
    files = some_files(random.Random(4), 20)
    publish(vault, files, "gone")
    vault.forget("gone")
    before = packed_bytes(vault)
    with vault.writing() as one:
        root = add(one, files)
        assert swept_elsewhere(vault) == "StoreBusy"
        one.publish(root, "new", 1)
    assert packed_bytes(vault) == before
    assert swept_elsewhere(vault) == "0"
    assert read(vault, root) == files


def test_a_sweep_that_is_never_let_in_says_so(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "files", busy_seconds=0.05)
    publish(vault, {b"a": b"1"}, "x")
    with vault.writing() as one, pytest.raises(StoreBusy, match="try again"):
        one.add(b"2")
        vault.sweep()
    vault.close()


@pytest.mark.slow
def test_who_reads_while_packs_are_rewritten_finds_everything(vault: Vault) -> None:
    vault._packs.pack_bytes_max = 30_000
    seed = draw_seed()
    chance = random.Random(seed)
    kept = {b"%d" % number: chance.randbytes(1_000) for number in range(60)}
    root = publish(vault, kept, "kept")
    refs = list(tree.objects(root, vault.load, set()))
    over, problems, reads = threading.Event(), list[str](), 0

    def reader() -> None:
        nonlocal reads
        own = Vault(vault.path)
        while not over.is_set():
            for ref in refs:
                try:
                    own._load(ref)
                    reads += 1
                except SnapshotBroken as error:
                    problems.append(str(error))
        own.close()

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    moved = 0
    for _ in range(10):
        # Garbage around the same objects, again and again, so that every sweep moves them.
        publish(vault, {b"%d" % each: chance.randbytes(2_500) for each in range(60)}, "gone")
        vault.forget("gone")
        before = packs(vault)
        vault.sweep()
        moved += packs(vault) != before
    over.set()
    for thread in threads:
        thread.join()
    assert problems == [], seed
    assert reads > 100
    assert moved > 2
    assert read(vault, root) == kept


@pytest.mark.slow
def test_processes_that_publish_forget_and_sweep_at_once_lose_nothing(vault: Vault) -> None:
    seed = draw_seed()
    program = (
        "import random, sys\n"
        "from killick.workspace.vault.vault import Vault\n"
        "from workspace.vaults import publish, read, some_files\n"
        "vault, number, seed = Vault(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        "vault._packs.pack_bytes_max = 40_000\n"
        "chance, made = random.Random(seed * 10 + number), {}\n"
        "for turn in range(25):\n"
        "    owner = f'{number}/{chance.randrange(4)}'\n"
        "    what = chance.random()\n"
        "    if what < 0.65:\n"
        "        files = some_files(chance)\n"
        "        made.setdefault(owner, {})[publish(vault, files, owner)] = files\n"
        "    elif what < 0.85:\n"
        "        vault.forget(owner)\n"
        "        made.pop(owner, None)\n"
        "    else:\n"
        "        vault.sweep()\n"
        "    for owner, roots in made.items():\n"
        "        assert {each.root for each in vault.references(owner)} == set(roots), (owner, turn)\n"
        "    roots = [pair for some in made.values() for pair in some.items()]\n"
        "    for root, files in chance.sample(roots, min(2, len(roots))):\n"
        "        assert read(Vault(sys.argv[1]), root) == files, turn\n"
        "for roots in made.values():\n"
        "    for root, files in roots.items():\n"
        "        assert read(vault, root) == files\n"
    )
    children = [process(program, vault, number, seed) for number in range(4)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, (seed, errors[-2_000:])
    assert vault.verify() == [], seed
    vault.sweep()
    assert vault.verify() == [], seed


def test_an_object_without_bytes_that_alone_is_left_in_a_pack_is_moved_out_of_it(vault: Vault) -> None:
    vault._packs.pack_bytes_max = 1_000
    publish(vault, {b"a": b"", b"b": os.urandom(100_000)}, "gone")
    root = publish(vault, {b"a": b""}, "kept")
    vault.forget("gone")
    assert vault.sweep().bytes_freed > 90_000
    assert read(vault, root) == {b"a": b""}
    assert vault.verify() == []
