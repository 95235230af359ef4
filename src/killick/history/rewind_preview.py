"""Previews a rewind: the steps that a run leaves, and their effects that stay on the ledger. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from killick.engine.effects.branch_point import cut
from killick.engine.effects.rewind import refuse_own, returned
from killick.engine.effects.run_tree import effects_of
from killick.errors import TimeRefused
from killick.history import workspace_files as files
from killick.history.workspace_files import FilesDiff, How
from killick.log.boundaries import RunMoment
from killick.log.log import Log
from killick.model import events as e
from killick.model.facts import Step
from killick.model.ledger import EffectStatus, Ledger, Spend

STANDING: Final = ("happened", "in_doubt", "open")
"""The statuses of effects that are, or may be, in the world."""


class LeftEffect(msgspec.Struct, frozen=True, kw_only=True):
    """An effect that stays in the world."""

    step: e.StepId
    tool: str
    status: EffectStatus
    key: str
    arguments: Any
    output: Any


class LeftChild(msgspec.Struct, frozen=True):
    """A child run that continues."""

    run: str
    status: str


class LeftAnswer(msgspec.Struct, frozen=True):
    """An answer that is dropped; the same question will be asked again."""

    step: e.StepId
    by: str
    answer: Any


class LeftFiles(msgspec.Struct, frozen=True):
    """The restore of the workspace: its folder, the snapshot, and the number of changes."""

    folder: str
    snapshot: str
    counts: Mapping[How, int]


class RewindPreview(msgspec.Struct, frozen=True, kw_only=True):
    """The preview of a rewind: the dropped steps, and their lasting effects. `messages` return to the inbox."""

    run: str
    to: str
    seq: int
    steps: tuple[e.StepId, ...]
    effects: tuple[LeftEffect, ...]
    consumed: tuple[str, ...]
    spend: Spend
    children: tuple[LeftChild, ...]
    messages: tuple[str, ...]
    answers: tuple[LeftAnswer, ...]
    files: LeftFiles | None = None


def preview_rewind(log: Log, run: str, to: str) -> RewindPreview:
    """Previews rewinding a run to a position. TimeRefused if that is impossible."""
    ledger, state = log.ledger(run), log.state(run)
    refuse_own(state.agent, run)
    if (goes_on := state.fold.facts.renewed_as) is not None:
        raise TimeRefused(run, f"continues as {goes_on}; rewind that, or fork this one")
    found = cut(log, run, to)
    steps = left(log, run, found.seq, found.keep)
    # File-only effects are undone with the files, and will be repeated.
    done = effects_of(log, run, [step for step in steps if step.sort == "tool" and step.effect != "workspace"])
    before = log.ledger(run, found.seq).spend
    return RewindPreview(
        run=run,
        to=found.label,
        seq=found.seq,
        steps=tuple(step.id for step in steps),
        effects=tuple(
            LeftEffect(
                step=step.id,
                tool=step.name,
                status=done[step.id].effect.status,
                key=done[step.id].effect.key,
                arguments=state.data(step.edited or step.intended).get("arguments"),
                output=state.output_of(step) if step.status == "done" else None,
            )
            for step in steps
            if step.id in done and done[step.id].effect.status != "did_not_happen"
        ),
        consumed=rights(one.claim for one in ledger.consumed if found.drops(one.seq) and not one.released),
        spend=Spend(**{name: getattr(ledger.spend, name) - getattr(before, name) for name in Spend.__struct_fields__}),
        children=tuple(LeftChild(one.run, one.status) for one in ledger.children if found.drops(one.spawned)),
        messages=tuple(message.name.removeprefix("killick.") for message in returned(log, run, found)),
        answers=tuple(_answers(log, run, steps)),
        files=_files(log, run, ledger, RunMoment(found.files_seq, found.label)),
    )


def _files(log: Log, run: str, ledger: Ledger, place: RunMoment) -> LeftFiles | None:
    root = files.root_at(ledger, place)
    if root is None or ledger.facts.workspace is None:
        return None
    found = files.between(log, (run, RunMoment(log.head(run).seq, "now")), (run, place))
    return LeftFiles(ledger.facts.workspace, root.hex(), found.counts if isinstance(found, FilesDiff) else {})


def left(log: Log, run: str, seq: int, keep: Sequence[int] = ()) -> list[Step]:
    """Returns the steps of the current timeline that a cut drops, without compensating ones."""
    kept = set(keep)
    steps = log.state(run).fold.steps
    return [step for step in steps if step.sort != "undo" and step.intended > seq and step.intended not in kept]


def rights(claims: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of consumed rights, without Killick's internal ones."""
    return tuple(dict.fromkeys(name for claim in claims if (name := claim.partition(":")[0]) != "killick.action"))


def _answers(log: Log, run: str, steps: Iterable[Step]) -> Iterator[LeftAnswer]:
    """Returns people's answers in dropped steps."""
    intended = {step.id: step.intended for step in steps}
    state = log.state(run)
    asked: dict[e.StepId, e.WaitFor] = {}
    for seq, event, _ in log.read(run, after=min(intended.values(), default=1) - 1, limit=max(state.seq, 1)):
        if isinstance(event, e.WaitOpened):
            asked[event.step] = event.waits_for
        if not isinstance(event, e.WaitClosed) or event.how != "answered" or event.by is None:
            continue
        if seq > intended.get(event.step, seq) and asked.get(event.step) in ("answer", "settlement"):
            said: Any = state.data(seq).get("answer")
            yield LeftAnswer(event.step, event.by, said.get("kind") if isinstance(said, dict) else said)  # pyright: ignore
