"""How it looks when people are asked whether something may be done: the call, why, of whom, who agreed, what they
changed. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rich.text import Text

from killick.cli import style
from killick.cli.contract_wording import listed
from killick.client.inbox import agreement
from killick.engine.approval.argument_edits import ARGUMENT_CHARS, shown, visible
from killick.engine.approval.contracts_in_force import APPROVE
from killick.history.phrasing import entries_of
from killick.history.timeline_parts import Edit, Step, Wait


def by_rule(rule: str | None) -> str:
    """The rule that has people asked; nothing where it is the tool itself."""
    return f"rule {rule}" if rule is not None and rule != APPROVE else ""


# on the page of a run -----------------------------------------------------------------------------


def asked_lines(step: Step) -> Iterator[Text]:
    """What people were asked about a step before it was done, and what they said and changed, in order."""
    asked = [wait for wait in step.waits if wait.rule is not None]
    told = [(wait.opened.seq, _asked(wait, before)) for before, wait in pairwise([None, *asked]) if wait is not None]
    told += [(edit.values.seq, edited(edit)) for edit in step.edits if edit.stands]
    yield from (line for _, line in sorted(told, key=lambda each: each[0]))


def _asked(wait: Wait, before: Wait | None) -> Text:
    then = "then " * (before is not None and wait.round > before.round)
    verb = f"{then}{'asks' if wait.how is None else 'asked'}"
    rule = f" by {by_rule(wait.rule)}" if by_rule(wait.rule) and not then else ""
    said = Text(f"{verb} {', '.join(wait.to) or 'people'}{rule}", style="bold" if wait.how is None else "")
    outcome = _said(wait)
    return said.append(": ", style="dim").append_text(outcome) if outcome is not None else said


def _said(wait: Wait) -> Text | None:
    """What came of it, in a few words; an edit tells itself."""
    voters, answer = [vote.by for vote in wait.votes], entries_of(wait.answer)
    comment = f" “{wait.comment}”" if wait.comment else ""
    kind, by = str(answer.get("kind")), wait.by or "somebody"
    if wait.how is None:
        return Text(agreement(wait.need, voters)) if voters else None
    if wait.how == "expired":
        some = f"{agreement(wait.need, voters)}, and " if voters else ""
        return Text(f"{some}nobody {'else ' * bool(voters)}answered in time", style="yellow")
    if wait.how != "answered":
        return Text("no longer of interest", style="dim")
    if kind == "approve":
        names = voters if wait.need > 1 else [by]
        return Text.assemble((f"{', '.join(names)} agreed", "green"), (comment, "italic"))
    if kind == "edit":
        return Text(f"{', '.join(voters)} agreed", style="dim") if voters else None
    before = f"{', '.join(voters)} agreed, " if voters else ""
    if kind == "respond":
        value = answer.get("value")
        text = value if isinstance(value, str) else style.inline(value)
        return Text.assemble((f"{before}{by} answered instead: ", "yellow"), (f"{text}{comment}", "italic"))
    return Text.assemble((f"{before}{by} said no", "red"), (comment, "italic"))


def edited(edit: Edit) -> Text:
    """What somebody changed: edited by mia: amount 5000 → 1000."""
    line = Text.assemble((f"edited by {edit.by}: ", "magenta"), changes(edit.changed))
    return line.append(f" “{edit.comment}”", style="italic") if edit.comment else line


def changes(changed: Any) -> str:
    """By argument, what it was and what it is."""
    pairs: Mapping[str, Any] = entries_of(changed)
    told = (f"{name} {_value(old)} → {_value(new)}" for name, (old, new) in pairs.items())
    return ", ".join(told) or "nothing"


def _value(value: Any) -> str:
    return visible(value) if isinstance(value, str) and len(value) <= ARGUMENT_CHARS else shown(value)


def ended_lines(step: Step) -> Iterator[Text]:
    """Why a step came to nothing before it was begun: a rule, or somebody who skipped it."""
    failure = step.failure
    if step.rejected is not None and failure is not None:
        rule = f"rule {step.rejected.rule}" if step.rejected.rule else "the contract"
        yield Text.assemble((f"rejected by {rule}: ", "red")).append(failure.message)
    elif step.is_skipped and failure is not None:
        yield Text(failure.message, style="magenta")


def passed_on(step: Step | None) -> str:
    """From whom an open question was passed on, because they did not answer in time."""
    asked = step.waits if step is not None else ()
    before = [name for wait in asked if wait.how == "expired" and wait.rule is not None for name in wait.to]
    return f"passed on from {listed(dict.fromkeys(before))}" if before else ""
