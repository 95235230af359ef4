"""Agents drawn at random: a small program of steps as data, and interpreters that carry out the one they are given.

Owns the programs, the tools that they call and the far side that these act on. What the far side did is never undone
by a death; a far side that is shut refuses to be touched at all.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from hypothesis import strategies as st

import killick

Op = dict[str, Any]
Program = list[Op]

THINGS: Final = ("ale", "bun")
"""Few, so that programs do the same thing twice."""

DEPTH_MAX: Final = 2
"""How deep branches, children and caught failures lie in each other."""


class Touched(AssertionError):
    """Code reached the world where there must be none."""


# the far side -------------------------------------------------------------------------------------


class FarSide:
    """What tools act on. Its books have every action by name and by request; nothing is ever taken off them."""

    def __init__(self) -> None:
        self.actions: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.requests: dict[str, str] = {}
        """What was answered to a request, by its key."""
        self.done: list[tuple[str, str]] = []
        """Every action, in order, with the key of its request."""
        self.is_shut = False
        self.point: Callable[[str], None] = lambda place: None
        """Called before and after everything that counts; here a process can die."""

    def do(self, action: str, key: str, *, honoured: bool = False) -> str:
        """An action happens. With the key honoured, the second request only hears the answer again."""
        self._touch(action)
        self.point(f"before {action}")
        if not (honoured and key in self.requests):
            self.actions[action] += 1
            self.done.append((key, action))
            self.requests[key] = f"{action} no. {self.actions[action]}"
        self.point(f"after {action}")
        return self.requests[key]

    def undo(self, action: str, key: str) -> str:
        """An action is undone, once a key."""
        self._touch(f"undoing {action}")
        self.point(f"before undoing {action}")
        if key not in self.requests:
            self.undone[action] += 1
            self.requests[key] = f"no {action}"
        self.point(f"after undoing {action}")
        return self.requests[key]

    def look(self, place: str) -> int:
        """How often somebody came here, this time included; looking is no action."""
        self._touch(place)
        self.visits[place] += 1
        return self.visits[place]

    def _touch(self, what: str) -> None:
        if self.is_shut:
            raise Touched(f"{what}: the world is shut")


_FAR = FarSide()


def far() -> FarSide:
    """The far side of the story that is told now."""
    return _FAR


@contextmanager
def another_world() -> Iterator[FarSide]:
    """A far side with empty books."""
    global _FAR
    _FAR = FarSide()
    yield _FAR


def action_of(tool: str, what: str) -> str:
    """How the far side calls what a tool does. Tools have names of their own here: others are declared elsewhere."""
    return f"{tool.removeprefix('walk_')} {what}"


# tools: every class of effect, awaited and blocking -----------------------------------------------


def seen(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """A reconciler that looks into the books."""
    far().look(f"reconciling {effect.tool}")
    answer = far().requests.get(effect.key)
    return killick.DidNotHappen() if answer is None else killick.Happened(answer)


@killick.tool(name="walk_give_back", effect="idempotent")
def give_back(effect: killick.Effect, key: killick.Key = killick.KEY) -> str:
    return far().undo(action_of(effect.tool, effect.arguments["what"]), key)


@killick.tool(name="walk_look", effect="reads")
async def look(what: str) -> str:
    """What is read changes, so that a second timeline may see something else."""
    return f"{what} as of visit {far().look(f'look {what}')}"


@killick.tool(name="walk_pay")
async def pay(what: str, key: killick.Key = killick.KEY) -> str:
    """At most once, and only a person can tell whether it happened."""
    await asyncio.sleep(0)
    return far().do(action_of("pay", what), key)


@killick.tool(name="walk_book", reconcile=seen)
def book(what: str, key: killick.Key = killick.KEY) -> str:
    return far().do(action_of("book", what), key)


@killick.tool(name="walk_mail", effect="idempotent")
async def mail(what: str, key: killick.Key = killick.KEY) -> str:
    return far().do(action_of("mail", what), key, honoured=True)


@killick.tool(name="walk_rent", compensate=give_back, reconcile=seen)
async def rent(what: str, key: killick.Key = killick.KEY) -> str:
    return far().do(action_of("rent", what), key)


@killick.tool(name="walk_order", repeat="recorded", reconcile=seen)
async def order(what: str, key: killick.Key = killick.KEY) -> str:
    return far().do(action_of("order", what), key)


@killick.tool(name="walk_redeem", consumes=("what",), reconcile=seen)
async def redeem(what: str, key: killick.Key = killick.KEY) -> str:
    return far().do(action_of("redeem", what), key)


@killick.tool(
    name="walk_shaky", reconcile=seen, nothing_happened=ConnectionRefusedError,
    retry=killick.Retry(attempts=5, first="1s"),
)  # fmt: skip
async def shaky(what: str, key: killick.Key = killick.KEY) -> str:
    if far().look(f"shaky {what}") % 3:
        raise ConnectionRefusedError("nobody listens")
    return far().do(action_of("shaky", what), key)


@killick.tool(name="walk_refuse")
async def refuse(what: str) -> str:
    far().look(f"refuse {what}")
    raise killick.NotDone(f"no {what} here")


TOOLS: Final = {
    tool.name.removeprefix("walk_"): tool for tool in (look, pay, book, mail, rent, order, redeem, shaky, refuse)
}
ACTING: Final = frozenset(f"walk_{name}" for name in TOOLS) - {"walk_look", "walk_refuse"}
ONCE: Final = frozenset({"walk_order"})
"""Tools of which a second equal call in one timeline is given the result of the first."""


def reply_to(prompt: str) -> dict[str, Any]:
    """A model that words its replies anew each time."""
    return {"text": f"{prompt}? wording {far().look(f'model {prompt}')}", "usage": {"input_tokens": 3}}


# what carries a program out -----------------------------------------------------------------------

Branch = Callable[[Program], Any]
Course = Generator[Any, Any, list[Any]]


def course(run: Any, program: Program, branch: Branch) -> Course:
    """A program, step by step: yields what the run's methods gave, an awaitable or a value, and is told its value."""
    told: list[Any] = []
    for op in program:
        told.append((yield from _one(run, op, told, branch)))
    return told


