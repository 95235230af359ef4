"""What is ignored is what git ignores, on trees and rules that nobody thought of."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from killick.workspace.ignore import GITIGNORE, IGNORE_FILES, KILLICKIGNORE, Rules, Scope
from seeds import repeats

SEEDS: Final = random.Random(7).sample(range(1_000_000), repeats(20, 40))


def ignored(folder: Path, rules: Rules) -> set[bytes]:
    """Paths of a tree that are ignored, without those below an ignored folder."""

    def look(path: bytes, above: Scope | None) -> Iterator[bytes]:
        here = os.path.join(os.fsencode(folder), path)

        def read(name: bytes) -> bytes | None:
            try:
                return Path(os.fsdecode(os.path.join(here, name))).read_bytes()
            except OSError:
                return None

        scope = rules.scope(above, path, read)
        with os.scandir(here) as found:
            for entry in found:
                place = path + b"/" + entry.name if path else entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if scope.ignores(entry.name, is_folder=is_folder):
                    yield place
                elif is_folder:
                    yield from look(place, scope)

    return set(look(b"", None))


def ignored_by_git(folder: Path) -> set[bytes]:
    """The same, as git says it."""
    everything = [
        os.path.relpath(os.path.join(at, name), os.fsencode(folder))
        for at, folders, files in os.walk(os.fsencode(folder))
        for name in (*folders, *files)
        if b".git" not in os.path.relpath(os.path.join(at, name), os.fsencode(folder)).split(b"/")
    ]
    answer = subprocess.run(
        ["git", "-C", folder, "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "--stdin", "-z"],
        input=b"\0".join(everything), capture_output=True, check=False,
    )  # fmt: skip
    assert answer.returncode in (0, 1), answer.stderr
    told = set(filter(None, answer.stdout.split(b"\0")))
    return {path for path in told if not any(path.startswith(other + b"/") for other in told)}


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", "--template=", folder], check=True)
    return folder


NAMES: Final = (
    b"a", b"b", b"ab", b"abc", b"b.c", b"a.o", b"b.o", b"foo", b"foobar", b"bar", b"Foo", b".x", b"a b", b"a ", b"#a",
    b"!a", b"[a]", b"a\\b", b"a*b", b"\xff\xfe", b"\xc3\xa4", b"a\nb", b"x-y", b"x]y", b"7", b"build", b"**", b"a\tb",
)  # fmt: skip
PIECES: Final = (
    b"a", b"b", b"c", b"foo", b"bar", b"*", b"*", b"**", b"**/", b"/**", b"/**/", b"/", b"?", b"*.o", b".", b" ", b"\\",
    b"[ab]", b"[!a]", b"[^a-c]", b"[a-", b"[z-a]", b"[]a]", b"[[:alpha:]]", b"[[:digit:]x]", b"[[:nope:]]", b"[[:a]",
    b"[a\\]b]", b"[\\", b"\\*", b"\\ ", b"\\#", b"\\/", b"!", b"#", b"\xff", b"\xc3", b"-", b"]", b"[+--]", b"x", b"\t",
    b"[/]", b"[a-\\c]", b"[--0]", b"***", b"\n",
)  # fmt: skip


def pattern(chance: random.Random) -> bytes:
    if chance.random() < 0.4:
        made = b"/".join(chance.choices((*NAMES, b"*", b"**", b"*.o", b"?", b"a*", b"*b*"), k=chance.randint(1, 3)))
    else:
        made = b"".join(chance.choices(PIECES, k=chance.randint(1, 5)))
    before = chance.choice((b"", b"", b"", b"/", b"!", b"!", b"!/", b"#", b"\\"))
    return before + made + chance.choice((b"", b"", b"", b"/", b" ", b"  ", b"\\ ", b"\r", b"\\"))


def rules_text(chance: random.Random) -> bytes:
    begin = chance.choice((b"", b"", b"", b"\xef\xbb\xbf", b"\n", b"# said\n"))
    return (
        begin + b"\n".join(pattern(chance) for _ in range(chance.randint(1, 6))) + chance.choice((b"", b"\n", b"\r\n"))
    )


def grow(folder: bytes, chance: random.Random, depth: int) -> None:
    """A random tree with ignore files in some of its folders."""
    for name in chance.sample(NAMES, chance.randint(4, 9)):
        place = os.path.join(folder, name)
        if depth and chance.random() < 0.5:
            os.mkdir(place)
            grow(place, chance, depth - 1)
        elif chance.random() < 0.1:
            os.symlink(b".", place)
        else:
            Path(os.fsdecode(place)).touch()
    if chance.random() < 0.6:
        Path(os.fsdecode(folder), ".gitignore").write_bytes(rules_text(chance))


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_git_ignores_the_same_files(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(4):
        folder = repository(tmp_path / str(number))
        grow(os.fsencode(folder), chance, 3)
        ours = ignored(folder, Rules()) - {b".git"}
        agree(folder, ours, ignored_by_git(folder))


@pytest.mark.gate(3)
@pytest.mark.parametrize("seed", SEEDS[:10])
def test_a_killickignore_has_the_last_word_in_its_folder(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder, twin = tmp_path / "ours", repository(tmp_path / "twin")
    folder.mkdir()
    grow(os.fsencode(folder), random.Random(seed), 3)
    grow(os.fsencode(twin), random.Random(seed), 3)
    for at, _, files in os.walk(folder):
        more = rules_text(chance).removeprefix(b"\xef\xbb\xbf") if chance.random() < 0.5 else None
        if more is None:
            continue
        Path(at, ".killickignore").write_bytes(more)
        # Git knows one file for each folder: what comes later in it wins, as a .killickignore does.
        both = twin / Path(at).relative_to(folder) / ".gitignore"
        both.write_bytes((both.read_bytes() + b"\n" if ".gitignore" in files else b"") + more)
    names = set(IGNORE_FILES)
    ours = {path for path in ignored(folder, Rules()) if os.path.basename(path) not in names}
    agree(folder, ours, {path for path in ignored_by_git(twin) if os.path.basename(path) not in names})


def agree(folder: Path, ours: set[bytes], gits: set[bytes]) -> None:
    """Both are the same; otherwise the rules that bear on what differs are shown."""
    told = []
    for path in sorted(ours ^ gits):
        above = [folder, *(folder / os.fsdecode(path)).parents]
        said = {
            str(at.relative_to(folder)): [
                (at / name).read_bytes() for name in (".gitignore", ".killickignore") if (at / name).exists()
            ]
            for at in above
            if at.is_relative_to(folder)
        }
        told.append(
            f"{'only we' if path in ours else 'only git'} ignore {path!r}: { {k: v for k, v in said.items() if v} }"
        )
    assert not told, "\n".join(told[:5])


def scoped(text: bytes, *, name: bytes = GITIGNORE, exclude: Sequence[str] = ()) -> Scope:
    return Rules(exclude).scope(None, b"", {name: text}.get)


def nothing(name: bytes) -> None:
    return None


def test_what_is_given_wins_over_every_file() -> None:
    scope = scoped(b"!*.log\n*.txt\n", name=KILLICKIGNORE, exclude=["*.log", "!keep.txt", "# a remark"])
    assert scope.ignores(b"a.log", is_folder=False)
    assert scope.ignores(b"a.txt", is_folder=False)
    assert not scope.ignores(b"keep.txt", is_folder=False)


def test_a_pattern_with_a_slash_holds_only_at_its_place() -> None:
    rules = Rules(["/build", "docs/*.html"])
    root = rules.scope(None, b"", nothing)
    docs = rules.scope(root, b"docs", nothing)
    deeper = rules.scope(docs, b"docs/build", nothing)
    assert root.ignores(b"build", is_folder=True)
    assert not docs.ignores(b"build", is_folder=True)
    assert docs.ignores(b"a.html", is_folder=False)
    assert not deeper.ignores(b"a.html", is_folder=False)


def test_gitignore_files_are_not_read_where_nobody_wants_them() -> None:
    rules = Rules(gitignore=False)
    scope = rules.scope(None, b"", {GITIGNORE: b"*", KILLICKIGNORE: b"*.o"}.get)
    assert scope.ignores(b"a.o", is_folder=False)
    assert not scope.ignores(b"a.c", is_folder=False)


def test_a_gitignore_says_nothing_of_a_checkouts_own_records() -> None:
    rules = Rules()
    root = rules.scope(None, b"", {GITIGNORE: b"*\nlogs/\ntags\n", KILLICKIGNORE: b"*.pack\n"}.get)
    git = rules.scope(root, b".git", nothing)
    refs = rules.scope(git, b".git/refs", {GITIGNORE: b"*"}.get)
    assert root.ignores(b"a", is_folder=False)
    assert not root.ignores(b".git", is_folder=True)
    assert not git.ignores(b"logs", is_folder=True)
    assert not refs.ignores(b"tags", is_folder=True)
    assert refs.ignores(b"x.pack", is_folder=False), "a .killickignore does"
    assert scoped(b".git\n", name=KILLICKIGNORE).ignores(b".git", is_folder=True)


def test_a_name_that_is_no_text_is_judged_by_its_bytes() -> None:
    scope = Rules([os.fsdecode(b"\xff*")]).scope(None, b"", nothing)
    assert scope.ignores(b"\xff\xfe", is_folder=False)
    assert not scope.ignores(b"\xfe", is_folder=False)


@pytest.mark.parametrize("hostile", [b"*a" * 60 + b"*b", b"**/a/" * 60 + b"b", b"?*" * 80 + b"b", b"*" * 200 + b"/b"])
def test_no_pattern_takes_for_ever(hostile: bytes) -> None:
    rules = Rules()
    root = rules.scope(None, b"", {GITIGNORE: hostile}.get)
    deep = rules.scope(root, b"a/" * 120 + b"a", nothing)
    assert not any(scope.ignores(b"a" * 255, is_folder=False) for scope in (root, deep))


def test_fifty_thousand_names_are_judged() -> None:
    patterns = [f"*.{end}" for end in ("o", "pyc", "so", "a", "tmp", "log", "swp", "class", "egg-info", "cache")]
    patterns += ["build/", "dist/", "__pycache__/", ".venv/", "node_modules", ".DS_Store", "*~", ".#*", "core.[0-9]*"]
    patterns += ["/docs/_build/", "/target", "src/generated/*.c", "**/fixtures/*.bin", "tmp-?", "!keep.log", "!*.a"]
    patterns += ["test_*.out", "report-[0-9][0-9].html", "*.min.*", "*_pb2.py"]
    rules = Rules(patterns)
    root = rules.scope(None, b"", nothing)
    folders = [rules.scope(root, b"src/part%d" % number, nothing) for number in range(1_000)]
    ends = (b"py", b"txt", b"pyc", b"log", b"c")
    names = [b"some_module_%d.%s" % (number, ends[number % 5]) for number in range(50)]
    count = sum(scope.ignores(name, is_folder=False) for scope in folders for name in names)
    assert count == 20_000
