"""Triggers, declared with the agents: the source that starts an agent, and the policies for late and overlapping runs.

Declares and describes; `workers.trigger_runner` acts. What is declared is recorded as a spec, which any worker obeys.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias, get_args

import msgspec
from cronsim import CronSimError

from killick.clock import SET_BACK_US
from killick.definitions.agents import Agent, AnyAgent
from killick.definitions.schedules import Cron, Every, Missed, Overlap, Schedule, zone
from killick.errors import DeclarationRefused, DurationRefused, KillickError
from killick.model import events as e
from killick.model import system_events
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.retry import Duration, seconds

OWN: Final = "killick.trigger:"
"""How the agents of triggers' own logs are named, before the trigger's name."""

LOG: Final = "trigger:"
"""How triggers' own logs are named, before the trigger's name."""

EVENT: Final = "event:"
"""How the logs of triggers that listen to an event are tagged, before the event's name."""

TAG: Final = "trigger"
"""What the logs of all triggers are tagged with."""

INTERVAL_SECONDS_MIN: Final = 0.1

_NAME: Final = re.compile(r"[\w.-]+")
_UNSET: Final[Any] = msgspec.UNSET

Condition: TypeAlias = Callable[[], Any] | Callable[[], Awaitable[Any]]


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """One firing of a trigger, from which a function makes the input.

    trigger  the name of the trigger
    number   the number of the firing, from 1
    due      when it was due, in the trigger's time zone
    at       when it fired
    run      the id of the run that it starts
    body     the body of the event
    value    the value of the condition
    """

    trigger: str
    number: int
    due: datetime
    at: datetime
    run: str
    body: Any = None
    value: Any = None


class Previous(msgspec.Struct, frozen=True, kw_only=True):
    """The run of the firing before: its id, its current status and its result."""

    id: str
    status: str
    result: Any = None


class TriggerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a trigger.

    name, agent  the trigger, and the agent that it starts
    sort, what   "cron", "every", "when" or "event"; and the expression, interval, condition or event
    next_us      when it is due next, in microseconds since the epoch
    last_us      when it fired last
    fired        the number of firings
    queued       the number of firings that wait for the run before
    holds        whether its condition holds
    paused       whether it is paused
    run, status  its last run, and the status of that run
    declared     whether this process declares it
    is_set       whether a worker has taken it up
    """

    name: str
    sort: str
    what: str
    agent: str
    next_us: int | None = None
    last_us: int | None = None
    fired: int = 0
    queued: int = 0
    holds: bool = False
    paused: bool = False
    run: str | None = None
    status: str | None = None
    declared: bool = False
    is_set: bool = True


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded declaration. `what` is the expression, the interval, the condition's name or the event's;
    `makes_input` names the function that makes the input, where there is one."""

    sort: system_events.TriggerSort
    what: str
    agent: str
    tz: str = "UTC"
    seconds: float | None = None
    missed: Missed = "once"
    overlap: Overlap = "skip"
    input: Any = None
    makes_input: str | None = None
    priority: int | None = None
    tags: tuple[str, ...] = ()

    @property
    def digest(self) -> e.Digest:
        """What tells two declarations apart."""
        return e.to_text(digest(msgspec.structs.asdict(self), at="spec"))

    @property
    def schedule(self) -> Schedule | None:
        """When it is due by the clock; None where something else sets it off."""
        if self.sort == "cron":
            return Cron(self.what, self.tz)
        return Every(round((self.seconds or 0) * 1_000_000)) if self.sort == "every" else None

    def first_due(self, now_us: int) -> int | None:
        """When it is due first, declared now. A condition wants to be looked at from now on."""
        schedule = self.schedule
        if schedule is not None:
            return schedule.begin(now_us)
        return now_us if self.sort == "when" else None

    def next_due(self, now_us: int, last_us: int) -> int | None:
        """When it is due next, after the time that it fired for last. A last time that no clock can have meant, as it
        is later than the next two steps, does not count: a clock was ahead."""
        return self.first_due(max(now_us, last_us) if self.can_be_due(last_us, now_us) else now_us)

    def can_be_due(self, at_us: int, now_us: int) -> bool:
        """Whether its next time can be this one: at most one step after its next step from now."""
        schedule = self.schedule
        latest = now_us + SET_BACK_US if schedule is None else schedule.begin(schedule.begin(now_us))
        return at_us <= latest

    def __str__(self) -> str:
        match self.sort:
            case "cron":
                return f"cron {self.what} {self.tz}"
            case "every":
                return f"every {self.what}"
            case "when":
                return f"when {self.what}, every {self.seconds:g} s"
            case "event":
                return f"on {self.what}"


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """A declared trigger: its spec, and the code that only this process has."""

    name: str
    spec: Spec
    agent: AnyAgent
    condition: Condition | None = None
    make_input: Callable[..., Any] | None = None
    make_id: Callable[[Firing], Any] | None = None
    make_subject: Callable[[Firing], Any] | None = None
    place: Any = None

    @property
    def wants_previous(self) -> bool:
        """Whether the function that makes its input looks at the run before."""
        return self.make_input is not None and _parameters(self.make_input)[1] >= 2

    @property
    def log(self) -> str:
        """The id of its own log."""
        return LOG + self.name

    @property
    def own_agent(self) -> str:
        """The agent that its own log goes by, so that only workers that declare it attend to it."""
        return OWN + self.name

    @property
    def tags(self) -> tuple[str, ...]:
        """How its own log is found."""
        return (TAG, EVENT + self.spec.what) if self.spec.sort == "event" else (TAG,)


