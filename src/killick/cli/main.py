"""The front of the command line: which commands there are, help on one screen, and one line for every error."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import zip_longest
from typing import Final

import click
from click.shell_completion import CompletionItem

from killick.cli.exit_codes import CommandFailed, Exit, code_of, drop_output
from killick.errors import KillickError

GROUPS: Final[dict[str, dict[str, str]]] = {
    "try": {
        "demo": "see a crash and a recovery",
        "check": "inject faults, find bugs",
    },
    "run": {
        "run": "run an agent here",
        "start": "create a run for a worker",
        "worker": "execute the due runs",
        "serve": "dashboard and HTTP API",
        "proxy": "record and page model calls",
        "trigger": "schedules and events",
    },
    "look": {
        "ps": "list runs",
        "show": "one run in detail",
        "diff": "compare places or runs",
        "find": "search all runs",
        "verify": "verify the record",
    },
    "people": {
        "inbox": "questions to people",
        "answer": "answer a question",
        "say": "send a text to a run's loop",
    },
    "act": {
        "pause": "stop at the next step",
        "resume": "continue runs",
        "cancel": "end runs",
        "send": "send a run a message",
        "set": "change a run's context",
        "override": "give a step its result",
        "skip": "skip a step",
        "retry": "retry without the backoff",
        "note": "add a note to the record",
        "prioritize": "set a priority",
    },
    "time": {
        "replay": "re-run code on its record",
        "fork": "branch off a new run",
        "rewind": "return to an earlier step",
        "undo": "undo one effect",
        "restore": "restore a run's files",
        "export": "write a run to a file",
    },
    "keep": {
        "contract": "check, show, rejudge",
        "store": "doctor, prune, repair",
        "token": "access to the server",
        "completion": "for your shell",
    },
}
"""Every command with its one line, by what people want. Each one's module is imported when it is called."""

MODULES: Final = {
    name: module
    for module, names in {
        "killick.cli.demo": "demo",
        "killick.cli.commands.check": "check",
        "killick.cli.commands.run": "run start",
        "killick.cli.commands.worker": "worker",
        "killick.cli.commands.serve": "serve",
        "killick.cli.commands.proxy": "proxy",
        "killick.cli.commands.trigger": "trigger",
        "killick.cli.commands.ps": "ps",
        "killick.cli.commands.show": "show",
        "killick.cli.commands.diff": "diff",
        "killick.cli.commands.find": "find",
        "killick.cli.commands.inbox": "inbox answer say",
        "killick.cli.commands.control": "pause resume cancel send",
        "killick.cli.commands.overrides": "set override skip retry note prioritize",
        "killick.cli.commands.time_travel": "fork rewind undo",
        "killick.cli.commands.files": "restore",
        "killick.cli.commands.replay": "replay",
        "killick.cli.commands.export": "export",
        "killick.cli.commands.store.verify": "verify store",
        "killick.cli.commands.contract": "contract",
        "killick.cli.commands.token": "token",
        "killick.cli.completion": "completion",
    }.items()
    for name in names.split()
}
"""Where each command lives: as the object `NAME_command` of its module."""

COMPLETING: Final = "_KILLICK_COMPLETE"
"""The variable by which a shell asks for completions."""

VARIABLES: Final = {
    "KILLICK_STORE": "the store, where `--store` names none",
    "KILLICK_SEAL_KEY": "the private key that `killick store seal` signs with, where `--key` names none",
    "KILLICK_DEBUG": "anything: errors come with their traceback",
    "NO_COLOR": "anything: no colours",
    "COLUMNS": "how wide lines may be where output goes to a file or a pipe",
}
"""What the command line reads from its environment."""


