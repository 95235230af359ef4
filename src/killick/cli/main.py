"""The front of the command line: which commands there are, help on one screen, and one line for every error."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem, shell_complete

from killick.cli.exit_codes import CommandFailed, Exit, code_of, drop_output, nearest
from killick.errors import KillickError
from killick.version import VERSION

COMMANDS: Final[dict[str, str]] = {
    "run": "run an agent here",
    "ps": "list runs",
    "start": "create a run for a worker",
    "show": "one run in detail",
    "worker": "execute the due runs",
    "serve": "dashboard and HTTP API",
    "inbox": "questions to people",
    "check": "inject faults, find bugs",
    "answer": "answer a question",
    "demo": "see a crash and a recovery",
    "pause": "stop at the next step",
    "resume": "continue runs",
    "cancel": "end runs",
    "mcp": "let models read runs",
}
"""The commands that are typed as one word, each with its line; in the help, two to a line."""

GROUPS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "find": ("Look across all runs and time.", {
        "answers": "people's answers and comments", "calls": "tool calls and outcomes",
        "decisions": "choices and their reasons", "effects": "in force, undone or in doubt", "failures": "by error",
    }),
    "edit": ("Intervene in a run.", {
        "set": "change a run's context", "override": "give a step its result", "skip": "skip a step",
        "retry": "retry without the backoff", "note": "add a note to the record", "priority": "set a priority",
    }),
    "message": ("Send something to a run.", {
        "say": "send a text to a run's loop", "send": "send a run a message that it waits for",
    }),
    "time": ("Return to a place in a run's history, or compare two.", {
        "diff": "compare places or runs", "fork": "branch off a new run", "replay": "re-run code on its record",
        "restore": "restore a run's files", "rewind": "return to an earlier step", "undo": "undo one effect",
    }),
    "trigger": ("Schedules, conditions and events that start runs. Lists them without a command.", {
        "list": "list the triggers", "history": "show what one did", "fire": "fire one now",
        "publish": "publish an event", "pause": "pause one", "resume": "resume one",
    }),
    "contract": ("Rules that evaluate every intention of an agent.", {
        "show": "show the rules", "rejudge": "evaluate recorded runs again",
    }),
    "store": ("Maintain the store, and prove its contents.", {
        "verify": "verify the record", "doctor": "diagnose problems", "repair": "repair a run's log",
        "export": "write a run to a file", "prune": "archive old runs", "erase": "erase values",
        "seal": "sign the record", "prove": "prove one event", "new-key": "make a master key",
        "rotate": "wrap the data keys again",
        "namespaces": "list the tenants of a server",
    }),
    "token": ("Access to the server. Lists the tokens without a command.", {
        "create": "create a token", "list": "list the tokens", "revoke": "revoke a token",
    }),
}  # fmt: skip
"""The groups of commands: each with its purpose and its commands, and a line for each command."""

MODULES: Final = {
    path: module
    for module, paths in {
        "killick.cli.demo": "demo",
        "killick.cli.commands.check": "check",
        "killick.cli.commands.run": "run, start",
        "killick.cli.commands.worker": "worker",
        "killick.cli.commands.serve": "serve",
        "killick.cli.commands.mcp": "mcp",
        "killick.cli.commands.trigger": ", ".join(f"trigger {word}" for word in GROUPS["trigger"][1]),
        "killick.cli.commands.ps": "ps",
        "killick.cli.commands.show": "show",
        "killick.cli.commands.diff": "time diff",
        "killick.cli.commands.find": ", ".join(f"find {word}" for word in GROUPS["find"][1]),
        "killick.cli.commands.inbox": "inbox, answer, message say",
        "killick.cli.commands.control": "pause, resume, cancel, message send",
        "killick.cli.commands.overrides": ", ".join(f"edit {word}" for word in GROUPS["edit"][1]),
        "killick.cli.commands.time_travel": "time fork, time rewind, time undo",
        "killick.cli.commands.files": "time restore",
        "killick.cli.commands.replay": "time replay",
        "killick.cli.commands.store.verify": "store verify",
        "killick.cli.commands.store.doctor": "store doctor, store namespaces",
        "killick.cli.commands.store.maintenance": "store erase, store export, store new-key, store rotate",
        "killick.cli.commands.store.repair": "store repair",
        "killick.cli.commands.store.prune": "store prune",
        "killick.cli.commands.store.seal": "store seal, store prove",
        "killick.cli.commands.contract": ", ".join(f"contract {word}" for word in GROUPS["contract"][1]),
        "killick.cli.commands.token": ", ".join(f"token {word}" for word in GROUPS["token"][1]),
    }.items()
    for path in paths.split(", ")
}
"""Where each command lives: as the object `WORD_command` of its module, which is imported when it is called."""

COMPLETING: Final = "_KILLICK_COMPLETE"
"""The variable by which a shell asks for completions, or a person for the script: `bash_source`."""

VARIABLES: Final = {
    "KILLICK_STORE": "the store, if `--store` is not given",
    "KILLICK_KEYS": "the master keys of an encrypted store: files, or `env:NAME`, with commas between them",
    "KILLICK_SEAL_KEY": "the private key of `killick store seal`, if `--key` is not given",
    "KILLICK_DEBUG": "any value: errors are printed with their traceback",
    "NO_COLOR": "any value: no colors",
    "COLUMNS": "the width of lines in a file or a pipe",
}
"""The environment variables of the command line."""


class CommandGroup(click.Group):
    """A group whose commands are known by their words, and imported when they are called."""

    words: Mapping[str, str]
    prefix = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.words)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = MODULES.get(f"{self.prefix}{cmd_name}")
        found: click.Command | None = None
        if module is not None:
            found = getattr(importlib.import_module(module), f"{cmd_name.replace('-', '_')}_command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word and word not in self.words and not word.startswith("-") and not ctx.resilient_parsing:
            raise CommandFailed(f"{word}: {self.unknown(ctx)}; {self.nearest(word)}")
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: click.Context) -> str:
        return f"{ctx.command_path} has no such command"

    def nearest(self, word: str) -> str:
        return nearest(word, self.words, f"it has {', '.join(self.words)}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=line) for name, line in self.words.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.words.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "list" in self.words and (not args or (args[0][:1] == "-" and args[0] not in ctx.help_option_names)):
            args = ["list", *args]
        elif not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)


class Killick(CommandGroup):
    """All commands: those of one word, and the groups."""

    words = COMMANDS | {name: help_text for name, (help_text, _) in GROUPS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in GROUPS:
            return super().get_command(ctx, cmd_name)
        help_text, words = GROUPS[cmd_name]
        made = CommandGroup(cmd_name, help=help_text, context_settings={"max_content_width": 100})
        made.words, made.prefix = words, f"{cmd_name} "
        return made

    def unknown(self, ctx: click.Context) -> str:
        return "no such command"

    def nearest(self, word: str) -> str:
        """The command that was meant, by its word alone where that is in a group."""
        inside = {path.rpartition(" ")[2]: f"killick {path}" for path in MODULES if " " in path}
        if word in inside:
            return f"did you mean {inside[word]}?"
        return nearest(word, self.words, "`killick --help` lists them")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write = formatter.write
        title = click.style("Killick: the state layer for LLM agents.", bold=True)
        write(f"{title}  killick COMMAND --help says more.\n\n")
        cells = [f"{click.style(f'{name:<10}', fg='cyan')} {line:<28}" for name, line in COMMANDS.items()]
        for at in range(0, len(cells), 2):
            write(f"  {''.join(cells[at : at + 2]).rstrip()}\n")
        write("\n")
        for name, (_, words) in GROUPS.items():
            listed = click.wrap_text(", ".join(words), 66, subsequent_indent=" " * 13)
            write(f"  {click.style(f'{name:<10}', fg='cyan')} {listed}\n")
        write(f"\n{click.style('--store URL or KILLICK_STORE names the store, --json prints data.', dim=True)}\n")


@click.group(cls=Killick, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="killick", message="%(prog)s %(version)s")
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
        # The reader closed the pipe, as `head` does: nothing can be printed.
        drop_output()
        return int(Exit.DONE)
    except (KeyboardInterrupt, click.Abort):
        return _print_error("interrupted", Exit.INTERRUPTED)
    except CommandFailed as failed:
        return _print_error(str(failed), failed.code)
    except click.exceptions.Exit as left:
        return left.exit_code
    except click.ClickException as wrong:
        return _print_error(_usage(wrong), Exit.MISTYPED)
    except KillickError as error:
        return _print_error(str(error), code_of(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output()
            return _print_error("the output cannot be written: the disk is full; write it to another place", Exit.BAD)
        return _print_error(
            f"this is a bug in Killick ({type(error).__name__}: {error}); KILLICK_DEBUG=1 shows where", Exit.BUG
        )


def _invoke(args: list[str]) -> int:
    # Not by click's own main, which ends the process its own way when a pipe breaks or the user interrupts.
    color = False if os.environ.get("NO_COLOR") else None
    with killick.make_context("killick", args, color=color) as context:
        code = killick.invoke(context)
    sys.stdout.flush()
    return int(code or 0)


def _complete(asked: str) -> int:
    """Answer a shell that completes. It has nowhere to put an error, so there is none."""
    with contextlib.suppress(Exception, SystemExit, click.Abort):
        shell_complete(killick, {}, "killick", COMPLETING, asked)
        sys.stdout.flush()
    return int(Exit.DONE)


def _usage(wrong: click.ClickException) -> str:
    """A usage error of click, in one line with the next move."""
    context: click.Context = getattr(wrong, "ctx", None) or click.Context(killick, info_name="killick")
    where, group = context.command_path, context.command
    see = f"see {where} --help"
    if isinstance(wrong, click.NoSuchOption):
        if where == "killick":
            return f"{wrong.option_name}: no such option here; options come after the command, killick COMMAND --help"
        known = [name for parameter in group.params for name in parameter.opts]
        return f"{wrong.option_name}: {where} has no such option; {nearest(wrong.option_name, known, see)}"
    if isinstance(wrong, click.MissingParameter) and wrong.param is not None:
        return f"{where.removeprefix('killick ')}: needs {wrong.param.make_metavar(context)}; {see}"
    if isinstance(wrong, click.BadParameter) and wrong.param is not None:
        name = wrong.param.opts[0] if isinstance(wrong.param, click.Option) else wrong.param.human_readable_name.upper()
        return f"{name}: {_said(wrong.message)}; {see}"
    return f"{_said(wrong.format_message())}; {see}"


def _said(message: str) -> str:
    line = " ".join(message.split()).rstrip(".")
    return f"{line[:1].lower()}{line[1:]}"


def _print_error(line: str, code: Exit) -> int:
    if os.environ.get("KILLICK_DEBUG"):
        traceback.print_exc()
    from killick.sanitizer import visible

    # The terminal has written ^C, and the line is not to follow it.
    begin = "\n" if code is Exit.INTERRUPTED and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{begin}killick: {visible(' '.join(line.split()))}\n")
    return int(code)
