"""The demo: an agent with nine steps, four tools and a flaky API is killed at step 6, and another process continues it.

Owns the folder, the processes and the order of events; `story` prints them. Nothing is simulated: the API
is a server, the agent's process is really killed, and the output is read from the record or the server. A failed check
ends the demo with exit code 1.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from killick.cli.context import console
from killick.cli.demo import calendar_api
from killick.cli.demo.story import Narrator
from killick.cli.exit_codes import CommandFailed, Exit
from killick.client.client import Client
from killick.client.client import open as open_client
from killick.history.diff import between
from killick.permissions import make_folder, open_output

FOLDER: Final = "killick-demo"
RUN: Final = "launch_meeting"
KILLED_AT: Final = "6"
PHASE_SECONDS_MAX: Final = 30.0
LOOK_SECONDS: Final = 0.01

HERE: Final = Path(__file__).parent
FILES: Final = {
    "meeting.py": HERE / "meeting.py.txt",  # people's code, which no rule of this package binds
    "calendar_api.py": Path(calendar_api.__file__),
}
MARK: Final = "# made by `killick demo`, which makes it anew each time\n"
SETTINGS: Final = '[tool.killick]\napp = "meeting"\nstore = "killick.db"\n'


@click.command("demo")
@click.argument("folder", default=FOLDER, type=click.Path(path_type=Path))
def demo_command(folder: Path) -> int:
    """Kill an agent at step 6, and resume it in another process.

    The agent and its store stay in FOLDER, killick-demo by default.
    """
    narrator = Narrator(console(), RUN)
    narrator.begins(folder, is_again=prepare(folder))
    with contextlib.ExitStack() as stack:
        api, address = stack.enter_context(serving(folder))
        kd = stack.enter_context(open_client(str(folder / "killick.db")))
        narrator.stage(folder, address)
        play(narrator, kd, folder, address)
        check(api.poll() is None, "the API's server went away")
        print_record(narrator, kd)
    narrator.next(commands(folder))
    return Exit.DONE


# the folder ---------------------------------------------------------------------------------------


def prepare(folder: Path) -> bool:
    """Make the folder anew, with the files of the demo; says whether an earlier one was there."""
    mark = folder / ".gitignore"
    is_again = mark.is_file() and mark.read_text(encoding="utf-8", errors="replace").startswith(MARK)
    try:
        make_folder(folder)
        if not is_again and any(folder.iterdir()):
            raise CommandFailed(
                f"{folder}: is there and not empty, and no demo made it; name another: killick demo FOLDER"
            )
        for old in folder.glob("killick.db*"):
            old.unlink()
        for name, source in FILES.items():
            _keep_changed(folder / name, source)
            _write(folder / name, source.read_bytes())
        _write(folder / "pyproject.toml", SETTINGS.encode())
        _write(mark, f"{MARK}*\n".encode())
    except OSError as error:
        raise CommandFailed(f"{folder}: cannot be made ({error.strerror}); name another: killick demo FOLDER") from None
    return is_again


def _write(file: Path, data: bytes) -> None:
    with open_output(file) as output:
        output.write(data)


def _keep_changed(file: Path, source: Path) -> None:
    """Files that a person changed in an earlier demo's folder are renamed, not lost."""
    if file.is_file() and file.read_bytes() != source.read_bytes():
        file.replace(file.with_suffix(".yours.py"))


# processes ----------------------------------------------------------------------------------------


def check(claim: bool, otherwise: str) -> None:
    """Raises unless the condition is true."""
    if not claim:
        raise CommandFailed(f"the demo failed: {otherwise}", Exit.BAD)


@contextlib.contextmanager
def started(folder: Path, file: str, *arguments: str, **env: str) -> Generator[subprocess.Popen[str]]:
    """A Python process in the folder; gone when this ends, however it ends."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    known = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} | env
    # A group of its own: an interrupt at the terminal reaches only this process, which ends its children.
    process = subprocess.Popen(
        [sys.executable, file, *arguments], cwd=folder, env=known, text=True, process_group=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """How a process ended, and the last thing it said."""
    said, _ = process.communicate(timeout=PHASE_SECONDS_MAX)
    return process.returncode, said.strip().rpartition("\n")[2]


@contextlib.contextmanager
def serving(folder: Path) -> Generator[tuple[subprocess.Popen[str], str]]:
    """The flaky API in a process of its own, and where it listens."""
    with started(folder, "calendar_api.py", "0", "--bound") as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        check(address.startswith("127.0.0.1:"), f"the API's server did not start; it said {address!r}")
        yield process, address


def calendar(address: str) -> Any:
    """The API's data and request counts, read over HTTP."""
    link = http.client.HTTPConnection(address, timeout=PHASE_SECONDS_MAX)
    try:
        link.request("GET", "/calendar")
        return json.load(link.getresponse())
    finally:
        link.close()


