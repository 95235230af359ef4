"""Finds nondeterminism in agent code that no rehearsal can show. Runs nothing.

A line that ends with `# killick: ok` is skipped.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final, Literal

import msgspec

from killick.definitions.agents import Agent, AnyAgent
from killick.definitions.tools import Tool
from killick.llm.toolset import Toolset

SpotKind = Literal["differs", "sleeps", "swallows", "tasks", "keeps"]
DEPTH_MAX: Final = 6


class Spot(msgspec.Struct, frozen=True):
    """A line with a problem, and its fix."""

    kind: SpotKind
    file: str
    line: int
    what: str
    instead: str
    loops: bool = False


_NOW: Final = "run.now(): the time that is on record"
_CHANCE: Final = "run.random(): a number that is on record"
_UUID: Final = "run.uuid(): an id that is on record"
_MODULES: Final = {"random": _CHANCE, "secrets": _CHANCE, "numpy.random": _CHANCE}
_NAMED: Final[Mapping[str, tuple[SpotKind, str]]] = {
    **{f"time.{name}": ("differs", _NOW) for name in ("time", "time_ns", "monotonic", "perf_counter", "localtime")},
    **{f"datetime.datetime.{name}": ("differs", _NOW) for name in ("now", "utcnow", "today")},
    "datetime.date.today": ("differs", _NOW),
    **{f"uuid.uuid{n}": ("differs", _UUID) for n in (1, 4, 6, 7, 8)},
    "posix.urandom": ("differs", _CHANCE),
    "builtins.id": ("differs", "something of the value itself: id() is another one in every process"),
    "builtins.hash": ("differs", "hashlib: hash() of a text is another one in every process"),
    "time.sleep": ("sleeps", 'run.sleep("…"): it outlasts the process'),
    "asyncio.tasks.sleep": ("sleeps", 'run.sleep("…"): it outlasts the process'),
    "asyncio.tasks.gather": ("tasks", "run.gather(…)"),
    "asyncio.tasks.create_task": ("tasks", "run.gather(…)"),
    "asyncio.tasks.ensure_future": ("tasks", "run.gather(…)"),
    "asyncio.taskgroups.TaskGroup": ("tasks", "run.gather(…)"),
    "asyncio.tasks.wait_for": ("tasks", "timeout= of the tool"),
}
_CHANGING: Final = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
     "update"}
)  # fmt: skip


def read_agent(agent: AnyAgent) -> list[Spot]:
    """Returns the problems in an agent's code, and in the functions of its module that it calls."""
    found: list[Spot] = []
    for source in sources(agent.fn):
        reader = _Reader(source)
        reader.visit(source.tree)
        found += reader.spots
    return sorted(set(found), key=lambda spot: (spot.file, spot.line))


def place_of_step(agent: AnyAgent, name: str, *, last: bool = False) -> tuple[str, int] | None:
    """Returns where an agent calls a tool, or asks a question with this prefix: the first place, or the last."""
    found: list[tuple[str, int]] = []
    for source in sources(agent.fn):
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            first = node.args[0]
            called: Any = source.resolve(_without_options(first))
            asked = node.func.attr == "ask" and _begins(first, name)
            if asked or (isinstance(called, Tool) and called.name == name):
                found.append((source.file, node.lineno + source.first - 1))
    return (found[-1] if last else found[0]) if found else None


def tools_named(agent: AnyAgent) -> set[str]:
    """Returns the tools that an agent's code names: one by one, in a toolset, or in a collection of the module."""
    found: set[str] = set()
    for source in sources(agent.fn):
        for node in ast.walk(source.tree):
            named: Any = source.resolve(node)
            held: Any = list(named.values()) if isinstance(named, dict) else named  # pyright: ignore
            several: Any = held if isinstance(held, Toolset | list | tuple | set) else (held,)  # pyright: ignore
            found.update(each.name for each in several if isinstance(each, Tool))
    return found


def _without_options(node: ast.expr) -> ast.expr:
    """Returns the tool in `tool.options(…)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "options":
        return node.func.value
    return node


def _begins(prompt: ast.expr, words: str) -> bool:
    """Returns whether a prompt's literal start matches."""
    if isinstance(prompt, ast.JoinedStr):
        return bool(prompt.values) and _begins(prompt.values[0], words)
    return isinstance(prompt, ast.Constant) and words.startswith(str(prompt.value))


class Source:
    """A function's source, its location, and its names."""

    def __init__(self, fn: FunctionType, tree: ast.AST, file: str, first: int, lines: list[str]) -> None:
        self.fn = fn
        self.tree = tree
        self.file = file
        self.first = first
        self.lines = lines
        self.names: dict[str, Any] = {**vars(builtins), **fn.__globals__, **inspect.getclosurevars(fn).nonlocals}

    def spot(self, kind: SpotKind, node: ast.AST, what: str, instead: str, *, loops: bool = False) -> Spot:
        line = int(getattr(node, "lineno", 1)) + self.first - 1
        return Spot(kind, self.file, line, what, instead, loops)

    def is_excused(self, line: int) -> bool:
        at = line - self.first
        return 0 <= at < len(self.lines) and self.lines[at].rstrip().endswith("# killick: ok")

    def resolve(self, node: ast.AST) -> Any:
        """Resolves a dotted name within the module."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return getattr(owner, node.attr, None) if owner is not None else None
        return None

    @property
    def run(self) -> str:
        """Returns the name of the function's run parameter."""
        return next(iter(inspect.signature(self.fn).parameters), "run")


