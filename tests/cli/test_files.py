"""Files on the command line: `show --files`, `diff`, `fork`, `rewind`, `restore`, `verify`, `prune` and `doctor`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import killick
from claims import Called, call, on_terminal, plain_environment
from killick.log.writer import Entry
from killick.model import events as e
from killick.workspace.vault.vault import Vault
from leasing import leased_by

Capture = pytest.CaptureFixture[str]
APP: Final = r'''
"""An agent that mends what is in a folder."""

from pathlib import Path

import killick


@killick.tool(effect="workspace")
async def make(folder: Path = killick.WORKSPACE) -> str:
    (folder / "src").mkdir()
    (folder / "src" / "app.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "README.md").write_text("read me\n")
    (folder / "logo.png").write_bytes(bytes(range(256)))
    return "made"


@killick.tool(effect="workspace")
async def mend(folder: Path = killick.WORKSPACE) -> str:
    (folder / "src" / "app.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "README.md").unlink()
    (folder / "test.py").write_text("assert add(1, 2) == 3\n")
    return "mended"


@killick.agent(workspace="shop")
async def mender(run: killick.Run) -> str:
    await run.call(make)
    await run.call(mend)
    await run.ask("Good?")
    return "done"


@killick.agent
async def plain(run: killick.Run) -> str:
    return "done"


@killick.agent(workspace="{run}.many")
async def many(run: killick.Run) -> str:
    await run.call(fill)
    await run.call(touch)
    return "done"


@killick.tool(effect="workspace")
async def fill(folder: Path = killick.WORKSPACE) -> None:
    for number in range(120):
        (folder / f"part{number % 4}").mkdir(exist_ok=True)
        (folder / f"part{number % 4}" / f"{number:03}.txt").write_text(f"{number}\n")


@killick.tool(effect="workspace")
async def touch(folder: Path = killick.WORKSPACE) -> None:
    (folder / "part1" / "005.txt").write_text("".join(f"line {number}\n" for number in range(100)))
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Path:
    """A folder with a run, `fix`, that waits after it made and mended files in `shop`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("KILLICK_STORE", "KILLICK_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "180")
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "shop").mkdir()
    assert call(capsys, "run", "app.py:mender", "-q", "--id", "fix").code == 3
    return tmp_path


def did(capsys: Capture, *words: str, code: int = 0) -> str:
    found = call(capsys, *words)
    assert found.code == code, found
    return found.out if code in (0, 1, 3) and found.out else found.err


def documents(capsys: Capture, *words: str, code: int = 0) -> Any:
    return json.loads(did(capsys, *words, "--json", code=code))


def kept(text: str) -> str:
    """The snapshot that has what was there, by what a command says."""
    found = re.search(r"--snapshot ([0-9a-f]{12})", text)
    assert found is not None, text
    return found[1]


# show ---------------------------------------------------------------------------------------------


def test_files_are_listed_as_they_were_with_what_the_step_did(here: Path, capsys: Capture) -> None:
    told = did(capsys, "show", "fix", "--files", "--at", "2:after")
    assert re.search(r"^fix  files at 2:after @\d+$", told, re.MULTILINE)
    assert f"  folder   {here}/shop\n" in told
    assert re.search(r"^  snapshot [0-9a-f]{12}  3 files in 2 folders, 310 B$", told, re.MULTILINE)
    assert "  since    2:before: 1 added, 1 removed, 1 changed\n" in told
    rows = re.findall(r"^  ([ +~-]) ([dl-][rwx-]{9}) +(\d+ B)? .* (\S+)$", told, re.MULTILINE)
    assert [(sign, path) for sign, _, _, path in rows] == [
        ("-", "README.md"), (" ", "logo.png"), (" ", "src/"), ("~", "src/app.py"), ("+", "test.py"),
    ]  # fmt: skip
    assert told.endswith("more: killick show fix --files --at 2:after  PATH\n")
    listing = documents(capsys, "show", "fix", "--files", "--at", "2:after")
    assert (listing["at"], listing["files"], listing["changed"]["added"]) == ("2:after", 3, 1)


