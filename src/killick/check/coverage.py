"""Measures which tools, lines and branches of an agent its rehearsals reach. Changes nothing that they do."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import msgspec

from killick.check.findings import Reached, relative
from killick.check.static_analysis import Source, sources
from killick.definitions.agents import AnyAgent
from killick.definitions.tools import Tool
from killick.llm.toolset import Toolset

Place = tuple[str, int]
Lines = tuple[str, range]

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Branch(msgspec.Struct, frozen=True):
    """One way out of a statement that decides."""

    file: str
    line: int
    way: str
    """What the statement would have to do: be true, be false, run, match or catch."""
    into: range
    """The lines of the statement that follows."""
    after: range = range(0)
    """The lines that have to run directly before it; any if empty."""

    def __str__(self) -> str:
        return f"{relative(self.file)}:{self.line} {self.way}"


class Coverage:
    """Records the lines that run while it measures."""

    def __init__(self, agent: AnyAgent) -> None:
        self._sources = list(sources(agent.fn))
        self._codes = {source.fn.__code__: source.file for source in self._sources}
        self._hits: set[Place] = set()
        self._arcs: set[tuple[str, int, int]] = set()
        self._last: dict[FrameType, int] = {}
        self.measured = False

    @contextmanager
    def measure(self) -> Generator[None]:
        """Records the agent's lines. Does nothing where another tracer is active."""
        if sys.gettrace() is not None:
            yield
            return
        self.measured = True
        sys.settrace(self._enter)
        threading.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._last.clear()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._trace if frame.f_code in self._codes else None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            file, line = self._codes[frame.f_code], frame.f_lineno
            self._hits.add((file, line))
            self._arcs.add((file, self._last.get(frame, 0), line))
            self._last[frame] = line
        return self._trace

    def reached(self, called: Iterable[str], offered: Iterable[str]) -> Reached:
        """Returns the reached parts, given the tools that were called and those that models were offered."""
        tools = {tool.name for source in self._sources for tool in _tools(source)}.union(offered)
        found = Reached(tools=len(tools), tools_never=tuple(sorted(tools.difference(called))))
        if not self.measured:
            return found
        lines = sorted({each for source in self._sources for each in _lines(source)}, key=lambda each: each[1].start)
        branches = [branch for source in self._sources for branch in _branches(source)]
        never = [each for each in lines if not self._has_run(*each)]
        return msgspec.structs.replace(
            found,
            lines=len(lines),
            lines_reached=len(lines) - len(never),
            lines_never=tuple(_ranges(never)),
            branches=len(branches),
            branches_never=tuple(str(each) for each in branches if not self._took(each)),
        )

    def _has_run(self, file: str, lines: range) -> bool:
        return any((file, line) in self._hits for line in lines)

    def _took(self, branch: Branch) -> bool:
        if not branch.after:
            return self._has_run(branch.file, branch.into)
        return any(
            file == branch.file and last in branch.after and line in branch.into for file, last, line in self._arcs
        )


def _tools(source: Source) -> Iterator[Tool[..., Any]]:
    """Returns the tools that a function names: one by one, in a toolset, or in a collection of the module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name | ast.Attribute):
            named: Any = source.resolve(node)
            found: Any = list(named.values()) if isinstance(named, dict) else named  # pyright: ignore
            each: Any
            for each in found if isinstance(found, Toolset | list | tuple | set) else (found,):  # pyright: ignore
                if isinstance(each, Tool):
                    yield each


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    """Returns the lists of statements below a node, without those of functions and classes in it."""
    for value in vars(node).values():
        below: list[Any] = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
        if below and isinstance(below[0], ast.stmt):
            yield below
        for each in below:
            if isinstance(each, ast.AST) and not isinstance(each, _FUNCTIONS):
                yield from _blocks(each)


def _header(node: ast.AST) -> range:
    """Returns the lines of a statement without those of the statements in it."""
    first, last = int(getattr(node, "lineno", 1)), int(getattr(node, "end_lineno", 1))
    inner = [each.lineno for block in _blocks(node) for each in block]
    return range(first, max(first + 1, min(inner)) if inner else last + 1)


def _function(source: Source) -> ast.stmt:
    return next(node for node in ast.walk(source.tree) if isinstance(node, ast.stmt))


def _placed(source: Source, lines: range) -> range:
    return range(lines.start + source.first - 1, lines.stop + source.first - 1)


def _lines(source: Source) -> Iterator[Lines]:
    """Returns the statements of a function that have code of their own."""
    coded = {line for _, _, line in source.fn.__code__.co_lines() if line is not None}
    for node in (each for block in _blocks(_function(source)) for each in block):
        lines = _placed(source, _header(node))
        if not isinstance(node, ast.Try) and coded.intersection(lines):
            yield source.file, lines


def _branches(source: Source) -> Iterator[Branch]:
    for block in _blocks(_function(source)):
        for node, following in zip(block, [*block[1:], None], strict=True):
            for way, into, after in _ways(node, following):
                if into.start > node.lineno:
                    yield Branch(
                        source.file, node.lineno + source.first - 1, way, _placed(source, into), _placed(source, after)
                    )


def _ways(node: ast.stmt, following: ast.stmt | None) -> Iterator[tuple[str, range, range]]:
    """Returns the ways out of a statement: what it does, the lines that follow, and those that have to precede them."""
    match node:
        case ast.If():
            yield "is never true", _header(node.body[0]), range(0)
            if node.orelse:
                yield "is never false", _header(node.orelse[0]), range(0)
            elif following is not None:
                yield "is never false", _header(following), _header(node)
        case ast.For() | ast.AsyncFor() | ast.While():
            yield "never loops", _header(node.body[0]), range(0)
        case ast.Match():
            yield from (
                (f"never matches {ast.unparse(case.pattern)}", _header(case.body[0]), range(0)) for case in node.cases
            )
        case ast.Try():
            for handler in node.handlers:
                kind = ast.unparse(handler.type) if handler.type is not None else "anything"
                yield f"never catches {kind}", _header(handler.body[0]), range(0)
        case _:
            pass


def _ranges(never: Sequence[Lines]) -> Iterator[str]:
    """Joins neighbouring statements of a file."""
    joined: list[tuple[str, int, int]] = []
    for file, lines in sorted(never, key=lambda each: (each[0], each[1].start)):
        if joined and joined[-1][0] == file and lines.start <= joined[-1][2] + 1:
            joined[-1] = (file, joined[-1][1], max(lines[-1], joined[-1][2]))
        else:
            joined.append((file, lines[0], lines[-1]))
    for file, first, last in joined:
        yield f"{relative(file)}:{first}" if first == last else f"{relative(file)}:{first}-{last}"
