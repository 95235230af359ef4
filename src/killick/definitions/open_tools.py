"""Tools that a framework or a server declares: any arguments by name, and a given JSON schema."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import Any

from killick.definitions.policy import names_of, policy_of
from killick.definitions.tools import TOOLS, AsyncTool, Shape, SyncTool, Tool, checked_tool


class OpenShape(Shape):
    """Accepts any arguments, by name. `schema` is the JSON schema of its parameters, if known."""

    def __init__(self, fn: Callable[..., Any], name: str, schema: Mapping[str, Any] | None) -> None:
        super().__init__(_nothing, name)
        self.is_async = inspect.iscoroutinefunction(fn)
        self.schema = None if schema is None else dict(schema)
        self._named(() if schema is None else tuple(schema.get("properties", ())))

    def _named(self, names: Sequence[str]) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        words = [name for name in names if name.isidentifier() and not keyword.iskeyword(name)]
        self.signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in words])
        self.hints = dict.fromkeys(names, Any)
        self.returns = Any

    def given(self, arguments: Mapping[str, Any]) -> Shape:
        """The shape of one call: its arguments are its parameters."""
        shape = copy(self)
        shape._named(tuple(dict.fromkeys((*self.hints, *arguments))))
        return shape

    def unknown_parameters(self, names: Collection[str]) -> list[str]:
        known = () if self.schema is None else self.schema.get("properties", ())
        takes_more = self.schema is None or bool(self.schema.get("additionalProperties", not known))
        return [] if takes_more else sorted(set(names) - set(known))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if args:
            raise TypeError(f"{self.name}: takes its arguments by name; write name=value")
        given = dict(kwargs)
        return given, given

    def restore(self, recorded: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
        return {**live, **recorded}

    def call(self, fn: Callable[..., Any], arguments: Mapping[str, Any], injected: Mapping[str, Any]) -> Any:
        return fn(**arguments, **injected)


def _nothing() -> None:
    """The function is supplied with each call."""


def open_tool(
    name: str,
    fn: Callable[..., Any] | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    doc: str = "",
    **options: Any,
) -> Tool[..., Any]:
    """Declares a tool that takes any arguments by name, for tools that are described by a JSON schema.

    name     the name of the tool
    fn       the function; a host may give another one with each call
    schema   the JSON schema of the parameters, as models see it
    doc      the description that models see; by default the function's docstring
    options  the options of `killick.tool`
    """
    function = fn or _nothing
    kind: Any = AsyncTool if inspect.iscoroutinefunction(function) else SyncTool
    shape = OpenShape(function, name, schema)
    for named in (*names_of(options.get("identity") or ()), *names_of(options.get("consumes", ()))):
        shape.hints.setdefault(named, Any)
    shape.doc = doc or inspect.getdoc(function) or ""
    declared: Tool[..., Any] = kind(function, name, policy_of(name, options), shape)
    checked_tool(declared)
    if not isinstance(getattr(TOOLS.get(name), "shape", None), Shape) or isinstance(TOOLS[name].shape, OpenShape):
        TOOLS[name] = declared  # a full declaration of that name takes precedence
    return declared