def test_a_path_is_the_content_of_a_file_or_that_folder(here: Path, capsys: Capture) -> None:
    assert did(capsys, "show", "fix", "--files", "src/app.py") == "def add(a, b):\n    return a + b\n"
    assert did(capsys, "show", "fix", "--files", "--at", "2:before", "README.md") == "read me\n"
    assert " src/app.py\n" in did(capsys, "show", "fix", "--files", "src")
    found = documents(capsys, "show", "fix", "--files", "src/app.py")
    assert (found["path"], found["kind"], found["size"]) == ("src/app.py", "file", 32)


@pytest.mark.slow
def test_what_is_binary_is_not_put_on_a_terminal(here: Path, capsys: Capture) -> None:
    words = [sys.executable, "-m", "killick", "show", "fix", "--files"]
    code, screen = on_terminal([*words, "logo.png"], cwd=here, env=plain_environment())
    assert code == 2
    assert "logo.png: is binary, 256 B, and for no terminal; killick show fix --files" in screen
    (here / "shop" / "evil.txt").write_text("a\x1b[2Jb\n")
    told = did(capsys, "time", "restore", "fix", "--at", "now")
    did(capsys, "time", "restore", "fix", "--snapshot", kept(told))
    code, screen = on_terminal([*words, "evil.txt"], cwd=here, env=plain_environment())
    assert (code, screen.strip()) == (0, "a\\x1b[2Jb")


def test_a_long_listing_is_cut_and_begins_with_what_changed(here: Path, capsys: Capture) -> None:
    did(capsys, "run", "app.py:many", "-q", "--id", "many")
    told = did(capsys, "show", "many", "--files", "--at", "2:after")
    rows = [line.split()[-1] for line in told.splitlines() if re.match(r"^  [ ~] [d-]r", line)]
    assert rows[:4] == ["part1/005.txt", "part0/", "part0/000.txt", "part0/004.txt"]
    assert (len(rows), "    and 76 more" in told) == (48, True)
    assert told.endswith("PATH  --all\n")
    assert len(did(capsys, "show", "many", "--files", "--all").splitlines()) > 120


def test_what_cannot_be_shown_is_told_in_one_line(here: Path, capsys: Capture) -> None:
    did(capsys, "run", "app.py:plain", "-q", "--id", "plain")
    for words, said in (
        (("show", "plain", "--files"), "killick: plain: has no workspace, so no files were recorded\n"),
        (("show", "fix", "src"), "killick: src: a PATH is for --files; killick show fix --files src\n"),
        (
            ("show", "fix", "--files", "x"),
            "killick: fix: there was no x at now; the folder had logo.png, src, test.py\n",
        ),
        (("show", "fix", "--files", "--at", "9"), "killick: fix: there is no step 9; it has step 1 to 3\n"),
        (("show", "fix", "--files", "--state"), "killick: --files and --state do not go together; choose one\n"),
        (("time", "restore", "plain", "--at", "now"), "killick: plain: has no workspace, so no files were recorded\n"),
        (("time", "restore", "fix"), "killick: name what to bring back: --at PLACE or --snapshot ID\n"),
        (("time", "diff", "plain", "start", "now", "--files"),
         "killick: plain: has no workspace, so no files were recorded\n"),
        (("time", "fork", "plain", "--workspace", "x"),
         "killick: plain: has no workspace; fork it without workspace=\n"),
    ):  # fmt: skip
        assert call(capsys, *words) == Called(2, "", said)


def test_a_run_tells_what_became_of_its_files(here: Path, capsys: Capture) -> None:
    told = did(capsys, "show", "fix")
    assert f"works in {here}/shop, whose files are kept in {here}/killick.files" in " ".join(told.split())
    assert re.search(r"files at the start: 0 files, 0 B \(snapshot [0-9a-f]{12}\)$", told, re.MULTILINE)
    assert re.search(r"files after step 1: \d changed \(snapshot [0-9a-f]{12}\)$", told, re.MULTILINE)
    assert re.search(r"files after step 2: 3 changed \(snapshot [0-9a-f]{12}\)$", told, re.MULTILINE)
    assert "--files" in told.splitlines()[-1]


