"""Builds the inputs of rules from the folds, identically live and in a later backtest. Reads values only through the
given reader. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, cast

from msgspec.structs import replace

from killick.contracts.contract import Intention, Others, PolicyInput, Ruling
from killick.contracts.facts import IntentionSort
from killick.model import events as e
from killick.model.facts import Step, intended_name
from killick.model.fold import Fold
from killick.model.ledger import Counts, Effect, Ledger, Spend
from killick.model.state import Reader, State

UPDATE: Final = "update"
"""The rule name of a context change."""

_THERE: Final = frozenset({"open", "happened", "in_doubt"})


def policy_input(
    fold: Fold,
    ledger: Ledger,
    reader: Reader,
    *,
    now_us: int,
    seen: int,
    base: int = 0,
    others: Others | None = None,
    since_us: int | None = None,
    mine: tuple[int, int] = (0, 0),
) -> PolicyInput:
    """Returns the state of a run for rules. `base` is the last event that a fork shares with its parent; earlier events
    are not its own. `seen` is the context version that the code has read. `since_us` is when the budget group began.
    `mine` counts how often calls and effects already include this intention."""
    facts = fold.facts

    def past(tool: str) -> Sequence[Mapping[str, Any]]:
        return past_of(ledger, reader, tool, after=base)

    return PolicyInput(
        now_us=now_us,
        started_us=facts.started_at if since_us is None else since_us,
        own=own_part(ledger),
        others=others,
        done=facts.done,
        context=lambda: State(fold, reader).context.document or {},
        context_version=facts.context_version,
        context_seen=seen,
        past=past,
        mine=mine[0],
        mine_acts=mine[1],
    )


def together(done: Mapping[str, int], above: Mapping[str, Any]) -> dict[str, int]:
    """Returns the completed calls of this run and of an ancestor, by name."""
    upper: Mapping[str, int] = above.get("done") or {}
    return {name: done.get(name, 0) + upper.get(name, 0) for name in (*done, *upper)}


def own_part(ledger: Ledger) -> Counts:
    """Returns the run's own counts: in a fork, without the parent's up to the cut."""
    counts, before = ledger.facts.counts, ledger.facts.before
    if before is None:
        return counts
    spend = {name: getattr(counts.spend, name) - getattr(before.spend, name) for name in Spend.__struct_fields__}
    return Counts(
        calls=_less(counts.calls, before.calls),
        effects=_less(counts.effects, before.effects),
        spend=Spend(**spend),
        governed=counts.governed - before.governed,
    )


def _less(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in counts.items()}


def past_of(ledger: Ledger, reader: Reader, tool: str, *, after: int = 0, first: int = 0) -> list[Mapping[str, Any]]:
    """Returns the arguments of a tool's effects after a seq that happened or may have, minus compensated ones. With
    `first`, only those from there on."""
    return [
        reader.data(effect.intended).get("arguments") or {}
        for effect in _there(ledger, after, first)
        if effect.tool == tool
    ]


def pasts(
    ledger: Ledger, reader: Reader, patterns: Iterable[str], *, after: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """The same for all tools that match the patterns, by tool name, so that no effect occurs twice."""
    found: dict[str, list[dict[str, Any]]] = {}
    tools = tuple(patterns)
    for effect in _there(ledger, after) if tools else ():
        if any(fnmatchcase(effect.tool, pattern) for pattern in tools):
            found.setdefault(effect.tool, []).append(dict(reader.data(effect.intended).get("arguments") or {}))
    return found


def _there(ledger: Ledger, after: int, first: int = 0) -> Iterator[Effect]:
    for effect in ledger.effects[first:] if first else ledger.effects:
        if effect.started > after and effect.status in _THERE and not effect.undoes:
            yield effect


# intentions from recorded events ------------------------------------------------------------------


def of_step(event: e.StepIntended, data: Mapping[str, Any]) -> Intention:
    """Returns a step's intention."""
    # A message to another run is a tool step without an effect of its own.
    is_send = event.sort == "tool" and event.effect is None
    arguments: Mapping[str, Any] = data.get("arguments") or {}
    model = None
    if event.sort == "model":
        model, arguments = arguments.get("model"), model_arguments(arguments)
    return Intention(
        name=intended_name(event.sort, event.name),
        sort="send" if is_send else cast("IntentionSort", event.sort),
        arguments=arguments,
        step=event.step,
        effect=event.effect,
        because=data.get("because"),
        model=model if isinstance(model, str) else None,
        paths=data.get("paths") or {},
    )


def model_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model call that rules see: everything but the conversation."""
    return {name: value for name, value in arguments.items() if value is None or isinstance(value, str | int | float)}


def of_the_context(ruling: Ruling, by: str, people: Mapping[str, Sequence[str]] | None = None) -> Ruling:
    """Evaluates a context change. It cannot wait: if approval is required, only an approver may make it."""
    if ruling.ruling != "ask":
        return ruling
    to = () if ruling.approval is None else ruling.approval.to
    known = {name for role in to for name in (people or {}).get(role, (role,))} if people and to else None
    may = by != "agent" and (known is None or by in known)
    message = f"{ruling.message or 'people are to be asked'}; let {' or '.join(sorted(known or ('a person',)))} set it"
    return replace(ruling, ruling="accept" if may else "reject", message=message, approval=None)


def of_edit(step: Step, event: e.StepEdited, data: Mapping[str, Any]) -> Intention:
    """Returns the intention after a person's edit."""
    return Intention(
        name=intended_name(step.sort, step.name),
        sort=cast("IntentionSort", step.sort),
        arguments=data.get("arguments") or {},
        step=event.step,
        effect=event.effect,
        because=data.get("because"),
        by=event.by,
        paths=data.get("paths") or {},
    )


def of_change(event: e.ContextChanged | e.ContextRefused, data: Mapping[str, Any]) -> Intention:
    """Returns the intention of a context change: the values set, and None for the removed ones."""
    removed: dict[str, Any] = dict.fromkeys(data.get("unset") or ())
    return Intention(
        name=UPDATE,
        sort="context",
        arguments={**(data.get("set") or {}), **removed},
        step=event.step or "",
        because=data.get("because"),
        by=event.by,
        paths=data.get("paths") or {},
    )
