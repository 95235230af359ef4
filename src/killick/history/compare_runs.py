"""Compares two runs: their shared prefix, the changed conditions of a fork, and the first differing step.

Read-only. Steps with the same events are never read; others are matched by number and compared by content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from killick.history.diff import Diff, across, last_shared, shown
from killick.history.phrasing import arguments, cut, entries_of, inline
from killick.history.timeline import Timeline, timeline
from killick.history.timeline_parts import Step, transition
from killick.log.log import Log
from killick.model import events as e
from killick.model.codec import canonical, plain
from killick.model.facts import OUT_OF_BAND, StepStatus
from killick.model.fold import Fold

How = Literal["call", "arguments", "outcome", "output", "absent"]
Changed = Literal["output", "input", "context", "model", "effects"]

_CALL_CHARS: Final = 1_000


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A changed condition of a fork: an output, the input, the context, a model, or the effects mode; and its old
    value."""

    run: str
    what: Changed
    step: str | None = None
    value: Any = None
    was: Any = None
    unset: tuple[str, ...] = ()

    def line(self, chars: int = 60) -> str:
        """Returns one line of about that length."""
        match self.what:
            case "output":
                return f"{self.step} returned {shown(plain(self.value), chars)}"
            case "context":
                named = [f"{name}={shown(plain(value), chars)}" for name, value in entries_of(self.value).items()]
                return f"context {', '.join([*named, *(f'without {name}' for name in self.unset)])}"
            case "input":
                return f"input {shown(plain(self.value), chars)}"
            case _:
                return f"{self.what} {self.value}"


class Shared(msgspec.Struct, frozen=True):
    """The shared prefix of two timelines: up to this position, an event of `run`."""

    run: str
    seq: int
    place: str
    steps: int


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step in one of two runs."""

    sort: e.Sort
    name: str
    status: StepStatus
    arguments: Any
    output: Any
    failure: str | None

    @property
    def call(self) -> str:
        """The call, as source code."""
        inside = "" if self.arguments in (None, {}) else arguments(self.arguments, _CALL_CHARS)
        bare = self.sort in ("decision", "undo")
        return self.name if bare else f"{self.name} {inside}" if self.sort == "wait" else f"{self.name}({inside})"

    @property
    def outcome(self) -> str:
        """Its outcome; empty if none."""
        if self.status != "done":
            return self.failure or self.status.replace("_", " ")
        return "" if self.output is None else inline(self.output)

    def line(self, chars: int = 60) -> str:
        """Returns the call and its outcome in one line of about that length."""
        outcome = f" → {cut(self.outcome, max(chars // 2, 12))}" if self.outcome else ""
        return cut(self.call, max(chars - len(outcome), 12)) + outcome


class Pair(msgspec.Struct, frozen=True):
    """A step number, and each run's step there. `how` is None if they are equal."""

    step: str
    how: How | None
    one: ComparedStep | None
    two: ComparedStep | None