def test_processes_that_were_alive_are_told(here: Path, capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        log = leased_by("test", kd.runtime.log, "fix", seconds=30)
        root = e.to_text(b"\x9f\x2c" + bytes(30))
        at = kd.runtime.clock.now_us()
        log.append(
            Entry(e.WorkspaceCaptured(at=at, after=log.seq, root=root, changed=3, processes=2)),
            Entry(e.WorkspaceCaptured(at=at, after=log.seq, root=root, changed=1, processes=1)),
        )
        kd.runtime.store.release("fix", epoch=log.epoch)
    told = did(capsys, "show", "fix")
    assert "files after step 3: 3 changed (snapshot 9f2c00000000); files only, 2 processes were alive\n" in told
    assert "1 changed (snapshot 9f2c00000000); files only, 1 process was alive\n" in told


# diff ---------------------------------------------------------------------------------------------


def test_a_diff_shows_files_with_their_lines(here: Path, capsys: Capture) -> None:
    told = did(capsys, "time", "diff", "fix", "2").partition("\nfiles  ")[2]
    assert re.match(r"[0-9a-f]{12} → [0-9a-f]{12}  1 added, 1 removed, 1 changed\n", told)
    assert told.partition("\n")[2] == (
        "  - README.md -1\n      -read me\n"
        "  ~ src/app.py +1 -1\n      @@ -1,2 +1,2 @@\n       def add(a, b):\n"
        "      -    return a - b\n      +    return a + b\n"
        "  + test.py +1\n      +assert add(1, 2) == 3\n"
    )
    assert "files" not in did(capsys, "time", "diff", "fix", "3")


def test_files_alone_are_told_whole_and_as_data(here: Path, capsys: Capture) -> None:
    did(capsys, "run", "app.py:many", "-q", "--id", "many")
    short, whole = did(capsys, "time", "diff", "many", "2"), did(capsys, "time", "diff", "many", "2", "--files")
    assert "… 62 more lines; --files prints them" in short
    assert "line 99" in whole
    assert "line 99" not in short
    found = documents(capsys, "time", "diff", "many", "2", "--files")
    [change] = found["changes"]
    assert (change["path"], change["plus"], change["minus"]) == ("part1/005.txt", 100, 1)
    assert did(capsys, "time", "diff", "fix", "3", "--files").endswith("\nNo file differs.\n")
    assert isinstance(documents(capsys, "time", "diff", "fix", "2"), list)


def test_two_runs_are_compared_in_their_files(here: Path, capsys: Capture) -> None:
    did(capsys, "time", "fork", "fix", "--at", "1:after", "--id", "other")
    told = did(capsys, "time", "diff", "fix", "other")
    assert "  + README.md +1\n" in told
    assert "  - test.py -1\n" in told
    assert documents(capsys, "time", "diff", "fix", "other")["files"]["counts"] == {
        "added": 1,
        "changed": 1,
        "removed": 1,
    }
    shutil.move("killick.files", "away")
    assert "files are not compared: fix: the vault of its files" in did(capsys, "time", "diff", "fix", "2")


# fork and rewind ----------------------------------------------------------------------------------


def test_a_fork_has_a_folder_of_its_own(here: Path, capsys: Capture) -> None:
    told = did(capsys, "time", "fork", "fix", "--at", "1:after", "--id", "other")
    assert re.search(rf"^  files       in {here}/shop-other, a copy of snapshot [0-9a-f]{{12}}$", told, re.MULTILINE)
    assert (here / "shop-other" / "README.md").read_text() == "read me\n"
    assert not (here / "shop" / "README.md").exists()
    made = documents(capsys, "time", "fork", "fix", "--at", "1:after", "--id", "third", "--workspace", "third")
    assert made["workspace"] == str(here / "third")
    assert "files in " in did(capsys, "show", "third")
    assert call(capsys, "time", "fork", "fix", "--workspace", "shop").code == 2


def test_a_rewind_says_that_files_go_back_and_what_was_kept(here: Path, capsys: Capture) -> None:
    (here / "shop" / "mine.txt").write_text("by hand")
    told = did(capsys, "time", "rewind", "fix", "--to", "2:before", "--dry-run")
    assert re.search(r"^  files       return to snapshot [0-9a-f]{12}: 1 added, 1 removed, 1 changed$", told,
                     re.MULTILINE)  # fmt: skip
    assert "the current files are kept first" in told
    assert "stays done" not in told
    assert (here / "shop" / "test.py").exists()
    told = did(capsys, "time", "rewind", "fix", "--to", "2:before")
    found = re.search(r"what was there is snapshot ([0-9a-f]{12})", told)
    assert found is not None
    assert not (here / "shop" / "mine.txt").exists()
    assert (here / "shop" / "README.md").exists()
    assert re.search(r"files went back to snapshot \w{12} \(the run was taken back\)", did(capsys, "show", "fix"))
    did(capsys, "time", "restore", "fix", "--snapshot", found[1], "mine.txt")
    assert (here / "shop" / "mine.txt").read_text() == "by hand"
    assert (here / "shop" / "README.md").exists()


# restore ------------------------------------------------------------------------------------------


def test_files_go_back_and_what_was_there_is_kept(here: Path, capsys: Capture) -> None:
    (here / "shop" / "mine.txt").write_text("by hand")
    told = did(capsys, "time", "restore", "fix", "--at", "2:before", "--dry-run")
    assert re.search(r"^fix  files would go back to 2:before  [0-9a-f]{12}$", told, re.MULTILINE)
    assert (here / "shop" / "mine.txt").exists()
    told = did(capsys, "time", "restore", "fix", "--at", "2:before")
    assert re.search(r"^fix  files went back to 2:before  [0-9a-f]{12}$", told, re.MULTILINE)
    assert f"  in       {here}/shop\n" in told
    assert re.search(r"^  done     \d written, 2 removed$", told, re.MULTILINE)
    assert "  run      stays where it is, waiting\n" in told
    assert sorted(each.name for each in (here / "shop").iterdir()) == ["README.md", "logo.png", "src"]
    back = did(capsys, "time", "restore", "fix", "--snapshot", kept(told))
    assert (here / "shop" / "mine.txt").read_text() == "by hand"
    assert not (here / "shop" / "README.md").exists()
    assert kept(back) != kept(told)
    with killick.open("killick.db") as kd:
        assert kd.info("fix").status == "waiting"
        events = [event for _, event, _ in kd.events("fix") if isinstance(event, e.WorkspaceRestored)]
    assert [event.because for event in events] == ["asked", "asked"]
    assert "(asked for by " in did(capsys, "show", "fix")


def test_files_at_now_are_those_that_were_brought_back(here: Path, capsys: Capture) -> None:
    did(capsys, "time", "restore", "fix", "--at", "2:before", "README.md")
    listing = documents(capsys, "show", "fix", "--files")
    assert "README.md" in {each["path"] for each in listing["entries"]}
    assert "test.py" in {each["path"] for each in listing["entries"]}
    assert documents(capsys, "show", "fix", "--files", "--at", "2:after")["files"] == 3


def test_only_the_paths_that_are_named_go_back(here: Path, capsys: Capture) -> None:
    told = did(capsys, "time", "restore", "fix", "--at", "2:before", "src", "test.py")
    assert told.startswith("fix  2 paths went back to 2:before")
    assert "a - b" in (here / "shop" / "src" / "app.py").read_text()
    assert sorted(each.name for each in (here / "shop").iterdir()) == ["logo.png", "src"]
    err = did(capsys, "time", "restore", "fix", "--at", "2:before", "nothing", code=2)
    assert err.startswith("killick: fix: there was no nothing at 2:before; the folder had")


def test_another_folder_is_written_and_the_runs_own_left_alone(here: Path, capsys: Capture) -> None:
    found = documents(capsys, "time", "restore", "fix", "--at", "2:before", "--to", "look")
    assert (found["folder"], found["before"], found["elsewhere"]) == (str(here / "look"), None, True)
    assert (here / "look" / "README.md").read_text() == "read me\n"
    assert (here / "shop" / "test.py").exists()
    err = did(capsys, "time", "restore", "fix", "--at", "2:before", "--to", "look", code=2)
    assert "exists and is not empty" in err
    err = did(capsys, "time", "restore", "fix", "--at", "2:before", "--to", "shop/look", code=2)
    assert "is inside the run's own folder" in err
    did(capsys, "time", "restore", "fix", "--at", "2:before", "src/app.py", "--to", "one")
    assert [each.relative_to("one").as_posix() for each in Path("one").rglob("*.*")] == ["src/app.py"]


def test_a_folder_that_somebody_works_in_is_not_touched(here: Path, capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        log = leased_by(kd.runtime.engine.holder, kd.runtime.log, "fix", seconds=30)
        err = did(capsys, "time", "restore", "fix", "--at", "2:before", code=4)
        assert err.startswith("killick: fix: ")
        assert not (here / "shop" / "README.md").exists()
        did(capsys, "time", "restore", "fix", "--at", "2:before", "--to", "look")
        assert (here / "look" / "README.md").exists()
        kd.runtime.store.release("fix", epoch=log.epoch)
    did(capsys, "time", "restore", "fix", "--at", "2:before")


def test_what_rules_leave_alone_is_left_alone(here: Path, capsys: Capture) -> None:
    (here / "shop" / ".gitignore").write_text("cache/\n")
    (here / "shop" / "cache").mkdir()
    (here / "shop" / "cache" / "big").write_text("mine")
    did(capsys, "time", "restore", "fix", "--at", "2:before")
    assert (here / "shop" / "cache" / "big").read_text() == "mine"
    assert not (here / "shop" / ".gitignore").exists()


def test_where_there_is_nothing_to_do_nothing_is_recorded(here: Path, capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        before = kd.runtime.log.head("fix").seq
    told = did(capsys, "time", "restore", "fix", "--at", "now")
    assert "  done     nothing: the files are the same\n" in told
    assert "--snapshot" not in told
    with killick.open("killick.db") as kd:
        assert kd.runtime.log.head("fix").seq == before


# looking after them -------------------------------------------------------------------------------


def test_verify_proves_files(here: Path, capsys: Capture) -> None:
    told = did(capsys, "store", "verify", "fix", "--files")
    assert told.endswith(f"✓ their files are whole: 3 snapshots of 1 run in {here}/killick.files\n")
    assert documents(capsys, "store", "verify", "--files")["files"]["snapshots"] == 3
    [pack] = (here / "killick.files" / "packs").iterdir()
    pack.write_bytes(bytes(byte ^ 0xFF for byte in pack.read_bytes()))
    assert did(capsys, "store", "verify", "fix").startswith("✓ the record is intact")
    err = did(capsys, "time", "restore", "fix", "--at", "1:after", "--to", "look", code=1)
    assert re.match(r"killick: [0-9a-f]{64}: is damaged in the vault", err)
    assert "is not cleaned: " in did(capsys, "store", "prune", "--older", "0s", "--yes", code=1)
    told = did(capsys, "store", "verify", "fix", "--files", code=1)
    assert re.search(r"^✗ snapshot [0-9a-f]{12}", told, re.MULTILINE)
    assert told.endswith("of 3 snapshots of 1 run not all files are whole\n")
    (here / "killick.files" / "index.db").write_bytes(b"no index" * 100)
    assert "files are not compared: " in did(capsys, "time", "diff", "fix", "2")
    did(capsys, "store", "verify", "--files", code=1)
    did(capsys, "store", "doctor", code=1)
    assert call(capsys, "show", "fix", "--files").code in (1, 2)


def test_pruned_runs_leave_the_vault_too(here: Path, capsys: Capture) -> None:
    did(capsys, "run", "app.py:many", "-q", "--id", "many")
    told = did(capsys, "store", "prune", "--older", "0s", "--dry-run")
    said = re.search(
        r"^(\d) snapshots of files, ([\d.]+ k?B), would be deleted from \S+/killick\.files$", told, re.MULTILINE
    )
    assert said is not None
    with_them = Vault(here / "killick.files")
    assert with_them.references()
    told = did(capsys, "store", "prune", "--older", "0s", "--yes")
    assert f"✓ {said[1]} snapshots of files, {said[2]}, deleted from {here}/killick.files\n" in told
    assert {each.owner.rpartition("/")[2] for each in with_them.references()} == {"fix"}
    with_them.close()
    did(capsys, "store", "verify", "--files")
    did(capsys, "time", "restore", "fix", "--at", "2:before")


def test_the_doctor_looks_at_the_vault(here: Path, capsys: Capture) -> None:
    told = did(capsys, "store", "doctor")
    assert re.search(rf"^✓ files +{here}/killick\.files, 3 snapshots, [\d.]+ kB", told, re.MULTILINE)
    vault = Vault(here / "killick.files")
    vault.begin_restoring("/srv/shop", bytes(32), None, None)
    told = " ".join(did(capsys, "store", "doctor", code=1).split())
    assert "a restore of /srv/shop was interrupted; the next operation there finishes it" in told
    vault.end_restoring("/srv/shop")
    vault.close()
    shutil.move("killick.files", "away")
    told = " ".join(did(capsys, "store", "doctor", code=1).split())
    assert "killick.files is not here, and runs have their files there; bring it back" in told