TRIGGERS: Final[dict[str, Trigger]] = {}
"""The triggers declared in this process, by name. The last one declared under a name counts."""


# declaring ----------------------------------------------------------------------------------------


def cron(
    expression: str,
    agent: Agent[Any, Any],
    *,
    tz: str = "UTC",
    input: Any = _UNSET,  # noqa: A002
    missed: Missed = "once",
    overlap: Overlap = "skip",
    name: str | None = None,
    priority: int | None = None,
    tags: Sequence[str] = (),
) -> Trigger:
    """Starts an agent at the times of a cron expression. Raises DeclarationRefused.

    expression  five fields, such as "0 9 * * mon-fri"
    agent       the agent
    tz          the time zone of the expression, such as "Europe/Oslo"
    input       a value, or a function of the Firing, or of the Firing and the Previous run
    missed      for times at which no worker ran: "skip" them, make up for them "once", or for "all"
    overlap     while the run before has not ended: "skip" the firing, "queue" it, "cancel" that run, or "allow" both
    name        the name of the trigger, after which its runs are named; by default the agent's name

        killick.triggers.cron("0 9 * * mon-fri", report, tz="Europe/Oslo")
    """
    called = _called(name, agent)
    _check_zone(called, tz)
    try:
        Cron(expression, tz).after(0)
    except (CronSimError, AttributeError) as error:
        why = str(error)[:1].lower() + str(error)[1:]
        raise DeclarationRefused(called, f"cron {expression!r}: {why}; write it as '0 9 * * mon-fri'") from None
    except StopIteration:
        raise DeclarationRefused(called, f"cron {expression!r}: never occurs; correct the expression") from None
    spec = Spec(sort="cron", what=expression, agent=agent.name, tz=tz, missed=missed, overlap=overlap)
    return _declare(called, agent, spec, input, priority, tags)


def every(
    interval: Duration,
    agent: Agent[Any, Any],
    *,
    input: Any = _UNSET,  # noqa: A002
    missed: Missed = "once",
    overlap: Overlap = "skip",
    name: str | None = None,
    priority: int | None = None,
    tags: Sequence[str] = (),
) -> Trigger:
    """Starts an agent at intervals, first after one interval. The other options are those of `cron`. Raises
    DeclarationRefused.

    interval  the interval, at least 0.1 s

        killick.triggers.every("15m", sync, overlap="queue")
    """
    called = _called(name, agent)
    length = _interval(called, interval)
    what = interval if isinstance(interval, str) else f"{length:g} s"
    spec = Spec(sort="every", what=what, agent=agent.name, seconds=length, missed=missed, overlap=overlap)
    return _declare(called, agent, spec, input, priority, tags)


def when(
    condition: Condition,
    agent: Agent[Any, Any],
    *,
    every: Duration = "30s",
    input: Any = _UNSET,  # noqa: A002
    overlap: Overlap = "skip",
    name: str | None = None,
    priority: int | None = None,
    tags: Sequence[str] = (),
) -> Trigger:
    """Starts an agent when a condition becomes true. One worker evaluates it. The other options are those of `cron`.
    Raises DeclarationRefused.

    condition  a function without arguments, plain or async
    every      how often it is evaluated
    input      as for `cron`; by default the value of the condition

        killick.triggers.when(has_mail, triage, every="1m")
    """
    called = _called(name, agent)
    if not callable(condition) or _parameters(condition)[0] != 0:
        raise DeclarationRefused(called, f"the condition {_words(condition)} is not a function without arguments")
    length = _interval(called, every)
    spec = Spec(sort="when", what=_words(condition), agent=agent.name, seconds=length, overlap=overlap)
    return _declare(called, agent, spec, input, priority, tags, condition=condition)


