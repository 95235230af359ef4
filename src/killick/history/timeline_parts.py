"""The parts of a timeline: steps with their attempts, waits and decisions, and the moments between them.

Frozen and lazy: values are read on access. Reads no log by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from killick.errors import RunBroken
from killick.history.phrasing import entries_of
from killick.model import events as e
from killick.model.codec import Damaged, Erased
from killick.model.facts import StepStatus
from killick.model.failure import Failure
from killick.model.typed import convert


class Values:
    """The values of one event, read on access. Erased ones are `Erased`, damaged ones `Damaged`."""

    __slots__ = ("_found", "_read", "seq")

    def __init__(self, read: Callable[[int], Mapping[str, Any]], seq: int) -> None:
        self._read = read
        self.seq = seq
        self._found: Mapping[str, Any] | None = None

    @property
    def all(self) -> Mapping[str, Any]:
        if self._found is None:
            try:
                self._found = self._read(self.seq)
            except RunBroken:
                self._found = defaultdict(lambda: Damaged(b""))
        return self._found

    def get(self, name: str) -> Any:
        found = self.all
        return found[name] if isinstance(found, defaultdict) else found.get(name)


NOTHING: Final = Values(lambda _: {}, 0)


class StoredValue:
    """A value of one of a part's events, by its own name: `prompt = StoredValue("opened")`."""

    def __init__(self, values: str) -> None:
        self._values = values

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: Any, owner: type) -> Any:
        return self if part is None else getattr(part, self._values).get(self._name)


class StoredFailure(StoredValue):
    """The same for a recorded error."""

    def __get__(self, part: Any, owner: type) -> Any:
        found = super().__get__(part, owner)
        if isinstance(found, Erased):
            return Failure.of("killick.Erased", "what was recorded of the error was erased on purpose")
        return found if found is None or found is self else convert(found, Failure, at="failure")


