"""The world of a rehearsal: fakes tools, models and people, injects one fault, and counts effects.

Nothing reaches the outside, except through tools that the user made real.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from killick.check.crashes import World, current_process
from killick.check.default_replies import Calls, offered, sample_answer, sample_reply
from killick.check.fakes import Fakes, is_same
from killick.check.samples import sample
from killick.client.client import Client
from killick.clock import LeapingClock
from killick.definitions.markers import KEY, STEP, ToolStep
from killick.definitions.policy import DidNotHappen, Effect, Happened, Policy
from killick.engine.replay import short
from killick.engine.steps.attempt import Applied
from killick.engine.steps.intention import Intent
from killick.engine.views import Wait
from killick.errors import KillickError, RateLimited
from killick.model.events import EffectClass, Sort

CallTrouble = Literal["timeout", "unheard", "lost", "limited", "broken", "paused"]
WaitTrouble = Literal["twice", "late", "expired", "otherwise"]

TROUBLES: Final[Mapping[CallTrouble | WaitTrouble, str]] = {
    "timeout": "times out once, and nothing happened",
    "unheard": "does its work, and the answer is lost once",
    "lost": "does its work, and the answer is lost every time",
    "limited": "is rate limited once",
    "broken": "is out of order from then on",
    "paused": "is running when a person pauses the run, and resumes it later",
    "twice": "is answered twice",
    "late": "is answered when its deadline has passed",
    "expired": "is never answered, and its deadline passes",
    "otherwise": "is answered in another way",
}
"""The faults of a call or a question, in words."""

RETRY_AFTER_SECONDS: Final = 30.0
SETTLED_MAX: Final = 2
"""How often a person answers "did not happen, retry" for one step before stopping it."""


class Trouble(msgspec.Struct, frozen=True):
    """A fault, and the step that it hits. `answer` is an alternative answer."""

    kind: CallTrouble | WaitTrouble
    run: str
    step: str
    answer: tuple[str, Any] | None = None


class Called(msgspec.Struct, frozen=True):
    """One call of a tool or a model."""

    run: str
    step: str
    sort: Sort
    name: str
    effect: EffectClass | None
    attempt: int

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}"


class Declared(NamedTuple):
    """A tool's declaration, from its first call."""

    name: str
    fn: Callable[..., Any]
    policy: Policy
    keyed: bool
    """Whether it receives its idempotency key, and so can pass it on."""


class OutOfOrder(Exception):
    """Raised by a tool that fails permanently in a rehearsal."""


@dataclass(kw_only=True)
class Environment:
    """The environment of an agent, shared by all its rehearsals."""

    fakes: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    real: frozenset[str] = frozenset()
    answers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: Mapping[str, Any] = field(default_factory=dict[str, Any])
    calls: Calls = "each"
    """The tools that a model without a fake calls."""
    samples: dict[tuple[str, Any], Any] = field(default_factory=dict[tuple[str, Any], Any])
    """The samples of tools without a fake, by name and type. The engine copies a tool's value before code sees it."""

    def answer_to(self, wait: Wait) -> tuple[str, Any]:
        """Returns a question's answer: the configured one, or the first that fits."""
        for asked, answer in self.answers.items():
            if asked in ("*", wait.step, wait.name) or asked.lower() in str(wait.prompt).lower():
                return as_answer(wait, answer)
        if "approve" in wait.verbs:
            return "approve", None
        return "respond", wait.options[0] if wait.options else sample_answer(wait.schema)


def as_answer(wait: Wait, answer: Any) -> tuple[str, Any]:
    """Parses an answer: a verb, a pair of verb and value, or a value."""
    match answer:
        case (str(verb), value):
            return verb, value
        case str(verb) if verb in wait.verbs:
            return verb, None
        case _:
            return "respond", answer


