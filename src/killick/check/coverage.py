"""Measures which tools and lines of an agent its rehearsals reach. Changes nothing that they do."""

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


class Coverage:
    """Records the lines that run while it measures."""

    def __init__(self, agent: AnyAgent) -> None:
        self._sources = list(sources(agent.fn))
        self._codes = {source.fn.__code__: source.file for source in self._sources}
        self._hits: set[Place] = set()
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

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._trace if frame.f_code in self._codes else None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._hits.add((self._codes[frame.f_code], frame.f_lineno))
        return self._trace

    def reached(self, called: Iterable[str], offered: Iterable[str]) -> Reached:
        """Returns the reached parts, given the tools that were called and those that models were offered."""
        tools = {tool.name for source in self._sources for tool in _tools(source)}.union(offered)
        found = Reached(tools=len(tools), tools_never=tuple(sorted(tools.difference(called))))
        if not self.measured:
            return found
        lines = sorted({each for source in self._sources for each in _lines(source)}, key=lambda each: each[1].start)
        never = [(file, each) for file, each in lines if not any((file, line) in self._hits for line in each)]
        return msgspec.structs.replace(
            found,
            lines=len(lines),
            lines_reached=len(lines) - len(never),
            lines_never=tuple(_ranges(never)),
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


def _header(node: ast.stmt, offset: int) -> range:
    """Returns the lines of a statement in its file, without those of the statements in it."""
    inner = [each.lineno for block in _blocks(node) for each in block]
    end = max(node.lineno + 1, min(inner)) if inner else (node.end_lineno or node.lineno) + 1
    return range(node.lineno + offset, end + offset)


def _lines(source: Source) -> Iterator[Lines]:
    """Returns the statements of a function that have code of their own."""
    coded = {line for _, _, line in source.fn.__code__.co_lines() if line is not None}
    function = next(node for node in ast.walk(source.tree) if isinstance(node, ast.stmt))
    for node in (each for block in _blocks(function) for each in block):
        lines = _header(node, source.first - 1)
        if not isinstance(node, ast.Try) and coded.intersection(lines):
            yield source.file, lines


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
