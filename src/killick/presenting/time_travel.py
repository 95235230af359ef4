"""Previews of a rewind, a fork or an undo: labels, and the lines under each. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from killick.history.phrasing import arguments, brief, counted
from killick.history.rewind_preview import LeftEffect, RewindPreview, rights
from killick.history.undo_preview import SharedBy, UndoPreview
from killick.history.workspace_files import How
from killick.model import events as e
from killick.model.ledger import Spend
from killick.presenting.phrase import Phrase

Report = Iterator[tuple[str, list[Phrase]]]
"""Labels, each with its lines."""

WORLD: Final[Mapping[e.ForkEffects, str]] = {
    "recorded": "a new effect needs a person's approval first",
    "live": "a new effect is executed",
    "none": "a new effect fails its step",
}
_STAYS: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (("happened",), "stays done", "the same call again gets this result; nothing is done twice"),
    (("in_doubt", "open"), "in doubt", "the same call again waits until this is settled"),
    (("undone",), "undone", "the same call again is executed"),
)
FILES: Final[Mapping[How, str]] = {"added": "good", "removed": "bad", "changed": "warning", "touched": "notice"}
"""The roles of file changes."""


def call_line(tool: str, given: Any, chars: int = 60) -> str:
    """A call as code has it: pay(amount=5)."""
    return f"{tool}({arguments(given, chars)})"


def steps_between(steps: Sequence[str]) -> str:
    """The steps that a rewind takes back."""
    if not steps:
        return "nothing"
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def rewind(found: RewindPreview, chars: int) -> Report:
    """The steps that a rewind drops, and the effects that stay."""
    kept = f", which {'stay' if len(found.steps) > 1 else 'stays'} on record" if found.steps else ""
    yield "rewinds", [Phrase(steps_between(found.steps)).add(kept, "quiet")]
    for status, label, means in _STAYS:
        if effects := [effect for effect in found.effects if effect.status in status]:
            yield label, [*(_effect(effect, chars) for effect in effects), Phrase(means, "quiet")]
    yield "consumed", [Phrase(f"{', '.join(found.consumed)}; stays so")] if found.consumed else []
    yield "spent", [Phrase(f"{spent(found.spend)}; stays so")] if found.spend.model_calls else []
    yield "children", [Phrase(f"{child.run} ({child.status}), which continues") for child in found.children]
    returned = [f"{name}, {len(list(same))}×" for name, same in groupby(sorted(found.messages))]
    yield "returns", [Phrase(f"to the inbox: {', '.join(returned)}")] if returned else []
    if found.files is not None:
        there = Phrase(f"return to snapshot {found.files.snapshot[:12]}: ").join(changed_files(found.files.counts))
        yield "files", [there, Phrase(f"in {found.files.folder}; the current files are kept first", "quiet")]
    yield "asks again", [Phrase(f"step {one.step}: {one.by} answered {one.answer}") for one in found.answers]


def _effect(effect: LeftEffect, chars: int) -> Phrase:
    came = f" → {brief(effect.output, max(chars // 3, 12))}" if effect.output is not None else ""
    call = call_line(effect.tool, effect.arguments, chars - len(came) - len(effect.tool) - 2)
    return Phrase(f"step {effect.step}, ", "strong").add(call).add(came, "quiet")


def changed_files(counts: Mapping[How, int]) -> Phrase:
    """2 added, 1 changed."""
    phrase = Phrase()
    for how, role in FILES.items():
        if counts.get(how):
            phrase.add(", " * bool(phrase)).add(f"{counts[how]:,} {how}", role)
    return phrase or Phrase("nothing changed", "quiet")


def spent(spend: Spend) -> str:
    """The model calls of a run, their tokens and their price."""
    tokens = f", {spend.tokens_in + spend.tokens_out:,} tokens" if spend.tokens_in + spend.tokens_out else ""
    price = f", ${spend.cost_micros / 1_000_000:,.4f}" if spend.cost_micros else ""
    return f"{counted(spend.model_calls, 'model call')}{tokens}{price}"


def undo(found: UndoPreview, chars: int) -> Report:
    """The effect of an undo, its compensation, and the steps that share the effect."""
    yield "returned", [Phrase(brief(found.result, chars))] if found.result is not None else []
    status = (found.status or "no effect").replace("_", " ")
    yield "effect", [Phrase(status).add(f"  {found.key}" if found.key else "", "quiet")]
    yield "undone by", [Phrase(found.compensated_by)] if found.compensated_by else []
    yield "shared by", [_shared(use, found.run) for use in found.shared_by]
    consumed = rights(found.claims)
    yield "consumed", [Phrase(f"{', '.join(consumed)}; stays so")] if consumed else []


def _shared(use: SharedBy, run: str) -> Phrase:
    """One step that shares the effect."""
    where = "" if use.run == run else f"{use.run}, "
    line = Phrase(f"{where}step {use.step} ", "strong").add(f"{use.name}: ")
    return line.add("shares the same effect" if use.how == "inherited" else "took its result as its own")
