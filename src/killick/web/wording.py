"""What happened to a run between its steps, in one line each; and which of it is not worth one. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from killick.engine.inbox import ANSWER, CHILD, COMMAND, SAID, VOTE
from killick.history.phrasing import counted, entries_of, filed, lapse_told, paged, snapshot
from killick.history.timeline_parts import Entry, Moment
from killick.model import events as e

_QUIET: Final = frozenset({"fact.drawn", "page.pinned", "run.tagged"})
_OURS: Final = frozenset({COMMAND, ANSWER, VOTE, CHILD})
_WORDS: Final = {"cancel.requested": "asked to end", "run.resumed": "let go on", "step.drifted": "the code has changed"}

Brief = Callable[[Any], str]


def trivial(entries: Sequence[Entry], *, is_first: bool) -> Callable[[Moment], bool]:
    """Says of a moment whether to leave it out: what replay needs, and that the same process took the run again."""
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


def told(moment: Moment, brief: Brief) -> str:
    """What happened, in one line."""
    event, data = moment.event, moment.data
    by = f" by {getattr(event, 'by', None)}" if getattr(event, "by", None) else ""
    because = f": {brief(data['because'])}" if data.get("because") else ""
    match event:
        case e.RunStarted():
            return "started" if data.get("input") is None else f"started with {brief(data['input'])}"
        case e.RunForked():
            own = f", files in {event.workspace}" if event.workspace else ""
            return f"forked{by} from {event.parent}, effects {event.effects}{own}{because}"
        case e.ForkMade():
            return f"forked{by} as {event.run}"
        case e.RunTaken():
            build = " ".join(filter(None, (event.build.version, event.build.commit)))
            return f"taken up by {process(event.holder)}{f', build {build}' if build else ''}"
        case e.LeaseLapsed():
            return f"died: {lapse_told(event)}"
        case e.RunQuarantined():
            return f"quarantined: its process died {counted(event.deaths, 'time')} in a row"
        case e.PlanMade():
            return f"plan {' → '.join(event.stages)}"
        case e.PlanReached():
            return event.stage
        case e.NoteMade():
            return f"note{by if event.by != 'agent' else ''}: {brief(data.get('note'))}"
        case e.MessageTaken():
            return f"{'said' if event.name == SAID else f'message {event.name}'}{by}: {brief(data.get('body'))}"
        case e.RunRewound():
            files = f", its files to {snapshot(event.files)}" if event.files else ""
            return f"taken back{f' to {moment.left[0].number}:before' if moment.left else ''}{by}{files}{because}"
        case e.RunDiverged():
            return (
                f"the code no longer fits at step {event.step}: recorded {data.get('recorded')}, "
                f"found {data.get('found')}"
            )
        case e.RunCompleted():
            return "completed" if data.get("result") is None else f"completed with {brief(data['result'])}"
        case e.RunPrioritized():
            return f"priority {event.priority}{by}"
        case e.PageEvicted() | e.PageFaulted() | e.PagePinned():
            return paged(event)
        case e.WorkspaceBound() | e.WorkspaceCaptured() | e.WorkspaceRestored():
            return filed(event, data)
        case e.AttemptSettled():
            return f"what {event.key} left in doubt was settled{by}: {event.settlement.replace('_', ' ')}"
        case e.ContextChanged() | e.ContextRefused() | e.ContractBound():
            return _known(event, data, brief) + because
        case _:
            words = _WORDS.get(moment.kind, moment.kind.partition(".")[2].replace("_", " "))
            step = f" at step {getattr(event, 'step', '')}" if moment.kind == "step.drifted" else ""
            return f"{words}{step}{by}{because}"


def _known(event: e.ContextChanged | e.ContextRefused | e.ContractBound, data: Mapping[str, Any], brief: Brief) -> str:
    """What the agent goes by: its own document, and the rules."""
    if isinstance(event, e.ContractBound):
        above = f" of {event.of}" if event.of else ""
        rules: Any = entries_of(data.get("contract")).get("rules")
        count = f", {counted(len(rules), 'rule')}" if isinstance(rules, list) else ""  # pyright: ignore
        return f"judged by contract {event.name}{above}{count}" if event.digest else f"no longer judged{above}"
    by = f" by {event.by}" if event.by != "agent" else ""
    changed = data.get("document", data.get("set"))
    gone = f" without {', '.join(map(str, data['unset']))}" if data.get("unset") else ""
    if isinstance(event, e.ContextRefused):
        rule = f" by rule {event.verdict.rule}" if event.verdict is not None else ""
        why = entries_of(data.get("failure")).get("message")
        return f"change{by} rejected{rule} {brief(changed)}{gone}{f': {why}' if why else ''}"
    return f"context{by} {brief(changed)}{gone}"


def process(holder: str) -> str:
    """A holder as people know it."""
    pid = holder.partition("-")[0]
    return f"process {pid}" if pid.isdigit() else holder
