"""The files of a run at a place in its time, and what changed between two: from its record and its vault."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import killick
from killick.client.file_restore import restored
from killick.errors import SnapshotBroken, WorkspaceRefused
from killick.history import phrasing, vaults, workspace_files
from killick.model import events as e

BEFORE = "def add(a, b):\n    return a - b\n\n\ndef main():\n    print(add(1, 2))\n"
AFTER = BEFORE.replace("a - b", "a + b")
ODD = b"odd \xff\nname"


@killick.tool(effect="workspace")
async def files_made(folder: Path = killick.WORKSPACE) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "app.py").write_text(BEFORE)
    (folder / "README.md").write_text("read me")
    (folder / "logo.png").write_bytes(bytes(range(256)) * 20)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "main.py").symlink_to("src/app.py")


@killick.tool(effect="workspace")
async def files_changed(folder: Path = killick.WORKSPACE) -> None:
    (folder / "src" / "app.py").write_text(AFTER)
    (folder / "README.md").unlink()
    (folder / "logo.png").write_bytes(bytes(range(255, -1, -1)) * 21)
    (folder / "run.sh").chmod(0o755)
    (folder / "main.py").unlink()
    (folder / "main.py").symlink_to("run.sh")
    Path(os.fsdecode(os.fsencode(folder) + b"/" + ODD)).write_text("odd")
    with (folder / "huge.img").open("wb") as huge:
        huge.seek(3 << 20)
        huge.write(b"end")


@killick.tool(effect="reads")
async def files_seen(folder: Path = killick.WORKSPACE) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@killick.agent(workspace="{run}.shop")
async def files_agent(run: killick.Run) -> str:
    await run.call(files_made)
    await run.call(files_changed)
    await run.call(files_seen)
    await run.ask("Go on?")
    return "done"


@killick.agent
async def without_files(run: killick.Run) -> str:
    await run.call(files_none)
    return "done"


@killick.tool(effect="reads")
async def files_none() -> None:
    return None


@pytest.fixture
def kd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[killick.Client]:
    monkeypatch.chdir(tmp_path)
    with killick.open("killick.db") as made:
        yield made


@pytest.fixture
def run(kd: killick.Client, tmp_path: Path) -> str:
    with pytest.raises(killick.RunWaiting):
        kd.run(files_agent, id="fix")
    return "fix"


def names(listing: workspace_files.Listing) -> dict[str, workspace_files.How | None]:
    return {each.path: each.how for each in listing.entries}


def content(found: workspace_files.Files, path: str, limit: int | None = None) -> bytes:
    return b"".join(found.pieces(path, found.find(path)[1], limit))


# a place ------------------------------------------------------------------------------------------


def test_a_listing_has_every_path_and_what_became_of_it_in_the_step(kd: killick.Client, run: str) -> None:
    with workspace_files.at(kd.runtime.log, run, "2:after") as found:
        listing = found.listing()
    assert names(listing) == {
        "README.md": "removed", "huge.img": "added", "logo.png": "changed", "main.py": "changed",
        "odd \\xff\\x0aname": "added", "run.sh": "touched", "src": None, "src/app.py": "changed",
    }  # fmt: skip
    assert listing.since == "2:before"
    assert listing.changed == {"added": 2, "removed": 1, "changed": 3, "touched": 1}
    assert (listing.files, listing.folders, listing.left_out) == (6, 1, 0)
    told = {each.path: each for each in listing.entries}
    assert told["src/app.py"].size == len(AFTER)
    assert (told["run.sh"].mode, told["main.py"].target) == (0o755, "run.sh")
    assert told["src/app.py"].mtime_ns == (Path("fix.shop") / "src" / "app.py").stat().st_mtime_ns


def test_a_place_that_is_no_end_of_a_step_is_compared_with_the_snapshot_before(kd: killick.Client, run: str) -> None:
    with workspace_files.at(kd.runtime.log, run, "2:before") as found:
        listing = found.listing()
    assert listing.since is not None
    assert set(names(listing).values()) == {"added"}
    with workspace_files.at(kd.runtime.log, run, "3:after") as found:
        listing = found.listing()
    assert listing.since == "3:before"
    assert listing.changed == {}
    with workspace_files.at(kd.runtime.log, run) as found:
        assert found.listing().since == "1:after"


def test_a_folder_is_listed_by_itself_and_a_long_listing_is_counted(kd: killick.Client, run: str) -> None:
    with workspace_files.at(kd.runtime.log, run, "2:after") as found:
        assert list(names(found.listing("src"))) == ["src/app.py"]
        assert list(names(found.listing("./src/"))) == ["src/app.py"]
        assert list(names(found.listing(f"{Path('fix.shop').resolve()}/src"))) == ["src/app.py"]
        cut = found.listing(limit=2)
        assert (cut.left_out, cut.files) == (5, 6)


def test_content_is_what_the_file_held_then(kd: killick.Client, run: str) -> None:
    with workspace_files.at(kd.runtime.log, run, "2:before") as found:
        assert content(found, "src/app.py") == BEFORE.encode()
        assert content(found, "README.md") == b"read me"
        assert content(found, "main.py") == b"src/app.py"
        assert content(found, "src/app.py", limit=3) == b"def"
    with workspace_files.at(kd.runtime.log, run) as found:
        assert content(found, "src/app.py") == AFTER.encode()
        assert content(found, os.fsdecode(ODD)) == b"odd"
        assert content(found, "odd \\xff\\x0aname") == b"odd"
        huge = Path("fix.shop/huge.img").read_bytes()
        assert content(found, "huge.img") == huge
        assert content(found, "huge.img", limit=(1 << 20) + 5) == huge[: (1 << 20) + 5]
        with pytest.raises(WorkspaceRefused, match=r"src: is a folder in the snapshot, which has no content"):
            content(found, "src")


def test_a_path_that_was_not_there_is_refused_with_what_was(kd: killick.Client, run: str) -> None:
    with workspace_files.at(kd.runtime.log, run, "2:before") as found:
        with pytest.raises(WorkspaceRefused, match=r"fix: there was no src/other at 2:before; src had app\.py$"):
            found.find("src/other")
        with pytest.raises(WorkspaceRefused, match=r"no nowhere/x at 2:before; the folder had README\.md, logo\.png"):
            found.find("nowhere/x")
        with pytest.raises(WorkspaceRefused, match=r"is not inside the run's folder"):
            found.find("../killick.db")
        with pytest.raises(WorkspaceRefused, match=r"is not inside the run's folder"):
            found.find("/etc/passwd")


def test_what_cannot_be_told_is_refused_in_one_line(kd: killick.Client, run: str) -> None:
    kd.run(without_files, id="plain")
    for name, place, said in (
        ("plain", "now", "plain: has no workspace, so no files were recorded"),
        (run, "start", "fix: there is no snapshot of its files as early as start; the first is at @3"),
    ):
        with pytest.raises(WorkspaceRefused) as refused:
            workspace_files.at(kd.runtime.log, name, place)
        assert str(refused.value) == said
    shutil.move("killick.files", "elsewhere")
    with pytest.raises(WorkspaceRefused, match=r"the vault of its files, \S+killick\.files, is not here; restore it"):
        workspace_files.at(kd.runtime.log, run)


def test_a_vault_that_moved_with_its_store_is_found_beside_it(kd: killick.Client, run: str, tmp_path: Path) -> None:
    kd.close()
    (tmp_path / "there").mkdir()
    for each in ("killick.db", "killick.files"):
        shutil.move(each, tmp_path / "there" / each)
    with (
        killick.open(str(tmp_path / "there" / "killick.db")) as moved,
        workspace_files.at(moved.runtime.log, run) as found,
    ):
        assert content(found, "src/app.py") == AFTER.encode()


def test_a_timeline_that_was_left_has_its_files_still(kd: killick.Client, run: str) -> None:
    kd.rewind(run, "2:before")
    with workspace_files.at(kd.runtime.log, run) as found:
        assert content(found, "src/app.py") == BEFORE.encode()
    with workspace_files.at(kd.runtime.log, run, "2~0:after") as found:
        assert content(found, "src/app.py") == AFTER.encode()


def test_a_snapshot_is_found_by_the_beginning_of_its_id(kd: killick.Client, run: str) -> None:
    Path("fix.shop/mine.txt").write_text("by hand")
    kd.rewind(run, "2:before")
    [kept] = [event for _, event, _ in kd.events(run) if isinstance(event, e.WorkspaceRestored)]
    root = e.from_text(str(kept.before))
    for text in (root.hex(), root.hex()[:12], root.hex()[:12].upper(), f"{root.hex()[:8]}…"):
        with workspace_files.by_id(kd.runtime.log, run, text) as found:
            assert content(found, "mine.txt") == b"by hand"
    with pytest.raises(WorkspaceRefused, match=r"'now' is not a snapshot id"):
        workspace_files.by_id(kd.runtime.log, run, "now")
    with pytest.raises(WorkspaceRefused, match=r"has no snapshot 00000000 on record"):
        workspace_files.by_id(kd.runtime.log, run, "00000000")


def test_files_are_brought_back_without_blocking_the_loop(kd: killick.Client, run: str) -> None:
    done = asyncio.run(kd.as_async().restore(run, "2:before", paths=["README.md"], by="mia"))
    assert (done.written, done.removed, done.paths) == (1, 0, ("README.md",))
    assert Path("fix.shop/README.md").read_text() == "read me"
    assert Path("fix.shop/src/app.py").read_text() == AFTER
    with workspace_files.by_id(kd.runtime.log, run, str(done.before)) as found:
        assert "README.md" not in names(found.listing())
    with pytest.raises(WorkspaceRefused, match=r"fix: name a position or a snapshot to restore"):
        kd.restore(run)
    kd.answer(run, "approve", by="mia")
    assert kd.run(files_agent, id=run) == "done"


# what changed -------------------------------------------------------------------------------------


def test_a_step_says_what_it_did_to_files_line_by_line(kd: killick.Client, run: str) -> None:
    found = kd.diff(run, "2").files
    assert found is not None
    told = {change.path: change for change in found.changes}
    assert {path: change.how for path, change in told.items()} == {
        "README.md": "removed", "huge.img": "added", "logo.png": "changed", "main.py": "changed",
        "odd \\xff\\x0aname": "added", "run.sh": "touched", "src/app.py": "changed",
    }  # fmt: skip
    assert found.counts == {"added": 2, "removed": 1, "changed": 3, "touched": 1}
    assert told["src/app.py"].lines == (
        "@@ -1,5 +1,5 @@", " def add(a, b):", "-    return a - b", "+    return a + b", " ", " ", " def main():",
    )  # fmt: skip
    assert (told["src/app.py"].plus, told["src/app.py"].minus) == (1, 1)
    assert told["README.md"].lines == ("@@ -1 +0,0 @@", "-read me", "\\ No newline at end of file")
    assert (told["logo.png"].lines, told["logo.png"].about) == ((), "binary, 5.1 kB → 5.4 kB")
    assert told["huge.img"].about == "binary, 3.1 MB"
    assert told["run.sh"].about == "mode 644 → 755"
    assert told["main.py"].about == "link → src/app.py, now → run.sh"
    assert (found.before.label, found.after.label) == ("2:before", "2:after")


def test_a_step_that_changed_no_file_says_so(kd: killick.Client, run: str) -> None:
    found = kd.diff(run, "3").files
    assert found is not None
    assert not found
    kd.run(without_files, id="plain")
    assert kd.diff("plain", "start", "now").files is None
    assert kd.diff("plain", "start", "now").no_files is None


def test_places_before_the_first_snapshot_are_compared_by_it(kd: killick.Client, run: str) -> None:
    found = kd.diff(run, "start", "1:after").files
    assert found is not None
    assert found.before.label == "@3"
    assert found.counts == {"added": 6}


def test_two_runs_are_compared_in_their_files(kd: killick.Client, run: str) -> None:
    kd.fork(run, "1:after", id="other")
    found = kd.diff(run, against="other").files
    assert found is not None
    assert {change.path for change in found.changes} >= {"README.md", "src/app.py"}
    assert found.counts["removed"] == 2
    kd.run(without_files, id="plain")
    assert kd.diff(run, against="plain").files is None
    assert kd.diff(run, against="plain").no_files == "plain has no workspace"


def test_a_diff_of_states_does_not_need_the_vault(kd: killick.Client, run: str) -> None:
    shutil.move("killick.files", "elsewhere")
    found = kd.diff(run, "2")
    assert found.files is None
    assert str(found.no_files).startswith("fix: the vault of its files,")
    assert found.lines()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("x\n" * 5_000, "y\n" * 5_000, "too long to compare"),
        ("x" * 300_000, "y", "too long to compare"),
        ("a\0b", "text", "binary"),
        (b"\xff\xfe", "text", "binary"),
        ("a", "a\n", ""),
        ("a\r\nb\r\n", "a\nb\n", ""),
        ("", "new\n", ""),
    ],
)
def test_only_small_texts_are_compared_line_by_line(
    kd: killick.Client, tmp_path: Path, before: str | bytes, after: str, said: str
) -> None:
    place = tmp_path / "tree"
    place.mkdir()
    with killick.Workspace(place, vault=tmp_path / "vault") as workspace:
        sides: list[bytes] = []
        for content in (before, after):
            (place / "f").write_bytes(content if isinstance(content, bytes) else content.encode())
            root = workspace.capture().root
            sides.append(root)
        one, two = (workspace_files.FilesSide("r", 1, "now", root.hex()) for root in sides)
        [change] = workspace_files.compared(one, two, sides[0], sides[1], workspace.vault.load).changes
    assert (change.how, change.about.partition(",")[0]) == ("changed", said)
    assert bool(change.lines) == (not said)
    if said == "" and before:
        assert any(line[:1] == "-" for line in change.lines)


def test_limits_hold_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kd: killick.Client
) -> None:
    place = tmp_path / "tree"
    place.mkdir()
    monkeypatch.setattr(workspace_files, "LISTED_MAX", 5)
    monkeypatch.setattr(workspace_files, "DIFFED_MAX", 2)
    with killick.Workspace(place, vault=tmp_path / "vault") as workspace:
        empty = workspace.capture().root
        for number in range(8):
            (place / f"f{number}").write_text("text\n")
        full = workspace.capture().root
        one, two = (workspace_files.FilesSide("r", 1, "now", root.hex()) for root in (empty, full))
        found = workspace_files.compared(one, two, empty, full, workspace.vault.load)
    assert (len(found.changes), found.left_out, found.counts) == (5, 3, {"added": 8})
    assert [bool(change.lines) for change in found.changes] == [True, True, False, False, False]
    assert found.changes[-1].about == "5 B"


# what has to be whole, and what can go ------------------------------------------------------------


def test_every_snapshot_on_record_is_proved(kd: killick.Client, run: str) -> None:
    held = vaults.verify(kd.runtime.log, [run])
    assert held.holds
    assert (held.runs, held.snapshots) == (1, 3)
    [pack] = Path("killick.files/packs").iterdir()
    pack.write_bytes(bytes(byte ^ 0xFF for byte in pack.read_bytes()))
    held = vaults.verify(kd.runtime.log, [run])
    assert not held.holds
    assert all(each.startswith("snapshot ") for each in held.broken)
    shutil.rmtree("killick.files")
    [said] = vaults.verify(kd.runtime.log, [run]).broken
    assert "is not here" in said
    with pytest.raises((SnapshotBroken, WorkspaceRefused)):
        workspace_files.at(kd.runtime.log, run).listing()


def test_only_snapshots_of_runs_that_are_gone_leave_the_vault(kd: killick.Client, run: str) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(files_agent, id="second")
    Path("second.shop/own.bin").write_bytes(os.urandom(200_000))
    restored(kd.runtime.engine, "second", "2:before")
    places = vaults.of_runs(kd.runtime.log, ["second"])
    assert places == {Path("killick.files").resolve()}
    [would] = vaults.clean(kd.runtime.log, places, going=["second"], dry_run=True)
    [nothing] = vaults.clean(kd.runtime.log, places)
    assert (nothing.snapshots, nothing.bytes_freed) == (0, 0)
    kd.runtime.store.remove("second")
    [done] = vaults.clean(kd.runtime.log, places)
    assert done.snapshots == would.snapshots > 0
    assert done.bytes_freed == would.bytes_freed > 0
    assert vaults.verify(kd.runtime.log, [run]).holds


def test_the_vault_of_another_store_is_left_alone(kd: killick.Client, run: str) -> None:
    kd.close()
    shutil.copy("killick.db", "copy.db")
    with killick.open("copy.db") as copy, killick.open("killick.db") as original:
        assert copy.runtime.store.id == original.runtime.store.id
        assert vaults.of_runs(original.runtime.log, [run]) == {Path("killick.files").resolve()}
        assert vaults.of_runs(copy.runtime.log, [run]) == set()


@pytest.mark.parametrize("because", get_args(e.RestoredBecause))
def test_why_files_went_back_is_told_in_words(because: e.RestoredBecause) -> None:
    event = e.WorkspaceRestored(at=1, root=e.to_text(bytes(32)), because=because, step="3", by="ann")
    assert phrasing.workspace_text(event, {}).startswith("files went back to snapshot 000000000000 (")
