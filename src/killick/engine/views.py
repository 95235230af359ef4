"""Views of runs for people: a run, an open wait, a line of a listing."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from killick.model import events as e
from killick.store.records import RunRow, shown_tags


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a run, in short.

    id, agent                     the run, and the name of its agent
    status                        queued, running, waiting, code_mismatch, paused, completed, failed or cancelled
    step                          the number of the current step
    stage, plan                   the current stage, and all planned stages
    waits                         the open waits
    wake_at_us                    when time wakes it, in microseconds since the epoch
    priority, tags                as given at the start
    parent                        the run that spawned it
    started_at_us, changed_at_us  in microseconds since the epoch
    build                         the version of the code
    holder                        the process that executes it
    """

    id: str
    agent: str
    status: str
    step: str | None
    stage: str | None
    plan: tuple[str, ...]
    waits: tuple[Wait, ...]
    wake_at_us: int | None
    priority: int
    tags: tuple[str, ...]
    parent: str | None
    started_at_us: int
    changed_at_us: int
    build: e.Build
    holder: str | None


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """An open wait of a run. `kd.answer` takes it, or its id.

    id, run, step  the wait, its run, and the number of the step
    waits_for      "answer", "settlement", "event", "time", "child" or "mend" (corrected code)
    name           the name of the message, of the child or of the tool
    prompt         the question
    to             the people and roles that are asked
    deadline_us    when it expires, in microseconds since the epoch
    since_us       when it opened
    verbs          the possible answers
    options        the values to choose from
    schema         the JSON schema of a response
    intention      the call that is to be approved or settled
    need           the number of approvers that must agree
    rule           the rule that requires the approval
    """

    id: str
    run: str
    step: str
    waits_for: str
    name: str
    prompt: str | None
    to: tuple[str, ...]
    deadline_us: int | None
    since_us: int
    verbs: tuple[str, ...] = ()
    options: tuple[Any, ...] = ()
    schema: Any = None
    intention: Any = None
    need: int = 1
    votes: tuple[str, ...] = ()
    """The people who agreed so far."""
    may: tuple[str, ...] | None = None
    """The people who may answer, if known."""
    rule: str | None = None
    reason: str | None = None
    """Why the rule requires it."""
    because: Any = None
    """Why the agent, or the model that decided it, wants it."""
    digest: str | None = None
    """Identifies the question: a changed question has another digest and may have the same id."""
    round: int = 0
    """The number of escalations."""
    opened: int = 0
    """The number of the event that opened it."""
    apart: Any = None
    """The people who cannot approve, and what each of them did, if duties are separate; else None."""

    @property
    def is_agreed(self) -> bool:
        """Whether the quorum is complete and the run has not consumed it yet."""
        return self.need > 1 and len(self.votes) >= self.need

    @property
    def with_move(self) -> str:
        """The wait in words, with the client's call that ends it."""
        if self.waits_for == "event":
            return f"{self}; call kd.send({self.run!r}, {self.name!r}, …)"
        if not self.verbs:
            return str(self)
        verb = "'respond'" if self.options else " | ".join(map(repr, self.verbs))
        values = " | ".join(map(repr, self.options)) or "…"
        value = f", value={values}" if {"respond", "happened"} & {*self.verbs} else ""
        return f"{self}; call kd.answer({self.id!r}, {verb}{value}{', by=…' if self.to else ''})"

    def __str__(self) -> str:
        what = self.prompt or self.name
        who = f" (asked of {', '.join(self.to)})" if self.to else ""
        return f"{self.waits_for} at step {self.step}: {what}{who}"


def key_of(intention: Any) -> str | None:
    """The idempotency key of the call that a person is to settle: what to look for in the remote service."""
    found: str | None = _field(intention, "key")
    return found


def needs_value(wait: Wait) -> bool:
    """Whether "it happened" is no answer without the value that the tool returned."""
    return bool(_field(wait.intention, "returns"))


def _field(intention: Any, name: str) -> Any:
    """A field of an intention, which may be of any kind."""
    return cast("dict[str, Any]", intention).get(name) if isinstance(intention, dict) else None


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a listing, as in RunInfo. `number` is the cursor for the next page."""

    number: int
    id: str
    agent: str
    status: str
    priority: int
    wake_at_us: int | None
    started_at_us: int
    changed_at_us: int
    tags: tuple[str, ...]

    @classmethod
    def of(cls, row: RunRow) -> Listed:
        """A run by its row of the store's index, without internal tags."""
        same = {name: getattr(row, name) for name in cls.__struct_fields__ if name not in ("id", "tags")}
        return cls(id=row.run, tags=shown_tags(row.tags), **same)