def _one(run: Any, op: Op, told: list[Any], branch: Branch) -> Generator[Any, Any, Any]:
    what = f"{op.get('what', '')}{_parity(told)}" if op.get("uses") else op.get("what", "")
    match op["do"]:
        case "model":
            return (yield run.model(reply_to, what))["text"]
        case "decide":
            return (yield run.decided(f"{what}?", len(told), because="it is so"))
        case "update":
            return (yield run.update(**{what: len(told)}))
        case "note":
            return (yield run.note(what))
        case "draw":
            return [str(run.uuid()), run.random(), run.now().isoformat()]
        case "ask":
            return (yield run.ask(f"{what}?")).value
        case "hear":
            return (yield run.wait(what))
        case "sleep":
            return (yield run.sleep("5s"))
        case "if":
            return (yield from course(run, op["then"] if _parity(told) else op["otherwise"], branch))
        case "try":
            try:
                return (yield from course(run, op["program"], branch))
            except killick.StepFailed as failed:
                return f"{failed.name} failed: {failed.failure.type}"
        case "redeem":
            try:
                return (yield run.call(redeem, what))
            except killick.StepFailed as failed:
                return failed.failure.type
        case "gather":
            return list((yield run.gather(*(branch(each) for each in op["branches"]))))
        case "first":
            won = yield run.first(*(branch(each) for each in op["branches"]))
            return [won.index, won.value]
        case "child":
            return (yield from _child(run, op))
        case tool:
            return (yield run.call(TOOLS[tool], what))


def _child(run: Any, op: Op) -> Generator[Any, Any, Any]:
    child = yield run.spawn(walks, op["program"], on_parent_end=op["end"])
    for word in op["words"]:
        yield run.send(child.id, "word", word)
    if not op["awaited"]:
        return "spawned"
    result = yield child.result() if isinstance(run, killick.Run) else run.result(child)
    return result


def _parity(told: list[Any]) -> int:
    """What came before, as one of two: so what a step returned decides what is done next."""
    return zlib.crc32(repr(told[-1:]).encode()) % 2


async def perform(run: killick.Run, program: Program) -> list[Any]:
    going = course(run, program, partial(perform, run))
    go_on: Callable[[], Any] = partial(next, going)
    while True:
        try:
            step = go_on()
        except StopIteration as over:
            told: list[Any] = over.value
            return told
        try:
            go_on = partial(going.send, await step)
        except Exception as error:
            go_on = partial(going.throw, error)


