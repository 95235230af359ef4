"""Shell completion: prints a shell's completion script, and answers the shell when a person presses Tab.

The protocol is click's. Bash breaks words at colons, of which agents and waits have one, so it gets a script of ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final, cast

import click
from click.shell_completion import BashComplete, ShellComplete, get_completion_class, split_arg_string

from killick.cli.exit_codes import CommandFailed

SHELLS: Final = ("bash", "zsh", "fish")

_BASH: Final = """\
%(complete_func)s() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}" type value
    local word="${line##*[[:space:]]}" before=""
    # Bash breaks words at a colon: the part before it is already on the line.
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && before="${word%%"${word##*:}"}"
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(env COMP_WORDS="$line" %(complete_var)s=bash_complete "$1" 2>/dev/null)
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s 2>/dev/null || complete -F %(complete_func)s %(prog_name)s
"""

_PLACES: Final = {
    "bash": "~/.local/share/bash-completion/completions/killick",
    "zsh": "~/.zfunc/_killick  (a folder of $fpath)",
    "fish": "~/.config/fish/completions/killick.fish",
}


class Bash(BashComplete):
    """Bash, with words that may hold colons."""

    source_template = _BASH

    def source(self) -> str:
        return ShellComplete.source(self)

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        return words, incomplete


def completions(group: click.Group, asked: str) -> None:
    """Prints the completions of a shell's line: `asked` is of the form bash_complete."""
    shell, _, instruction = asked.partition("_")
    if instruction == "complete":
        sys.stdout.write(_completer(shell, group).complete() + "\n")


def _completer(shell: str, group: click.Group) -> ShellComplete:
    kind = Bash if shell == "bash" else cast("type[ShellComplete]", get_completion_class(shell))
    return kind(group, {}, "killick", f"_{group.name}_COMPLETE".upper())


def _complete_shell(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in SHELLS if name.startswith(incomplete)]


@click.command("completion")
@click.argument("shell", metavar="[bash|zsh|fish]", required=False, shell_complete=_complete_shell)
def completion_command(shell: str | None) -> None:
    """Print a completion script for your shell: commands, options, runs, waits, agents and answers.

    Without a name it is for the current shell.

    \b
      killick completion bash > ~/.local/share/bash-completion/completions/killick
      killick completion fish > ~/.config/fish/completions/killick.fish
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise CommandFailed(f"{name or 'your shell'}: nothing is known of it; name one of {', '.join(SHELLS)}")
    root = cast("click.Group", click.get_current_context().find_root().command)
    sys.stdout.write(_completer(name, root).source())
    if sys.stdout.isatty():
        click.echo(f"put this into {_PLACES[name]}", err=True)
