"""What happened to a run between its steps, in one line each. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rich.text import Text

from killick.cli import style
from killick.engine.inbox import SAID
from killick.history.phrasing import counted, entries_of, filed, lapse_told, paged, snapshot
from killick.history.timeline_parts import Moment
from killick.model import events as e


class Page(Protocol):
    """What a line needs of the page it is on."""

    def value(self, value: Any) -> str: ...

    def arguments(self, given: Any) -> str: ...

    def step_before(self, seq: int) -> str | None: ...


def told(page: Page, moment: Moment) -> Text:
    """What happened, in one line."""
    event, data = moment.event, moment.data
    by = f" by {getattr(event, 'by', None)}" if getattr(event, "by", None) else ""
    because = f": {page.value(data['because'])}" if data.get("because") else ""
    match event:
        case e.RunStarted():
            return Text.assemble(("started", "bold")).append(
                f" with {page.value(data.get('input'))}" if data.get("input") is not None else ""
            )
        case e.RunForked():
            own = f", files in {event.workspace}" if event.workspace else ""
            return Text(f"forked{by} from {event.parent}, effects {event.effects}{own}{because}", style="magenta")
        case e.ForkMade():
            return Text(f"forked{by} as {event.run}", style="magenta")
        case e.RunTaken():
            return Text(f"taken up by {process(event.holder)}{build_of(event.build)}", style="blue")
        case e.LeaseLapsed():
            return Text(f"died: {lapse_told(event)}", style="red")
        case e.RunQuarantined():
            return Text(f"quarantined: its process died {counted(event.deaths, 'time')} in a row", style="bold red")
        case e.PlanMade():
            return Text.assemble(("plan ", "dim")).append(" → ".join(event.stages))
        case e.PlanReached():
            return Text(f"── {event.stage}", style="bold cyan")
        case e.NoteMade():
            return Text.assemble(("note ", "dim")).append(page.value(data.get("note")), style="italic")
        case e.ContextChanged():
            changed = data.get("document", data.get("set"))
            gone = f" without {', '.join(data['unset'])}" if data.get("unset") else ""
            told = page.arguments(changed) + gone
            return Text.assemble((f"context{by if event.by != 'agent' else ''} ", "dim")).append(told + because)
        case e.ContextRefused():
            return _refused(page, moment, event)
        case e.ContractBound():
            return _bound(event, data)
        case e.MessageTaken():
            name = "said" if event.name == SAID else f"message {event.name}"
            return Text.assemble((f"{name}{by}: ", "cyan")).append(page.value(data.get("body")))
        case e.RunRewound():
            to = f" to {moment.left[0].number}:before" if moment.left else ""
            files = f", its files to {snapshot(event.files)}" if event.files else ""
            return Text(f"taken back{to}{by}{files}{because}", style="magenta")
        case e.RunDiverged():
            differ = f"recorded {data.get('recorded')}, found {data.get('found')}"
            return Text(f"the code no longer fits at step {event.step}: {differ}", style="red")
        case e.RunCompleted():
            result = f" with {page.value(data['result'])}" if data.get("result") is not None else ""
            return Text.assemble(("completed", "bold green")).append(result)
        case e.RunFailed():
            return Text("failed", style="bold red")
        case e.RunPrioritized():
            return Text(f"priority {event.priority}{by}", style="dim")
        case e.FactDrawn():
            return Text.assemble((f"{event.name} ", "dim")).append(page.value(data.get("value")))
        case e.PageEvicted() | e.PageFaulted() | e.PagePinned():
            return Text(paged(event), style="dim")
        case e.WorkspaceCaptured():
            step = page.step_before(event.after)
            return Text(filed(event, data, f" after step {step}" if step is not None else " at the start"), style="dim")
        case e.WorkspaceBound():
            return Text(filed(event, data), style="dim")
        case e.WorkspaceRestored():
            return Text(filed(event, data), style="magenta")
        case e.AttemptSettled():
            return Text(
                f"what {event.key} left in doubt was settled{by}: {event.settlement.replace('_', ' ')}",
                style="cyan",
            )
        case _:
            words = {"cancel.requested": "asked to end"}.get(moment.kind, moment.kind.partition(".")[2])
            return Text(f"{words}{by}{because}", style=style.STYLES.get(words, "magenta"))


def _refused(page: Page, moment: Moment, event: e.ContextRefused) -> Text:
    """A change of the context that did not come about: by a rule, or because it rested on an older version."""
    data, by = moment.data, f" of {event.by}" if event.by != "agent" else ""
    change = page.arguments({**entries_of(data.get("set")), **dict.fromkeys(data.get("unset") or ())})
    rule = f" by rule {event.verdict.rule}" if event.verdict is not None else ""
    why = entries_of(data.get("failure")).get("message")
    told = Text.assemble((f"change{by} rejected{rule}", "red"), f" {change}")
    return told.append(f": {why}" if why else "")


def _bound(event: e.ContractBound, data: Mapping[str, Any]) -> Text:
    """Which rules hold from now on."""
    above = f" of {event.of}" if event.of else ""
    if not event.digest:
        return Text(f"no longer judged by a contract{above}", style="dim")
    rules: Any = entries_of(data.get("contract")).get("rules")
    count = f", {counted(len(rules), 'rule')}" if isinstance(rules, list) else ""  # pyright: ignore
    return Text(f"judged by contract {event.name}{above}{count}, {event.digest[:8]}", style="dim")


def process(holder: str) -> str:
    """A holder as people know it."""
    pid = holder.partition("-")[0]
    return f"process {pid}" if pid.isdigit() else holder


def build_of(build: e.Build) -> str:
    told = " ".join(filter(None, (build.version, build.commit)))
    return f", build {told}" if told else ""