class RunComparison(msgspec.Struct, frozen=True):
    """Two runs: their shared prefix (None: none), the changed conditions, and the steps from the first difference."""

    one: Timeline
    two: Timeline
    shared: Shared | None
    conditions: tuple[Condition, ...]
    pairs: tuple[Pair, ...]
    diff: Diff

    @property
    def diverges_at(self) -> Pair | None:
        """The first differing step; None if there is none."""
        return self.pairs[0] if self.pairs else None

    def why(self) -> str:
        """How they differ, in a few words."""
        first = self.diverges_at
        if first is None:
            return "every step is the same so far"
        if first.how == "absent":
            there, gone = (self.one, self.two) if first.one is not None else (self.two, self.one)
            ended = (
                f"had ended ({gone.status})" if gone.ended_at is not None else f"has not come so far ({gone.status})"
            )
            return f"step {first.step}: {there.run} took it, {gone.run} {ended}"
        assert first.one is not None
        assert first.two is not None
        words = {
            "call": f"{first.one.name} in the one, {first.two.name} in the other",
            "arguments": "the same call with other arguments",
            "outcome": f"one is {first.one.status}, the other {first.two.status}".replace("_", " "),
            "output": "the same call with another outcome",
        }
        return f"step {first.step}: {words[first.how or 'output']}"

    def document(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {
            "shared": _built(self.shared),
            "conditions": [_built(condition) for condition in self.conditions],
            "diverges_at": _built(self.diverges_at),
            "steps": [_built(pair) for pair in self.pairs],
            "patch": self.diff.patch(),
            **({"files": _built(self.diff.files)} if self.diff.files is not None else {}),
        }


def _built(part: Any) -> Any:
    if isinstance(part, msgspec.Struct):
        return {name: _built(getattr(part, name)) for name in part.__struct_fields__}
    return [_built(each) for each in part] if isinstance(part, tuple) else plain(part)  # pyright: ignore


def compare(log: Log, one: str, two: str) -> RunComparison:
    """Compares two runs at their heads."""
    paths = Path(log, one), Path(log, two)
    shared = _shared(log, *paths) if last_shared(log, one, two) else None
    pairs = list(_pairs(*paths))
    first = next((place for place, pair in enumerate(pairs) if pair.how is not None), len(pairs))
    conditions = tuple(conditions_between(log, one, two))
    return RunComparison(
        paths[0].timeline, paths[1].timeline, shared, conditions, tuple(pairs[first:]), across(log, one, two)
    )


# conditions of a fork -----------------------------------------------------------------------------


def conditions_between(log: Log, one: str, two: str) -> Iterator[Condition]:
    """Returns the changes of every fork between the common ancestor and either run."""
    ones, twos = _contributing_runs(log, one), _contributing_runs(log, two)
    for line, other in ((ones, twos), (twos, ones)):
        for run in reversed(line):
            if run not in other:
                yield from changed_in(log, run)


def _contributing_runs(log: Log, run: str) -> list[str]:
    """Returns a run, and those ancestors of whose own events it has any."""
    return [head.run for head, up_to in log.ancestry(run) if up_to > head.base]


def changed_in(log: Log, run: str) -> tuple[Condition, ...]:
    """Returns a fork's changed conditions; none for a run that is no fork."""
    head = log.head(run)
    if head.parent is None:
        return ()
    (_, forked, _), *others = log.read(run, after=head.base, limit=100)
    assert isinstance(forked, e.RunForked)
    parent, now = log.state(head.parent, head.base), log.state(head.parent)
    found: list[Condition] = []
    for seq, event, _ in others:
        if isinstance(event, e.RunTaken | e.StepIntended) or getattr(event, "by", None) in ("agent", "model"):
            break
        data = log.data(run, seq)
        if isinstance(event, e.StepOverridden | e.DecisionMade):
            # Its former output may follow the cut, because the fork does not share it.
            was = parent.outputs.get(event.step, now.outputs.get(event.step))
            value = data.get("choice", data.get("output"))
            found.append(Condition(run=run, what="output", step=event.step, value=value, was=was))
        elif isinstance(event, e.ContextChanged):
            value = data.get("set", data.get("document", {}))
            document = entries_of(parent.context.document)
            was = {name: document[name] for name in (*entries_of(value), *data.get("unset", ())) if name in document}
            unset = tuple(data.get("unset", ()))
            found.append(Condition(run=run, what="context", value=value, was=was, unset=unset))
    if forked.renews_input:
        given = log.data(run, head.base + 1).get("input")
        found.append(Condition(run=run, what="input", value=given, was=parent.input))
    if forked.model is not None:
        found.append(Condition(run=run, what="model", value=forked.model, was=parent.fold.facts.model))
    return (*found, Condition(run=run, what="effects", value=forked.effects))


# timelines ----------------------------------------------------------------------------------------


class StepKeys:
    """The identities of the steps of one timeline."""

    def __init__(self, log: Log, run: str, fold: Fold) -> None:
        self.run, self.fold = run, fold
        self._owners = [(head.base, head.run) for head, _ in log.ancestry(run)]

    def key(self, number: str) -> tuple[Any, ...]:
        """Returns a key that is equal for steps with the same events; an open step is unique to its run."""
        step = self.fold.step(number)
        assert step is not None
        intended = self.owner(step.intended), step.intended
        if not step.ended:
            return *intended, self.run, step.status, len(step.attempts)
        return *intended, self.owner(step.ended), step.ended

    def owner(self, seq: int) -> str:
        """Returns the ancestor that wrote an event."""
        return next(run for base, run in self._owners if seq > base)


class Path(StepKeys):
    """One timeline of a run, with the identities of its steps."""

    def __init__(self, log: Log, run: str) -> None:
        self.timeline = timeline(log, run)
        self.steps = [entry for entry in self.timeline.entries if isinstance(entry, Step)]
        super().__init__(log, run, self.timeline.state.fold)


def place_of(log: Log, run: str, seq: int, side: Literal["before", "after"] = "after") -> str:
    """Names an event as a position; `side` decides where one step ends as the next begins."""
    steps = log.state(run, seq).fold.steps
    after = next((f"{step.id}:after" for step in reversed(steps) if step.ended == seq), None)
    if after is not None and side == "after":
        return after
    following = log.event(run, seq + 1) if seq < log.head(run).seq else None
    if isinstance(following, e.StepIntended | e.DecisionMade):
        return f"{following.step}:before"
    return after or ("start" if seq == 1 else f"@{seq}")


def _shared(log: Log, one: Path, two: Path) -> Shared:
    last, count = None, 0
    for mine, other in zip(one.steps, two.steps, strict=False):
        if mine.number != other.number or one.key(mine.number) != two.key(other.number):
            break
        last, count = mine.number, count + 1
    if last is None:
        return Shared(one.owner(1), 1, "start", 0)
    step = one.fold.step(last)
    assert step is not None
    seq = step.ended
    return Shared(one.owner(seq), seq, f"{last}:after", count)


def _pairs(one: Path, two: Path) -> Iterator[Pair]:
    """Returns every step of either run by number, without the shared ones; out-of-band compensations come last."""
    ones, twos = ({step.number: step for step in each.timeline.steps()} for each in (one, two))
    for number in sorted({**ones, **twos}, key=in_order):
        mine, other = ones.get(number), twos.get(number)
        if mine is not None and other is not None and one.key(number) == two.key(number):
            continue
        yield paired(number, mine, other)


def paired(number: str, one: Step | None, two: Step | None) -> Pair:
    """Returns a step number with both runs' steps."""
    left, right = (_seen(step) if step is not None else None for step in (one, two))
    return Pair(number, "absent" if left is None or right is None else _differs(left, right), left, right)


def in_order(number: str) -> tuple[bool, list[int]]:
    """Returns the key by which step numbers are sorted."""
    return number.startswith(OUT_OF_BAND), [int(part) for part in number.split(".")]


def _differs(one: ComparedStep, two: ComparedStep) -> How | None:
    if (one.sort, one.name) != (two.sort, two.name):
        return "call"
    if canonical(one.arguments) != canonical(two.arguments):
        return "arguments"
    if (one.status, one.failure) != (two.status, two.failure):
        return "outcome"
    return "output" if canonical(one.output) != canonical(two.output) else None


def _seen(step: Step) -> ComparedStep:
    arguments, output, name = step.arguments, step.output, step.name
    if step.decision is not None:
        name, arguments = str(step.decision.question or name), {"options": step.decision.options}
    elif step.sort == "wait" and step.waits:
        wait = step.waits[0]
        # A child of another run has another id, which is no difference.
        name, arguments = {
            "child": ("waits for a child", None), "time": ("sleeps", None), "event": ("waits for", wait.name),
        }.get(wait.waits_for, ("asks", wait.prompt or wait.name))  # fmt: skip
        output = entries_of(output).get("result") if wait.waits_for == "child" else output
    elif step.sort == "scope":
        output = transition(step) or None
    elif step.sort == "undo":
        name, arguments = f"undo {step.undoes} {name}", None
    failure = f"{step.failure.type.rpartition('.')[2]}: {step.failure.message}" if step.failure is not None else None
    return ComparedStep(
        sort=step.sort, name=name, status=step.status, arguments=arguments, output=output, failure=failure
    )  # fmt: skip
