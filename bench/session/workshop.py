"""A copy of a real repository, and the tools that really read, search, change and try it. Decides nothing.

The outcome of a call is kept by the state of the tree and the call, so that what nothing has changed is not run twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
STDLIB_PARTS: Final = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "distutils", "email", "html", "http", "json",
    "logging", "multiprocessing", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip
TEXT: Final = frozenset({".py", ".md", ".html", ".css", ".js", ".sql", ".toml"})
LINES_MAX: Final = 50
"""How many matches a search shows."""

_ENVIRONMENT: Final = {
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}
_GIT: Final = ("git", "-c", "user.name=Coder", "-c", "user.email=coder@example.org", "-c", "gc.auto=0")


class Workshop:
    """The tree, and its tools: each takes its arguments by name and gives the text that a model would be given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = 0
        """How often the tree was changed: with a call it names the outcome."""
        self._known: dict[tuple[int, str], str] = {}
        self.files = sorted(
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.suffix in TEXT and path.is_file() and ".git" not in path.parts
        )

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Really run it, unless exactly this was run on the tree as it is now."""
        if tool == "edit_file":
            self.state += 1
            return self.edit_file(**arguments)
        key = self.state, f"{tool} {json.dumps(arguments, sort_keys=True)}"
        if key not in self._known:
            self._known[key] = getattr(self, tool)(**arguments)
        return self._known[key]

    def text(self, path: str) -> str:
        """A file as it is now."""
        return (self.root / path).read_text(encoding="utf-8", errors="replace")

    def read_file(self, path: str, start: int = 1, end: int = 100_000) -> str:
        """The lines with their numbers, as coding agents show them."""
        lines = self.text(path).splitlines()
        return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[start - 1 : end], start))

    def search(self, pattern: str, path: str = ".") -> str:
        """A real grep over the tree."""
        command = ("grep", "-rnE", "--include=*.py", "--include=*.md", "--exclude-dir=.git", "-e", pattern, path)
        found = sorted(self._run(command).splitlines())
        shown = "\n".join(line[:240] for line in found[:LINES_MAX])
        return f"{shown}\n… {len(found) - LINES_MAX} more" if len(found) > LINES_MAX else shown or "no match"

    def list_dir(self, path: str) -> str:
        """What a folder holds."""
        entries = sorted((self.root / path).iterdir())
        return "\n".join(
            f"{entry.name}/" if entry.is_dir() else f"{entry.name}  {entry.stat().st_size}"
            for entry in entries
            if entry.name not in {".git", "__pycache__"}
        )

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Really replace a text that stands there once, and show the place."""
        text = self.text(path)
        assert text.count(old) == 1, f"{path}: the text to replace stands there {text.count(old)} times"
        (self.root / path).write_text(text.replace(old, new), encoding="utf-8")
        first = text[: text.index(old)].count("\n") + 1
        shown = self.read_file(path, max(1, first - 3), first + new.count("\n") + 3)
        return f"The file {path} has been changed. The place now:\n{shown}"

    def run_tests(self, path: str) -> str:
        """Import the module in a fresh interpreter and run the tests in its documentation, really."""
        module = re.sub(r"(/__init__)?\.py$", "", path.removeprefix("src/")).replace("/", ".")
        told = f"import doctest, {module} as tried; print(doctest.testmod(tried, verbose=True))"
        return f"$ python -c '{told}'\n{self._run((sys.executable, '-c', told))}"

    def git_diff(self, path: str = ".") -> str:
        """What was changed since the start."""
        return self._run((*_GIT, "diff", "--", path)) or "no difference"

    def git_log(self, path: str = ".") -> str:
        """The last commits."""
        return self._run((*_GIT, "log", "--shortstat", "-5", "--", path))

    def commit(self, message: str) -> None:
        """What a person does when a task is done."""
        self._run((*_GIT, "commit", "-qam", message))
        self.state += 1

    def _run(self, command: tuple[str, ...]) -> str:
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": "src" if (self.root / "src").is_dir() else "."}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).replace(str(self.root), "/repo").rstrip()


def own(folder: Path) -> Workshop:
    """A copy of this project's own checkout."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout
    names = listed.split("\n") if listed else [str(path.relative_to(CHECKOUT)) for path in CHECKOUT.rglob("*.*")]
    return _copied(CHECKOUT, [name for name in names if Path(name).suffix in TEXT], folder)


def stdlib(folder: Path) -> Workshop:
    """A copy of the packages of Python's own library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [
        str(path.relative_to(library))
        for part in STDLIB_PARTS
        for path in sorted((library / part).rglob("*.py"))
        if not {"test", "tests", "__pycache__"} & set(path.parts)
    ]
    return _copied(library, names, folder)


def _copied(source: Path, names: list[str], folder: Path) -> Workshop:
    for name in names:
        if (source / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n", encoding="utf-8")
    made = Workshop(folder)
    for step in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "The state of things")):
        made._run((*_GIT, *step))
    return made
