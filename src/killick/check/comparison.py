"""Compares rehearsals with the uninterrupted one, and finds the causes of differences. Runs nothing."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from killick.check.crashes import WRITES, Ended, Story
from killick.check.findings import Finding, Reached, relative
from killick.check.stage import TROUBLES, Called, Declared, Stage
from killick.check.static_analysis import Spot, place_of_step, tools_named
from killick.contracts.one_sided import open_ends
from killick.definitions.agents import AnyAgent
from killick.definitions.current import UnrecordedIO
from killick.definitions.tools import TOOLS, Tool
from killick.history.phrasing import NOT_RETRIED
from killick.log import Log
from killick.model import events as e
from killick.store.records import RunQuery

ObservedKind = Literal["twice", "lost", "state", "ends", "diverges", "hangs", "breaks", "not_undone"]

CODE_CHARS_MAX: Final = 80

_READING: Final = ("check", "fetch", "find", "get", "list", "load", "look", "query", "read", "search")


class Observed(msgspec.Struct, frozen=True):
    """One difference between a rehearsal's end and the expected one."""

    kind: ObservedKind
    subject: str
    detail: str = ""


def describe(story: Story) -> str:
    """Describes a rehearsal's interruption."""
    stage = stage_of(story)
    parts: list[str] = []
    if stage.trouble is not None and stage.struck is not None:
        struck = stage.struck if isinstance(stage.struck, Called) else f'"{stage.struck.prompt}"'
        parts.append(f"{struck} {TROUBLES[stage.trouble.kind]}")
    parts += [f"the process dies {_place(place)}" for place in story.places]
    return ", then ".join(parts) or "nothing interrupts it"


def _place(place: str) -> str:
    """Describes where a process died."""
    when, _, what = place.partition(" ")
    verb, _, written = what.partition(" ")
    kind, _, step = written.partition(" ")
    if verb not in WRITES:
        return place
    if not kind:
        return f"{when} it writes to the store"
    known = {
        "step.started": "the start of step {}", "attempt.started": "the start of step {}",
        "attempt.ended": "the outcome of step {}",
        "step.ended": "the outcome of step {}", "attempt.settled": "what became of step {}",
        "wait.opened": "the question of step {}", "wait.closed": "the answer to step {}",
        "decision.made": "the decision at step {}", "run.started": "its start", "run.completed": "its end",
        "run.failed": "its end",
    }  # fmt: skip
    return f"{when} {known.get(kind, kind).format(step)} is on record"


def stage_of(story: Story) -> Stage:
    """Returns the world of a rehearsal."""
    assert isinstance(story.world, Stage)
    return story.world


Alike = Literal["anyhow", "status", "count", "state"]
"""How equal a rehearsal must be to the uninterrupted one: not at all, in its status, also in each tool's effect count,
or also in outcome and state."""


def observe(base: Story, story: Story, alike: Alike) -> Iterator[Observed]:
    """Returns a rehearsal's differences from the expectation, and violated invariants."""
    if "hung" in story.troubles:
        yield Observed("hangs", "")
        return
    for trouble in story.troubles:
        yield Observed("breaks", "", trouble)
    if story.status == "RunDiverged":
        yield Observed("diverges", "", str(story.outcome))
        return
    yield from _overdone(stage_of(base), stage_of(story), strictly=alike in ("count", "state"))
    if isinstance(story.outcome, Ended) and story.outcome.not_undone:
        acted = stage_of(story).by_tool()
        for left in story.outcome.not_undone:
            if acted[tool := left.partition(" at step ")[0]]:
                yield Observed("not_undone", tool, left)
    if alike == "anyhow":
        return
    if story.status != base.status or (alike == "state" and story.outcome != base.outcome):
        yield Observed("ends", story.status, f"{brief(story)} instead of {brief(base)}")
        return
    if alike == "state" and base.marks != story.marks:
        yield from _states(base, story)


def _overdone(usual: Stage, stage: Stage, *, strictly: bool) -> Iterator[Observed]:
    """Returns duplicate effects. A single extra one is no fault if the code takes another path."""
    again = [label for label, count in stage.effects.items() if count > max(usual.effects[label], 1)]
    yield from (Observed("twice", stage.doer[label], label) for label in again)
    if strictly and not again:
        made, meant = stage.by_tool(), usual.by_tool()
        yield from (
            Observed("twice", tool, f"{tool}, with other arguments") for tool in made if made[tool] > meant[tool]
        )