class Stage(World):
    """One rehearsal's world, and its interceptor."""

    def __init__(self, around: Environment, trouble: Trouble | None = None) -> None:
        super().__init__()
        self.around = around
        self.trouble = trouble
        self.struck: Called | Wait | None = None
        self.called: list[Called] = []
        self.asked: list[Wait] = []
        self.woken: dict[str, int] = {}
        """Tools whose outcome only a person could resolve, and how often one was asked."""
        self.declared: dict[str, Declared] = {}
        self.doer: dict[str, str] = {}
        """The tool of each effect."""
        self.stand_in = self
        self.sampled: set[str] = set()
        self.offered: set[str] = set()
        """The tools that models were offered."""
        self._fakes = Fakes(around.fakes)
        self._values: dict[tuple[str, str], Any] = {}
        self._happened: dict[tuple[str, str], Any] = {}
        self._honoured: set[str] = set()
        self._broken: set[str] = set()
        self._patience: dict[tuple[str, str], int] = {}
        self._lost: set[tuple[str, str]] = set()

    # tools and models -------------------------------------------------------------------------

    async def apply(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        """Makes one attempt, with its fault if due."""
        called = Called(place.run, place.id, intent.sort, intent.name, intent.effect, place.attempt)
        self.called.append(called)
        keyed = any(marker is KEY or marker is STEP for marker in intent.injected.values())
        if intent.sort == "tool":
            self.declared.setdefault(intent.name, Declared(intent.name, intent.fn, intent.policy, keyed))
        elif intent.sort == "model":
            self.offered.update(tool.name for tool in offered(intent.arguments))
        self.changes += 1
        trouble = self._strikes(called)
        if trouble == "paused" and self.client is not None:
            self.client.pause(place.run, by="rehearsal")
        if trouble == "limited":
            return Applied(error=RateLimited("rate limited in a rehearsal", retry_after=RETRY_AFTER_SECONDS))
        if trouble == "timeout":
            return Applied(error=TimeoutError("timed out in a rehearsal"), timed_out=True)
        if trouble == "broken":
            self._broken.add(intent.name)
        if intent.name in self._broken and intent.sort != "undo":
            return Applied(error=OutOfOrder(f"{intent.name} is out of order in this rehearsal"))
        applied = await self._performed(intent, place, real)
        if trouble == "lost":
            self._lost.add((place.run, place.id))
        if applied.error is None and (trouble == "unheard" or (place.run, place.id) in self._lost):
            return Applied(error=TimeoutError("the answer was lost in a rehearsal"), timed_out=True)
        return applied

    def _strikes(self, what: Called | Wait) -> CallTrouble | WaitTrouble | None:
        """Returns the fault of a call the first time, and of a question every time."""
        trouble = self.trouble
        if trouble is None or (trouble.run, trouble.step) != (what.run, what.step):
            return None
        if isinstance(what, Called) and self.struck is not None:
            return None
        self.struck = what
        return trouble.kind

    async def _performed(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        life = current_process()
        life.point(f"before {intent.name} ran at step {place.id}")
        applied = await real() if self._is_real(intent.name) else await self._faked(intent, place)
        if applied.error is None:
            life.touch(self._count, intent, place, applied.value)
            self.changes += 1
        life.point(f"after {intent.name} ran at step {place.id}")
        return applied

    def _is_real(self, name: str) -> bool:
        return "*" in self.around.real or name in self.around.real

    async def _faked(self, intent: Intent, place: ToolStep) -> Applied:
        """A fake returns the same value for the same step, across crashes."""
        at = (place.run, place.id)
        if at not in self._values:
            applied = await self._fakes.apply(intent, place)
            if applied is not None and applied.error is not None:
                return applied
            self._values[at] = self._sample(intent) if applied is None else applied.value
        return Applied(self._values[at])

    def _sample(self, intent: Intent) -> Any:
        if intent.sort == "undo" or intent.returns is None:
            return None
        self.sampled.add(intent.name)
        if intent.sort == "model":
            return sample_reply(intent, self.around.calls)
        samples, kind = self.around.samples, (intent.name, intent.returns)
        if intent.returns is not Any and kind not in samples:
            samples[kind] = sample(intent.returns, intent.name)
        return samples.get(kind)

    def _count(self, intent: Intent, place: ToolStep, value: Any) -> None:
        if intent.effect in (None, "reads"):
            return
        # A compensation receives the key of the effect that it undoes. A retried transaction was rolled back before,
        # and the files of a workspace tool went back.
        honours = intent.sort == "undo" or intent.effect in ("transaction", "workspace")
        honours = honours or self.declared[intent.name].keyed
        if honours and place.key in self._honoured:
            return
        call = f"{intent.name}({short(intent.recording)})"
        label = f"undoing {call}" if intent.sort == "undo" else call
        self.effects[label] += 1
        self.doer[label] = intent.name
        self._happened[place.run, place.id] = value
        self._honoured.add(place.key)

    def by_tool(self) -> Counter[str]:
        """How often each tool acted."""
        made: Counter[str] = Counter()
        for label, count in self.effects.items():
            made[self.doer[label]] += count
        return made

    async def call_hook(self, fn: Callable[..., Any], effect: Effect, real: Callable[[], Awaitable[Any]]) -> Any:
        """Answers a reconciler or a confirmation from this world's effects."""
        current_process().point(f"before looking what became of {effect.tool}")
        if self._is_real(effect.tool):
            return await real()
        run = effect.key.partition(":step_")[0]
        happened = (run, effect.step) in self._happened
        confirm = self.declared[effect.tool].policy.confirm if effect.tool in self.declared else None
        if confirm is not None and is_same(confirm, fn):
            return happened
        return Happened(self._happened[run, effect.step]) if happened else DidNotHappen()

    def copied(self) -> Self:
        """Returns an independent copy."""
        twin = super().copied()
        twin._fakes = self._fakes.copied()
        return twin

    # people -----------------------------------------------------------------------------------

    def unpaused(self, client: Client) -> bool:
        """A person resumes a paused run."""
        if self.trouble is None or self.trouble.kind != "paused":
            return False
        paused = [listed.id for listed in client.list(status="paused")]
        for run in paused:
            client.resume(run, by="rehearsal")
        return bool(paused)

    def respond(self, client: Client, waits: Sequence[Wait]) -> bool:
        """Acts as people and other programs; False if none can do anything."""
        done = self.unpaused(client)
        self.changes += 1
        for wait in waits:
            if wait.waits_for == "settlement":
                done |= self._settle(client, wait)
            elif wait.waits_for == "answer":
                self.asked.append(wait)
                done |= self._answer(client, wait)
            elif wait.waits_for == "event":
                client.send(wait.run, wait.name, self.around.messages.get(wait.name))
                done = True
        return done

    def _settle(self, client: Client, wait: Wait) -> bool:
        intention: Mapping[str, Any] = wait.intention or {}
        asked = client.state(wait.run).fold.step(wait.step)
        undoing = "undoing " if asked is not None and asked.sort != "tool" else ""
        tool = f"{undoing}{intention.get('tool', '')}"
        self.woken[tool] = self.woken.get(tool, 0) + 1
        at = (wait.run, wait.step)
        self._patience[at] = self._patience.get(at, SETTLED_MAX) - 1
        if "not" not in wait.verbs or self._patience[at] < 0:
            client.answer(wait.id, "stop", by="rehearsal", comment=wait.prompt)
        elif at in self._happened:
            client.answer(wait.id, "happened", value=self._happened[at], by="rehearsal")
        else:
            client.answer(wait.id, "not", by="rehearsal")
        return True

    def _answer(self, client: Client, wait: Wait) -> bool:
        kind = self._strikes(wait)
        verb, value = self.around.answer_to(wait)
        if self.trouble is not None and kind == "otherwise" and self.trouble.answer is not None:
            verb, value = self.trouble.answer
        if kind in ("late", "expired") and wait.deadline_us is not None:
            clock = client.runtime.clock
            assert isinstance(clock, LeapingClock)
            clock.advance(max(0, wait.deadline_us - clock.now_us()) / 1_000_000 + 1)
            if kind == "expired":
                return True
        answer: Any = verb
        try:
            people = _people(wait)
            for by in people[: wait.need - len(wait.votes) if answer == "approve" else 1]:
                client.answer(wait.id, answer, value=value, by=by)
        except KillickError:
            return kind == "late"
        if kind == "twice":
            with contextlib.suppress(KillickError):
                client.answer(wait.id, answer, value=value, by=people[-1])
        return True


def _people(wait: Wait) -> list[str]:
    """Returns the answering people: those permitted who have not yet answered, or enough of them if anyone may."""
    anybody = ["rehearsal", *(f"rehearsal {number}" for number in range(2, wait.need + 2)), "another person"]
    past = {*wait.votes, *(wait.apart or ())}
    return [name for name in (anybody if wait.may is None else wait.may) if name not in past]
