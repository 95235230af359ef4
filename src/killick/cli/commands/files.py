"""The display of files: `show --files`, the files of `diff`, and the command `restore`. Decides nothing."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import click
from rich.text import Text

from killick.cli import style as paint
from killick.cli.context import Shell, by_option, command, dry_run_option, run_argument, yes_option
from killick.cli.exit_codes import CommandFailed
from killick.client.file_restore import Restoration
from killick.engine.steps.workspace_grants import is_granted, is_near
from killick.history import workspace_files as history
from killick.history.phrasing import counted
from killick.history.workspace_files import FileChange, FileEntry, Files, FilesDiff, How, Listing
from killick.presenting.time_travel import changed_files
from killick.text import size_text
from killick.workspace import tree

LINES_MAX: Final = 48
"""The maximum number of printed entries, the changed ones first; `--all` prints all."""

CHANGES_MAX: Final = 40
"""The maximum number of printed changes, and of printed lines of each file; `--files` prints all."""

SIGNS: Final[Mapping[How, tuple[str, str]]] = {
    "added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow"), "touched": ("·", "cyan"),
}  # fmt: skip
_TYPES: Final = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "link": stat.S_IFLNK, "fifo": stat.S_IFIFO,
                 "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}  # fmt: skip
_LINE_STYLES: Final = {"+": "green", "-": "red", "@": "cyan", "\\": "dim"}


# show -----------------------------------------------------------------------------------------------


def show(shell: Shell, run: str, at: str | None, path: str | None, *, everything: bool) -> None:
    """Print the files of a run at a place: all, those of a folder, or the content of one."""
    with history.at(shell.log, run, at or "now") as found:
        if path is not None:
            name, entry = found.find(path)
            if not entry.is_folder:
                _content(shell, found, history.shown(name), entry)
                return
        listing = found.listing(path or "")
        shell.emit(listing)
        shell.print(*_listing(shell, listing, everything=everything))


def _content(shell: Shell, found: Files, path: str, entry: tree.Entry) -> None:
    if shell.json:
        shell.emit(history.listed(path.encode(), entry))
        return
    pieces = found.pieces(path, entry)
    if entry.kind == tree.LINK:
        shell.print(f"{path} → {history.shown(entry.ref)}")
        return
    if not shell.out.is_terminal:
        sys.stdout.flush()
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        return
    begins = b"".join(found.pieces(path, entry, 8_192))
    if b"\0" in begins:
        typed = shell.typed("show", found.run, "--files", "--at", found.at, path)
        raise CommandFailed(f"{path}: is binary, {size_text(entry.size)}, and for no terminal; {typed} > FILE")
    for piece in pieces:
        shell.out.print(Text(_plain(piece.decode("utf-8", "replace"))), soft_wrap=True, end="")


def _plain(text: str) -> str:
    """A text that moves no cursor: characters that are neither printable nor line breaks are escaped."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def _listing(shell: Shell, found: Listing, *, everything: bool) -> Iterator[Text]:
    head = Text.assemble((found.run, "bold"), "  files at ", (paint.place(found.at, found.seq), "bold"))
    yield head.append(f"  {found.path}/" if found.path else "")
    held = f"{counted(found.files, 'file')} in {counted(found.folders + 1, 'folder')}, {size_text(found.size_bytes)}"
    yield _labelled("folder", Text(found.folder))
    yield _labelled("snapshot", Text.assemble((found.snapshot[: history.ID_DIGITS], "cyan"), f"  {held}"))
    if found.since is not None:
        yield _labelled("since", Text(f"{found.since}: ").append_text(paint.text(changed_files(found.changed))))
    entries = list(found.entries)
    if is_cut := len(entries) > LINES_MAX and not everything:
        entries = sorted(entries, key=lambda each: each.how is None)[:LINES_MAX]
    yield Text()
    yield from _rows(entries)
    if not entries:
        yield Text("  nothing is in it", style="dim")
    if left := len(found.entries) - len(entries) + found.left_out:
        yield Text(f"    and {left:,} more", style="dim")
    yield Text()
    place = () if found.at == "now" else ("--at", found.at.partition(" ")[0])
    more = f"{shell.typed('show', found.run, '--files', *place)}  PATH{'  --all' if is_cut else ''}"
    yield Text(f"more: {more}", style="dim")