def _not_tried_again(story: Story) -> str:
    """Why no attempt followed the last one that failed, from the record; empty where it does not say."""
    rows = story.store.runs(RunQuery(), limit=100)
    events = [each.event for row in rows for each in Log(story.store).read(row.run)]
    for end in reversed(events):
        if isinstance(end, e.AttemptEnded) and end.not_retried is not None:
            return f" It was not tried again: {NOT_RETRIED[end.not_retried]}."
    return ""


def brief(story: Story) -> str:
    """Describes a rehearsal's end."""
    outcome = story.outcome
    shown = f"{outcome.type}: {outcome.message}" if isinstance(outcome, Ended) else repr(outcome)
    return f"{story.status} ({shown if len(shown) <= 120 else shown[:119] + '…'})"


def _states(base: Story, story: Story) -> Iterator[Observed]:
    for run, expected in base.states.items():
        found = story.states.get(run)
        if found is None:
            yield Observed("lost", run, f"the run {run} is not there")
            continue
        steps = {each["step"]: each["name"] for each in expected["outputs"]}
        gone = [step for step in expected["position"]["committed"] if step not in found["position"]["committed"]]
        for step in gone:
            yield Observed("lost", step, f"step {step} ({steps.get(step, '?')}) is not on record")
        for part in expected:
            if not gone and found.get(part) != expected[part]:
                yield Observed("state", part, _difference(part, expected[part], found.get(part)))


def _difference(part: str, expected: Any, found: Any) -> str:
    before, after = repr(expected), repr(found)
    if isinstance(expected, list) and isinstance(found, list):
        pairs = zip(map(repr, expected), map(repr, found), strict=False)  # pyright: ignore[reportUnknownArgumentType]
        before, after = next(((one, other) for one, other in pairs if one != other), (before, after))
    return f"{part}: {after[:160]} instead of {before[:160]}"


# causes -------------------------------------------------------------------------------------------


def place_of(fn: Any) -> str:
    """Returns a function's file and line."""
    code = inspect.unwrap(fn).__code__ if hasattr(inspect.unwrap(fn), "__code__") else None
    return f"{relative(code.co_filename)}:{code.co_firstlineno}" if code is not None else getattr(fn, "__name__", "?")


