"""The events of a run between its steps, one line each; and which of them a timeline omits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from killick.engine.control.inbox import ANSWER, CHILD, COMMAND, SAID, VOTE
from killick.history.phrasing import (
    build_text,
    counted,
    entries_of,
    lapse_text,
    page_text,
    process,
    snapshot,
    workspace_text,
)
from killick.history.timeline_parts import Entry, Moment
from killick.model import events as e
from killick.model import page_events
from killick.presenting.phrase import Phrase, Shows

_QUIET: Final = frozenset({"fact.drawn", "page.pinned", "run.tagged"})
_OURS: Final = frozenset({COMMAND, ANSWER, VOTE, CHILD})
_WORDS: Final = {"cancel.requested": "cancel requested", "step.drifted": "the code has changed"}
_ROLES: Final = {"cancelled": "quiet"}


def trivial(entries: Sequence[Entry], *, is_first: bool = True) -> Callable[[Moment], bool]:
    """Whether a moment may be left out: it serves replay alone, or the same process leased the run again.

    Without `is_first` the entries are a later section of a run, and its first lease is shown.
    """
    taken = [(entry.seq, entry.event) for entry in entries if isinstance(entry, Moment)]
    by = [(seq, event.holder, event.build) for seq, event in taken if isinstance(event, e.RunTaken)]
    others = {after[0] for before, after in pairwise(by) if before[1:] != after[1:]}
    others |= {seq for seq, *_ in by[:1] if not is_first}

    def is_trivial(moment: Moment) -> bool:
        event = moment.event
        if isinstance(event, e.RunTaken):
            return moment.seq not in others
        return moment.kind in _QUIET or (isinstance(event, e.MessageTaken) and event.name in _OURS)

    return is_trivial


def all_moments(entries: Iterable[Entry]) -> Iterator[Moment]:
    """The moments among some entries, with those inside of scopes."""
    for each in entries:
        yield from [each] if isinstance(each, Moment) else all_moments(each.entries)


def line(moment: Moment, shows: Shows) -> Phrase:
    """A moment, in one line."""
    event, data, value = moment.event, moment.data, shows.value
    by = f" by {getattr(event, 'by', None)}" if getattr(event, "by", None) else ""
    because = f": {value(said)}" if (said := data.get("because")) else ""
    match event:
        case e.RunStarted():
            return Phrase("started", "strong").add(_with(data.get("input"), value))
        case e.RunForked():
            own = f", files in {event.workspace}" if event.workspace else ""
            return Phrase(f"forked{by} from {event.parent}, effects {event.effects}{own}{because}", "change")
        case e.ForkMade():
            return Phrase(f"forked{by} as {event.run}", "change")
        case e.RunTaken():
            build = build_text(event.build)
            return Phrase(f"leased by {process(event.holder)}{f', build {build}' if build else ''}", "busy")
        case e.LeaseLapsed():
            return Phrase(f"died: {lapse_text(event)}", "bad")
        case e.RunQuarantined():
            return Phrase(f"quarantined: its process died {counted(event.deaths, 'time')} in a row", "strong bad")
        case e.PlanMade():
            return Phrase("plan ", "quiet").add(" → ".join(event.stages))
        case e.PlanReached():
            return Phrase(event.stage, "strong notice")
        case e.NoteMade():
            return Phrase(f"note{by if event.by != 'agent' else ''}: ", "quiet").add(value(data.get("note")), "quote")
        case e.ContextChanged() | e.ContextRefused():
            return _context(event, data, shows).add(because)
        case e.ContractBound():
            return Phrase(_bound(event, data), "quiet")
        case e.MessageTaken():
            name = "said" if event.name == SAID else f"message {event.name}"
            return Phrase(f"{name}{by}: ", "notice").add(value(data.get("body")))
        case e.RunRewound():
            to = f" to {moment.left[0].number}:before" if moment.left else ""
            files = f", its files to {snapshot(event.files)}" if event.files else ""
            return Phrase(f"rewound{to}{by}{files}{because}", "change")
        case e.RunDiverged():
            differ = f"recorded {data.get('recorded')}, found {data.get('found')}"
            return Phrase(f"the code diverged at step {event.step}: {differ}", "bad")
        case e.RunCompleted():
            return Phrase("completed", "strong good").add(_with(data.get("result"), value))
        case e.RunFailed():
            return Phrase("failed", "strong bad")
        case e.RunPrioritized():
            return Phrase(f"priority {event.priority}{by}", "quiet")
        case e.FactDrawn():
            return Phrase(f"{event.name} ", "quiet").add(value(data.get("value")))
        case page_events.PageEvicted() | page_events.PageFaulted() | page_events.PagePinned():
            return Phrase(page_text(event), "quiet")
        case e.WorkspaceCaptured():
            return Phrase(workspace_text(event, data, shows.after(event.after)), "quiet")
        case e.WorkspaceBound():
            return Phrase(workspace_text(event, data), "quiet")
        case e.WorkspaceRestored():
            return Phrase(workspace_text(event, data), "change")
        case e.AttemptSettled():
            return Phrase(f"settled{by}, {event.key}: {event.settlement.replace('_', ' ')}", "notice")
        case _:
            words = _WORDS.get(moment.kind, moment.kind.partition(".")[2].replace("_", " "))
            step = f" at step {getattr(event, 'step', '')}" if moment.kind == "step.drifted" else ""
            return Phrase(f"{words}{step}{by}{because}", _ROLES.get(words, "change"))


def _with(given: Any, value: Callable[[Any], str]) -> str:
    return "" if given is None else f" with {value(given)}"


def _context(event: e.ContextChanged | e.ContextRefused, data: Mapping[str, Any], shows: Shows) -> Phrase:
    """A change of the context, or one that a rule or a newer version rejected."""
    by = f" by {event.by}" if event.by != "agent" else ""
    changed = data.get("document", data.get("set"))
    gone = f" without {', '.join(map(str, unset))}" if (unset := data.get("unset")) else ""
    text = f" {shows.arguments(changed)}{gone}" if changed else gone
    if isinstance(event, e.ContextChanged):
        return Phrase(f"context{by}", "quiet").add(text)
    rule = f" by rule {event.verdict.rule}" if event.verdict is not None else ""
    why = entries_of(data.get("failure")).get("message")
    return Phrase(f"change{by.replace(' by ', ' of ')} rejected{rule}", "bad").add(text).add(f": {why}" if why else "")


def _bound(event: e.ContractBound, data: Mapping[str, Any]) -> str:
    """The contract that is in force from here on."""
    of = f" of {event.of}" if event.of else ""
    if not event.digest:
        return f"contract{of} no longer in force"
    rules: Any = entries_of(data.get("contract")).get("rules")
    count = f", {counted(len(rules), 'rule')}" if isinstance(rules, list) else ""  # pyright: ignore
    return f"contract {event.name}{of} in force{count}, {event.digest[:8]}"