def _source(fn: Callable[..., Any]) -> Source | None:
    fn = inspect.unwrap(fn)
    if not isinstance(fn, FunctionType):
        return None
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    return Source(fn, tree, fn.__code__.co_filename, first, lines)


def sources(fn: Callable[..., Any]) -> Iterator[Source]:
    """Yields a function and the functions of its file that it calls, except tools, agents and model functions."""
    seen: set[Any] = set()
    left: list[tuple[Callable[..., Any], int]] = [(fn, 0)]
    while left:
        each, depth = left.pop()
        source = _source(each) if each not in seen and depth <= DEPTH_MAX else None
        seen.add(each)
        if source is None:
            continue
        yield source
        for node in ast.walk(source.tree):
            called = source.resolve(node.func) if isinstance(node, ast.Call) else None
            if isinstance(called, FunctionType) and called.__code__.co_filename == source.file:
                left.append((called, depth + 1))


class _Reader(ast.NodeVisitor):
    """Analyses one function."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.spots: list[Spot] = []
        self._loops = 0
        self._locals = {
            node.id if isinstance(node, ast.Name) else node.arg
            for node in ast.walk(source.tree)
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        }
        self._steps = {
            argument.id
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if node.func.attr in ("model", "stream", "call")
            for argument in node.args[:1]
            if isinstance(argument, ast.Name)
        }

    def _say(self, kind: SpotKind, node: ast.AST, what: str, instead: str, *, loops: bool = False) -> None:
        spot = self.source.spot(kind, node, what, instead, loops=loops)
        if not self.source.is_excused(spot.line):
            self.spots.append(spot)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        declared = [
            self.source.resolve(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list
        ]
        is_step = node.name in self._steps or any(getattr(each, "__name__", "") == "tool" for each in declared)
        if not is_step or node.name == self.source.fn.__name__:
            self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        found = self.source.resolve(node.func)
        if found is not None and not isinstance(found, Tool | Agent):
            kind, instead = _known(found)
            if kind is not None and (kind != "tasks" or self._mentions_run(node)):
                self._say(kind, node, f"{ast.unparse(node.func)}()", instead)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            self._look_at_keeping(node.func.value, node)
        self.generic_visit(node)

    def _visit_assignment(self, node: ast.Assign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript):
                self._look_at_keeping(target.value, node)
        self.generic_visit(node)

    visit_Assign = visit_AugAssign = _visit_assignment  # noqa: N815

    def _look_at_keeping(self, owner: ast.expr, node: ast.AST) -> None:
        """Finds changes to module state."""
        if not isinstance(owner, ast.Name) or owner.id in self._locals:
            return
        if isinstance(self.source.names.get(owner.id), list | dict | set):
            instead = f"run.update(…): {owner.id} is lost with the process"
            self._say("keeps", node, f"the module's {owner.id}", instead)

    def visit_Global(self, node: ast.Global) -> None:
        names = ", ".join(node.names)
        self._say("keeps", node, f"global {names}", f"run.update(…): {names} is lost with the process")

    def _visit_loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        if not isinstance(node, ast.While):
            self._look_at_order(node.iter, node)
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    visit_For = visit_AsyncFor = visit_While = _visit_loop  # noqa: N815

    def _visit_comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp) -> None:
        for each in node.generators:
            self._look_at_order(each.iter, node)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = _visit_comprehension  # noqa: N815

    def _look_at_order(self, order: ast.expr, node: ast.AST) -> None:
        called = self.source.resolve(order.func) if isinstance(order, ast.Call) else None
        is_set = isinstance(order, ast.Set | ast.SetComp) or called in (set, frozenset)
        if is_set and self._mentions_run(node):
            text = ast.unparse(order)
            self._say(
                "differs", order, f"steps in the order of {text}", f"sorted({text}): a set has no order to rely on"
            )

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        caught: list[Any] = [] if node.type is None else [self.source.resolve(each) for each in _members(node.type)]
        raises = any(isinstance(each, ast.Raise) for each in ast.walk(node))
        if (node.type is None or BaseException in caught) and not raises:
            what = "except:" if node.type is None else f"except {ast.unparse(node.type)}:"
            self._say(
                "swallows", node, what, "except Exception: so that the run can be stopped", loops=bool(self._loops)
            )
        self.generic_visit(node)

    def _mentions_run(self, node: ast.AST) -> bool:
        return any(isinstance(each, ast.Name) and each.id == self.source.run for each in ast.walk(node))


def _members(caught: ast.expr) -> list[ast.expr]:
    return list(caught.elts) if isinstance(caught, ast.Tuple) else [caught]


def _known(found: Any) -> tuple[SpotKind | None, str]:
    """Returns whether agent code should not call this callable."""
    owner: Any = getattr(found, "__self__", None)
    module = str(getattr(found, "__module__", None) or getattr(owner.__class__, "__module__", ""))
    name = str(getattr(found, "__name__", ""))
    if isinstance(owner, type):
        module, name = owner.__module__, f"{owner.__qualname__}.{name}"
    elif owner is not None and not inspect.ismodule(owner):
        module = str(owner.__class__.__module__)
    for prefix, instead in _MODULES.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return ("differs", instead) if name != "Random" else (None, "")
    return _NAMED.get(f"{module}.{name}", (None, ""))