def call_at(file: str, line: int, what: str) -> str:
    """Returns the call of user code on a line, and the access that it makes; the access alone without one."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return what
    on_it = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.lineno == line)
    call = next(on_it, None)
    if call is None:
        return what
    text = ast.unparse(call)
    if text == what:
        return what
    text = text if len(text) <= CODE_CHARS_MAX else f"{ast.unparse(call.func)[: CODE_CHARS_MAX - 3]}(…)"
    return f"{text} does {what}"


class FindingCollector:
    """Collects observations and reports one finding for each cause."""

    def __init__(self, agent: AnyAgent, spots: Sequence[Spot]) -> None:
        self.agent = agent
        self.spots = spots
        self.strays: dict[tuple[str, int], tuple[UnrecordedIO, int]] = {}
        self._seen: dict[tuple[str, str], tuple[Observed, Story, int]] = {}
        self._woken: dict[str, tuple[Story, int]] = {}
        self._expired: Story | None = None
        self._used: dict[str, Declared] = {}
        self._offered: set[str] = set()
        self._models: set[str] = set()

    def stray(self, stray: UnrecordedIO) -> None:
        """Records I/O by agent code outside a step."""
        first, count = self.strays.get((stray.file, stray.line), (stray, 0))
        # A library may read before its main action: a connection is the most specific evidence, a read the least.
        if (stray.what.startswith("socket."), not stray.reads) > (first.what.startswith("socket."), not first.reads):
            first = stray
        self.strays[stray.file, stray.line] = first, count + 1

    @property
    def touches(self) -> bool:
        """Whether agent code tried more than reads outside a step."""
        return any(not stray.reads for stray, _ in self.strays.values())

    def take(self, base: Story, story: Story, alike: Alike) -> None:
        """Examines one rehearsal."""
        stage = stage_of(story)
        self._used = {**stage.declared, **self._used}
        self._offered |= stage.offered
        self._models |= {called.name for called in stage.called if called.sort == "model"}
        # A permanently failing tool needs a person in any case.
        for tool in stage.woken if stage.trouble is None or stage.trouble.kind != "broken" else ():
            first, count = self._woken.get(tool, (story, 0))
            self._woken[tool] = (first, count + 1)
        expired = stage.trouble is not None and stage.trouble.kind == "expired" and not story.places
        if expired and isinstance(story.outcome, Ended) and story.outcome.type.endswith("WaitExpired"):
            self._expired = story
        for observed in observe(base, story, alike):
            place = (observed.kind, observed.subject)
            known = self._seen.get(place)
            self._seen[place] = (known[0], known[1], known[2] + 1) if known else (observed, story, 1)

    @property
    def hangs(self) -> bool:
        return any(kind == "hangs" for kind, _ in self._seen)

    def reached(self) -> Reached:
        """Returns which of the agent's tools the rehearsals called."""
        tools = tools_named(self.agent).union(name for name in self._offered if name in TOOLS)
        return Reached(tools=len(tools), tools_never=tuple(sorted(tools - {*self._used, *self._models})))

    def unreached(self, reached: Reached, unless: str) -> Finding:
        """Returns the warning about tools that no rehearsal called. `unless` says how calling them failed."""
        never = reached.tools_never
        failed = f" When the sample model called its tools, the run failed: {unless}." if unless else ""
        return Finding(
            kind="unreached",
            title=f"{reached.tools - len(never)} of {reached.tools} tools called; never: {', '.join(never)}",
            where=self._step(never[0]),
            why=f"No rehearsal reached it, so nothing is known of it.{failed}",
            fix="another case that leads there: --input, --fake NAME=VALUE or --answer",
        )

    def findings(self) -> list[Finding]:
        """Returns all findings, the worst first."""
        found = list(map(self._spot, self.spots))
        found += [self._outside(stray, count) for stray, count in self.strays.values()]
        explained = bool(found)
        for observed, story, times in self._seen.values():
            finding = self._finding(observed, story, times, explained=explained)
            if finding is not None:
                found.append(finding)
        found += list(self._tools())
        found += list(self._open_ends())
        if self._expired is not None:
            found.append(self._expires(self._expired))
        order = ["fault", "advice"]
        unique = {(finding.kind, finding.title, finding.where): finding for finding in found}
        return sorted(unique.values(), key=lambda finding: order.index(finding.weight))

    def _witness(self, *kinds: ObservedKind) -> tuple[str, int]:
        """Returns the first rehearsal that shows one of these, and their number."""
        shown = [(story, times) for (kind, _), (_, story, times) in self._seen.items() if kind in kinds]
        return (describe(shown[0][0]), sum(times for _, times in shown)) if shown else ("", 0)

    def _spot(self, spot: Spot) -> Finding:
        place = f"{relative(spot.file)}:{spot.line}"
        seen, times = (
            self._witness("diverges", "state", "ends", "lost") if spot.kind in ("differs", "keeps") else ("", 0)
        )
        titles = {
            "differs": (
                f"{spot.what} differs each time the code runs",
                "After a crash the agent's code runs again from its start, and a decision by this value may be "
                "another one.",
            ),
            "keeps": (
                f"{spot.what} keeps state in the process",
                "It is lost when the process dies.",
            ),
            "sleeps": (
                f"{spot.what} waits in memory",
                "The wait is lost with the process, and begins anew in the next one.",
            ),
            "swallows": (
                f"{spot.what} swallows the signals that stop a run",
                "Parking, pausing and cancelling come as BaseException. Code that catches them cannot be stopped.",
            ),
            "tasks": (
                f"{spot.what} uses the run in a task that Killick did not start",
                "On replay the order of its steps is not known.",
            ),
        }
        title, why = titles[spot.kind]
        return Finding(kind=spot.kind, title=title, where=place, why=why, fix=spot.instead, seen=seen, times=times)

    def _outside(self, stray: UnrecordedIO, count: int) -> Finding:
        refused = "" if stray.reads else " Here it was refused."
        return Finding(
            kind="outside",
            title=f"{call_at(stray.file, stray.line, stray.what)} outside of a step",
            where=f"{relative(stray.file)}:{stray.line}",
            why=f"It is repeated each time the code runs again, and its result is not recorded.{refused}",
            fix='put it into a tool, @killick.tool(effect="reads") or what it is, and use run.call',
            seen="the agent's own code runs",
            times=count,
        )

    def _finding(self, observed: Observed, story: Story, times: int, *, explained: bool) -> Finding | None:
        agent = place_of(self.agent.fn)
        seen = describe(story)
        match observed.kind:
            case "twice":
                return self._twice(observed, story, times, explained=explained)
            case "hangs":
                return Finding(
                    kind="hangs", title="it does not end", where=agent, seen=seen, times=times,
                    why="The agent neither ends nor waits for anything that Killick knows of.",
                    fix="wait by run.wait, run.ask or run.sleep, and catch nothing wider than Exception",
                )  # fmt: skip
            case "breaks":
                return Finding(
                    kind="fails", title="it breaks off", where=agent, why=observed.detail, seen=seen, times=times,
                    fix="correct what the message names",
                )  # fmt: skip
            case "not_undone":
                return self._not_undone(observed, seen, times)
            case "ends" if self._is_fragile(story):
                return self._fragile(story, times)
            case _ if explained:
                return None
            case "diverges":
                return Finding(
                    kind="differs", title="the code asks for something else when it runs again", where=agent,
                    why=observed.detail, seen=seen, times=times,
                    fix="decide only by the input, the results of steps, run.now, run.random and run.uuid",
                )  # fmt: skip
            case "lost":
                return Finding(
                    kind="lost", title=f"step {observed.subject} is lost", where=agent, why=observed.detail, seen=seen,
                    times=times, fix="let the code take the same steps each time it runs",
                )  # fmt: skip
            case _:
                return Finding(
                    kind="differs", title="it ends differently after the interruption", where=agent,
                    why=observed.detail, seen=seen, times=times,
                    fix="keep state in the run: run.update(…), or the result of a step",
                )  # fmt: skip

    def _twice(self, observed: Observed, story: Story, times: int, *, explained: bool) -> Finding | None:
        tool = self._used.get(observed.subject)
        title, seen = f"{observed.subject} is done twice: {observed.detail}", describe(story)
        where = place_of(tool.fn) if tool is not None else place_of(self.agent.fn)
        steps = sorted({called.step for called in stage_of(story).called if called.name == observed.subject})
        policy = tool.policy if tool is not None else None
        if tool is not None and policy is not None and policy.effect == "idempotent" and not tool.keyed:
            why = (
                'It says effect="idempotent", so it is repeated when its outcome is unknown. But it takes no key, '
                "so the remote service cannot tell the second call from the first."
            )
            fix = 'add `key: killick.Key = killick.KEY` to its parameters and pass it on, or say effect="at_most_once"'
        elif policy is not None and any(issubclass(TimeoutError, kind) for kind in policy.nothing_happened):
            names = ", ".join(kind.__name__ for kind in policy.nothing_happened)
            why = f"nothing_happened=({names},) says that a timeout proves it. Here only the answer was lost."
            fix = f"leave {names} out of nothing_happened=(…); give reconcile=… so that Killick can find out"
        elif explained or (len(steps) > 1 and observed.subject in self._offered):
            return None  # a sample model asked again: that is not the agent's code
        elif len(steps) > 1:
            why = (
                f"When step {steps[0]} failed, the agent called it again, at step {steps[-1]}. "
                "A new step has a new key, so the remote service takes it for another action."
            )
            fix = "let the tool try again, retry=killick.Retry(attempts=4), and give up when the step has failed"
            where = self._step(observed.subject, last=True)
        else:
            why, fix = "It ran again under the same step.", 'say effect="at_most_once" and give reconcile=…'
        return Finding(kind="twice", title=title, where=where, why=why, fix=fix, seen=seen, times=times)

    def _not_undone(self, observed: Observed, seen: str, times: int) -> Finding:
        tool = self._used.get(observed.subject)
        can = tool is not None and tool.policy.compensate is not None
        why = "its compensation gave up." if can else "this tool has no compensate=…."
        fix = f"@killick.tool(…, compensate=undo_{observed.subject}), a function of the Effect"
        return Finding(
            kind="not_undone", title=f"{observed.subject} is not undone when the run fails", seen=seen, times=times,
            where=place_of(tool.fn) if tool is not None else place_of(self.agent.fn),
            why=f'The agent says on_failure="compensate", but {why}',
            fix="let its compensation try again: declare it as a tool with retry=…" if can else fix,
        )  # fmt: skip

    def _is_fragile(self, story: Story) -> bool:
        kind = getattr(stage_of(story).trouble, "kind", None)
        return story.status == "failed" and kind in ("timeout", "limited", "unheard")

    def _fragile(self, story: Story, times: int) -> Finding:
        stage = stage_of(story)
        name = getattr(stage.struck, "name", "it")
        tool = self._used.get(name)
        once = "rate limit" if getattr(stage.trouble, "kind", None) == "limited" else "timeout"
        return Finding(
            kind="fragile", title=f"one {once} of {name} fails the run", seen=describe(story), times=times,
            where=place_of(tool.fn) if tool is not None else place_of(self.agent.fn),
            why=f"Then it ends as {brief(story)}.{_not_tried_again(story)}",
            fix="retry=killick.Retry(attempts=4), or handle StepFailed in the agent",
        )  # fmt: skip

    def _tools(self) -> Iterator[Finding]:
        for name, tool in self._used.items():
            policy = tool.policy
            undo = policy.compensate
            if undo is not None and f"undoing {name}" in self._woken:
                yield self._undo_wakes(name, undo, *self._woken[f"undoing {name}"])
            if name in self._woken:
                yield self._wakes(name, tool, *self._woken[name])
            elif not policy.says_effect:
                yield self._undeclared(name, tool)

    def _wakes(self, name: str, tool: Declared, story: Story, times: int) -> Finding:
        said = (
            'effect="at_most_once"'
            if tool.policy.says_effect
            else "nothing of its effect, so it counts as at_most_once"
        )
        return Finding(
            kind="undeclared" if not tool.policy.says_effect else "wakes",
            title=f"{name} would wake a person",
            where=place_of(tool.fn),
            why=f"It says {said}, and has no reconcile=…: when its outcome is unknown, only a person can resolve it.",
            fix=_declaration(name, tool),
            seen=describe(story),
            times=times,
        )

    def _step(self, name: str, *, last: bool = False) -> str:
        """Returns the agent's line that calls a tool or asks a question; else the agent's own."""
        found = place_of_step(self.agent, name, last=last)
        return f"{relative(found[0])}:{found[1]}" if found is not None else place_of(self.agent.fn)

    def _undo_wakes(self, name: str, undo: Any, story: Story, times: int) -> Finding:
        fn = undo.fn if isinstance(undo, Tool) else undo
        return Finding(
            kind="wakes",
            title=f"undoing {name} would wake a person",
            where=place_of(fn),
            why=f"{fn.__name__} counts as at_most_once: when its outcome is unknown, only a person can resolve it.",
            fix=f'@killick.tool(effect="idempotent") on {fn.__name__}, if undoing twice does no harm',
            seen=describe(story),
            times=times,
        )

    def _undeclared(self, name: str, tool: Declared) -> Finding:
        return Finding(
            kind="undeclared",
            title=f"{name} does not declare its effect",
            where=place_of(tool.fn),
            why="Without a declaration it counts as at_most_once.",
            fix=_declaration(name, tool),
        )

    def _open_ends(self) -> Iterator[Finding]:
        contract = self.agent.options.contract
        for end in open_ends(contract.rules) if contract is not None else ():
            yield Finding(
                kind="one_sided",
                title=f"the rule {end.rule} limits {end.argument} on one side",
                where=place_of(self.agent.fn),
                why=f"{end.argument} {end.why}.",
                fix=end.fix,
            )

    def _expires(self, story: Story) -> Finding:
        prompt = getattr(stage_of(story).struck, "prompt", "a question")
        return Finding(
            kind="expires",
            title=f'the run fails when "{prompt}" is not answered in time',
            where=self._step(str(prompt)),
            why="The question has a deadline and no default.",
            fix='default="reject" (or another answer) with timeout=…, or catch killick.errors.WaitExpired',
            seen=describe(story),
            times=1,
        )


def _declaration(name: str, tool: Declared) -> str:
    """Returns the line to add for a tool with an unresolved effect."""
    if not tool.policy.says_effect and name.split("_")[0] in _READING:
        return '@killick.tool(effect="reads"), if it changes nothing'
    if tool.keyed:
        return '@killick.tool(effect="idempotent"), if the remote service honors the key'
    return f'@killick.tool(effect="at_most_once", reconcile=find_{name}), a function that looks whether it happened'
