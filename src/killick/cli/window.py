"""The display of `show --window`: the window's contents, evictions and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from rich.table import Table
from rich.text import Text

from killick.cli import style as paint
from killick.cli.context import Shell
from killick.cli.exit_codes import CommandFailed
from killick.history.phrasing import counted
from killick.history.window_report import ModelCall, Windows, windows
from killick.log.boundaries import RunMoment
from killick.presenting.windows import KINDS, NOT_HELD, happened, share

LINES_MAX: Final = 24
"""The last calls, which are listed; all on request."""

BAR_COLUMNS: Final = 32
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"

_COLOURS: Final = {"left": "magenta", "files": "cyan", "results": "blue", "documents": "blue", "schemas": "yellow"}


def show(shell: Shell, run: str, place: RunMoment | None, *, everything: bool) -> None:
    """Prints the requests of a run's model calls."""
    found = windows(shell.log, run, place)
    if found is None:
        raise CommandFailed(
            f"{run}: called no model, so there is no window; {shell.typed('show', run)} shows its steps"
        )
    shell.emit(found)
    for part in (_fills(found), _sums(found), _paging(found)):
        for lead, body in part:
            shell.row(lead, body)
        shell.print("")
    shell.out.print(_calls(found, found.calls if everything else found.calls[-LINES_MAX:]))
    if len(found.calls) > LINES_MAX and not everything:
        earlier = (
            f"{counted(len(found.calls) - LINES_MAX, 'earlier call')}; {shell.typed('show', run, '--window')} --all"
        )
        shell.print("", Text(f"{earlier} lists them", style="dim"))


# one part after the other -------------------------------------------------------------------------


Line: TypeAlias = tuple[Text, Text]
"""A lead and its text, wrapped next to it."""


def _line(label: str, text: Text | str, *, style: str = "") -> Line:
    return Text(f"{label:<9}", style="dim"), text if isinstance(text, Text) else Text(text, style=style)


def _fills(found: Windows) -> Iterator[Line]:
    at = found.at
    text = Text.assemble((found.run, "bold"), f"  the model's input at step {at.step}")
    yield Text(), text.append(f", call {at.number} of {len(found.calls)}", style="dim")
    budget = f" of {found.budget:,}" if found.budget else ""
    text = Text.assemble((f"{at.sent:,}", "bold"), f"{budget} tokens in {counted(found.messages, 'message')}")
    yield Text("  "), text
    for fill in sorted(found.fills, key=lambda fill: -fill.tokens):
        lead = Text(f"  {KINDS[fill.kind]:<15}").append(f"{fill.pieces:>6,}", style="dim")
        lead.append(f"{fill.tokens:>12,}{share(fill.tokens, at.sent):>6}  ")
        yield lead, Text(_bar(fill.tokens, at.sent), style=_COLOURS.get(fill.kind, "green"))


def _sums(found: Windows) -> Iterator[Line]:
    text = f"{found.sent:,} tokens in {counted(len(found.calls), 'call')}"
    if found.counted:
        text += f"; the provider counted {found.counted:,}"
        text += f", {share(found.cached, found.counted)} of them from its cache" if found.cached else ""
    yield _line("sent", text)
    if found.without > found.sent:
        saved = Text(f"{found.without:,} tokens without the window: ")
        yield _line("instead", saved.append(f"{share(found.without - found.sent, found.without)} fewer", "bold green"))
    largest = found.largest
    yield _line("largest", f"{largest.sent:,} tokens, call {largest.number} (step {largest.step})")


def _paging(found: Windows) -> Iterator[Line]:
    if not found.evictions and not found.faults:
        yield _line("left", f"nothing: {NOT_HELD}", style="dim")
        return
    pages = sum(len(each.pages) for each in found.evictions)
    saved = max(found.at.without - found.at.sent, 0)
    batches = counted(len(found.evictions), "batch", "batches")
    yield _line("left", f"{counted(pages, 'page')} in {batches}; {saved:,} tokens fewer at the last call")
    how = Counter(fault.how for fault in found.faults)
    ways = ", ".join(f"{count} {name}" for name, count in how.most_common())
    rate = f"; {share(found.wanted, found.left)} of the evicted tokens were wanted back" if found.left else ""
    yield _line("back", f"{counted(len(found.faults), 'fault')} ({ways}){rate}" if ways else "nothing was wanted back")
    if found.thrashed:
        yield _line("thrash", f"wanted back more than once: {', '.join(found.thrashed[:8])}", style="yellow")


# calls ----------------------------------------------------------------------------------------------


def _calls(found: Windows, calls: Sequence[ModelCall]) -> Table:
    """A line a call, with what left before it and what its reply wanted back."""
    most = max(call.without for call in found.calls)
    pages = any(call.without != call.sent for call in found.calls)
    table = paint.table(("CALL", "STEP", "     SENT", *(("  WITHOUT",) if pages else ()), "  COUNTED", "", "WHAT"))
    for call in calls:
        bar = Text(_bar(call.sent, most, 24), style="green")
        bar.append(_bar(call.without, most, 24)[len(bar.plain) :].replace("█", "░"), style="dim")
        table.add_row(
            f"{call.number:>4}", call.step, f"{call.sent:>9,}", *((f"{call.without:>9,}",) if pages else ()),
            f"{call.counted:>9,}" if call.counted else "", bar, happened(call),
        )  # fmt: skip
    return table


# how it looks -----------------------------------------------------------------------------------------


def _bar(part: int, whole: int, columns: int = BAR_COLUMNS) -> str:
    eighths = round(part * columns * 8 / whole) if whole else 0
    eighths = max(eighths, 1) if part else 0
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