def on_event(
    event: str,
    agent: Agent[Any, Any],
    *,
    input: Any = _UNSET,  # noqa: A002
    id: Callable[[Firing], Any] | None = None,  # noqa: A002
    subject: Callable[[Firing], Any] | None = None,
    overlap: Overlap = "allow",
    name: str | None = None,
    priority: int | None = None,
    tags: Sequence[str] = (),
) -> Trigger:
    """Starts an agent for every published event of a name. The other options are those of `cron`. Raises
    DeclarationRefused.

    event    the name, as in `kd.triggers.publish(name)`
    input    as for `cron`; by default the body of the event
    id       a function of the Firing that returns the id of the run; an event whose id is taken starts no run
    subject  a function of the Firing that returns the person whose data it is, in an encrypted store, or None

        killick.triggers.on_event("order.created", ship, id=lambda firing: f"order-{firing.body['number']}")
    """
    called = _called(name, agent)
    if not isinstance(event, str) or not event or event.startswith("killick."):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationRefused(called, f"{event!r} is not a valid event name; use one such as 'order.created'")
    for option, made in (("id", id), ("subject", subject)):
        if made is not None and (not callable(made) or _parameters(made)[0] > 1 or not _parameters(made)[1]):  # pyright: ignore
            told = f"{option}={_words(made)} is not a function of the firing; give lambda firing: …"
            raise DeclarationRefused(called, told)
    spec = Spec(sort="event", what=event, agent=agent.name, overlap=overlap)
    return _declare(called, agent, spec, input, priority, tags, make_id=id, make_subject=subject)


def _declare(
    name: str, agent: AnyAgent, spec: Spec, given: Any, priority: int | None, tags: Sequence[str], **code: Any
) -> Trigger:
    for option, value, allowed in (("missed", spec.missed, Missed), ("overlap", spec.overlap, Overlap)):
        if value not in get_args(allowed):
            raise DeclarationRefused(name, f"{option}={value!r} is not one of {', '.join(get_args(allowed))}")
    makes = given if callable(given) else None
    if makes is not None and not (_parameters(makes)[0] <= 2 and _parameters(makes)[1]):
        raise DeclarationRefused(name, f"input={_words(makes)} takes neither (firing) nor (firing, previous)")
    spec = msgspec.structs.replace(
        spec,
        input=None if makes is not None else _constant(name, agent, spec, given),
        makes_input=_words(makes) if makes is not None else None,
        priority=priority,
        tags=(tags,) if isinstance(tags, str) else tuple(tags),
    )
    make_input = makes or _own_input(spec, given)
    declared = Trigger(name=name, spec=spec, agent=agent, make_input=make_input, place=_place(), **code)
    if (known := TRIGGERS.get(name)) is not None and known.place is not None and known.place is declared.place:
        raise DeclarationRefused(name, "two triggers of this module have this name; give one name=…")
    TRIGGERS[name] = declared
    return declared


def _own_input(spec: Spec, given: Any) -> Callable[..., Any] | None:
    """Without a declared input, the firing itself is the input."""
    if given is not _UNSET:
        return None
    return {"event": lambda firing: firing.body, "when": lambda firing: firing.value}.get(spec.sort)  # pyright: ignore


def _constant(name: str, agent: AnyAgent, spec: Spec, given: Any) -> Any:
    """An input that is always the same, as it is recorded; one that the agent cannot take is refused here."""
    if given is _UNSET and spec.sort in ("event", "when"):
        return None
    value = None if given is _UNSET else given
    try:
        if value is not None and not agent.takes_input:
            raise DeclarationRefused(name, f"input={value!r}, but {agent.name} takes none")
        recorded = through_codec(value, at="input")
        agent.checked(recorded)
    except DeclarationRefused:
        raise
    except KillickError as error:
        raise DeclarationRefused(name, f"{error}; give an input that {agent.name} takes") from None
    return recorded


def _called(name: str | None, agent: Any) -> str:
    """A trigger's name: that of its agent, unless it is given one. Runs are named after it."""
    if not isinstance(agent, Agent):
        raise DeclarationRefused(name or "trigger", f"{_words(agent)} is not an agent; declare it with @killick.agent")
    called = agent.name if name is None else name
    if not isinstance(called, str) or _NAME.fullmatch(called) is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationRefused(str(called), "a trigger's name has letters, digits and . _ - only; give name=…")
    return called


def _check_zone(name: str, tz: str) -> None:
    try:
        zone(tz)
    except (KeyError, ValueError, OSError, TypeError):
        raise DeclarationRefused(name, f"tz={tz!r} is not a time zone; give one such as Europe/Oslo") from None


def _interval(name: str, interval: Duration) -> float:
    try:
        length = seconds(interval)
    except DurationRefused as error:
        raise DeclarationRefused(name, str(error)) from None
    if length < INTERVAL_SECONDS_MIN:
        raise DeclarationRefused(name, f"every {interval!r} is too often; {INTERVAL_SECONDS_MIN:g} s is the least")
    return length


def _parameters(fn: Callable[..., Any]) -> tuple[int, int]:
    """How many arguments a function has to be given, and how many it can be given by position."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return -1, 0
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed), len(plain)


def _words(thing: Any) -> str:
    return str(getattr(thing, "__qualname__", None) or repr(thing))


def _place() -> Any:
    """The code at a module's top that declares; run again, as by a reload, it is other code."""
    frame = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code if frame.f_code.co_name == "<module>" else None