class StoredList(StoredValue):
    """The same for a list: empty if absent."""

    def __get__(self, part: Any, owner: type) -> Any:
        found = super().__get__(part, owner)
        return found if found is self else tuple(found) if isinstance(found, list | tuple) else ()  # pyright: ignore


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a timeline."""


class Settled(Part, frozen=True):
    """An unknown outcome was resolved: by a reconciler, a late result, or a person."""

    at: int
    how: e.Settlement
    by: str | None
    values: Values
    because = StoredValue("values")


class Attempt(Part, frozen=True):
    """One attempt of a step. `died`: its process died before recording an outcome."""

    number: int
    key: str
    started_at: int
    ended_at: int | None = None
    outcome: e.Outcome | None = None
    died: bool = False
    retry_at: int | None = None
    limited: bool = False
    not_retried: e.NotRetried | None = None
    usage: e.Usage | None = None
    settled: Settled | None = None
    values: Values = NOTHING
    progressed: Values = NOTHING
    failure = StoredFailure("values")
    reasoning = StoredValue("values")
    progress = StoredValue("progressed")


class Vote(Part, frozen=True):
    """One approval of a quorum."""

    at: int
    by: str
    values: Values
    answer = StoredValue("values")
    comment = StoredValue("values")


class Wait(Part, frozen=True):
    """A wait within a step, its permitted approvers, and its answers. No verbs: no person answers.

    An escalated question is one wait for each round, with its number. `rule` is set if a contract or a tool requires
    the approval.
    """

    step: str
    waits_for: e.WaitFor
    name: str
    to: tuple[str, ...]
    opened_at: int
    deadline: int | None
    closed_at: int | None = None
    how: e.WaitEnd | None = None
    by: str | None = None
    need: int = 1
    rule: str | None = None
    round: int = 0
    digest: e.Digest | None = None
    votes: tuple[Vote, ...] = ()
    opened: Values = NOTHING
    closed: Values = NOTHING
    prompt = StoredValue("opened")
    verbs = StoredList("opened")
    options = StoredList("opened")
    default = StoredValue("opened")
    schema = StoredValue("opened")
    intention = StoredValue("opened")
    may = StoredList("opened")
    reason = StoredValue("opened")
    contract = StoredValue("opened")
    answer = StoredValue("closed")
    comment = StoredValue("closed")


class Edit(Part, frozen=True):
    """A person's edit of a step's arguments; `changed` has the old and the new value by argument. A rejected edit
    changed nothing."""

    at: int
    by: str
    verdict: e.Verdict | None
    values: Values
    arguments = StoredValue("values")
    changed = StoredValue("values")
    comment = StoredValue("values")
    failure = StoredFailure("values")

    @property
    def stands(self) -> bool:
        return self.verdict is None or self.verdict.ruling != "reject"


class Delay(Part, frozen=True):
    """The step was delayed: by a rate limit, or because the previous holder might still be active."""

    at: int
    until: int
    because: str


class Drift(Part, frozen=True):
    """Later code made the same call with other arguments; the recorded result was kept."""

    at: int
    values: Values
    recorded = StoredValue("values")
    found = StoredValue("values")


class Note(Part, frozen=True):
    """A remark about a step."""

    at: int
    by: str
    values: Values
    note = StoredValue("values")


class Decision(Part, frozen=True):
    """A decision: its options, choice, author and reason."""

    by: str
    values: Values
    question = StoredValue("values")
    options = StoredList("values")
    choice = StoredValue("values")
    because = StoredValue("values")


class Adopted(Part, frozen=True):
    """The source of a reused result: the effect with this key, started in `run`."""

    run: str
    key: str
    seq: int


class Child(Part, frozen=True):
    """A run that a step started or waited for; and its outcome, if recorded."""

    run: str
    agent: str = ""
    status: str | None = None


class Step(Part, frozen=True):
    """One step with all its parts. `entries` are the entries of a scope.

    verdict    the contract's verdict on the intention; `last_verdict`, the one that ended the step before it began,
               after an approval request
    ended_by   the person who rejected or skipped it
    """

    number: str
    sort: e.Sort
    name: str
    status: StepStatus
    seq: int
    intended_at: int
    ended_at: int | None = None
    effect: e.EffectClass | None = None
    stage: str | None = None
    verdict: e.Verdict | None = None
    last_verdict: e.Verdict | None = None
    ended_by: str | None = None
    edits: tuple[Edit, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    delayed_until: int | None = None
    delays: tuple[Delay, ...] = ()
    waits: tuple[Wait, ...] = ()
    decision: Decision | None = None
    drifts: tuple[Drift, ...] = ()
    notes: tuple[Note, ...] = ()
    adopted: Adopted | None = None
    overridden_by: str | None = None
    confirmed: bool | None = None
    undoes: str | None = None
    undone_by: str | None = None
    child: Child | None = None
    sent_to: str | None = None
    entries: tuple[Entry, ...] = ()
    intended: Values = NOTHING
    ended: Values = NOTHING
    overriding: Values = NOTHING
    arguments = StoredValue("intended")
    because = StoredValue("intended")

    @property
    def given(self) -> Any:
        """The effective arguments: the agent's, or a person's edit."""
        standing = [edit.arguments for edit in self.edits if edit.stands]
        return standing[-1] if standing else self.arguments

    @property
    def rejected(self) -> e.Verdict | None:
        """The verdict that rejected it."""
        found = self.last_verdict or self.verdict
        return found if found is not None and found.ruling == "reject" else None

    @property
    def is_skipped(self) -> bool:
        """Whether a person skipped it without being asked."""
        return self.ended_by is not None and (failure := self.failure) is not None and failure.type == "killick.Skipped"

    @property
    def output(self) -> Any:
        """Its output, for any kind of end; None while open."""
        data: Mapping[str, Any] = self.ended.all if self.status == "done" else {}
        return next((data[name] for name in ("output", "answer", "choice", "result") if name in data), None)

    @property
    def failure(self) -> Failure | None:
        """Its failure: its own, or its last attempt's."""
        if self.status != "failed":
            return None
        last = self.attempts[-1] if self.attempts else None
        if last is not None and last.settled is not None and last.settled.how == "stopped":
            because = f": {last.settled.because}" if last.settled.because else ""
            return Failure.of("killick.Stopped", f"stopped by {last.settled.by or 'a person'}{because}")
        found: Any = self.ended.get("failure")
        own = convert(found, Failure, at="failure") if isinstance(found, dict) else None
        return own or (last.failure if last is not None else None)

    @property
    def usage(self) -> e.Usage | None:
        """A model call's usage."""
        return next((attempt.usage for attempt in reversed(self.attempts) if attempt.usage is not None), None)

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "cancelled")


class Moment(Part, frozen=True):
    """An event between the run's steps; `left` are the steps that a rewind dropped."""

    seq: int
    at: int
    kind: str
    event: e.Event
    values: Values
    left: tuple[Step, ...] = ()

    @property
    def data(self) -> Mapping[str, Any]:
        return self.values.all


Entry: TypeAlias = Step | Moment


class Failed(Part, frozen=True):
    """A run's failure; `not_undone` are the failed compensations."""

    at: int
    step: str | None
    values: Values
    failure = StoredFailure("values")
    not_undone = StoredList("values")


def walked(entries: Sequence[Entry]) -> Iterator[Step]:
    """Yields the steps among entries, and the nested ones."""
    for entry in entries:
        if isinstance(entry, Step):
            yield entry
            yield from walked(entry.entries)


def transition(step: Step) -> dict[str, Any]:
    """Describes a state machine's transition: the next state and its wait, or the end."""
    output = entries_of(step.output)
    waits = entries_of(output.get("waits")).get("name")
    found = {name: output[name] for name in ("state", "done") if name in output}
    return found if waits is None else {**found, "after": waits}