class Killick(click.Group):
    """The commands in their groups; imports none of them for its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for group in GROUPS.values() for name in group]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = MODULES.get(cmd_name)
        if module is None:
            return None
        found: click.Command = getattr(importlib.import_module(module), f"{cmd_name}_command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in MODULES and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise CommandFailed(
                f"{args[0]}: no such command; {_nearest(args[0], MODULES, '`killick --help` lists them')}"
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        commands = [pair for group in GROUPS.values() for pair in group.items()]
        return [CompletionItem(name, help=line) for name, line in commands if name.startswith(incomplete)]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write = formatter.write
        title = click.style("Killick: the state layer for LLM agents.", bold=True)
        write(f"{title}  killick COMMAND --help says more.\n\n")
        for group, commands in GROUPS.items():
            told = [f"{click.style(f'{name:<8}', fg='cyan')} {line:<28}" for name, line in commands.items()]
            for number, pair in enumerate(zip_longest(told[::2], told[1::2], fillvalue="")):
                named = click.style(f"{group if number == 0 else '':<8}", dim=True)
                write(f"{named}{''.join(pair).rstrip()}\n")
        write(f"\n{click.style('--store URL or KILLICK_STORE names the store, --json prints data.', dim=True)}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


@click.group(cls=Killick, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="killick", prog_name="killick", message="%(prog)s %(version)s")
def killick() -> None:
    """The state layer for LLM agents."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; an error is one line on stderr."""
    if asked := os.environ.get(COMPLETING):
        return _complete(asked)
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # one text that UTF-8 cannot hold stops no command
    try:
        return _invoke(args)
    except BrokenPipeError:
        # Whoever read us has gone, as `head` does; there is nobody to tell.
        drop_output()
        return int(Exit.DONE)
    except (KeyboardInterrupt, click.Abort):
        return _tell("interrupted", Exit.INTERRUPTED)
    except CommandFailed as told:
        return _tell(str(told), told.code)
    except click.exceptions.Exit as left:
        return left.exit_code
    except click.ClickException as wrong:
        return _tell(_usage(wrong), Exit.MISTYPED)
    except KillickError as error:
        return _tell(str(error), code_of(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output()
            return _tell("the output cannot be written: no space is left there; write it to another place", Exit.BAD)
        return _tell(
            f"this is a bug in Killick ({type(error).__name__}: {error}); KILLICK_DEBUG=1 shows where", Exit.BUG
        )


def _invoke(args: list[str]) -> int:
    # Not by click's own main, which ends the process its own way when a pipe breaks or somebody interrupts.
    color = False if os.environ.get("NO_COLOR") else None
    with killick.make_context("killick", args, color=color) as context:
        code = killick.invoke(context)
    sys.stdout.flush()
    return int(code or 0)


def _complete(asked: str) -> int:
    """Answer a shell that completes. It has nowhere to put an error, so there is none."""
    from killick.cli.completion import completions

    with contextlib.suppress(Exception, SystemExit, click.Abort):
        completions(killick, asked)
        sys.stdout.flush()
    return int(Exit.DONE)


def _usage(wrong: click.ClickException) -> str:
    """What click found wrong, in one line with the next move."""
    context: click.Context = getattr(wrong, "ctx", None) or click.Context(killick, info_name="killick")
    where, group = context.command_path, context.command
    see = f"see {where} --help"
    if isinstance(wrong, click.NoSuchOption):
        if where == "killick":
            return f"{wrong.option_name}: no such option here; options come after the command, killick COMMAND --help"
        known = [name for parameter in group.params for name in parameter.opts]
        return f"{wrong.option_name}: {where} has no such option; {_nearest(wrong.option_name, known, see)}"
    if isinstance(wrong, click.MissingParameter) and wrong.param is not None:
        return f"{where.removeprefix('killick ')}: needs {wrong.param.make_metavar(context)}; {see}"
    if isinstance(wrong, click.BadParameter) and wrong.param is not None:
        return f"{_name_of(wrong.param)}: {_said(wrong.message)}; {see}"
    if isinstance(group, click.Group) and (name := getattr(wrong, "command_name", "")):
        return f"{name}: {where} has no such command; {_nearest(name, group.list_commands(context), see)}"
    return f"{_said(wrong.format_message())}; {see}"


def _name_of(parameter: click.Parameter) -> str:
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name.upper()


def _said(message: str) -> str:
    line = " ".join(message.split()).rstrip(".")
    return f"{line[:1].lower()}{line[1:]}"


def _nearest(word: str, known: Sequence[str] | dict[str, str], otherwise: str) -> str:
    close = get_close_matches(word, known, 1, 0.5)
    return f"did you mean {close[0]}?" if close else otherwise


def _tell(line: str, code: Exit) -> int:
    if os.environ.get("KILLICK_DEBUG"):
        traceback.print_exc()
    from killick.sanitizer import visible

    # The terminal has written ^C, and the line is not to follow it.
    begin = "\n" if code is Exit.INTERRUPTED and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{begin}killick: {visible(' '.join(line.split()))}\n")
    return int(code)
