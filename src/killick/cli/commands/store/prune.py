"""`killick store prune`: says which old runs can go and which stay, asks, and archives them. Decides nothing itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import click
import msgspec
from rich.filesize import decimal

from killick.archive.bundle import name_at
from killick.archive.prune import Chosen, Pruned, choose, prune
from killick.cli import style
from killick.cli.commands.store.maintenance import some
from killick.cli.context import Shell, agent_option, command, current_user, dry_run_option, yes_option
from killick.cli.exit_codes import Exit
from killick.cli.progress import progress
from killick.history.phrasing import counted
from killick.history.vaults import Cleaned
from killick.store.records import ENDED
from killick.text import size_text


@command("prune")
@click.option("--older", metavar="WHEN", default="90d", show_default=True, help="Unchanged since: 90d, 2026-08-01.")
@click.option("--status", "-s", metavar="STATUS", multiple=True, help=f"Only these: {', '.join(ENDED)}.")
@agent_option
@click.option("--to", metavar="FILE", help="The archive.  [default: killick-pruned-TIME.jsonl.gz here]")
@dry_run_option
@yes_option
def prune_command(
    shell: Shell, older: str, status: tuple[str, ...], agent: str | None, to: str | None, dry_run: bool, yes: bool
) -> Exit:
    """Move runs that ended long ago into an archive.

    The archive is one new file, synced and verified before the first run is removed. Values that no other run needs are
    removed too. Runs that others need stay, and are listed. Ids and consumed rights stay taken. File snapshots of
    removed runs are deleted from the vault.

    \b
      killick store prune --older 90d --dry-run
      killick store prune --older 30d --status completed --to /backup/october.jsonl.gz
    """
    now_us = shell.clock.now_us()
    until_us = style.moment_of(older, now_us)
    wanted = tuple(each.strip() for text in status for each in text.split(",")) or ENDED
    path = to or name_at(now_us)
    with progress(shell) as tell:
        chosen = choose(shell.log, until_us=until_us, status=wanted, agent=agent, progress=tell)
    _print_chosen(shell, chosen, until_us)
    if dry_run:
        done = chosen.untouched(shell.log)
    else:
        if chosen.going:
            question = f"Move {counted(len(chosen.going), 'run')} into {path}, and out of the store?"
            shell.confirm(question, yes=yes)
        with progress(shell) as tell:
            done = prune(
                shell.log, chosen, path, holder=shell.ids.new("prune"), now_us=now_us, by=current_user(), progress=tell
            )
    shell.emit(msgspec.to_builtins(done))
    if not dry_run:
        _print_done(shell, chosen, done)
    for vault in done.vaults:
        _print_vault(shell, vault, dry_run=dry_run)
    return Exit.BAD if any(vault.problem is not None for vault in done.vaults) else Exit.DONE


def _print_vault(shell: Shell, vault: Cleaned, *, dry_run: bool) -> None:
    if vault.problem is not None:
        shell.say("✗", (vault.vault, "bold"), f"  is not cleaned: {vault.problem}")
    if not vault.snapshots and not vault.bytes_freed:
        return
    freed = f"{counted(vault.snapshots, 'snapshot')} of files, {size_text(vault.bytes_freed)}, "
    shell.say(
        "" if dry_run else "✓", freed, "would be deleted from " if dry_run else "deleted from ", (vault.vault, "bold")
    )


def _print_chosen(shell: Shell, chosen: Chosen, until_us: int) -> None:
    pruned = chosen.going
    events = f", with {counted(chosen.events, 'event')}," if pruned else ""
    shell.say("", f"{counted(len(pruned), 'run')}{events} ended before {style.moment(until_us)} and can go")
    for row in some(shell, pruned):
        ended = style.ago(row.changed_at_us, shell.clock.now_us())
        shell.say("", "  ", (row.run, "bold"), f"  {row.agent}, ", (row.status, style.STYLES[row.status]), f" {ended}")
    _print_kept(shell, chosen.kept)


def _print_kept(shell: Shell, kept: Mapping[str, str]) -> None:
    for run, why in some(shell, kept.items()):
        shell.say("", ("  stays: ", "dim"), (run, "bold"), f"  {why}")


def _print_done(shell: Shell, chosen: Chosen, done: Pruned) -> None:
    _print_kept(shell, {run: why for run, why in done.kept.items() if run not in chosen.kept})
    swept = f"; {counted(done.values, 'value')} that nothing needed went too" if done.values else ""
    if done.file is None:
        shell.say("✓", f"nothing was moved{swept}")
        return
    moved = f"{counted(len(done.runs), 'run')}, {counted(done.events, 'event')} moved into "
    shell.say("✓", moved, (done.file, "bold"), f" ({decimal(done.size_bytes)}){swept}")
    shell.say(
        "", (f"    {shlex.join(('killick', 'store', 'verify', done.file))}", "green")
    )  # for which no store is needed
