"""Rehearses an agent once for every possible interruption, and reports the findings.

Uses an in-memory store and a simulated clock; tools, models and people are faked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

from killick.check.comparison import Alike, FindingCollector, brief, place_of, stage_of
from killick.check.crashes import Ended, Saved, Scenario, Story, simulate
from killick.check.default_replies import Calls
from killick.check.fakes import always, in_order
from killick.check.findings import ALONE, Faulty, Finding, Report, relative
from killick.check.samples import sample
from killick.check.stage import Called, CallTrouble, Environment, Stage, Trouble
from killick.check.static_analysis import read_agent
from killick.definitions.agents import AGENTS, Agent, AnyAgent
from killick.definitions.current import refuse_io
from killick.definitions.tools import TOOLS
from killick.engine.steps.model_reply import rebuild
from killick.engine.views import Wait
from killick.errors import DeclarationRefused, KillickError
from killick.log import Log
from killick.model import events as e
from killick.model.event_codec import decode
from killick.model.events import FactDrawn
from killick.store.records import RunQuery
from killick.triggers import TRIGGERS
from killick.workers.hooks import HOOKS

STORIES_MAX: Final = 5_000
PATHS_MAX: Final = 12
"""The number of alternative paths (other answers, failing tools) that are interrupted everywhere too."""
OTHER_PATHS: Final = frozenset({"broken", "otherwise", "expired"})
"""The faults that may take the agent to other code."""
TWICE_DEAD: Final = 24
HANG_SECONDS: Final = 20.0
"""The time limit of a rehearsal with threads. Without threads, a hang is detected when no event can occur."""

Progress = Callable[[int, int], None]
"""Called after every rehearsal with the count so far, and the count that is expected."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An agent, its input and its environment, to be checked.

    agent  the agent
    """

    agent: AnyAgent
    input: Any = ...
    """Default: a sample of the agent's input type."""
    fakes: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """By tool, model function or name: a value, a list of values in order, a function, or an exception."""
    answers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By a part of the question, a step or `*`: a verb, a value, or a pair of both."""
    messages: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By the name that the run waits for."""
    real: Sequence[Any] = ()
    """Tools that run for real, by object or name; `*` for all."""


def check(
    case: Case | AnyAgent, *, stories_max: int = STORIES_MAX, progress: Progress | None = None, **options: Any
) -> Report:
    """Interrupts an agent at every possible point and returns a report.

    case         a Case, or an agent with the options of a Case
    stories_max  the maximum number of rehearsals
    options      the fields of a Case
    """
    if isinstance(case, Agent):
        case = Case(agent=case, **options)
    return _Checking(case, stories_max, progress or (lambda count, expected: None)).go()


def interrupt_everywhere(case: Case | AnyAgent, *, stories_max: int = STORIES_MAX, **options: Any) -> Report:
    """Interrupts an agent at every possible point, for a test. Raises AssertionError with the problems and their fixes.

    case         a Case, or an agent with the options of a Case
    stories_max  the maximum number of rehearsals
    options      the fields of a Case

        killick.testing.interrupt_everywhere(settle, input=claim, fakes={charge: "ok"})
    """
    report = check(case, stories_max=stories_max, **options)
    if not report.holds:
        raise Faulty(report)
    return report


class _StopRehearsals(Exception):
    """Stops the rehearsals: the limit is reached, or one hung."""


class _Rehearsal(NamedTuple):
    """One interruption, and the story that its end is compared with."""

    way: str
    expected: Story | None
    trouble: Trouble | None = None
    kills: tuple[int, ...] = ()
    saved: Saved | None = None
    story: Story | None = None
    """Its own story, if it was simulated for its crash points already."""


