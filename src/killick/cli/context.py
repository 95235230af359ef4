"""The context of every command: the store, the app, the consoles, and the parsing of values. Decides nothing."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json as jsonlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

import click
import msgspec

from killick.cli import apps
from killick.cli.exit_codes import CommandFailed, Exit, nearest
from killick.clock import SystemClock
from killick.encryption.store import decrypting
from killick.errors import AgentUnknown, RunUnknown, StoreBroken
from killick.ids import RandomIds
from killick.log.log import Log
from killick.model.retry import seconds
from killick.permissions import open_output, read_input, refuse_database
from killick.presenting.encoder import document
from killick.sanitizer import visible
from killick.store import open_store
from killick.store.protocol import Store, is_held
from killick.store.records import OWN_AGENTS, RunQuery

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from killick.client.client import Client
    from killick.definitions.agents import AnyAgent

DEFAULT_STORE: Final = "killick.db"
PIPE_COLUMNS: Final = 160
"""The line width where output is no terminal."""

AT_ONCE: Final = 1_000
"""How many lines are printed together."""


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where a command prints. Colour on a terminal unless NO_COLOR says otherwise; plain and wide in a pipe."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for each in super().render(renderable, options):
                # Rich's own control codes are marked as such; every other text is untrusted.
                yield each if each.control or not each.text else Segment(visible(each.text), each.style)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` handles a reader that closed the pipe

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() else int(columns) if columns.isdigit() and int(columns) else PIPE_COLUMNS
    return SafeConsole(stderr=stderr, quiet=quiet, width=width, highlight=False, soft_wrap=False, emoji=False)


HOSTED: Final = "call the same conversation from your program"


class Shell:
    """One invocation of the command line. A command that only reads uses its log; the client brings the engine."""

    clock: Final = SystemClock()
    ids: Final = RandomIds()

    def __init__(self, *, store: str | None = None, app: str | None = None, json: bool = False) -> None:
        self.json = json
        self._url = store
        self._app = app
        self._store: Store | None = None
        self._client: Client | None = None

    @cached_property
    def out(self) -> Console:
        """The console for results: stdout. Silent with --json, where `emit` prints the same as data."""
        return console(quiet=self.json)

    @cached_property
    def err(self) -> Console:
        """For remarks."""
        return console(stderr=True)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return apps.settings()

    @cached_property
    def url(self) -> str:
        """Where the store is: `--store`, KILLICK_STORE, `[tool.killick] store`, or killick.db here."""
        if self._url:
            return self._url
        named = self.settings.get("store")
        if named is None:
            return DEFAULT_STORE
        return named if ":" in named else str(self.settings["folder"] / named)

    @property
    def shown_url(self) -> str:
        """The URL to print, which never has a password."""
        return "URL" if urlsplit(self.url).password else self.url

    @cached_property
    def app(self) -> str | None:
        """The module that declares the agents: `--app` or `[tool.killick] app`."""
        named = self._app or self.settings.get("app")
        if named is None or self._app:
            return named
        folder: Path = self.settings["folder"]
        return str(folder / named) if named.endswith(".py") else named

    @property
    def importable_app(self) -> str | None:
        """The app, for a command that imports it: the folder of pyproject.toml, and its src, are on the path now. A
        command that only reads never gets there, so that no file of the folder stands in for a library."""
        if self.app is not None and not self._app and not self.app.endswith(".py"):
            folder: Path = self.settings["folder"]
            sys.path[:0] = [place for place in (str(folder), str(folder / "src")) if place not in sys.path]
        return self.app

    @property
    def place(self) -> str:
        """Where the open store is: a file as it was named, a server without a password."""
        return str(self._file or self.store.place)

    @property
    def store(self) -> Store:
        """The store, which must exist: a command that reads creates none."""
        if self._store is None:
            if self.url.startswith("memory:"):
                raise CommandFailed("memory: keeps nothing from one command to the next; --store names a file")
            if not self.exists:
                raise CommandFailed(
                    f"{self.url}: no store here; `killick demo` and `killick run` make one, --store names another"
                )
            self._store = self._opened(create=False)
        return self._store

    def open_read_only(self) -> None:
        """Opens a store on a full disk, where it cannot be opened: no process has it open, so none writes to it."""
        self._store = decrypting(open_store(self.url, create=False, read_only=True))

    @cached_property
    def log(self) -> Log:
        """The log over the store."""
        return self._client.runtime.log if self._client is not None else Log(self.store)

    @property
    def client(self) -> Client:
        """A client of the store."""
        if self._client is None:
            from killick.client.client import Client

            self._client = Client(self.store, url=None if self.url.startswith("memory:") else self.url)
        return self._client

    def creating(self) -> Client:
        """A client of the store, which is created if it does not exist."""
        if self._store is None:
            existed = self.exists
            self._store = self._opened(create=True)
            if not existed and self._file is not None:
                self.note(f"made a new store: {self._file}")
        return self.client

    @property
    def exists(self) -> bool:
        """Whether the store exists, as far as that is known without opening it. An empty file is no store."""
        if self._file is None:
            return not self.url.startswith("memory:")
        return self._file.exists() and self._file.stat().st_size > 0

    @property
    def _file(self) -> Path | None:
        path = self.url.removeprefix("sqlite:///")
        return None if "://" in path or path.startswith("memory:") else Path(path)

    def _opened(self, *, create: bool) -> Store:
        if self.url.startswith("memory:"):
            return decrypting(open_store(self.url))
        try:
            return decrypting(open_store(self.url, create=create))
        except StoreBroken:
            if self._file is not None and self._file.is_file() and read_input(self._file)[:6] != b"SQLite":
                raise CommandFailed(f"{self.url}: is a file, but no store; --store names another") from None
            raise

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        elif self._store is not None:
            self._store.close()

    # printing ---------------------------------------------------------------------------------

    def emit(self, data: Any) -> None:
        """Data for a program, with --json alone: one document, keys as they are documented."""
        if self.json:
            self.write(msgspec.json.format(msgspec.json.encode(document(data)), indent=2).decode())

    def emit_line(self, data: Any) -> None:
        """One line of many, with --json alone: JSON lines."""
        if self.json:
            self.write(msgspec.json.encode(document(data)).decode())
            sys.stdout.flush()

    def write(self, text: str) -> None:
        """A text as it is, with a newline, but for characters that a terminal obeys."""
        sys.stdout.write(visible(text) + "\n")

    def print(self, *lines: Text | str, err: bool = False) -> None:
        """Lines as they are: a longer one is not wrapped. Many together, since rich takes long to print one by one."""
        from rich.text import Text

        texts = [Text(line) if isinstance(line, str) else line for line in lines]
        for first in range(0, len(texts), AT_ONCE):
            (self.err if err else self.out).print(Text("\n").join(texts[first : first + AT_ONCE]), soft_wrap=True)

    def row(self, lead: Text | str, body: Text | str) -> None:
        """A label and its text, wrapped next to it; a label that is a string is dim."""
        from rich.text import Text

        from killick.cli.style import wrapped

        label = Text(lead, style="dim") if isinstance(lead, str) else lead
        self.print(*wrapped(label, Text(body) if isinstance(body, str) else body, self.out.width))

    def save(self, file: str | Path, data: bytes) -> None:
        """Write a file that the person named."""
        try:
            with open_output(file) as output:
                output.write(data)
        except OSError as error:
            raise CommandFailed(f"{file}: cannot be written ({error.strerror}); name another file") from None

    def is_held(self, run: str) -> bool:
        """Whether a process has the run leased."""
        head = self.store.head(run)
        return head is not None and is_held(self.store, head)

    def say(self, sign: str, *parts: str | tuple[str, str]) -> None:
        """A line with a sign before it, in the sign's colour."""
        from rich.text import Text

        style = {"✓": "bold green", "✗": "bold red", "?": "bold red", "~": "yellow"}.get(sign, "")
        self.print(Text.assemble((f"{sign} " if sign else "", style), *parts))

    def say_next(self, *words: str) -> None:
        """The command to type next."""
        self.say("", (f"    {self.typed(*words)}", "green"))

    def note(self, line: str) -> None:
        """A remark that is no data, on stderr, so that a pipe never carries it."""
        self.err.print(line, style="dim", soft_wrap=True, markup=False)

    def typed(self, *words: str) -> str:
        """A command line that reaches the same store."""
        named = ("--store", self.shown_url) if self._url and self._url != os.environ.get("KILLICK_STORE") else ()
        return shlex.join(("killick", *words, *named))

    def continue_command(self, run: str, agent: str | None = None) -> str:
        """The command that continues a run. Without a configured app it names the agent's app."""
        target: tuple[str, ...] = ()
        if agent and agent.startswith(OWN_AGENTS):
            return self.typed("worker")  # which serves triggers and hooks
        if agent and not self.app:
            target = ([*self.targets_of(agent), f"APP.py:{agent}"][0],)
        named = ("--app", self._app) if self._app else ()
        return self.typed("run", *target, "--id", run, *named)

    def worker_for(self, agent: str) -> str:
        """The command that starts a worker for an agent. Without a configured app it names the agent's app."""
        here = "" if self.app else [*self.targets_of(agent), "APP.py:"][0].rpartition(":")[0]
        return self.typed("worker", *filter(None, (self._app or here,)))

    def continues(self, run: str) -> str:
        """The command that continues a run, by its recorded agent; for a framework's run, the program that hosts it."""
        state = self.log.state(run)
        return HOSTED if state.fold.facts.hosted else self.continue_command(run, state.agent)

    def resumes(self, run: str, *, hosted: bool) -> str:
        """The command that resumes a run; for a framework's run, the program that hosts it."""
        return HOSTED if hosted else self.typed("resume", run)

    def next_move(self, run: str) -> str:
        """The command that continues a run whose wait was answered."""
        move = self.continues(run)
        return f"to continue: {move}" if move is HOSTED else f"to continue: {move}, or start a worker"

    # lookup -----------------------------------------------------------------------------------

    def agent(self, target: str) -> AnyAgent:
        """An agent by `app.py:agent`, `module:agent`, or its name in the app."""
        return apps.load_agent(target, self.importable_app)

    def agent_of(self, name: str) -> AnyAgent | None:
        """The code of a recorded agent: in the app, or in the one file here that declares it. None: not found."""
        from killick.definitions.agents import AGENTS

        self.load_app()
        with contextlib.suppress(AgentUnknown):
            return AGENTS.get(name)
        here = self.targets_of(name)
        return self.agent(here[0]) if len(here) == 1 else None

    @staticmethod
    def targets_of(agent: str) -> list[str]:
        """Where an agent is declared in files here, as `app.py:agent`."""
        return [each for each in apps.declared_here() if each.endswith(f":{agent}")]

    def load_app(self, target: str | None = None) -> None:
        """Import the app, the target or else the configured one, so that its agents are known."""
        if (module := target or self.importable_app) is not None:
            apps.load_module(module)

    def run(self, run: str) -> str:
        """A run's id that exists, or one line with the nearest one."""
        if self.store.head(run) is None:
            self.refuse_run(run)
        return run

    def refuse_run(self, run: str) -> NoReturn:
        """Say that there is no such run, and which one may have been meant."""
        hint = nearest(run, (row.run for row in self.store.runs(RunQuery(), limit=1_000)), "`killick ps` lists them")
        raise CommandFailed(f"{run}: no such run in {self.place}; {hint}") from RunUnknown(run)

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask at the terminal whether to proceed, unless --yes says so. Ends the command if not."""
        if not (yes or sys.stdin.isatty()):
            raise CommandFailed(f"{question} There is no terminal to confirm at; add --yes, or --dry-run to only look")
        if not (yes or click.confirm(visible(question), default=False, err=True)):
            raise CommandFailed("nothing done", Exit.BAD)

    def refuse_without(self, what: str, extra: str, *packages: str) -> None:
        """End the command if a package of an extra is not installed."""
        if missing := [name for name in packages if find_spec(name) is None]:
            raise CommandFailed(
                f"{what} needs its extra ({', '.join(missing)} missing); pip install '.[{extra}]' in a clone"
            )


# how people write values --------------------------------------------------------------------------


def current_user() -> str | None:
    """The user of this process, for the record; None where the system does not say."""
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return None


def text_of(text: str) -> str:
    """A text as people give it: itself, `@file`, `-` for stdin; `@@` begins a text with @."""
    if text == "-":
        return sys.stdin.read().removesuffix("\n")
    if text.startswith("@@"):
        return text[1:]
    if not text.startswith("@"):
        return text
    try:
        refuse_database(text[1:])
        found = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise CommandFailed(f"{text}: cannot be read ({why}); write @@ to begin a text with @") from None
    if text.endswith(".json") and isinstance(parsed(found), Unparsed):
        raise CommandFailed(f"{text}: is not JSON ({parsed(found).why}); correct the file")
    return found.removesuffix("\n")


class Unparsed(str):
    """A text that is not JSON, and why not."""

    why: str


def parsed(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return jsonlib.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        made = Unparsed(text)
        made.why = str(error)
        return made


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are words, not JSON."""
    raise ValueError(f"{name} is no JSON")