def perform_blocking(run: killick.SyncRun, program: Program) -> list[Any]:
    going = course(run, program, lambda branch: partial(perform_blocking, run, branch))
    value = None
    while True:
        try:
            value = going.send(value)
        except StopIteration as over:
            told: list[Any] = over.value
            return told


@killick.agent
async def walks(run: killick.Run, program: Program) -> list[Any]:
    return await perform(run, program)


@killick.agent
def walks_blocking(run: killick.SyncRun, program: Program) -> list[Any]:
    return perform_blocking(run, program)


@killick.agent(on_failure="compensate")
async def walks_back(run: killick.Run, program: Program) -> list[Any]:
    """What it did is undone where it fails."""
    return await perform(run, program)


@killick.machine
async def walks_in_stages(run: killick.Run, state: dict[str, Any]) -> Any:
    """Two steps a transition, as a state machine."""
    program, told = state["program"], state["told"]
    told = [*told, *(await perform(run, program[:2]))]
    rest = {"program": program[2:], "told": told, "waits": not state["waits"]}
    if not program[2:]:
        return killick.Done(told)
    return killick.WaitFor("word", rest) if state["waits"] else killick.Next(rest)


AGENTS: Final[dict[str, Any]] = {agent.name: agent for agent in (walks, walks_blocking, walks_back, walks_in_stages)}


def input_of(agent: str, program: Program) -> Any:
    """What an agent is given, so that it carries out a program."""
    return {"program": program, "told": [], "waits": True} if agent == walks_in_stages.name else program


# drawing ------------------------------------------------------------------------------------------

_QUIET: Final = ("look", "model", "decide", "update", "note", "draw")
_LOUD: Final = ("pay", "pay", "book", "mail", "rent", "order", "redeem", "shaky")
_WAITS: Final = ("ask", "hear", "sleep")

_simple = st.builds(
    lambda do, what, uses: {"do": do, "what": what} | ({"uses": True} if uses else {}),
    st.sampled_from((*_LOUD, *_QUIET, *_WAITS)),
    st.sampled_from(THINGS),
    st.sampled_from((False, False, True)),
)
_failing = st.builds(lambda what: {"do": "refuse", "what": what}, st.sampled_from(THINGS))


def programs(depth: int = DEPTH_MAX, *, least: int = 2, most: int = 6) -> st.SearchStrategy[Program]:
    """Programs whose parts lie at the most so deep in each other. Few of them fail."""
    if depth == 0:
        return st.lists(_simple, min_size=1, max_size=3)
    inner = programs(depth - 1, least=1, most=3)
    several = st.lists(inner, min_size=2, max_size=3)
    tried = st.builds(lambda program, failing: {"do": "try", "program": [*program, *failing]}, inner,
                      st.lists(_failing, max_size=1))  # fmt: skip
    return st.lists(
        st.one_of(
            _simple,
            _simple,
            _simple,
            tried,
            st.builds(lambda then, other: {"do": "if", "then": then, "otherwise": other}, inner, inner),
            st.builds(lambda branches: {"do": "gather", "branches": branches}, several),
            st.builds(lambda branches: {"do": "first", "branches": branches}, several),
            st.builds(_spawning, inner, st.integers(0, 2), st.booleans(), st.sampled_from(("cancel", "wait"))),
        ),
        min_size=least,
        max_size=most,
    )


def _spawning(program: Program, words: int, awaited: bool, end: str) -> Op:
    hears = [{"do": "hear", "what": "word"}] * words
    return {
        "do": "child",
        "program": [*program, *hears],
        "words": [f"word {number}" for number in range(words)],
        "awaited": awaited,
        "end": end,
    }


def agents() -> st.SearchStrategy[tuple[str, Program]]:
    """An agent by name, and the program that it is given; some fail at the end."""
    ending = st.sampled_from(([], [], [], [{"do": "refuse", "what": "more"}]))
    drawn = st.builds(lambda program, end: [*program, *end], programs(most=4), ending)
    return st.tuples(st.sampled_from(tuple(AGENTS)), drawn)