class _Checking:
    def __init__(self, case: Case, stories_max: int, progress: Progress) -> None:
        self.agent = case.agent
        self.progress = progress
        self.stories_max = stories_max
        self.ways: Counter[str] = Counter()
        self.spots = read_agent(case.agent)
        self.judge = FindingCollector(case.agent, self.spots)
        self.expected = 0
        self.unless = ""
        """Why a sample model calls fewer tools than it could."""
        self.cut_short = ""
        self.draws = False
        """Whether the agent draws random values, which differ if a process died before recording them."""
        real = frozenset(each if isinstance(each, str) else each.name for each in case.real)
        self.around = Environment(fakes=case.fakes, real=real, answers=case.answers, messages=case.messages)
        self.scenario = Scenario(
            agent=case.agent,
            input=_input(case),
            outside=lambda client, waits, world: cast(Stage, world).respond(client, waits),
            verified=False,
            hang_seconds=HANG_SECONDS,
            world=partial(Stage, self.around),
        )

    def go(self) -> Report:
        if any(spot.kind == "swallows" and spot.loops for spot in self.spots):
            self.cut_short = "nothing was rehearsed: code that swallows signals in a loop may never end"
            return self._report(None)
        declared = [(registry, dict(registry)) for registry in (TOOLS, AGENTS.declared, HOOKS, TRIGGERS)]
        unwatch = refuse_io(lambda stray: self.judge.stray(stray))
        base: Story | None = None
        try:
            base, saved = self._left_alone()
            if self.judge.touches:
                raise _StopRehearsals("stopped after one rehearsal: it does I/O outside of a step, which was refused")
            if isinstance(base.outcome, Ended):
                raise _StopRehearsals("stopped after one rehearsal: it fails without any interruption")
            if base.status:
                self._everything(base, saved)
        except _StopRehearsals as enough:
            self.cut_short = str(enough)
        finally:
            unwatch()
            for registry, before in declared:
                registry.clear()
                registry.update(before)  # type: ignore[arg-type]
        return self._report(base)

    def _left_alone(self) -> tuple[Story, list[Saved]]:
        """Rehearses without interruption. If the run fails while a sample model calls tools, it calls fewer."""
        first: tuple[Story, list[Saved]] | None = None
        for self.around.calls in get_args(Calls):
            saved: list[Saved] = []
            self.judge = FindingCollector(self.agent, self.spots)
            story = self._rehearse(_Rehearsal(ALONE, None), saved)
            if story.status == "completed" or not stage_of(story).offered or self.judge.touches:
                self.unless = brief(first[0]) if first is not None else ""
                return story, saved
            first = first or (story, saved)
        assert first is not None
        self.around.calls = "each"
        self.judge = FindingCollector(self.agent, self.spots)
        self.judge.take(first[0], first[0], "state")
        return first

    def _everything(self, base: Story, saved: list[Saved]) -> None:
        self.draws = _draws(base)
        self._rehearse(_Rehearsal(ALONE, base))
        for each in self._plan(base, saved):
            self._rehearse(each)

    def _plan(self, base: Story, saved: list[Saved]) -> Iterator[_Rehearsal]:
        """Yields every interruption. A path that is interrupted everywhere is simulated when its turn comes."""
        stage = stage_of(base)
        twice = saved[:: max(1, len(saved) // TWICE_DEAD)]
        paths = [*self._failures(stage.called), *self._answers(stage.asked)]
        # A path that is interrupted everywhere takes about as long as the base.
        self.expected = 2 + (1 + min(len(paths), PATHS_MAX)) * len(saved) + 5 * len(stage.called) + len(twice)
        yield from _everywhere(base, None, saved)
        for called in stage.called:
            kinds: list[CallTrouble] = ["timeout", "limited", "paused", "unheard"]
            for kind in kinds if _acts(called) else kinds[:3]:
                yield _Rehearsal(_WAYS[kind], base, Trouble(kind, called.run, called.step))
        for number, trouble in enumerate(paths):
            left: list[Saved] | None = [] if number < PATHS_MAX and trouble.kind in OTHER_PATHS else None
            path = _Rehearsal(_WAYS[trouble.kind], base, trouble)
            story = self._simulated(path, left)
            yield path._replace(story=story)
            if left is not None and story.status:
                yield from _everywhere(story, trouble, left)
        # A sample, spread over the run, also dies again during recovery.
        for number, each in enumerate(twice):
            yield _Rehearsal("second death", base, kills=(2 + 3 * number % 7,), saved=each)

    def _failures(self, called: Sequence[Called]) -> Iterator[Trouble]:
        seen: set[str] = set()
        for each in called:
            if _acts(each):
                yield Trouble("lost", each.run, each.step)
            if each.name not in seen:
                yield Trouble("broken", each.run, each.step)
            seen.add(each.name)

    def _answers(self, asked: Sequence[Wait]) -> Iterator[Trouble]:
        for wait in asked:
            yield Trouble("twice", wait.run, wait.step)
            if wait.deadline_us is not None:
                yield from (Trouble("late", wait.run, wait.step), Trouble("expired", wait.run, wait.step))
            usual = self.around.answer_to(wait)
            plain = [(verb, None) for verb in ("approve", "reject") if verb in wait.verbs]
            for answer in [*plain, *(("respond", option) for option in wait.options)]:
                if answer != usual and "respond" in (*wait.verbs, answer[0]):
                    yield Trouble("otherwise", wait.run, wait.step, answer)

    def _rehearse(self, each: _Rehearsal, saving: list[Saved] | None = None) -> Story:
        if self.ways.total() >= self.stories_max:
            raise _StopRehearsals(f"stopped after {self.stories_max} rehearsals; --max allows more")
        story = each.story or self._simulated(each, saving)
        self.ways[each.way] += 1
        self._take(each, story)
        count = self.ways.total()
        self.progress(count, max(self.expected, count))
        if self.judge.hangs:
            raise _StopRehearsals("stopped at the first rehearsal that did not end")
        return story

    def _simulated(self, each: _Rehearsal, saving: list[Saved] | None = None) -> Story:
        trouble = each.trouble
        scenario = replace(self.scenario, world=partial(Stage, self.around, trouble))
        return simulate(scenario, *each.kills, saved=each.saved, saving=saving)

    def _take(self, each: _Rehearsal, story: Story) -> None:
        alike = _required_equality(each.trouble, again=each.saved is not None)
        self.judge.take(each.expected or story, story, "count" if alike == "state" and self.draws else alike)

    def _report(self, base: Story | None) -> Report:
        findings = self.judge.findings()
        stage = stage_of(base) if base is not None else None
        explained = self.judge.touches or any(finding.kind == "tasks" for finding in findings)
        if base is not None and isinstance(base.outcome, Ended) and stage is not None and not explained:
            findings.insert(0, _fails(self.agent, base.outcome, stage))
        reached = self.judge.reached()
        if reached.tools_never and base is not None and base.status == "completed" and not self.cut_short:
            findings.append(self.judge.unreached(reached, self.unless))
        return Report(
            agent=self.agent.name,
            where=place_of(self.agent.fn),
            left_alone=base.status if base is not None else "not run",
            steps=len(base.states["run"]["position"]["committed"]) if base is not None and "run" in base.states else 0,
            questions=len(stage.asked) if stage is not None else 0,
            tools=tuple(sorted({called.name for called in stage.called})) if stage is not None else (),
            ways=dict(self.ways),
            findings=tuple(findings),
            sampled=tuple(sorted(stage.sampled)) if stage is not None else (),
            reached=reached,
            cut_short=self.cut_short,
        )


_WAYS: Final = {
    "timeout": "timeout", "unheard": "lost answer", "lost": "lost answer", "limited": "rate limit",
    "broken": "failing tool", "paused": "pause", "twice": "other answer", "late": "other answer",
    "expired": "deadline", "otherwise": "other answer",
}  # fmt: skip


def _draws(story: Story) -> bool:
    rows = (row for run in story.store.runs(RunQuery(), limit=10_000) for row in story.store.read(run.run, data=False))
    events = (decode(row.body) for row in rows if row.body.startswith(b'{"kind":"fact.drawn"'))
    return any(isinstance(event, FactDrawn) and event.name in ("random", "uuid") for event in events)


def _required_equality(trouble: Trouble | None, *, again: bool) -> Alike:
    """Returns how equal a rehearsal's end must be. Which branch fails first is a race."""
    if trouble is None or trouble.kind in ("timeout", "limited", "paused", "unheard", "twice"):
        return "state"
    if not again:
        return "anyhow"
    return "status" if trouble.kind == "broken" else "state"


def _everywhere(expected: Story, trouble: Trouble | None, saved: Sequence[Saved]) -> Iterator[_Rehearsal]:
    """Yields a crash at every point of one path through the agent, from the dead process's saved state."""
    return (_Rehearsal("death", expected, trouble, saved=each) for each in saved)


def _acts(called: Called) -> bool:
    """Returns whether it may have happened without a recorded outcome. A transaction's outcome is always recorded."""
    return called.effect not in (None, "reads", "transaction")


def _input(case: Case) -> Any:
    if case.input is not ...:
        return case.input
    if not case.agent.takes_input:
        return None
    try:
        return sample(case.agent.input_type)
    except Exception as error:
        raise DeclarationRefused(case.agent.name, f"no input can be generated for it ({error}); give one") from None


def _fails(agent: AnyAgent, ended: Ended, stage: Stage) -> Finding:
    theirs = [frame for frame in ended.failure.frames if frame.line and not frame.file.startswith(_OURS)]
    where = f"{relative(theirs[-1].file)}:{theirs[-1].line}" if theirs else place_of(agent.fn)
    step = f" at step {ended.step}" if ended.step else ""
    made_up = ", ".join(sorted(stage.sampled))
    fix = "correct what it names"
    if made_up and not ended.type.startswith("killick."):
        fix = f"say what these give, for samples of their types may not do: {made_up} (fakes, or --fake NAME=VALUE)"
    return Finding(
        kind="fails",
        title=f"left alone, it fails{step}: {ended.type.rpartition('.')[2]}: {ended.message}",
        where=where,
        why="Nothing interrupted it.",
        fix=fix,
    )


_OURS: Final = str(Path(__file__).parents[1])
"""Killick's own source, which the user cannot fix."""


# a case from a recorded run -----------------------------------------------------------------------


MORE_CALLS: Final = 64
"""How often a tool's last value is repeated, if a rehearsal calls it more often than the run did."""


def case_like(log: Log, run: str, agent: AnyAgent) -> Case:
    """Returns a case with everything that an agent met in a run, and in its children."""
    state = log.state(run)
    outputs: dict[str, list[Any]] = {}
    answers: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for each in _family(log, run):
        found = log.state(each)
        for step in found.fold.steps:
            if step.sort in ("tool", "model") and step.status == "done" and step.output:
                data = found.data(step.output)
                value = data.get("output")
                reply = data.get("reply")
                outputs.setdefault(step.name, []).append(rebuild(reply, value) if reply else value)
        for recorded in log.read(each):
            if isinstance(recorded.event, e.WaitClosed) and recorded.event.how == "answered":
                match log.data(each, recorded.seq).get("answer"):
                    case {"kind": "approve" | "reject" | "respond" | "edit" as verb, **rest}:
                        answers[recorded.event.step] = (verb, rest.get("value"))
                    case _:
                        pass
            elif isinstance(recorded.event, e.MessageTaken) and not recorded.event.name.startswith("killick."):
                messages[recorded.event.name] = log.data(each, recorded.seq).get("body")
    fakes = {
        name: always(values[0]) if len(values) == 1 else in_order(*values, *values[-1:] * MORE_CALLS)
        for name, values in outputs.items()
    }
    return Case(agent=agent, input=state.input, fakes=fakes, answers=answers, messages=messages)


def _family(log: Log, run: str) -> Iterator[str]:
    yield run
    for child in log.ledger(run).children:
        try:
            yield from _family(log, child.run)
        except KillickError:
            continue