def _rows(entries: Iterable[FileEntry]) -> Iterator[Text]:
    for each in entries:
        sign, style = SIGNS[each.how] if each.how is not None else (" ", "")
        size = size_text(each.size) if each.kind == "file" else ""
        when = paint.moment(each.mtime_ns // 1_000)
        line = Text.assemble("  ", (f"{sign} ", f"bold {style}"), (stat.filemode(_TYPES[each.kind] | each.mode), "dim"))
        line.append(f" {size:>8}  ").append(f"{when:<19}  ", style="dim")
        yield line.append_text(_name(each, style))


def _name(each: FileEntry, style: str) -> Text:
    if each.kind == "folder":
        return Text(f"{each.path}/", style=style or "bold blue")
    text = Text(each.path, style=style or ("cyan" if each.kind == "link" else "green" if each.mode & 0o111 else ""))
    return text.append(f" → {each.target}" if each.target is not None else "", style="dim")


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((f"  {label:<9}", "dim")).append_text(text)


# diff -----------------------------------------------------------------------------------------------


def print_diff(shell: Shell, found: FilesDiff, *, whole: bool = False) -> None:
    """The differences between the files of two positions; with the lines of small texts, or of all on request."""
    one, two = found.before, found.after
    head = Text.assemble(("files", "bold"))
    for between, side in (("  ", one), (" → ", two)):
        head.append(between, style="dim").append(side.snapshot[: history.ID_DIGITS], style="cyan")
    shell.print(head.append("  ").append_text(paint.text(changed_files(found.counts))))
    printed = found.changes if whole else found.changes[:CHANGES_MAX]
    room = CHANGES_MAX * 5
    for change in printed:
        shell.print(_change(change))
        limit = len(change.lines) if whole else max(min(CHANGES_MAX, room), 0)
        room -= min(len(change.lines), limit)
        shell.print(*_diff_lines(change, limit, shell.out.width))
    left = len(found.changes) - len(printed) + found.left_out
    if left:
        shell.print(Text(f"  and {left:,} more; --files lists them", style="dim"))


def _change(change: FileChange) -> Text:
    sign, style = SIGNS[change.how]
    is_folder = "folder" in {each.kind for each in (change.before, change.after) if each is not None}
    line = Text.assemble("  ", (sign, f"bold {style}"), " ").append(change.path + "/" * is_folder, style=style)
    for count, kind in ((change.plus, "+"), (change.minus, "-")):
        line.append(f" {kind}{count}" if count else "", style=_LINE_STYLES[kind])
    about = change.about if change.about != "folder" else ""
    return line.append(f"  {about}" if about else "", style="dim")


def _diff_lines(change: FileChange, limit: int, width: int) -> Iterator[Text]:
    # A new or deleted file is printed without hunk headers: the whole file changed.
    lines = [line for line in change.lines if change.how == "changed" or line[:2] != "@@"]
    for line in lines[:limit]:
        text = Text(f"      {_plain(line.expandtabs(4))}", style=_LINE_STYLES.get(line[:1], "dim"))
        text.truncate(width, overflow="ellipsis")
        yield text
    if len(lines) > limit:
        yield Text(f"      … {counted(len(lines) - limit, 'more line')}; --files prints them", style="dim")


# restore --------------------------------------------------------------------------------------------


@command("restore", app=True)
@run_argument
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--at", metavar="PLACE", help="As they were then: 6:before, 6:after, 4~1:before, @17, start.")
@click.option("--snapshot", "snapshot", metavar="ID", help="Restore this snapshot, such as one that a restore kept.")
@click.option("--to", metavar="DIR", help="Write to this folder instead, which must be new or empty.")
@by_option
@yes_option
@dry_run_option
def restore_command(
    shell: Shell, run: str, at: str | None, snapshot: str | None, to: str | None, yes: bool, **how: Any
) -> None:
    """Restore files of a run's workspace at a place: all, or the named ones. The run itself does not change.

    The current files are kept as a snapshot, whose id is printed. The folder of a leased run is not changed; --to
    writes elsewhere. A folder that was not used on this machine must be declared by the app, or be in the folder of the
    store: then the command asks.

    \b
      killick time restore fix_17 --at 6:before
      killick time restore fix_17 --at 6:before src/app.py
      killick time restore fix_17 --at 4:after --to look
      killick time restore fix_17 --snapshot 41d0c8aa12ab
    """
    if (at is None) == (snapshot is None):
        raise CommandFailed("name what to bring back: --at PLACE or --snapshot ID")
    if to is None and (folder := _recorded_folder(shell, run)) is not None:
        shell.confirm(f"No agent loaded here declares {folder}. Restore the files in it?", yes=yes)
        to = folder
    done = shell.client.restore(run, at, snapshot=snapshot, to=to, **how)
    shell.emit(done)
    _print_restored(shell, done)


def _recorded_folder(shell: Shell, run: str) -> str | None:
    """The folder of a run that only its record names, if it is in the folder of the store."""
    folder = shell.log.ledger(shell.run(run)).facts.workspace
    if folder is None or is_granted(shell.store, folder):
        return None
    shell.load_app()
    return folder if not is_granted(shell.store, folder) and is_near(shell.store, folder) else None


def _print_restored(shell: Shell, done: Restoration) -> None:
    what = counted(len(done.paths), "path") if done.paths else "files"
    would = "would go back to" if done.dry_run else "as they were at" if done.elsewhere else "went back to"
    head = Text.assemble((done.run, "bold cyan"), f"  {what} {would} ", (done.at, "bold"))
    if done.snapshot[:12] not in done.at:
        head.append(f"  {done.snapshot[:12]}", style="cyan")
    shell.print(head)
    lines = [("in", Text(done.folder))]
    did_nothing = not (done.written or done.removed or done.left)
    text = "nothing: the files are the same" if did_nothing else f"{done.written:,} written, {done.removed:,} removed"
    lines.append(("would be" if done.dry_run else "done", Text(text)))
    lines += [("left" if not number else "", Text(each, style="yellow")) for number, each in enumerate(done.left[:12])]
    if len(done.left) > 12:
        lines.append(("", Text(f"and {len(done.left) - 12:,} more; --json lists them", style="dim")))
    if done.before is not None and not did_nothing:
        lines.append(("before", Text.assemble((done.before[:12], "cyan"), (" has the files from before:", "dim"))))
        lines.append(
            ("", Text(shell.typed("time", "restore", done.run, "--snapshot", done.before[:12]), style="green"))
        )
    if not done.elsewhere:
        lines.append(("run", Text(f"stays where it is, {shell.client.info(done.run).status}", style="dim")))
    for label, line in lines:
        shell.print(_labelled(label, line))
