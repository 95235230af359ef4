"""The demo: an agent with nine steps, four tools and a flaky API is killed at step 6, and another process continues it.

Nothing is simulated: the API is a server, the agent's process is really killed, and the output is read from the record
or the server. A failed check ends the demo with exit code 1.
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
from killick.cli.demo.story import GOOD, Narrator
from killick.cli.exit_codes import CommandFailed, Exit
from killick.client.client import Client
from killick.client.client import open as open_client
from killick.permissions import make_folder, open_output

FOLDER: Final = "killick-demo"
RUN: Final = "launch_meeting"
KILLED_AT: Final = "6"
PHASE_SECONDS_MAX: Final = 30.0
LOOK_SECONDS: Final = 0.01

FILES: Final = {
    "meeting.py": Path(__file__).with_name("meeting.py.txt"),  # people's code, which no rule of this package binds
    "calendar_api.py": Path(calendar_api.__file__),
}
MARK: Final = "# made by `killick demo`, which makes it anew each time\n*\n"
SETTINGS: Final = '[tool.killick]\napp = "meeting"\nstore = "killick.db"\n'


@click.command("demo")
@click.argument("folder", default=FOLDER, type=click.Path(path_type=Path))
def demo_command(folder: Path) -> int:
    """Kill an agent at step 6, and resume it in another process.

    The agent and its store stay in FOLDER, killick-demo by default.
    """
    prepare(folder)
    narrator = Narrator(console(), RUN)
    with serving(folder) as address, open_client(str(folder / "killick.db")) as kd:
        narrator.heading("An agent with nine steps, four tools and a flaky API")
        narrator.row("", "the agent", f"{folder}/meeting.py")
        narrator.row("", "the API", f"calendar_api.py, a separate process at {address}")
        narrator.row("", "the log", "killick.db; the lines below are read from it")
        play(narrator, kd, folder, address)
        report = kd.store.verify()
        check(report.holds, "the record was to verify")
        narrator.row("✓", "the log", f"{report.events} events; every hash matches", style=GOOD)
    narrator.heading("Try next")
    for command in commands(folder):
        narrator.out.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
    return Exit.DONE


def prepare(folder: Path) -> None:
    """Writes the files of the demo anew. A folder that no demo made is refused, and so is a changed file in it."""
    files = {".gitignore": MARK, "pyproject.toml": SETTINGS} | {name: path.read_text() for name, path in FILES.items()}
    there = [folder / name for name in files if (folder / name).exists()]
    try:
        make_folder(folder)
        strange = [] if folder / ".gitignore" in there else [each.name for each in folder.iterdir()]
        strange += [each.name for each in there if each.read_text(errors="replace") != files[each.name]]
        if strange:
            raise CommandFailed(f"{folder}: {strange[0]} is not the demo's; name another: killick demo FOLDER")
        for old in folder.glob("killick.db*"):
            old.unlink()
        for name, text in files.items():
            with open_output(folder / name) as output:
                output.write(text.encode())
    except OSError as error:
        raise CommandFailed(f"{folder}: cannot be made ({error.strerror}); name another: killick demo FOLDER") from None


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


@contextlib.contextmanager
def serving(folder: Path) -> Generator[str]:
    """The flaky API in a process of its own; yields its address."""
    with started(folder, "calendar_api.py", "0", "--bound") as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        check(address.startswith("127.0.0.1:"), f"the API's server did not start; it said {address!r}")
        yield address


def calendar(address: str) -> Any:
    """The API's data and request counts, read over HTTP."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=PHASE_SECONDS_MAX)) as link:
        link.request("GET", "/calendar")
        return json.load(link.getresponse())


# the play -----------------------------------------------------------------------------------------


def play(narrator: Narrator, kd: Client, folder: Path, address: str) -> None:
    """Runs the agent, kills it at the worst moment, lets another process resume it, and counts."""
    with started(folder, "meeting.py", CALENDAR_API=address) as first:
        narrator.heading(f"Process {first.pid} runs the agent")
        follow(narrator, kd, first, lambda: bool(calendar(address)["invites"]))
        first.send_signal(signal.SIGKILL)
        said, _ = first.communicate(timeout=PHASE_SECONDS_MAX)
        check(first.returncode == -signal.SIGKILL, f"the first process ended by itself, and said: {said}")
    narrator.follow(kd)
    died_at, then = kd.state(RUN).position.step, calendar(address)
    check(died_at == KILLED_AT, f"it was to die at step {KILLED_AT}, and died at {died_at}")
    check([invite["to"] for invite in then["invites"]] == ["ann"], "ann was to have her invite by now")
    narrator.killed(first.pid, KILLED_AT)

    with started(folder, "meeting.py", CALENDAR_API=address) as second:
        narrator.heading(f"Process {second.pid} resumes the run")
        narrator.row("1-5", "replayed", "recorded steps return their outcomes: no tool and no model is called again")
        follow(narrator, kd, second, lambda: False)
        said, _ = second.communicate(timeout=PHASE_SECONDS_MAX)
        check(second.returncode == 0, f"the second process was to end well, and said: {said}")
    narrator.follow(kd)

    now = calendar(address)
    sent, asked = [invite["to"] for invite in now["invites"]], now["asked"]
    check(sorted(sent) == calendar_api.PEOPLE, "one invite for each was to be out")
    check(len(now["rooms"]) == 1 < asked["POST /rooms"], "one room was to be booked, by more than one request")
    again = [name for name in ("GET /people", "GET /slots", "POST /rooms") if asked[name] != then["asked"][name]]
    check(not again, f"steps on record were done again: {', '.join(again)}")
    narrator.heading("What the API received")
    each = ", ".join(f"{person} {sent.count(person)}" for person in sent)
    narrator.row("✓", "invites", f"{each}: one each", style=GOOD)
    narrator.row("✓", "rooms", f"1, asked for {asked['POST /rooms']} times under one key", style=GOOD)


def follow(narrator: Narrator, kd: Client, process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    """Prints new events while a process works, until a condition holds or the process has ended."""
    late = kd.runtime.clock.monotonic() + PHASE_SECONDS_MAX
    while process.poll() is None and not until():
        narrator.follow(kd)
        check(kd.runtime.clock.monotonic() < late, f"nothing happened for {PHASE_SECONDS_MAX:.0f} seconds")
        time.sleep(LOOK_SECONDS)


def commands(folder: Path) -> list[str]:
    """The next commands to try, ready to paste."""
    return [
        *([f'export PATH="{Path(sys.executable).parent}:$PATH"'] if shutil.which("killick") is None else []),
        *(["unset KILLICK_STORE"] if os.environ.get("KILLICK_STORE") else []),
        f"cd {shlex.quote(str(folder))}",
        f"killick show {RUN}",
        f"killick show {RUN} --why {KILLED_AT}",
        f"killick time diff {RUN} {KILLED_AT}:before {KILLED_AT}:after",
        "killick check meeting.py:arrange",
        *(["killick serve"] if find_spec("starlette") else []),
    ]
