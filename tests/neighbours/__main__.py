"""Runs the tests of every neighbour, each in an environment of its own, and says what came of it.

`make test-neighbours` calls it; names as arguments choose some. With `--types`, as `make lint-neighbours` does, their
adapters are type-checked instead. With `--oldest`, frameworks have the oldest versions that their extras allow.

An environment is made anew when what it should hold changed. Three are at work at once, as there is a lot of waiting.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / ".neighbours"
AT_ONCE = 3
LONGEST = ("crewai", "langgraph", "mcp", "openapi_clients", "temporal")
"""They begin first, so that none of them runs alone in the end."""
Check = Callable[[str, Path], "subprocess.CompletedProcess[str]"]
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


class Outcome(NamedTuple):
    """What came of one neighbour."""

    name: str
    is_green: bool
    told: str
    seconds: float
    output: str


def main() -> int:
    known = sorted(each.parent.name for each in HERE.glob("*/requirements.txt"))
    checks = typed if "--types" in sys.argv[1:] else tested
    is_oldest = "--oldest" in sys.argv[1:]
    if is_oldest:
        known = sorted(set(known) & set(extras()))
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or known
    names.sort(key=lambda name: name not in LONGEST)
    if unknown := sorted(set(names) - set(known)):
        sys.stderr.write(f"{', '.join(unknown)}: no such neighbour; there are {', '.join(known)}\n")
        return 2
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = []
        for outcome in pool.map(partial(visit, checks, is_oldest), names):
            outcomes.append(outcome)
            sys.stdout.write(f"{outcome.name:18} {outcome.told}  ({outcome.seconds:.0f} s)\n")
            sys.stdout.flush()
    for outcome in outcomes:
        if not outcome.is_green:
            sys.stdout.write(f"\n== {outcome.name} ==\n{outcome.output[-12000:]}\n")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in outcomes:
        for number, what in COUNTED.findall(outcome.told):
            counts["failed" if what.startswith("error") else what] += int(number)
    broken = sum(not outcome.is_green for outcome in outcomes)
    counts["failed"] = max(counts["failed"], broken)
    sys.stdout.write(f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped\n")
    return 1 if broken else 0


def visit(checked: Check, is_oldest: bool, name: str) -> Outcome:
    began = time.monotonic()
    try:
        told = checked(name, environment(name, is_oldest))
    except subprocess.CalledProcessError as error:
        return Outcome(name, False, "could not be installed", time.monotonic() - began, str(error.output))
    closing = told.stdout.strip().splitlines()[-1] if told.stdout.strip() else "said nothing"
    return Outcome(name, told.returncode == 0, closing, time.monotonic() - began, told.stdout)


def tested(name: str, python: Path) -> subprocess.CompletedProcess[str]:
    return tried([str(python), "-m", "pytest", "-p", "no:cacheprovider", f"tests/neighbours/{name}"])


def typed(name: str, python: Path) -> subprocess.CompletedProcess[str]:
    """The types of an adapter, seen beside the package that it stands on."""
    parts = ROOT / "src" / "killick"
    named = (f"{name}.py", f"{name}/*.py", f"{name}_*.py", f"*/{name}.py")
    places = (f"*/{name}.py", *(f"adapters/{each}" for each in named), f"store/{name}*.py")
    others = {each.parent.name for each in HERE.glob("*/requirements.txt")} - {name}
    files = {each for place in places for each in parts.glob(place) if each.stem not in others}
    cache = ["--cache-dir", str(HOME / f"{name}.mypy_cache")]
    return tried([sys.executable, "-m", "mypy", *cache, "--python-executable", str(python), *map(str, sorted(files))])


def environment(name: str, is_oldest: bool = False) -> Path:
    """The interpreter of a neighbour's environment, which holds what it should."""
    place = HOME / (f"{name}.oldest" if is_oldest else name)
    python = place / "bin" / "python"
    wanted = (HERE / name / "requirements.txt").read_text()
    if is_oldest:
        wanted = lowered(wanted, extras()[name])
    mark = sha256(wanted.encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = place / "has"
    if stamp.exists() and stamp.read_text() == mark and python.exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    uv = [sys.executable, "-m", "uv", "--quiet"]
    tried([*uv, "venv", "--python", sys.executable, str(place)], check=True)
    (place / "wanted.txt").write_text(wanted)
    tried(
        [*uv, "pip", "install", "--python", str(python), "-e", str(ROOT), "-r", str(place / "wanted.txt")], check=True
    )
    stamp.write_text(mark)
    return python


def extras() -> dict[str, dict[str, str]]:
    """The oldest version of each package that the extras of the neighbours allow."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {
        extra.replace("-", "_"): {name: oldest for name, _, oldest in (each.partition(">=") for each in wanted)}
        for extra, wanted in declared.items()
    }


def lowered(wanted: str, oldest: dict[str, str]) -> str:
    """Requirements with the oldest versions of some packages; what else is pinned, except pytest, is as it fits."""
    lines = []
    for line in wanted.splitlines():
        name, pinned, _ = line.partition("==")
        free = line if name.startswith(("pytest", "#")) or not pinned else name
        lines.append(f"{name}=={oldest[name]}" if name in oldest else free)
    missing = [f"{name}=={version}" for name, version in oldest.items() if not any(x.startswith(name) for x in lines)]
    return "\n".join([*lines, *missing]) + "\n"


def tried(command: list[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    told = {name.replace("PIP_", "UV_"): os.environ[name] for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
            if name in os.environ}  # fmt: skip
    if "PIP_CERT" in os.environ:
        told["SSL_CERT_FILE"] = os.environ["PIP_CERT"]
    return subprocess.run(
        command, cwd=ROOT, env={**told, **os.environ}, check=check, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