def value_of(text: str | None, named: str | None = None) -> Any:
    """A value as people write it: JSON where it is JSON, `@file` for a file of it, `-` for stdin, else plain text.

    A value that is `named` is no prose: where it begins as JSON it has to be JSON.
    """
    if text is None:
        return None
    found = parsed(text_of(text))
    if not isinstance(found, Unparsed):
        return found
    if named is not None and found[:1] in ("{", "[", '"'):
        hint = 'quote it for your shell, as \'{"status": "down"}\''
        raise CommandFailed(f"{named}: is not JSON ({found.why}); {hint}")
    return str(found)


def named(text: str) -> tuple[str, str]:
    """The two parts of `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CommandFailed(f"{text!r}: no name and value; write it as name=value")
    return name, value


def pair(text: str) -> tuple[str, Any]:
    """`name=value` as people write it."""
    name, value = named(text)
    return name, value_of(value, name)


# options and arguments -------------------------------------------------------------------------------

run_argument: Final = click.argument("run")
by_option: Final = click.option("--by", metavar="NAME", default=current_user, help="Your name.  [default: your login]")


def who_options(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Who acts and why, for the record: `because` and `by`."""
    return click.option("--because", metavar="TEXT", help="The reason, for the record.")(by_option(fn))


def span(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """The seconds of an option that takes a duration."""
    return seconds(text)


grace_option: Final = click.option("--grace", metavar="SPAN", default="30s", show_default=True, callback=span,
                                   help="How long an open step may run on after Ctrl-C.")  # fmt: skip
yes_option: Final = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
agent_option: Final = click.option("--agent", "-a", metavar="NAME", help="Only runs of this agent.")  # fmt: skip
tag_option: Final = click.option("--tag", metavar="TAG", help="Only runs with this tag.")
since_option: Final = click.option("--since", metavar="WHEN", help="Only runs that changed since: 2h, 3d, 2026-11-14.")
dry_run_option: Final = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")


def limit_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """How many lines a listing has at the most."""
    return click.option("--limit", "-n", type=click.IntRange(1), default=default, show_default=True, metavar="N",
                        help="The maximum to list.")  # fmt: skip


# declaring commands -------------------------------------------------------------------------------


def command(name: str, *, json: bool = True, app: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command: a function of a Shell and its own parameters, with --store and, where it prints data, --json.

    A required argument RUN names a run that exists. Returns an exit code, or None for 0.
    """

    def declare(fn: Callable[..., Any]) -> click.Command:
        own: list[click.Parameter] = getattr(fn, "__click_params__", [])
        has_run = any(isinstance(each, click.Argument) and each.name == "run" and each.required for each in own)

        @functools.wraps(fn)
        def invoked(store: str | None, json: bool = False, app: str | None = None, **parameters: Any) -> Any:
            shell = Shell(store=store, app=app, json=json)
            try:
                if has_run:
                    shell.run(parameters["run"])
                return fn(shell, **parameters)
            finally:
                shell.close()

        option = click.option("--store", metavar="URL", envvar="KILLICK_STORE", help="The store: a path or a URL.")
        wrapped: Any = option(invoked)
        if app:
            wrapped = click.option("--app", metavar="MODULE", help="The module that declares the agents.")(wrapped)
        if json:
            wrapped = click.option("--json", is_flag=True, help="Print data as JSON.")(wrapped)
        made = click.command(name, context_settings={"max_content_width": 100})(wrapped)
        # Common options come last in the help.
        made.params.sort(key=lambda parameter: parameter.name in ("json", "app", "store"))
        return made

    return declare