# the play -----------------------------------------------------------------------------------------


def play(narrator: Narrator, kd: Client, folder: Path, address: str) -> None:
    """Run the agent, kill it at the worst moment, let another process resume it, and count."""
    with started(folder, "meeting.py", CALENDAR_API=address) as first:
        narrator.runs(first.pid)
        follow(narrator, kd, first, lambda: bool(calendar(address)["invites"]))
        first.send_signal(signal.SIGKILL)
        code, said = ended(first)
        check(code == -signal.SIGKILL, f"the first process was to be killed, and ended by itself: {said}")
    narrator.follow(kd)
    state, then = kd.state(RUN), calendar(address)
    check(state.position.step == KILLED_AT, f"it was to die at step {KILLED_AT}, and died at {state.position.step}")
    check(len(kd.runtime.log.ledger(RUN).in_doubt()) == 1, "one effect was to be in doubt")
    check([invite["to"] for invite in then["invites"]] == ["ann"], "ann was to have her invite by now")
    narrator.killed(first.pid, KILLED_AT)

    with started(folder, "meeting.py", CALENDAR_API=address) as second:
        narrator.resumed(second.pid)
        follow(narrator, kd, second, lambda: False)
        code, said = ended(second)
        check(code == 0, f"the second process was to end well, and said: {said}")
    narrator.follow(kd)
    check(kd.info(RUN).status == "completed", "the run was to be completed")

    now = calendar(address)
    check(sorted(invite["to"] for invite in now["invites"]) == calendar_api.PEOPLE, "one invite for each was to be out")
    check(len(now["rooms"]) == 1 < now["asked"]["POST /rooms"], "one room was to be booked, by more than one request")
    again = {name for name in ("GET /people", "GET /slots", "POST /rooms") if now["asked"][name] != then["asked"][name]}
    check(not again, f"steps on record were done again: {', '.join(sorted(again))}")
    narrator.counts(now)


def follow(narrator: Narrator, kd: Client, process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    """Prints new events while a process works, until a condition holds or the process has ended."""
    late = kd.runtime.clock.monotonic() + PHASE_SECONDS_MAX
    while process.poll() is None and not until():
        narrator.follow(kd)
        check(kd.runtime.clock.monotonic() < late, f"nothing happened for {PHASE_SECONDS_MAX:.0f} seconds")
        time.sleep(LOOK_SECONDS)


def print_record(narrator: Narrator, kd: Client) -> None:
    """Prints the record afterwards: before and after, reasons, counts, and its verification."""
    changed = between(kd.runtime.log, RUN, f"{KILLED_AT}:before", f"{KILLED_AT}:after")
    check(
        any(change.part == "effects" and change.op == "add" for change in changed.changes), "step 6 was to do something"
    )
    narrator.before_and_after(changed)
    narrator.reasons(kd)
    report = kd.verify()
    check(report.holds, "the record was to verify")
    narrator.verified(report)


def commands(folder: Path) -> list[tuple[str, str]]:
    """The next commands to try, ready to paste, each with its purpose."""
    tell: list[tuple[str, str]] = []
    if shutil.which("killick") is None:
        tell.append((f'export PATH="{Path(sys.executable).parent}:$PATH"', "where killick is"))
    if os.environ.get("KILLICK_STORE"):
        tell.append(("unset KILLICK_STORE", "it names another store"))
    return [
        *tell,
        (f"cd {shlex.quote(str(folder))}", ""),
        (f"killick show {RUN}", "what happened, step by step"),
        (f"killick show {RUN} --why {KILLED_AT}", "why step 6, and how it came out"),
        (f"killick time diff {RUN} {KILLED_AT}:before {KILLED_AT}:after", "what it knew before and after"),
        ("killick check meeting.py:arrange", "kill it everywhere else, too"),
        *([("killick serve", "all of it on a page")] if find_spec("starlette") else []),
    ]
